# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Bits per byte and accuracy against hand computation, at every budget up to the capacity; the record of a sweep."""

import functools
import json
import math
import random
from types import SimpleNamespace

import pytest
import torch
from helpers import random_ids, random_model
from torch import nn
from training_run import bpe_tokenizer, documents

from essm_train.data.blocks import evaluation_blocks, text_labels, to_stream
from essm_train.data.readers import FeatureReader, Sample
from essm_train.data.rows import Split, collate
from essm_train.data.tokens import ByteEncoder, TokenizerEncoder
from essm_train.measure.budget_sweep import read_sweep, save_sweep, sweep_budgets
from essm_train.measure.scoring import ACCURACY, BITS_PER_BYTE, HeldOut, block_nats, hold_out_blocks, hold_out_samples
from modeling_essm import ESSMForSequenceClassification
from modeling_essm.budgets.curve import BudgetCurve
from modeling_essm.training.byte_tokenizer import EOS_ID, VOCAB_SIZE


class FixedLogits(nn.Module):
    """A language model that is a table: logits of the next token given this one, (vocabulary, vocabulary)."""

    def __init__(self, table: torch.Tensor, capacity: int = 32):
        super().__init__()
        self.table, self.device = table, table.device
        self.config = SimpleNamespace(num_spectral_channels=capacity)

    def forward(self, input_ids, use_cache, spectral_budget):
        return SimpleNamespace(logits=self.table[input_ids])


def held_out(text: str, bytes_per_token: float = 1.0) -> HeldOut:
    """Blocks of 32 of the text, cut into two."""
    stream, _ = to_stream([text[:40], text[40:]], ByteEncoder())
    return hold_out_blocks(evaluation_blocks(stream, 32, 1000), ByteEncoder.special_ids, bytes_per_token, 8, "a test")


def test_a_uniform_model_has_eight_bits_per_byte_at_every_budget():
    table = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    table[:, 256:] = -math.inf
    data = held_out(random.Random(0).randbytes(1000).decode("latin1"))
    sweep = sweep_budgets(FixedLogits(table), data)
    assert sweep.budgets == (2, 3, 4, 6, 8, 12, 16, 24, 32)
    assert sweep.values == pytest.approx([8.0] * 9, abs=1e-5)
    assert len(sweep.speeds) == 9 and min(sweep.speeds) > 0
    smaller = FixedLogits(table, capacity=10)
    assert sweep_budgets(smaller, data, (4,)).budgets == (4, 10)
    with pytest.raises(ValueError, match=r"budgets must be in \[1, 10\], got 16"):
        sweep_budgets(smaller, data, (16, 4))


def test_the_next_byte_is_scored():
    successor = torch.full((VOCAB_SIZE, VOCAB_SIZE), -100.0)
    successor[torch.arange(128), (torch.arange(128) + 1) % 128] = 0.0  # knows that bytes count upwards
    successor[EOS_ID] = 0.0  # and nothing after the end of a document
    text = "".join(chr(i % 128) for i in range(1000))
    bits = held_out(text).value(FixedLogits(successor), 4)
    assert bits == pytest.approx(math.log2(VOCAB_SIZE) / 999, rel=1e-3)
    assert held_out(text, bytes_per_token=2.0).value(FixedLogits(successor), 4) == pytest.approx(bits / 2)


def test_tokens_of_any_length_are_scored_per_byte():
    """A model that is uniform over V tokens needs log2 V bits for each, and a token stands for several bytes."""
    encoder = TokenizerEncoder(bpe_tokenizer(documents()), "mine")
    texts = [text for text in documents() if text]
    stream, bytes_per_token = to_stream(texts, encoder)
    blocks = evaluation_blocks(stream, 16, 1000, encoder.pad_id)
    model = FixedLogits(torch.zeros(encoder.vocab_size, encoder.vocab_size))
    found = hold_out_blocks(blocks, encoder.special_ids, bytes_per_token, 8, "texts").value(model, 4)
    num_bytes, num_tokens = sum(len(text) for text in texts), len(stream) - len(texts)
    scored = text_labels(blocks, encoder.special_ids)[:, 1:] != -100
    assert scored.sum() == num_tokens - 1  # the first is context
    assert found == pytest.approx(num_tokens * math.log2(encoder.vocab_size) / num_bytes, rel=1e-6)


@pytest.mark.parametrize("batch_size", [3, 7])
def test_blocks_add_up_to_the_total(batch_size):
    model, ids = random_model(), random_ids(7, 20)
    ids[2, 11:], ids[5, 1:] = 258, 258  # special tokens, which are not scored
    labels = text_labels(ids)
    nats = block_nats(model, ids, labels, 8, batch_size)
    assert nats.shape == (7,) and nats.dtype == torch.float64 and nats[5] == 0
    log_p = model(ids, spectral_budget=8).logits.double().log_softmax(-1)[:, :-1]
    expected = -log_p.gather(-1, ids[:, 1:, None])[..., 0] * (labels[:, 1:] != -100)
    assert nats.tolist() == pytest.approx(expected.sum(1).tolist(), rel=1e-5)


def test_predictions_do_not_depend_on_batches():
    model = random_model(ESSMForSequenceClassification, num_labels=5, num_input_features=1)
    reader = FeatureReader("x", 64, None, "float32", "auto")
    generator = torch.Generator().manual_seed(0)
    samples = [Sample(torch.randn(9, 1, generator=generator).numpy(), i % 5) for i in range(11)]
    features = collate(reader, samples)["input_features"]
    classes = model(input_features=features, spectral_budget=4).logits.argmax(-1)
    labels = torch.tensor([sample.label for sample in samples])
    labels[-1] = classes[-1]  # a hit, which would be missed
    assert 1 < (classes == labels).sum() < 11
    broken = random_model(ESSMForSequenceClassification, num_labels=5, num_input_features=1)
    broken.score.weight.data[0] = math.nan
    data = hold_out_samples(Split(samples, labels, ""), functools.partial(collate, reader), 4, "a test")
    with pytest.raises(ValueError, match=r"accuracy of a test; .*at K=4 must be finite, got nan"):
        data.value(broken, 4)
    assert math.isnan(data.value(broken, 4, finite=False))
    for size in (4, 5, 11):  # the last of two, of one, and of all
        data = hold_out_samples(Split(samples, labels, "noise"), lambda some: collate(reader, some), size, "")
        assert data.score(model, 4)[0].tolist() == (classes == labels).tolist() and [*data.inputs] == ["input_features"]


@pytest.mark.parametrize("metric", [BITS_PER_BYTE, ACCURACY])
def test_a_sweep_is_read_as_it_was_written(metric, tmp_path):
    timings = ({2: (1.0, 0.9), 4: (2.0, 1.9), 8: (3.0, 2.5)},)
    sweep = BudgetCurve(*metric, (2, 4, 8), (0.5, 0.71, 0.8), (3.0, 2.0, 1.0), timings=timings)
    save_sweep(sweep, tmp_path, model="mine")
    record = json.loads((tmp_path / "budget_sweep.json").read_text())
    assert read_sweep(record) == sweep and read_sweep(record).timings == timings and record["model"] == "mine"
    assert ("bits_per_byte" in record) == (metric == BITS_PER_BYTE)
    assert (record["sweet_spot"], record["collapse_boundary"]) == (sweep.sweet_spot, sweep.collapse_boundary)
