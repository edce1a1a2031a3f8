# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""S5, LRU and S4D against their definitions in NumPy, and what compression tools read and write."""

import copy
import math

import numpy as np
import pytest
import torch
from transformers import AutoModel

from modeling_essm.companions import DiagonalSSMConfig
from modeling_essm.companions.models.mixer_diagonal import MIXERS, as_complex, hippo_frequencies
from modeling_essm.companions.systems import OUTPUTS, DiagonalAdapter, DiagonalSystem

H = 3
KINDS = {
    "s5": {"parameterization": "s5"},
    "s5-bilinear": {"parameterization": "s5", "discretization": "bilinear"},
    "s5-free": {"parameterization": "s5", "clip_eigs": False},
    "lru": {"parameterization": "lru"},
    "s4d": {"parameterization": "s4d"},
    "s4d-bilinear": {"parameterization": "s4d", "discretization": "bilinear"},
}
kinds = pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
three = pytest.mark.parametrize("parameterization", ["s5", "lru", "s4d"])


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make(n=5, seed=0, dtype=torch.float64, **fields):
    """A mixer whose every weight is off its initial value, with steps long enough for modes to differ."""
    torch.manual_seed(seed)
    config = DiagonalSSMConfig(hidden_size=H, num_hidden_layers=1, state_size=n, dt_min=0.05, dt_max=0.3, **fields)
    mixer = MIXERS[config.parameterization](config, n).to(dtype)
    mixer.reset_parameters()
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.1 * random(*p.shape, seed=seed, dtype=dtype))
    return mixer


def lti(mixer):
    return DiagonalSystem(*mixer.lti())


def system(mixer):
    """lam, discrete B and C, and the factor of Re(C x), from the weights by the papers' formulas, in NumPy."""
    config = mixer.config
    w = {name: p.detach().double().numpy() for name, p in mixer.named_parameters()}
    C = w["C"][..., 0] + 1j * w["C"][..., 1]
    if config.parameterization == "lru":
        lam = np.exp(-np.exp(w["nu_log"]) + 1j * np.exp(w["theta_log"]))
        return lam, np.exp(w["gamma_log"])[:, None] * (w["B"][..., 0] + 1j * w["B"][..., 1]), C, 1.0
    if config.parameterization == "s5":
        A, dt = w["Lambda"][:, 0] + 1j * w["Lambda"][:, 1], np.exp(w["log_step"])
        B = w["B"][..., 0] + 1j * w["B"][..., 1]
    else:
        A, dt, B = -np.exp(w["log_A_real"]) + 1j * w["A_imag"], np.exp(w["log_dt"])[:, None], 1.0
    if config.discretization == "zoh":
        lam, factor = np.exp(A * dt), (np.exp(A * dt) - 1) / A
    else:
        lam, factor = (1 + A * dt / 2) / (1 - A * dt / 2), dt / (1 - A * dt / 2)
    return lam, (factor[:, None] * B if config.parameterization == "s5" else factor * B), C, 2.0


def run(mixer, u, x0=None):
    """y (B, L, H) and the last state, step by step in NumPy; in one direction."""
    lam, B, C, factor = system(mixer)
    siso, D = lam.ndim == 2, mixer.D.detach().double().numpy()
    ys = []
    x = np.zeros((len(u), *lam.shape), dtype=complex) if x0 is None else x0
    for t in range(u.shape[1]):
        x = lam * x + (B * u[:, t, :, None] if siso else u[:, t] @ B.T)
        ys.append(factor * ((C * x).sum(-1) if siso else x @ C.T).real + D * u[:, t])
    return np.stack(ys, 1), x


# --- Definitions


