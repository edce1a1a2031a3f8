# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Per-layer budgets: closed forms against measurement, dynamic program, planted cases, trained models, bad input."""

import argparse
import dataclasses
import importlib
import itertools
import json
import statistics

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_ids, random_model, randomise, tiny_config

from essm_train.tasks import catalog
from modeling_essm import ESSMForCausalLM, ESSMForSequenceClassification, ESSMModel
from modeling_essm.budgets import allocation as budget_allocation
from modeling_essm.budgets.allocation import (
    LayerStatistics,
    aire_budgets,
    allocate_spectral_budget,
    calibration_loss,
    channel_energies,
    distortions,
    even_budgets,
    exchange,
    gate_moments,
    layer_statistics,
    minimise,
    non_increasing,
    read_calibration,
    spectral_mixers,
)
from modeling_essm.spectral_basis import spectral_basis


def white(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def everywhere(x):
    return torch.ones(x.shape[:2], dtype=torch.bool)


def matrices(mixer):
    """M_k as the operator takes them."""
    return mixer.channel_mixing if mixer.mixing_heads is None else mixer.channel_mixing.unflatten(1, mixer.mixing_heads)


def text(rows=4, length=24, seed=0):
    return [{"input_ids": random_ids(rows, length, seed=seed)}]


# ---------------------------------------------------------------------------------------------------------------------
# Closed forms.


GATED = {"block": "gated", "inner_size": 16, "num_heads": 4, "mixing_size": 2}
CASES = {"softmax": {}, "none": {"gating": "none"}, "gated": GATED, "gated-diagonal": GATED | {"mixing_size": 1}}
cases = pytest.mark.parametrize("fields", CASES.values(), ids=CASES)


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def monte_carlo(request):
    """A mixer, its statistics in closed form, and its spectral branch at several K for white u and gates of another v.

    H = 1024; the first 1024 steps, in which the filters have not seen their whole length, are left out.
    """
    sizes = {"num_hidden_layers": 1, "filter_length": 1024, "scaling_exponent": 0.25}  # energies that fall with k
    (mixer,) = spectral_mixers(random_model(**sizes, **request.param))
    with torch.no_grad():
        if mixer.gated:
            mixer.gate_out.weight.mul_(10.0)  # gates that move
        u, v = white(4, 3072, 16, seed=1), white(4, 3072, 16, seed=2)
        budgets = (2, 4, 8, 16, 32)
        y = {K: mixer.operator(u, mixer.gates(v, K), matrices(mixer), algorithm="fft")[0] for K in budgets}
    found = LayerStatistics(channel_energies(mixer), *gate_moments(mixer, v[:, 1024:], everywhere(v[:, 1024:])))
    return mixer, u, found, {K: x[:, 1024:].double() for K, x in y.items()}


def test_distortions_are_those_measured(monte_carlo):
    mixer, _, found, y = monte_carlo
    B1, B2 = distortions(found, gain_free=False), distortions(found)
    power = float((found.square[-1] * found.energies).sum())
    assert power == pytest.approx(float(y[32].square().sum(-1).mean()), rel=0.05)
    for K in (2, 4, 8, 16):
        measured = float((y[32] - y[K]).square().sum(-1).mean())
        gain = float((y[32] * y[K]).sum() / y[K].square().sum())
        gain_free = float((y[32] - gain * y[K]).square().sum(-1).mean())
        # Slow filters leave about 200 independent samples; the rounding of fp32 shows below 1e-10 of the power.
        rel = 0.05 if mixer.num_heads == 1 else 0.1  # outputs of heads are sums of fewer independent terms
        assert float(B1[K - 1]) == pytest.approx(measured, rel=rel, abs=1e-10 * power)
        assert float(B2[K - 1]) == pytest.approx(gain_free, rel=rel, abs=1e-10 * power)
        tail = float((found.square[-1] * found.energies)[K:].sum())  # over channels, and over gates of heads
        if mixer.gated:  # dropping channels raises the gates of the others
            assert B1[K - 1] > 10 * tail and B1[K - 1] > 1.5 * B2[K - 1]
        else:
            assert float(B1[K - 1]) == pytest.approx(tail) and float(B2[K - 1]) == pytest.approx(tail)
    # Three fp64 sums of 32 terms that add up to `power` cancel: 4 * 32 eps = 3e-14 of it may stay.
    assert B1[-1] <= 1e-12 * power and B2[-1] <= 1e-12 * power


def test_powers_of_channels_add_up():
    (mixer,) = spectral_mixers(random_model(num_hidden_layers=1).double())
    basis, M, a = spectral_basis(512), mixer.channel_mixing.detach(), white(32, seed=3).double()
    phi = torch.from_numpy(basis.filters(32))
    weights = a * torch.from_numpy(basis.sigma[:32] ** mixer.scaling_exponent)

    def power(covariance_of_u):  # of sum_k a_k sigma_k^p (phi_k * u) M_k, all cross terms included
        features = phi.T @ covariance_of_u @ phi
        return float(torch.einsum("k,j,kj,kde,jde->", weights, weights, features, M, M))

    e = float((a**2 * channel_energies(mixer)).sum())
    assert power(torch.eye(512, dtype=torch.float64)) == pytest.approx(e, rel=1e-10)
    lags = torch.arange(512)
    coloured = 0.95 ** (lags[:, None] - lags).abs().double()
    assert abs(power(coloured) / e - 1) > 0.1  # so it is the whiteness that makes them add up


@cases
def test_energies_of_given_inputs_are_those_of_single_channels(fields):
    model = random_model(num_hidden_layers=1, **fields)
    (mixer,) = spectral_mixers(model)
    u = white(3, 40, 16).cumsum(1) @ white(16, 16, seed=1)  # coloured in time and across the width
    real = torch.arange(40) < torch.tensor([[40], [25], [1]])
    found = channel_energies(mixer, u, real)
    scale = mixer.operator.sigma(32, mixer.scaling_exponent, u)
    with torch.no_grad():
        for k in range(32):
            gates = F.one_hot(torch.tensor(k), 32) * scale
            y, _ = mixer.operator(u, gates.expand(3, 40, 32), matrices(mixer), algorithm="naive")
            power = y[real].square().unflatten(-1, (*found.shape[1:], -1)).sum(-1).mean(0)  # of each gate's outputs
            torch.testing.assert_close(found[k], power.double(), rtol=1e-4, atol=0.0)  # fp32 products


@cases
def test_statistics_average_over_real_positions_of_all_batches(fields):
    model, ids = random_model(**fields), random_ids(4, 20)
    mask = (torch.arange(20) < torch.tensor([[20], [20], [12], [3]])).long()
    whole = [{"input_ids": ids, "attention_mask": mask}]
    parts = [{"input_ids": ids[:1]}, {"input_ids": ids[1:2]}, {"input_ids": ids[2:3, :12]}, {"input_ids": ids[3:, :3]}]
    one, many = (layer_statistics(model, read_calibration(model, batches)) for batches in (whole, parts))
    for a, b in zip(one, many):
        for name in ("energies", "square", "cross"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-4, atol=0.0)
        assert a.weight == pytest.approx(b.weight, rel=1e-4)
    mixer, (gated, *_) = spectral_mixers(model)[0], one
    u = []
    hook = mixer.register_forward_pre_hook(lambda module, args: u.append(args[0]))
    with torch.no_grad():
        model(ids[:1])
        hook.remove()
        alpha = mixer.gates(mixer.operator_inputs(u[0]), 5).movedim(2, -1)
        alpha = (alpha / mixer.operator.sigma(5, mixer.scaling_exponent, u[0])).movedim(-1, 2)
    if mixer.gated:
        assert_close(alpha.sum(2), torch.ones_like(alpha[:, :, 0]))
    first = layer_statistics(model, read_calibration(model, parts[:1]))[0]
    assert_close(first.square[4, :5], alpha[0].square().mean(0).double(), atol=1e-6)
    assert (gated.square[4, 5:] == 0).all() and (gated.cross[4, 5:] == 0).all()


@pytest.mark.parametrize("fields, frozen", [({}, False), ({}, True), (GATED, False)], ids=str)
def test_weights_are_the_gradients_of_the_loss(fields, frozen):
    model, ids = random_model(**fields).requires_grad_(not frozen), random_ids(3, 20)
    mask = (torch.arange(20) < torch.tensor([[20], [14], [9]])).long()
    batches = read_calibration(model, [{"input_ids": ids, "attention_mask": mask}])
    with torch.no_grad():  # a caller's mode does not matter
        found = layer_statistics(model, batches)
    shifts = [torch.zeros(3, 20, 16, requires_grad=True) for _ in found]
    for mixer, shift in zip(spectral_mixers(model), shifts):
        mixer.register_forward_hook(lambda module, args, y, shift=shift: y + shift)
    logits = model(ids, attention_mask=mask).logits[:, :-1]
    losses = F.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
    losses[mask[:, 1:].bool()].sum().backward()
    for s, shift in zip(found, shifts):
        assert s.weight == pytest.approx(float(shift.grad.square().sum(-1)[mask.bool()].mean() / 16), rel=1e-3)
    assert all(parameter.grad is None for parameter in model.parameters()) or not frozen
    plain = random_model(ESSMModel)  # without a loss: the output's power
    y = []
    spectral_mixers(plain)[1].register_forward_hook(lambda module, args, out: y.append(out.detach()))
    weight = layer_statistics(plain, read_calibration(plain, text()))[1].weight
    assert weight == pytest.approx(1 / float(y[0].square().sum(-1).mean()), rel=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# From curves to lists.


def all_lists(total, capacities, min_budget):
    ranges = [range(min_budget, capacity + 1) for capacity in capacities]
    return [budgets for budgets in itertools.product(*ranges) if sum(budgets) == total]


def cost(curves, budgets, min_budget):
    return sum(curve[K - min_budget] for curve, K in zip(curves, budgets))


@pytest.mark.parametrize("seed", range(5))
def test_dynamic_program_is_brute_force(seed):
    rng, capacities = np.random.default_rng(seed), (6, 4, 7)
    curves = [rng.normal(size=capacity - 1) for capacity in capacities]  # of any shape
    falling = [np.sort(curve)[::-1] for curve in curves]
    costs = []
    for total in range(6, 18):
        lists = all_lists(total, capacities, 2)
        found = minimise(curves, total, 2)
        assert tuple(found) in lists
        assert cost(curves, found, 2) == pytest.approx(min(cost(curves, b, 2) for b in lists), abs=1e-9)
        costs.append(cost(falling, minimise(falling, total, 2), 2))
    assert costs == sorted(costs, reverse=True)  # more channels are never worse
    assert minimise(curves, 17, 2) == [6, 4, 7]


def test_identical_layers_get_the_same():
    convex = 0.5 ** np.arange(2.0, 33.0)
    straight = np.interp(range(2, 33), (2, 8, 32), (3.0, 1.0, 0.0))  # many lists are equally good
    E = 0.7 ** torch.arange(32) * (1 + torch.arange(32) % 3)  # scores that rise and fall
    for total in range(10, 5 * 32 + 1):
        for budgets in (minimise([convex] * 5, total, 2), minimise([straight] * 5, total, 2),
                        aire_budgets([E] * 5, total, 2), even_budgets(total, [32] * 5, 2)):  # fmt: skip
            assert sum(budgets) == total and max(budgets) - min(budgets) <= 1


def test_even_lists_respect_capacities():
    assert even_budgets(30, [32, 4, 32], 2) in ([13, 4, 13],)
    assert even_budgets(7, [4, 4, 4], 2) in ([3, 2, 2], [2, 3, 2], [2, 2, 3])


def test_prefix_rule():
    # Scores of layer 0: 1, 1/2, 0, 8/10 -> envelope 1, .8, .8, .8; of layer 1: 1, 1/2, 1/3, 1/4.
    energies = [torch.tensor([1.0, 1.0, 0.0, 8.0]), torch.ones(4)]
    found = [aire_budgets(energies, total, 1) for total in range(2, 9)]
    assert found == [[1, 1], [2, 1], [3, 1], [4, 1], [4, 2], [4, 3], [4, 4]]
    assert aire_budgets([1e-9 * energies[0], energies[1]], 5, 1) == [4, 1]  # ratios within a layer only
    assert aire_budgets([torch.zeros(4), torch.ones(4)], 6, 2) == [2, 4]


def test_isotonic_regression():
    assert non_increasing([3.0, 1.0, 2.0, 0.0]).tolist() == [3.0, 1.5, 1.5, 0.0]
    assert non_increasing([0.0, 3.0, 3.0]).tolist() == [2.0] * 3
    values = np.random.default_rng(0).normal(size=6)
    fit = non_increasing(values)
    assert (np.diff(fit) <= 1e-12).all()
    mean = lambda a, b: values[a : b + 1].mean()  # noqa: E731
    expected = [max(min(mean(a, b) for a in range(i + 1)) for b in range(i, 6)) for i in range(6)]  # min-max formula
    np.testing.assert_allclose(fit, expected, atol=1e-12)


def test_curves_are_measured_with_one_layer_reduced(monkeypatch):
    curves = [w * np.interp(range(33), (0, 4, 8, 16, 32), (9.0, 3.0, 1.0, 0.25, 0.0)) for w in (1.0, 8.0, 2.0)]
    seen = []

    def loss(model, batches, budgets):
        seen.append(tuple(budgets))
        return 5.0 + float(cost(curves, budgets, 0))

    monkeypatch.setattr(budget_allocation, "calibration_loss", loss)
    found = allocate_spectral_budget(random_model(num_hidden_layers=3), 24, calibration=text())
    assert cost(curves, found, 0) == pytest.approx(min(cost(curves, b, 0) for b in all_lists(24, [32] * 3, 2)))
    grid = [2, 3, 4, 6, 8, 12, 16, 24]
    one_reduced = [(K, 32, 32) for K in grid] + [(32, K, 32) for K in grid] + [(32, 32, K) for K in grid]
    assert seen[:25] == [(32, 32, 32), *one_reduced]
    assert all(sum(b) == 24 for b in seen[25:]) and len(seen) <= 25 + 3 + 2 * 3


def test_exchanges_follow_the_loss_of_the_whole_list():
    target, seen = (9, 2, 4), []

    def loss(budgets):
        seen.append(tuple(budgets))
        return float(sum(abs(K - wanted) for K, wanted in zip(budgets, target)))

    curves = [np.linspace(1.0, 0.0, 15)] * 3  # they tell nothing
    assert exchange(loss, [7, 4, 4], curves, 2) == [9, 2, 4]
    assert len(seen) == len(set(seen)) <= 1 + 2 * 3 and all(sum(b) == 15 and min(b) >= 2 for b in seen)
    assert exchange(lambda budgets: 0.0, [5, 5, 5], curves, 2) == [5, 5, 5]  # nothing falls, nothing moves
    assert exchange(loss, [16, 16, 16], curves, 2) == [16, 16, 16]


# ---------------------------------------------------------------------------------------------------------------------
# Planted cases.


@torch.no_grad()
def own_text(model):
    """Calibration data whose labels the model itself predicts, without a doubt: any change of it costs."""
    model.get_decoder().norm.weight.mul_(30.0)
    ids = random_ids(4, 24)
    return [{"input_ids": ids, "labels": F.pad(model(ids).logits.argmax(-1)[:, :-1], (1, 0), value=-100)}]


ALL_METHODS = [("loss", True), ("distortion", True), ("aire", True), ("aire", False)]


@pytest.mark.parametrize("fields", [{}, GATED], ids=["paper", "gated"])
@pytest.mark.parametrize("method, calibrated", ALL_METHODS)
def test_a_dead_layer_gets_the_least(method, calibrated, fields):
    model = random_model(num_hidden_layers=3, **fields)
    with torch.no_grad():
        spectral_mixers(model)[1].channel_mixing.zero_()
    budgets = allocate_spectral_budget(model, 30, method, own_text(model) if calibrated else None)
    assert budgets[1] == 2 and sum(budgets) == 30
    ids = random_ids(2, 24, seed=9)
    with torch.no_grad():
        assert_close(model(ids, spectral_budget=[32, 2, 32]).logits, model(ids).logits)
    statistics_ = layer_statistics(model, read_calibration(model, text()))
    for gain_free in (True, False):
        dead, live = (distortions(statistics_[layer], gain_free) for layer in (1, 0))
        assert (dead == 0).all() and (live[:31] > 0).all()


@cases
def test_channels_that_do_nothing_are_not_paid_for(fields):
    model = random_model(num_hidden_layers=3, **fields)
    mixer = spectral_mixers(model)[0]
    with torch.no_grad():
        mixer.channel_mixing[4:] = 0.0
        if mixer.gated:  # equal gates on the live channels, at every K
            mixer.gate_out.weight.zero_()
            mixer.gate_out.bias[4:] = -30.0
            mixer.gate_out.bias[:4] = 1.0
    found = layer_statistics(model, read_calibration(model, text()))[0]
    B1, B2 = distortions(found, gain_free=False), distortions(found)
    power = (found.square[-1] * found.energies).sum()
    assert (B2[3:] <= 1e-6 * power).all() and (B2[:3] > 1e-3 * power).all()  # fp32 gates
    if mixer.gated:
        assert (B1[3:16] > 0.01 * power).all()  # a pure gain: Eq. (8) still shares out what dead channels had
    else:
        assert (B1[3:] == 0).all()
    for method, calibration in (("distortion", text()), ("aire", text()), ("aire", None)):
        budgets = allocate_spectral_budget(model, 48, method, calibration)
        assert budgets[0] <= 4 and sum(budgets) == 48


def test_distortions_are_weighted_and_free_of_gain(monkeypatch):
    model = random_model(num_hidden_layers=3)
    same = layer_statistics(model, read_calibration(model, text()))[0]
    found = []
    for weights in ((1.0, 1.0, 1.0), (1.0, 1e4, 1.0)):
        layers = [dataclasses.replace(same, weight=weight) for weight in weights]
        monkeypatch.setattr(budget_allocation, "layer_statistics", lambda *args, layers=layers: layers)
        found.append(allocate_spectral_budget(model, 30, "distortion", text()))
        curves = [weight * non_increasing(distortions(same)[1:]) for weight in weights]
        assert found[-1] == minimise(curves, 30, 2)
    assert max(found[0]) < 14 < found[1][1]


def test_calibrated_prefix_rule_counts_the_gates():
    model = random_model()
    with torch.no_grad():
        spectral_mixers(model)[0].gate_out.bias[8:] -= 30.0  # closed, as far as Eq. (8) allows
    statistics_ = layer_statistics(model, read_calibration(model, text()))
    plain = [s.energies for s in statistics_]
    gated = [s.square[-1] * s.energies for s in statistics_]
    totals = range(4, 65, 6)
    expected = [aire_budgets(gated, total, 2) for total in totals]
    assert [allocate_spectral_budget(model, total, "aire", text()) for total in totals] == expected
    assert expected != [aire_budgets(plain, total, 2) for total in totals]


@pytest.mark.parametrize("method, calibrated", ALL_METHODS)
def test_totals(method, calibrated):
    model, calibration = random_model(num_hidden_layers=3), text() if calibrated else None
    allocate = lambda total, **kwargs: allocate_spectral_budget(model, total, method, calibration, **kwargs)  # noqa: E731
    assert allocate(3 * 32) == [32] * 3 and allocate(6) == [2] * 3 and allocate(3, min_budget=1) == [1] * 3
    budgets = allocate(np.int64(20))
    assert sum(budgets) == 20 and min(budgets) >= 2 and all(type(K) is int for K in budgets)
    if method == "aire":  # one threshold: lists are nested
        lists = [allocate(total) for total in range(6, 97, 6 if calibrated else 1)]
        assert all(a <= b for low, high in itertools.pairwise(lists) for a, b in zip(low, high))


@pytest.mark.parametrize("method, calibrated", ALL_METHODS)
def test_layers_of_different_capacity(method, calibrated):
    model = random_model()
    mixer = spectral_mixers(model)[1]
    mixer.channel_mixing = torch.nn.Parameter(mixer.channel_mixing[:8].detach().clone())
    mixer.gate_out.weight = torch.nn.Parameter(mixer.gate_out.weight[:8].detach().clone())
    mixer.gate_out.bias = torch.nn.Parameter(mixer.gate_out.bias[:8].detach().clone())
    calibration = text() if calibrated else None
    assert allocate_spectral_budget(model, 40, method, calibration) == [32, 8]
    first, second = allocate_spectral_budget(model, 30, method, calibration)
    assert first + second == 30 and 2 <= second <= 8
    with pytest.raises(ValueError, match=r"integer in \[4, 40\]"):
        allocate_spectral_budget(model, 41, method, calibration)


# ---------------------------------------------------------------------------------------------------------------------
# Lists in the model.


def test_a_uniform_list_is_the_integer():
    model, ids = random_model(), random_ids(2, 24)
    with torch.no_grad():
        for K in (2, 7, 32):
            assert torch.equal(model(ids, spectral_budget=[K, K]).logits, model(ids, spectral_budget=K).logits)
        assert not torch.equal(model(ids, spectral_budget=[7, 6]).logits, model(ids, spectral_budget=7).logits)


def test_generation_with_a_list_is_the_full_forward():
    model, ids = random_model(num_hidden_layers=3), random_ids(2, 9)
    with torch.no_grad():
        spectral_mixers(model)[0].channel_mixing[4:] *= 0.1
    budgets = allocate_spectral_budget(model, 21)
    assert budgets[0] < 7 < budgets[1]
    out = model.generate(
        ids, max_new_tokens=8, do_sample=False, spectral_budget=budgets, output_logits=True,
        return_dict_in_generate=True, eos_token_id=None,
    )  # fmt: skip
    with torch.no_grad():
        full = model(out.sequences, spectral_budget=budgets).logits
        other = model(out.sequences, spectral_budget=7).logits
    assert_close(torch.stack(out.logits, 1), full[:, 8:-1])
    assert (full - other).abs().max() > 1e-3


def test_a_saved_list_comes_back(tmp_path):
    model, ids = random_model(), random_ids(2, 24)
    budgets = allocate_spectral_budget(model, 12, calibration=text())
    model.config.spectral_budget = budgets
    model.save_pretrained(tmp_path)
    loaded = ESSMForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.spectral_budget == budgets
    with torch.no_grad():
        out = loaded(ids)
        assert out.spectral_budget == tuple(budgets)
        assert torch.equal(out.logits, model(ids, spectral_budget=budgets).logits)
        assert not torch.equal(out.logits, loaded(ids, spectral_budget=32).logits)


# ---------------------------------------------------------------------------------------------------------------------
# Trained models.

VOCABULARY, LAG, LENGTH, AVERAGE = 16, 6, 32, 5


def copies(rows, seed):
    """(rows, 32) ids: nine times out of ten that of six steps before, else any."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
    for t in range(LAG, LENGTH):
        ids[:, t] = torch.where(torch.rand(rows, generator=generator) < 0.9, ids[:, t - LAG], ids[:, t])
    return ids


@pytest.fixture(scope="module")
def trained():
    """Three seeds of (model, calibration, losses, list that "loss" finds): three layers, seconds of training."""
    runs = []
    for seed in range(3):
        torch.manual_seed(seed)
        config = tiny_config(
            vocab_size=VOCABULARY, pad_token_id=None, bos_token_id=None, eos_token_id=None, num_hidden_layers=3,
            num_spectral_channels=16, chunk_size=32,
        )  # fmt: skip
        model, data = ESSMForCausalLM(config).train(), copies(512, seed)
        for mixer in spectral_mixers(model):
            torch.nn.init.normal_(mixer.channel_mixing, std=0.05)  # large enough to learn within seconds
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        for step in range(200):
            batch = data[torch.randint(0, len(data), (16,))]
            model(batch, labels=batch, spectral_budget=(2, 4, 8, 16)[step % 4], use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model, held_out = model.eval(), copies(128, 1000 + seed)

        @torch.no_grad()
        def losses(budget, model=model, held_out=held_out):
            """(rows,) mean loss of every held-out sequence."""
            logits = model(held_out, spectral_budget=budget).logits[:, :-1]
            return F.cross_entropy(logits.mT, held_out[:, 1:], reduction="none").mean(1).double()

        calibration = [{"input_ids": copies(64, 2000 + seed)}]
        runs.append((model, calibration, losses, allocate_spectral_budget(model, 3 * AVERAGE, "loss", calibration)))
    return runs


def test_chosen_lists_beat_uniform_and_random_ones(trained):
    rng = np.random.default_rng(0)
    gains = []
    for model, calibration, losses, budgets in trained:
        uniform = losses(AVERAGE)
        assert uniform.mean() < 2.5 < np.log(VOCABULARY)  # it has learnt something, which budgets can spoil
        chosen = losses(budgets)
        noise = float((chosen - uniform).std() / len(uniform) ** 0.5)
        assert chosen.mean() <= uniform.mean() + 3 * noise + 1e-6
        gains.append(float(uniform.mean() - chosen.mean()))
        lists = all_lists(3 * AVERAGE, [16] * 3, 2)
        drawn = [lists[i] for i in rng.choice(len(lists), 20, replace=False)]
        random_mean = statistics.fmean(float(losses([*other]).mean()) for other in drawn)
        assert chosen.mean() < random_mean - 0.05
        for method, data in (("distortion", calibration), ("aire", calibration), ("aire", None)):
            assert losses(allocate_spectral_budget(model, 3 * AVERAGE, method, data)).mean() < random_mean - 0.05
    assert statistics.fmean(gains) > 0.02  # measured: 0.07


def test_shuffled_importances_do_worse(trained, monkeypatch):
    """The same method with the layers' statistics handed to the wrong layers, and the measured list shuffled."""
    values = {order: [] for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1))}  # the first is the right one
    for model, calibration, losses, budgets in trained:
        right = layer_statistics(model, read_calibration(model, calibration))
        for order, found in values.items():
            shuffled = [right[layer] for layer in order]
            monkeypatch.setattr(budget_allocation, "layer_statistics", lambda *args, shuffled=shuffled: shuffled)
            for method in ("distortion", "aire"):
                chosen = allocate_spectral_budget(model, 3 * AVERAGE, method, calibration)
                found.append(float(losses(chosen).mean()))
            found.append(float(losses([budgets[layer] for layer in order]).mean()))
    right, *wrong = ([statistics.fmean(v[method::3]) for method in range(3)] for v in values.values())
    losses_by_shuffling = [statistics.fmean(w[method] for w in wrong) - right[method] for method in range(3)]
    assert min(losses_by_shuffling) > 0  # measured: 0.03 to 0.06
    assert statistics.fmean(losses_by_shuffling) > 0.02


