# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Inner steps diagnosed: what is told of them is what the model does, and what they cost is counted once, where it is
spent."""

import json
import math

import pytest
import torch
from safetensors.torch import save_model
from tiny_chains import write_chains

from benchmarks import elastic_diagnostics
from benchmarks import elastic_tasks as tasks
from benchmarks.elastic_diagnostics import (
    Parts,
    Steps,
    diagnose,
    hardened,
    over_seeds,
    parts_of,
    replaced,
    told_of_steps,
)
from benchmarks.elastic_measures import cost, told
from benchmarks.elastic_states import ROWS, Run, Settings, backbone_config, definition, make_model, weights_of
from benchmarks.elastic_tasks import always
from modeling_essm.companions import ElasticStateConfig, ElasticStateModel

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
POSITIONS = 10


def cut(batch):
    """The first positions of windows."""
    return {name: cut(x) if isinstance(x, dict) else x[:, :POSITIONS] for name, x in batch.items()}


class Repair(tasks.Repair):
    """Of streams that are a sixth as long."""

    def __init__(self, *args):
        super().__init__(*args)
        self.test = cut(self.test)

    def batch(self, *args, **kwargs):
        return cut(super().batch(*args, **kwargs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("data")
    write_chains(found / "protein_chains", 18)
    return found


@pytest.fixture
def settings(folder):
    return Settings(str(folder), 4, latent_size=8, hidden_size=8, test_count=2)


def new(settings, task, row="ESM", step=-1.0):
    torch.manual_seed(0)
    model = make_model(settings, ROWS[row], task).eval()
    model.corrector.log_step_size.data.fill_(step)
    return model


@torch.no_grad()
def watched(task, model, depth, streams=2):
    with Steps(model) as steps:
        assert sum(task.stream(model, i, always(depth)) for i in range(streams)) == streams * POSITIONS
    return steps


@pytest.mark.parametrize("step, refuses", [(-5.0, False), (0.0, True)])
@torch.no_grad()
def test_steps_lead_from_proposals_to_what_is_committed(settings, step, refuses):
    task = Repair(settings.data_dir, 2)
    model = new(settings, task, step=step)
    model.corrector.config.trust_radius = None
    measured, steps = task.measure(model, always(2)), watched(task, model, 2)
    first, second = told_of_steps(steps.taken, 2 * POSITIONS, 3)
    assert first["taken"] == second["taken"] == 1 and first["cut"] == second["cut"] == 0
    assert first["before"] == pytest.approx(float(measured.losses.mean()), rel=1e-4)
    assert second["before"] == pytest.approx(first["after"]) and first["after"] <= first["before"]
    assert second["after"] == pytest.approx(float(measured.refined.mean()), rel=1e-4)
    assert len(steps.ways) == 2 * POSITIONS
    refused = sum(not s.kept for s in steps.taken)
    assert (refused > 0) == refuses
    assert first["kept"] + second["kept"] == pytest.approx(2 - refused / (2 * POSITIONS))
    assert first["lowered"] <= first["kept"]


@torch.no_grad()
def test_steps_of_the_gate_are_the_sum_of_depths(settings):
    task = Repair(settings.data_dir, 2)
    model = new(settings, task)
    model.gate.first.fill_(1.5)  # about the logarithm of an objective here
    depths = task.measure(model).depths
    assert 0 < depths.double().mean() < 3
    steps = watched(task, model, None)
    assert len(steps.taken) == depths.sum() and len(steps.ways) == (depths > 0).sum()
    rows = told_of_steps(steps.taken, depths.numel(), 3)
    assert [row["taken"] for row in rows] == [float((depths >= j).double().mean()) for j in range(1, len(rows) + 1)]


@torch.no_grad()
def test_what_is_cut_is_longer_than_the_trust_region(settings):
    task = Repair(settings.data_dir, 2)
    model = new(settings, task)
    config = model.corrector.config
    for radius, cut_ones in {0.0: 1.0, 1e6: 0.0, 3.0: None}.items():
        config.trust_radius = radius
        taken = watched(task, model, 1).taken
        assert [s.cut for s in taken] == [s.length > radius / 0.999 for s in taken]
        share = sum(s.cut for s in taken) / len(taken)
        assert 0 < share < 1 if cut_ones is None else share == cut_ones
    config.trust_radius, config.drift = 1e-3, 0.0  # steps of a metric that is still the identity
    steps = watched(task, model, 1)
    kept = [s for s in steps.taken if s.kept]
    assert kept
    assert max(steps.ways) == pytest.approx(1e-3 * float(model.corrector.step_size), rel=1e-3)


@torch.no_grad()
def test_what_is_retracted_was_beyond_the_ball(settings):
    task = Repair(settings.data_dir, 2)
    model = new(settings, task)
    assert not any(s.retracted for s in watched(task, model, 1).taken)
    model.corrector.config.retraction, model.corrector.config.retraction_radius = "ball", 1.5
    norms = []

    def noting(original):
        def step(*args, **kwargs):
            output = original(*args, **kwargs)
            norms.append(float(output.latents.norm()))
            return output

        return step

    with replaced(model, "step", noting):
        taken = watched(task, model, 1).taken
    assert all(s.kept for s in taken) and len(norms) == len(taken)
    assert [s.retracted for s in taken] == [norm == pytest.approx(1.5) for norm in norms]
    assert len({s.retracted for s in taken}) == 2
    model.corrector.config.acceptance = "none"
    with pytest.raises(ValueError, match="none"):
        Steps(model)


def test_watching_leaves_nothing_behind(settings):
    task = Repair(settings.data_dir, 1)
    model = new(settings, task)
    before = [set(vars(x)) for x in (model, model.corrector, model.gate, model.source)]
    with pytest.raises(RuntimeError, match="stop"), Steps(model), Parts(model, lambda: 0.0):
        assert "judge" in vars(model.corrector)
        raise RuntimeError("stop")
    assert [set(vars(x)) for x in (model, model.corrector, model.gate, model.source)] == before


@torch.no_grad()
def test_every_flop_belongs_to_one_part(settings):
    """By hand, with steps that are all kept: two readouts are judged, one gradient goes back, one solve."""
    task = Repair(settings.data_dir, 1)
    readout = 2 * (8 * 64 + 64 * 3)
    for depth in (0, 1):
        model = new(settings, task, step=-6.0)
        model.corrector.metric.factor()  # is kept
        whole = cost(task, model, depth, 1)["flops"]
        found = parts_of(task, model, depth, 1)
        flops, seconds = found["flops"], found["seconds"]
        assert sum(flops.values()) == pytest.approx(whole)
        assert flops["backbone"] == 2 * (15 * 8 + 8 * 8) and flops["objective of proposals"] == readout
        assert flops["objective of steps"] == flops["gradient"] == depth * readout
        assert flops["metric"] == depth * 2 * 8 * 8
        assert flops["gate"] == flops["rest"] == flops["rest of steps"] == 0
        assert all(x >= 0 for x in seconds.values()) and seconds["rest"] > 0
        assert (seconds["gradient"] > 0) == (depth == 1) and seconds["gate"] == 0  # depth was forced
    assert parts_of(task, model, None, 1)["seconds"]["gate"] > 0


@pytest.mark.parametrize("feedback", [False, True])
def test_backbones_are_counted_wherever_they_run(settings, feedback):
    """Without feedback a sequence is read at once, in what begins a call; with it position by position."""
    task = Repair(settings.data_dir, 1)
    config = new(settings, task).config.to_dict() | {"feedback": feedback, "metric": "diagonal"}
    config["backbone_config"] = backbone_config("transformer", 16, 16)
    model = ElasticStateModel(ElasticStateConfig(**config)).set_objective(task.objective()).eval()
    flops = parts_of(task, model, 1, 1)["flops"]
    assert sum(flops.values()) == pytest.approx(cost(task, model, 1, 1)["flops"])
    assert flops["backbone"] > 1000 and flops["rest"] == flops["rest of steps"] == 0


@pytest.mark.parametrize("kind", [Repair, tasks.Maze])
def test_a_gate_that_is_hard_already_is_hardened_for_nothing(settings, kind):
    task = kind(settings.data_dir, 2)
    model = new(settings, task, "ESM, relaxed gate")
    before = model.config.to_dict()
    hard, soft = hardened(task, model, 1e-6, 2), hardened(task, model, 1.0, 2)
    assert hard["soft"] == pytest.approx(hard["hard"], rel=1e-3)
    assert hard["soft_depth"] == pytest.approx(hard["hard_depth"], rel=1e-3)
    assert soft["hard"] == pytest.approx(hard["hard"]) and abs(soft["soft_depth"] - soft["hard_depth"]) > 1e-3
    assert model.config.to_dict() == before and not model.training


def test_numbers_of_seeds_become_means():
    found = over_seeds([{"a": 1.0, "b": [{"c": 2.0}, {"c": 5.0}]}, {"a": 3.0, "b": [{"c": 4.0}]}])
    assert found["a"] == {"mean": 2.0, "deviation": pytest.approx(math.sqrt(2))}
    assert len(found["b"]) == 1 and found["b"][0]["c"]["mean"] == 3.0


def test_models_of_a_folder_are_diagnosed(settings, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "repair", Repair)
    task = Repair(settings.data_dir, 2)
    for name, row in {"ESM": ROWS["ESM"], "SSM": ROWS["SSM"], "ESM, relaxed gate": ROWS["ESM, relaxed gate"]}.items():
        for seed in (0, 1):
            run, model = Run(name, 3e-3, seed, "repair"), new(settings, task, name)
            own = told(task.measure(model, always(row.depth)), 3)
            record = {"task": "repair", "model": name, "rate": 3e-3, "seed": seed, "settings": settings.values()}
            record |= {"definition": definition(settings, run), "parameters": 1, "diverged": False, "own": own}
            record |= {"metric": {"1": 1.0}, "controls": {}, "cost": {"flops": 1.0, "seconds": 1.0}}
            (tmp_path / run.file).write_text(json.dumps(record))
            if (name, seed) != ("ESM", 1):
                save_model(model, str(weights_of(tmp_path / run.file)))
    out = tmp_path / "report" / "found.json"
    argv = ["--data_dir", settings.data_dir, "--runs_dir", str(tmp_path), "--out", str(out), "--streams", "1"]
    elastic_diagnostics.main(argv)
    results = {r["model"]: r for r in json.loads(out.read_text())["results"]}
    assert list(results) == ["ESM", "ESM, relaxed gate"]
    assert results["ESM"]["seeds"] == [0] and results["ESM, relaxed gate"]["seeds"] == [0, 1]
    assert "left out" in capsys.readouterr().out
    found = results["ESM"]
    assert found["metric"]["condition"]["mean"] == pytest.approx(1.0, rel=1e-5)
    assert found["step_size"]["mean"] == pytest.approx(math.exp(-1)) and len(found["thresholds"]) == 3
    assert "hardened" in results["ESM, relaxed gate"] and "hardened" not in found
    with pytest.raises(SystemExit):
        elastic_diagnostics.main([*argv, "--streams", "0"])
    assert "at least 1, got 0" in capsys.readouterr().err


@torch.no_grad()
def test_depths_are_those_of_the_record(settings):
    task = Repair(settings.data_dir, 2)
    model = new(settings, task)
    model.gate.first.fill_(99.0)  # so that it takes no step
    record = {"model": "ESM", "settings": settings.values(), "own": {"histogram": [90, 6, 3, 1]}}
    depths = diagnose(task, model, record, 1)["depths"]
    assert (depths["p50"], depths["p95"], depths["at_cap"]) == (0, 1, 0.01)
    assert depths["worst_case_flops"] == pytest.approx(cost(task, model, 3, 1)["flops"], rel=0.2)  # but for a factor
