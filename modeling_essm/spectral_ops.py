# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Eq. (7) four ways: y(t) = sum_{k<=K} g_k(t) M_k (phi_k * u)(t), with g_k = alpha_k sigma_k^(1/4).

`naive` is the definition, in fp64, and what the others are tested against. `fft` is the paper's algorithm. `step` is
the recurrence (R) of `spectral_basis`. `chunked`, the default, unrolls (R) over chunks of C steps, so that everything
is a matrix product: F = W [u; x] gives all K features of a chunk from its inputs u and the state x before it, then
y = (g * F) M. The backward pass recomputes F group by group instead of storing it.

Letters: B batch, L sequence, D inner width, E output width (= D in the model), K budget, N states, C chunk length.
All four share one signature, `SpectralOperator.__call__`; state is features of all N states at the last step.
"""

from __future__ import annotations

import functools
import hashlib
import math
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd import forward_ad

from .quantization import dequantize, is_quantized, quantized_product
from .spectral_basis import chunk_operators, num_states, spectral_basis

ALGORITHMS = ("chunked", "fft", "step", "naive")

# Features of one group of chunks, the working set of the chunked algorithm: cache-sized on a CPU, but never so few rows
# that reading M dominates; large on an accelerator, where launches cost more than memory.
_GROUP_BYTES_CPU, _GROUP_ROWS_CPU = 2 << 20, 256
_GROUP_BYTES_ACCELERATOR = 128 << 20
_LONGEST_CHUNK = 512
_CACHED_BYTES_CPU = 1 << 18  # a matrix smaller than this stays in a core's cache from one step to the next


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
        return _num_states(self.filter_length, num_channels, self.state_margin)

    def sigma(self, num_channels: int, exponent: float, like: Tensor) -> Tensor:
        """sigma_k^exponent for the first K channels: (K,) with the dtype and device of `like`."""
        return _sigma_power(self.filter_length, exponent, str(like.device), like.dtype)[:num_channels]

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
        """Eq. (7) for a budget K = gates.shape[-1]; reads the first K matrices and N states only.

        Args:
            u: (B, L, D) inputs, L >= 1, fp32, bf16, fp16 or fp64; zero wherever a position is padding.
            gates: (B, L, K) g_k(t).
            channel_mixing: (>= K, D, E) weights M_k, which may be quantised.
            initial_state: (B, >= N, D) state before u, or None for zero.
            lengths: (B,) int64 in [0, L], steps after which each row's state is taken (right padding); None for L.
            algorithm: one of ALGORITHMS. `chunked` takes `step` for a single step.
            num_states: N to carry if more than the budget needs.
        Returns:
            y (B, L, E) in u's dtype, and the state (B, N, D) after each row's last step in fp32 (fp64 for fp64).
        Raises:
            ValueError: unknown algorithm, an initial state of fewer than N rows, or an export for any length of
                another algorithm than `chunked`.
        """
        if torch.compiler.is_exporting() and not isinstance(u.shape[1], int) and algorithm != "chunked":
            raise ValueError(
                f"spectral_algorithm={algorithm!r} cannot be exported for any length: set config.spectral_algorithm = "
                '"chunked", which computes the same, or export a fixed length'
            )
        K = gates.shape[-1]
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
        if algorithm == "step" or (u.shape[1] == 1 and algorithm == "chunked"):
            run = _step
        elif algorithm == "chunked":
            run = _chunked
        elif algorithm == "fft":
            run = _fft
        elif algorithm == "naive":
            run = _naive
        else:
            raise ValueError(f"spectral_algorithm must be one of {ALGORITHMS}, got {algorithm!r}")
        last = None if lengths is None else lengths.clamp(min=1)
        with torch.autocast(u.device.type, enabled=False) if autocast else nullcontext():  # dtypes are chosen below
            y, state = run(self, N, u, gates, channel_mixing, initial_state, last)
        if lengths is not None:  # a row of padding only keeps the state it came with
            before = state.new_zeros(()) if initial_state is None else initial_state.to(state.dtype)
            state = torch.where((lengths > 0)[:, None, None], state, before)
        return y, state


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """States need fp32 or better: rounded to bf16, channel 32 is lost."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _feature_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp16 ends at 65504, which states reach beyond the filter length: features are made and gated in fp32 there."""
    return torch.float32 if dtype == torch.float16 else dtype


