# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Requests in a running batch get what each would get alone, and leave nothing behind."""

import pytest
import torch
from helpers import random_model
from transformers import LogitsProcessorList

from modeling_essm import ESSMCache, ESSMForCausalLM
from modeling_essm.decoding import ContinuousBatch, compile_decoding

PROMPTS = [list(text) for text in (b"The ", b"In the beginning there was", b"x", b"Once upon a time", b"It was a dark")]
ROOM = 1 << 24


@pytest.fixture(scope="module")
def model():
    return random_model(ESSMForCausalLM).eval()


def budget_of(model, i):
    return (1, 2, model.config.num_spectral_channels)[i % 3]


def alone(model, prompt, budget, new, **arguments):
    """generate's new tokens."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, spectral_budget=budget, max_new_tokens=new, eos_token_id=None, pad_token_id=0, **arguments
    )
    return out[0, len(prompt) :].tolist()


def finish(batch, steps=1000):
    for _ in range(steps):
        if not batch:
            return
        batch.step()
    raise AssertionError("the batch does not come to an end")


@pytest.mark.parametrize(
    ("block", "piece", "max_rows"), [("paper", 1, None), ("paper", 512, 1), ("paper", 3, 2), ("gated", 3, None)]
)
def test_each_request_is_answered_as_if_alone(block, piece, max_rows):
    model = random_model(ESSMForCausalLM, block=block).eval()
    batch = ContinuousBatch(model, ROOM, max_rows=max_rows, prefill_chunk_size=piece)
    asked = []
    for i, prompt in enumerate(PROMPTS * 2):
        budget, new = budget_of(model, i), 1 + 3 * (i % 4)
        asked.append((batch.submit(prompt, new, budget, eos_token_id=[]), prompt, budget, new))
        batch.step()  # others are under way when it comes
    finish(batch)
    for request, prompt, budget, new in asked:
        assert request.status == "finished" and request.tokens == alone(model, prompt, budget, new)
    assert batch.state_bytes == 0 and batch.num_running == 0


def test_layers_of_different_capacity():
    model = random_model(ESSMForCausalLM, num_spectral_channels=6, spectral_capacities=[6, 2]).eval()
    batch = ContinuousBatch(model, ROOM)
    asked = {K: batch.submit(PROMPTS[0], 6, K, eos_token_id=[]) for K in (1, 4, None)}
    finish(batch)
    for K, request in asked.items():
        assert request.tokens == alone(model, PROMPTS[0], K, 6)


def test_a_token_that_ends_it_is_the_last(model):
    tokens = alone(model, PROMPTS[0], 2, 20)
    end = tokens[7]
    batch = ContinuousBatch(model, ROOM)
    request = batch.submit(PROMPTS[0], 20, 2, eos_token_id=end)
    finish(batch)
    assert request.tokens == tokens[: tokens.index(end) + 1]


def test_admission_is_by_memory(model):
    capacity = model.config.num_spectral_channels
    small, large = (ContinuousBatch(model, ROOM)._bytes_of(K) for K in (1, capacity))
    batch = ContinuousBatch(model, 3 * large - 1)
    requests = [batch.submit(PROMPTS[0], 30 + 5 * i, K) for i, K in enumerate((1, 1, 1, capacity, 1))]
    most = 0
    while batch:
        batch.step()
        most = max(most, batch.num_running)
        assert batch.state_bytes <= batch.max_state_bytes
        assert requests[4].status == "waiting" or requests[3].status != "waiting"  # nobody is overtaken
    assert most == min(3, (3 * large - 1) // small)
    assert all(request.status == "finished" for request in requests)
    with pytest.raises(ValueError, match=f"takes {large} bytes of state a row, more than max_state_bytes {large - 1}"):
        ContinuousBatch(model, large - 1).submit([1], 1, capacity)


def test_a_long_prompt_delays_the_others_by_a_piece_at_a_time(model):
    batch = ContinuousBatch(model, ROOM, prefill_chunk_size=4)
    short = batch.submit(PROMPTS[0], 50)
    batch.step()
    long = batch.submit(PROMPTS[1] * 2, 3)
    for done in range(2, 12):
        batch.step()
        assert len(short.tokens) == done and long.status == "reading"


def dies_after(count):
    seen = []

    def on_token(token):
        seen.append(token)
        if len(seen) == count:
            raise RuntimeError("the client is gone")

    return on_token


def explode(ids, scores):
    raise ArithmeticError("a processor's own error")


def test_a_request_that_dies_leaves_no_trace(model):
    """By its callback, its processor, a broken model and a client that leaves while it waits, is read and runs."""
    batch = ContinuousBatch(model, ROOM, max_rows=6, prefill_chunk_size=2)
    kept = [batch.submit(prompt, 12, budget_of(model, i), eos_token_id=[]) for i, prompt in enumerate(PROMPTS[:3])]
    by_callback = batch.submit(PROMPTS[3], 12, on_token=dies_after(3), eos_token_id=[])
    by_processor = batch.submit(PROMPTS[4], 12, logits_processor=LogitsProcessorList([explode]), eos_token_id=[])
    leaves = [batch.submit(PROMPTS[1], 12, eos_token_id=[]) for _ in range(3)]
    batch.cancel(leaves[0])
    while leaves[1]._cache is None:
        batch.step()
    assert leaves[1].status == "reading"
    batch.cancel(leaves[1])
    while leaves[2].status != "running":
        batch.step()
    batch.cancel(leaves[2])
    batch.cancel(leaves[2])
    finish(batch)
    assert [request.status for request in leaves] == ["cancelled"] * 3
    assert by_callback.status == "failed" and str(by_callback.error) == "the client is gone"
    assert len(by_callback.tokens) == 3
    assert by_processor.status == "failed" and isinstance(by_processor.error, ArithmeticError)
    assert batch.state_bytes == 0 and not batch
    assert all(request._cache is None for request in (*leaves, by_callback, by_processor))
    for i, request in enumerate(kept):
        assert request.tokens == alone(model, PROMPTS[i], budget_of(model, i), 12)


def test_a_callback_may_cancel_any_request(model):
    """Another one gets not even the token that was computed beside this one's; a cancelled one does not fail."""
    batch, told = ContinuousBatch(model, ROOM), []

    def cancel(token):
        if len(later.tokens) == 4 and not later.over:
            told.append("cancelled")
            batch.cancel(later)
            batch.cancel(itself)
            raise RuntimeError("and then it raises")

    itself = batch.submit(PROMPTS[0], 20, on_token=cancel, eos_token_id=[])
    later = batch.submit(PROMPTS[2], 20, on_token=told.append, eos_token_id=[])
    kept = batch.submit(PROMPTS[2], 6, 2, eos_token_id=[])
    finish(batch)
    assert itself.status == later.status == "cancelled" and itself.error is None and len(later.tokens) == 4
    assert told == [*later.tokens, "cancelled"]
    assert kept.tokens == alone(model, PROMPTS[2], 2, 6)


