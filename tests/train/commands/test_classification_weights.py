# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm-train-classification from a configuration, from weights, and with a baseline."""

from pathlib import Path

import datasets
import pytest
import torch
from helpers import random_model
from training_run import NO_SIZES, ONCE, read, texts, write
from training_run import train_classes as train
from transformers import AutoTokenizer

from essm_train.arguments import parse_arguments
from essm_train.data.arguments import ClassificationArguments
from essm_train.data.classification import load_classification
from essm_train.run.classifier import build_classifier
from modeling_essm import ESSMConfig, ESSMForSequenceClassification, build_byte_tokenizer


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
    config.architectures = ["ESSMForSequenceClassification"]  # as a trained model's; a new one learns other classes
    config.save_pretrained(tmp_path / "config")
    path = write(tmp_path, "pets.parquet", {"text": ["cat", "dog", "eel"] * 8, "label": ["cat", "dog", "eel"] * 8})
    changes = {"train_file": path, "test_file": path, "config_name": tmp_path / "config", "max_length": 9}
    train(arguments(tmp_path / "pets", "text", **ONCE | changes))
    assert list(ESSMConfig.from_pretrained(tmp_path / "pets" / "model").id2label.values()) == ["cat", "dog", "eel"]


def test_training_starts_from_a_language_model_with_a_new_head(arguments, tmp_path):
    # 8 channels: the schedule is the model's, not that of the 32 which are the default of the arguments.
    source = random_model(num_spectral_channels=8, filter_length=2048)
    source.save_pretrained(tmp_path / "lm")
    train(arguments(tmp_path / "run", "text", **ONCE, model_name_or_path=tmp_path / "lm"), whole=True)
    found = weights(tmp_path / "run" / "model")
    assert all(torch.equal(found[f"model.{name}"], value) for name, value in source.model.state_dict().items())
    assert found["score.weight"].shape == (2, 16) and 0.01 < float(found["score.weight"].std()) < 0.04
    assert ESSMConfig.from_pretrained(tmp_path / "run" / "model").trained_budgets[-1] == 8
    assert read(tmp_path / "run" / "budget_sweep.json")["budgets"][-1] == 8
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").model_max_length == 2048
    training = read(tmp_path / "run" / "training.json")["arguments"]
    assert training["model_name_or_path"] == str(tmp_path / "lm") and training["max_length"] == 2048


# Fields of the saved model, and what the data or the arguments have instead.
UNFIT = [
    ({"num_labels": 3}, "text", {}, r"num_input_features of .*saved' must be None for column 'text', got 1"),
    ({"num_labels": 3, "num_input_features": None}, "pixels", {}, "must be 1 for column 'pixels', got None"),
    ({"num_labels": 10}, "pixels", {}, "num_labels of .*saved' must be 3 for .*, got 10: give num_labels"),
    ({"num_labels": 2}, "pixels", {}, "num_labels of .*saved' must be 3 for column 'pixels', got 2"),
    ({"num_labels": 3}, "pixels", {"classifier_pooling": "last"}, "pooling of .*saved' must be 'last' for .*'mean'"),
    ({"num_input_features": None, "vocab_size": 300}, "text", {}, "must be 259 for bytes, got 300"),
]


@pytest.mark.parametrize(("fields", "kind", "changes", "message"), UNFIT, ids=[case[-1][:30] for case in UNFIT])
def test_weights_that_do_not_fit_the_data_are_refused(fields, kind, changes, message, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = [Path("run", name) for name in ("model", "best", "checkpoint-00000006")]
    for folder in run:
        folder.mkdir(parents=True)
    random_model(ESSMForSequenceClassification, **{"num_input_features": 1} | fields).save_pretrained("saved")
    line = arguments("run", kind, **ONCE, **changes, model_name_or_path="saved")
    with pytest.raises(ValueError, match=message):
        train([*line, "--overwrite_output_dir"])
    assert all(folder.is_dir() for folder in run)  # nothing is deleted


def test_labels_of_weights_and_data(arguments, tmp_path):
    features = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["few", "many"])}
    named = write(tmp_path, "named.parquet", texts(30, seed=0), features)

    def labels(saved: list[str] | None, **changes) -> list[str]:
        fields = {"id2label": dict(enumerate(saved)), "label2id": {n: i for i, n in enumerate(saved)}} if saved else {}
        random_model(ESSMForSequenceClassification, **fields).save_pretrained(tmp_path / "saved")
        line = arguments(tmp_path / "run", "text", **ONCE | changes, model_name_or_path=tmp_path / "saved")
        args = parse_arguments(ClassificationArguments, line)
        args.check_length(512)
        config = build_classifier(args, load_classification(args)).config
        assert config.label2id == {name: i for i, name in config.id2label.items()}
        return [config.id2label[i] for i in range(config.num_labels)]

    assert labels(None, train_file=named) == labels(["few", "many"], train_file=named) == ["few", "many"]
    assert labels(["no", "yes"]) == ["no", "yes"]  # which the data does not name
    assert labels(["no", "yes", "maybe"], num_labels=3) == ["no", "yes", "maybe"]  # and does not all show
    with pytest.raises(
        ValueError, match=r"id2label of .*saved' must be \{0: 'few', 1: 'many'\} for .*'many', 1: 'few'"
    ):
        labels(["many", "few"], train_file=named)


def test_a_vocabulary_with_room_to_spare_is_kept(arguments, tmp_path):
    build_byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    random_model(vocab_size=300).save_pretrained(tmp_path / "lm")
    changes = {"tokenizer_name": tmp_path / "tokenizer", "model_name_or_path": tmp_path / "lm", "max_length": 40}
    args = parse_arguments(ClassificationArguments, arguments(tmp_path / "run", "text", **ONCE | changes))
    data = load_classification(args)
    assert build_classifier(args, data).config.vocab_size == 300 and "sha256 of the tokenizer" in data.digests


def test_numbers_are_scaled_as_the_weights_know_them(arguments, files, tmp_path):
    """As features.json beside them says; without weights columns of uint8 by themselves, others as they are."""
    columns = datasets.load_dataset("parquet", data_files=files["pixels train"], split="train")[:]
    wide = {f"p{i:02}": [row[i] for row in columns["pixels"]] for i in range(24)} | {"label": columns["label"]}
    kinds = {name: datasets.Value("int64" if name == "label" else "uint8") for name in wide}
    random_model(ESSMForSequenceClassification, num_input_features=1, num_labels=3).save_pretrained(tmp_path / "model")
    (tmp_path / "model/features.json").write_text('{"multiplier": 0.25, "offset": -1.0, "max_length": 40}')
    for source, column in (
        (write(tmp_path, "wide.parquet", wide, kinds), "p*"),
        (write(tmp_path, "plain.parquet", columns), "pixels"),
    ):
        changes = {"train_file": source, "features_column": column, "max_length": 40}
        args = parse_arguments(ClassificationArguments, arguments(tmp_path / "run", **changes))
        assert load_classification(args).reader.multiplier == (1 / 127.5 if column == "p*" else 1.0)
        changes |= NO_SIZES | {"model_name_or_path": tmp_path / "model"}
        args = parse_arguments(ClassificationArguments, arguments(tmp_path / "run", **changes))
        reader = load_classification(args).reader
        assert (reader.multiplier, reader.offset) == (0.25, -1.0)
