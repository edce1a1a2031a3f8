# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""`transformers serve` and `chat` by examples/serve.py: each answer is that of `generate` at the budget asked for."""

import asyncio
import contextlib
import dataclasses
import http.client
import importlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from types import SimpleNamespace

import pytest
import torch
from apart import free_port, run_script
from helpers import ROOT, VARIANTS, random_model

from modeling_essm import ESSMCache, ESSMForCausalLM, build_byte_tokenizer

SERVE = ROOT / "examples" / "serve.py"

pytestmark = pytest.mark.slow
for needed in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(needed)

guard, schema, shared_batch = map(importlib.import_module, ("serving.guard", "serving.schema", "serving.shared_batch"))

PROMPT, TOKENS, BUDGETS, DEFAULT = "def main(", 12, (2, 7, 32), 4


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SERVE.parents[1]), **changes}


def serve(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SERVE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One that writes letters only, which no terminal renders as anything else, and others at every budget."""
    model = random_model(budget_presets={"small": BUDGETS[0], "layers": [2, 7]}, **VARIANTS["memory"])
    folder = tmp_path_factory.mktemp("served") / "model"
    for layer in model.model.layers:
        layer.mixer.channel_mixing.data *= 4
    model.generation_config.spectral_budget = DEFAULT
    model.generation_config.suppress_tokens = [i for i in range(259) if not ord("a") <= i <= ord("z")]
    model.save_pretrained(folder)
    build_byte_tokenizer().save_pretrained(folder)
    return model, str(folder)


@pytest.fixture(scope="module")
def expected(model):
    """(prompt, budget) to the text of greedy decoding."""

    def generate(prompt: str, budget: int) -> str:
        ids = torch.tensor([list(prompt.encode())])
        tokens = model[0].generate(ids, spectral_budget=budget, max_new_tokens=TOKENS, do_sample=False)
        return bytes(tokens[0, ids.shape[1] :].tolist()).decode()

    for prompt in (PROMPT, f"{PROMPT}\n"):
        assert len({generate(prompt, K) for K in (*BUDGETS, DEFAULT)}) == 4
    return generate


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """Its address."""
    address, path = f"http://127.0.0.1:{(port := free_port())}", tmp_path_factory.mktemp("log") / "log"
    command = [sys.executable, str(SERVE), "serve", model[1], "--host", "127.0.0.1", "--port", str(port)]
    command, deadline = [*command, "--device", "cpu", "--enable-cors"], time.monotonic() + 200
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(path, "w"))
        process = stack.enter_context(subprocess.Popen(command, env=environment(), stdout=log, stderr=log))
        stack.callback(process.terminate)
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            assert process.poll() is None and time.monotonic() < deadline, path.read_text()[-4000:]
            time.sleep(0.2)
        yield address


@pytest.fixture(scope="module")
def post(server, model):
    """(path, budget, fields of the request) to the text of the answer."""

    def send(path: str, budget=None, **fields) -> str:
        config = {"max_new_tokens": TOKENS} | ({} if budget is None else {"spectral_budget": budget})
        body = {"model": model[1], "temperature": 0, "generation_config": json.dumps(config), **fields}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(server + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=100) as answer:
            return answer.read().decode()

    return send


ENDPOINTS = {
    "completions": ({"prompt": PROMPT}, PROMPT),
    "chat/completions": ({"messages": [{"role": "user", "content": PROMPT}]}, f"{PROMPT}\n"),
    "responses": ({"input": PROMPT, "stream": False}, f"{PROMPT}\n"),
}


def text_of(endpoint: str, answer: dict) -> str:
    if endpoint == "responses":
        return answer["output"][0]["content"][0]["text"]
    choice = answer["choices"][0]
    return choice["text"] if endpoint == "completions" else choice["message"]["content"]


def streamed(endpoint: str, answer: str) -> str:
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    if endpoint == "responses":
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    choices = [event["choices"][0] for event in events]
    parts = [choice.get("text") or choice.get("delta", {}).get("content") for choice in choices]
    return "".join(part or "" for part in parts)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_each_request_has_its_budget(endpoint, post, expected):
    fields, prompt = ENDPOINTS[endpoint]
    for K in (*BUDGETS, "small", None):
        text = expected(prompt, K or DEFAULT)
        assert text_of(endpoint, json.loads(post(f"/v1/{endpoint}", K, **fields))) == text
        assert streamed(endpoint, post(f"/v1/{endpoint}", K, **fields | {"stream": True})) == text
    if endpoint == "completions":
        answer = json.loads(post("/v1/completions", generation_config=None, max_tokens=TOKENS, **fields))
        assert text_of("completions", answer) == text


def test_a_page_of_another_site_reads_what_the_guard_says(server):
    for path, method, status in (("/v1/models", "OPTIONS", 200), ("/v1/models", "GET", 200), ("/docs", "GET", 404)):
        asked = {"Origin": "http://a.site", "Access-Control-Request-Method": "GET"}
        asked |= {"Access-Control-Request-Headers": "authorization"}
        connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=100)
        connection.request(method, path, headers=asked)
        answer = connection.getresponse()
        assert answer.status == status and answer.getheader("access-control-allow-origin") in ("*", "http://a.site")
        connection.close()


def test_chat_in_the_terminal(server, model, expected):
    """A budget as a flag, another one typed in; the conversation so far is the prompt."""
    typed = f"{PROMPT}\nn\n!set spectral_budget={BUDGETS[1]}\n!clear\n{PROMPT}\nn\n!exit\n"
    flags = ["spectral_budget=small", f"max_new_tokens={TOKENS}", "do_sample=False"]
    # Offline, the client would refuse to speak to any server, this one too.
    run = serve(
        "chat", model[1], f"{server}/v1", *flags, input=typed, env=environment(COLUMNS="200", HF_HUB_OFFLINE="0")
    )
    assert run.returncode == 0, run.stderr[-4000:]
    lines = map(str.strip, run.stdout.splitlines())
    answers = [line for line in lines if len(line) == TOKENS and line.islower()]
    assert answers == [expected(f"{PROMPT}\n", K) for K in BUDGETS[:2]]


def test_no_model_no_server():
    """A server without a model of its own would load whatever a request names."""
    run = run_script(SERVE, "serve", "--port", "1")
    assert run.returncode == 1 and "error: name the model to serve" in run.stderr


# ---------------------------------------------------------------------------------------------------------------------
# The guard, around the library's server in this process.

TIGHT = {"body_bytes": 2000, "new_tokens": 50, "messages": 3, "requests": 4, "prompt_chunk": 16}


class Guarded(guard.Guard):
    """A guard that a test can speak to."""

    def connect(self, body, path: str = "/v1/completions", method: str = "POST", **headers):
        """A connection over which that request has been sent; a dictionary goes as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        return connection

    def ask(self, body, *where: str, **headers) -> tuple[int, dict]:
        """Status and content of the answer."""
        with contextlib.closing(self.connect(body, *where, **headers)) as connection:
            answer = connection.getresponse()
            content = answer.read()
            return answer.status, json.loads(content) if content else {}

    def refusal(self, body, *where: str, **headers) -> tuple[int, str]:
        """Status and reason."""
        status, answer = self.ask(body, *where, **headers)
        assert answer["error"]["code"] == status
        return status, answer["error"]["message"]

    def complete(self, **fields) -> dict:
        status, answer = self.ask({"prompt": PROMPT, "max_tokens": 3, **fields})
        assert status == 200, answer
        return answer


@pytest.fixture(scope="module")
def guarded(model):
    """A running server with tight limits: its guard, with `port` and `model`."""
    from transformers.cli import serve
    from transformers.cli.serving import model_manager, server

    guards = []

    def build(manager, *args, build_server=server.build_server, **kwargs):
        (timed,) = manager.loaded_models.values()
        guards.append(Guarded(build_server(manager, *args, **kwargs), timed.model, model[1], schema.Limits(**TIGHT)))
        guards[0].model, guards[0].processor, guards[0].port = timed.model, timed.processor, port
        return guards[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_manager.transformers, "ESSMForCausalLM", ESSMForCausalLM, raising=False)
        patch.setattr(server, "build_server", build)
        port = free_port()
        running = serve.Serve(force_model=model[1], device="cpu", host="127.0.0.1", port=port, non_blocking=True)
        while not running.server.started:
            assert running._thread.is_alive()
            time.sleep(0.01)
        yield guards[0]
        running.kill_server()
        guards[0].batch.thread.join(60)
        assert not guards[0].batch.thread.is_alive()


CHAT, CONFIG = "/v1/chat/completions", "generation_config"
USER = {"role": "user", "content": "a"}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}
# (the request, status, reason), and where it is not a completion the path. Of a completion without a prompt: "a".
BAD = [
    (b'{"prompt": "a"', 400, "JSON"),
    (b'{"prompt": "\\ud800"}', 400, "JSON"),  # half a surrogate
    (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", 400, "recursion"),
    (b'{"prompt": "' + b"a" * 3000 + b'"}', 413, "at most 2000 bytes, got 3014"),
    (b'{"prompt": "a", "temperature": NaN}', 422, "temperature: Input should be a finite number"),
    ({"model": "gpt2"}, 404, "got 'gpt2'"),
    ({"model": "gpt2"}, 404, "got 'gpt2'", "/load_model"),
    ({"prompt": ["a", "b"]}, 422, "prompt: Input should be a valid string"),
    ({}, 422, "input: Field required", "/v1/responses"),
    ({"messages": [IMAGE]}, 422, "messages.0.content", CHAT),
    ({"messages": [USER] * 4}, 422, "at most 3 messages are read, got 4", CHAT),
    ({"messages": [USER], "tools": [{}]}, 422, "tools: Value error, not supported", CHAT),
    ({"messages": [USER], "logit_bias": {"999": 1}}, 422, "[0, 259)", CHAT),
    ({"max_tokens": 10**7}, 422, "at most 50 new tokens are generated, got 10000000"),
    ({CONFIG: {"max_new_tokens": 51}}, 422, "at most 50 new tokens are generated, got 51"),
    ({"input": "a", "max_output_tokens": 51}, 422, "at most 50 new tokens", "/v1/responses"),
    ({CONFIG: {"min_new_tokens": 9, "max_new_tokens": 5}}, 422, "min_new_tokens must be at most the 5"),
    ({"presence_penalty": 1.0, "logit_bias": {"122": 100}}, 422, "logit_bias, presence_penalty: not supported"),
    ({"input": "a", "previous_response_id": "r"}, 422, "previous_response_id: not supported", "/v1/responses"),
    ({"messages": [USER], "response_format": {"type": "json_object"}}, 422, "response_format: not", CHAT),
    ({"n": 2}, 422, "n: Input should be 1, got 2"),
    ({CONFIG: {"num_beams": 3}}, 422, "num_beams: Extra inputs"),
    ({CONFIG: {"spectral_budget": 33}, "stream": True}, 422, "must be an integer in [1, 32], got 33"),
    ({CONFIG: {"spectral_budget": "fast"}}, 422, "unknown spectral_budget preset 'fast'; known presets: 'layers'"),
    (
        {CONFIG: {"spectral_budget": "layers"}, "stream": True},
        422,
        "these presets have one for each: {'layers': [2, 7]}",
    ),
    ({"temperature": -1}, 422, "temperature: Input should be greater"),
    ({"temperature": 1e-30}, 422, "must be 0, for greedy decoding, or in"),
    ({"stop": 5}, 422, "stop"),
    ({"stop": "b", CONFIG: {"stop_strings": ["c"]}}, 422, "give stop or generation_config.stop_strings, not both"),
    ({"messages": [USER], "foo": 1}, 422, "Unexpected fields in the request: {'foo'}", CHAT),  # by the library
    ({CONFIG: {"eos_token_id": 259}}, 422, "eos_token_id must be in [0, 259), got [259]"),
    ({CONFIG: {"num_return_sequences": 9}}, 422, "num_return_sequences: Extra inputs"),
    ({CONFIG: "{"}, 400, "generation_config: Invalid JSON"),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: str(bad[2])[:30])
def test_a_bad_request_is_told_why(bad, guarded):
    body, status, reason, path = (*bad, "/v1/completions")[:4]
    if isinstance(body, dict):
        body = {"prompt": "a", **body} if path == "/v1/completions" else dict(body)
        if isinstance(body.get(CONFIG), dict):
            body[CONFIG] = json.dumps(body[CONFIG])
    found, told = guarded.refusal(body, path)
    assert found == status and reason in told


@pytest.mark.parametrize("count", [4000, 5000])  # JSON's reader takes numbers of up to 4,300 digits
def test_numbers_too_long_to_be_printed_are_refused(guarded, count, monkeypatch):
    monkeypatch.setattr(guarded, "limits", dataclasses.replace(guarded.limits, body_bytes=1 << 16))
    digits = "1" * count
    fields = [f'"logit_bias": {{"{digits}": 1}}', f'"max_tokens": {digits}', f'"seed": {digits}', f'"n": {digits}']
    for name in ("spectral_budget", "top_k", "max_new_tokens", "temperature", "eos_token_id"):
        for value in (digits, f"-{digits}", f"[{digits}]"):
            fields.append('"generation_config": ' + json.dumps(f'{{"{name}": {value}}}'))
    for field in fields:
        found, told = guarded.refusal(f'{{"prompt": "a", {field}}}'.encode())
        assert (found == 422 and field.split('"')[1] in told) or (found == 400 and "number out of range" in told)
        assert len(told) < 1000


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_model_in_training_mode_answers_nobody(guarded, meanwhile):
    model = guarded.model
    hook = model.lm_head.register_forward_hook(lambda *_: model.train() and None)  # as another thread would
    try:
        model.train(not meanwhile)
        status, reason = guarded.refusal({"prompt": "a", "max_tokens": 1})
        assert status == 503 and "training mode" in reason
    finally:
        hook.remove()
        model.eval()
    guarded.complete()


def test_method_type_and_place_are_told_too(guarded):
    for arguments, status, reason in (
        ({"method": "GET"}, 405, "/v1/completions takes POST, got GET"),
        ({"path": "/health"}, 405, "/health takes GET, got POST"),
        ({"path": "/docs", "method": "GET"}, 404, "/docs is not served"),
        ({"Content-Type": "text/plain"}, 415, "application/json, got 'text/plain'"),
    ):
        found, told = guarded.refusal({"prompt": "a"}, **arguments)
        assert found == status and reason in told
    (listed,) = guarded.ask(b"", "/v1/models", "GET")[1]["data"]
    assert guarded.complete(model=listed["id"])["choices"][0]["finish_reason"] == "length"
    status, answer = guarded.ask({"prompt": "a", "spectral_budget": 2})  # a field that the library does not know
    assert status == 422 and "spectral_budget" in str(answer)


def test_a_body_that_does_not_arrive_is_given_up(guarded, monkeypatch):
    monkeypatch.setattr(guarded, "limits", dataclasses.replace(guarded.limits, seconds=0.01))
    status, told = guarded.refusal(b"{", **{"Content-Length": "100"})
    assert status == 408 and "did not arrive within 0.01 seconds" in told


@pytest.fixture
def held(guarded):
    """Stops the model at its n-th call from the first held() on: held(n) gives an event for "there", one for "go on".

    Attributes: `seen`, the prompt length or 1 of every call; `together`, the most requests that had a state in one.
    """
    stops, handles = {}, []
    guarded.complete()  # the batch has measured the state of a row

    def hold(call: int):
        if not handles:
            handles.append(guarded.model.register_forward_pre_hook(before))
        stops[call] = threading.Event(), threading.Event()
        return stops[call]

    def before(module, args):
        hold.seen.append(args[0].shape[1])
        hold.together = max(hold.together, guarded.batch.batch.num_running)
        if len(hold.seen) in stops:
            there, go = stops[len(hold.seen)]
            there.set()
            assert go.wait(60)

    hold.seen, hold.together = [], 0
    yield hold
    for handle in handles:
        handle.remove()


def test_requests_share_a_batch(guarded, held, expected):
    """Those that come while one is written go on beside it, at budgets of their own, with the answers of one alone."""
    there, go = held(2)
    budgets = [BUDGETS[0], "small", BUDGETS[1]]
    sent = []
    for K in budgets:
        settings = json.dumps({"spectral_budget": K, "max_new_tokens": TOKENS, "do_sample": False})
        sent.append(guarded.connect({"prompt": PROMPT, CONFIG: settings}))
        assert there.wait(60)
    while guarded.batch.jobs.qsize() < 2:
        time.sleep(0.01)
    go.set()
    for K, connection in zip(budgets, sent):
        with contextlib.closing(connection):
            answer = json.loads(connection.getresponse().read())
        assert text_of("completions", answer) == expected(PROMPT, BUDGETS[0] if K == "small" else K)
    assert held.together == 3


def test_a_stop_string_and_an_end_token_end_an_answer(guarded):
    text = guarded.complete(max_tokens=20)["choices"][0]["text"]
    for fields in ({"stop": text[6:9]}, {"generation_config": json.dumps({"eos_token_id": ord(text[8])})}):
        answer = guarded.complete(**{"max_tokens": 20} | fields)["choices"][0]
        first = text.index(text[6:9]) + 3 if "stop" in fields else text.index(text[8]) + 1
        assert (answer["text"], answer["finish_reason"]) == (text[:first], "stop")


def test_a_seed_gives_the_same_draws_in_company(guarded, held):
    def draw(seed: int, **fields) -> str:
        return guarded.complete(max_tokens=20, seed=seed, **fields)["choices"][0]["text"]

    alone, greedy = draw(5), guarded.complete(max_tokens=20)["choices"][0]["text"]
    assert draw(5) == alone == draw(5, temperature=1.0) != draw(6)
    sampling = [{"generation_config": json.dumps(drawn)} for drawn in ({"top_k": 20}, {"min_p": 0.01})]
    for fields in ({"top_p": 0.9}, {"temperature": 0.9}, *sampling):
        assert guarded.complete(max_tokens=20, **fields)["choices"][0]["text"] != greedy, fields
    assert greedy == draw(5, temperature=0) == draw(5, generation_config='{"do_sample": false}') != alone
    there, go = held(3)
    beside = guarded.connect({"prompt": "a", "max_tokens": 40, "generation_config": '{"do_sample": true}'})
    assert there.wait(60)
    go.set()
    assert draw(5) == alone
    beside.close()


@pytest.mark.parametrize(
    ("prompt", "call", "stream"), [(PROMPT, 5, True), ("a" * 64, 2, False)], ids=["while it writes", "while it reads"]
)
def test_a_client_that_leaves_takes_its_work_along(guarded, held, stream, prompt, call):
    there, go = held(call)
    connection = guarded.connect({"prompt": prompt, "max_tokens": 50, "stream": stream})
    assert there.wait(60)
    (ticket,) = guarded.tickets.values()
    if stream:
        connection.getresponse().close()
    connection.close()
    assert ticket.gone.wait(60)
    go.set()
    guarded.complete(prompt="z")  # waits for its turn
    assert held.seen[call:] == [1, 1, 1], held.seen


def test_no_memory_to_take_out_a_row_ends_what_runs_and_nothing_else(guarded, held, monkeypatch):
    (alone, start), (there, go) = held(1), held(6)
    first = guarded.connect({"prompt": "abc", "max_tokens": 50, "stream": True})
    assert alone.wait(60)
    second = guarded.connect({"prompt": "abc", "max_tokens": 50})
    while not guarded.batch.jobs.qsize():
        time.sleep(0.01)
    start.set()
    assert there.wait(60) and len(guarded.batch.running) == 2
    select, fail = ESSMCache.select, [True]
    monkeypatch.setattr(ESSMCache, "select", lambda *a: 1 / 0 if fail and fail.pop() else select(*a))
    ticket = next(iter(guarded.tickets.values()))
    first.close()
    assert ticket.gone.wait(60)
    go.set()
    with contextlib.closing(second):
        assert second.getresponse().status in (200, 503)
    assert not fail
    guarded.complete()


def test_a_client_that_leaves_the_queue_is_never_served(guarded, held):
    there, go = held(1)
    first = guarded.connect({"prompt": "abc", "max_tokens": 1})
    assert there.wait(60)
    waiting = guarded.connect({"prompt": "abcdefg", "max_tokens": 1})
    while len(guarded.tickets) < 2:
        time.sleep(0.01)
    *_, ticket = guarded.tickets.values()
    waiting.close()
    assert ticket.gone.wait(60)
    go.set()
    assert first.getresponse().status == 200
    first.close()
    guarded.complete(prompt="abcd", max_tokens=1)
    assert held.seen == [3, 4]


def test_beyond_the_queue_requests_are_sent_away(guarded, held, monkeypatch):
    """From when a body begins: one that does not come takes a place. Long ones without a place are told so."""
    monkeypatch.setattr(guarded, "limits", dataclasses.replace(guarded.limits, requests=2))
    there, go = held(1)
    first = guarded.connect({"prompt": "a", "max_tokens": 1})
    assert there.wait(60)
    begun = guarded.connect(b"{", **{"Content-Length": "100"})
    while guarded.open < 2:
        time.sleep(0.01)
    for size in (1, 3000):  # beyond what is kept of any body
        status, told = guarded.refusal({"prompt": "a" * size})
        assert status == 429 and "try again later" in told
    assert guarded.ask(b"", "/health", "GET")[0] == 200
    begun.close()
    go.set()
    assert first.getresponse().status == 200
    first.close()
    while guarded.open:
        time.sleep(0.01)
    guarded.complete()


def test_time_ends_a_request(guarded, monkeypatch):
    """By a clock that goes on by a second whenever it is read."""
    clock = itertools.count()
    monkeypatch.setattr(shared_batch, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(guarded, "limits", dataclasses.replace(guarded.limits, seconds=7))
    answer = guarded.complete(max_tokens=50)
    assert answer["usage"]["completion_tokens"] == 6 and answer["choices"][0]["finish_reason"] == "length"
    assert guarded.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
    status, told = guarded.refusal({"prompt": "a" * 16 * 10})
    assert status == 422 and "the prompt was not read within 7 seconds" in told


def test_a_client_that_does_not_read_does_not_keep_its_place():
    alone = object.__new__(guard.Guard)
    alone.limits, alone.tickets, sent, aborted = schema.Limits(seconds=0.05), {}, [], []

    async def app(scope, receive, send):
        with pytest.raises(ConnectionError, match="the client does not read its answer"):
            await send("started")
        await send("and an error")

    class Connection:  # as uvicorn's
        transport = SimpleNamespace(abort=lambda: aborted.append(True))

        async def never(self, *message):
            sent.extend(message)
            await asyncio.Event().wait()

    alone.app = app
    with pytest.raises(ConnectionError):
        asyncio.run(asyncio.wait_for(alone._serve({}, {}, Connection().never, Connection().never), 60))
    assert not alone.tickets and sent[0] == "started" and aborted


def test_a_templates_own_refusal_is_told_too(guarded, monkeypatch):
    monkeypatch.setattr(guarded.processor, "chat_template", "{{ raise_exception('begin with the user') }}")
    assert guarded.refusal({"messages": [USER]}, CHAT) == (422, "chat template: begin with the user")


def test_what_generate_refuses_by_itself_is_told_too(guarded, monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError("no such thing")

    monkeypatch.setattr(guarded.model, "generate", refuse)
    assert guarded.refusal({"prompt": "a"}) == (422, "no such thing")
