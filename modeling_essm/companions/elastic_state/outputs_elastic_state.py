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
            sum of refine_depths. objective_calls: how many rows it was evaluated for, whether or not a gradient was
            taken from that. kept_steps: of the steps along those gradients, how many config.acceptance kept.
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


def mean_over(each: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """() of (B, L) where real (B, L) is true; 0 if it is nowhere."""
    return each.masked_fill(~real, 0.0).sum() / real.sum().clamp(min=1)


def distillation_loss(output: ElasticStateOutput, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """() mean over real positions of |z_0 - z_K|^2, where z_K is data: proposals learn what they were refined to.

    Added to the loss of a model that refines well already, it is to save steps (section 8 of the poster).

    Args:
        attention_mask: (B, L), 1 for real positions; None if all are.
    Raises:
        ValueError: an output without latents and proposals.
    """
    if output.proposals is None or output.latents is None:
        raise ValueError("distillation needs an output with latents and proposals")
    each = (output.proposals - output.latents.detach()).square().sum(-1)
    return each.mean() if attention_mask is None else mean_over(each, attention_mask.bool())


__all__ = ["ElasticStateOutput", "distillation_loss"]
