# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How many inner steps a state gets: ordered thresholds on the logarithm of its objective.

    s = softplus(w) log(l0 + eps) + b,    tau_1 < .. < tau_Kmax,    K = sum_j 1[s > tau_j]

K is monotone in the objective l0 for every value of the weights, and the steps are nested: a row that takes step j took
those before it. In training p_j = sigmoid((s - tau_j) / T) carries the gradient. The gate sends no gradient into l0: a
proposal is trained to be good, not to look easy.
Letters: B batch, K depth.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

EPSILON = 1e-6  # of the logarithm: objectives below count as zero


class ElasticStateGate(nn.Module):
    """Weights `weight`, `bias`, `first` of shape () and `gaps` (K_max - 1,), made by `reset_parameters`."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.weight, self.bias, self.first = (nn.Parameter(torch.empty((), dtype=torch.float32)) for _ in range(3))
        self.gaps = nn.Parameter(torch.empty(config.max_refine_depth - 1, dtype=torch.float32))

    @property
    def thresholds(self) -> Tensor:
        """tau (K_max,), rising."""
        return self.first + F.pad(F.softplus(self.gaps).cumsum(0), (1, 0))

    def margins(self, losses: Tensor, shift: float = 0.0) -> Tensor:
        """(B, K_max): s - tau_j - shift of objectives (B,), falling along j; negative objectives count as zero."""
        s = F.softplus(self.weight) * (losses.detach().clamp(min=0) + EPSILON).log() + self.bias
        return s[:, None] - self.thresholds - shift

    def depths(self, losses: Tensor, shift: float = 0.0) -> Tensor:
        """K (B,) int64 in [0, K_max]."""
        return (self.margins(losses, shift) > 0).sum(1)

    def masks(self, losses: Tensor, shift: float = 0.0) -> Tensor:
        """(B, K_max), the weight of each inner step in training: with "straight_through" 0 or 1, with the gradient of
        p, with "relaxed" p itself."""
        margins = self.margins(losses, shift)
        p = (margins / self.config.gate_temperature).sigmoid()
        if self.config.gate_training == "relaxed":
            return p
        return (margins > 0).to(p.dtype) + p - p.detach()

    def sample(self, losses: Tensor, shift: float = 0.0, most: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Continue with probability p_j until the first stop, or until `most` steps: "policy_gradient".

        Returns:
            Depths (B,) int64, and the log-probability and the entropy of the draw, (B,) each.
        """
        logits = self.margins(losses, shift)[:, :most] / self.config.gate_temperature
        keep = torch.rand_like(logits) < logits.sigmoid()
        taken = keep.long().cumprod(1)  # (B, K): steps before the first stop
        reached = F.pad(taken[:, :-1], (1, 0), value=1).to(logits.dtype)  # decisions that are made
        log_prob = torch.where(taken.bool(), F.logsigmoid(logits), F.logsigmoid(-logits))
        entropy = F.softplus(logits) - logits * logits.sigmoid()
        return taken.sum(1), (reached * log_prob).sum(1), (reached * entropy).sum(1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """softplus(w) = 1, b = 0, thresholds as configured."""
        init.constant_(self.weight, math.log(math.expm1(1.0)))
        init.zeros_(self.bias)
        init.constant_(self.first, self.config.gate_first_threshold)
        init.constant_(self.gaps, math.log(math.expm1(self.config.gate_threshold_gap)))


def policy_loss(costs: Tensor, log_prob: Tensor, entropy: Tensor, real: Tensor, config: Any) -> Tensor:
    """REINFORCE on the discounted cost to go; the baseline of a row is the mean of the others at that position, or 0.

    Args:
        costs, log_prob, entropy: (B, L). real: (B, L) bool, positions that count.
    Returns:
        (): its gradient is that of the expected cost, less policy_entropy times the entropy.
    """
    B, L = costs.shape
    to_go, returns = torch.zeros_like(costs[:, 0]), []
    for t in reversed(range(L)):
        to_go = torch.where(real[:, t], costs[:, t].detach(), 0.0) + config.policy_discount * to_go
        returns.append(to_go)
    R = torch.stack(returns[::-1], 1)
    advantages = R if B == 1 else (R - R.mean(0)) * B / (B - 1)  # R_b - mean of the others
    each = advantages * log_prob - config.policy_entropy * entropy
    return each.masked_fill(~real, 0.0).sum() / real.sum().clamp(min=1)
