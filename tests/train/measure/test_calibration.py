# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""modeling_essm/budgets: profiles made by hand; train/calibrate.py from end to end. No time is asserted."""

import contextlib
import copy
import io
import json
import math
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import VARIANTS, captured_warnings, random_ids, random_model, truncate
from huggingface_hub import constants
from training_run import bpe_tokenizer, documents
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from essm_train.commands import calibrate
from essm_train.data.blocks import evaluation_blocks, text_labels, to_stream
from essm_train.data.documents import read_files
from essm_train.data.tokens import ByteEncoder
from essm_train.measure import calibration, evaluation
from essm_train.measure.budget_sweep import BudgetSweep, sweep_budgets
from essm_train.measure.calibration import HeldOut, measure_quality
from essm_train.measure.metric import BITS_PER_BYTE, Metric
from essm_train.models import read_saved_config
from modeling_essm import ESSMForCausalLM, ESSMForSequenceClassification, ESSMModel
from modeling_essm.budgets import budget_profile, choose_budget, profile_file, read_profile
from modeling_essm.budgets import profile as profile_module
from modeling_essm.budgets.fingerprint import Fingerprint, fingerprint
from modeling_essm.budgets.profile import BudgetProfile, DeviceProfile, Measurement, Quality, device_name
from modeling_essm.loading_essm import PROFILE_NAME

BUDGETS = (2, 4, 8, 16, 32)
HERE, THERE = "this machine", "another machine"


def quality(values, budgets=BUDGETS, higher=False) -> Quality:
    zeros = (0.0,) * len(budgets)
    metric = "accuracy" if higher else "bits_per_byte"
    return Quality(metric, higher, "words", 9, 64, "2026-01-01", "float32", budgets, tuple(values), zeros, zeros)


def device(name, decode=None, prefill=(10.0, 11.0, 12.0, 14.0, 20.0), sizes=(1,)) -> DeviceProfile:
    """Median times per budget, one tenth below and above; twice as long for each further batch size."""
    rows = []
    for phase, times in (("prefill", prefill), ("decode", decode)):
        for i, size in enumerate(sizes if times else ()):
            for K, ms in zip(BUDGETS, times):
                ms *= 2**i
                rows.append(Measurement(phase, size, K, ms, 0.9 * ms, 1.1 * ms, 1e3 * size / ms, 100 + K, K))
    return DeviceProfile(name, "2026-01-02", "float32", 1, {"torch": "2"}, 64, 3, 1000, tuple(rows))


def profile(values=(2.4, 2.1, 2.03, 2.01, 2.0), higher=False, **devices) -> BudgetProfile:
    """Loses 20%, 5%, 1.5%, 0.5% and 0; on HERE a token takes 1, 1.5, 2, 3 and 5 ms, twice that at batch size 4."""
    entries = devices or {HERE: device(HERE, (1.0, 1.5, 2.0, 3.0, 5.0), sizes=(1, 4))}
    samples = {"the norms": (1.0, 0.5, -0.25), "the embedding": (0.1,)}
    return BudgetProfile(Fingerprint(16, (32, 32), samples), quality(values, higher=higher), entries)


@pytest.fixture(autouse=True)
def named_machine(monkeypatch):
    """The tests run HERE."""
    monkeypatch.setattr(profile_module, "device_name", lambda device=None: HERE)
    monkeypatch.setattr(calibration, "device_name", lambda device=None: HERE)


# ---------------------------------------------------------------------------------------------------------------------
# Choosing.


@pytest.mark.parametrize(
    "limits, budget",
    [
        ({"max_quality_drop": 0}, 32),
        ({"max_quality_drop": 0.01}, 16),
        ({"max_quality_drop": 0.05}, 4),  # exactly 5%
        ({"max_quality_drop": 0.0499}, 8),
        ({"max_quality_drop": 5}, 2),
        ({"max_latency_ms": 5.0}, 32),
        ({"max_latency_ms": 4.99}, 16),
        ({"max_latency_ms": 1}, 2),
        ({"max_latency_ms": 5.0, "batch_size": 4}, 8),
        ({"max_latency_ms": 12, "phase": "prefill"}, 8),
        ({"max_latency_ms": 3.0, "max_quality_drop": 0.05}, 4),  # the smallest of 4, 8 and 16
        ({"max_latency_ms": 2.0, "max_quality_drop": 0.02}, 8),  # the only one
    ],
    ids=str,
)
def test_the_budget_that_keeps_to_the_limits(limits, budget):
    assert profile().choose(**limits) == budget


def test_time_buys_quality_and_not_size():
    """Of equal or better quality, the smaller budget is chosen although there is time for the larger."""
    assert profile((2.4, 1.9, 2.03, 2.01, 2.0)).choose(max_latency_ms=100.0) == 4
    assert profile((2.4, 2.0, 2.0, 2.0, 2.0)).choose(max_latency_ms=100.0) == 4


def test_higher_is_better():
    found = profile((0.5, 0.85, 0.88, 0.95, 0.9), higher=True)
    assert found.quality.drops == pytest.approx((4 / 9, 1 / 18, 1 / 45, -1 / 18, 0))
    assert found.choose(max_quality_drop=0.05) == 8
    assert found.choose(max_quality_drop=0.0) == found.choose(max_latency_ms=9.0) == 16
    assert found.choose(max_latency_ms=2.9) == 8


def test_a_quality_of_zero():
    assert profile((0.1, 0.0, 0.0, 0.0, 0.0), higher=True).quality.drops == (-math.inf, 0, 0, 0, 0)
    assert profile((0.1, 0.0, 0.0, 0.0, 0.0)).quality.drops == (math.inf, 0, 0, 0, 0)
    negative = profile((-3.0, -2.5, -2.0, -2.0, -2.0), higher=True)
    assert negative.quality.drops == (0.5, 0.25, 0, 0, 0)


@pytest.mark.parametrize(
    "limits, message",
    [
        ({}, "needs max_latency_ms, max_quality_drop or both"),
        ({"max_latency_ms": 0.5}, "decodes a token within 0.5 ms on this machine at batch size 1; .* K=2, needs 1 ms"),
        ({"max_latency_ms": 1, "batch_size": 4}, "at batch size 4; the fastest, K=2, needs 2 ms"),
        ({"max_latency_ms": 1, "phase": "prefill"}, "no budget reads its input within 1 ms .* K=2, needs 10 ms"),
        ({"max_latency_ms": 1.9, "max_quality_drop": 0.02}, "most 0.02 .* 1.9 ms .* K=8, needs 2 ms; .* K=4, .* 0.05"),
        ({"max_latency_ms": 0}, "max_latency_ms must be a finite number > 0, got 0"),
        ({"max_latency_ms": 10**400}, "max_latency_ms must be a finite number > 0, got 1000"),
        ({"max_latency_ms": "2"}, "max_latency_ms must be a finite number > 0, got '2'"),
        ({"max_latency_ms": math.nan}, "max_latency_ms must be a finite number > 0, got nan"),
        ({"max_latency_ms": True}, "max_latency_ms must be a finite number > 0, got True"),
        ({"max_quality_drop": -0.1}, "max_quality_drop must be a finite number >= 0, got -0.1"),
        ({"max_quality_drop": math.inf}, "max_quality_drop must be a finite number >= 0, got inf"),
        ({"max_latency_ms": 2, "batch_size": 3}, r"batch_size must be one of \[1, 4\], measured on .*, got 3"),
        ({"max_latency_ms": 2, "phase": "train"}, r"phase must be one of \['prefill', 'decode'\].*got 'train'"),
        ({"max_latency_ms": 2, "device": "moon"}, "device must be one of those measured, 'this machine', got 'moon'"),
    ],
    ids=str,
)  # fmt: skip
def test_limits_that_cannot_be_kept(limits, message):
    with pytest.raises(ValueError, match=message):
        profile().choose(**limits)


