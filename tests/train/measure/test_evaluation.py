# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Saved models on held-out data at every budget, seed by seed; pruning of modes, ratio by ratio."""

import dataclasses
import functools
import json
import shutil
import statistics
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from helpers import random_model

from essm_train import evaluate
from essm_train.baselines.config import BaselineConfig
from essm_train.baselines.models import BaselineForCausalLM
from essm_train.data.arguments import ClassificationArguments
from essm_train.data.classification import load_classification
from essm_train.data.tokens import ByteEncoder
from essm_train.evaluate import EvaluateArguments
from essm_train.measure import evaluation, pruning
from essm_train.measure.evaluation import Evaluation, evaluate_models, load_for, open_task, open_text
from essm_train.measure.scoring import ACCURACY, BITS_PER_BYTE, HeldOut, hold_out_samples
from essm_train.measure.timing import machine, working_device
from modeling_essm import ESSMForSequenceClassification, build_byte_tokenizer
from modeling_essm.budgets.curve import BudgetCurve


def summary(values, metric=BITS_PER_BYTE):
    curves = tuple(BudgetCurve(*metric, (2, 4, 32), seed, (300.0, 200.0, 100.0)) for seed in values)
    return Evaluation(curves, (1, 2, 4), (10, 20, 80))


def test_seeds_are_summarised():
    found = summary(((2.4, 2.1, 2.0), (2.6, 2.3, 2.0)))
    curve = found.curve
    assert curve.values == pytest.approx((2.5, 2.2, 2.0))
    assert curve.errors == pytest.approx((statistics.stdev((2.4, 2.6)), statistics.stdev((2.1, 2.3)), 0.0))
    assert curve.retention == pytest.approx((2.0 / 2.5, 2.0 / 2.2, 1.0))
    assert (curve.sweet_spot, curve.collapse_boundary) == (32, 4)  # 2.2 is 10% above, 2 / 2.2 = 91%
    lines = found.markdown().splitlines()
    assert len(lines) == 5 and lines[2].startswith("| 2 | 2.5000 ± 0.1414 | 80.0% | 10 (12%) | 300 |")
    assert "▲ collapse boundary" in lines[3] and "★ sweet spot" in lines[4]
    better = summary(((0.5, 0.885, 0.9),), ACCURACY).curve
    assert better.retention == pytest.approx((0.5 / 0.9, 0.885 / 0.9, 1.0)) and better.errors == (0, 0, 0)
    assert (better.sweet_spot, better.collapse_boundary) == (4, 4)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_a_torch_that_was_built_for_a_gpu_evaluates_without_one(monkeypatch):
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    assert torch.accelerator.current_accelerator().type == "cuda"
    assert working_device().type == "cpu" and machine(working_device())["gpu"] is None


