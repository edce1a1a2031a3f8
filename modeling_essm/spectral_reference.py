# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Eq. (7) as convolution with the exact filters: the definition, in fp64, and the paper's FFT algorithm.

Shapes as in `SpectralOperator.__call__`; slow and memory-hungry, to compare with.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .spectral_basis import spectral_basis
from .spectral_constants import Realization, state_dtype


def by_heads(gates: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    """gates (B, L, K, h) and M (K, h, d, e), whatever form they came in: dense M_k are one head."""
    if M.ndim == 3:
        M = M[:, None]
    if gates.ndim == 3:
        gates = gates[..., None]
    return gates.repeat_interleave(M.shape[1] // gates.shape[3], 3), M


def naive(basis: Realization, u: Tensor, gates: Tensor, M: Tensor, x0: Tensor | None, lengths: Tensor | None):
    """The definition: y(t) = sum_k g_k(t) M_k sum_j phi_k(t - j) u(j), head by head."""
    B, L, _ = u.shape
    K = gates.shape[2]
    phi = _filters(basis, basis.N, L, u.device)  # (L, N) fp64
    u64, tau = u.double(), torch.arange(L, device=u.device)[:, None] - torch.arange(L, device=u.device)
    toeplitz = torch.where((tau >= 0)[..., None], phi[tau.clamp(min=0)], 0.0)  # (t, j, N): phi_k(t - j)
    features = torch.einsum("tjn,bjd->btnd", toeplitz, u64)
    if x0 is not None:
        features = features + _free_response(basis, x0.double(), L, basis.N)
    g, M = by_heads(gates.double(), M[:K].double())
    split = features[:, :, :K].unflatten(3, (M.shape[1], M.shape[2]))  # (B, t, K, h, d)
    y = torch.einsum("btkh,btkhd,khde->bthe", g, split, M).flatten(2)
    last = torch.full((B,), L, device=u.device) if lengths is None else lengths
    state = features[torch.arange(B, device=u.device), last - 1]
    return y.to(u.dtype), state.to(state_dtype(u.dtype))


def fft(basis: Realization, u: Tensor, gates: Tensor, M: Tensor, x0: Tensor | None, lengths: Tensor | None):
    """The paper's algorithm: one real FFT of u, then channels in groups of 8, each an inverse FFT and an einsum."""
    L, K = gates.shape[1:3]
    dtype = state_dtype(u.dtype)
    n = 1 << (2 * L - 1).bit_length()
    phi_f = _filter_spectra(basis.H, K, L, n, str(u.device), dtype)  # (K, n/2+1)
    u_f = torch.fft.rfft(u.to(dtype).mT.contiguous(), n)  # (B, D, n/2+1)
    free = None if x0 is None else _free_response(basis, x0.double(), L, K).to(dtype)
    g, M = by_heads(gates, M[:K])
    y = torch.zeros((), dtype=u.dtype, device=u.device)
    for a in range(0, K, 8):
        b = min(a + 8, K)
        features = torch.fft.irfft(u_f[:, None] * phi_f[a:b, None], n)[..., :L]  # (B, k, D, L)
        if free is not None:
            features = features + free[:, :, a:b].permute(0, 2, 3, 1)
        split = features.to(u.dtype).unflatten(2, (M.shape[1], M.shape[2]))  # (B, k, h, d, L)
        mixed = torch.einsum("bkhdl,khde->bklhe", split, M[a:b])
        y = y + torch.einsum("bklhe,blkh->blhe", mixed, g[:, :, a:b])
    return y.flatten(2), _state_by_convolution(basis, u, x0, lengths).to(dtype)


def _state_by_convolution(basis: Realization, u: Tensor, x0: Tensor | None, lengths: Tensor | None):
    """f_n(T) = sum_j phi_n(T-j) u(j) for the last step T of every row, fp64."""
    B, L, _ = u.shape
    last = torch.full((B,), L, device=u.device) if lengths is None else lengths
    tau = last[:, None] - 1 - torch.arange(L, device=u.device)  # (B, L)
    phi = torch.where((tau >= 0)[..., None], _filters(basis, basis.N, L, u.device)[tau.clamp(min=0)], 0.0)
    state = torch.einsum("bln,bld->bnd", phi, u.double())
    if x0 is not None:
        free = _free_response(basis, x0.double(), L, basis.N)
        state = state + free[torch.arange(B, device=u.device), last - 1]
    return state


def _filters(basis: Realization, K: int, L: int, device: torch.device) -> Tensor:
    """(L, K) fp64 phi_k(tau); zero beyond the filter length."""
    lags = np.arange(min(L, basis.H))
    phi = torch.from_numpy(spectral_basis(basis.H).filters(K, lags)).to(device)
    return F.pad(phi, (0, 0, 0, L - phi.shape[0]))


@functools.lru_cache(maxsize=4)
def _filter_spectra(H: int, K: int, L: int, n: int, device: str, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False), unset_fake_temporarily():
        phi = _filters(Realization(H, K, 1), K, L, torch.device(device))
        return torch.fft.rfft(phi.T.contiguous(), n).to(torch.complex128 if dtype == torch.float64 else torch.complex64)


def _free_response(basis: Realization, x0: Tensor, L: int, num_rows: int) -> Tensor:
    """The first rows of (A^{t+1})^T x0 for t = 0..L-1: (B, L, num_rows, D) fp64."""
    N = x0.shape[1]
    A = torch.from_numpy(spectral_basis(basis.H).A[:N, :N].copy()).to(x0.device)
    powers = A[None]
    while powers.shape[0] < L:
        powers = torch.cat([powers, powers @ powers[-1]])
    return torch.einsum("tmn,bmd->btnd", powers[:L, :, :num_rows], x0)
