# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""train/evaluate_model.py and train/reproduce.py: sweeps of saved models, seeds, tables and the runner."""

import importlib.util
import json
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from apart import run_script
from helpers import ROOT, random_model, randomise
from transformers import AutoModelForSequenceClassification

from essm_train.commands import reproduce
from essm_train.data.arguments import ClassificationArguments, CLMArguments
from essm_train.data.classification import load_classification
from essm_train.measure import evaluation
from essm_train.measure.evaluation import Evaluation
from essm_train.measure.metric import Metric
from essm_train.measure.paper import Figure, figures_of
from essm_train.measure.tables import cost_tables, panels_of
from essm_train.tasks.catalog import TASKS
from essm_train.tasks.retrieval import PairFile, collate
from modeling_essm import (
    ESSMForPairClassification,
    ESSMForSequenceClassification,
    ESSMPairConfig,
    build_byte_tokenizer,
)


def summary(values, higher=False):
    budgets = (2, 4, 32)
    metric = Metric("accuracy" if higher else "bits_per_byte", higher)
    return Evaluation(metric, budgets, values, tuple((300.0, 200.0, 100.0) for _ in values), (1, 2, 4), (10, 20, 80))


def test_seeds_are_summarised():
    found = summary(((2.4, 2.1, 2.0), (2.6, 2.3, 2.0)))
    assert found.mean == pytest.approx((2.5, 2.2, 2.0))
    assert found.deviation == pytest.approx((statistics.stdev((2.4, 2.6)), statistics.stdev((2.1, 2.3)), 0.0))
    assert found.curve.retention == pytest.approx((2.0 / 2.5, 2.0 / 2.2, 1.0))
    assert (found.curve.sweet_spot, found.curve.collapse_boundary) == (32, 4)  # 2.2 is 10% above, 2 / 2.2 = 91%
    better = summary(((0.5, 0.885, 0.9),), higher=True)
    assert better.curve.retention == pytest.approx((0.5 / 0.9, 0.885 / 0.9, 1.0)) and better.deviation == (0, 0, 0)
    assert (better.curve.sweet_spot, better.curve.collapse_boundary) == (4, 4)


def test_markdown_has_a_row_per_budget():
    lines = summary(((2.4, 2.1, 2.0), (2.6, 2.3, 2.0))).markdown().splitlines()
    assert len(lines) == 5 and lines[2].startswith("| 2 | 2.5000 ± 0.1414 | 80.0% | 10 (12%) | 300 |")
    assert "▲ collapse boundary" in lines[3] and "★ sweet spot" in lines[4]


def test_a_language_model_is_evaluated_at_every_budget(tmp_path):
    folders = []
    for seed in (0, 1):
        folder = tmp_path / f"seed{seed}" / "model"
        random_model(seed=seed).save_pretrained(folder)
        build_byte_tokenizer().save_pretrained(folder)
        folders.append(str(folder))
    (tmp_path / "text.txt").write_text("spectral budget " * 200)
    args = CLMArguments(
        train_file=[str(tmp_path / "text.txt")], block_size=64, sweep_blocks=4, validation_blocks=4, filter_length=512
    )
    task = evaluation.open_language_task(args, "words")
    found = evaluation.evaluate_models(folders, task, (2, 8))
    assert found.budgets == (2, 8, 32) and len(found.values) == 2
    model = task.load(folders[0])
    assert found.active_parameters == tuple(model.num_active_parameters(K) for K in found.budgets)
    assert found.peak_bytes[0] < found.peak_bytes[2]
    assert found.values[0] != found.values[1]
    record = json.loads(json.dumps(found.record()))
    assert record["seeds"] == 2 and record["sweet_spot"] in found.budgets
    small = tmp_path / "small"
    random_model(num_spectral_channels=8).save_pretrained(small)
    with pytest.raises(ValueError, match="capacity 8"):
        evaluation.evaluate_models([folders[0], str(small)], task, (2, 8))


