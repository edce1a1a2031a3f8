# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A conversation goes on from its file bit for bit, and only in the model that had it."""

import copy
import os

import pytest
import torch
from helpers import HYBRID, VARIANTS, filled, random_ids, random_model
from safetensors.torch import save_file

from modeling_essm import ESSMCache
from modeling_essm.decoding import load_cache, save_cache
from modeling_essm.decoding.states_on_disk import _FORMAT

MODELS = {"paper": {}, "elastic": VARIANTS["memory"], "bf16": {"dtype": torch.bfloat16}, "hybrid": HYBRID}


def make(fields):
    fields = dict(fields)
    dtype = fields.pop("dtype", torch.float32)
    return random_model(**fields).to(dtype)


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_a_saved_cache_goes_on_bit_for_bit(fields, tmp_path):
    """Rows of different room and length among them."""
    model, path = make(fields), tmp_path / "cache.safetensors"
    cache = ESSMCache.merge([filled(model, random_ids(1, 5), 3), filled(model, random_ids(2, 9), 20)])
    save_cache(cache, path, model)
    assert os.listdir(tmp_path) == [path.name]
    loaded = load_cache(path, model)
    assert loaded.get_seq_length() == 9 and loaded.batch_size == 3 and list(loaded.states) == list(cache.states)
    assert all(t.dtype == cache.states[name].dtype for name, t in loaded.states.items())
    call = {"input_ids": random_ids(3, 1), "spectral_budget": torch.tensor([2, 20, 5])}
    with pytest.raises(ValueError, match="in row 0 of layer 0"):
        model(random_ids(3, 1), past_key_values=loaded, spectral_budget=4)
    assert torch.equal(*(model(past_key_values=each, **call).logits for each in (loaded, cache)))
    save_cache(cache, path, model)
    call["spectral_budget"], small = torch.tensor([2, 5, 5]), copy.deepcopy(model).truncate(5)
    cut = copy.deepcopy(cache).shrink(5)
    assert torch.equal(model(past_key_values=cut, **call).logits,
                       small(past_key_values=load_cache(path, small), **call).logits)  # fmt: skip


def test_a_saved_cache_of_another_model_is_refused(tmp_path):
    model, path = random_model(), tmp_path / "cache"
    save_cache(filled(model, random_ids(2, 9), 5), path, model)
    with pytest.raises(ValueError, match=r"of another model.*'hidden_size': 16.*'hidden_size': 24"):
        load_cache(path, random_model(hidden_size=24))
    with pytest.raises(ValueError, match="of another model of this shape, with other weights"):
        load_cache(path, random_model(seed=1))
    load_cache(path, copy.deepcopy(model).to(torch.bfloat16))
    load_cache(path, copy.deepcopy(model).to("meta"))  # whose weights nobody can compare
    assert load_cache(path, random_model()).batch_size == 2


def test_any_flipped_bit_is_found(tmp_path):
    """Bits of the whole file, drawn at random, and all of the words that say what it is."""
    model, path = random_model(num_hidden_layers=1), tmp_path / "cache"
    save_cache(filled(model, random_ids(1, 9), 2), path, model)
    whole = path.read_bytes()
    bits = torch.randint(0, 8 * len(whole), (60,), generator=torch.Generator().manual_seed(0)).tolist()
    for word in (b"essm-cache", b"seen_tokens", b"sha256"):
        bits += range(8 * whole.index(word), 8 * (whole.index(word) + len(word) + 6), 3)
    for bit in bits:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=str(path)):
            load_cache(path, model)


def test_files_that_are_no_caches(tmp_path):
    model, path = random_model(), tmp_path / "cache"
    with pytest.raises(FileNotFoundError):
        load_cache(path, model)
    for metadata, message in ((None, "is not a cache of this version"), ({"format": _FORMAT}, "match its checksum")):
        save_file({"a": torch.zeros(2)}, path, metadata=metadata)
        with pytest.raises(ValueError, match=message):
            load_cache(path, model)
    with pytest.raises(ValueError, match=f"{tmp_path} is a folder, and no saved cache"):
        load_cache(tmp_path, model)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:50], b""):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="truncated or corrupt"):
            load_cache(path, model)


def test_what_is_not_saved_leaves_the_old_file(tmp_path, monkeypatch):
    model, path = random_model(), tmp_path / "cache"
    with pytest.raises(ValueError, match="cannot save an empty cache"):
        save_cache(ESSMCache(model.config), path, model)
    cache = filled(model, random_ids(2, 9), 5)
    save_cache(cache, path, model)
    before = path.read_bytes()
    cache.layers[1].apply(lambda t: t * torch.nan)
    with pytest.raises(ValueError, match=r"states 1\.features of this cache are not finite"):
        save_cache(cache, path, model)
    with pytest.raises(ValueError, match="hidden_size"):
        save_cache(filled(random_model(hidden_size=24), random_ids(2, 9), 5), path, model)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


def test_only_a_cache_is_replaced(tmp_path):
    """Damaged or not, or an empty file; never a model's weights."""
    model = random_model(num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    weights, cache = tmp_path / "model.safetensors", filled(model, random_ids(1, 5), 2)
    before = weights.read_bytes()
    with pytest.raises(ValueError, match=r"model\.safetensors holds something other than a saved cache"):
        save_cache(cache, weights, model)
    assert weights.read_bytes() == before
    with pytest.raises(ValueError, match="holds something other than a saved cache"):
        save_cache(cache, tmp_path, model)
    path = tmp_path / "cache"
    path.touch()
    for _ in range(3):
        save_cache(cache, path, model)
        assert load_cache(path, model).get_seq_length() == 5
        path.write_bytes(path.read_bytes()[:-9])
