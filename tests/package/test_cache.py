# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""States between calls: what they cost, which budgets they serve, rows taken out and put together, room given back."""

import copy
import re

import pytest
import torch
from helpers import VARIANTS, assert_close, blocks, filled, random_ids, random_model, variants

from modeling_essm import ESSMCache

NAMES = ("past_key_values", "cache")  # until transformers 5.24, and from then on


@torch.no_grad()
def step(model, cache, token, K=None):
    """(B, V) logits after one token of every row."""
    return model(token, past_key_values=cache, use_cache=True, spectral_budget=K).logits[:, 0]


def states(cache):
    return list(cache.states.values())


@pytest.mark.parametrize("part", ["language model", "base model"])
def test_a_cache_goes_by_both_names(part):
    model, ids = random_model(), random_ids(2, 6)
    model = model if part == "language model" else model.model
    caches = [filled(random_model(), ids, 4) for _ in range(2)]
    one, other = (model(ids[:, :1], spectral_budget=4, **{name: c})[0] for name, c in zip(NAMES, caches))
    assert torch.equal(one, other) and all(cache.get_seq_length() == 7 for cache in caches)
    with pytest.raises(ValueError, match="give past_key_values or cache, two names of one argument, not both"):
        model(ids[:, :1], past_key_values=caches[0], cache=caches[1])


# --- Rows


def decode_as(model, merged, solo, budgets, seed):
    """Each row of a merged cache decodes as the cache that it came from."""
    tokens = random_ids(len(solo), 5, seed=seed)
    for t in range(5):
        together = step(model, merged, tokens[:, t : t + 1], torch.tensor(budgets))
        for i, K in enumerate(budgets):
            assert_close(together[i : i + 1], step(model, solo[i], tokens[i : i + 1, t : t + 1], K))


@variants
def test_merged_rows_equal_solo_runs(variant):
    """Rows of several budgets and lengths, decoded together and taken apart again."""
    model, late = random_model(**variant), random_ids(1, 7, seed=3)
    prompts = [(random_ids(1, n, seed=n), K) for n, K in ((5, 2), (19, 32), (12, 7))]
    solo, parts = ([filled(model, ids, K) for ids, K in prompts] for _ in range(2))
    merged = ESSMCache.merge(parts)
    assert merged.batch_size == 3 and merged.get_seq_length() == 19
    decode_as(model, merged, solo, [2, 32, 7], seed=1)
    merged = merged.select([2, 0])  # the middle row, which alone needed the room, leaves; another comes
    assert merged.layers[0].room == solo[2].layers[0].room == 7
    merged = ESSMCache.merge([merged, filled(model, late, 4)])
    decode_as(model, merged, [solo[2], solo[0], filled(model, late, 4)], [7, 2, 4], seed=2)


def test_select_leaves_the_original_alone():
    model, ids = random_model(), random_ids(3, 9)
    cache = filled(model, ids, 8)
    before = [t.clone() for t in states(cache)]
    part = cache.select(torch.tensor([2, 0]))
    assert part.batch_size == 2 and part.get_seq_length() == 9
    for actual, wanted in zip(states(part), states(filled(model, ids[[2, 0]], 8))):
        assert_close(actual, wanted)
    for mask in ([True, False, True], torch.tensor([[True], [False], [True]])):
        assert all(map(torch.equal, states(cache.select(mask)), states(cache.select([0, 2]))))
    step(model, part, ids[:2, :1], 8)
    assert all(map(torch.equal, states(cache), before)) and cache.get_seq_length() == 9


def test_every_row_keeps_its_own_stamp():
    model, token = random_model(), random_ids(3, 1)
    merged = ESSMCache.merge([filled(model, random_ids(1, 5), 3), filled(model, random_ids(2, 5), 20)])
    for budget, row, K in ((torch.tensor([4, 20, 20]), 0, 4), (torch.tensor([3, 20, 21]), 2, 21), (4, 0, 4)):
        with pytest.raises(ValueError, match=rf"spectral_budget {K} needs .* in row {row} of layer 0"):
            step(model, merged, token, budget)
    for budget in (torch.tensor([3, 20, 2]), 3):
        step(model, copy.deepcopy(merged), token, budget)
    merged.reorder_cache(torch.tensor([2, 2, 0]))  # stamps travel with the rows
    with pytest.raises(ValueError, match="in row 2 of layer 0"):
        step(model, merged, token, torch.tensor([20, 20, 4]))
    merged.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match="in row 4 of layer 0"):
        step(model, merged, random_ids(6, 1), 4)


# --- Room


@variants
def test_the_size_falls_with_the_budget_and_is_constant_in_context(variant):
    model = random_model(**variant)
    sizes = [[filled(model, random_ids(2, n), K).num_bytes for K in (1, 8, 32)] for n in (60, 300)]
    assert sizes[0] == sorted(set(sizes[0]))
    assert "layer_types" in variant or sizes[0] == sizes[1]
    greedy = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    generated = model.generate(random_ids(2, 60 - 7), **greedy, spectral_budget=8)
    assert generated.past_key_values.num_bytes == sizes[0][1]
    if not variant:
        assert sizes[0][1] == 2 * 2 * (8 + 16) * 16 * 4  # layers, rows, states, width, bytes of fp32


