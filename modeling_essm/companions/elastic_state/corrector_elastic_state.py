# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The inner steps: natural gradient descent of a state on its objective, in a trust region.

    g = dl/dz,    v = -G^{-1} g,    kappa = g^T G^{-1} g = |v|_G^2,    v <- v min(1, rho / |v|_G)
    z' = Retract(z + alpha v + beta (z0 - z))

Every row is on its own. A step is computed for the rows that take it and no others: `refine` selects them, so that the
number of gradient calls is the sum of depths. Gradients are taken at a detached leaf, so that weights get none; this
works under no_grad and under inference_mode.
Letters: B batch, d width of the latent, K depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .metrics_elastic_state import METRICS

MOST_HALVINGS = 2  # of "backtrack"
Evaluate = Callable[[Tensor, "Tensor | None"], Tensor]  # (z (b, d), rows (b,) int64 or None for all) -> objective (b,)


class InnerWork:
    """Of one forward: rows for which a gradient, and for which only a value of the objective was computed; steps that
    were kept; and the metric's solver, once it has been factored."""

    def __init__(self) -> None:
        self.gradients = self.values = self.kept = 0
        self.solve: Callable[[Tensor], Tensor] | None = None


class ElasticStateCorrector(nn.Module):
    """The metric, and `log_step_size` (), alpha = exp of it and at most 1."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.metric = METRICS[config.metric](config)
        self.log_step_size = nn.Parameter(torch.empty(()))

    @property
    def step_size(self) -> Tensor:
        return self.log_step_size.clamp(max=0.0).exp()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """A new step size; the metric makes its own weights."""
        init.constant_(self.log_step_size, math.log(self.config.step_size))

    def direction(self, g: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
        """v (B, d) of gradients g (B, d), at most rho long in the norm of G."""
        v = -solve(g)
        if self.config.trust_radius is None:
            return v
        kappa = (-(g * v).sum(1, keepdim=True)).clamp(min=0)
        rho = self.config.trust_radius
        if self.config.trust_radius_kind == "kappa":
            rho = rho * (kappa / (kappa + self.config.trust_kappa) + 1e-12).sqrt()
        return v * (rho / (kappa + 1e-12).sqrt()).clamp(max=1.0)

    def retract(self, z: Tensor) -> Tensor:
        """Rows of (B, d) into the ball, or onto the sphere, of `retraction_radius`."""
        if self.config.retraction == "none":
            return z
        scale = self.config.retraction_radius / z.norm(dim=1, keepdim=True).clamp(min=1e-12)
        return z * (scale.clamp(max=1.0) if self.config.retraction == "ball" else scale)

    def move(self, z: Tensor, z0: Tensor, v: Tensor, scale: float = 1.0) -> Tensor:
        """z' (B, d); `scale` multiplies alpha."""
        return self.retract(z + scale * self.step_size * v + self.config.drift * (z0 - z))

    def refine(self, z0: Tensor, depths: Tensor, evaluate: Evaluate, work: InnerWork) -> Tensor:
        """Each row its own number of steps, computed for the rows that still take one.

        Args:
            z0: (B, d) proposals. depths: (B,) int64. work: advanced.
        Returns:
            z_K (B, d); rows of depth 0 are those of z0, bit for bit.
        """
        z, deepest = z0, int(depths.max()) if len(depths) else 0
        for j in range(deepest):
            rows = (depths > j).nonzero().flatten()
            step = self._step(z.index_select(0, rows), z0.index_select(0, rows), evaluate, rows, work)
            z = z.index_copy(0, rows, step)
        return z

    def refine_softly(self, z0: Tensor, masks: Tensor, evaluate: Evaluate, work: InnerWork) -> Tensor:
        """All rows take all steps, each weighted: z <- z + m_j (z' - z). For training.

        Args:
            masks: (B, K) from `ElasticStateGate.masks`.
        """
        z = z0
        for m in masks.unbind(1):
            z = z + m[:, None] * (self._step(z, z0, evaluate, None, work) - z)
        return z

    def _step(
        self,
        z: Tensor,
        z0: Tensor,
        evaluate: Evaluate,
        rows: Tensor | None,
        work: InnerWork,
    ) -> Tensor:
        config = self.config
        work.solve = work.solve or self.metric.solver()
        second_order = self.training and config.gradient_order == 2 and torch.is_grad_enabled()
        before, g = value_and_gradient(evaluate, z, rows, second_order)
        work.gradients += len(z)
        v = self.direction(g, work.solve)
        new = self.move(z, z0, v)
        acceptance = config.training_acceptance if self.training else config.acceptance
        if acceptance == "none":
            work.kept += len(z)
            return new
        good = self._no_worse(new, evaluate, rows, before, work)
        for halving in range(MOST_HALVINGS if acceptance == "backtrack" else 0):
            again = (~good).nonzero().flatten()
            if not len(again):
                break
            shorter = self.move(z[again], z0[again], v[again], 0.5 ** (halving + 1))
            there = again if rows is None else rows[again]
            good = good.index_copy(0, again, self._no_worse(shorter, evaluate, there, before[again], work))
            new = new.index_copy(0, again, shorter)
        work.kept += int(good.sum())
        return torch.where(good[:, None], new, z)

    @staticmethod
    @torch.no_grad()
    def _no_worse(z: Tensor, evaluate: Evaluate, rows: Tensor | None, before: Tensor, work: InnerWork) -> Tensor:
        work.values += len(z)
        return evaluate(z, rows) <= before  # not of a NaN


def value_and_gradient(
    evaluate: Evaluate, z: Tensor, rows: Tensor | None, second_order: bool = False
) -> tuple[Tensor, Tensor]:
    """The objective (b,) at states (b, d), detached, and its gradient with respect to them, that of each row alone.

    Args:
        second_order: whether the gradient carries a graph of its own.
    Raises:
        ValueError: an objective whose value autograd cannot follow to the state.
    """
    with torch.inference_mode(False), torch.enable_grad():
        if second_order and z.requires_grad:
            leaf = z
        else:
            leaf = (z.clone() if z.is_inference() else z.detach()).requires_grad_()
        losses = evaluate(leaf, rows)
        if not losses.requires_grad:
            raise ValueError("the objective must be computed from y by functions that autograd knows")
        (g,) = torch.autograd.grad(losses.sum(), leaf, create_graph=second_order, materialize_grads=True)
    return losses.detach(), g


__all__ = ["ElasticStateCorrector", "InnerWork", "value_and_gradient"]
