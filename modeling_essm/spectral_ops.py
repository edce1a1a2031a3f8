# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Eq. (7): y(t) = sum_{k<=K} g_k(t) M_k (phi_k * u)(t), with g_k = alpha_k sigma_k^(1/4), by one of several algorithms.

`chunked`, the default, unrolls the recurrence (R) of `spectral_basis` over chunks of C steps (`spectral_chunked`).
`step` is (R) itself, one step at a time, and how a model decodes. The installed package adds `naive`, the definition in
fp64 that the others are tested against, and `fft`, the paper's algorithm (`modeling_essm.reference`).

Letters: B batch, L sequence, D inner width, E output width (= D in the model), K budget, N states, C chunk length, G
gates a channel. State means the features of all N states at the last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .spectral_chunked import chunked
from .spectral_constants import (
    Realization,
    recurrence,
    sigma_power,
    state_matmul,
    states_needed,
)

_CACHED_BYTES_CPU = 1 << 18  # a matrix smaller than this stays in a core's cache from one step to the next
_LONGEST_CHUNK = 512


def step(basis: Realization, u: Tensor, gates: Tensor, M: Tensor, x0: Tensor | None, lengths: Tensor | None):
    """(R): f(t) = A^T f(t-1) + phi(0)^T u(t) over all L steps, then Eq. (7). Shapes as in `SpectralOperator`."""
    B, L, D = u.shape
    K, N = gates.shape[2], basis.N
    dtype = torch.promote_types(u.dtype, torch.float32)
    wide = dtype if u.dtype == torch.float16 else u.dtype  # features of fp16 are gated in fp32, see `feature_dtype`
    AB = recurrence(basis.H, str(u.device), dtype)
    A_T, phi0 = AB[:N, :N], AB[:N, -1:]
    x = u.new_zeros(B, N, D, dtype=dtype) if x0 is None else x0.to(dtype)
    per_group = gates if gates.ndim == 4 else gates[..., None]
    per_group = per_group.to(wide)[..., None]  # (B, L, K, G, 1)
    gated, state = [], x
    for t in range(L):
        x = torch.addcmul(state_matmul(A_T, x), phi0, u[:, t : t + 1].to(dtype))
        state = x if lengths is None else torch.where((t < lengths)[:, None, None], x, state)
        features = x[:, :K].to(wide).unflatten(2, (per_group.shape[3], D // per_group.shape[3]))
        gated.append((features * per_group[:, t]).to(u.dtype))
    features = (gated[0] if L == 1 else torch.stack(gated, 1)).view(B * L, K, D)
    y = (features * M[:K]).sum(1) if M.ndim == 2 else _mix(features.view(B * L, K * D), M[:K].reshape(K * D, -1))
    return y.view(B, L, M.shape[-1]), state


def _mix(features: Tensor, M_flat: Tensor) -> Tensor:
    """(n, K D) gated features by dense M_k (K D, E): (n, E)."""
    return _weighted_row_sum(features, M_flat) if _is_memory_bound(features, M_flat) else features @ M_flat


def _is_memory_bound(features: Tensor, M_flat: Tensor) -> bool:
    """Whether the product waits for M, on a CPU, with no gradient wanted of it."""
    if torch.is_grad_enabled() or torch.compiler.is_exporting():  # first: an export must not look at the batch
        return False
    if M_flat.device.type != "cpu" or not 0 < features.shape[0] <= 4 or M_flat.dtype == torch.float64:
        return False
    num_bytes = M_flat.numel() * M_flat.element_size()
    return num_bytes >= _CACHED_BYTES_CPU or M_flat.dtype == torch.float16  # BLAS is slow in fp16 at any size


def _weighted_row_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """weights (n, R) @ rows (R, E): an embedding bag streams rows at the memory's speed, BLAS at half of it.

    Each row of weights is split into bags, one for every thread.
    """
    n, R = weights.shape
    bags = math.gcd(R, max(1, _num_threads() // n))
    indices = torch.arange(R, device=rows.device).view(bags, -1).repeat(n, 1)
    sums = F.embedding_bag(indices, rows, mode="sum", per_sample_weights=weights.view(n * bags, -1))
    return sums.view(n, bags, -1).sum(1) if bags > 1 else sums


@torch.compiler.assume_constant_result
def _num_threads() -> int:
    return torch.get_num_threads()


ALGORITHMS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"chunked": chunked, "step": step}


@dataclass(frozen=True)
class SpectralOperator:
    """The fixed part of Eq. (7): which basis, how many states, which chunk length. Hashable; holds no tensors.

    Attributes:
        filter_length: H. Sequences longer than H leave the range in which recurrence and convolution agree.
        state_margin: see `spectral_basis.num_states`.
        chunk_size: C, at most H and 512: the constants of a chunk grow with C^2, at H = 512 and K = 32 to 55 MB for
            C = 512, and longer chunks are slower.
    """

    filter_length: int
    state_margin: int = 16
    chunk_size: int = 64

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {self.chunk_size}")
        object.__setattr__(self, "chunk_size", min(self.chunk_size, self.filter_length, _LONGEST_CHUNK))

    def num_states(self, num_channels: int) -> int:
        """N, the number of states that a budget K reads and writes."""
        return states_needed(self.filter_length, num_channels, self.state_margin)

    def sigma(self, num_channels: int, exponent: float, like: Tensor) -> Tensor:
        """sigma_k^exponent for the first K channels: (K,) with the dtype and device of `like`."""
        return sigma_power(self.filter_length, exponent, str(like.device), like.dtype)[:num_channels]

    def __call__(
        self,
        u: Tensor,
        gates: Tensor,
        channel_mixing: Tensor,
        initial_state: Tensor | None = None,
        lengths: Tensor | None = None,
        algorithm: str = "chunked",
        num_states: int | None = None,
        nested: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Eq. (7) for a budget K = gates.shape[2]; reads the first K matrices and N states only.

        Args:
            u: (B, L, D) inputs, L >= 1, fp32, bf16, fp16 or fp64; zero wherever a position is padding.
            gates: (B, L, K) g_k(t); with diagonal M_k also (B, L, K, G), each for D / G columns side by side.
            channel_mixing: weights M_k, dense (>= K, D, E) or diagonal (>= K, D).
            initial_state: (B, >= N, D) state before u, or None for zero.
            lengths: (B,) int64 in [0, L], steps after which each row's state is taken (right padding); None for L.
            algorithm: a key of ALGORITHMS. `chunked` takes `step` for a single step.
            num_states: N to carry, by default what the budget needs, to which smaller values are raised. With an
                initial state it is taken as given, because the cache has checked it.
            nested: whether the gates g_kj(t) of filters k > j are zero, which `chunked` on a CPU then skips.
        Returns:
            y (B, L, E) in u's dtype, and the state (B, N, D) after each row's last step in fp32 (fp64 for fp64).
        Raises:
            ValueError: unknown algorithm, shapes that do not fit, more channels than fp64 resolves at H, an initial
                state of fewer than N rows, or an export for any length of another algorithm than `chunked`.
        """
        if torch.compiler.is_exporting() and not isinstance(u.shape[1], int) and algorithm != "chunked":
            raise ValueError(
                f"spectral_algorithm={algorithm!r} cannot be exported for any length: load the model with "
                'spectral_algorithm="chunked", which computes the same, or export a fixed length'
            )
        if algorithm not in ALGORITHMS:
            raise ValueError(
                f"spectral_algorithm must be one of {(*ALGORITHMS,)}, got {algorithm!r} "
                '("fft" and "naive" need the package modeling_essm)'
            )
        (B, L, D), K = u.shape, gates.shape[2]
        if L == 0 or not u.is_floating_point():
            raise ValueError(f"u must hold floating-point numbers of one step or more, got {u.dtype}, {tuple(u.shape)}")
        if gates.shape[:2] != (B, L):
            raise ValueError(f"gates must have shape ({B}, {L}, K), got {tuple(gates.shape)}")
        if channel_mixing.shape[0] < K or channel_mixing.shape[1] != D:
            shape = tuple(channel_mixing.shape)
            raise ValueError(f"channel_mixing must have at least {K} channels of input width {D}, got {shape}")
        if gates.ndim == 4 and (channel_mixing.ndim == 3 or u.shape[2] % gates.shape[3]):
            raise ValueError(f"gates of {gates.shape[3]} groups need diagonal M_k of a width that they divide")
        if initial_state is None or num_states is None:  # a decoding step has both, checked by its cache
            num_states = max(num_states or 0, self.num_states(K))
        N = num_states
        if initial_state is not None:
            if initial_state.shape[1] < N or initial_state.shape[::2] != (B, D):
                raise ValueError(f"initial_state must have shape ({B}, >= {N}, {D}), got {tuple(initial_state.shape)}")
            initial_state = initial_state[:, :N]
        autocast = u.device.type != "meta" and torch.is_autocast_enabled(u.device.type)
        if autocast:
            u = u.to(torch.get_autocast_dtype(u.device.type))
        gates = gates.to(u.dtype)
        if channel_mixing.dtype != u.dtype:
            channel_mixing = channel_mixing[:K].to(u.dtype)
        if algorithm == "chunked" and u.shape[1] == 1:
            algorithm = "step"
        basis = Realization(self.filter_length, N, self.chunk_size)
        last = None if lengths is None else lengths.clamp(min=1)
        skip = {"nested": nested} if algorithm == "chunked" else {}
        with torch.autocast(u.device.type, enabled=False) if autocast else nullcontext():  # dtypes are chosen here
            y, state = ALGORITHMS[algorithm](basis, u, gates, channel_mixing, initial_state, last, **skip)
        if lengths is not None:  # a row of padding only keeps the state it came with
            before = state.new_zeros(()) if initial_state is None else initial_state.to(state.dtype)
            state = torch.where((lengths > 0)[:, None, None], state, before)
        return y, state
