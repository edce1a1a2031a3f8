# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a server does with states: take rows out, put rows together, give room back, keep them on disk."""

import copy
import os

import pytest
import torch
from helpers import assert_close, random_ids, random_model
from safetensors.torch import save_file

from modeling_essm import ESSMCache

VARIANTS = pytest.mark.parametrize("variant", [{}, {"gating": "none"}, {"ar_order": 2}], ids=["softmax", "none", "ar"])


@torch.no_grad()
def filled(model, ids, K=None):
    cache = ESSMCache(model.config)
    model(ids, past_key_values=cache, use_cache=True, spectral_budget=K)
    return cache


@torch.no_grad()
def step(model, cache, token, K):
    """(B, V) logits after one token of every row."""
    return model(token, past_key_values=cache, use_cache=True, spectral_budget=K).logits[:, 0]


def states(cache):
    return [tensor for layer in cache.layers for tensor in layer.tensors.values()]


@VARIANTS
def test_merged_rows_equal_solo_runs(variant):
    """Rows of several budgets and lengths, decoded together and taken apart again."""
    model, budgets, lengths = random_model(**variant), [2, 32, 7], [5, 19, 12]
    prompts = [random_ids(1, n, seed=n) for n in lengths]
    solo = [filled(model, ids, K) for ids, K in zip(prompts, budgets)]
    merged = ESSMCache.merge([filled(model, ids, K) for ids, K in zip(prompts, budgets)])
    assert merged.batch_size == 3 and merged.get_seq_length() == 19
    tokens = random_ids(3, 10, seed=1)
    for t in range(5):
        together = step(model, merged, tokens[:, t : t + 1], torch.tensor(budgets))
        for i, K in enumerate(budgets):
            assert_close(together[i : i + 1], step(model, solo[i], tokens[i : i + 1, t : t + 1], K))
    # the middle row, which alone needed the room, leaves; another comes
    merged = merged.select([2, 0])
    assert merged.layers[0].num_states == solo[2].layers[0].num_states
    late = random_ids(1, 7, seed=3)
    merged = ESSMCache.merge([merged, filled(model, late, 4)])
    solo, budgets = [solo[2], solo[0], filled(model, late, 4)], [7, 2, 4]
    tokens = tokens[[2, 0, 1]]
    for t in range(5, 10):
        together = step(model, merged, tokens[:, t : t + 1], torch.tensor(budgets))
        for i, K in enumerate(budgets):
            assert_close(together[i : i + 1], step(model, solo[i], tokens[i : i + 1, t : t + 1], K))


def test_select_leaves_the_original_alone():
    model, ids = random_model(), random_ids(3, 9)
    cache = filled(model, ids, 8)
    before = [t.clone() for t in states(cache)]
    part = cache.select(torch.tensor([2, 0]))
    assert part.batch_size == 2 and part.get_seq_length() == 9
    expected = filled(model, ids[[2, 0]], 8)
    for actual, wanted in zip(states(part), states(expected)):
        assert_close(actual, wanted)
    step(model, part, ids[:2, :1], 8)
    assert all(torch.equal(a, b) for a, b in zip(states(cache), before)) and cache.get_seq_length() == 9


def test_every_row_keeps_its_own_stamp():
    model = random_model()
    merged = ESSMCache.merge([filled(model, random_ids(1, 5), 3), filled(model, random_ids(2, 5), 20)])
    token, before = random_ids(3, 1), [t.clone() for t in states(merged)]
    for budget, row, K in ((torch.tensor([4, 20, 20]), 0, 4), (torch.tensor([3, 20, 21]), 2, 21), (4, 0, 4)):
        with pytest.raises(ValueError, match=rf"spectral_budget {K} needs .* in row {row} of layer 0"):
            step(model, merged, token, budget)
    assert all(torch.equal(a, b) for a, b in zip(states(merged), before))
    step(model, copy.deepcopy(merged), token, torch.tensor([3, 20, 2]))
    step(model, copy.deepcopy(merged), token, 3)
    # stamps travel with the rows
    merged.reorder_cache(torch.tensor([2, 2, 0]))
    with pytest.raises(ValueError, match="in row 2 of layer 0"):
        step(model, merged, token, torch.tensor([20, 20, 4]))
    merged.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match="in row 4 of layer 0"):
        step(model, merged, random_ids(6, 1), 4)
    merged.reset()
    model(random_ids(2, 5), past_key_values=merged, use_cache=True)  # as new


@VARIANTS
def test_shrinking_a_running_cache(variant):
    model, ids = random_model(**variant), random_ids(2, 9)
    whole, small = filled(model, ids, 32), filled(model, ids, 32)
    assert small.shrink(5) is small
    assert small.num_bytes == filled(model, ids, 5).num_bytes < 0.6 * whole.num_bytes
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in states(small))  # freed, not hidden
    for t in range(4):
        assert_close(step(model, small, ids[:, t : t + 1], 5), step(model, whole, ids[:, t : t + 1], 5))
    with pytest.raises(ValueError, match="spectral_budget 6 needs 22 states in layer 0, but this cache holds 19"):
        step(model, small, ids[:, :1], 6)
    small.shrink([4, 2])
    assert [layer.num_states for layer in small.layers] == [16, 10]
    small.shrink(32)  # nothing to give back
    assert [layer.num_states for layer in small.layers] == [16, 10]
    merged = ESSMCache.merge([filled(model, ids, 3), whole]).shrink(8)
    step(model, merged, random_ids(4, 1), torch.tensor([3, 3, 8, 8]))
    with pytest.raises(ValueError, match="in row 1"):
        step(model, merged, random_ids(4, 1), torch.tensor([3, 4, 8, 8]))
    with pytest.raises(ValueError, match=r"\[1, 32\], got 33"):
        whole.shrink(33)


