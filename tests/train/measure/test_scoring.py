# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/measure/scoring.py: what is scored one by one adds up to what is reported."""

import pytest
import torch
from accelerate import Accelerator
from helpers import random_ids, random_model

from essm_train.data.blocks import text_labels
from essm_train.data.readers import FeatureReader, Sample
from essm_train.data.rows import collate
from essm_train.measure.scoring import Predictor, block_nats, num_scored, total_nats
from modeling_essm import ESSMForSequenceClassification


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_blocks_add_up_to_the_total(batch_size):
    model, ids = random_model(), random_ids(7, 20)
    ids[2, 11:], ids[5, 1:] = 258, 258  # special tokens, which are not scored
    labels = text_labels(ids)
    nats = block_nats(model, ids, labels, 8, batch_size)
    total = total_nats(model, ids, labels, 8, batch_size)
    assert nats.shape == (7,) and nats.dtype == torch.float64 and nats[5] == 0
    assert nats.sum().item() == pytest.approx(total, rel=1e-6)  # fp32 sums within a batch
    log_p = model(ids, spectral_budget=8).logits.double().log_softmax(-1)[:, :-1]
    expected = -log_p.gather(-1, ids[:, 1:, None])[..., 0] * (labels[:, 1:] != -100)
    assert total == pytest.approx(expected.sum().item(), rel=1e-5)
    assert num_scored(labels) == 7 * 19 - 9 - 19


def test_predictions_do_not_depend_on_batches_or_accelerator():
    model = random_model(ESSMForSequenceClassification, num_labels=5, num_input_features=1)
    reader = FeatureReader("x", 64, None, "float32", "auto")
    generator = torch.Generator().manual_seed(0)
    samples = [Sample(torch.randn(9, 1, generator=generator).numpy(), i % 5) for i in range(11)]
    batch = collate(reader, samples)
    expected = model(input_features=batch["input_features"], spectral_budget=4).logits.argmax(-1)
    assert len(set(expected.tolist())) > 1
    for size in (1, 4, 11):
        for accelerator in (None, Accelerator()):
            predict = Predictor(lambda some: collate(reader, some), size, accelerator)
            assert torch.equal(predict(model, samples, 4), expected)
    assert set(predict.batch(samples, 8)) == {"input_features"}