ROOMS = {
    "asked": lambda model, ids, rooms: filled(model, ids, [3], ESSMCache(model.config, state_budget=rooms[0])),
    "first": lambda model, ids, rooms: filled(model, ids, torch.tensor(rooms)),
    "merged": lambda model, ids, rooms: ESSMCache.merge([filled(model, x[None], K) for x, K in zip(ids, rooms)]),
}


@pytest.mark.parametrize("how", ROOMS)
@variants
@torch.no_grad()
def test_any_budgets_within_the_room(variant, how):
    """In a last layer, outputs and states are those of a model that has always run all channels of each row's room."""
    layers = (
        variant["layer_types"][1:3] if "layer_types" in variant else ["linear_attention"]
    )  # attention has no budget
    model = random_model(**variant | {"num_hidden_layers": len(layers), "layer_types": layers})
    rooms, ids, t = [20, 20, 20] if how == "asked" else [4, 20, 11], random_ids(3, 35), 7
    cache, always = ROOMS[how](model, ids[:, :t], rooms), [filled(model, x[None, :t], K) for x, K in zip(ids, rooms)]
    generator = torch.Generator().manual_seed(len(how))
    for length in (1, 1, 9, 1, 3, 12, 1):
        budgets = [int(torch.randint(1, room + 1, (), generator=generator)) for room in rooms]
        budgets = [min(budgets)] * 3 if length == 3 else budgets
        piece, t = ids[:, t : t + length], t + length
        logits = model(piece, past_key_values=cache, spectral_budget=torch.tensor(budgets)).logits
        for i, K in enumerate(budgets):
            row = piece[i : i + 1]
            alone = model(row, past_key_values=copy.deepcopy(always[i]), spectral_budget=K)
            assert_close(logits[i : i + 1], alone.logits)
            for name, state in filled(model, row, rooms[i], always[i]).layers[-1].tensors.items():
                n = rooms[i] if name == "features" else state.shape[1]  # later ones depend on how many there are
                assert_close(cache.layers[-1].tensors[name][i, :n, : state.shape[2]], state[0, :n], atol=1e-4)


def test_a_cache_is_what_the_first_call_that_ran_made_it():
    """Not one that was refused."""
    model, ids = random_model(**VARIANTS["memory"]), random_ids(2, 9)
    cache = ESSMCache(model.config)
    with pytest.raises(ValueError, match="input_ids"):
        model(ids + 259, past_key_values=cache, spectral_budget=torch.tensor([2, 9]))
    assert all(map(torch.equal, states(filled(model, ids, 9, cache)), states(filled(model, ids, 9))))


def test_a_budget_beyond_the_states_says_how_and_touches_nothing():
    model, ids = random_model(), random_ids(2, 9)
    cache = filled(model, ids, 4)
    before = [t.clone() for t in states(cache)]
    hint = r"spectral_budget 20 needs 36 states in layer {}.*holds 16.*ESSMCache\(config, state_budget=20\)"
    for budget, layer in ((20, 0), ([20, 4], 0), (torch.tensor([4, 20]), 0), ([4, 20], 1)):
        with pytest.raises(ValueError, match=hint.format(layer)):
            step(model, cache, ids[:, :1], budget)
    with pytest.raises(ValueError, match=hint.format(0)):
        model.generate(random_ids(2, 10), past_key_values=cache, spectral_budget=20)
    assert cache.get_seq_length() == 9 and all(map(torch.equal, states(cache), before))


@blocks
def test_shrinking_a_running_cache(block):
    model, ids = random_model(**block), random_ids(2, 9)
    whole, small = filled(model, ids, 32), filled(model, ids, 32)
    assert small.shrink(5) is small
    assert small.num_bytes == filled(model, ids, 5).num_bytes < 0.6 * whole.num_bytes
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in states(small))  # freed, not hidden
    for t in range(4 if not model.config.memory_key_size else 0):  # a smaller room writes other memories
        assert_close(step(model, small, ids[:, t : t + 1], 5), step(model, whole, ids[:, t : t + 1], 5))
    with pytest.raises(ValueError, match="spectral_budget 6 needs 22 states in layer 0, but this cache holds 19"):
        step(model, small, ids[:, :1], 6)
    for budget in ([4, 2], 32):  # the second has nothing to give back
        assert [layer.room for layer in small.shrink(budget).layers] == [4, 2]
    merged = ESSMCache.merge([filled(model, ids, 3), whole]).shrink(8)
    step(model, merged, random_ids(4, 1), torch.tensor([3, 3, 8, 8]))
    with pytest.raises(ValueError, match="in row 1"):
        step(model, merged, random_ids(4, 1), torch.tensor([3, 4, 8, 8]))
    merged.shrink(2)  # below what any row had
    with pytest.raises(ValueError, match="spectral_budget 3 needs"):
        step(model, merged, random_ids(4, 1), 3)
    with pytest.raises(ValueError, match=r"\[1, 32\], got 33"):
        whole.shrink(33)


