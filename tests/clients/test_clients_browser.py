# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""examples/browser in a headless Chromium: it writes what the exported programs write, while the slider moves."""

import functools
import http.server
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request

import numpy as np
import pytest
from apart import free_port
from helpers import ROOT, VARIANTS, random_model

from essm_train.arguments import parse_arguments
from essm_train.publish.arguments import ExportArguments
from essm_train.publish.export import export
from modeling_essm import build_byte_tokenizer

pytestmark = pytest.mark.slow
onnxruntime = pytest.importorskip("onnxruntime")
PAGE, PROMPT = ROOT / "examples" / "browser", "Nárcis "
LONGEST = 64  # tokens that prefill reads at once
for needed, found in {
    "chromedriver and Chromium": shutil.which("chromedriver"),
    "onnxruntime-web beside the page, see docs/ship_many_sizes.md": (PAGE / "ort-wasm-simd-threaded.wasm").exists(),
}.items():
    if not found:
        pytest.skip(f"needs {needed}", allow_module_level=True)


class Browser:
    """As much of a WebDriver client as this file needs."""

    def __init__(self, address: str):
        self.address = address
        options = {"args": ["--headless=new", "--no-sandbox", "--window-size=900,900"]}
        body = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        self.address += f"/session/{self.call('POST', '/session', **body)['sessionId']}"

    def call(self, method: str, path: str, **body):
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(self.address + path, data, method=method)
        with urllib.request.urlopen(request, timeout=100) as answer:
            return json.load(answer)["value"]

    def run(self, script: str, *arguments):
        return self.call("POST", "/execute/sync", script=script, args=arguments)

    def protocol(self, command: str, **parameters):
        return self.call("POST", "/goog/cdp/execute", cmd=command, params=parameters)

    def text(self, name: str) -> str:
        return self.run("return document.getElementById(arguments[0]).textContent", name)

    def press(self, name: str, keys: str) -> None:
        (element,) = self.call("POST", "/element", using="css selector", value=f"#{name}").values()
        self.call("POST", f"/element/{element}/value", text=keys)

    def wait(self, status: str) -> None:
        until = time.monotonic() + 100
        while not self.text("status").startswith(status):
            assert time.monotonic() < until, self.text("status")
            time.sleep(0.05)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The page with a model beside it, and its address."""
    folder = tmp_path_factory.mktemp("browser")
    page = folder / "page"
    shutil.copytree(PAGE, page, ignore=shutil.ignore_patterns("model"))
    fields = VARIANTS["elastic"] | {"num_spectral_channels": 8, "num_hidden_layers": 1, "eos_token_id": None}
    fields |= {"hidden_size": 128, "head_size": 32, "filter_length": 1 << 16}  # the text must not end before the test
    model = random_model(**fields, budget_presets={"medium": 1, "full": 8})
    model.save_pretrained(folder / "model")
    build_byte_tokenizer().save_pretrained(folder / "model")
    arguments = ["--model", folder / "model", "--output_dir", page / "model", "--int8", "--max_length", LONGEST]
    export(parse_arguments(ExportArguments, [*map(str, arguments), "--spectral_budget", "1", "8"]))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(page))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield page / "model", f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()


@pytest.fixture
def browser(site):
    port = free_port()
    process = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with socket.socket() as driver:
                if not driver.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.05)
        browser = Browser(f"http://127.0.0.1:{port}")
        browser.call("POST", "/url", url=site[1])
        yield browser
        browser.call("DELETE", "")
    finally:
        process.terminate()
        process.wait()


@functools.cache
def opened(path):
    return onnxruntime.InferenceSession(path)


def greedy(folder, ids: list[int], budget: str, count: int, read_at: str | None = None) -> list[int]:
    """What follows ids by the exported programs; all but the last are read at another budget, and the states cut."""
    budgets = json.loads((folder / "export.json").read_text())["budgets"]

    def run(name: str, K: str, tokens: list[int], states: dict, **inputs):
        session = opened(folder / budgets[K][name]["file"])
        logits, *new = session.run(None, {"input_ids": np.array([tokens]), **inputs, **states})
        return int(logits.argmax()), dict(zip(states, new))

    def shapes(K: str) -> dict:
        return {x["name"]: x["shape"][1:] for x in budgets[K]["step"]["inputs"] if x["name"].startswith("past.")}

    K = read_at or budget
    states = {name: np.zeros((1, *shape), "float32") for name, shape in shapes(K).items()}
    for start in range(0, len(ids) - 1, LONGEST):
        piece = ids[start : min(start + LONGEST, len(ids) - 1)]
        _, states = run("prefill", K, piece, states, attention_mask=np.ones((1, len(piece)), "int64"))
    states = {name: states[name][:, :n, :m] for name, (n, m) in shapes(budget).items()}
    written = ids[-1:]
    for _ in range(count):
        token, states = run("step", budget, written[-1:], states)
        written.append(token)
    return written[1:]


def test_it_writes_the_models_greedy_text_while_the_slider_moves(site, browser):
    folder, _ = site
    browser.wait("Ready")
    assert browser.text("size") == "medium 1 of 8 channels"
    browser.run("document.getElementById('prompt').value = arguments[0]", PROMPT)
    browser.run(
        """const [budgets, count] = arguments;
        const [slider, text, button] = ["budget", "text", "write"].map((name) => document.getElementById(name));
        new MutationObserver(() => {
          const written = [...text.querySelectorAll("span")];
          if (Number(written.at(-1)?.dataset.count ?? 0) < count) return;
          if (written.length > budgets.length) return button.textContent === "Stop" && button.click();
          slider.value = budgets[written.length - 1];
          slider.dispatchEvent(new Event("input"));
        }).observe(text, { childList: true, subtree: true, characterData: true });""",
        [1, 0, 1],
        20,
    )
    browser.press("write", "\ue007")
    browser.wait("Stopped")
    spans = "[...document.querySelectorAll('#text span')]"
    parts = browser.run(f"return {spans}.map(({{ dataset }}) => [dataset.budget, Number(dataset.count)])")
    assert [budget for budget, _ in parts] == ["1", "8", "1", "8"]
    ids, start = list(PROMPT.encode()), len(PROMPT.encode())
    for i, (budget, count) in enumerate(parts):
        fell = i and int(budget) < int(parts[i - 1][0])
        ids += greedy(folder, ids, budget, count, parts[i - 1][0] if fell else None)
    expected = bytes(token for token in ids[start:] if token < 256).decode(errors="replace")
    assert len(set(expected)) > 5
    assert browser.text("text") == PROMPT + expected


def test_keys_move_the_slider_and_a_screen_reader_finds_every_control(browser):
    browser.wait("Ready")
    small = browser.text("state")
    browser.press("budget", "\ue014")  # arrow right
    assert browser.text("size") == "full 8 of 8 channels" and browser.text("state") != small
    nodes = browser.protocol("Accessibility.getFullAXTree")["nodes"]
    named = {(node["role"]["value"], node.get("name", {}).get("value")) for node in nodes if not node["ignored"]}
    assert {("slider", "Size"), ("slider", "Temperature"), ("textbox", "Begin with"), ("button", "Write")} <= named
    assert {("region", "Text"), ("status", "")} <= named


@pytest.mark.parametrize("width", [320, 375, 1200])
def test_nothing_is_wider_than_the_screen(browser, width):
    browser.wait("Ready")
    browser.protocol("Emulation.setDeviceMetricsOverride", width=width, height=700, deviceScaleFactor=1, mobile=True)
    assert browser.run("return document.documentElement.scrollWidth") == width


@pytest.mark.parametrize(
    ("export", "told"),
    [(None, "model/export.json: 404"), ('{"weights": null, "budgets": {}}', "model/export.json: this page")],
)
def test_what_is_no_model_for_the_page_is_named(site, browser, export, told):
    (site[0] / "export.json").rename(site[0] / "away.json")
    try:
        if export:
            (site[0] / "export.json").write_text(export)
        browser.call("POST", "/refresh")
        browser.wait(told)
    finally:
        (site[0] / "away.json").replace(site[0] / "export.json")