@kinds
def test_definition(fields):
    """Steps one by one, and the algorithm of long inputs. 1e-12: sums of 35 terms of size 10 in fp64."""
    mixer = make(**fields)
    for found, expected in zip(mixer.lti(), system(mixer)[:3]):
        np.testing.assert_allclose(found.detach().numpy(), np.broadcast_to(expected, found.shape), rtol=0, atol=1e-12)
    assert OUTPUTS[lti(mixer).output] == system(mixer)[3]
    x0 = torch.view_as_complex(random(2, *lti(mixer).lam.shape, 2))
    for L, state in ((1, None), (1, x0), (35, None), (35, x0)):
        u = random(2, L, H)
        y, last = mixer(u, state)
        expected, x = run(mixer, u.numpy(), None if state is None else x0.numpy())
        np.testing.assert_allclose(y.detach().numpy(), expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(last.detach().numpy(), x, rtol=0, atol=1e-12)


@three
def test_two_directions(parameterization):
    """y = C_1 x-> + C_2 x<- + D u: lag 0 counts in both, D once."""
    mixer = make(bidirectional=True, parameterization=parameterization)
    one, u = make(parameterization=parameterization), random(2, 21, H)
    expected = -(mixer.D.detach() * u).numpy()
    for i, way in enumerate((u, u.flip(1))):
        weights = mixer.state_dict()
        one.load_state_dict(weights | {"C": weights["C"][i]})
        y, _ = run(one, way.numpy())
        expected = expected + (y[:, ::-1] if i else y)
    y, last = mixer(u)
    assert last is None
    np.testing.assert_allclose(y.detach().numpy(), expected, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="state must be None"):
        mixer(u, torch.zeros(2, 5, dtype=torch.complex128))


# --- dtypes, no modes


@three
def test_the_recurrence_runs_in_fp32_of_bf16_weights(parameterization):
    mixer, u = make(parameterization=parameterization, dtype=torch.bfloat16), random(2, 40, H).bfloat16()
    y, state = mixer(u)
    assert y.dtype == torch.bfloat16 and state.dtype == torch.complex64
    expected, x = copy.deepcopy(mixer).double()(u.double())
    assert (y.double() - expected).abs().max() < 2**-8 * expected.abs().max()  # one rounding to bf16, at the end
    assert (state - x).abs().max() < 40 * 6e-7 * x.abs().max()  # fp32 over 40 steps
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mixer(u)[0], y)
    assert mixer.double()(u.double())[1].dtype == torch.complex128


@pytest.mark.parametrize(("parameterization", "bidirectional"), [("s5", True), ("lru", False), ("s4d", False)])
def test_no_modes(parameterization, bidirectional):
    """y = D u, an empty state, and a gradient of every parameter."""
    mixer, u = make(n=0, parameterization=parameterization, bidirectional=bidirectional), random(2, 4, H)
    y, state = mixer(u)
    assert torch.equal(y, mixer.D * u)
    assert bidirectional or state.shape == ((2, H, 0) if parameterization == "s4d" else (2, 0))
    y.sum().backward()
    assert all(p.grad is not None for p in mixer.parameters()) and mixer.D.grad.abs().min() > 0
    if not bidirectional:
        assert mixer(u[:, :1], state)[1].shape == state.shape
    assert lti(mixer).modes == 0
    mixer.set_lti(*mixer.lti()[:3])
    assert torch.equal(mixer(u)[0], y)


# --- What compression tools read and write


def modes(mixer, n, bidirectional=False, seed=5):
    """A system that the mixer can become: eigenvalues all over the disc, real ones of both signs among them."""
    siso = mixer.config.parameterization == "s4d"
    first = (H, n) if siso else (n,)
    lam = torch.polar(random(*first, seed=seed).sigmoid(), 3 * random(*first, seed=seed + 1))
    lam[..., :2] = torch.tensor([0.7, -0.4], dtype=lam.dtype)
    ways = (2,) if bidirectional else ()
    B = torch.view_as_complex(random(*(first if siso else (n, H)), 2, seed=seed + 2))
    return lam, B, torch.view_as_complex(random(*ways, H, n, 2, seed=seed + 3))


