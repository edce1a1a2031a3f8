# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Drafting at a small budget and verifying at the full one changes nothing but the number of calls."""

import pytest
import torch
from helpers import VARIANTS, assert_close, blocks, captured_warnings, filled, level_model, random_ids
from transformers import SynthIDTextWatermarkingConfig, TextStreamer

from modeling_essm import ESSMCache, build_byte_tokenizer
from modeling_essm.decoding import speculate

SYNTHID = SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=5)

NEW = 17


def decode(model, ids, draft_budget=None, draft_length=None, **kwargs):
    if draft_budget is not None:
        kwargs["custom_generate"] = speculate(draft_budget, draft_length)
    return model.generate(ids, **{"max_new_tokens": NEW, "pad_token_id": 256, "do_sample": False, **kwargs})


@pytest.mark.parametrize(
    ("block", "prompt", "draft_length"), [("paper", 1, 4), ("paper", 19, None), ("elastic", 2, 1), ("memory", 19, None)]
)
def test_greedy_is_token_identical(block, prompt, draft_length):
    model, ids = level_model(**VARIANTS[block]), random_ids(3, prompt)
    for budget, draft in ((32, 4), ([5, 20], [3, 2]), (8, 8)):
        for rows in (ids[:1], ids):
            common = {"spectral_budget": budget, "eos_token_id": None}
            drafted = decode(model, rows, draft_budget=draft, draft_length=draft_length, **common)
            assert torch.equal(drafted, decode(model, rows, **common))


def test_left_padding_ends_and_row_budgets():
    """Rows of different lengths that end at different steps, each at budgets of its own, two samples of each."""
    model, ids, mask = level_model(), random_ids(3, 19), torch.ones(3, 19, dtype=torch.long)
    mask[0, :18], mask[2, :7] = 0, 0
    rows, drafts = torch.tensor([32, 8, 20]), torch.tensor([2, 8, 5])
    plain = decode(model, ids, attention_mask=mask, spectral_budget=rows, eos_token_id=None)
    ends = plain[0, 19 + 6].item(), plain[1, 19 + 2].item()
    for kwargs in ({}, {"repetition_penalty": 1.3}, {"num_return_sequences": 2, "do_sample": True, "top_k": 1}):
        common = {"attention_mask": mask, "spectral_budget": rows, "eos_token_id": list(ends), **kwargs}
        expected = decode(model, ids, **common)
        assert (expected == 256).any()  # some row did end early
        assert torch.equal(decode(model, ids, draft_budget=drafts, **common), expected)


def test_processors_stops_and_streamers_see_every_token(capsys):
    model, ids, tokenizer = level_model(), random_ids(2, 9), build_byte_tokenizer()
    letters = {"eos_token_id": None, "suppress_tokens": [*range(65), *range(91, 259)]}
    text = tokenizer.decode(decode(model, ids[:1], **letters)[0, 9:])
    for kwargs in (
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 9, "eos_token_id": list(range(128))},
        {"bad_words_ids": [[65]], "suppress_tokens": list(range(100, 200))},
        letters | {"stop_strings": [text[4:6]], "tokenizer": tokenizer},  # which the library drops where it is custom
    ):
        rows = ids[:1] if "tokenizer" in kwargs else ids
        plain = decode(model, rows, **kwargs)
        assert torch.equal(decode(model, rows, draft_budget=4, **kwargs), plain)
    assert plain.shape[1] < 9 + NEW
    out = decode(model, ids[:1], draft_budget=4, streamer=TextStreamer(tokenizer, skip_prompt=True), **letters)
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(out[0, 9:])


def test_what_is_reported():
    model, ids, calls = level_model(filter_length=32, num_spectral_channels=8), random_ids(1, 9), []
    model.register_forward_hook(lambda model, args, out: calls.append((args[0].shape[1], out.spectral_budget[0])))
    options = {"spectral_budget": 8, "return_dict_in_generate": True, "eos_token_id": None}
    found = decode(model, ids, draft_budget=8, **options)
    assert found.acceptance_rate == 1.0 and found.num_drafts == found.num_accepted
    assert found.num_verifications + found.num_accepted == NEW  # each call adds a token of its own
    calls.clear()
    with captured_warnings() as messages:
        found = decode(model, ids, draft_budget=2, draft_length=3, **options)
    assert not messages  # drafts that are not accepted do not count as positions
    assert found.acceptance_rate == found.num_accepted / found.num_drafts < 1
    assert sum(K == 8 for _, K in calls) == 1 + found.num_verifications
    assert all(n <= 2 * 3 + 1 for n, K in calls[2:] if K == 8) and all(n == 1 for n, K in calls[2:] if K == 2)


