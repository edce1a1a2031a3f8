# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Pairs of documents: the formula of the head, budgets, bad calls, folders of today and before, also without code."""

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import BLOCK, assert_close, pad, random_ids, random_model, variants
from transformers import AutoConfig, AutoModelForSequenceClassification

from modeling_essm import ESSMForPairClassification, ESSMModel, ESSMPairConfig

IDS, LABELS = random_ids(3, 2, 21), torch.tensor([1, 0, 1])
AUTO_MAP = {
    "AutoConfig": "pair_essm.ESSMPairConfig",
    "AutoModelForSequenceClassification": "pair_essm.ESSMForPairClassification",
}


def pairs(**fields) -> ESSMForPairClassification:
    return random_model(ESSMForPairClassification, **{"head_hidden_size": 24} | fields)


@torch.no_grad()
@variants
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_logits_are_those_of_the_formula(variant, pooling):
    model = pairs(classifier_pooling=pooling, **variant)
    lengths = [21, 5, 9, 21, 13, 20]
    ids, mask = pad(IDS.flatten(0, 1), lengths, "right")
    outputs = model(ids.view(3, 2, 21), mask.view(3, 2, 21), labels=LABELS, spectral_budget=5)
    for row in range(3):
        a, b = (
            model.model(IDS[row, i, : lengths[2 * row + i]][None], spectral_budget=5).last_hidden_state for i in (0, 1)
        )
        a, b = (a.mean(1), b.mean(1)) if pooling == "mean" else (a[:, -1], b[:, -1])
        hidden = torch.nn.functional.gelu(model.head(torch.cat([a, b, a * b, a - b], -1)))
        assert_close(outputs.logits[row : row + 1], model.score(hidden))  # alone, without padding
    assert outputs.loss == torch.nn.functional.cross_entropy(outputs.logits, LABELS)
    assert outputs.spectral_budget == (5, 5)


@torch.no_grad()
def test_budgets_of_calls_and_of_pairs(tmp_path):
    model = pairs()
    budgets = torch.tensor([2, 5, 32])
    rows = model(IDS, spectral_budget=budgets)
    assert torch.equal(rows.spectral_budget, budgets)
    for row, K in enumerate(budgets.tolist()):
        assert_close(rows.logits[row], model(IDS, spectral_budget=K).logits[row])
    assert not torch.equal(rows.logits[0], model(IDS).logits[0])
    layers = model(IDS, spectral_budget=[5, 2])
    assert layers.spectral_budget == (5, 2) and not torch.equal(layers.logits, model(IDS, spectral_budget=5).logits)
    model.config.budget_presets = {"small": 3}
    assert torch.equal(model(IDS, spectral_budget="small").logits, model(IDS, spectral_budget=3).logits)
    model.save_pretrained(tmp_path)
    default = AutoModelForSequenceClassification.from_pretrained(tmp_path, spectral_budget=3)
    assert torch.equal(default(IDS).logits, model(IDS, spectral_budget=3).logits)


def test_gradients_reach_every_parameter():
    model = pairs().train()
    model(IDS, labels=LABELS).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


BAD_CALLS = {
    "one document": ({"input_ids": IDS[:, 0]}, ValueError, r"shape \(B, 2, L\), .* got \(3, 21\)"),
    "three documents": ({"input_ids": random_ids(2, 3, 5)}, ValueError, r"shape \(B, 2, L\), .* got \(2, 3, 5\)"),
    "mask": ({"attention_mask": torch.ones(3, 21)}, ValueError, r"attention_mask must be \(3, 2, 21\), got \(3, 21\)"),
    "ids": ({"input_ids": IDS + 250}, ValueError, r"input_ids must be in \[0, 258\], got values from 251"),
    "budget": ({"spectral_budget": 33}, ValueError, r"\[1, 32\]"),
    "budgets": ({"spectral_budget": torch.tensor([2] * 6)}, ValueError, "3"),
    "misspelt": ({"budget": 2}, TypeError, "unknown argument 'budget'"),
    "packed": ({"position_ids": torch.arange(21)[None]}, ValueError, "packed sequences have no place"),
}


