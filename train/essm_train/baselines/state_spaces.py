# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""S4 (Gu, Goel and Re 2022) and S4D (Gu, Gupta, Goel and Re 2022): a state space per channel as one long convolution.

    x'(t) = A x(t) + B u(t),  y(t) = C x(t) + D u(t)

S4D: A = diag(A_1, .., A_{N/2}) and B = 1, one of each conjugate pair. Zero-order hold over a step dt makes of it
x_l = exp(dt A) x_{l-1} + B_bar u_l with B_bar = (exp(dt A) - 1) / A, and K_l = 2 Re sum_n C_n B_bar_n exp(l dt A_n).

S4: A = diag(Lambda) - P P*, the form of HiPPO-LegS (Theorem 1) in the eigenbasis of its normal part, discretised by the
bilinear rule. The kernel K_l = C A_bar^l B_bar of L steps is the inverse discrete Fourier transform of its generating
function at the L roots of unity z, where Woodbury's identity leaves four sums over n (Algorithm 1):

    K^(z) = C~ (I - z A_bar)^-1 B_bar,  C~ = C (I - A_bar^L);   S_ab = sum_n a_n b_n / (g - Lambda_n)
          = 2 / (1 + z) (S_CB - S_CP S_PB / (1 + S_PP)),        g = 2 / dt (1 - z) / (1 + z)

C~ is what is trained, as in the paper, so L is a constant of the model.
Letters: B batch, L sequence, H width, N state, F frequencies.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from essm_train.baselines.config import BaselineConfig
from modeling_essm.companions.models.mixer_diagonal import as_complex

DT_RANGE = (1e-3, 1e-1)  # of the initial dt, log-uniform
_FREQUENCIES = 1024  # at a time: at H = 256 and N = 64 some 300 MB


def _undecayed(*shape: int) -> nn.Parameter:
    """A parameter that weight decay leaves alone, as published: it would move the poles."""
    parameter = nn.Parameter(torch.empty(*shape))
    parameter._no_weight_decay = True  # type: ignore[attr-defined]
    return parameter


class StateSpaceMixer(nn.Module):
    """(B, L, H) -> (B, L, H): a state space for every channel, GELU, then a gated linear unit that mixes channels."""

    def __init__(self, hidden_size: int, state_size: int):
        super().__init__()
        H, pairs = hidden_size, state_size // 2
        self.log_dt = nn.Parameter(torch.empty(H))
        self.log_A_real = _undecayed(H, pairs)  # Re A = -exp(.) < 0: always stable
        self.A_imag = _undecayed(H, pairs)
        self.C = nn.Parameter(torch.empty(H, pairs, 2))  # real and imaginary part
        self.D = nn.Parameter(torch.empty(H))
        self.mix = nn.Linear(H, 2 * H)

    @torch.no_grad()
    def reset_state_space(self) -> None:
        """dt log-uniform, C and D standard normal; a subclass sets A."""
        init.uniform_(self.log_dt, *map(math.log, DT_RANGE))
        init.normal_(self.C, std=0.5**0.5)
        init.normal_(self.D)

    def kernel(self, length: int, dtype: torch.dtype) -> Tensor:
        """(H, length) K of `dtype`."""
        raise NotImplementedError

    def convolve(self, u: Tensor) -> Tensor:
        """K * u + D u: (B, L, H) -> (B, L, H) in u's dtype, computed in fp32 or better."""
        L, dtype = u.shape[1], torch.promote_types(u.dtype, torch.float32)
        x = u.to(dtype).mT  # (B, H, L)
        spectrum = torch.fft.rfft(x, 2 * L) * torch.fft.rfft(self.kernel(L, dtype), 2 * L)
        y = torch.fft.irfft(spectrum, 2 * L)[..., :L] + self.D.to(dtype)[:, None] * x
        return y.mT.to(u.dtype)

    def forward(self, u: Tensor) -> Tensor:
        return F.glu(self.mix(F.gelu(self.convolve(u))), dim=-1)


class S4DMixer(StateSpaceMixer):
    """S4D, initialised as S4D-Lin: A_n = -1/2 + i pi n."""

    @torch.no_grad()
    def reset_state_space(self) -> None:
        super().reset_state_space()
        init.constant_(self.log_A_real, math.log(0.5))
        n = torch.arange(self.A_imag.shape[1], dtype=self.A_imag.dtype, device=self.A_imag.device)
        init.copy_(self.A_imag, (math.pi * n).expand_as(self.A_imag))

    def kernel(self, length: int, dtype: torch.dtype) -> Tensor:
        """(H, length) K of `dtype`, without the H x N x length powers: exp(l dt A) = exp(i m dt A) exp(j dt A)."""
        A = torch.complex(-self.log_A_real.to(dtype).exp(), self.A_imag.to(dtype))
        dtA = A * self.log_dt.to(dtype).exp()[:, None]
        CB = as_complex(self.C, dtype) * (dtA.exp() - 1.0) / A
        m = math.isqrt(length - 1) + 1  # l = i m + j with i, j < m
        j = torch.arange(m, device=dtA.device, dtype=dtype)
        rows = CB[..., None] * (dtA[..., None] * (m * j)).exp()  # (H, N/2, m)
        columns = (dtA[..., None] * j).exp()
        return 2.0 * (rows.mT @ columns).real.flatten(1)[:, :length]


