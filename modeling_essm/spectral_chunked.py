# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""(R) unrolled over chunks of C steps, so that everything is a matrix product; the default algorithm.

The state before every chunk comes from a scan over chunks, x_{c+1} = carry x_c + inject u_c, as a tree: n products in
log2(n) levels. The work inside the chunks is that of `spectral_groups`, or of `spectral_folded` on an accelerator. One
opaque operator forward and one backward, so that torch.compile neither unrolls the loop over groups nor stores
features; torch.export, torch.func and forward-mode AD get plain tensor operations instead. Shapes as in
`SpectralOperator.__call__`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .spectral_constants import Realization, channel_readout, chunk_constants, feature_dtype, state_dtype, state_matmul
from .spectral_folded import mix_dense_folded, unmix_dense_folded
from .spectral_groups import mix_dense, mix_heads, unmix_dense, unmix_heads
from .tracing import is_transformed


def chunked(basis: Realization, u: Tensor, gates: Tensor, M: Tensor, x0: Tensor | None, lengths: Tensor | None):
    """Outputs and final state, see the module."""
    if torch.compiler.is_exporting() or is_transformed(u, gates, M, x0):  # the opaque one would answer with zeros
        return _chunked_traceable(basis, u, gates, M, x0, lengths)
    if M.ndim == 4 and M.shape[1] == 1:  # the products of dense M_k copy none of it: twice as fast
        M, gates = M[:, 0], gates.flatten(2)
    elif M.ndim == 4 and gates.ndim == 3:
        gates = gates[..., None]
    y, state, _ = _chunked_forward(u, gates, M, x0, lengths, *basis)
    return y, state


def _scan(v: Tensor, powers: Tensor) -> None:
    """In place, s_i = carry s_{i-1} + v_i for all i: pairs become one step of carry^2, and so on up.

    Args:
        v: (B, n, N, D). powers: (J, N, N), carry^(2^j).
    """
    if v.shape[1] < 2:
        return
    odd = v[:, 1::2]
    odd += state_matmul(powers[0], v[:, : 2 * odd.shape[1] : 2])
    _scan(odd, powers[1:])
    even = v[:, 2::2]
    if even.shape[1]:
        even += state_matmul(powers[0], odd[:, : even.shape[1]])


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
    dx = dx.flip(1)
    _scan(dx, powers.mT)
    dx = dx.flip(1)
    if dx.shape[1] > 1:
        dchunks[:, :-1] += state_matmul(readout[-1, :, : dchunks.shape[2]].T, dx[:, 1:])
    return dx[:, 0].clone()


