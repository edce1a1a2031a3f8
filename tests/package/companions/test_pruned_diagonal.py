# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The pruning tools on the diagonal state space models: S5, LRU and S4D, saved and loaded."""

import pytest
import torch

from modeling_essm.companions import (
    allocate,
    certify,
    describe,
    hinf_norm,
    importance,
    prune,
    remove,
    restore,
    state_layers,
)

diagonal_ssm = pytest.importorskip("modeling_essm.companions.models")
Model, Config = diagonal_ssm.DiagonalSSMForCausalLM, diagonal_ssm.DiagonalSSMConfig
WORDS, WIDTH = 17, 4
every = pytest.mark.parametrize("name", ["s5", "lru", "s4d"])


def build(name, dtype=torch.float32):
    torch.manual_seed(0)
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = Config(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=2, state_size=6, parameterization=name, **ids
    )
    return Model(config).to(dtype).eval()


def logits(model):
    ids = torch.randint(3, WORDS, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits


@every
def test_a_pruned_model_is_saved_and_loaded(name, tmp_path):
    model = build(name)
    full = logits(model)
    layers = state_layers(model)
    assert [layer.kind for layer in layers] == [name, name] == [layer.kind for layer in describe(model).layers]
    plan = allocate(importance(model), amount=0.5)
    for own, layer, bounds in zip(plan.layers, layers, certify(plan, model)):
        assert 0 < hinf_norm(layer.read(), ~own.keep, points=64) <= bounds["best"] * (1 + 1e-9)
    prune(model, plan)
    masked = logits(model)
    assert (masked - full).abs().max() > 1e-3
    restore(model)
    assert torch.equal(logits(model), full)
    prune(model, plan)
    model.save_pretrained(tmp_path / "masked")
    assert torch.equal(logits(Model.from_pretrained(tmp_path / "masked").eval()), masked)
    assert remove(model) == plan.sizes == model.config.state_sizes
    scale = float(masked.abs().max())
    torch.testing.assert_close(logits(model), masked, rtol=1e-6, atol=2e-6 * scale)  # fp32 sums in another order
    model.save_pretrained(tmp_path / "removed")
    loaded, info = Model.from_pretrained(tmp_path / "removed", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.config.state_sizes == plan.sizes and torch.equal(logits(loaded.eval()), logits(model))
    assert [layer.modes for layer in describe(loaded).layers] == plan.kept


@pytest.mark.parametrize("name", ["s4d"])
def test_removal_is_exact_in_fp64(name):
    model = build(name, torch.float64)
    prune(model, allocate(importance(model, "energy"), amount=0.5))
    masked = logits(model)
    remove(model)
    torch.testing.assert_close(logits(model), masked, rtol=1e-13, atol=1e-14 * float(masked.abs().max()))


@pytest.mark.parametrize("name", ["lru", "s4d"])
def test_a_whole_layer_goes(name, tmp_path):
    model = build(name)
    with torch.no_grad():
        layers = state_layers(model)
        layers[1].module.C.mul_(1e-12)
    plan = allocate(importance(model, eps=1e-6), amount=0.6, min_keep=0)
    assert plan.kept[1] == 0
    prune(model, plan)
    masked = logits(model)
    assert remove(model)[1] == 0
    torch.testing.assert_close(logits(model), masked, rtol=1e-6, atol=2e-6 * float(masked.abs().max()))
    model.save_pretrained(tmp_path)
    loaded = Model.from_pretrained(tmp_path).eval()
    assert loaded.config.state_sizes[1] == 0 and torch.equal(logits(loaded), logits(model))
    with torch.no_grad():
        cached = loaded(torch.tensor([[3, 4, 5]]), use_cache=True)
        step = loaded(torch.tensor([[6]]), past_key_values=cached.past_key_values).logits[:, -1]
        torch.testing.assert_close(step, loaded(torch.tensor([[3, 4, 5, 6]])).logits[:, -1], rtol=1e-4, atol=1e-5)
    loaded(torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
    assert state_layers(loaded)[1].module.D.grad.any()


def test_both_directions():
    torch.manual_seed(0)
    config = Config(vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=1, state_size=6, bidirectional=True)
    model = diagonal_ssm.DiagonalSSMModel(config).double().eval()
    orders = {way: importance(model, bidirectional=way).scores[0] for way in ("paper", "exact", "released")}
    assert len({tuple(scores.tolist()) for scores in orders.values()}) == 3
    plan = allocate(importance(model, "aire_exact"), total=2)
    system = state_layers(model)[0].read()
    assert 0 < hinf_norm(system, ~plan.keep[0], points=64) <= certify(plan, model)[0]["best"] * (1 + 1e-9)
    prune(model, plan)
    with torch.no_grad():
        ids = torch.tensor([[3, 4, 5, 6, 7]])
        masked = model(ids).last_hidden_state
        assert remove(model) == [2]
        torch.testing.assert_close(model(ids).last_hidden_state, masked, rtol=1e-12, atol=1e-13)
