# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""S4D (Gu, Gupta, Goel and Re 2022): a diagonal state space per channel, trained as one long convolution.

    x'(t) = A x(t) + B u(t),  y(t) = 2 Re(C x(t)) + D u(t),   A = diag(A_1, .., A_{N/2}), B = 1

Only one of each conjugate pair is kept. Zero-order hold over a step dt makes of it x_l = exp(dt A) x_{l-1} + B_bar u_l
with B_bar = (exp(dt A) - 1) / A, so that y = K * u + D u with K_l = 2 Re sum_n C_n B_bar_n exp(l dt A_n).
Letters: B batch, L sequence, H width, N state.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

DT_RANGE = (1e-3, 1e-1)  # of the initial dt, log-uniform


class StateSpaceMixer(nn.Module):
    """(B, L, H) -> (B, L, H): a state space for every channel, GELU, then a gated linear unit that mixes channels."""

    def __init__(self, hidden_size: int, state_size: int):
        super().__init__()
        H, pairs = hidden_size, state_size // 2
        self.log_dt = nn.Parameter(torch.empty(H))
        self.log_A_real = nn.Parameter(torch.empty(H, pairs))  # Re A = -exp(.) < 0: always stable
        self.A_imag = nn.Parameter(torch.empty(H, pairs))
        self.C = nn.Parameter(torch.empty(H, pairs, 2))  # real and imaginary part
        self.D = nn.Parameter(torch.empty(H))
        self.mix = nn.Linear(H, 2 * H)
        self._keep_from_decay(self.log_A_real, self.A_imag)

    @staticmethod
    def _keep_from_decay(*parameters: nn.Parameter) -> None:
        """As published: weight decay would move the poles."""
        for parameter in parameters:
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    @torch.no_grad()
    def reset_state_space(self) -> None:
        """dt log-uniform, C and D standard normal; a subclass sets A."""
        low, high = (math.log(dt) for dt in DT_RANGE)
        init.uniform_(self.log_dt, low, high)
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
    """The state space of the module's docstring."""

    @torch.no_grad()
    def reset_state_space(self) -> None:
        """S4D-Lin: A_n = -1/2 + i pi n."""
        super().reset_state_space()
        init.constant_(self.log_A_real, math.log(0.5))
        n = torch.arange(self.A_imag.shape[1], dtype=self.A_imag.dtype, device=self.A_imag.device)
        init.copy_(self.A_imag, (math.pi * n).expand_as(self.A_imag))

    def discretise(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """dt A and C B_bar, both (H, N/2), complex with parts of `dtype`."""
        A = torch.complex(-self.log_A_real.to(dtype).exp(), self.A_imag.to(dtype))
        dtA = A * self.log_dt.to(dtype).exp()[:, None]
        C = torch.view_as_complex(self.C.to(dtype))
        return dtA, C * (dtA.exp() - 1.0) / A

    def kernel(self, length: int, dtype: torch.dtype) -> Tensor:
        """(H, length) K of `dtype`, without the H x N x length powers: exp(l dt A) = exp(i m dt A) exp(j dt A)."""
        dtA, CB = self.discretise(dtype)
        m = math.isqrt(length - 1) + 1  # l = i m + j with i, j < m
        j = torch.arange(m, device=dtA.device, dtype=dtype)
        rows = CB[..., None] * (dtA[..., None] * (m * j)).exp()  # (H, N/2, m)
        columns = (dtA[..., None] * j).exp()
        return 2.0 * (rows.mT @ columns).real.flatten(1)[:, :length]


class StateSpaceLayer(GradientCheckpointingLayer):
    """The paper's block of ES-SSM with its mixer exchanged: LayerNorm -> mixer -> +, LayerNorm -> feed-forward -> +."""

    def __init__(self, mixer: StateSpaceMixer, hidden_size: int, intermediate_size: int, dropout: float, eps: float):
        super().__init__()
        self.input_norm = nn.LayerNorm(hidden_size, eps=eps)
        self.mixer = mixer
        self.ffn_norm = nn.LayerNorm(hidden_size, eps=eps)
        self.ffn = nn.Sequential(
            nn.Linear(hidden_size, intermediate_size), nn.GELU(), nn.Linear(intermediate_size, hidden_size)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, padding: Tensor | None = None) -> Tensor:
        """(B, L, H) -> (B, L, H); `padding` (B, L, 1), True where there is nothing, is silence to the state space."""
        u = self.input_norm(hidden_states)
        if padding is not None:
            u = u.masked_fill(padding, 0.0)
        hidden_states = hidden_states + self.dropout(self.mixer(u))
        return hidden_states + self.dropout(self.ffn(self.ffn_norm(hidden_states)))
