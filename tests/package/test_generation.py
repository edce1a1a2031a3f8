# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""generate(): every decoding strategy, padded prompts, and the budget by every route and for every step."""

import itertools

import pytest
import torch
import transformers
from helpers import HYBRID, VARIANTS, captured_warnings, filled, level_model, pad, random_ids
from packaging.version import Version
from transformers import GenerationConfig

from modeling_essm import ESSMCache, ESSMForCausalLM
from modeling_essm.cache_essm import ESSMStaticCache
from modeling_essm.decoding import speculate

NEW = 8
GREEDY = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}  # the second keeps eos away
STRATEGIES = {
    "greedy": GREEDY,
    "beams": {**GREEDY, "num_beams": 3, "num_return_sequences": 3},
    "samples": {**GREEDY, "do_sample": True, "top_k": 20, "temperature": 0.8, "num_return_sequences": 3},
}
# States are the same without a gate; the hybrid's spectral layers are the paper's.
variants = pytest.mark.parametrize("variant", [VARIANTS["memory"], HYBRID], ids=["elastic", "hybrid"])


@torch.no_grad()
def greedy_without_cache(model, ids, **kwargs):
    """The definition of greedy decoding: one full forward pass per token."""
    for _ in range(NEW):
        logits = model(ids, use_cache=False, **kwargs).logits[:, -1]
        logits[:, 258] = -torch.inf  # eos
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids


def generate(model, ids, seed=0, **kwargs):
    torch.manual_seed(seed)
    return model.generate(ids, **GREEDY | kwargs)


# --- Strategies


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@variants
def test_no_cache_and_a_static_one_change_nothing(strategy, variant):
    model = level_model(**variant)
    ids, mask = pad(random_ids(2, 19), [19, 8], "left")
    options = {"attention_mask": mask, "spectral_budget": 6, **strategy}
    cached = generate(model, ids, **options)
    assert torch.equal(cached, generate(model, ids, **options, use_cache=False))
    assert cached.shape == (2 * strategy.get("num_return_sequences", 1), 19 + NEW)
    if variant is not HYBRID:  # keys of attention have no constant size
        assert not torch.equal(cached, generate(model, ids, **options | {"spectral_budget": 1}))
        assert torch.equal(cached, generate(model, ids, cache_implementation="static", **options))


@pytest.mark.parametrize("change", ["embeddings", "offloaded cache", "training"])
def test_what_changes_no_token(change):
    """Embeddings for ids; a kind of cache that there is none of; training mode with gradient checkpointing."""
    model, ids, start, options = level_model(), random_ids(2, 19), 19, {"spectral_budget": 6}
    expected = generate(model, ids, **options)[:, 19:]
    if change == "embeddings":
        options["inputs_embeds"], ids, start = model.get_input_embeddings()(ids), None, 0
    elif change == "training":
        model.train().gradient_checkpointing_enable()
    else:
        options["cache_implementation"] = "offloaded"
    with captured_warnings() as messages:
        assert torch.equal(generate(model, ids, **options)[:, start:], expected)
    assert sum("cache_implementation" in message for message in messages) == (change == "offloaded cache")


def test_a_users_compilation_decodes_with_a_static_cache():
    model, ids = level_model(num_hidden_layers=1), random_ids(2, 12)
    expected = generate(model, ids)
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(generate(model, ids, cache_implementation="static"), expected)


def test_a_cache_of_the_whole_prompt_leaves_nothing_to_read():
    model, ids, options = level_model(), random_ids(2, 12), {"max_new_tokens": 3, "do_sample": False}
    longer, embed = torch.cat([ids, ids[:, :2]], 1), model.get_input_embeddings()
    expected = model.generate(longer, **options)
    for ways in (
        {},
        {"inputs_embeds": embed(ids)},
        {"step_budgets": [32]},
        {"prefill_chunk_size": 2},
        {"num_beams": 2},
        {"custom_generate": speculate(2)},
        {"past_key_values": ESSMStaticCache(model.config)},
    ):
        call = options | {"past_key_values": ESSMCache(model.config)} | ways
        filled(model, ids, cache=call["past_key_values"])
        prompt = {} if "inputs_embeds" in ways else {"input_ids": ids}
        too_old = "prefill_chunk_size" in ways and Version(transformers.__version__) < Version("5.21")
        said = "leave prefill_chunk_size out" if too_old else "has read 12 positions, but the prompt has 12"
        said = "starts from input_ids" if "custom_generate" in ways else said  # no cache at all
        for text in (prompt, {"input_ids": longer})[: 1 + too_old]:
            with pytest.raises(ValueError, match=said):
                model.generate(**text, **call)
        if too_old or "custom_generate" in ways:
            continue
        if "num_beams" in ways:
            call["past_key_values"].batch_repeat_interleave(2)
        if prompt:
            found, wanted = model.generate(longer, **call), expected
        else:
            found, wanted = model.generate(**call | {"inputs_embeds": embed(longer)}), expected[:, 14:]
        assert torch.equal(found, model.generate(longer, **options | ways) if "num_beams" in ways else wanted)


