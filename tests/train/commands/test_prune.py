# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm-prune from end to end: ratios, limits, what is left in the folder, and what it refuses."""

import errno
import json
import random
import shutil
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM

from essm_train.baselines.config import BaselineConfig
from essm_train.baselines.models import BaselineForCausalLM
from essm_train.data.tokens import ByteEncoder
from essm_train.measure.evaluation import open_text
from essm_train.measure.pruning import PruningCurve
from essm_train.publish import pruned as prune
from essm_train.publish.arguments import PruneArguments
from modeling_essm import build_byte_tokenizer
from modeling_essm.companions import DiagonalSSMConfig, DiagonalSSMForCausalLM
from modeling_essm.companions.pruning.plans import Plan

SMALL = {"vocab_size": 259, "hidden_size": 8, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Held-out text and text to calibrate on."""
    folder = tmp_path_factory.mktemp("texts")
    for i, name in enumerate(("heldout.txt", "other.txt")):
        (folder / name).write_text("".join(random.Random(i).choices("abcde ", k=400)))
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A diagonal language model of 6 modes a layer, the last three of the second silent, with a byte tokenizer."""
    torch.manual_seed(0)
    model = DiagonalSSMForCausalLM(DiagonalSSMConfig(**SMALL, parameterization="lru", state_size=6))
    with torch.no_grad():
        mixer = model.model.layers[1].mixer
        for name in mixer.output_names:
            mixer.get_parameter(name).narrow(mixer.mode_dims[name], 3, 3).zero_()
    folder = tmp_path_factory.mktemp("saved") / "lru"
    model.save_pretrained(folder)
    build_byte_tokenizer(model_max_length=64).save_pretrained(folder)
    return folder


def run(saved, texts, output_dir, **changes):
    values = {"text_files": [str(texts / "heldout.txt")], "block_size": 32, "max_blocks": 4, "step": 0.25}
    prune.prune_model(PruneArguments(model=str(saved), output_dir=str(output_dir), **values | changes))
    return json.loads((output_dir / "pruning.json").read_text())


def test_at_a_ratio(saved, texts, tmp_path, capsys):
    found = run(saved, texts, tmp_path, amount=0.25)
    assert found["ratios"] == [0, 0.25, 0.5, 0.75] and found["kept"][0] == [6, 6]
    assert found["modes"] == {"before": [6, 6], "kept": [6, 3], "stored": [6, 3]}  # the silent ones go
    bits = found["bits_per_byte"]
    assert bits["after"] == pytest.approx(bits["before"], rel=1e-6) == found["values"][1]
    assert found["values"][3] != pytest.approx(bits["before"], rel=1e-6)
    assert found["parameters"]["after"] < found["parameters"]["before"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
    assert model.config.state_sizes == [6, 3] == Plan.load(tmp_path / "plan.json").sizes
    tokens = torch.arange(97, 117)[None]
    whole = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
    torch.testing.assert_close(model(tokens).logits, whole(tokens).logits, rtol=1e-5, atol=1e-6)  # fp32, another order
    card = (tmp_path / "model" / "README.md").read_text()
    assert "with 9 of its 12 modes, ranked by aire (global)" in card and "| 25.0% |" in card
    assert (tmp_path / "pruning.png").exists()
    assert not (tmp_path / "pruning_partial.json").exists()
    assert "LRU" in (shown := capsys.readouterr().out).upper() and "error bound" in shown


def test_a_model_that_is_there_is_not_replaced(saved, texts, tmp_path, monkeypatch):
    """Not even by its own pruned self where that may overwrite; a full disk leaves nothing of a new one."""
    start = shutil.copytree(saved, tmp_path / "model")
    before = {path.name: path.read_bytes() for path in start.glob("*.*")}
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=f"'{start}' is read, and '{start}' would be replaced"):
            run(start, texts, tmp_path, amount=0.25, overwrite=overwrite)
    assert {path.name: path.read_bytes() for path in start.glob("*.*")} == before
    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"No space left on device: '.*/out/model'"):
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(DiagonalSSMForCausalLM, "save_pretrained", mock.Mock(side_effect=full))
        run(start, texts, tmp_path / "out", amount=0.25)
    assert not list((tmp_path / "out").glob(".[!l]*")) and not (tmp_path / "out" / "model").exists()
    run(start, texts, tmp_path / "out", amount=0.25)
    with pytest.raises(ValueError, match=r"holds model, pruning\.json, pruning\.md, pruning\.png, plan\.json, which"):
        run(start, texts, tmp_path / "out", amount=0.5)
    assert run(start, texts, tmp_path / "out", amount=0.5, overwrite=True)["ratio"] == 0.5


def test_what_a_model_needs_beside_it_goes_along(saved, texts, tmp_path, monkeypatch):
    """Its tokenizer, and how its numbers are scaled, also where a task names the data."""
    start = shutil.copytree(saved, tmp_path / "start")
    (start / "features.json").write_text("{}")
    (start / "chat_template.jinja").write_text("{{ messages }}")
    data = open_text([str(texts / "heldout.txt")], ByteEncoder(), 32, 4)
    monkeypatch.setattr(prune, "open_task", lambda *args: data)
    monkeypatch.setattr(prune, "identity", lambda *args: {})
    run(start, texts, tmp_path / "out", amount=0.25, text_files=None, task="of.yaml")
    for name in ("tokenizer.json", "tokenizer_config.json", "features.json", "chat_template.jinja"):
        assert (tmp_path / "out" / "model" / name).read_bytes() == (start / name).read_bytes()


