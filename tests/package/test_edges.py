# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What people do to models and this one got wrong: empty batches, NaN behind masks, transforms, library tables."""

import copy
import logging
import subprocess
import sys

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from helpers import HYBRID, assert_close, random_ids, random_model, variants
from torch.func import functional_call, grad, vmap
from transformers import TorchAoConfig, Trainer, TrainingArguments

from modeling_essm import ESSMConfig, ESSMForCausalLM, ESSMForSequenceClassification
from modeling_essm.budgets.weights import weights_checksum
from modeling_essm.packing import pool

IDS = random_ids(2, 12)


@variants
@torch.no_grad()
def test_a_batch_may_be_empty(variant):
    model, ids = random_model(**variant), IDS[:0]
    outputs = model(ids, attention_mask=torch.ones_like(ids), use_cache=True)
    for _ in range(2):
        outputs = model(ids[:, :1], past_key_values=outputs.past_key_values)
        assert outputs.logits.shape == (0, 1, 259)


@variants
def test_numbers_behind_a_mask_are_not_read(variant):
    """Neither outputs nor gradients; a hybrid's attention multiplies what it hides by 0."""
    model = random_model(**variant)
    embeds, mask = torch.randn(2, 9, 16), torch.ones(2, 9)
    mask[0, :3] = mask[1, 4:6] = 0
    labels = IDS[:, :9].masked_fill(mask == 0, -100)
    results = []
    for fill in (0.0, float("nan")):
        model.zero_grad()
        inputs = embeds.masked_fill(mask[..., None] == 0, fill).requires_grad_()
        outputs = model(inputs_embeds=inputs, attention_mask=mask, labels=labels)
        outputs.loss.backward()
        results.append(
            [outputs.logits[mask == 1], inputs.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
        )
    assert all(map(torch.equal, *results)) and all(t.isfinite().all() for t in results[1])


def test_features_behind_a_mask_are_not_read():
    model = random_model(ESSMForSequenceClassification, num_input_features=2, num_labels=3)
    features, mask = torch.randn(1, 9, 2), torch.ones(1, 9)
    mask[0, 6:] = 0
    features[0, 6:] = float("nan")
    model(input_features=features, attention_mask=mask, labels=torch.tensor([1])).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("length", [16_384, 70_000])
def test_long_rows_are_pooled_in_fp32(length):
    states = torch.full((1, length, 1), 60.0, dtype=torch.float16)
    assert pool(states, torch.ones(1, length), "mean").item() == 60.0


def test_constants_outlive_a_transform():
    """A filter made inside torch.func belonged to the transform, and a later compilation in that process failed."""
    code = """
import torch
from torch.func import functional_call, grad
from modeling_essm import ESSMConfig, ESSMForCausalLM
model = ESSMForCausalLM(ESSMConfig(hidden_size=8, num_hidden_layers=1, num_spectral_channels=2, filter_length=64))
ids = torch.arange(70)[None]
loss = lambda weights: functional_call(model, weights, (ids,), {"labels": ids}).loss
grad(loss)(dict(model.named_parameters()))
torch._dynamo.config.suppress_errors = False
torch.compile(model, backend="aot_eager")(ids).logits
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_gradients_of_single_samples():
    model, ids = random_model(), random_ids(3, 9)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, row):
        return functional_call(model, weights, (row[None],), {"labels": row[None], "use_cache": False}).loss

    together = vmap(grad(loss), (None, 0))(weights, ids)
    for i, row in enumerate(ids):
        for name, alone in grad(loss)(weights, row).items():
            assert_close(together[name][i], alone)


def test_a_users_compilation_decodes_with_a_static_cache():
    model, options = random_model(), {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(IDS, **options)
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(model.generate(IDS, cache_implementation="static", **options), expected)


def test_outputs_rebuilt_from_their_items_keep_the_budget():
    forward = convert_outputs_to_fp32(random_model().bfloat16().forward)
    outputs = forward(IDS, spectral_budget=3)
    assert outputs.logits.dtype == torch.float32 and outputs.spectral_budget == (3, 3)


def test_a_cache_of_the_whole_prompt_leaves_nothing_to_read():
    model = random_model()
    cache = model(IDS, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="has read 12 positions, but the prompt has 12"):
        model.generate(IDS, past_key_values=copy.deepcopy(cache), max_new_tokens=2)
    longer = torch.cat([IDS, IDS[:, :2]], 1)
    options = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(longer, past_key_values=cache, **options), model.generate(longer, **options))


def test_what_a_model_announces_is_what_it_does():
    plain, hybrid = random_model(), random_model(**HYBRID)
    assert not (plain._supports_sdpa or plain._supports_flash_attn) and hybrid._supports_sdpa
    assert not plain.is_backend_compatible() and not hybrid.is_backend_compatible()  # its state would be lost there
    assert not hasattr(plain.config, "rope_parameters") and hybrid.config.rope_parameters["rope_type"] == "default"
    assert plain.config == copy.deepcopy(plain.config) != hybrid.config
    signals = random_model(ESSMForSequenceClassification, num_input_features=2)
    assert (signals.main_input_name, plain.main_input_name) == ("input_features", "input_ids")
    hybrid.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="rope_parameters must have a rope_type"):
        ESSMForCausalLM(hybrid.config)


class Losses(Trainer):
    """The library's, for one loss without an update."""

    def __init__(self, model, folder, **options):
        arguments = TrainingArguments(str(folder), report_to=[], use_cpu=True, **options)
        super().__init__(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in IDS])

    def loss(self, ids):
        return self.compute_loss(self.model, {"input_ids": ids, "labels": ids.clone()})


