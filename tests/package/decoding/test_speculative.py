# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Drafting at a small budget and verifying at the full one changes nothing but the number of calls."""

import helpers
import pytest
import torch
from helpers import VARIANTS, random_ids
from transformers import TextStreamer

from modeling_essm import ESSMCache, build_byte_tokenizer
from modeling_essm.decoding import speculate
from modeling_essm.decoding.speculation import _judge

NEW = 17


def random_model(seed=2, **fields):
    """With so small an exponent late channels count, and budgets decode differently."""
    return helpers.random_model(seed=seed, **{"scaling_exponent": 0.02, **fields})


def decode(model, ids, draft_budget=None, draft_length=None, **kwargs):
    if draft_budget is not None:
        kwargs["custom_generate"] = speculate(draft_budget, draft_length)
    return model.generate(ids, **{"max_new_tokens": NEW, "pad_token_id": 256, "do_sample": False, **kwargs})


@pytest.mark.parametrize(
    ("block", "prompt", "draft_length"), [("paper", 1, 4), ("paper", 19, None), ("gated", 2, 1), ("gated", 19, None)]
)
def test_greedy_is_token_identical(block, prompt, draft_length):
    model, ids = random_model(**VARIANTS[block]), random_ids(3, prompt)
    for budget, draft in ((32, 4), (32, 1), ([5, 20], [3, 2]), (8, 8), (None, 4)):
        for rows in (ids[:1], ids):
            plain = decode(model, rows, spectral_budget=budget, eos_token_id=None)
            speculative = decode(
                model, rows, spectral_budget=budget, draft_budget=draft, draft_length=draft_length, eos_token_id=None
            )
            assert torch.equal(plain, speculative)


def test_left_padding_ends_and_row_budgets():
    """Rows of different lengths that end at different steps, each at budgets of its own, two samples of each."""
    model, ids, mask = random_model(), random_ids(3, 19), torch.ones(3, 19, dtype=torch.long)
    mask[0, :18], mask[2, :7] = 0, 0
    rows, drafts = torch.tensor([32, 8, 20]), torch.tensor([2, 8, 5])
    plain = decode(model, ids, attention_mask=mask, spectral_budget=rows, eos_token_id=None)
    ends = plain[0, 19 + 6].item(), plain[1, 19 + 2].item()
    for kwargs in ({}, {"num_return_sequences": 2, "do_sample": True, "top_k": 1}):
        common = {"attention_mask": mask, "spectral_budget": rows, "eos_token_id": list(ends), **kwargs}
        expected = decode(model, ids, **common)
        assert (expected == 256).any()  # some row did end early
        assert torch.equal(decode(model, ids, draft_budget=drafts, **common), expected)


def test_processors_see_every_token():
    model, ids = random_model(), random_ids(2, 9)
    for kwargs in (
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 9, "eos_token_id": list(range(128))},
        {"bad_words_ids": [[65]], "suppress_tokens": list(range(100, 200))},
    ):
        plain = decode(model, ids, **kwargs)
        assert torch.equal(decode(model, ids, draft_budget=4, **kwargs), plain)


def test_what_is_reported():
    model, ids = random_model(), random_ids(1, 9)
    calls = []
    model.register_forward_hook(lambda model, args, out: calls.append((args[0].shape[1], out.spectral_budget[0])))
    same = {"draft_budget": 8, "spectral_budget": 8, "return_dict_in_generate": True, "eos_token_id": None}
    found = decode(model, ids, **same)
    assert found.acceptance_rate == 1.0 and found.num_drafts == found.num_accepted
    assert found.num_verifications + found.num_accepted == NEW  # each call adds a token of its own
    calls.clear()
    found = decode(model, ids, **{**same, "draft_budget": 2, "draft_length": 3})
    assert found.acceptance_rate == found.num_accepted / found.num_drafts < 1
    assert sum(K == 8 for _, K in calls) == 1 + found.num_verifications
    assert all(n <= 2 * 3 + 1 for n, K in calls[2:] if K == 8) and all(n == 1 for n, K in calls[2:] if K == 2)
    plain = decode(model, ids, draft_budget=2, spectral_budget=8, eos_token_id=None)
    assert isinstance(plain, torch.Tensor)


