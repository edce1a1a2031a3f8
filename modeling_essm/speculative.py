# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Self-speculative decoding: the model drafts at a small budget and verifies at the full one, all drafts in one call.

Lossless: greedy decoding gives the tokens of plain greedy decoding, sampling draws from the same distribution
(Leviathan et al. 2023). Both budgets have states of their own. The drafter's are kept at every draft, so that it can
return to the last accepted one. The verifier reads accepted tokens and new drafts together, but keeps its state before
the drafts (`state_lengths`): nothing has to be undone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from .cache_essm import ESSMCache
from .spectral_budget import SpectralBudget, rows_of_samples

FIRST_DRAFT_LENGTH, LONGEST_DRAFT = 4, 16


@dataclass
class ESSMSpeculativeOutput(ModelOutput):
    """
    Args:
        sequences: (B, prompt + longest new) int64, padded after the end of a row.
        acceptance_rate: accepted drafts / drafts, of rows that were not finished.
        num_drafts, num_accepted, num_verifications: counts behind it, and calls at the full budget after the prompt.
    """

    sequences: Tensor | None = None
    acceptance_rate: float | None = None
    num_drafts: int | None = None
    num_accepted: int | None = None
    num_verifications: int | None = None


@dataclass(frozen=True)
class Speculation:
    """Stands for `spectral_budget` in `generate` when there is a draft_budget.

    Attributes:
        budget, draft_budget: of verifying and drafting, in any form. draft_length: tokens a draft, None to adapt it.
    """

    budget: SpectralBudget
    draft_budget: SpectralBudget
    draft_length: int | None

    def __post_init__(self) -> None:
        length = self.draft_length
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            raise ValueError(f"draft_length must be None or an integer >= 1, got {length!r}")


def check_speculation(generation_config: Any) -> None:
    """Raises ValueError for what speculative decoding cannot do."""
    if generation_config.num_beams not in (None, 1):
        beams = generation_config.num_beams
        raise ValueError(f"draft_budget works with greedy decoding and sampling, got num_beams={beams}")
    if generation_config.use_cache is False:
        raise ValueError("draft_budget needs the states that use_cache=False forbids")
    if generation_config.guidance_scale not in (None, 1):
        raise ValueError(f"draft_budget cannot be combined with guidance_scale, got {generation_config.guidance_scale}")
    for name in ("output_scores", "output_logits", "output_hidden_states"):
        if getattr(generation_config, name, None):
            raise ValueError(f"draft_budget cannot be combined with {name}")


class _Row:
    """One sequence: its tokens so far, padding first, and those that the verifier has not read for good."""

    def __init__(self, ids: Tensor):
        self.ids, self.pending, self.done = ids, ids[-1:], False


