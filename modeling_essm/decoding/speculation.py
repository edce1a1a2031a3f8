# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Self-speculative decoding: the model drafts at a small budget and verifies at the full one, all drafts in one call.

    model.generate(ids, custom_generate=speculate(draft_budget=2), spectral_budget=8)

It is lossless: greedy decoding gives the tokens of plain greedy decoding, sampling draws from the same distribution
(Leviathan et al. 2023). Each budget has states of its own. The drafter keeps its states after every draft, so that it
can return to the last accepted one. The verifier reads accepted tokens and new drafts in one call, and `state_lengths`
keeps its states from before the drafts, so it has nothing to undo.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.utils import ModelOutput

from ..cache_essm import CACHE, ESSMCache
from ..generation_essm import check_left_padding
from ..spectral_budget import SpectralBudget, rows_of_samples

FIRST_DRAFT_LENGTH, LONGEST_DRAFT = 4, 16
# Processors that know a row by its place in the batch.
_OF_A_ROW = {
    "PrefixConstrainedLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
}
_WITH_HISTORY = {"SynthIDTextWatermarkLogitsProcessor"}  # a draft would be in it before it is accepted


@dataclass
class ESSMSpeculativeOutput(ModelOutput):
    """
    Args:
        sequences: (B, prompt + longest new) int64, padded after the end of a row.
        acceptance_rate: accepted drafts / drafts, in rows that were not finished.
        num_drafts, num_accepted: the counts behind it.
        num_verifications: calls at the full budget after the prompt.
    """

    sequences: Tensor | None = None
    acceptance_rate: float | None = None
    num_drafts: int | None = None
    num_accepted: int | None = None
    num_verifications: int | None = None


def speculate(draft_budget: SpectralBudget, draft_length: int | None = None) -> Callable:
    """What `generate` takes as custom_generate, to draft at one budget and verify at the call's `spectral_budget`.

    The dictionary output, `ESSMSpeculativeOutput`, tells the acceptance rate.

    Args:
        draft_budget: a spectral budget in any form. draft_length: tokens of a draft, None to adapt it.
    Raises:
        ValueError: a bad draft_length; in `generate` a bad budget, or an option that speculation cannot serve.
    """
    length = draft_length
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
        raise ValueError(f"draft_length must be None or an integer >= 1, got {length!r}")

    @torch.no_grad()
    def decode(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Callable[[Tensor, Any], Tensor],
        generation_config: Any,
        streamer: Any = None,
        tokenizer: Any = None,  # which the stopping criteria have read
        **model_kwargs: Any,
    ) -> Tensor | ESSMSpeculativeOutput | None:
        """As `GenerationMixin._sample`: (B, L) int64 prompts, padded on the left, until every row has stopped."""
        if model.training:
            raise ValueError("drafts are verified in evaluation mode, without dropout: call model.eval() first")
        _check(generation_config, model_kwargs)
        given = {type(processor).__name__ for processor in logits_processor}
        if names := _WITH_HISTORY & given:
            raise ValueError(f"drafts cannot be judged by {min(names)}, which keeps what it has seen")
        names = _OF_A_ROW & given
        if names and len(input_ids) > 1:
            raise ValueError(f"drafts are judged row by row, and {min(names)} knows rows by their place: give one row")
        drafts = rows_of_samples(draft_budget, generation_config.num_return_sequences or 1)
        budgets = model_kwargs.get("spectral_budget"), drafts
        pair = _Pair(model, input_ids, budgets, logits_processor, generation_config.do_sample)
        pair.read_prompt(model_kwargs.get("attention_mask"))
        output = _decode(pair, draft_length, stopping_criteria, generation_config, streamer)
        return output if generation_config.return_dict_in_generate else output.sequences

    return decode


_REFUSED = ("output_scores", "output_logits", "output_hidden_states", "prefill_chunk_size")


