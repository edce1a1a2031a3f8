# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Elastic state models compared: statistics of depths that are known, sizes that match, batches, and a tiny sweep."""

import json

import numpy as np
import pytest
import torch
from tiny_chains import write_chains

from benchmarks import elastic_figures, elastic_measures, elastic_states
from benchmarks.elastic_measures import (
    AROUND,
    IN_USE,
    Flops,
    around_events,
    auroc,
    controls,
    cost,
    dithered,
    rank_correlation,
    told,
)
from benchmarks.elastic_states import ROWS, Settings, make_model, parameters_of
from benchmarks.elastic_tables import summarise
from benchmarks.elastic_tasks import Maze, Measured, Repair, always, gate
from essm_train.tasks import chains, mazes


def test_auroc_and_rank_correlation_with_ties():
    scores = torch.tensor([0, 1, 1, 2, 0])
    hard = torch.tensor([False, True, False, True, False])
    pairs = [(s > t) + 0.5 * (s == t) for s in (1, 2) for t in (0, 1, 0)]
    assert auroc(scores, hard) == pytest.approx(np.mean(pairs)) and np.isnan(auroc(scores, hard | True))
    assert rank_correlation(scores, scores.float().exp()) == pytest.approx(1.0)
    assert rank_correlation(scores, -scores) == pytest.approx(-1.0)
    ranks = np.corrcoef([1.5, 3.5, 3.5, 5, 1.5], [1, 2, 3, 4, 5])[0, 1]
    assert rank_correlation(scores, torch.arange(5.0)) == pytest.approx(ranks)


def test_depths_are_told_of_positions_that_exist():
    depths = torch.tensor([[0, 2, 1, 3], [1, 1, 0, 3]])
    hard = torch.tensor([[False, True, False, True], [False, False, True, True]])
    real = torch.tensor([[True, True, True, True], [True, True, True, False]])
    errors = torch.tensor([[9.0, 1, 2, 3], [8, 7, 6, 0]])
    refined = torch.tensor([[0.0, 0, 0.5, 4], [1, 0, 3, 0]])  # of five that worked, three are lower
    found = told(Measured({"energy": 1.0}, depths, depths.float(), refined, errors, hard, real), 3)
    assert found["lowered"] == pytest.approx(3 / 5) and found["objective"] == pytest.approx(8.5 / 7)
    assert found["mean_depth"] == pytest.approx(8 / 7) and found["histogram"] == [2, 3, 1, 1]
    assert found["depth_difficult"] == pytest.approx(5 / 3) and found["depth_easy"] == pytest.approx(3 / 4)
    assert found["error_correlation"] == pytest.approx(rank_correlation(depths[real], errors[real]))
    assert found["error_correlation_difficult"] == pytest.approx(
        rank_correlation(torch.tensor([2, 3, 0]), torch.tensor([1, 3, 6]))
    )
    events = around_events(Measured({}, depths, depths.float(), refined, errors, hard, real))
    # stretches begin at 1 and 3 of the first stream and at 2 of the second; what follows their end counts as well
    assert events[AROUND - 2 :][:4] == [1.5, 2 / 3, 5 / 3, 1.0] and events[0] is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("data")
    write_chains(found / "protein_chains", 18)
    return found


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.backbone])
@pytest.mark.parametrize("kind", [Repair, Maze])
def test_rows_have_the_parameters_of_the_whole_model(name, kind, folder):
    task, settings = kind(folder, 1), Settings(str(folder), 1)
    whole = make_model(settings, ROWS["ESM"], task).num_parameters()
    model = make_model(settings, ROWS[name], task)
    assert model.num_parameters() == pytest.approx(ROWS[name].share * whole, rel=0.05)


