# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Requests in a running batch get what each would get alone, and leave nothing behind."""

import pytest
import torch
from helpers import VARIANTS, random_model
from transformers import LogitsProcessorList

from modeling_essm import ESSMCache
from modeling_essm.decoding import ContinuousBatch, compile_decoding

PROMPTS = [list(text) for text in (b"The ", b"In the beginning there was", b"x", b"Once upon a time", b"It was a dark")]
BUDGETS = (1, 2, 32, 1, 2)
SIZES = {"small": 1, "full": 32}
# What a step's first row and each further one take, by budget; None as measured.
COSTS = {
    "as measured": None,
    "one group": lambda K: (1.0, 0.0),
    "a group for each budget": lambda K: (0.0, 1.0),
    "groups of two and more": lambda K: (1.5, K / 32),
}
ROOM = 1 << 24


@pytest.fixture(scope="module")
def model():
    return random_model()


def alone(model, prompt, budget, new):
    """generate's new tokens."""
    options = {"spectral_budget": budget, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


class Batch(ContinuousBatch):
    """Remembers what was asked for, and how many groups ran."""

    def __init__(self, model, room=ROOM, costs=None, **limits):
        super().__init__(model, room, **limits)
        self.asked, self.groups = [], set()
        self._seconds_of = costs or self._seconds_of

    def step(self):
        super().step()
        self.groups.add(len(self._groups))
        assert self.state_bytes <= self.max_state_bytes

    def ask(self, i=0, new=9, budget=2, **options):
        request = self.submit(PROMPTS[i], new, budget, **{"eos_token_id": [], **options})
        self.asked.append((request, PROMPTS[i], budget, new))
        return request

    def finish(self):
        for _ in range(1000):
            if not self:
                break
            self.step()
        assert not self and self.state_bytes == 0 and self.num_running == 0
        assert all(request._cache is None for request, *_ in self.asked)

    def finish_as_alone(self, *requests):
        """Those, or all, were answered as if alone."""
        self.finish()
        for request, prompt, budget, new in self.asked:
            if not requests or request in requests:
                assert request.status == "finished" and request.tokens == alone(self.model, prompt, budget, new)


@pytest.mark.parametrize(
    ("block", "piece", "max_rows", "costs", "most"),
    [
        ("paper", 1, None, "one group", 1),
        ("paper", 512, 1, "a group for each budget", 1),
        ("paper", 3, 2, "a group for each budget", 2),
        ("paper", 512, None, "a group for each budget", 3),
        ("memory", 512, None, "groups of two and more", 2),
        ("memory", 512, None, "as measured", 3),
    ],
)
def test_each_request_is_answered_as_if_alone(block, piece, max_rows, costs, most):
    model = random_model(budget_presets=SIZES, **VARIANTS[block])
    batch = Batch(model, costs=COSTS[costs], max_rows=max_rows, prefill_chunk_size=piece)
    for i in range(10):
        batch.ask(i % 5, 1 + 3 * (i % 4), ("small", 2, "full")[i % 3])
        batch.step()  # others are under way when it comes
    batch.finish_as_alone()
    assert max(batch.groups) == most or costs == "as measured"


def test_layers_of_different_capacity():
    batch = Batch(random_model(num_spectral_channels=6, spectral_capacities=[6, 2]))
    for K in (1, 4, None):
        batch.ask(0, 6, K)
    batch.finish_as_alone()


def test_defaults_are_those_of_generate():
    model = random_model()
    model.generation_config.spectral_budget = 1
    expected = alone(model, PROMPTS[0], None, 8)
    assert expected == alone(model, PROMPTS[0], 1, 8) != alone(model, PROMPTS[0], 32, 8)
    model.generation_config.eos_token_id = [expected[4], 0]
    for end in (None, torch.tensor([expected[4]]), expected[4]):  # a token that ends it is the last
        batch = Batch(model)
        request = batch.submit(torch.tensor([PROMPTS[0]]), 8, eos_token_id=end)
        batch.finish()
        assert request.tokens == expected[: expected.index(expected[4]) + 1]


def test_sampling_is_the_requests_own(model):
    """Its generator and processors; the draws of others change nothing."""

    def run(others):
        batch = Batch(model)
        ban = LogitsProcessorList([lambda ids, scores: scores.index_fill(1, torch.arange(128, 259), -torch.inf)])
        request = batch.ask(0, 20, logits_processor=ban, generator=torch.Generator().manual_seed(3))
        for seed in range(others):
            batch.ask(1, generator=torch.Generator().manual_seed(seed))
        batch.finish()
        return request.tokens

    tokens = run(0)
    assert tokens == run(2) and max(tokens) < 128 and len(set(tokens)) > 3


def test_rows_of_one_budget_take_the_compiled_step():
    compiled = compile_decoding(random_model(), budgets=[2], batch_size=2, backend="eager")
    calls, run = [], compiled.decoding_steps.run
    compiled.decoding_steps.run = lambda *arguments: calls.append(run(*arguments)) or calls[-1]
    batch = Batch(compiled)
    batch.ask(), batch.ask()
    batch.finish_as_alone()
    assert any(output is not None for output in calls)


# --- Who is served when


@pytest.mark.parametrize("costs", COSTS)
def test_admission_is_by_memory(model, costs):
    small, large = (ContinuousBatch(model, ROOM)._bytes_of(K) for K in (1, 32))
    room, most = 3 * large - 1, 0
    batch = Batch(model, room, COSTS[costs])
    requests = [batch.ask(0, 10 + 2 * i, K) for i, K in enumerate((1, 1, 1, 32, 1, 32, 32))]
    while batch:
        batch.step()
        held = [request for request in requests if request.status in ("reading", "running")]
        assert batch.state_bytes <= room and sum(large if r.budget == 32 else small for r in held) <= room
        most = max(most, batch.num_running)
        assert requests[4].status == "waiting" or requests[3].status != "waiting"  # nobody is overtaken
    assert 5 <= most < 7 and 4 * small + large < room  # each takes what its own budget needs
    batch.finish_as_alone()
    with pytest.raises(ValueError, match=f"takes {large} bytes of state a row, more than max_state_bytes {large - 1}"):
        ContinuousBatch(model, large - 1).submit([1], 1, 32)


def test_a_long_prompt_delays_the_others_by_a_piece_at_a_time(model):
    """Neither those that run nor a short one that comes after it."""
    batch = Batch(model, prefill_chunk_size=2)
    runs = batch.ask(0, 50)
    batch.step(), batch.step()
    long, short = batch.ask(1, 3), batch.ask(2, 20)
    for done in range(2, 12):
        batch.step()
        assert len(runs.tokens) == done and long.status == "reading" and bool(short.tokens) == (done > 2)
    batch.finish_as_alone()


# --- Who ends how


def explode(*arguments, **options):
    raise ArithmeticError("an error of its own")


def dies_after(count):
    seen = []

    def on_token(token):
        seen.append(token)
        if len(seen) == count:
            explode()

    return on_token


def test_a_request_that_dies_leaves_no_trace(model):
    """By its callback, its processor, a processor of no use, and a client that leaves while it waits, is read, runs."""
    batch = Batch(model, max_rows=8, prefill_chunk_size=2)
    kept = [batch.ask(i, 12, BUDGETS[i]) for i in range(3)]
    dead = {
        batch.ask(3, on_token=dies_after(3)): (3, "an error of its own"),
        batch.ask(4, logits_processor=LogitsProcessorList([explode])): (0, "an error of its own"),
        batch.ask(0, on_token=lambda token: batch.step()): (1, "on_token must not call it"),
        batch.ask(0, logits_processor=lambda ids, x: torch.cat([x, x[:, -1:] + 9], 1)): (0, "must give (1, "),
        batch.ask(0, logits_processor=lambda ids, x: torch.full_like(x, -torch.inf)): (0, "must give (1, "),
    }
    leaves = [batch.ask(1, 12) for _ in range(3)]
    batch.cancel(leaves[0])
    for leaving, status in ((leaves[1], "reading"), (leaves[2], "running")):
        while leaving.status != status or (status == "reading" and leaving._cache is None):
            batch.step()
        batch.cancel(leaving), batch.cancel(leaving)
    batch.finish_as_alone(*kept)
    assert [request.status for request in leaves] == ["cancelled"] * 3
    for request, (tokens, reason) in dead.items():
        assert request.status == "failed" and len(request.tokens) == tokens and reason in str(request.error)


@pytest.mark.parametrize("budget", BUDGETS[:3])
def test_a_callback_may_cancel_any_request(model, budget):
    """Another one gets not even the token that was computed beside this one's; a cancelled one does not fail."""
    batch, told = Batch(model, costs=COSTS["a group for each budget"]), []

    def cancel(token):
        if len(later.tokens) == 4 and not later.over:
            told.append("cancelled")
            batch.cancel(later), batch.cancel(itself)
            explode()

    itself = batch.ask(0, 20, budget, on_token=cancel)
    later, kept = batch.ask(2, 20, on_token=told.append), batch.ask(1, 12)
    batch.finish_as_alone(kept)
    assert itself.status == later.status == "cancelled" and itself.error is None and len(later.tokens) == 4
    assert told == [*later.tokens, "cancelled"]


@pytest.mark.parametrize("place", ["the model", "merge"])
def test_a_call_that_fails_ends_the_rows_it_was_for(model, monkeypatch, place):
    """All that run if the model fails on them; the one that joins if there is no room to."""
    batch = Batch(model)
    running = batch.ask()
    batch.step()
    with monkeypatch.context() as patch:
        owner, name = (model.model.layers[-1], "forward") if place == "the model" else (ESSMCache, "merge")
        patch.setattr(owner, name, explode)
        joins = batch.ask(1)
        batch.step()
    assert joins.status == "failed" and (running.status == "failed") == (place == "the model")
    batch.finish_as_alone(batch.ask() if place == "the model" else running)


def test_a_row_without_finite_logits_fails_alone():
    broken = random_model()
    with torch.no_grad():
        broken.model.embed_tokens.weight[7] = torch.nan
    broken.lm_head.weight = torch.nn.Parameter(broken.lm_head.weight.nan_to_num())
    batch = Batch(broken)
    good, bad = batch.ask(), batch.submit([1, 7, 1], 5)
    batch.finish()
    assert isinstance(bad.error, FloatingPointError) and bad.tokens == []
    assert good.status == "finished" and len(good.tokens) == 9


@pytest.mark.parametrize("where", ["callback", "decoding", "reading", "select"])
def test_an_interrupt_fails_what_holds_a_state(model, monkeypatch, where):
    """Its states and tokens may not fit each other; what waits is answered as if alone."""

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    # The second one is read while the first one runs; the third waits.
    batch = Batch(model, max_rows=2, prefill_chunk_size=5)
    first, second, third = batch.ask(0, 3), batch.ask(1), batch.ask(2)
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
            batch.finish()
    assert first.over and isinstance(second.error, KeyboardInterrupt) and third.status == "waiting"
    assert batch.state_bytes == 0 and batch.num_running == 0
    batch.finish_as_alone(third)


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


def test_bad_limits_are_refused(model):
    for name in ("max_state_bytes", "max_rows", "prefill_chunk_size"):
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
            ContinuousBatch(model, **({"max_state_bytes": ROOM} | {name: 0}))
    with pytest.raises(ValueError, match="evaluation mode"):
        ContinuousBatch(random_model().train(), ROOM)


def test_a_model_put_into_training_mode_at_work_ends_only_what_it_was_at():
    batch = Batch(random_model(dropout=0.5))
    running = batch.ask()
    batch.step()
    waiting = batch.ask(1)
    hook = batch.model.register_forward_hook(lambda *_: batch.model.train() and None)  # as another thread would
    batch.step()
    assert running.status == "failed" and "training mode while it" in str(running.error)
    hook.remove()
    with pytest.raises(RuntimeError, match="training mode"):
        batch.step()
    batch.model.eval()
    batch.finish_as_alone(waiting)