@pytest.mark.parametrize("changes, error, message", BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls(changes, error, message):
    with pytest.raises(error, match=message):
        pairs()(**{"input_ids": IDS} | changes)


def test_bad_fields(tmp_path):
    for value in (0, 2.0, 2**25):
        with pytest.raises(ValueError, match=r"head_hidden_size must be None or an integer in \[1, 16777216\], got"):
            ESSMPairConfig(head_hidden_size=value)
    with pytest.raises(ValueError, match="reads token ids: num_input_features must be None, got 3"):
        pairs(num_input_features=3)
    config = ESSMPairConfig(hidden_size=12)
    assert config.head_hidden_size == 12
    config.head_hidden_size = -1
    with pytest.raises(ValueError, match="head_hidden_size"):
        config.save_pretrained(tmp_path)


@torch.no_grad()
def test_folders_load_by_auto_classes(tmp_path):
    model = pairs(num_labels=3)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["auto_map"] == AUTO_MAP and saved["architectures"] == ["ESSMForPairClassification"]
    assert (saved["model_type"], saved["head_hidden_size"]) == ("essm_two_tower", 24)
    assert type(AutoConfig.from_pretrained(tmp_path)) is ESSMPairConfig
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(loaded) is ESSMForPairClassification
    assert torch.equal(loaded(IDS, spectral_budget=3).logits, model(IDS, spectral_budget=3).logits)
    encoder = ESSMModel.from_pretrained(tmp_path)
    assert torch.equal(encoder(IDS[0]).last_hidden_state, model.model(IDS[0]).last_hidden_state)


@torch.no_grad()
def test_a_folder_of_before_loads(tmp_path):
    """When the class was TwoTowerClassifier of the training library, folders had neither code nor an auto_map."""
    model = pairs()
    model.save_pretrained(tmp_path)
    for path in tmp_path.glob("*.py"):
        path.unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    del config["auto_map"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["TwoTowerClassifier"]}))
    for load in (ESSMForPairClassification, AutoModelForSequenceClassification):
        loaded = load.from_pretrained(tmp_path)
        assert type(loaded) is ESSMForPairClassification
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    loaded.save_pretrained(tmp_path)  # and becomes one of today
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert (tmp_path / "pair_essm.py").is_file()


@torch.no_grad()
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantised_weights(name, tmp_path):
    pytest.importorskip("torchao")
    large = pairs(hidden_size=64)
    large.save_pretrained(tmp_path / "full")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "full", quantization_config=name)
    assert model.get_memory_footprint() < 0.5 * large.get_memory_footprint()
    logits, expected = (m(IDS, spectral_budget=4).logits for m in (model, large))
    assert (logits - expected).norm() < (0.05 if name == "int8" else 0.3) * expected.norm()
    model.save_pretrained(tmp_path / "small")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "small")
    assert torch.equal(again(IDS, spectral_budget=4).logits, logits)
    prefix = AutoModelForSequenceClassification.from_pretrained(tmp_path / "small", spectral_capacity=4)
    assert_close(prefix(IDS).logits, logits)


LOAD = """
import sys, torch
from transformers import AutoConfig, AutoModelForSequenceClassification
torch.set_num_threads(1)
folder, remote = sys.argv[1], {"trust_remote_code": True}
ids, expected, smaller = torch.load(sys.argv[2])
for source in (folder, "again"):
    config = AutoConfig.from_pretrained(source, **remote)
    model = AutoModelForSequenceClassification.from_pretrained(source, **remote)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    assert type(config).__name__ == "ESSMPairConfig" and type(config) is type(model.config)
    prefix = AutoModelForSequenceClassification.from_pretrained(source, **remote, spectral_capacity=5)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)
        assert torch.equal(prefix(ids).logits, smaller)
    made = AutoModelForSequenceClassification.from_config(config, **remote)
    assert made(ids).logits.shape == expected.shape
    model.save_pretrained("again")
print("loaded", type(model).__name__)
"""


@pytest.mark.parametrize("route", ["path", "hub"])
@pytest.mark.sampled(1)
def test_folders_load_without_the_package(route, tmp_path):
    model, home = pairs(num_labels=3), tmp_path / "hf_home"
    folder = tmp_path / "saved"
    if route == "hub":  # as a download would leave it
        repository = home / "hub" / "models--essm-tests--pairs"
        folder = repository / "snapshots" / ("01" * 20)
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("01" * 20)
    model.save_pretrained(folder)
    with torch.no_grad():
        torch.save((IDS, model(IDS).logits, model(IDS, spectral_budget=5).logits), tmp_path / "expected.pt")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "PYTHON", "TRANSFORMERS_"))}
    env |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    source = "essm-tests/pairs" if route == "hub" else str(folder)
    command = [sys.executable, "-I", "-c", BLOCK + LOAD, source, str(tmp_path / "expected.pt")]
    child = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-4000:]
    assert "loaded ESSMForPairClassification" in child.stdout