def test_moving_between_devices():
    cache = filled(random_model(), random_ids(2, 9), 4)
    assert cache.to("meta") is cache and all(t.is_meta for t in states(cache))


# --- On disk


@VARIANTS
def test_a_saved_cache_goes_on_bit_for_bit(variant, tmp_path):
    model, path = random_model(**variant), tmp_path / "cache.safetensors"
    cache = ESSMCache.merge([filled(model, random_ids(1, 5), 3), filled(model, random_ids(2, 9), 20)])
    cache.save(path, model)
    assert os.listdir(tmp_path) == [path.name]
    loaded = ESSMCache.load(path, model)
    assert loaded.get_seq_length() == 9 and loaded.batch_size == 3
    token, budgets = random_ids(3, 1), torch.tensor([2, 20, 5])
    with pytest.raises(ValueError, match="in row 0 of layer 0"):
        step(model, loaded, token, 4)
    assert torch.equal(step(model, loaded, token, budgets), step(model, cache, token, budgets))


def test_bf16_weights_keep_their_states(tmp_path):
    model = random_model().to(torch.bfloat16)
    cache = filled(model, random_ids(2, 9), 5)
    cache.save(tmp_path / "cache", model)
    loaded = ESSMCache.load(tmp_path / "cache", model)
    assert [t.dtype for t in states(loaded)] == [t.dtype for t in states(cache)]
    assert all(torch.equal(a, b) for a, b in zip(states(loaded), states(cache)))


def test_a_saved_cache_of_another_model_is_refused(tmp_path):
    model, path = random_model(), tmp_path / "cache"
    filled(model, random_ids(2, 9), 5).save(path, model)
    with pytest.raises(ValueError, match=r"of another model.*'hidden_size': 16.*'hidden_size': 24"):
        ESSMCache.load(path, random_model(hidden_size=24))
    with pytest.raises(ValueError, match=r"of another model.*'num_hidden_layers': 2.*'num_hidden_layers': 3"):
        ESSMCache.load(path, random_model(num_hidden_layers=3))
    with pytest.raises(ValueError, match=r"of another model: other weights"):
        ESSMCache.load(path, random_model(seed=1))  # same shape
    ESSMCache.load(path, copy.deepcopy(model).truncate(5))
    ESSMCache.load(path, copy.deepcopy(model).to(torch.bfloat16))
    assert ESSMCache.load(path, random_model(seed=0)).batch_size == 2


def test_a_running_cache_of_another_model_is_refused():
    cache = filled(random_model(), random_ids(2, 9), 5)
    with pytest.raises(ValueError, match="of a model of hidden_size 16, but this one has 24"):
        step(random_model(hidden_size=24), cache, random_ids(2, 1), 5)


def test_damaged_files(tmp_path):
    model, path = random_model(), tmp_path / "cache"
    with pytest.raises(FileNotFoundError):
        ESSMCache.load(path, model)
    filled(model, random_ids(2, 9), 5).save(path, model)
    whole = path.read_bytes()
    for damaged in (whole[:-100], whole[:50], b""):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="truncated or corrupt"):
            ESSMCache.load(path, model)
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="is not a cache of this version"):
        ESSMCache.load(path, model)
    save_file({"a": torch.zeros(2)}, path, metadata={"format": "essm-cache-1", "cache": "{"})
    with pytest.raises(ValueError, match="truncated or corrupt"):
        ESSMCache.load(path, model)


def test_saving_is_atomic(tmp_path, monkeypatch):
    model, path = random_model(), tmp_path / "cache"
    filled(model, random_ids(2, 9), 5).save(path, model)
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        filled(model, random_ids(2, 9), 7).save(path, model)
    assert path.read_bytes() == before


# --- Bad calls


def test_bad_rows_and_caches():
    model = random_model()
    cache = filled(model, random_ids(2, 9), 5)
    for rows in ([2], [-1], [], torch.tensor([0, 5])):
        with pytest.raises(ValueError, match=r"rows must be integers in \[0, 1\], at least one"):
            cache.select(rows)
    empty = ESSMCache(model.config)
    with pytest.raises(ValueError, match="cannot select rows of an empty cache"):
        empty.select([0])
    with pytest.raises(ValueError, match="cannot merge an empty cache"):
        ESSMCache.merge([cache, empty])
    with pytest.raises(ValueError, match="merge needs at least one cache"):
        ESSMCache.merge([])
    with pytest.raises(ValueError, match="caches of different models"):
        ESSMCache.merge([cache, filled(random_model(num_hidden_layers=1), random_ids(1, 3))])
    with pytest.raises(ValueError, match="cannot save an empty cache"):
        empty.save("nowhere", model)
