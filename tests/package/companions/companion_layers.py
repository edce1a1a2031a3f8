# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Layers and systems for the tests of the pruning tools: the recurrence as it is written, and nothing else."""

from types import SimpleNamespace

import torch
from torch import nn

from modeling_essm.companions import Adapter, DiagonalSystem, register

LAGS = 400  # 0.9^800 = 2e-37: what lies behind is below rounding


def impulse_responses(system, lags=LAGS):
    """What each mode adds to the output, summed over its conjugate: (modes.., q, p) for lags -(lags-1) .. lags-1."""
    powers = system.lam[..., None].expand(*system.lam.shape, lags).clone()
    powers[..., 0] = 1
    powers = powers.cumprod(-1)
    Cs = list(system.C) if system.bidirectional else [system.C]
    total = torch.zeros(*system.lam.shape, *(() if system.siso else (Cs[0].shape[0], system.B.shape[1])), 2 * lags - 1)
    total = total.to(torch.complex128)
    for i, C in enumerate(Cs):
        if system.siso:
            one = (C * system.B)[..., None] * powers
        else:
            one = torch.einsum("qn,np,nk->nqpk", C, system.B, powers)
        if i == 0:
            total[..., lags - 1 :] += one
        else:
            total[..., :lags] += one.flip(-1)
    if system.output == "complex":
        return total
    return total.real * (2.0 if system.output == "twice_real" else 1.0)


class Recurrence(nn.Module):
    """y = out(C x) + D u, x_t = lam x_{t-1} + B u_t, of a `DiagonalSystem`; weights are shaped as there."""

    def __init__(self, system, dtype=torch.float64):
        super().__init__()
        self.output, self.siso = system.output, system.siso
        for name in ("lam", "B", "C"):
            value = torch.view_as_real(getattr(system, name)).to(dtype)
            self.register_parameter(name, nn.Parameter(value.clone()))
        width = len(system.lam) if system.siso else system.B.shape[1]
        self.D = nn.Parameter(torch.linspace(0.5, 1.5, width, dtype=dtype))
        self.register_buffer("present", system.present)

    @property
    def mode_dims(self):
        dims = {"lam": -2, "B": -2 if self.siso else -3, "C": -2}
        return dims if self.present is None else {**dims, "present": -1}

    output_names = ("C",)

    def complex(self):
        return (torch.view_as_complex(getattr(self, name).contiguous()) for name in ("lam", "B", "C"))

    def forward(self, u):
        lam, B, C = self.complex()
        Cs = list(C) if C.ndim == 3 else [C]
        y = self.D * u
        for C, v in zip(Cs, (u, u.flip(1))):
            x, outputs = torch.zeros(len(u), *lam.shape, dtype=lam.dtype), []
            for t in range(u.shape[1]):
                x = lam * x + (v[:, t, :, None] * B if self.siso else v[:, t].to(B.dtype) @ B.mT)
                outputs.append((C * x).sum(-1) if self.siso else x @ C.mT)
            out = torch.stack(outputs, 1).real * (2.0 if self.output == "twice_real" else 1.0)
            y = y + (out if v is u else out.flip(1))
        return y


class RecurrenceAdapter(Adapter):
    def read(self, layer):
        lam, B, C = (value.detach().to(torch.complex128) for value in layer.complex())
        return DiagonalSystem(lam, B, C, layer.output, layer.present)


register(Recurrence, RecurrenceAdapter())


class Stack(nn.Module):
    """x + tanh(layer(x)) of each system."""

    def __init__(self, *systems, dtype=torch.float64):
        super().__init__()
        self.layers = nn.ModuleList(Recurrence(system, dtype) for system in systems)
        self.config = SimpleNamespace(state_sizes=[system.lam.shape[-1] for system in systems])

    def forward(self, u):
        for layer in self.layers:
            u = u + torch.tanh(layer(u))
        return u


def with_energies(*energies):
    """A layer whose modes have these energies: lam = 0, b = 1, c = sqrt(E)."""
    c = torch.tensor([energies], dtype=torch.complex128).sqrt()
    n = len(energies)
    ones = torch.ones(n, 1, dtype=torch.complex128)
    return DiagonalSystem(torch.zeros(n, dtype=torch.complex128), ones, c, "complex")
