# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""generate(), pipelines and the cache: every decoding strategy, and the budget by every route."""

import io
import itertools
import threading
from contextlib import redirect_stdout

import pytest
import torch
from generating import BEAMS, FIXED, GREEDY, NEW, generate, greedy_without_cache, left_pad, random_model, strategies
from helpers import captured_warnings, random_ids, variants
from transformers import GenerationConfig, TextIteratorStreamer, TextStreamer, pipeline

from modeling_essm import ESSMCache, ESSMForCausalLM, build_byte_tokenizer
from modeling_essm.decoding import speculate

# --- Strategies


@variants
@pytest.mark.parametrize("budget", [None, 1, 7, [3, 20]], ids=["full", "K1", "K7", "K3-20"])
def test_greedy_is_a_full_forward_per_token(variant, budget):
    model, ids = random_model(**variant), random_ids(2, 19)
    expected = greedy_without_cache(model, ids, spectral_budget=budget)
    assert torch.equal(generate(model, ids, **GREEDY, spectral_budget=budget), expected)
    assert len(set(expected[:, 19:].flatten().tolist())) > 3  # not one token over and over


@strategies
@variants
def test_cache_changes_nothing(strategy, variant):
    model, ids = random_model(**variant), random_ids(2, 19)
    cached = generate(model, ids, **strategy, spectral_budget=6)
    assert torch.equal(cached, generate(model, ids, **strategy, spectral_budget=6, use_cache=False))
    assert cached.shape == (2 * strategy.get("num_return_sequences", 1), 19 + NEW)
    assert not torch.equal(cached, generate(model, ids, **strategy, spectral_budget=1))


@pytest.mark.parametrize("strategy", [GREEDY, BEAMS], ids=["greedy", "beams"])
@variants
def test_left_padded_rows_equal_solo_rows(strategy, variant):
    model, lengths = random_model(**variant), [19, 8, 1]
    padded, mask = left_pad(random_ids(3, 19), lengths)
    batch = generate(model, padded, attention_mask=mask, **strategy)
    for i, n in enumerate(lengths):
        alone = generate(model, padded[i : i + 1, -n:], **strategy)
        assert torch.equal(batch[i, -n - NEW :], alone[0])


@pytest.mark.parametrize("chunk", [1, 4, 7, 100], ids=lambda chunk: f"chunk{chunk}")
@variants
def test_chunked_prefill(chunk, variant):
    """Chunks of 1 included, where a chunk may be all padding for some rows."""
    model = random_model(**variant)
    padded, mask = left_pad(random_ids(3, 19), [19, 8, 1])
    expected = generate(model, padded, attention_mask=mask, **GREEDY, spectral_budget=6)
    actual = generate(model, padded, attention_mask=mask, **GREEDY, spectral_budget=6, prefill_chunk_size=chunk)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"prefill_chunk_size": 7}, {"num_beams": 3}], ids=str)
