# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""train_classification.py: text and features, map-style and streamed; resume, errors that name the row, the sweep."""

import csv
import json
import os
import signal
import subprocess
import sys
import wave
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from helpers import ROOT, random_model
from training_run import bpe_tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from essm_train.arguments import parse_arguments
from essm_train.baselines.models import BaselineForSequenceClassification
from essm_train.commands import train_classification
from essm_train.data.arguments import ClassificationArguments
from essm_train.data.classification import load_classification
from essm_train.data.readers import FeatureReader, Sample, TextReader
from essm_train.data.rows import collate
from essm_train.data.sound import decode_wav
from essm_train.run.checkpoints import list_checkpoints
from modeling_essm import ESSMConfig, ESSMForSequenceClassification, build_byte_tokenizer
from modeling_essm.training.budget_dropout import budget_schedule

TRAIN = ROOT / "train"

# Eight updates, checkpoints after 3, 6 and 8; dropout makes the random states matter.
TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_spectral_channels": 8,
    "filter_length": 512,
    "max_length": 40,
    "per_device_train_batch_size": 4,
    "eval_batch_size": 8,
    "max_steps": 8,
    "warmup_steps": 2,
    "learning_rate": 0.01,
    "dropout": 0.1,
    "eval_steps": 4,
    "save_steps": 3,
    "cpu_threads": 1,  # more would wait for each other
}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """What `datasets` writes goes there, also from subprocesses."""
    patch = pytest.MonkeyPatch()
    folder = str(tmp_path_factory.mktemp("cache"))
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    patch.setenv("HF_DATASETS_CACHE", folder)
    datasets.disable_progress_bars()
    yield
    patch.undo()


def texts(count: int, seed: int) -> dict[str, list]:
    """Of class 1 if three quarters of the bytes are "a", of class 0 if a quarter is; 20 to 48 bytes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(2, size=count)
    rows = ["".join(rng.choice(["a", "ü"], rng.integers(16, 40), p=[p, 1 - p])) for p in 0.25 + 0.5 * labels]
    return {"text": rows, "label": labels.tolist()}


def signals(count: int, seed: int) -> dict[str, list]:
    """24 numbers in [0, 255] about one of three means."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=count)
    return {"pixels": (rng.integers(0, 90, (count, 24)) + 80 * labels[:, None]).tolist(), "label": labels.tolist()}


PIXELS = {"pixels": datasets.List(datasets.Value("uint8")), "label": datasets.Value("int64")}


def write(folder: Path, name: str, columns: dict[str, list], features: dict | None = None) -> str:
    """A parquet, jsonl or csv file; its path."""
    path = folder / name
    table = datasets.Dataset.from_dict(columns, features=None if features is None else datasets.Features(features))
    {".parquet": table.to_parquet, ".jsonl": table.to_json, ".csv": table.to_csv}[path.suffix](path)
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("data")
    named = {}
    for split, count in {"train": 120, "validation": 24, "test": 30}.items():
        named[f"text {split}"] = write(folder, f"text-{split}.jsonl", texts(count, seed=count))
        named[f"pixels {split}"] = write(folder, f"pixels-{split}.parquet", signals(count, seed=count), PIXELS)
    return named


def command_line(values: dict) -> list[str]:
    flags = [f"--{name}" for name, value in values.items() if value is True]
    return flags + [
        part
        for name, value in values.items()
        if value is not None and value is not True
        for part in (f"--{name}", str(value))
    ]


@pytest.fixture(scope="module")
def arguments(files):
    """Arguments of a tiny run on "pixels" or "text" in that folder; keywords override, None takes away."""

    def build(output_dir: Path, kind: str = "pixels", **changes) -> list[str]:
        column = {"text": "text_column", "pixels": "features_column"}[kind]
        values = {**TINY, "output_dir": output_dir, "train_file": files[f"{kind} train"], column: kind}
        if changes.get("streaming"):
            values |= {"validation_file": files[f"{kind} validation"], "num_labels": 3, "shuffle_buffer": 10}
        return command_line(values | changes)

    return build


def train(arguments: list[str]) -> None:
    train_classification.main(parse_arguments(ClassificationArguments, arguments))


RUNS = {"pixels": {"kind": "pixels"}, "streamed text": {"kind": "text", "streaming": True}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, arguments, files) -> dict[str, Path]:
    """Folders of runs that nothing interrupted."""
    folders = {name: tmp_path_factory.mktemp("finished") for name in RUNS}
    for name, run in RUNS.items():
        train(arguments(folders[name], **run, test_file=files[f"{run['kind']} test"]))
    return folders


def final_tensors(output_dir: Path) -> list[torch.Tensor]:
    """Weights and optimizer moments of the last checkpoint."""
    checkpoint = list_checkpoints(output_dir)[-1]
    weights = torch.load(checkpoint / "pytorch_model.bin")
    moments = torch.load(checkpoint / "optimizer.bin")["state"]
    return [*weights.values(), *(t for state in moments.values() for t in state.values())]


def same(a: Path, b: Path) -> bool:
    return all(torch.equal(x, y) for x, y in zip(final_tensors(a), final_tensors(b), strict=True))


def read(path: Path) -> dict:
    return json.loads(path.read_text())


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs.


@pytest.mark.parametrize("run", RUNS)
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
    assert training["script"] == "train_classification.py" and training["updates"] == 8
    assert training["samples_per_update"] == 4 and training["arguments"]["per_device_train_batch_size"] == 4
    assert "3 classes" in training["data"] and "test on 30" in training["data"] and training["hardware"]
    assert (folder / "model" / "README.md").exists()