def assert_same_system(actual, lam, B, C):
    """To 1e-12; of one recurrence per channel only the product of B and C is kept."""
    torch.testing.assert_close(actual.lam, lam, rtol=0, atol=1e-12)
    if lam.ndim == 2:
        torch.testing.assert_close(actual.B * actual.C, B * C, rtol=1e-12, atol=1e-12)
    else:
        torch.testing.assert_close(actual.B, B, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(actual.C, C, rtol=1e-12, atol=1e-12)


@kinds
@pytest.mark.parametrize("n", [2, 8])
def test_it_becomes_any_system(fields, n):
    """Its own again, and others with fewer, as many and more modes."""
    mixer = make(bidirectional=n == 8, **fields)
    own, u = mixer.lti(), random(2, 9, H)
    y = mixer(u)[0]
    mixer.set_lti(*own[:3])
    assert_same_system(lti(mixer), *own[:3])
    torch.testing.assert_close(mixer(u)[0], y, rtol=0, atol=1e-12)
    old = dict(mixer.named_parameters())
    loss = mixer(u)[0].sum()
    target = modes(mixer, n, n == 8)
    if fields["parameterization"] == "lru":  # its phase is at least 1e-8
        target[0][..., 0] *= torch.polar(torch.ones((), dtype=torch.float64), torch.tensor(1e-3, dtype=torch.float64))
    mixer.set_lti(*target)
    assert_same_system(lti(mixer), *target)
    if fields["parameterization"] == "lru":  # normalised as a new one
        gamma = (1 - target[0].abs() ** 2).sqrt()
        torch.testing.assert_close(mixer.gamma_log.detach().exp(), gamma, rtol=1e-12, atol=0)
    for name, dim in mixer.mode_dims.items():
        new = getattr(mixer, name)
        assert new is not old.get(name) and new.shape[dim] == n == mixer.state_size and new.is_contiguous()
    marked = {name for name, p in mixer.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert marked == {*mixer.pole_names} | ({"B"} & set(old))
    assert mixer.D is old["D"]
    loss.backward()  # the graph of before is alive, and of the old parameters
    assert all(p.grad is not None and p.grad.shape == p.shape for p in old.values())


@three
def test_guards(parameterization):
    """lam = 0, real ones, and moduli up to 1: moved to where all logarithms and their gradients are finite."""
    mixer = make(n=3, parameterization=parameterization)
    lam, B, C = modes(mixer, 3)
    lam[...] = torch.tensor([0.0, 1.0 - 1e-12, 0.5], dtype=lam.dtype)
    mixer.set_lti(lam, B, C)
    written = lti(mixer).lam
    torch.testing.assert_close(written.abs(), lam.abs().clamp(1e-8, 1 - 1e-7), rtol=1e-9, atol=0)
    torch.testing.assert_close(written, lam, rtol=0, atol=2e-7)
    assert not lam.imag.any() and written.imag.abs().max() < 1e-12  # far below the half-width of any pole
    mixer(random(2, 5, H))[0].sum().backward()
    assert all(p.isfinite().all() and p.grad.isfinite().all() for p in mixer.parameters())
    with pytest.raises(ValueError, match=r"\|lam\| must be at most 1 in this parameterization, got 1.5"):
        mixer.set_lti(1.5 * torch.ones_like(lam), B, C)


@three
def test_bad_systems(parameterization):
    mixer = make(parameterization=parameterization)
    lam, B, C = modes(mixer, 4)
    for bad in ((lam, B[..., :2], C), (lam, B, C.expand(2, H, 4)), (lam, B, C * math.nan)):
        with pytest.raises(ValueError, match=r"lam, B and C of a layer of width 3 must be finite, \[\(.*\], got \["):
            mixer.set_lti(*bad)
    assert lti(mixer).lam.shape[-1] == 5  # nothing was written


def test_weights_may_lie_anywhere():
    """Safetensors begin on multiples of 8 bytes, and torch's kernels for complex128 end the process on others."""
    there = torch.zeros(26, dtype=torch.float64)
    there = there[1 - there.data_ptr() // 8 % 2 :][:24].view(4, 3, 2)  # on 8 modulo 16
    assert there.data_ptr() % 16 == 8 and as_complex(there, torch.float64).data_ptr() % 16 == 0


def test_padding_of_channels_stays_silent():
    """Whatever is stored there, and a step of training does not move it."""
    mixer, u = make(parameterization="s4d"), random(2, 9, H)
    keep = torch.rand(H, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    DiagonalAdapter().shrink(mixer, keep, 5)
    present = mixer.present
    assert present.sum() == keep.sum() and (mixer.C[present] != 0).all()
    y, _ = mixer(u)
    y.square().sum().backward()
    assert (mixer.C.grad[~present] == 0).all() and (mixer.C.grad[present] != 0).any()
    with torch.no_grad():
        mixer.C[~present] = 9.0
    assert torch.equal(mixer(u)[0], y) and (lti(mixer).C[~present] == 0).all()
    system, again = lti(mixer), copy.deepcopy(mixer)
    again.set_lti(system.lam, system.B, system.C, system.present)
    torch.testing.assert_close(again(u)[0], y, rtol=0, atol=1e-12)
    assert torch.equal(again.present, present)
    DiagonalAdapter().shrink(mixer, torch.arange(5).expand(H, 5) < 4, 4)
    assert torch.equal(mixer.present, present[:, :4])  # padding stays padding


# --- New weights


def fresh(n, width=64, **fields):
    torch.manual_seed(0)
    config = DiagonalSSMConfig(hidden_size=width, **fields)
    mixer = MIXERS[config.parameterization](config, n)
    mixer.reset_parameters()
    return mixer


def test_hippo_frequencies(n=4):
    """Eigenvalues of HiPPO-LegS plus its rank-one term, entry by entry."""
    A = np.zeros((2 * n, 2 * n))
    for j in range(2 * n):
        for k in range(2 * n):
            A[j, k] = -math.sqrt((2 * j + 1) * (2 * k + 1)) if j > k else -(j + 1) if j == k else 0.0
            A[j, k] += math.sqrt((j + 0.5) * (k + 0.5))
    found = np.linalg.eigvals(A)
    np.testing.assert_allclose(found.real, -0.5, atol=1e-12)
    np.testing.assert_allclose(np.sort(found.imag)[n:], hippo_frequencies(n), atol=1e-12)


@pytest.mark.parametrize(("parameterization", "kind"), [("s5", "hippo"), ("s4d", "linear")])
def test_new_poles(parameterization, kind):
    mixer = fresh(7, parameterization=parameterization, hippo_blocks=2)
    expected = math.pi * np.arange(7) if kind == "linear" else np.r_[hippo_frequencies(4), hippo_frequencies(3)]
    if parameterization == "s5":
        (re, im), steps = mixer.Lambda.detach().unbind(-1), mixer.log_step.exp()
    else:
        re, im, steps = -mixer.log_A_real.detach().exp()[5], mixer.A_imag.detach()[5], mixer.log_dt.exp()
    np.testing.assert_allclose(re, -0.5, rtol=1e-6)
    np.testing.assert_allclose(im, expected, rtol=1e-6)
    assert 0.001 <= steps.min() < steps.max() <= 0.1
    if parameterization == "s4d":
        assert steps.log().mean().sub(math.log(0.01)).abs() < 4 * math.log(100) / 12**0.5 / 8  # 64 draws, 4 sigma


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_new_lru_of_long_memory_is_finite_in_half_precision(dtype):
    config = {"parameterization": "lru", "state_size": 4000, "hidden_size": 1, "num_hidden_layers": 1, "r_min": 0.0}
    model = AutoModel.from_config(DiagonalSSMConfig(**config, r_max=0.99999), dtype=dtype)
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_pole_at_0_integrates():
    mixer = make(2, parameterization="s5", clip_eigs=False, bidirectional=False)
    mixer.Lambda.data[0] = 0
    lam, B, _ = mixer.system(torch.float64)
    assert lam[0] == 1
    torch.testing.assert_close(torch.view_as_real(B[0]), mixer.log_step[0].exp() * mixer.B[0])


def test_new_lru():
    mixer = fresh(4000, width=1, parameterization="lru", r_min=0.5, r_max=0.9, max_phase=1.0)
    lam = lti(mixer).lam
    squares, phases = lam.abs() ** 2, lam.angle()
    assert 0.5 <= lam.abs().min() < lam.abs().max() <= 0.9 + 1e-6 and 0 < phases.min() < phases.max() <= 1.0
    assert squares.mean().sub((0.25 + 0.81) / 2).abs() < 4 * 0.56 / 12**0.5 / 4000**0.5  # uniform, 4 sigma
    assert phases.mean().sub(0.5).abs() < 4 / 12**0.5 / 4000**0.5
    gamma = mixer.gamma_log.detach().double().exp()
    torch.testing.assert_close(gamma, (1 - squares).sqrt(), rtol=1e-5, atol=0)