def test_a_call_that_fails_ends_the_rows_it_was_for(model, monkeypatch):
    batch = ContinuousBatch(model, ROOM)
    running = batch.submit(PROMPTS[0], 20)
    batch.step()
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[-1], "forward", lambda *a, **k: explode(None, None))
        reading = batch.submit(PROMPTS[1], 20)
        batch.step()
    assert running.status == reading.status == "failed" and batch.state_bytes == 0
    after = batch.submit(PROMPTS[0], 5, 2, eos_token_id=[])
    finish(batch)
    assert after.tokens == alone(model, PROMPTS[0], 2, 5)


def test_a_row_without_finite_logits_fails_alone(model):
    broken = random_model(ESSMForCausalLM).eval()
    with torch.no_grad():
        broken.model.embed_tokens.weight[7] = torch.nan
    broken.lm_head.weight = torch.nn.Parameter(broken.lm_head.weight.nan_to_num())
    batch = ContinuousBatch(broken, ROOM)
    good, bad = batch.submit(PROMPTS[0], 5, eos_token_id=[]), batch.submit([1, 7, 1], 5)
    finish(batch)
    assert isinstance(bad.error, FloatingPointError) and bad.tokens == []
    assert good.status == "finished" and len(good.tokens) == 5


@pytest.mark.parametrize(
    "processor",
    [
        lambda ids, scores: torch.cat([scores, scores[:, -1:] + 9], 1),
        lambda ids, scores: torch.full_like(scores, -torch.inf),
    ],
    ids=["wider", "all-banned"],
)
def test_a_processor_of_no_use_fails_alone(model, processor):
    batch = ContinuousBatch(model, ROOM)
    good = batch.submit(PROMPTS[0], 9, 2, eos_token_id=[])
    bad = batch.submit(PROMPTS[2], 9, 2, logits_processor=processor, eos_token_id=[])
    finish(batch)
    assert bad.status == "failed" and not bad.tokens and "logits_processor must give (1, " in str(bad.error)
    assert good.tokens == alone(model, PROMPTS[0], 2, 9)


