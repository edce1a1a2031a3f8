# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm-train-classification: text and features, map-style and streamed; errors that name the row, the sweep."""

import datasets
import pytest
import torch
from training_run import NO_SIZES, final_state, load_classes, read, read_log, signals, texts, write
from training_run import train_classes as train
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from essm_train.data.readers import FeatureReader, Sample, TextReader
from essm_train.data.rows import collate
from essm_train.run.checkpoints import list_checkpoints
from modeling_essm.training.budget_dropout import budget_schedule


@pytest.mark.parametrize("run", ["pixels", "streamed text"])
def test_run_leaves_a_model_and_a_sweep(run, finished):
    folder = finished[run]
    assert [path.name for path in list_checkpoints(folder)] == ["checkpoint-00000006", "checkpoint-00000008"]
    sweep = read(folder / "budget_sweep.json")
    assert sweep["budgets"] == [2, 3, 4, 6, 8]
    assert sweep["metric"] == {"name": "accuracy", "higher_is_better": True}
    assert (sweep["split"], sweep["samples"]) == ("test", 30) and sweep["sweet_spot"] in sweep["budgets"]
    assert all((30 * value) % 1 == pytest.approx(0, abs=1e-9) and 0 <= value <= 1 for value in sweep["values"])
    assert (folder / "budget_sweep.png").read_bytes().startswith(b"\x89PNG")
    training = read(folder / "training.json")
    assert training["script"] == "essm-train-classification" and training["updates"] == 8
    assert training["samples_per_update"] == 4 and training["arguments"]["per_device_train_batch_size"] == 4
    assert "3 classes" in training["data"] and "test on 30" in training["data"] and training["hardware"]
    assert (folder / "model" / "README.md").exists()


def test_saved_model_brings_what_its_inputs_need(finished):
    pixels, text = (finished[run] / "model" for run in finished)
    assert read(pixels / "features.json") == {"multiplier": 1 / 127.5, "offset": -1.0, "max_length": 40}
    config = AutoModelForSequenceClassification.from_pretrained(pixels, trust_remote_code=True).config
    assert (config.num_input_features, config.num_labels, config.filter_length) == (1, 3, 512)
    assert config.trained_budgets == [2, 3, 4, 6, 8]
    tokenizer = AutoTokenizer.from_pretrained(text, trust_remote_code=True)
    batch = tokenizer(["a" * 50, "aü"], padding=True, truncation=True, return_tensors="pt")
    assert batch["input_ids"].shape == (2, 40) and batch["attention_mask"][1].tolist() == [1] * 3 + [0] * 37


@pytest.mark.parametrize(
    "run", [{"kind": "pixels"}, {"kind": "text", "streaming": True, "num_labels": 2}], ids=["pixels", "streamed text"]
)
def test_runs_learn(run, arguments, files, tmp_path, capsys):
    changes = {"per_device_train_batch_size": 16, "max_steps": 40, "dropout": 0.0, "eval_steps": 40}
    train(arguments(tmp_path, **run, **changes, save_steps=40, test_file=files[f"{run['kind']} test"]), whole=True)
    sweep = read(tmp_path / "budget_sweep.json")
    assert min(sweep["values"]) >= 0.85  # chance is about a half or a third; the samples are separable
    best = read(tmp_path / "best" / "best.json")
    assert set(best["validation"]) == {"2", "4", "8"} and min(best["validation"].values()) >= 0.75


def test_a_diagonal_ssm_ends_without_a_card(arguments, tmp_path):
    diagonal = NO_SIZES | {"architecture": "diagonal_ssm", "hidden_size": 8, "num_hidden_layers": 1, "max_steps": 1}
    train(arguments(tmp_path, **diagonal), whole=True)
    assert read(tmp_path / "model" / "config.json")["model_type"] == "diagonal_ssm"
    assert read(tmp_path / "budget_sweep.json")["budgets"] == [1]


def test_dataset_folder_with_splits_and_class_names(tmp_path, arguments):
    features = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["few", "many", "none"])}
    for split in ("train", "validation", "test"):
        rows = texts(24, seed=len(split))
        rows["label"] = rows["label"] if split != "test" else [-1] * 24  # kept to itself, as benchmarks do
        rows_features = features | ({"label": datasets.Value("int64")} if split == "test" else {})
        (tmp_path / "data").mkdir(exist_ok=True)
        write(tmp_path / "data", f"{split}.parquet", rows, features if split != "test" else rows_features)
    (tmp_path / "data" / "test.parquet").rename(tmp_path / "test.parquet")
    common = {"train_file": None, "dataset_name": tmp_path / "data", "max_steps": 1}
    train(arguments(tmp_path / "run", "text", **common))
    assert read(tmp_path / "run" / "model" / "config.json")["id2label"] == {"0": "few", "1": "many", "2": "none"}
    train(arguments(tmp_path / "streamed", "text", **common, streaming=True, validation_file=None, num_labels=None))
    assert read(tmp_path / "streamed" / "model" / "config.json")["id2label"]["2"] == "none"
    hidden = {"test_file": tmp_path / "test.parquet", "train_file": tmp_path / "data" / "train.parquet"}
    data = load_classes(arguments(tmp_path / "x", "text", **hidden))
    assert data.test is None and data.num_labels == 3