def test_a_classifier_is_evaluated_on_the_test_split(tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 7)):
        rows = pa.array(list(rng.integers(0, 256, (count, 16)).astype(np.uint8)), pa.list_(pa.uint8()))
        pq.write_table(pa.table({"pixels": rows, "label": rng.integers(0, 3, count)}), tmp_path / f"{split}.parquet")
    random_model(ESSMForSequenceClassification, num_input_features=1, num_labels=3).save_pretrained(tmp_path / "model")
    args = ClassificationArguments(
        train_file=[str(tmp_path / "train.parquet")], test_file=[str(tmp_path / "test.parquet")],
        features_column="pixels", num_labels=3, filter_length=512, cpu_threads=1,
    )  # fmt: skip
    data = load_classification(args)
    task = evaluation.open_labelled_task(data, AutoModelForSequenceClassification, 32, "noise")
    found = evaluation.evaluate_models([str(tmp_path / "model")], task, (2, 32))
    assert found.metric.name == "accuracy"
    labels = torch.tensor(pq.read_table(tmp_path / "test.parquet")["label"].to_pylist())
    pixels = torch.tensor(pq.read_table(tmp_path / "test.parquet")["pixels"].to_pylist()) / 127.5 - 1
    model = task.load(str(tmp_path / "model")).eval()
    with torch.no_grad():
        expected = [
            (model(input_features=pixels[..., None], spectral_budget=K).logits.argmax(-1) == labels) for K in (2, 32)
        ]
    assert found.values[0] == pytest.approx([float(e.double().mean()) for e in expected])


@pytest.fixture
def pairs(tmp_path) -> Path:
    """A data folder with the official files of retrieval."""
    rng = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for split, count in (("train", 12), ("eval", 5), ("test", 23)):
        texts = ["".join(rng.choice(list("abc"), rng.integers(5, 40))) for _ in range(2 * count)]
        lines = [f"{i % 2:.1f}\tP{i}\tQ{i}\tb'{texts[2 * i]}'\tb'{texts[2 * i + 1]}'\n" for i in range(count)]
        (tmp_path / "data" / f"new_aan_pairs.{split}.tsv").write_text("".join(lines))
    return tmp_path / "data"


def test_the_script_evaluates_pairs(pairs, tmp_path):
    folder = tmp_path / "run" / "model"
    config = ESSMPairConfig(hidden_size=16, num_hidden_layers=1, num_spectral_channels=8, filter_length=512)
    model = randomise(ESSMForPairClassification(config)).eval()
    test = PairFile(pairs / "new_aan_pairs.test.tsv", 512)
    with torch.no_grad():  # so that predictions differ, and between budgets
        model.model.layers[0].mixer.channel_mixing.mul_(20)
        logits = model(**collate(list(test))).logits
        difference = (logits[:, 1] - logits[:, 0]).sort().values
        model.score.bias[1] -= difference[11:13].mean()  # between two of the 23 pairs: on one, rounding would decide it
    model.save_pretrained(folder)
    script = ROOT / "train/evaluate_model.py"
    line = ["--task", "retrieval", "--data_dir", pairs, "--scale", "small", "--models", folder, "--budgets", 2, 5]
    done = run_script(script, *line)
    assert done.returncode == 0, done.stderr
    assert "23 pairs of new_aan_pairs.test.tsv" in done.stdout and "| 5 |" in done.stdout
    found = json.loads((tmp_path / "run" / "evaluation" / "evaluation.json").read_text())
    for i, K in enumerate((2, 5, 8)):
        with torch.no_grad():
            right = model(**collate(list(test)), spectral_budget=K).logits.argmax(-1) == test.labels
        assert found["budgets"][i] == K and found["values"][0][i] == pytest.approx(float(right.double().mean()))
        assert found["active_parameters"][i] == model.num_active_parameters(K)
    assert len(set(found["values"][0])) > 1
    assert 0 < found["peak_bytes"][0] < found["peak_bytes"][2] and min(found["tokens_per_second"][0]) > 0
    assert json.loads((tmp_path / "run" / "budget_sweep.json").read_text())["values"] == found["values"][0]


def test_open_task_names_what_is_wrong(pairs, tmp_path):
    random_model().save_pretrained(tmp_path / "lm")
    task = evaluation.open_task("retrieval", str(pairs), "small")
    with pytest.raises(ValueError, match=r"lm is not a model of this task: it lacks score\.weight"):
        evaluation.evaluate_models([str(tmp_path / "lm")], task)
    with pytest.raises(FileNotFoundError, match="new_aan_pairs"):
        evaluation.open_task("retrieval", str(tmp_path / "run"), "small")
    with pytest.raises(ValueError, match="got 'pairs'"):
        evaluation.open_task("pairs", str(pairs), "small")


def test_the_script_does_not_hide_the_evaluate_library():
    from essm_train.measure.metric import load_metric

    assert load_metric("accuracy").compute(predictions=[1, 0], references=[1, 1])["accuracy"] == 0.5
    assert importlib.util.find_spec("evaluate") is not None


