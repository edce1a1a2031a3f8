# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Probes of memory: samples against slow definitions, the harness from end to end, and what filters span."""

import importlib
import json
import math

import numpy as np
import pytest
import torch
from helpers import start_killed_sweep

from benchmarks import matched_models, memory_probes, sweeps, what_budgets_buy
from benchmarks.memory_tasks import (
    IGNORED,
    TASKS,
    AssociativeRecall,
    InductionHeads,
    NoiseDelay,
    PhoneBook,
    SelectiveCopying,
    TokenDelay,
    make_task,
)
from modeling_essm.spectral_basis import spectral_basis

# ---------------------------------------------------------------------------------------------------------------------
# Samples.


def recall(row, task):
    """The value of a key, at every even place after the pairs where the key is one of them and is asked for."""
    pairs = {int(row[2 * i]): int(row[2 * i + 1]) for i in range(task.pairs)}
    assert len(pairs) == task.pairs and len({*pairs.values()}) == task.pairs
    assert all(0 < k < task.vocabulary // 2 <= v < task.vocabulary for k, v in pairs.items())
    return pairs


def selective(row, task):
    data = [token for token in row[: -task.tokens] if token]
    assert len(data) == task.tokens and 1 not in data and set(row[-task.tokens :]) == {1}
    return [IGNORED] * (task.length - task.tokens) + data


def induction(row, task):
    first = list(row).index(0)
    assert [i for i, token in enumerate(row) if token == 0] == [first, task.length - 1] and first < task.length - 2
    return [IGNORED] * (task.length - 1) + [row[first + 1]]


def delay(row, task):
    return [IGNORED if t < task.tau else row[t - task.tau] for t in range(task.length)]


def phone_book(row, task):
    book, asked = row[: task.entries * (task.name + task.digits)], row[-task.name - task.digits + 1 :]
    entries = [book[i : i + task.name + task.digits] for i in range(0, len(book), task.name + task.digits)]
    assert all(max(entry[: task.name]) < task.vocabulary // 2 <= min(entry[task.name :]) for entry in entries)
    numbers = {tuple(entry[: task.name]): entry[task.name :] for entry in entries}
    assert len(numbers) == task.entries
    number = numbers[tuple(asked[: task.name])]
    assert asked[task.name :] == number[:-1]
    return [IGNORED] * (task.length - task.digits) + number


EXPECTED = {PhoneBook: phone_book, SelectiveCopying: selective, InductionHeads: induction, TokenDelay: delay}


@pytest.mark.parametrize(
    "task",
    [
        PhoneBook(entries=3, name=2, digits=3, vocabulary=5),
        PhoneBook(entries=2, name=1, digits=1, vocabulary=4),
        SelectiveCopying(length=11, tokens=3, vocabulary=5),
        SelectiveCopying(length=4, tokens=2, vocabulary=4),
        InductionHeads(length=9, vocabulary=4),
        InductionHeads(length=3, vocabulary=3),
        TokenDelay(length=10, tau=3, vocabulary=4),
        TokenDelay(length=3, tau=2, vocabulary=2),
    ],
    ids=str,
)
def test_tokens_are_what_their_definition_says(task):
    inputs, targets = task.sample(60, np.random.default_rng(0))
    assert inputs.dtype == targets.dtype == np.int64 and inputs.shape == targets.shape == (60, task.length)
    assert inputs.min() >= 0 and inputs.max() == task.vocabulary - 1  # all of the vocabulary, and nothing else
    for row, wanted in zip(inputs, targets):
        assert wanted.tolist() == list(EXPECTED[type(task)](row.tolist(), task))
    # Nothing is fixed that should be random: every place, or value, occurs.
    if isinstance(task, SelectiveCopying):
        assert (inputs[:, : -task.tokens] > 0).any(0).all()
    elif isinstance(task, PhoneBook):
        width = task.name + task.digits
        places = {
            row[:-1].index(row[-1])
            for row in ([tuple(r[i : i + task.name]) for i in range(0, len(r), width)] for r in inputs.tolist())
        }
        assert places == {*range(task.entries)}
    elif isinstance(task, InductionHeads):
        assert {*inputs.argmin(1)} == {*range(task.length - 2)}


@pytest.mark.parametrize("task", [AssociativeRecall(20, 3, 10), AssociativeRecall(16, 4, 12, power=1.0)], ids=str)
def test_recall_asks_every_key_once(task):
    inputs, targets = task.sample(80, np.random.default_rng(0))
    for row, wanted in zip(inputs, targets):
        pairs = recall(row, task)
        asked = np.flatnonzero(wanted != IGNORED)
        assert (asked >= 2 * task.pairs).all() and (asked % 2 == 0).all()
        assert sorted(row[asked]) == sorted(pairs) and [pairs[key] for key in row[asked]] == wanted[asked].tolist()
    rest = inputs[:, 2 * task.pairs :][targets[:, 2 * task.pairs :] == IGNORED]
    assert {*rest} == {*range(task.vocabulary)}  # random tokens elsewhere


def test_distances_of_recall_follow_the_power_law():
    task = AssociativeRecall(length=34, pairs=1, vocabulary=8, power=0.01)
    _, targets = task.sample(20_000, np.random.default_rng(0))
    places = np.argmax(targets != IGNORED, 1)
    weights = np.arange(1, 17) ** (0.01 - 1)
    shares = np.bincount((places - 2) // 2, minlength=16) / len(places)
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=0.012)  # 4 standard deviations


@pytest.mark.parametrize("band", [0.5, 0.3, 0.02])
def test_noise_is_delayed_and_has_its_frequencies(band):
    task = NoiseDelay(length=50, tau=7, band=band)
    inputs, targets = task.sample(400, np.random.default_rng(3))
    assert inputs.dtype == targets.dtype == np.float32
    assert np.isnan(targets[:, :7]).all() and np.array_equal(targets[:, 7:], inputs[:, :-7])
    if band == 0.5:
        expected = np.random.default_rng(3).standard_normal((400, 50))
        lags = np.where(np.arange(50) == 0, 1.0, 0.0)
    else:  # the sum of waves, one by one
        frequencies = task.frequencies
        assert 0 < frequencies[0] <= 1 / (4 * 50) and frequencies[-1] <= band < frequencies[-1] + frequencies[0]
        a, b = np.random.default_rng(3).standard_normal((2, 400, len(frequencies))) / math.sqrt(len(frequencies))
        angles = 2 * np.pi * np.outer(frequencies, np.arange(50))
        expected = a @ np.cos(angles) + b @ np.sin(angles)
        lags = np.cos(angles).mean(0)
    np.testing.assert_allclose(inputs, expected, atol=1e-5)  # fp32
    # Stationary, of variance 1: over 400 samples the products of two values average to their correlation.
    found = (inputs[:, :1] * inputs).mean(0)
    np.testing.assert_allclose(found, lags, atol=0.25)  # 4 standard deviations of 400 products


@pytest.mark.parametrize("name", TASKS)
def test_samples_are_a_function_of_the_seed(name):
    task = make_task(name)
    first, again, other = (task.sample(4, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(map(np.float64, first), map(np.float64, again)))
    assert not np.array_equal(first[0], other[0])


def test_task_names_hold_parameters():
    assert make_task("mqar:pairs=2,power=0.5", length=16, tau=3) == AssociativeRecall(length=16, pairs=2, power=0.5)
    assert make_task("delay:tau=5", tau=3).tau == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mqar:pairs=17", "length must be even and at least 4 pairs = 68.*got"),
        ("mqar:length=63", "length must be even.*got 63"),
        ("mqar:vocabulary=8", "has 3 keys, too few for 4 pairs"),
        ("mqar:power=0", r"power must be in \(0, 1\]"),
        ("mqar:pairs=0", "pairs of AssociativeRecall must be an integer of at least 1, got 0"),
        ("selective-copying:tokens=40", "at least 2 tokens = 80"),
        ("phone-book:name=1,entries=9", "8 letters make 8 names of length 1: there must be at least entries = 9"),
        ("phone-book:name=6", "8 letters make 262144 names"),
        ("phone-book:digits=0", "digits of PhoneBook must be an integer of at least 1, got 0"),
        ("induction:length=2", "length of InductionHeads must be an integer of at least 3, got 2"),
        ("delay:tau=64", "tau must be below the length 64"),
        ("delay-white:tau=64,length=64", "tau must be below the length 64"),
        ("delay-band:band=0.6", "band must be in"),
        ("delay-band:band=nan", "band must be in"),
        ("delay-band:band=x", "band of delay-band must be a number"),
        ("delay:tau=1.5", "tau of delay must be a number"),
        ("delay:band=0.1", "parameters of delay are"),
        ("copy", "a task must be one of"),
    ],
)
def test_parameters_that_cannot_be_met(name, message):
    with pytest.raises(ValueError, match=message):
        make_task(name)


# ---------------------------------------------------------------------------------------------------------------------
# The harness.


def run(module, tmp_path, *arguments):
    path = tmp_path / "report.json"
    module.main(["--quick", "--runs_dir", str(tmp_path / "runs"), "--out", str(path), *arguments])
    return json.loads(path.read_text())


@pytest.mark.slow
def test_every_model_runs_every_kind_of_task(tmp_path, capsys):
    names, tasks = [*memory_probes.ROWS], ["mqar:pairs=3", "delay-white"]
    report = run(memory_probes, tmp_path, "--tasks", *tasks, "--rates", "0.01", "--seeds", "0")
    assert [(r["task"]) for r in report["results"]] == [tasks[0]] * len(names) + [tasks[1]] * len(names)
    assert len(list((tmp_path / "runs").iterdir())) == 2 * len(names)
    for result in report["results"]:
        assert abs(result["parameters"] / 50_000 - 1) <= matched_models.TOLERANCE
        elastic = memory_probes.ROWS[result["model"]].peer is None
        assert [*result["error"]] == (["2", "4", "8", "16", "32"] if elastic else ["1"])
        assert result["definition"]["task"]["length"] == 32
        assert (result["cache_bytes"] is not None) == (elastic and result["task"] != "delay-white")
        assert result["definition"]["task"].get("pairs", 3) == 3 and result["definition"]["task"].get("tau", 4) == 4
    text = capsys.readouterr().out
    assert "mqar:pairs=3: accuracy" in text and "delay-white: squared error over variance" in text
    assert run(memory_probes, tmp_path, "--tasks", *tasks, "--table")["results"] == report["results"]


def test_errors_are_those_of_the_answers(tmp_path):
    """Scored by a model that is known: it gives the token of two steps ago, or half of what the signal was."""

    class Known(torch.nn.Module):
        config = None

        def __init__(self):
            super().__init__()
            self.unused = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids=None, input_features=None, use_cache=None):
            if input_ids is not None:
                logits = torch.nn.functional.one_hot(input_ids.roll(2, 1), 16).float()
            else:
                assert torch.equal(input_features[..., 1], torch.ones_like(input_features[..., 1]))
                logits = input_features[..., 0].roll(2, 1) / 2
            return type("Output", (), {"logits": logits})

    settings = memory_probes.Settings(1000, 1, positions=512, held_out=16_384)
    errors = {
        name: memory_probes.score(Known(), make_task(name), settings, [1])["1"]
        for name in ("delay:tau=2", "delay:tau=3", "delay-white:tau=2", "delay-white:tau=3")
    }
    assert errors["delay:tau=2"] == 0.0 and errors["delay-white:tau=2"] == pytest.approx(0.25)
    assert errors["delay:tau=3"] == pytest.approx(15 / 16, abs=0.01)  # independent
    assert errors["delay-white:tau=3"] == pytest.approx(1.25, abs=0.05)


