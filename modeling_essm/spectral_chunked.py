# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""(R) unrolled over chunks of C steps, so that everything is a matrix product; the default algorithm.

The state before every chunk comes from a scan over chunks, x_{c+1} = carry x_c + inject u_c, as a tree: n products in
log2(n) levels. Inside the chunks, features F = W [u; x] are made, gated and mixed by M_k in groups of chunks whose
features fit a cache, so that only one group's features ever exist; the backward pass makes F again. There is one opaque
operator forward and one backward, so torch.compile neither unrolls the loop over groups nor stores features.
torch.export, torch.func and forward-mode AD get plain tensor operations instead. Shapes as in `SpectralOperator`.

Letters: m chunks of all rows, C steps, N states, D width, E output width, K budget, G gates a channel (each for D / G
columns), R the steps of a chunk that exist, C unless the sequence is shorter.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from .spectral_constants import (
    Realization,
    channel_readout,
    chunk_constants,
    feature_dtype,
    is_transformed,
    readout_by_channel,
    state_dtype,
    state_matmul,
)

# Features of one group, the working set: cache-sized on a CPU, but never so few rows that reading M dominates.
_GROUP_BYTES_CPU, _GROUP_ROWS_CPU = 2 << 20, 256  # rows: steps of dense groups, D of diagonal ones
# On an accelerator four waves of tiles on 132 processors, but never more than this part of the device's memory.
_BYTES_PER_CHANNEL, _SHARE_OF_MEMORY, _MEMORY_UNKNOWN = 35 << 20, 32, 8 << 30

# On a CPU torch.bmm takes matrices of fewer multiplications than this one at a time, slower than two passes.
_SMALL_PRODUCT = 400


def chunked(
    basis: Realization,
    u: Tensor,
    gates: Tensor,
    M: Tensor,
    x0: Tensor | None,
    lengths: Tensor | None,
    nested: bool = False,
):
    """Outputs and final state, see the module. nested: as of `SpectralOperator`."""
    if M.ndim == 2 and gates.ndim == 3:
        gates = gates[..., None]
    if torch.compiler.is_exporting() or is_transformed(u, gates, M, x0):  # the opaque one would answer with zeros
        return _chunked_traceable(basis, u, gates, M, x0, lengths)
    y, state, _ = _chunked_forward(u, gates, M, x0, lengths, *basis, nested)
    return y, state


# ---------------------------------------------------------------------------------------------------------------------
# Between chunks: the scan.


def _scan(v: Tensor, powers: Tensor, backwards: bool = False) -> None:
    """In place, s_i = carry s_{i-1} + v_i for all i: pairs become one step of carry^2, and so on up.

    Args:
        v: (B, n, N, D). powers: (J, N, N), carry^(2^j). backwards: s_i = carry s_{i+1} + v_i.
    """
    n = v.shape[1]
    if n < 2:
        return
    if backwards:
        starts, ends, others = v[:, n % 2 + 1 :: 2], v[:, n % 2 : n - 1 : 2], v[:, 1 - n % 2 : n - 2 : 2]
    else:
        starts, ends, others = v[:, : n - 1 : 2], v[:, 1::2], v[:, 2::2]
    ends += state_matmul(powers[0], starts)
    _scan(ends, powers[1:], backwards)
    if count := others.shape[1]:
        others += state_matmul(powers[0], ends[:, -count:] if backwards else ends[:, :count])


def _states_before_chunks(chunks: Tensor, x0: Tensor | None, readout: Tensor, powers: Tensor) -> Tensor:
    """The state before every chunk: (B, n, N, D) in the dtype of readout.

    Args:
        chunks: (B, n, C, D) inputs. x0: (B, N, D). readout: (C, N, C + N). powers: as in `_scan`.
    """
    B, n, C, D = chunks.shape
    x = readout.new_zeros(B, n, readout.shape[1], D)
    if x0 is not None:
        x[:, 0] = x0
    if n > 1:
        x[:, 1:] = state_matmul(readout[-1, :, :C], chunks[:, :-1].to(x.dtype))
    _scan(x, powers)
    return x