def test_saved_model_brings_what_its_inputs_need(finished):
    pixels, text = (finished[run] / "model" for run in RUNS)
    assert read(pixels / "features.json") == {"multiplier": 1 / 127.5, "offset": -1.0, "max_length": 40}
    config = AutoModelForSequenceClassification.from_pretrained(pixels, trust_remote_code=True).config
    assert (config.num_input_features, config.num_labels, config.filter_length) == (1, 3, 512)
    assert config.trained_budgets == [2, 3, 4, 6, 8]
    tokenizer = AutoTokenizer.from_pretrained(text, trust_remote_code=True)
    batch = tokenizer(["a" * 50, "aü"], padding=True, truncation=True, return_tensors="pt")
    assert batch["input_ids"].shape == (2, 40) and batch["attention_mask"][1].tolist() == [1] * 3 + [0] * 37


def test_sweep_is_the_accuracy_of_the_saved_model(finished, files):
    model = AutoModelForSequenceClassification.from_pretrained(finished["pixels"] / "model", trust_remote_code=True)
    rows = datasets.load_dataset("parquet", data_files=files["pixels test"], split="train")
    features = torch.tensor(rows["pixels"])[..., None] / 127.5 - 1
    sweep = read(finished["pixels"] / "budget_sweep.json")
    for K, value in zip(sweep["budgets"], sweep["values"]):
        with torch.no_grad():
            predictions = model.eval()(input_features=features, spectral_budget=K).logits.argmax(-1)
        assert value == pytest.approx((predictions == torch.tensor(rows["label"])).double().mean().item())


@pytest.mark.parametrize(
    "run",
    [{"kind": "pixels"}, {"kind": "text"}, {"kind": "text", "streaming": True, "num_labels": 2}],
    ids=["pixels", "text", "streamed text"],
)
def test_runs_learn(run, arguments, files, tmp_path, capsys):
    changes = {"per_device_train_batch_size": 16, "max_steps": 40, "dropout": 0.0, "eval_steps": 40}
    train(arguments(tmp_path, **run, **changes, save_steps=40, test_file=files[f"{run['kind']} test"]))
    sweep = read(tmp_path / "budget_sweep.json")
    assert min(sweep["values"]) >= 0.85  # chance is about a half or a third; the samples are separable
    best = read(tmp_path / "best" / "best.json")
    assert set(best["validation"]) == {"2", "4", "8"} and min(best["validation"].values()) >= 0.75
    assert "the reloaded" in capsys.readouterr().out


def test_frames_and_tokenizers_run_too(arguments, files, tmp_path):
    rng = np.random.default_rng(0)
    rows = {"frames": rng.normal(size=(20, 6, 3)).tolist(), "label": [0, 1] * 10}
    frames = write(tmp_path, "frames.jsonl", rows)
    changes = {"max_steps": 1, "train_file": frames, "features_column": "frames", "feature_scale": 0.5}
    train(arguments(tmp_path / "frames", **changes))
    assert read(tmp_path / "frames" / "model" / "config.json")["num_input_features"] == 3
    assert read(tmp_path / "frames" / "budget_sweep.json")["split"] == "validation"
    build_byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    train(arguments(tmp_path / "text", "text", max_steps=1, tokenizer_name=tmp_path / "tokenizer"))
    own, given = (TextReader("text", 40, t) for t in (None, AutoTokenizer.from_pretrained(tmp_path / "tokenizer")))
    assert own.read("aü", "").tolist() == given.read("aü", "").tolist() == [97, 195, 188]


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
    data = load_classification(parse_arguments(ClassificationArguments, arguments(tmp_path / "x", "text", **hidden)))
    assert data.test is None and data.num_labels == 3


def test_arguments_may_come_from_a_file_and_be_overridden(tmp_path, files):
    table = f"train_file: {files['pixels train']}\nfeatures_column: pixels\nlearning_rate: 1e-4\nmax_steps: 7\n"
    (tmp_path / "a.yaml").write_text(table + "num_labels: 3\nfeature_scale: uint8\n")
    args = parse_arguments(ClassificationArguments, [str(tmp_path / "a.yaml"), "--max_steps", "9"])
    assert (args.train_file, args.learning_rate, args.max_steps) == ([files["pixels train"]], 1e-4, 9)
    assert (args.num_labels, args.max_length, args.feature_scale) == (3, 1024, "uint8")


# ---------------------------------------------------------------------------------------------------------------------
# A newcomer's own files: text as labels, a column per time step, folders of sound.


