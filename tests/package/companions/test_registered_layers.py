# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A layer of a user's own class: every tool works on it through its adapter."""

import pytest
import torch

from modeling_essm import companions
from modeling_essm.companions import DiagonalSystem, allocate, balanced_truncate, describe, importance, prune, remove


class Modes(torch.nn.Module):
    """y = C x, with complex weights and neither lti() nor set_lti()."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, dtype=torch.complex128, generator=generator)  # noqa: E731
        z = draw(6)
        self.poles = torch.nn.Parameter(z / z.abs() * (0.5 + 0.4 * torch.rand(6, generator=generator)))
        self.inputs, self.outputs = torch.nn.Parameter(draw(6, 2)), torch.nn.Parameter(draw(3, 6))


class ModesAdapter(companions.Adapter):
    def read(self, layer):
        return DiagonalSystem(layer.poles, layer.inputs, layer.outputs, "complex")

    def write(self, layer, system):
        for name, value in {"poles": system.lam, "inputs": system.B, "outputs": system.C}.items():
            setattr(layer, name, torch.nn.Parameter(value.clone()))

    def mode_dims(self, layer):
        return {"poles": 0, "inputs": 0, "outputs": 1}

    def output_names(self, layer):
        return ("outputs",)


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr("modeling_essm.companions.systems._REGISTERED", {})
    companions.register(Modes, ModesAdapter())
    return torch.nn.Sequential(Modes(0), torch.nn.ReLU(), Modes(1))


def test_described_pruned_and_removed(model):
    assert [layer.size for layer in describe(model).layers] == [6, 6]
    before = model[0].poles.detach().clone()
    prune(model, allocate(importance(model, "last"), amount=0.5, scope="uniform"))
    assert (model[0].outputs == 0).all(0).sum() == 3
    assert remove(model) == [3, 3] and {*model[0].poles.tolist()} < {*before.tolist()}


def test_truncated(model):
    report = balanced_truncate(model, sizes=[6, 3])
    assert report.sizes == [6, 3] and [len(model[0].poles), len(model[2].poles)] == [6, 3]
    assert report.layers[0].bound == 0 < report.layers[1].bound


def test_wrapped_layers_count_once(monkeypatch):
    layer = companions.DiagonalSSMModel(companions.DiagonalSSMConfig(state_size=4, num_hidden_layers=1, vocab_size=9))
    layer.layers[0].mixer = torch.compile(layer.layers[0].mixer)
    assert [layer.size for layer in describe(layer).layers] == [4]