def _check(config: Any, model_kwargs: dict[str, Any]) -> None:
    """Raises ValueError for options of generate that speculative decoding cannot serve."""
    check_left_padding("draft_budget", model_kwargs.get("attention_mask"))
    given = {name: getattr(config, name, None) for name in _REFUSED}
    given |= {"step_budgets": model_kwargs.get("step_budgets")}
    given |= {name: value for name in ("num_beams", "guidance_scale") if (value := getattr(config, name)) != 1}
    for name, value in given.items():
        if value:
            raise ValueError(f"draft_budget cannot be combined with {name}, got {value}")
    if config.use_cache is False:
        raise ValueError("draft_budget needs the states that use_cache=False forbids")
    if model_kwargs[CACHE].get_seq_length() or model_kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "draft_budget starts from input_ids: give the whole text, no past_key_values, no inputs_embeds"
        )


class _Row:
    """One sequence: its tokens so far, padding first, and those that the verifier has not read for good."""

    def __init__(self, ids: Tensor, processors: LogitsProcessorList):
        self.ids, self.pending, self.done, self.processors = ids, ids[-1:], False, processors

    def scores(self, ids: Tensor, logits: Tensor) -> Tensor:
        """(V,) processed scores of the token after ids."""
        return self.processors(ids[None], logits[None].float())[0]


class _Pair:
    """Verifier and drafter, one model at two budgets with a state each, and the rows that they decode."""

    def __init__(self, model: Any, input_ids: Tensor, budgets: Any, processors: Iterable, sampling: bool | None):
        self.model, self.sampling, self.input_ids = model, bool(sampling), input_ids
        self.rows = [_Row(ids, _of_row(i, processors)) for i, ids in enumerate(input_ids)]
        B, resolve = len(input_ids), model.config.resolve_budget
        self.budget, self.draft_budget = (resolve(K, batch_size=B) for K in budgets)
        self.verifier, self.drafter = (ESSMCache(model.config) for _ in range(2))

    def read_prompt(self, attention_mask: Tensor | None) -> None:
        """Read all but the last token of the prompt at both budgets; attention_mask (B, L), or None."""
        prompt, mask = self.input_ids[:, :-1], None if attention_mask is None else attention_mask[:, :-1]
        for cache, K in ((self.verifier, self.budget), (self.drafter, self.draft_budget)):
            if prompt.shape[1]:
                self.model(prompt, attention_mask=mask, past_key_values=cache, spectral_budget=K, logits_to_keep=1)

    def draft(self, token: Tensor) -> Tensor:
        """Logits (B, V) of the drafter after one more token (B, 1)."""
        return self.model(token, past_key_values=self.drafter, spectral_budget=self.draft_budget).logits[:, -1]

    def verify(self, drafts: list[Tensor]) -> Tensor:
        """Logits (B, L, V) after the tokens accepted last and all drafts; the states stay before the drafts."""
        sequences = [torch.cat([row.pending, torch.stack([d[i] for d in drafts])]) for i, row in enumerate(self.rows)]
        read = torch.tensor([len(row.pending) for row in self.rows], device=self.input_ids.device)
        padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        options = {"past_key_values": self.verifier, "spectral_budget": self.budget, "state_lengths": read}
        return self.model(padded, **options).logits