def test_shrinking_makes_nothing_larger():
    """A budget above the room that a cache has, or has been asked to make, changes nothing; nor after a reset."""
    model, ids = random_model(), random_ids(2, 9)
    fresh, ran = ESSMCache(model.config, state_budget=4).shrink(8), filled(model, ids, 4).shrink(8)
    ran.reset()
    for cache in (fresh, ran, ESSMCache(model.config).shrink(8)):
        assert filled(model, ids, 4, cache).num_bytes == filled(model, ids, 4).num_bytes
    merged = ESSMCache.merge([filled(model, ids, 4), filled(model, ids, 8)]).shrink(20)
    step(model, merged, random_ids(4, 1), torch.tensor([4, 4, 8, 8]))
    roomy = ESSMCache(model.config, state_budget=20).shrink(8)
    assert filled(model, ids, 4, roomy).num_bytes == filled(model, ids, 8).num_bytes


@variants
def test_a_truncated_model_goes_on_with_the_whole_ones_cache(variant):
    """Once it is as small, where states need the weights of their channels; and the two models' rows fit together."""
    whole, ids, token = random_model(**variant), random_ids(1, 9), random_ids(1, 1)
    sizes = [5, 7][: len(whole.config.capacities)]
    small, cache = copy.deepcopy(whole).truncate(sizes), filled(whole, ids, 8)
    if whole.config.block == "elastic":
        for wide in (cache, ESSMCache(whole.config, state_budget=8)):
            with pytest.raises(
                ValueError, match=rf"8 channels in layer \d, .*: call .*shrink\({re.escape(str(sizes))}\)"
            ):
                step(small, wide, token)
    for pair in ((filled(small, ids, 5), cache), (cache, filled(small, ids, 5))):
        merged, K = ESSMCache.merge(pair), [5, 8] if pair[1] is cache else [8, 5]
        solo = torch.cat([step(whole, copy.deepcopy(one), token, k) for one, k in zip(pair, K)])
        assert_close(step(whole, merged, token.repeat(2, 1), torch.tensor(K)), solo)
    cut = cache.shrink(sizes)
    assert_close(step(small, copy.deepcopy(cut), token, sizes), step(whole, cut, token, sizes))


# --- As a whole


def test_reset_forgets_everything():
    model, ids = random_model(), random_ids(2, 9)
    cache = filled(model, random_ids(3, 7, seed=5), 4)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.num_bytes == 0 and not cache.has_previous_state()
    with torch.no_grad():  # other rows and a larger budget are welcome
        assert torch.equal(model(ids, past_key_values=cache).logits, model(ids).logits)


def test_a_copy_is_a_checkpoint_and_crop_says_so():
    model, ids = random_model(), random_ids(1, 9)
    cache = model(ids, use_cache=True).past_key_values
    assert not any(tensor.requires_grad for tensor in states(cache))  # nor does it hold the graph
    kept = copy.deepcopy(cache)
    assert torch.equal(step(model, cache, ids[:, :1]), step(model, kept, ids[:, :1]))
    with pytest.raises(ValueError, match=r"cannot be cropped: .*deepcopy"):
        cache.crop(4)
    assert cache.to("meta") is cache and all(t.is_meta for t in states(cache))


@blocks
def test_a_decoding_step_reads_no_value_of_a_tensor(block):
    """On the meta device there is none to read."""
    model, ids = random_model(**block), random_ids(2, 9)
    budget = model.config.resolve_budget(torch.tensor([3, 8]), batch_size=2)
    cache = filled(model, ids, budget).to("meta")
    model.to("meta")
    for K in (budget, 3):
        assert step(model, cache, ids[:, :1].to("meta"), K).shape == (2, 259)


def test_bad_rows_and_caches():
    model = random_model()
    cache, empty = filled(model, random_ids(2, 9), 5), ESSMCache(model.config)
    for rows in ([2], [-1], [], [0.5, 1.0], [True], [True, False, True], torch.tensor([False, False])):
        with pytest.raises(ValueError, match=r"rows must be integers in \[0, 1\], at least one, or a mask of 2"):
            cache.select(rows)
    with pytest.raises(ValueError, match="cannot select rows of an empty cache"):
        empty.select([0])
    other = filled(random_model(num_hidden_layers=1), random_ids(1, 3))
    for caches, message in (
        ([cache, empty], "cannot merge an empty cache"),
        ([], "merge needs at least one cache"),
        ([cache, other], "caches of different models"),
    ):
        with pytest.raises(ValueError, match=message):
            ESSMCache.merge(caches)


@blocks
@pytest.mark.parametrize("length", [1, 5])
def test_states_made_under_inference_mode_can_train(block, length):
    model, ids = random_model(**block), random_ids(2, 9)
    with torch.inference_mode():
        cache = model(ids[:, :-length], use_cache=True).past_key_values
    logits = model(ids[:, -length:], past_key_values=cache).logits
    logits.sum().backward()
    assert_close(logits, model(ids).logits[:, -length:])