@variants
def test_prompts_with_holes_equal_solo_prompts(options, variant):
    """Masked positions anywhere: in the middle, on the left and, where the prompt is read at once, on the right."""
    model, ids = random_model(**variant), random_ids(4, 19)
    mask = torch.rand(4, 19, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[:, -1] = True
    if "prefill_chunk_size" not in options:
        mask[1, 11:], mask[2] = False, torch.arange(19) < 6
    batch = generate(model, ids, attention_mask=mask.long(), **GREEDY, **options)
    for i in range(4):
        alone = generate(model, ids[i : i + 1, mask[i]], **GREEDY, num_beams=options.get("num_beams", 1))
        assert torch.equal(batch[i, -NEW:], alone[0, -NEW:])


READING_IN_PIECES = {"prefill_chunk_size": {"prefill_chunk_size": 7}, "draft_budget": {"custom_generate": speculate(2)}}


@pytest.mark.parametrize("name", READING_IN_PIECES)
def test_right_padding_is_refused_where_it_cannot_be_read(name):
    model, ids = random_model(), random_ids(2, 19)
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[1, -1] = 0
    options = READING_IN_PIECES[name]
    with pytest.raises(ValueError, match=rf"{name} needs prompts padded on the left.*rows \[1\]"):
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
    expected = generate(model, ids, **GREEDY, spectral_budget=6)
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(generate(model, None, inputs_embeds=embeds, **GREEDY, spectral_budget=6), expected[:, 19:])
    padded, mask = left_pad(ids, [19, 8])
    expected = generate(model, padded, attention_mask=mask, **GREEDY)
    embeds = model.get_input_embeddings()(padded)
    actual = generate(model, None, inputs_embeds=embeds, attention_mask=mask, **GREEDY)
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
    with redirect_stdout(io.StringIO()) as printed:
        generate(model, ids, **GREEDY, spectral_budget=6, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert printed.getvalue().rstrip("\n") == text.rstrip("\n")
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


@pytest.mark.parametrize("name", ["offloaded", "dynamic", "quantized"])
def test_cache_implementation_is_ignored_with_a_warning(name):
    model, ids = random_model(), random_ids(1, 9)
    with captured_warnings() as messages:
        actual = generate(model, ids, **GREEDY, cache_implementation=name)
    assert torch.equal(actual, generate(model, ids, **GREEDY))
    assert sum("cache_implementation" in message for message in messages) == 1


@strategies
@variants
def test_a_static_cache_changes_nothing(strategy, variant):
    model = random_model(**variant)
    ids, mask = left_pad(random_ids(2, 9), [9, 5])
    expected = generate(model, ids, attention_mask=mask, **strategy)
    actual = generate(model, ids, attention_mask=mask, cache_implementation="static", **strategy)
    assert torch.equal(actual, expected)


def test_generating_in_training_mode_with_gradient_checkpointing():
    model, ids = random_model(), random_ids(2, 9)
    expected = generate(model, ids, **GREEDY)
    model.train()
    model.gradient_checkpointing_enable()
    assert torch.equal(generate(model, ids, **GREEDY), expected)


# --- The budget by every route


class Routes:
    """How a user can ask generate() for K; each returns what was generated."""

    @staticmethod
    def call(model, ids, K, path):
        return generate(model, ids, **GREEDY, spectral_budget=K)

    @staticmethod
    def model_generation_config(model, ids, K, path):
        model.generation_config.spectral_budget = K
        return generate(model, ids, **GREEDY)

    @staticmethod
    def passed_generation_config(model, ids, K, path):
        return generate(model, ids, generation_config=GenerationConfig(**GREEDY, spectral_budget=K))

    @staticmethod
    def saved_generation_config(model, ids, K, path):
        model.generation_config.spectral_budget = K
        model.save_pretrained(path)
        return generate(ESSMForCausalLM.from_pretrained(path), ids, **GREEDY)

    @staticmethod
    def model_config(model, ids, K, path):
        model.config.spectral_budget = K
        return generate(model, ids, **GREEDY)

    @staticmethod
    def from_pretrained(model, ids, K, path):
        model.save_pretrained(path)
        return generate(ESSMForCausalLM.from_pretrained(path, spectral_budget=K), ids, **GREEDY)

    @staticmethod
    def pipeline_call(model, ids, K, path):
        return Routes._pipeline(model, ids, spectral_budget=K)

    @staticmethod
    def pipeline_generation_config(model, ids, K, path):
        model.generation_config.spectral_budget = K
        return Routes._pipeline(model, ids)

    @staticmethod
    def pipeline_constructor(model, ids, K, path):
        model.save_pretrained(path)
        build_byte_tokenizer().save_pretrained(path)
        generator = pipeline("text-generation", model=str(path), model_kwargs={"spectral_budget": K})
        return Routes._run(generator, ids)

    @staticmethod
    def _pipeline(model, ids, **kwargs):
        generator = pipeline("text-generation", model=model, tokenizer=build_byte_tokenizer())
        return Routes._run(generator, ids, **kwargs)

    @staticmethod
    def _run(generator, ids, **kwargs):
        text = generator.tokenizer.decode(ids[0])
        new = generator(text, **GREEDY, return_tensors=True, **kwargs)[0]["generated_token_ids"]
        return torch.tensor(new)[None]


ROUTES = [name for name in vars(Routes) if not name.startswith("_")]
ASCII = torch.tensor([list(b"The elastic spring goes to town.")])  # text for pipelines


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("K", [1, [2, 9]], ids=["K1", "K2-9"])
def test_the_budget_arrives(route, K, tmp_path):
    model = random_model()
    expected = greedy_without_cache(model, ASCII, spectral_budget=K)
    assert not torch.equal(expected, greedy_without_cache(model, ASCII))
    assert torch.equal(getattr(Routes, route)(model, ASCII, K, tmp_path), expected)


def test_call_beats_generation_config_beats_config():
    model, ids = random_model(), ASCII
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


@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize(
    "budget",
    [{}, {"spectral_budget": 2}, {"spectral_budget": torch.tensor([2, 9])}, {"step_budgets": [2, 9, 4]}],
    ids=["full", "K2", "rows", "steps"],
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


@pytest.mark.parametrize("bad", [0, 33, "x", 2.5])
def test_a_bad_budget_in_the_generation_config_is_refused(bad):
    model = random_model()
    model.generation_config.spectral_budget = bad
    with pytest.raises(ValueError, match="spectral_budget"):
        model.generate(ASCII, **GREEDY)


@pytest.mark.parametrize(
    "strategy",
    [GREEDY, BEAMS, {**BEAMS, "num_return_sequences": 2}],
    ids=["greedy", "beams", "beams-2"],
)
@variants
def test_row_budgets_equal_solo_runs(strategy, variant):
    model, lengths, rows = random_model(**variant), [19, 8, 12], torch.tensor([2, 32, 7])
    padded, mask = left_pad(random_ids(3, 19), lengths)
    batch = generate(model, padded, attention_mask=mask, spectral_budget=rows, **strategy)
    returned = strategy.get("num_return_sequences", 1)
    for i, (n, K) in enumerate(zip(lengths, rows.tolist())):
        alone = generate(model, padded[i : i + 1, -n:], spectral_budget=K, **strategy)
        assert torch.equal(batch[i * returned : (i + 1) * returned, -n - NEW :], alone)


def test_row_budgets_with_many_samples():
    """Sampling a batch cannot equal solo runs draw by draw; top_k=1 makes the draws certain."""
    model, ids, rows = random_model(), random_ids(2, 19), torch.tensor([2, 32])
    strategy = {**FIXED, "do_sample": True, "top_k": 1, "num_return_sequences": 3}
    batch = generate(model, ids, spectral_budget=rows, **strategy)
    for i, K in enumerate((2, 32)):
        alone = generate(model, ids[i : i + 1], **GREEDY, spectral_budget=K)
        assert torch.equal(batch[3 * i : 3 * i + 3], alone.expand(3, -1))