@pytest.mark.parametrize("block", ["paper", "gated"])
def test_the_drafter_returns_to_the_last_accepted_token(block):
    """Counts of a loop of full forward passes, which has no states to get wrong."""
    model, ids, length = random_model(**VARIANTS[block]), random_ids(1, 9), 3
    plain = decode(model, ids, spectral_budget=32, eos_token_id=None)
    drafts, accepted, known = 0, 0, 9
    with torch.no_grad():
        while known < 9 + NEW:
            n, prefix = max(1, min(length, 9 + NEW - known - 1)), plain[:, :known]
            for _ in range(n):
                token = model(prefix, spectral_budget=4, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
                prefix = torch.cat([prefix, token], 1)
            end = min(known + n, 9 + NEW)
            same = (prefix[0, known:end] == plain[0, known:end]).long().cumprod(0).sum().item()
            drafts, accepted = drafts + min(same + 1, n), accepted + same
            known = known + same + 1
    found = decode(
        model, ids, spectral_budget=32, draft_budget=4, draft_length=3, eos_token_id=None, return_dict_in_generate=True
    )
    assert 0 < accepted < drafts
    assert (found.num_drafts, found.num_accepted) == (drafts, accepted)


def test_drafts_get_longer_while_they_are_right_and_shorter_when_not():
    model, ids, lengths = random_model(), random_ids(1, 9), []

    def record(module, args, kwargs):
        if kwargs.get("state_lengths") is not None:
            lengths.append(args[0].shape[1] - int(kwargs["state_lengths"]))

    model.register_forward_pre_hook(record, with_kwargs=True)
    long = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None, "pad_token_id": 256}
    decode(model, ids, draft_budget=32, **long)
    assert lengths[:4] == [4, 6, 8, 10]
    lengths.clear()
    decode(model, ids, draft_budget=1, **long)
    assert min(lengths) == 1 and max(lengths) <= 6
    lengths.clear()
    decode(model, ids, draft_budget=1, draft_length=5, **long)
    assert set(lengths[:-6]) == {5}


def test_sampling_draws_from_the_same_distribution():
    """A vocabulary of five, all strings of three tokens: chi-square against their exact probabilities."""
    model = random_model(vocab_size=5, pad_token_id=None, bos_token_id=None, eos_token_id=None, scaling_exponent=0.0)
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)
        ids = torch.tensor([[1, 4, 2, 0, 3, 3]])

        def exactly(K):
            """Probabilities (125,) of all strings at that budget."""
            probabilities, prefix = torch.ones(1), ids
            for _ in range(3):
                p = (model(prefix, use_cache=False, spectral_budget=K).logits[:, -1] / 0.8).softmax(-1)
                probabilities = (probabilities[:, None] * p).flatten()
                tokens = torch.arange(5).repeat(len(prefix))[:, None]
                prefix = torch.cat([prefix.repeat_interleave(5, 0), tokens], 1)
            return probabilities

        n, probabilities = 3000, exactly(None)
        torch.manual_seed(0)
        kwargs = {"max_new_tokens": 3, "do_sample": True, "temperature": 0.8, "top_k": 0, "pad_token_id": 0}
        found = decode(model, ids.repeat(n, 1), draft_budget=1, draft_length=2, return_dict_in_generate=True, **kwargs)
        assert 0.3 < found.acceptance_rate < 0.97  # both branches are taken
        drawn = (found.sequences[:, 6:] * torch.tensor([25, 5, 1])).sum(1)
        counts = torch.bincount(drawn, minlength=125).double()
        expected = n * probabilities.double()
        kept = expected >= 5
        chi = ((counts - expected) ** 2 / expected)[kept].sum() + (
            (counts[~kept].sum() - expected[~kept].sum()) ** 2 / expected[~kept].sum().clamp(min=1)
        )
        degrees = int(kept.sum())
        limit = degrees + 4.5 * (2 * degrees) ** 0.5
        assert chi < limit
        assert ((n * exactly(1).double() - expected) ** 2 / expected)[kept].sum() > 2 * limit  # the drafter is far off


def test_a_rejected_draft_is_replaced_from_the_residual():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.1, 0.8])
    torch.manual_seed(0)
    drawn = torch.zeros(3)
    for _ in range(4000):
        draft = torch.multinomial(q, 1)[0]
        drawn[_judge(p.log(), draft, q.log(), True)[0]] += 1
    torch.testing.assert_close(drawn / 4000, p, atol=0.03, rtol=0)