def hippo_legs(state_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lambda, P and B of HiPPO-LegS, (N/2,) complex128, one of each conjugate pair.

    A = V (diag(Lambda) - P P*) V* and V B are those in the basis of polynomials; N is even.
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
    """S4, initialised as HiPPO-LegS in every channel; C is C~. More than max_length positions raise ValueError."""

    def __init__(self, hidden_size: int, state_size: int, max_length: int):
        super().__init__(hidden_size, state_size)
        self.max_length = max_length
        self.P = _undecayed(hidden_size, state_size // 2, 2)
        self.B = _undecayed(hidden_size, state_size // 2, 2)

    @torch.no_grad()
    def reset_state_space(self) -> None:
        super().reset_state_space()
        Lambda, P, B = hippo_legs(2 * self.A_imag.shape[1])
        init.copy_(self.log_A_real, (-Lambda.real).log().expand_as(self.log_A_real))
        init.copy_(self.A_imag, Lambda.imag.expand_as(self.A_imag))
        init.copy_(self.P, torch.view_as_real(P).expand_as(self.P))
        init.copy_(self.B, torch.view_as_real(B).expand_as(self.B))
        if self.C.device.type != "meta":  # C~ of that C
            A_bar, _, C = self.discretise()
            rest = (C[:, None] @ torch.linalg.matrix_power(A_bar, self.max_length)).squeeze(1)
            init.copy_(self.C, torch.view_as_real((C - rest)[:, : self.C.shape[1]]))

    def discretise(self) -> tuple[Tensor, Tensor, Tensor]:
        """A_bar (H, N, N), B_bar and C (H, N), complex128, with both of each conjugate pair."""
        P, B, C = (as_complex(x, torch.float64) for x in (self.P, self.B, self.C))
        P, B, C = (torch.cat([x, x.conj()], 1) for x in (P, B, C))
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
        P, B, C = (as_complex(x, dtype) for x in (self.P, self.B, self.C))
        s, c = (theta / 2).sin().to(dtype), (theta / 2).cos().to(dtype)
        frequency = (2 / self.log_dt.to(dtype).exp())[:, None] * s  # (H, F): g = i frequency / c
        squares = (Lambda.abs() ** 2)[..., None] * c**2 - frequency[:, None] ** 2  # (H, N/2, F)
        denominator = torch.complex(squares, -2 * Lambda.real[..., None] * (frequency * c)[:, None])
        pairs = torch.stack([C * B, C * P, P.conj() * B, P.conj() * P], 1)  # (H, 4, N/2)
        numerators = torch.cat([2 * pairs.real, -2 * (pairs * Lambda.conj()[:, None]).real], 1)  # of g and of 1
        sums = numerators.to(denominator.dtype) @ denominator.reciprocal()  # (H, 8, F)
        CB, CP, PB, PP = (1j * frequency[:, None] * sums[:, :4] + c * sums[:, 4:]).unbind(1)
        return torch.polar(torch.ones_like(c), (theta / 2).to(dtype)) * (CB - c * CP * PB / (1 + c * PP))


class StateSpaceLayer(GradientCheckpointingLayer):
    """The paper's block of ES-SSM with its mixer exchanged: LayerNorm -> mixer -> +, LayerNorm -> feed-forward -> +."""

    def __init__(self, config: BaselineConfig):
        super().__init__()
        D, N, inner = config.hidden_size, config.state_size, config.intermediate_size
        self.input_norm = nn.LayerNorm(D, eps=config.norm_eps)
        self.mixer = S4Mixer(D, N, config.max_position_embeddings) if config.architecture == "s4" else S4DMixer(D, N)
        self.ffn_norm = nn.LayerNorm(D, eps=config.norm_eps)
        self.ffn = nn.Sequential(nn.Linear(D, inner), nn.GELU(), nn.Linear(inner, D))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden_states: Tensor, padding: Tensor | None = None) -> Tensor:
        """(B, L, H) -> (B, L, H); `padding` (B, L, 1), True where there is nothing, is silence to the state space."""
        u = self.input_norm(hidden_states)
        if padding is not None:
            u = u.masked_fill(padding, 0.0)
        hidden_states = hidden_states + self.dropout(self.mixer(u))
        return hidden_states + self.dropout(self.ffn(self.ffn_norm(hidden_states)))
