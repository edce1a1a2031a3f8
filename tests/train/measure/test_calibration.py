# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What calibration measures: quality with its errors, and times."""

import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import random_model
from profiles import as_here
from training_run import bpe_tokenizer, documents

from essm_train.commands import calibrate
from essm_train.measure import calibration, evaluation
from essm_train.measure.calibration import HeldOut, measure_quality
from essm_train.measure.metric import BITS_PER_BYTE, Metric
from essm_train.models import read_saved_config
from modeling_essm import ESSMForCausalLM, ESSMForSequenceClassification


@pytest.fixture(autouse=True)
def named_machine(monkeypatch):
    """The tests run HERE."""
    as_here(monkeypatch)


def test_standard_errors_are_those_of_paired_samples():
    generator = torch.Generator().manual_seed(0)
    hits = {K: (torch.rand(500, generator=generator) < p).double() for K, p in ((2, 0.5), (4, 0.8), (8, 0.8))}
    held_out = HeldOut(Metric("accuracy", True), lambda model, K: (hits[K], torch.ones(500).double()), 7, "coins")
    found = measure_quality(random_model(num_spectral_channels=8), held_out, (2, 4, 8))
    assert (found.metric, found.higher_is_better, found.data, found.samples) == ("accuracy", True, "coins", 500)
    assert found.values == pytest.approx([float(hits[K].mean()) for K in (2, 4, 8)])
    assert found.errors == pytest.approx([float(hits[K].std() / math.sqrt(500)) for K in (2, 4, 8)])
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
    assert found.errors[1] > 0.1 and found.drop_errors == pytest.approx((0, 0), abs=1e-12)


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
    expected = task.sweep(model, budgets=(2, 4))
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


def test_a_classifier_of_token_ids_is_timed():
    model = random_model(ESSMForSequenceClassification, num_labels=3)
    assert calibration.random_inputs(model, 2, 9)["input_ids"].shape == (2, 9)
    entry = calibration.measure_device(model, (4,), (2,), 9, 1, 1)
    assert [(row.phase, row.batch_size, row.budget) for row in entry.rows] == [("prefill", 2, 4)]