# ---------------------------------------------------------------------------------------------------------------------
# The runner.


@pytest.fixture
def novels(tmp_path, monkeypatch):
    """A tiny task in place of the novels; the arguments of a runner that trains it."""
    text = tmp_path / "text.txt"
    text.write_text("the spectral state of the spectral budget " * 100)
    tiny = {"train_file": [str(text)], "hidden_size": 16, "num_hidden_layers": 1, "num_spectral_channels": 4}
    tiny |= {"filter_length": 512, "block_size": 64, "max_steps": 4, "warmup_steps": 1, "validation_blocks": 2}
    tiny |= {"sweep_blocks": 2, "per_device_train_batch_size": 2, "block": "paper"}
    tiny |= {"tokenizer_name": str(ROOT / "hub_configs" / "essm-tiny")}
    monkeypatch.setattr(reproduce, "task_arguments", lambda name, data_dir, scale: tiny)
    folders = {"output_dir": str(tmp_path / "runs"), "results_dir": str(tmp_path / "results")}
    return lambda **changes: reproduce.ReproduceArguments(
        **({"seeds": 2, "rows": ["base", "ES-SSM"]} | folders | changes)
    )


def test_fixed_models_beside_an_elastic_one_are_costed(novels, tmp_path, monkeypatch):
    """Rows "K=2" and "K=4": Appendix B's question is answered below the table."""
    rows = "  K=2: {arguments: {num_spectral_channels: 2}}\n  K=4: {}\n  ES-SSM: {arguments: {gating: softmax}}\n"
    (tmp_path / "fixed.yaml").write_text(f"question: Retrain or cut?\ntask: novels\nrows:\n{rows}")
    one = Evaluation(Metric("bits_per_byte", False), (2, 4), ((3.0, 2.5),), ((1.0, 1.0),), (0, 0), (0, 0))
    training = {"updates": 10, "tokens_per_update": 64, "seconds": [5.0], "parameters": 9, "hardware": "a cpu"}

    def collect(folders):
        return one, training | {"schedule": "discrete" if "gating" in folders[0].name else "full"}

    monkeypatch.setattr(reproduce, "perform", lambda command, folder: 0.0)
    monkeypatch.setattr(reproduce, "collect", collect)
    reproduce.reproduce(str(tmp_path / "fixed.yaml"), novels(rows=None, seeds=1))
    text = (tmp_path / "results" / "fixed-small.md").read_text()
    assert text.index("| ES-SSM |") < text.index("| tokens of training | 640 | 640 | 1,280 | 640 | 1/2.0 |")


@pytest.mark.slow
def test_a_table_is_run_collected_and_resumed(novels, tmp_path, capsys, monkeypatch):
    record = reproduce.reproduce("table4_novels", novels())
    rows = record["rows"]
    assert list(rows) == ["base", "ES-SSM"] and all(len(row["values"]) == 2 for row in rows.values())
    assert rows["base"]["training"]["arguments"]["gating"] == "none"
    assert rows["ES-SSM"]["training"]["schedule"] == "discrete" and rows["base"]["training"]["schedule"] == "full"
    assert rows["base"]["values"][0] != rows["base"]["values"][1]  # another seed
    names = {path.name for path in (tmp_path / "results").iterdir()}
    assert names == {"table4_novels-small.json", "table4_novels-small.md", "table4_novels-small.png"}
    assert "| ES-SSM |" in (tmp_path / "results" / "table4_novels-small.md").read_text()
    written = (tmp_path / "results" / "table4_novels-small.json").read_text()
    assert str(tmp_path) not in written and str(ROOT) not in written and "hub_configs/essm-tiny" in written
    capsys.readouterr()
    monkeypatch.setattr(reproduce.subprocess, "run", None)  # nothing is run again
    assert reproduce.reproduce("table4_novels", novels())["rows"] == rows
    assert capsys.readouterr().out.count("done before") == 4
    with pytest.raises(RuntimeError, match="gating=none-match_parameters=True-seed0 holds the run of another command"):
        reproduce.reproduce("table4_novels", novels(max_steps=5))


