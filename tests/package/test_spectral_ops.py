# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""All algorithms agree with the fp64 definition in outputs, final states and gradients, in every precision.

That the definition is Eq. (7) is tested in test_reference, and sequences cut in pieces with the models.
"""

import pytest
import torch
from operators import TOLERANCE, H, make_heads, make_inputs, reachable_state, relative_error, run
from torch.utils.flop_counter import FlopCounterMode

from modeling_essm import spectral_chunked, spectral_ops
from modeling_essm.spectral_ops import ALGORITHMS, SpectralOperator

algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)
FAST = pytest.mark.parametrize("algorithm", ["chunked", "fft", "step"])
MIXING = pytest.mark.parametrize("make", [make_inputs, make_heads], ids=["dense", "diagonal"])


def assert_agrees(operator, algorithm, u, gates, M, x0=None, lengths=None):
    expected = run(operator, "naive", u, gates, M, x0, lengths)
    actual = run(operator, algorithm, u, gates, M, x0, lengths)
    for name in expected:
        error = relative_error(actual[name], expected[name])
        assert error < TOLERANCE[u.dtype], f"{name}: {error:.1e}"


@FAST
@MIXING
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
def test_agrees_with_the_definition(dtype, algorithm, make):
    for B, L, K, C in ((2, 63, 3, 7), (3, 200, 32, 64), (2, 21, 6, 1)):
        assert_agrees(SpectralOperator(H, chunk_size=C), algorithm, *make(B, L, K, dtype=dtype))


@FAST
@MIXING
def test_agrees_with_the_definition_after_a_state_and_before_padding(algorithm, make):
    operator = SpectralOperator(H)
    for B, L, K in ((2, 1, 4), (3, 65, 32), (2, 200, 8)):
        u, gates, M = make(B, L, K)
        x0 = reachable_state(operator, K, u.shape[-1], B, u.dtype)
        lengths = torch.arange(L, L - B, -1).clamp(min=1)
        for row, length in enumerate(lengths):
            u[row, length:] = 0
        assert_agrees(operator, algorithm, u, gates, M, x0, lengths)


@algorithms
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
def test_nested_heads_agree_with_the_definition(dtype, algorithm, monkeypatch):
    """Head j has filters 1 to j; there may be more heads than filters, whose gates are zero. The gradient by a gate
    that is zero for being of a later filter counts nowhere."""
    monkeypatch.setattr(spectral_chunked, "_GROUP_BYTES_CPU", 1024)  # or each head alone would not pay
    for L, K, heads in ((63, 3, 3), (200, 4, 6), (21, 6, 6)):
        u, gates, M = make_heads(2, L, K, G=heads, dtype=dtype)
        has = torch.arange(K)[:, None] <= torch.arange(heads)
        gates *= has & (torch.arange(heads) < K)
        operator, lengths = SpectralOperator(H, chunk_size=16), torch.tensor([L, L - 5])
        given = u, gates, M, reachable_state(operator, K, u.shape[-1], 2, dtype), lengths
        expected, actual = run(operator, "naive", *given), run(operator, algorithm, *given, nested=True)
        expected["dgates"] *= has
        actual["dgates"] *= has
        for name in expected:
            error = relative_error(actual[name], expected[name])
            assert error < TOLERANCE[dtype], f"{name}: {error:.1e}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
@MIXING
def test_what_an_accelerator_runs_agrees_with_the_definition(dtype, make, monkeypatch):
    """Other sums, and groups of some chunks."""
    monkeypatch.setattr(spectral_chunked, "_is_on_cpu", lambda x: False)
    monkeypatch.setattr(spectral_chunked, "_memory", lambda device: 1 << 20)
    assert_agrees(SpectralOperator(H), "chunked", *make(3, 200, 32, dtype=dtype))


@pytest.mark.parametrize("filter_length, chunk_size, covered", [(64, 8192, 64), (2**16, 2**16, 512)], ids=str)
def test_a_chunk_is_no_longer_than_the_filters_and_512(filter_length, chunk_size, covered):
    """Its cost grows with the square of C: chunks of 8192 steps took 22 GiB at filters of 512."""
    assert SpectralOperator(filter_length, chunk_size=chunk_size) == SpectralOperator(filter_length, chunk_size=covered)


@FAST
def test_inputs_of_any_strides(algorithm):
    """Gates may be one row expanded, and inputs and matrices transposed."""
    operator, L, K, results = SpectralOperator(H), 130, 4, []
    u, gates, M = make_inputs(2, L, K)
    strange = [u.mT.contiguous().mT, gates[:1, :1].expand(2, L, K), M.mT.contiguous().mT]
    for tensors in ([t.contiguous() for t in strange], strange):
        leaves = [t.detach().requires_grad_() for t in tensors]
        y, state = operator(*leaves, algorithm=algorithm)
        results.append([y, state, *torch.autograd.grad(y.square().sum() + state.square().sum(), leaves)])
    for plain, other in zip(*results):
        torch.testing.assert_close(other, plain)


@algorithms
def test_a_budget_touches_only_its_prefix(algorithm):
    operator, K = SpectralOperator(H), 4
    u, gates, M = make_inputs(2, 70, K, capacity=16)
    x0 = reachable_state(operator, 16, u.shape[-1], 2, u.dtype)
    clean = run(operator, algorithm, u, gates, M[:K].clone(), x0[:, : operator.num_states(K)], None)
    M[K:] = float("nan")
    x0[:, operator.num_states(K) :] = float("nan")
    poisoned = run(operator, algorithm, u, gates, M, x0, None)
    for name in ("y", "state", "du", "dgates", "dx0"):
        assert torch.equal(poisoned[name], clean[name]), name
    assert torch.equal(poisoned["dM"][:K], clean["dM"])
    assert (poisoned["dM"][K:] == 0).all()


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "nested"),
    [(make_inputs, False), (make_heads, False), (make_heads, True)],
    ids=["dense", "diagonal", "nested"],
)
def test_the_librarys_counter_of_flops_counts_what_is_inside(make, nested, monkeypatch):
    """Of nested heads that are long enough, only the filters that they have."""
    monkeypatch.setattr(spectral_chunked, "_GROUP_BYTES_CPU", 1024)
    for L in (1, 9, 100):
        u, gates, M = make(
            2, L, 6, dtype=torch.bfloat16
        )  # in fp32 an in-place product is one that torch does not count
        inputs = u, gates, M, None, None, H, 20, 8, nested
        y, state, x = spectral_chunked._chunked_forward(*inputs)
        gradients = torch.ones_like(y), torch.ones_like(state), u, gates, M, x, None, H, 20, 8, nested
        for operator, arguments in (
            (spectral_chunked._chunked_forward, inputs),
            (spectral_chunked._chunked_backward, gradients),
        ):
            told, counted = (FlopCounterMode(display=False) for _ in range(2))
            with told:
                operator(*arguments)
            with counted:
                operator._init_fn(*arguments)
            assert told.get_total_flops() == counted.get_total_flops() > 0
            with FlopCounterMode(display=False) as whole:
                operator(*arguments[:-1], False)
            assert (told.get_total_flops() < whole.get_total_flops()) == (nested and L > 1)


def test_no_rows_make_a_step():
    """Where a step would wait for its matrices, too: rows of theirs are shared out among the threads."""
    u, gates, M = torch.zeros(0, 1, 256), torch.zeros(0, 1, 4), torch.zeros(4, 256, 256)
    assert M.nbytes >= spectral_ops._CACHED_BYTES_CPU
    assert SpectralOperator(H)(u, gates, M)[0].shape == (0, 1, 256)


def cut(which: int, positions: slice, channels: int | None = None):
    """Inputs of 10 positions and 8 channels, one of which has fewer."""
    tensors = [*make_inputs(2, 10, 8)]
    tensors[which] = tensors[which][:channels] if channels else tensors[which][:, positions]
    return tensors


@pytest.mark.parametrize(
    ("tensors", "x0", "algorithm", "message"),
    [
        (make_inputs(1, 10, 8), None, "winograd", r"spectral_algorithm must be one of .*got .winograd."),
        (
            make_inputs(1, 10, 8),
            torch.zeros(1, 5, 12),
            "chunked",
            r"initial_state must have shape \(1, >= 24, 12\), got \(1, 5, 12\)",
        ),
        (make_inputs(2, 10, 8), torch.zeros(1, 24, 12), "step", r"shape \(2, >= 24, 12\), got \(1, 24, 12\)"),
        (cut(1, slice(9)), None, "chunked", r"gates must have shape \(2, 10, K\), got \(2, 9, 8\)"),
        (cut(1, slice(9)), None, "step", r"gates must have shape \(2, 10, K\), got \(2, 9, 8\)"),
        (cut(2, slice(None), 4), None, "chunked", r"channel_mixing must have at least 8 channels of input width 12"),
        (make_heads(1, 9, 2, G=5), None, "chunked", "gates of 5 groups need diagonal M_k of a width that they divide"),
        (make_inputs(1, 10, 70), None, "chunked", rf"K must be in \[1, .*at filter_length {H}, got 70"),
        (make_inputs(1, 0, 8), None, "chunked", r"u must hold floating-point numbers of one step or more, got"),
    ],
    ids=[
        "algorithm",
        "state",
        "rows of the state",
        "length",
        "length of steps",
        "channels",
        "groups",
        "too many",
        "none",
    ],
)
def test_errors(tensors, x0, algorithm, message):
    with pytest.raises(ValueError, match=message):
        SpectralOperator(H)(*tensors, x0, algorithm=algorithm)


# --- Derivatives


def test_memory_of_a_backward_pass_does_not_hold_features():
    """Autograd keeps inputs and chunk states, not K features per token."""
    operator, K = SpectralOperator(H), 32
    u, gates, M = make_inputs(1, 1024, K, D=16, E=16, dtype=torch.float32)
    saved = []
    leaves = [t.requires_grad_() for t in (u, gates, M)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        operator(*leaves)
    kept = sum(t.numel() for t in saved) - sum(t.numel() for t in leaves)
    assert kept <= 1024 // 64 * operator.num_states(K) * 16 and kept < u.numel()


@algorithms
def test_constants_made_under_inference_mode_can_train(algorithm):
    operator = SpectralOperator(2048 + list(ALGORITHMS).index(algorithm))  # a filter length no other test uses
    u, gates, M = make_inputs(1, 70, 4)
    with torch.inference_mode():
        operator(u, gates, M, algorithm=algorithm)
    leaf = u.clone().requires_grad_()
    operator(leaf, gates, M, algorithm=algorithm)[0].sum().backward()
    assert leaf.grad.abs().sum() > 0


def _tangent(f, u):
    with torch.autograd.forward_ad.dual_level():
        output = f(torch.autograd.forward_ad.make_dual(u, torch.cos(u)))
        return torch.autograd.forward_ad.unpack_dual(output).tangent


TRANSFORMS = {
    "jvp": lambda f, u: torch.func.jvp(f, (u,), (torch.cos(u),))[1],
    "dual numbers": _tangent,
    "vmap of grad": lambda f, u: torch.func.vmap(torch.func.grad(f))(torch.stack([u, 2 * u])),
    "hessian": lambda f, u: torch.func.hessian(f)(u),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_other_derivatives_are_those_of_the_definition(transform):
    operator = SpectralOperator(64, chunk_size=4)
    u, gates, M = make_inputs(1, 27, 3, D=2, E=2)

    def energy(algorithm):
        return lambda u: operator(u, gates, M, algorithm=algorithm)[0].pow(2).sum()

    actual, expected = (TRANSFORMS[transform](energy(algorithm), u) for algorithm in ("chunked", "naive"))
    assert expected.abs().max() > 0.01
    assert relative_error(actual, expected) < TOLERANCE[torch.float64]


def test_a_second_derivative_in_reverse_mode_says_what_to_do():
    u, gates, M = make_inputs(1, 11, 3)
    u.requires_grad_()
    energy = SpectralOperator(H)(u, gates, M)[0].pow(2).sum()
    (gradient,) = torch.autograd.grad(energy, u, create_graph=True)
    with pytest.raises(NotImplementedError, match="spectral_algorithm"):
        gradient.pow(2).sum().backward()


# --- Precision


def test_autocast_runs_products_in_low_precision_and_state_in_fp32():
    """Also where the backward pass runs inside."""
    operator, gradients = SpectralOperator(4096), []
    u, gates, M = make_inputs(1, 1024, 32, dtype=torch.float32)
    gates[:, :, :31] = 0  # the channel that low precision loses
    for inside in (False, True):
        leaf = u.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, state = operator(leaf, gates, M)
            loss = y.float().square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        gradients.append(leaf.grad)
    assert y.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert relative_error(y, operator(u, gates, M)[0]) < TOLERANCE[torch.bfloat16]
    assert relative_error(gradients[1], gradients[0]) < 1e-6


def test_fp16_beyond_the_filter_length():
    """States pass 65504 there; outputs stay finite and exact, chunked and step by step."""
    operator, K = SpectralOperator(64, chunk_size=8), 22
    u, _, M = make_inputs(2, 192, K)
    gates = (operator.sigma(K, 0.25, u) / K).expand(2, 192, K).clone()
    half = [t.half().requires_grad_() for t in (u, gates, M)]
    y, state = operator(*half)
    assert state.abs().max() > 65504
    expected = [t.detach().double().requires_grad_() for t in half]
    exact = operator(*expected)[0]
    size = float(exact.detach().abs().max())
    # Half a unit of fp16's last place, 2^-11, for each of u, gates, M, the gated feature and y; sums are of fp32.
    for found in (y, operator(*half, algorithm="step")[0]):
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=5 * 2**-11 * size)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) / size
    (y.double() * weights).sum().backward()
    (exact * weights).sum().backward()
    for name, low, high in zip(("du", "dgates", "dM"), half, expected):
        within = high.grad.abs() < 65504  # gradients of gates are as large as features
        assert within.double().mean() > 0.9
        error = (low.grad.double() - high.grad)[within].norm() / high.grad[within].norm()
        assert error < TOLERANCE[torch.bfloat16], name


@pytest.fixture
def tf32_products(monkeypatch):
    """fp32 products as a GPU makes them once TF32 is allowed: operands keep 10 bits of mantissa."""

    def rounded(t):
        return (t.view(torch.int32) + 0x1000 & -0x2000).view(torch.float32) if t.dtype == torch.float32 else t

    for name in ("matmul", "bmm", "mm"):
        exact = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda a, b, exact=exact, **kw: exact(rounded(a), rounded(b), **kw))
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("algorithm", ["chunked", "step"])
def test_states_stay_exact_where_tf32_is_allowed(algorithm, tf32_products):
    operator, K = SpectralOperator(H), 32
    u, gates, M = make_inputs(2, 321, K, dtype=torch.float32)
    expected = run(operator, "naive", u, gates, M, None, None)

    def errors():
        actual = run(operator, algorithm, u, gates, M, None, None)
        late = relative_error(actual["state"][:, 24:], expected["state"][:, 24:])
        return late, relative_error(actual["y"], expected["y"]), relative_error(actual["du"], expected["du"])

    late, _, _ = errors()  # products are rounded, but the setting does not say so
    assert late > 20 * TOLERANCE[torch.float32]
    torch.set_float32_matmul_precision("high")
    late, y, du = errors()
    assert late < TOLERANCE[torch.float32]
    assert max(y, du) < 3e-3  # the large products stay in TF32, 2^-11 an operand


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["chunked", "step"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
@MIXING
def test_agrees_with_the_definition_on_cuda(dtype, algorithm, make):
    operator = SpectralOperator(H)
    u, gates, M = (t.cuda() for t in make(2, 321, 32, dtype=dtype))
    expected = operator(u.double(), gates.double(), M.double(), algorithm="naive")
    for tf32 in ("highest", "high"):
        torch.set_float32_matmul_precision(tf32)
        y, state = operator(u, gates, M, algorithm=algorithm)
        torch.set_float32_matmul_precision("highest")
        assert relative_error(y, expected[0]) < max(TOLERANCE[dtype], 3e-3 if tf32 == "high" else 0)
        assert relative_error(state[:, 24:32], expected[1][:, 24:32]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_that_waits_for_memory(dtype, monkeypatch):
    """Large matrices and few rows are read another way without gradients, with the result of the product."""
    operator = SpectralOperator(512)
    for batch, threads in ((1, 1), (1, 3), (3, 5)):
        monkeypatch.setattr(spectral_ops, "_num_threads", lambda threads=threads: threads)
        u, gates, M = make_inputs(batch, 1, 12, D=128, E=128, capacity=14, dtype=dtype)
        state = torch.randn(batch, 40, 128, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            y, _ = operator(u, gates, M, state, num_states=40)
        expected, _ = operator(u, gates, M.clone().requires_grad_(), state, num_states=40)
        assert relative_error(y, expected.detach()) < (1e-5 if dtype == torch.float32 else 1e-2)


def test_fewer_states_than_a_budget_needs_are_not_carried():
    inputs = make_inputs(2, 40, 8)
    for asked, found in zip(SpectralOperator(512)(*inputs, num_states=8), SpectralOperator(512)(*inputs)):
        assert torch.equal(asked, found)
