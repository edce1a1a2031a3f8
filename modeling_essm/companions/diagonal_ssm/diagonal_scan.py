# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The diagonal recurrence x_t = lam x_{t-1} + v_t, by definition, as a parallel scan and as a convolution.

    x_t = lam^{t+1} x0 + sum_{j<=t} lam^{t-j} v_j                                                    (a convolution)

The parallel scan cuts time into chunks of T steps. Inside a chunk the sum is one product with the Toeplitz matrix of
the powers of lam; from chunk to chunk the last states obey the same recurrence with lam^T, so the scan calls itself:
log_T(L) levels, all of them matrix products, instead of L small steps or log_2(L) passes over the data. A layer with
one recurrence per channel (`siso_*`) never holds the states of all steps: it is a convolution with its impulse
response, or chunk by chunk a Toeplitz matrix of that, with states where chunks end.

Letters: B batch, L steps, n modes, H channels, T steps of a chunk. The shape M of the modes is (n,) or (H, n).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK, SISO_CHUNK = 16, 64  # T of the parallel scans


def naive_scan(lam: Tensor, v: Tensor, x0: Tensor | None = None) -> Tensor:
    """The definition: all states of x_t = lam x_{t-1} + v_t.

    Args:
        lam: M complex eigenvalues. v: (B, L, *M) complex inputs, L >= 1. x0: (B, *M) complex state before them, or None
            for zero.
    Returns:
        (B, L, *M) states; the last of them is [:, -1].
    """
    x = torch.zeros_like(v[:, 0]) if x0 is None else x0
    states = []
    for t in range(v.shape[1]):
        x = lam * x + v[:, t]
        states.append(x)
    return torch.stack(states, 1)


def parallel_scan(lam: Tensor, v: Tensor, x0: Tensor | None = None, chunk: int = CHUNK) -> Tensor:
    """The same by matrix products in chunks of `chunk` >= 2 steps; arguments and result as of `naive_scan`."""
    L, M = v.shape[1], lam.shape
    T = min(chunk, L)
    powers = powers_of(lam.flatten(), T + 1)  # (T + 1, m)
    u = F.pad(v.flatten(2), (0, 0, 0, -L % T)).unflatten(1, (-1, T))  # (B, c, T, m)
    columns = u.permute(3, 2, 0, 1).flatten(2)  # (m, T, B c)
    inside = (toeplitz(powers[:T].T) @ columns).unflatten(2, u.shape[:2]).permute(2, 3, 1, 0)  # (B, c, T, m)
    before = torch.zeros_like(inside[:, :1, 0]) if x0 is None else x0.flatten(1)[:, None]
    if u.shape[1] > 1:
        ends = parallel_scan(powers[T], inside[:, :, -1], None if x0 is None else x0.flatten(1), chunk)
        before = torch.cat([before, ends[:, :-1]], 1)  # (B, c, m): the state when each chunk begins
    elif x0 is None:
        return inside[:, 0].unflatten(2, M)
    return (inside + powers[1:] * before[:, :, None]).flatten(1, 2)[:, :L].unflatten(2, M)


def fft_scan(lam: Tensor, v: Tensor, x0: Tensor | None = None) -> Tensor:
    """The same as a convolution with lam^t, by complex FFTs of length 2 L; arguments and result as of `naive_scan`."""
    L = v.shape[1]
    powers = powers_of(lam, L + 1)
    spectrum = torch.fft.fft(v, 2 * L, dim=1) * torch.fft.fft(powers[:L], 2 * L, dim=0)
    x = torch.fft.ifft(spectrum, dim=1)[:, :L]
    return x if x0 is None else x + powers[1:] * x0[:, None]


