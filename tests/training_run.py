# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Tiny training runs for the tests: in this process, or in one of their own that may be killed.

Whatever a test breaks or watches is patched in here; the scripts know nothing of it.
"""

import contextlib
import json
import math
import os
import random
import re
import resource
import signal
import wave
from pathlib import Path
from unittest import mock

import datasets
import numpy as np
import tokenizers
import torch
from apart import free_port, redirect, start
from datasets import Dataset
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import PreTrainedTokenizerFast

from essm_train.arguments import as_words, parse_arguments
from essm_train.data.arguments import ClassificationArguments, CLMArguments
from essm_train.data.classification import load_classification
from essm_train.run import checkpoints, language, loop, weights
from essm_train.run.checkpoints import list_checkpoints
from essm_train.run.classifier import train_classifier
from essm_train.run.weights import local
from modeling_essm.training.budget_dropout import BudgetSchedule

BLOCK = 32

# A checkpoint after updates 3, 6 and 8. Dropout makes the random states matter, the average its own state.
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_spectral_channels": 8, "filter_length": 512, "dropout": 0.1}
SHORT = {"max_steps": 8, "warmup_steps": 2, "eval_steps": 4, "save_steps": 3, "logging_steps": 1}
SHORT |= {"cpu_threads": 1}  # more would wait for each other
OF_TEXT = {"block_size": BLOCK, "per_device_train_batch_size": 2, "validation_blocks": 2, "sweep_blocks": 2}
TINY = SIZES | SHORT | OF_TEXT | {"ema_decay": 0.9}
NO_SIZES = dict.fromkeys(SIZES)
TINY_CLASSIFIER = SIZES | SHORT | {"max_length": 40, "per_device_train_batch_size": 4, "eval_batch_size": 8}
TINY_CLASSIFIER |= {"learning_rate": 0.01}
ONCE = NO_SIZES | {"max_length": None, "max_steps": 1, "learning_rate": 0.0}  # one update that changes nothing


def command_line(output_dir: Path, **changes) -> list[str]:
    """Arguments of a tiny run in that folder; None leaves one out."""
    return options(CLMArguments, {**TINY, "output_dir": output_dir} | changes)


def options(cls: type, values: dict) -> list[str]:
    """Values as options of a command, fields of the configuration among its overrides; None leaves one out."""
    return as_words(cls, {name: value for name, value in values.items() if value is not None})


@contextlib.contextmanager
def only_training():
    """Without what follows it."""
    with contextlib.ExitStack() as patches:
        sweep = mock.Mock(**{"table.return_value": ""})
        patches.enter_context(mock.patch.object(loop, "sweep_budgets", return_value=sweep))
        for module, name in ((loop, "save_sweep"), (loop, "write_card_and_push"), (language, "show_samples")):
            patches.enter_context(mock.patch.object(module, name))
        yield


def train(arguments: list[str], whole: bool = False) -> None:
    """Run essm-train-clm, by default without what follows the training."""
    with contextlib.nullcontext() if whole else only_training():
        language.train_language_model(parse_arguments(CLMArguments, arguments))


FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
FSDP2 |= {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
NUM_BLOCKS = 24


def train_classes(arguments: list[str], whole: bool = False) -> None:
    """Run essm-train-classification, by default without what follows the training."""
    with contextlib.nullcontext() if whole else only_training():
        train_classifier(parse_arguments(ClassificationArguments, arguments))


def load_classes(arguments: list[str], label_names: list[str] | None = None):
    """Its data, with the classes of weights in that order."""
    return load_classification(parse_arguments(ClassificationArguments, arguments), label_names)


def documents() -> list[str]:
    """Random words, 24 rows between 0 and 80 letters: no row ends where a block does, and one rest fills no block."""
    source, rows = random.Random(0), []
    wanted = NUM_BLOCKS * (BLOCK - 1) + 10
    while wanted > 100:
        rows.append("".join(source.choices("abcdefgh ", k=source.randrange(80))))
        wanted -= len(rows[-1]) + 1 if rows[-1] else 0  # and <eos>; empty rows are left out
    return [*rows, "".join(source.choices("abcdefgh ", k=wanted - 1))]


def write_tables(folder: Path) -> list[str]:
    """The documents as three parquet files with row groups of two."""
    rows, paths = documents(), []
    size = math.ceil(len(rows) / 3)
    for i in range(3):
        path = folder / f"part-{i}.parquet"
        Dataset.from_dict({"text": rows[i * size : (i + 1) * size]}).to_parquet(path, batch_size=2)
        paths.append(str(path))
    return paths


def write_text(folder: Path) -> str:
    """As many blocks as one document."""
    path = folder / "words.txt"
    path.write_text("".join(random.Random(1).choices("abcdefgh ", k=NUM_BLOCKS * (BLOCK - 1))))
    return str(path)


def write_held_out(folder: Path) -> str:
    path = folder / "held_out.txt"
    path.write_text("".join(random.Random(2).choices("abcdefgh ", k=100)))
    return str(path)


def texts(count: int, seed: int) -> dict[str, list]:
    """Of class 1 if three quarters of the bytes are "a", of class 0 if a quarter is; 20 to 48 bytes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(2, size=count)
    rows = ["".join(rng.choice(["a", "ü"], rng.integers(16, 40), p=[p, 1 - p])) for p in 0.25 + 0.5 * labels]
    return {"text": rows, "label": labels.tolist()}


