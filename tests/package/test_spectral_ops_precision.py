# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Low precision, TF32, derivatives and CUDA of the spectral operator."""

import pytest
import torch
from operators import TOLERANCE, H, make_inputs, relative_error, run

from modeling_essm import spectral_step
from modeling_essm.spectral_ops import SpectralOperator


def test_autocast_runs_products_in_low_precision_and_state_in_fp32():
    operator = SpectralOperator(H)
    u, gates, M = make_inputs(1, 70, 8, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = operator(u, gates, M)
    assert y.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert relative_error(y, operator(u, gates, M)[0]) < TOLERANCE[torch.bfloat16]


def test_a_backward_pass_inside_autocast_keeps_the_state_in_fp32():
    operator = SpectralOperator(4096)
    u, gates, M = make_inputs(1, 1024, 32, dtype=torch.float32)
    gates[:, :, :31] = 0  # the channel that low precision loses
    gradients = []
    for inside in (False, True):
        leaf = u.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = operator(leaf, gates, M)[0].float().square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        gradients.append(leaf.grad)
    assert relative_error(gradients[1], gradients[0]) < 1e-6


def test_fp16_beyond_the_filter_length():
    """States pass 65504 there. The chunked operator stays finite where single steps do, and agrees with them."""
    operator, K = SpectralOperator(64, chunk_size=8), 22
    u, _, M = make_inputs(2, 192, K)
    gates = (operator.sigma(K, 0.25, u) / K).expand(2, 192, K).clone()
    half = [t.half().requires_grad_() for t in (u, gates, M)]
    y, state = operator(*half)
    assert state.abs().max() > 65504
    single = operator(*half, algorithm="step")[0]
    assert single.isfinite().all()
    expected = [t.detach().double().requires_grad_() for t in half]
    exact = operator(*expected)[0]
    size = float(exact.detach().abs().max())
    # Half a unit of fp16's last place, 2^-11, for each of u, gates, M, the gated feature and y; sums are of fp32.
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=5 * 2**-11 * size)
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=5 * 2**-11 * size)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) / size
    (y.double() * weights).sum().backward()
    (exact * weights).sum().backward()
    for name, low, high in zip(("du", "dgates", "dM"), half, expected):
        within = high.grad.abs() < 65504  # gradients of gates are as large as features
        assert within.double().mean() > 0.9
        error = (low.grad.double() - high.grad)[within].norm() / high.grad[within].norm()
        assert error < TOLERANCE[torch.bfloat16], name


TRANSFORMS = {
    "jvp": lambda f, u: torch.func.jvp(f, (u,), (torch.cos(u),))[1],
    "dual numbers": lambda f, u: _tangent(f, u),
    "grad": lambda f, u: torch.func.grad(f)(u),
    "vmap of grad": lambda f, u: torch.func.vmap(torch.func.grad(f))(torch.stack([u, 2 * u])),
    "jacfwd": lambda f, u: torch.func.jacfwd(f)(u),
    "hessian": lambda f, u: torch.func.hessian(f)(u),
}


def _tangent(f, u):
    with torch.autograd.forward_ad.dual_level():
        output = f(torch.autograd.forward_ad.make_dual(u, torch.cos(u)))
        return torch.autograd.forward_ad.unpack_dual(output).tangent


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_other_derivatives_are_those_of_the_definition(transform):
    operator = SpectralOperator(64, chunk_size=4)
    u, gates, M = make_inputs(1, 11, 3, D=2, E=2)

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


def test_errors():
    operator = SpectralOperator(H)
    u, gates, M = make_inputs(1, 10, 8)
    with pytest.raises(ValueError, match=r"spectral_algorithm must be one of .*got .winograd."):
        operator(u, gates, M, algorithm="winograd")
    with pytest.raises(ValueError, match="initial_state needs 24 states, got 5"):
        operator(u, gates, M, torch.zeros(1, 5, 12))


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
def test_agrees_with_the_definition_on_cuda(dtype, algorithm):
    operator = SpectralOperator(H)
    u, gates, M = (t.cuda() for t in make_inputs(2, 321, 32, dtype=dtype))
    expected = operator(u.double(), gates.double(), M.double(), algorithm="naive")
    for actual, truth in zip(operator(u, gates, M, algorithm=algorithm), expected):
        assert relative_error(actual[:, :32], truth[:, :32]) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["chunked", "step"])
def test_late_states_survive_tf32_on_cuda(algorithm):
    operator = SpectralOperator(H)
    u, gates, M = (t.cuda() for t in make_inputs(2, 321, 32, dtype=torch.float32))
    expected = operator(u.double(), gates.double(), M.double(), algorithm="naive")[1][:, 24:]
    torch.set_float32_matmul_precision("high")
    try:
        state = operator(u, gates, M, algorithm=algorithm)[1][:, 24:32]
    finally:
        torch.set_float32_matmul_precision("highest")
    assert relative_error(state, expected[:, :8]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_that_waits_for_memory(dtype, batch, threads, monkeypatch):
    """Without gradients, large M and few rows: read by an embedding bag, with the result of the product."""
    taken = []
    row_sum = spectral_step._weighted_row_sum
    monkeypatch.setattr(spectral_step, "_num_threads", lambda: threads)
    monkeypatch.setattr(spectral_step, "_weighted_row_sum", lambda *args: taken.append(1) or row_sum(*args))
    generator = torch.Generator().manual_seed(0)
    op, D, K = SpectralOperator(512), 128, 12
    u = torch.randn(batch, 1, D, generator=generator).to(dtype)
    gates = torch.rand(batch, 1, K, generator=generator).to(dtype)
    M, state = torch.randn(K + 2, D, D, generator=generator).to(dtype), torch.randn(batch, 40, D, generator=generator)
    with torch.no_grad():
        y, _ = op(u, gates, M, state, num_states=40)
    assert taken == [1]
    with torch.enable_grad():  # the product
        expected, _ = op(u, gates, M, state, num_states=40)
    assert taken == [1]
    error = (y.double() - expected.double()).norm() / expected.double().norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)
