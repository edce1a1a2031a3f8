# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Clients that come with transformers and Accelerate: pipelines, and weights offloaded to memory or disk.

The others have files of their own: test_clients_peft, _lm_eval, _serve and _trainers.
"""

import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload, dispatch_model, infer_auto_device_map
from helpers import ROOT, VARIANTS, assert_close, random_ids, random_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig, pipeline

from modeling_essm import ESSMCache, ESSMForSequenceClassification, build_byte_tokenizer
from modeling_essm.decoding import load_cache, save_cache

MEMORY = VARIANTS["memory"] | {"intermediate_size": 64}
PROMPTS = ["elastic", "a longer prompt"]
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A language model, another with a default budget in its generation config, and a classifier, with tokenizers."""
    folder = tmp_path_factory.mktemp("models")
    models = {"causal": random_model(**MEMORY), "at-2": random_model(**MEMORY)}
    models["at-2"].generation_config.spectral_budget = 2
    models["classifier"] = random_model(ESSMForSequenceClassification, num_labels=3)
    for name, model in models.items():
        model.save_pretrained(folder / name)
        build_byte_tokenizer().save_pretrained(folder / name)
    return {name: str(folder / name) for name in models}


# --- pipelines


def generated(generator, prompt=PROMPTS[0], **kwargs) -> list[int]:
    (output,) = generator(prompt, return_tensors=True, **GREEDY | kwargs)
    return output["generated_token_ids"]


def test_text_generation_at_a_budget(folders):
    """Of a call, or a default that is told in each of three ways."""
    model, ids = AutoModelForCausalLM.from_pretrained(folders["causal"]), torch.tensor([list(PROMPTS[0].encode())])
    expected = {K: model.generate(ids, spectral_budget=K, **GREEDY)[0].tolist() for K in (2, 32)}
    assert expected[2] != expected[32]
    for name, default, options in (
        ("causal", 32, {}),
        ("at-2", 2, {}),
        ("causal", 2, {"spectral_budget": 2}),
        ("causal", 2, {"model_kwargs": {"spectral_budget": 2}}),
    ):
        generator = pipeline("text-generation", model=folders[name], **options)
        for K in (default, 32, 2, default):
            assert generated(generator, **{} if default == K else {"spectral_budget": K}) == expected[K]
    config = GenerationConfig(spectral_budget=2, **GREEDY)
    (output,) = generator(PROMPTS[0], generation_config=config, return_tensors=True)
    assert output["generated_token_ids"] == expected[2]
    with pytest.raises(ValueError, match=r"spectral_budget must be an integer in \[1, 32\], got 99"):
        generated(generator, spectral_budget=99)


def test_text_generation_of_a_padded_batch(folders):
    generator = pipeline("text-generation", model=folders["causal"])
    together = generator(PROMPTS, batch_size=2, spectral_budget=torch.tensor([2, 32]), return_tensors=True, **GREEDY)
    for prompt, K, (output,) in zip(PROMPTS, (2, 32), together):
        alone = generated(generator, prompt, spectral_budget=K)
        assert output["generated_token_ids"][-len(alone) :] == alone


def test_text_classification(folders):
    """It knows no budget of a call: it hands that to the tokenizer, which drops it. docs/clients.md says what to do."""
    model, scores = AutoModelForSequenceClassification.from_pretrained(folders["classifier"]), {}
    for K in (2, 32):
        pipe = pipeline("text-classification", folders["classifier"], model_kwargs={"spectral_budget": K}, top_k=None)
        found = [{row["label"]: row["score"] for row in rows} for rows in pipe(PROMPTS, batch_size=2)]
        for prompt, row in zip(PROMPTS, found):
            with torch.no_grad():
                logits = model(torch.tensor([list(prompt.encode())]), spectral_budget=K).logits[0]
            assert list(map(row.get, model.config.id2label.values())) == pytest.approx(logits.softmax(0).tolist(), 1e-5)
        scores[K] = found[0]["LABEL_0"]
    assert scores[2] != pytest.approx(scores[32], abs=1e-3)
    assert pipe(PROMPTS[0], spectral_budget=2) == pipe(PROMPTS[0])
    pipe.model.config.spectral_budget = 2
    assert {row["label"]: row["score"] for row in pipe(PROMPTS[:1])[0]}["LABEL_0"] == pytest.approx(scores[2], abs=1e-5)


# --- offloaded weights