def test_flops_of_inner_steps_are_counted(folder):
    task, settings = Repair(folder, 1), Settings(str(folder), 1, latent_size=8, hidden_size=8)
    solves = {"ESM, metric I": 0, "ESM": 2 * 8 * 8}
    for name, solve in solves.items():
        torch.manual_seed(0)
        model = make_model(settings, ROWS[name], task).eval()
        model.corrector.log_step_size.data.fill_(-6.0)  # so that no step is refused
        none, one, two = (cost(task, model, depth, streams=1)["flops"] for depth in (0, 1, 2))
        readout = 2 * (8 * 64 + 64 * 3)
        assert none == 2 * (15 * 8 + 8 * 8) + readout
        # backward through the readout of where the state is, and forward through that of where it went
        once = (2 * 8**3 + 8**3 // 3) / 63 if solve else 0  # of the first stream alone: its factor is kept
        assert two - one + once == pytest.approx(2 * readout + solve)
        assert one - none - once == pytest.approx(2 * readout + solve)


def test_flops_of_attention_grow_with_what_is_attended_to():
    q, k = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 9, 4)
    with Flops() as flops:
        torch.nn.functional.scaled_dot_product_attention(q, k, k)
    assert flops.total == 4 * 2 * 4 * 9
    with Flops() as flops:
        torch.linalg.cholesky(torch.eye(6))
        torch.cholesky_solve(torch.ones(6, 2), torch.eye(6))
    assert flops.total == 6**3 // 3 + 2 * 6 * 6 * 2


def test_sizes_of_rows(folder):
    """As many parameters as the ESM, of those that a row uses; and a Transformer that costs more than it ever does."""
    task, settings = Repair(folder, 1), Settings(str(folder), 1)
    models = {name: make_model(settings, ROWS[name], task).eval() for name in ROWS if not name.startswith("ESM,")}
    sizes = {name: parameters_of(model, ROWS[name]) for name, model in models.items()}
    for name, share in {"SSM, wide": 1, "Transformer": 1, "SSM + attention": 1, "Transformer, large": 3}.items():
        assert sizes[name] == pytest.approx(share * sizes["ESM"], rel=0.06)
    assert sizes["SSM"] < 0.75 * sizes["ESM"] == 0.75 * models["ESM"].num_parameters()
    cost(task, models["ESM"], 1, 1)  # factors the metric, which is kept
    assert cost(task, models["Transformer, large"], 0, 1)["flops"] > cost(task, models["ESM"], 1, 1)["flops"]


class Depth(torch.nn.Module):
    """Takes the place of a task: 20 streams of 30 positions, every third of them difficult; the gate says 2 there."""

    def measure(self, model, depths=gate, gate_threshold_shift=0.0):
        hard = torch.arange(30) % 3 == 0
        rows = []
        for t in range(30):
            asked = depths(hard[t].expand(20))
            own = 2 if gate_threshold_shift < 2 else 1
            asked = own * hard[t].expand(20).long() if asked is None else torch.as_tensor(asked).expand(20)
            rows.append(asked)
        taken = torch.stack(rows, 1)
        zero = torch.zeros(20, 30)
        return Measured({}, taken, zero, zero, zero, hard.expand(20, 30), torch.ones(20, 30, dtype=torch.bool))


def test_controls_spend_what_the_gate_does():
    task = Depth()
    own = task.measure(None)
    found = controls(task, None, own, 3, seed=0)
    assert found["thresholds -2"]["mean_depth"] == 2 / 3 and found["thresholds +2"]["mean_depth"] == 1 / 3
    assert found["none"]["mean_depth"] == 0 and found["all"]["mean_depth"] == 3
    for name in ("mean everywhere", "by chance", "where difficult"):
        assert found[name]["mean_depth"] == pytest.approx(2 / 3, abs=0.08), name  # four deviations of 600 positions
    assert found["where difficult"]["depth_easy"] == 0 and found["by chance"]["auroc"] == pytest.approx(0.5, abs=0.1)
    assert found["mean everywhere"]["histogram"][2:] == [0, 0] and found["by chance"]["histogram"][1] == 0
    busy = Measured({}, own.depths + 1, *([own.losses] * 3), own.difficult, own.real)
    oracle = controls(task, None, busy, 3, seed=0)["where difficult"]  # 5/3: three at the difficult, the rest elsewhere
    assert oracle["depth_difficult"] == 3 and oracle["depth_easy"] == pytest.approx(1, abs=0.15)


def test_dithering_keeps_means():
    mean = torch.tensor([0.0, 0.25, 1.0, 2.75]).repeat_interleave(4000)
    found = dithered(mean, torch.Generator().manual_seed(0)).view(4, -1).double()
    assert found.amin(1).tolist() == [0, 0, 1, 2] and found.amax(1).tolist() == [0, 1, 1, 3]
    torch.testing.assert_close(found.mean(1), mean.view(4, -1)[:, 0].double(), rtol=0, atol=0.03)  # four deviations


