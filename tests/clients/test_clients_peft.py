# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""LoRA adapters by PEFT, on linear layers and on the channels: they train, merge, load, and budgets stay nested."""

from typing import Any

import pytest
import torch
from helpers import BLOCKS, assert_close, blocks, random_ids, random_model
from transformers import AutoModelForCausalLM

from modeling_essm import ESSMForCausalLM
from modeling_essm.decoding import compile_decoding

pytestmark = pytest.mark.slow
peft = pytest.importorskip("peft")

LINEAR = {"target_modules": ["mixer.gate_in", "mixer.skip", "ffn.up", "ffn.down", "in_proj", "out_proj"]}
CHANNELS = {"target_parameters": ["mixer.channel_mixing"]}
TARGETS = {"linear": LINEAR, "both": LINEAR | CHANNELS, "all": {"target_modules": "all-linear"}}
IDS = random_ids(4, 20)
RANK, D = 3, 16


def adapted(model, **fields):
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, task_type="CAUSAL_LM", **fields))


def trained(model, budgets=(32, 5, 2), by=0.02) -> Any:
    """In eval mode; it has learned something at the first budget."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    losses = []
    model.train()
    for step in range(10):
        losses.append(model(input_ids=IDS, labels=IDS, spectral_budget=budgets[step % len(budgets)]).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[9] < losses[0] - by
    return model.eval()


def merged(model) -> ESSMForCausalLM:
    """Merged twice: the first time PEFT leaves adapters inside a module that has one itself."""
    model.merge_and_unload()
    return model.merge_and_unload()


@torch.no_grad()
def logits(model, budget=None):
    return model(input_ids=IDS, spectral_budget=budget).logits


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("base"))


def saved(folder, **fields) -> str:
    random_model(**fields).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", TARGETS)
@blocks
def test_it_trains_loads_and_merges(name, block, tmp_path):
    base = saved(tmp_path / "base", **block)
    model = AutoModelForCausalLM.from_pretrained(base)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model = trained(adapted(model, **TARGETS[name]))
    expected = {K: logits(model, K) for K in (2, 7, 32)}
    adapter, load = tmp_path / "adapter", peft.AutoPeftModelForCausalLM.from_pretrained
    model.save_pretrained(adapter)
    assert {path.name for path in adapter.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    for loaded in (
        load(adapter),
        peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter),
        AutoModelForCausalLM.from_pretrained(adapter),
    ):
        assert all(torch.equal(logits(loaded.eval(), K), expected[K]) for K in (2, 32))
    assert torch.equal(logits(load(adapter, spectral_budget=2).eval()), expected[2])
    with model.disable_adapter():
        assert (logits(model, 7) - expected[7]).abs().max() > 0.01
    for change in (model.merge_adapter, model.unmerge_adapter):
        change()
        assert_close(logits(model, 7), expected[7])
    if name == "both":
        with pytest.raises(ValueError, match=r"PEFT's adapters are still in this model: .* call it a second time"):
            model.merge_and_unload().save_pretrained(tmp_path / "left")
    model = merged(model)
    assert type(model) is ESSMForCausalLM and model.state_dict().keys() == before.keys()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    untouched = [key for key, value in model.state_dict().items() if torch.equal(value, before[key])]
    assert "model.embed_tokens.weight" in untouched and len(untouched) < len(before)
    model.save_pretrained(tmp_path / "merged")
    for whole in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()):
        for K, adapter in expected.items():
            assert_close(logits(whole, K), adapter)
    assert_close(logits(model.truncate(7)), expected[7])


def test_a_channel_is_one_of_pefts_experts():
    """(K, D_in, D_out) as (experts, out, in): each channel gets an update of rank r, B at its input side."""
    model = trained(adapted(random_model(), **CHANNELS))
    mixer = model.base_model.model.model.layers[0].mixer
    start = mixer.base_layer.channel_mixing.detach().clone()
    A, B = (layer["default"].weight for layer in (mixer.lora_A, mixer.lora_B))
    update = 2.0 * torch.einsum("ark,kro->kao", B.view(D, RANK, 32), A.view(32, RANK, D)).detach()
    # Gradients reach the channels of the budget only.
    model.train()(input_ids=IDS, labels=IDS, spectral_budget=5).loss.backward()
    for gradient in (A.grad.view(32, -1), B.grad.view(D, RANK, 32).permute(2, 0, 1).flatten(1)):
        assert (gradient[:5].abs().amax(1) > 0).all() and (gradient[5:] == 0).all()
    weight = merged(model).model.layers[0].mixer.channel_mixing.detach()
    torch.testing.assert_close(weight - start, update, rtol=0, atol=1e-6)
    assert (torch.linalg.matrix_rank(update) == RANK).all()


def test_budgets_stay_nested():
    """Channels above K are not read, not the adapter's either, so that cutting them changes nothing."""
    model = trained(adapted(random_model(), **LINEAR | CHANNELS))
    expected = logits(model, 5)
    prompt = {"input_ids": IDS[:2, :6], "max_new_tokens": 6, "do_sample": False}
    tokens = model.generate(**prompt, spectral_budget=5)
    for layer in model.base_model.model.model.layers:
        with torch.no_grad():
            layer.mixer.base_layer.channel_mixing[5:] = torch.nan
            layer.mixer.lora_A["default"].weight.view(32, RANK, D)[5:] = torch.nan
            layer.mixer.lora_B["default"].weight.view(D, RANK, 32)[..., 5:] = torch.nan
    assert torch.equal(logits(model, 5), expected)
    assert logits(model, 6).isnan().any()
    model = merged(model).truncate(5)
    assert_close(logits(model), expected)
    assert torch.equal(model.generate(**prompt), tokens)


