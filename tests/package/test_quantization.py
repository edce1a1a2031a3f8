# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Small weights by torchao, through the library: linear layers are int8, channels stay, and budgets stay prefixes."""

import copy

import pytest
import torch
from helpers import assert_close, blocks, random_ids, random_model
from transformers import TorchAoConfig

from modeling_essm import ESSMForCausalLM

Int8WeightOnlyConfig = pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig
LINEAR = {"gate_in", "in_proj", "out_proj", "rates", "up", "down", "skip"}
IDS = random_ids(3, 30)


@torch.no_grad()
def outputs(model, budget=None):
    return model(IDS, spectral_budget=budget).logits


@blocks
def test_linear_layers_are_int8_and_a_budget_is_a_prefix(block, tmp_path):
    large, load = random_model(**block, hidden_size=32), ESSMForCausalLM.from_pretrained
    int8 = {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}
    large.save_pretrained(tmp_path / "full")
    model = load(tmp_path / "full", **int8)
    small = {name for name, parameter in model.named_parameters() if hasattr(parameter, "qdata")}
    linear = {name for name, module in large.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    assert small == {f"{name}.weight" for name in linear} and {name.split(".")[-1] for name in linear} <= LINEAR
    for budget in (5, 32):
        expected = outputs(large, budget)
        assert 0 < (outputs(model, budget) - expected).norm() < 0.05 * expected.norm()
    read, cut = load(tmp_path / "full", spectral_capacity=5, **int8), copy.deepcopy(model).truncate(5)
    assert read.config.capacities == cut.config.capacities == (5, 5)
    assert_close(outputs(cut), outputs(model, 5))
    expected = outputs(large, 5)  # of the elastic block's rows a prefix has scales of its own
    assert (outputs(read) - expected).norm() < 0.05 * expected.norm()
    greedy = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    rows = model.generate(IDS[:2], spectral_budget=torch.tensor([4, 20]), **greedy)
    assert torch.equal(rows[:1], model.generate(IDS[:1], spectral_budget=4, **greedy))

    model.save_pretrained(tmp_path / "small")  # a saved copy is the model, and loads whole
    again, found = load(tmp_path / "small", output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(outputs(again, 7), outputs(model, 7))
    assert again.lm_head.weight is again.model.embed_tokens.weight
    with pytest.raises(ValueError, match="spectral_capacity reads plain weights: load a quantised checkpoint whole"):
        load(tmp_path / "small", spectral_capacity=7)
