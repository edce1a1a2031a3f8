# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""hub_configs/release.py: a run becomes a folder that loads from a clone, and says of itself what is true of it."""

import json
import re

import pytest
import release
import torch
from helpers import random_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_essm import ESSMForCausalLM, build_byte_tokenizer
from modeling_essm.budgets import curve


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run, and a held-out text."""
    folder = tmp_path_factory.mktemp("release")
    random_model(num_spectral_channels=4, filter_length=128, trained_budgets=[1, 2, 3, 4]).save_pretrained(
        folder / "run" / "model"
    )
    build_byte_tokenizer(128).save_pretrained(folder / "run" / "model")
    (folder / "run" / "training.json").write_text("{}")
    (folder / "held_out.txt").write_text("It was the age of wisdom, it was the age of foolishness. " * 20)
    return folder


def arguments(run, **changes):
    given = {"run_dir": str(run / "run"), "name": "released", "text_files": [str(run / "held_out.txt")]}
    quick = {"text": "A test.", "prompts": ["It was"], "block_size": 64, "max_blocks": 4, "rounds": 1}
    return release.ReleaseArguments(**given | quick | changes)


@pytest.fixture(scope="module")
def released(run):
    """As where no budget saves time: whether one is worse than another then decides the sweet spot."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curve, "saves_time", lambda *_: False)
        return release.release(arguments(run), run)


def test_it_is_the_model_of_the_run_in_bf16(run, released):
    model = AutoModelForCausalLM.from_pretrained(released, trust_remote_code=True)
    assert model.dtype == torch.bfloat16 and [path.name for path in released.glob("*.py")] == ["essm.py"]
    trained = ESSMForCausalLM.from_pretrained(run / "run" / "model").state_dict()
    assert all(torch.equal(value, trained[name].bfloat16()) for name, value in model.state_dict().items())
    assert len(AutoTokenizer.from_pretrained(released)("It was").input_ids) == 6
    assert json.loads((released / "config.json").read_text())["auto_map"]["AutoConfig"] == "essm.ESSMConfig"
    with pytest.raises(ValueError, match="released is there already: give another name"):
        release.release(arguments(run), run)
    (run / "run" / "training.json").rename(run / "gone.json")
    with pytest.raises(ValueError, match="has not ended"):
        release.release(arguments(run, name="other"), run)
    assert not (run / "other").exists()


def test_its_card_says_what_was_measured_of_it(released):
    card = (released / "README.md").read_text()
    sweep = json.loads((released / "budget_sweep.json").read_text())
    sizes = dict(re.findall(r"^\| bf16 \| (\d) \| [\d.]+ \| ([\d.]+) \|$", card, re.M))
    assert sizes == {str(K): f"{value:.4f}" for K, value in zip(sweep["budgets"], sweep["bits_per_byte"]) if K != 3}
    presets = json.loads((released / "config.json").read_text())["budget_presets"]
    marked = int(re.search(r"^\| (\d) \|.*sweet spot", card, re.M)[1])
    assert presets["medium"] == sweep["sweet_spot"] == marked and f"`medium` ({marked})" in card
    assert json.loads((released / "budget_profile.json").read_text())["quality"]["budgets"] == sweep["budgets"]
    assert "fp32" in sweep["hardware"] and f"without a cache on {sweep['hardware']}" in card
    assert f'folder = "{released.parent.name}/released"' in card and 'tokenizer("It was"' in card
    assert "A test." in card and "model_info" not in card and "budget_profile.json" in card
    assert re.findall(r"^- K = (\d): \*\*It was\*\*", card, re.M) == ["1", "2", "4"]
