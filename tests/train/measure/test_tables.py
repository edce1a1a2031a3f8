# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Tables of experiments, the paper's figures beside ours, and one elastic model against one model a budget."""

import json
import math
from dataclasses import replace

import pytest

from essm_train import reproduce
from essm_train.measure.evaluation import Evaluation
from essm_train.measure.paper import PAPER_FIGURES, Figure, figures_of, paper_curve
from essm_train.measure.scoring import ACCURACY, BITS_PER_BYTE
from essm_train.measure.tables import cost_tables, departures, markdown, panels_of
from essm_train.tasks import experiments
from essm_train.tasks.catalog import TASKS
from essm_train.tasks.experiments import EXPERIMENTS, Experiment, Row, get_experiment
from modeling_essm.budgets.curve import BudgetCurve


def evaluation(*seeds, metric=BITS_PER_BYTE, budgets=(2, 4, 8)) -> Evaluation:
    budgets = budgets[: len(seeds[0])]
    return Evaluation(tuple(BudgetCurve(*metric, budgets, seed, (1.0,) * len(budgets)) for seed in seeds))


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


# ---------------------------------------------------------------------------------------------------------------------
# Tables and panels.


def test_the_papers_figure_of_a_baseline_stands_under_ours():
    """Also in a table of baselines alone, which has one column."""
    one = {"text, mamba": (evaluation((0.5,), metric=ACCURACY, budgets=(1,)), {})}
    many = {"text": (evaluation((0.4, 0.6), metric=ACCURACY), {"parameters": 7000})}
    experiment, paper = get_experiment("table1"), {"text, mamba": {32: Figure(0.8, 0.01)}, "text": {2: Figure(0.7)}}
    header, _, ours, theirs = cells(markdown(experiment, one, paper))
    assert header[2] == "one budget" and ours[2] == "0.5000"
    assert theirs[:3] == ["text, mamba, the paper's", "", "0.8 ± 0.01"] and len(theirs) == len(header)
    header, _, elastic, of_elastic, ours, theirs = cells(markdown(experiment, many | one, paper, {"text"}))
    assert header[2:4] == ["K=2", "K=4"] and elastic[:4] == ["text (substitute data)", "7,000", "0.4000", "0.6000"]
    assert of_elastic[2:4] == ["0.7", ""] and ours[2:4] == ["", "0.5000"] and theirs[2:4] == ["", "0.8 ± 0.01"]


def test_panels_keep_the_papers_curve_apart_from_substitute_data():
    experiment = get_experiment("table2")
    rows = dict.fromkeys(("listops", "text"), (evaluation((0.5, 0.6, 0.7), metric=ACCURACY), {}))
    ours, theirs = panels_of(experiment, rows, figures_of(experiment), {"listops": "short trees"})
    assert list(ours) == ["listops (substitute data)", "text"] and list(theirs) == ["the paper, listops", "text"]
    assert theirs["the paper, listops"]["ES-SSM"].values[:3] == (0.5411, 0.5947, 0.6035)


def test_models_of_one_budget_each_are_a_line_together():
    """Section 5.1: each K by the model that was trained at it, and what they cost together."""
    experiment = get_experiment("retrained")
    rows = {"ES-SSM": evaluation((2.3, 2.2, 2.1)), "AR-STU, K=8": evaluation((4.0, 3.9, 2.2))}
    rows["AR-STU, K=2"] = evaluation((2.5,))
    for name, each in rows.items():
        training = {"seconds": [10.0 + len(name)], "updates": 3, "tokens_per_update": 5, "schedule": "discrete"}
        rows[name] = each, {"parameters": 7} | training
    text = markdown(experiment, rows, figures_of(experiment))
    assert "| AR-STU, K=2 | 7 | 2.5000 |  |  |  |  | 1 |" in text
    assert "| AR-STU, a model each |  | 2.5000 |  | 2.2000 |" in text
    assert "ES-SSM, the paper's on PG19 | | 1.5642 | 1.266 | 1.2" in text
    costs = cost_tables(experiment, rows)
    assert costs.startswith("\nAR-STU:\n\nOne model, 'ES-SSM', against 2 fixed ones")
    assert "| seconds of training | 21 | 21 | 42 | 16 | 1/2.6 |" in costs
    ours, theirs = panels_of(experiment, rows, figures_of(experiment), {})
    assert list(ours["novels"]) == ["ES-SSM", "AR-STU, a model each"] and list(theirs) == ["the paper, PG19"]
    assert ours["novels"]["AR-STU, a model each"].values == (2.5, 2.2)


def test_costs_and_quality_by_hand():
    def row(evaluation, seconds, updates=100, schedule="full"):
        training = {"seconds": seconds, "updates": updates, "tokens_per_update": 64, "schedule": schedule}
        return evaluation, training

    rows = {
        "K=8": row(evaluation((9.0, 9.0, 2.5), (9.0, 9.0, 2.7)), [50.0, 70.0]),
        "ES-SSM": row(evaluation((3.2, 2.9, 2.8), (3.4, 2.9, 2.6)), [40.0, 60.0], 120, "discrete"),
        "K=2": row(evaluation((3.0,), (3.1,)), [20.0, 30.0]),
        "all channels": row(evaluation((5.0, 4.0, 3.0), (5.0, 4.0, 3.0)), [1.0, 1.0]),
    }
    experiment = Experiment("mine", "?", {name: Row("novels") for name in rows})
    table = cells(cost_tables(experiment, rows))
    assert table[0] == ["", "K=2", "K=8", "all fixed", "elastic", "elastic / all fixed"]
    assert table[2] == ["seconds of training", "25", "60", "85", "50", "1/1.7"]
    assert table[3][:5] == ["tokens of training", "6,400", "6,400", "12,800", "7,680"]
    assert table[4] == ["updates of training", "100", "100", "200", "120", "1/1.7"]
    assert table[5][:3] == ["fixed at K", "3.0500", "2.6000"] and table[6][:3] == ["elastic at K", "3.3000", "2.7000"]
    assert table[7][1:3] == ["+0.2500 ± 0.0707", "+0.1000 ± 0.2828"]  # +0.2 and +0.3; +0.3 and -0.1
    assert cost_tables(experiment, {name: row for name, row in rows.items() if name != "K=2"}) == ""  # no family
    other = replace(experiment, rows=experiment.rows | {"ES-SSM": Row("smnist")})
    assert cost_tables(other, rows) == ""


