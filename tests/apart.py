# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Processes of their own that need not import anything first: they are forked from a server that has."""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

context = multiprocessing.get_context("forkserver")  # its server imports everything once
context.set_forkserver_preload(["training_run"])


def start(function, arguments: tuple) -> multiprocessing.Process:
    """A started process that calls a function of a module's top level."""
    process = context.Process(target=function, args=arguments)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # for the server, when it starts
        process.start()
    return process


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def redirect(path: Path, *descriptors: int) -> None:
    """What this process writes there goes to the end of a file."""
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in descriptors:
        os.dup2(target, descriptor)


def run_script(
    script: str | Path, *arguments: str, cwd: str | Path | None = None, stdin: bytes = b"", timeout: float = 300
) -> subprocess.CompletedProcess:
    """`python script arguments`, or `python -m` of a module of essm_train, offline on one thread; what it wrote.

    For what a script does, not for what it imports: torch, transformers and this project are there before it begins.

    Raises:
        subprocess.TimeoutExpired: it was killed after that many seconds.
    """
    command = [str(script), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        process = start(_script, (command, Path(folder), str(cwd or Path.cwd()), stdin))
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout)
        out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess(command, process.exitcode, out, err)


def _script(command: list[str], folder: Path, cwd: str, stdin: bytes) -> None:
    import huggingface_hub.constants
    import torch

    redirect(folder / "out", 1)
    redirect(folder / "err", 2)
    (folder / "in").write_bytes(stdin)
    os.dup2(os.open(folder / "in", os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0, closefd=False)
    torch.set_num_threads(1)
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # read from the environment when it was imported
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    os.chdir(cwd)
    sys.argv = command
    if command[0].startswith("essm_train."):
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        return
    pytest.MonkeyPatch().syspath_prepend(Path(command[0]).resolve().parent)  # as `python script` does
    runpy.run_path(command[0], run_name="__main__")
