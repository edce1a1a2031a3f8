# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What people do to models and this one got wrong: empty batches, NaN behind masks, transforms, library tables."""

import copy
import json
import logging
import shutil
import subprocess
import sys

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from helpers import HYBRID, assert_close, captured_warnings, filled, hub_snapshot, random_ids, random_model, variants
from torch.func import functional_call, grad, vmap
from transformers import TorchAoConfig, Trainer, TrainingArguments

from modeling_essm import ESSMCache, ESSMConfig, ESSMForCausalLM, ESSMForSequenceClassification
from modeling_essm.cache_essm import ESSMStaticCache
from modeling_essm.decoding import speculate
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


@pytest.mark.parametrize("name", ["past_key_values", "state_lengths"])
def test_a_classifier_reads_whole_rows(name):
    with pytest.raises(ValueError, match=f"a classifier reads whole rows, and takes no {name}"):
        random_model(ESSMForSequenceClassification)(IDS, **{name: torch.tensor([3, 3])})


@pytest.mark.parametrize("length", [16_384, 70_000])
def test_long_rows_are_pooled_in_fp32(length):
    states = torch.full((1, length, 1), 60.0, dtype=torch.float16)
    assert pool(states, torch.ones(1, length), "mean").item() == 60.0


def test_constants_outlive_a_transform():
    """A filter made inside torch.func belonged to the transform, and a later compilation in that process failed."""
    code = """
import sys
import torch
from torch.func import functional_call, grad
from modeling_essm import ESSMConfig, ESSMForCausalLM
assert not any(name.startswith("modeling_essm.companions") for name in sys.modules)
model = ESSMForCausalLM(ESSMConfig(hidden_size=8, num_hidden_layers=1, num_spectral_channels=2, filter_length=64))
ids = torch.arange(70)[None]
loss = lambda weights: functional_call(model, weights, (ids,), {"labels": ids}).loss
grad(loss)(dict(model.named_parameters()))
torch._dynamo.config.suppress_errors = False
torch.compile(model, backend="aot_eager")(ids).logits
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


MASK = torch.ones(3, 20, dtype=torch.int64)
MASK[0, :3] = MASK[1, 15:] = MASK[2, 5:7] = 0
SAMPLES = {
    "short": (ESSMForCausalLM, {}, {"input_ids": random_ids(3, 5), "labels": random_ids(3, 5)}),
    "long": (ESSMForCausalLM, {}, {"input_ids": random_ids(3, 20), "labels": random_ids(3, 20)}),
    "classes": (
        ESSMForSequenceClassification,
        {"num_labels": 3},
        {"input_ids": random_ids(3, 20), "attention_mask": MASK, "labels": torch.arange(3)},
    ),
    "features": (
        ESSMForSequenceClassification,
        {"num_labels": 3, "num_input_features": 2},
        {"input_features": torch.randn(3, 5, 2), "attention_mask": MASK[:, :5], "labels": torch.arange(3)},
    ),
}


@pytest.mark.parametrize("kind", SAMPLES)
@variants
def test_gradients_of_single_samples(variant, kind):
    """Shorter and longer than a chunk, 8, with and without masks: as by `backward`, row by row."""
    cls, fields, batch = SAMPLES[kind]
    model = random_model(cls, **variant | fields)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, row):
        return functional_call(model, weights, (), {name: value[None] for name, value in row.items()}).loss

    together = vmap(grad(loss), (None, 0))(weights, batch)
    for i in range(3):
        model.zero_grad()
        model(**{name: value[i : i + 1] for name, value in batch.items()}).loss.backward()
        for name, p in model.named_parameters():
            assert_close(together[name][i], torch.zeros_like(p) if p.grad is None else p.grad)


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
    model, options = random_model(), {"max_new_tokens": 3, "do_sample": False}
    longer, embed = torch.cat([IDS, IDS[:, :2]], 1), model.get_input_embeddings()
    expected = model.generate(longer, **options)
    for ways in (
        {},
        {"inputs_embeds": embed(IDS)},
        {"step_budgets": [32]},
        {"prefill_chunk_size": 2},
        {"num_beams": 2},
        {"custom_generate": speculate(2)},
        {"past_key_values": ESSMStaticCache(model.config)},
    ):
        call = options | {"past_key_values": ESSMCache(model.config)} | ways
        filled(model, IDS, cache=call["past_key_values"])
        prompt = {} if "inputs_embeds" in ways else {"input_ids": IDS}
        with pytest.raises(ValueError, match="has read 12 positions, but the prompt has 12"):
            model.generate(**prompt, **call)
        if {"custom_generate", "prefill_chunk_size"} & {*ways}:  # no cache at all; in 5.17 a mask of another shape
            continue
        if "num_beams" in ways:
            call["past_key_values"].batch_repeat_interleave(2)
        if prompt:
            found, wanted = model.generate(longer, **call), expected
        else:
            found, wanted = model.generate(**call | {"inputs_embeds": embed(longer)}), expected[:, 14:]
        assert torch.equal(found, model.generate(longer, **options | ways) if "num_beams" in ways else wanted)


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


class Derived(ESSMForCausalLM):
    """As a user's, or the one that FSDP2 makes."""


