# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The inner steps: natural gradient descent of a state on its objective, in a trust region.

    g = dl/dz,    v = -G^{-1} g,    kappa = g^T G^{-1} g = |v|_G^2,    v <- v min(1, rho / |v|_G)
    z' = Retract(z + alpha v + beta (z0 - z))

    cholesky:  G = L L^T + eps I, L lower triangular with a softplus diagonal         2 d^2 flops for each solve
    diagonal:  G = diag(softplus(delta)) + eps I                                       d
    low_rank:  G = diag(softplus(delta)) + eps I + U U^T, by Woodbury's identity       4 d r

A new G is the identity, up to U U^T, whose entries are of size 1e-4, because U = 0 would get no gradient. A step is
computed for the rows that take it. A state is judged once: the evaluation that accepts a step is the one that the next
gradient is taken from, and the readout. Weights get no gradient from inner steps.
Letters: B batch, d width of the latent, r rank, K depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

LOW_RANK_STD = 0.01
MOST_HALVINGS = 2  # of "backtrack"
# (z (b, d), rows (b,) int64 or None for all) -> readouts (b, d_y), objective (b,)
Evaluate = Callable[[Tensor, "Tensor | None"], tuple[Tensor, Tensor]]
Solve = Callable[[Tensor], Tensor]  # rows (B, d) -> G^{-1} of each


def at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class CholeskyMetric(nn.Module):
    """`lower` (d, d): below the diagonal L, on the diagonal what softplus makes L of; the rest is not read."""

    def __init__(self, config: Any):
        super().__init__()
        self.epsilon = config.metric_epsilon
        self.lower = nn.Parameter(torch.empty(config.latent_size, config.latent_size, dtype=torch.float32))

    def matrix(self) -> Tensor:
        """G as a dense (d, d) matrix."""
        lower = at_least_fp32(self.lower)
        L = lower.tril(-1) + torch.diag(F.softplus(lower.diagonal()))
        return L @ L.mT + self.epsilon * torch.eye(len(L), dtype=L.dtype, device=L.device)

    def solver(self) -> Solve:
        factor = torch.linalg.cholesky(self.matrix())
        return lambda g: torch.cholesky_solve(g.mT, factor).mT

    @torch.no_grad()
    def reset_parameters(self) -> None:
        one = math.log(math.expm1(math.sqrt(1 - self.epsilon)))  # of the diagonal of L, whose square counts
        init.copy_(self.lower, torch.full_like(self.lower.diagonal(), one).diag())


class DiagonalMetric(nn.Module):
    """`delta` (d,)."""

    def __init__(self, config: Any):
        super().__init__()
        self.epsilon = config.metric_epsilon
        self.delta = nn.Parameter(torch.empty(config.latent_size, dtype=torch.float32))

    @property
    def diagonal(self) -> Tensor:
        return F.softplus(at_least_fp32(self.delta)) + self.epsilon

    def matrix(self) -> Tensor:
        return self.diagonal.diag()

    def solver(self) -> Solve:
        diagonal = self.diagonal
        return lambda g: g / diagonal

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init.constant_(self.delta, math.log(math.expm1(1 - self.epsilon)))