def test_which_device(monkeypatch):
    slow, fast = device(THERE, (10.0, 15.0, 20.0, 30.0, 50.0)), device(HERE, (1.0, 1.5, 2.0, 3.0, 5.0))
    both = profile(**{THERE: slow, HERE: fast})
    assert both.choose(max_latency_ms=20, device=THERE) == 8
    said: list[str] = []
    monkeypatch.setattr(profile_module.logger, "warning_once", said.append)
    assert both.choose(max_latency_ms=20) == 32 and not said
    assert profile(**{THERE: slow}).choose(max_latency_ms=20) == 8  # the only one
    assert said == ["budgets are chosen by times measured on 'another machine'; this is 'this machine'"]
    monkeypatch.setattr(profile_module, "device_name", lambda device=None: f"a {device or 'third'}")
    with pytest.raises(ValueError, match=r"no times were measured on 'a third'.*'another machine', 'this machine'"):
        both.choose(max_latency_ms=20)
    with pytest.raises(ValueError, match="no times were measured on 'a cuda'"):
        both.choose(max_latency_ms=20, device=torch.device("cuda"))
    assert both.choose(max_quality_drop=0.02) == 8  # needs no device
    with pytest.raises(ValueError, match=r"\(measured: none\)"):
        replace(both, devices={}).choose(max_latency_ms=20)


def test_a_classifier_is_chosen_by_prefill():
    found = profile(**{HERE: device(HERE)})
    assert found.choose(max_latency_ms=12.5) == 8
    with pytest.raises(ValueError, match=r"phase must be one of \['prefill'\].*got 'decode'"):
        found.choose(max_latency_ms=12.5, phase="decode")


def test_only_budgets_with_both_figures_count():
    found = profile(**{HERE: device(HERE, (1.0, 1.5, 2.0, 3.0, 5.0))})
    some = replace(found, quality=quality((2.4, 2.0), budgets=(2, 32)))
    assert some.choose(max_latency_ms=3.5) == 2
    with pytest.raises(ValueError, match=r"no budget has both a quality \(of \[3\]\) and a time"):
        replace(found, quality=quality((2.0,), budgets=(3,))).choose(max_latency_ms=3.5)
    untimed = replace(found, quality=quality((2.4, 2.0), budgets=(2, 33)))
    with pytest.raises(
        ValueError, match="none timed there loses so little; within that time the best is K=2, which loses"
    ):
        untimed.choose(max_latency_ms=3.5, max_quality_drop=0.1)


def test_device_name_is_of_its_parts(monkeypatch):
    monkeypatch.undo()
    name = device_name(torch.device("cpu"))
    assert name.endswith(" cores") and len(name.split(", ")[0]) > 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    assert device_name() == device_name(torch.device("cuda")) == "GPU cuda"


# ---------------------------------------------------------------------------------------------------------------------
# Presets.


@pytest.mark.parametrize(
    "values, higher",
    [
        ((2.4, 2.1, 2.03, 2.01, 2.0), False),
        ((2.0, 1.9, 1.8, 1.79, 1.8), False),  # 1.8 / 0.9 is 2.0
        ((2.4, 2.2, 2.041, 2.04, 2.0), False),  # 2% above is 2.04
        ((9.0, 8.0, 7.0, 6.0, 2.0), False),
        ((0.5, 0.80, 0.881, 0.9, 0.9), True),
        ((0.5, 0.81, 0.882, 0.9, 0.9), True),  # 90% is 0.81, 98% is 0.882
        ((0.9, 0.9, 0.9, 0.9, 0.9), True),
    ],
    ids=str,
)
def test_presets_are_those_of_the_sweep(values, higher):
    sweep = BudgetSweep(BUDGETS, values, (1.0,) * 5, Metric("accuracy" if higher else "bits_per_byte", higher))
    expected = {"sweet-spot": sweep.sweet_spot, "collapse-boundary": sweep.collapse_boundary, "full": 32}
    assert profile(values, higher).presets() == expected


# ---------------------------------------------------------------------------------------------------------------------
# The file.