def _state_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, in fp64 where the user lets fp32 products run in TF32 or bf16: states would lose the late channels."""
    if a.dtype == torch.float32 and _has_reduced_products(a.device.type):
        return torch.matmul(a.double(), b.double()).float()
    return torch.matmul(a, b)


@torch.compiler.assume_constant_result
def _has_reduced_products(device_type: str) -> bool:
    """Whether fp32 products may be rounded there; reads what both of torch's interfaces to that setting write."""
    backend = torch.backends.cuda if device_type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision not in ("none", "ieee")


# ---------------------------------------------------------------------------------------------------------------------
# The definition and the paper's algorithm: convolution with the exact filters.


def _naive(
    op: SpectralOperator, N: int, u: Tensor, gates: Tensor, M: Tensor, x0: Tensor | None, lengths: Tensor | None
):
    B, L, _ = u.shape
    K = gates.shape[-1]
    phi = _filters(op, N, L, u.device)  # (L, N) fp64
    u64, tau = u.double(), torch.arange(L, device=u.device)[:, None] - torch.arange(L, device=u.device)
    toeplitz = torch.where((tau >= 0)[..., None], phi[tau.clamp(min=0)], 0.0)  # (t, j, N): phi_k(t - j)
    features = torch.einsum("tjn,bjd->btnd", toeplitz, u64)
    if x0 is not None:
        features = features + _free_response(op, x0.double(), L, N)
    y = torch.einsum("btk,btkd,kde->bte", gates.double(), features[:, :, :K], M[:K].double())
    last = torch.full((B,), L, device=u.device) if lengths is None else lengths
    state = features[torch.arange(B, device=u.device), last - 1]
    return y.to(u.dtype), state.to(state_dtype(u.dtype))


def _fft(op: SpectralOperator, N: int, u: Tensor, gates: Tensor, M: Tensor, x0: Tensor | None, lengths: Tensor | None):
    """The paper's Algorithm: one real FFT of u, then channels in groups of 8, each an inverse FFT and an einsum."""
    L, K = gates.shape[1:]
    dtype = state_dtype(u.dtype)
    n = 1 << (2 * L - 1).bit_length()
    phi_f = _filter_spectra(op.filter_length, K, L, n, str(u.device), dtype)  # (K, n/2+1)
    u_f = torch.fft.rfft(u.to(dtype).mT.contiguous(), n)  # (B, D, n/2+1)
    free = None if x0 is None else _free_response(op, x0.double(), L, K).to(dtype)
    y = torch.zeros((), dtype=u.dtype, device=u.device)
    for a in range(0, K, 8):
        b = min(a + 8, K)
        features = torch.fft.irfft(u_f[:, None] * phi_f[a:b, None], n)[..., :L]  # (B, k, D, L)
        if free is not None:
            features = features + free[:, :, a:b].permute(0, 2, 3, 1)
        mixed = torch.einsum("bkdl,kde->bkle", features.to(u.dtype), M[a:b])
        y = y + torch.einsum("bkle,blk->ble", mixed, gates[:, :, a:b])
    return y, _state_by_convolution(op, u, x0, lengths, N).to(dtype)


def _state_by_convolution(op: SpectralOperator, u: Tensor, x0: Tensor | None, lengths: Tensor | None, N: int):
    """f_n(T) = sum_j phi_n(T-j) u(j) for the last step T of every row, fp64."""
    B, L, _ = u.shape
    last = torch.full((B,), L, device=u.device) if lengths is None else lengths
    tau = last[:, None] - 1 - torch.arange(L, device=u.device)  # (B, L)
    phi = torch.where((tau >= 0)[..., None], _filters(op, N, L, u.device)[tau.clamp(min=0)], 0.0)
    state = torch.einsum("bln,bld->bnd", phi, u.double())
    if x0 is not None:
        state = state + _free_response(op, x0.double(), L, N)[torch.arange(B, device=u.device), last - 1]
    return state


def _filters(op: SpectralOperator, N: int, L: int, device: torch.device) -> Tensor:
    """(L, N) fp64 phi_n(tau); zero beyond the filter length."""
    lags = np.arange(min(L, op.filter_length))
    phi = torch.from_numpy(spectral_basis(op.filter_length).filters(N, lags)).to(device)
    return F.pad(phi, (0, 0, 0, L - phi.shape[0]))


@functools.lru_cache(maxsize=4)
def _filter_spectra(H: int, K: int, L: int, n: int, device: str, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False), unset_fake_temporarily():
        phi = _filters(SpectralOperator(H), K, L, torch.device(device))
        return torch.fft.rfft(phi.T.contiguous(), n).to(torch.complex128 if dtype == torch.float64 else torch.complex64)