@torch.no_grad()
def test_label_smoothing_predicts_the_next_token(tmp_path):
    """Where the library does not know a class by its name, smoothed labels are those of the present token."""
    model, epsilon = random_model(), 0.1
    log_p = model(IDS).logits[:, :-1].log_softmax(-1)
    nll = -log_p.gather(-1, IDS[:, 1:, None]).mean()
    expected = (1 - epsilon) * nll + epsilon * -log_p.mean()
    assert_close(Losses(model, tmp_path, label_smoothing_factor=epsilon).loss(IDS), expected)


def test_adapters_learn_on_quantised_weights(tmp_path):
    int8 = pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig
    random_model(hidden_size=32).save_pretrained(tmp_path)
    base = ESSMForCausalLM.from_pretrained(tmp_path, quantization_config=TorchAoConfig(int8()))
    torch.manual_seed(0)
    peft = pytest.importorskip("peft")
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


def test_training_weights_in_16_bits_warns_once(caplog):
    model = random_model()
    with caplog.at_level(logging.WARNING):
        logging.getLogger("transformers").propagate = True
        model.train().eval()
        assert "16 bits" not in caplog.text
        model.bfloat16().eval().train()
    assert "dtype=torch.float32" in caplog.text


def test_a_configuration_names_only_code_that_lies_beside_it(tmp_path):
    ESSMConfig().save_pretrained(tmp_path / "config")
    assert ESSMConfig.from_pretrained(tmp_path / "config").auto_map  # of this class, whatever the file says
    text = (tmp_path / "config" / "config.json").read_text()
    assert "configuration_essm.ESSMConfig" in text and "modeling_essm.ESSMModel" not in text
    random_model().save_pretrained(tmp_path / "model")
    assert "modeling_essm.ESSMModel" in (tmp_path / "model" / "config.json").read_text()


def test_edited_code_beside_the_weights_is_named(tmp_path, caplog):
    random_model().save_pretrained(tmp_path)
    logging.getLogger("transformers").propagate = True
    with caplog.at_level(logging.WARNING):
        ESSMForCausalLM.from_pretrained(tmp_path)
        assert "beside the weights" not in caplog.text
        with (tmp_path / "mixer_essm.py").open("a") as file:
            file.write("# mine\n")
        ESSMForCausalLM.from_pretrained(tmp_path)
    assert "mixer_essm.py beside the weights" in caplog.text


def test_merged_adapters_are_other_weights():
    model = random_model()
    before = weights_checksum(model)
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=2, target_modules=["up"], init_lora_weights=False)
    assert weights_checksum(peft.get_peft_model(copy.deepcopy(model), adapters).merge_and_unload()) != before
    assert weights_checksum(copy.deepcopy(model).bfloat16()) == before