class Reviewer(ESSMForSequenceClassification):
    """Its name says nothing of its loss, by which the library would choose one."""


def test_the_loss_of_a_derived_class_is_that_of_its_base(tmp_path):
    assert Losses(random_model(Derived), tmp_path)._loss_shifts_labels
    derived, base = (random_model(cls, num_labels=3) for cls in (Reviewer, ESSMForSequenceClassification))
    labels = torch.tensor([0, 2])
    assert derived(IDS, labels=labels).loss == base(IDS, labels=labels).loss


@pytest.mark.parametrize("cls", [ESSMForCausalLM, Derived])
@torch.no_grad()
def test_label_smoothing_predicts_the_next_token(cls, tmp_path):
    """Where the library does not know a class by its name, smoothed labels are those of the present token."""
    model, epsilon = random_model(cls), 0.1
    log_p = model(IDS).logits[:, :-1].log_softmax(-1)
    nll = -log_p.gather(-1, IDS[:, 1:, None]).mean()
    expected = (1 - epsilon) * nll + epsilon * -log_p.mean()
    assert_close(Losses(model, tmp_path, label_smoothing_factor=epsilon).loss(IDS), expected)


def test_adapters_learn_on_quantised_weights(tmp_path):
    quantization, peft = pytest.importorskip("torchao.quantization"), pytest.importorskip("peft")
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
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
    elsewhere = {"AutoModel": "org/name--modeling_essm.ESSMModel", "AutoTokenizer": ["mine.Tokenizer", None]}
    ESSMConfig(auto_map=elsewhere).save_pretrained(tmp_path / "remote")
    assert elsewhere.items() <= json.loads((tmp_path / "remote" / "config.json").read_text())["auto_map"].items()
    ESSMConfig(auto_map={"AutoModel": "essm.ESSMModel"}).save_pretrained(tmp_path / "released")  # as in hub_configs
    assert "essm.ESSMModel" not in (tmp_path / "released" / "config.json").read_text()


def test_other_code_beside_the_weights_is_named(tmp_path):
    """Edited or of another version, in a folder or a snapshot of the Hub; other line ends are no other code."""
    saved, snapshot = tmp_path / "saved", hub_snapshot(tmp_path / "hub", "org/name")
    random_model().save_pretrained(saved)
    code = saved / "mixer_essm.py"
    code.write_bytes(code.read_bytes().replace(b"\n", b"\r\n"))
    shutil.copytree(saved, snapshot)
    with captured_warnings() as messages:
        ESSMForCausalLM.from_pretrained(saved)
        ESSMForCausalLM.from_pretrained(snapshot)
        assert not messages
        for folder in (saved, snapshot):
            (folder / code.name).write_text(code.read_text() + "# mine\n")
            for _ in range(2):
                ESSMForCausalLM.from_pretrained(folder)
            (message,) = messages
            assert f"beside the weights in '{folder}', edited or of another version, is not run" in message
            assert "Different: mixer_essm.py." in message
            messages.clear()