@pytest.mark.parametrize("name", ["gated", "llama", "s4d"])
@pytest.mark.parametrize("kind", ["delay", "delay-white"])
def test_models_do_not_see_the_future(name, kind):
    settings = memory_probes.Settings(30_000, 1, quick=True)
    task = settings.task(kind)
    torch.manual_seed(0)
    model = memory_probes.make_model(memory_probes.model_config(memory_probes.ROWS[name], task, settings)).eval()
    inputs, targets = task.sample(2, np.random.default_rng(0))
    changed = inputs.copy()
    changed[:, 20:] = changed[:, 20:][:, ::-1]
    a, b = (model(**memory_probes.batch_of((x, targets), "cpu")[0], use_cache=False).logits for x in (inputs, changed))
    torch.testing.assert_close(a[:, :20], b[:, :20], rtol=0, atol=1e-4)
    assert (a[:, 20:] - b[:, 20:]).abs().max() > 1e-4


def test_training_lowers_the_error(tmp_path):
    """A delay of one step is a matter of a few updates."""
    settings = memory_probes.Settings(20_000, 60, positions=512, held_out=2048, filter_length=512, quick=True)
    runs = [sweeps.Run("gated", 0.02, 0, "delay:tau=1,length=16,vocabulary=4")]
    memory_probes.sweep(settings, runs, tmp_path, 1)
    (record,) = sweeps.collect(tmp_path)
    assert all(error < 0.3 for error in record["error"].values())  # 0.75 is chance