def write_wide(path: Path, count: int, seed: int, labels: list[str]) -> str:
    """A row per sample of 12 steps in x0, y0, x1, y1, .., about a mean of its class."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", *(f"{axis}{i}" for i in range(12) for axis in "xy"), "kind"])
        for row in range(count):
            kind = labels[row % len(labels)]
            table.writerow([row, *rng.normal({"walk": 0, "run": 1, "sit": 2}[kind], 0.3, 24).round(3), kind])
    return str(path)


def read_rows(path: str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(path).read_text().splitlines()))


def write_sounds(folder: Path, counts: dict[str, int], rate: int = 8000) -> str:
    """A folder per class: 40 ms of a tone, low or high, in 16 bits."""
    rng = np.random.default_rng(0)
    for name, hertz in {"low": 200, "high": 1900}.items():
        (folder / name).mkdir(parents=True)
        for i in range(counts[name]):
            tone = 0.5 * np.sin(2 * np.pi * (hertz * np.arange(rate // 25) / rate + rng.random()))
            with wave.open(str(folder / name / f"{i}.wav"), "wb") as file:
                file.setparams((1, 2, rate, 0, "NONE", ""))
                file.writeframes((tone * 32767).astype("<i2").tobytes())
    return str(folder)


def test_wide_tables_with_text_as_labels_train(arguments, tmp_path):
    """One column per number; classes are the sorted values of the label, in the config too."""
    train_file = write_wide(tmp_path / "train.csv", 60, 0, ["walk", "run", "sit"])
    test_file = write_wide(tmp_path / "test.csv", 18, 1, ["walk", "sit"])
    changes = {"train_file": train_file, "test_file": test_file, "features_column": "[xy]*", "label_column": "kind"}
    changes |= {"frame_length": 2, "max_steps": 40, "per_device_train_batch_size": 16, "dropout": 0.0, "eval_steps": 40}
    train(arguments(tmp_path / "run", **changes, save_steps=40))
    config = read(tmp_path / "run" / "model" / "config.json")
    assert config["id2label"] == {"0": "run", "1": "sit", "2": "walk"} and config["num_input_features"] == 2
    assert read(tmp_path / "run" / "model" / "features.json")["frame_length"] == 2
    assert min(read(tmp_path / "run" / "budget_sweep.json")["values"]) >= 0.8  # of its two classes, 1 and 2
    data = load(arguments(tmp_path / "x", **changes))
    values = data.source.samples[0].values
    rows = [[float(row[f"{axis}{i}"]) for i in range(12) for axis in "xy"] for row in read_rows(train_file)]
    assert values.shape == (12, 2) and any(values.flatten().tolist() == pytest.approx(row) for row in rows)
    # Trained on: the classes of the weights count, whichever the data shows.
    head = {"model_name_or_path": tmp_path / "run" / "model", "train_file": test_file, "test_file": None}
    train(arguments(tmp_path / "on", **changes | ONCE | head))
    assert read(tmp_path / "on" / "model" / "config.json")["id2label"] == config["id2label"]


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ("x0,x1,kind\n1,2,a\n3,,b\n", {}, r"row 1 of .* must hold finite numbers, got nan"),
        ("x0,x1,kind\n1,2,a\n3,no,b\n", {}, r"features_column 'x\*': column 'x1' must hold numbers: .*'no'"),
        ("y0,y1,kind\n1,2,a\n3,4,b\n", {}, r"features_column must be one of \['y0', 'y1', 'kind'\] .* got 'x\*'"),
        ("x0,x1,kind\n1,2,a\n3,4,b\n", {"frame_length": 3}, r"row 0 .* holds 2 steps, and frame_length is 3"),
        ("x0,x1,kind\n1,2,a\n3,4,a\n", {}, "num_labels must be at least 2, got 1"),
    ],
)
def test_wide_tables_that_cannot_be(rows, changes, message, arguments, tmp_path):
    (tmp_path / "a.csv").write_text(rows)
    wide = {"train_file": tmp_path / "a.csv", "features_column": "x*", "label_column": "kind"}
    with pytest.raises(ValueError, match=message):
        load(arguments(tmp_path / "run", **wide | changes))


def test_labels_of_other_files_must_be_known(arguments, tmp_path):
    train_file = write(tmp_path, "train.jsonl", {"text": ["a", "b", "c", "d"], "label": ["yes", "no"] * 2})
    validation = write(tmp_path, "validation.jsonl", {"text": ["a", "b"], "label": ["yes", "perhaps"]})
    with pytest.raises(ValueError, match=r"row 1 of validation_file .* must be one of \['no', 'yes'\], got 'perhaps'"):
        load(arguments(tmp_path / "run", "text", train_file=train_file, validation_file=validation))


def test_a_folder_of_sound_trains(arguments, tmp_path):
    """One sub-folder per class, splits by the folder's name, without any package that decodes."""
    for split, count in {"train": 24, "test": 8}.items():
        write_sounds(tmp_path / "clips" / split, {"low": count, "high": count})
    changes = {"train_file": None, "dataset_name": tmp_path / "clips", "features_column": "audio", "frame_length": 8}
    changes |= {"max_steps": 30, "per_device_train_batch_size": 16, "dropout": 0.0, "eval_steps": 30}
    train(arguments(tmp_path / "run", **changes, save_steps=30))
    model = tmp_path / "run" / "model"
    assert read(model / "config.json")["id2label"] == {"0": "high", "1": "low"}
    assert read(model / "features.json") == {
        "multiplier": 1.0, "offset": 0.0, "max_length": 40, "frame_length": 8, "sampling_rate": 8000,
    }  # fmt: skip
    sweep = read(tmp_path / "run" / "budget_sweep.json")
    assert (sweep["split"], sweep["samples"]) == ("test", 16) and min(sweep["values"]) >= 0.9
    batch = collate((data := load(arguments(tmp_path / "x", **changes))).reader, [data.source.samples[0]])
    assert batch["input_features"].shape == (1, 40, 8) and 0.4 < batch["input_features"].abs().max() <= 0.5