def _free_response(op: SpectralOperator, x0: Tensor, L: int, num_rows: int) -> Tensor:
    """The first rows of (A^{t+1})^T x0 for t = 0..L-1: (B, L, num_rows, D) fp64."""
    N = x0.shape[1]
    A = torch.from_numpy(spectral_basis(op.filter_length).A[:N, :N].copy()).to(x0.device)
    powers = A[None]
    while powers.shape[0] < L:
        powers = torch.cat([powers, powers @ powers[-1]])
    return torch.einsum("tmn,bmd->btnd", powers[:L, :, :num_rows], x0)


# ---------------------------------------------------------------------------------------------------------------------
# (R), one step at a time.


def _step(op: SpectralOperator, N: int, u: Tensor, gates: Tensor, M: Tensor, x0: Tensor | None, lengths: Tensor | None):
    B, L, D = u.shape
    K = gates.shape[-1]
    dtype = state_dtype(u.dtype)
    recurrence = _recurrence(op.filter_length, str(u.device), dtype)
    A_T, phi0 = recurrence[:N, :N], recurrence[:N, -1:]
    x = u.new_zeros(B, N, D, dtype=dtype) if x0 is None else x0.to(dtype)
    gated, state = [], x
    for t in range(L):
        x = torch.addcmul(_state_matmul(A_T, x), phi0, u[:, t : t + 1].to(dtype))
        state = x if lengths is None else torch.where((t < lengths)[:, None, None], x, state)
        wide = _feature_dtype(u.dtype)
        gated.append((x[:, :K].to(wide) * gates[:, t, :, None].to(wide)).to(u.dtype))
    features = torch.stack(gated, 1).view(B * L, K * D)
    if is_quantized(M):
        return quantized_product(features, M).view(B, L, -1), state
    M_flat = M[:K].reshape(K * D, -1)
    if _is_memory_bound(features, M_flat):
        y = _weighted_row_sum(features, M_flat)
    else:
        y = features @ M_flat
    return y.view(B, L, -1), state


def _is_memory_bound(features: Tensor, M_flat: Tensor) -> bool:
    """Whether the product waits for M, on a CPU, with no gradient wanted of it."""
    if torch.is_grad_enabled() or torch.compiler.is_exporting():  # first: an export must not look at the batch
        return False
    if M_flat.device.type != "cpu" or features.shape[0] > 4 or M_flat.dtype == torch.float64:
        return False
    return M_flat.nbytes >= _CACHED_BYTES_CPU or M_flat.dtype == torch.float16  # BLAS is slow in fp16 at any size


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


# ---------------------------------------------------------------------------------------------------------------------
# (R) unrolled over chunks. One opaque operator forward and one backward, so that torch.compile neither unrolls the
# loop over groups nor stores features. torch.export gets plain tensor operations for any length up to H instead.


def _chunked(
    op: SpectralOperator, N: int, u: Tensor, gates: Tensor, M: Tensor, x0: Tensor | None, lengths: Tensor | None
):
    if torch.compiler.is_exporting() or _is_transformed(u, gates, M, x0):
        return _chunked_traceable(op, N, u, gates, M, x0, lengths)
    y, state, _ = _chunked_forward(u, gates, M, x0, lengths, op.filter_length, N, op.chunk_size)
    return y, state


def _is_transformed(*tensors: Tensor | None) -> bool:
    """Whether torch.func or forward-mode AD looks at the operator, which the opaque one would answer with zeros."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        return True
    level = forward_ad._current_level
    return level >= 0 and any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _states_before_chunks(chunks: Tensor, x0: Tensor | None, readout: Tensor, powers: Tensor) -> Tensor:
    """(R) at chunk level, x_{c+1} = carry x_c + inject u_c, for all chunks in log2(n) matrix products.

    Args:
        chunks: (B, n, C, D) inputs. x0: (B, N, D). readout: (C, N, C + N). powers: (J, N, N), carry^(2^j).
    Returns:
        (B, n, N, D) state before every chunk, in the dtype of readout.
    """
    B, n, C, D = chunks.shape
    x = readout.new_zeros(B, n, readout.shape[1], D)
    if x0 is not None:
        x[:, 0] = x0
    if n > 1:
        x[:, 1:] = _state_matmul(readout[-1, :, :C], chunks[:, :-1].to(x.dtype))
    for j in range((n - 1).bit_length()):
        x[:, 1 << j :] += _state_matmul(powers[j], x[:, : -(1 << j)])
    return x


def _last_chunk(lengths: Tensor | None, L: int, C: int, readout: Tensor) -> tuple[Tensor | int, Tensor]:
    """Where each row's last step lies: its chunk, and the (N, C + N) or (B, N, C + N) part of readout for it."""
    if lengths is None:
        return (L - 1) // C, readout[(L - 1) % C]
    return (lengths - 1) // C, readout[(lengths - 1) % C]