def signals(count: int, seed: int) -> dict[str, list]:
    """24 numbers in [0, 255] about one of three means."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=count)
    return {"pixels": (rng.integers(0, 90, (count, 24)) + 80 * labels[:, None]).tolist(), "label": labels.tolist()}


PIXELS = {"pixels": datasets.List(datasets.Value("uint8")), "label": datasets.Value("int64")}


def write(folder: Path, name: str, columns: dict[str, list], features: dict | None = None) -> str:
    """A parquet, jsonl or csv file; its path."""
    path = folder / name
    table = Dataset.from_dict(columns, features=None if features is None else datasets.Features(features))
    {".parquet": table.to_parquet, ".jsonl": table.to_json, ".csv": table.to_csv}[path.suffix](path)
    return str(path)


def write_wav(path: Path, samples: np.ndarray, rate: int = 16000, channels: int = 1) -> None:
    """Numbers in [-1, 1], in 16 bits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, 2, rate, 0, "NONE", ""))
        file.writeframes((samples * 32767).astype("<i2").tobytes())


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def bpe_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 300 tokens, trained on the texts; its end-of-text token has the last id."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=299, show_progress=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer)
    fast.add_special_tokens({"eos_token": "<|end|>"})
    return fast


def tensors(state) -> list[torch.Tensor]:
    """All tensors in nested containers, numbers among them."""
    if isinstance(state, dict):
        return [t for value in state.values() for t in tensors(value)]
    if isinstance(state, (list, tuple)):
        return [t for value in state for t in tensors(value)]
    return [torch.as_tensor(state)] if isinstance(state, (torch.Tensor, int, float, np.ndarray)) else []


def final_state(output_dir: Path) -> list[torch.Tensor]:
    """Weights, optimizer, learning rate and average of the last checkpoint, and the weights of the saved model."""
    checkpoint = list_checkpoints(output_dir)[-1]
    found = [torch.load(checkpoint / "custom_checkpoint_0.pkl"), model_weights(output_dir / "model")]
    found += [torch.load(path) for path in sorted(checkpoint.glob("average*.pt"))]
    for name in ("pytorch_model", "optimizer"):
        path = checkpoint / f"{name}.bin"
        if not path.exists():  # shards, merged here
            (shards,) = (folder for folder in checkpoint.iterdir() if folder.is_dir() and folder.name.startswith(name))
            path = output_dir / f"merged-{name}"
            dcp_to_torch_save(shards, path)
        found.append(torch.load(path))
    return tensors(found)


def model_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: Path, b: Path) -> bool:
    """Bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(final_state(a), final_state(b), strict=True))


def read_log(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "log.jsonl").read_text().splitlines()]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def flip(path: Path) -> None:
    """One bit of a file changes."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def kill_at_update(update: int) -> None:
    """The process dies when so many updates are done and the next begins."""
    call = BudgetSchedule.__call__
    BudgetSchedule.__call__ = lambda self, done: die() if done == update else call(self, done)


def break_weight_at_update(update: int, rank: int) -> None:
    """On that rank alone, the step of that update leaves a NaN in a weight, after a loss and a gradient without."""
    step, done = torch.optim.AdamW.step, []

    def broken(self, *args, **kwargs):
        result = step(self, *args, **kwargs)
        done.append(1)
        if len(done) == update and os.environ["RANK"] == str(rank):
            local(self.param_groups[0]["params"][0]).data.view(-1)[0] = math.nan
        return result

    torch.optim.AdamW.step = broken


def kill_in_file(path: str) -> None:
    """The process dies when half of the file whose path ends like this is written."""
    save = torch.save

    def half(state, file, *args, **kwargs):
        save(state, file, *args, **kwargs)
        if str(file).endswith(path):
            os.truncate(file, os.path.getsize(file) // 2)
            die()

    torch.save = half


def kill_at_rename(path: str) -> None:
    """The process dies when the complete folder should get the name that ends like this pattern."""
    rename = os.replace
    os.replace = lambda source, target: die() if re.search(f"{path}$", str(target)) else rename(source, target)


def full_disk_at(name: str) -> None:
    """While the folder of that name is written no file grows beyond 4 KiB: a real error of the operating system."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    publishing = checkpoints.publishing

    @contextlib.contextmanager
    def limited(accelerator, path):
        with publishing(accelerator, path) as temporary:
            if path.name == name:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            try:
                yield temporary
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    checkpoints.publishing = weights.publishing = limited


def _apart(command, arguments: list[str], log: Path, fault: tuple | None, environment: dict[str, str]) -> None:
    redirect(log, 1, 2)
    os.environ.update(environment)
    if fault is not None:
        globals()[fault[0]](*fault[1:])
    command(arguments)


def train_apart(
    arguments,
    folder: Path,
    fault: tuple | None = None,
    ranks: int = 1,
    environment: dict[str, str] | None = None,
    command=train,
) -> tuple[list[int | None], str]:
    """`train`, or another command, in as many processes of its own.

    Args:
        folder: where `log` goes. fault: name of a function above, and its argument.
        environment: set in those processes, beside what `torchrun` sets.
    Returns:
        The exit code of every process (-9: killed), and what they wrote.
    """
    log = folder / "log"
    log.unlink(missing_ok=True)
    environment = dict(environment or {})
    if ranks > 1:
        environment |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    processes = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        processes.append(start(_apart, (command, arguments, log, fault, environment | own)))
    for process in processes:
        process.join()
    return [process.exitcode for process in processes], log.read_text()