def test_runner_errors(novels):
    with pytest.raises(ValueError, match=r"experiment must be one of exponents, .* or a \.yaml file, got 'table9'"):
        reproduce.reproduce("table9", novels())
    with pytest.raises(ValueError, match=r"rows of table4_novels must be among .* got \['gate'\]"):
        reproduce.reproduce("table4_novels", novels(rows=["gate"]))
    with pytest.raises(ValueError, match="seeds and jobs"):
        reproduce.reproduce("table4_novels", novels(seeds=0))
    with pytest.raises(RuntimeError, match="max_steps must be at least 1, got -1"):
        reproduce.reproduce("table4_novels", novels(max_steps=-1, rows=["base"], seeds=1))


@pytest.mark.slow
def test_rows_are_shared_left_out_and_set_beside_the_paper(novels, tmp_path, capsys, monkeypatch):
    """Books without PG19: one ES-SSM and one baseline, whose single figure stands under the full budget."""
    tiny = reproduce.task_arguments("novels", "data", "small")

    def arguments(name, data_dir, scale):
        if name == "pg19":
            raise FileNotFoundError("no data for task 'pg19': fetch it")
        return tiny

    monkeypatch.setattr(reproduce, "task_arguments", arguments)
    rows = ["pg19", "novels", "novels, transformer"]
    (tmp_path / "paper.json").write_text('{"novels": {"4": 1.25}}')
    recipe = {row: {"task": row.split(",")[0]} for row in rows}
    recipe["novels, transformer"] |= {"arguments": {"architecture": "transformer"}}
    books = str(tmp_path / "books.yaml")
    Path(books).write_text(yaml.safe_dump({"question": "How good is it?", "rows": recipe}, sort_keys=False))
    record = reproduce.reproduce(books, novels(rows=rows, seeds=1, paper_figures=str(tmp_path / "paper.json")))
    assert list(record["rows"]) == rows[1:] and record["left out"] == ["pg19"]
    assert "pg19 is left out: no data for task 'pg19': fetch it" in capsys.readouterr().out
    sizes = [record["rows"][row]["training"]["parameters"] for row in rows[1:]]
    assert abs(sizes[1] / sizes[0] - 1) < 0.05
    text = (tmp_path / "results" / "books-small.md").read_text()
    table = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")]
    assert table[0][3:6] == ["K=2", "K=3", "K=4"]
    elastic, paper, baseline = table[2:]
    assert elastic[1] == "novels" and elastic[5] == f"{record['rows']['novels']['values'][0][-1]:.4f}"
    assert paper[1] == "novels, the paper's" and paper[3:6] == ["", "", "1.25"]
    assert baseline[1] == rows[2] and baseline[3:5] == ["", ""] and float(baseline[5]) > 0
    assert "- pg19 was left out, its data was absent." in text and "hidden_size 96" in text
    # another experiment has the same run in it
    monkeypatch.setattr(reproduce.subprocess, "run", None)
    reproduce.reproduce("exponents", novels(rows=["exponent 1/4"], seeds=1))
    with pytest.raises(FileNotFoundError, match="fetch it"):
        reproduce.reproduce(books, novels(rows=["pg19"], seeds=1))


def test_a_name_that_moved_is_not_reused_silently(novels, tmp_path, capsys):
    """table5 was rules of training: its figures are neither overwritten nor taken for those of speech."""
    (tmp_path / "results").mkdir()
    path = tmp_path / "results" / "table5-small.json"
    path.write_text('{"rows": {"uniform": {}, "sandwich": {}}}')
    with pytest.raises(ValueError, match=r"table5-small.json holds .* uniform, sandwich\. Before, table5 was rules"):
        reproduce.reproduce("table5", novels(rows=None))
    assert "which is schedules now" in capsys.readouterr().out
    reproduce.check_results(reproduce.get_experiment("schedules"), path)
    path.write_text('{"rows": {"sc10": {}}}')
    reproduce.check_results(reproduce.get_experiment("table5"), path)


