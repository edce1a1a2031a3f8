# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A run to publish, and essm-push here or in a child process against `hub_server.FakeHub`.

The client is told where the Hub is by HF_ENDPOINT, as a mirror's user would. HF_HUB_DISABLE_XET=1 because a client
with hf_xet uploads large files through xet only, which the server does not offer.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import FakeHub
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from essm_train.arguments import parse_arguments
from essm_train.publish.arguments import PushArguments
from essm_train.publish.run_card import push_run

REPO = "essm-tests/elastic"
SWEEP = {
    "budgets": [2, 8, 32],
    "bits_per_byte": [2.75, 2.55, 2.5],
    "tokens_per_second": [9000.0, 5000.4, 2000.0],
    "sweet_spot": 8,
    "collapse_boundary": 2,
    "block_size": 512,
    "blocks": 128,
    "threads": 2,
    "torch": "2.13.0",
    "model": "/home/somebody/runs/x/model",
}
TRAINING = {
    "script": "essm-train-clm",
    "data": "A | tiny corpus",
    "updates": 600,
    "tokens_per_update": 2048,
    "schedule": "discrete",
    "hardware": "2 cores of an AMD EPYC",
    "arguments": {"learning_rate": 0.005, "train_file": ["/home/somebody/book.txt"], "hub_token": "hf_secret"},
}
PICTURE = b"\x89PNG\r\n\x1a\n\0not really"


def environment(hub: FakeHub | str, home: Path, token: str | None = "hf_writer") -> dict[str, str]:
    """A machine that knows nothing but the server and, perhaps, a token."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING")) and "proxy" not in k.lower()}
    kept |= {"HF_ENDPOINT": hub if isinstance(hub, str) else hub.url, "HF_HOME": str(home / "hf_home")}
    kept |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    kept |= {"OMP_NUM_THREADS": "1"} | ({"HF_TOKEN": token} if token else {})
    return kept


@contextlib.contextmanager
def machine(hub: FakeHub | str, home: Path, token: str | None = "hf_writer") -> Iterator[None]:
    """This process on such a machine: the client reads most of its environment when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub if isinstance(hub, str) else hub.url)
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "no-token"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.delenv("HF_TOKEN", raising=False)
        if token:
            patch.setenv("HF_TOKEN", token)
        yield


def push(hub, run: Path, *arguments: str, repo: str = REPO, token: str | None = "hf_writer") -> str | None:
    """essm-push in this process; the revision, or what it raises."""
    given = ["--run", str(run), "--hub_model_id", repo, *map(str, arguments)]
    with machine(hub, run.parent, token):
        return push_run(parse_arguments(PushArguments, given))


def push_fails(hub, run: Path, *arguments: str, **options) -> str:
    """What it says, which is one line to a user."""
    with pytest.raises((ValueError, OSError)) as error:
        push(hub, run, *arguments, **options)
    return str(error.value)


def start(hub, run: Path) -> subprocess.Popen:
    """essm-push in a process of its own, which may be killed."""
    command = [sys.executable, "-m", "essm_train.push", "--run", str(run), "--hub_model_id", REPO]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment(hub, run.parent), cwd=run.parent, **pipes)


def shas(hub: FakeHub, repo: str = REPO) -> list[str]:
    return [sha for sha, _, _ in hub.repositories[repo].commits]


def change_weights(run: Path) -> None:
    path = run / "model" / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
