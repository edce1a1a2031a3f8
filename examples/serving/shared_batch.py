# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Calls of `generate` on many threads, decoded together by one ContinuousBatch on a thread of its own."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from modeling_essm.decoding import ContinuousBatch

from .schema import Limits, Refused


class Ticket:
    """A request from its arrival to its last byte.

    Attributes:
        seconds: it may take. seed: of its draws, or None. gone: set once nobody waits for it any more. end: when its
        time is over, by time.monotonic(). late: whether that has ended it.
    """

    def __init__(self, seconds: float, seed: int | None) -> None:
        self.seconds, self.seed, self.gone, self.end, self.late = seconds, seed, threading.Event(), 0.0, False


@dataclass(eq=False)
class _Job:
    """What a call waits for. submit: makes the request of the batch."""

    submit: Callable[[], Any]
    ticket: Ticket
    answer: Future = field(default_factory=Future)
    request: Any = None


class SharedBatch:
    """Steps a ContinuousBatch for as long as a call waits for one of its requests.

    Raises:
        ValueError: a model with attention layers, or in training mode, or whose default has a budget for each layer.
    """

    def __init__(self, model: Any, limits: Limits):
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # None ends the thread
        self.running: list[_Job] = []
        self.batch = ContinuousBatch(model, limits.state_bytes, limits.requests, limits.prompt_chunk)
        self.batch.cancel(self.batch.submit([0], 1))  # at the default
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def decode(
        self,
        ticket: Ticket,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Callable,
        stopping_criteria: Callable,
        generation_config: Any,
        streamer: Any = None,
        tokenizer: Any = None,  # which the stopping criteria have read
        spectral_budget: Any = None,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """What `generate` calls as custom_generate, once its first argument is given: (1, L) to (1, L + new) ids."""
        generator = torch.Generator() if generation_config.do_sample else None
        if generator is not None:
            generator.seed() if ticket.seed is None else generator.manual_seed(ticket.seed)

        def written() -> torch.Tensor:
            return torch.cat([input_ids, input_ids.new_tensor([job.request.tokens])], 1)

        def on_token(token: int) -> None:
            if streamer is not None:
                streamer.put(torch.tensor([token]))
            if stopping_criteria(written(), None).all():
                self.batch.cancel(job.request)

        options = {"eos_token_id": [], "logits_processor": logits_processor, "generator": generator}
        length = generation_config.max_length - input_ids.shape[1]
        job = _Job(partial(self.batch.submit, input_ids, length, spectral_budget, on_token=on_token, **options), ticket)
        ticket.end = time.monotonic() + ticket.seconds
        self.jobs.put(job)
        job.answer.result()
        return written()

    def _run(self) -> None:
        while True:
            while not self.running or not self.jobs.empty():
                if (job := self.jobs.get()) is None:
                    for job in self.running:  # whose threads Python would wait for
                        job.answer.set_exception(Refused(503, "the server has ended"))
                    return
                self._begin(job)
            try:
                for job in self.running:
                    self._give_up(job)
                self.batch.step()
            except Exception as error:  # the model is in training mode, say
                for job in self.running:
                    job.answer.set_exception(Refused(503, str(error)))
                    with contextlib.suppress(Exception):  # no memory to move the others; the last one moves none
                        self.batch.cancel(job.request)
            for job in self.running:
                if job.request.over and not job.answer.done():
                    self._answer(job)
            self.running = [job for job in self.running if not job.answer.done()]

    def _begin(self, job: _Job) -> None:
        try:
            job.request = job.submit()
            self.running.append(job)
        except Exception as error:  # such as no memory to try the budget
            job.answer.set_exception(_reason(error))

    def _give_up(self, job: _Job) -> None:
        """End a request whose client has left or whose time is over."""
        job.ticket.late = time.monotonic() >= job.ticket.end
        if job.ticket.late or job.ticket.gone.is_set():
            self.batch.cancel(job.request)

    def _answer(self, job: _Job) -> None:
        error = job.request.error
        if error is None and job.ticket.late and not job.request.tokens:
            error = Refused(422, f"the prompt was not read within {job.ticket.seconds:g} seconds")
        if error is None:
            job.answer.set_result(None)
        else:
            job.answer.set_exception(_reason(error))


def _reason(error: BaseException) -> BaseException:
    """The error that a client is told; those of the model as one of the server."""
    return Refused(503, str(error)) if isinstance(error, RuntimeError | FloatingPointError) else error
