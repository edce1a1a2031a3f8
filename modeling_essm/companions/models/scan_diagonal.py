# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The diagonal recurrence x_t = lam x_{t-1} + v_t, by definition, as a parallel scan and as a convolution.

The parallel scan cuts time into chunks of T steps. Inside a chunk the sum is one product with the Toeplitz matrix of
the powers of lam; from chunk to chunk the last states obey the same recurrence with lam^T, so the scan calls itself:
log_T(L) levels of matrix products. A layer with one recurrence per channel never holds the states of all steps: it is a
convolution with its impulse response.
Letters: B batch, L steps, n modes, H channels, T steps of a chunk. The shape M of the modes is (n,) or (H, n).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 16  # T of the parallel scan


def naive_scan(lam: Tensor, v: Tensor, x0: Tensor | None = None) -> Tensor:
    """The definition: all states (B, L, *M) of x_t = lam x_{t-1} + v_t.

    Args:
        lam: M complex eigenvalues. v: (B, L, *M) complex inputs, L >= 1. x0: (B, *M) state before them, None for zero.
    """
    x = torch.zeros_like(v[:, 0]) if x0 is None else x0
    states = []
    for t in range(v.shape[1]):
        x = lam * x + v[:, t]
        states.append(x)
    return torch.stack(states, 1)


def parallel_scan(lam: Tensor, v: Tensor, x0: Tensor | None = None) -> Tensor:
    """The same for M = (n,), by matrix products in chunks; arguments and result as of `naive_scan`."""
    L = v.shape[1]
    T = min(CHUNK, L)
    powers = powers_of(lam, T + 1)  # (T + 1, n)
    u = F.pad(v, (0, 0, 0, -L % T)).unflatten(1, (-1, T))  # (B, c, T, n)
    columns = u.permute(3, 2, 0, 1).flatten(2)  # (n, T, B c)
    inside = (toeplitz(powers[:T].T) @ columns).unflatten(2, u.shape[:2]).permute(2, 3, 1, 0)  # (B, c, T, n)
    before = torch.zeros_like(inside[:, :1, 0]) if x0 is None else x0[:, None]
    if u.shape[1] > 1:
        ends = parallel_scan(powers[T], inside[:, :, -1], x0)
        before = torch.cat([before, ends[:, :-1]], 1)  # (B, c, n): the state when each chunk begins
    elif x0 is None:
        return inside[:, 0]
    return (inside + powers[1:] * before[:, :, None]).flatten(1, 2)[:, :L]


def naive_of_channels(lam: Tensor, B: Tensor, C: Tensor, u: Tensor, x0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The definition for one recurrence per channel: y_t = Re sum_n C_n x_t,n with v_t = B u_t.

    Args:
        lam, B, C: (H, n) complex. u: (B, L, H) real, L >= 1. x0: (B, H, n) complex, or None for zero.
    Returns:
        y (B, L, H) real, and the last state (B, H, n).
    """
    x = naive_scan(lam, B * u[..., None], x0)
    return (C * x).real.sum(-1), x[:, -1]


def fft_of_channels(lam: Tensor, B: Tensor, C: Tensor, u: Tensor, x0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same as one long real convolution by FFTs of length 2 L; arguments and result as of `naive_of_channels`.

    Powers of lam are never formed for all steps: lam^{i m + j} = (lam^m)^i lam^j with i and j below about sqrt(L).
    """
    if not len(u):  # FFTs take no empty batch
        y, last = fft_of_channels(lam, B, C, F.pad(u, (0, 0, 0, 0, 0, 1)))
        return y[:0], last[:0]
    L = u.shape[1]
    m = int((L - 1) ** 0.5) + 1
    fine = powers_of(lam, m + 1)  # (m + 1, H, n)
    coarse = powers_of(fine[m], -(-L // m))  # (I, H, n)
    fine = fine[:m]
    kernel = torch.einsum("ihn,hn,jhn->hij", coarse, B * C, fine).real.flatten(1)[:, :L]
    x = u.mT  # (B, H, L)
    y = torch.fft.irfft(torch.fft.rfft(x, 2 * L) * torch.fft.rfft(kernel, 2 * L), 2 * L)[..., :L]
    backwards = F.pad(x.flip(-1), (0, len(coarse) * m - L)).unflatten(-1, (-1, m))  # (B, H, i, j) of lag i m + j
    sums = torch.einsum("jhnr,bhij->bhinr", torch.view_as_real(fine), backwards)
    last = torch.einsum("ihn,bhin->bhn", coarse, torch.view_as_complex(sums.contiguous())) * B
    if x0 is not None:
        y = y + torch.einsum("ihn,bhn,jhn->bhij", coarse, C * lam * x0, fine).real.flatten(2)[..., :L]
        last = last + coarse[(L - 1) // m] * fine[(L - 1) % m] * lam * x0
    return y.mT, last


def powers_of(lam: Tensor, count: int) -> Tensor:
    """(count, *M): lam^0 to lam^{count - 1}, by doubling; also of zeros, with gradients."""
    powers = torch.ones_like(lam)[None]
    while len(powers) < count:
        powers = torch.cat([powers, powers * lam])
        lam = lam * lam
    return powers[:count]


def power_of_rows(lam: Tensor, exponents: Tensor) -> Tensor:
    """(B, *M): lam^e for the exponent e >= 0 of each row, exponents (B,) int64, by repeated squaring."""
    result = torch.ones_like(lam).expand(len(exponents), *lam.shape)
    exponents = exponents.reshape(-1, *(1,) * lam.ndim)
    while bool((exponents > 0).any()):
        result = torch.where(exponents % 2 == 1, result * lam, result)
        exponents, lam = exponents // 2, lam * lam
    return result


def toeplitz(k: Tensor) -> Tensor:
    """(.., T) -> (.., T, T): the lower triangular matrix with k_{i-j} at (i, j)."""
    T = k.shape[-1]
    return F.pad(k, (T - 1, 0)).unfold(-1, T, 1).flip(-1)
