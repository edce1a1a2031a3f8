# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The cache between calls of generate(), and a budget for every step."""

import copy

import pytest
import torch
from generating import (
    BEAMS,
    GREEDY,
    NEW,
    generate,
    greedy_without_cache,
    random_model,
)
from helpers import assert_close, random_ids, variants

from modeling_essm import ESSMCache

# --- The cache


def filled(model, ids, K=None, **kwargs):
    with torch.no_grad():
        return model(ids, use_cache=True, spectral_budget=K, **kwargs).past_key_values


@variants
def test_cache_size_is_constant_in_context_and_falls_with_the_budget(variant):
    model = random_model(**variant)
    sizes = {}
    for K in (1, 2, 4, 8, 16, 32):
        sizes[K] = filled(model, random_ids(2, 3), K).num_bytes
        assert filled(model, random_ids(2, 300), K).num_bytes == sizes[K]
    assert list(sizes.values()) == sorted(set(sizes.values()))
    if not variant:
        N = 8 + 16
        assert sizes[8] == 2 * 2 * N * 16 * 4  # layers, rows, N, D, bytes of fp32
    generated = model.generate(random_ids(2, 3), **GREEDY, spectral_budget=8, return_dict_in_generate=True)
    assert generated.past_key_values.num_bytes == sizes[8]


@variants
def test_lowering_the_budget_mid_generation(variant):
    """Features do not depend on the budget above them: with one layer, a lowered budget is as if it always ran."""
    model, ids = random_model(num_hidden_layers=1, **variant), random_ids(2, 30)
    if "ar_order" in variant:
        with torch.no_grad():  # its feedback remembers what larger budgets put out
            model.model.layers[0].mixer.output_mixing.zero_()
    cache = filled(model, ids[:, :20], 32)
    with torch.no_grad():
        for K, t in ((20, 20), (3, 21), (9, 22), (32, 23)):
            actual = model(ids[:, t : t + 1], past_key_values=cache, spectral_budget=K).logits
            assert_close(actual, model(ids[:, : t + 1], spectral_budget=K).logits[:, -1:])
    assert cache.layers[0].num_states == filled(model, ids, 32).layers[0].num_states


def test_lowering_the_budget_between_two_calls_of_generate():
    model, ids = random_model(), random_ids(1, 19)
    first = model.generate(ids, **GREEDY, spectral_budget=32, return_dict_in_generate=True)
    cache = copy.deepcopy(first.past_key_values)
    second = model.generate(first.sequences, past_key_values=cache, **GREEDY, spectral_budget=4)
    with torch.no_grad():  # by hand, with the same state
        cache, token = first.past_key_values, first.sequences[:, -1:]
        for t in range(NEW):
            logits = model(token, past_key_values=cache, spectral_budget=4).logits[:, -1]
            logits[:, 258] = -torch.inf
            token = logits.argmax(-1, keepdim=True)
            assert torch.equal(token[:, 0], second[:, first.sequences.shape[1] + t])


def test_raising_the_budget_beyond_the_states_says_how():
    model, ids = random_model(), random_ids(2, 9)
    cache = filled(model, ids, 4)
    before = [layer.tensors["features"].clone() for layer in cache.layers]
    hint = r"spectral_budget 20 needs 36 states in layer 0.*holds 16.*ESSMCache\(config, state_budget=20\)"
    for budget in (20, [20, 4], torch.tensor([4, 20])):
        with pytest.raises(ValueError, match=hint):
            model(ids[:, :1], past_key_values=cache, spectral_budget=budget)
    with pytest.raises(ValueError, match="in layer 1"):
        model(ids[:, :1], past_key_values=cache, spectral_budget=[4, 20])
    with pytest.raises(ValueError, match=hint):
        model.generate(random_ids(2, 10), past_key_values=cache, **GREEDY, spectral_budget=20)
    assert cache.get_seq_length() == 9  # nothing was touched
    assert all(torch.equal(layer.tensors["features"], old) for layer, old in zip(cache.layers, before))