def _scan_gradients(dchunks: Tensor, dx: Tensor, readout: Tensor, powers: Tensor) -> Tensor:
    """That backwards: adds to dchunks (B, n, C, D) what comes through dx (B, n, N, D); returns x0's (B, N, D)."""
    _scan(dx, powers.mT, backwards=True)
    if dx.shape[1] > 1:
        dchunks[:, :-1] += state_matmul(readout[-1, :, : dchunks.shape[2]].T, dx[:, 1:])
    return dx[:, 0].clone()


# ---------------------------------------------------------------------------------------------------------------------
# Inside chunks: features, gates and mixing, group by group.


def _is_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


@functools.lru_cache(maxsize=64)
def _memory(device: torch.device) -> int:
    """Bytes the device has."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _MEMORY_UNKNOWN


def _chunks_per_group(shape: tuple[int, ...], like: Tensor) -> int:
    """How many chunks whose features have that shape, (R, K, D) or (D, K, R), make a group."""
    chunk_bytes = torch.Size(shape).numel() * like.element_size()
    if _is_on_cpu(like):
        return max(1, _GROUP_BYTES_CPU // chunk_bytes, _GROUP_ROWS_CPU // shape[0])
    return max(1, min(_BYTES_PER_CHANNEL * shape[1], _memory(like.device) // _SHARE_OF_MEMORY) // chunk_bytes)


def _groups(chunks: Tensor, x: Tensor, size: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Group by group its place among the m chunks, and [u; x] (size, C + N, D) of chunks (m, C, D) and x (m, N, D)."""
    for a in range(0, len(chunks), size):
        g = slice(a, a + size)
        yield g, torch.cat([chunks[g].to(dtype), x[g].to(dtype)], 1)


def _mix_dense(basis: Realization, chunks: Tensor, x: Tensor, gates: Tensor, M: Tensor) -> Tensor:
    """y of all chunks with dense M_k.

    Args:
        chunks: (m, C, D). x: (m, N, D) state before each. gates: (m, R, K). M: (>= K, D, E).
    Returns:
        (m, R, E).
    """
    m, _, D = chunks.shape
    R, K = gates.shape[1:]
    W = channel_readout(basis, K, str(chunks.device), feature_dtype(chunks.dtype))[: R * K]
    M_flat = M[:K].reshape(K * D, -1)
    gates = gates.unsqueeze(-1)
    y = chunks.new_empty(m, R, M.shape[2])
    group = _chunks_per_group((R, K, D), chunks)
    buffer = W.new_empty(min(group, m), R * K, D)
    for g, inputs in _groups(chunks, x, group, W.dtype):
        features = torch.bmm(W.expand(len(inputs), -1, -1), inputs, out=buffer[: len(inputs)])
        features.view(-1, R, K, D).mul_(gates[g])
        torch.mm(features.view(-1, K * D).to(y.dtype), M_flat, out=y[g].view(-1, M.shape[2]))
    return y


