# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Eq. (7) four ways: y(t) = sum_{k<=K} g_k(t) M_k (phi_k * u)(t), with g_k = alpha_k sigma_k^(1/4).

`naive` is the definition, in fp64, and what the others are tested against; `fft` is the paper's algorithm
(`spectral_reference`). `step` is the recurrence (R) of `spectral_basis` (`spectral_step`). `chunked`, the default,
unrolls (R) over chunks of C steps (`spectral_chunked`): F = W [u; x] gives all K features of a chunk from its inputs u
and the state x before it, then y = (g * F) M.

Letters: B batch, L sequence, D inner width, E output width (= D in the model), K budget, N states, C chunk length;
h heads, d = D / h, e = E / h, G gates a channel. All four share one signature, `SpectralOperator.__call__`; state is
features of all N states at the last step.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from .quantized_weights import dequantize, is_quantized
from .spectral_chunked import chunked
from .spectral_constants import Realization, sigma_power, states_needed
from .spectral_reference import fft, naive
from .spectral_step import step

ALGORITHMS = ("chunked", "fft", "step", "naive")
_RUN = {"chunked": chunked, "fft": fft, "step": step, "naive": naive}
_LONGEST_CHUNK = 512


@dataclass(frozen=True)
class SpectralOperator:
    """The fixed part of Eq. (7): which basis, how many states, which chunk length. Hashable; holds no tensors.

    Attributes:
        filter_length: H. Sequences longer than H leave the range in which recurrence and convolution agree.
        state_margin: see `spectral_basis.num_states`.
        chunk_size: C, which beyond H or 512 is taken as that: the constants of a chunk grow with C^2, at H = 512 and
            K = 32 to 55 MB for C = 512, and longer chunks are slower.
    """

    filter_length: int
    state_margin: int = 16
    chunk_size: int = 64

    def __post_init__(self) -> None:
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
    ) -> tuple[Tensor, Tensor]:
        """Eq. (7) for a budget K = gates.shape[2]; reads the first K matrices and N states only.

        Args:
            u: (B, L, D) inputs, L >= 1, fp32, bf16, fp16 or fp64; zero wherever a position is padding.
            gates: (B, L, K) g_k(t); with heads also (B, L, K, G), each for h / G heads side by side.
            channel_mixing: (>= K, D, E) weights M_k, which may be quantised, or (>= K, h, d, e), of heads: block h of
                M_k maps d of the D inputs to e of the h e outputs. d = e = 1 are diagonal M_k.
            initial_state: (B, >= N, D) state before u, or None for zero.
            lengths: (B,) int64 in [0, L], steps after which each row's state is taken (right padding); None for L.
            algorithm: one of ALGORITHMS. `chunked` takes `step` for a single step.
            num_states: N to carry if more than the budget needs.
        Returns:
            y (B, L, E) in u's dtype, and the state (B, N, D) after each row's last step in fp32 (fp64 for fp64).
        Raises:
            ValueError: unknown algorithm, heads that do not fit, an initial state of fewer than N rows, or an export
                for any length of another algorithm than `chunked`.
        """
        if torch.compiler.is_exporting() and not isinstance(u.shape[1], int) and algorithm != "chunked":
            raise ValueError(
                f"spectral_algorithm={algorithm!r} cannot be exported for any length: set config.spectral_algorithm = "
                '"chunked", which computes the same, or export a fixed length'
            )
        if algorithm not in _RUN:
            raise ValueError(f"spectral_algorithm must be one of {ALGORITHMS}, got {algorithm!r}")
        self._check_heads(u, gates, channel_mixing)
        K = gates.shape[2]
        N = max(self.num_states(K), num_states or 0)
        if initial_state is not None:
            if initial_state.shape[1] < N:
                raise ValueError(f"initial_state needs {N} states, got {initial_state.shape[1]}")
            initial_state = initial_state[:, :N]
        autocast = u.device.type != "meta" and torch.is_autocast_enabled(u.device.type)
        if autocast:
            u = u.to(torch.get_autocast_dtype(u.device.type))
        gates = gates.to(u.dtype)
        if is_quantized(channel_mixing):
            if u.shape[1] > 1 or algorithm not in ("chunked", "step"):
                channel_mixing = dequantize(channel_mixing, K, u.dtype)
        elif channel_mixing.dtype != u.dtype:
            channel_mixing = channel_mixing[:K].to(u.dtype)
        if algorithm == "chunked" and u.shape[1] == 1:
            algorithm = "step"
        basis = Realization(self.filter_length, N, self.chunk_size)
        last = None if lengths is None else lengths.clamp(min=1)
        with torch.autocast(u.device.type, enabled=False) if autocast else nullcontext():  # dtypes are chosen below
            y, state = _RUN[algorithm](basis, u, gates, channel_mixing, initial_state, last)
        if lengths is not None:  # a row of padding only keeps the state it came with
            before = state.new_zeros(()) if initial_state is None else initial_state.to(state.dtype)
            state = torch.where((lengths > 0)[:, None, None], state, before)
        return y, state

    @staticmethod
    def _check_heads(u: Tensor, gates: Tensor, M: Tensor) -> None:
        """Raises ValueError for heads that do not make up D, or gates that do not divide them."""
        if M.ndim == 4 and M.shape[1] * M.shape[2] != u.shape[2]:
            raise ValueError(f"{M.shape[1]} heads of width {M.shape[2]} do not make up D = {u.shape[2]}")
        G = 1 if gates.ndim == 3 else gates.shape[3]
        heads = M.shape[1] if M.ndim == 4 else 1
        if heads % G:
            raise ValueError(f"the number of gates a channel must divide the {heads} heads, got {G}")
