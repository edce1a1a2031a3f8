# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""LoRA adapters by PEFT, on linear layers and on the channels: they train, merge, load, and budgets stay nested."""

from typing import Any

import pytest
import torch
from helpers import assert_close, blocks, random_ids, random_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from modeling_essm import ESSMForCausalLM
from modeling_essm.training.budget_dropout import BudgetDropoutCallback, budget_schedule

peft = pytest.importorskip("peft")

LINEAR = {"target_modules": ["mixer.gate_in", "mixer.skip", "ffn.up", "ffn.down"]}
CHANNELS = {"target_parameters": ["mixer.channel_mixing"]}
TARGETS = {"linear": LINEAR, "both": LINEAR | CHANNELS}
IDS = random_ids(4, 20)
RANK, D = 3, 16


def adapted(model, **fields):
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, task_type="CAUSAL_LM", **fields))


def trained(model, steps: int = 10, budgets=(32, 5, 2)) -> tuple[Any, list[float]]:
    """In eval mode, and the losses."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    losses = []
    model.train()
    for step in range(steps):
        loss = model(input_ids=IDS, labels=IDS, spectral_budget=budgets[step % len(budgets)]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.eval(), losses


def merged(model) -> ESSMForCausalLM:
    """Merged twice: the first time PEFT leaves adapters inside a module that has one itself."""
    model.merge_and_unload()
    return model.merge_and_unload()


@torch.no_grad()
def logits(model, budget=None):
    return model(input_ids=IDS, spectral_budget=budget).logits


def adapter_gradients(model, budget: int) -> dict[str, torch.Tensor]:
    """Of the first mixer's channel adapter: A as (K, r, D), B as (D, r, K)."""
    model.train().zero_grad()
    model(input_ids=IDS, labels=IDS, spectral_budget=budget).loss.backward()
    mixer = model.base_model.model.model.layers[0].mixer
    A, B = mixer.lora_A["default"].weight.grad, mixer.lora_B["default"].weight.grad
    return {"A": A.reshape(-1, RANK, D), "B": B.reshape(D, RANK, -1)}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    random_model().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", TARGETS)
@blocks
def test_it_trains_and_merges(name, block):
    model, fields = random_model(**block), TARGETS[name]
    if block:
        fields = fields | {"target_modules": ["mixer.gate_in", "in_proj", "out_proj"]}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model, losses = trained(adapted(model, **fields))
    assert losses[9] < losses[0] - 0.02  # both at the full budget
    expected = {K: logits(model, K) for K in (2, 7, 32)}
    with model.disable_adapter():
        plain = logits(model, 7)
    assert (plain - expected[7]).abs().max() > 0.01
    model = merged(model)
    assert type(model) is ESSMForCausalLM and model.state_dict().keys() == before.keys()
    untouched = [key for key, value in model.state_dict().items() if torch.equal(value, before[key])]
    assert "model.embed_tokens.weight" in untouched and len(untouched) < len(before)
    for K, adapter in expected.items():
        assert_close(logits(model, K), adapter)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_what_a_merge_leaves_behind_is_not_saved_as_a_model(tmp_path):
    model, _ = trained(adapted(random_model(), **LINEAR | CHANNELS))
    left = model.merge_and_unload()
    with pytest.raises(ValueError, match=r"PEFT's adapters are still in this model: .* call it a second time"):
        left.save_pretrained(tmp_path / "left")
    expected = logits(left, 5)
    left = model.merge_and_unload()
    left.save_pretrained(tmp_path / "merged")
    assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval(), 5), expected)


def test_a_channel_is_one_of_pefts_experts():
    """(K, D_in, D_out) as (experts, out, in): each channel gets an update of rank r, B at its input side."""
    model = adapted(random_model(), **CHANNELS)
    start = model.base_model.model.model.layers[0].mixer.base_layer.channel_mixing.detach().clone()
    model, _ = trained(model)
    mixer = model.base_model.model.model.layers[0].mixer
    A, B = (layer["default"].weight.detach() for layer in (mixer.lora_A, mixer.lora_B))
    update = 2.0 * torch.einsum("ark,kro->kao", B.reshape(D, RANK, 32), A.reshape(32, RANK, D))
    weight = merged(model).model.layers[0].mixer.channel_mixing.detach()
    torch.testing.assert_close(weight - start, update, rtol=0, atol=1e-6)
    assert (torch.linalg.matrix_rank(update) == RANK).all()


@pytest.mark.parametrize("budget", [1, 5])
def test_gradients_reach_the_channels_of_the_budget_only(budget):
    model, _ = trained(adapted(random_model(), **CHANNELS))
    for name, gradient in adapter_gradients(model, budget).items():
        gradient = gradient if name == "A" else gradient.permute(2, 0, 1)
        assert (gradient[:budget].flatten(1).abs().amax(1) > 0).all(), name
        assert (gradient[budget:] == 0).all(), name


def test_budgets_stay_nested():
    """Channels above K are not read, not the adapter's either, so that cutting them changes nothing."""
    model, _ = trained(adapted(random_model(), **LINEAR | CHANNELS))
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


