# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The work inside chunks with dense M_k on an accelerator: gates go into W, so that fewer passes read the features.

g_k(t) scales the row of W that makes feature k of step t, and W is smaller than the features it makes. With
W_g = g * W, X = [u; x] and G = dy M^T the gated features are F = W_g X, and

    y = F M,   dM = F^T dy,   dX = W_g^T G,   dg = rowsum((G X^T) * W).

On a CPU, where a group's features stay in its cache, `spectral_groups` is as fast forward and faster backward. Letters
and arguments as there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .spectral_constants import Realization, channel_readout, state_dtype
from .spectral_groups import chunks_per_group, groups, unrounded_product


def mix_dense_folded(basis: Realization, chunks: Tensor, x: Tensor, gates: Tensor, M: Tensor) -> Tensor:
    """y (m, R, E) of all chunks; arguments as `spectral_groups.mix_dense`."""
    m, _, D = chunks.shape
    R, K = gates.shape[1:]
    W = channel_readout(basis, K, chunks)[: R * K]
    M_flat = M[:K].reshape(K * D, -1)
    y = chunks.new_empty(m, R, M.shape[2])
    for g, X in groups(chunks, x, chunks_per_group((R, K, D), chunks), W.dtype):
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
    for g, X in groups(chunks, x, chunks_per_group((R, K, D), chunks), W.dtype):
        dy_rows = dy[g].reshape(-1, dy.shape[2])
        W_g = W * gates[g].reshape(len(X), R * K, 1)
        features = torch.bmm(W_g, X).view(-1, K * D).to(dy.dtype)
        dM_flat += unrounded_product(features.T, dy_rows, dM.dtype)
        dfeatures = torch.mm(dy_rows, M_flat.T).to(W.dtype).view(len(X), R * K, D)
        dgates[g] = torch.bmm(dfeatures, X.mT).mul_(W).sum(-1).view(-1, R, K)
        dinputs = torch.bmm(W_g.mT, dfeatures)
        dchunks[g], dx[g] = dinputs[:, :C], dinputs[:, C:]
    return dchunks, dx, dgates, dM
