# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Pruning sweeps: what is reported of curves that are known, pooled images, and a tiny run from end to end."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import state_pruning
from benchmarks.state_pruning import (
    METHODS,
    MODELS,
    Settings,
    Task,
    additivity,
    largest_within,
    make_model,
    pruned,
    sizes_at,
    word_ids,
)
from modeling_essm.companions import elastic_layers, is_pruned


def test_the_largest_ratio_stops_at_the_first_that_loses_more():
    ratios = (0.0, 0.1, 0.2, 0.3)
    assert largest_within([0.10, 0.10, 0.12, 0.10], ratios) == 0.1
    assert largest_within([0.10, 0.11, 0.109, 0.05], ratios) == 0.3
    assert largest_within([0.10, 0.20, 0.10, 0.10], ratios) == 0.0


def test_equal_shares_leave_a_mode():
    assert sizes_at(0.5, [8, 5]) == [4, 3] and sizes_at(0.95, [8, 2]) == [1, 1] and sizes_at(0.0, [3]) == [3]


def test_images_are_averaged_over_squares(monkeypatch):
    images = torch.arange(2 * 16.0).view(2, 16, 1)
    batch = {"input_features": images, "labels": torch.tensor([1, 2])}
    monkeypatch.setattr("essm_train.data.rows.collate", lambda reader, samples: batch)
    found = state_pruning.batch_of(None, [], Task("smnist", 2), "cpu")
    assert found["input_features"][0, :, 0].tolist() == [2.5, 4.5, 10.5, 12.5]  # of rows 0123 4567 89.. of a 4 x 4
    assert found["labels"].tolist() == [1, 2]
    assert torch.equal(state_pruning.batch_of(None, [], Task("smnist"), "cpu")["input_features"], images)