def test_batches_are_the_same_at_a_seed_whatever_the_model_does():
    """The mazes, and where a step is random; ways differ where the model goes by itself."""
    task = Maze("", 1)
    torch.manual_seed(0)
    settings = Settings("", 1, latent_size=8, hidden_size=8)
    models = [make_model(settings, ROWS[name], task).train() for name in ("SSM", "ESM")]
    ways = []
    for seed in range(4):
        one, again, other = (task.batch(np.random.default_rng(seed), 3, models[i]) for i in (0, 0, 1))
        assert all(torch.equal(one[name], again[name]) for name in ("input_features", "expert", "real"))
        assert torch.equal(one["view"][:, 0], other["view"][:, 0]) and torch.equal(
            one["goal"][:, 0], other["goal"][:, 0]
        )
        ways.append(torch.equal(one["place"], other["place"]))
    assert models[0].training and one["input_features"].shape == (3, task.length, task.features)
    assert True in ways and False in ways  # the expert's and their own


def test_what_comes_after_an_arrival_stays():
    task = Maze("", 1)
    torch.manual_seed(0)
    model = make_model(Settings("", 1, latent_size=8, hidden_size=8), ROWS["SSM"], task).train()
    found = [task.batch(np.random.default_rng(seed), 3, model) for seed in range(4)]
    one = next(batch for batch in found if not batch["real"].all())
    assert torch.equal(one["real"], one["observations"]["goal"].abs().sum(-1) > 0)
    here = one["real"].long().cumsum(1) + 1  # the step of an arrival is seen once
    late = torch.arange(task.length) > here.amax(1, keepdim=True) - 1
    assert late.any() and not one["observations"]["moved"][late].any()


@pytest.mark.parametrize("kind", [Repair, Maze])
@pytest.mark.parametrize("name", ["SSM", "ESM", "ESM, one step everywhere"])
@pytest.mark.sampled(3)
def test_rows_learn_with_the_depths_that_they_work_with(kind, name, folder, monkeypatch):
    """Where they go by themselves too: else they would meet in tests what they have never seen."""
    settings, task = Settings(str(folder), 2, batch_size=2, latent_size=8, hidden_size=8), kind(folder, 1)
    torch.manual_seed(0)
    model, taken, asked = make_model(settings, ROWS[name], task), [], []
    move, gate = model.corrector._move, model.gate.depths
    monkeypatch.setattr(model.corrector, "_move", lambda here, *args: taken.append(len(here.z)) or move(here, *args))
    monkeypatch.setattr(model.gate, "depths", lambda *args: asked.append(1) or gate(*args))
    elastic_states.train(model, ROWS[name], task, settings, elastic_states.Run(name, 3e-3, 0, "either"))
    assert bool(taken) == (name != "SSM") and bool(asked) == (name == "ESM")
    if ROWS[name].everywhere and kind is Repair:  # a batch of two, in both updates, as they act and as they learn
        assert taken == [2] * (2 * 2 * 63)


@pytest.mark.parametrize("kind", [Repair, Maze])
def test_a_row_may_learn_without_refinement_at_first(kind, folder, monkeypatch):
    settings, task = Settings(str(folder), 4, batch_size=2, latent_size=8, hidden_size=8), kind(folder, 1)
    torch.manual_seed(0)
    model, calls, before = make_model(settings, ROWS["ESM, from three quarters"], task), [], []
    gradient, loss = model.corrector.gradient, task.loss
    monkeypatch.setattr(model.corrector, "gradient", lambda here: calls.append(1) or gradient(here))
    monkeypatch.setattr(task, "loss", lambda *args: before.append(len(calls)) or loss(*args))
    task.ahead = 1
    elastic_states.train(model, ROWS["ESM, from three quarters"], task, settings, elastic_states.Run("", 3e-3, 0))
    assert before[:3] == [0, 0, 0] and before[3] >= 2 * 3 * (63 if kind is Repair else 40)  # acting and learning


def test_models_that_learnt_without_refinement_are_refined_in_use(folder, monkeypatch):
    monkeypatch.setattr(elastic_measures, "SHIFTS", ())
    task, settings = Repair(folder, 1), Settings(str(folder), 1, latent_size=8, hidden_size=8)
    for name in ("SSM", "ESM, one step everywhere"):
        model = make_model(settings, ROWS[name], task).eval()
        own = task.measure(model, always(ROWS[name].depth))
        found = elastic_states.other_depths(task, model, ROWS[name], own, 3, 0)
        assert bool(found) == (IN_USE in found) == (name == "SSM")
        if name == "SSM":
            assert own.depths.sum() == 0 < found[IN_USE]["mean_depth"]
            assert found["all"]["objective"] < found["none"]["objective"]
            assert found["none"]["values"] == pytest.approx(own.values)


