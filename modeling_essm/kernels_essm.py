# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The chunked operator as Triton kernels; optional, and only where `use_kernels` says so.

Each public function has the signature and the meaning of its torch counterpart, which stays the truth that tests
compare with: `scan_states` and `scan_gradients` of `spectral_chunked`, the others of `spectral_groups`. A scan keeps
the state of 32 columns in registers over all chunks. With dense M_k one kernel makes gated features and the library's
product mixes them; with heads, or diagonal M_k, features never leave the chip.

Letters as in `kernels_triton`.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .kernels_triton import (
    INTERPRETED,
    _dense_backward,
    _dense_forward,
    _diagonal_backward,
    _diagonal_forward,
    _heads_backward,
    _heads_forward,
    _heads_mixing_gradient,
    _scan_backward,
    _scan_forward,
    triton,
)
from .spectral_constants import Realization, padded_readout
from .spectral_groups import unrounded_product

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
    if device.type == "cpu" and not INTERPRETED:
        return False
    off = wanted != "1" or torch.version.hip
    if device.type == "cuda" and (off or torch.cuda.get_device_capability(device) != (9, 0)):
        return False
    if dtype not in (torch.float32, torch.bfloat16) or N > _MOST_STATES or not _STEPS[0] <= C <= _STEPS[1]:
        return False
    if mixing is None:
        return True
    if dtype == torch.float32 and device.type == "cuda":  # these tiles are made to fit an H100 in bf16
        return False
    narrowest = D // G if mixing == (1, 1) else min(mixing)
    return mixing[0] == D or (_HEAD_WIDTHS[0] <= narrowest and max(mixing) <= _HEAD_WIDTHS[1])


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
        dM_flat += unrounded_product(features.view(-1, K * D).T, rows, dM.dtype)
    return dchunks, dx, dgates, dM


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
