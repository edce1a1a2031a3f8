# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Elastic state models compared: statistics of depths that are known, sizes that match, batches, and tiny sweeps."""

import numpy as np
import pytest
import torch

from benchmarks import chains, elastic_states
from benchmarks.elastic_measures import AROUND, Flops, around_events, auroc, controls, flops_of, rank_correlation, told
from benchmarks.elastic_states import IN_USE, ROWS, Settings, summarise
from benchmarks.elastic_tasks import SET_ASIDE, Maze, Measured, Repair, gate

SMALL = Settings("", 1, batch_size=2, latent_size=8, hidden_size=8)


def make_model(name, task, settings=SMALL):
    torch.manual_seed(0)
    return elastic_states.make_model(settings, ROWS[name], task).eval()


def test_auroc_and_rank_correlation_with_ties():
    scores = torch.tensor([0, 1, 1, 2, 0])
    hard = torch.tensor([False, True, False, True, False])
    pairs = [(s > t) + 0.5 * (s == t) for s in (1, 2) for t in (0, 1, 0)]
    assert auroc(scores, hard) == pytest.approx(np.mean(pairs)) and np.isnan(auroc(scores, hard | True))
    ranks = np.corrcoef([1.5, 3.5, 3.5, 5, 1.5], [1, 2, 3, 4, 5])[0, 1]
    assert rank_correlation(scores, torch.arange(5.0)) == pytest.approx(ranks)


def test_depths_are_told_of_positions_that_exist():
    depths = torch.tensor([[0, 2, 1, 3], [1, 1, 0, 3]])
    hard = torch.tensor([[False, True, False, True], [False, False, True, True]])
    real = torch.tensor([[True, True, True, True], [True, True, True, False]])
    errors = torch.tensor([[9.0, 1, 2, 3], [8, 7, 6, 0]])
    refined = torch.tensor([[0.0, 0, 0.5, 4], [1, 0, 3, 0]])
    measured = Measured({"energy": 1.0}, depths, depths.float(), refined, errors, hard, real)
    found = told(measured)
    assert found["mean_depth"] == pytest.approx(8 / 7) and found["objective"] == pytest.approx(8.5 / 7)
    assert found["depth_difficult"] == pytest.approx(5 / 3) and found["depth_easy"] == pytest.approx(3 / 4)
    assert found["error_correlation"] == pytest.approx(rank_correlation(depths[real], errors[real]))
    # Stretches begin at 1 and 3 of the first stream and at 2 of the second; what follows their end counts as well.
    assert around_events(measured)[AROUND - 2 :][:4] == [1.5, 2 / 3, 5 / 3, 1.0]


@pytest.mark.parametrize("name", ["SSM + attention", "Transformer, small"])
def test_rows_have_the_parameters_of_the_whole_model(name, data_dir):
    task, settings = Repair(data_dir, 1), Settings(data_dir, 1)
    used, whole = (elastic_states.parameters_of(make_model(n, task, settings), ROWS[n]) for n in (name, "ESM"))
    assert used == pytest.approx(ROWS[name].share * whole, rel=0.06)


def test_flops_are_counted(data_dir):
    q, k = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 9, 4)
    with Flops() as flops:
        torch.nn.functional.scaled_dot_product_attention(q, k, k)
        torch.linalg.cholesky(torch.eye(6))
        torch.cholesky_solve(torch.ones(6, 2), torch.eye(6))
    assert flops.total == 4 * 2 * 4 * 9 + 6**3 // 3 + 2 * 6 * 6 * 2
    task = Repair(data_dir, 1)
    model = make_model("ESM, metric I", task)
    model.corrector.log_step_size.data.fill_(-6.0)  # so that no step is refused
    none, one = (flops_of(task, model, depth, streams=1) for depth in (0, 1))
    readout = 2 * (8 * 64 + 64 * 3)
    assert none == 2 * (15 * 8 + 8 * 8) + readout
    assert one - none == pytest.approx(2 * readout)  # backward where the state is, and forward where it went


class Depth:
    """A task of 20 streams of 30 positions, every third of them difficult; the gate says 2 there."""

    def measure(self, model, depths=gate, gate_threshold_shift=0.0):
        hard = torch.arange(30) % 3 == 0
        rows = []
        for t in range(30):
            asked, own = depths(hard[t].expand(20)), 2 if gate_threshold_shift < 2 else 1
            rows.append(own * hard[t].expand(20).long() if asked is None else torch.as_tensor(asked).expand(20))
        taken, zero = torch.stack(rows, 1), torch.zeros(20, 30)
        return Measured({}, taken, zero, zero, zero, hard.expand(20, 30), torch.ones(20, 30, dtype=torch.bool))