@pytest.mark.parametrize("name", TARGETS)
def test_saved_adapters_load(name, base, tmp_path):
    model, _ = trained(adapted(AutoModelForCausalLM.from_pretrained(base), **TARGETS[name]))
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    for loaded in (
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path),
        peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    ):
        for K in (3, 32):
            assert torch.equal(logits(loaded.eval(), K), logits(model, K))
    at_default = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path, spectral_budget=3)
    assert torch.equal(logits(at_default.eval()), logits(model, 3))
    merged(model).save_pretrained(tmp_path / "merged")
    assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval(), 3), logits(loaded, 3))


def test_adapters_of_a_model_of_fewer_channels(base, tmp_path):
    small, _ = trained(
        adapted(AutoModelForCausalLM.from_pretrained(base, spectral_capacity=8), **CHANNELS), budgets=[8]
    )
    small.save_pretrained(tmp_path / "channels")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "channels", spectral_capacity=8).eval()
    assert again.config.num_spectral_channels == 8 and torch.equal(logits(again), logits(small))
    with pytest.raises(RuntimeError, match=r"size mismatch for .*mixer\.lora_A"):  # a rank of its own per channel
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "channels")

    small, _ = trained(adapted(AutoModelForCausalLM.from_pretrained(base, spectral_capacity=8), **LINEAR), budgets=[8])
    small.save_pretrained(tmp_path / "linear")
    for capacity in (None, 16):  # these know nothing of channels
        whole = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "linear", spectral_capacity=capacity).eval()
        assert torch.equal(logits(whole, 8), logits(small, 8))


def test_an_adapter_of_channels_is_merged_before_it_is_cut():
    model, _ = trained(adapted(random_model(), **CHANNELS))
    expected = logits(model, 32)
    with pytest.raises(ValueError, match=r"an adapter of channel weights cannot be cut: call merge_and_unload\(\)"):
        model.truncate(4)
    assert torch.equal(logits(model, 32), expected)
    model, _ = trained(adapted(random_model(), **LINEAR))
    expected = logits(model, 4)
    assert torch.equal(logits(model.truncate(4)), expected)


def test_adapters_of_the_tied_embedding(base, tmp_path):
    """They train and load. A merge goes to the shared weight, as PEFT warns, unless it was untied before."""
    with pytest.warns(UserWarning, match="`ensure_weight_tying` is not set to True"):
        model = adapted(AutoModelForCausalLM.from_pretrained(base), target_modules=["lm_head"])
    model, losses = trained(model)
    assert losses[9] < losses[0] - 0.02
    expected = logits(model, 5)
    model.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval(), 5), expected)
    with pytest.warns(UserWarning, match="You can opt to merge the adapter after cloning the weights"):
        assert (logits(merged(model), 5) - expected).abs().max() > 0.1

    untied = AutoModelForCausalLM.from_pretrained(base, tie_word_embeddings=False)
    untied.lm_head.weight.data = untied.model.embed_tokens.weight.data.clone()
    model, _ = trained(adapted(untied, target_modules=["lm_head"]))
    expected = logits(model, 5)
    merged(model).save_pretrained(tmp_path / "untied")
    assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "untied").eval(), 5), expected)


def test_the_gates_output_is_refused_as_a_module_and_works_as_a_parameter():
    with pytest.raises(ValueError, match=r"Target module ESSMPrefixLinear\(\) is not supported"):
        adapted(random_model(), target_modules=["gate_out"])
    model, losses = trained(adapted(random_model(), target_parameters=["gate_out.weight"]))
    assert losses[9] < losses[0]
    expected = logits(model, 5)
    assert_close(logits(merged(model).truncate(5)), expected)


def test_budget_dropout_in_trainer(tmp_path):
    model = adapted(random_model(), **CHANNELS)
    ran = []
    model.base_model.model.model.register_forward_hook(lambda m, a, output: ran.append(output.spectral_budget[0]))
    settings = {"max_steps": 6, "per_device_train_batch_size": 2, "save_steps": 6, "report_to": [], "use_cpu": True}
    data = [{"input_ids": ids, "labels": ids} for ids in random_ids(16, 10)]
    schedule = budget_schedule("discrete", 32, seed=4)
    callbacks = [BudgetDropoutCallback(schedule)]
    Trainer(model, TrainingArguments(tmp_path, **settings), train_dataset=data, callbacks=callbacks).train()
    assert ran == [K for update in range(6) for K in schedule(update)] and len(set(ran)) > 2
    saved = {path.name for path in (tmp_path / "checkpoint-6").iterdir()}
    assert "adapter_model.safetensors" in saved and "model.safetensors" not in saved


def test_prompts_are_tuned_and_prefixes_are_not():
    sizes = {"num_attention_heads": 1, "num_layers": 2, "token_dim": D}  # PEFT asks configs for heads
    fields = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4, **sizes}
    model, losses = trained(peft.get_peft_model(random_model(), peft.PromptTuningConfig(**fields)))
    assert losses[9] < losses[0]
    tokens = model.generate(input_ids=IDS[:1, :5], spectral_budget=5, max_new_tokens=4, do_sample=False)
    again = model(input_ids=tokens, spectral_budget=5).logits[:, -5:-1].argmax(-1)
    assert torch.equal(again, tokens[:, 5:])
    model = peft.get_peft_model(random_model(), peft.PrefixTuningConfig(**fields))
    with pytest.raises(ValueError, match="past_key_values must be an ESSMCache, got DynamicCache"):
        model(input_ids=IDS)