def test_language_models_are_evaluated_at_every_budget(tmp_path, monkeypatch):
    folders = [str(tmp_path / f"seed{seed}") for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        random_model(seed=seed).save_pretrained(folder)
    (tmp_path / "text.txt").write_text("spectral budget " * 200)
    data = open_text([str(tmp_path / "text.txt")], ByteEncoder(), 64, 4)
    assert data.description == "text.txt; 4 blocks of 64 tokens"
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("spectral budget " * 200)
    assert open_text([f"{tmp_path}/books/"], ByteEncoder(), 64, 4).description.startswith("books (1 files); 4 blocks")
    found = evaluate_models(folders, data, (2, 8))
    assert found.budgets == (2, 8, 32) and found.curves[0].values != found.curves[1].values
    model = load_for(data, folders[0])
    assert found.curves[0].values == pytest.approx([data.value(model, K) for K in found.budgets])
    assert found.active_parameters == tuple(model.num_active_parameters(K) for K in found.budgets)
    assert found.peak_bytes[0] < found.peak_bytes[2]
    config = BaselineConfig(
        architecture="matmamba", hidden_size=16, intermediate_size=64, num_hidden_layers=1, state_size=8, vocab_size=259
    )
    nested = BaselineForCausalLM(config)
    nested.save_pretrained(tmp_path / "nested")
    sizes = evaluate_models([str(tmp_path / "nested")], data, (1, 4)).active_parameters
    assert sizes == tuple(nested.truncate(K).num_parameters() for K in (1, 4, 8)) and sizes[0] < sizes[1] < sizes[2]
    sweeps = []
    monkeypatch.setattr(evaluation, "sweep_budgets", sweeps.append)
    random_model(num_spectral_channels=8).save_pretrained(tmp_path / "small")
    random_model().save_pretrained(tmp_path / "words")
    build_byte_tokenizer().save_pretrained(tmp_path / "words")
    others = {
        "small": "capacity 8, and .*seed0 32",
        "words": r"tokenizer\.json of SHA-256 [0-9a-f]{64}, and .*seed0 None",
    }
    for name, message in others.items():
        with pytest.raises(ValueError, match=f"{name} has the {message}"):
            evaluate_models([folders[0], str(tmp_path / name)], data, (2, 8))
    with pytest.raises(ValueError, match="models must be different ones, got"):
        evaluate_models([folders[0], f"{folders[0]}/"], data, (2, 8))
    assert not sweeps  # before the first one


def test_classifiers_are_evaluated_on_the_test_split(tmp_path):
    rng = np.random.default_rng(0)
    pixels, labels = torch.from_numpy(rng.integers(0, 256, (7, 16))), torch.from_numpy(rng.integers(0, 3, 7))
    for split, order in (("train", slice(6)), ("test", slice(None))):
        rows = pa.array([row.astype(np.uint8) for row in pixels.numpy()[order]], pa.list_(pa.uint8()))
        pq.write_table(pa.table({"pixels": rows, "label": labels.numpy()[order]}), tmp_path / f"{split}.parquet")
    random_model(ESSMForSequenceClassification, num_input_features=1, num_labels=3).save_pretrained(tmp_path / "model")
    files = {f"{split}_file": [str(tmp_path / f"{split}.parquet")] for split in ("train", "test")}
    args = ClassificationArguments(**files, features_column="pixels", num_labels=3, max_length=16)
    data = load_classification(args)
    held_out = hold_out_samples(data.held_out, data.collate, 4, "noise")
    found = evaluate_models([str(tmp_path / "model")], held_out, (2, 32))
    assert found.curve.metric == ACCURACY.name and held_out.length == 16
    model, x = load_for(held_out, str(tmp_path / "model")), (pixels / 127.5 - 1)[..., None]
    with torch.no_grad():
        hits = [model(input_features=x, spectral_budget=K).logits.argmax(-1) == labels for K in (2, 32)]
    assert found.curves[0].values == pytest.approx([float(each.double().mean()) for each in hits])
    random_model().save_pretrained(tmp_path / "lm")
    with pytest.raises(ValueError, match=r"lm is not a model of this task: it lacks score\.weight"):
        evaluate_models([str(tmp_path / "lm")], held_out)
    random_model(ESSMForSequenceClassification).save_pretrained(tmp_path / "words")
    (tmp_path / "text.txt").write_text("spectral budget " * 200)
    with pytest.raises(ValueError, match="words is not a model of this task: it is ESSMForSequenceClassification"):
        load_for(open_text([str(tmp_path / "text.txt")], ByteEncoder(), 64, 4), str(tmp_path / "words"))
    with pytest.raises(ValueError, match=r"lm reads up to filter_length = 512 positions, got 600 of text\.txt"):
        load_for(open_text([str(tmp_path / "text.txt")], ByteEncoder(), 600, 4), str(tmp_path / "lm"))


def test_classes_have_the_models_order(tmp_path):
    """Where a task's data holds some of them, or in another order; with test data alone."""
    model = random_model(ESSMForSequenceClassification, num_input_features=1, id2label={0: "c", 1: "b", 2: "a"})
    model.save_pretrained(tmp_path / "model")
    for split, labels in (("validation", "ab"), ("test", "abb")):
        rows = [{"x": [0.5, 1.0], "label": label} for label in labels]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "train.jsonl").write_text("is not read")
    files = {split: f"{split}.jsonl" for split in ("train", "validation", "test")}
    words = dict.fromkeys(("title", "note", "origin"), "noise") | {"script": "train_classification"}
    sizes = {"full": {"features_column": "x"}, "small": {}}
    task = {**words, "data": [{"files": files, "how": "by hand"}], **sizes}
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(task))
    held_out = open_task(str(tmp_path / "t.yaml"), str(tmp_path), "full", str(tmp_path / "model"))
    hits, _ = held_out.score(model, 32)
    with torch.no_grad():
        answer = int(model(input_features=torch.tensor([[[0.5], [1.0]]])).logits.argmax())
    assert hits.tolist() == [answer == 2, answer == 1, answer == 1]
    record = {"multiplier": 0.5, "offset": -1.0, "max_length": 1}
    (tmp_path / "model" / "features.json").write_text(json.dumps(record))  # how that model was trained
    inputs = open_task(str(tmp_path / "t.yaml"), str(tmp_path), "full", str(tmp_path / "model")).inputs
    assert inputs["input_features"].tolist() == [[[-0.75]]] * 3
    model.config.id2label = {0: "a", 1: "b", 2: "c"}
    model.save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "model" / "features.json", tmp_path / "other" / "features.json")
    with pytest.raises(ValueError, match=r"other has the classes \['a', 'b', 'c'\], and .*model \['c', 'b', 'a'\]"):
        evaluate_models([str(tmp_path / name) for name in ("model", "other")], held_out, (32,))
    shutil.copytree(tmp_path / "model", tmp_path / "scaled")
    (tmp_path / "scaled" / "features.json").write_text(json.dumps(record | {"multiplier": 1.0}))
    with pytest.raises(ValueError, match=r"scaled has the features\.json .*1\.0"):
        evaluate_models([str(tmp_path / name) for name in ("model", "scaled")], held_out, (32,))


