# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The classifier of pairs: one encoder for both documents, whose codes the head compares."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_ids, random_model
from transformers import AutoModelForSequenceClassification

from essm_train.pairs import ESSMForPairClassification, ESSMPairConfig

IDS = random_ids(3, 2, 20)


def pairs(**fields):
    return random_model(ESSMForPairClassification, **fields)


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_logits_compare_the_codes_of_both_documents(pooling):
    """Whatever stands behind them, and at a budget for each pair."""
    model, lengths, budgets = pairs(classifier_pooling=pooling, num_labels=3), [20, 11, 1], torch.tensor([2, 32, 7])
    mask = (torch.arange(20) < torch.tensor(lengths)[:, None, None]).long().expand(3, 2, 20)
    logits = model(IDS.masked_fill(mask == 0, 256), mask, spectral_budget=budgets).logits
    for i, (n, K) in enumerate(zip(lengths, budgets.tolist())):
        hidden = model.model(IDS[i, :, :n], spectral_budget=K).last_hidden_state
        a, b = hidden.mean(1) if pooling == "mean" else hidden[:, -1]
        assert_close(logits[i], model.score(F.gelu(model.head(torch.cat([a, b, a * b, a - b])))))


def test_it_trains():
    model, labels = pairs(), torch.tensor([0, 1, 1])
    outputs = model(IDS, labels=labels)
    assert_close(outputs.loss, F.cross_entropy(outputs.logits, labels))
    outputs.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_it_is_saved_without_code_and_loads_whole_or_as_a_prefix(tmp_path):
    model = pairs(num_labels=3, head_hidden_size=24)
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(loaded) is ESSMForPairClassification and loaded.head.out_features == 24
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    prefix = AutoModelForSequenceClassification.from_pretrained(tmp_path, spectral_capacity=5)
    assert torch.equal(prefix(IDS).logits, model(IDS, spectral_budget=5).logits)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": IDS[:, 0]}, r"input_ids must have shape \(B, 2, L\)"),
        ({"input_ids": IDS, "attention_mask": torch.ones(3, 20)}, r"attention_mask must be \(3, 2, 20\)"),
        ({"input_ids": IDS, "spectral_budget": torch.tensor([2, 3])}, r"shape \(3,\)"),
    ],
    ids=["shape", "mask", "budgets"],
)
def test_bad_calls(arguments, message):
    with pytest.raises(ValueError, match=message):
        pairs()(**arguments)


def test_bad_fields():
    with pytest.raises(Exception, match="head_hidden_size"):
        ESSMPairConfig(head_hidden_size=0)
    with pytest.raises(ValueError, match="reads token ids: num_input_features must be None, got 3"):
        pairs(num_input_features=3)


@torch.no_grad()
def test_pairs_of_one_budget_as_a_tensor():
    model = pairs()
    assert torch.equal(model(IDS, spectral_budget=torch.tensor([4, 4, 4])).logits, model(IDS, spectral_budget=4).logits)