def test_adapters_of_a_model_of_fewer_channels(base, tmp_path):
    load = peft.AutoPeftModelForCausalLM.from_pretrained
    for fields, capacities in ((CHANNELS, [8]), (LINEAR, [None, 16])):  # the latter know nothing of channels
        small = AutoModelForCausalLM.from_pretrained(base, spectral_capacity=8)
        small = trained(adapted(small, **fields), budgets=[8])
        small.save_pretrained(tmp_path)
        for capacity in capacities:
            assert torch.equal(logits(load(tmp_path, spectral_capacity=capacity).eval(), 8), logits(small, 8))
        if fields is CHANNELS:
            with pytest.raises(RuntimeError, match=r"size mismatch for .*mixer\.lora_A"):  # a rank per channel
                load(tmp_path)


@pytest.mark.parametrize("block, targets", [({}, CHANNELS), (BLOCKS[1], LINEAR)], ids=["paper", "elastic"])
def test_an_adapter_of_channels_is_merged_before_it_is_cut(block, targets):
    model = adapted(random_model(**block), **targets)
    with pytest.raises(ValueError, match=r"an adapter of channel weights cannot be cut: call merge_and_unload\(\)"):
        model.truncate(4)
    model = trained(adapted(random_model(), **LINEAR))
    expected = logits(model, 4)
    assert torch.equal(logits(model.truncate(4)), expected)


def test_an_adapter_is_not_read_as_a_prefix(base, tmp_path):
    adapted(AutoModelForCausalLM.from_pretrained(base), **LINEAR).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="an adapter cannot be cut: load it whole"):
        AutoModelForCausalLM.from_pretrained(tmp_path, spectral_capacity=8)


def test_whole_mixers_trained_beside_an_adapter_are_not_cut():
    model = adapted(random_model(**BLOCKS[1]), target_modules=["embed_tokens"], modules_to_save=["mixer"])
    with pytest.raises(ValueError, match="an adapter of channel weights cannot be cut"):
        model.truncate(4)


@torch.no_grad()
def test_steps_compiled_with_an_adapter_end_where_it_does():
    model = adapted(random_model(), init_lora_weights=False, **LINEAR).eval()
    compile_decoding(model, [5], backend="eager")
    assert model.get_base_model().decoding_steps
    options = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": None, "spectral_budget": 5}
    with model.disable_adapter():
        found = model.generate(input_ids=IDS[:1], **options)
        model.get_base_model().decoding_steps = None
        assert torch.equal(found, model.generate(input_ids=IDS[:1], **options))


@pytest.mark.parametrize(
    "block, scores", [({}, "gate_out.weight"), (BLOCKS[1], "gate_weight")], ids=["paper", "elastic"]
)
def test_the_gates_output_is_refused_as_a_module_and_works_as_a_parameter(block, scores):
    if not block:
        with pytest.raises(ValueError, match=r"Target module ESSMPrefixLinear\(\) is not supported"):
            adapted(random_model(), target_modules=["gate_out"])
    model = trained(adapted(random_model(**block), target_parameters=[scores]), by=0)
    expected = logits(model, 5)
    assert_close(logits(merged(model).truncate(5)), expected)


def test_prompts_are_tuned_and_prefixes_are_not():
    sizes = {"num_attention_heads": 1, "num_layers": 2, "token_dim": D}  # PEFT asks configs for heads
    fields = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4, **sizes}
    model = trained(peft.get_peft_model(random_model(), peft.PromptTuningConfig(**fields)), by=0)
    tokens = model.generate(input_ids=IDS[:1, :5], spectral_budget=5, max_new_tokens=4, do_sample=False)
    assert torch.equal(model(input_ids=tokens, spectral_budget=5).logits[:, -5:-1].argmax(-1), tokens[:, 5:])
    model = peft.get_peft_model(random_model(), peft.PrefixTuningConfig(**fields))
    with pytest.raises(ValueError, match="past_key_values must be an ESSMCache, got DynamicCache"):
        model(input_ids=IDS)
