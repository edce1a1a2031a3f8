# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Sweeps of trained models: files of runs, resumption, best rates, sizes that match, and what is measured."""

import dataclasses
import json
import math
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import ablation, classification_tasks, matched_models, memory_probes, sweeps, what_budgets_buy
from benchmarks.memory_probes import IGNORED, TASKS, AssociativeRecall, NoiseDelay
from benchmarks.sweeps import choose_task
from essm_train import models
from modeling_essm.spectral_basis import spectral_basis


@pytest.fixture
def ablate(quick, tmp_path):
    def run(*arguments):
        (tmp_path / "text.txt").write_text("spectral budgets " * 300)
        files = ["--train_file", tmp_path / "text.txt", "--runs_dir", tmp_path / "runs"]
        return quick(ablation, *files, *arguments)

    return run


def test_runs_are_tabled_at_their_best_rate(ablate, tmp_path, monkeypatch):
    """At a seed every model and rate sees the same blocks."""
    seen, run_at_budget = [], models.run_at_budget

    def watched(model, batch, K):
        if models.capacity_of(model) == K:  # which every update runs once, on all rows
            seen.append(batch["input_ids"])
        return run_at_budget(model, batch, K)

    monkeypatch.setattr(models, "run_at_budget", watched)
    names = ["elastic", "llama"]
    report = ablate("--only", *names, "--rates", 0.001, 0.1, "--seeds", 0, 1)
    runs = [json.loads(path.read_text()) for path in sorted((tmp_path / "runs").iterdir())]
    results = {r["model"]: r for r in report["results"]}
    assert len(runs) == 8 and results.keys() == {*names}
    for result in results.values():
        assert result["seeds"] == [0, 1] and abs(result["parameters"] / 60_000 - 1) <= matched_models.TOLERANCE
        assert result["rates"][f"{result['best_rate']:g}"] == min(result["rates"].values()) and result["at_the_edge"]
        best = [r for r in runs if (r["model"], r["rate"]) == (result["model"], result["best_rate"])]
        for K, bits in result["bits_per_byte"].items():
            assert bits["mean"] == pytest.approx(statistics.fmean(r["bits_per_byte"][K] for r in best))
    elastic, llama = results["elastic"], results["llama"]
    assert [*elastic["bits_per_byte"]] == ["1", "2", "3", "4", "6", "8"] and [*llama["bits_per_byte"]] == ["1"]
    above = [llama["by_seed"][seed]["1"] - elastic["by_seed"][seed]["8"] for seed in "01"]
    assert llama["against_elastic"]["mean"] == pytest.approx(statistics.fmean(above))
    orders = [torch.stack(seen[i : i + 3]) for i in range(0, len(seen), 3)]  # of 3 updates
    assert all(torch.equal(order, orders[i // 4 * 4]) for i, order in enumerate(orders))
    assert len(orders) == 8 and not torch.equal(orders[0], orders[4])
    # A rate that has a seed of its own is compared by those that it shares.
    (worse,) = {*llama["rates"]} - {f"{llama['best_rate']:g}"}
    extra = json.loads((tmp_path / "runs" / f"llama-rate{worse}-seed0.json").read_text())
    extra |= {"seed": 2, "bits_per_byte": {"1": 0.01}}
    records = [r for r in runs if r["model"] == "llama"]
    assert sweeps.summarise([*records, extra], "bits_per_byte")["best_rate"] == llama["best_rate"]
    seen.clear()
    monkeypatch.setattr(sweeps.common, "machine", lambda device: report["machine"] | {"cpu": "of the table"})
    again = ablate("--table", "--only", *names)
    assert again["results"] == report["results"] and not seen
    assert again["machine"]["cpu"] == runs[0]["machine"]["cpu"]


def test_a_rate_is_judged_by_the_sizes_that_were_trained(ablate, tmp_path, monkeypatch):
    near = dataclasses.replace(ablation.ROWS["mamba2, nested"], layers=2, hidden_size=40)  # has about 60,000
    monkeypatch.setitem(ablation.ROWS, "mamba2, nested", near)
    sizes = {"elastic, full alone": [8], "elastic": [1, 2, 3, 4, 6, 8], "mamba2, nested": [1, 2, 4, 8]}
    for name, trained in sizes.items():
        ablate("--only", name, "--rates", 0.01, "--seeds", 0)
        (path,) = (tmp_path / "runs").glob(f"{name.replace(', ', '-').replace(' ', '-')}-rate*")
        assert json.loads(path.read_text())["trained_budgets"] == trained
    bits = {0.1: {"1": 1.0, "8": 3.0}, 0.2: {"1": 9.0, "8": 2.0}}
    runs = [{"rate": rate, "seed": 0, "diverged": False, "bits": values} for rate, values in bits.items()]
    for trained, best in (([8], 0.2), ([1, 8], 0.1)):
        records = [run | {"trained_budgets": trained} for run in runs]
        assert [r["rate"] for r in sweeps.at_best_rate(records, "bits")[1]] == [best]


def test_a_rate_that_diverged_changes_nothing_for_the_others():
    def run(rate, seed, bits, diverged=False):
        return {"rate": rate, "seed": seed, "diverged": diverged, "bits": {"1": bits}}

    runs = [run(0.1, seed, bits) for seed, bits in enumerate((5, 1, 1))] + [run(0.2, seed, 4) for seed in range(3)]
    for more in ([], [run(0.3, 0, None, True)]):
        means, best = sweeps.at_best_rate(runs + more, "bits")
        assert means[0.1] == pytest.approx(7 / 3) and {r["rate"] for r in best} == {0.1} and means.get(0.3) is None
    with pytest.raises(ValueError, match=re.escape("got seeds by rate {0.1: {0}, 0.2: {1}}")):
        sweeps.at_best_rate([runs[0], runs[4]], "bits")


def test_a_table_is_of_the_seeds_and_rates_asked_for(ablate, tmp_path):
    order = ["--only", "llama", "--rates", 0.01, 0.02, "--seeds", 3, 4]
    assert ablate(*order)["results"][0]["seeds"] == [3, 4]
    (all_there,) = ablate("--table", "--only", "llama")["results"]
    assert all_there["seeds"] == [3, 4] and [*all_there["rates"]] == ["0.01", "0.02"]
    (few,) = ablate("--table", "--only", "llama", "--seeds", 4, "--rates", 0.02)["results"]
    assert few["seeds"] == [4] and [*few["rates"]] == ["0.02"]
    with pytest.raises(ValueError, match=r"holds no finished run of .* seeds \[5\], rates any"):
        ablate("--table", "--only", "llama", "--seeds", 5)


def test_a_sweep_goes_on_where_it_was_killed(ablate, tmp_path, monkeypatch):
    order, train, calls = ["--only", "paper", "s4d", "--rates", 0.01], ablation.train, []

    def dies(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return train(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ablation, "train", dies)
        ablate(*order)
    found = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    assert {path.name for path in found} == {"paper-rate0.01-seed0.json", "s4d-rate0.01-seed0.json"}
    (tmp_path / "runs" / ".partial-x-seed1.json").write_text("{")  # killed while it was written
    assert [r["seeds"] for r in ablate(*order)["results"]] == [[0, 1, 2]] * 2
    assert all(path.stat().st_mtime_ns == time for path, time in found.items())
    with pytest.raises(ValueError, match=r"its settings was .* and is now .*; choose another --runs_dir"):
        ablate(*order, "--updates", 2)
    (tmp_path / "text2.txt").write_text("other text " * 300)
    with pytest.raises(ValueError, match=r"its definition was .* and is now .*; choose another --runs_dir"):
        ablate(*order, "--validation_file", tmp_path / "text2.txt")
    # Nor does a table mix texts, or two definitions of a row.
    with pytest.raises(ValueError, match="holds runs of different texts"):
        ablate("--only", "llama", "--rates", 0.01, "--validation_file", tmp_path / "text2.txt")
        ablate("--table", "--only", "paper", "llama")
    path = tmp_path / "runs" / "s4d-rate0.01-seed1.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"definition": record["definition"] | {"config": "of other defaults"}}))
    with pytest.raises(ValueError, match="holds runs of different definitions s4d"):
        ablate("--table", "--only", "s4d")


def test_a_separate_model_is_held_against_the_elastic_one_at_its_size():
    whole, alone = {"1": 3.0, "4": 2.2, "8": 2.0}, {"4": 2.1}
    result = {"definition": {"channels": 4}, "by_seed": {"0": alone}}
    assert ablation.difference(result, {"by_seed": {"0": whole}})["mean"] == pytest.approx(-0.1)
    result["definition"]["channels"] = None
    assert ablation.difference(result, {"by_seed": {"0": whole}})["mean"] == pytest.approx(0.1)


def test_a_run_that_diverged_rules_its_rate_out(ablate):
    (result,) = ablate("--only", "paper", "--rates", 1e38, 0.01, "--seeds", 0)["results"]
    assert result["rates"]["1e+38"] is None and result["best_rate"] == 0.01


def test_a_nested_mamba2_trains_its_sizes_in_every_update(ablate, monkeypatch):
    """Each on the whole batch; and it is measured at these."""
    seen, run_at_budget = [], models.run_at_budget

    def watched(model, batch, K):
        seen.append((K, len(batch["labels"]))) if model.training else None
        return run_at_budget(model, batch, K)

    monkeypatch.setattr(models, "run_at_budget", watched)
    near = dataclasses.replace(ablation.ROWS["mamba2, nested"], layers=2, hidden_size=40)  # has about 60,000
    monkeypatch.setitem(ablation.ROWS, "mamba2, nested", near)
    (result,) = ablate("--only", "mamba2, nested", "--rates", 0.01, "--seeds", 0)["results"]
    assert abs(result["parameters"] / 60_000 - 1) <= matched_models.TOLERANCE
    assert [*result["bits_per_byte"]] == ["1", "2", "4", "8"] and len(
        {b["mean"] for b in result["bits_per_byte"].values()}
    ) == 4
    assert [sorted(seen[i : i + 4]) for i in (0, 4, 8)] == [[(K, 2) for K in (1, 2, 4, 8)]] * 3 and len(seen) == 12


@pytest.mark.parametrize("name", ["paper", "elastic, muon, FFN, inner 4 D", "elastic, memory", "llama"])
def test_models_have_as_many_parameters(name):
    row = ablation.ROWS[name]
    config = matched_models.matched_config(row, 800_000)
    with torch.device("meta"):
        assert abs(ablation.make_model(config, 4096).num_parameters() / 800_000 - 1) <= 0.03
    for field, value in row.fields.items():
        assert getattr(config, field) == value
    if row.peer is None:
        if config.block == "elastic":
            assert abs(8 * config.head_size / config.hidden_size - row.expansion) <= 0.25
            assert config.memory_key_size == config.memory_value_size == int(row.memory * config.head_size)
        assert abs(config.num_hidden_layers - row.layers) <= 2


@pytest.mark.parametrize("name", ["elastic", "llama"])
def test_a_size_that_no_model_of_a_row_has_is_refused(name):
    with pytest.raises(ValueError, match="has 500 parameters"):
        matched_models.matched_config(ablation.ROWS[name], 500)


def test_a_separate_model_has_the_size_of_the_elastic_one_at_its_budget():
    configs = [matched_models.matched_config(ablation.ROWS[n], 800_000) for n in ("elastic", "elastic, K = 2 alone")]
    with torch.device("meta"):
        whole, alone = (ablation.make_model(config, 4096) for config in configs)
    assert alone.num_parameters() == whole.num_active_parameters(2) < whole.num_parameters()


@pytest.fixture
def classify(quick, data_dir, tmp_path):
    def run(*arguments):
        return quick(classification_tasks, "--data_dir", data_dir, "--runs_dir", tmp_path / "runs", *arguments)

    return run


@pytest.mark.slow
def test_every_model_and_every_task_runs(classify):
    tasks, rows = classification_tasks.TASKS, classification_tasks.ROWS
    every_task = classify("--rates", 0.01, "--seeds", 0, "--only", "elastic")["results"]
    every_model = classify("--rates", 0.01, "--seeds", 0, "--tasks", "smnist")["results"]
    assert [r["task"] for r in every_task] == [*tasks] and {r["model"] for r in every_model} == {*rows}
    for result in every_task + every_model:
        assert abs(result["parameters"] / 50_000 - 1) <= matched_models.TOLERANCE
        capacity = rows[result["model"]].fields.get("num_spectral_channels", 1)
        assert [*result["error"]] == [str(K) for K in sorted({min(K, capacity) for K in (1, 2, 4, 8, 16)})]


def test_models_classify_the_same_samples_at_their_budgets(classify, monkeypatch):
    seen, smaller, run_at_budget = [], [], models.run_at_budget

    def watched(model, batch, budget):
        if models.capacity_of(model) == budget:  # which every update runs once, on all rows
            seen.append((torch.cat([batch["input_features"].flatten(), batch["labels"]]), budget))
        else:
            smaller.append((len(seen), budget))
        return run_at_budget(model, batch, budget)

    monkeypatch.setattr(models, "run_at_budget", watched)
    results = classify("--tasks", "smnist:updates=8", "--only", "elastic", "s4d", "--rates", 0.01, "--seeds", 0, 1)
    assert [r["definition"]["task"]["updates"] for r in results["results"]] == [8, 8]
    orders = torch.stack([samples for samples, _ in seen]).unflatten(0, (4, 8))
    assert orders[0].equal(orders[1]) and orders[2].equal(orders[3]) and not orders[0].equal(orders[2])
    # The elastic block: the first half at the full budget alone, then smaller ones beside it; S4D has one.
    assert [budget for _, budget in seen] == ([8] * 8 + [1] * 8) * 2
    assert {update for update, _ in smaller} == {5, 6, 7, 8, 21, 22, 23, 24}
    assert {budget for _, budget in smaller} <= {1, 2, 3, 4, 6}


def test_training_lowers_the_error(data_dir, tmp_path):
    settings = classification_tasks.Settings(data_dir, 20_000, 40, quick=True)
    record = classification_tasks.perform(settings, sweeps.Run("elastic", 0.01, 0, "smnist"))
    assert all(error < 0.3 for error in record["error"].values())  # 2/3 is chance


def test_what_cannot_be_run_is_refused_before_any_work(classify, data_dir, tmp_path):
    for arguments, error, message in (
        (["--tasks", "smnist", "copy"], ValueError, "a task must be one of"),
        (["--tasks", "smnist:pairs=8"], ValueError, "parameters of smnist are numbers named"),
        (["--data_dir", tmp_path, "--tasks", "listops"], FileNotFoundError, "no data for task 'listops'"),
    ):
        with pytest.raises(error, match=message):
            classify(*arguments)
    settings = classification_tasks.Settings(data_dir, 50, 1)
    with pytest.raises(ValueError, match="has 50 parameters"):
        classification_tasks.define(settings, sweeps.Run("paper", 0.01, 0, "smnist"))
    assert not (tmp_path / "runs").exists()


def answers_of(name, row):
    """The targets of a sample by its definition, for tasks where they follow from the inputs."""
    task = TASKS[name]
    if name == "selective-copying":
        return [IGNORED] * (task.length - task.tokens) + [token for token in row[: -task.tokens] if token]
    if name == "induction":
        return [IGNORED] * (task.length - 1) + [row[row.index(0) + 1]]
    pairs, asked = dict(zip(row[: 2 * task.pairs : 2], row[1 : 2 * task.pairs : 2])), row[2 * task.pairs :: 2]
    assert sorted(asked) == sorted(pairs) and max(pairs) < task.keys <= min(pairs.values())
    return [IGNORED] * 2 * task.pairs + [token for key in asked for token in (pairs[key], IGNORED)][:-1]


@pytest.mark.parametrize("name", ["recall", "selective-copying", "induction"])
def test_tokens_are_what_their_definition_says(name):
    task = TASKS[name]
    inputs, targets = task.sample(200, np.random.default_rng(0))
    assert inputs.dtype == targets.dtype == np.int64 and inputs.shape == targets.shape == (200, task.length)
    assert inputs.min() == 0 and inputs.max() == task.vocabulary - 1
    for row, wanted in zip(inputs.tolist(), targets.tolist()):
        assert wanted == answers_of(name, row)
    assert not np.array_equal(inputs, task.sample(200, np.random.default_rng(1))[0])


def test_recall_asks_every_key_once_at_distances_of_a_power_law():
    task = AssociativeRecall(20, 3, 10)
    for row, wanted in zip(*task.sample(80, np.random.default_rng(0))):
        pairs = {int(row[2 * i]): int(row[2 * i + 1]) for i in range(3)}
        asked = np.flatnonzero(wanted != IGNORED)
        assert sorted(row[asked]) == sorted(pairs) and [pairs[key] for key in row[asked]] == wanted[asked].tolist()
    task = AssociativeRecall(length=34, pairs=1, vocabulary=8, power=0.01)
    _, targets = task.sample(20_000, np.random.default_rng(0))
    places = np.argmax(targets != IGNORED, 1)
    weights = np.arange(1, 17) ** (0.01 - 1)
    shares = np.bincount((places - 2) // 2, minlength=16) / len(places)
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=0.012)  # 4 standard deviations


@pytest.mark.parametrize("band", [0.5, 0.02])
def test_noise_is_delayed_and_has_its_frequencies(band):
    task = NoiseDelay(length=50, tau=7, band=band)
    inputs, targets = task.sample(400, np.random.default_rng(3))
    assert np.isnan(targets[:, :7]).all() and np.array_equal(targets[:, 7:], inputs[:, :-7])
    lags = np.arange(50)
    expected = np.where(lags == 0, 1.0, 0.0) if band == 0.5 else np.sinc(2 * band * lags)
    found = (inputs[:, :1] * inputs).mean(0)
    np.testing.assert_allclose(found, expected, atol=0.25)  # 4 standard deviations of 400 products


def test_parameters_of_tasks():
    assert choose_task(TASKS, "mqar:pairs=2,power=0.5", length=16, tau=3) == AssociativeRecall(16, 2, power=0.5)
    with pytest.raises(ValueError, match="are numbers named"):
        choose_task(TASKS, "induction:length=x")
    for name, said in (
        ("mqar:pairs=9", r"pairs must be in \[1, 8\], got 9"),
        ("recall:pairs=65", r"pairs must be in \[1, 64\]"),
        ("selective-copying:tokens=17", r"tokens must be in \[1, 16\]"),
        ("induction:length=2", r"length must be in \[3, inf\]"),
        ("delay-white:tau=64", r"tau must be in \[1, 63\]"),
        ("delay-band:band=0", r"band must be in \[1e-06, 0.5\], got 0"),
    ):
        with pytest.raises(ValueError, match=said):
            choose_task(TASKS, name)
    for name in (
        "mqar:pairs=8",
        "recall:pairs=64",
        "selective-copying:tokens=16",
        "induction:length=3",
        "delay-white:tau=63",
    ):
        inputs, _ = choose_task(TASKS, name).sample(4, np.random.default_rng(0))
        assert len(inputs) == 4


def test_every_kind_of_memory_is_probed(quick, tmp_path):
    names, tasks = ["elastic, memory", "s4d"], ["mqar:pairs=3", "recall:keys=16", "delay-white"]
    order = ["--tasks", *tasks, "--rates", 0.01, "--seeds", 0, "--only", *names, "--runs_dir", tmp_path / "runs"]
    report = quick(memory_probes, *order)
    assert {(r["task"], r["model"]) for r in report["results"]} == {(t, n) for t in tasks for n in names}
    for result in report["results"]:
        assert all(0 <= error["mean"] < 2 for error in result["error"].values())
        if "recalled" in result:  # the error is that with all pairs
            right = {K: {"mean": pytest.approx(1 - error["mean"])} for K, error in result["error"].items()}
            assert {K: {"mean": values["mean"]} for K, values in result["recalled"]["2"].items()} == right
    assert [*report["results"][2]["recalled"]] == ["2", "4", "8", "12", "16"]
    assert Path(tmp_path, "report.png").stat().st_size > 0


def test_pairs_are_held_up_to_the_first_number_that_is_not():
    shares = {"2": {"1": 0.95, "8": 1.0}, "4": {"1": 0.8, "8": 0.9}, "8": {"1": 0.92, "8": 0.89}}
    recalled = {P: {K: {"mean": share} for K, share in of.items()} for P, of in shares.items()}
    assert memory_probes.pairs_held(recalled) == {"1": 2, "8": 4}


def test_every_update_trains_smaller_sizes_too():
    task = memory_probes.Settings(30_000, 300).task("delay-white:length=4096,tau=8")
    count = memory_probes.batch_size(task, 2048)
    rows = {*memory_probes.budgets_of_rows((1, 2, 4), count, np.random.default_rng(0)).tolist()}
    assert 4 in rows and len(rows) > 1


def test_budgets_of_rows_hold_the_full_one():
    rows = memory_probes.budgets_of_rows((1, 2, 4), 10, np.random.default_rng(0)).tolist()
    assert rows[:3] == [4, 4, 4] and {*rows} <= {1, 2, 4} and rows[3:6] == rows[3:4] * 3


def test_what_filters_span_is_what_dense_algebra_says(quick, tmp_path):
    phi = spectral_basis(512).filters(32)
    h = np.exp(-np.arange(512) / 20.0)
    share = what_budgets_buy.shares(512, 32, "exponential", np.array([20.0]))[0, 5]
    assert share == pytest.approx(np.square(phi[:, :6].T @ h).sum() / np.square(h).sum())
    taus = np.array([1.0, 2, 3, 4])
    assert what_budgets_buy.horizon(taus, np.array([1, 0.9, 0.4, 0.9]), 0.5) == 2
    assert what_budgets_buy.horizon(taus, np.ones(4), 0.5) == math.inf
    # White noise: what the filters do not hold of the impulse at that lag, and a little for the noise on the input.
    errors = what_budgets_buy.readout_errors(512, 0.5, 3)
    held = np.square(phi[3, :8]).sum()
    assert errors["8"] == pytest.approx(1 - held / (1 + what_budgets_buy.NOISE), abs=1e-3)
    report = quick(what_budgets_buy, "--runs_dir", tmp_path / "runs")
    assert len(report["results"]["trained"]) == 2 and Path(tmp_path, "report.png").stat().st_size > 0
