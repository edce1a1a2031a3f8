# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""hub_configs/release.py: a run becomes a folder that loads from a clone, and says of itself what is true of it."""

import json
import re

import pytest
import release
import torch
from training_run import train
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_essm import ESSMForCausalLM

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_spectral_channels": 4, "filter_length": 128, "block_size": 64}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three updates on a text, and its held-out end."""
    folder = tmp_path_factory.mktemp("release")
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times. " * 200)
    (folder / "held_out.txt").write_text("It was the age of wisdom, it was the age of foolishness. " * 20)
    arguments = [f"--{name}={value}" for name, value in SIZES.items()]
    arguments += ["--max_steps=4", "--eval_steps=2", "--warmup_steps=1", "--validation_blocks=2", "--sweep_blocks=2"]
    arguments += [f"--train_file={folder / 'text.txt'}", f"--output_dir={folder / 'run'}", "--cpu_threads=1"]
    train(arguments)
    return folder


@pytest.fixture(scope="module")
def released(run):
    args = release.ReleaseArguments(
        str(run / "run"),
        "released",
        [str(run / "held_out.txt")],
        text="A test.",
        peers=[str(run / "run")],
        prompts=["It was"],
        block_size=64,
        max_blocks=4,
        rounds=1,
    )
    return release.release(args, run)


def test_it_is_the_model_of_the_run_in_bf16(run, released):
    model = AutoModelForCausalLM.from_pretrained(released, trust_remote_code=True)
    assert model.dtype == torch.bfloat16 and sorted(path.name for path in released.glob("*.py")) == []
    trained = ESSMForCausalLM.from_pretrained(run / "run" / "model").state_dict()
    assert all(torch.equal(value, trained[name].bfloat16()) for name, value in model.state_dict().items())
    assert len(AutoTokenizer.from_pretrained(released)("It was").input_ids) == 6
    assert json.loads((released / "config.json").read_text())["auto_map"]["AutoConfig"].startswith(f"{release.CODE}/")
    assert (released / release.CODE).resolve() == release.PACKAGE


def test_its_card_says_what_was_measured_of_it(released):
    card = (released / "README.md").read_text()
    sweep = json.loads((released / "budget_sweep.json").read_text())
    assert "A test." in card and (released / "peers.png").stat().st_size > 1000
    sizes = dict(re.findall(r"^\| bf16 \| (\d) \| [\d.]+ \| ([\d.]+) \|$", card, re.M))
    assert sizes == {str(K): f"{value:.4f}" for K, value in zip(sweep["budgets"], sweep["bits_per_byte"]) if K != 3}
    presets = json.loads((released / "config.json").read_text())["budget_presets"]
    marked = int(re.search(r"^\| (\d) \|.*sweet spot", card, re.M)[1])
    assert presets["sweet-spot"] == sweep["sweet_spot"] == marked and f"`sweet-spot` ({marked})" in card
    assert json.loads((released / "budget_profile.json").read_text())["quality"]["budgets"] == sweep["budgets"]
    assert "fp32" in sweep["hardware"] and f"without a cache on {sweep['hardware']}" in card
    assert f'folder = "{released.parent.name}/released"' in card and 'tokenizer("It was"' in card
    assert "model_info" not in card and "budget_profile.json" in card
    samples = re.findall(r"^- K = (\d): \*\*It was\*\*", card, re.M)
    assert samples == ["2", "4"]


def test_a_run_that_has_not_ended_is_refused(run, tmp_path):
    (tmp_path / "model").symlink_to(run / "run" / "model")
    args = release.ReleaseArguments(str(tmp_path), "released", [str(run / "held_out.txt")])
    with pytest.raises(ValueError, match="has not ended"):
        release.release(args, tmp_path)
    assert not (tmp_path / "released").exists()
