# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The paper's figures: every one is data of the repository and stands beside a row of the table that has its number."""

import json
import math
from dataclasses import fields, replace

import pytest

from essm_train.data.arguments import CLMArguments
from essm_train.measure.paper import PAPER_FIGURES, Figure, figures_of, paper_curve, read_paper_figures
from essm_train.tasks.catalog import ROOT, get_task
from essm_train.tasks.experiments import EXPERIMENTS, get_experiment
from modeling_essm.budgets.curve import BudgetCurve

TABLES = json.loads(PAPER_FIGURES.read_text())["tables"]


def test_rows_have_the_papers_figures():
    """Mean and deviation at full capacity, a sweep, a failure; shares as fractions."""
    first = figures_of(get_experiment("table1"))
    assert first["listops, mamba2"] == {32: Figure(0.5145, 0.0044)} and str(first["text"][32]) == "0.9391 ± 0.0021"
    assert math.isnan(first["pathx, transformer"][32].mean) and str(first["pathx, transformer"][32]) == "FAIL"
    assert first["image, Base Spectral"][32].mean == 0.8733 and "image, s4d" not in first
    assert figures_of(get_experiment("table2"))["image"][32] == Figure(0.9246)
    third, novels = (figures_of(get_experiment(name)) for name in ("table3", "table3_novels"))
    assert third["pg19, s4"] == {32: Figure(1.26)} == novels["novels, s4"]
    assert figures_of(get_experiment("table4_novels"))["AR-STU"][2] == Figure(1.7432)
    assert figures_of(get_experiment("table5"))["sc10, AR-STU"] == {32: Figure(0.9776, 0.0009)}
    assert figures_of(get_experiment("table6_speech4"))["speech4"][3] == Figure(0.9762)
    assert figures_of(get_experiment("exponents")) == {}


@pytest.mark.parametrize("number", range(1, 7))
def test_every_figure_of_the_paper_has_a_row(number):
    experiment = get_experiment(f"table{number}")
    assert experiment.paper == f"table_{number}" and experiment.title.startswith(f"Table {number} of the paper: ")
    rows = TABLES[experiment.paper]["rows"]
    wanted = {(row, column) for row in rows for column in rows[row]} if number == 1 else {(row,) for row in rows}
    wanted -= {(f"SC-10, {name}",) for name in ("retention", "active spectral capacity")}  # follow from the accuracy
    assert wanted <= {tuple(row.paper) for row in experiment.rows.values()}
    assert len(figures_of(experiment)) == len(wanted)


def test_substitute_data_never_has_the_papers_name():
    """Only rows on the paper's own data stand under its figures without a word; LRA's tasks are made as there."""
    for name in EXPERIMENTS:
        experiment = get_experiment(name)
        if not experiment.paper:
            continue
        tasks = {row.task for row in experiment.rows.values()}
        assert bool(experiment.paper_data) == bool(tasks & {"novels", "speech4"}), name


def test_wrong_keys():
    experiment = get_experiment("table3")
    with pytest.raises(ValueError, match=r"paper of table3 must be among \('table_1', .*got 'table_9'"):
        figures_of(replace(experiment, paper="table_9"))
    row = replace(experiment.rows["pg19"], paper=["RWKV"])
    with pytest.raises(ValueError, match=r"paper of table3: pg19 must be among .*'Mamba-2'.*got 'RWKV'"):
        figures_of(replace(experiment, rows={"pg19": row}))
    row = replace(row, paper=["S4", "32"])
    with pytest.raises(ValueError, match=r"pg19 must be among \(\), got '32'"):
        figures_of(replace(experiment, rows={"pg19": row}))


def test_curves_of_the_paper(tmp_path):
    ours = BudgetCurve("accuracy", True, (2, 4), (0.5, 0.6))
    curve = paper_curve({4: Figure(0.8, 0.01), 2: Figure(0.7)}, ours)
    assert (curve.budgets, curve.values, curve.errors) == ((2, 4), (0.7, 0.8), (0.0, 0.01))
    assert paper_curve({32: Figure(math.nan)}, ours) is None is paper_curve({}, ours)
    baseline = BudgetCurve("accuracy", True, (1,), (0.5,))
    assert paper_curve({32: Figure(0.8)}, baseline).budgets == (1,)
    (tmp_path / "own.json").write_text('{"text": {"4": 0.5}}')
    assert read_paper_figures(str(tmp_path / "own.json"), ["text"]) == {"text": {4: Figure(0.5)}}


def test_pg19_is_trained_as_in_the_authors_notebook():
    recipe, run = json.loads(PAPER_FIGURES.read_text())["released_pg19_recipe"], get_task("pg19").full
    config = json.loads((ROOT / "hub_configs" / "essm-21m" / "config.json").read_text())
    assert run["config_name"].endswith("/essm-21m")
    epoch, ours = recipe["updates of an epoch"], {"block", "config_name", "streaming", "sweep_blocks"}
    assert {
        "hidden_size": config["hidden_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_spectral_channels": config["num_spectral_channels"],
        "filter_length": config["filter_length"],
        **{name: value for name, value in run.items() if name not in ours},
    } == {
        "hidden_size": recipe["width"],
        "num_hidden_layers": recipe["blocks"],
        "num_spectral_channels": recipe["capacity"],
        "filter_length": recipe["sequence length and filter length"],
        "block_size": recipe["sequence length and filter length"],
        "per_device_train_batch_size": recipe["sequences of an update"],
        "gate_hidden_size": recipe["gate width"],
        "gate_bias": recipe["gate output bias"],
        "embedding_dropout": recipe["dropout on the embedding"],
        "activation_dropout": recipe["dropout inside the feed-forward layer"],
        "stochastic_depth": recipe["stochastic depth of the last block"],
        "stochastic_depth_ramp": True,
        "max_steps": epoch * recipe["epochs at most"],
        "learning_rate": recipe["learning rate"],
        "lr_scheduler_type": "cosine_with_min_lr",
        "min_lr_rate": recipe["floor of the learning rate"],
        "warmup_steps": recipe["warm-up"],
        "weight_decay": recipe["weight decay"],
        "ema_decay": recipe["decay of the averaged weights"],
        "budget_schedule": "authors",
        "full_budget_updates": epoch * recipe["epochs at full budget"],
        "eval_steps": epoch,
        "save_steps": epoch,
        "eval_budgets": [recipe["selected by K"]],
        "early_stopping_patience": recipe["patience in epochs"],
        "early_stopping_threshold": recipe["least improvement"],
        "load_best_model_at_end": True,
        "validation_blocks": recipe["segments looked at"],
    }
    defaults = {field.name: field.default for field in fields(CLMArguments)}
    assert recipe["betas"] == [0.9, defaults["adam_beta2"]] and recipe["clipped at"] == defaults["max_grad_norm"]