def test_models_are_told_what_their_objective_knows(folder):
    """How far a chain has drifted, and what was said before of the cells in view."""
    torch.manual_seed(0)
    settings = Settings("", 1, latent_size=8, hidden_size=8)
    task = Repair(folder, 2)
    model = make_model(settings, ROWS["SSM"], task)
    found = task.follow(model, task.test)
    drift = (task.test["observations"]["place"] - found["places"])[:, :-1]  # where the step before ended
    torch.testing.assert_close(found["features"][:, 1:, -3:], drift, rtol=0, atol=1e-5)
    assert not found["features"][:, 0, -3:].any()
    maze = Maze("", 2)
    model = make_model(settings, ROWS["SSM"], maze)
    seen = maze.walk(model, maze.test_walks(), gate)
    said, known = seen["features"][..., -50:].chunk(2, -1)
    assert not known[:, 0].any() and (known[:, 1].sum(-1) >= 6).all()  # of the inner 3 x 3 seen before
    assert not said[known == 0].any() and said[known > 0].any()


@torch.no_grad()
def test_what_is_right_is_not_seen(folder):
    """Other native steps change what is told of depths, readouts and refinement in nothing."""
    torch.manual_seed(0)
    task = Repair(folder, 2)
    model = make_model(Settings("", 1, latent_size=8, hidden_size=8), ROWS["ESM"], task).eval()
    found = task.follow(model, task.test)
    other = task.follow(model, task.test | {"native": torch.randn_like(task.test["native"])})
    assert found["depths"].any() and all(torch.equal(found[name], other[name]) for name in found)