def test_controls_spend_what_the_gate_does():
    task = Depth()
    found = controls(task, None, task.measure(None), 3, seed=0)
    assert found["thresholds -2"]["mean_depth"] == 2 / 3 and found["thresholds +2"]["mean_depth"] == 1 / 3
    assert found["none"]["mean_depth"] == 0 and found["all"]["mean_depth"] == 3
    for name in ("mean everywhere", "by chance", "where difficult"):
        assert found[name]["mean_depth"] == pytest.approx(2 / 3, abs=0.08), name  # four deviations of 600 positions
    assert found["where difficult"]["depth_easy"] == 0 and found["by chance"]["auroc"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("kind", [Repair, Maze])
@pytest.mark.parametrize("name", ["SSM", "ESM, one step everywhere"])
def test_rows_learn_with_the_depths_that_they_work_with(kind, name, data_dir, monkeypatch):
    """Where they go by themselves too: else they would meet in tests what they have never seen."""
    task = kind(data_dir, 1)
    task.longer, task.length = 2, 8
    model, asked = make_model(name, task), []
    gradient, before = model.corrector.gradient, [p.clone() for p in model.parameters()]
    monkeypatch.setattr(model.corrector, "gradient", lambda here: asked.append(1) or gradient(here))
    found = elastic_states.train(model, ROWS[name], task, SMALL, elastic_states.Run(name, 3e-3, 0))
    assert bool(asked) == (name != "SSM") and found["updates_done"] == 2 and not found["diverged"]
    assert not all(map(torch.equal, before, model.parameters()))


def test_models_that_learnt_without_refinement_are_refined_in_use(data_dir, monkeypatch):
    monkeypatch.setattr("benchmarks.elastic_measures.SHIFTS", ())
    task = Repair(data_dir, 1)
    model = make_model("SSM", task)
    own = task.measure(model, lambda difficult: 0)
    found = elastic_states.other_depths(task, model, ROWS["SSM"], own, 3, 0)
    assert own.depths.sum() == 0 < found[IN_USE]["mean_depth"]
    assert found["all"]["objective"] < found["none"]["objective"]
    assert found["none"]["values"] == pytest.approx(own.values)
    assert elastic_states.other_depths(task, model, ROWS["ESM, one step everywhere"], own, 3, 0) == {}


def test_mazes_are_the_same_at_a_seed_whatever_the_model_does():
    task = Maze("", 1)
    models = [make_model(name, task).train() for name in ("SSM", "ESM")]
    one, again, other = (task.batch(np.random.default_rng(1), 3, models[i]) for i in (0, 0, 1))
    assert all(torch.equal(one[name], again[name]) for name in ("input_features", "expert", "real"))
    assert torch.equal(one["view"][:, 0], other["view"][:, 0]) and torch.equal(one["goal"][:, 0], other["goal"][:, 0])
    assert models[0].training and one["input_features"].shape == (3, task.length, task.features)


def test_models_are_told_what_their_objective_knows_and_not_what_is_right(data_dir):
    """How far a chain has drifted, and what was said before of the cells in view; native steps change nothing."""
    task = Repair(data_dir, 2)
    model, read = make_model("ESM", task), task.test["observations"]
    found = task.follow(model, task.test)
    expected = read["place"][:, 1:] - read["step"][:, 1:] - found["readouts"].cumsum(1)[:, :-1]
    torch.testing.assert_close(found["features"][:, 1:, -3:], expected, rtol=0, atol=1e-4)
    other = task.follow(model, task.test | {"native": torch.randn_like(task.test["native"])})
    assert found["depths"].any() and all(torch.equal(found[name], other[name]) for name in found)
    maze = Maze("", 1)
    seen = maze.follow(make_model("SSM", maze), maze.walks(maze.test_seed)[:3])
    said, known = seen["features"][..., -50:].chunk(2, -1)
    assert not known[:, 0].any() and (known[:, 1].sum(-1) >= 6).all()  # of the inner 3 x 3 seen before
    assert not said[known == 0].any() and said[known > 0].any()


def test_a_rate_is_not_chosen_by_what_is_tested(data_dir, monkeypatch):
    task = Repair(data_dir, 2)
    model = make_model("SSM", task)
    found = task.validate(model, gate)
    monkeypatch.setattr(task, "test", None)
    assert task.validate(model, gate) == found >= 0
    known = chains.read_chains(f"{data_dir}/protein_chains")[0]
    aside = chains.collate(chains.fixed_windows(known[::SET_ASIDE]))["native"]
    torch.testing.assert_close(task.validation["native"], aside[:2])  # and these are not learnt from
    assert len(task.train) == len(known) - len(known[::SET_ASIDE])


def test_rows_are_means_of_what_every_seed_has():
    def record(seed, energy, **more):
        own = {"values": {"energy": energy}, "mean_depth": 1.0, "flops": 8.0} | more
        record = {"task": "repair", "model": "ESM", "rate": 0.01, "seed": seed, "diverged": False, "parameters": 9}
        return record | {"own": own, "metric": {"1": energy}, "controls": {}}

    aligned = {"around_events": [None, 1.0, 2.0]}
    records = [record(0, 1.0, auroc=0.5, rank_correlation=float("nan"), **aligned), record(1, 3.0, auroc=0.7)]
    (row,) = summarise(records)
    assert row["energy"] == {"mean": 2.0, "deviation": pytest.approx(2**0.5)} and row["auroc"]["mean"] == 0.6
    assert "rank_correlation" not in row and row["flops"]["mean"] == 8.0
    assert row["around_events"][0] is None and row["around_events"][1]["mean"] == 1.0


@pytest.mark.slow
def test_elastic_states_from_end_to_end(quick, data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.elastic_measures.SHIFTS", ())
    order = ["--data_dir", data_dir, "--tasks", "repair", "--only", "SSM", "Transformer", "ESM", "--seeds", 0]
    report = quick(elastic_states, *order, "--rates", 0.01, "--runs_dir", tmp_path / "runs")
    rows = {(r["model"], r["control"]): r for r in report["results"]}
    assert rows["SSM", None]["over_ssm"] == 1 and rows["Transformer", None]["flops_over_transformer"] == 1
    assert {control for model, control in rows if model == "ESM"} >= {None, "none", "all", "by chance"}
    assert rows["SSM", IN_USE]["flops"]["mean"] > rows["SSM", None]["flops"]["mean"]
    assert rows["ESM", None]["minus_esm"]["mean"] == 0 and "native" in report["references"]
    assert {path.name for path in tmp_path.glob("*.png")} == {"report.png", "report_depths.png"}
