# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Each Triton kernel against its torch counterpart, on a CPU; `test_kernels.py` runs this file with TRITON_INTERPRET=1.

The truth is computed in fp64 from the same inputs. Every tensor that a kernel is given lies between guards, which no
kernel may read into a result nor change: NaN, or a number around buffers that are not yet written, which hold NaN. A
load of fp32 that does not say what stands where its mask is false finds NaN there, since a GPU may find anything.
"""

import numpy as np
import pytest
import torch
import triton.language as tl
from operators import H, make_inputs, reachable_state, relative_error, run
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from modeling_essm import kernels_essm, spectral_chunked, spectral_groups
from modeling_essm.spectral_constants import Realization, chunk_constants
from modeling_essm.spectral_ops import SpectralOperator

GUARD, UNTOUCHED = 4096, 7.0
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Names of the kernels that ran, each between guards."""
    names, launch = [], kernels_essm._launch

    def guarded(kernel, grid, *args, **options):
        names.append(kernel.fn.__name__)
        inside = []
        for tensor in args:
            if isinstance(tensor, torch.Tensor):
                assert tensor.is_contiguous()
                guard = UNTOUCHED if tensor.isnan().all() else torch.nan
                buffer = tensor.new_full((tensor.numel() + 2 * GUARD,), guard)
                inside.append(buffer[GUARD:-GUARD].view(tensor.shape).copy_(tensor))
            else:
                inside.append(tensor)
        launch(kernel, grid, *inside, **options)
        for tensor, copy in zip(args, inside):
            if isinstance(tensor, torch.Tensor):
                guards = torch.cat([copy._base[:GUARD], copy._base[-GUARD:]])
                assert (guards == UNTOUCHED).all() or guards.isnan().all(), "written out of bounds"
                tensor.copy_(copy)

    load = InterpreterBuilder.create_masked_load

    def undefined(self, ptrs, mask, other, *args):
        if other is None and ptrs.get_element_ty() == tl.float32:
            other = TensorHandle(np.full(ptrs.data.shape, np.nan, np.float32), tl.float32)
        return load(self, ptrs, mask, other, *args)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", undefined)
    monkeypatch.setattr(kernels_essm, "_launch", guarded)
    torch.use_deterministic_algorithms(True)  # fills what is not yet written
    assert torch.empty(3).isnan().all()
    yield names
    torch.use_deterministic_algorithms(False)


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def doubled(*tensors):
    return [t if t is None else t.double() for t in tensors]


def assert_as_good(actual, plain, exact):
    """Errors like those of torch in the same dtype: the same values are rounded, or fewer, and sums have another order.

    Late channels are small differences of large terms, so no bound on the error itself would mean much.
    """
    for i, (a, b, c) in enumerate(zip(actual, plain, exact, strict=True)):
        assert a.shape == b.shape
        error, allowed = relative_error(a, c), 3 * relative_error(b, c) + 1e-6
        print(f"result {i}: {error:.1e}, allowed {allowed:.1e}")
        assert error < allowed