@pytest.mark.parametrize("task_reads", [None, 9, 3])
def test_a_text_is_read_as_far_as_in_training(task_reads, tmp_path):
    random_model(ESSMForSequenceClassification, num_labels=2).save_pretrained(tmp_path / "model")
    build_byte_tokenizer(model_max_length=5).save_pretrained(tmp_path / "model")
    for split in ("train", "test"):
        rows = [{"text": "a long text", "label": label} for label in (0, 1)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = dict.fromkeys(("title", "note", "origin"), "noise") | {"script": "train_classification", "small": {}}
    data = [{"files": {split: f"{split}.jsonl" for split in ("train", "test")}, "how": "by hand"}]
    task = words | {"data": data, "full": {"text_column": "text", "max_length": task_reads}}
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(task))
    held_out = open_task(str(tmp_path / "t.yaml"), str(tmp_path), "full", str(tmp_path / "model"))
    assert held_out.inputs["input_ids"].shape == (2, min(task_reads or 5, 5))


@pytest.mark.parametrize(
    ("script", "streaming", "expected"),
    [
        ("train_classification", False, "10% of the training rows, held out"),  # the labels of its test are not public
        ("train_classification", True, "streaming needs a validation_file"),
        ("train_clm", False, "blocks of 16"),
        ("train_clm", True, "streaming needs validation_file"),
    ],
)
def test_a_task_without_held_out_files_holds_out_training_data(script, streaming, expected, tmp_path):
    random_model(ESSMForSequenceClassification, num_input_features=1, num_labels=2).save_pretrained(tmp_path / "model")
    rows = {"train": [{"x": [0.5, 1.0], "text": "a text " * 9, "label": i % 2} for i in range(40)]}
    rows |= {"test": [{"x": [0.5, 1.0], "label": -1}]} if script == "train_classification" else {}
    for split, found in rows.items():
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, found)))
    words = dict.fromkeys(("title", "note", "origin"), "noise") | {"script": script, "small": {}}
    full = {"features_column": "x", "num_labels": 2} if "test" in rows else {"text_column": "text", "block_size": 16}
    data = [{"files": {split: f"{split}.jsonl" for split in rows}, "how": "by hand"}]
    task = words | {"data": data, "full": full | {"streaming": streaming}}
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(task))
    opened = functools.partial(open_task, str(tmp_path / "t.yaml"), str(tmp_path), "full", str(tmp_path / "model"))
    if streaming:
        with pytest.raises(ValueError, match=expected):
            opened()
    else:
        assert expected in opened().description