def test_a_tenth_is_held_out_where_nothing_is_given(arguments, tmp_path):
    data = load_classes(arguments(tmp_path))
    assert (len(data.source.samples), len(data.validation.samples), data.test) == (108, 12, None)
    rows = [sample.values.tobytes() for part in (data.source.samples, data.validation.samples) for sample in part]
    assert len(set(rows)) == 120  # disjoint, and nothing is lost
    again = load_classes(arguments(tmp_path, seed=1))  # or another seed's model would be measured on what it has read
    assert again.validation.labels.tolist() == data.validation.labels.tolist()
    assert [sample.label for sample in data.validation.samples] == data.validation.labels.tolist()


def test_validation_and_test_are_never_trained_on_or_mixed(arguments, files, tmp_path):
    given = {"validation_file": files["pixels validation"], "test_file": files["pixels test"], "test_samples": 7}
    data = load_classes(arguments(tmp_path, **given))
    assert (len(data.source.samples), len(data.validation.samples), len(data.test.samples)) == (120, 24, 7)
    assert data.validation.labels.tolist() == signals(24, seed=24)["label"]
    assert data.tokens_per_sample == 24 and data.num_labels == 3


def test_streams_and_tables_hold_the_same_samples(arguments, files, tmp_path):
    for kind in ("pixels", "text"):
        table = load_classes(arguments(tmp_path, kind, validation_file=files[f"{kind} validation"]))
        stream = load_classes(arguments(tmp_path, kind, streaming=True, shuffle_buffer=1))
        for own, streamed in zip(table.source.samples, stream.source.draw(120), strict=True):
            assert own.label == streamed.label and own.values.tolist() == streamed.values.tolist()
        assert table.validation.labels.tolist() == stream.validation.labels.tolist()


def test_batches_are_padded_and_scaled():
    reader = FeatureReader("pixels", 3, None, "uint8", "auto")
    arrays = [reader.read(value, "") for value in ([0, 255], [51, 0, 0, 9])]
    batch = collate(reader, [Sample(array, i) for i, array in enumerate(arrays)])
    expected = torch.tensor([[-1.0, 1.0, 0.0], [-0.6, -1.0, -1.0]])[..., None]
    torch.testing.assert_close(batch["input_features"], expected, atol=1e-6, rtol=0)
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]] and batch["labels"].tolist() == [0, 1]
    assert "attention_mask" not in collate(reader, [Sample(arrays[1], 0)])
    text = TextReader("text", 4)
    batch = collate(text, [Sample(text.read(value, ""), 0) for value in ("\u00ff", "abcdef")], length=5)
    assert batch["input_ids"].tolist() == [[195, 191, 256, 256, 256], [97, 98, 99, 100, 256]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]
    assert FeatureReader("x", 3, None, "int64", "auto").multiplier == 1.0
    assert FeatureReader("x", 3, None, "float32", "-2").multiplier == -2.0


@pytest.mark.parametrize(
    ("changes", "first_half_full"), [({}, True), ({"block": "paper"}, False), ({"full_budget_updates": 0}, False)]
)
def test_new_elastic_models_begin_with_half_of_their_updates_at_the_full_budget(
    changes, first_half_full, arguments, tmp_path
):
    sizes = {"num_spectral_channels": 8, "max_steps": 12, "logging_steps": 1}
    train(arguments(tmp_path, **sizes, **changes))
    budgets = [line["budget"] for line in read_log(tmp_path)]
    assert len(budgets) == 12 and set(budgets[6:]) != {8}
    assert (set(budgets[:6]) == {8}) == first_half_full
    if first_half_full:  # an extension begins no second half
        train([*arguments(tmp_path, **sizes | {"max_steps": 32}, **changes), "--extend"])
        schedule = budget_schedule("discrete", 8, 0, full_budget_updates=6)
        assert [line["budget"] for line in read_log(tmp_path)] == [schedule(i)[0] for i in range(32)]


def test_trained_weights_begin_with_budget_dropout(arguments, finished, tmp_path):
    start = finished["pixels"] / "model"
    train(arguments(tmp_path, **NO_SIZES, logging_steps=1, model_name_or_path=start))
    schedule = budget_schedule("discrete", 8, 0)
    assert [line["budget"] for line in read_log(tmp_path)] == [schedule(i)[0] for i in range(8)]


@pytest.mark.parametrize("streaming", [False, True])
def test_resuming_on_changed_data_is_refused(streaming, tmp_path, arguments):
    path = write(tmp_path, "train.jsonl", texts(30, seed=0))
    line = arguments(tmp_path / "run", "text", train_file=path, max_steps=1, streaming=streaming)
    train(line)
    rows = texts(30, seed=0)
    rows["text"][-1] = rows["text"][-1][1:] + rows["text"][-1][0]  # as many bytes as before
    assert rows != texts(30, seed=0)
    write(tmp_path, "train.jsonl", rows)
    before = final_state(tmp_path / "run")
    with pytest.raises(ValueError, match=r"sha256 of the training data was .* and is now"):
        train(line)
    assert all(torch.equal(a, b) for a, b in zip(before, final_state(tmp_path / "run"), strict=True))
    with pytest.raises(ValueError, match="max_length was 40 and is now 39"):
        train([*line, "--max_length", "39"])
