# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""generate(): every decoding strategy, the cache between calls, and the budget by every route and for every step."""

import copy
import itertools
import threading

import pytest
import torch
from generating import BEAMS, GREEDY, NEW, generate, greedy_without_cache, random_model, strategies
from helpers import HYBRID, VARIANTS, assert_close, captured_warnings, pad, random_ids
from transformers import GenerationConfig, TextIteratorStreamer

from modeling_essm import ESSMCache, ESSMForCausalLM, build_byte_tokenizer
from modeling_essm.decoding import speculate

# States are the same without a gate.
variants = pytest.mark.parametrize("variant", [{}, VARIANTS["gated"], HYBRID], ids=["paper", "gated", "hybrid"])

# --- Strategies


@variants
@pytest.mark.parametrize("budget", [None, [3, 20]], ids=["full", "K3-20"])
def test_greedy_is_a_full_forward_per_token(variant, budget):
    model, ids = random_model(**variant), random_ids(2, 19)
    expected = greedy_without_cache(model, ids, spectral_budget=budget)
    assert torch.equal(generate(model, ids, **GREEDY, spectral_budget=budget), expected)
    assert len(set(expected[:, 19:].flatten().tolist())) > 3  # not one token over and over


@strategies
@pytest.mark.parametrize("fields", [{}, HYBRID], ids=["paper", "hybrid"])
def test_no_cache_and_a_static_one_change_nothing(strategy, fields):
    model = random_model(**fields)
    ids, mask = pad(random_ids(2, 19), [19, 8], "left")
    options = {"attention_mask": mask, "spectral_budget": 6, **strategy}
    cached = generate(model, ids, **options)
    assert torch.equal(cached, generate(model, ids, **options, use_cache=False))
    assert cached.shape == (2 * strategy.get("num_return_sequences", 1), 19 + NEW)
    if not fields:  # keys of attention have no constant size
        assert not torch.equal(cached, generate(model, ids, **options | {"spectral_budget": 1}))
        assert torch.equal(cached, generate(model, ids, cache_implementation="static", **options))


OPTIONS = [
    {},
    {"use_cache": False},
    {"prefill_chunk_size": 1},  # where a chunk may be all padding for some rows
    {"prefill_chunk_size": 7},
    {"num_beams": 3},
    {"step_budgets": [32, 4, 9]},
    {"custom_generate": speculate(draft_budget=2)},
    {"spectral_budget": torch.tensor([2, 32, 7])},
    {"spectral_budget": torch.tensor([2, 32, 7]), "num_beams": 3, "num_return_sequences": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "greedy")
@variants
def test_rows_of_a_padded_batch_equal_solo_rows(options, variant):
    model, ids, lengths = random_model(**variant), random_ids(3, 19), [19, 8, 1]
    prompts, mask = pad(ids, lengths, "left")
    batch = generate(model, prompts, attention_mask=mask, **GREEDY, **options)
    plain = {name: value for name, value in options.items() if name != "custom_generate"}
    returned = options.get("num_return_sequences", 1)
    for i, n in enumerate(lengths):
        if "spectral_budget" in plain:
            plain["spectral_budget"] = int(options["spectral_budget"][i])
        alone = generate(model, ids[i : i + 1, :n], **GREEDY, **plain)
        assert torch.equal(batch[i * returned : (i + 1) * returned, 19:], alone[:, n:])


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 7}], ids=str)
@variants
def test_prompts_with_holes_equal_solo_prompts(options, variant):
    """Masked positions stand in the middle, on the left and, where the prompt is read at once, on the right."""
    model, ids = random_model(**variant), random_ids(4, 19)
    mask = torch.rand(4, 19, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[:, -1] = True
    if "prefill_chunk_size" not in options:
        mask[1, 11:], mask[2] = False, torch.arange(19) < 6
    batch = generate(model, ids, attention_mask=mask.long(), **GREEDY, **options)
    for i in range(4):
        alone = generate(model, ids[i : i + 1, mask[i]], **GREEDY)
        assert torch.equal(batch[i, -NEW:], alone[0, -NEW:])


READING_IN_PIECES = {"prefill_chunk_size": 7, "custom_generate": speculate(2)}


@pytest.mark.parametrize("name", READING_IN_PIECES)
def test_right_padding_is_refused_where_it_cannot_be_read(name):
    model, ids = random_model(), random_ids(2, 19)
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[1, -1] = 0
    options = {name: READING_IN_PIECES[name]}
    with pytest.raises(ValueError, match=r"needs prompts padded on the left.*rows \[1\]"):
        model.generate(ids, attention_mask=mask, **GREEDY, **options)
    model.generate(ids, attention_mask=mask.flip(1), **GREEDY, **options)


@variants
def test_a_turn_padded_on_the_left_continues_a_conversation(variant):
    model, ids, turns = random_model(**variant), random_ids(2, 12), random_ids(2, 6, seed=1)
    first = model.generate(ids, **GREEDY, return_dict_in_generate=True)
    cache = first.past_key_values
    text = torch.cat([first.sequences, turns], 1)
    mask = torch.ones_like(text)
    mask[1, -6:-2] = 0
    continued = model.generate(text, attention_mask=mask, past_key_values=cache, **GREEDY)
    for i in range(2):
        alone = greedy_without_cache(model, text[i : i + 1, mask[i].bool()])
        assert torch.equal(continued[i, -NEW:], alone[0, -NEW:])


def test_inputs_embeds():
    model, ids = random_model(), random_ids(2, 19)
    padded, mask = pad(ids, [19, 8], "left")
    expected = generate(model, padded, attention_mask=mask, **GREEDY, spectral_budget=6)
    embeds = model.get_input_embeddings()(padded)
    actual = generate(model, None, inputs_embeds=embeds, attention_mask=mask, **GREEDY, spectral_budget=6)
    assert torch.equal(actual, expected[:, 19:])


def test_rows_that_end_early_leave_the_others_alone():
    """An eos chosen so that only row 0 stops: row 1 must go on as if alone."""
    model, ids = random_model(), random_ids(2, 19)
    expected = greedy_without_cache(model, ids)
    eos = next(token for token in expected[0, 19:-3].tolist() if token not in expected[1, 19:])
    together = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=eos)
    first = expected[0, 19:].tolist().index(eos)
    assert (together[0, 19 + first + 1 :] == 256).all()
    assert torch.equal(together[1], expected[1])


