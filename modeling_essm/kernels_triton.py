# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The Triton kernels that `kernels_essm` launches; a module without any where Triton is absent.

Products have fp32 sums. Operands in bf16 are taken as they are, those in fp32 as three TF32 products (tf32x3), which is
as exact as fp32: one TF32 product would lose the late channels. No sum depends on the order in which programs run.

Letters: m chunks of all rows, n chunks of one, C steps, R those that exist, N states, D width, K budget; h heads of
width d (in) and e (out), G gates a channel, each for D_G = D / G columns. Sizes named _P are those of tiles, which
zeros pad to powers of two. Tiles of features lie transposed, (columns, steps): Hopper's products have at least 64 rows,
of which a short chunk has no use, and the gradient of a feature goes on to the next product without leaving registers.
"""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_SIZES = ["m", "n", "R", "K", "C", "N", "G", "h", "segment", "span", "blocks"]


def _jit(function: Any) -> Any:
    """triton.jit, with one compilation for all values of the sizes that no address depends on."""
    return function if triton is None else triton.jit(function, do_not_specialize=_SIZES)


INTERPRETED = triton is not None and tl.constexpr(triton.knobs.runtime.interpret)


# -- Parts of kernels -------------------------------------------------------------------------------------------------


@_jit
def _dot(a, b, acc):
    """acc + a b in fp32. The interpreter multiplies bf16 wrongly, so there it gets fp32."""
    if INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="tf32x3")


@_jit
def _tile(start, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Addresses of a tile of rows that lie `stride` apart."""
    return start + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :]


