# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Random diagonal recurrences, what they do to inputs, and a tiny model whose layers are such recurrences."""

import math

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from modeling_essm.companions.systems import DiagonalSystem
from modeling_essm.companions.truncation.training import InTrainingTruncation


def random_system(n=5, p=3, q=2, output="complex", r_min=0.4, r_max=0.95, seed=0, channels=None, directions=1):
    """Modes with moduli in [r_min, r_max] and any phase; with `channels` one recurrence of n modes for each."""
    g = torch.Generator().manual_seed(seed)
    C = (channels, n) if channels else (q, n)
    shapes = {"lam": C if channels else (n,), "B": C if channels else (n, p), "C": C if directions == 1 else (2, *C)}
    uniform = torch.rand(shapes["lam"], generator=g, dtype=torch.float64)
    phase = 2 * math.pi * torch.rand(shapes["lam"], generator=g, dtype=torch.float64)
    B, C = (torch.randn(*shapes[name], generator=g, dtype=torch.complex128) for name in ("B", "C"))
    return DiagonalSystem(torch.polar(r_min + (r_max - r_min) * uniform, phase), B, C, output)


def impulse_response(lam, B, C, lags):
    """C A^k B, k = 0..lags-1: (lags, q, p), of lam (n,) or a dense A (n, n)."""
    A = torch.diag(lam) if lam.ndim == 1 else lam
    terms = [B]
    for _ in range(lags - 1):
        terms.append(A @ terms[-1])
    return torch.stack([C @ term for term in terms])


def frequency_response(system, points=2000):
    """The map from real inputs to outputs at e^{jw}, (points, q, p); of two directions, which a (2, q, n) C has, the
    sum of the one forward in time and the one backward. For a system of lam (n,)."""
    w = torch.cat([torch.linspace(0, 2 * math.pi, points, dtype=torch.float64), system.lam.angle()])

    def transfer(C, w):
        shift = torch.polar(torch.ones_like(w), -w)  # z^-1
        G = torch.einsum("qn,wn,np->wqp", C, 1 / (1 - shift[:, None] * system.lam), system.B)
        mirrored = torch.einsum("qn,wn,np->wqp", C, 1 / (1 - shift.conj()[:, None] * system.lam), system.B).conj()
        return {"complex": G, "real": (G + mirrored) / 2, "twice_real": G + mirrored}[system.output]

    return transfer(system.C, w) if system.C.ndim == 2 else transfer(system.C[0], w) + transfer(system.C[1], -w)


def error_norm(system, other, points=2000):
    """The largest singular value, on a grid, of the difference of two frequency responses."""
    whole = DiagonalSystem(
        torch.cat([system.lam, other.lam]), torch.cat([system.B, other.B]), torch.cat([system.C, -other.C], -1),
        system.output,
    )  # fmt: skip
    return float(torch.linalg.matrix_norm(frequency_response(whole, points), ord=2).max())


