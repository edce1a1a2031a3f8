# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""train/train_retrieval.py: lines of the files, arguments, runs that learn, baselines, errors that name the line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, assert_close
from huggingface_hub import ModelCard
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from essm_train.arguments import parse_arguments
from essm_train.commands import train_retrieval as retrieval
from essm_train.measure.scoring import Predictor
from essm_train.publish.hub import check_folder
from essm_train.run.checkpoints import list_checkpoints
from essm_train.tasks.retrieval import (
    Pair,
    PairFile,
    RetrievalArguments,
    collate,
    load_retrieval,
)
from modeling_essm import ESSMForPairClassification, ESSMPairConfig

TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_spectral_channels": 8,
    "filter_length": 512,
    "max_length": 64,
    "per_device_train_batch_size": 16,
    "max_steps": 50,
    "warmup_steps": 10,
    "learning_rate": 0.01,
    "eval_steps": 25,
    "save_steps": 25,
    "cpu_threads": 1,  # more would wait for each other
}


# Which weights have.
SIZES = ("hidden_size", "num_hidden_layers", "num_spectral_channels", "filter_length")
WEIGHTS = {"model_name_or_path": "x"} | dict.fromkeys(SIZES)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """Pairs of six words; 1 if both documents use mostly the same word of two. Neither document alone tells."""
    folder, rng = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0)
    paths = {}
    for split, count in (("train", 300), ("eval", 40), ("test", 60)):
        lines = []
        for i in range(count):
            first, label = rng.integers(2, size=2)
            documents = [
                " ".join(rng.choice(["xx", "yyyy"], rng.integers(5, 9), p=[0.9, 0.1] if topic else [0.1, 0.9]))
                for topic in (first, first if label else 1 - first)
            ]
            lines.append(f"{float(label)}\tP{i:02}-1\tQ{i:02}-2\tb'{documents[0]}'\tb'{documents[1]}'\n")
        paths[split] = folder / f"new_aan_pairs.{split}.tsv"
        paths[split].write_text("".join(lines))
    return paths


def arguments(output_dir: Path, files: dict[str, Path], **changes) -> RetrievalArguments:
    values = {**TINY, "output_dir": output_dir, "train_file": files["train"], "test_file": files["test"]}
    values |= {"validation_file": files["eval"]} | changes
    parts = []
    for name, value in values.items():
        parts += [] if value is None else [f"--{name}", str(value)]
    return parse_arguments(RetrievalArguments, parts)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, files) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    retrieval.main(arguments(folder, files))
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# The pairs.


def test_pairs_are_read_as_they_stand_cut_and_padded(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_bytes(b"1.0\ta\tb\tabcdef\t\"x\n0.0\tc\td\tb'\\n'\t" + "é".encode() + b"\n")
    found = PairFile(path, max_length=4)
    assert len(found) == 2 and found.labels.tolist() == [1, 0] and found.lengths.tolist() == [[6, 2], [5, 2]]
    assert [bytes(text) for i in (1, 0) for text in found[i][:2]] == [b"b'\\n", "é".encode(), b"abcd", b'"x']
    batch = collate([found[0], found[1]])
    assert batch["input_ids"].tolist() == [
        [[97, 98, 99, 100], [34, 120, 256, 256]],
        [[98, 39, 92, 110], [195, 169, 256, 256]],
    ]
    assert batch["attention_mask"].sum(-1).tolist() == [[4, 2], [4, 2]] and batch["labels"].tolist() == [1, 0]
    assert collate([found[0]], 7)["input_ids"].shape == (1, 2, 7)


def test_files_that_cannot_be(tmp_path):
    path = tmp_path / "pairs.tsv"
    with pytest.raises(ValueError, match=r"pairs\.tsv is not there: fetch lra_release\.gz"):
        PairFile(path, 10)
    for line, message in (
        ("1.0\ta\tb\tc", r"line 2 of .*pairs\.tsv must hold label, id1, id2, text1, text2 between tabs"),
        ("1.0\ta\tb\t\td", r"line 2 of .* texts that are not empty"),
        ("1.0\ta\tb\tc\td\te", r"cannot read .*pairs\.tsv: .* line 2, saw 6"),
        ("label\tid1\tid2\ttext1\ttext2", "line 2 of .* label must be 0 or 1, got 'label'"),
        ("", "line 2 of .* label must be 0 or 1"),
    ):
        path.write_text(f"1.0\ta\tb\tc\td\n{line}\n1.0\ta\tb\tc\td\n")
        with pytest.raises(ValueError, match=message):
            PairFile(path, 10)


def test_held_out_pairs(files, tmp_path):
    data = load_retrieval(arguments(tmp_path, files, validation_file=None, test_samples=7))
    parts = data.source.samples, data.validation.samples, data.test.samples
    assert tuple(map(len, parts)) == (270, 30, 7)
    assert not set(parts[0].indices) & set(parts[1].indices)
    assert data.validation.labels.tolist() == [pair.label for pair in data.validation.samples]
    again = load_retrieval(arguments(tmp_path, files, validation_file=None, seed=1))
    assert set(again.validation.samples.indices) != set(parts[1].indices)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train_file": None}, "give --train_file"),
        ({"max_length": 513}, r"max_length must be in \[1, filter_length = 512\], got 513"),
        ({"test_samples": 0}, "test_samples must be at least 1, got 0"),
        ({"architecture": "mamba", "push_to_hub": True, "hub_model_id": "a/b"}, "'mamba' is there to compare with"),
        (WEIGHTS | {"head_hidden_size": 8}, "head_hidden_size is part of model_name_or_path: leave it out, got 8"),
    ],
)
def test_bad_arguments(changes, message, files, tmp_path):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, files, **changes)


