# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The chunked operator as Triton kernels; optional, and only where `use_kernels` says so.

Each public function has the signature and the meaning of its torch counterpart, which stays the truth that tests
compare with: `scan_states` and `scan_gradients` of `spectral_chunked`, the others of `spectral_groups`. A scan keeps
the state of 32 columns in registers over all chunks. With dense M_k one kernel makes gated features and the library's
product mixes them; with heads, or diagonal M_k, features never leave the chip.

Products have fp32 sums. Operands in bf16 are taken as they are, those in fp32 as three TF32 products (tf32x3), which is
as exact as fp32: one TF32 product would lose the late channels. No sum depends on the order in which programs run.

Letters: m chunks of all rows, n chunks of one, C steps, R those that exist, N states, D width, K budget; h heads of
width d (in) and e (out), G gates a channel, each for D_G = D / G columns. Sizes named _P are those of tiles, which
zeros pad to powers of two. Tiles of features lie transposed, (columns, steps): Hopper's products have at least 64 rows,
of which a short chunk has no use, and the gradient of a feature goes on to the next product without leaving registers.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .spectral_constants import Realization, padded_readout

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_SIZES = ["m", "n", "R", "K", "C", "N", "G", "h", "segment", "span", "blocks"]


def _jit(function: Any) -> Any:
    """triton.jit, with one compilation for all values of the sizes that no address depends on."""
    return function if triton is None else triton.jit(function, do_not_specialize=_SIZES)


_INTERPRETED = triton is not None and tl.constexpr(triton.knobs.runtime.interpret)

_MOST_STATES, _STEPS = 64, (16, 64)
_HEAD_WIDTHS = (16, 128)
_SMS = 132  # of an H100
_FEW_CHUNKS = 256  # one program takes them one by one, however few programs there are
_SHORTEST_SEGMENT = 64
_GROUP_OUTPUTS = 4 * _SMS * 128 * 256  # elements of y of a dense group: four waves of the library's product


def use_kernels(
    device: torch.device, dtype: torch.dtype, N: int, C: int, D: int, G: int = 1, mixing: tuple[int, ...] | None = None
) -> bool:
    """Whether the kernels run that shape there: scans if `mixing` is None, else the work inside chunks.

    They run on GPUs of compute capability 9.0, for which their tests compile them, and there only if the environment
    variable ESSM_TRITON is 1, since no GPU has run them yet; and on a CPU under Triton's interpreter
    (TRITON_INTERPRET=1), unless it is 0.

    Args:
        mixing: (d, e) of M_k with heads, (D, E) of dense ones.
    """
    wanted = os.environ.get("ESSM_TRITON")
    if device.type not in ("cuda", "cpu") or triton is None or wanted == "0":
        return False
    if device.type == "cpu":
        if not _INTERPRETED:
            return False
    elif wanted != "1" or torch.version.hip or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    if dtype not in (torch.float32, torch.bfloat16) or N > _MOST_STATES or not _STEPS[0] <= C <= _STEPS[1]:
        return False
    if mixing is None:
        return True
    if dtype == torch.float32 and device.type == "cuda":  # these tiles are made to fit an H100 in bf16
        return False
    if mixing[0] == D:
        return True
    smallest, largest = _HEAD_WIDTHS
    if mixing == (1, 1):
        return smallest <= D // G
    return smallest <= min(mixing) and max(mixing) <= largest


# -- Parts of kernels -------------------------------------------------------------------------------------------------


@_jit
def _dot(a, b, acc):
    """acc + a b in fp32. The interpreter multiplies bf16 wrongly, so there it gets fp32."""
    if _INTERPRETED:
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


