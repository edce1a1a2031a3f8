# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What does text longer than in training do to a byte-level model, with filters as long as its blocks or longer?

    python -m benchmarks.length_extrapolation --training_length 512 --text_files held_out.txt \\
        --models equal=runs/h512-s0/model,runs/h512-s1/model above=runs/h4096-s0/model,runs/h4096-s1/model

Windows of 8 times the training length are predicted in blocks of 1, 2, 4 and 8 times that length: bits per byte by
context, and in the longest blocks by position, one figure per training length. Beyond `filter_length` the recurrence
("chunked") goes on with what its states hold, while the convolution ("fft", the paper's) forgets; models of short
filters are measured with both. Several models of one name are seeds: mean and standard deviation (n - 1).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from essm_train.data.blocks import evaluation_blocks, to_stream
from essm_train.data.documents import read_files
from essm_train.data.tokens import ByteEncoder
from modeling_essm import ESSMConfig, ESSMForCausalLM

from . import common
from .sweeps import mean

MULTIPLES = (1, 2, 4, 8)


@torch.inference_mode()
def bits_by_position(model: Any, windows: Tensor, length: int, budget: int) -> Tensor:
    """(blocks, length) bits of every byte of the windows, predicted in blocks of that length."""
    blocks, bits = (x.reshape(-1, length).split(max(1, 8192 // length)) for x in (windows[:, :-1], windows[:, 1:])), []
    for ids, wanted in zip(*blocks):
        logits = model(ids.to(model.device), use_cache=False, spectral_budget=budget).logits.float()
        bits.append(F.cross_entropy(logits.flatten(0, 1), wanted.flatten().to(logits.device), reduction="none"))
    return torch.cat(bits).view(-1, length).cpu() / math.log(2)


def measure(model: Any, windows: Tensor, length: int, budgets: list[int]) -> dict[str, dict[int, list[float]]]:
    """Bits per byte of one model: by_context {K: [one per multiple]}, by_position {K: [one per training length]}."""
    found: dict[str, dict[int, list[float]]] = {"by_context": {}, "by_position": {}}
    for K in budgets:
        bits = [bits_by_position(model, windows, multiple * length, K) for multiple in MULTIPLES]
        found["by_context"][K] = [float(each.mean()) for each in bits]
        found["by_position"][K] = bits[-1].view(-1, MULTIPLES[-1], length).mean((0, 2)).tolist()
    return found


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    p.add_argument("--models", nargs="+", required=True, help="name=folder[,folder of another seed ...]")
    p.add_argument("--text_files", nargs="+", required=True, help="held-out text")
    p.add_argument("--training_length", type=int, required=True, help="block_size of the training, in bytes")
    p.add_argument("--budgets", type=int, nargs="+", default=[4, 32])
    p.add_argument("--windows", type=int, default=48)
    args = p.parse_args(argv)
    if wrong := [entry for entry in args.models if "=" not in entry]:
        p.error(f"--models takes name=folder, got {wrong[0]!r}")
    length = args.training_length
    stream, _ = to_stream(read_files(args.text_files), ByteEncoder())
    longest = MULTIPLES[-1] * length
    whole = (len(stream) - 1) // longest * longest
    if not whole:
        raise ValueError(f"the text must hold more than {longest} tokens, got {len(stream)}")
    windows = evaluation_blocks(stream[: whole + 1], longest + 1, 2 if args.quick else args.windows)
    settings = {"training_length": length, "windows": len(windows), "budgets": args.budgets}
    device, report = common.start("length_extrapolation", args, **settings)
    report["results"] = []
    for name, _, joined in (entry.partition("=") for entry in args.models):
        folders = joined.split(",")
        filter_length = ESSMConfig.from_pretrained(folders[0]).filter_length
        # Filters as long as the longest blocks make both algorithms the same up to rounding.
        for algorithm in ("chunked", "fft") if filter_length < longest else ("chunked",):
            runs = []
            for folder in folders:
                model = ESSMForCausalLM.from_pretrained(folder, spectral_algorithm=algorithm)
                runs.append(measure(model.eval().to(device), windows, length, args.budgets))
            result = {"name": name, "algorithm": algorithm, "filter_length": filter_length, "seeds": len(runs)}
            for key, first in runs[0].items():  # over seeds, of every entry
                result[key] = {K: [mean(values) for values in zip(*(run[key][K] for run in runs))] for K in first}
            report["results"].append(result)
    return common.finish(report, args)


if __name__ == "__main__":
    main()
