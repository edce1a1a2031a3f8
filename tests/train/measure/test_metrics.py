# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""train/metrics: `evaluate` modules against hand computation, without a network."""

import math

import numpy as np
import pytest
import torch

from essm_train.measure.metric import load_metric


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    import socket

    def refuse(*args, **kwargs):
        raise AssertionError("a metric looked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_accuracy_is_the_share_of_equal_classes():
    metric = load_metric("accuracy")
    assert metric.compute(predictions=[0, 2, 1, 1], references=[0, 1, 1, 2]) == {"accuracy": 0.5}
    predictions, references = torch.arange(10), np.arange(10) % 7
    assert metric.compute(predictions=predictions, references=references) == {"accuracy": 0.7}


def test_accuracy_in_batches_weighs_samples_not_batches():
    metric = load_metric("accuracy")
    metric.add_batch(predictions=[1], references=[1])
    metric.add_batch(predictions=[0, 0, 0], references=[1, 1, 0])
    assert metric.compute() == {"accuracy": 0.5}


def test_bits_per_byte_of_known_texts():
    metric = load_metric("bits_per_byte")
    uniform = [math.log(256)] * 5
    assert metric.compute(nats=uniform, bytes=[1] * 5)["bits_per_byte"] == pytest.approx(8.0, rel=1e-15)
    assert metric.compute(nats=[sum(uniform)], bytes=[5])["bits_per_byte"] == pytest.approx(8.0, rel=1e-15)
    # Tokens of 3, 1 and 0 bytes with probabilities 1/2, 1/8 and 1/4: 1 + 3 + 2 bits over 4 bytes.
    nats = [math.log(2), math.log(8), math.log(4)]
    assert metric.compute(nats=nats, bytes=[3, 1, 0])["bits_per_byte"] == pytest.approx(1.5, rel=1e-15)
    for pair in zip(nats, [3, 1, 0]):
        metric.add_batch(nats=[pair[0]], bytes=[pair[1]])
    assert metric.compute()["bits_per_byte"] == pytest.approx(1.5, rel=1e-15)


def test_metrics_refuse_what_has_no_value():
    with pytest.raises(ValueError, match="at least one prediction, got none"):
        load_metric("accuracy").compute(predictions=[], references=[])
    with pytest.raises(ValueError, match=r"number of predictions \(1\) and references \(2\)"):
        load_metric("accuracy").compute(predictions=[1], references=[1, 2])
    for nats, sizes, message in (
        ([1.0], [0], "at least one byte, got none"),
        ([math.nan], [1], "nats must be finite and at least 0, got nan"),
        ([-1.0], [1], "nats must be finite and at least 0, got -1.0"),
        ([1.0, 1.0], [2, -1], "bytes must be at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            load_metric("bits_per_byte").compute(nats=nats, bytes=sizes)
