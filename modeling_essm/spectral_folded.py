# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The work inside chunks with dense M_k on an accelerator: gates go into W, so that fewer passes read the features.

g_k(t) scales the row of W that makes feature k of step t, and W is smaller than the features it makes. With
W_g = g * W, X = [u; x] and G = dy M^T the gated features are F = W_g X, and

    y = F M,   dM = F^T dy,   dX = W_g^T G,   dg = rowsum((G X^T) * W).

On a CPU, where a group's features stay in its cache, `spectral_groups` is as fast forward and faster backward. Letters
and arguments as there.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .spectral_constants import Realization, channel_readout, state_dtype
from .spectral_groups import groups

_BYTES_PER_CHANNEL = 35 << 20  # features of a group: four waves of tiles on 132 processors
_SHARE_OF_MEMORY = 32  # but never more than this part of the device's memory
_MEMORY_UNKNOWN = 8 << 30


@functools.lru_cache(maxsize=64)
def _memory(device: torch.device) -> int:
    """Bytes the device has."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _MEMORY_UNKNOWN


def _group_size(R: int, K: int, D: int, like: Tensor) -> int:
    """How many chunks make a group."""
    largest = min(_BYTES_PER_CHANNEL * K, _memory(like.device) // _SHARE_OF_MEMORY)
    return max(1, largest // (R * K * D * like.element_size()))


def mix_dense_folded(basis: Realization, chunks: Tensor, x: Tensor, gates: Tensor, M: Tensor) -> Tensor:
    """y (m, R, E) of all chunks; arguments as `spectral_groups.mix_dense`."""
    m, _, D = chunks.shape
    R, K = gates.shape[1:]
    W = channel_readout(basis, K, chunks)[: R * K]
    M_flat = M[:K].reshape(K * D, -1)
    y = chunks.new_empty(m, R, M.shape[2])
    for g, X in groups(chunks, x, _group_size(R, K, D, chunks), W.dtype):
        features = torch.bmm(W * gates[g].reshape(len(X), R * K, 1), X)
        torch.mm(features.view(-1, K * D).to(y.dtype), M_flat, out=y[g].view(-1, M.shape[2]))
    return y


def unmix_dense_folded(
    basis: Realization, dy: Tensor, chunks: Tensor, x: Tensor, gates: Tensor, M: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `mix_dense_folded`; as `spectral_groups.unmix_dense`."""
    m, C, D = chunks.shape
    R, K = gates.shape[1:]
    W = channel_readout(basis, K, chunks)[: R * K]
    M_flat = M[:K].reshape(K * D, -1)
    dM = torch.zeros(M.shape, dtype=state_dtype(M.dtype), device=M.device)
    dM_flat = dM[:K].view(K * D, -1)
    dgates = W.new_empty(m, R, K)
    dchunks, dx = torch.empty_like(chunks, dtype=x.dtype), torch.empty_like(x)
    for g, X in groups(chunks, x, _group_size(R, K, D, chunks), W.dtype):
        dy_rows = dy[g].reshape(-1, dy.shape[2])
        W_g = W * gates[g].reshape(len(X), R * K, 1)
        features = torch.bmm(W_g, X).view(-1, K * D).to(dy.dtype)
        dM_flat += _product_in(dM.dtype, features.T, dy_rows)
        dfeatures = torch.mm(dy_rows, M_flat.T).to(W.dtype).view(len(X), R * K, D)
        dgates[g] = torch.bmm(dfeatures, X.mT).mul_(W).sum(-1).view(-1, R, K)
        dinputs = torch.bmm(W_g.mT, dfeatures)
        dchunks[g], dx[g] = dinputs[:, :C], dinputs[:, C:]
    return dchunks, dx, dgates, dM


def _product_in(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    """a @ b, not rounded to the factors' dtype where the device can give it as it was summed."""
    if a.device.type == "cuda" and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b)
