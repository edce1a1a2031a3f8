# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a request to examples/serve.py may say; all else is refused with the field, the value and what is legal."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Json, ValidationError
from transformers.cli.serving.chat_completion import UNUSED_CHAT_COMPLETION_FIELDS
from transformers.cli.serving.completion import UNUSED_LEGACY_COMPLETION_FIELDS
from transformers.cli.serving.response import UNUSED_RESPONSE_FIELDS

from modeling_essm import ESSMConfig


class Refused(ValueError):
    """A request that is not served. status: of HTTP; its text is the reason that the client reads."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """Bounds on one request, and on all of them together; sizes in bytes."""

    body_bytes: int = 256 * 1024
    new_tokens: int = 4096
    messages: int = 256
    state_bytes: int = 1 << 30  # of all requests; those that it has no room for wait
    seconds: float = 120.0  # of reading the body, of generating, and of waiting for a client that does not read
    requests: int = 16  # read, waiting or answered at the same time; bodies of others are not kept
    prompt_chunk: int = 1024  # tokens read at once: between chunks a request can be given up


def _no_support(value: Any) -> None:
    if value:
        raise ValueError("not supported by this server")


def _temperature(value: float) -> float:
    if 0 < value < 0.01:
        raise ValueError("must be 0, for greedy decoding, or in [0.01, 100]")
    return value


Unsupported = Annotated[Any, AfterValidator(_no_support)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Natural = Annotated[int, Field(ge=0, lt=2**31)]
Temperature = Annotated[float, Field(ge=0, le=100), AfterValidator(_temperature)]
Share = Annotated[float, Field(gt=0, le=1)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Stop = StopString | Annotated[list[StopString], Field(min_length=1, max_length=8)]
STRICT = ConfigDict(strict=True, allow_inf_nan=False)


class Generation(BaseModel):
    """The JSON string `generation_config`."""

    model_config = STRICT | ConfigDict(extra="forbid")
    spectral_budget: Natural | str | None = None
    max_new_tokens: Count | None = None
    min_new_tokens: Natural | None = None
    do_sample: bool | None = None
    temperature: Temperature | None = None
    top_k: Natural | None = None
    top_p: Share | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stop_strings: Stop | None = None
    eos_token_id: Natural | Annotated[list[Natural], Field(min_length=1, max_length=64)] | None = None
    transformers_version: str | None = None  # `chat` sends it


class Part(BaseModel):
    model_config = STRICT
    type: Literal["text", "input_text", "output_text"]
    text: str


class Message(BaseModel):
    model_config = STRICT
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(min_length=1)]
    tool_calls: Unsupported = None


class Request(BaseModel):
    """What all endpoints share. The library reads or refuses fields that are not named here, but for IGNORED."""

    model_config = STRICT | ConfigDict(extra="allow")
    model: str | None = None
    stream: bool | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    frequency_penalty: Annotated[float, Field(ge=-0.99, le=2)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    max_output_tokens: Count | None = None
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    stop: Stop | None = None
    logit_bias: dict[Annotated[str, Field(max_length=10)], Annotated[float, Field(ge=-100, le=100)]] | None = None
    generation_config: Json[Generation] | None = None
    tools: Unsupported = None
    functions: Unsupported = None
    chat_template_kwargs: Unsupported = None  # a template of the client's own could run for ever


class Completion(Request):
    prompt: Annotated[str, Field(min_length=1)]
    suffix: str | None = None


class Chat(Request):
    messages: Annotated[list[Message], Field(min_length=1)]


class Response(Request):
    input: Annotated[str, Field(min_length=1)] | Annotated[list[Message], Field(min_length=1)]
    instructions: str | None = None
    stream: bool = True  # the library's default


ENDPOINTS = {
    "/v1/completions": Completion,
    "/v1/chat/completions": Chat,
    "/v1/responses": Response,
    "/load_model": Request,  # the client of `chat` asks for it first
}
# What the library ignores with a warning in its log, if it changes an answer; n and best_of can be 1 alone.
_HARMLESS = {"user", "metadata", "stream_options", "store", "service_tier", "n", "best_of"}
IGNORED = {
    "/v1/completions": {*UNUSED_LEGACY_COMPLETION_FIELDS, "logit_bias"} - _HARMLESS,
    "/v1/chat/completions": UNUSED_CHAT_COMPLETION_FIELDS - _HARMLESS,
    "/v1/responses": UNUSED_RESPONSE_FIELDS - _HARMLESS,
}


def parse(path: str, raw: bytes, limits: Limits, model: str, config: ESSMConfig) -> dict[str, Any]:
    """The body that the library is given for these bytes: valid, and with the number of new tokens in it.

    Args:
        path: one of ENDPOINTS. model: name of the only model served. config: its config.
    Raises:
        Refused: 400 for what is no JSON, 404 for another model, 422 for values.
    """
    try:
        request = ENDPOINTS[path].model_validate_json(raw)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        raise Refused(400 if found[0]["type"] == "json_invalid" else 422, "; ".join(map(_reason, found[:4]))) from None
    if request.model not in (None, model):
        raise Refused(404, f"model must be {model!r}, the only one served here, got {_short(request.model)}")
    body = request.model_dump(exclude_unset=True, exclude_none=True)
    if path == "/load_model":
        return {"model": model}
    if ignored := sorted(name for name in IGNORED[path] if body.get(name)):
        raise Refused(422, f"{', '.join(ignored)}: not supported by this server")
    generation = request.generation_config or Generation()
    asked = (request.max_completion_tokens, request.max_tokens, request.max_output_tokens, generation.max_new_tokens)
    tokens = next((count for count in asked if count is not None), min(1024, limits.new_tokens))
    rounds = len(body.get("messages", ())) or (len(body["input"]) if isinstance(body.get("input"), list) else 1)
    vocabulary = config.vocab_size
    ends = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id or 0]
    budget = generation.spectral_budget
    try:
        config.resolve_budget([budget] if isinstance(budget, str) else budget)  # a name in a list means one number
    except ValueError as error:
        raise Refused(422, f"generation_config: {error}") from None
    for wrong, reason in (
        (tokens > limits.new_tokens, f"at most {limits.new_tokens} new tokens are generated, got {tokens}"),
        (request.stop and generation.stop_strings, "give stop or generation_config.stop_strings, not both"),
        ((generation.min_new_tokens or 0) > tokens, f"min_new_tokens must be at most the {tokens} new tokens"),
        (rounds > limits.messages, f"at most {limits.messages} messages are read, got {rounds}"),
        (not all(0 <= end < vocabulary for end in ends), f"eos_token_id must be in [0, {vocabulary}), got {ends}"),
        (
            not all(key.isascii() and key.isdigit() and int(key) < vocabulary for key in request.logit_bias or ()),
            f"the keys of logit_bias must be token ids in [0, {vocabulary})",
        ),
    ):
        if wrong:
            raise Refused(422, reason)
    settings = generation.model_dump(exclude_none=True, exclude={"transformers_version"}) | {"max_new_tokens": tokens}
    drawn = settings | {name: body[name] for name in ("temperature", "top_p", "seed") if name in body}
    if drawn.get("temperature") == 0:
        settings |= {"do_sample": False}
    elif {"temperature", "top_k", "top_p", "min_p", "seed"} & drawn.keys():
        settings.setdefault("do_sample", True)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        body.pop(name, None)
    return body | {"model": model, "generation_config": json.dumps(settings)}


def _reason(error: Any) -> str:
    where = ".".join(_cut(str(part)) for part in error["loc"])
    got = "" if error["type"] in ("missing", "json_invalid") else f", got {_short(error['input'])}"
    return f"{where + ': ' if where else ''}{error['msg']}{got}"


def _short(value: Any) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}..."