def test_sizes_make_the_encoder(files, tmp_path):
    sizes = {"gating": "none", "ar_order": 2, "scaling_exponent": 0.0, "dropout": 0.1, "stochastic_depth": 0.2}
    sizes["block"] = "paper"
    model = retrieval.build_model(arguments(tmp_path, files, **sizes, head_hidden_size=24))
    assert {name: getattr(model.config, name) for name in sizes} == sizes
    assert model.config.head_hidden_size == 24
    sizes = {"block": "gated", "inner_size": 24, "num_heads": 3, "mixing_size": 4, "conv_kernel_size": 3}
    config = retrieval.build_model(arguments(tmp_path, files, **sizes, intermediate_size=20)).config
    assert {name: getattr(config, name) for name in sizes} == sizes and config.intermediate_size == 20
    config = retrieval.build_model(arguments(tmp_path, files, filter_length=None)).config
    assert (config.filter_length, config.dropout, config.head_hidden_size) == (4096, 0.0, 16)


def test_rates_that_are_not_given_are_recorded_as_before(files, tmp_path):
    """Or a run started before baselines and configurations could be named here would not continue."""
    identity = arguments(tmp_path, files, dropout=0.0).identity()
    assert identity["dropout"] == 0.0 and identity["stochastic_depth"] is None


def test_a_configuration_or_weights_make_the_model(finished, files, tmp_path):
    values = dict.fromkeys(SIZES) | {"config_name": ROOT / "hub_configs" / "essm-lra-retrieval"}
    small = {"hidden_size": 16, "num_hidden_layers": 1, "max_steps": 1}
    sizes = {"num_hidden_layers": 1, "head_hidden_size": 9}
    config = retrieval.build_model(arguments(tmp_path, files, **values | sizes)).config
    assert (config.hidden_size, config.num_hidden_layers, config.head_hidden_size) == (256, 1, 9)
    assert (config.block, config.filter_length) == ("paper", 4096)
    with pytest.raises(ValueError, match=r"max_length must be in \[1, filter_length = 4096\], got 4097"):
        retrieval.main(arguments(tmp_path, files, **values | small | {"max_length": 4097}))
    with pytest.raises(ValueError, match=r"must hold .* model_type 'essm_two_tower', got model_type 'essm'"):
        retrieval.main(arguments(tmp_path, files, **values | {"config_name": ROOT / "hub_configs" / "essm-tiny"}))
    again = retrieval.build_model(arguments(tmp_path, files, **WEIGHTS | {"model_name_or_path": finished / "model"}))
    saved = ESSMForPairClassification.from_pretrained(finished / "model")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), saved.parameters(), strict=True))


def test_a_variant_of_as_many_parameters_keeps_its_head(files, tmp_path):
    values = {"hidden_size": 32, "num_hidden_layers": 2, "head_hidden_size": 40, "block": "paper"}
    whole = retrieval.build_model(arguments(tmp_path, files, **values))
    variant = retrieval.build_model(arguments(tmp_path, files, **values, gating="none", match_parameters=True))
    assert type(variant.config) is ESSMPairConfig and variant.head.out_features == 40
    assert abs(variant.num_parameters() / whole.num_parameters() - 1) <= 0.03
    assert variant.config.intermediate_size > 4 * 32  # in the place of the gate


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs.