def test_the_papers_figure_of_a_baseline_stands_under_ours():
    """Also in a table of baselines alone, which has one column."""
    one = Evaluation(Metric("accuracy", higher_is_better=True), (1,), ((0.5,),), ((1.0,),), (0,), (0,))
    many = replace(one, budgets=(2, 4), values=((0.4, 0.6),), tokens_per_second=((1.0, 1.0),))
    experiment = reproduce.get_experiment("table1")
    paper = {"text, mamba": {32: Figure(0.8, 0.01)}, "text": {2: Figure(0.7)}}

    def lines(**rows):
        names = {"mamba": "text, mamba", "essm": "text"}
        shown = {names[row]: evaluation for row, evaluation in rows.items()}
        text = reproduce.markdown(experiment, shown, {}, paper)
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]

    header, _, ours, theirs = lines(mamba=one)
    assert header[2] == "one budget" and ours[2] == "0.5000"
    assert theirs[:3] == ["text, mamba, the paper's", "", "0.8 ± 0.01"] and len(theirs) == len(header)
    header, _, elastic, of_elastic, ours, theirs = lines(essm=many, mamba=one)
    assert header[2:4] == ["K=2", "K=4"] and elastic[2:4] == ["0.4000", "0.6000"] and of_elastic[2:4] == ["0.7", ""]
    assert ours[2:4] == ["", "0.5000"] and theirs[2:4] == ["", "0.8 ± 0.01"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "must hold"),
        ('{"novels": 3}', "must hold"),
        ('{"novels": {"x": 3}}', "must hold"),
        ('{"war": {"4": 3}}', r"among .* got \['war'\]"),
    ],
)
def test_bad_paper_figures(novels, tmp_path, text, message):
    (tmp_path / "paper.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        reproduce.reproduce("table3_novels", novels(rows=["novels"], paper_figures=str(tmp_path / "paper.json")))


def test_models_of_one_budget_each_are_a_line_together():
    """Section 5.1: each K by the model that was trained at it, and what they cost together."""
    experiment = reproduce.get_experiment("retrained")

    def row(*values):
        zeros = (0,) * len(values)
        return Evaluation(
            Metric("bits_per_byte", False), (2, 3, 4)[: len(values)], (values,), ((1.0,) * 3,), zeros, zeros
        )

    rows = {"ES-SSM": row(2.3, 2.2, 2.1), "AR-STU, K=4": row(4.0, 3.9, 2.2), "AR-STU, K=2": row(2.5)}
    training = {name: {"parameters": 7, "seconds": [10.0 + len(name)]} for name in rows}
    text = reproduce.markdown(experiment, rows, training, figures_of(experiment))
    assert "| AR-STU, K=2 | 7 | 2.5000 |  |  |  |  | 1 |" in text
    assert "| AR-STU, a model each |  | 2.5000 |  | 2.2000 |" in text
    assert "ES-SSM, the paper's on PG19 | | 1.5642 | 1.3065 | 1.266 |" in text
    costs = cost_tables(experiment, {name: (evaluation, training[name]) for name, evaluation in rows.items()})
    assert costs.startswith("\nAR-STU:\n\nOne model, 'ES-SSM', against 2 fixed ones")
    assert "| seconds of training | 21 | 21 | 42 | 16 | 1/2.6 |" in costs
    assert cost_tables(experiment, {"ES-SSM": (rows["ES-SSM"], {})}) == ""
    ours, theirs = panels_of(experiment, rows, figures_of(experiment))
    assert list(ours["novels"]) == ["ES-SSM", "AR-STU, a model each"] and list(theirs) == ["the paper, PG19"]
    assert ours["novels"]["AR-STU, a model each"].values == (2.5, 2.2)


def test_panels_say_that_data_is_a_substitute():
    """And the paper's curve, which is of the official data, is not drawn among ours."""
    experiment = reproduce.get_experiment("table2")
    accuracy, zeros = Metric("accuracy", True), (0,) * 3
    rows = {
        name: Evaluation(accuracy, (2, 3, 4), ((0.5, 0.6, 0.7),), ((1.0,) * 3,), zeros, zeros)
        for name in ("listops", "text")
    }
    ours, theirs = panels_of(experiment, rows, figures_of(experiment), {"listops": "short trees"})
    assert list(ours) == ["listops (substitute data)", "text"]
    assert list(theirs) == ["the paper, listops", "text"]
    assert theirs["the paper, listops"]["ES-SSM"].values[:3] == (0.5411, 0.5947, 0.6035)


def test_every_reduced_task_says_how_it_differs():
    text = reproduce.departures(TASKS, "small")
    assert text.count("Small scale: ") == len(TASKS)
    assert "max_length 512 for 4096" in text and "eval_steps" not in text
    text = reproduce.departures(TASKS, "medium", {"retrieval": "pairs of passages"})
    assert text.count("Medium scale: ") == len(TASKS)
    assert "retrieval: the official files" in text and "  Substitute data: pairs of passages.\n  Medium scale" in text
    assert "Small scale" not in reproduce.departures(TASKS, "full")
