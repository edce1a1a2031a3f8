# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""`transformers serve` and `chat` by examples/serve.py: each answer is that of `generate` at the budget asked for."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from helpers import random_model

from modeling_essm import build_byte_tokenizer

for needed in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(needed)

SERVE = Path(__file__).parents[1] / "examples" / "serve.py"
PROMPT, TOKENS, BUDGETS, DEFAULT = "def main(", 12, (2, 7, 32), 4


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SERVE.parents[1]), **changes}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One that writes letters only, which no terminal renders as anything else, and others at every budget."""
    model = random_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mixer.channel_mixing *= 4
    model.generation_config.spectral_budget = DEFAULT
    model.generation_config.suppress_tokens = [i for i in range(259) if not ord("a") <= i <= ord("z")]
    folder = tmp_path_factory.mktemp("served") / "model"
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SERVE), "serve", model[1], "--host", "127.0.0.1", "--port", str(port)]
    path = tmp_path_factory.mktemp("log") / "log"
    with open(path, "w") as log:
        process = subprocess.Popen([*command, "--device", "cpu"], env=environment(), stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 200
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                except OSError:
                    assert process.poll() is None and time.monotonic() < deadline, path.read_text()[-4000:]
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


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
    for K in (*BUDGETS, BUDGETS[0]):
        assert text_of(endpoint, json.loads(post(f"/v1/{endpoint}", K, **fields))) == expected(prompt, K)
        assert streamed(endpoint, post(f"/v1/{endpoint}", K, **fields | {"stream": True})) == expected(prompt, K)


def test_a_request_without_a_budget_runs_at_the_models_default(post, expected):
    fields, prompt = ENDPOINTS["completions"]
    answer = json.loads(post("/v1/completions", **fields))
    assert text_of("completions", answer) == expected(prompt, DEFAULT)
    answer = json.loads(post("/v1/completions", generation_config=None, max_tokens=TOKENS, **fields))
    assert text_of("completions", answer) == expected(prompt, DEFAULT)


def test_the_openai_client(server, model, expected):
    import openai

    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    for K in BUDGETS:
        config = json.dumps({"spectral_budget": K, "max_new_tokens": TOKENS})
        answer = client.chat.completions.create(
            model=model[1],
            messages=[{"role": "user", "content": PROMPT}],
            temperature=0,
            extra_body={"generation_config": config},
        )
        assert answer.choices[0].message.content == expected(f"{PROMPT}\n", K)


def test_what_it_does_not_understand_is_refused(post):
    """A field of its own for the budget, and a budget out of range: the reason is in the log, or in the stream."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        post("/v1/completions", prompt=PROMPT, spectral_budget=2)
    assert refused.value.code == 422 and "spectral_budget" in refused.value.read().decode()
    with pytest.raises(urllib.error.HTTPError) as refused:
        post("/v1/completions", 33, prompt=PROMPT)
    assert refused.value.code == 500
    answer = post("/v1/completions", 33, prompt=PROMPT, stream=True)
    assert "spectral_budget must be an integer in [1, 32], got 33" in answer


def test_chat_in_the_terminal(server, model, expected):
    """A budget as a flag, another one typed in; the conversation so far is the prompt."""
    typed = f"{PROMPT}\nn\n!set spectral_budget={BUDGETS[1]}\n!clear\n{PROMPT}\nn\n!exit\n"
    flags = [f"spectral_budget={BUDGETS[0]}", f"max_new_tokens={TOKENS}", "do_sample=False"]
    command = [sys.executable, str(SERVE), "chat", model[1], f"{server}/v1", *flags]
    # Offline, the client would refuse to speak to any server, this one too.
    env = environment(COLUMNS="200", HF_HUB_OFFLINE="0")
    run = subprocess.run(command, env=env, input=typed, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-4000:]
    answers = [
        line.strip() for line in run.stdout.splitlines() if len(line.strip()) == TOKENS and line.strip().islower()
    ]
    assert answers == [expected(f"{PROMPT}\n", K) for K in BUDGETS[:2]]
