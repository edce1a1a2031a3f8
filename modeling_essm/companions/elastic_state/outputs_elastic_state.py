# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What an elastic state model returns. Letters: B batch, L sequence, d width of the latent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput


@dataclass
class ElasticStateOutput(ModelOutput):
    """
    Args:
        loss: () mean over real positions of l_K + lambda_E K + w_0 l_0, in training with "policy_gradient" plus its
            surrogate; None without an objective. A task's loss on `readouts` is added by whoever has one.
        readouts: (B, L, d_y) y = g(z_K); of no meaning, like what else is told of them, at positions that are not real.
        latents: (B, L, d) z_K, committed. proposals: (B, L, d) z_0.
        proposal_losses, losses: (B, L) the objective of proposals and of refined states; None without an objective.
        refine_depths: (B, L) int64 K. expected_depths: (B, L) the same with gradients to the gate; of "relaxed" gates
            in training the sum of the p_j.
        past_key_values: ElasticStateCache after the last position, if asked for.
        gradient_calls: how many rows the objective's gradient was computed for; outside of training of the gate the
            sum of refine_depths. objective_calls: and how many its value alone. kept_steps: of the steps along those
            gradients, how many config.acceptance kept.
    """

    loss: torch.Tensor | None = None
    readouts: torch.Tensor | None = None
    latents: torch.Tensor | None = None
    proposals: torch.Tensor | None = None
    proposal_losses: torch.Tensor | None = None
    losses: torch.Tensor | None = None
    refine_depths: torch.Tensor | None = None
    expected_depths: torch.Tensor | None = None
    past_key_values: Any = None
    gradient_calls: int | None = None
    objective_calls: int | None = None
    kept_steps: int | None = None


__all__ = ["ElasticStateOutput"]
