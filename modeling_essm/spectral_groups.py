# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The work inside chunks: features F = W [u; x], gates, mixing with M_k; forward, and backward with F made again.

Chunks are taken in groups whose features fit a cache, so that only a group's features ever exist. With dense M_k a
group is two large products. With heads, features are laid out by head and channel, (head, d, K, step), so that one
product makes the features of all heads and a small one for each head mixes them.

Letters: m chunks of all rows, C steps, N states, D width, K budget, h heads of width d (in) and e (out), G gates a
channel (each for h / G heads), R the steps of a chunk that exist, C unless the sequence is shorter.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from .spectral_constants import Realization, channel_readout, readout_by_channel, state_dtype

# Features of one group, the working set: cache-sized on a CPU, but never so few rows that reading M dominates.
_GROUP_BYTES_CPU, _GROUP_ROWS_CPU = 2 << 20, 256  # rows: steps of dense groups, of heads D
# On an accelerator four waves of tiles on 132 processors, but never more than this part of the device's memory.
_BYTES_PER_CHANNEL, _SHARE_OF_MEMORY, _MEMORY_UNKNOWN = 35 << 20, 32, 8 << 30

# On a CPU torch.bmm takes matrices of fewer multiplications than this one at a time, slower than two passes.
_SMALL_PRODUCT = 400


def _is_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


@functools.lru_cache(maxsize=64)
def _memory(device: torch.device) -> int:
    """Bytes the device has."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _MEMORY_UNKNOWN


def chunks_per_group(shape: tuple[int, ...], like: Tensor) -> int:
    """How many chunks whose features have that shape, (R, K, D) or (D, K, R), make a group."""
    chunk_bytes = torch.Size(shape).numel() * like.element_size()
    if _is_on_cpu(like):
        return max(1, _GROUP_BYTES_CPU // chunk_bytes, _GROUP_ROWS_CPU // shape[0])
    return max(1, min(_BYTES_PER_CHANNEL * shape[1], _memory(like.device) // _SHARE_OF_MEMORY) // chunk_bytes)


def groups(chunks: Tensor, x: Tensor, size: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Group by group its place among the m chunks, and [u; x] (size, C + N, D) of chunks (m, C, D) and x (m, N, D)."""
    for a in range(0, len(chunks), size):
        g = slice(a, a + size)
        yield g, torch.cat([chunks[g].to(dtype), x[g].to(dtype)], 1)


def mix_dense(basis: Realization, chunks: Tensor, x: Tensor, gates: Tensor, M: Tensor) -> Tensor:
    """y of all chunks.

    Args:
        chunks: (m, C, D). x: (m, N, D) state before each. gates: (m, R, K). M: (>= K, D, E).
    Returns:
        (m, R, E).
    """
    m, _, D = chunks.shape
    R, K = gates.shape[1:]
    W = channel_readout(basis, K, chunks)[: R * K]
    M_flat = M[:K].reshape(K * D, -1)
    gates = gates.unsqueeze(-1)
    y = chunks.new_empty(m, R, M.shape[2])
    group = chunks_per_group((R, K, D), chunks)
    buffer = W.new_empty(min(group, m), R * K, D)
    for g, inputs in groups(chunks, x, group, W.dtype):
        features = torch.bmm(W.expand(len(inputs), -1, -1), inputs, out=buffer[: len(inputs)])
        features.view(-1, R, K, D).mul_(gates[g])
        torch.mm(features.view(-1, K * D).to(y.dtype), M_flat, out=y[g].view(-1, M.shape[2]))
    return y


def unmix_dense(
    basis: Realization, dy: Tensor, chunks: Tensor, x: Tensor, gates: Tensor, M: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `mix_dense` by chunks (m, C, D) and x (m, N, D), both in the state's dtype, gates and M.

    Args:
        dy: (m, R, E). The rest as there.
    """
    m, C, D = chunks.shape
    R, K = gates.shape[1:]
    W = channel_readout(basis, K, chunks)[: R * K]
    M_flat = M[:K].reshape(K * D, -1)
    dM = torch.zeros(M.shape, dtype=state_dtype(M.dtype), device=M.device)
    dM_flat = dM[:K].view(K * D, -1)
    dgates = W.new_empty(m, R, K)
    dchunks, dx = torch.empty_like(chunks, dtype=x.dtype), torch.empty_like(x)
    group = chunks_per_group((R, K, D), chunks)
    buffers = W.new_empty(3, min(group, m), R * K, D)
    for g, inputs in groups(chunks, x, group, W.dtype):
        features, dgated, product = buffers[:, : len(inputs)]
        dy_rows, gate = dy[g].reshape(-1, dy.shape[2]), gates[g].reshape(-1, R * K, 1)  # gates may be expanded
        torch.bmm(W.expand(len(inputs), -1, -1), inputs, out=features)
        if W.dtype == dy.dtype:
            torch.mm(dy_rows, M_flat.T, out=dgated.view(-1, K * D))
        else:
            dgated.view(-1, K * D).copy_(torch.mm(dy_rows, M_flat.T))
        torch.sum(torch.mul(dgated, features, out=product), -1, out=dgates[g].view(-1, R * K))
        gated = features.mul_(gate).view(-1, K * D).to(dy.dtype)
        if dM.dtype == dy.dtype:
            dM_flat.addmm_(gated.T, dy_rows)
        else:
            dM_flat += torch.mm(gated.T, dy_rows)
        dinputs = torch.bmm(W.T.expand(len(inputs), -1, -1), dgated.mul_(gate))
        dchunks[g], dx[g] = dinputs[:, :C], dinputs[:, C:]
    return dchunks, dx, dgates, dM


def unrounded_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b of matrices, or of batches of them, in `dtype`, where it is not that of the factors as it was summed."""
    if a.device.type == "cuda" and a.dtype != dtype:
        return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=dtype)
    return torch.matmul(a.to(dtype), b.to(dtype))


