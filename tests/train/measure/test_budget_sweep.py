# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""train/budget_sweep.py on language models: bits per byte, the budgets it visits, and its record."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from training_run import bpe_tokenizer, documents

from essm_train.data.blocks import evaluation_blocks, text_labels, to_stream
from essm_train.data.tokens import ByteEncoder, TokenizerEncoder
from essm_train.measure.budget_sweep import read_sweep, sweep_budgets, sweep_record
from essm_train.measure.metric import ACCURACY, BITS_PER_BYTE
from essm_train.measure.scoring import num_scored
from modeling_essm.budgets.curve import BudgetCurve
from modeling_essm.training.byte_tokenizer import EOS_ID, VOCAB_SIZE


class FixedLogits(nn.Module):
    """A language model that is a table: logits of the next token given this one, (vocabulary, vocabulary)."""

    def __init__(self, table: torch.Tensor, capacity: int = 32):
        super().__init__()
        self.table, self.device = table, table.device
        self.config = SimpleNamespace(num_spectral_channels=capacity)
        self.seen: list[int] = []

    def forward(self, input_ids, use_cache, spectral_budget):
        self.seen.append(spectral_budget)
        return SimpleNamespace(logits=self.table[input_ids])


def byte_blocks(document: bytes, block_size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the document, cut into two."""
    stream, _ = to_stream([("one", document[:40]), ("two", document[40:])], ByteEncoder())
    input_ids = evaluation_blocks(stream, block_size, 1000)
    return input_ids, text_labels(input_ids)


def test_uniform_model_has_eight_bits_per_byte():
    table = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    table[:, 256:] = -math.inf
    sweep = sweep_budgets(FixedLogits(table), *byte_blocks(random.Random(0).randbytes(1000)))
    assert sweep.budgets == (2, 3, 4, 6, 8, 12, 16, 24, 32)
    assert sweep.values == pytest.approx([8.0] * 9, abs=1e-5)
    assert all(speed > 0 for speed in sweep.speeds)


def test_bits_per_byte_score_the_next_byte():
    successor = torch.full((VOCAB_SIZE, VOCAB_SIZE), -100.0)
    successor[torch.arange(256), (torch.arange(256) + 1) % 256] = 0.0  # knows that bytes count upwards
    successor[EOS_ID] = 0.0  # and nothing after the end of a document
    input_ids, labels = byte_blocks(bytes(i % 256 for i in range(1000)))
    scored = 1000 - 1
    sweep = sweep_budgets(FixedLogits(successor), input_ids, labels, budgets=[4])
    assert sweep.values[0] == pytest.approx(math.log2(VOCAB_SIZE) / scored, rel=1e-3)
    halved = sweep_budgets(FixedLogits(successor), input_ids, labels, budgets=[4], num_bytes=2 * scored)
    assert halved.values[0] == pytest.approx(sweep.values[0] / 2)


def test_tokens_of_any_length_are_scored_per_byte():
    """A model that is uniform over V tokens needs log2 V bits for each, and a token stands for several bytes."""
    encoder = TokenizerEncoder(bpe_tokenizer(documents()), "mine")
    texts = [text for text in documents() if text]
    stream, bytes_per_token = to_stream([("a test", text) for text in texts], encoder)
    input_ids = evaluation_blocks(stream, 16, 1000, encoder.pad_id)
    labels = text_labels(input_ids, encoder.special_ids)
    model = FixedLogits(torch.zeros(encoder.vocab_size, encoder.vocab_size))
    sweep = sweep_budgets(model, input_ids, labels, budgets=[4], num_bytes=num_scored(labels) * bytes_per_token)
    num_bytes = sum(len(text) for text in texts)
    num_tokens = len(stream) - len(texts)
    assert num_scored(labels) == num_tokens - 1  # the first is context, <eos> and padding are not scored
    assert sweep.values[0] == pytest.approx(num_tokens * math.log2(encoder.vocab_size) / num_bytes, rel=1e-6)


def test_sweep_runs_each_budget_up_to_the_capacity():
    model = FixedLogits(torch.zeros(VOCAB_SIZE, VOCAB_SIZE), capacity=10)
    sweep = sweep_budgets(model, *byte_blocks(bytes(200)), budgets=(4, 2))
    assert sweep.budgets == (2, 4, 10) and set(model.seen) == {2, 4, 10}
    assert sweep_budgets(model, *byte_blocks(bytes(200)), budgets=(4, 16, 32)).budgets == (4, 10)


def test_a_record_is_read_as_it_was_written():
    for metric in (BITS_PER_BYTE, ACCURACY):
        sweep = BudgetCurve(*metric, (2, 4, 8), (0.5, 0.71, 0.8), (3.0, 2.0, 1.0))
        record = sweep_record(sweep)
        assert read_sweep(record) == sweep and ("bits_per_byte" in record) == (metric == BITS_PER_BYTE)
        assert (record["sweet_spot"], record["collapse_boundary"]) == (sweep.sweet_spot, sweep.collapse_boundary)
