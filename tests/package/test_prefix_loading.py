# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A model of fewer channels, cut in memory or read from a part of a checkpoint, is the large one at that budget."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    HYBRID,
    SHA,
    VARIANTS,
    all_variants,
    assert_close,
    blocks,
    captured_warnings,
    filled,
    hub_snapshot,
    random_ids,
    random_model,
)
from safetensors import safe_open
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig

from modeling_essm import ESSMCache, ESSMConfig, ESSMForCausalLM, ESSMForSequenceClassification, ESSMModel, loading_essm
from modeling_essm.cache_essm import operator_of


@torch.no_grad()
def outputs(model, budget=None, ids=None):
    ids = random_ids(3, 40) if ids is None else ids
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    return model(ids, attention_mask=mask, spectral_budget=budget)[0]


@pytest.mark.parametrize("capacity", [1, [3, 20]], ids=str)
@all_variants
def test_a_truncated_model_is_the_large_one_at_that_budget(variant, capacity, tmp_path):
    large = random_model(**variant)
    expected = outputs(large, capacity)
    large.save_pretrained(tmp_path / "large")
    read = ESSMForCausalLM.from_pretrained(tmp_path / "large", spectral_capacity=capacity)
    cut = copy.deepcopy(large).truncate(capacity)
    cut.save_pretrained(tmp_path / "small")
    again = ESSMForCausalLM.from_pretrained(tmp_path / "small")
    layers = (capacity,) * 2 if isinstance(capacity, int) else tuple(capacity)
    shapes = {name: p.shape for name, p in cut.named_parameters()}
    for model in (read, cut, again):
        assert torch.equal(outputs(model), expected)
        assert torch.equal(outputs(model, 1), outputs(large, 1))
        assert model.config.capacities == layers and not model.training
        assert {name: p.shape for name, p in model.named_parameters()} == shapes
        assert model.num_parameters() == large.num_active_parameters(capacity) == model.num_active_parameters()
    states = filled(cut, random_ids(2, 9)).states.items()
    assert [t.shape[1] for name, t in states if name.endswith("features")] == [
        operator_of(cut.config).num_states(K) for K in layers
    ]


@blocks
def test_generation_and_row_budgets(block, tmp_path):
    large, ids = random_model(**block), random_ids(2, 11)
    large.save_pretrained(tmp_path)
    small = ESSMForCausalLM.from_pretrained(tmp_path, spectral_capacity=[20, 3])
    assert ESSMCache(small.config, state_budget=20).layers[1].state_budget == 3
    greedy = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 256}
    assert torch.equal(small.generate(ids, **greedy), large.generate(ids, **greedy, spectral_budget=[20, 3]))
    rows = torch.tensor([2, 20])  # in a layer that holds 3, the second row runs 3
    batch, logits = small.generate(ids, **greedy, spectral_budget=rows), small(ids, spectral_budget=rows).logits
    for i, budget in enumerate(([2, 2], [20, 3])):
        assert torch.equal(batch[i : i + 1], large.generate(ids[i : i + 1], **greedy, spectral_budget=budget))
        assert_close(logits[i : i + 1], large(ids[i : i + 1], spectral_budget=budget).logits, atol=1e-6)
    assert small(ids, spectral_budget=7).spectral_budget == (7, 3)


HEADS = {
    ESSMModel: (AutoModel, {}),
    ESSMForCausalLM: (AutoModelForCausalLM, VARIANTS["memory"]),
    ESSMForSequenceClassification: (ESSMForSequenceClassification, VARIANTS["elastic"]),
}


@pytest.mark.parametrize("cls", HEADS)
def test_heads_shards_precision_and_auto_classes(cls, tmp_path):
    auto, block = HEADS[cls]
    large = random_model(cls, **block)
    large.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists() and not (tmp_path / "model.safetensors").exists()
    for options in ({}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}):
        small, whole = (auto.from_pretrained(tmp_path, **options, **part) for part in ({"spectral_capacity": 6}, {}))
        assert small.dtype == whole.dtype == options.get("dtype", torch.float32)
        assert torch.equal(outputs(small), outputs(whole, 6))
    large.save_pretrained(tmp_path / "variant", max_shard_size="20KB", variant="fp16")
    small = auto.from_pretrained(tmp_path / "variant", variant="fp16", spectral_capacity=6)
    assert torch.equal(outputs(small), outputs(large, 6))


@pytest.mark.parametrize("tied", [True, False])
def test_a_prefix_on_disk(tied, tmp_path):
    large = random_model(**VARIANTS["elastic"], tie_word_embeddings=tied)
    large.save_pretrained(tmp_path / "saved")
    options = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "disk", "spectral_capacity": 6}
    assert_close(outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options)), outputs(large, 6))