def test_what_a_rate_is_chosen_by_is_not_learnt_from(folder):
    task = Repair(folder, 44)
    known = chains.read_chains(folder / "protein_chains")[0]
    learnt = [len(chain) for chain in task.train]  # which tells these chains apart
    aside = [chain for chain in known if len(chain) not in learnt]
    assert len(aside) == -(-len(known) // 6) and len(aside) + len(learnt) == len(known)
    windows = chains.collate(chains.fixed_windows(aside))["native"][:44]
    torch.testing.assert_close(task.validation["native"], windows)
    maze = Maze("", 2)
    first, second = (
        np.stack([walk.maze for walk in maze.walks(seed)]) for seed in (maze.test_seed, maze.validation_seed)
    )
    assert not np.array_equal(first, second)


def test_a_rate_is_not_chosen_by_what_is_tested(folder, monkeypatch):
    torch.manual_seed(0)
    settings = Settings("", 1, latent_size=8, hidden_size=8)
    for task, untouched in ((Repair(folder, 2), "test"), (Maze("", 1), "test_seed")):
        model = make_model(settings, ROWS["SSM"], task).eval()
        found = task.validate(model, gate)
        monkeypatch.setattr(task, untouched, None)
        assert task.validate(model, gate) == found >= 0


def test_a_walk_ends_where_all_have_arrived(monkeypatch):
    """No step of the model is taken, and counted, after that."""
    torch.manual_seed(0)
    task = Maze("", 1)
    model, calls = make_model(Settings("", 1, latent_size=8, hidden_size=8), ROWS["SSM"], task).eval(), []
    step = model.step
    monkeypatch.setattr(model, "step", lambda *args, **kwargs: calls.append(1) or step(*args, **kwargs))
    assert task.stream(model, 0) == len(calls) > 0


def test_proposals_are_wrong_by_what_the_objective_does_not_see(folder):
    torch.manual_seed(0)
    settings = Settings("", 1, latent_size=8, hidden_size=8)
    task, maze = Repair(folder, 2), Maze("", 3)
    model = make_model(settings, ROWS["ESM"], task).eval()
    measured, refined = task.measure(model, lambda difficult: 0), task.measure(model, lambda difficult: 2)
    steps = torch.cat([measured.places[:, :1], measured.places.diff(dim=1)], 1)
    torch.testing.assert_close(measured.errors, (steps - task.test["native"]).norm(dim=-1), rtol=0, atol=1e-4)
    assert not torch.allclose(
        refined.errors,
        (refined.places.diff(dim=1, prepend=torch.zeros(2, 1, 3)) - task.test["native"]).norm(dim=-1),
        atol=1e-2,
    )  # of what they are refined to
    model = make_model(settings, ROWS["SSM"], maze).eval()
    measured = maze.measure(model, lambda difficult: 0)
    walks = maze.test_walks()
    for i, walk in enumerate(walks):
        for t in measured.real[i].nonzero().flatten().tolist():
            assert list(walk.at) == measured.places[i, t].tolist()
            after = measured.places[i, t + 1].tolist() if t + 1 < measured.places.shape[1] else None
            if after is not None and after != list(walk.at):  # a move that was seen
                action = next(
                    a for a in range(4) if [walk.at[0] + mazes.MOVES[a][0], walk.at[1] + mazes.MOVES[a][1]] == after
                )
                assert measured.errors[i, t] == float(walk.costs()[action] > walk.costs().min())
                walk.step(action)
            else:
                break


def test_rows_are_means_of_what_every_seed_has():
    def record(seed, energy, **told):
        own = {"values": {"energy": energy}, "mean_depth": 1.0} | told
        record = {"task": "repair", "model": "ESM", "rate": 0.01, "seed": seed, "diverged": False, "parameters": 9}
        return record | {"own": own, "metric": {"1": energy}, "controls": {}, "cost": {"flops": 8.0, "seconds": 2.0}}

    aligned = {"around_events": [None, 1.0, 2.0]}
    records = [record(0, 1.0, auroc=0.5, rank_correlation=float("nan"), **aligned), record(1, 3.0, auroc=0.7)]
    (row,) = summarise(records, ROWS)
    assert row["energy"] == {"mean": 2.0, "deviation": pytest.approx(2**0.5)} and row["auroc"]["mean"] == 0.6
    assert "rank_correlation" not in row  # not defined for all of them
    assert "over_ssm" not in row  # which is not there
    ssm = record(0, 4.0) | {"model": "SSM"}
    large = record(0, 1.0) | {"model": "Transformer", "cost": {"flops": 16.0, "seconds": 2.0}}
    rows = {row["model"]: row for row in summarise([*records, ssm, large], ROWS)}
    assert (
        rows["ESM"]["over_ssm"] == 0.5 and rows["SSM"]["over_ssm"] == rows["Transformer"]["flops_over_transformer"] == 1
    )
    assert rows["ESM"]["flops_over_transformer"] == 0.5
    assert [at and at["mean"] for at in row["around_events"]] == [None, 1.0, 2.0]
    json.dumps(row, allow_nan=False)


def test_models_are_compared_at_equal_depth():
    """Between the points that their own gates reach with other thresholds, none and all; other controls say nothing."""

    def record(model, own, seed=0, **controls):
        def told(depth, energy):
            return {"values": {"energy": energy}, "mean_depth": depth}

        record = {"task": "repair", "model": model, "rate": 0.01, "seed": seed, "diverged": False, "parameters": 9}
        record |= {"own": told(*own), "metric": {"1": own[1]}, "cost": {"flops": 8.0, "seconds": 2.0}}
        return record | {"controls": {name.replace("_", " "): told(*value) for name, value in controls.items()}}

    esm = record("ESM", (0.5, 2.0), none=(0.0, 4.0), all=(3.0, 1.0), by_chance=(0.5, 3.9))
    other = record("ESM, penalty 3", (0.2, 5.0), none=(0.0, 6.0), all=(3.0, 2.0), **{"thresholds_-1": (0.8, 2.0)})
    transformer = record("Transformer", (0.0, 3.0))
    ssm = record("SSM", (0.0, 9.0), none=(0.0, 9.0), all=(3.0, 0.5), refined_in_use=(0.5, 1.0))
    ssm["cost_in_use"] = {"flops": 16.0, "seconds": 4.0}
    found = summarise([esm, other, transformer, ssm], ROWS)
    rows = {row["model"]: row for row in found if row["control"] is None}
    assert rows["SSM"]["at_esm_depth"]["mean"] == 1.0 and rows["SSM"]["minus_esm"]["mean"] == -1.0
    assert [row["flops"]["mean"] for row in found if row["control"] == IN_USE] == [16.0]
    assert rows["ESM"]["at_esm_depth"]["mean"] == 2.0 and "at_esm_depth" not in rows["Transformer"]
    assert rows["ESM, penalty 3"]["at_esm_depth"]["mean"] == pytest.approx(3.5)  # half of the way from 5 to 2
    assert rows["ESM, penalty 3"]["minus_esm"] == {"mean": pytest.approx(1.5), "deviation": 0.0, "seeds": 1}

    again = record(
        "ESM", (1.5, 3.0), 1, none=(0.0, 5.0), all=(3.0, 1.0), by_chance=(1.5, 9.0)
    )  # the ESM's depth is 1.0 now
    third = record(
        "ESM, penalty 3", (1.0, 9.0), 2, none=(0.0, 9.0), all=(3.0, 9.0), **{"thresholds_-1": (2.0, 9.0)}
    )  # a seed that the ESM has not
    rows = {row["model"]: row for row in summarise([esm, again, other, third], ROWS) if row["control"] is None}
    values = [2 - 0.2, 5 - 4 / 3]
    assert rows["ESM"]["at_esm_depth"]["mean"] == pytest.approx(np.mean(values))
    assert rows["ESM"]["at_esm_depth"]["deviation"] == pytest.approx(np.std(values, ddof=1))
    assert rows["ESM"]["minus_esm"] == {"mean": 0.0, "deviation": 0.0, "seeds": 2}
    assert rows["ESM, penalty 3"]["minus_esm"] == {"mean": pytest.approx(2.0 - 1.8), "deviation": 0.0, "seeds": 1}


@pytest.mark.slow
def test_a_sweep_from_end_to_end(folder, tmp_path, capsys):
    out = tmp_path / "found.json"
    argv = ["--quick", "--data_dir", str(folder), "--only", "SSM", "ESM", "Transformer", "--seeds", "0"]
    argv += ["--rates", "3e-3"]
    argv += ["--runs_dir", str(tmp_path / "runs"), "--out", str(out)]
    elastic_states.main(argv)
    report = json.loads(out.read_text())
    rows, (read, native) = report["results"], report["references"].values()
    assert native["rmsd_loop"] == 0 < read["rmsd_loop"] and native["energy"] < read["energy"]
    assert read["rmsd_outside"] == pytest.approx(0, abs=1e-4)
    assert read["objective_auroc"] > 0.8
    for task in ("repair", "maze"):
        found = {(r["model"], r["control"]): r for r in rows if r["task"] == task}
        depths = {None, "none", "all", "mean everywhere", "by chance", "where difficult"}
        depths |= {f"thresholds {shift}" for shift in ("-4", "-2", "-1", "+1", "+2")}
        assert {control for model, control in found if model == "ESM"} == depths
        assert {control for model, control in found if model == "SSM"} == depths | {IN_USE}
        assert found["SSM", IN_USE]["flops"]["mean"] > found["SSM", None]["flops"]["mean"]
        assert "at_esm_depth" in found["SSM", None] and "at_esm_depth" not in found["SSM", IN_USE]
        assert found["SSM", None]["mean_depth"]["mean"] == 0 and found["ESM", "all"]["mean_depth"]["mean"] == 3
        assert found["ESM", None]["flops"]["mean"] > found["SSM", None]["flops"]["mean"]
    capsys.readouterr()
    elastic_states.main([*argv, "--time", "3"])
    timed = [r["seconds_in_turn"] for r in json.loads(out.read_text())["results"] if r["control"] is None]
    assert len(timed) == len(elastic_states.TASKS) * 3
    assert all(0 < t["least"] <= t["median"] <= t["most"] for t in timed)
    runs = len(elastic_states.TASKS) * 3
    assert f"{runs} of {runs} runs are there" in capsys.readouterr().out

    argv = ["--data_dir", str(folder), "--runs_dir", str(tmp_path / "runs"), "--out_dir", str(tmp_path)]
    written = elastic_figures.main([*argv, "--example", "1"])
    assert [path.name for path in written] == [f"elastic_states{x}.png" for x in ("_repair", "_maze", "", "_depths")]
    assert all(path.stat().st_size > 10_000 for path in written)
    elastic_figures.main([*argv, "--model", "ESM, metric I"])
    assert "not drawn" in capsys.readouterr().out


@torch.no_grad()
def test_figures_show_what_is_measured(folder):
    torch.manual_seed(0)
    for kind in (Maze, Repair):
        task = kind(folder, 3)
        model = make_model(Settings(str(folder), 1, latent_size=8, hidden_size=8), ROWS["ESM"], task).eval()
        measured = task.measure(model)
        if kind is Maze:
            found = elastic_figures.walk_through(model, task, 2)
            there = measured.real[2]
            assert found["difficult"].tolist() == measured.difficult[2][there].tolist()
        else:
            found = elastic_figures.repair(model, task, 2)
            there = measured.real[2]
            steps = np.diff(found["read"], axis=0) / 3.8
            np.testing.assert_allclose(steps, task.test["observations"]["step"][2], atol=1e-4)
            places = np.diff(found["repaired"], axis=0).cumsum(0) / 3.8
            np.testing.assert_allclose(places, measured.places[2], atol=1e-3)
        assert found["depth"].tolist() == measured.depths[2][there].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Maze, Repair])