def siso_naive(lam: Tensor, B: Tensor, C: Tensor, u: Tensor, x0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The definition for one recurrence per channel: y_t = Re sum_n C_n x_t,n with v_t = B u_t.

    Args:
        lam, B, C: (H, n) complex. u: (B, L, H) real, L >= 1. x0: (B, H, n) complex, or None for zero.
    Returns:
        y (B, L, H) real, and the last state (B, H, n).
    """
    x = naive_scan(lam, B * u[..., None], x0)
    return (C * x).real.sum(-1), x[:, -1]


def siso_parallel(
    lam: Tensor, B: Tensor, C: Tensor, u: Tensor, x0: Tensor | None = None, chunk: int = SISO_CHUNK
) -> tuple[Tensor, Tensor]:
    """The same by real matrix products in chunks of `chunk` >= 2 steps; arguments and result as of `siso_naive`."""
    L = u.shape[1]
    T = min(chunk, L)
    if L % T:  # the remainder, a chunk of its own, begins where the whole chunks end
        y, x = siso_parallel(lam, B, C, u[:, : L - L % T], x0, chunk)
        rest, x = siso_parallel(lam, B, C, u[:, L - L % T :], x, chunk)
        return torch.cat([y, rest], 1), x
    powers = powers_of(lam, T + 1)  # (T + 1, H, n)
    kernel = (powers[:T] * (B * C)).real.sum(-1)  # (T, H): the impulse response
    chunks = u.unflatten(1, (-1, T))  # (B, c, T, H)
    columns = chunks.permute(3, 2, 0, 1).flatten(2)  # (H, T, B c)
    to_end = torch.view_as_real(B * powers[:T].flip(0)).permute(1, 2, 3, 0).flatten(1, 2)  # (H, 2n, T)
    ends = (to_end @ columns).unflatten(2, chunks.shape[:2]).permute(2, 3, 0, 1)  # (B, c, H, 2n)
    x = parallel_scan(powers[T], torch.view_as_complex(ends.unflatten(3, (-1, 2)).contiguous()), x0)
    first = torch.zeros_like(x[:, 0]) if x0 is None else x0
    before = torch.view_as_real(torch.cat([first[:, None], x[:, :-1]], 1)).flatten(3)  # (B, c, H, 2n)
    from_start = torch.view_as_real((C * powers[1:]).conj_physical()).permute(1, 0, 2, 3).flatten(2)  # (H, T, 2n)
    y = toeplitz(kernel.T) @ columns + from_start @ before.permute(2, 3, 0, 1).flatten(2)  # (H, T, B c)
    return y.unflatten(2, chunks.shape[:2]).permute(2, 3, 1, 0).flatten(1, 2), x[:, -1]


def siso_fft(lam: Tensor, B: Tensor, C: Tensor, u: Tensor, x0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same as one long real convolution by FFTs of length 2 L; arguments and result as of `siso_naive`.

    Powers of lam are never formed for all steps: lam^{i m + j} = (lam^m)^i lam^j with i and j below about sqrt(L).
    """
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


SCANS = {"naive": naive_scan, "parallel": parallel_scan, "fft": fft_scan}
SISO_SCANS = {"naive": siso_naive, "parallel": siso_parallel, "fft": siso_fft}


def choose(algorithm: str, length: int, siso: bool) -> str:
    """The name of the algorithm to run; "auto" is the cheapest on a CPU for so many steps.

    A few steps are taken as they are defined. Longer ones of many inputs need the states, which the parallel scan makes
    in about two thirds of the time of complex FFTs; one recurrence per channel needs the outputs alone, which real FFTs
    give two to four times faster than products with a Toeplitz matrix. (Forward and backward, one core, 256 to 4,096
    steps.)

    Raises:
        ValueError: an unknown name.
    """
    if algorithm != "auto" and algorithm not in SCANS:
        raise ValueError(f"algorithm must be one of {('auto', *SCANS)}, got {algorithm!r}")
    if algorithm != "auto":
        return algorithm
    if length <= (2 if siso else 8):
        return "naive"
    return "fft" if siso else "parallel"


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


__all__ = ["SCANS", "SISO_SCANS", "fft_scan", "naive_scan", "parallel_scan", "siso_fft", "siso_naive", "siso_parallel"]