@variants
def test_state_budget_makes_raising_legal(variant):
    model, ids = random_model(num_hidden_layers=1, **variant), random_ids(2, 30)
    if "ar_order" in variant:
        with torch.no_grad():
            model.model.layers[0].mixer.output_mixing.zero_()
    cache = ESSMCache(model.config, state_budget=20)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache, spectral_budget=4)
        assert cache.num_bytes == filled(model, ids, 20).num_bytes
        for K, t in ((20, 20), (3, 21), (20, 22)):
            actual = model(ids[:, t : t + 1], past_key_values=cache, spectral_budget=K).logits
            assert_close(actual, model(ids[:, : t + 1], spectral_budget=K).logits[:, -1:])
        with pytest.raises(ValueError, match="state_budget=21"):
            model(ids[:, :1], past_key_values=cache, spectral_budget=21)


def test_state_budget_in_generate():
    model, ids = random_model(), random_ids(1, 19)
    cache = ESSMCache(model.config, state_budget=20)
    first = model.generate(ids, past_key_values=cache, **GREEDY, spectral_budget=4)
    assert torch.equal(first, greedy_without_cache(model, ids, spectral_budget=4))
    assert model.generate(first, past_key_values=cache, **GREEDY, spectral_budget=20).shape[1] == 19 + 2 * NEW


@variants
def test_continuing_a_conversation(variant):
    """Generate, add a turn, generate from the returned cache: as if from the whole text."""
    model, ids = random_model(**variant), random_ids(2, 12)
    first = model.generate(ids, **GREEDY, return_dict_in_generate=True)
    turn = torch.cat([first.sequences, random_ids(2, 5, seed=1)], 1)
    continued = model.generate(turn, past_key_values=first.past_key_values, **GREEDY)
    assert torch.equal(continued, greedy_without_cache(model, turn))


@variants
def test_reorder_select_and_repeat(variant):
    model, ids = random_model(**variant), random_ids(4, 9)

    def agrees(cache, rows):
        expected = filled(model, ids[rows])
        for layer, other in zip(cache.layers, expected.layers):
            assert layer.tensors.keys() == other.tensors.keys()
            for name in other.tensors:
                assert_close(layer.tensors[name], other.tensors[name])
        with torch.no_grad():  # and decodes on
            token = random_ids(len(rows), 1, seed=2)
            actual = model(token, past_key_values=cache).logits
            assert_close(actual, model(torch.cat([ids[rows], token], 1)).logits[:, -1:])

    for rows in ([2, 0, 0, 3], [1, 1, 1, 1]):
        cache = filled(model, ids)
        cache.reorder_cache(torch.tensor(rows))
        agrees(cache, rows)
    cache = filled(model, ids)
    cache.batch_select_indices(torch.tensor([3, 1]))
    agrees(cache, [3, 1])
    cache = filled(model, ids)
    cache.batch_repeat_interleave(2)
    agrees(cache, [0, 0, 1, 1, 2, 2, 3, 3])


def test_reset_forgets_everything():
    model, ids = random_model(), random_ids(2, 9)
    cache = filled(model, random_ids(3, 7, seed=5), 4)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.num_bytes == 0 and not cache.has_previous_state()
    with torch.no_grad():  # other rows and a larger budget are welcome
        actual = model(ids, past_key_values=cache, spectral_budget=32).logits
        assert torch.equal(actual, model(ids, spectral_budget=32).logits)


def test_a_copy_is_a_checkpoint_and_crop_says_so():
    model, ids = random_model(), random_ids(1, 9)
    cache = filled(model, ids)
    kept = copy.deepcopy(cache)
    with torch.no_grad():
        once = model(ids[:, :3], past_key_values=cache).logits
        assert torch.equal(model(ids[:, :3], past_key_values=kept).logits, once)
    with pytest.raises(ValueError, match=r"cannot be cropped to 4.*deepcopy"):
        cache.crop(4)