def test_streaming(capsys):
    model, tokenizer = random_model(), build_byte_tokenizer()
    ids = tokenizer("abc", return_tensors="pt").input_ids
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    out = decode(model, ids, draft_budget=4, streamer=streamer, eos_token_id=None)
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(out[0, 3:]).rstrip("\n")


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"draft_budget": 33}, r"\[1, 32\], got 33"),
        ({"draft_budget": 4, "num_beams": 2}, "got num_beams=2"),
        ({"draft_budget": 4, "use_cache": False}, "use_cache=False"),
        ({"draft_budget": 4, "draft_length": 0}, "draft_length must be None or an integer >= 1, got 0"),
        ({"draft_budget": 4, "guidance_scale": 2.0}, "guidance_scale, got 2.0"),
        ({"draft_budget": 4, "step_budgets": [4]}, "draft_budget or step_budgets, not both"),
        ({"draft_budget": 4, "output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    ],
    ids=str,
)
def test_bad_calls(kwargs, message):
    with pytest.raises(ValueError, match=message):
        decode(random_model(), random_ids(2, 9), **kwargs)


def test_stop_strings():
    """The library drops the tokenizer, which they need, where decoding is custom."""
    model, tokenizer, ids = random_model(), build_byte_tokenizer(), random_ids(1, 9)
    letters = {"eos_token_id": None, "suppress_tokens": [*range(65), *range(91, 259)]}
    text = tokenizer.decode(decode(model, ids, **letters)[0, 9:])
    wanted = letters | {"stop_strings": [text[4:6]], "tokenizer": tokenizer}
    plain = decode(model, ids, **wanted)
    assert plain.shape[1] < 9 + NEW and torch.equal(decode(model, ids, draft_budget=4, **wanted), plain)


@pytest.mark.parametrize("argument", [{"draft_budget": 4}, {"draft_length": 3}], ids=str)
def test_the_former_arguments_name_the_new_way(argument):
    with pytest.raises(ValueError, match=rf"{next(iter(argument))} is an argument of modeling_essm.decoding.speculate"):
        random_model().generate(random_ids(2, 9), **argument)


def test_a_state_from_before_is_refused():
    model, ids = random_model(), random_ids(1, 9)
    cache = ESSMCache(model.config)
    model(ids[:, :5], past_key_values=cache)
    with pytest.raises(ValueError, match="draft_budget starts from input_ids"):
        decode(model, ids, draft_budget=4, past_key_values=cache)


@pytest.mark.parametrize("block", ["paper", "gated"])
def test_state_lengths(block):
    """Outputs of all positions, the state of the first: as if the rest had not been read."""
    model, ids = random_model(**VARIANTS[block]), random_ids(3, 12)
    lengths = torch.tensor([1, 7, 5])
    with torch.no_grad():
        cache = ESSMCache(model.config)
        model(ids[:, :4], past_key_values=cache)
        whole = model(ids[:, 4:], past_key_values=cache, state_lengths=lengths).logits
        assert cache.get_seq_length() == 4 + 7
        helpers.assert_close(whole, model(ids, use_cache=False).logits[:, 4:])
        for row, read in enumerate((5, 11, 9)):
            alone = model(ids[row : row + 1, :read], use_cache=True).past_key_values
            for layer, own in zip(cache.layers, alone.layers):
                for name, tensor in own.tensors.items():
                    torch.testing.assert_close(layer.tensors[name][row : row + 1], tensor, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"state_lengths must have shape \(3,\) and come with a cache"):
        model(ids, use_cache=False, state_lengths=lengths)
    with pytest.raises(ValueError, match="got shape"):
        model(ids, past_key_values=ESSMCache(model.config), state_lengths=lengths[:2])
    for bad, message in {
        (13, 1, 5): r"integers in \[0, 12\], got values from 1 to 13",
        (0, -1, 5): r"integers in \[0, 12\], got values from -1 to 5",
        (1.0, 2.0, 5.0): r"integers in \[0, 12\], got torch.float32",
    }.items():
        cache = ESSMCache(model.config)
        with pytest.raises(ValueError, match=f"state_lengths must be {message}"):
            model(ids, past_key_values=cache, state_lengths=torch.tensor(bad))
        assert cache.get_seq_length() == 0 and not cache.layers[0].tensors
    model(ids, past_key_values=(cache := ESSMCache(model.config)), state_lengths=torch.tensor([0, 12, 3]))
    assert cache.get_seq_length() == 12