def _unmix_dense(
    basis: Realization, dy: Tensor, chunks: Tensor, x: Tensor, gates: Tensor, M: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `_mix_dense` by chunks (m, C, D) and x (m, N, D), both in the state's dtype, gates and M.

    Args:
        dy: (m, R, E). The rest as there.
    """
    m, C, D = chunks.shape
    R, K = gates.shape[1:]
    W = channel_readout(basis, K, str(chunks.device), feature_dtype(chunks.dtype))[: R * K]
    M_flat = M[:K].reshape(K * D, -1)
    dM = torch.zeros(M.shape, dtype=state_dtype(M.dtype), device=M.device)
    dM_flat = dM[:K].view(K * D, -1)
    dgates = W.new_empty(m, R, K)
    dchunks, dx = torch.empty_like(chunks, dtype=x.dtype), torch.empty_like(x)
    group = _chunks_per_group((R, K, D), chunks)
    buffers = W.new_empty(3, min(group, m), R * K, D)
    for g, inputs in _groups(chunks, x, group, W.dtype):
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


def _sums_by_elements(features: Tensor) -> bool:
    """Whether sums over the K channels (or R steps) of each column pay as elementwise passes, not as small products."""
    K, R = features.shape[-2:]
    return K * R < _SMALL_PRODUCT or not _is_on_cpu(features) or features.dtype == torch.float16


def _mix_diagonal(basis: Realization, chunks: Tensor, x: Tensor, gates: Tensor, M: Tensor) -> Tensor:
    """As `_mix_dense`, with gates (m, R, K, G) and diagonal M (>= K, D); returns (m, R, D)."""
    m, _, D = chunks.shape
    R, K, G = gates.shape[1:]
    W = readout_by_channel(basis, K, str(chunks.device), feature_dtype(chunks.dtype))[..., :R].reshape(-1, K * R)
    coefficients = M[:K].T.contiguous().unsqueeze(1)  # (D, 1, K)
    gates = gates.permute(0, 3, 2, 1).contiguous().unsqueeze(2)  # (m, G, 1, K, R)
    y = chunks.new_empty(m, R, D)
    group = _chunks_per_group((D, K, R), chunks)
    buffer = W.new_empty(min(group, m), D, K * R)
    for g, inputs in _groups(chunks, x, group, W.dtype):
        features = torch.bmm(inputs.mT, W.expand(len(inputs), -1, -1), out=buffer[: len(inputs)])
        gated = features.view(-1, G, D // G, K, R).mul_(gates[g]).view(-1, D, K, R).to(y.dtype)
        if _sums_by_elements(gated):
            y[g] = gated.mul_(coefficients.mT).sum(2).mT
        else:
            y[g] = torch.matmul(coefficients, gated).flatten(1, 2).mT
    return y


def _unmix_diagonal(
    basis: Realization, dy: Tensor, chunks: Tensor, x: Tensor, gates: Tensor, M: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `_mix_diagonal`, as `_unmix_dense` gives them."""
    m, C, D = chunks.shape
    R, K, G = gates.shape[1:]
    W = readout_by_channel(basis, K, str(chunks.device), feature_dtype(chunks.dtype))[..., :R].reshape(-1, K * R)
    coefficients = M[:K].T.contiguous().unsqueeze(2)  # (D, K, 1)
    gates = gates.permute(0, 3, 2, 1).contiguous().unsqueeze(2)
    dcoefficients = torch.zeros(D, 1, K, dtype=state_dtype(M.dtype), device=M.device)
    dgates = W.new_empty(m, G, K, R)
    dchunks, dx = torch.empty_like(chunks, dtype=x.dtype), torch.empty_like(x)
    group = _chunks_per_group((D, K, R), chunks)
    buffers = W.new_empty(3, min(group, m), D, K * R)
    for g, inputs in _groups(chunks, x, group, W.dtype):
        count = len(inputs)
        features, dgated, product = buffers[:, :count]
        torch.bmm(inputs.mT, W.expand(count, -1, -1), out=features)
        dy_t = dy[g].mT.contiguous().view(count, D, 1, R)
        by_column, by_gate = (count, D, K, R), (count, G, D // G, K, R)
        torch.mul(coefficients, dy_t, out=dgated.view(by_column))
        torch.sum(torch.mul(dgated, features, out=product).view(by_gate), 2, out=dgates[g])
        gated = features.view(by_gate).mul_(gates[g]).view(by_column).to(dy.dtype)
        if _sums_by_elements(gated):
            dcoefficients += gated.mul_(dy_t).sum((0, 3), dtype=dcoefficients.dtype).unsqueeze(1)
        else:  # in bf16 products are rounded before they are added: half the time, and an error like their factors'
            dcoefficients += torch.matmul(dy_t, gated.mT).sum(0, dtype=dcoefficients.dtype)
        dgated.view(by_gate).mul_(gates[g])
        dinputs = torch.bmm(W.expand(count, -1, -1), dgated.mT)
        dchunks[g], dx[g] = dinputs[:, :C], dinputs[:, C:]
    dM = torch.zeros(M.shape, dtype=dcoefficients.dtype, device=M.device)
    dM[:K] = dcoefficients[:, 0].T
    return dchunks, dx, dgates.permute(0, 3, 2, 1), dM


def _nested_heads(nested: bool, steps: int, gates: Tensor, M: Tensor) -> list[tuple[slice, slice, int]]:
    """Columns, gate and number of filters of every head that is mixed by itself: nested ones, on a CPU, whose features
    at that many steps fill more than two groups. Of fewer, and on an accelerator, the number of calls is the time."""
    if not nested or M.ndim == 3 or not _is_on_cpu(gates):
        return []
    (K, G), D = gates.shape[2:], M.shape[1]
    if steps * K * D * M.element_size() <= 2 * _GROUP_BYTES_CPU:
        return []
    w = D // G
    return [(slice(j * w, (j + 1) * w), slice(j, j + 1), min(j + 1, K)) for j in range(G)]


def _mix(basis: Realization, chunks: Tensor, x: Tensor, gates: Tensor, M: Tensor, nested: bool) -> Tensor:
    """y of all chunks: `_mix_dense` or `_mix_diagonal`, of nested heads the filters that they have."""
    if not (heads := _nested_heads(nested, gates.shape[:2].numel(), gates, M)):
        return (_mix_diagonal if M.ndim == 2 else _mix_dense)(basis, chunks, x, gates, M)
    y = chunks.new_empty(*gates.shape[:2], M.shape[1])
    for c, j, k in heads:
        y[..., c] = _mix_diagonal(basis, chunks[..., c], x[..., c], gates[:, :, :k, j], M[:k, c])
    return y


def _unmix(
    basis: Realization, dy: Tensor, chunks: Tensor, x: Tensor, gates: Tensor, M: Tensor, nested: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `_mix`, as `_unmix_dense` gives them."""
    if not (heads := _nested_heads(nested, gates.shape[:2].numel(), gates, M)):
        return (_unmix_diagonal if M.ndim == 2 else _unmix_dense)(basis, dy, chunks, x, gates, M)
    dchunks, dx = torch.empty_like(chunks, dtype=x.dtype), torch.empty_like(x)
    dgates, dM = gates.new_zeros(gates.shape), torch.zeros_like(M, dtype=state_dtype(M.dtype))
    for c, j, k in heads:
        dchunks[..., c], dx[..., c], dgates[:, :, :k, j], dM[:k, c] = _unmix_diagonal(
            basis, dy[..., c], chunks[..., c], x[..., c], gates[:, :, :k, j], M[:k, c]
        )
    return dchunks, dx, dgates, dM


# ---------------------------------------------------------------------------------------------------------------------
# The opaque operators.


def _pad_length(t: Tensor, length: int) -> Tensor:
    """Zeros appended to dimension 1; the tensor itself (F.pad would copy) where nothing is missing."""
    return t if t.shape[1] == length else F.pad(t, (0, 0) * (t.ndim - 2) + (0, length - t.shape[1]))


def _cut(u: Tensor, gates: Tensor, C: int) -> tuple[Tensor, Tensor]:
    """(B, n, C, D) chunks of u, and gates (B n, R, K[, G]): a sequence shorter than a chunk has R = L steps in it."""
    B, L, D = u.shape
    n, R = -(-L // C), min(L, C)
    chunk_gates = _pad_length(gates, n * R).reshape(B * n, R, *gates.shape[2:])
    return _pad_length(u, n * C).view(B, n, C, D), chunk_gates


def _last_chunk(lengths: Tensor | None, L: int, C: int, readout: Tensor) -> tuple[Any, Tensor]:
    """Where each row's last step lies: row and chunk, and the (N, C + N) or (B, N, C + N) part of readout for it."""
    if lengths is None:
        return (slice(None), (L - 1) // C), readout[(L - 1) % C]
    return (torch.arange(len(lengths), device=readout.device), (lengths - 1) // C), readout[(lengths - 1) % C]


# Each copy of this module registers its own operators: the package and remote code may live in one process.
_NAMESPACE = "essm_" + hashlib.sha1(__name__.encode()).hexdigest()[:8]


@torch.library.custom_op(f"{_NAMESPACE}::chunked", mutates_args=())
def _chunked_forward(
    u: Tensor,
    gates: Tensor,
    M: Tensor,
    x0: Tensor | None,
    lengths: Tensor | None,
    H: int,
    N: int,
    C: int,
    nested: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y (B, L, E), the final state (B, N, D) and, for the backward pass, the state before every chunk."""
    B, L, _ = u.shape
    basis = Realization(H, N, C)
    readout, powers = chunk_constants(basis, str(u.device), state_dtype(u.dtype))
    chunks, chunk_gates = _cut(u, gates, C)
    x = _states_before_chunks(chunks, x0, readout, powers)
    y = _mix(basis, chunks.flatten(0, 1), x.flatten(0, 1), chunk_gates, M, nested)
    y = y.view(B, chunks.shape[1] * y.shape[1], y.shape[2])[:, :L].contiguous()
    # The state after each row's last step is one more readout of its last chunk.
    last, read = _last_chunk(lengths, L, C, readout)
    state = state_matmul(read, torch.cat([chunks[last].to(x.dtype), x[last]], 1))
    return y, state, x


@_chunked_forward.register_fake
def _(u, gates, M, x0, lengths, H, N, C, nested):
    B, L, D = u.shape
    dtype = state_dtype(u.dtype)
    return (
        u.new_empty(B, L, M.shape[-1]),
        u.new_empty(B, N, D, dtype=dtype),
        u.new_empty(B, (L + C - 1) // C, N, D, dtype=dtype),
    )


@torch.library.custom_op(f"{_NAMESPACE}::chunked_backward", mutates_args=())
def _chunked_backward(
    dy: Tensor,
    dstate: Tensor,
    u: Tensor,
    gates: Tensor,
    M: Tensor,
    x: Tensor,
    lengths: Tensor | None,
    H: int,
    N: int,
    C: int,
    nested: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns du, dgates, dM (zero beyond the budget) and dx0; features are made again, group by group."""
    B, L, _ = u.shape
    basis = Realization(H, N, C)
    readout, powers = chunk_constants(basis, str(u.device), state_dtype(u.dtype))
    chunks, chunk_gates = _cut(u, gates, C)
    n, R = chunks.shape[1], chunk_gates.shape[1]
    # 1. Inside the chunks.
    dy = _pad_length(dy, n * R).reshape(B * n, R, dy.shape[2])
    dchunks, dx, dgates, dM = _unmix(basis, dy, chunks.flatten(0, 1), x.flatten(0, 1), chunk_gates, M, nested)
    # 2. The final state reads one chunk of each row.
    dchunks, dx = dchunks.view(chunks.shape), dx.view(x.shape)
    last, read = _last_chunk(lengths, L, C, readout)
    dlast = state_matmul(read.mT, dstate)
    dchunks[last] += dlast[:, :C]
    dx[last] += dlast[:, C:]
    # 3. The scan over chunks, backwards.
    dx0 = _scan_gradients(dchunks, dx, readout, powers)
    du = dchunks.flatten(1, 2)[:, :L].to(u.dtype).contiguous()
    dgates = dgates.reshape(B, n * R, *gates.shape[2:])[:, :L].to(gates.dtype).contiguous()
    return du, dgates, dM.to(M.dtype), dx0


@_chunked_backward.register_fake
def _(dy, dstate, u, gates, M, x, lengths, H, N, C, nested):
    return (
        torch.empty_like(u, memory_format=torch.contiguous_format),
        torch.empty_like(gates, memory_format=torch.contiguous_format),
        torch.empty_like(M, memory_format=torch.contiguous_format),
        x.new_empty(x.shape[0], N, x.shape[-1]),
    )


def _no_second_backward(ctx, *grads):
    raise NotImplementedError(
        "the chunked operator is differentiable once in reverse mode; for second derivatives load the "
        'model with spectral_algorithm="step" or "fft", or use torch.func (hessian, jvp), which differentiates plain '
        "tensor operations"
    )


_chunked_backward.register_autograd(_no_second_backward)


def _save_for_backward(ctx, inputs, output):
    u, gates, M, x0, lengths, *ctx.spec = inputs
    ctx.has_x0 = x0 is not None
    ctx.save_for_backward(u, gates, M, output[2], lengths)
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dstate, _dx):
    u, gates, M, x, lengths = ctx.saved_tensors
    if dy is None:
        dy = u.new_zeros(*u.shape[:2], M.shape[-1])
    if dstate is None:
        dstate = x.new_zeros(x.shape[0], x.shape[2], x.shape[3])
    with torch.autocast(u.device.type, enabled=False):  # or a backward pass inside an autocast block scans in bf16
        du, dgates, dM, dx0 = _chunked_backward(dy.contiguous(), dstate, u, gates, M, x, lengths, *ctx.spec)
    return du, dgates, dM, dx0 if ctx.has_x0 else None, None, None, None, None, None


_chunked_forward.register_autograd(_backward, setup_context=_save_for_backward)


# torch.utils.flop_counter, which counts matrix products, cannot look into an operator.


def _scan_products(n: int) -> int:
    return 0 if n < 2 else n // 2 + (n - 1) // 2 + _scan_products(n // 2)


def _count_flops(u: Tensor, gates: Tensor, M: Tensor, N: int, C: int, nested: bool, inside: int) -> int:
    """Of the operator, from shapes; products inside the chunks are made so many times."""
    (B, L, D), K = u.shape, gates.shape[2]
    chunks, steps = -(-L // C), min(L, C)
    heads = _nested_heads(nested, B * chunks * steps, gates, M)
    features = D // len(heads) * sum(k for *_, k in heads) if heads else K * D
    mixing = M.shape[2] if M.ndim == 3 else 0  # by diagonal M_k it is no product
    in_chunks = B * chunks * steps * features * (C + N + mixing)
    between = B * D * N * ((chunks - 1) * C + _scan_products(chunks) * N + C + N)
    return 2 * (inside * in_chunks + between)


flop_registry[_chunked_forward._opoverload._overloadpacket] = (
    lambda u, gates, M, x0, lengths, H, N, C, nested, out_val: _count_flops(u, gates, M, N, C, nested, inside=1)
)
flop_registry[_chunked_backward._opoverload._overloadpacket] = (
    lambda dy, dstate, u, gates, M, x, lengths, H, N, C, nested, out_val: _count_flops(
        u, gates, M, N, C, nested, inside=2
    )
)


# ---------------------------------------------------------------------------------------------------------------------
# Plain tensor operations.


def _chunked_traceable(
    basis: Realization, u: Tensor, gates: Tensor, M: Tensor, x0: Tensor | None, lengths: Tensor | None
):
    """The same in plain tensor operations, for torch.func, forward-mode AD and torch.export.

    In an export no branch, loop or slice depends on L <= H, which may be symbolic.
    """
    B, L, D = u.shape
    H, N, C = basis
    K = gates.shape[2]
    readout, powers = chunk_constants(basis, str(u.device), state_dtype(u.dtype))
    W = channel_readout(basis, K, str(u.device), feature_dtype(u.dtype))
    n = (L - 1) // C + 2  # one more than needed: never 1, which would be a case of its own
    position = torch.arange(n, device=u.device)[:, None] * C + torch.arange(C, device=u.device)
    source = position.clamp(max=L - 1)
    chunks = u[:, source] * (position < L)[..., None]  # (B, n, C, D)
    first = u.new_zeros(B, N, D, dtype=readout.dtype) if x0 is None else x0.to(readout.dtype)
    x = torch.cat([first[:, None], state_matmul(readout[-1, :, :C], chunks.to(readout.dtype))], 1)
    longest = H if torch.compiler.is_exporting() else L
    for j in range((longest // C).bit_length()):
        x = x + state_matmul(powers[j], F.pad(x, (0, 0, 0, 0, 1 << j, 0))[:, : n + 1])
    x = x[:, :n]
    features = torch.matmul(W, torch.cat([chunks.to(W.dtype), x.to(W.dtype)], 2)).view(B, n, C, K, D)
    y = _mix_traceable(features, gates[:, source].to(feature_dtype(u.dtype)), M[:K])  # (B, n C, E)
    t = torch.arange(L, device=u.device)
    last = (torch.full((B,), L, device=u.device) if lengths is None else lengths) - 1
    row = torch.arange(B, device=u.device)
    inputs = torch.cat([chunks[row, last // C].to(x.dtype), x[row, last // C]], 1)
    return y[:, t], state_matmul(readout[last % C], inputs)


def _mix_traceable(features: Tensor, gates: Tensor, M: Tensor) -> Tensor:
    """(B, n, C, K, D) features and (B, n, C, K[, G]) gates by M, (K, D, E) or (K, D): (B, n C, E)."""
    if M.ndim == 3:
        gated = (features * gates[..., None]).to(M.dtype).flatten(3)
        return torch.matmul(gated, M.reshape(1, -1, M.shape[2])).flatten(1, 2)
    gated = (features.unflatten(4, (gates.shape[4], -1)) * gates[..., None]).to(M.dtype).flatten(4)
    return (gated * M).sum(3).flatten(1, 2)
