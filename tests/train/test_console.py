# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/console.py: errors that a user can mend are one line, others keep their traceback."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import HFValidationError
from torch.distributed import DistBackendError

from essm_train import console
from essm_train.console import Failed, run_script


@pytest.mark.parametrize(("given", "found"), [({}, "10000"), ({"GOMP_SPINCOUNT": "5"}, "5")])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(given, found):
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"} | given
    code = "import os, essm_train.console; print(os.environ['GOMP_SPINCOUNT'])"
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == found, run.stderr


def fail(error: BaseException):
    def main() -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("K must be\n  at least 1"), "error: K must be at least 1\n"),
        (FloatingPointError("update 3: loss is nan"), "error: update 3: loss is nan\n"),
        (FileNotFoundError("no such file"), "error: no such file\n"),
        (ValueError(), "error: ValueError\n"),
        (
            HFValidationError("Repo id: 'a/b/c'"),
            "error: there is no such folder, and no such name on the Hub: Repo id: ",
        ),
        (Failed("the run ended with 1"), "error: the run ended with 1\n"),
        (
            ModuleNotFoundError("..", name="x"),
            "error: x is not installed, this command needs pip install 'modeling-essm[train]'",
        ),
        (
            ModuleNotFoundError("..", name="onnx.ir"),
            "error: onnx.ir is not installed, this command needs pip install 'modeling-essm[export]'",
        ),
        (RuntimeError("[x/gloo/y.cc:1] Connection closed"), "error: lost another process of this run: [x/gloo/y.cc:1]"),
        (DistBackendError("NCCL error"), "error: lost another process of this run: NCCL error\n"),
    ],
    ids=repr,
)
def test_what_a_user_can_mend_is_one_line(error, said, capsys):
    with pytest.raises(SystemExit) as left:
        run_script(fail(error))
    out = capsys.readouterr()
    assert left.value.code == 1 and out.err.startswith(said) and out.err.count("\n") == 1 and not out.out


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), KeyError("name"), SystemExit(3)], ids=repr)
def test_other_errors_keep_their_traceback(error):
    with pytest.raises(type(error)) as left:
        run_script(fail(error))
    assert left.value is error


def test_development_mode_keeps_tracebacks(monkeypatch):
    monkeypatch.setattr(
        console, "sys", SimpleNamespace(flags=SimpleNamespace(dev_mode=True), modules={}, stdout=None, stderr=None)
    )
    with pytest.raises(ValueError, match="K must be"):
        run_script(fail(ValueError("K must be at least 1")))


def test_only_the_first_rank_reports_wrong_arguments(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as left:
        run_script(fail(ValueError("K must be at least 1")))
    assert left.value.code == 1 and not capsys.readouterr().err
