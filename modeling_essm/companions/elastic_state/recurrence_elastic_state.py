# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The model's own backbone: a diagonal linear recurrence (LRU, Orvieto et al. 2023) whose state is refined.

    z0_{t+1} = lam z_t + exp(gamma) B (W x_{t+1} + b),    lam = exp(-exp(nu) + i exp(theta))

z_t is the state that was committed, after refinement, so that what was corrected once need not be corrected again.
Complex numbers are pairs of real ones: z = [Re, Im] of shape (B, 2n).
Letters: B batch, L sequence, F input features, H width, n modes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init


class ElasticStateRecurrence(nn.Module):
    """Weights `nu_log`, `theta_log`, `gamma_log` (n,), `B` (n, H, 2), and the linear encoder `embed_features`."""

    has_spectral_budget = False

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        n = config.latent_size // 2
        self.embed_features = nn.Linear(config.num_input_features, config.hidden_size)
        self.nu_log, self.theta_log, self.gamma_log = (nn.Parameter(torch.empty(n)) for _ in range(3))
        self.B = nn.Parameter(torch.empty(n, config.hidden_size, 2))

    def start(
        self, features: Tensor, real: Tensor | None, cache: Any, spectral_budget: Any
    ) -> Callable[[int, Tensor], Tensor]:
        """Reads (B, L, F); returns the function (t, committed z (B, 2n)) -> proposal (B, 2n).

        Args:
            real, cache, spectral_budget: not read; the committed state is all there is.
        """
        dtype = torch.promote_types(self.nu_log.dtype, torch.float32)
        modulus, angle = (-self.nu_log.to(dtype).exp()).exp(), self.theta_log.to(dtype).exp()
        re, im = modulus * angle.cos(), modulus * angle.sin()
        weight = (
            (self.gamma_log.to(dtype).exp()[:, None, None] * self.B.to(dtype)).movedim(2, 0).flatten(0, 1)
        )  # (2n, H)
        u = self.embed_features(features.to(self.embed_features.weight.dtype)).to(dtype)
        drive = u @ weight.mT  # (B, L, 2n)

        def propose(t: int, z: Tensor) -> Tensor:
            x, y = z.chunk(2, 1)
            return torch.cat([re * x - im * y, im * x + re * y], 1) + drive[:, t]

        return propose

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """|lam|^2 uniform in [r_min^2, r_max^2], phase uniform in (0, max_phase), B as published."""
        low, high = self.config.r_min**2, self.config.r_max**2
        squares = (torch.empty_like(self.nu_log).uniform_() * (high - low) + low).clamp(min=1e-8)
        phases = torch.empty_like(self.theta_log).uniform_() * self.config.max_phase
        init.copy_(self.nu_log, (-0.5 * squares.log()).log())
        init.copy_(self.theta_log, phases.clamp(min=1e-8).log())
        init.copy_(self.gamma_log, 0.5 * torch.log1p(-squares))
        init.normal_(self.B, std=(2 * self.config.hidden_size) ** -0.5)


__all__ = ["ElasticStateRecurrence"]