def test_wav_files_of_every_width_and_number_of_channels(tmp_path):
    sound = np.random.default_rng(0).uniform(-1, 1, (50, 2))
    for width, levels in {1: 128, 2: 1 << 15, 3: 1 << 23, 4: 1 << 31}.items():
        codes = (sound * levels).round().clip(-levels, levels - 1).astype(np.int64)
        raw = (codes + 128 if width == 1 else codes).astype("<i8")[..., None].view(np.uint8)[..., :width]
        with wave.open(str(tmp_path / "a.wav"), "wb") as file:
            file.setparams((2, width, 16000, 0, "NONE", ""))
            file.writeframes(raw.tobytes())
        for value in ({"path": str(tmp_path / "a.wav"), "bytes": None}, {"path": None, "bytes": None}):
            value["bytes"] = None if value["path"] else (tmp_path / "a.wav").read_bytes()
            samples, rate = decode_wav(value, "a test")
            assert (
                rate == 16000 and samples.dtype == np.float32 and np.abs(samples - sound).max() <= 1.01 / levels + 1e-7
            )


def test_sound_that_cannot_be_read(arguments, tmp_path):
    def load_clips():
        changes = {"train_file": None, "dataset_name": tmp_path / "clips", "features_column": "audio"}
        load(arguments(tmp_path / "run", **changes))

    write_sounds(tmp_path / "clips", {"low": 2, "high": 2})
    write_sounds(tmp_path / "other", {"low": 1, "high": 0}, rate=16000)
    (tmp_path / "other" / "low" / "0.wav").rename(tmp_path / "clips" / "low" / "9.wav")
    with pytest.raises(ValueError, match=r"low/9\.wav: sound must have 8000 samples a second.* got 16000: convert"):
        load_clips()
    (tmp_path / "clips" / "low" / "9.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"low/9\.wav: is no WAV file of PCM: .*ffmpeg"):
        load_clips()
    (tmp_path / "clips" / "low" / "9.wav").rename(tmp_path / "clips" / "low" / "9.mp3")
    with pytest.raises(ValueError, match=r"sound must be WAV files, got '.*9\.mp3'"):
        load_clips()
    with pytest.raises(ValueError, match=r"train_file '.*clips' is a folder: give it as dataset_name"):
        load(arguments(tmp_path / "run", train_file=tmp_path / "clips", features_column="audio"))


# ---------------------------------------------------------------------------------------------------------------------
# From a configuration, and from weights.

NO_SIZES = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_spectral_channels", "filter_length", "max_length"))
ONCE = NO_SIZES | {"max_steps": 1, "learning_rate": 0.0, "dropout": None}  # one update that changes nothing


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return ESSMForSequenceClassification.from_pretrained(folder).state_dict()


def test_training_starts_from_a_configuration(arguments, tmp_path):
    config = ESSMConfig(
        hidden_size=8, num_hidden_layers=1, num_spectral_channels=4, filter_length=64, classifier_pooling="last",
        dropout=0.2, num_input_features=5, id2label={i: f"class {i}" for i in range(3)},
    )  # fmt: skip
    config.save_pretrained(tmp_path / "config")
    train(arguments(tmp_path / "run", **ONCE, config_name=tmp_path / "config"))
    found = ESSMConfig.from_pretrained(tmp_path / "run" / "model")
    assert (found.hidden_size, found.filter_length, found.num_spectral_channels) == (8, 64, 4)
    assert (found.classifier_pooling, found.dropout, found.num_input_features) == ("last", 0.2, 1)
    assert found.id2label == config.id2label and found.trained_budgets == [2, 3, 4]
    assert read(tmp_path / "run" / "model" / "features.json")["max_length"] == 64
    changes = {"max_length": 9, "classifier_pooling": "mean", "dropout": 0.0, "num_labels": 4}
    train(arguments(tmp_path / "text", "text", **ONCE | changes, config_name=tmp_path / "config"))
    found = ESSMConfig.from_pretrained(tmp_path / "text" / "model")
    assert (found.classifier_pooling, found.dropout, found.num_input_features) == ("mean", 0.0, None)
    assert list(found.id2label.values()) == ["LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3"]
    assert AutoTokenizer.from_pretrained(tmp_path / "text" / "model").model_max_length == 9


def test_weights_are_trained_on_with_their_own_tokenizer(arguments, tmp_path):
    tokenizer = bpe_tokenizer(["abc" * 50])
    random_model(vocab_size=len(tokenizer) + 5, eos_token_id=0).save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    start = {"model_name_or_path": tmp_path / "lm"} | ONCE
    train(arguments(tmp_path / "run", "text", **start))
    saved = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert saved.get_vocab() == tokenizer.get_vocab()
    build_byte_tokenizer().save_pretrained(tmp_path / "bytes")
    with pytest.raises(ValueError, match=r"tokenizer_name must be the tokenizer of .*lm'"):
        train(arguments(tmp_path / "other", "text", **start, tokenizer_name=tmp_path / "bytes"))


def test_training_starts_from_a_language_model_with_a_new_head(arguments, tmp_path):
    # 8 channels: the schedule is the model's, not that of the 32 which are the default of the arguments.
    source = random_model(num_spectral_channels=8, filter_length=2048)
    source.save_pretrained(tmp_path / "lm")
    train(arguments(tmp_path / "run", "text", **ONCE, model_name_or_path=tmp_path / "lm"))
    found = weights(tmp_path / "run" / "model")
    assert all(torch.equal(found[f"model.{name}"], value) for name, value in source.model.state_dict().items())
    assert found["score.weight"].shape == (2, 16) and 0.01 < float(found["score.weight"].std()) < 0.04
    assert ESSMConfig.from_pretrained(tmp_path / "run" / "model").trained_budgets[-1] == 8
    assert read(tmp_path / "run" / "budget_sweep.json")["budgets"][-1] == 8
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").model_max_length == 2048
    training = read(tmp_path / "run" / "training.json")["arguments"]
    assert training["model_name_or_path"] == str(tmp_path / "lm") and training["max_length"] == 2048


def test_training_goes_on_from_a_classifier(arguments, finished, tmp_path):
    start = finished["pixels"] / "model"
    train(arguments(tmp_path / "run", **ONCE | {"dropout": 0.3}, model_name_or_path=start))
    before, after = weights(start), weights(tmp_path / "run" / "model")
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert ESSMConfig.from_pretrained(tmp_path / "run" / "model").dropout == 0.3
    learned = {"max_steps": 5, "learning_rate": 0.01, "eval_steps": 5}
    train(arguments(tmp_path / "trained", **ONCE | learned, model_name_or_path=start))
    assert not torch.equal(weights(tmp_path / "trained" / "model")["score.weight"], before["score.weight"])


# Fields of the saved model, and what the data or the arguments have instead.
UNFIT = [
    ({"num_labels": 3}, "text", {}, r"num_input_features of .*saved' must be None for column 'text', got 1"),
    ({"num_labels": 3, "num_input_features": None}, "pixels", {}, "must be 1 for column 'pixels', got None"),
    ({"num_labels": 3, "num_input_features": 40}, "pixels", {}, "must be 1 for column 'pixels', got 40"),
    ({"num_labels": 10}, "pixels", {}, "head of .*saved' has 10 labels, and the data 3: give num_labels 10 if"),
    ({"num_labels": 2}, "pixels", {}, "head of .*saved' has 2 labels, and the data 3"),
    ({"num_labels": 3}, "pixels", {"classifier_pooling": "last"}, "classifier_pooling must be 'mean', .*got 'last'"),
    ({"num_input_features": None, "vocab_size": 300}, "text", {}, "must be 259 for bytes, got 300"),
    (
        {"num_input_features": None, "vocab_size": 258, "pad_token_id": 0},
        "text",
        {"tokenizer_name": "tokenizer"},
        "vocab_size of .*saved' must be at least 259 for tokens of tokenizer, got 258",
    ),
]


@pytest.mark.parametrize(("fields", "kind", "changes", "message"), UNFIT, ids=[case[-1][:30] for case in UNFIT])
def test_weights_that_do_not_fit_the_data_are_refused(
    fields, kind, changes, message, arguments, finished, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    build_byte_tokenizer().save_pretrained("tokenizer")
    random_model(ESSMForSequenceClassification, **{"num_input_features": 1} | fields).save_pretrained("saved")
    before = sorted(path.name for path in finished["pixels"].iterdir())
    line = arguments(finished["pixels"], kind, **ONCE, **changes, model_name_or_path="saved")
    with pytest.raises(ValueError, match=message):
        train([*line, "--overwrite_output_dir"])
    assert sorted(path.name for path in finished["pixels"].iterdir()) == before  # nothing is deleted


def test_labels_of_weights_and_data(arguments, tmp_path):
    features = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["few", "many"])}
    named = write(tmp_path, "named.parquet", texts(30, seed=0), features)

    def labels(saved: list[str] | None, **changes) -> list[str]:
        fields = {"id2label": dict(enumerate(saved)), "label2id": {n: i for i, n in enumerate(saved)}} if saved else {}
        random_model(ESSMForSequenceClassification, **fields).save_pretrained(tmp_path / "saved")
        line = arguments(tmp_path / "run", "text", **ONCE | changes, model_name_or_path=tmp_path / "saved")
        args = parse_arguments(ClassificationArguments, line)
        args.set_max_length(512)
        config = train_classification.build_model(args, load_classification(args)).config
        assert config.label2id == {name: i for i, name in config.id2label.items()}
        return [config.id2label[i] for i in range(config.num_labels)]

    assert labels(None, train_file=named) == labels(["few", "many"], train_file=named) == ["few", "many"]
    assert labels(["no", "yes"]) == ["no", "yes"]  # which the data does not name
    assert labels(["no", "yes", "maybe"], num_labels=3) == ["no", "yes", "maybe"]  # and does not all show
    with pytest.raises(ValueError, match=r"labels of .*saved' are \['many', 'few'\], and .* data \['few', 'many'\]"):
        labels(["many", "few"], train_file=named)