def test_sweep_goes_on_where_it_was_killed(tmp_path, monkeypatch):
    order = ["--tasks", "delay", "--only", "llama", "--rates", "0.01"]
    start_killed_sweep(memory_probes, monkeypatch, lambda: run(memory_probes, tmp_path, *order))
    found = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    assert {path.name for path in found} == {f"delay-llama-rate0.01-seed{seed}.json" for seed in (0, 1)}
    (result,) = run(memory_probes, tmp_path, *order)["results"]
    assert result["seeds"] == [0, 1, 2] and all(path.stat().st_mtime_ns == time for path, time in found.items())
    with pytest.raises(ValueError, match="updates was 3 and is now 2; choose another --runs_dir"):
        run(memory_probes, tmp_path, *order, "--updates", "2")
    monkeypatch.setitem(TASKS, "delay", TokenDelay(vocabulary=8))
    with pytest.raises(ValueError, match=r"definition was .* and is now .*; choose another --runs_dir"):
        run(memory_probes, tmp_path, *order)


def test_what_cannot_be_run_is_refused_before_any_work(tmp_path, capsys):
    for order, message in (
        (["--tasks", "copy"], "a task must be one of"),
        (["--tasks", "mqar:pairs=99"], "at least 4 pairs = 396"),
    ):
        with pytest.raises(ValueError, match=message):
            run(memory_probes, tmp_path, *order)
    with pytest.raises(ValueError, match="has 500 parameters"):
        memory_probes.sweep(memory_probes.Settings(500, 1), [sweeps.Run("paper", 0.01, 0, "delay")], tmp_path / "x", 1)
    with pytest.raises(SystemExit):
        run(memory_probes, tmp_path, "--updates", "0")
    assert "--updates must be at least 1, got 0" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists() and not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match="holds no finished run"):
        run(memory_probes, tmp_path, "--table")


