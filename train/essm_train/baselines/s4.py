# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""S4 (Gu, Goel and Re 2022): a state space per channel whose matrix is diagonal plus low rank, as one convolution.

    x'(t) = A x(t) + B u(t),  y(t) = C x(t) + D u(t),   A = diag(Lambda) - P P*

HiPPO-LegS has this form (Theorem 1) in the eigenbasis of its normal part. The bilinear rule over a step dt makes of it
x_l = A_bar x_{l-1} + B_bar u_l. The kernel K_l = C A_bar^l B_bar of L steps is the inverse discrete Fourier transform
of its generating function at the L roots of unity z, where Woodbury's identity leaves four sums over n (Algorithm 1):

    K^(z) = C~ (I - z A_bar)^-1 B_bar,  C~ = C (I - A_bar^L);   S_ab = sum_n a_n b_n / (g - Lambda_n)
          = 2 / (1 + z) (S_CB - S_CP S_PB / (1 + S_PP)),        g = 2 / dt (1 - z) / (1 + z)

C~ is what is trained, as in the paper, so L is a constant of the model. A* = A^- in conjugate pairs; one of each pair
is kept. Letters: H width, N state, L longest sequence, F frequencies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init

from essm_train.baselines.s4d import StateSpaceMixer

_FREQUENCIES = 1024  # at a time: at H = 256 and N = 64 some 300 MB


def hippo_legs(state_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """HiPPO-LegS, diagonal plus low rank, one of each conjugate pair.

    Args:
        state_size: N, even.
    Returns:
        Lambda, P and B, (N/2,) complex128, of A = V (diag(Lambda) - P P*) V* and V B in the basis of polynomials.
    """
    n = torch.arange(state_size, dtype=torch.float64)
    B = (2 * n + 1).sqrt()
    P = (n + 0.5).sqrt()
    lower = torch.outer(B, B).tril(-1)  # A = -lower - diag(n + 1)
    skew = P[:, None] * P - lower - torch.diag(n + 0.5)  # A + P P^T + 1/2
    frequencies, V = torch.linalg.eigh(-1j * skew)  # ascending, and symmetric about 0
    V = V[:, state_size // 2 :]
    Lambda = torch.complex(torch.full_like(n[: state_size // 2], -0.5), frequencies[state_size // 2 :])
    return Lambda, V.mH @ P.to(V.dtype), V.mH @ B.to(V.dtype)


class S4Mixer(StateSpaceMixer):
    """The state space of the module's docstring; C is C~.

    Raises:
        ValueError: in `kernel` and so in `forward`, a sequence of more than max_length steps.
    """

    def __init__(self, hidden_size: int, state_size: int, max_length: int):
        super().__init__(hidden_size, state_size)
        self.max_length = max_length
        self.P = nn.Parameter(torch.empty(hidden_size, state_size // 2, 2))
        self.B = nn.Parameter(torch.empty(hidden_size, state_size // 2, 2))
        self._keep_from_decay(self.P, self.B)

    @torch.no_grad()
    def reset_state_space(self) -> None:
        """HiPPO-LegS in every channel; C~ of a standard normal C."""
        super().reset_state_space()
        Lambda, P, B = hippo_legs(2 * self.A_imag.shape[1])
        init.copy_(self.log_A_real, (-Lambda.real).log().expand_as(self.log_A_real))
        init.copy_(self.A_imag, Lambda.imag.expand_as(self.A_imag))
        init.copy_(self.P, torch.view_as_real(P).expand_as(self.P))
        init.copy_(self.B, torch.view_as_real(B).expand_as(self.B))
        if self.C.device.type != "meta":
            init.copy_(self.C, torch.view_as_real(self._truncating(self.C.double())))

    def _truncating(self, C: Tensor) -> Tensor:
        """C~ = C (I - A_bar^L) of (H, N/2, 2) fp64: (H, N/2) complex128."""
        A_bar, _, C_both = self.discretise(C)
        rest = (C_both[:, None] @ torch.linalg.matrix_power(A_bar, self.max_length)).squeeze(1)
        return (C_both - rest)[:, : C.shape[1]]

    def discretise(self, C: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """A_bar (H, N, N), B_bar and C (H, N), complex128, with both of each conjugate pair; C is C~ unless given."""
        both = [torch.view_as_complex(x.double()) for x in (self.P, self.B, self.C if C is None else C)]
        P, B, C = (torch.cat([x, x.conj()], 1) for x in both)
        Lambda = torch.complex(-self.log_A_real.double().exp(), self.A_imag.double())
        A = torch.diag_embed(torch.cat([Lambda, Lambda.conj()], 1)) - P[..., None] * P.conj()[:, None]
        half = self.log_dt.double().exp()[:, None, None] / 2
        identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        A_bar = torch.linalg.solve(identity - half * A, identity + half * A)
        B_bar = torch.linalg.solve(identity - half * A, 2 * half * B[..., None]).squeeze(-1)
        return A_bar, B_bar, C

    def kernel(self, length: int, dtype: torch.dtype) -> Tensor:
        """(H, length) K of `dtype`; what it takes of each frequency is computed again for the gradient, not kept."""
        L = self.max_length
        if length > L:
            raise ValueError(f"this S4 model reads at most {L} positions (max_position_embeddings), got {length}")
        theta = 2 * math.pi / L * torch.arange(L // 2 + 1, device=self.P.device, dtype=torch.float64)
        parts = [checkpoint(self.spectrum, part, dtype, use_reentrant=False) for part in theta.split(_FREQUENCIES)]
        return torch.fft.irfft(torch.cat(parts, 1), L)[:, :length]

    def spectrum(self, theta: Tensor, dtype: torch.dtype) -> Tensor:
        """The transform of K at frequencies theta (F,) fp64: (H, F), complex, each part of `dtype`.

        With z = exp(-i theta), g = i (2 / dt) s / c for s, c = sin, cos of theta / 2. A pair's two terms of a sum have
        one denominator, and so that c = 0 is no exception, all is multiplied by c: S_ab = c q_ab.
        """
        Lambda = torch.complex(-self.log_A_real.to(dtype).exp(), self.A_imag.to(dtype))
        P, B, C = (torch.view_as_complex(x.to(dtype)) for x in (self.P, self.B, self.C))
        s, c = (theta / 2).sin().to(dtype), (theta / 2).cos().to(dtype)
        frequency = (2 / self.log_dt.to(dtype).exp())[:, None] * s  # (H, F): g = i frequency / c
        squares = (Lambda.abs() ** 2)[..., None] * c**2 - frequency[:, None] ** 2  # (H, N/2, F)
        denominator = torch.complex(squares, -2 * Lambda.real[..., None] * (frequency * c)[:, None])
        pairs = torch.stack([C * B, C * P, P.conj() * B, P.conj() * P], 1)  # (H, 4, N/2)
        numerators = torch.cat([2 * pairs.real, -2 * (pairs * Lambda.conj()[:, None]).real], 1)  # of g and of 1
        sums = numerators.to(denominator.dtype) @ denominator.reciprocal()  # (H, 8, F)
        CB, CP, PB, PP = (1j * frequency[:, None] * sums[:, :4] + c * sums[:, 4:]).unbind(1)
        return torch.polar(torch.ones_like(c), (theta / 2).to(dtype)) * (CB - c * CP * PB / (1 + c * PP))