def test_devices_stand_side_by_side(tmp_path):
    one = profile(**{HERE: device(HERE, (1.0, 1.5, 2.0, 3.0, 5.0))})
    path = one.save(tmp_path)
    assert path == tmp_path / PROFILE_NAME and read_profile(tmp_path) == read_profile(path) == one
    both = one.merge(device(THERE, (10.0, 15.0, 20.0, 30.0, 50.0)))
    both.save(path)
    assert read_profile(path) == both and list(both.devices) == [HERE, THERE]
    again = read_profile(path).merge(device(HERE, (2.0, 2.5, 3.0, 4.0, 6.0)))
    again.save(path)
    assert read_profile(path).devices[THERE] == both.devices[THERE]
    assert read_profile(path).choose(max_latency_ms=5.0) == 16  # and not 32 as before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("where", ["write", "replace"])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch, where):
    old = profile()
    path = old.save(tmp_path)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    if where == "replace":
        monkeypatch.setattr(os, "replace", interrupted)
    else:
        write_text = Path.write_text
        half = lambda self, text, **kwargs: (write_text(self, text[: len(text) // 2], **kwargs), interrupted())  # noqa: E731
        monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        old.merge(device(THERE, (1.0,) * 5)).save(tmp_path)
    monkeypatch.undo()
    assert read_profile(path) == old and list(tmp_path.iterdir()) == [path]


def edit(path: Path, keys: tuple, value) -> None:
    """Set (or with `del` remove) a value inside a JSON file."""
    record = json.loads(path.read_text())
    inner = record
    for key in keys[:-1]:
        inner = inner[key]
    if value is del_:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    path.write_text(json.dumps(record))


del_ = object()
ROW = ("devices", HERE, "rows", 0)


@pytest.mark.parametrize(
    "keys, value, message",
    [
        (("format_version",), 2, r"format_version must be one of \[1\], got 2"),
        (("format_version",), True, r"format_version must be one of \[1\], got True"),
        (("format_version",), del_, r"format_version must be one of \[1\], got nothing"),
        (("quality",), del_, "quality must be a JSON object, got None"),
        (("devices",), [], r"devices must be a JSON object, got \[\]"),
        (("model", "hidden_size"), 0, r"model.hidden_size must be an integer in \[1, \d+\], got 0"),
        (("model", "capacities"), [32, 0], r"model.capacities must be a list of integers in \[1, \d+\], got \[32, 0\]"),
        (
            ("model", "samples", "the norms"),
            [1.0, None],
            r"samples.the norms must be a list of finite numbers",
        ),
        (("quality", "metric"), None, "quality.metric must be text, got None"),
        (("quality", "higher_is_better"), 1, r"quality.higher_is_better must be one of \[True, False\], got 1"),
        (("quality", "budgets"), [4, 2], r"budgets must be a list of ascending integers in \[1, 32\], got \[4, 2\]"),
        (("quality", "budgets"), [2, 2], r"budgets must be a list of ascending integers in \[1, 32\], got \[2, 2\]"),
        (("quality", "budgets"), [], r"quality.budgets must be a list of ascending integers in \[1, 32\], got \[\]"),
        (("quality", "budgets"), ["2"], r"quality.budgets must be .* got \['2'\]"),
        (("quality", "values"), [1.0] * 4, r"quality.values must be a list of 5 finite numbers, got \[1.0"),
        (("quality", "values"), [1.0] * 4 + [math.nan], "quality.values must be a list of 5 finite numbers, got .*nan"),
        (("quality", "drop_errors"), [0, 0, 0, 0, -1], "quality.drop_errors must be .* 5 finite numbers >= 0, got"),
        (("devices", HERE, "rows"), [], r"devices\['this machine'\].rows must be a list of at least one object, got"),
        (
            ("devices", HERE, "threads"),
            1.5,
            r"devices\['this machine'\].threads must be an integer in \[1, \d+\], got 1.5",
        ),
        (("devices", HERE, "versions"), None, r"devices\['this machine'\].versions must be a JSON object, got None"),
        ((*ROW, "phase"), "train", r"rows\[0\].phase must be one of \['prefill', 'decode'\], got 'train'"),
        ((*ROW, "budget"), "2", r"rows\[0\].budget must be an integer in \[1, 32\], got '2'"),
        (
            ("quality", "budgets"),
            [2, 4, 8, 16, 33],
            r"budgets must be a list of ascending integers in \[1, 32\], got .*33",
        ),
        ((*ROW, "budget"), 33, r"rows\[0\].budget must be an integer in \[1, 32\], got 33"),
        ((*ROW, "max_ms"), 10**400, r"rows\[0\].max_ms must be a finite number >= 10, got 1000"),
        (("quality", "values"), [10**400] * 5, r"quality.values must be a list of 5 finite numbers, got \[1000"),
        ((*ROW, "peak_bytes"), 10**400, r"rows\[0\].peak_bytes must be an integer in \[0, \d+\], got 1000"),
        (("model", "samples", "the norms"), [10**400], r"samples.the norms must be a list of finite numbers, got"),
        ((*ROW, "min_ms"), -1, r"rows\[0\].min_ms must be a finite number >= 0, got -1"),
        ((*ROW, "median_ms"), 8.9, r"rows\[0\].median_ms must be a finite number >= 9, got 8.9"),
        ((*ROW, "max_ms"), math.inf, r"rows\[0\].max_ms must be a finite number >= 10, got inf"),
        ((*ROW, "peak_bytes"), del_, r"rows\[0\].peak_bytes must be an integer in \[0, \d+\], got nothing"),
    ],
    ids=lambda x: str(x) if isinstance(x, tuple) else "",
)
def test_a_damaged_field(tmp_path, keys, value, message):
    path = profile().save(tmp_path)
    edit(path, keys, value)
    with pytest.raises(ValueError, match=message) as error:
        read_profile(tmp_path)
    assert str(error.value).startswith(str(path))


DAMAGED = {
    "empty": b"",
    "cut": b'{"format_version": 1, "mod',
    "binary": b"\xff\xfe",
    "list": b"[1]",
    "nested": b"[" * 100_000 + b"]" * 100_000,
    "nested-objects": b'{"model": ' * 100_000 + b"1" + b"}" * 100_000,
    "nested-within": b'{"format_version": ' + b"[" * 900 + b"]" * 900 + b"}",
    "digits": b'{"format_version": 1' + b"0" * 5000 + b"}",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file(tmp_path, content):
    path = tmp_path / PROFILE_NAME
    path.write_bytes(content)
    with pytest.raises(ValueError, match=PROFILE_NAME) as error:
        read_profile(tmp_path)
    assert path.read_bytes() == content and len(str(error.value)) < len(str(path)) + 300


@pytest.mark.parametrize("damage", [lambda text: "[" * 100_000, lambda text: text.replace(" 2.4", " 1" + "0" * 400)])
def test_a_damaged_profile_does_not_keep_a_model_from_being_saved(tmp_path, damage):
    model = random_model(seed=3)
    model.save_pretrained(tmp_path / "model")
    path = of(model).save(tmp_path / "model")
    path.write_text(damage(path.read_text()))
    loaded = type(model).from_pretrained(tmp_path / "model")
    with captured_warnings() as messages:
        loaded.save_pretrained(tmp_path / "again")
    assert len(messages) == 1 and messages[0].startswith(f"no budget profile is saved: {path}")
    assert (tmp_path / "again" / "model.safetensors").exists() and not (tmp_path / "again" / PROFILE_NAME).exists()
    with pytest.raises(ValueError, match=PROFILE_NAME):
        choose_budget(loaded, max_quality_drop=0.1)


def test_no_budget_above_the_capacity_is_chosen(tmp_path):
    """Also where all layers ran the whole of what they hold at that budget."""
    model = random_model(seed=3)
    record = of(model)
    replace(record, quality=replace(record.quality, budgets=(2, 4, 8, 16, 40))).save(tmp_path)
    with pytest.raises(ValueError, match=r"quality.budgets must be .* in \[1, 32\], got \[2, 4, 8, 16, 40\]"):
        read_profile(tmp_path, model)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*budget_profile.json: write it with train/calibrate.py"):
        read_profile(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Of which model.


def of(model) -> BudgetProfile:
    return replace(profile(), model=fingerprint(model))


class Quantised(torch.nn.Module):
    """What stands in place of a quantised layer."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype):
        super().__init__()
        self.register_buffer("weight", (weight.detach() * 100).to(dtype))


def quantised(model, dtype):
    model.model.embed_tokens = Quantised(model.model.embed_tokens.weight, dtype)
    for layer in model.model.layers:
        layer.ffn.up = Quantised(layer.ffn.up.weight, dtype)
    return model


SAME = {
    "itself": lambda model: model,
    "bf16": lambda model: model.bfloat16(),
    "fp16": lambda model: model.half(),
    "fp64": lambda model: model.double(),
    "without-head": lambda model: model.model,
    "truncated": lambda model: truncate(model, 5),
    "int8": lambda model: quantised(model, torch.int8),
    "packed": lambda model: quantised(model, torch.int32),
    "fp8": lambda model: quantised(model, torch.float8_e4m3fn),
    "meta": lambda model: model.to("meta"),
}


blocks = pytest.mark.parametrize("block", ["paper", "gated"])


@blocks
@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_the_same_model_in_another_form(tmp_path, change, block):
    model = random_model(seed=3, **VARIANTS[block])
    of(model).save(tmp_path)
    changed = change(copy.deepcopy(model))
    assert read_profile(tmp_path, changed).quality.values[0] == 2.4
    if "meta" not in str(next(changed.parameters()).device):
        assert fingerprint(changed).samples.keys() >= {"the norms", "channel_mixing[0]"}


def test_the_same_model_saved_and_loaded(tmp_path):
    model = random_model(seed=3)
    of(model.bfloat16()).save(tmp_path)
    random_model(seed=3).save_pretrained(tmp_path / "model")
    assert read_profile(tmp_path, ESSMForCausalLM.from_pretrained(tmp_path / "model")) == of(model)
    assert read_profile(tmp_path, ESSMModel.from_pretrained(tmp_path / "model")) == of(model)


def trained_further(model):
    """One gentle step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = random_ids(2, 32)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    return model.eval()


@torch.no_grad()
def with_other_mixing(model):
    """A model of equal norms, as two that were never trained have."""
    model.model.layers[-1].mixer.channel_mixing[0].mul_(1.05)
    return model


OTHERS = {
    "seed": (lambda model: random_model(seed=4), r"other weights: a value of .* is -?\d\.\d+ instead of"),
    "trained": (trained_further, "other weights"),
    "mixing": (with_other_mixing, r"other weights: a value of channel_mixing\[0\]"),
    "width": (lambda model: random_model(hidden_size=8), "hidden_size 8 instead of 16"),
    "depth": (lambda model: random_model(num_hidden_layers=1), "1 layers instead of 2"),
}


@blocks
@pytest.mark.parametrize("other, message", OTHERS.values(), ids=OTHERS)
def test_another_model(tmp_path, other, message, block):
    model = random_model(seed=3, **VARIANTS[block])
    path = of(model).save(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        read_profile(tmp_path, other(model))
    assert str(error.value).startswith(f"{path} was measured on another model: this one has ")


def test_an_untrained_model_is_told_from_another():
    """Whose norms are all ones and zeros."""
    torch.manual_seed(0)
    one = ESSMForCausalLM(random_model().config)
    two = ESSMForCausalLM(one.config)
    assert "other weights" in fingerprint(one).difference(fingerprint(two))


def test_a_truncated_model_has_no_larger_budgets(tmp_path):
    model = random_model(seed=3)
    of(model).save(tmp_path)
    small = truncate(model, 9)
    found = read_profile(tmp_path, small)
    assert found.quality.budgets == (2, 4, 8) and found.quality.values == (2.4, 2.1, 2.03)
    assert len(found.quality.drop_errors) == len(found.quality.standard_errors) == 3
    assert {row.budget for row in found.devices[HERE].rows} == {2, 4, 8} and len(found.devices[HERE].rows) == 12
    assert found.choose(max_latency_ms=100.0) == 8
    assert found.presets()["full"] == 8
    assert found.model.capacities == (8, 8)
    found.save(tmp_path / "small.json")
    assert read_profile(tmp_path / "small.json", small) == found
    with pytest.raises(ValueError, match=r"quality.budgets must hold one in \[1, 1\].* got \[2, 4, 8, 16, 32\]"):
        read_profile(tmp_path, truncate(model, 1))


def test_layers_truncated_to_different_lengths(tmp_path, monkeypatch):
    """A budget counts where every layer has as many of its channels as when it was measured."""
    model = random_model(seed=3)
    of(model).save(tmp_path)
    own = fingerprint(model)

    def budgets(measured, capacities):
        record = of(model).restricted_to(max(measured))
        replace(record, model=replace(own, capacities=measured)).save(tmp_path)
        monkeypatch.setattr(profile_file, "fingerprint", lambda model: replace(own, capacities=capacities))
        found = read_profile(tmp_path, model).quality.budgets
        monkeypatch.setattr(profile_file, "fingerprint", fingerprint)
        return found

    assert budgets((32, 32), (4, 16)) == (2, 4)
    assert budgets((4, 16), (4, 16)) == (2, 4, 8, 16)  # measured so: the first layer always ran 4
    assert budgets((4, 16), (4, 8)) == (2, 4, 8)


def test_restricted_to_a_capacity():
    found = profile()
    assert found.restricted_to(32) == replace(found, model=replace(found.model, capacities=(32, 32)))
    assert found.restricted_to(4).quality.budgets == (2, 4)
    assert found.restricted_to(1) is None
    large = replace(device(THERE), rows=device(THERE).rows[3:])
    assert list(found.merge(large).restricted_to(8).devices) == [HERE]  # nothing is left of the other


def test_the_profile_is_found_beside_the_weights(tmp_path, monkeypatch):
    model = random_model(seed=3)
    with pytest.raises(ValueError, match=r"choose_budget needs budget_profile.json beside the model"):
        choose_budget(model, max_quality_drop=0.02)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    loaded = ESSMForCausalLM.from_pretrained(folder)
    assert budget_profile(model) is None and budget_profile(loaded) is None
    of(model).save(folder)
    assert budget_profile(loaded) == of(model)
    assert choose_budget(loaded, max_quality_drop=0.02) == 8
    assert choose_budget(loaded, max_latency_ms=5.0, batch_size=4, phase="decode", device=HERE) == 8
    assert choose_budget(model, profile=of(model), max_latency_ms=12, phase="prefill") == 8
    folder.rename(tmp_path / "gone")
    assert budget_profile(loaded) is None


LOADS = {
    "class": lambda source: ESSMForCausalLM.from_pretrained(source),
    "auto": lambda source: AutoModelForCausalLM.from_pretrained(source),
    "prefix": lambda source: ESSMForCausalLM.from_pretrained(source, spectral_capacity=32),
    "path": lambda source: ESSMForCausalLM.from_pretrained(Path(source)),
    "config": lambda source: AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_local_model_never_asks_the_hub(load, tmp_path, monkeypatch):
    """Loaded by a relative name that a repository could have; then the working directory changes, the folder moves."""
    asked = []

    def refuse(*args, **kwargs):
        asked.append(args)
        raise RuntimeError("the network was used")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    model = random_model(seed=3)
    model.save_pretrained("org/name")
    of(model).save("org/name")
    near, far = load("org/name"), load("org/name")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert budget_profile(near) == (
        None if load is LOADS["config"] else of(model)
    )  # which has its weights from nowhere
    Path("../org/name").rename("moved")
    assert budget_profile(far) is None
    with pytest.raises(ValueError, match=r"choose_budget needs budget_profile.json"):
        choose_budget(far, max_quality_drop=0.02)
    far.save_pretrained("saved")
    assert not asked and not Path("saved/budget_profile.json").exists()


def test_the_times_are_those_of_the_device_the_model_is_on(monkeypatch):
    monkeypatch.setattr(profile_module, "device_name", lambda device=None: THERE if device is None else HERE)
    times = {THERE: device(THERE, (0.1, 0.2, 0.3, 0.4, 0.5)), HERE: device(HERE, (1.0, 1.5, 2.0, 3.0, 5.0))}
    found = profile(**times)
    assert choose_budget(random_model(), profile=found, max_latency_ms=2.0) == 8
    assert choose_budget(random_model(), profile=found, max_latency_ms=2.0, device=THERE) == 32
    assert found.choose(max_latency_ms=2.0) == 32  # this machine's first device


def test_the_profile_of_a_repository(tmp_path, monkeypatch):
    model, other = random_model(seed=3), random_model(seed=4)
    repository = tmp_path / "cache" / "models--org--name"
    shas = {model: "0123456789abcdef0123456789abcdef01234567", other: "76543210fedcba9876543210fedcba9876543210"}
    for each, sha in shas.items():
        each.save_pretrained(repository / "snapshots" / sha)
        of(each).save(repository / "snapshots" / sha)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(shas[other])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    where = {"cache_dir": str(tmp_path / "cache")}
    for cls in (ESSMForCausalLM, AutoModelForCausalLM):
        loaded = cls.from_pretrained("org/name", revision=shas[model], **where)
        assert budget_profile(loaded) == of(model)
        assert budget_profile(cls.from_pretrained("org/name", **where)) == of(other)
        (repository / "snapshots" / shas[model] / "budget_profile.json").unlink()
        assert budget_profile(loaded) is None
        of(model).save(repository / "snapshots" / shas[model])


# ---------------------------------------------------------------------------------------------------------------------
# Measured quality.


def test_standard_errors_are_those_of_paired_samples():
    generator = torch.Generator().manual_seed(0)
    hits = {K: (torch.rand(500, generator=generator) < p).double() for K, p in ((2, 0.5), (4, 0.8), (8, 0.8))}
    held_out = HeldOut(Metric("accuracy", True), lambda model, K: (hits[K], torch.ones(500).double()), 7, "coins")
    found = measure_quality(random_model(num_spectral_channels=8), held_out, (2, 4, 8))
    assert (found.metric, found.higher_is_better, found.data, found.samples) == ("accuracy", True, "coins", 500)
    assert found.values == pytest.approx([float(hits[K].mean()) for K in (2, 4, 8)])
    assert found.standard_errors == pytest.approx([float(hits[K].std() / math.sqrt(500)) for K in (2, 4, 8)])
    assert found.drop_errors[2] == 0
    # By resampling: what is measured of drops when samples are drawn anew.
    rows = torch.randint(500, (4000, 500), generator=generator)
    resampled = {K: hits[K][rows].mean(1) for K in (2, 4, 8)}
    for i, K in enumerate((2, 4)):
        expected = float((1 - resampled[K] / resampled[8]).std())
        assert found.drop_errors[i] == pytest.approx(expected, rel=0.1)  # 4000 draws of a spread: 1%


def test_blocks_that_all_lose_alike_have_no_drop_error():
    bits, sizes = torch.tensor([9.0, 3.0, 5.0]).double(), torch.tensor([3.0, 2.0, 2.0]).double()
    held_out = HeldOut(BITS_PER_BYTE, lambda model, K: (bits * (1.1 if K == 2 else 1.0), sizes), 7, "blocks")
    found = measure_quality(random_model(num_spectral_channels=4), held_out, (2, 4))
    assert found.values == pytest.approx((17 / 7 * 1.1, 17 / 7)) and found.drops[0] == pytest.approx(0.1)
    assert found.standard_errors[1] > 0.1 and found.drop_errors == pytest.approx((0, 0), abs=1e-12)


def test_a_task_is_scored_as_it_is_evaluated(tmp_path):
    for split in ("train", "validation"):
        rows = [f"{split}: the spectral state of the spectral budget " * 60, "and so on " * 90]
        pq.write_table(pa.table({"text": rows}), tmp_path / f"english_novels-{split}.parquet")
    folder = tmp_path / "model"
    random_model(seed=2, num_spectral_channels=4).save_pretrained(folder)
    args = calibrate.CalibrateArguments(str(folder), task="novels", data_dir=str(tmp_path), scale="small")
    held_out = calibrate.open_held_out(args, read_saved_config(folder))
    task = evaluation.open_task("novels", str(tmp_path), "small")
    model = task.load(str(folder))
    expected = task.sweep(model, (2, 4))
    found = measure_quality(model, held_out, (2, 4))
    assert found.values == pytest.approx(expected.values, rel=1e-5) and found.length == 256 and found.samples > 5


def test_a_model_of_other_tokens_is_scored_per_byte(tmp_path):
    tokenizer = bpe_tokenizer(documents())
    random_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    text = "".join(documents())
    (tmp_path / "text.txt").write_text(text)
    args = calibrate.CalibrateArguments(str(tmp_path / "model"), text_files=[str(tmp_path / "text.txt")], block_size=16)
    score = calibrate.open_held_out(args, read_saved_config(tmp_path / "model")).score
    bits, num_bytes = score(ESSMForCausalLM.from_pretrained(tmp_path / "model").eval(), 32)
    num_tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert num_tokens < 0.8 * len(text.encode())  # or a byte might as well be a token
    per_token = len(text.encode()) / num_tokens
    assert float(num_bytes.sum()) == pytest.approx(per_token * (num_tokens - 1))  # the first is context only
    assert float(bits.sum()) == pytest.approx(math.log2(len(tokenizer)) * num_tokens, rel=0.5)  # an untrained model


# ---------------------------------------------------------------------------------------------------------------------
# From end to end.

QUICK = ["--rounds", "1", "--decode_tokens", "3", "--device", "cpu", "--threads", "1", "--batch_sizes", "1", "2"]


@pytest.fixture(scope="module", params=["paper", "gated"])
def saved(request, tmp_path_factory):
    """A language model with a preset of its user's, and some text."""
    root = tmp_path_factory.mktemp("calibration")
    fields = {"budget_presets": {"phone": 3, "sweet-spot": 1}, "dropout": 0.1} | VARIANTS[request.param]
    random_model(seed=5, **fields).save_pretrained(root / "model")
    (root / "text.txt").write_text("the spectral state of the spectral budget " * 40)
    return root


@pytest.fixture(scope="module")
def calibrated(saved):
    """It, calibrated from the command line in a copy; what was printed is beside it."""
    folder = saved / "calibrated"
    shutil.copytree(saved / "model", folder)
    arguments = ["--model", str(folder), "--text_files", str(saved / "text.txt"), "--budgets", "2", "8"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.setattr(calibration, "device_name", lambda device: HERE)
        calibrate.main([*arguments, "--block_size", "64", "--max_blocks", "5", *QUICK])
    (saved / "output.txt").write_text(output.getvalue())
    return folder


def test_a_language_model_is_calibrated(saved, calibrated):
    model = AutoModelForCausalLM.from_pretrained(calibrated, trust_remote_code=True).eval()
    found = read_profile(calibrated, model)
    stream, _ = to_stream(read_files([str(saved / "text.txt")]), ByteEncoder())
    blocks = evaluation_blocks(stream, 64, 5)
    sweep = sweep_budgets(model, blocks, text_labels(blocks), budgets=(2, 8))
    assert found.quality.budgets == (2, 8, 32)
    assert found.quality.values == pytest.approx(sweep.values, rel=1e-5)
    assert (found.quality.samples, found.quality.length, found.quality.dtype) == (5, 64, "float32")
    assert (
        found.quality.data == "text.txt; 5 blocks of 64 tokens"
        and str(saved) not in (calibrated / PROFILE_NAME).read_text()
    )
    assert all(error > 0 for error in found.quality.standard_errors)

    entry = found.devices[HERE]
    assert (entry.prompt_length, entry.rounds, entry.threads, entry.dtype) == (64, 1, 1, "float32")
    assert entry.versions["torch"] == torch.__version__ and entry.weight_bytes == 4 * model.num_parameters()
    assert entry.phases == ("prefill", "decode")
    for phase, positions in (("prefill", 64), ("decode", 1)):
        assert entry.batch_sizes(phase) == (1, 2)
        for size in (1, 2):
            rows = list(entry.at(phase, size).values())
            assert [row.budget for row in rows] == [2, 8, 32]
            for row in rows:
                assert row.tokens_per_second == pytest.approx(size * positions / row.median_ms * 1e3)
                outputs = model(random_ids(size, 64), use_cache=True, spectral_budget=row.budget)
                assert row.cache_bytes == outputs.past_key_values.num_bytes
            assert rows[0].peak_bytes < rows[2].peak_bytes
    # a step holds the copy of its cache, a prefill hidden states of its whole prompt
    assert all(row.peak_bytes > row.cache_bytes for row in entry.rows)
    assert entry.at("prefill", 2)[8].peak_bytes > 1.5 * entry.at("prefill", 1)[8].peak_bytes


def test_what_is_printed_and_left(saved, calibrated):
    printed = (saved / "output.txt").read_text()
    assert read_profile(calibrated).table(HERE) in printed
    for heading in ("prefill, batch size 1, of 64 positions", "decode, batch size 2, after 64 positions"):
        lines = printed.split(heading)[1].splitlines()[2:5]
        assert [line.split()[0] for line in lines] == ["2", "8", "32"]
    K = read_profile(calibrated).presets()["sweet-spot"]
    assert all(line.split()[0] == str(K) for line in printed.splitlines() if "* sweet spot" in line)
    assert printed.count("* sweet spot") == printed.count("^ collapse boundary") == 4
    new = {path.name for path in calibrated.iterdir()} - {path.name for path in (saved / "model").iterdir()}
    assert new - {"__pycache__"} == {PROFILE_NAME, "budget_profile.png"}
    assert (calibrated / "budget_profile.png").read_bytes().startswith(b"\x89PNG")


def test_presets_work_after_reloading(saved, calibrated):
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (saved / "model", calibrated))
    found = read_profile(calibrated)
    assert after.pop("budget_presets") == {"phone": 3, **found.presets()}
    assert before.pop("budget_presets") == {"phone": 3, "sweet-spot": 1}
    assert list(before.items()) == list(after.items())
    model, ids = ESSMForCausalLM.from_pretrained(calibrated), random_ids(1, 12)
    for name in ("sweet-spot", "collapse-boundary", "full"):
        assert model(ids, spectral_budget=name).spectral_budget == (found.presets()[name],) * 2
        by_name, by_number = (
            model.generate(ids, max_new_tokens=5, do_sample=False, spectral_budget=budget, output_logits=True,
                           return_dict_in_generate=True).logits
            for budget in (name, found.presets()[name])
        )  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(by_name, by_number))
    assert choose_budget(model, max_quality_drop=0.02) == found.presets()["sweet-spot"]


def test_another_device_adds_its_times(calibrated, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(calibrated, folder)
    before = read_profile(folder)
    monkeypatch.setattr(calibration, "device_name", lambda device: THERE)
    monkeypatch.setattr(calibrate, "measure_quality", None)
    monkeypatch.setattr(calibrate, "open_held_out", None)
    arguments = ["--model", str(folder), "--timing_only", "--dtype", "bfloat16", "--prompt_length", "9", *QUICK]
    calibrate.main([*arguments, "--budgets", "8"])
    after = read_profile(folder)
    assert after.quality == before.quality and after.devices[HERE] == before.devices[HERE]
    entry = after.devices[THERE]
    assert (entry.dtype, entry.prompt_length, entry.weight_bytes) == (
        "bfloat16",
        9,
        before.devices[HERE].weight_bytes / 2,
    )
    assert {row.budget for row in entry.rows} == {8}
    assert [axes.get_title().split("\n")[0] for axes in calibration.draw(after).axes] == [HERE, THERE]
    # and once more: only its own entry is replaced
    calibrate.main(["--model", str(folder), "--timing_only", *QUICK])
    again = read_profile(folder)
    assert {row.budget for row in again.devices[THERE].rows} == {2, 8, 32}
    assert again.devices[HERE] == before.devices[HERE] and again.devices[THERE].dtype == "float32"


def test_calibrated_again_other_devices_stay(saved, calibrated, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(calibrated, folder)
    before = read_profile(folder)
    monkeypatch.setattr(calibration, "device_name", lambda device: THERE)
    calibrate.main(["--model", str(folder), "--text_files", str(saved / "text.txt"), "--budgets", "4", *QUICK])
    after = read_profile(folder)
    assert after.devices[HERE] == before.devices[HERE] and after.quality.budgets == (4, 32)
    assert after.quality.length == 512  # by default, which is all that the filters reach
    assert after.devices[THERE].prompt_length == 509  # and leaves room for 3 tokens


def test_what_a_time_means(monkeypatch):
    """Of a prefill that of the call, of decoding that of one of its steps, for the whole batch."""
    monkeypatch.setattr(
        calibration, "paired", lambda calls, *args, **kwargs: {case: [0.004, 0.012, 0.002] for case in calls}
    )
    prefill, decode = calibration.measure_device(random_model(), (4,), (3,), 10, 2, 1).rows
    assert (prefill.phase, decode.phase) == ("prefill", "decode")
    assert (prefill.median_ms, prefill.min_ms, prefill.max_ms) == pytest.approx((4, 2, 12))
    assert (decode.median_ms, decode.min_ms, decode.max_ms) == pytest.approx((2, 1, 6))
    assert (prefill.tokens_per_second, decode.tokens_per_second) == pytest.approx((30 / 0.004, 3 / 0.002))


def test_the_picture():
    """One curve per batch size over all budgets, times to the right, marks on each curve."""
    found = profile()
    (axes,) = calibration.draw(found).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    times, values = (1.0, 1.5, 2.0, 3.0, 5.0), found.quality.values
    assert lines["batch size 1"] == [list(pair) for pair in zip(times, values)]
    assert lines["batch size 4"] == [[2 * ms, value] for ms, value in zip(times, values)]
    assert lines["K = 8: sweet spot"] == [[2.0, 2.03], [4.0, 2.03]]
    assert lines["K = 4: collapse boundary"] == [[1.5, 2.1], [3.0, 2.1]]
    assert [text.get_text() for text in axes.texts] == ["2", "4", "8", "16", "32"] * 2
    assert "decoded token" in axes.get_xlabel() and "lower is better" in axes.get_ylabel()
    (axes,) = calibration.draw(profile((0.5, 0.6, 0.7, 0.8, 0.9), True, **{HERE: device(HERE)})).axes
    assert "call over 64 positions" in axes.get_xlabel() and "higher is better" in axes.get_ylabel()


def test_a_classifier_is_calibrated(tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 7)):
        rows = pa.array(list(rng.integers(0, 256, (count, 784)).astype(np.uint8)), pa.list_(pa.uint8()))
        table = pa.table({"pixels": rows, "label": rng.permutation(np.arange(count) % 10)})
        pq.write_table(table, tmp_path / f"mnist-{split}.parquet")
    folder = tmp_path / "model"
    fields = {"num_input_features": 1, "num_labels": 10, "filter_length": 1024}
    random_model(ESSMForSequenceClassification, **fields).save_pretrained(folder)
    arguments = ["--model", str(folder), "--task", "smnist", "--data_dir", str(tmp_path), "--scale", "small"]
    found = calibrate.main([*arguments, "--budgets", "2", "--eval_batch_size", "4", *QUICK])

    model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True).eval()
    assert read_profile(folder, model) == found
    test = pq.read_table(tmp_path / "mnist-test.parquet")
    pixels, labels = (torch.tensor(test[name].to_pylist()) for name in ("pixels", "label"))
    with torch.no_grad():
        expected = [
            model(input_features=(pixels / 127.5 - 1)[..., None], spectral_budget=K).logits.argmax(-1) == labels
            for K in (2, 32)
        ]
    assert found.quality.values == pytest.approx([float(hits.double().mean()) for hits in expected])
    assert (found.quality.metric, found.quality.samples, found.quality.length) == ("accuracy", 7, 784)
    entry = found.devices[HERE]
    assert entry.phases == ("prefill",) and entry.prompt_length == 784 and len(entry.rows) == 4
    assert all(row.cache_bytes == 0 for row in entry.rows)
    assert model.config.budget_presets == found.presets()
    assert choose_budget(model, max_latency_ms=1e9) in (2, 32)


def test_an_own_classifier_is_calibrated_on_own_files(tmp_path):
    """Numbers are scaled as features.json says, whatever their type, and text as labels means the model's classes."""
    values = np.random.default_rng(0).integers(0, 256, (9, 24)) * np.arange(9)[:, None] // 8
    folder, names = tmp_path / "model", ["walk", "sit", "run"]  # not sorted
    model = random_model(ESSMForSequenceClassification, num_input_features=2, id2label=dict(enumerate(names)))
    with torch.no_grad():  # without what all samples share, or all are of one class
        inputs = torch.tensor(values.reshape(9, 12, 2)[:, :10] * 0.01 - 0.5).float()
        mean = model.model(input_features=inputs).last_hidden_state.mean((0, 1))
        model.score.weight -= torch.outer(model.score.weight @ mean, mean) / mean.square().sum()
    model.save_pretrained(folder)
    record = {"multiplier": 0.01, "offset": -0.5, "max_length": 10, "frame_length": 2}
    (folder / "features.json").write_text(json.dumps(record))

    def predictions(multiplier: float, offset: float, K: int) -> torch.Tensor:
        inputs = torch.tensor(values.reshape(9, 12, 2)[:, :10] * multiplier + offset).float()
        with torch.no_grad():
            return model(input_features=inputs, spectral_budget=K).logits.argmax(-1)

    labels = predictions(0.01, -0.5, 32)
    assert len(set(labels.tolist())) > 1 and not torch.equal(labels, predictions(1.0, 0.0, 32))
    lines = ["kind," + ",".join(f"t{i}" for i in range(24))]
    lines += [f"{names[label]}," + ",".join(map(str, row)) for label, row in zip(labels, values)]
    (tmp_path / "test.csv").write_text("\n".join(lines))
    arguments = ["--model", str(folder), "--test_file", str(tmp_path / "test.csv"), "--label_column", "kind"]
    found = calibrate.main([*arguments, "--features_column", "t*", "--budgets", "2", *QUICK])
    expected = float((predictions(0.01, -0.5, 2) == labels).double().mean())
    assert found.quality.values == pytest.approx((expected, 1.0))
    assert (found.quality.metric, found.quality.samples, found.quality.length) == ("accuracy", 9, 10)
    for change, message in (
        (["--features_column", "t*", "--label_column", "t0"], r"row \d of .*: labels must be in \[0, 2\], got"),
        (["--features_column", "nothing"], "features_column must be one of"),
        ([], "give text_column or features_column, and not both"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate.main([*arguments, *change, *QUICK])
    (folder / "features.json").write_text('{"offset": "none"}')
    with pytest.raises(ValueError, match=r"features\.json must hold numbers for multiplier"):
        calibrate.main([*arguments, "--features_column", "t*", *QUICK])


def test_an_own_classifier_of_text_is_calibrated_with_its_own_tokenizer(tmp_path):
    tokenizer = bpe_tokenizer(documents())
    folder = tmp_path / "model"
    model = random_model(ESSMForSequenceClassification, vocab_size=len(tokenizer), num_labels=2)
    model.save_pretrained(folder)
    tokenizer.model_max_length = 7
    tokenizer.save_pretrained(folder)
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(documents()) if text]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = calibrate.CalibrateArguments(str(folder), test_file=[str(tmp_path / "test.jsonl")], text_column="text")
    held_out = calibrate.open_held_out(args, read_saved_config(folder))
    hits, _ = held_out.score(model, 32)
    with torch.no_grad():
        expected = [
            int(model(torch.tensor([tokenizer(row["text"])["input_ids"][:7]])).logits.argmax()) == row["label"]
            for row in rows
        ]
    assert hits.tolist() == expected and held_out.length == 7


def test_a_classifier_of_token_ids_is_timed():
    model = random_model(ESSMForSequenceClassification, num_labels=3)
    assert calibration.random_inputs(model, 2, 9)["input_ids"].shape == (2, 9)
    entry = calibration.measure_device(model, (4,), (2,), 9, 1, 1)
    assert [(row.phase, row.batch_size, row.budget) for row in entry.rows] == [("prefill", 2, 4)]


BAD_ARGUMENTS = {
    "nothing": ([], "give text_files, test_file, dataset_name, task or timing_only, one of them, got none"),
    "files": (["--test_file", "a.csv", "--text_column", "a"], "measure classifiers; a language model needs text_files"),
    "both": (["--text_files", "a", "--task", "smnist"], "one of them"),
    "timing-and-text": (["--timing_only", "--text_files", "a"], "timing_only measures no quality"),
    "rounds": (["--timing_only", "--rounds", "0"], "rounds must be at least 1, got 0"),
    "batch": (["--timing_only", "--batch_sizes", "1", "0"], "batch_sizes must be at least 1, got 0"),
    "budget": (["--timing_only", "--budgets", "0"], "budgets must be at least 1, got 0"),
    "dtype": (["--timing_only", "--dtype", "int8"], "dtype must be one of .*'bfloat16'.*, got 'int8'"),
    "device": (["--timing_only", "--device", "tpu"], r"device must be one of \['auto', 'cpu', 'cuda'\], got 'tpu'"),
    "block": (["--text_files", "text.txt", "--block_size", "1"], "block_size must be at least 2, got 1"),
    "block-long": (["--text_files", "text.txt", "--block_size", "513"], r"block_size must be in \[2, 512\].*got 513"),
    "prompt": (["--text_files", "text.txt", "--prompt_length", "449"], r"prompt_length must be in \[1, 448\].*got 449"),
    "decode": (["--text_files", "text.txt", "--decode_tokens", "512"], r"decode_tokens must be in \[1, 511\].*got 512"),
    "large": (["--text_files", "text.txt", "--budgets", "4", "40"], r"budgets must be in \[1, 32\], got 40"),
    "absent": (["--text_files", "absent.txt"], "cannot read text file 'absent.txt'"),
    "task": (["--task", "smnist"], "task 'smnist' is one of train_classification.py, and .* holds a language model"),
    "retrieval": (["--task", "retrieval"], "evaluated by its own script"),
    "no-task": (["--task", "mnist"], "'mnist'"),
}


@pytest.mark.parametrize("arguments, message", BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments(saved, monkeypatch, arguments, message):
    monkeypatch.chdir(saved)
    monkeypatch.setattr(calibrate, "measure_quality", None)
    monkeypatch.setattr(calibrate, "measure_device", None)
    before = {path: path.read_bytes() for path in (saved / "model").iterdir() if path.is_file()}
    with pytest.raises(ValueError, match=message):
        calibrate.main(["--model", "model", *arguments])
    assert {path: path.read_bytes() for path in (saved / "model").iterdir() if path.is_file()} == before


def test_bad_models(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "measure_quality", None)
    text = ["--text_files", str(saved / "text.txt")]
    with pytest.raises(ValueError, match=r"model must be the folder of a saved model, got '.*nowhere': No such file"):
        calibrate.main(["--model", str(tmp_path / "nowhere"), *text])
    with pytest.raises(FileNotFoundError, match=r"there is no .*budget_profile.json"):
        calibrate.main(["--model", str(saved / "model"), "--timing_only"])
    config = tmp_path / "config.json"
    for content, message in (
        ("{", "config.json is not valid JSON"),
        ('{"model_type": "gpt2"}', "model_type must be 'essm', which has budgets, got 'gpt2'"),
        ('{"model_type": "essm", "architectures": ["ESSMModel"]}', "architecture must be .*, got 'ESSMModel'"),
    ):
        config.write_text(content)
        with pytest.raises(ValueError, match=message):
            calibrate.main(["--model", str(tmp_path), *text])
    random_model(ESSMForSequenceClassification, num_labels=3).save_pretrained(tmp_path / "classifier")
    with pytest.raises(ValueError, match="text_files measure language models; a classifier needs test_file"):
        calibrate.main(["--model", str(tmp_path / "classifier"), *text])


def test_a_profile_that_is_there_and_does_not_fit(saved, tmp_path, monkeypatch):
    """It may hold the figures of other devices, so it is refused, not replaced."""
    monkeypatch.setattr(calibrate, "measure_quality", None)
    folder = tmp_path / "model"
    random_model(seed=6).save_pretrained(folder)
    path = of(random_model(seed=5)).save(folder)
    for content, message in ((path.read_text(), "was measured on another model"), ("{", "cannot be read")):
        path.write_text(content)
        for what in (["--text_files", str(saved / "text.txt")], ["--timing_only"]):
            with pytest.raises(ValueError, match=message):
                calibrate.main(["--model", str(folder), *what])
        assert path.read_text() == content
    of(random_model(seed=6)).save(folder)
    with pytest.raises(ValueError, match=r"budgets must be among those with a quality, \[2, 4, 8, 16, 32\], got \[3\]"):
        calibrate.main(["--model", str(folder), "--timing_only", "--budgets", "3"])


# ---------------------------------------------------------------------------------------------------------------------
# The model's own methods.


def own_profile(model) -> BudgetProfile:
    return replace(profile(), model=fingerprint(model))


def test_a_model_chooses_by_its_profile(tmp_path):
    model = random_model()
    assert budget_profile(model) is None
    with pytest.raises(ValueError, match=r"choose_budget needs budget_profile\.json"):
        choose_budget(model, max_quality_drop=0.02)
    model.save_pretrained(tmp_path)
    own_profile(model).save(tmp_path)
    loaded = ESSMForCausalLM.from_pretrained(tmp_path)
    assert choose_budget(loaded, max_quality_drop=0.02) == 8
    assert choose_budget(loaded, max_latency_ms=3.0, phase="decode", batch_size=4, device=HERE) == 4
    with pytest.raises(ValueError, match="needs max_latency_ms, max_quality_drop or both"):
        choose_budget(loaded)


def test_a_smaller_model_carries_what_it_can_run(tmp_path):
    model = random_model(budget_presets={"sweet-spot": 8, "full": 32})
    model.save_pretrained(tmp_path / "large")
    own_profile(model).save(tmp_path / "large")
    whole = ESSMForCausalLM.from_pretrained(tmp_path / "large")
    whole.save_pretrained(tmp_path / "copy")
    assert read_profile(tmp_path / "copy", whole) == own_profile(model)
    read = ESSMForCausalLM.from_pretrained(tmp_path / "large", spectral_capacity=8)
    assert budget_profile(whole).quality.budgets == BUDGETS
    for i, small in enumerate((read, whole.truncate(8))):
        small.save_pretrained(tmp_path / str(i))
        again = ESSMForCausalLM.from_pretrained(tmp_path / str(i))
        assert read_profile(tmp_path / str(i)).quality.budgets == (2, 4, 8)
        assert budget_profile(again).quality.budgets == (2, 4, 8)
        assert choose_budget(again, max_quality_drop=0.0) == 8  # the full budget, now
        assert again(torch.tensor([[1, 2]]), spectral_budget="sweet-spot").spectral_budget == (8, 8)
        with pytest.raises(ValueError, match="unknown spectral_budget preset 'full'"):
            again(torch.tensor([[1, 2]]), spectral_budget="full")


def test_a_model_trained_on_is_saved_without_the_old_profile(tmp_path):
    model = random_model()
    model.save_pretrained(tmp_path / "old")
    own_profile(model).save(tmp_path / "old")
    trained = trained_further(ESSMForCausalLM.from_pretrained(tmp_path / "old"))
    trained.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new" / PROFILE_NAME).exists()
    with pytest.raises(ValueError, match="was measured on another model"):
        choose_budget(trained, max_quality_drop=0.02)