def test_by_the_name_of_a_repository(tmp_path):
    """From a Hub cache as a download leaves it, offline: revision, subfolder and generation config are found."""
    large = random_model()
    large.generation_config.spectral_budget, large.generation_config.max_new_tokens = 4, 11
    snapshot = hub_snapshot(tmp_path, "org/elastic")
    large.save_pretrained(snapshot)
    large.save_pretrained(snapshot / "deep" / "er")
    where = {"cache_dir": tmp_path, "local_files_only": True}
    for options in ({}, {"revision": SHA}, {"subfolder": "deep/er"}):
        small = ESSMForCausalLM.from_pretrained("org/elastic", spectral_capacity=6, **where, **options)
        assert torch.equal(outputs(small, 6), outputs(large, 6))
        assert small.generation_config.max_new_tokens == 11 and small.name_or_path == "org/elastic"
    with pytest.raises(OSError, match="find them in the cached files"):
        ESSMForCausalLM.from_pretrained("org/absent", spectral_capacity=6, **where)


@blocks
def test_only_the_prefix_is_read(block, tmp_path, monkeypatch):
    """Every byte that safetensors hands out is counted: those of the small model's weights."""
    random_model(**block).save_pretrained(tmp_path)
    counted: dict[str, int] = {}

    def count(name, tensor):
        counted[name] = tensor.nbytes
        return tensor

    @contextlib.contextmanager
    def counting(*args, **kwargs):
        with safe_open(*args, **kwargs) as file:

            def cut(name):
                return type("Slice", (), {"__getitem__": lambda _, index: count(name, file.get_slice(name)[index])})()

            yield SimpleNamespace(keys=file.keys, get_tensor=lambda n: count(n, file.get_tensor(n)), get_slice=cut)

    monkeypatch.setattr(loading_essm, "safe_open", counting)
    for K in (2, 32):
        counted.clear()
        model = ESSMForCausalLM.from_pretrained(tmp_path, spectral_capacity=K)
        assert counted == {name: parameter.nbytes for name, parameter in model.named_parameters()}


def test_the_config_follows(tmp_path):
    fields = {
        "trained_budgets": [2, 4, 8, 32],
        "budget_presets": {"phone": 4, "full": 32, "both": [6, 3], "no": [3, 7]},
    }
    large = random_model(**fields, spectral_budget="full")
    large.generation_config.spectral_budget, large.generation_config.step_budgets = 8, [4, 8]
    large.save_pretrained(tmp_path)
    cut = copy.deepcopy(large).truncate(6)
    phone = copy.deepcopy(large).truncate("phone")
    for model in (phone, ESSMForCausalLM.from_pretrained(tmp_path, spectral_capacity="phone")):
        assert set(model.config.capacities) == {4}
    for model in (cut, ESSMForCausalLM.from_pretrained(tmp_path, spectral_capacity=6)):
        config = model.config
        assert config.num_spectral_channels == 6 and config.spectral_capacities is None
        assert config.trained_budgets == [2, 4] and config.budget_presets == {"phone": 4, "both": [6, 3]}
        assert config.spectral_budget is None
        assert model.generation_config.spectral_budget is model.generation_config.step_budgets is None
        assert model.model.config is config
        assert model(random_ids(1, 5)).spectral_budget == (6, 6)
    assert large.config.num_spectral_channels == 32  # not a view
    large.generation_config.step_budgets = 4  # no list: `generate` says so, and not what loads a part
    assert copy.deepcopy(large).truncate(6).generation_config.step_budgets == 4
    for load in (ESSMForCausalLM, AutoModelForCausalLM):
        kept = load.from_pretrained(tmp_path, spectral_capacity=6, spectral_budget="phone")
        assert kept(random_ids(1, 5)).spectral_budget == (4, 4)
    config = ESSMConfig.from_pretrained(tmp_path, dropout=0.5)
    kept = ESSMForCausalLM.from_pretrained(tmp_path, config=config, spectral_capacity=[20, 9])
    assert (kept.generation_config.spectral_budget, kept.generation_config.step_budgets) == (8, [4, 8])
    assert kept.config.spectral_capacities == [20, 9]
    assert kept.config.dropout == 0.5 and config.num_spectral_channels == 32 and config.spectral_capacities is None
    assert ESSMForCausalLM.from_pretrained(tmp_path, dropout=0.25, spectral_capacity=6).config.dropout == 0.25
    random_model(ESSMForSequenceClassification, num_labels=2).save_pretrained(tmp_path / "head")
    two = ESSMForSequenceClassification.from_pretrained(tmp_path / "head", spectral_capacity=6, num_labels=2)
    assert two.config.num_labels == 2
    given = GenerationConfig(max_new_tokens=3)
    kept = ESSMForCausalLM.from_pretrained(tmp_path, spectral_capacity=6, generation_config=given)
    assert kept.generation_config.max_new_tokens == 3