LAYERS = 4
MAP = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu"}
MAP |= {f"model.layers.{i}": "disk" if i in (1, 2) else "cpu" for i in range(LAYERS)}
IDS = random_ids(2, 21)
WAYS = {
    "from_pretrained": lambda model, folder: loaded(model, folder),
    "capacity": lambda model, folder: loaded(model, folder, spectral_capacity=8),
    "cpu_offload": lambda model, folder: cpu_offload(model, torch.device("cpu")),
    "disk_offload": lambda model, folder: disk_offload(model, folder / "offload", torch.device("cpu")),
    "dispatch_model": lambda model, folder: dispatch_model(model, MAP, main_device="cpu", offload_dir=folder / "off"),
}


def offloadable(**fields):
    return random_model(num_hidden_layers=LAYERS, **fields)


def loaded(model, folder, device_map=MAP, **options):
    model.save_pretrained(folder / "saved")
    options |= {"device_map": device_map, "offload_folder": folder / "offload"}
    return AutoModelForCausalLM.from_pretrained(folder / "saved", **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block", [{}, MEMORY], ids=["paper", "memory"])
def test_offloaded_weights_change_nothing(block, way, tmp_path):
    model, offloaded = offloadable(**block), WAYS[way](offloadable(**block), tmp_path)
    away = {name for name, parameter in offloaded.named_parameters() if parameter.is_meta}
    assert "model.layers.1.mixer.channel_mixing" in away
    for K in (3, 8):
        with torch.no_grad():
            assert_close(offloaded(IDS, spectral_budget=K).logits, model(IDS, spectral_budget=K).logits)
        tokens = [each.generate(IDS, spectral_budget=K, **GREEDY) for each in (offloaded, model)]
        assert torch.equal(*tokens)
    assert away <= {name for name, parameter in offloaded.named_parameters() if parameter.is_meta}
    if way == "from_pretrained":
        with pytest.raises(ValueError, match=r"offloaded weights cannot be cut in memory: load .* spectral_capacity"):
            offloaded.truncate(4)


@torch.no_grad()
def test_states_of_offloaded_layers(tmp_path):
    """They stay in memory: chunked reading continues from them, and a file of them serves the whole model."""
    model, offloaded = offloadable(**MEMORY), loaded(offloadable(**MEMORY), tmp_path)
    cache, whole = (ESSMCache(model.config, state_budget=32) for _ in range(2))
    expected = model(IDS, past_key_values=whole, spectral_budget=5).logits
    first = offloaded(IDS[:, :9], past_key_values=cache, spectral_budget=5).logits
    assert not any(tensor.is_meta for tensor in cache.states.values())
    save_cache(cache, tmp_path / "cache", offloaded)
    for reader, states in ((offloaded, cache), (model, load_cache(tmp_path / "cache", model))):
        second = reader(IDS[:, 9:], past_key_values=states, spectral_budget=5).logits
        assert_close(torch.cat([first, second], 1), expected)


def test_an_offloaded_model_is_saved_whole_and_tied(tmp_path):
    loaded(offloadable(), tmp_path, dict.fromkeys(MAP, "disk")).save_pretrained(tmp_path / "again")
    again, found = AutoModelForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(found.values()) and again.lm_head.weight is again.model.embed_tokens.weight
    for name, tensor in offloadable().state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_device_map_never_splits_a_layer():
    """At any limit; without _no_split_modules some of them would."""
    model, split = offloadable(**MEMORY), 0
    layer = sum(parameter.numel() * 4 for parameter in model.model.layers[0].parameters())
    for memory in range(3 * layer, 5 * layer, layer // 4):
        limits = {"cpu": memory, "disk": 1 << 30}
        devices = infer_auto_device_map(model, limits, no_split_module_classes=model._no_split_modules)
        assert all(name.count(".") <= 2 for name in devices if name.startswith("model.layers")), devices
        split += any(name.count(".") > 2 for name in infer_auto_device_map(model, limits))
    assert split


@pytest.mark.slow
def test_the_librarys_tests_of_its_models(tmp_path):
    """From the source distribution of the version that is installed."""
    name = f"transformers-{transformers.__version__}"
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "transformers"]
    subprocess.run([*pip, name.replace("-", "=="), "-d", tmp_path], check=True, timeout=300)
    shutil.unpack_archive(tmp_path / f"{name}.tar.gz", tmp_path)
    done = subprocess.run(
        [sys.executable, ROOT / "tests/library_models.py", tmp_path / name], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
