# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Eq. (7-8) as the paper writes them, in fp64, and the paper's FFT algorithm; to read, and to compare with.

`spectral_mixer` is both equations for one budget, `elastic_mixer` what the elastic block makes of them. Their
convolution and their sum over channels are those of `naive`, the definition that the fast algorithms are tested
against. All of it is slow and memory-hungry. docs/theory.md derives the fast ones. Importing this module makes "naive"
and "fft" values of `spectral_algorithm`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers.activations import ACT2FN

from ..spectral_basis import spectral_basis
from ..spectral_constants import Realization, state_dtype
from ..spectral_ops import ALGORITHMS

__all__ = ["delta_memory", "elastic_mixer", "fft", "mix_channels", "naive", "spectral_features", "spectral_mixer"]


def spectral_mixer(
    u: Tensor,
    gate: tuple[Tensor, Tensor, Tensor, Tensor],
    channel_mixing: Tensor,
    skip: Tensor,
    filter_length: int,
    budget: int,
    scaling_exponent: float = 0.25,
) -> Tensor:
    """Eq. (7-8) with the first K channels of the weights, which never read the others.

        s(t) = W2 GELU(W1 u(t) + b1) + b2,   s~ = s_{1:K} sqrt(K) / (||s_{1:K}|| + 1e-6),   alpha = softmax(s~)      (8)
        y(t) = D u(t) + sum_{k<=K} alpha_k(t) sigma_k^{1/4} M_k (phi_k * u)(t)                                       (7)

    Args:
        u: (B, L, D) inputs. gate: weights W1 (D_g, D), b1 (D_g), W2 (>= K, D_g) and b2 (>= K).
        channel_mixing: (>= K, D, E) weights, M_k as it multiplies a row from the right.
        skip: (E, D), the matrix D. filter_length: H. budget: K. scaling_exponent: the 1/4 of Eq. (7).
    Returns:
        (B, L, E) in u's dtype, computed in fp64.
    Raises:
        ValueError: budget is not in [1, capacity].
    """
    K, x = _checked(budget, len(channel_mixing)), u.double()
    W1, b1, W2, b2 = (weight.double() for weight in gate)
    phi = _filters(filter_length, K, u.shape[1], u.device)
    gates = _alpha(F.gelu(x @ W1.T + b1) @ W2[:K].T + b2[:K]) * _sigma(filter_length, K, u) ** scaling_exponent
    return (x @ skip.double().T + mix_channels(spectral_features(x, phi), gates, channel_mixing.double())).to(u.dtype)