def test_a_compiled_objective_is_the_same(folder, kind):
    """In a roll-out, where states are refined, and in training, whose loss goes through the same graphs."""
    task, found = kind(folder, 1), []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = make_model(Settings(str(folder), 1, latent_size=8, hidden_size=8), ROWS["ESM"], task).train()
        if compiled:
            elastic_states.compile_objective(model, "aot_eager")
            assert model.objective._compiled_call_impl is not None
        batch = task.batch(np.random.default_rng(3), 2, model, always(2))
        output = model(batch["input_features"], batch["observations"], use_cache=False)
        (output.loss + task.loss(output, batch)).backward()
        found.append([batch["input_features"], output.loss.detach(), model.readout[0].weight.grad])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)  # sums in another order, over sixty steps


@pytest.mark.slow
def test_weights_of_runs_come_back(folder, tmp_path):
    task, run = Repair(folder, 2), elastic_states.Run("ESM, metric I", 3e-3, 0, "repair")
    settings = Settings(str(folder), 2, batch_size=2, latent_size=8, hidden_size=8, test_count=2)
    record = elastic_states.perform(settings, False, run, tmp_path / run.file)
    model = elastic_states.load_trained(tmp_path / run.file, task)
    assert task.measure(model).values == pytest.approx(record["own"]["values"], rel=1e-4)
    elastic_states.weights_of(tmp_path / run.file).unlink()
    with pytest.raises(ValueError, match="train again"):
        elastic_states.load_trained(tmp_path / run.file, task)