def test_streaming():
    model, tokenizer = random_model(), build_byte_tokenizer()
    ids = random_ids(1, 19)
    text = tokenizer.decode(generate(model, ids, **GREEDY, spectral_budget=6)[0, 19:])
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    kwargs = {"streamer": streamer, "spectral_budget": 6, **GREEDY}
    thread = threading.Thread(target=generate, args=(model, ids), kwargs=kwargs)
    thread.start()
    assert "".join(streamer) == text
    thread.join()


@pytest.mark.parametrize("kwargs", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": None}], ids=str)
def test_assisted_generation_is_refused(kwargs):
    model = random_model()
    if "assistant_model" in kwargs:
        kwargs = {"assistant_model": random_model(seed=1)}
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(random_ids(1, 9), **GREEDY, **kwargs)


def test_a_misspelled_budget_is_refused():
    with pytest.raises(ValueError, match="spectral_bugdet"):
        random_model().generate(random_ids(1, 9), **GREEDY, spectral_bugdet=3)


def test_cache_implementation_is_ignored_with_a_warning():
    model, ids = random_model(), random_ids(1, 9)
    with captured_warnings() as messages:
        actual = generate(model, ids, **GREEDY, cache_implementation="offloaded")
    assert torch.equal(actual, generate(model, ids, **GREEDY))
    assert sum("cache_implementation" in message for message in messages) == 1


def test_generating_in_training_mode_with_gradient_checkpointing():
    model, ids = random_model(), random_ids(2, 9)
    expected = generate(model, ids, **GREEDY)
    model.train()
    model.gradient_checkpointing_enable()
    assert torch.equal(generate(model, ids, **GREEDY), expected)


# --- The budget by every route


def test_a_budget_of_the_saved_configuration_arrives(tmp_path):
    """Budgets of pipelines are tested with the clients."""
    model, ids, K = random_model(), random_ids(1, 19), [2, 9]
    expected = greedy_without_cache(model, ids, spectral_budget=K)
    assert not torch.equal(expected, greedy_without_cache(model, ids))
    model.save_pretrained(tmp_path / "plain")
    loaded = ESSMForCausalLM.from_pretrained(tmp_path / "plain", spectral_budget=K)
    assert torch.equal(generate(loaded, ids, **GREEDY), expected)
    model.generation_config.spectral_budget = K
    model.save_pretrained(tmp_path / "with")
    assert torch.equal(generate(ESSMForCausalLM.from_pretrained(tmp_path / "with"), ids, **GREEDY), expected)


def test_call_beats_generation_config_beats_config():
    model, ids = random_model(), random_ids(1, 19)
    expected = {K: greedy_without_cache(model, ids, spectral_budget=K) for K in (1, 3, 8, 32)}
    assert len({tuple(ids[0].tolist()) for ids in expected.values()}) == 4
    model.config.spectral_budget = 1
    assert torch.equal(generate(model, ids, **GREEDY), expected[1])
    model.generation_config.spectral_budget = 3
    assert torch.equal(generate(model, ids, **GREEDY), expected[3])
    assert torch.equal(generate(model, ids, **GREEDY, spectral_budget=8), expected[8])
    passed = GenerationConfig(**GREEDY, spectral_budget=32)
    assert torch.equal(generate(model, ids, generation_config=passed), expected[32])
    assert torch.equal(generate(model, ids, generation_config=passed, spectral_budget=8), expected[8])
    assert model.config.spectral_budget == 1 and model.generation_config.spectral_budget == 3  # nothing is left behind


@pytest.mark.parametrize(
    "budget, use_cache",
    [
        ({}, True),
        ({"spectral_budget": torch.tensor([2, 9])}, True),
        ({"step_budgets": [2, 9, 4]}, True),
        ({"step_budgets": [2, 9, 4]}, False),
    ],
    ids=["full", "rows", "steps", "steps-uncached"],
)
def test_guidance_runs_both_halves_at_the_budget(budget, use_cache):
    """Classifier-free guidance calls the model by itself: its unconditional half starts from the last token alone."""
    model, ids = random_model(), random_ids(2, 9)
    actual = generate(model, ids, **GREEDY, guidance_scale=3.0, use_cache=use_cache, **budget)
    expected = ids
    for step in range(NEW):
        steps = budget.get("step_budgets", [budget.get("spectral_budget")])
        halves = []
        for tokens in (expected, expected[:, 8:]):
            cache = ESSMCache(model.config, state_budget=32)  # earlier tokens were read at the budgets of their steps
            cuts = [0, *range(tokens.shape[1] - step, tokens.shape[1] + 1)] if use_cache else [0, tokens.shape[1]]
            for i, (a, b) in enumerate(itertools.pairwise(cuts)):
                K = steps[min(i if use_cache else step, len(steps) - 1)]
                with torch.no_grad():
                    outputs = model(tokens[:, a:b], past_key_values=cache, spectral_budget=K)
            halves.append(outputs.logits[:, -1].log_softmax(-1))
        scores = halves[1] + 3.0 * (halves[0] - halves[1])
        scores[:, 258] = -torch.inf  # eos, of which FIXED allows none
        expected = torch.cat([expected, scores.argmax(-1, keepdim=True)], 1)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("bad", [33, "x"])
def test_a_bad_budget_in_the_generation_config_is_refused(bad):
    model = random_model()
    model.generation_config.spectral_budget = bad
    with pytest.raises(ValueError, match="spectral_budget"):
        model.generate(random_ids(1, 9), **GREEDY)


# --- The cache


def filled(model, ids, K=None, **kwargs):
    with torch.no_grad():
        return model(ids, use_cache=True, spectral_budget=K, **kwargs).past_key_values


@variants
def test_cache_size_falls_with_the_budget_and_is_constant_in_context(variant):
    model = random_model(**variant)
    budgets, lengths = (1, 8, 32), (60, 300)
    sizes = [[filled(model, random_ids(2, n), K).num_bytes for K in budgets] for n in lengths]
    assert sizes[0] == sorted(set(sizes[0]))
    assert variant is HYBRID or sizes[0] == sizes[1]
    generated = model.generate(random_ids(2, 60 - NEW + 1), **GREEDY, spectral_budget=8, return_dict_in_generate=True)
    assert generated.past_key_values.num_bytes == sizes[0][1]
    if not variant:
        assert sizes[0][1] == 2 * 2 * (8 + 16) * 16 * 4  # layers, rows, states, width, bytes of fp32


@variants
def test_the_budget_of_a_running_cache(variant):
    """Features do not depend on the budget above them: in a last layer, a new budget is as if it had always run."""
    one = {"num_hidden_layers": 2, "layer_types": variant["layer_types"][1:3]} if variant is HYBRID else {}
    model, ids = random_model(**variant | ({"num_hidden_layers": 1} | one)), random_ids(2, 30)
    cache = ESSMCache(model.config, state_budget=20)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache, spectral_budget=4)
        for K, t in ((20, 20), (3, 21), (9, 22), (20, 23)):
            actual = model(ids[:, t : t + 1], past_key_values=cache, spectral_budget=K).logits
            assert_close(actual, model(ids[:, : t + 1], spectral_budget=K).logits[:, -1:])
        with pytest.raises(ValueError, match="state_budget=21"):
            model(ids[:, :1], past_key_values=cache, spectral_budget=21)


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


@pytest.mark.parametrize("strategy", [GREEDY, {**BEAMS, "num_return_sequences": 2}], ids=["greedy", "beams"])
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


def test_a_budget_as_a_tensor_of_no_dimension_holds_for_every_beam():
    model, ids = random_model(), random_ids(2, 9)
    expected = model.generate(ids, spectral_budget=4, num_beams=2, max_new_tokens=4)
    assert torch.equal(model.generate(ids, spectral_budget=torch.tensor(4), num_beams=2, max_new_tokens=4), expected)