def test_names_of_files_of_runs():
    """Those that exist must stay readable."""
    run = sweeps.Run("gated, inner D, d D/4", 0.003, 0)
    assert run.file == "gated-inner-D-d-D-4-rate0.003-seed0.json"
    assert sweeps.Run("llama", 0.01, 2, "mqar:pairs=8").file == "mqar-pairs-8-llama-rate0.01-seed2.json"
    row = importlib.import_module("benchmarks.ablation").ROWS["llama"]
    assert matched_models.definition_of(row) == {
        "layers": 5,
        "fields": {},
        "expansion": 1.0,
        "feed_forward": 0.0,
        "peer": "transformer",
        "hidden_size": 112,
        "updates": 1.0,
        "full_share": 0.0,
        "schedule": "discrete",
    }


# ---------------------------------------------------------------------------------------------------------------------
# What budgets buy.


@pytest.mark.parametrize("kind", what_budgets_buy.LEVELS)
def test_shares_are_those_of_a_projection(kind):
    H, K, taus = 64, 7, np.array([1.0, 5.0, 30.0])
    found = what_budgets_buy.shares(H, K, kind, taus)
    phi, lags = spectral_basis(H).filters(K), np.arange(H)
    for i, tau in enumerate(taus):
        h = {"impulse": lags == tau, "window": lags < tau, "exponential": np.exp(-lags / tau)}[kind].astype(float)
        for k in range(1, K + 1):
            held = phi[:, :k] @ np.linalg.lstsq(phi[:, :k], h, rcond=None)[0]
            assert found[i, k - 1] == pytest.approx(held @ held / (h @ h), abs=1e-9)


def test_horizon_ends_where_the_share_first_falls():
    taus = np.array([1.0, 2.0, 4.0, 8.0])
    cases = {(0.5, 0.1, 0.9, 0.1): 1.0, (0.9, 0.9, 0.8, 0.2): 4.0, (0.1, 0.9, 0.9, 0.9): 0.0, (0.9,) * 4: math.inf}
    for share, expected in cases.items():
        assert what_budgets_buy.horizon(taus, np.array(share), 0.5) == expected


@pytest.mark.parametrize("band", [0.5, 0.1])
def test_readout_errors_are_those_of_a_regression(band):
    """The normal equations with the signal's autocorrelation, instead of least squares over frequencies."""
    H, tau, noise = 512, 6, 1e-2
    found = what_budgets_buy.readout_errors(H, band, tau, noise)
    inside = [j for j in range(1, H) if j / (2 * H) <= band]
    lags = np.arange(H)
    if band == 0.5:
        correlation = (lags == 0).astype(float)
    else:
        correlation = np.cos(2 * np.pi * np.outer(lags, inside) / (2 * H)).mean(1)
    toeplitz = correlation[abs(lags[:, None] - lags)]
    for K in (2, 8, 32):
        phi = spectral_basis(H).filters(K)
        cross = phi.T @ toeplitz[:, tau]
        covariance = phi.T @ toeplitz @ phi + noise * np.eye(K)
        assert found[str(K)] == pytest.approx(1 - cross @ np.linalg.solve(covariance, cross), abs=1e-8)


def test_what_budgets_buy_from_end_to_end(tmp_path):
    report = run(what_budgets_buy, tmp_path)
    exact, trained = report["results"]["analytic"], report["results"]["trained"]
    assert [r["task"] for r in trained] == [r["task"] for r in exact["readout_errors"]]
    assert all(
        [*r["error"]] == [str(K) for K in what_budgets_buy.BUDGETS] for r in (*trained, *exact["readout_errors"])
    )
    assert {row["response"] for row in exact["horizons"]} == {*what_budgets_buy.LEVELS} and report["targets"]
    assert exact["energy_lags"]["4"] == [11, 29]  # as the project's notes have them
    assert (tmp_path / "report.png").stat().st_size > 0
    assert run(what_budgets_buy, tmp_path, "--analytic")["results"] == {"analytic": exact, "trained": []}