def test_a_task_is_opened_by_its_name(tmp_path):
    """Its held-out data alone: training data may be terabytes."""
    for split, count in (("train", 12), ("eval", 5), ("test", 9)):
        lines = [f"{i % 2:.1f}\tP{i}\tQ{i}\tb'{'abc' * (i + 3)}'\tb'abcabc'\n" for i in range(count)]
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_text("".join(lines))
    (tmp_path / "new_aan_pairs.train.tsv").write_text("is not read")
    data = model = str(tmp_path)  # a model without a tokenizer reads bytes
    pairs = open_task("retrieval", data, "small", model, batch_size=4)
    assert pairs.inputs["input_ids"].shape[:2] == (4, 2) and pairs.length == 36
    assert "9 pairs of new_aan_pairs.test.tsv" in pairs.description
    for split in ("train", "validation"):
        text = [f"{split}: the spectral state of the spectral budget " * 60]
        pq.write_table(pa.table({"text": text}), tmp_path / f"english_novels-{split}.parquet")
    (tmp_path / "english_novels-train.parquet").write_text("is not read")
    novels = open_task("novels", data, "small", model)
    assert novels.metric == BITS_PER_BYTE and novels.length == 256 == novels.inputs["input_ids"].shape[1]
    random_model().save_pretrained(tmp_path / "saved")
    whole = EvaluateArguments([f"{tmp_path}/saved"], "novels", data, "small", budgets=[2], output_dir=f"{tmp_path}/out")
    evaluate.main(whole)
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert (found["task"], found["budgets"]) == ("novels", [2, 32])
    assert "| 2 | " in (tmp_path / "out" / "evaluation.md").read_text() and (tmp_path / "out/evaluation.png").exists()
    with pytest.raises(FileNotFoundError, match="no data for task 'pg19'"):
        open_task("pg19", data, "small", model)
    with pytest.raises(ValueError, match="got 'pairs'"):
        open_task("pairs", data, "small", model)


def test_a_cut_off_measurement_of_ratios_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(pruning, "prune", lambda model, plan: model.masks.append(plan.kept))
    monkeypatch.setattr(pruning, "restore", lambda model: model.masks.clear())
    model = SimpleNamespace(masks=[], config=None)
    measured = []

    def score(model, K):
        measured.append(model.masks[0][0])
        return torch.tensor([1.0] * model.masks[0][0] + [0.0] * (10 - model.masks[0][0])), torch.ones(10)

    held_out = HeldOut(ACCURACY, score, {}, lambda: 1, "", None)

    def measure(ratios, identity="a", **options):
        plan = lambda ratio: SimpleNamespace(kept=[round(8 * (1 - ratio))])  # noqa: E731
        return pruning.measure_ratios(
            model, plan, ratios, held_out, tmp_path / "partial.json", {"of": identity}, **options
        )

    measure((0.0, 0.25))
    curve = measure((0.0, 0.25, 0.5))
    assert measured == [8, 6, 4] and not model.masks and curve.kept == ((8,), (6,), (4,))
    assert curve.losses == pytest.approx((0, 0.2, 0.4)) and curve.largest_within(0.3) == 0.25
    point = dataclasses.replace(curve, values=(0.95, 0.94, 0.9))  # 0.95 - 0.94 is a little more than 0.01
    assert point.largest_within(0.01) == 0.25
    with pytest.raises(ValueError, match=r"partial.json was measured with {'of': 'a'}, got {'of': 'b'}: take another"):
        measure((0.0,), "b")
    assert measured == [8, 6, 4]
    measure((0.0,), "b", overwrite=True)
    (tmp_path / "partial.json").write_text('{"identity"')
    measure((0.0,))
    assert measured[3:] == [8, 8]