def test_a_roll_out_is_shared_out_to_updates():
    """Every row once, of nests of tensors too."""
    batch = {"a": torch.arange(6), "nest": {"b": torch.arange(12).view(6, 2)}}
    shares = [elastic_states.share(batch, i, 2) for i in range(3)]
    assert [share["a"].tolist() for share in shares] == [[0, 1], [2, 3], [4, 5]]
    assert torch.equal(torch.cat([share["nest"]["b"] for share in shares]), batch["nest"]["b"])


@pytest.mark.parametrize("kind, calls", [(Maze, 2), (Repair, 6)])
def test_a_model_comes_through_streams_anew_after_as_many_updates_as_the_task_says(folder, kind, calls, monkeypatch):
    sizes, task, batch = [], kind(folder, 1), kind.batch
    monkeypatch.setattr(task, "batch", lambda rng, size, *args: sizes.append(size) or batch(task, rng, size, *args))
    settings = Settings(str(folder), 6, batch_size=1, latent_size=8, hidden_size=8)
    model = make_model(settings, ROWS["SSM"], task)
    elastic_states.train(model, ROWS["SSM"], task, settings, elastic_states.Run("SSM", 1e-3, 0, "maze"))
    assert sizes == [task.ahead] * calls


def test_what_comes_after_an_arrival_is_not_learnt_from(folder):
    """A backbone without a mask has the loss of one with it."""
    task = Maze("", 1)
    torch.manual_seed(0)
    model = make_model(Settings("", 1, latent_size=8, hidden_size=8), ROWS["SSM"], task).train()
    batch = task.batch(np.random.default_rng(3), 3, model)
    output = model(batch["input_features"], batch["observations"], refine_depth=0, use_cache=False)
    loss = elastic_states.mean_of((1 + model.config.proposal_weight) * output.losses, batch["real"])
    masked = model(batch["input_features"], batch["observations"], attention_mask=batch["real"], refine_depth=0)
    torch.testing.assert_close(loss, masked.loss)
    assert not torch.allclose(loss, output.loss, rtol=1e-2)