def _of_row(i: int, processors: Iterable) -> LogitsProcessorList:
    """The processors for row i alone: the library's repetition penalty holds the padding of every row."""
    own = LogitsProcessorList()
    for processor in processors:
        padding = getattr(processor, "prompt_ignore_length", None)
        if isinstance(padding, Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = padding[i : i + 1]
        own.append(processor)
    return own


def _decode(
    pair: _Pair, draft_length: int | None, stopping_criteria: Callable, generation_config: Any, streamer: Any
) -> ESSMSpeculativeOutput:
    rows, length = pair.rows, draft_length or FIRST_DRAFT_LENGTH
    drafted = accepted = calls = 0
    while not all(row.done for row in rows):
        # 1. Draft token by token at the small budget, not beyond the end; keep the states of every step.
        if generation_config.max_length is not None:
            shortest = min(len(row.ids) for row in rows if not row.done)
            length = max(1, min(length, generation_config.max_length - shortest - 1))
        states = [pair.drafter.states]
        drafts: list[Tensor] = []
        draft_scores: list[list[Tensor]] = []
        token = torch.stack([row.ids[-1] for row in rows])[:, None]
        for _ in range(length):
            logits = pair.draft(token)
            states.append(pair.drafter.states)
            so_far = torch.stack(drafts, 1) if drafts else token[:, :0]
            draft_scores.append([row.scores(torch.cat([row.ids, so_far[i]]), logits[i]) for i, row in enumerate(rows)])
            token = torch.stack([_pick(s, pair.sampling) for s in draft_scores[-1]])[:, None]
            drafts.append(token[:, 0])

        # 2. Verify: accept the drafts that the full budget would have made, then one token of its own.
        logits, counts = pair.verify(drafts), []
        calls += 1
        for i, row in enumerate(rows):
            if row.done:
                row.pending = row.pending[-1:]  # goes on beside the others, unseen
                counts.append(0)
                continue
            judged = [(d[i], s[i]) for d, s in zip(drafts, draft_scores)]
            same = _accept(pair, row, judged, logits[i, len(row.pending) - 1 :], stopping_criteria)
            drafted, accepted = drafted + min(length, len(row.pending)), accepted + same
            counts.append(len(row.pending) - 1)
            if streamer is not None:
                streamer.put(row.pending.cpu())

        # 3. The drafter returns to the last accepted token of every row.
        if max(counts) == length and not all(row.done for row in rows):
            pair.draft(token)
            states.append(pair.drafter.states)
        _return_to(pair.drafter, states, [min(n + 1, len(states) - 1) for n in counts])
        pair.drafter._seen_tokens = pair.verifier.get_seq_length()
        if draft_length is None:
            live = [n for n, row in zip(counts, rows) if not row.done] or [0]
            length = min(length + 2, LONGEST_DRAFT) if min(live) == length else max(1, length - 1)

    if streamer is not None:
        streamer.end()
    pad = generation_config._pad_token_tensor  # which `generate` has set
    output = torch.nn.utils.rnn.pad_sequence([row.ids for row in rows], True, 0 if pad is None else int(pad))
    rate = accepted / drafted if drafted else None
    return ESSMSpeculativeOutput(output, rate, drafted, accepted, calls)


def _accept(
    pair: _Pair, row: _Row, drafts: list[tuple[Tensor, Tensor]], logits: Tensor, stopping_criteria: Callable
) -> int:
    """Append the drafts that the full budget accepts and one token of its own, up to the row's end.

    Args:
        drafts: token () and scores (V,) of each. logits: (>= drafts + 1, V) of the full budget, before each draft and
            after the last.
    Returns:
        how many drafts were accepted.
    """
    tokens: list[Tensor] = []
    ids, same, accepted = row.ids, True, 0
    while same and not row.done:
        j = len(tokens)
        draft, draft_scores = drafts[j] if j < len(drafts) else (None, None)
        new, same = _judge(row.scores(ids, logits[j]), draft, draft_scores, pair.sampling)
        accepted += same
        tokens.append(new)
        ids = torch.cat([ids, new[None]])
        row.done = bool(stopping_criteria(ids[None], None)[0])
    row.ids, row.pending = ids, torch.stack(tokens)
    return accepted


def _pick(scores: Tensor, sampling: bool) -> Tensor:
    return torch.multinomial(scores.softmax(-1), 1)[0] if sampling else scores.argmax(-1)


def _judge(target: Tensor, draft: Tensor | None, draft_scores: Tensor | None, sampling: bool) -> tuple[Tensor, bool]:
    """The token that stands in the draft's place, and whether it is the draft.

    Without a draft it is the full budget's own token.
    """
    if draft is None or draft_scores is None:
        return _pick(target, sampling), False
    if not sampling:
        token = target.argmax(-1)
        return token, bool(token == draft)
    p, q = target.softmax(-1), draft_scores.softmax(-1)
    if torch.rand((), device=p.device) * q[draft] < p[draft]:
        return draft, True
    return torch.multinomial((p - q).clamp(min=0.0), 1)[0], False


def _return_to(cache: ESSMCache, states: list[dict[str, Tensor]], steps: list[int]) -> None:
    """Give every row the states that it had at its step."""
    if len(set(steps)) == 1:
        cache.set_states(states[steps[0]])
    else:
        caches = {step: ESSMCache(cache.config) for step in {*steps}}
        for step, there in caches.items():
            there.set_states(states[step])
        cache.set_states(ESSMCache.merge([caches[step].select([row]) for row, step in enumerate(steps)]).states)