@torch.no_grad()
def speculative_decode(
    model: Any,
    input_ids: Tensor,
    speculation: Speculation,
    logits_processor: Callable[[Tensor, Tensor], Tensor],
    stopping_criteria: Callable[[Tensor, Any], Tensor],
    generation_config: Any,
    attention_mask: Tensor | None = None,
    streamer: Any = None,
) -> ESSMSpeculativeOutput:
    """Decode until every row has stopped.

    Args:
        input_ids: (B, L) int64 prompts, padded on the left. attention_mask: (B, L), or None.
        logits_processor, stopping_criteria: as `generate` prepares them, called with one row at a time.
    """
    B, prompt = input_ids.shape
    device, sampling = input_ids.device, generation_config.do_sample
    budgets = [rows_of_samples(K, B) for K in (speculation.budget, speculation.draft_budget)]
    verifier, drafter = (ESSMCache(model.config) for _ in range(2))
    for cache, K in zip((verifier, drafter), budgets):
        if prompt > 1:
            mask = None if attention_mask is None else attention_mask[:, :-1]
            model(input_ids[:, :-1], attention_mask=mask, past_key_values=cache, spectral_budget=K, logits_to_keep=1)
    rows = [_Row(ids) for ids in input_ids]
    length = speculation.draft_length or FIRST_DRAFT_LENGTH
    drafted = accepted = calls = 0

    def scores(ids: Tensor, logits: Tensor) -> Tensor:
        """(V,) processed scores of the token after ids."""
        return logits_processor(ids[None], logits[None].float())[0]

    while not all(row.done for row in rows):
        # 1. Draft: token by token at the small budget, states kept at every step; not beyond the end.
        if generation_config.max_length is not None:
            shortest = min(len(row.ids) for row in rows if not row.done)
            length = max(1, min(length, generation_config.max_length - shortest - 1))
        states = [_states(drafter)]
        drafts: list[Tensor] = []
        draft_scores: list[list[Tensor]] = []
        token = torch.stack([row.ids[-1] for row in rows])[:, None]
        for _ in range(length):
            logits = model(token, past_key_values=drafter, spectral_budget=budgets[1]).logits[:, -1]
            states.append(_states(drafter))
            so_far = torch.stack(drafts, 1) if drafts else input_ids.new_empty(B, 0)
            draft_scores.append([scores(torch.cat([row.ids, so_far[i]]), logits[i]) for i, row in enumerate(rows)])
            token = torch.stack([_pick(s, sampling) for s in draft_scores[-1]])[:, None]
            drafts.append(token[:, 0])

        # 2. Verify: accepted tokens of the last round and all drafts in one call; the state stays before the drafts.
        sequences = [torch.cat([row.pending, torch.stack([d[i] for d in drafts])]) for i, row in enumerate(rows)]
        read = torch.tensor([len(row.pending) for row in rows], device=device)
        padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        logits = model(padded, past_key_values=verifier, spectral_budget=budgets[0], state_lengths=read).logits
        calls += 1

        # 3. Accept the drafts that the full budget would have made, and one token of its own.
        counts = []
        for i, row in enumerate(rows):
            if row.done:
                row.pending = row.pending[-1:]  # goes on beside the others, unseen
                counts.append(0)
                continue
            own: list[Tensor] = []
            first = len(row.pending) - 1
            for j in range(length + 1):
                target = scores(torch.cat([row.ids, *(t[None] for t in own)]), logits[i, first + j])
                draft = drafts[j][i] if j < length else None
                new, same = _judge(target, draft, draft_scores[j][i] if j < length else None, sampling)
                own.append(new)
                ids = torch.cat([row.ids, torch.stack(own)])
                stopped = bool(stopping_criteria(ids[None], None)[0])
                if j < length:
                    drafted, accepted = drafted + 1, accepted + same
                if not same or stopped:
                    break
            row.ids, row.pending, row.done = ids, torch.stack(own), stopped
            counts.append(len(own) - 1)
            if streamer is not None:
                streamer.put(row.pending.cpu())

        # 4. The drafter returns to the last accepted token of every row.
        if max(counts) == length and not all(row.done for row in rows):
            model(token, past_key_values=drafter, spectral_budget=budgets[1])
            states.append(_states(drafter))
        _return_to(drafter, states, [min(n + 1, len(states) - 1) for n in counts])
        if speculation.draft_length is None:
            live = [n for n, row in zip(counts, rows) if not row.done] or [0]
            length = min(length + 2, LONGEST_DRAFT) if min(live) == length else max(1, length - 1)

    if streamer is not None:
        streamer.end()
    width = max(len(row.ids) for row in rows)
    output = input_ids.new_full((B, width), _pad_token(generation_config))
    for i, row in enumerate(rows):
        output[i, : len(row.ids)] = row.ids
    rate = accepted / drafted if drafted else None
    return ESSMSpeculativeOutput(output, rate, drafted, accepted, calls)


def _pick(scores: Tensor, sampling: bool) -> Tensor:
    return torch.multinomial(scores.softmax(-1), 1)[0] if sampling else scores.argmax(-1)


def _judge(target: Tensor, draft: Tensor | None, draft_scores: Tensor | None, sampling: bool) -> tuple[Tensor, bool]:
    """The token after a draft is judged, and whether it is the draft. Without a draft, the full budget's own token."""
    if draft is None or draft_scores is None:
        return _pick(target, sampling), False
    if not sampling:
        own = target.argmax(-1)
        return own, bool(own == draft)
    p, q = target.softmax(-1), draft_scores.softmax(-1)
    if torch.rand((), device=p.device) * q[draft] < p[draft]:
        return draft, True
    return torch.multinomial((p - q).clamp(min=0.0), 1)[0], False


def _states(cache: ESSMCache) -> list[dict[str, Tensor]]:
    """All states as they are now: later calls replace tensors and never write into them."""
    return [dict(layer.tensors) for layer in cache.layers]


def _return_to(cache: ESSMCache, states: list[list[dict[str, Tensor]]], steps: list[int]) -> None:
    """Give every row the state that it had at its step."""
    for i, layer in enumerate(cache.layers):
        if len(set(steps)) == 1:
            layer.update(**states[steps[0]][i])
        elif states[steps[0]][i]:
            names = states[-1][i]
            layer.update(
                **{name: torch.stack([states[step][i][name][row] for row, step in enumerate(steps)]) for name in names}
            )


def _pad_token(generation_config: Any) -> int:
    pad = getattr(generation_config, "_pad_token_tensor", None)
    return int(pad) if pad is not None else int(generation_config.pad_token_id or 0)
