# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Budgets per layer: dynamic program, planted cases, lists in the model, trained models."""

import dataclasses
import itertools
import statistics

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from allocations import GATED, all_lists, cases, text
from helpers import assert_close, random_ids, random_model, tiny_config

from modeling_essm import ESSMForCausalLM
from modeling_essm.budgets import allocation as budget_allocation
from modeling_essm.budgets.allocation import (
    aire_budgets,
    allocate_spectral_budget,
    distortions,
    even_budgets,
    exchange,
    layer_statistics,
    minimise,
    non_increasing,
    read_calibration,
    spectral_mixers,
)

# From curves to lists.


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


@pytest.mark.slow
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
