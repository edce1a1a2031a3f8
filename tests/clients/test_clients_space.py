# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The page of examples/space on its own server, as gradio's client drives it."""

import os
import subprocess
import sys

import huggingface_hub
import pytest
import torch
from helpers import ROOT
from transformers import AutoTokenizer

from modeling_essm import ESSMForCausalLM

pytestmark = pytest.mark.slow
gradio, gradio_client = pytest.importorskip("gradio"), pytest.importorskip("gradio_client")

SPACE, MODEL = ROOT / "examples/space", ROOT / "hub_configs/essm-novels-6m"
PROMPT, TOKENS = "She looked at him, and", 80


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Of a page that was started without arguments, and so shows the released model."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "GRADIO_ANALYTICS_ENABLED": "False", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(SPACE / "app.py")]
    log = tmp_path_factory.mktemp("space") / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as server,
    ):
        try:
            address = next((line.split()[-1] for line in server.stdout if "http://" in line), None)
            assert address, log.read_text()
            yield gradio_client.Client(address, verbose=False)
        finally:
            server.kill()


@pytest.fixture(scope="module")
def model():
    return ESSMForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def continued(model, **budget) -> tuple[str, int]:
    """The greedy continuation and the bytes of state."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    options = {"max_new_tokens": TOKENS, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(**inputs, **options, **budget)
    text = tokenizer.decode(output.sequences[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return text, output.past_key_values.num_bytes


def test_sizes_write_side_by_side(client, model):
    sizes = ["small", "3", "full"]
    shown = list(client.submit(PROMPT, *sizes, TOKENS, 0, 0, api_name="/compare"))
    for size, text, figures in zip(sizes, shown[-1][:3], shown[-1][3:]):
        budget = int(size) if size.isdigit() else size
        expected, state = continued(model, spectral_budget=budget)
        assert text == expected
        assert f"{model.num_active_parameters(budget) / 1e6:.2f}M" in figures
        assert f"{state / 1e3:.0f} kB" in figures
    assert len(shown) > 1 and all(texts[i] == shown[-1][i][: len(texts[i])] for texts in shown for i in range(3))


def test_the_budget_follows_a_deadline(client, model):
    """Whatever budgets the machine's load made it choose, each piece is what its budget writes there."""
    *_, (pieces, figures) = client.submit(PROMPT, 5, TOKENS, 0, 0, api_name="/keep_deadline")
    budgets = [int(piece["class_or_confidence"].split()[-1]) for piece in pieces for _ in piece["token"]]
    assert "".join(piece["token"] for piece in pieces) == continued(model, step_budgets=budgets)[0]
    assert "ms a token" in figures


def test_the_hub_runs_the_version_that_is_tested():
    about = huggingface_hub.metadata_load(SPACE / "README.md")
    assert about["sdk_version"] == gradio.__version__ and (SPACE / about["app_file"]).is_file()