@dtypes
@pytest.mark.parametrize("starts", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize(
    ("B", "n", "C", "D", "N", "segmented"),
    [(1, 1, 5, 3, 18, False), (3, 4, 16, 40, 33, False), (1, 3, 64, 32, 48, False), (2, 7, 2, 33, 21, True)],
)
def test_scan(B, n, C, D, N, segmented, starts, dtype, launches, monkeypatch):
    if segmented:
        monkeypatch.setattr(kernels_essm, "_segment", lambda programs, n: 2)
    chunks = random(B, n, C, D, dtype=dtype)
    x0 = random(B, N, D, seed=1) if starts else None
    gradients = random(B, n, D, C, seed=2).mT, random(B, n, D, N, seed=3).mT

    def scans(states, derivatives, double, *combine):
        inputs, down = (chunks, x0), [t.clone() for t in gradients]
        if double:
            inputs, down = doubled(*inputs), doubled(*down)
        constants = chunk_constants(Realization(H, N, C), inputs[0])
        x = states(*inputs, *constants, *combine)
        return x, derivatives(*down, *constants, *combine), down[0]

    actual = scans(*kernels_essm.SCAN, False, spectral_chunked._scan)
    assert launches == ["_scan_forward"] * (1 + segmented) + ["_scan_backward"] * (1 + segmented)
    plain = spectral_chunked._states_before_chunks, spectral_chunked._scan_gradients
    assert_as_good(actual, scans(*plain, False), scans(*plain, True))


def compare(functions, names, basis, chunks, x, gates, M, dy):
    """Forward and backward against the functions of these names; matrices beyond the budget are not read.

    Inputs have strides that are not those of the kernels.
    """
    K = gates.shape[2]
    chunks, x, dy = (t.mT.contiguous().mT for t in (chunks, x, dy))
    M[K:] = float("nan")

    def both(functions, *tensors):
        _dy, *inputs = tensors
        y, gradients = functions[0](basis, *inputs), functions[1](basis, *tensors)
        assert not gradients[3][K:].any()
        return y, *gradients[:3], gradients[3][:K]

    tensors, plain = (dy, chunks, x, gates, M), [getattr(spectral_groups, name) for name in names]
    actual = both(functions, *tensors)
    assert actual[0].dtype == chunks.dtype
    assert_as_good(actual, both(plain, *tensors), both(plain, *doubled(*tensors)))


@dtypes
@pytest.mark.parametrize("outputs", [None, 1], ids=["one-group", "groups"])
@pytest.mark.parametrize(
    ("m", "C", "R", "K", "D", "E"),
    [(1, 5, 3, 1, 3, 7), (3, 16, 16, 5, 40, 33), (2, 33, 33, 2, 130, 16), (1, 64, 64, 32, 48, 20)],
)
def test_dense(m, C, R, K, D, E, outputs, dtype, monkeypatch):
    if outputs:
        monkeypatch.setattr(kernels_essm, "_GROUP_OUTPUTS", 2 * R * max(D, E))
    basis = Realization(H, K + 16, C)
    chunks, x, gates = random(m, C, D, dtype=dtype), random(m, K + 16, D, seed=1), random(m, R, K, dtype=dtype, seed=2)
    chunks[:, R:] = 0
    M, dy = random(K + 1, D, E, dtype=dtype, seed=3), random(m, R, E, dtype=dtype, seed=4)
    compare(kernels_essm.DENSE, ("mix_dense", "unmix_dense"), basis, chunks, x, gates, M, dy)


HEADS = {  # m, C, R, K, heads h, widths d and e, gates a channel G
    "one-step": (1, 5, 1, 1, 2, 3, 5, 2),
    "odd-chunks": (3, 16, 16, 5, 2, 20, 16, 1),
    "gates-shared": (2, 17, 17, 2, 4, 5, 5, 2),
    "many-channels": (2, 64, 64, 32, 2, 16, 16, 2),
    "diagonal": (3, 32, 32, 5, 48, 1, 1, 3),
    "diagonal-one-step": (1, 7, 1, 1, 6, 1, 1, 2),
    "diagonal-many-channels": (1, 32, 32, 32, 40, 1, 1, 1),
    "diagonal-columns": (2, 16, 16, 2, 576, 1, 1, 3),
    "diagonal-long-chunks": (1, 50, 50, 3, 34, 1, 1, 2),
}


@dtypes
@pytest.mark.parametrize("shape", HEADS.values(), ids=HEADS)
def test_heads(shape, dtype, monkeypatch):
    monkeypatch.setattr(kernels_essm, "_SMS", 10)  # so that parts of dM are of several chunks, the last one of fewer
    m, C, R, K, h, d, e, G = shape
    D, basis = h * d, Realization(H, K + 16, C)
    chunks, x, gates = random(m, C, D, dtype=dtype), random(m, K + 16, D, seed=1), random(m, R, K, G, dtype=dtype)
    chunks[:, R:] = 0
    M, dy = random(K + 1, h, d, e, dtype=dtype, seed=3), random(m, R, h * e, dtype=dtype, seed=4)
    compare(kernels_essm.HEADS, ("mix_heads", "unmix_heads"), basis, chunks, x, gates, M, dy)


OPERATORS = {  # B, L, K, C, shape of M after K, G, the kernels that run beside the scans
    "dense": (3, 100, 5, 32, (40, 24), None, "_dense"),
    "dense-short": (1, 9, 2, 64, (16, 16), None, "_dense"),
    "dense-all-channels": (1, 131, 32, 64, (24, 16), None, "_dense"),
    "heads": (2, 75, 3, 16, (3, 16, 24), 3, "_heads"),
    "heads-one-channel": (1, 33, 1, 16, (2, 20, 16), None, "_heads"),
    "diagonal": (3, 100, 5, 32, (48, 1, 1), 2, "_diagonal"),
    "diagonal-all-channels": (1, 70, 32, 32, (40, 1, 1), None, "_diagonal"),
    "heads-too-narrow": (2, 40, 3, 16, (4, 3, 3), 2, None),
}


@dtypes
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "state-and-right-padding"])
@pytest.mark.parametrize("case", OPERATORS.values(), ids=OPERATORS)
def test_the_operator_agrees_with_the_definition(case, padded, dtype, launches):
    B, L, K, C, shape, G, kind = case
    operator, D = SpectralOperator(H, chunk_size=C), shape[0] * shape[1] if len(shape) == 3 else shape[0]
    u, gates, _ = make_inputs(B, L, K, D=D, dtype=dtype)
    if G:
        gates = random(B, L, K, G, dtype=dtype, seed=1).abs()
    M = random(K, *shape, dtype=dtype, seed=2)
    x0, lengths = None, None
    if padded:
        x0 = reachable_state(operator, K, D, B, dtype)
        lengths = torch.arange(L, L - B, -1)
        for row, length in enumerate(lengths):
            u[row, length:] = 0
    torch.use_deterministic_algorithms(False)  # scatters of the definition have no deterministic form
    expected = run(operator, "naive", u, gates, M, x0, lengths)
    assert not launches
    torch.use_deterministic_algorithms(True)
    actual = run(operator, "chunked", u, gates, M, x0, lengths)
    for name in expected:
        error = relative_error(actual[name], expected[name])
        assert error < (2e-4 if dtype == torch.float32 else 2e-2), f"{name}: {error:.1e}"  # as of all algorithms
    kernels = {"_scan_forward", "_scan_backward"}
    if kind:
        kernels |= {f"{kind}_forward", f"{kind}_backward"}
    if kind == "_heads":
        kernels |= {"_heads_mixing_gradient"}
    assert set(launches) == kernels


def test_what_they_do_not_run(launches, monkeypatch):
    def operate(dtype=torch.float32, C=16):
        launches.clear()
        SpectralOperator(H, chunk_size=C)(*make_inputs(1, 20, 2, D=16, E=16, dtype=dtype))
        return bool(launches)

    assert operate()
    assert operate(torch.bfloat16)
    assert not operate(torch.float16)
    assert not operate(torch.float64)
    assert not operate(C=8)
    assert not operate(C=65)
    with monkeypatch.context() as patch:
        patch.setattr(kernels_essm, "_MOST_STATES", 1)
        assert not operate()
    monkeypatch.setenv("ESSM_TRITON", "0")
    assert not operate()
