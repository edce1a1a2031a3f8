# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Clients that come with transformers and Accelerate: pipelines, and weights offloaded to memory or disk.

The others have files of their own: test_clients_peft, _lm_eval, _serve and _trainers.
"""

import copy

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model, infer_auto_device_map
from helpers import random_ids, random_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig, pipeline

from modeling_essm import ESSMCache, ESSMForSequenceClassification, build_byte_tokenizer
from modeling_essm.decoding import load_cache, save_cache

PROMPTS = ["elastic", "a longer prompt"]


def save(model, folder):
    model.save_pretrained(folder)
    build_byte_tokenizer().save_pretrained(folder)
    return str(folder)


# --- pipelines


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    return save(random_model(), tmp_path_factory.mktemp("causal"))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return save(random_model(ESSMForSequenceClassification, num_labels=3), tmp_path_factory.mktemp("classifier"))


GREEDY = {"max_new_tokens": 8, "do_sample": False}


def generated(generator, prompt=PROMPTS[0], **kwargs) -> list[int]:
    (output,) = generator(prompt, return_tensors=True, **GREEDY, **kwargs)
    return output["generated_token_ids"]


@pytest.fixture(scope="module")
def expected(causal):
    """Of each budget, what `generate` makes of the first prompt."""
    model, ids = AutoModelForCausalLM.from_pretrained(causal), torch.tensor([list(PROMPTS[0].encode())])
    outputs = {K: model.generate(ids, spectral_budget=K, **GREEDY)[0].tolist() for K in (2, 32)}
    assert outputs[2] != outputs[32]
    return outputs


def test_text_generation_at_the_budget_of_the_call(causal, expected):
    generator = pipeline("text-generation", model=causal)
    for K in (2, 32, 2):
        assert generated(generator, spectral_budget=K) == expected[K]
    config = GenerationConfig(spectral_budget=2, **GREEDY)
    (output,) = generator(PROMPTS[0], generation_config=config, return_tensors=True)
    assert output["generated_token_ids"] == expected[2]
    with pytest.raises(ValueError, match=r"spectral_budget must be an integer in \[1, 32\], got 99"):
        generated(generator, spectral_budget=99)


@pytest.mark.parametrize("way", ["pipeline", "model_kwargs", "generation_config"])
def test_text_generation_at_a_default_budget(causal, expected, way, tmp_path):
    if way == "generation_config":
        model = AutoModelForCausalLM.from_pretrained(causal)
        model.generation_config.spectral_budget = 2
        causal = save(model, tmp_path)
    options = {"pipeline": {"spectral_budget": 2}, "model_kwargs": {"model_kwargs": {"spectral_budget": 2}}}
    generator = pipeline("text-generation", model=causal, **options.get(way, {}))
    assert generated(generator) == expected[2]
    assert generated(generator, spectral_budget=32) == expected[32]


def test_text_generation_of_a_padded_batch(causal):
    generator = pipeline("text-generation", model=causal)
    together = generator(PROMPTS, batch_size=2, spectral_budget=torch.tensor([2, 32]), return_tensors=True, **GREEDY)
    for prompt, K, (output,) in zip(PROMPTS, (2, 32), together):
        alone = generated(generator, prompt, spectral_budget=K)
        assert output["generated_token_ids"][-len(alone) :] == alone


def test_text_classification(classifier):
    model, scores = AutoModelForSequenceClassification.from_pretrained(classifier), {}
    for K in (2, 32):
        pipe = pipeline("text-classification", model=classifier, model_kwargs={"spectral_budget": K}, top_k=None)
        scores[K] = [{row["label"]: row["score"] for row in rows} for rows in pipe(PROMPTS, batch_size=2)]
        for prompt, row in zip(PROMPTS, scores[K]):
            with torch.no_grad():
                logits = model(torch.tensor([list(prompt.encode())]), spectral_budget=K).logits[0]
            assert list(map(row.get, model.config.id2label.values())) == pytest.approx(logits.softmax(0).tolist(), 1e-5)
    assert scores[2][0]["LABEL_0"] != pytest.approx(scores[32][0]["LABEL_0"], abs=1e-3)


def test_text_classification_knows_no_budget_of_a_call(classifier):
    """It hands the argument to the tokenizer, which drops it: docs/clients.md says what to do instead."""
    pipe = pipeline("text-classification", model=classifier)
    assert pipe(PROMPTS[0], spectral_budget=2) == pipe(PROMPTS[0])
    full = pipe(PROMPTS[0])[0]["score"]
    pipe.model.config.spectral_budget = 2
    assert pipe(PROMPTS[0])[0]["score"] != pytest.approx(full, abs=1e-3)


# --- offloaded weights

LAYERS = 4
MAP = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu"}
MAP |= {f"model.layers.{i}": "disk" if i in (1, 2) else "cpu" for i in range(LAYERS)}
WHOLE = {name: "disk" for name in MAP}
IDS = random_ids(2, 21)


def whole_and_offloaded(way: str, folder):
    model = random_model(num_hidden_layers=LAYERS)
    model.save_pretrained(folder / "saved")
    load = AutoModelForCausalLM.from_pretrained
    disk = {"offload_folder": folder / "offload"}
    if way == "from_pretrained":
        return model, load(folder / "saved", device_map=MAP, **disk)
    if way == "everything":
        return model, load(folder / "saved", device_map=WHOLE, **disk)
    if way == "capacity":
        return model, load(folder / "saved", device_map=MAP, spectral_capacity=8, **disk)
    other = copy.deepcopy(model)
    if way == "cpu_offload":
        return model, cpu_offload(other, torch.device("cpu"))
    if way == "disk_offload":
        return model, disk_offload(other, folder / "offload", torch.device("cpu"))
    return model, dispatch_model(other, MAP, main_device="cpu", offload_dir=folder / "offload")


@pytest.mark.parametrize("way", ["from_pretrained", "capacity", "cpu_offload", "disk_offload", "dispatch_model"])
def test_offloaded_weights_change_nothing(way, tmp_path):
    model, offloaded = whole_and_offloaded(way, tmp_path)
    away = [name for name, parameter in offloaded.named_parameters() if parameter.is_meta]
    assert "model.layers.1.mixer.channel_mixing" in away
    for K in (3, 8):
        with torch.no_grad():
            assert torch.equal(offloaded(IDS, spectral_budget=K).logits, model(IDS, spectral_budget=K).logits)
        greedy = {"spectral_budget": K, "max_new_tokens": 6, "do_sample": False}
        assert torch.equal(offloaded.generate(IDS, **greedy), model.generate(IDS, **greedy))
    assert {*away} <= {name for name, parameter in offloaded.named_parameters() if parameter.is_meta}


def test_states_of_offloaded_layers(tmp_path):
    """They stay in memory: chunked reading continues from them, and a file of them serves the whole model."""
    model, offloaded = whole_and_offloaded("from_pretrained", tmp_path)
    cache = ESSMCache(model.config, state_budget=32)
    with torch.no_grad():
        first = offloaded(IDS[:, :9], past_key_values=cache, spectral_budget=5).logits
        assert not any(tensor.is_meta for layer in cache.layers for tensor in layer.tensors.values())
        save_cache(cache, tmp_path / "cache", offloaded)
        second = offloaded(IDS[:, 9:], past_key_values=cache, spectral_budget=5).logits
        loaded = load_cache(tmp_path / "cache", model)
        assert torch.equal(model(IDS[:, 9:], past_key_values=loaded, spectral_budget=5).logits, second)
        torch.testing.assert_close(torch.cat([first, second], 1), model(IDS, spectral_budget=5).logits)


def test_an_offloaded_model_is_saved_whole_and_tied(tmp_path):
    model, offloaded = whole_and_offloaded("everything", tmp_path)
    offloaded.save_pretrained(tmp_path / "again")
    again, found = AutoModelForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(found.values()) and again.lm_head.weight is again.model.embed_tokens.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_an_offloaded_model_cannot_be_cut_in_memory(tmp_path):
    _, offloaded = whole_and_offloaded("from_pretrained", tmp_path)
    with pytest.raises(ValueError, match=r"offloaded weights cannot be cut in memory: load .* with spectral_capacity"):
        offloaded.truncate(4)
    assert offloaded.config.num_spectral_channels == 32


def test_a_device_map_never_splits_a_layer():
    """At any limit; without _no_split_modules some of them would."""
    model = random_model(num_hidden_layers=LAYERS)
    layer = sum(parameter.numel() * 4 for parameter in model.model.layers[0].parameters())
    split = 0
    for memory in range(3 * layer, 5 * layer, layer // 4):
        limits = {"cpu": memory, "disk": 1 << 30}
        devices = infer_auto_device_map(model, limits, no_split_module_classes=model._no_split_modules)
        assert all(name.count(".") <= 2 for name in devices if name.startswith("model.layers")), devices
        split += any(name.count(".") > 2 for name in infer_auto_device_map(model, limits))
    assert split
