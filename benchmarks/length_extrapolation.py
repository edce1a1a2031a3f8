# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What does text longer than in training do to a byte-level model, with filters as long as its blocks or longer?

    python -m benchmarks.length_extrapolation --training_length 512 --text_files held_out.txt \\
        --models equal=runs/h512-s0/model,runs/h512-s1/model above=runs/h4096-s0/model,runs/h4096-s1/model

A window has 8 times the training length. Its bytes are predicted in blocks of 1, 2, 4 and 8 times that
length, each block from its own start: bits per byte by context. In the longest blocks bits per byte are also given by
position, one figure per training length. Beyond `filter_length` the recurrence ("chunked") goes on with what its
states hold, while the convolution ("fft", the paper's) forgets; models of short filters are measured with both.
Several models of one name are seeds: mean and standard deviation (n - 1).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from essm_train.arguments import TRUST_HELP
from essm_train.data.blocks import to_stream
from essm_train.data.documents import read_files
from essm_train.data.tokens import ByteEncoder
from essm_train.models import load_model

from . import common
from .sweeps import mean

MULTIPLES = (1, 2, 4, 8)


def windows_of(stream: np.ndarray, length: int, count: int) -> Tensor:
    """(n, length + 1) int64: at most `count` windows spread evenly over the stream, each with a first byte of context.

    Raises:
        ValueError: the stream is shorter than one window.
    """
    available = (len(stream) - 1) // length
    if available < 1:
        raise ValueError(f"the text must hold more than {length} tokens, got {len(stream)}")
    starts = np.linspace(0, available - 1, min(count, available)).round().astype(int) * length
    return torch.from_numpy(np.stack([stream[a : a + length + 1] for a in starts]).astype(np.int64))


@torch.inference_mode()
def bits_by_position(model: PreTrainedModel, windows: Tensor, length: int, budget: int) -> Tensor:
    """(blocks, length) bits of every byte of the windows, predicted in blocks of that length."""
    inputs = windows[:, :-1].reshape(-1, length)
    targets = windows[:, 1:].reshape(-1, length)
    bits = []
    for ids, wanted in zip(inputs.split(max(1, 8192 // length)), targets.split(max(1, 8192 // length))):
        logits = model(ids.to(model.device), use_cache=False, spectral_budget=budget).logits.float()
        bits.append(F.cross_entropy(logits.flatten(0, 1), wanted.flatten().to(logits.device), reduction="none"))
    return torch.cat(bits).view(-1, length).cpu() / math.log(2)


def measure(
    path: str,
    algorithm: str,
    windows: Tensor,
    length: int,
    budgets: list[int],
    device: torch.device,
    trust_remote_code: bool = False,
) -> dict:
    """Bits per byte of one model: by_context {K: [one per multiple]}, by_position {K: [one per training length]}."""
    trusted = {"trust_remote_code": trust_remote_code}
    model = load_model(AutoModelForCausalLM, path, **trusted, spectral_algorithm=algorithm)
    model.eval().to(device)
    by_context: dict[int, list[float]] = {K: [] for K in budgets}
    by_position: dict[int, list[float]] = {}
    for K in budgets:
        for multiple in MULTIPLES:
            bits = bits_by_position(model, windows, multiple * length, K)
            by_context[K].append(float(bits.mean()))
        by_position[K] = bits.view(-1, MULTIPLES[-1], length).mean((0, 2)).tolist()
    return {"by_context": by_context, "by_position": by_position}


def summarise(runs: list[dict], key: str) -> dict[int, list[dict[str, float]]]:
    """Mean and standard deviation over seeds, of every entry."""
    return {K: [mean(values) for values in zip(*(run[key][K] for run in runs))] for K in runs[0][key]}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    p.add_argument("--models", nargs="+", required=True, help="name=folder[,folder of another seed ...]")
    p.add_argument("--text_files", nargs="+", required=True, help="held-out text")
    p.add_argument("--training_length", type=int, required=True, help="block_size of the training, in bytes")
    p.add_argument("--budgets", type=int, nargs="+", default=[4, 32])
    p.add_argument("--windows", type=int, default=48)
    p.add_argument("--trust_remote_code", action="store_true", help=TRUST_HELP)
    args = p.parse_args(argv)
    groups = {}
    for entry in args.models:
        name, separator, folders = entry.partition("=")
        if not separator:
            p.error(f"--models takes name=folder, got {entry!r}")
        groups[name] = folders.split(",")
    length, count = args.training_length, 2 if args.quick else args.windows
    stream, _ = to_stream(read_files(args.text_files), ByteEncoder())
    windows = windows_of(stream, MULTIPLES[-1] * length, count)
    settings = {"training_length": length, "windows": len(windows), "budgets": args.budgets}
    device, report = common.start("length_extrapolation", args, **settings)
    report["results"] = []
    for name, folders in groups.items():
        longest = load_model(AutoConfig, folders[0], trust_remote_code=args.trust_remote_code).filter_length
        # Filters as long as the longest blocks make both algorithms the same up to rounding.
        for algorithm in ("chunked", "fft") if longest < MULTIPLES[-1] * length else ("chunked",):
            measured = (windows, length, args.budgets, device, args.trust_remote_code)
            runs = [measure(folder, algorithm, *measured) for folder in folders]
            result = {"name": name, "algorithm": algorithm, "filter_length": longest, "seeds": len(runs)}
            result |= {key: summarise(runs, key) for key in ("by_context", "by_position")}
            report["results"].append(result)
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