class LRU(nn.Module):
    """Re(C x_t) + D u_t with x_t = lam x_{t-1} + gamma B u_t, one step after another; companions.md, B.1."""

    def __init__(self, width, n, seed=0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)

        def weight(*shape, std=1.0):
            return nn.Parameter(std * torch.randn(*shape, generator=g))

        modulus = (0.8 + 0.19 * torch.rand(n, generator=g)).sqrt()
        self.nu = nn.Parameter((-modulus.log()).log())
        self.theta = nn.Parameter((6.28 * torch.rand(n, generator=g)).log())
        self.gamma = nn.Parameter((1 - modulus**2).log() / 2)
        self.B, self.C = weight(n, width, 2, std=(2 * width) ** -0.5), weight(width, n, 2, std=n**-0.5)
        self.D = weight(width)
        self.nu._no_weight_decay = True

    def lti(self):
        lam = torch.polar((-self.nu.double().exp()).exp(), self.theta.double().exp())
        B, C = (torch.view_as_complex(weight.double()) for weight in (self.B, self.C))
        return lam, self.gamma.double().exp()[:, None] * B, C, "real"

    def set_lti(self, lam, B, C, present=None):
        modulus, phase = lam.abs().clamp(1e-8, 1 - 1e-7), lam.angle().remainder(2 * math.pi).clamp(min=1e-8)
        gamma = (1 - modulus**2).log() / 2
        new = {"nu": (-modulus.log()).log(), "theta": phase.log(), "gamma": gamma}
        new |= {"B": torch.view_as_real(B / gamma.exp()[:, None]), "C": torch.view_as_real(C.resolve_conj())}
        for name, value in new.items():
            setattr(self, name, nn.Parameter(value.to(self.D.dtype).contiguous()))

    def forward(self, u):
        lam = torch.polar((-self.nu.exp()).exp(), self.theta.exp())
        B, C = self.gamma.exp()[:, None] * torch.view_as_complex(self.B), torch.view_as_complex(self.C)
        x, ys = torch.zeros(len(u), len(lam), dtype=lam.dtype), []
        for t in range(u.shape[1]):
            x = lam * x + u[:, t].to(lam.dtype) @ B.T
            ys.append((x @ C.T).real)
        return torch.stack(ys, 1) + self.D * u


class RecurrentConfig(PreTrainedConfig):
    model_type = "tiny_recurrent"

    def __init__(self, hidden_size=4, state_sizes=(8, 8), seed=0, **kwargs):
        super().__init__(**kwargs)
        self.hidden_size, self.state_sizes, self.seed = hidden_size, list(state_sizes), seed


class RecurrentModel(PreTrainedModel):
    """(B, L, H) inputs to one number a sequence: residual LRU layers and a mean over time."""

    config_class = RecurrentConfig

    def __init__(self, config):
        super().__init__(config)
        layers = (LRU(config.hidden_size, n, config.seed + i) for i, n in enumerate(config.state_sizes))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(config.hidden_size, 1)
        with torch.no_grad():
            self.head.weight.copy_(torch.linspace(-1, 1, config.hidden_size)[None])
            self.head.bias.zero_()
        self.post_init()

    def _init_weights(self, module):
        """As made."""

    def forward(self, u, labels=None, use_cache=False, **kwargs):
        for layer in self.layers:
            u = u + torch.nn.functional.gelu(layer(u))
        y = self.head(u.mean(1))[:, 0]
        return SequenceClassifierOutput(None if labels is None else (y - labels).square().mean(), y)


def training_data(rows=32, length=6, width=4, seed=5):
    g = torch.Generator().manual_seed(seed)
    u = torch.randn(rows, length, width, generator=g)
    return [{"u": row, "labels": row[0, 0] * row[1, 1]} for row in u]


def on_two_ranks(group, steps=4):
    """Training in DistributedDataParallel with other data on each rank and truncations after steps 2 and 3, of which
    only the first rank may compute anything: sizes, weights, and how often the wrapper was exchanged gradients."""
    model = RecurrentModel(RecurrentConfig(state_sizes=[8, 6]))
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    truncation = InTrainingTruncation((2, 3), tau=0.1)
    if group.rank() == 1:
        truncation.tau = 0.9  # would choose other sizes
    rows = training_data(8)[group.rank() :: 2]
    batch = {name: torch.stack([row[name] for row in rows]) for name in ("u", "labels")}
    for step in range(1, steps + 1):
        wrapped(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        truncation.after_step(model, optimizer, step)  # as in Trainer, which does not show its wrapper to callbacks
    settings = (wrapped.find_unused_parameters, wrapped.training, wrapped.module is model)
    return model.config.state_sizes, truncation.history, dict(model.state_dict()), settings


def error_on_two_ranks(group):
    """What every rank says if the first cannot compute a truncation."""
    model = RecurrentModel(RecurrentConfig())
    truncation = InTrainingTruncation((1,), tau=0.1)
    if group.rank() == 0:
        truncation.tau = 2.0
    try:
        truncation.after_step(model, torch.optim.AdamW(model.parameters()), 1)
    except ValueError as error:
        return str(error)