@_jit
def _inside(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Which elements of a tile exist."""
    return (tl.arange(0, ROWS)[:, None] < rows) & (tl.arange(0, COLUMNS)[None, :] < columns)


@_jit
def _load(start, stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile, zero beyond `rows` and `columns`."""
    mask = _inside(rows, columns, ROWS, COLUMNS)
    return tl.load(_tile(start, stride, ROWS, COLUMNS), mask=mask, other=0.0)


@_jit
def _store(start, stride, rows, columns, tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    mask = _inside(rows, columns, ROWS, COLUMNS)
    tl.store(_tile(start, stride, ROWS, COLUMNS), tile.to(start.dtype.element_ty), mask=mask)


@_jit
def _weights(W, k, C_P: tl.constexpr, N_P: tl.constexpr):
    """W of channel k for the inputs (C_P, C_P) and for the state (C_P, N_P)."""
    start = W + k * C_P * (C_P + N_P)
    return tl.load(_tile(start, C_P + N_P, C_P, C_P)), tl.load(_tile(start + C_P, C_P + N_P, C_P, N_P))


@_jit
def _inputs(chunks, x, c, d, width, C, N, D, dtype, C_P: tl.constexpr, N_P: tl.constexpr, COLUMNS: tl.constexpr):
    """u (COLUMNS, C_P) and x (COLUMNS, N_P) of chunk c, columns d to d + width."""
    u = _load(chunks + c * C * D + d, D, C, width, C_P, COLUMNS)
    s = _load(x + c * N * D + d, D, N, width, N_P, COLUMNS)
    return tl.trans(u).to(dtype), tl.trans(s).to(dtype)


@_jit
def _features(W_u, W_x, u, x):
    """F = W [u; x], transposed: (COLUMNS, C_P) in fp32."""
    acc = tl.zeros((u.shape[0], W_u.shape[0]), tl.float32)
    return _dot(u, tl.trans(W_u), _dot(x, tl.trans(W_x), acc))


@_jit
def _gate(gates, c, k, gate, R, K, G, C_P: tl.constexpr):
    """Gates of one chunk and channel, (1, C_P) in fp32."""
    step = tl.arange(0, C_P)
    return tl.load(gates + ((c * R + step) * K + k) * G + gate, mask=step < R, other=0.0).to(tl.float32)[None, :]


@_jit
def _store_gradients(
    dchunks, dx, c, d, width, C, N, D, du, ds, C_P: tl.constexpr, N_P: tl.constexpr, COLUMNS: tl.constexpr
):
    _store(dchunks + c * C * D + d, D, C, width, tl.trans(du), C_P, COLUMNS)
    _store(dx + c * N * D + d, D, N, width, tl.trans(ds), N_P, COLUMNS)


# -- Scan over chunks -------------------------------------------------------------------------------------------------


@_jit
def _scan_forward(
    chunks, starts, out, carry, inject, n, segment, C, N, D,
    STORE: tl.constexpr, C_P: tl.constexpr, N_P: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """x_{c+1} = carry x_c + inject u_c over one segment: stores x before each chunk, or only the last one."""
    b, first, d = tl.program_id(0).to(tl.int64), tl.program_id(2) * segment, tl.program_id(1) * COLUMNS
    place = (b * tl.num_programs(2) + tl.program_id(2)) * N * D + d
    A = _load(carry, N, N, N, N_P, N_P)
    V = _load(inject, C, N, C, N_P, C_P)
    x = _load(starts + place, D, N, D - d, N_P, COLUMNS)
    for c in range(first, tl.minimum(first + segment, n)):
        if STORE:
            _store(out + (b * n + c) * N * D + d, D, N, D - d, x, N_P, COLUMNS)
        u = _load(chunks + (b * n + c) * C * D + d, D, C, D - d, C_P, COLUMNS).to(tl.float32)
        x = _dot(A, x, _dot(V, u, tl.zeros((N_P, COLUMNS), tl.float32)))
    if not STORE:
        _store(out + place, D, N, D - d, x, N_P, COLUMNS)


@_jit
def _scan_backward(
    dx, dchunks, starts, out, carry_t, inject_t, n, segment, C, N, D,
    ADD: tl.constexpr, C_P: tl.constexpr, N_P: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """g_c = dx_c + carry^T g_{c+1} down one segment, to `out`; with ADD also du_c += inject^T g_{c+1}."""
    b, first, d = tl.program_id(0).to(tl.int64), tl.program_id(2) * segment, tl.program_id(1) * COLUMNS
    place = (b * tl.num_programs(2) + tl.program_id(2)) * N * D + d
    A = _load(carry_t, N, N, N, N_P, N_P)
    V = _load(inject_t, N, C, N, C_P, N_P)
    g = _load(starts + place, D, N, D - d, N_P, COLUMNS)
    last = tl.minimum(first + segment, n) - 1
    for c in range(0, last + 1 - first):
        chunk = b * n + last - c
        if ADD:
            du = _load(dchunks + chunk * C * D + d, D, C, D - d, C_P, COLUMNS)
            _store(dchunks + chunk * C * D + d, D, C, D - d, _dot(V, g, du), C_P, COLUMNS)
        g = _dot(A, g, _load(dx + chunk * N * D + d, D, N, D - d, N_P, COLUMNS))
    _store(out + place, D, N, D - d, g, N_P, COLUMNS)


# -- Dense M_k --------------------------------------------------------------------------------------------------------


@_jit
def _dense_forward(
    W, chunks, x, gates, features, R, K, C, N, D, C_P: tl.constexpr, N_P: tl.constexpr, COLUMNS: tl.constexpr
):
    """g * F of one chunk and COLUMNS columns, to (R, K, D)."""
    c, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    dtype = features.dtype.element_ty
    u, s = _inputs(chunks, x, c, d, D - d, C, N, D, dtype, C_P, N_P, COLUMNS)
    for k in range(K):
        W_u, W_x = _weights(W, k, C_P, N_P)
        gated = _features(W_u, W_x, u, s) * _gate(gates, c, k, 0, R, K, 1, C_P)
        _store(features + (c * R * K + k) * D + d, K * D, R, D - d, tl.trans(gated.to(dtype)), C_P, COLUMNS)


@_jit
def _dense_backward(
    W, chunks, x, gates, features, dchunks, dx, dgates, R, K, C, N, D,
    C_P: tl.constexpr, N_P: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """From dy M_k^T in `features`: gradients of u, x, and of gates by these columns; leaves g * F there."""
    c, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    dtype = features.dtype.element_ty
    u, s = _inputs(chunks, x, c, d, D - d, C, N, D, dtype, C_P, N_P, COLUMNS)
    du, ds = tl.zeros((COLUMNS, C_P), tl.float32), tl.zeros((COLUMNS, N_P), tl.float32)
    partial = dgates + (tl.program_id(1) * tl.num_programs(0) + c) * R * K
    step = tl.arange(0, C_P)
    for k in range(K):
        W_u, W_x = _weights(W, k, C_P, N_P)
        g = _gate(gates, c, k, 0, R, K, 1, C_P)
        place = features + (c * R * K + k) * D + d
        dgated = tl.trans(_load(place, K * D, R, D - d, C_P, COLUMNS)).to(tl.float32)
        feature = _features(W_u, W_x, u, s)
        _store(place, K * D, R, D - d, tl.trans((feature * g).to(dtype)), C_P, COLUMNS)
        tl.store(partial + step * K + k, tl.sum(feature * dgated, 0), mask=step < R)
        dfeature = (dgated * g).to(dtype)
        du, ds = _dot(dfeature, W_u, du), _dot(dfeature, W_x, ds)
    _store_gradients(dchunks, dx, c, d, D - d, C, N, D, du, ds, C_P, N_P, COLUMNS)


# -- Heads ------------------------------------------------------------------------------------------------------------


@_jit
def _heads_forward(
    W, chunks, x, gates, M, y, m, R, K, C, N, D, G, h, d, e,
    C_P: tl.constexpr, N_P: tl.constexpr, D_P: tl.constexpr, E_P: tl.constexpr,
):  # fmt: skip
    """y of one head in two chunks, which share what is read of W and M; of an odd number the last is done twice."""
    a, head = tl.program_id(0).to(tl.int64) * 2, tl.program_id(1)
    b = tl.minimum(a + 1, m - 1)
    gate, E = head // (h // G), h * e
    dtype = y.dtype.element_ty
    u_a, s_a = _inputs(chunks, x, a, head * d, d, C, N, D, dtype, C_P, N_P, D_P)
    u_b, s_b = _inputs(chunks, x, b, head * d, d, C, N, D, dtype, C_P, N_P, D_P)
    y_a, y_b = tl.zeros((E_P, C_P), tl.float32), tl.zeros((E_P, C_P), tl.float32)
    for k in range(K):
        W_u, W_x = _weights(W, k, C_P, N_P)
        M_k = tl.trans(_load(M + (k * h + head) * d * e, e, d, e, D_P, E_P))
        gated_a = _features(W_u, W_x, u_a, s_a) * _gate(gates, a, k, gate, R, K, G, C_P)
        y_a = _dot(M_k, gated_a.to(dtype), y_a)
        gated_b = _features(W_u, W_x, u_b, s_b) * _gate(gates, b, k, gate, R, K, G, C_P)
        y_b = _dot(M_k, gated_b.to(dtype), y_b)
    _store(y + a * R * E + head * e, E, R, e, tl.trans(y_a), C_P, E_P)
    _store(y + b * R * E + head * e, E, R, e, tl.trans(y_b), C_P, E_P)


@_jit
def _heads_backward(
    W, chunks, x, gates, M, dy, dchunks, dx, dgates, R, K, C, N, D, G, h, d, e,
    C_P: tl.constexpr, N_P: tl.constexpr, D_P: tl.constexpr, E_P: tl.constexpr,
):  # fmt: skip
    """Gradients of u and x of one head in one chunk, and of gates by this head."""
    c, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    gate, E = head // (h // G), h * e
    dtype = dy.dtype.element_ty
    u, s = _inputs(chunks, x, c, head * d, d, C, N, D, dtype, C_P, N_P, D_P)
    dy_c = tl.trans(_load(dy + c * R * E + head * e, E, R, e, C_P, E_P))
    du, ds = tl.zeros((D_P, C_P), tl.float32), tl.zeros((D_P, N_P), tl.float32)
    partial = dgates + (head * tl.num_programs(0) + c) * R * K
    step = tl.arange(0, C_P)
    for k in range(K):
        W_u, W_x = _weights(W, k, C_P, N_P)
        M_k = _load(M + (k * h + head) * d * e, e, d, e, D_P, E_P)
        dgated = _dot(M_k, dy_c, tl.zeros((D_P, C_P), tl.float32))
        tl.store(partial + step * K + k, tl.sum(_features(W_u, W_x, u, s) * dgated, 0), mask=step < R)
        dfeature = (dgated * _gate(gates, c, k, gate, R, K, G, C_P)).to(dtype)
        du, ds = _dot(dfeature, W_u, du), _dot(dfeature, W_x, ds)
    _store_gradients(dchunks, dx, c, head * d, d, C, N, D, du, ds, C_P, N_P, D_P)


@_jit
def _heads_mixing_gradient(
    W, chunks, x, gates, dy, dM, m, span, R, K, C, N, D, G, h, d, e,
    C_P: tl.constexpr, N_P: tl.constexpr, D_P: tl.constexpr, E_P: tl.constexpr,
):  # fmt: skip
    """The gradient of M_k of one head by `span` chunks."""
    head, k, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    gate, E = head // (h // G), h * e
    dtype = dy.dtype.element_ty
    W_u, W_x = _weights(W, k, C_P, N_P)
    acc = tl.zeros((D_P, E_P), tl.float32)
    for i in range(part * span, tl.minimum(part * span + span, m)):
        c = tl.cast(i, tl.int64)
        u, s = _inputs(chunks, x, c, head * d, d, C, N, D, dtype, C_P, N_P, D_P)
        dy_c = _load(dy + c * R * E + head * e, E, R, e, C_P, E_P)
        gated = _features(W_u, W_x, u, s) * _gate(gates, c, k, gate, R, K, G, C_P)
        acc = _dot(gated.to(dtype), dy_c, acc)
    _store(dM + ((part * K + k) * h + head) * d * e, e, d, e, acc, D_P, E_P)


# -- Diagonal M_k -----------------------------------------------------------------------------------------------------


@_jit
def _diagonal_forward(
    W, chunks, x, gates, M, y, blocks, R, K, C, N, D, G, D_G,
    C_P: tl.constexpr, N_P: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """y of one chunk and COLUMNS columns of one gate, whose columns make `blocks` of those."""
    c, gate, block = tl.program_id(0).to(tl.int64), tl.program_id(1) // blocks, tl.program_id(1) % blocks
    d, width = gate * D_G + block * COLUMNS, D_G - block * COLUMNS
    u, s = _inputs(chunks, x, c, d, width, C, N, D, y.dtype.element_ty, C_P, N_P, COLUMNS)
    acc, column = tl.zeros((COLUMNS, C_P), tl.float32), tl.arange(0, COLUMNS)
    for k in range(K):
        W_u, W_x = _weights(W, k, C_P, N_P)
        M_k = tl.load(M + k * D + d + column, mask=column < width, other=0.0).to(tl.float32)[:, None]
        acc += _features(W_u, W_x, u, s) * _gate(gates, c, k, gate, R, K, G, C_P) * M_k
    _store(y + c * R * D + d, D, R, width, tl.trans(acc), C_P, COLUMNS)


@_jit
def _diagonal_backward(
    W, chunks, x, gates, M, dy, dchunks, dx, dgates, dM, blocks, R, K, C, N, D, G, D_G,
    C_P: tl.constexpr, N_P: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of u and x of one chunk and those columns, of gates by these columns, of M_k by this chunk."""
    c, gate, block = tl.program_id(0).to(tl.int64), tl.program_id(1) // blocks, tl.program_id(1) % blocks
    d, width = gate * D_G + block * COLUMNS, D_G - block * COLUMNS
    dtype = dy.dtype.element_ty
    u, s = _inputs(chunks, x, c, d, width, C, N, D, dtype, C_P, N_P, COLUMNS)
    dy_c = tl.trans(_load(dy + c * R * D + d, D, R, width, C_P, COLUMNS)).to(tl.float32)
    du, ds = tl.zeros((COLUMNS, C_P), tl.float32), tl.zeros((COLUMNS, N_P), tl.float32)
    partial = dgates + (tl.program_id(1) * tl.num_programs(0) + c) * R * K
    step, column = tl.arange(0, C_P), tl.arange(0, COLUMNS)
    for k in range(K):
        W_u, W_x = _weights(W, k, C_P, N_P)
        M_k = tl.load(M + k * D + d + column, mask=column < width, other=0.0).to(tl.float32)[:, None]
        g = _gate(gates, c, k, gate, R, K, G, C_P)
        feature_dy = _features(W_u, W_x, u, s) * dy_c
        tl.store(partial + step * K + k, tl.sum(feature_dy * M_k, 0), mask=step < R)
        tl.store(dM + (c * K + k) * D + d + column, tl.sum(feature_dy * g, 1), mask=column < width)
        dfeature = (dy_c * g * M_k).to(dtype)
        du, ds = _dot(dfeature, W_u, du), _dot(dfeature, W_x, ds)
    _store_gradients(dchunks, dx, c, d, width, C, N, D, du, ds, C_P, N_P, COLUMNS)