class LowRankMetric(DiagonalMetric):
    """`delta` (d,) and `U` (d, r): G^{-1} = D^{-1} - D^{-1} U (I + U^T D^{-1} U)^{-1} U^T D^{-1}."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.U = nn.Parameter(torch.empty(config.latent_size, config.metric_rank, dtype=torch.float32))

    def matrix(self) -> Tensor:
        U = at_least_fp32(self.U)
        return super().matrix() + U @ U.mT

    def solver(self) -> Solve:
        diagonal, U = self.diagonal, at_least_fp32(self.U)
        scaled = U / diagonal[:, None]
        factor = torch.linalg.cholesky(torch.eye(U.shape[1], dtype=U.dtype, device=U.device) + U.mT @ scaled)
        return lambda g: g / diagonal - torch.cholesky_solve((g @ scaled).mT, factor).mT @ scaled.mT

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.normal_(self.U, std=LOW_RANK_STD)


METRICS: dict[str, Callable[[Any], Any]] = {
    "cholesky": CholeskyMetric,
    "diagonal": DiagonalMetric,
    "low_rank": LowRankMetric,
}


class InnerWork:
    """Of one forward: how many rows the objective's gradient was computed for, and the metric's solver, once it has
    been factored."""

    def __init__(self) -> None:
        self.gradients = 0
        self.solve: Solve | None = None


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


class ElasticStateCorrector(nn.Module):
    """The metric, and `log_step_size` (), alpha = exp of it and at most 1."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.metric = METRICS[config.metric](config)
        self.log_step_size = nn.Parameter(torch.empty((), dtype=torch.float32))

    @property
    def step_size(self) -> Tensor:
        return self.log_step_size.clamp(max=0.0).exp()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.metric.reset_parameters()
        init.constant_(self.log_step_size, math.log(self.config.step_size))

    def direction(self, g: Tensor, solve: Solve) -> Tensor:
        """v (B, d) of gradients g (B, d), at most rho long in the norm of G."""
        v = -solve(g)
        if self.config.trust_radius is None:
            return v
        kappa = (-(g * v).sum(1, keepdim=True)).clamp(min=0)
        return v * (self.config.trust_radius / (kappa + 1e-12).sqrt()).clamp(max=1.0)

    def retract(self, z: Tensor) -> Tensor:
        """Rows of (B, d) into the ball of `retraction_radius`."""
        if self.config.retraction == "none":
            return z
        scale = self.config.retraction_radius / z.norm(dim=1, keepdim=True).clamp(min=1e-12)
        return z * scale.clamp(max=1.0)

    def move(self, z: Tensor, z0: Tensor, v: Tensor, scale: float = 1.0) -> Tensor:
        """z' (B, d); `scale` multiplies alpha."""
        return self.retract(z + scale * self.step_size * v + self.config.drift * (z0 - z))

    def judge(self, z: Tensor, evaluate: Evaluate, rows: Tensor | None, differentiable: bool) -> Judged:
        """Evaluate states (b, d) once; `differentiable`: so that a gradient can be taken from that."""
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
                here = self.judge(z, evaluate, given, differentiable=True)
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
            new, _ = self._move(here, start.z, work)
            z = here.z + masks[:, j, None] * (new - here.z)
            here = self.judge(z, evaluate, None, differentiable=j + 1 < K)
        return here

    def gradient(self, here: Judged) -> Tensor:
        """g (b, d) of the objective at states judged with `differentiable`, of each row alone, without a graph.

        Raises:
            ValueError: an objective whose value autograd cannot follow to the state.
        """
        if here.leaf is None or here.graph is None or not here.graph.requires_grad:
            raise ValueError("the objective must be computed from y by functions that autograd knows")
        retain = torch.is_grad_enabled()  # then the loss goes through the same graph
        with torch.inference_mode(False), torch.enable_grad():
            (g,) = torch.autograd.grad(here.graph.sum(), here.leaf, retain_graph=retain, materialize_grads=True)
        return g

    def _move(self, here: Judged, z0: Tensor, work: InnerWork) -> tuple[Tensor, Tensor]:
        """Where the whole step leads from states with proposals z0 (b, d), and v, (b, d) each."""
        g = self.gradient(here)
        work.gradients += len(z0)
        with torch.autocast(z0.device.type, enabled=False):  # half precision is not enough for G to stay positive
            work.solve = work.solve or self.metric.solver()
            v = self.direction(g, work.solve)
        return self.move(here.z, z0, v), v

    def _step(
        self, here: Judged, z0: Tensor, evaluate: Evaluate, rows: Tensor | None, work: InnerWork, differentiable: bool
    ) -> Judged:
        """The states after a step, and after what `acceptance` undoes of it."""
        new, v = self._move(here, z0, work)
        there = self.judge(new, evaluate, rows, differentiable)
        if self.training or self.config.acceptance == "none":
            return there
        good = there.losses <= here.losses  # not of a NaN
        for halving in range(MOST_HALVINGS if self.config.acceptance == "backtrack" else 0):
            again = (~good).nonzero().flatten()
            if not len(again):
                break
            z = self.move(here.z[again], z0[again], v[again], 0.5 ** (halving + 1))
            shorter = self.judge(z, evaluate, again if rows is None else rows[again], differentiable=False)
            good = good.index_copy(0, again, shorter.losses <= here.losses[again])
            there = Judged(there.z, there.y, there.losses).put(again, shorter)
        bad = (~good).nonzero().flatten()
        if not len(bad):
            return there
        return Judged(there.z, there.y, there.losses).put(bad, Judged(here.z[bad], here.y[bad], here.losses[bad]))
