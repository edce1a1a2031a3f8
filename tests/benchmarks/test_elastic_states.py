# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Elastic state models compared: statistics of depths that are known, sizes that match, batches, and a tiny sweep."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_chains import write_chains

from benchmarks import elastic_figures, elastic_states
from benchmarks.elastic_states import ROWS, Settings, around_events, auroc, cost, make_model, rank_correlation, told
from benchmarks.elastic_tasks import Maze, Measured, Repair


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
    found = told(Measured({"energy": 1.0}, depths, depths.float(), hard, real), 3)
    assert found["mean_depth"] == pytest.approx(8 / 7) and found["histogram"] == [2, 3, 1, 1]
    assert found["depth_difficult"] == pytest.approx(5 / 3) and found["depth_easy"] == pytest.approx(3 / 4)
    events = around_events(Measured({}, depths, depths.float(), hard, real))
    assert events[elastic_states.AROUND - 2 :][:4] == [1.0, 0.5, 1.0, 1.0] and events[0] is None


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
    torch.manual_seed(0)
    model = make_model(settings, ROWS["ESM, metric I"], task).eval()
    none, one, two = (cost(task, model, depth)["flops"] for depth in (0, 1, 2))
    readout = 2 * (8 * 64 + 64 * 3)
    assert none == 2 * (12 * 8 + 8 * 8) + readout
    # forward and backward of the readout, its value for "reject", and once more for the state that is committed
    assert two - one == 3 * readout and one - none == 4 * readout


def test_proposals_learn_from_refined_states_alone():
    proposals, latents = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(2))
    real = torch.tensor([[True, True, False], [True, False, False]])
    output = SimpleNamespace(proposals=proposals, latents=latents)
    elastic_states.distillation(output, real).backward()
    expected = 2 * (proposals - latents).detach() * real[..., None] / (4 * 3)
    torch.testing.assert_close(proposals.grad, expected)
    assert latents.grad is None
    torch.testing.assert_close(elastic_states.distillation(output, None), (proposals - latents).square().mean())


def test_batches_are_the_same_at_a_seed_and_walks_end():
    task = Maze("", 1)
    torch.manual_seed(0)
    model = make_model(Settings("", 1, latent_size=8, hidden_size=8), ROWS["SSM"], task).train()
    one, other = (task.batch(np.random.default_rng(3), 3, model) for _ in range(2))
    assert model.training and one["input_features"].shape == (3, task.length, task.features)
    assert all(torch.equal(one[name], other[name]) for name in ("input_features", "expert", "real"))
    there = one["observations"]["goal"].abs().sum(-1) > 0
    assert torch.equal(one["real"], there) and not there.all()  # some arrive within 40 steps
    here = one["real"].long().cumsum(1) + 1  # the step of an arrival is seen once
    late = torch.arange(task.length) > here.amax(1, keepdim=True) - 1
    assert late.any() and not one["observations"]["moved"][late].any()


def test_a_sweep_from_end_to_end(folder, tmp_path, capsys):
    out = tmp_path / "found.json"
    argv = ["--quick", "--data_dir", str(folder), "--only", "SSM", "ESM", "Transformer", "--seeds", "0"]
    argv += ["--runs_dir", str(tmp_path / "runs"), "--out", str(out)]
    elastic_states.main(argv)
    report = json.loads(out.read_text())
    rows, (read, native) = report["results"], report["references"].values()
    assert native["rmsd_loop"] == 0 < read["rmsd_loop"] and native["energy"] < read["energy"]
    assert read["rmsd_outside"] == pytest.approx(0, abs=1e-4)
    for task in ("repair", "maze"):
        found = {(r["model"], r["control"]): r for r in rows if r["task"] == task}
        assert {control for model, control in found if model == "ESM"} == {
            *(None, "none", "all", "mean everywhere", "shuffled", "where difficult")
        }
        assert found["SSM", None]["mean_depth"]["mean"] == 0 and found["ESM", "all"]["mean_depth"]["mean"] == 3
        assert found["ESM", None]["flops"]["mean"] > found["SSM", None]["flops"]["mean"]
    capsys.readouterr()
    elastic_states.main(argv)
    assert "6 of 6 runs are there" in capsys.readouterr().out

    argv = ["--data_dir", str(folder), "--runs_dir", str(tmp_path / "runs"), "--out_dir", str(tmp_path)]
    written = elastic_figures.main([*argv, "--example", "1"])
    assert [path.name for path in written] == [f"elastic_states{x}.png" for x in ("_repair", "_maze", "")]
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
            found = elastic_figures.walk_through(model, 2)
            there = measured.real[2]
            assert found["difficult"].tolist() == measured.difficult[2][there].tolist()
        else:
            found = elastic_figures.repair(model, task, 2)
            there = measured.real[2]
            steps = np.diff(found["read"], axis=0) / 3.8
            np.testing.assert_allclose(steps, task.test["observations"]["step"][2], atol=1e-4)
            assert found["energies"][1] == pytest.approx(float(measured_losses(model, task)[2].mean()), rel=1e-4)
        assert found["depth"].tolist() == measured.depths[2][there].tolist()


def measured_losses(model, task):
    return model(task.test["input_features"], task.test["observations"]).losses


def test_weights_of_runs_come_back(folder, tmp_path):
    task, run = Repair(folder, 2), elastic_states.Run("ESM, metric I", 3e-3, 0, "repair")
    settings = Settings(str(folder), 2, batch_size=2, latent_size=8, hidden_size=8, test_count=2)
    record = elastic_states.perform(settings, run, tmp_path / run.file)
    model = elastic_states.load_trained(tmp_path / run.file, task)
    assert task.measure(model).values == pytest.approx(record["own"]["values"], rel=1e-4)
    elastic_states.weights_of(tmp_path / run.file).unlink()
    with pytest.raises(ValueError, match="train again"):
        elastic_states.load_trained(tmp_path / run.file, task)


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