def elastic_mixer(
    u: Tensor, weights: Mapping[str, Tensor], config: Any, budget: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mixer of the elastic block with the first K channels of its weights, which never reads the others.

    With j, k <= K; a head j has d units, of which the first d - e pass through the filters and e through the memory:

        z_j, v_j, q_j, k_j = in_j u;   v_j = silu(conv_j v_j);   q_j, k_j for `delta_memory` where there is a memory
        s_kj(t) = gate_weight_kj act(gate_in u(t)) + gate_offset_kj,   alpha of head j by (8) over k <= j
        y_j = skip_j v_j + sum_{k<=j} alpha_kj sigma_k^p M_kj (phi_k * v_j)                                          (7)
        out = sum_{j<=K} out_j (norm_j([y_j, o_j]) silu(z_j)),   o of `delta_memory`

    With `gating="softmax"` k <= K instead of k <= j.

    Args:
        u: (B, L, D) of unit scale. weights: named as in the mixer. config: ESSMConfig with block="elastic". budget: K.
    Returns:
        (B, L, D) in u's dtype, computed in fp64; and the states after the last step in fp64, as `ESSMCache` names them
        ("features" of the first K filters only).
    Raises:
        ValueError: budget is not in [1, capacity].
    """
    K, L, H = _checked(budget, len(weights["gate_offset"])), u.shape[1], config.filter_length
    x, W = u.double(), {name: weight.double() for name, weight in weights.items()}
    d, e, g = config.head_size, config.memory_value_size, config.gate_hidden_size // config.num_spectral_channels
    w, n = d - e, d + 2 * config.memory_key_size
    z, v = (x @ W["in_proj.weight"][: K * (d + n)].T).unflatten(2, (K, d + n)).split((d, n), 3)
    v, tail = _convolution(v.flatten(2), W["convolution"][:, : K * n])
    v, qk = v.unflatten(2, (K, n)).split((d, n - d), 3)
    v = F.silu(v)
    h = ACT2FN[config.hidden_act](x @ W["gate_in.weight"][: K * g].T + W["gate_in.bias"][: K * g])
    s = torch.einsum("blg,kjg->blkj", h, W["gate_weight"][:K, :K, : K * g]) + W["gate_offset"][:K, :K]
    counts = range(1, K + 1) if config.gating == "nested" else [K] * K
    alpha = torch.stack([F.pad(_alpha(s[:, :, :n, j]), (0, K - n)) for j, n in enumerate(counts)], 3)
    gates = alpha * _sigma(H, K, u)[:, None] ** config.scaling_exponent
    features = spectral_features(v[..., :w].flatten(2), _filters(H, K, L, u.device))  # (B, L, K, K w)
    y = W["skip"][: K * w] * v[..., :w].flatten(2) + mix_channels(features, gates, W["channel_mixing"][:, : K * w])
    y, states = y.unflatten(2, (K, w)), {"features": features[:, -1], "convolution": tail}
    if e:
        o, states["memory"] = delta_memory(x, qk, v[..., w:], W)
        y = torch.cat([y, o], 3)
    y = y / (y.square().mean(3, keepdim=True) + config.layer_norm_eps).sqrt() * W["norm"][: K * d].view(K, d)
    return ((y * F.silu(z)).flatten(2) @ W["out_proj.weight"][:, : K * d].T).to(u.dtype), states


def delta_memory(x: Tensor, qk: Tensor, v: Tensor, W: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """S(t) = a(t) (I - beta(t) k(t) k(t)^T) S(t-1) + beta(t) k(t) v(t)^T and o(t) = S(t)^T q(t), step by step.

    Args:
        x: (B, L, D). qk: (B, L, K, 2 m), queries and keys of the live heads, convolved. v: (B, L, K, e), their values.
        W: weights of the mixer.
    Returns:
        o (B, L, K, e), and S (B, K m, K e) after the last step; fp64.
    """
    B, L, K, e = v.shape
    m = qk.shape[3] // 2
    qk = F.silu(qk + W["memory.offset"][: 2 * K * m].view(K, 2 * m))
    q, k = (part.flatten(2) for part in qk.split(m, 3))
    q, k = (part * (part.square().sum(2, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
    decay, strength = (x @ W["memory.rates.weight"].T + W["memory.rates.bias"]).unbind(2)
    a, beta, v = (4.0 - decay).sigmoid(), strength.sigmoid(), v.flatten(2)
    S, o = x.new_zeros(B, K * m, K * e), []
    for t in range(L):
        key, kept = k[:, t, :, None], a[:, t, None, None] * S
        S = kept + beta[:, t, None, None] * key @ (v[:, t, None] - key.mT @ kept)
        o.append(q[:, t, None] @ S)
    return torch.cat(o, 1).unflatten(2, (K, e)), S


def _checked(budget: int, capacity: int) -> int:
    if not 1 <= budget <= capacity:
        raise ValueError(f"budget must be an integer in [1, {capacity}], got {budget!r}")
    return budget


def _alpha(s: Tensor) -> Tensor:
    """Eq. (8) of the scores (B, L, K) of all live channels."""
    return (s * s.shape[2] ** 0.5 / (torch.linalg.vector_norm(s, dim=2, keepdim=True) + 1e-6)).softmax(2)


def _convolution(u: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """Causal, of each column, the last tap that of the present step; and the inputs that a later step still reads."""
    p, L = len(taps) - 1, u.shape[1]
    padded = F.pad(u, (0, 0, p, 0))
    return sum(tap * padded[:, i : i + L] for i, tap in enumerate(taps)), padded[:, L:]


def spectral_features(u: Tensor, phi: Tensor) -> Tensor:
    """(phi_k * u)(t) = sum_{j<=t} phi_k(t-j) u(j): u (B, L, D) and filters phi (L, K), fp64, to (B, L, K, D)."""
    t = torch.arange(u.shape[1], device=u.device)
    lag = t[:, None] - t
    toeplitz = torch.where((lag >= 0)[..., None], phi[lag.clamp(min=0)], 0.0)  # (t, j, K): phi_k(t - j)
    return torch.einsum("tjn,bjd->btnd", toeplitz, u)


def mix_channels(features: Tensor, gates: Tensor, M: Tensor) -> Tensor:
    """sum_k g_k(t) M_k f_k(t).

    Args:
        features: (B, L, K, D). gates: (B, L, K) g_k = alpha_k sigma_k^p, or with diagonal M_k (B, L, K, G), each for
            D / G columns. M: dense (>= K, D, E) or diagonal (>= K, D).
    Returns:
        (B, L, E), or (B, L, D).
    """
    M = M[: features.shape[2]]
    if M.ndim == 3:
        return torch.einsum("btk,btkd,kde->bte", gates, features, M)
    return torch.einsum("btkd,btkd,kd->btd", features, _by_column(gates, M), M)


def naive(basis: Realization, u: Tensor, gates: Tensor, M: Tensor, x0: Tensor | None, lengths: Tensor | None):
    """The definition of Eq. (7) from any state; shapes as in `SpectralOperator.__call__`."""
    B, L, _ = u.shape
    features = spectral_features(u.double(), _filters(basis.H, basis.N, L, u.device))
    if x0 is not None:
        features = features + _free_response(basis, x0.double(), L, basis.N)
    y = mix_channels(features[:, :, : gates.shape[2]], gates.double(), M.double())
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
    g = gates if M.ndim == 3 else _by_column(gates, M)
    y = torch.zeros((), dtype=u.dtype, device=u.device)
    for a in range(0, K, 8):
        b = min(a + 8, K)
        features = torch.fft.irfft(u_f[:, None] * phi_f[a:b, None], n)[..., :L]  # (B, k, D, L)
        if free is not None:
            features = features + free[:, :, a:b].permute(0, 2, 3, 1)
        mixed = "bkdl,blk,kde->ble" if M.ndim == 3 else "bkdl,blkd,kd->bld"
        y = y + torch.einsum(mixed, features.to(u.dtype), g[:, :, a:b], M[a:b])
    return y, _state_by_convolution(basis, u, x0, lengths).to(dtype)


def _state_by_convolution(basis: Realization, u: Tensor, x0: Tensor | None, lengths: Tensor | None):
    """f_n(T) = sum_j phi_n(T-j) u(j) for the last step T of every row, fp64."""
    B, L, _ = u.shape
    last = torch.full((B,), L, device=u.device) if lengths is None else lengths
    tau = last[:, None] - 1 - torch.arange(L, device=u.device)  # (B, L)
    phi = torch.where((tau >= 0)[..., None], _filters(basis.H, basis.N, L, u.device)[tau.clamp(min=0)], 0.0)
    state = torch.einsum("bln,bld->bnd", phi, u.double())
    if x0 is not None:
        free = _free_response(basis, x0.double(), L, basis.N)
        state = state + free[torch.arange(B, device=u.device), last - 1]
    return state


def _by_column(gates: Tensor, M: Tensor) -> Tensor:
    """Gates (B, L, K) or (B, L, K, G) for each of the D columns of diagonal M (>= K, D): (B, L, K, D)."""
    gates = gates if gates.ndim == 4 else gates[..., None]
    return gates.repeat_interleave(M.shape[1] // gates.shape[3], 3)


def _sigma(H: int, K: int, like: Tensor) -> Tensor:
    """(K,) fp64 sigma_k."""
    return torch.tensor(spectral_basis(H).sigma[:K], device=like.device)


def _filters(H: int, K: int, L: int, device: torch.device) -> Tensor:
    """(L, K) fp64 phi_k(tau); zero beyond the filter length."""
    lags = np.arange(min(L, H))
    phi = torch.from_numpy(spectral_basis(H).filters(K, lags)).to(device)
    return F.pad(phi, (0, 0, 0, L - phi.shape[0]))


@functools.lru_cache(maxsize=4)
def _filter_spectra(H: int, K: int, L: int, n: int, device: str, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False), _disable_current_modes(), torch._C._DisableFuncTorch():
        phi = _filters(H, K, L, torch.device(device))
        return torch.fft.rfft(phi.T.contiguous(), n).to(torch.complex128 if dtype == torch.float64 else torch.complex64)


def _free_response(basis: Realization, x0: Tensor, L: int, num_rows: int) -> Tensor:
    """The first rows of (A^{t+1})^T x0 for t = 0..L-1: (B, L, num_rows, D) fp64."""
    N = x0.shape[1]
    A = torch.from_numpy(spectral_basis(basis.H).A[:N, :N].copy()).to(x0.device)
    powers = A[None]
    while powers.shape[0] < L:
        powers = torch.cat([powers, powers @ powers[-1]])
    return torch.einsum("tmn,bmd->btnd", powers[:L, :, :num_rows], x0)


ALGORITHMS.update(naive=naive, fft=fft)