def test_a_ladder_stops_at_its_first_gap():
    curve = PruningCurve("accuracy", True, (0.0, 0.1, 0.2, 0.3), (0.9, 0.89, 0.7, 0.9), ((4,),) * 4)
    assert curve.largest_within(0.02) == 0.1 and curve.largest_within(0.3) == 0.3 and curve.largest_within(0.0) == 0.0
    assert curve.losses == pytest.approx((0, 0.01, 0.2, 0))


def mamba():
    sizes = {"state_size": 4, "pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258}
    return MambaForCausalLM(MambaConfig(**SMALL, **sizes))


def baseline():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    return BaselineForCausalLM(BaselineConfig(architecture="mamba2", **sizes))


@pytest.mark.parametrize("make", [mamba, baseline])
def test_mambas_with_calibration_text(make, texts, tmp_path):
    """The library's, and one that the training scripts make."""
    torch.manual_seed(0)
    make().save_pretrained(tmp_path / "mamba")
    other = [str(texts / "other.txt")]
    found = run(tmp_path / "mamba", texts, tmp_path / "out", amount=0.5, calibration_files=other, scope="uniform")
    assert found["modes"]["stored"] == [2, 2] and found["parameters"]["after"] < found["parameters"]["before"]
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert ("\nimport essm_train.baselines.models\n" in card) == (make is baseline)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert model.config.state_size == 2 and torch.isfinite(model(torch.arange(20)[None]).logits).all()
    with pytest.raises(ValueError, match="give calibration"):
        run(tmp_path / "mamba", texts, tmp_path / "without", amount=0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"amount": 0.5, "max_loss": 0.1}, "give amount or max_loss, got 0.5 and 0.1"),
        ({"amount": 1.0}, r"amount must be in \(0, 1\), got 1.0"),
        ({"amount": 0.5, "step": 0.0}, r"step must be in \[0.001, 0.5\], got 0.0"),
        ({"amount": 0.5, "method": "best"}, "method must be one of aire, .*got 'best'"),
        ({"amount": 0.5, "task": "smnist"}, "give task or text_files"),
        ({"amount": 0.5, "data_dir": "data"}, "data_dir needs task"),
        ({"amount": 0.5, "granularity": "mode_index"}, "mode_index' needs modes for every channel"),
        ({"amount": 0.5, "calibration_files": ["x.txt"]}, "calibration_files are for Mamba and Mamba-2"),
    ],
)
def test_bad_arguments(saved, texts, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run(saved, texts, tmp_path, **changes)


def test_to_a_limit(saved, texts, tmp_path, monkeypatch):
    """At the largest ratio up to which none loses more; if the first one does, nothing is pruned."""
    curve = PruningCurve("bits_per_byte", False, (0.0, 0.25, 0.5), (1.0, 1.05, 1.5), ((6, 6), (6, 3), (6, 0)))
    monkeypatch.setattr(prune, "measure_ratios", lambda *args: curve)
    with pytest.raises(ValueError, match=r"exceeded by the first step, 0\.25 of the modes, which loses 0\.05"):
        run(saved, texts, tmp_path, max_loss=0.04)
    assert not (tmp_path / "model").exists()
    found = run(saved, texts, tmp_path, max_loss=0.1)
    assert found["ratio"] == 0.25 and found["modes"]["stored"] == [6, 3]


def test_other_weights_or_texts_are_measured_anew(saved, texts, tmp_path):
    """What a run left that was cut off is of the weights and the text that it had."""
    other = texts.with_name("texts2")
    shutil.copytree(texts, other, dirs_exist_ok=True)
    (other / "heldout.txt").write_text("edcba " * 60)
    args = {"model": str(saved), "output_dir": "x", "amount": 0.5}
    one, two = (PruneArguments(**args, text_files=[str(f / "heldout.txt")]) for f in (texts, other))
    model = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
    first = prune.identity(one, model)["sha256"]
    assert prune.identity(two, model)["sha256"] != first
    of_task = PruneArguments(**args, task="novels", data_dir=str(tmp_path))
    identities = []
    for text in ("held out", "replaced"):
        for split in ("train", "validation"):
            (tmp_path / f"english_novels-{split}.parquet").write_text(text)
        identities.append(prune.identity(of_task, model)["sha256"])
    assert identities[0] != identities[1]
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    assert prune.identity(one, model)["sha256"] != first


def test_filling_is_no_calibration_text(texts):
    args = PruneArguments(model=str(texts), output_dir="x", amount=0.5, text_files=["y"], block_size=256, max_blocks=4)
    args.calibration_files = [str(texts / "other.txt")]
    (batch,) = prune.calibration(args, ByteEncoder())
    assert batch["attention_mask"].sum() == 402  # 400 bytes and <eos>, and one that both blocks have
    assert (batch["attention_mask"] == 1).equal(batch["input_ids"] != ByteEncoder().pad_id)


def test_unstable_modes_need_a_horizon_and_have_no_bound(texts, tmp_path):
    torch.manual_seed(0)
    config = DiagonalSSMConfig(**SMALL, parameterization="s5", state_size=6, clip_eigs=False)
    model = DiagonalSSMForCausalLM(config)
    with torch.no_grad():
        model.model.layers[1].mixer.Lambda[:, 0] = 0.01  # real parts above 0 grow
    model.save_pretrained(tmp_path / "s5")
    with pytest.raises(ValueError, match="horizon"):
        run(tmp_path / "s5", texts, tmp_path / "out", amount=0.25)
    run(tmp_path / "s5", texts, tmp_path / "out", amount=0.25, method="magnitude")
    found = run(tmp_path / "s5", texts, tmp_path / "far", amount=0.9, horizon=32)
    assert found["arguments"]["horizon"] == 32
    assert "| none |" in (tmp_path / "far" / "pruning.md").read_text()
