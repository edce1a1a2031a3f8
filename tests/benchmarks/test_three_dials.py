# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Three dials in one model: each one acts, alone, and what is told of them is what was measured."""

import json

import pytest
import torch
from tiny_chains import write_chains

from benchmarks import three_dials
from benchmarks.elastic_measures import cost
from benchmarks.elastic_tasks import Repair
from benchmarks.three_dials import Settings, effects, front, make_model, smaller


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("data")
    write_chains(found / "protein_chains", 18)
    return found


@pytest.fixture(scope="module")
def task(folder):
    return Repair(folder, 1)


@pytest.fixture
def model(folder, task):
    torch.manual_seed(0)
    return make_model(Settings(str(folder), 1), task).eval()


@torch.no_grad()
@pytest.mark.slow
def test_every_dial_changes_the_output_and_costs_more_when_it_is_turned_up(model, task):
    places, costs = [], []
    for small, K, depth in ((model, 8, 3), (model, 2, 3), (smaller(model, 0.25), 8, 3), (model, 8, 1)):
        places.append(task.measure(small, lambda difficult, depth=depth: depth, spectral_budget=K).places)
        costs.append(cost(task, small, depth, 1, spectral_budget=K)["flops"])
    for place, flops in zip(places[1:], costs[1:]):
        assert (place - places[0]).abs().max() > 1e-4 and flops < costs[0]
    assert model.source.backbone.diagonal.config.state_sizes == [32]  # a copy was made smaller


@torch.no_grad()
def test_streams_give_what_sequences_give(model, task):
    observations = task.test["observations"]
    features = task.follow(model, task.test, spectral_budget=4)["features"][:1]
    whole = model(features, {n: x[:1] for n, x in observations.items()}, spectral_budget=4, refine_depth=2).readouts
    cache, found = None, []
    for t in range(features.shape[1]):
        seen = {name: x[:1, t] for name, x in observations.items()}
        output = model.step(features[:, t], cache, seen, spectral_budget=4, refine_depth=2)
        cache = output.past_key_values
        found.append(output.readouts)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-3, atol=1e-4)


def test_the_front_holds_what_nothing_beats():
    rows = [{"energy": e, "flops": f} for e, f in ((3, 1), (2, 2), (2, 3), (1, 3), (4, 1), (1, 3))]
    assert front(rows) == [True, True, False, True, False, True]


def test_effects_are_of_one_dial():
    def row(K, kept, depth, energy, flops):
        return {"budget": K, "kept": kept, "depth": depth, "energy": {"mean": energy}, "flops": {"mean": flops}}

    rows = [row(8, 1.0, "gate", 2.0, 100)]
    rows += [row(K, 1.0, "gate", 2.0 + 1 / K, 10 * K) for K in (2, 4)]
    rows += [row(8, kept, "gate", 2.0 / kept, 100 * kept) for kept in (0.5, 0.25)]
    rows += [row(8, 1.0, depth, 4.0, 30) for depth in (0, 1, 3)]
    found = {(r["dial"], r["set_to"]): r for r in effects(rows)}
    assert found["budget", 2]["energy_change"] == pytest.approx(0.25)
    assert found["budget", 4]["flops_saved"] == pytest.approx(0.6)
    assert found["kept", 0.25]["energy_change"] == pytest.approx(3.0) and len(found) == 7


@pytest.mark.slow
def test_a_table_from_end_to_end(folder, tmp_path, capsys):
    out = tmp_path / "found.json"
    argv = ["--quick", "--data_dir", str(folder), "--seeds", "0", "--runs_dir", str(tmp_path / "runs")]
    three_dials.main([*argv, "--out", str(out)])
    rows = json.loads(out.read_text())["results"]
    assert len(rows) == 36 and {r["states"][0] for r in rows} == {32, 16, 8}
    for r in rows:
        assert r["depth"] == "gate" or r["mean_depth"]["mean"] == r["depth"]
    assert 1 <= sum(r["on_front"] for r in rows) < 36
    assert out.with_suffix(".png").stat().st_size > 10_000
    capsys.readouterr()
    three_dials.main([*argv, "--out", str(out)])
    assert "1 of 1 runs are there" in capsys.readouterr().out
