# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a server does with states: take rows out, put rows together, give room back."""

import copy

import pytest
import torch
from helpers import assert_close, blocks, random_ids, random_model, variants

from modeling_essm import ESSMCache


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


@variants
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
    # The middle row, which alone needed the room, leaves; another comes
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
    for mask in ([True, False, True], torch.tensor([[True], [False], [True]])):
        assert all(map(torch.equal, states(cache.select(mask)), states(cache.select([0, 2]))))
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
    # Stamps travel with the rows.
    merged.reorder_cache(torch.tensor([2, 2, 0]))
    with pytest.raises(ValueError, match="in row 2 of layer 0"):
        step(model, merged, token, torch.tensor([20, 20, 4]))
    merged.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match="in row 4 of layer 0"):
        step(model, merged, random_ids(6, 1), 4)
    merged.reset()
    model(random_ids(2, 5), past_key_values=merged, use_cache=True)  # as new


@blocks
def test_shrinking_a_running_cache(block):
    model, ids = random_model(**block), random_ids(2, 9)
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
    merged.shrink(2)  # below what any row had
    with pytest.raises(ValueError, match="spectral_budget 3 needs"):
        step(model, merged, random_ids(4, 1), 3)
    with pytest.raises(ValueError, match=r"\[1, 32\], got 33"):
        whole.shrink(33)


@blocks
@pytest.mark.parametrize("length", [1, 9])
def test_states_of_one_row_lie_as_their_shapes_say(block, length):
    """A clone of a part keeps the whole's stride in a dimension of size 1, and compiled steps look at strides."""
    model = random_model(**block)
    cache = filled(model, random_ids(1, length), 9)
    for held in (cache, cache.select([0]), copy.deepcopy(cache).shrink(5), cache):
        assert all(tensor.stride() == torch.empty(tensor.shape).stride() for tensor in states(held))
        step(model, held, random_ids(1, 1), 5)


def test_shrinking_makes_nothing_larger():
    """A budget above the room that a cache has, or has been asked to make, changes nothing; nor after a reset."""
    model, ids = random_model(), random_ids(2, 9)
    fresh = ESSMCache(model.config, state_budget=4).shrink(8)
    ran, plain = filled(model, ids, 4).shrink(8), ESSMCache(model.config).shrink(8)
    merged = ESSMCache.merge([filled(model, ids, 4), filled(model, ids, 8)]).shrink(20)
    step(model, merged, random_ids(4, 1), torch.tensor([4, 4, 8, 8]))
    ran.reset()
    for cache in (fresh, ran, plain):
        with torch.no_grad():
            model(ids, past_key_values=cache, spectral_budget=4)
        assert cache.num_bytes == filled(model, ids, 4).num_bytes
    roomy = ESSMCache(model.config, state_budget=20).shrink(8)
    step(model, roomy, ids[:, :1], 4)
    assert roomy.num_bytes == filled(model, ids, 8).num_bytes


@blocks
def test_the_step_of_named_states_is_that_of_a_cache(block):
    model, token = random_model(**block), random_ids(2, 1)
    cache = filled(model, random_ids(2, 9), 5)
    held, other = cache.states, ESSMCache(model.config)
    other.set_states(held)
    logits, after = model.step(token, (5, 5), held)
    assert torch.equal(logits, step(model, other, token, 5))
    assert after.keys() == held.keys() and all(torch.equal(after[name], other.states[name]) for name in after)


def test_moving_between_devices():
    cache = filled(random_model(), random_ids(2, 9), 4)
    assert cache.to("meta") is cache and all(t.is_meta for t in states(cache))


def test_bad_rows_and_caches():
    model = random_model()
    cache = filled(model, random_ids(2, 9), 5)
    for rows in ([2], [-1], [], [0.5, 1.0], [True], [True, False, True], torch.tensor([False, False])):
        with pytest.raises(ValueError, match=r"rows must be integers in \[0, 1\], at least one, or a mask of 2"):
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


@blocks
def test_a_decoding_step_reads_no_value_of_a_tensor(block):
    """On the meta device there is none to read."""
    model, ids = random_model(**block), random_ids(2, 9)
    budget = model.config.resolve_budget(torch.tensor([3, 8]), batch_size=2)
    with torch.no_grad():
        cache = model(ids, spectral_budget=budget).past_key_values
        model.to("meta")
        cache.to("meta")
        for K in (budget, 4):
            assert model(ids[:, :1].to("meta"), past_key_values=cache, spectral_budget=K).logits.shape == (2, 1, 259)