def test_a_run_learns_at_every_budget(finished, files):
    sweep = json.loads((finished / "budget_sweep.json").read_text())
    assert sweep["budgets"] == [2, 3, 4, 6, 8] and (sweep["split"], sweep["samples"]) == ("test", 60)
    # Chance is a half; the words of a document name its topic with more than nine chances in ten.
    assert min(sweep["values"]) >= 0.8
    model = AutoModelForSequenceClassification.from_pretrained(finished / "model").eval()
    assert type(model) is ESSMForPairClassification
    test = PairFile(files["test"], 64)
    for K, value in zip(sweep["budgets"], sweep["values"]):
        with torch.no_grad():
            predictions = model(**collate(list(test)), spectral_budget=K).logits.argmax(-1)
        assert value == pytest.approx((predictions == test.labels).double().mean().item())
    assert model.config.trained_budgets == [2, 3, 4, 6, 8] and model.config.id2label == {0: "unrelated", 1: "related"}
    training = json.loads((finished / "training.json").read_text())
    assert training["script"] == "train_retrieval.py" and "300 pairs" in training["data"]


def test_saved_tokenizer_pads_and_cuts_as_in_training(finished):
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    batch = tokenizer(["a" * 80, "ab"], padding=True, truncation=True, return_tensors="pt")
    assert batch["input_ids"].shape == (2, 64) and batch["attention_mask"][1].sum() == 2
    assert batch["input_ids"][1, :2].tolist() == [97, 98]


def test_an_interrupted_run_ends_with_the_same_weights(finished, files, tmp_path, monkeypatch):
    original, calls = Predictor.__call__, []

    def dies(self, model, part, budget):
        calls.append(budget)
        if len(calls) == 4:  # in the second validation
            raise KeyboardInterrupt
        return original(self, model, part, budget)

    with monkeypatch.context() as patch:
        patch.setattr(Predictor, "__call__", dies)
        with pytest.raises(KeyboardInterrupt):
            retrieval.main(arguments(tmp_path, files))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-00000025"]
    retrieval.main(arguments(tmp_path, files))
    first, second = (ESSMForPairClassification.from_pretrained(run / "model") for run in (finished, tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    with pytest.raises(ValueError, match="sha256 of the training data was"):
        retrieval.main(arguments(tmp_path, files | {"train": files["test"]}))


def test_a_finished_run_can_be_published(finished):
    files = check_folder(finished / "model")
    assert {"pair_essm.py", "modeling_essm.py", "README.md", "tokenizer.json"} <= set(files)
    card = ModelCard((finished / "model" / "README.md").read_text())
    assert card.data.pipeline_tag == "text-classification" and card.data.metrics == ["accuracy"]
    assert "ESSMForPairClassification" in card.text and "two documents, shape (batch, 2, length)" in card.text
    assert "reads one text" in card.text


@pytest.mark.parametrize("architecture", ["transformer", "mamba", "mamba2", "s4", "s4d", "cnn"])
def test_a_baseline_of_as_many_parameters_trains(architecture, files, tmp_path):
    values = {"hidden_size": 32, "num_hidden_layers": 2, "head_hidden_size": 40, "max_steps": 2, "warmup_steps": 1}
    values |= {"per_device_train_batch_size": 2, "test_samples": 6, "validation_samples": 4}
    elastic = retrieval.build_model(arguments(tmp_path, files, **values))
    sweep = retrieval.main(arguments(tmp_path, files, **values, architecture=architecture))
    assert sweep.budgets == (1,)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    assert type(model).__name__ == "BaselineForPairClassification" and model.config.architecture == architecture
    assert abs(model.num_parameters() / elastic.num_parameters() - 1) <= 0.05
    assert model.head.out_features == 40 and model.config.id2label == {0: "unrelated", 1: "related"}
    assert not [*(tmp_path / "model").glob("*.py")]
    batch = collate([Pair(np.arange(5), np.arange(9), 0), Pair(np.arange(7), np.arange(3), 1)])
    with torch.no_grad():
        outputs = model(**batch)
        a, b = (model.model(text[None], None, None)[0].mean(1) for text in (torch.arange(5), torch.arange(9)))
        hidden = torch.nn.functional.gelu(model.head(torch.cat([a, b, a * b, a - b], -1)))
    assert_close(outputs.logits[:1], model.score(hidden))  # alone, without padding
    assert outputs.loss == torch.nn.functional.cross_entropy(outputs.logits, batch["labels"])


def test_a_baseline_of_full_size_has_the_same_head(files, tmp_path):
    values = dict.fromkeys(SIZES) | {"config_name": ROOT / "hub_configs" / "essm-lra-retrieval"}
    elastic, baseline = (
        retrieval.build_model(arguments(tmp_path, files, **values, architecture=name)) for name in ("essm", "s4d")
    )
    assert baseline.config.hidden_size != 256 == baseline.head.out_features
    assert abs(baseline.num_parameters() / elastic.num_parameters() - 1) <= 0.05


def test_a_baseline_that_reads_features_is_refused(files, tmp_path):
    with pytest.raises(ValueError, match="'tc_resnet' needs num_input_features"):
        retrieval.build_model(arguments(tmp_path, files, architecture="tc_resnet"))