def _pad_length(t: Tensor, length: int) -> Tensor:
    """Zeros appended to dimension 1; the tensor itself (F.pad would copy) where nothing is missing."""
    return t if t.shape[1] == length else F.pad(t, (0, 0, 0, length - t.shape[1]))


def _chunks_per_group(features_per_chunk: torch.Size, u: Tensor) -> int:
    chunk_bytes = features_per_chunk.numel() * u.element_size()
    if u.device.type == "cpu":
        return max(1, _GROUP_BYTES_CPU // chunk_bytes, _GROUP_ROWS_CPU // features_per_chunk[0])
    return max(1, _GROUP_BYTES_ACCELERATOR // chunk_bytes)


# Each copy of this module registers its own operators: the package and remote code may live in one process.
_NAMESPACE = "essm_" + hashlib.sha1(__name__.encode()).hexdigest()[:8]


@torch.library.custom_op(f"{_NAMESPACE}::chunked", mutates_args=())
def _chunked_forward(
    u: Tensor, gates: Tensor, M: Tensor, x0: Tensor | None, lengths: Tensor | None, H: int, N: int, C: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y (B, L, E), the final state (B, N, D) and, for the backward pass, the state before every chunk."""
    B, L, D = u.shape
    K, E = gates.shape[-1], M.shape[-1]
    readout, powers, W = _chunk_tensors(H, N, C, K, u)
    # 1. Cut into n chunks; a sequence shorter than a chunk uses the leading rows of W only.
    n, rows = -(-L // C), min(L, C)
    W = W[: rows * K]
    chunks = _pad_length(u, n * C).view(B, n, C, D)
    chunk_gates = _pad_length(gates, n * rows).reshape(B * n, rows, K, 1)
    # 2. State before every chunk, fp32.
    x = _states_before_chunks(chunks, x0, readout, powers)
    # 3. Features, gates and mixing: two matrix products per group of chunks.
    chunks_flat, x_flat, M_flat = chunks.reshape(B * n, C, D), x.view(B * n, N, D), M[:K].reshape(K * D, E)
    y = u.new_empty(B * n, rows, E)
    group = _chunks_per_group(torch.Size((rows, K, D)), u)
    buffer = W.new_empty(min(group, B * n), rows * K, D)
    for a in range(0, B * n, group):
        g = slice(a, a + group)
        inputs = torch.cat([chunks_flat[g].to(W.dtype), x_flat[g].to(W.dtype)], 1)
        features = torch.bmm(W.expand(len(inputs), -1, -1), inputs, out=buffer[: len(inputs)])
        features.view(-1, rows, K, D).mul_(chunk_gates[g])
        torch.mm(features.view(-1, K * D).to(u.dtype), M_flat, out=y[g].view(-1, E))
    y = y.view(B, n * rows, E)[:, :L].contiguous()
    # 4. The state after each row's last step is one more readout of its last chunk.
    c, read = _last_chunk(lengths, L, C, readout)
    row = slice(None) if lengths is None else torch.arange(B, device=u.device)
    state = _state_matmul(read, torch.cat([chunks[row, c].to(x.dtype), x[row, c]], 1))
    return y, state, x


@_chunked_forward.register_fake
def _(u, gates, M, x0, lengths, H, N, C):
    B, L, D = u.shape
    dtype = state_dtype(u.dtype)
    return (
        u.new_empty(B, L, M.shape[-1]),
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
    """Returns du, dgates, dM (zero beyond the budget) and dx0; features are recomputed group by group."""
    B, L, D = u.shape
    K, E = gates.shape[-1], M.shape[-1]
    readout, powers, W = _chunk_tensors(H, N, C, K, u)
    n, rows = -(-L // C), min(L, C)
    W = W[: rows * K]
    chunks = _pad_length(u, n * C).view(B, n, C, D)
    chunk_gates = _pad_length(gates, n * rows).reshape(B * n, rows, K, 1)
    dy = _pad_length(dy, n * rows).reshape(B * n, rows, E)
    chunks_flat, x_flat, M_flat = chunks.reshape(B * n, C, D), x.view(B * n, N, D), M[:K].reshape(K * D, E)
    # 1. Transposes of forward step 3, group by group.
    dM = torch.zeros(M.shape, dtype=x.dtype, device=M.device)
    dM_flat = dM[:K].view(K * D, E)
    dgates = W.new_empty(B * n, rows, K)
    dchunks, dx = x.new_empty(B * n, C, D), x.new_empty(B * n, N, D)
    group = _chunks_per_group(torch.Size((rows, K, D)), u)
    buffers = W.new_empty(3, min(group, B * n), rows * K, D)
    for a in range(0, B * n, group):
        g = slice(a, a + group)
        inputs = torch.cat([chunks_flat[g].to(W.dtype), x_flat[g].to(W.dtype)], 1)
        features, dgated, product = buffers[:, : len(inputs)]
        dy_rows, gate = dy[g].view(-1, E), chunk_gates[g].reshape(-1, rows * K, 1)  # gates may be expanded
        torch.bmm(W.expand(len(inputs), -1, -1), inputs, out=features)
        if W.dtype == u.dtype:
            torch.mm(dy_rows, M_flat.T, out=dgated.view(-1, K * D))
        else:
            dgated.view(-1, K * D).copy_(torch.mm(dy_rows, M_flat.T))
        torch.sum(torch.mul(dgated, features, out=product), -1, out=dgates[g].view(-1, rows * K))
        features.mul_(gate)
        gated = features.view(-1, K * D).to(u.dtype)
        if dM.dtype == u.dtype:
            dM_flat.addmm_(gated.T, dy_rows)
        else:
            dM_flat += torch.mm(gated.T, dy_rows)
        dinputs = torch.bmm(W.T.expand(len(inputs), -1, -1), dgated.mul_(gate))
        dchunks[g], dx[g] = dinputs[:, :C], dinputs[:, C:]
    # 2. The final state reads one chunk of each row.
    dchunks, dx = dchunks.view(B, n, C, D), dx.view(B, n, N, D)
    c, read = _last_chunk(lengths, L, C, readout)
    dlast = _state_matmul(read.mT, dstate)
    row = slice(None) if lengths is None else torch.arange(B, device=u.device)
    dchunks[row, c] += dlast[:, :C]
    dx[row, c] += dlast[:, C:]
    # 3. The recurrence over chunks, backwards.
    for j in range((n - 1).bit_length()):
        dx[:, : -(1 << j)] += _state_matmul(powers[j].T, dx[:, 1 << j :])
    if n > 1:
        dchunks[:, :-1] += _state_matmul(readout[-1, :, :C].T, dx[:, 1:])
    du = dchunks.view(B, n * C, D)[:, :L].to(u.dtype).contiguous()
    dgates = dgates.view(B, n * rows, K)[:, :L].to(gates.dtype).contiguous()
    return du, dgates, dM.to(M.dtype), dx[:, 0].clone()


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
    ctx.has_x0, ctx.has_lengths = x0 is not None, lengths is not None
    ctx.save_for_backward(u, gates, M, output[2], *([lengths] if ctx.has_lengths else []))
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dstate, _dx):
    u, gates, M, x, *lengths = ctx.saved_tensors
    if dy is None:
        dy = u.new_zeros(*u.shape[:2], M.shape[-1])
    if dstate is None:
        dstate = x.new_zeros(x.shape[0], x.shape[2], x.shape[3])
    lengths = lengths[0] if ctx.has_lengths else None
    with torch.autocast(u.device.type, enabled=False):  # or a backward pass inside an autocast block scans in bf16
        du, dgates, dM, dx0 = _chunked_backward(dy.contiguous(), dstate, u, gates, M, x, lengths, *ctx.spec)
    return du, dgates, dM, dx0 if ctx.has_x0 else None, None, None, None, None


_chunked_forward.register_autograd(_backward, setup_context=_save_for_backward)


def _chunked_traceable(
    op: SpectralOperator, N: int, u: Tensor, gates: Tensor, M: Tensor, x0: Tensor | None, lengths: Tensor | None
):
    """The same in plain tensor operations, for torch.func, forward-mode AD and torch.export.

    In an export no branch, loop or slice depends on L <= H, which may be symbolic.
    """
    B, L, D = u.shape
    K, C = gates.shape[-1], op.chunk_size
    readout, powers, W = _chunk_tensors(op.filter_length, N, C, K, u)
    n = (L - 1) // C + 2  # one more than needed: never 1, which would be a case of its own
    position = torch.arange(n, device=u.device)[:, None] * C + torch.arange(C, device=u.device)
    source = position.clamp(max=L - 1)
    chunks = u[:, source] * (position < L)[..., None]  # (B, n, C, D)
    chunk_gates = gates[:, source][..., None]  # (B, n, C, K, 1)
    first = u.new_zeros(B, N, D, dtype=readout.dtype) if x0 is None else x0.to(readout.dtype)
    x = torch.cat([first[:, None], _state_matmul(readout[-1, :, :C], chunks.to(readout.dtype))], 1)
    longest = op.filter_length if torch.compiler.is_exporting() else L
    for j in range((longest // C).bit_length()):
        x = x + _state_matmul(powers[j], F.pad(x, (0, 0, 0, 0, 1 << j, 0))[:, : n + 1])
    x = x[:, :n]
    features = torch.matmul(W, torch.cat([chunks.to(W.dtype), x.to(W.dtype)], 2)).view(B, n, C, K, D)
    gated = (features * chunk_gates).to(u.dtype).flatten(3)
    y = torch.matmul(gated, M[:K].reshape(1, K * D, -1))  # (B, n, C, E)
    t = torch.arange(L, device=u.device)
    last = (torch.full((B,), L, device=u.device) if lengths is None else lengths) - 1
    row = torch.arange(B, device=u.device)
    inputs = torch.cat([chunks[row, last // C].to(x.dtype), x[row, last // C]], 1)
    return y[:, t // C, t % C], _state_matmul(readout[last % C], inputs)


# ---------------------------------------------------------------------------------------------------------------------
# Constants: pure functions of their arguments, made once per process and device.


def _to_device(array: np.ndarray, device: str, dtype: torch.dtype) -> Tensor:
    # Cached for the life of the process, so never an inference tensor nor a fake one of a running export.
    with torch.inference_mode(False), unset_fake_temporarily():
        return torch.tensor(array, dtype=dtype, device=device)


@functools.lru_cache(maxsize=1024)
def _num_states_cached(H: int, K: int, state_margin: int) -> int:
    return min(num_states(K, state_margin), len(spectral_basis(H).sigma))


@functools.lru_cache(maxsize=1024)
def _sigma_power_cached(H: int, exponent: float, device: str, dtype: torch.dtype) -> Tensor:
    return _to_device(spectral_basis(H).sigma ** exponent, device, dtype)


@functools.lru_cache(maxsize=1024)
def _recurrence_cached(H: int, device: str, dtype: torch.dtype) -> Tensor:
    return _to_device(chunk_operators(H, len(spectral_basis(H).sigma), 1).recurrence, device, dtype)


# torch.compile takes these results as constants. It names them after the function, so that within one graph each must
# return one tensor: hence all states and channels, of which a budget uses the leading ones.


@torch.compiler.assume_constant_result
def _num_states(H: int, K: int, state_margin: int) -> int:
    return _num_states_cached(H, K, state_margin)


@torch.compiler.assume_constant_result
def _sigma_power(H: int, exponent: float, device: str, dtype: torch.dtype) -> Tensor:
    """sigma^exponent of all states of the basis."""
    return _sigma_power_cached(H, exponent, device, dtype)


@torch.compiler.assume_constant_result
def _recurrence(H: int, device: str, dtype: torch.dtype) -> Tensor:
    """(N, N + 1) for all states of the basis: A^T and phi(0)^T side by side."""
    return _recurrence_cached(H, device, dtype)


@functools.lru_cache(maxsize=1024)
def _chunk_constants(H: int, N: int, C: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """readout (C, N, C + N) and carry^(2^j) (24, N, N), see `ChunkOperators`."""
    operators = chunk_operators(H, N, C)
    return _to_device(operators.readout, device, dtype), _to_device(operators.carry_powers, device, dtype)


@functools.lru_cache(maxsize=1024)
def _channel_readout(H: int, N: int, C: int, K: int, device: str, dtype: torch.dtype) -> Tensor:
    """W (C K, C + N): the rows of readout that are channels, step by step."""
    return _to_device(chunk_operators(H, N, C).readout[:, :K].reshape(C * K, C + N), device, dtype)


def _chunk_tensors(H: int, N: int, C: int, K: int, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """readout and carry powers in the state's dtype, W in the features' dtype, all where u is."""
    readout, powers = _chunk_constants(H, N, C, str(u.device), state_dtype(u.dtype))
    return readout, powers, _channel_readout(H, N, C, K, str(u.device), _feature_dtype(u.dtype))