def test_a_vocabulary_with_room_to_spare_is_kept(arguments, tmp_path):
    build_byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    random_model(vocab_size=300).save_pretrained(tmp_path / "lm")
    changes = {"tokenizer_name": tmp_path / "tokenizer", "model_name_or_path": tmp_path / "lm", "max_length": 40}
    args = parse_arguments(ClassificationArguments, arguments(tmp_path / "run", "text", **ONCE | changes))
    assert train_classification.build_model(args, load_classification(args)).config.vocab_size == 300


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 513}, r"max_length must be in \[1, filter_length = 512\], got 513"),
        ({"budget_schedule": "often"}, "budget_schedule must be one of"),
        ({"model_name_or_path": "MISSING"}, "cannot read the configuration of 'MISSING'"),
    ],
)
def test_a_configuration_is_checked_before_data_is_read(changes, message, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    random_model().save_pretrained("saved")
    monkeypatch.setattr(train_classification, "load_classification", None)
    with pytest.raises(ValueError, match=message):
        train(arguments("run", "text", **ONCE | {"model_name_or_path": "saved"} | changes))


def test_baselines_classify_text_and_features(arguments, tmp_path):
    for kind in ("pixels", "text"):
        args = parse_arguments(ClassificationArguments, arguments(tmp_path, kind, architecture="transformer"))
        model = train_classification.build_model(args, load_classification(args))
        assert type(model) is BaselineForSequenceClassification and model.config.classifier_pooling == "mean"


# ---------------------------------------------------------------------------------------------------------------------
# Data.


def load(arguments: list[str]):
    return load_classification(parse_arguments(ClassificationArguments, arguments))


def test_a_tenth_is_held_out_where_nothing_is_given(arguments, tmp_path):
    data = load(arguments(tmp_path))
    assert (len(data.source.samples), len(data.validation.samples), data.test) == (108, 12, None)
    rows = [sample.values.tobytes() for part in (data.source.samples, data.validation.samples) for sample in part]
    assert len(set(rows)) == 120  # disjoint, and nothing is lost
    again = load(arguments(tmp_path))
    assert again.validation.labels.tolist() == data.validation.labels.tolist()
    assert load(arguments(tmp_path, seed=1)).validation.labels.tolist() != data.validation.labels.tolist()
    assert [sample.label for sample in data.validation.samples] == data.validation.labels.tolist()


def test_validation_and_test_are_never_trained_on_or_mixed(arguments, files, tmp_path):
    given = {"validation_file": files["pixels validation"], "test_file": files["pixels test"], "test_samples": 7}
    data = load(arguments(tmp_path, **given))
    assert (len(data.source.samples), len(data.validation.samples), len(data.test.samples)) == (120, 24, 7)
    assert data.validation.labels.tolist() == signals(24, seed=24)["label"]
    assert data.tokens_per_sample == 24 and data.num_labels == 3


def test_streams_and_tables_hold_the_same_samples(arguments, files, tmp_path):
    for kind in ("pixels", "text"):
        table = load(arguments(tmp_path, kind, validation_file=files[f"{kind} validation"]))
        stream = load(arguments(tmp_path, kind, streaming=True, shuffle_buffer=1))
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
    batch = collate(text, [Sample(text.read(value, ""), 0) for value in (b"\xff\x00", b"abcdef")], length=5)
    assert batch["input_ids"].tolist() == [[255, 0, 256, 256, 256], [97, 98, 99, 100, 256]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]
    assert FeatureReader("x", 3, None, "int64", "auto").multiplier == 1.0
    assert FeatureReader("x", 3, None, "float32", "-2").multiplier == -2.0


# ---------------------------------------------------------------------------------------------------------------------
# Interruption. The scripts know nothing of this: a wrapper patches what they call so that the process kills itself.


@pytest.mark.parametrize(
    ("changes", "first_half_full"), [({}, True), ({"block": "paper"}, False), ({"full_budget_updates": 0}, False)]
)
def test_new_gated_models_begin_with_half_of_their_updates_at_the_full_budget(
    changes, first_half_full, arguments, tmp_path
):
    sizes = {"num_spectral_channels": 8, "max_steps": 12, "logging_steps": 1}
    train(arguments(tmp_path, **sizes, **changes))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    budgets = [line["budget"] for line in lines if "budget" in line]
    assert len(budgets) == 12 and set(budgets[6:]) != {8}
    assert (set(budgets[:6]) == {8}) == first_half_full
    if first_half_full:  # an extension begins no second half
        train([*arguments(tmp_path, **sizes | {"max_steps": 32}, **changes), "--extend"])
        lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
        assert [line["budget"] for line in lines if "budget" in line][:12] == budgets
        schedule = budget_schedule("discrete", 8, 0, full_budget_updates=6)
        assert [line["budget"] for line in lines if "budget" in line] == [schedule(i)[0] for i in range(32)]


def test_trained_weights_begin_with_budget_dropout(arguments, finished, tmp_path):
    start = finished["pixels"] / "model"
    train(arguments(tmp_path, **NO_SIZES, logging_steps=1, model_name_or_path=start))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    schedule = budget_schedule("discrete", 8, 0)
    assert [line["budget"] for line in lines if "budget" in line] == [schedule(i)[0] for i in range(8)]


@pytest.mark.parametrize("run", RUNS)
def test_killed_run_resumes_bit_for_bit(run, tmp_path, arguments, finished, files, capsys):
    script = """
import os, signal, sys
from essm_train.commands import train_classification
from modeling_essm.training import budget_dropout
call = budget_dropout.BudgetSchedule.__call__
def die(self, update):
    return os.kill(os.getpid(), signal.SIGKILL) if update == 5 else call(self, update)
budget_dropout.BudgetSchedule.__call__ = die
train_classification.main(
    train_classification.parse_arguments(train_classification.ClassificationArguments, sys.argv[1:])
)
"""
    line = arguments(tmp_path, **RUNS[run], test_file=files[f"{RUNS[run]['kind']} test"])
    killed = subprocess.run([sys.executable, "-c", script, *line], capture_output=True, text=True, env=dict(os.environ))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-00000003"]
    train(line)
    assert "checkpoint-00000003 holds update 3" in capsys.readouterr().out
    assert same(tmp_path, finished[run])
    sweeps = [read(folder / "budget_sweep.json")["values"] for folder in (tmp_path, finished[run])]
    assert sweeps[0] == sweeps[1]


@pytest.mark.parametrize("streaming", [False, True])
def test_resuming_on_changed_data_is_refused(streaming, tmp_path, arguments):
    path = write(tmp_path, "train.jsonl", texts(30, seed=0))
    line = arguments(tmp_path / "run", "text", train_file=path, max_steps=1, streaming=streaming)
    train(line)
    rows = texts(30, seed=0)
    rows["text"][-1] = rows["text"][-1][1:] + rows["text"][-1][0]  # as many bytes as before
    assert rows != texts(30, seed=0)
    write(tmp_path, "train.jsonl", rows)
    before = final_tensors(tmp_path / "run")
    with pytest.raises(ValueError, match=r"sha256 of the training data was .* and is now"):
        train(line)
    assert all(torch.equal(a, b) for a, b in zip(before, final_tensors(tmp_path / "run"), strict=True))
    with pytest.raises(ValueError, match="max_length was 40 and is now 39"):
        train([*line, "--max_length", "39"])


# ---------------------------------------------------------------------------------------------------------------------
# Errors.

GOOD = {"pixels": [[1, 2], [3, 4], [5, 6]], "label": [0, 1, 2]}
BAD_ARGUMENTS = [
    ({"train_file": None}, "no data to train on: give --train_file data.parquet"),
    ({"dataset_name": "imdb"}, "train_file or dataset_name, not both"),
    ({"train_file": None, "dataset_name": "NOWHERE/AT_ALL"}, "cannot read dataset 'NOWHERE/AT_ALL'"),
    ({"train_file": "MISSING.parquet"}, "train_file 'MISSING.parquet' is not there"),
    ({"validation_file": "MISSING.csv"}, "validation_file 'MISSING.csv' is not there"),
    ({"train_file": "EMPTY.jsonl"}, "train_file 'EMPTY.jsonl' is empty"),
    ({"train_file": "words.txt"}, r"train_file must end in one of \['.csv', .*got 'words.txt'"),
    ({"train_file": "broken.parquet"}, "cannot read train_file broken.parquet: "),
    ({"train_file": "broken.jsonl"}, "cannot read "),
    ({"features_column": None}, "give text_column or features_column, and not both, got None, None"),
    ({"text_column": "text"}, "give text_column or features_column, and not both, got 'text', 'pixels'"),
    ({"features_column": "frames"}, r"features_column must be one of \['pixels', 'label'\].*got 'frames'"),
    ({"label_column": "class"}, r"label_column must be one of \['pixels', 'label'\].*got 'class'"),
    ({"max_length": 513}, r"max_length must be in \[1, filter_length = 512\], got 513"),
    ({"num_labels": 1}, "num_labels must be at least 2, got 1"),
    ({"feature_scale": "big"}, "feature_scale must be 'auto', 'uint8' or a number, got 'big'"),
    ({"tokenizer_name": "gpt2"}, "tokenizer_name needs text_column"),
    ({"eval_batch_size": 0}, "eval_batch_size must be at least 1, got 0"),
    ({"num_labels": 2}, r"row \d+ of train_file pixels-train.parquet: labels must be in \[0, 1\], got 2"),
    ({"num_spectral_channels": 40}, "filter_length 512 resolves at most .*got num_spectral_channels=40"),
    ({"budget_schedule": "often"}, "budget_schedule must be one of"),
    ({"streaming": True, "num_labels": None}, "streaming needs num_labels"),
    ({"streaming": True, "validation_file": None}, "streaming needs a validation_file"),
    ({"streaming": True, "train_file": "broken.jsonl"}, "cannot read "),
    ({"streaming": True, "features_column": "x"}, r"features_column must be one of \['pixels', 'label'\].*got 'x'"),
    ({"streaming": True, "num_labels": 2}, r"row \d+ of validation_file .*: labels must be in \[0, 1\], got 2"),
]


@pytest.mark.parametrize(
    ("changes", "message"), BAD_ARGUMENTS, ids=["-".join(map(str, changes)) for changes, _ in BAD_ARGUMENTS]
)
def test_errors_come_before_any_work(changes, message, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    Path("EMPTY.jsonl").touch()
    Path("words.txt").write_text("words")
    Path("broken.parquet").write_bytes(b"no parquet")
    Path("broken.jsonl").write_text('{"pixels": [1], "label": 0}\nno json\n')
    monkeypatch.setattr(train_classification, "train_and_record", None)
    with pytest.raises(ValueError, match=message):
        train(arguments("run", **changes))


BAD_ROWS = [
    ({"pixels": [[1], [2], []]}, "row 2 of .*: features_column 'pixels' holds an empty sequence"),
    ({"pixels": [[1], None, [2]]}, "row 1 of .* must hold a sequence of numbers, got NoneType"),
    ({"pixels": [[1], [2], [0.5, None]]}, "row 2 of .* must hold finite numbers, got nan|must hold numbers"),
    ({"pixels": [["a"], ["b"], ["c"]]}, "row 0 of .* must hold numbers, got .* such as 'a'"),
    ({"pixels": ["a", "b", "c"]}, "row 0 of .* must hold a sequence of numbers, got str"),
    (
        {"pixels": [[[1, 2]], [[3, 4], [5]], [[6, 7]]]},
        r"row 1 of .* holds a ragged list: frames of \[1, 2\] numbers, not of one width",
    ),
    ({"pixels": [[[1, 2]], [[3, 4]], [[5]]]}, r"row 2 of .* must hold frames of 2 numbers, .*shape \(1, 1\)"),
    ({"label": [0, 1, -1]}, r"row 2 of .*: labels must be in \[0, 2\], got -1"),
    ({"label": [0, 3, 2]}, r"row 1 of .*: labels must be in \[0, 2\], got 3"),
    ({"label": [0, 1, None]}, "row 2 of .*: label_column 'label' must hold integers from 0, got None"),
    (
        {"label": ["no", "yes", None]},  # of a stream the first row is refused: its classes are not known
        r"row 2 of .* must be one of \['no', 'yes'\], got None|row 0 of .* must hold integers from 0, got 'no'",
    ),
    ({"label": [0.0, 0.5, 1.0]}, r"row 0 of .*: label_column 'label' must hold integers from 0, got 0.0"),
    ({"pixels": [[1], [256], [0]], "scale": "uint8"}, r"row 1 of .* numbers in \[0, 255\] .*got 256"),
]


@pytest.mark.parametrize(("columns", "message"), BAD_ROWS, ids=[message[:40] for _, message in BAD_ROWS])
@pytest.mark.parametrize("streaming", [False, True], ids=["table", "stream"])
def test_bad_rows_are_named(columns, message, streaming, arguments, tmp_path):
    columns = dict(columns)
    scale = columns.pop("scale", "auto")
    path = write(tmp_path, "bad.parquet", GOOD | columns)
    changes = {"train_file": path, "feature_scale": scale, "num_labels": 3, "per_device_train_batch_size": 1}
    if not streaming:
        with pytest.raises(ValueError, match=message):
            load(arguments(tmp_path / "run", **changes))
        return
    width = np.asarray(columns.get("pixels", [[0]])[0]).ndim  # a validation set of the same kind
    good = {"v": [[[1, 2]]] * 2, "label": [0, 1]} if width == 2 else {"v": [[1]] * 2, "label": [0, 1]}
    validation = write(tmp_path, "good.parquet", {"pixels": good["v"], "label": good["label"]})
    with pytest.raises(ValueError, match=message):
        load(arguments(tmp_path / "run", **changes, streaming=True, validation_file=validation)).source.draw(3)


def test_streams_name_the_row_after_a_resume(arguments, files, tmp_path):
    rows = signals(12, seed=0)
    rows["label"][9] = 7
    path = write(tmp_path, "train.parquet", rows, PIXELS)
    line = arguments(tmp_path / "run", train_file=path, streaming=True, shuffle_buffer=1, save_steps=1)
    with pytest.raises(ValueError, match=r"row 9 of train_file train.parquet: labels must be in \[0, 2\], got 7"):
        train(line)
    assert [path.name for path in list_checkpoints(tmp_path / "run")][-1] == "checkpoint-00000002"
    with pytest.raises(ValueError, match=r"row 9 of train_file"):
        train(line)
    assert [path.name for path in list_checkpoints(tmp_path / "run")][-1] == "checkpoint-00000002"  # nothing is lost


def test_text_rows_are_checked(arguments, tmp_path):
    build_byte_tokenizer().save_pretrained(tmp_path / "tokenizer")

    def check(rows: list, **changes):
        path = write(tmp_path, "bad.parquet", {"text": rows, "label": [0, 1, 0]})
        return load(arguments(tmp_path / "run", "text", train_file=path, **changes))

    with pytest.raises(ValueError, match=r"row 1 of .*: text_column 'text' holds an empty text"):
        check(["a", "", "c"])
    with pytest.raises(ValueError, match=r"row 2 of .*: text_column 'text' must hold text, got NoneType"):
        check(["a", "b", None])
    with pytest.raises(ValueError, match=r"row 0 of .*: text_column 'text' must hold text, got int"):
        check([1, 2, 3])
    undecodable = [b"abc", b"a\xffc", b"\x00"]
    data = check(undecodable)
    assert sorted(bytes(s.values) for part in (data.source.samples, data.validation.samples) for s in part) == sorted(
        undecodable
    )
    with pytest.raises(ValueError, match=r"row 1 of .* is not UTF-8: byte 0xff at position 1; .*train on bytes"):
        check(undecodable, tokenizer_name=tmp_path / "tokenizer")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"cannot load tokenizer '.*empty'"):
        check(["a", "b", "c"], tokenizer_name=tmp_path / "empty")


@pytest.mark.parametrize("streaming", [False, True])
def test_undecodable_csv_is_a_clear_error(streaming, arguments, files, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_bytes(b"text,label\nabc,0\n\xff\xfe,1\n")
    changes = {"train_file": path, "streaming": streaming, "validation_file": files["text validation"]}
    with pytest.raises(ValueError, match=r"cannot read .*: 'utf-8' codec can't decode byte 0xff"):
        load(arguments(tmp_path / "run", "text", **changes))


def test_csv_files_are_read(arguments, tmp_path):
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text", "label"], *zip(*texts(20, seed=0).values())])
    data = load(arguments(tmp_path / "run", "text", train_file=tmp_path / "a.csv"))
    assert len(data.source.samples) == 18 and data.num_labels == 2


def test_files_without_rows_are_refused(arguments, tmp_path):
    path = write(tmp_path, "none.parquet", {"pixels": [], "label": []}, PIXELS)
    for streaming in (False, True):
        with pytest.raises(ValueError, match=r"train_file none.parquet holds no rows"):
            load(arguments(tmp_path / "run", train_file=path, streaming=streaming))
    with pytest.raises(ValueError, match=r"validation_file none.parquet holds no rows"):
        load(arguments(tmp_path / "run", validation_file=path))