def test_every_reduced_task_says_how_it_differs():
    text = departures(TASKS, "small", {}, {})
    assert text.count("Small scale: ") == len(TASKS)
    assert "max_length 512 for 4096" in text and "eval_steps" not in text
    text = departures(["retrieval"], "medium", {"retrieval": "pairs of passages"}, {})
    assert text.startswith("- retrieval: the official files")
    assert "  Substitute data: pairs of passages.\n  Medium scale: hidden_size 128 for that of essm-lra-r" in text
    assert "Small scale" not in departures(TASKS, "full", {}, {})
    for scale in ("small", "full"):
        assert "max_steps 10 for 50000" in departures(["smnist"], scale, {}, {"max_steps": 10})


# ---------------------------------------------------------------------------------------------------------------------
# The paper's figures.


def test_rows_have_the_papers_figures():
    """Mean and deviation at full capacity, a sweep, a failure; shares as fractions."""
    first = figures_of(get_experiment("table1"))
    assert first["listops, mamba2"] == {32: Figure(0.5145, 0.0044)} and str(first["text"][32]) == "0.9391 ± 0.0021"
    assert math.isnan(first["pathx, transformer"][32].mean) and str(first["pathx, transformer"][32]) == "FAIL"
    assert "image, s4d" not in first
    assert figures_of(get_experiment("table3_novels"))["novels, s4"] == {32: Figure(1.26)}
    assert figures_of(get_experiment("table4_novels"))["AR-STU"][2] == Figure(1.7432)
    assert figures_of(get_experiment("table6_speech4"))["speech4"][3] == Figure(0.9762)
    assert figures_of(get_experiment("exponents")) == {}
    experiment = get_experiment("table3")
    with pytest.raises(ValueError, match=r"paper of table3 must be among \('table_1', .*got 'table_9'"):
        figures_of(replace(experiment, paper="table_9"))
    with pytest.raises(ValueError, match=r"paper of table3: pg19 must be among .*'Mamba-2'.*got 'RWKV'"):
        figures_of(replace(experiment, rows={"pg19": replace(experiment.rows["pg19"], paper=["RWKV"])}))


def test_every_figure_of_the_paper_has_a_row():
    tables = json.loads(PAPER_FIGURES.read_text())["tables"]
    for number in range(1, 7):
        experiment = get_experiment(f"table{number}")
        assert experiment.paper == f"table_{number}"
        assert experiment.title.startswith(f"Table {number} of the paper, version 1: ")
        rows = tables[experiment.paper]["rows"]
        wanted = {(row, column) for row in rows for column in rows[row]} if number == 1 else {(row,) for row in rows}
        wanted -= {(f"SC-10, {name}",) for name in ("retention", "active spectral capacity")}  # follow from accuracy
        assert wanted <= {tuple(row.paper) for row in experiment.rows.values()}
        assert len(figures_of(experiment)) == len(wanted)


def test_substitute_data_never_has_the_papers_name():
    """Only rows on the paper's own data stand under its figures without a word; LRA's tasks are made as there."""
    for experiment in map(get_experiment, EXPERIMENTS):
        own = {row.task for row in experiment.rows.values()} & {"novels", "speech4"}
        assert not experiment.paper or bool(experiment.paper_data) == bool(own)


def test_curves_of_the_paper():
    ours = BudgetCurve("accuracy", True, (2, 4), (0.5, 0.6))
    curve = paper_curve({4: Figure(0.8, 0.01), 2: Figure(0.7)}, ours)
    assert (curve.budgets, curve.values, curve.errors) == ((2, 4), (0.7, 0.8), (0.0, 0.01))
    assert paper_curve({32: Figure(math.nan)}, ours) is None is paper_curve({}, ours)
    assert paper_curve({32: Figure(0.8)}, BudgetCurve("accuracy", True, (1,), (0.5,))).budgets == (1,)


def test_rows_whose_runs_would_share_a_folder_are_refused(tmp_path, monkeypatch):
    """A task of one's own may be called as one of the library's; the same run of two rows stands once."""
    rows = {"ours": Row("text"), "mine": Row("mine/text.yaml")}
    monkeypatch.setattr(experiments, "get_experiment", lambda name: Experiment(name, "?", rows))
    monkeypatch.setattr(reproduce, "arguments_of", lambda row, args, seed: {"data": row.task})
    args = reproduce.ReproduceArguments("x", output_dir=str(tmp_path), results_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"text and mine/text.yaml would share .*text-small/default-seed0"):
        reproduce.reproduce(args)
    named = Row("text", {"tokenizer_name": "org/name"})
    assert reproduce.folder_of(named, args, 0).parts[-2:] == ("text-small", "tokenizer_name=org_name-seed0")