@pytest.mark.parametrize("where", ["callback", "decoding", "reading", "select"])
def test_an_interrupt_fails_what_holds_a_state(model, monkeypatch, where):
    """Its states and tokens may not fit each other; what waits is answered as if alone."""
    batch = ContinuousBatch(model, ROOM, max_rows=2, prefill_chunk_size=5)

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    # The second one is read while the first one runs; the third waits.
    first = batch.submit(PROMPTS[0], 3, 2, eos_token_id=[])
    second = batch.submit(PROMPTS[1], 9, 2, eos_token_id=[])
    third = batch.submit(PROMPTS[2], 9, 2, eos_token_id=[])
    batch.step()
    with monkeypatch.context() as patch:
        if where == "callback":
            first.on_token = interrupt
        elif where == "select":
            second._read = second.input_ids.shape[1] - 1  # read on, so that two rows run when the first one ends
            patch.setattr(ESSMCache, "select", interrupt)
        else:
            name = {"decoding": "_decode", "reading": "_read"}[where]
            work = getattr(batch, name)
            patch.setattr(batch, name, lambda *arguments: (work(*arguments), interrupt()))
        with pytest.raises(KeyboardInterrupt):
            finish(batch)
    assert first.over and isinstance(second.error, KeyboardInterrupt) and third.status == "waiting"
    assert batch.state_bytes == 0 and batch.num_running == 0
    finish(batch)
    assert third.tokens == alone(model, PROMPTS[2], 2, 9)


def test_no_room_to_join_fails_the_one_that_joins(model, monkeypatch):
    def no_memory(caches):
        raise torch.OutOfMemoryError("no memory for both")

    batch = ContinuousBatch(model, ROOM)
    running = batch.submit(PROMPTS[0], 9, 2, eos_token_id=[])
    batch.step()
    joins = batch.submit(PROMPTS[1], 9, 2, eos_token_id=[])
    with monkeypatch.context() as patch:
        patch.setattr(ESSMCache, "merge", no_memory)
        batch.step()
    assert joins.status == "failed" and "no memory for both" in str(joins.error) and joins._cache is None
    finish(batch)
    assert running.tokens == alone(model, PROMPTS[0], 2, 9)


def test_step_is_not_for_callbacks(model):
    batch = ContinuousBatch(model, ROOM)
    bad = batch.submit(PROMPTS[0], 9, 2, on_token=lambda token: batch.step())
    good = batch.submit(PROMPTS[1], 9, 2, eos_token_id=[])
    finish(batch)
    assert bad.status == "failed" and "on_token must not call it" in str(bad.error)
    assert good.tokens == alone(model, PROMPTS[1], 2, 9)


def test_prompts_are_read_in_turn(model):
    """A short one does not wait for all of a long one that came before it."""
    batch = ContinuousBatch(model, ROOM, prefill_chunk_size=4)
    long, short = batch.submit(PROMPTS[1] * 9, 3, eos_token_id=[]), batch.submit(PROMPTS[2], 3, 2, eos_token_id=[])
    batch.step()
    batch.step()
    assert len(short.tokens) == 1 and long.status == "reading"
    finish(batch)
    assert short.tokens == alone(model, PROMPTS[2], 2, 3)
    assert long.tokens == alone(model, PROMPTS[1] * 9, long.budget, 3)