# -- Functions of tensors ---------------------------------------------------------------------------------------------


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    device = args[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # not always the current one
        kernel[grid](*args, **options)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _padded(size: int, least: int = 16) -> int:
    """The power of two from `size` on, and a product's least."""
    return max(least, 1 << (size - 1).bit_length())


def _options(basis: Realization) -> dict[str, int]:
    """Those of all kernels but the scans. More stages would spill registers, here as in `_heads_forward`."""
    return {"C_P": _padded(basis.C), "N_P": _padded(basis.N, 32), "num_warps": 8, "num_stages": 2}


def _readout(basis: Realization, K: int, like: Tensor, options: dict[str, int]) -> Tensor:
    return padded_readout(basis, K, like, options["C_P"], options["N_P"])


def _columns(width: int, most: int = 128) -> int:
    """Columns of a tile: at most that many, and fewer where that pads less."""
    return most if width % most == 0 else min(most, max(32, width & -width), _padded(width))


def _segment(programs: int, n: int) -> int:
    """Chunks of a segment of a scan, a power of two: all of them unless few programs would each take many."""
    segment = _padded(n, 1)
    if n > _FEW_CHUNKS:
        while programs * _ceil_div(n, segment) < _SMS and segment > _SHORTEST_SEGMENT:
            segment //= 2
    return segment


def scan_states(chunks: Tensor, x0: Tensor | None, readout: Tensor, powers: Tensor, combine: Any) -> Tensor:
    """The state before every chunk, (B, n, N, D) fp32, as `spectral_chunked._states_before_chunks` makes it.

    Args:
        chunks: (B, n, C, D) bf16 or fp32. x0: (B, N, D) or None. readout: (C, N, C + N). powers: (J, N, N).
        combine: `spectral_chunked._scan`, for the states between segments.
    """
    B, n, C, D = chunks.shape
    N = readout.shape[1]
    blocks = _ceil_div(D, 32)
    segment = _segment(B * blocks, n)
    grid = (B, blocks, _ceil_div(n, segment))
    starts, x = readout.new_zeros(B, grid[2], N, D), readout.new_empty(B, n, N, D)
    if x0 is not None:
        starts[:, 0] = x0
    chunks, inject = chunks.contiguous(), readout[-1, :, :C].contiguous()
    sizes = dict(C_P=_padded(C), N_P=_padded(N, 32), COLUMNS=32, num_warps=4)
    if grid[2] > 1:
        ends = torch.empty_like(starts)
        args = chunks, torch.zeros_like(starts), ends, powers[0], inject, n, segment, C, N, D
        _launch(_scan_forward, grid, *args, STORE=False, **sizes)
        starts[:, 1:] = ends[:, :-1]
        combine(starts, powers[segment.bit_length() - 1 :])
    args = chunks, starts, x, powers[0], inject, n, segment, C, N, D
    _launch(_scan_forward, grid, *args, STORE=True, **sizes)
    return x


def scan_gradients(dchunks: Tensor, dx: Tensor, readout: Tensor, powers: Tensor, combine: Any) -> Tensor:
    """The same backwards, as `spectral_chunked._scan_gradients`: adds to dchunks and returns the gradient of x0.

    Args:
        dchunks: (B, n, C, D) and dx (B, n, N, D), fp32: gradients by what is inside the chunks.
    """
    B, n, C, D = dchunks.shape
    N = dx.shape[2]
    blocks = _ceil_div(D, 32)
    segment = _segment(B * blocks, n)
    grid = (B, blocks, _ceil_div(n, segment))
    starts, ends = dx.new_zeros(B, grid[2], N, D), dx.new_empty(B, grid[2], N, D)
    carry, inject = powers[0].T.contiguous(), readout[-1, :, :C].T.contiguous()
    sizes = dict(C_P=_padded(C), N_P=_padded(N, 32), COLUMNS=32, num_warps=4)
    summed = dchunks.contiguous()
    args = dx.contiguous(), summed, starts, ends, carry, inject, n, segment, C, N, D
    if grid[2] > 1:
        _launch(_scan_backward, grid, *args, ADD=False, **sizes)
        downwards = torch.cat([starts[:, -1:], ends[:, 1:].flip(1)], 1)
        combine(downwards, powers[segment.bit_length() - 1 :].mT)
        starts.copy_(downwards.flip(1))
    _launch(_scan_backward, grid, *args, ADD=True, **sizes)
    if summed is not dchunks:
        dchunks.copy_(summed)
    return ends[:, 0].clone()


def mix_dense(basis: Realization, chunks: Tensor, x: Tensor, gates: Tensor, M: Tensor) -> Tensor:
    """As `spectral_groups.mix_dense`."""
    chunks, x, gates = chunks.contiguous(), x.contiguous(), gates.contiguous()
    m, C, D = chunks.shape
    R, K = gates.shape[1:]
    options = _options(basis) | {"COLUMNS": _columns(D)}
    W, M_flat = _readout(basis, K, chunks, options), M[:K].reshape(K * D, -1)
    y = chunks.new_empty(m, R, M.shape[2])
    group = max(1, _GROUP_OUTPUTS // (R * max(D, M.shape[2])))
    buffer = chunks.new_empty(min(group, m), R, K * D)
    for a in range(0, m, group):
        g = slice(a, a + group)
        features = buffer[: len(y[g])]
        grid = len(features), _ceil_div(D, options["COLUMNS"])
        _launch(_dense_forward, grid, W, chunks[g], x[g], gates[g], features, R, K, C, basis.N, D, **options)
        torch.mm(features.view(-1, K * D), M_flat, out=y[g].view(-1, M.shape[2]))
    return y


def unmix_dense(
    basis: Realization, dy: Tensor, chunks: Tensor, x: Tensor, gates: Tensor, M: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `spectral_groups.unmix_dense`."""
    dy, chunks, x, gates = dy.contiguous(), chunks.contiguous(), x.contiguous(), gates.contiguous()
    m, C, D = chunks.shape
    R, K = gates.shape[1:]
    options = _options(basis) | {"COLUMNS": _columns(D)}
    W, M_flat = _readout(basis, K, chunks, options), M[:K].reshape(K * D, -1)
    dM = torch.zeros(M.shape, dtype=torch.float32, device=M.device)
    dM_flat = dM[:K].view(K * D, -1)
    dchunks, dx, dgates = x.new_empty(chunks.shape), x.new_empty(x.shape), x.new_empty(m, R, K)
    group = max(1, _GROUP_OUTPUTS // (R * max(D, M.shape[2])))
    buffer = chunks.new_empty(min(group, m), R, K * D)
    for a in range(0, m, group):
        g = slice(a, a + group)
        rows = dy[g].view(-1, dy.shape[2])
        features = buffer[: len(dy[g])]
        torch.mm(rows, M_flat.T, out=features.view(-1, K * D))
        grid = len(features), _ceil_div(D, options["COLUMNS"])
        by_block = x.new_empty(grid[1], grid[0], R, K)
        tensors = W, chunks[g], x[g], gates[g], features, dchunks[g], dx[g], by_block
        _launch(_dense_backward, grid, *tensors, R, K, C, basis.N, D, **options)
        torch.sum(by_block, 0, out=dgates[g])
        _add_product(dM_flat, features.view(-1, K * D).T, rows)
    return dchunks, dx, dgates, dM


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, summed in fp32."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        total += torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a.float(), b.float())


def mix_heads(basis: Realization, chunks: Tensor, x: Tensor, gates: Tensor, M: Tensor) -> Tensor:
    """As `spectral_groups.mix_heads`."""
    chunks, x, gates = chunks.contiguous(), x.to(M.dtype).contiguous(), gates.contiguous()
    m, C, D = chunks.shape
    R, K, G = gates.shape[1:]
    h, d, e = M.shape[1:]
    options, y = _options(basis), chunks.new_empty(m, R, h * e)
    tensors = _readout(basis, K, chunks, options), chunks, x, gates, M[:K].contiguous(), y
    if d == e == 1:
        options |= {"COLUMNS": _columns(D // G, min(128, 4096 // options["C_P"]))}
        blocks = _ceil_div(D // G, options["COLUMNS"])
        _launch(_diagonal_forward, (m, G * blocks), *tensors, blocks, R, K, C, basis.N, D, G, D // G, **options)
    else:
        options |= {"D_P": _padded(d), "E_P": _padded(e), "num_stages": 2 if max(d, e) <= 64 else 1}  # registers
        _launch(_heads_forward, (_ceil_div(m, 2), h), *tensors, m, R, K, C, basis.N, D, G, h, d, e, **options)
    return y


def unmix_heads(
    basis: Realization, dy: Tensor, chunks: Tensor, x: Tensor, gates: Tensor, M: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `spectral_groups.unmix_heads`."""
    dchunks, dx = x.new_empty(chunks.shape), x.new_empty(x.shape)
    dM = torch.zeros(M.shape, dtype=torch.float32, device=M.device)
    dy, chunks, x, gates = dy.contiguous(), chunks.contiguous(), x.to(M.dtype).contiguous(), gates.contiguous()
    m, C, D = chunks.shape
    R, K, G = gates.shape[1:]
    h, d, e = M.shape[1:]
    options = _options(basis)
    inputs = _readout(basis, K, chunks, options), chunks, x, gates
    if d == e == 1:
        options |= {"COLUMNS": _columns(D // G, min(128, 4096 // options["C_P"]))}
        blocks = _ceil_div(D // G, options["COLUMNS"])
        dgates, parts = dx.new_empty(G, blocks, m, R, K), dx.new_empty(m, K, h, d, e)
        tensors = *inputs, M[:K].contiguous(), dy, dchunks, dx, dgates
        _launch(_diagonal_backward, (m, G * blocks), *tensors, parts, blocks, R, K, C, basis.N, D, G, D // G, **options)
    else:
        options |= {"D_P": _padded(d), "E_P": _padded(e)}
        span = _ceil_div(m, _ceil_div(2 * _SMS, h * K))
        dgates, parts = dx.new_empty(G, h // G, m, R, K), dx.new_empty(_ceil_div(m, span), K, h, d, e)
        tensors, sizes = (*inputs, M[:K].contiguous(), dy, dchunks, dx, dgates), (R, K, C, basis.N, D, G, h, d, e)
        _launch(_heads_backward, (m, h), *tensors, *sizes, **options)
        _launch(_heads_mixing_gradient, (h, K, len(parts)), *inputs, dy, parts, m, span, *sizes, **options)
    torch.sum(parts, 0, out=dM[:K])
    return dchunks, dx, dgates.sum(1).permute(1, 2, 3, 0), dM


SCAN, DENSE, HEADS = (scan_states, scan_gradients), (mix_dense, unmix_dense), (mix_heads, unmix_heads)
