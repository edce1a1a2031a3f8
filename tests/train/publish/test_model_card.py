# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The card of a model."""

import json
from pathlib import Path

import pytest
from helpers import random_model
from hub_run import PICTURE, REPO, SWEEP, TRAINING
from huggingface_hub import EvalResult, ModelCard
from safetensors.torch import load_file

from essm_train.measure.budget_sweep import read_sweep
from essm_train.publish.model_card import SECTIONS, write_model_card
from essm_train.publish.run_card import PushArguments, push_run
from modeling_essm import ESSMForSequenceClassification


def write(folder: Path, **options) -> str:
    defaults = {"sweep": SWEEP, "training": TRAINING, "hub_model_id": REPO, "template": None}
    return write_model_card(folder, **(defaults | options)).read_text()


def test_card_of_a_language_model(run):
    text = write(run / "model")
    card = ModelCard(text)
    assert card.data.license == "apache-2.0" and card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation" and "state-space-model" in card.data.tags
    assert card.data.model_name == "elastic" and card.data.metrics == ["bits_per_byte"]
    assert card.data.eval_results == [
        EvalResult(
            task_type="text-generation",
            dataset_type="custom",
            dataset_name="A | tiny corpus",
            metric_type="bits_per_byte",
            metric_name=f"bits per byte (K = {K})",
            metric_value=value,
            metric_args={"spectral_budget": K},
        )
        for K, value in zip(SWEEP["budgets"], SWEEP["bits_per_byte"])
    ]
    for row in (
        "| K | bits per byte | against K = 32 | tokens/s |  |",
        "| 2 | 2.7500 | +10.0% | 9,000 |  |",
        "| 8 | 2.5500 | +2.0% | 5,000 | sweet spot |",
        "| 32 | 2.5000 | +0.0% | 2,000 |  |",
        "| data | A \\| tiny corpus |",
        "| tokens in all | 1,228,800 |",
    ):
        assert row in text
    parameters = sum(tensor.numel() for tensor in load_file(run / "model" / "model.safetensors").values())
    assert f"| parameters | {parameters:,} |" in text
    assert "![bits per byte against the spectral budget](budget_sweep.png)" in text
    assert (run / "model" / "budget_sweep.png").read_bytes() == PICTURE
    assert "trust_remote_code=True" in text and "revision=revision" in text and "not supported" in text
    assert text == write(run / "model")


def test_card_of_a_calibrated_model(run):
    """Presets and the profile are told of where they are, and nowhere else."""
    folder = run / "model"

    def loading() -> str:
        return " ".join(write(folder).split("## How to load it")[1].split("\n## ")[0].split())

    assert "spectral_capacity=" in loading() and "sweet-spot" not in loading() and "choose_budget" not in loading()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"budget_presets": {"sweet-spot": 3, "full": 8}}))
    (folder / "budget_profile.json").write_text("{}")
    assert "the names `sweet-spot` (3), `full` (8)." in loading() and "budgets.choose_budget(model, max_" in loading()


def test_no_boundary_is_marked_where_nothing_collapses(run):
    text = write(run / "model")
    assert "Sweet spot:" in text and "ollapse" not in text
    text = write(run / "model", sweep=SWEEP | {"bits_per_byte": [3.0, 2.7, 2.5]})
    assert "Collapse boundary:" in text and "| 8 | 2.7000 | +8.0% | 5,000 | collapse boundary |" in text


def test_a_users_card_is_not_read_as_jinja(run, tmp_path):
    """And keeps its head."""
    body = "{{ 1 + 1 }} {% if %}\n" + "".join(f"<!-- {name} -->\n" for name in SECTIONS)
    (tmp_path / "template.md").write_text("---\nlicense: mit\nmine: [1, 2]\n---\n" + body)
    card = ModelCard(write(run / "model", template=tmp_path / "template.md"))
    assert "{{ 1 + 1 }} {% if %}" in card.text and "## Training" in card.text
    assert card.data.license == "mit" and card.data.to_dict()["mine"] == [1, 2]


def test_card_tells_no_secrets(run):
    text = write(run / "model")
    assert "somebody" not in text and "hf_secret" not in text
    assert 'train_file: ["book.txt"]' in text and "learning_rate: 0.005" in text


def test_card_of_a_classifier(tmp_path):
    model = random_model(ESSMForSequenceClassification, num_labels=3)
    model.save_pretrained(tmp_path / "model")
    sweep = {
        "budgets": [4, 32],
        "metric": {"name": "accuracy", "higher_is_better": True},
        "values": [0.5, 0.625],
        "tokens_per_second": [80.0, 20.0],
        "sweet_spot": 32,
        "split": "test",
        "samples": 1655,
    }
    training = {"arguments": {"dataset_name": "stanfordnlp/imdb"}, "samples_per_update": 16, "updates": 10}
    text = write(tmp_path / "model", sweep=sweep, training=training, hub_model_id=None)
    card = ModelCard(text)
    assert card.data.pipeline_tag == "text-classification" and card.data.datasets == ["stanfordnlp/imdb"]
    assert [result.metric_value for result in card.data.eval_results] == [0.5, 0.625]
    assert card.data.eval_results[0].dataset_type == "stanfordnlp/imdb"
    assert card.data.eval_results[1].dataset_split == "test" and "on 1,655 samples of the test data" in text
    assert (
        "| 4 | 0.5000 | -20.0% | 80 |  |" in text
        and "| 32 | 0.6250 | +0.0% | 20 | sweet spot, collapse boundary |" in text
    )
    assert "higher is better" in text and "| samples in all | 160 |" in text and "budget_sweep.png" not in text
    assert 'repository = "org/name"' in text and "AutoModelForSequenceClassification" in text


def test_card_without_measurements(run):
    text = write(run / "model", sweep=None, training=None)
    assert "Not measured" in text and "| data | not stated |" in text and ModelCard(text).data.eval_results is None


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"bits_per_byte": [2.0]}, "as many values"),
        ({"bits_per_byte": None}, "as many values"),
        ({"budgets": []}, "as many values"),
        ({"bits_per_byte": [2.0, float("nan"), 2.0]}, "finite"),
        ({"tokens_per_second": [1.0]}, "must have 3 values"),
    ],
)
def test_damaged_sweeps(changes, says):
    with pytest.raises(ValueError, match=says):
        read_sweep(SWEEP | changes)


@pytest.mark.parametrize("text, says", [("# no markers", "lacks"), ("---\n[\n---\n", "YAML"), (None, "cannot be read")])
def test_bad_templates(run, tmp_path, text, says):
    template = tmp_path / "template.md"
    if text is not None:
        template.write_text(text)
    with pytest.raises(ValueError, match=says):
        write(run / "model", template=template)


def test_card_only_needs_no_hub(run, capsys):
    assert push_run(PushArguments(run=str(run), card_only=True)) is None
    assert "wrote" in capsys.readouterr().out and (run / "model" / "README.md").exists()
    assert ModelCard.load(run / "model" / "README.md").text.strip().startswith("# run\n")
    with pytest.raises(ValueError, match="one of them"):
        push_run(PushArguments(run=str(run), card_only=True, keep_card=True))
    with pytest.raises(ValueError, match="hub_model_id is needed"):
        push_run(PushArguments(run=str(run)))