def test_defaults_are_those_of_generate():
    model = random_model(ESSMForCausalLM).eval()
    model.generation_config.spectral_budget = 1
    expected = alone(model, PROMPTS[0], None, 8)
    assert expected == alone(model, PROMPTS[0], 1, 8) != alone(model, PROMPTS[0], budget_of(model, 2), 8)
    model.generation_config.eos_token_id = [expected[4], 0]
    for end in (None, torch.tensor([expected[4]]), expected[4]):
        batch = ContinuousBatch(model, ROOM)
        request = batch.submit(torch.tensor([PROMPTS[0]]), 8, eos_token_id=end)
        finish(batch)
        assert request.tokens == expected[: expected.index(expected[4]) + 1]


def test_sampling_is_the_requests_own(model):
    """Its generator and processors; the draws of others change nothing."""

    def run(others):
        batch = ContinuousBatch(model, ROOM)
        ban = LogitsProcessorList([lambda ids, scores: scores.index_fill(1, torch.arange(128, 259), -torch.inf)])
        asked = dict(logits_processor=ban, generator=torch.Generator().manual_seed(3), eos_token_id=[])
        request = batch.submit(PROMPTS[0], 20, 2, **asked)
        for seed in range(others):
            batch.submit(PROMPTS[1], 9, 2, generator=torch.Generator().manual_seed(seed))
        finish(batch)
        return request.tokens

    tokens = run(0)
    assert tokens == run(2) and max(tokens) < 128 and len(set(tokens)) > 3


def test_rows_of_one_budget_take_the_compiled_step(model):
    compiled = random_model(ESSMForCausalLM).eval()
    compile_decoding(compiled, budgets=[2], batch_size=2, backend="eager")
    calls, run = [], compiled.decoding_steps.run
    compiled.decoding_steps.run = lambda *arguments: calls.append(run(*arguments)) or calls[-1]
    batch = ContinuousBatch(compiled, ROOM)
    requests = [batch.submit(PROMPTS[0], 6, 2, eos_token_id=[]) for _ in range(2)]
    finish(batch)
    assert any(output is not None for output in calls)
    assert requests[0].tokens == requests[1].tokens == alone(model, PROMPTS[0], 2, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": []}, r"at least one id, got \(0,\)"),
        ({"input_ids": torch.ones(2, 3, dtype=torch.int64)}, r"one prompt \(L,\) or \(1, L\) .*, got \(2, 3\)"),
        ({"input_ids": [1, 9999]}, r"in \[0, \d+\], got \[1, 9999\]"),
        ({"input_ids": [True]}, "input_ids must be integers"),
        ({"input_ids": "abc"}, "input_ids must be token ids, got 'abc'"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, got 0"),
        ({"spectral_budget": 99}, "got 99"),
        ({"spectral_budget": [1, 2]}, r"one spectral_budget, an integer for all layers, got \[1, 2\]"),
        ({"eos_token_id": [-5]}, r"eos_token_id must be integers in \[0, \d+\], got \[-5\]"),
        ({"logits_processor": [explode]}, "logits_processor must be called"),
        ({"on_token": 3}, "on_token must be called, .* got 3"),
        ({"generator": 3}, "generator must be a torch.Generator on the CPU, got 3"),
    ],
)
def test_bad_requests_are_refused(model, arguments, message):
    batch = ContinuousBatch(model, ROOM)
    with pytest.raises(ValueError, match=message):
        batch.submit(**({"input_ids": [1], "max_new_tokens": 1} | arguments))
    assert not batch


@pytest.mark.parametrize("name", ["max_state_bytes", "max_rows", "prefill_chunk_size"])
def test_bad_limits_are_refused(model, name):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
        ContinuousBatch(model, **({"max_state_bytes": ROOM} | {name: 0}))
    with pytest.raises(ValueError, match="evaluation mode"):
        ContinuousBatch(random_model(ESSMForCausalLM).train(), ROOM)
    hybrid = random_model(ESSMForCausalLM, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(ValueError, match="has attention layers, whose keys grow"):
        ContinuousBatch(hybrid, ROOM)