# --- Padded prompts

OPTIONS = [
    {},
    {"prefill_chunk_size": 1},  # where a chunk may be all padding for some rows
    {"step_budgets": [32, 4, 9]},
    {"custom_generate": speculate(draft_budget=2)},
    {"spectral_budget": torch.tensor([2, 32, 7])},
    {"spectral_budget": torch.tensor([2, 32, 7]), "num_beams": 3, "num_return_sequences": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "greedy")
@variants
def test_rows_of_a_padded_batch_equal_solo_rows(options, variant):
    model, ids, lengths = level_model(**variant), random_ids(3, 19), [19, 8, 1]
    prompts, mask = pad(ids, lengths, "left")
    batch = generate(model, prompts, attention_mask=mask, **options)
    plain = {name: value for name, value in options.items() if name != "custom_generate"}
    returned = options.get("num_return_sequences", 1)
    for i, n in enumerate(lengths):
        if "spectral_budget" in plain:
            plain["spectral_budget"] = int(options["spectral_budget"][i])
        alone = generate(model, ids[i : i + 1, :n], **plain)
        assert torch.equal(batch[i * returned : (i + 1) * returned, 19:], alone[:, n:])


@variants
def test_a_turn_padded_on_the_left_continues_a_conversation(variant):
    model, ids, turns = level_model(**variant), random_ids(2, 12), random_ids(2, 6, seed=1)
    first = generate(model, ids, return_dict_in_generate=True)
    text = torch.cat([first.sequences, turns], 1)
    mask = torch.ones_like(text)
    mask[1, -6:-2] = 0
    continued = generate(model, text, attention_mask=mask, past_key_values=first.past_key_values)
    for i in range(2):
        alone = greedy_without_cache(model, text[i : i + 1, mask[i].bool()])
        assert torch.equal(continued[i, -NEW:], alone[0, -NEW:])


# --- The budget by every route


def test_call_beats_generation_config_beats_config(tmp_path):
    model, ids = level_model(), random_ids(1, 19)
    expected = {str(K): greedy_without_cache(model, ids, spectral_budget=K) for K in (1, 3, 8, 32, [2, 9])}
    assert len({tuple(ids[0].tolist()) for ids in expected.values()}) == 5
    model.config.spectral_budget = 1
    assert torch.equal(generate(model, ids), expected["1"])
    model.generation_config.spectral_budget = 3
    assert torch.equal(generate(model, ids), expected["3"])
    assert torch.equal(generate(model, ids, spectral_budget=8), expected["8"])
    beams = [generate(model, ids, num_beams=2, spectral_budget=K) for K in (8, torch.tensor(8))]
    assert torch.equal(*beams)
    passed = GenerationConfig(**GREEDY, spectral_budget=32)
    assert torch.equal(model.generate(ids, generation_config=passed), expected["32"])
    assert torch.equal(model.generate(ids, generation_config=passed, spectral_budget=8), expected["8"])
    assert model.config.spectral_budget == 1 and model.generation_config.spectral_budget == 3  # nothing is left behind
    model.generation_config.spectral_budget = [2, 9]
    model.save_pretrained(tmp_path)
    assert torch.equal(generate(ESSMForCausalLM.from_pretrained(tmp_path), ids), expected["[2, 9]"])
    model.generation_config.spectral_budget = 33
    for options, message in (({}, r"\[1, 32\], got 33"), ({"spectral_bugdet": 3}, "spectral_bugdet")):
        with pytest.raises(ValueError, match=message):
            generate(model, ids, **options)


@pytest.mark.parametrize(
    "budget, use_cache",
    [
        ({"spectral_budget": torch.tensor([2, 9])}, True),
        ({"step_budgets": [2, 9, 4]}, True),
        ({"step_budgets": [2, 9, 4]}, False),
    ],
    ids=["rows", "steps", "steps-uncached"],
)
def test_guidance_runs_both_halves_at_the_budget(budget, use_cache):
    """Classifier-free guidance calls the model by itself: its unconditional half starts from the last token alone."""
    model, ids = level_model(), random_ids(2, 9)
    actual = generate(model, ids, guidance_scale=3.0, use_cache=use_cache, **budget)
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
        scores[:, 258] = -torch.inf  # eos
        expected = torch.cat([expected, scores.argmax(-1, keepdim=True)], 1)
    assert torch.equal(actual, expected)


# --- A budget for every step


def test_step_budgets_are_those_of_a_loop_by_hand():
    """Step 0 reads the prompt; the state is kept, and room is made for the largest budget of a list."""
    model, ids, plan = level_model(), random_ids(2, 19), [4, 20, [2, 9], 7]
    actual = generate(model, ids, step_budgets=plan, return_dict_in_generate=True)
    cache, tokens = ESSMCache(model.config, state_budget=20), ids
    with torch.no_grad():
        for t in range(NEW):
            new = tokens if t == 0 else tokens[:, -1:]
            logits = model(new, past_key_values=cache, spectral_budget=plan[min(t, 3)]).logits[:, -1]
            logits[:, 258] = -torch.inf
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    assert torch.equal(actual.sequences, tokens)
    assert actual.past_key_values.num_bytes == cache.num_bytes
    assert not torch.equal(tokens, generate(model, ids, spectral_budget=4))
    model.generation_config.step_budgets = plan  # as a default, which a call's budget beats
    assert torch.equal(generate(model, ids), tokens) and not torch.equal(
        generate(model, ids, spectral_budget=4), tokens
    )


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_rows_of_step_budgets_are_what_they_are_alone(options):
    """A memory is written in each row up to the largest budget that this row will have."""
    model, ids = level_model(**HYBRID | VARIANTS["memory"]), random_ids(3, 10)
    steps = [torch.tensor([1, 3, 2]), torch.tensor([1, 6, 1])]
    together = generate(model, ids, step_budgets=steps, **options)
    for row in range(3):
        alone = [int(step[row]) for step in steps]
        assert torch.equal(together[row], generate(model, ids[row : row + 1], step_budgets=alone, **options)[0])


@variants
@pytest.mark.parametrize(("count", "padded"), [(1, 4), (12, 4), (3, 0)])
def test_a_cache_goes_on_with_new_tokens_alone(variant, count, padded):
    """As the library lets it: the mask is then of all."""
    model, ids = level_model(**variant), random_ids(2, 10 + count)
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    found = []
    for given in (ids, ids[:, 10:]):
        cache = ESSMCache(model.config)
        with torch.no_grad():
            model(ids[:, :10], attention_mask=mask[:, :10], past_key_values=cache)
        found.append(generate(model, given, attention_mask=mask, past_key_values=cache)[:, -NEW:])
    assert torch.equal(*found)


def test_the_default_length_goes_beyond_the_filters():
    model, ids = level_model(filter_length=16, num_spectral_channels=8), random_ids(1, 20)
    assert model.generate(ids, do_sample=False, eos_token_id=None).shape == (1, 40)


def test_a_rising_function_needs_room():
    model, ids = level_model(), random_ids(2, 19)
    with pytest.raises(ValueError, match=r"spectral_budget 3 needs .*ESSMCache\(config, state_budget=3\)"):
        generate(model, ids, step_budgets=lambda step: 2 + step)
    cache = ESSMCache(model.config, state_budget=20)
    rising = generate(model, ids, step_budgets=lambda step: 2 + step, cache=cache)
    assert torch.equal(rising, generate(model, ids, step_budgets=list(range(2, 2 + NEW))))


RIGHT = {"attention_mask": (torch.arange(9) < torch.tensor([[9], [8]])).long()}


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"step_budgets": []}, "a function of the step or a list of budgets, got"),
        ({"step_budgets": 6}, "a function of the step or a list of budgets, got 6"),
        ({"step_budgets": [4, 33]}, r"\[1, 32\], got 33"),
        ({"step_budgets": [4], "spectral_budget": 4}, "spectral_budget or step_budgets, not both, got 4"),
        ({"step_budgets": [4], "prefill_chunk_size": 4}, "prefill_chunk_size"),
        ({"step_budgets": lambda step: 40}, r"\[1, 32\], got 40"),
        ({"spectral_budget": torch.tensor([4])}, r"must have shape \(2,\), got \(1,\)"),
        ({"step_budgets": [torch.tensor([4])]}, r"must have shape \(2,\), got \(1,\)"),
        ({"spectral_budget": torch.tensor(2.7)}, r"must be an integer in \[1, 32\], got tensor\(2.7"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation is not supported with stateful models"),
        ({"assistant_model": level_model(seed=1)}, "assisted generation is not supported with stateful models"),
        ({"prefill_chunk_size": 7, "inputs_embeds": torch.zeros(2, 9, 16)}, "prefill_chunk_size reads input_ids in pi"),
        ({"prefill_chunk_size": 7} | RIGHT, r"needs prompts padded on the left.*rows \[1\]"),
        ({"custom_generate": speculate(2)} | RIGHT, r"needs prompts padded on the left.*rows \[1\]"),
    ],
)
def test_bad_calls(kwargs, message):
    with pytest.raises(ValueError, match=message):
        generate(level_model(), random_ids(2, 9), **kwargs)