@torch.no_grad()
@pytest.mark.parametrize(("block", "draft"), [("paper", 4), ("elastic", 24), ("memory", 24)])
def test_the_drafter_returns_to_the_last_accepted_token(block, draft):
    """Counts of a loop of full forward passes, which has no states to get wrong."""
    model, ids = level_model(**VARIANTS[block]), random_ids(1, 9)
    drafts, accepted, known, end = 0, 0, 9, 9 + NEW
    plain = decode(model, ids, spectral_budget=32, eos_token_id=None)
    while known < end:
        n, prefix = max(1, min(3, end - known - 1)), plain[:, :known]
        for _ in range(n):
            token = model(prefix, spectral_budget=draft, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            prefix = torch.cat([prefix, token], 1)
        until = min(known + n, end)
        same = int((prefix[0, known:until] == plain[0, known:until]).long().cumprod(0).sum())
        drafts, accepted, known = drafts + min(same + 1, n), accepted + same, known + same + 1
    options = {"spectral_budget": 32, "eos_token_id": None, "return_dict_in_generate": True}
    found = decode(model, ids, draft_budget=draft, draft_length=3, **options)
    assert 0 < accepted < drafts and (found.num_drafts, found.num_accepted) == (drafts, accepted)


def test_drafts_get_longer_while_they_are_right_and_shorter_when_not():
    model, lengths = level_model(), []

    def record(module, args, kwargs):
        if kwargs.get("state_lengths") is not None:
            lengths.append(args[0].shape[1] - int(kwargs["state_lengths"]))

    def drafted(**options):
        lengths.clear()
        decode(model, random_ids(1, 9), max_new_tokens=60, eos_token_id=None, **options)
        return lengths

    model.register_forward_pre_hook(record, with_kwargs=True)
    assert drafted(draft_budget=32)[:4] == [4, 6, 8, 10]
    assert min(drafted(draft_budget=1)) == 1 and max(lengths) <= 6
    assert set(drafted(draft_budget=1, draft_length=5)[:-6]) == {5}


@torch.no_grad()
def test_sampling_draws_from_the_same_distribution():
    """A vocabulary of four, all strings of three tokens: chi-square against their exact probabilities."""
    model = level_model(vocab_size=4, pad_token_id=None, bos_token_id=None, eos_token_id=None, scaling_exponent=0.0)
    model.lm_head.weight.mul_(3.0)
    ids, n = torch.tensor([[1, 0, 2, 3, 1, 2]]), 800

    def exactly(K):
        """How often each of the 64 strings is expected at that budget."""
        counts, prefix = torch.full((1,), float(n), dtype=torch.float64), ids
        for _ in range(3):
            p = (model(prefix, use_cache=False, spectral_budget=K).logits[:, -1] / 0.8).softmax(-1)
            counts = (counts[:, None] * p).flatten()
            tokens = torch.arange(4).repeat(len(prefix))[:, None]
            prefix = torch.cat([prefix.repeat_interleave(4, 0), tokens], 1)
        return counts

    torch.manual_seed(0)
    kwargs = {"max_new_tokens": 3, "do_sample": True, "temperature": 0.8, "top_k": 0, "pad_token_id": 0}
    found = decode(model, ids.repeat(n, 1), draft_budget=1, draft_length=2, return_dict_in_generate=True, **kwargs)
    assert 0.3 < found.acceptance_rate < 0.97  # both branches are taken
    drawn = torch.bincount((found.sequences[:, 6:] * torch.tensor([16, 4, 1])).sum(1), minlength=64)
    expected = exactly(None)
    kept = expected >= 5
    limit = int(kept.sum()) + 4.5 * (2 * int(kept.sum())) ** 0.5
    assert ((drawn - expected) ** 2 / expected)[kept].sum() < limit
    assert ((exactly(1) - expected) ** 2 / expected)[kept].sum() > 2 * limit  # the drafter is far off


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"draft_budget": 33}, r"\[1, 32\], got 33"),
        ({"num_beams": 2}, "combined with num_beams, got 2"),
        ({"use_cache": False}, "use_cache=False"),
        ({"draft_length": 0}, "draft_length must be None or an integer >= 1, got 0"),
        ({"guidance_scale": 2.0}, "combined with guidance_scale, got 2.0"),
        ({"step_budgets": [4]}, "combined with step_budgets"),
        ({"prefill_chunk_size": 3}, "combined with prefill_chunk_size, got 3"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [row]}, "PrefixConstrainedLogitsProcessor knows rows by"),
        (
            {"watermarking_config": SYNTHID, "do_sample": True},
            "cannot be judged by SynthIDTextWatermarkLogitsProcessor",
        ),
        ({"output_scores": True, "return_dict_in_generate": True}, "combined with output_scores"),
        ({"past_key_values": filled(level_model(), random_ids(2, 5))}, "draft_budget starts from input_ids"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_calls(kwargs, message):
    with pytest.raises(ValueError, match=message):
        decode(level_model(), random_ids(2, 9), **{"draft_budget": 4} | kwargs)
    with pytest.raises(ValueError, match=r"in evaluation mode.*model\.eval\(\)"):
        decode(level_model().train(), random_ids(2, 9), draft_budget=4)


@blocks
@torch.no_grad()
def test_state_lengths(block):
    """Outputs of all positions, the state of the first: as if the rest had not been read."""
    model, ids = level_model(**block), random_ids(3, 12)
    cache, lengths = filled(model, ids[:, :4]), torch.tensor([1, 7, 5])
    whole = model(ids[:, 4:], past_key_values=cache, state_lengths=lengths).logits
    assert cache.get_seq_length() == 4 + 7
    assert_close(whole, model(ids, use_cache=False).logits[:, 4:])
    for row, read in enumerate((5, 11, 9)):
        for name, tensor in filled(model, ids[row : row + 1, :read]).states.items():
            torch.testing.assert_close(cache.states[name][row : row + 1], tensor, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"state_lengths must have shape \(3,\) and come with a cache"):
        model(ids, use_cache=False, state_lengths=lengths)
    cache = ESSMCache(model.config)
    for bad, message in {
        (1, 7): "got shape",
        (13, 1, 5): r"must be integers in \[0, 12\], got values from 1 to 13",
        (0, -1, 5): r"must be integers in \[0, 12\], got values from -1 to 5",
        (1.0, 2.0, 5.0): r"must be integers in \[0, 12\], got torch.float32",
    }.items():
        with pytest.raises(ValueError, match=message):
            model(ids, past_key_values=cache, state_lengths=torch.tensor(bad))
        assert cache.get_seq_length() == 0 and not cache.states
    model(ids, past_key_values=cache, state_lengths=torch.tensor([0, 12, 3]))
    assert cache.get_seq_length() == 12