def test_words_are_the_same_ids_wherever_they_stand(monkeypatch):
    one, other = (word_ids(text.encode(), 50) for text in ("It was, it wasn't!", "IT"))
    assert one.tolist() == word_ids(b"it was it wasn't", 50).tolist() and one[0] == one[2] == other[0]
    assert len(one) == 4 and 1 <= int(one.min()) <= int(one.max()) < 50
    assert len(word_ids(b"!", 50)) == 1 and word_ids([*b"it", 257], 50).tolist() == other.tolist()
    samples = [SimpleNamespace(values=text, label=1) for text in (b"a good one", b"bad")]
    monkeypatch.setattr("essm_train.data.rows.collate", lambda reader, samples: {"labels": torch.tensor([1, 1])})
    batch = state_pruning.batch_of(None, samples, Task("text", words=50), "cpu")
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]] and batch["input_ids"][1, 1:].tolist() == [0, 0]


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    data = SimpleNamespace(num_labels=3, reader=SimpleNamespace(config_fields={"num_input_features": 1}))
    return make_model(request.param, Task("smnist"), Settings(None, 1, hidden_size=4), data)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_leaves_as_many_modes_as_asked_for(model, method):
    modes = [layer.read().modes for layer in elastic_layers(model)]
    smaller, kept = pruned(model, method, 0.5, seed=0)
    assert abs(sum(kept) - sum(modes) / 2) <= 1
    assert not is_pruned(smaller) and sum(smaller.config.state_sizes) < sum(modes)
    if METHODS[method][1] == "uniform":
        assert kept == [n // 2 for n in modes]
    assert [layer.read().modes for layer in elastic_layers(model)] == modes and not is_pruned(model)


def test_energies_of_equal_modes_do_not_add_up():
    """Of m equal modes the energy is m^2 of one, m times the sum of energies: also where only the weaker half goes."""
    torch.manual_seed(0)
    data = SimpleNamespace(num_labels=3, reader=SimpleNamespace(config_fields={"num_input_features": 1}))
    model = make_model("s5", Task("smnist"), Settings(None, 1, hidden_size=4, num_hidden_layers=1), data)
    (layer,) = elastic_layers(model)
    system = layer.read()
    n = system.modes
    lam, C = torch.full_like(system.lam, 0.5), torch.ones_like(system.C)
    layer.module.set_lti(lam, torch.ones_like(system.B), C)
    ratio = 0.5
    (equal,) = additivity(model, ratio)
    assert equal == pytest.approx(n / 2, rel=1e-3)  # of m equal modes m^2 over m
    C = torch.zeros_like(C)
    C[:, 0, : n // 2], C[:, 1, n // 2 :] = 1.0, 0.5
    layer.module.set_lti(lam, torch.ones_like(system.B), C)
    (same,) = additivity(model, ratio)
    assert same == pytest.approx(n / 2, rel=1e-3)  # the weaker half, all equal among themselves


def test_modes_of_other_channels_add():
    """With modes for each channel, those of one add like equals, and those of two add their energies."""
    data = SimpleNamespace(num_labels=2, reader=SimpleNamespace(config_fields={"num_input_features": 1}))
    settings = Settings(None, 1, hidden_size=2, num_hidden_layers=1)
    model = make_model("s4d", Task("smnist"), settings, data)
    (layer,) = elastic_layers(model)
    system = layer.read()
    lam, C = torch.full_like(system.lam, 0.5), torch.full_like(system.C, 2.0)
    C[:, :, :5] = 0.1  # AIRE prunes these, in both channels
    layer.module.set_lti(lam, torch.ones_like(system.B), C, system.present)
    ratio = 5 / system.lam.shape[1]
    (found,) = additivity(model, ratio)
    assert found == pytest.approx(5, rel=1e-3)  # and not 10


def test_summary_of_known_runs(capsys):
    def record(seed, errors):
        curve = {"ratios": [0.0, 0.5], "errors": errors, "kept": [[4], [2]]}
        same = {"task": "digits", "model": "s5", "seed": seed, "diverged": False, "additivity": {"0.5": [1.0]}}
        return same | {"error": {"1": errors[0]}, "pruned": dict.fromkeys(METHODS, curve)}

    results = state_pruning.summarise([record(0, [0.1, 0.3]), record(1, [0.2, 0.2])])
    assert len(results) == len(METHODS)
    (aire,) = (r for r in results if r["method"] == "aire")
    assert aire["area"]["mean"] == pytest.approx((0.8 + 0.8) / 2)
    assert aire["largest_within_a_point"]["mean"] == pytest.approx(0.25)
    assert aire["steepest_fall"]["mean"] == pytest.approx(0.1) and aire["accuracy"]["mean"] == pytest.approx(0.85)
    assert [point["mean"] for point in aire["curve"]] == pytest.approx([0.85, 0.75])
    assert aire["kept_by_layer"] == [[4], [2]]
    state_pruning.print_tables(results)
    assert "digits, s5: accuracy 0.8500±0.0707, 2 seeds" in capsys.readouterr().out
    assert len(state_pruning.draw(results).axes) == 2


def test_bounds_are_compared_with_gains_by_task_and_model():
    layers = [{"sum_of_peaks": 2.0, "best": 2.0, "measured": 1.0}, {"sum_of_peaks": 9.0, "best": 6.0, "measured": 2.0}]
    record = {"task": "digits", "model": "s5", "certificates": {"0.2": layers[:1], "0.5": layers[1:]}}
    peaks, best = state_pruning.tightness([record, record])
    assert (peaks["bound"], peaks["layers"], peaks["least"], peaks["largest"]) == ("sum_of_peaks", 4, 2.0, 4.5)
    assert (best["task"], best["model"], best["median"]) == ("digits", "s5", 2.5)


def test_certificates_hold_on_a_model(model):
    for ratio in state_pruning.LOOKED_AT:
        found = state_pruning.certificates(model, ratio)
        assert found and all(0 < layer["measured"] <= layer["best"] * (1 + 1e-9) for layer in found)


@pytest.mark.slow
def test_a_sweep_from_end_to_end(tmp_path, data_dir, capsys):
    out = tmp_path / "found.json"
    argv = ["--quick", "--data_dir", data_dir, "--tasks", "digits", "reviews", "--seeds", "0", "--out", str(out)]
    argv += ["--runs_dir", str(tmp_path / "runs")]
    state_pruning.main(argv)
    report = json.loads(out.read_text())
    assert {(r["model"], r["method"]) for r in report["results"]} == {(m, n) for m in MODELS for n in METHODS}
    assert all(row["least"] >= 1 - 1e-9 for row in report["certificates"]) and out.with_suffix(".png").exists()
    capsys.readouterr()
    state_pruning.main(argv)
    assert "4 of 4 runs are there" in capsys.readouterr().out
