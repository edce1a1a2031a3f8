# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Small weights by torchao, through the library: linear layers are int8 or int4, and budgets stay prefixes."""

import copy

import pytest
import torch
from helpers import assert_close, blocks, random_ids, random_model
from torch import nn
from transformers import TorchAoConfig

from modeling_essm import ESSMForCausalLM

quantization = pytest.importorskip("torchao.quantization")
BITS = {
    "int8": quantization.Int8WeightOnlyConfig(),
    "int4": quantization.IntxWeightOnlyConfig(torch.int4, quantization.PerGroup(32)),
}
LINEAR = {"gate_in", "in_proj", "out_proj", "up", "down", "skip"}
IDS = random_ids(3, 30)


@torch.no_grad()
def outputs(model, budget=None):
    return model(IDS, spectral_budget=budget).logits


def in_full(model):
    """A copy with the same weights in fp32."""
    full = copy.deepcopy(model)
    for module in full.modules():
        if isinstance(module, nn.Linear) and hasattr(module.weight, "qdata"):
            module.weight = nn.Parameter(module.weight.dequantize())
    return full


@pytest.mark.parametrize("bits", BITS)
@blocks
def test_linear_layers_are_small_and_a_budget_is_a_prefix(block, bits, tmp_path):
    large, load = random_model(**block, hidden_size=32), ESSMForCausalLM.from_pretrained
    options = {"quantization_config": TorchAoConfig(BITS[bits])}
    large.save_pretrained(tmp_path / "full")
    model = load(tmp_path / "full", **options)
    small = {name for name, parameter in model.named_parameters() if hasattr(parameter, "qdata")}
    linear = {name for name, module in large.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    assert small == {f"{name}.weight" for name in linear} and {name.split(".")[-1] for name in linear} <= LINEAR
    full = in_full(model)
    for budget in (1, 5, 32):
        assert_close(outputs(model, budget), outputs(full, budget), atol=1e-4)  # scaled before or after the product
        assert (outputs(model, budget) - outputs(large, budget)).abs().max() > 1e-3
    read, cut = load(tmp_path / "full", spectral_capacity=8, **options), copy.deepcopy(model).truncate(8)
    assert read.config.capacities == cut.config.capacities == (8, 8)
    assert_close(outputs(cut), outputs(model, 8))
    expected = outputs(large, 8)  # rows that are read as a prefix have scales of their own
    assert (outputs(read) - expected).norm() < 2 * (outputs(cut) - expected).norm()
    greedy = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    rows = model.generate(IDS[:2], spectral_budget=torch.tensor([4, 20]), **greedy)
    assert torch.equal(rows[:1], model.generate(IDS[:1], spectral_budget=4, **greedy))

    model.save_pretrained(tmp_path / "small")  # a saved copy is the model, and loads whole
    again, found = load(tmp_path / "small", output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(outputs(again, 7), outputs(model, 7))
    assert torch.equal(again.generate(IDS[:1], spectral_budget=4, **greedy), rows[:1])
    assert again.lm_head.weight is again.model.embed_tokens.weight
    with pytest.raises(ValueError, match="spectral_capacity reads plain weights: load a quantised checkpoint whole"):
        load(tmp_path / "small", spectral_capacity=7)
    if bits == "int4" and block:  # a group of 32 columns is that of several channels
        with pytest.raises(ValueError, match=r"weights \(32, .*cannot be cut: cut the model first, with"):
            model.truncate(3)
        assert torch.equal(outputs(again, 3), outputs(model, 3))


@pytest.mark.slow  # needs peft
def test_adapters_learn_on_quantised_weights(tmp_path):
    peft, config = pytest.importorskip("peft"), TorchAoConfig(BITS["int8"])
    random_model(hidden_size=64, gate_hidden_size=64).save_pretrained(tmp_path)
    base = ESSMForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["up", "down"])).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(6):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