# ---------------------------------------------------------------------------------------------------------------------
# Inputs.


def test_the_model_stays_as_it_is():
    model = random_model(dropout=0.5).train()
    model.model.layers[0].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stream = ({"input_ids": random_ids(2, 16, seed=i)} for i in range(2))  # read once, used many times
    first = allocate_spectral_budget(model, 20, "loss", stream)
    again = allocate_spectral_budget(model, 20, "loss", [{"input_ids": random_ids(2, 16, seed=i)} for i in range(2)])
    allocate_spectral_budget(model, 20, "distortion", text())
    assert first == again  # no dropout
    model.config.spectral_budget = 2  # the default of calls, not the capacity
    for method in budget_allocation.METHODS:
        found = allocate_spectral_budget(model, 20, method, text())
        model.config.spectral_budget = None
        assert found == allocate_spectral_budget(model, 20, method, text())
        model.config.spectral_budget = 2
    model.config.spectral_budget = None
    assert model.training and not model.model.layers[0].training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.config.spectral_budget is None and not any(m._forward_hooks for m in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_loss_is_the_mean_over_all_targets():
    model, ids = random_model(), random_ids(3, 24)
    mask = (torch.arange(24) < torch.tensor([[24], [10], [5]])).long()
    parts = [{"input_ids": ids[:1]}, {"input_ids": ids[1:2, :10]}, {"input_ids": ids[2:, :5]}]
    with torch.no_grad():
        logits = model(ids, spectral_budget=[3, 9]).logits[:, :-1]
    expected = F.cross_entropy(logits.mT, ids[:, 1:], reduction="none")[mask[:, 1:].bool()].mean()
    for calibration in (parts, [{"input_ids": ids, "attention_mask": mask}]):
        found = calibration_loss(model, read_calibration(model, calibration), [3, 9])
        assert found == pytest.approx(float(expected), rel=1e-5)
    labels = torch.full_like(ids, -100)
    labels[:, 7] = 1  # given labels are the ones
    found = calibration_loss(model, read_calibration(model, [{"input_ids": ids, "labels": labels}]), [3, 9])
    assert found == pytest.approx(float(-logits[:, 6].log_softmax(-1)[:, 1].mean()), rel=1e-5)


def test_padding_does_not_count():
    model, ids = random_model(num_hidden_layers=3), random_ids(3, 24)
    mask = torch.ones_like(ids)
    padded = {"input_ids": F.pad(ids, (0, 40)), "attention_mask": F.pad(mask, (0, 40))}
    left = {"input_ids": F.pad(ids, (40, 0)), "attention_mask": F.pad(mask, (40, 0))}
    for method in ("loss", "distortion", "aire"):
        expected = allocate_spectral_budget(model, 21, method, [{"input_ids": ids}])
        assert allocate_spectral_budget(model, 21, method, [padded]) == expected
        assert allocate_spectral_budget(model, 21, method, [left]) == expected
    losses = [
        calibration_loss(model, read_calibration(model, [b]), [9] * 3) for b in ({"input_ids": ids}, padded, left)
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


@pytest.mark.parametrize("method", budget_allocation.METHODS)
def test_classifiers_of_features(method):
    model = random_model(ESSMForSequenceClassification, num_input_features=2, num_labels=3)
    inputs = {"input_features": white(6, 20, 2), "attention_mask": torch.ones(6, 20, dtype=torch.long)}
    budgets = allocate_spectral_budget(model, 14, method, [inputs | {"labels": torch.arange(6) % 3}])
    assert sum(budgets) == 14
    if method != "loss":
        assert sum(allocate_spectral_budget(model, 14, method, [inputs])) == 14  # weights from the output's power


@pytest.mark.parametrize("method", budget_allocation.METHODS)
def test_pairs_of_documents(method, monkeypatch):
    from essm_train.tasks.retrieval import TwoTowerClassifier, TwoTowerConfig

    config = TwoTowerConfig(hidden_size=16, num_hidden_layers=2, filter_length=512, chunk_size=8, num_labels=2)
    model, ids = randomise(TwoTowerClassifier(config)).eval(), random_ids(3, 2, 20)
    mask = (torch.arange(20) < torch.tensor([[20, 5], [9, 20], [20, 20]])[..., None]).long()
    for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
        batch = [inputs | {"labels": torch.tensor([0, 1, 1])}]
        assert sum(allocate_spectral_budget(model, 14, method, batch)) == 14


def test_autoregression_is_measured_only():
    model = random_model(ar_order=2)
    assert sum(allocate_spectral_budget(model, 14, calibration=text())) == 14
    for method, calibration in (("distortion", text()), ("aire", None)):
        with pytest.raises(ValueError, match="ar_order = 2"):
            allocate_spectral_budget(model, 14, method, calibration)


REFUSED = {
    "total-low": ({"total": 3}, r"total must be an integer in \[4, 64\].*got 3"),
    "total-high": ({"total": 65}, r"total must be an integer in \[4, 64\].*got 65"),
    "total-float": ({"total": 8.0}, r"total must be an integer in \[4, 64\].*got 8.0"),
    "total-bool": ({"total": True, "min_budget": 1}, r"total must be an integer in \[2, 64\].*got True"),
    "min-budget": ({"min_budget": 33}, r"min_budget must be an integer in \[1, 32\].*got 33"),
    "min-budget-zero": ({"min_budget": 0}, r"min_budget must be an integer in \[1, 32\].*got 0"),
    "min-budget-bool": ({"min_budget": True}, r"min_budget must be an integer in \[1, 32\].*got True"),
    "method": ({"method": "magic"}, r"method must be one of \('loss', 'distortion', 'aire'\), got 'magic'"),
    "loss-without-data": ({"method": "loss"}, "'loss' needs calibration.*got None"),
    "distortion-without-data": ({"method": "distortion"}, "'distortion' needs calibration.*got None"),
    "empty": ({"calibration": []}, "must hold a batch"),
    "only-padding": (
        {"calibration": [{"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.zeros(1, 4)}]},
        "must hold a batch",
    ),
    "one-token": ({"calibration": [{"input_ids": torch.ones(1, 1).long()}]}, "must hold a batch"),
    "a-single-dict": ({"calibration": {"input_ids": torch.ones(1, 4).long()}}, "iterable of dicts.*got a dict of str"),
    "tensor": ({"calibration": torch.ones(2, 4).long()}, "iterable of dicts.*got a Tensor of Tensor"),
    "list-of-tensors": ({"calibration": [torch.ones(2, 4).long()]}, "iterable of dicts.*list of Tensor"),
    "no-inputs": ({"calibration": [{"labels": torch.ones(1, 4).long()}]}, r"must hold input_ids.*\['labels'\]"),
}


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_refused_before_any_compute(arguments, message):
    model = random_model()
    model.register_forward_pre_hook(lambda *args: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=message):
        allocate_spectral_budget(model, **{"total": 12, **arguments})


def test_labels_are_asked_for():
    classifier = random_model(ESSMForSequenceClassification, num_labels=3)
    classifier.register_forward_pre_hook(lambda *args: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=r"'loss' needs labels in every batch .* got only \['input_ids'\]"):
        allocate_spectral_budget(classifier, 12, calibration=text())
    with pytest.raises(ValueError, match="needs a model with a loss, got a ESSMModel"):
        allocate_spectral_budget(random_model(ESSMModel), 12, calibration=text())
    with pytest.raises(ValueError, match="ESSMSpectralMixer layers, got a Linear"):
        allocate_spectral_budget(torch.nn.Linear(2, 2), 12)


def test_a_loss_that_is_not_finite_is_refused():
    model = random_model()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"calibration loss at spectral_budget \[32, 32\] must be finite, got nan"):
        allocate_spectral_budget(model, 12, calibration=text())


# ---------------------------------------------------------------------------------------------------------------------
# benchmarks/budget_allocation.py


@pytest.fixture
def benchmark(monkeypatch):
    module = importlib.import_module("benchmarks.budget_allocation")
    monkeypatch.setattr(module, "seen", [], raising=False)  # calibration data that lists were chosen on

    def allocate(model, total, method, calibration, min_budget):
        module.seen.extend(calibration or [])
        return allocate_spectral_budget(model, total, method, calibration, min_budget)

    monkeypatch.setattr(module, "allocate_spectral_budget", allocate)
    return module


def save(tmp_path, cls=ESSMForCausalLM, **fields):
    folders = [str(tmp_path / f"seed{seed}" / "model") for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        random_model(cls, seed=seed, **fields).save_pretrained(folder)
    return folders


def test_benchmark_of_language_models(benchmark, tmp_path, capsys):
    folders, held_out, other = save(tmp_path, num_hidden_layers=3), tmp_path / "held_out.txt", tmp_path / "other.txt"
    held_out.write_text("the spectral state of the spectral budget " * 30)
    other.write_text("a balanced realisation of the Hankel operator " * 30)
    out = tmp_path / "report.json"
    arguments = ["--quick", "--device", "cpu", "--models", *folders, "--averages", "3", "8", "--block_size", "64"]
    files = ["--text_files", str(held_out), "--calibration_files", str(other), "--out", str(out)]
    report = benchmark.main([*arguments, *files])
    assert json.loads(out.read_text())["results"] == report["results"] and out.with_suffix(".png").stat().st_size > 0
    assert {"cpu", "cpu_cores", "torch"} <= report["machine"].keys() and str(tmp_path) not in out.read_text()
    assert "aire, no data" in capsys.readouterr().out
    assert all(bytes(ids[ids < 256].tolist()) in other.read_bytes() for b in benchmark.seen for ids in b["input_ids"])
    rows = {(row["average"], row["method"]): row for row in report["results"]}
    assert len(rows) == 2 * 6
    model = ESSMForCausalLM.from_pretrained(folders[0]).eval()
    options = {"block_size": 64, "batch_size": 3, "evaluation_size": 8, "calibration_size": 4}
    data = benchmark.open_text(
        argparse.Namespace(text_files=[str(held_out)], calibration_files=[str(other)], **options)
    )
    for average in (3, 8):
        found = report["models"][0]["averages"][average]
        for method in ("uniform", *benchmark.METHODS):
            assert found[method]["quality"] == pytest.approx(data.quality(model, found[method]["list"]), rel=1e-6)
            assert sum(found[method]["list"]) == 3 * average and min(found[method]["list"]) >= 2
        assert found["uniform"]["list"] == [average] * 3 and len(found["random"]["qualities"]) == 3
        row = rows[average, "loss"]
        values = [m["averages"][average]["loss"]["quality"] for m in report["models"]]
        uniform = [m["averages"][average]["uniform"]["quality"] for m in report["models"]]
        assert row["quality"]["deviation"] == pytest.approx(statistics.stdev(values))
        assert row["gain"]["mean"] == pytest.approx(statistics.fmean(uniform) - statistics.fmean(values))
        assert rows[average, "uniform"]["gain"]["mean"] == 0.0 and 0 <= row["beaten"] <= 1
    assert report["targets"][0]["value"] == min(rows[average, "loss"]["gain"]["mean"] for average in (3, 8))
    with pytest.raises(ValueError, match="must not share a file"):
        benchmark.main([*arguments, "--text_files", str(held_out), "--calibration_files", str(other), str(held_out)])
    with pytest.raises(ValueError, match="need --calibration_files"):
        benchmark.main([*arguments, "--text_files", str(held_out)])


def test_benchmark_reads_language_tasks(benchmark, tmp_path, monkeypatch):
    from essm_train.data.arguments import CLMArguments
    from essm_train.data.text import load_text
    from essm_train.data.tokens import ByteEncoder

    (tmp_path / "train.txt").write_text("a balanced realisation of the Hankel operator " * 30)
    (tmp_path / "validation.txt").write_text("the spectral state of the spectral budget " * 30)
    files = {f"{split}_file": [str(tmp_path / f"{split}.txt")] for split in ("train", "validation")}
    args = CLMArguments(**files, block_size=64, filter_length=512)
    monkeypatch.setattr(catalog, "make_arguments", lambda name, data_dir, scale: args)
    options = {"data_dir": "data", "scale": "full", "batch_size": 3, "evaluation_size": 5, "calibration_size": 4}
    data = benchmark.open_task(argparse.Namespace(task="novels", **options))
    blocks = [bytes(ids[ids < 256].tolist()) for batch in data.calibration for ids in batch["input_ids"]]
    train = (tmp_path / "train.txt").read_bytes()
    assert len(blocks) == 4 and all(block in train for block in blocks)
    rows, model = load_text(args, ByteEncoder()).held_out, random_model()
    assert len(rows) == 20
    rows = rows[[0, 5, 10, 14, 19]]
    with torch.no_grad():
        logits = model(rows, spectral_budget=[3, 5]).logits[:, :-1]
    nats = F.cross_entropy(logits.mT, rows[:, 1:].masked_fill(rows[:, 1:] > 255, -100))
    assert data.quality(model, [3, 5]) == pytest.approx(float(nats) / np.log(2), rel=1e-5)


def test_benchmark_of_classifiers(benchmark, tmp_path, monkeypatch):
    from essm_train.data.arguments import ClassificationArguments

    rng = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 7)):
        rows = pa.array(list(rng.integers(0, 256, (count, 16)).astype(np.uint8)), pa.list_(pa.uint8()))
        pq.write_table(pa.table({"pixels": rows, "label": rng.integers(0, 3, count)}), tmp_path / f"{split}.parquet")
    args = ClassificationArguments(
        train_file=[str(tmp_path / "train.parquet")], test_file=[str(tmp_path / "test.parquet")],
        features_column="pixels", num_labels=3, filter_length=512, cpu_threads=1,
    )  # fmt: skip
    monkeypatch.setattr(catalog, "make_arguments", lambda name, data_dir, scale: args)
    folders = save(tmp_path, ESSMForSequenceClassification, num_input_features=1, num_labels=3)
    out = tmp_path / "report.json"
    report = benchmark.main(
        ["--quick", "--device", "cpu", "--models", *folders, "--task", "smnist", "--averages", "3", "--out", str(out)]
    )
    assert report["metric"] == "accuracy" and "7 of " in report["data"] and "4 training samples" in report["data"]
    model = ESSMForSequenceClassification.from_pretrained(folders[1])
    table = pq.read_table(tmp_path / "test.parquet")
    pixels, labels = (torch.tensor(table[name].to_pylist()) for name in ("pixels", "label"))
    train = {tuple(row) for row in pq.read_table(tmp_path / "train.parquet")["pixels"].to_pylist()}
    drawn = [((row[:, 0] + 1) * 127.5).round().int().tolist() for b in benchmark.seen for row in b["input_features"]]
    assert drawn and all(tuple(row) in train for row in drawn)
    found = report["models"][1]["averages"][3]
    for name in ("uniform", "loss"):
        with torch.no_grad():
            logits = model(input_features=pixels[..., None] / 127.5 - 1, spectral_budget=found[name]["list"]).logits
        assert found[name]["quality"] == pytest.approx(float((logits.argmax(-1) == labels).double().mean()))


def test_random_lists_are_legal_and_equally_likely(benchmark):
    lists = [tuple(budgets) for budgets in benchmark.random_lists(3000, 12, (6, 4, 7), 2, seed=0)]
    legal = all_lists(12, (6, 4, 7), 2)
    counts = [lists.count(budgets) for budgets in legal]
    assert sum(counts) == 3000 and len(legal) == 14
    assert all(abs(count - 3000 / 14) < 5 * (3000 / 14) ** 0.5 for count in counts)


def test_a_list_as_the_default_of_a_config(tmp_path):
    model, ids = random_model(), random_ids(2, 16)
    budgets = allocate_spectral_budget(model, total=20, calibration=[{"input_ids": ids}])
    assert model.config.spectral_budget is None
    model.config.spectral_budget = budgets
    assert budgets == allocate_spectral_budget(model, 20, "loss", [{"input_ids": ids}])
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    with torch.no_grad():
        assert loaded(ids).spectral_budget == tuple(budgets)
        assert torch.equal(loaded(ids).logits, model(ids, spectral_budget=budgets).logits)
    with pytest.raises(ValueError, match="total must be"):
        allocate_spectral_budget(model, 1)
    assert model.config.spectral_budget == budgets
