# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Stands between clients and the library's server: limits, reasons, and no work for a client that has left.

By itself the library's server lets one request take all the tokens, memory and time there are, goes on for a client
that has left, and answers a bad value with an error 500. Only its public parts are used here: the ASGI application, the
request format, `generate` and its stopping criteria.
"""

import asyncio
import functools
import json
import threading
import time
import uuid
from typing import Any

import torch
from fastapi.responses import JSONResponse
from transformers import StoppingCriteria, StoppingCriteriaList

from .schema import ENDPOINTS, Limits, Refused, parse

DRAINED = 64 * 1024 * 1024  # bytes read of a refused body, so that its sender gets to read why


class Ticket:
    """A request from its arrival to its last byte. gone: set once nobody waits for it any more."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        self.end = float("inf")  # in time.monotonic(), set when generation begins
        self.chunks = 0  # chunks of its prompt begun so far
        self.writing = False  # whether it has its first token


class Guard:
    """ASGI application around another one.

    Args:
        app: the library's. model: its only model, an ESSMForCausalLM, whose `generate` is bounded from now on, on one
        thread at a time. name: what requests call the model.
    """

    def __init__(self, app: Any, model: Any, name: str, limits: Limits):
        self.app, self.model, self.config, self.name, self.limits = app, model, model.config, name, limits
        self.tickets: dict[str, Ticket] = {}
        self.running: Ticket | None = None
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._check_mode)
        model.generate = functools.partial(self._generate, model.generate)
        app.add_exception_handler(ValueError, lambda _, error: _answer(getattr(error, "status", 422), str(error)))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            self._check_route(scope["path"], scope["method"])
            if scope["method"] != "POST":
                listing = {"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "local"}]}
                answer = JSONResponse(listing) if scope["path"] == "/v1/models" else self.app
                return await answer(scope, receive, send)
            raw = await self._read(scope, receive)
            body = parse(scope["path"], raw, self.limits, self.name, self.config)
            if len(self.tickets) >= self.limits.requests:
                raise Refused(429, f"{len(self.tickets)} requests are being answered or wait: try again later")
        except Refused as refused:
            return await _answer(refused.status, str(refused))(scope, receive, send)
        await self._serve(body, scope, receive, send)

    @staticmethod
    def _check_route(path: str, method: str) -> None:
        methods = {"/health": ("GET", "HEAD"), "/v1/models": ("GET",)}.get(path, ("POST",))
        if path not in ENDPOINTS and path not in ("/health", "/v1/models"):
            raise Refused(404, f"{path} is not served, only {', '.join(('/health', '/v1/models', *ENDPOINTS))}")
        if method not in (*methods, "OPTIONS"):
            raise Refused(405, f"{path} takes {methods[0]}, got {method}")

    async def _read(self, scope: Any, receive: Any) -> bytes:
        """The whole body.

        Raises:
            Refused: 408, 413, 415.
        """
        kind = dict(scope["headers"]).get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            raise Refused(415, f"Content-Type must be application/json, got {kind.decode('latin1')!r}")
        parts, size, more = [], 0, True
        try:
            async with asyncio.timeout(self.limits.seconds):
                while more and size <= DRAINED:
                    message = await receive()
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size <= self.limits.body_bytes:
                        parts.append(part)
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {self.limits.seconds:g} seconds") from None
        if size > self.limits.body_bytes:
            raise Refused(413, f"a body has at most {self.limits.body_bytes} bytes, got {'over ' * more}{size}")
        return b"".join(parts)

    async def _serve(self, body: dict[str, Any], scope: Any, receive: Any, send: Any) -> None:
        """Hand the request on, with a ticket in its generation_config; watch for its client to leave."""
        number, ticket, left = uuid.uuid4().hex, Ticket(), asyncio.Event()
        if "generation_config" in body:
            settings = json.loads(body["generation_config"]) | {"ticket": number}
            body = body | {"generation_config": json.dumps(settings)}
        pending = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            ticket.gone.set()
            left.set()

        async def replay() -> dict[str, Any]:
            if pending:
                return pending.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        self.tickets[number] = ticket
        watcher = asyncio.create_task(watch())
        try:
            await self.app(scope, replay, send)
        finally:
            ticket.gone.set()
            watcher.cancel()
            del self.tickets[number]

    def _generate(self, generate: Any, *args: Any, generation_config: Any, **kwargs: Any) -> Any:
        """`generate` for a ticket; called on the library's inference thread."""
        ticket = self.tickets.get(generation_config.__dict__.pop("ticket", ""))
        ids = kwargs["input_ids"]
        if ticket is None or ticket.gone.is_set():  # left while it waited
            if kwargs.get("streamer") is not None:
                kwargs["streamer"].end()
            return ids
        ticket.end = time.monotonic() + self.limits.seconds
        if ids.shape[1] > self.limits.prompt_chunk:
            generation_config.prefill_chunk_size = self.limits.prompt_chunk
        stop = _Stop(ticket, generation_config, ids.shape[1])
        self.running = ticket
        try:
            stopping = StoppingCriteriaList([stop])
            return generate(*args, generation_config=generation_config, stopping_criteria=stopping, **kwargs)
        finally:
            self.running = None

    def _check_mode(self, *_: Any) -> None:
        if self.model.training:
            raise Refused(503, "the model is in training mode, whose dropout would change every answer")

    def _before_forward(self, *_: Any) -> None:
        """Give up between two chunks of a prompt; between two tokens _Stop does."""
        self._check_mode()
        ticket = self.running
        if ticket is None or ticket.writing:
            return
        if ticket.gone.is_set():
            raise Refused(499, "the client has left")
        if ticket.chunks and time.monotonic() >= ticket.end:
            raise Refused(422, f"the prompt was not read within {self.limits.seconds:g} seconds")
        ticket.chunks += 1


class _Stop(StoppingCriteria):
    """Ends a generation whose client has left or whose time is over; the library then says "length" as the reason."""

    def __init__(self, ticket: Ticket, generation_config: Any, prompt: int):
        self.ticket, self.generation_config, self.prompt = ticket, generation_config, prompt

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.ticket.writing = True
        over = time.monotonic() >= self.ticket.end
        if over:  # the library compares its own object with the number of tokens made
            self.generation_config.max_new_tokens = input_ids.shape[1] - self.prompt
        stop = over or self.ticket.gone.is_set()
        return torch.full((len(input_ids),), stop, dtype=torch.bool, device=input_ids.device)


def _answer(status: int, reason: str) -> JSONResponse:
    """In the form of OpenAI's errors."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": reason, "type": kind, "code": status}}, status)
