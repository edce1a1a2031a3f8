# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""(R), one step at a time: f(t) = A^T f(t-1) + phi(0)^T u(t), then Eq. (7) on the features at t. How a model decodes.

Shapes as in `SpectralOperator.__call__`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .quantized_weights import is_quantized, quantized_product
from .spectral_constants import Realization, feature_dtype, recurrence, state_dtype, state_matmul

_CACHED_BYTES_CPU = 1 << 18  # a matrix smaller than this stays in a core's cache from one step to the next


def step(basis: Realization, u: Tensor, gates: Tensor, M: Tensor, x0: Tensor | None, lengths: Tensor | None):
    """The recurrence over all L steps; one mixing product at the end."""
    B, L, D = u.shape
    K, N = gates.shape[2], basis.N
    dtype, wide = state_dtype(u.dtype), feature_dtype(u.dtype)
    AB = recurrence(basis.H, str(u.device), dtype)
    A_T, phi0 = AB[:N, :N], AB[:N, -1:]
    x = u.new_zeros(B, N, D, dtype=dtype) if x0 is None else x0.to(dtype)
    per_head = gates if gates.ndim == 4 else gates[..., None]
    per_head = per_head.to(wide)[..., None]  # (B, L, K, G, 1)
    gated, state = [], x
    for t in range(L):
        x = torch.addcmul(state_matmul(A_T, x), phi0, u[:, t : t + 1].to(dtype))
        state = x if lengths is None else torch.where((t < lengths)[:, None, None], x, state)
        features = x[:, :K].to(wide).unflatten(2, (per_head.shape[3], D // per_head.shape[3]))
        gated.append((features * per_head[:, t]).to(u.dtype))
    return _mix(torch.stack(gated, 1).view(B * L, K, D), M).view(B, L, -1), state


def _mix(features: Tensor, M: Tensor) -> Tensor:
    """(n, K, D) gated features by M_k, dense (>= K, D, E) or of heads (>= K, h, d, e): (n, E)."""
    n, K, D = features.shape
    if is_quantized(M):
        return quantized_product(features.view(n, K * D), M)
    if M.ndim == 4:
        h, d, e = M.shape[1:]
        if d == e == 1:
            return (features * M[:K].view(K, D)).sum(1)
        # A product for each channel and head reads M as it lies in memory; channels are added afterwards.
        products = torch.bmm(features.view(n, K * h, d).transpose(0, 1), M[:K].reshape(K * h, d, e))
        return products.view(K, h, n, e).sum(0).transpose(0, 1).reshape(n, h * e)
    M_flat = M[:K].reshape(K * D, -1)
    features = features.view(n, K * D)
    return _weighted_row_sum(features, M_flat) if _is_memory_bound(features, M_flat) else features @ M_flat


def _is_memory_bound(features: Tensor, M_flat: Tensor) -> bool:
    """Whether the product waits for M, on a CPU, with no gradient wanted of it."""
    if torch.is_grad_enabled() or torch.compiler.is_exporting():  # first: an export must not look at the batch
        return False
    if M_flat.device.type != "cpu" or features.shape[0] > 4 or M_flat.dtype == torch.float64:
        return False
    return M_flat.nbytes >= _CACHED_BYTES_CPU or M_flat.dtype == torch.float16  # BLAS is slow in fp16 at any size


def _weighted_row_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """weights (n, R) @ rows (R, E): an embedding bag streams rows at the memory's speed, BLAS at half of it.

    Each row of weights is split into bags, one for every thread.
    """
    n, R = weights.shape
    bags = math.gcd(R, max(1, _num_threads() // n))
    indices = torch.arange(R, device=rows.device).view(bags, -1).repeat(n, 1)
    sums = F.embedding_bag(indices, rows, mode="sum", per_sample_weights=weights.view(n * bags, -1))
    return sums.view(n, bags, -1).sum(1) if bags > 1 else sums


@torch.compiler.assume_constant_result
def _num_threads() -> int:
    return torch.get_num_threads()