def test_a_cache_does_not_hold_the_graph():
    model, ids = random_model(), random_ids(2, 9)
    cache = model(ids, use_cache=True).past_key_values
    assert not any(tensor.requires_grad for layer in cache.layers for tensor in layer.tensors.values())


# --- A budget for every step


def test_step_budgets_are_those_of_a_loop_by_hand():
    """Step 0 reads the prompt; the state is kept, and room is made for the largest budget of a list."""
    model, ids, plan = random_model(), random_ids(2, 19), [4, 20, [2, 9], 7]
    actual = model.generate(ids, **GREEDY, step_budgets=plan, return_dict_in_generate=True)
    cache, tokens = ESSMCache(model.config, state_budget=20), ids
    with torch.no_grad():
        for t in range(NEW):
            new = tokens if t == 0 else tokens[:, -1:]
            logits = model(new, past_key_values=cache, spectral_budget=plan[min(t, 3)]).logits[:, -1]
            logits[:, 258] = -torch.inf
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    assert torch.equal(actual.sequences, tokens)
    assert actual.past_key_values.num_bytes == cache.num_bytes
    assert not torch.equal(tokens, model.generate(ids, **GREEDY, spectral_budget=4))


@pytest.mark.parametrize(
    "strategy", [GREEDY, BEAMS, {**BEAMS, "num_return_sequences": 2}], ids=["greedy", "beams", "2"]
)
def test_step_budgets_as_a_function(strategy):
    model, ids, steps = random_model(), random_ids(2, 19), []

    def falling(step):
        steps.append(step)
        return [9, 5, 2][min(step, 2)]

    actual = generate(model, ids, step_budgets=falling, **strategy)
    assert steps == list(range(NEW))
    assert torch.equal(actual, generate(model, ids, step_budgets=[9, 5, 2], **strategy))
    assert torch.equal(
        generate(model, ids, step_budgets=lambda step: 5, **strategy),
        generate(model, ids, spectral_budget=5, **strategy),
    )
    rows = torch.tensor([2, 9])
    assert torch.equal(
        generate(model, ids, step_budgets=[rows], **strategy), generate(model, ids, spectral_budget=rows, **strategy)
    )


def test_a_rising_function_needs_room():
    model, ids = random_model(), random_ids(2, 19)
    with pytest.raises(ValueError, match=r"spectral_budget 3 needs .*ESSMCache\(config, state_budget=3\)"):
        model.generate(ids, **GREEDY, step_budgets=lambda step: 2 + step)
    cache = ESSMCache(model.config, state_budget=20)
    rising = model.generate(ids, **GREEDY, step_budgets=lambda step: 2 + step, past_key_values=cache)
    assert torch.equal(rising, model.generate(ids, **GREEDY, step_budgets=list(range(2, 2 + NEW))))


def test_forward_sees_the_budget_of_its_step_alone():
    model, calls = random_model(), []
    model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
    model.generate(random_ids(1, 9), **GREEDY, step_budgets=[9, 5, 2])
    assert [kwargs["spectral_budget"] for kwargs in calls] == [9, 5] + [2] * (NEW - 2)
    assert all("step_budgets" not in kwargs for kwargs in calls)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"step_budgets": []}, "a function of the step or a list of budgets, got"),
        ({"step_budgets": 6}, "a function of the step or a list of budgets, got 6"),
        ({"step_budgets": [4, 33]}, r"\[1, 32\], got 33"),
        ({"step_budgets": [4, [1, 2, 3]]}, "each of the 2 spectral layers, got 3"),
        ({"step_budgets": [4], "spectral_budget": 4}, "spectral_budget or step_budgets, not both, got 4"),
        ({"step_budgets": [4], "prefill_chunk_size": 4}, "prefill_chunk_size"),
        ({"step_budgets": lambda step: 40}, r"\[1, 32\], got 40"),
    ],
)
def test_bad_step_budgets(kwargs, message):
    with pytest.raises(ValueError, match=message):
        random_model().generate(random_ids(2, 9), **GREEDY, **kwargs)
