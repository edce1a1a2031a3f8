# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The metric G of the natural gradient, positive definite for every value of its weights.

    cholesky:  G = L L^T + eps I, L lower triangular with a softplus diagonal         2 d^2 flops for each solve
    diagonal:  G = diag(softplus(delta)) + eps I                                       d
    low_rank:  G = diag(softplus(delta)) + eps I + U U^T, by Woodbury's identity       4 d r

Each is learned and the same for all inputs. It starts as the identity; with "low_rank" up to U U^T, whose entries are
of size 1e-4, because U = 0 would get no gradient.
Letters: B batch, d width of the latent, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

LOW_RANK_STD = 0.01


def at_least_fp32(tensor: Tensor) -> Tensor:
    """In fp32, or fp64 if that is what it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def without_autocast(tensor: Tensor) -> AbstractContextManager:
    """Products in the dtype of their factors: half of it is not enough for a matrix that has to stay positive."""
    return torch.autocast(tensor.device.type, enabled=False)


class ElasticStateMetric(nn.Module):
    """What the metrics share. Their weights are made by `reset_parameters`."""

    def __init__(self, config: Any):
        super().__init__()
        self.epsilon, self.size = config.metric_epsilon, config.latent_size

    @property
    def one(self) -> float:
        """The weight whose softplus is 1 - eps."""
        return math.log(math.expm1(1 - self.epsilon))

    def matrix(self) -> Tensor:
        """G as a dense (d, d) matrix, for diagnostics."""
        raise NotImplementedError

    def solver(self) -> Callable[[Tensor], Tensor]:
        """Factors G once; returns the function (B, d) -> (B, d) that applies G^{-1} to rows."""
        raise NotImplementedError

    def norm(self, v: Tensor) -> Tensor:
        """sqrt(v^T G v) of rows: (B, d) -> (B,)."""
        return torch.einsum("bi,ij,bj->b", v, self.matrix().to(v.dtype), v).clamp(min=0).sqrt()

    def reset_parameters(self) -> None:
        """New weights; those that were loaded stay."""
        raise NotImplementedError


class CholeskyMetric(ElasticStateMetric):
    """`lower` (d, d): below the diagonal L, on the diagonal what softplus makes L of; the rest is not read."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.lower = nn.Parameter(torch.empty(self.size, self.size))
        self._kept: tuple[Tensor, Tensor] | None = None  # the weights, and the factor that they have

    @property
    def one(self) -> float:
        return math.log(math.expm1(math.sqrt(1 - self.epsilon)))  # the diagonal of L, whose square counts

    def matrix(self) -> Tensor:
        lower = at_least_fp32(self.lower)
        L = lower.tril(-1) + torch.diag(F.softplus(lower.diagonal()))
        with without_autocast(L):
            return L @ L.mT + self.epsilon * torch.eye(self.size, dtype=L.dtype, device=L.device)

    def factor(self) -> Tensor:
        """The lower triangular (d, d) factor of G. Without gradients it is kept for as long as the weights stay."""
        lower = self.lower
        if (torch.is_grad_enabled() and lower.requires_grad) or lower.is_inference():
            return torch.linalg.cholesky(self.matrix())
        kept = self._kept
        same = kept is not None and kept[0].device == lower.device and kept[0].dtype == lower.dtype
        if kept is None or not same or not torch.equal(kept[0], lower):
            with torch.inference_mode(False), torch.no_grad():
                kept = self._kept = lower.clone(), torch.linalg.cholesky(self.matrix())
        return kept[1]

    def solver(self) -> Callable[[Tensor], Tensor]:
        factor = self.factor()
        return lambda g: torch.cholesky_solve(g.mT, factor).mT

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init.copy_(self.lower, torch.full_like(self.lower.diagonal(), self.one).diag())


class DiagonalMetric(ElasticStateMetric):
    """`delta` (d,)."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.delta = nn.Parameter(torch.empty(self.size))

    @property
    def diagonal(self) -> Tensor:
        return F.softplus(at_least_fp32(self.delta)) + self.epsilon

    def matrix(self) -> Tensor:
        return self.diagonal.diag()

    def solver(self) -> Callable[[Tensor], Tensor]:
        diagonal = self.diagonal
        return lambda g: g / diagonal

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init.constant_(self.delta, self.one)


class LowRankMetric(DiagonalMetric):
    """`delta` (d,) and `U` (d, r): G^{-1} = D^{-1} - D^{-1} U (I + U^T D^{-1} U)^{-1} U^T D^{-1}."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.U = nn.Parameter(torch.empty(self.size, config.metric_rank))

    def matrix(self) -> Tensor:
        U = at_least_fp32(self.U)
        with without_autocast(U):
            return super().matrix() + U @ U.mT

    def solver(self) -> Callable[[Tensor], Tensor]:
        diagonal, U = self.diagonal, at_least_fp32(self.U)
        scaled = U / diagonal[:, None]
        with without_autocast(U):
            inner = torch.eye(U.shape[1], dtype=U.dtype, device=U.device) + U.mT @ scaled
            factor = torch.linalg.cholesky(inner)

        def solve(g: Tensor) -> Tensor:
            with without_autocast(g):
                return g / diagonal - torch.cholesky_solve((g @ scaled).mT, factor).mT @ scaled.mT

        return solve

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.normal_(self.U, std=LOW_RANK_STD)


METRICS: dict[str, type[ElasticStateMetric]] = {
    "cholesky": CholeskyMetric,
    "diagonal": DiagonalMetric,
    "low_rank": LowRankMetric,
}

__all__ = ["METRICS", "CholeskyMetric", "DiagonalMetric", "ElasticStateMetric", "LowRankMetric"]