def _last_chunk(lengths: Tensor | None, L: int, C: int, readout: Tensor) -> tuple[Any, Tensor]:
    """Where each row's last step lies: row and chunk, and the (N, C + N) or (B, N, C + N) part of readout for it."""
    if lengths is None:
        return (slice(None), (L - 1) // C), readout[(L - 1) % C]
    return (torch.arange(len(lengths), device=readout.device), (lengths - 1) // C), readout[(lengths - 1) % C]


def _functions(basis: Realization, u: Tensor, gates: Tensor, M: Tensor) -> tuple[Callable, ...]:
    """Scan, its gradients, mixing and its gradients: of torch, or kernels where there are any for that shape."""
    scan: tuple[Callable, ...] = _states_before_chunks, _scan_gradients
    mix = _inside_chunks(M)
    if u.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":  # elsewhere Triton is not even imported
        from .kernels_essm import DENSE, HEADS, SCAN, use_kernels

        shape = u.device, u.dtype, basis.N, basis.C, u.shape[2], gates.shape[3] if gates.ndim == 4 else 1
        if use_kernels(*shape):
            scan = tuple(partial(function, combine=_scan) for function in SCAN)
        if use_kernels(*shape, mixing=(M.shape[-2], M.shape[-1])):
            mix = HEADS if M.ndim == 4 else DENSE
    return *scan, *mix


def _pad_length(t: Tensor, length: int) -> Tensor:
    """Zeros appended to dimension 1; the tensor itself (F.pad would copy) where nothing is missing."""
    return t if t.shape[1] == length else F.pad(t, (0, 0) * (t.ndim - 2) + (0, length - t.shape[1]))


def _cut(u: Tensor, gates: Tensor, C: int) -> tuple[Tensor, Tensor]:
    """(B, n, C, D) chunks of u, and gates (B n, R, K[, G]): a sequence shorter than a chunk has R = L steps in it."""
    B, L, D = u.shape
    n, R = -(-L // C), min(L, C)
    chunk_gates = _pad_length(gates, n * R).reshape(B * n, R, *gates.shape[2:])
    return _pad_length(u, n * C).view(B, n, C, D), chunk_gates


def _inside_chunks(M: Tensor) -> tuple[Callable, Callable]:
    """The torch functions that compute y of all chunks with these weights where they lie, and the gradients."""
    if M.ndim == 4:
        return mix_heads, unmix_heads
    return (mix_dense, unmix_dense) if M.device.type == "cpu" else (mix_dense_folded, unmix_dense_folded)


# Each copy of this module registers its own operators: the package and remote code may live in one process.
_NAMESPACE = "essm_" + hashlib.sha1(__name__.encode()).hexdigest()[:8]


@torch.library.custom_op(f"{_NAMESPACE}::chunked", mutates_args=())
def _chunked_forward(
    u: Tensor, gates: Tensor, M: Tensor, x0: Tensor | None, lengths: Tensor | None, H: int, N: int, C: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y (B, L, E), the final state (B, N, D) and, for the backward pass, the state before every chunk."""
    B, L, _ = u.shape
    basis = Realization(H, N, C)
    readout, powers = chunk_constants(basis, u)
    chunks, chunk_gates = _cut(u, gates, C)
    scan, _, mix, _ = _functions(basis, u, gates, M)
    x = scan(chunks, x0, readout, powers)
    y = mix(basis, chunks.flatten(0, 1), x.flatten(0, 1), chunk_gates, M)
    y = y.view(B, chunks.shape[1] * y.shape[1], y.shape[2])[:, :L].contiguous()
    # The state after each row's last step is one more readout of its last chunk.
    last, read = _last_chunk(lengths, L, C, readout)
    state = state_matmul(read, torch.cat([chunks[last].to(x.dtype), x[last]], 1))
    return y, state, x


@_chunked_forward.register_fake
def _(u, gates, M, x0, lengths, H, N, C):
    B, L, D = u.shape
    dtype = state_dtype(u.dtype)
    return (
        u.new_empty(B, L, M.shape[-1] if M.ndim == 3 else M.shape[1] * M.shape[3]),
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns du, dgates, dM (zero beyond the budget) and dx0; features are made again, group by group."""
    B, L, _ = u.shape
    basis = Realization(H, N, C)
    readout, powers = chunk_constants(basis, u)
    chunks, chunk_gates = _cut(u, gates, C)
    n, R = chunks.shape[1], chunk_gates.shape[1]
    # 1. Inside the chunks.
    dy = _pad_length(dy, n * R).reshape(B * n, R, dy.shape[2])
    _, scan_gradients, _, unmix = _functions(basis, u, gates, M)
    dchunks, dx, dgates, dM = unmix(basis, dy, chunks.flatten(0, 1), x.flatten(0, 1), chunk_gates, M)
    # 2. The final state reads one chunk of each row.
    dchunks, dx = dchunks.view(chunks.shape), dx.view(x.shape)
    last, read = _last_chunk(lengths, L, C, readout)
    dlast = state_matmul(read.mT, dstate)
    dchunks[last] += dlast[:, :C]
    dx[last] += dlast[:, C:]
    # 3. The scan over chunks, backwards.
    dx0 = scan_gradients(dchunks, dx, readout, powers)
    du = dchunks.flatten(1, 2)[:, :L].to(u.dtype).contiguous()
    dgates = dgates.reshape(B, n * R, *gates.shape[2:])[:, :L].to(gates.dtype).contiguous()
    return du, dgates, dM.to(M.dtype), dx0


@_chunked_backward.register_fake
def _(dy, dstate, u, gates, M, x, lengths, H, N, C):
    return (
        torch.empty_like(u, memory_format=torch.contiguous_format),
        torch.empty_like(gates, memory_format=torch.contiguous_format),
        torch.empty_like(M, memory_format=torch.contiguous_format),
        x.new_empty(x.shape[0], N, x.shape[-1]),
    )


def _no_second_backward(ctx, *grads):
    raise NotImplementedError(
        "the chunked operator is differentiable once in reverse mode; for second derivatives set "
        'config.spectral_algorithm = "step" or "fft", or use torch.func (hessian, jvp), which differentiates plain '
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
        dy = u.new_zeros(*u.shape[:2], M.shape[-1] if M.ndim == 3 else M.shape[1] * M.shape[3])
    if dstate is None:
        dstate = x.new_zeros(x.shape[0], x.shape[2], x.shape[3])
    with torch.autocast(u.device.type, enabled=False):  # or a backward pass inside an autocast block scans in bf16
        du, dgates, dM, dx0 = _chunked_backward(dy.contiguous(), dstate, u, gates, M, x, lengths, *ctx.spec)
    return du, dgates, dM, dx0 if ctx.has_x0 else None, None, None, None, None


_chunked_forward.register_autograd(_backward, setup_context=_save_for_backward)


def _chunked_traceable(
    basis: Realization, u: Tensor, gates: Tensor, M: Tensor, x0: Tensor | None, lengths: Tensor | None
):
    """The same in plain tensor operations, for torch.func, forward-mode AD and torch.export.

    In an export no branch, loop or slice depends on L <= H, which may be symbolic.
    """
    B, L, D = u.shape
    H, N, C = basis
    K = gates.shape[2]
    readout, powers = chunk_constants(basis, u)
    W = channel_readout(basis, K, u)
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
    """(B, n, C, K, D) features and (B, n, C, K[, G]) gates by M (K, D, E) or (K, h, d, e): (B, n C, E)."""
    if M.ndim == 3:
        gated = (features * gates[..., None]).to(M.dtype).flatten(3)
        return torch.matmul(gated, M.reshape(1, -1, M.shape[2])).flatten(1, 2)
    _, h, d, e = M.shape
    B, n, C, K = features.shape[:4]
    gates = gates if gates.ndim == 5 else gates[..., None]
    gated = (features.unflatten(4, (gates.shape[4], -1)) * gates[..., None]).to(M.dtype).flatten(4).unflatten(4, (h, d))
    by_head = gated.permute(4, 0, 1, 2, 3, 5).reshape(h, B * n * C, K * d)
    y = torch.bmm(by_head, M.transpose(0, 1).reshape(h, K * d, e))
    return y.view(h, B, n * C, e).permute(1, 2, 0, 3).flatten(2)  # split no further, or an export asks what n divides