def _product_over_chunks(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """sum_n a[n] b[n]^T, of a (n, h, e, R) and b (n, h, c, R): (h, e, c) in `dtype`.

    In bf16 a CPU rounds each product before they are added: half the time, and an error like that of their factors.
    """
    if _is_on_cpu(a) and a.dtype != torch.float16:  # in which BLAS is slow
        return torch.matmul(a, b.mT).sum(0, dtype=dtype)
    a, b = (x.transpose(0, 1).transpose(1, 2).flatten(2) for x in (a, b))  # (h, e or c, n R)
    return unrounded_product(a, b.mT, dtype)


def mix_heads(basis: Realization, chunks: Tensor, x: Tensor, gates: Tensor, M: Tensor) -> Tensor:
    """As `mix_dense`, of gates (m, R, K, G) and M (>= K, h, d, e); returns (m, R, h e)."""
    m, _, D = chunks.shape
    R, K, G = gates.shape[1:]
    h, d, e = M.shape[1:]
    W = readout_by_channel(basis, K, chunks)[..., :R].reshape(-1, K * R)
    matrices = M[:K].permute(1, 3, 2, 0).reshape(h, e, d * K).contiguous()
    gates = gates.permute(0, 3, 2, 1).contiguous().unsqueeze(2)  # (m, G, 1, K, R)
    y = chunks.new_empty(m, R, h * e)
    group = chunks_per_group((D, K, R), chunks)
    buffer = W.new_empty(min(group, m), D, K * R)
    for g, inputs in groups(chunks, x, group, W.dtype):
        features = torch.bmm(inputs.mT, W.expand(len(inputs), -1, -1), out=buffer[: len(inputs)])
        gated = features.view(-1, G, D // G, K, R).mul_(gates[g]).view(-1, h, d * K, R).to(y.dtype)
        if d == e == 1 and (K * R < _SMALL_PRODUCT or not _is_on_cpu(gated)):
            y[g] = gated.mul_(matrices.mT).sum(2).mT
        else:
            y[g] = torch.matmul(matrices, gated).flatten(1, 2).mT
    return y


def unmix_heads(
    basis: Realization, dy: Tensor, chunks: Tensor, x: Tensor, gates: Tensor, M: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `mix_heads`, as `unmix_dense` gives them."""
    m, C, D = chunks.shape
    R, K, G = gates.shape[1:]
    h, d, e = M.shape[1:]
    W = readout_by_channel(basis, K, chunks)[..., :R].reshape(-1, K * R)
    matrices = M[:K].permute(1, 2, 0, 3).reshape(h, d * K, e).contiguous()
    gates = gates.permute(0, 3, 2, 1).contiguous().unsqueeze(2)
    dmatrices = torch.zeros(h, e, d * K, dtype=state_dtype(M.dtype), device=M.device)
    dgates = W.new_empty(m, G, K, R)
    dchunks, dx = torch.empty_like(chunks, dtype=x.dtype), torch.empty_like(x)
    group = chunks_per_group((D, K, R), chunks)
    buffers = W.new_empty(3, min(group, m), D, K * R)
    for g, inputs in groups(chunks, x, group, W.dtype):
        count = len(inputs)
        features, dgated, product = buffers[:, :count]
        torch.bmm(inputs.mT, W.expand(count, -1, -1), out=features)
        dy_t = dy[g].mT.contiguous().view(count, h, e, R)
        by_head, by_gate = (count, h, d * K, R), (count, G, D // G, K, R)
        if d == e == 1:
            torch.mul(matrices, dy_t, out=dgated.view(by_head))
        else:
            dgated.view(by_head).copy_(torch.matmul(matrices, dy_t))
        torch.sum(torch.mul(dgated, features, out=product).view(by_gate), 2, out=dgates[g])
        gated = features.view(by_gate).mul_(gates[g]).view(by_head).to(dy.dtype)
        if d == e == 1 and (K * R < _SMALL_PRODUCT or not _is_on_cpu(gated)):
            dmatrices += gated.mul_(dy_t).sum((0, 3), dtype=dmatrices.dtype).unsqueeze(1)
        else:
            dmatrices += _product_over_chunks(dy_t, gated, dmatrices.dtype)
        dgated.view(by_gate).mul_(gates[g])
        dinputs = torch.bmm(W.expand(count, -1, -1), dgated.mT)
        dchunks[g], dx[g] = dinputs[:, :C], dinputs[:, C:]
    dM = torch.zeros(M.shape, dtype=dmatrices.dtype, device=M.device)
    dM[:K] = dmatrices.view(h, e, d, K).permute(3, 0, 2, 1)
    return dchunks, dx, dgates.permute(0, 3, 2, 1), dM
