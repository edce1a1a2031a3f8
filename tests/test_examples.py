# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Every example runs offline from end to end and is short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import random_model

from modeling_essm import build_byte_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, *arguments: str) -> str:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_any_budget(tmp_path):
    random_model().save_pretrained(tmp_path)
    build_byte_tokenizer().save_pretrained(tmp_path)
    output = run_example("any_budget.py", str(tmp_path), "import ")
    state_bytes = [int(line.split()[4].replace(",", "")) for line in output.splitlines() if "bytes of state" in line]
    assert len(state_bytes) == 3
    assert state_bytes == sorted(set(state_bytes))  # a larger budget carries a larger state


def test_classify_signals():
    lines = run_example("classify_signals.py", "3").splitlines()
    assert [line.split(":")[0] for line in lines] == ["K =  2", "K =  4", "K =  8", "K = 16"]


def test_finetune_with_trainer():
    before, after = run_example("finetune_with_trainer.py", "20").splitlines()[-2:]
    values = [[float(part.split()[0]) for part in line.split(":")[1].split(",")] for line in (before, after)]
    assert len(values[0]) == 3 and all(new < old - 1 for old, new in zip(*values))


@pytest.mark.parametrize("path", EXAMPLES.glob("*.py"), ids=lambda path: path.name)
def test_examples_stay_short(path):
    assert len(path.read_text().splitlines()) < 60