def test_a_default_budget_that_no_longer_fits_is_told(tmp_path):
    random_model(spectral_budget=8).save_pretrained(tmp_path)
    for load in (ESSMForCausalLM, AutoModelForCausalLM):
        for capacity, dropped in ((8, False), (4, True)):
            with captured_warnings() as messages:
                small = load.from_pretrained(tmp_path, spectral_capacity=capacity)
            assert small.config.spectral_budget == (None if dropped else 8)
            assert ["spectral_budget 8 of the configuration does not fit [4, 4]" in m for m in messages] == [
                True
            ] * dropped


def test_truncating_leaves_every_layer_one_configuration():
    model = random_model(**HYBRID).truncate(4)
    assert model.model.config is model.config
    assert [layer.self_attn.config is model.config for layer in model.model.layers[1::2]] == [True, True]


@blocks
def test_truncating_in_steps_and_training_on(block):
    large = random_model(**block)
    large.model.layers[1].mixer.channel_mixing.requires_grad_(False)
    expected = outputs(large, 4)
    small = large.truncate([9, 12]).truncate(7)
    assert small.config.capacities == (7, 7)
    small = small.truncate(4)
    assert torch.equal(outputs(small), expected)
    small.train()(random_ids(2, 9), labels=random_ids(2, 9)).loss.backward()
    assert [name for name, p in small.named_parameters() if p.grad is None] == ["model.layers.1.mixer.channel_mixing"]
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in small.parameters())  # the rest is freed


def test_sizes_that_are_no_multiple_of_16_bytes_round_otherwise():
    """Sums over columns begin elsewhere in memory; those of a single row, as of a decoding step, are rounded anew."""
    large, ids = random_model(block="elastic", head_size=3, intermediate_size=96), random_ids(2, 9)
    with torch.no_grad():
        expected = large(ids, spectral_budget=5).logits, large(ids[:1, :1], spectral_budget=5).logits
        small = large.truncate(5)
        assert torch.equal(small(ids).logits, expected[0])
        assert_close(small(ids[:1, :1]).logits, expected[1], atol=1e-5)


def test_bad_capacities(tmp_path):
    model = random_model()
    model.save_pretrained(tmp_path)
    before = outputs(model)
    for value, message in (
        (33, r"spectral_capacity must be an integer in \[1, 32\], got 33"),
        ("6", "unknown spectral_budget preset '6'; known presets: none are stored"),
    ):
        with pytest.raises(ValueError, match=message):
            model.truncate(value)
        with pytest.raises(ValueError, match=message):
            ESSMForCausalLM.from_pretrained(tmp_path, spectral_capacity=value)
    assert torch.equal(outputs(model), before)


def test_a_small_model_refuses_more(tmp_path):
    random_model().truncate([6, 3]).save_pretrained(tmp_path)
    model = ESSMForCausalLM.from_pretrained(tmp_path)
    for budget, message in ((7, r"\[1, 6\], got 7"), ([6, 4], r"\[1, 3\], got 4"), (torch.tensor([1, 9]), "to 9")):
        with pytest.raises(ValueError, match=message):
            model(random_ids(2, 5), spectral_budget=budget)
    with pytest.raises(ValueError, match=r"\[1, 6\], got 8"):
        ESSMForCausalLM.from_pretrained(tmp_path, spectral_capacity=8)
    for load in (ESSMForCausalLM, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=r"\[1, 5\], got 6"):
            load.from_pretrained(tmp_path, spectral_capacity=5, spectral_budget=6)
    with pytest.raises(ValueError, match=r"got 6 for layer 1"):
        model.truncate([6, 6])
    assert ESSMForCausalLM.from_pretrained(tmp_path, spectral_capacity=5).config.capacities == (5, 3)


def test_what_cannot_be_a_prefix(tmp_path):
    model = random_model()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="give its folder or name, no state_dict"):
        ESSMForCausalLM.from_pretrained(None, config=model.config, state_dict=model.state_dict(), spectral_capacity=6)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"holds no model.safetensors; load it whole"):
        ESSMForCausalLM.from_pretrained(tmp_path, spectral_capacity=6)
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    (tmp_path / "many" / "model.safetensors.index.json").write_text("[1]")
    with pytest.raises(ValueError, match="is not an index of a sharded checkpoint"):
        ESSMForCausalLM.from_pretrained(tmp_path / "many", spectral_capacity=6)
