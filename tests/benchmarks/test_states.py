# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Pruned and truncated state spaces: what is reported of curves that are known, and tiny runs from end to end."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import state_pruning, state_removal, state_tasks, state_truncation
from benchmarks.state_pruning import METHODS, MODELS, cut_layers, largest_within, pruned
from benchmarks.state_tasks import Task, word_ids
from modeling_essm.companions import DiagonalSSMConfig, DiagonalSSMForSequenceClassification, is_pruned, state_layers


def make_model(kind, layers=2):
    torch.manual_seed(0)
    sizes = {"num_labels": 3, "num_input_features": 1, "hidden_size": 4, "num_hidden_layers": layers}
    return DiagonalSSMForSequenceClassification(DiagonalSSMConfig(**sizes | MODELS[kind])).float()


def test_the_largest_ratio_stops_at_the_first_that_loses_more():
    ratios = (0.0, 0.1, 0.2, 0.3)
    assert largest_within([0.10, 0.10, 0.12, 0.10], ratios) == 0.1
    assert largest_within([0.10, 0.11, 0.109, 0.05], ratios) == 0.3


def test_images_are_averaged_and_words_are_hashed(monkeypatch):
    images = torch.arange(2 * 16.0).view(2, 16, 1)
    batch = {"input_features": images, "labels": torch.tensor([1, 2])}
    monkeypatch.setattr(state_tasks, "collate", lambda reader, samples: batch)
    found = state_tasks.batch_of(None, Task("smnist", 2), [])
    assert found["input_features"][0, :, 0].tolist() == [2.5, 4.5, 10.5, 12.5]  # of rows 0123 4567 89.. of a 4 x 4
    one, other = (word_ids(text.encode(), 50) for text in ("It was, it wasn't!", "IT"))
    assert one[0] == one[2] == other[0] and len(one) == 4 and 1 <= int(one.min()) <= int(one.max()) < 50
    samples = [SimpleNamespace(values=text, label=1) for text in (b"a good one", b"bad")]
    found = state_tasks.batch_of(None, Task("text", words=50), samples)
    assert found["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]] and found["input_ids"][1, 1:].tolist() == [0, 0]


@pytest.mark.parametrize("method", ["aire", "lamp", "uniform energy", "balanced"])
def test_methods_leave_as_many_modes_as_asked_for(method):
    for kind in MODELS:
        model = make_model(kind)
        modes = [layer.read().modes for layer in state_layers(model)]
        smaller, kept = pruned(model, method, 0.5, seed=0)
        assert abs(sum(kept) - sum(modes) / 2) <= 1
        assert not is_pruned(smaller) and sum(smaller.config.state_sizes) < sum(modes)
        if METHODS[method][1] == "uniform":
            assert kept == [n // 2 for n in modes]
        assert [layer.read().modes for layer in state_layers(model)] == modes  # a copy was made smaller


def test_energies_of_equal_modes_do_not_add_up():
    """The energy of m equal modes is m^2 of one, m times the sum of energies."""
    model = make_model("s5", layers=1)
    (layer,) = state_layers(model)
    system = layer.read()
    lam = torch.full_like(system.lam, 0.5)
    layer.module.set_lti(lam, torch.ones_like(system.B), torch.ones_like(system.C))
    (cut,) = cut_layers(model, 0.5)
    assert cut["energy"] == pytest.approx(system.modes / 2, rel=1e-3)


def test_summary_of_known_runs():
    def record(seed, errors):
        curve = {"ratios": [0.0, 0.5], "errors": errors, "kept": [[4], [2]]}
        layers = [{"energy": 1.0, "peaks": peaks, "measured": gain} for peaks, gain in ((2.0, 1.0), (9.0, 2.0))]
        same = {"task": "digits", "model": "s5", "seed": seed, "diverged": False, "cut_layers": {"0.2": layers}}
        return same | {"error": {"1": errors[0]}, "pruned": dict.fromkeys(METHODS, curve)}

    records = [record(0, [0.1, 0.3]), record(1, [0.2, 0.2])]
    aire = next(r for r in state_pruning.summarise(records) if r["method"] == "aire")
    assert aire["area"]["mean"] == pytest.approx((0.8 + 0.8) / 2)
    assert aire["largest_within_a_point"]["mean"] == pytest.approx(0.25)
    assert aire["steepest_fall"]["mean"] == pytest.approx(0.1) and aire["accuracy"]["mean"] == pytest.approx(0.85)
    assert [point["mean"] for point in aire["lost"]] == pytest.approx([0.0, 0.1])
    energy, peaks = state_pruning.over_truth(records)
    assert (energy["median"], peaks["layers"], peaks["least"], peaks["largest"]) == (1.0, 4, 2.0, 4.5)


def test_removed_modes_cost_nothing(quick):
    results = quick(state_removal, "--only", "s4d", "mamba")["results"]
    for name in ("parameters", "state_bytes"):
        for kind in (results[:4], results[4:]):
            found = [row[name] for row in kind]
            assert found == sorted(found, reverse=True) and 0 < found[-1] < found[0]


@pytest.mark.slow
def test_pruning_from_end_to_end(quick, data_dir, tmp_path):
    order = ["--data_dir", data_dir, "--tasks", "digits", "reviews", "--seeds", 0, "--runs_dir", tmp_path / "runs"]
    report = quick(state_pruning, *order)
    assert {(r["model"], r["method"]) for r in report["results"]} == {(m, n) for m in MODELS for n in METHODS}
    bounds = [row for row in report["certificates"] if row["of"] != "energy"]
    assert bounds and all(row["least"] >= 1 - 1e-9 for row in bounds) and (tmp_path / "report.png").exists()


def test_truncation_against_a_model_born_small(quick, data_dir, tmp_path):
    order = ["--data_dir", data_dir, "--tasks", "digits", "--only", "full", "tau 0.15", "--seeds", 0, 1]
    full, shrunk = quick(state_truncation, *order, "--runs_dir", tmp_path / "runs")["results"]
    assert full["modes"]["mean"] == 8 > shrunk["modes"]["mean"] and "born_small" not in full
    assert shrunk["time_over_full"]["mean"] > 0 and shrunk["time_over_born_small"]["mean"] > 0
    difference = shrunk["accuracy"]["mean"] - shrunk["born_small"]["mean"]
    assert shrunk["difference"]["mean"] == pytest.approx(difference)
    assert state_truncation.of_seeds([0.1, 0.5, 0.2, 0.3])["top_3"] == pytest.approx(1 / 3)
