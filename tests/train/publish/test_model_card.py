# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The card of a model."""

import json
from pathlib import Path

import pytest
from helpers import random_model
from huggingface_hub import EvalResult, ModelCard
from transformers import AutoModelForCausalLM

from essm_train.measure.budget_sweep import read_sweep
from essm_train.publish.model_card import SECTIONS, write_model_card
from modeling_essm import ESSMForSequenceClassification


def write(run: Path, **options) -> str:
    names = {"sweep": "budget_sweep.json", "training": "training.json"}
    records = {name: json.loads((run / file).read_text()) for name, file in names.items() if name not in options}
    options = {"hub_model_id": "org/elastic", "template": None} | records | options
    return write_model_card(run / "model", **options).read_text()


@pytest.fixture
def sweep(run) -> dict:
    return json.loads((run / "budget_sweep.json").read_text())


def test_card_of_a_language_model(run, sweep):
    text, model = write(run), AutoModelForCausalLM.from_pretrained(run / "model")
    read = {K: f"{model.num_active_parameters(K):,}" for K in sweep["budgets"]}
    assert len({*read.values()}) == 3
    card = ModelCard(text)
    assert card.data.license is None and card.data.library_name == "transformers"
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
        for K, value in zip(sweep["budgets"], sweep["bits_per_byte"])
    ]
    for row in (
        "| K | parameters read | bits per byte | against K = 32 | tokens/s |  |",
        f"| 2 | {read[2]} | 2.7500 | +10.0% | 9,000 |  |",
        f"| 8 | {read[8]} | 2.5500 | +2.0% | 5,000 | sweet spot |",
        "| data | A \\| tiny corpus |",
        "| tokens in all | 1,228,800 |",
    ):
        assert row in text
    assert "saves no time" not in text
    timings = [{"2": [1.0, 0.9], "8": [2.0, 1.0], "32": [2.0, 1.9]}]
    timed = write(run, sweep=sweep | {"timings": timings})
    assert f"| 32 | {read[32]} | 2.5000 | +0.0% | 2,000 | sweet spot |" in timed and "saves no time" not in timed
    assert "A smaller budget saves no time here" in write(run, sweep=sweep | {"timings": [timings[0] | {"2": [2, 1]}]})
    assert f"| parameters | {read[32]} |" in text
    assert "![bits per byte against the spectral budget](budget_sweep.png)" in text
    assert (run / "model" / "budget_sweep.png").read_bytes() == (run / "budget_sweep.png").read_bytes()
    assert "revision=revision, trust_remote_code=True" in text and "not supported" in text and "ollapse" not in text
    assert "somebody" not in text and "hf_secret" not in text
    assert 'train_file: ["book.txt"]' in text and "learning_rate: 0.005" in text
    assert text == write(run)
    text = write(run, sweep=sweep | {"bits_per_byte": [3.0, 2.7, 2.5]})
    assert "Collapse boundary:" in text and f"| 8 | {read[8]} | 2.7000 | +8.0% | 5,000 | collapse boundary |" in text
    training = json.loads((run / "training.json").read_text())
    best = training | {"best_update": 3, "arguments": training["arguments"] | {"load_best_model_at_end": True}}
    assert "| weights | those after update 3, the best validation |" in write(run, training=best)
    assert "the best validation" not in text
    text = write(run, sweep=None, training=None)
    assert "Not measured" in text and "| data | not stated |" in text and ModelCard(text).data.eval_results is None


def test_card_of_a_calibrated_model(run):
    """Presets and the profile are told of where they are, and nowhere else."""

    def loading() -> str:
        return " ".join(write(run).split("## How to load it")[1].split("\n## ")[0].split())

    assert "spectral_capacity=" in loading() and "medium" not in loading() and "choose_budget" not in loading()
    path = run / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"budget_presets": {"medium": 3, "full": 8}}))
    (run / "model" / "budget_profile.json").write_text("{}")
    assert "the names `medium` (3), `full` (8)." in loading() and "budgets.choose_budget(model, max_" in loading()


def test_card_of_a_classifier(run):
    random_model(ESSMForSequenceClassification, num_labels=3).save_pretrained(run / "model")
    sweep = {
        "budgets": [4, 32],
        "metric": {"name": "accuracy", "higher_is_better": True},
        "values": [0.5, 0.625],
        "split": "test",
        "samples": 1655,
    }
    training = {"arguments": {"dataset_name": "stanfordnlp/imdb"}, "samples_per_update": 16, "updates": 10}
    text = write(run, sweep=sweep, training=training, hub_model_id=None)
    card = ModelCard(text)
    assert card.data.pipeline_tag == "text-classification" and card.data.datasets == ["stanfordnlp/imdb"]
    assert [result.metric_value for result in card.data.eval_results] == [0.5, 0.625]
    assert card.data.eval_results[0].dataset_type == "stanfordnlp/imdb"
    assert card.data.eval_results[1].dataset_split == "test" and "on 1,655 samples of the test data" in text
    assert " | 0.6250 | +0.0% |  | sweet spot, collapse boundary |" in text and "higher is better" in text
    (run / "model" / "features.json").write_text('{"multiplier": 0.5, "offset": -1.0, "max_length": 9}')
    random_model(ESSMForSequenceClassification, num_input_features=3).save_pretrained(run / "model")
    numbers = write(run, sweep=sweep, training=training, hub_model_id=None)
    assert "| 0.5 x -1 |" in numbers and "0.5 * torch.zeros(1, 512, 3) + -1.0}" in numbers
    assert "| samples in all | 160 |" in text and 'repository = "org/name"' in text and "AutoModelForSeq" in text


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"bits_per_byte": [2.0]}, "as many values"),
        ({"bits_per_byte": None}, "as many values"),
        ({"budgets": []}, "as many values"),
        ({"bits_per_byte": [2.0, float("nan"), 2.0]}, "finite"),
        ({"tokens_per_second": [1.0]}, "as many speeds"),
    ],
)
def test_damaged_sweeps(sweep, changes, says):
    with pytest.raises(ValueError, match=says):
        read_sweep(sweep | changes)


def test_a_users_card_keeps_its_head(run, tmp_path):
    template = tmp_path / "template.md"
    for text, says in (("# no markers", "lacks"), ("---\n[\n---\n", "YAML")):
        template.write_text(text)
        with pytest.raises(ValueError, match=says):
            write(run, template=template)
    template.write_text("---\nlicense: mit\nmine: [1]\n---\n{{ x }}" + "".join(f"<!-- {name} -->" for name in SECTIONS))
    card = ModelCard(write(run, template=template))
    assert "{{ x }}## Model" in card.text and card.data.license == "mit" and card.data.to_dict()["mine"] == [1]
