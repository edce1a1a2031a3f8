# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Continuous batching: requests of different lengths and budgets share one running batch, and come and go at any step.

    batch = ContinuousBatch(model, max_state_bytes=1 << 30)
    request = batch.submit(input_ids, max_new_tokens=100, spectral_budget="small")
    while batch:
        batch.step()  # request.tokens grows
    request.status    # "finished"

Every step decodes one token of every running row, and reads a piece of a prompt, or several short ones, taking the
admitted in turn. So a long prompt delays the others by one piece at a time. The size of a row's state is known before
the row is read, so a request waits until there is room and never has to be put out again. Rows are computed
independently: what one asks for, and how it ends, changes no other. If the model fails on a group of rows, all of these
fail.

The rows of one budget are a group with a cache of its own size and a call of its own. Where a call costs more than it
saves, because the rows are few, they join the group of the next larger budget; a few timed steps of each budget tell.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ..cache_essm import CACHE, ESSMCache
from ..spectral_budget import SPECTRAL_LAYER, is_hybrid

STATUS = ("waiting", "reading", "running", "finished", "cancelled", "failed")
WAITING, READING, RUNNING, FINISHED, CANCELLED, FAILED = STATUS
TIMED_ROWS, TIMED_STEPS = 16, 5  # of which a step's seconds are told: one row and that many, the fastest of the steps


@dataclass(eq=False)
class Request:
    """What was asked for, and what has come of it.

    Attributes:
        input_ids: (1, L). budget: K for all layers. ends: ids that end it.
        tokens: new ids so far, the one that ended it included.
        status: one of STATUS. error: why it failed, or None.
    """

    input_ids: Tensor
    max_new_tokens: int
    budget: int
    ends: frozenset[int]
    processor: LogitsProcessorList | None
    generator: torch.Generator | None
    on_token: Callable[[int], None] | None
    tokens: list[int] = field(default_factory=list)
    status: str = WAITING
    error: BaseException | None = None
    _cache: ESSMCache | None = None  # while it is being read
    _read: int = 0

    @property
    def unread(self) -> int:
        """How many tokens of the prompt have not been read."""
        return self.input_ids.shape[1] - self._read

    @property
    def over(self) -> bool:
        return self.status in (FINISHED, CANCELLED, FAILED)

    def fail(self, error: BaseException) -> None:
        """End it with that error, unless it is over."""
        if not self.over:
            self.status, self.error = FAILED, error

    def take(self, logits: Tensor, likeliest: int, finite: bool) -> None:
        """Choose the next token. An error in it ends this request alone.

        Args:
            logits: (V,) of its row. likeliest: their argmax. finite: whether all of them are.
        """
        if self.over:  # another request's on_token has ended it
            return
        try:
            if not finite:
                raise FloatingPointError("the model's logits are not finite")
            token = likeliest
            if self.processor is not None:
                ids = torch.cat([self.input_ids, self.input_ids.new_tensor([self.tokens])], 1)
                scores = self.processor(ids, logits[None].float())
                if scores.shape != (1, len(logits)) or not scores.max() > -torch.inf:
                    raise ValueError(
                        f"logits_processor must give {(1, len(logits))} scores, one above -inf and none NaN, got "
                        f"{tuple(scores.shape)} with the maximum {scores.max()}"
                    )
                logits, token = scores[0], int(scores.argmax())
            if self.generator is not None:
                token = int(torch.multinomial(logits.float().softmax(-1).cpu(), 1, generator=self.generator))
            self.tokens.append(token)
            if self.on_token is not None:
                self.on_token(token)
        except Exception as error:  # a caller's function may raise anything
            self.fail(error)
        else:
            if not self.over and (token in self.ends or len(self.tokens) == self.max_new_tokens):
                self.status = FINISHED


@dataclass(eq=False)
class _Group:
    """Running rows that one call decodes, at the largest of their budgets, and their cache in the same order."""

    requests: list[Request]
    cache: ESSMCache


