# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Tensors and dtypes that all algorithms of Eq. (7) share. The tensors are made once per process and device.

They are pure functions of filter length H, number of states N, chunk length C and budget K. `spectral_basis` computes
them in fp64, and caches keep them. No module has them as buffers, so casting, moving and loading leave them alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from .spectral_basis import chunk_operators, num_states, spectral_basis

P = ParamSpec("P")
T = TypeVar("T")


class Realization(NamedTuple):
    """The recurrence that stands for the filters.

    Attributes:
        H: filter length. N: states carried. C: steps that one matrix product covers.
    """

    H: int
    N: int
    C: int


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """States need fp32 or better: rounded to bf16, channel 32 is lost."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def feature_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp16 ends at 65504, and states pass that beyond the filter length: their features are made and gated in fp32."""
    return torch.float32 if dtype == torch.float16 else dtype


def state_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, in fp64 where the user lets fp32 products run in TF32 or bf16: states would lose the late channels."""
    if a.dtype == torch.float32 and _has_reduced_products(a.device.type):
        return torch.matmul(a.double(), b.double()).float()
    return torch.matmul(a, b)


@torch.compiler.assume_constant_result
def _has_reduced_products(device_type: str) -> bool:
    """Whether fp32 products may be rounded there; reads what both of torch's interfaces to that setting write."""
    backend = torch.backends.cuda if device_type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision not in ("none", "ieee")


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether torch.func or forward-mode AD acts on these tensors: they cannot see through autograd functions."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        return True
    level = forward_ad._current_level
    return level >= 0 and any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def to_device(array: np.ndarray, device: str, dtype: torch.dtype) -> Tensor:
    """A tensor to keep for the life of the process: none of inference mode, an export or a torch.func transform."""
    with torch.inference_mode(False), _disable_current_modes(), torch._C._DisableFuncTorch():
        return torch.tensor(array, dtype=dtype, device=device)


def _constant(function: Callable[P, T]) -> Callable[P, T]:
    """Computes a result once and keeps it; to torch.compile it is a constant.

    The compiler names constants after their functions, so one function must return one tensor within a graph. Hence
    these are for all states and channels, and a budget uses the leading ones.
    """
    cached = functools.lru_cache(maxsize=1024)(function)

    @functools.wraps(function)
    def constant(*args: Any) -> Any:
        return cached(*args)

    return torch.compiler.assume_constant_result(constant)


@_constant
def states_needed(H: int, K: int, state_margin: int) -> int:
    """N, the number of states that a budget K reads and writes. Raises ValueError unless fp64 resolves K filters."""
    if not 1 <= K <= (most := spectral_basis(H).num_resolved):
        raise ValueError(f"K must be in [1, {most}], which fp64 resolves at filter_length {H}, got {K}")
    return min(num_states(K, state_margin), len(spectral_basis(H).sigma))


@_constant
def sigma_power(H: int, exponent: float, device: str, dtype: torch.dtype) -> Tensor:
    """sigma^exponent of all states of the basis."""
    return to_device(spectral_basis(H).sigma ** exponent, device, dtype)


@_constant
def recurrence(H: int, device: str, dtype: torch.dtype) -> Tensor:
    """(N, N + 1) for all states of the basis: A^T and phi(0)^T side by side."""
    basis = spectral_basis(H)
    phi0 = basis.filters(len(basis.sigma), np.zeros(1))
    return to_device(np.concatenate([basis.A.T, phi0.T], 1), device, dtype)


@_constant
def later_filters(H: int, device: str) -> Tensor:
    """(filters, heads) bool for all states of the basis, true where filter k > j: head j does not mix it."""
    return to_device(np.tri(len(spectral_basis(H).sigma), k=-1, dtype=bool), device, torch.bool)


@_constant
def root_of_filters(H: int, device: str, dtype: torch.dtype) -> Tensor:
    """(heads,) sqrt(j) for all states of the basis, of the number of filters that head j mixes."""
    return to_device(np.arange(1, len(spectral_basis(H).sigma) + 1) ** 0.5, device, dtype)


@functools.lru_cache(maxsize=1024)
def chunk_constants(basis: Realization, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """readout (C, N, C + N) and carry^(2^j) (24, N, N), see `ChunkOperators`; dtype is that of states."""
    operators = chunk_operators(*basis)
    return to_device(operators.readout, device, dtype), to_device(operators.carry_powers, device, dtype)


@functools.lru_cache(maxsize=1024)
def channel_readout(basis: Realization, K: int, device: str, dtype: torch.dtype) -> Tensor:
    """W (C K, C + N), the rows of readout that are channels, step by step; dtype is that of features."""
    return to_device(chunk_operators(*basis).readout[:, :K].reshape(basis.C * K, -1), device, dtype)


@functools.lru_cache(maxsize=1024)
def readout_by_channel(basis: Realization, K: int, device: str, dtype: torch.dtype) -> Tensor:
    """The same transposed, (C + N, K, C): for each channel all steps of a chunk."""
    return to_device(chunk_operators(*basis).readout[:, :K].transpose(2, 1, 0).copy(), device, dtype)
