# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm-train-clm: whole runs on bytes, tokens and weights that exist, and errors before any work.

How a run trains, stops, breaks and resumes is tested in tests/train/run.
"""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from training_run import (
    NO_SIZES,
    bpe_tokenizer,
    command_line,
    documents,
    read_log,
    train,
    write_held_out,
    write_text,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from essm_train.arguments import parse_arguments
from essm_train.data.arguments import CLMArguments
from essm_train.run import loop
from essm_train.run.checkpoints import list_checkpoints
from essm_train.run.language import build_model, make_encoder, show_samples
from essm_train.sweep import SweepArguments
from essm_train.sweep import main as sweep_main
from modeling_essm import ESSMConfig, ESSMForCausalLM


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("data")
    return {"train_file": write_text(folder), "validation_file": write_held_out(folder)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data) -> Path:
    """The folder of a whole run."""
    output_dir = tmp_path_factory.mktemp("finished")
    train(command_line(output_dir, **data), whole=True)
    return output_dir


def test_a_run_leaves_a_model_its_card_and_a_sweep(finished):
    names = {path.name for path in (finished / "model").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "modeling_essm.py"} <= names
    assert "README.md" in names and not list(finished.glob(".tmp-*"))
    assert AutoConfig.from_pretrained(finished / "model").trained_budgets == [1, 2, 3, 4, 6, 8]
    sweep = json.loads((finished / "budget_sweep.json").read_text())
    assert sweep["budgets"] == [1, 2, 3, 4, 6, 8] and sweep["sweet_spot"] in sweep["budgets"]
    assert all(0 < bits < 8.1 for bits in sweep["bits_per_byte"])
    assert (finished / "budget_sweep.png").read_bytes().startswith(b"\x89PNG")
    training = json.loads((finished / "training.json").read_text())
    assert (training["updates"], training["samples_per_update"], training["tokens_per_update"]) == (8, 2, 64)
    assert training["script"] == "essm-train-clm" and training["arguments"]["learning_rate"] == 0.005


def test_validation_measures_what_the_sweep_measures(finished):
    """Both see two held-out blocks, and the sweep the model that was saved: that of the last validation."""
    sweep = json.loads((finished / "budget_sweep.json").read_text())
    last = read_log(finished)[-1]
    for K, bits in zip(sweep["budgets"], sweep["bits_per_byte"]):
        if K in (1, 4, 8):
            assert last[f"validation bits/byte K={K}"] == pytest.approx(bits, rel=1e-5)


def test_best_and_model_load_with_remote_code(finished):
    for name in ("best", "model"):
        model = AutoModelForCausalLM.from_pretrained(finished / name, trust_remote_code=True)
        tokenizer = AutoTokenizer.from_pretrained(finished / name, trust_remote_code=True)
        ids = tokenizer("abc", return_tensors="pt").input_ids
        assert model.generate(ids, spectral_budget=2, min_new_tokens=3, max_new_tokens=3).shape == (1, 6)
        assert tokenizer.model_max_length == 512


def test_a_finished_run_is_measured_but_not_trained_again(finished, data, capsys, monkeypatch):
    monkeypatch.setattr(loop, "update", None)  # which an update would call
    checkpoints = list_checkpoints(finished)
    (finished / "budget_sweep.json").unlink()
    card = finished / "model" / "README.md"
    edited = card.read_text() + "\nTrained for my aunt.\n"
    card.write_text(edited)
    train(command_line(finished, **data), whole=True)
    assert card.read_text() == edited
    out = capsys.readouterr().out
    assert "finished already" in out and "validation" not in out
    shown, *samples = re.split(r"--- sample at K=[248] ---\n", out.split("--- prompt ---\n")[1])
    prompt = shown.rstrip("\n")
    assert len(samples) == 3 and len(prompt) > 20 and not any(prompt in text for text in samples)
    assert (finished / "budget_sweep.json").exists() and list_checkpoints(finished) == checkpoints


def test_a_tokenizer_replaces_bytes(data, tmp_path, monkeypatch, capsys):
    """A bare file, which does not say which token ends a text."""
    tokenizer = bpe_tokenizer(documents())
    tokenizer.backend_tokenizer.save(str(tmp_path / "bpe.json"))
    changes = {"tokenizer_name": tmp_path / "bpe.json", "num_spectral_channels": 4, "max_steps": 1}
    train(command_line(tmp_path / "run", **data, **changes, learning_rate=1e-9, ema_decay=0))
    model = tmp_path / "run" / "model"
    config = AutoConfig.from_pretrained(model)
    assert config.vocab_size == len(tokenizer) and config.eos_token_id == tokenizer.eos_token_id
    assert config.pad_token_id == tokenizer.eos_token_id and config.bos_token_id is None
    saved = AutoTokenizer.from_pretrained(model)
    assert saved("abc dach").input_ids == tokenizer("abc dach").input_ids
    # An untrained model is uniform but for a few percent: log2(V) bits per token, and a token stands for several bytes.
    text = Path(data["validation_file"]).read_text()
    bits = math.log2(len(tokenizer)) * len(tokenizer(text).input_ids) / len(text)
    assert bits < 0.75 * math.log2(len(tokenizer))  # so that bits per token would not pass
    assert read_log(tmp_path / "run")[0]["validation bits/byte K=1"] == pytest.approx(bits, rel=0.05)
    args = parse_arguments(CLMArguments, command_line(tmp_path / "run", **data, **changes))

    def generate(self, input_ids, attention_mask, spectral_budget, max_new_tokens, do_sample, temperature):
        return input_ids.repeat(1, 2)

    monkeypatch.setattr(ESSMForCausalLM, "generate", generate)
    prompt, continued = (
        tokenizer("abc dach").input_ids,
        r"--- prompt ---\nabc dach\n(--- sample at K=[24] ---\nabc dach\n){2}",
    )
    path = model / "tokenizer_config.json"  # as BERT's, which has what no model here takes
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | names))
    show_samples(args, ESSMForCausalLM.from_pretrained(model), torch.tensor(prompt))
    assert re.search(continued, capsys.readouterr().out)
    show_samples(args, ESSMForCausalLM.from_pretrained(model), torch.tensor([tokenizer.eos_token_id]))
    assert "sample" not in capsys.readouterr().out  # there is nothing to go on from
    given = {"model": str(model), "text_files": [data["validation_file"]], "output_dir": str(tmp_path / "again")}
    sweep_main(SweepArguments(**given, budgets=[4]))
    again = json.loads((tmp_path / "again" / "budget_sweep.json").read_text())
    assert again["bits_per_byte"] == pytest.approx([bits], rel=0.05)
    assert again["model"] == model.name and again["data"].startswith(Path(data["validation_file"]).name)


def test_weights_of_another_vocabulary_are_refused(data, tmp_path):
    bpe_tokenizer(documents()).save_pretrained(tmp_path / "tokenizer")
    needed = len(AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))

    def build(vocab_size: int, **changes):
        config = ESSMConfig(vocab_size=vocab_size, hidden_size=8, num_hidden_layers=1, pad_token_id=0)
        ESSMForCausalLM(config).save_pretrained(tmp_path / "model")
        line = command_line(tmp_path / "run", **data, **NO_SIZES, **changes, model_name_or_path=tmp_path / "model")
        args = parse_arguments(CLMArguments, line)
        return build_model(args, make_encoder(args))

    own = {"tokenizer_name": tmp_path / "tokenizer"}
    with pytest.raises(ValueError, match=f"must be at least {needed} for .*tokenizer, got {needed - 1}: give the"):
        build(needed - 1, **own)
    assert build(needed + 7, **own).config.vocab_size == needed + 7  # room to spare
    with pytest.raises(ValueError, match=r"vocab_size of .*model' must be 259 for bytes, got 300"):
        build(300)
    with pytest.raises(ValueError, match=r"block_size must be in \[2, filter_length = 4096\], got 4097"):
        build(259, block_size=4097)


def test_weights_are_trained_on_with_their_own_tokenizer(data, tmp_path):
    """Without a word; with another one only if that is said, and then the model ends its texts as that one does."""
    tokenizer = bpe_tokenizer(documents())
    config = ESSMConfig(vocab_size=320, hidden_size=8, num_hidden_layers=1, pad_token_id=0, eos_token_id=299)
    ESSMForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    changes = NO_SIZES | {"model_name_or_path": tmp_path / "model", "max_steps": 1}
    train(command_line(tmp_path / "run", **data, **changes))
    saved = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert saved.get_vocab() == tokenizer.get_vocab()
    assert "tokens of" in json.loads((tmp_path / "run" / "training.json").read_text())["data"]
    other = bpe_tokenizer(["xyz" * 50])
    other.save_pretrained(tmp_path / "other")
    line = command_line(tmp_path / "run", **data, **changes, tokenizer_name=tmp_path / "other")
    with pytest.raises(ValueError, match=r"tokenizer_name must be the tokenizer of .*model'.* --replace_tokenizer"):
        train(line)
    args = parse_arguments(CLMArguments, [*line, "--replace_tokenizer"])
    model = build_model(args, make_encoder(args))
    assert (model.config.vocab_size, model.config.eos_token_id) == (320, other.eos_token_id)
    assert model.generation_config.eos_token_id == other.eos_token_id != 299
    small = ESSMConfig(vocab_size=200, hidden_size=8, num_hidden_layers=1, pad_token_id=0, eos_token_id=199)
    ESSMForCausalLM(small).save_pretrained(tmp_path / "model")
    model = build_model(args, make_encoder(args))
    assert model.config.vocab_size == len(other) == len(model.lm_head.weight) > 200
    with pytest.raises(ValueError, match="replace_tokenizer needs tokenizer_name and model_name_or_path"):
        parse_arguments(CLMArguments, ["--replace_tokenizer", "--tokenizer_name", "x"])


def test_nothing_is_deleted_by_arguments_that_cannot_work(finished, data):
    before = sorted(path.name for path in finished.iterdir())
    unfit = {"lr_scheduler_type": "polynomial", "learning_rate": 1e-8}  # which the library refuses
    wrong = {"99": {"eval_budgets": [99]}, "MISSING": {"train_file": "MISSING"}, "block_size": {"block_size": 1}}
    for said, changes in (wrong | {"lr_end": unfit}).items():
        with pytest.raises(ValueError, match=said):
            train([*command_line(finished, **data | changes), "--overwrite_output_dir"])
    assert sorted(path.name for path in finished.iterdir()) == before


def test_a_hub_or_a_tracker_that_cannot_be_reached_ends_a_run_before_anything_is_deleted(finished, data, monkeypatch):
    def refuse(*names, private=True):
        raise PermissionError(f"no token for {names}, private={private}")

    before = sorted(path.name for path in finished.iterdir())
    order = [*command_line(finished, **data, hub_model_id="me/mine"), "--overwrite_output_dir", "--push_to_hub"]
    order.append("--hub_private_repo")
    monkeypatch.setattr(loop, "check_can_push", refuse)
    with pytest.raises(ValueError, match="cannot read MISSING"):  # before a repository is made
        train([*order, "--train_file", "MISSING"])
    with pytest.raises(PermissionError, match=r"no token .*me/mine.*private=True"):
        train(order)
    monkeypatch.setattr("accelerate.Accelerator.init_trackers", refuse)
    with pytest.raises(PermissionError, match=r"no token .*essm"):
        train(order[:-1])
    assert sorted(path.name for path in finished.iterdir()) == before
