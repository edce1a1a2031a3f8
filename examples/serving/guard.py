# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Stands between clients and the library's server: limits, reasons, one batch, no work for a client that has left.

By itself the library's server answers one request at a time, lets it take all the tokens, memory and time there are,
goes on for a client that has left, and answers a bad value with an error 500. Used of it are the ASGI application, the
request format, `generate`, and the thread that calls it.
"""

import asyncio
import functools
import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from transformers.cli.serving import utils

from .schema import ENDPOINTS, Limits, Refused, parse
from .shared_batch import SharedBatch, Ticket

DRAINED = 64 * 1024 * 1024  # bytes read of a refused body, so that its sender gets to read why


class _Threads:
    """In place of the library's thread for `generate`, which takes one call at a time: each call has its own."""

    def __init__(self, count: int):
        self.pool = ThreadPoolExecutor(count)
        self.submit = self.pool.submit

    def async_submit(self, function: Any, *args: Any, **kwargs: Any) -> asyncio.Future:
        return asyncio.wrap_future(self.submit(function, *args, **kwargs))


class Guard:
    """ASGI application around another one.

    Args:
        app: the library's. model: its only model, an ESSMForCausalLM, whose `generate` joins a shared batch from now
        on. name: what requests call the model.
    Raises:
        ValueError: a model that `SharedBatch` cannot serve.
    """

    def __init__(self, app: Any, model: Any, name: str, limits: Limits):
        self.app, self.config, self.name, self.limits = app, model.config, name, limits
        self.tickets: dict[str, Ticket] = {}
        self.open = 0  # requests that have a place: being read, waiting or answered
        self.batch = SharedBatch(model, limits)
        utils.InferenceThread = functools.partial(_Threads, limits.requests)
        model.generate = functools.partial(self._generate, model.generate)
        app.add_exception_handler(HTTPException, lambda _, error: _answer(error.status_code, str(error.detail)))
        app.add_exception_handler(TemplateError, lambda _, error: _answer(422, f"chat template: {error}"))
        app.add_exception_handler(ValueError, lambda _, error: _answer(getattr(error, "status", 422), str(error)))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            if scope["type"] == "lifespan":  # the server has ended
                self.batch.jobs.put(None)
            return
        try:
            self._check_route(scope["path"], scope["method"])
        except Refused as refused:
            return await _answer(refused.status, str(refused))(scope, receive, send)
        if scope["method"] in ("GET", "OPTIONS"):
            listing = {"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "local"}]}
            answer = JSONResponse(listing) if scope["path"] == "/v1/models" else self.app
            return await answer(scope, receive, send)
        has_place = self.open < self.limits.requests
        self.open += has_place
        try:
            raw = await self._read(scope, receive, has_place)
            body = parse(scope["path"], raw, self.limits, self.name, self.config)
            await self._serve(body, scope, receive, send)
        except Refused as refused:
            await _answer(refused.status, str(refused))(scope, receive, send)
        finally:
            self.open -= has_place

    @staticmethod
    def _check_route(path: str, method: str) -> None:
        taken = "POST" if path in ENDPOINTS else "GET"
        if path not in ENDPOINTS and path not in ("/health", "/v1/models"):
            raise Refused(404, f"{path} is not served, only {', '.join(('/health', '/v1/models', *ENDPOINTS))}")
        if method not in (taken, "OPTIONS"):
            raise Refused(405, f"{path} takes {taken}, got {method}")

    async def _read(self, scope: Any, receive: Any, has_place: bool) -> bytes:
        """The whole body; of a request without a place nothing is kept.

        Raises:
            Refused: 408, 413, 415, 429.
        """
        kind = dict(scope["headers"]).get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            raise Refused(415, f"Content-Type must be application/json, got {kind.decode('latin1')!r}")
        parts, size, more, kept = [], 0, True, self.limits.body_bytes if has_place else 0
        try:
            async with asyncio.timeout(self.limits.seconds):
                while more and size <= max(DRAINED, self.limits.body_bytes):
                    message = await receive()
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size <= kept:
                        parts.append(part)
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {self.limits.seconds:g} seconds") from None
        if not has_place:
            raise Refused(429, f"{self.limits.requests} requests are being read, wait or are answered: try again later")
        if size > self.limits.body_bytes:
            raise Refused(413, f"a body has at most {self.limits.body_bytes} bytes, got {'over ' * more}{size}")
        return b"".join(parts)

    async def _serve(self, body: dict[str, Any], scope: Any, receive: Any, send: Any) -> None:
        """Hand the request on, with a ticket in its generation_config; watch for its client to leave."""
        number, ticket, left = uuid.uuid4().hex, Ticket(self.limits.seconds, body.get("seed")), asyncio.Event()
        patience, clock = self.limits.seconds, asyncio.get_running_loop().time
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

        async def send_in_time(message: Any) -> None:
            nonlocal patience
            began = clock()
            try:
                async with asyncio.timeout(patience):
                    await send(message)
            except TimeoutError:
                if transport := getattr(getattr(send, "__self__", None), "transport", None):
                    transport.abort()  # uvicorn's close() would wait for this client, and the server's end for that
                raise ConnectionError("the client does not read its answer") from None
            finally:
                patience -= clock() - began

        self.tickets[number] = ticket
        watcher = asyncio.create_task(watch())
        try:
            await self.app(scope, replay, send_in_time)
        finally:
            ticket.gone.set()
            watcher.cancel()
            del self.tickets[number]

    def _generate(self, generate: Any, *args: Any, generation_config: Any, **kwargs: Any) -> Any:
        """`generate` for a ticket, beside those of others."""
        ticket = self.tickets.get(generation_config.__dict__.pop("ticket", ""))
        ids = prompt = kwargs["input_ids"]
        if ticket is not None and not ticket.gone.is_set():  # it did not leave while it waited for a thread
            decode = functools.partial(self.batch.decode, ticket)
            one = {"num_beams": 1, "num_return_sequences": 1}  # whatever the model's own generation_config says
            kwargs |= {"custom_generate": decode, "generation_config": generation_config}
            ids = generate(*args, **one, **kwargs)
            if ticket.late:  # the library compares its own object with the number of new tokens
                generation_config.max_new_tokens = ids.shape[1] - prompt.shape[1]
        if kwargs.get("streamer") is not None:
            kwargs["streamer"].end()
        return ids


def _answer(status: int, reason: str) -> JSONResponse:
    """In the form of OpenAI's errors."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": reason, "type": kind, "code": status}}, status)