class ContinuousBatch:
    """A running batch over one model, driven by calls of `step`; not for several threads at once.

    Args:
        model: ESSMForCausalLM in evaluation mode, with spectral layers only.
        max_state_bytes: the most that all states may take together, which decides how many requests run at once. While
            rows join or leave, twice that is in use.
        max_rows: the most requests that run at once, or None.
        prefill_chunk_size: prompt tokens of one piece, and the most of a step.
    Raises:
        ValueError: a model in training or with attention layers, or a limit below 1.
    """

    def __init__(
        self, model: Any, max_state_bytes: int, max_rows: int | None = None, prefill_chunk_size: int = 512
    ) -> None:
        limits = {"max_state_bytes": max_state_bytes, "prefill_chunk_size": prefill_chunk_size}
        for name, value in (limits | ({} if max_rows is None else {"max_rows": max_rows})).items():
            _require_positive(name, value)
        if is_hybrid(model.config):
            raise ValueError(
                "requests are admitted by the size of their states, and this model has attention layers, whose keys "
                f"grow: layer_types must all be {SPECTRAL_LAYER!r}"
            )
        if model.training:
            raise ValueError("requests are served in evaluation mode: call model.eval() first")
        self.model, self.max_state_bytes = model, max_state_bytes
        self.max_rows, self.prefill_chunk_size = max_rows, prefill_chunk_size
        self._waiting: OrderedDict[Request, None] = OrderedDict()  # of which each can be taken out at once
        self._reading: deque[Request] = deque()
        self._groups: list[_Group] = []
        self._row_bytes: dict[int, int] = {}
        self._seconds: dict[int, tuple[float, float]] = {}
        self._stepping = False

    def __bool__(self) -> bool:
        """Whether any request is not over."""
        return bool(self._waiting or self._held)

    @property
    def _held(self) -> list[Request]:
        return [*self._reading, *(request for group in self._groups for request in group.requests)]

    @property
    def num_running(self) -> int:
        """Requests that hold a state, or the room for one."""
        return len(self._held)

    @property
    def state_bytes(self) -> int:
        """Bytes of all states held now."""
        caches = [group.cache for group in self._groups] + [request._cache for request in self._reading]
        return sum(cache.num_bytes for cache in caches if cache is not None)

    def submit(
        self,
        input_ids: Tensor | Sequence[int],
        max_new_tokens: int,
        spectral_budget: int | str | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        logits_processor: LogitsProcessorList | None = None,
        generator: torch.Generator | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> Request:
        """Queue a request; `step` works on it.

        Args:
            input_ids: (L,) or (1, L) prompt, L >= 1.
            spectral_budget: one budget for all layers, a number or a name; by default that of generation_config, else
                of the config.
            eos_token_id: ids that end it, [] for none; by default those of generation_config.
            logits_processor: applied to (1, V) logits before a token is chosen.
            generator: on the CPU; draws from the probabilities. Without one the likeliest token is taken.
            on_token: called with every new token; if it raises, the request fails.
        Raises:
            ValueError: a prompt that is empty or more than one, ids out of range, a bad budget, a state larger than
                max_state_bytes, or an argument of another type.
        """
        defaults, vocabulary = self.model.generation_config, self.model.config.vocab_size
        ids = _token_ids("input_ids", input_ids, vocabulary)
        if ids.numel() == 0 or ids.shape not in ((ids.numel(),), (1, ids.numel())):
            raise ValueError(f"input_ids must be one prompt (L,) or (1, L) of at least one id, got {tuple(ids.shape)}")
        _require_positive("max_new_tokens", max_new_tokens)
        for name, value in (("logits_processor", logits_processor), ("on_token", on_token)):
            if value is not None and not callable(value):
                raise ValueError(f"{name} must be called, as a function or a LogitsProcessorList is, got {value!r}")
        if generator is not None and (not isinstance(generator, torch.Generator) or generator.device.type != "cpu"):
            raise ValueError(f"generator must be a torch.Generator on the CPU, got {generator!r}")
        if spectral_budget is None:
            spectral_budget = getattr(defaults, "spectral_budget", None)
        layers = self.model.config.resolve_budget(spectral_budget, batch_size=1).layers
        budget = max(layers)  # layers of less capacity run at theirs
        if layers != self.model.config.resolve_budget(budget).layers:
            raise ValueError(f"a request has one spectral_budget, an integer for all layers, got {[*layers]}")
        if (needed := self._bytes_of(budget)) > self.max_state_bytes:
            raise ValueError(
                f"spectral_budget {budget} takes {needed} bytes of state a row, more than max_state_bytes "
                f"{self.max_state_bytes}"
            )
        if eos_token_id is None:
            eos_token_id = defaults.eos_token_id
        ends = [] if eos_token_id is None else _token_ids("eos_token_id", eos_token_id, vocabulary).flatten().tolist()
        prompt = ids.reshape(1, -1).to(self.model.device)
        request = Request(prompt, max_new_tokens, budget, frozenset(ends), logits_processor, generator, on_token)
        self._waiting[request] = None
        return request

    def cancel(self, request: Request) -> None:
        """End a request now, wherever it stands; one that is over stays as it is.

        Its state is freed at once, or in the course of the step whose callback calls this.
        """
        if not request.over:
            request.status = CANCELLED
            if request in self._waiting:
                del self._waiting[request]
            elif not self._stepping:  # a step goes through the groups, and then arranges them itself
                self._arrange()

    @torch.inference_mode()
    def step(self) -> None:
        """Admit the requests that there is room for, decode one token of every running row, read prompts.

        An interrupt such as KeyboardInterrupt fails every request that holds a state, since its states and tokens may
        no longer fit each other. Requests that wait for room go on waiting.

        Raises:
            RuntimeError: called by an on_token, or the model has been put into training mode; no request is lost then.
        """
        if self.model.training:
            raise RuntimeError("the model is in training mode, whose dropout changes tokens: call model.eval() first")
        if self._stepping:
            raise RuntimeError("step is at work: on_token must not call it")
        self._stepping = True
        try:
            while self._waiting and self._has_room(next(iter(self._waiting))):
                request, _ = self._waiting.popitem(last=False)
                request.status = READING
                self._reading.append(request)
                self._arrange()  # so that rows in a wider group than they need make room
            for group in self._groups:
                if not self.model.training:  # which an on_token may have changed
                    self._decode(group)
            if any(request.over for request in self._held):
                self._arrange()
            tokens = 0
            while self._reading and not self.model.training:
                tokens += min(self.prefill_chunk_size, self._reading[0].unread)
                if tokens > self.prefill_chunk_size:
                    break
                self._read(self._reading[0])
        except BaseException as error:
            for request in self._held:
                request.fail(error)
            self._arrange()
            raise
        finally:
            self._stepping = False

    def _has_room(self, request: Request) -> bool:
        held = [*self._held, request]
        if self.max_rows is not None and len(held) > self.max_rows:
            return False
        return sum(self._bytes_of(other.budget) for other in held) <= self.max_state_bytes

    def _bytes_of(self, budget: int) -> int:
        """Bytes of one row's state, measured once per budget."""
        if budget not in self._row_bytes:
            with torch.inference_mode():
                one = torch.zeros(1, 1, dtype=torch.int64, device=self.model.device)
                cache = self.model(one, use_cache=True, spectral_budget=budget)[CACHE]
            self._row_bytes[budget] = cache.num_bytes
        return self._row_bytes[budget]

    @torch.inference_mode()
    def _seconds_of(self, budget: int) -> tuple[float, float]:
        """What a step of one row takes, and each further row, measured once per budget."""
        if budget not in self._seconds:
            fastest, many = [], max(2, min(TIMED_ROWS, self.max_state_bytes // self._bytes_of(budget)))
            for rows in (1, many):
                ids, cache, times = torch.zeros(rows, 1, dtype=torch.int64, device=self.model.device), None, []
                for _ in range(1 + TIMED_STEPS):  # the first makes the cache
                    start = time.perf_counter()
                    outputs = self._call(ids, cache, budget)
                    cache = outputs[CACHE]
                    outputs.logits.argmax(-1).tolist()  # waits for the device
                    times.append(time.perf_counter() - start)
                fastest.append(min(times[1:]))
            self._seconds[budget] = fastest[0], max(0.0, fastest[1] - fastest[0]) / (many - 1)
        return self._seconds[budget]

    def _read(self, request: Request) -> None:
        piece = request.input_ids[:, request._read : request._read + self.prefill_chunk_size]
        try:
            out = self._call(piece, request._cache, request.budget)
            request._cache, request._read = out[CACHE], request._read + piece.shape[1]
            if request.unread:
                self._reading.rotate(-1)
                return
            _take_each([request], out.logits[:, -1])
            if not request.over:
                self._arrange(joins=request)
                request._cache, request.status = None, RUNNING
        except Exception as error:  # such as no memory for the piece, or for all rows
            request.fail(error)
        if request.over:
            self._arrange()

    def _decode(self, group: _Group) -> None:
        budgets = torch.tensor([request.budget for request in group.requests])
        tokens = torch.tensor([[request.tokens[-1]] for request in group.requests], device=self.model.device)
        try:
            out = self._call(tokens, group.cache, budgets)
        except Exception as error:  # some layers have advanced their states, others have not
            for request in group.requests:
                request.fail(error)
            return
        _take_each(group.requests, out.logits[:, -1])

    def _call(self, input_ids: Tensor, cache: ESSMCache | None, budget: int | Tensor) -> Any:
        """The model's outputs. Raises RuntimeError if another thread put it into training mode meanwhile."""
        options: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}
        outputs = self.model(input_ids, past_key_values=cache, spectral_budget=budget, **options)
        if self.model.training:
            raise RuntimeError("the model was put into training mode while it read or decoded")
        return outputs

    def _arrange(self, joins: Request | None = None) -> None:
        """Drop the requests that are over, and divide the running rows, with one that joins, into groups anew."""
        parts = [(group.requests, group.cache) for group in self._groups]
        if joins is not None and joins._cache is not None:
            parts.append(([joins], joins._cache))
        group_of = self._group_of(Counter(one.budget for requests, _ in parts for one in requests if not one.over))
        found: dict[int, list[_Group]] = {budget: [] for budget in group_of.values()}
        for requests, cache in parts:
            for budget, pieces in found.items():
                rows = [i for i, one in enumerate(requests) if not one.over and group_of[one.budget] == budget]
                if rows:
                    part = cache if len(rows) == len(requests) else cache.select(rows)
                    pieces.append(_Group([requests[i] for i in rows], part))
        self._groups = [
            _Group(
                [one for piece in pieces for one in piece.requests],
                pieces[0].cache if len(pieces) == 1 else ESSMCache.merge([piece.cache for piece in pieces]),
            )
            for pieces in found.values()
        ]
        for request in self._reading:
            request._cache = None if request.over else request._cache
        self._reading = deque(one for one in self._reading if not one.over and one is not joins)

    def _group_of(self, rows: Counter[int]) -> dict[int, int]:
        """The budget of the group in which each budget's rows run: its own, or a larger one where that is faster."""
        group_of: dict[int, int] = {}
        free = self.max_state_bytes - sum(self._bytes_of(one.budget) for one in self._held if not one.over)
        larger = 0
        for K, count in sorted(rows.items(), reverse=True):
            if larger:
                wider = count * (self._bytes_of(larger) - self._bytes_of(K))
                (first, more), saved = self._seconds_of(K), count * self._seconds_of(larger)[1]
                if wider <= free and first + (count - 1) * more > saved:
                    group_of[K], free = larger, free - wider
                    continue
            group_of[K] = larger = K
        return group_of


def _take_each(requests: list[Request], logits: Tensor) -> None:
    """Give every request its row of logits (B, V); the device is waited for once."""
    likeliest, finite = logits.argmax(-1).tolist(), logits.isfinite().all(-1).tolist()
    for row in zip(requests, logits, likeliest, finite):
        row[0].take(*row[1:])


def _token_ids(name: str, given: Any, vocabulary: int) -> Tensor:
    """As an integer tensor.

    Raises:
        ValueError: not integers, or one out of range.
    """
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be token ids, got {given!r}") from error
    if ids.numel() == 0:
        return ids.long()
    numbers = ids.dtype != torch.bool and not ids.is_floating_point() and not ids.is_complex()
    if not numbers or not 0 <= int(ids.long().min()) <= int(ids.long().max()) < vocabulary:
        raise ValueError(f"{name} must be integers in [0, {vocabulary - 1}], got {ids.flatten()[:20].tolist()}")
    return ids.long()


def _require_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
