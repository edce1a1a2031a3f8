# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The inner steps: natural gradient descent of a state on its objective, in a trust region.

    g = dl/dz,    v = -G^{-1} g,    kappa = g^T G^{-1} g = |v|_G^2,    v <- v min(1, rho / |v|_G)
    z' = Retract(z + alpha v + beta (z0 - z))

Every row is on its own. A step is computed for the rows that take it and no others: `refine` selects them, so that the
number of gradient calls is the sum of depths. A state is judged once: the evaluation that accepts a step is the one
that the next gradient is taken from, and that the readout comes from in the end. Weights get no gradient from inner
steps, and these work under no_grad and under inference_mode.
Letters: B batch, d width of the latent, K depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .metrics_elastic_state import METRICS

MOST_HALVINGS = 2  # of "backtrack"
# (z (b, d), rows (b,) int64 or None for all) -> readouts (b, d_y), objective (b,)
Evaluate = Callable[[Tensor, "Tensor | None"], tuple[Tensor, Tensor]]


class InnerWork:
    """Of one forward: rows that the objective was evaluated for, and those that its gradient was computed for; steps
    that were kept; and the metric's solver, once it has been factored."""

    def __init__(self) -> None:
        self.gradients = self.values = self.kept = 0
        self.solve: Callable[[Tensor], Tensor] | None = None


@dataclass
class Judged:
    """States z (b, d), readouts y (b, d_y), objective `losses` (b,).

    Attributes:
        leaf, graph: z to differentiate at, and the objective as autograd follows it there; None if that was not asked
            for, or after rows of several evaluations were put together.
    """

    z: Tensor
    y: Tensor
    losses: Tensor
    leaf: Tensor | None = None
    graph: Tensor | None = None

    def put(self, rows: Tensor, other: Judged) -> Judged:
        """The states with these rows (b',) int64 from the other; the other itself if it has all."""
        if len(rows) == len(self.z):
            return other
        pairs = ((self.z, other.z), (self.y, other.y), (self.losses, other.losses))
        return Judged(*(mine.index_copy(0, rows, theirs) for mine, theirs in pairs))

    def where(self, good: Tensor, other: Judged) -> Judged:
        """These states where good (b,) is true, the others elsewhere."""
        pairs = ((self.z, other.z), (self.y, other.y))
        z, y = (torch.where(good[:, None], mine, theirs) for mine, theirs in pairs)
        return Judged(z, y, torch.where(good, self.losses, other.losses))


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

    def judge(
        self, z: Tensor, evaluate: Evaluate, rows: Tensor | None, work: InnerWork, differentiable: bool
    ) -> Judged:
        """Evaluate states (b, d) once; `differentiable`: so that a gradient can be taken from that."""
        work.values += len(z)
        if not differentiable:
            return Judged(z, *evaluate(z, rows))
        with torch.inference_mode(False):
            leaf = z
            if not (z.requires_grad and torch.is_grad_enabled()):
                leaf = (z.clone() if z.is_inference() else z.detach()).requires_grad_()
            with torch.enable_grad():
                y, graph = evaluate(leaf, rows)
        if torch.is_grad_enabled():
            return Judged(z, y, graph, leaf, graph)
        return Judged(z, y.detach(), graph.detach(), leaf, graph)

    def gradient(self, here: Judged) -> Tensor:
        """g (b, d) of the objective at states judged with `differentiable`, of each row alone.

        It has a graph of its own in training with gradient_order 2.

        Raises:
            ValueError: an objective whose value autograd cannot follow to the state.
        """
        leaf, graph = here.leaf, here.graph
        if leaf is None or graph is None or not graph.requires_grad:
            raise ValueError("the objective must be computed from y by functions that autograd knows")
        outer = torch.is_grad_enabled()  # then the loss goes through the same graph
        second_order = outer and self.training and self.config.gradient_order == 2
        with torch.inference_mode(False), torch.enable_grad():
            (g,) = torch.autograd.grad(
                graph.sum(), leaf, retain_graph=outer, create_graph=second_order, materialize_grads=True
            )
        return g

    def refine(self, start: Judged, depths: Tensor, evaluate: Evaluate, work: InnerWork) -> Judged:
        """Each row its own number of steps, computed for the rows that still take one.

        Args:
            start: B proposals, judged with `differentiable` if any depth is above 0. depths: (B,) int64.
            work: advanced.
        Returns:
            Judged z_K; rows of depth 0 are those of `start`, bit for bit.
        """
        whole = here = start
        deepest = int(depths.max()) if len(depths) else 0
        for j in range(deepest):
            rows = (depths > j).nonzero().flatten()
            given = None if len(rows) == len(depths) else rows
            if len(rows) < len(here.z) or here.leaf is None:
                z = whole.z if given is None else whole.z.index_select(0, rows)
                here = self.judge(z, evaluate, given, work, differentiable=True)
            z0 = start.z if given is None else start.z.index_select(0, rows)
            here = self._step(here, z0, evaluate, given, work, differentiable=j + 1 < deepest)
            whole = whole.put(rows, here)
        return whole

    def refine_softly(self, start: Judged, masks: Tensor, evaluate: Evaluate, work: InnerWork) -> Judged:
        """All rows take all steps, each weighted: z <- z + m_j (z' - z). For training.

        Args:
            start: B proposals, judged with `differentiable`. masks: (B, K) from `ElasticStateGate.masks`.
        """
        here, K = start, masks.shape[1]
        for j in range(K):
            if self.config.training_acceptance == "none":
                new = self._move(here, start.z, work)[0]
                work.kept += len(new)
            else:
                new = self._step(here, start.z, evaluate, None, work, differentiable=False).z
            z = here.z + masks[:, j, None] * (new - here.z)
            here = self.judge(z, evaluate, None, work, differentiable=j + 1 < K)
        return here

    def _move(self, here: Judged, z0: Tensor, work: InnerWork) -> tuple[Tensor, Tensor]:
        """Where the whole step leads from states with proposals z0 (b, d), and v, (b, d) each."""
        work.solve = work.solve or self.metric.solver()
        work.gradients += len(z0)
        v = self.direction(self.gradient(here), work.solve)
        return self.move(here.z, z0, v), v

    def _step(
        self,
        here: Judged,
        z0: Tensor,
        evaluate: Evaluate,
        rows: Tensor | None,
        work: InnerWork,
        differentiable: bool,
    ) -> Judged:
        """The states after a step, and after what `acceptance` undoes of it."""
        new, v = self._move(here, z0, work)
        there = self.judge(new, evaluate, rows, work, differentiable)
        acceptance = self.config.training_acceptance if self.training else self.config.acceptance
        if acceptance == "none":
            work.kept += len(new)
            return there
        good = there.losses <= here.losses  # not of a NaN
        for halving in range(MOST_HALVINGS if acceptance == "backtrack" else 0):
            again = (~good).nonzero().flatten()
            if not len(again):
                break
            z = self.move(here.z[again], z0[again], v[again], 0.5 ** (halving + 1))
            shorter = self.judge(z, evaluate, again if rows is None else rows[again], work, differentiable=False)
            good = good.index_copy(0, again, shorter.losses <= here.losses[again])
            there = Judged(there.z, there.y, there.losses).put(again, shorter)
        kept = int(good.sum())
        work.kept += kept
        return there if kept == len(good) else there.where(good, here)


__all__ = ["ElasticStateCorrector", "InnerWork", "Judged"]
