# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What does a budget cost, beside the capacity: weights, state, a token, a prompt, an update, and loading?

    python -m benchmarks.budget_cost --config hub_configs/essm-elastic-21m      both tables, a file for each
    python -m benchmarks.budget_cost --table loading                            1.4 GB of the paper's block

compute  One thread, batch 1, fp32, random weights. Parameters that a call reads, bytes of its cache, and seconds of a
         decoded token (eager, greedy, after 1,024 others), of reading a prompt, and of an update: forward, backward and
         AdamW. In every round all budgets take turns; "over" are ratios to the capacity within rounds.
loading  `from_pretrained(folder, spectral_capacity=K)` in a process of its own, which first imports everything and
         drops the checkpoint's pages from the page cache. Bytes are those that the disk delivered, read-ahead included;
         memory is the peak resident set above the one before the load. The small model's logits must be the large
         one's at that budget. "whole" is an ordinary load; int8 has torchao's weights of linear layers. Linux only.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchao.quantization import Int8WeightOnlyConfig
from transformers import TorchAoConfig

from essm_train.measure.timing import decoder
from modeling_essm import ESSMForCausalLM
from modeling_essm.training.budget_dropout import clip_budgets

from . import common
from .decoding import prefill
from .training_step import make_step

BUDGETS = (1, 2, 4, 8, 16, 32)
CONTEXT = 1024  # tokens before a decoded one

# Sums of up to 4096 fp32 terms, in an order that another number of threads changes: sqrt(4096) eps of logits below 1. A
# channel more or less shows from 1.6e-5 on, two budgets that are compared differ by 5e-3.
ROUNDING = 1e-5

_LOAD = """
import json, os, re, resource, sys, time
import torch
from modeling_essm import ESSMForCausalLM
folder, K = sys.argv[1], json.loads(sys.argv[2])
for name in os.listdir(folder):
    with open(os.path.join(folder, name), "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
def read_bytes():
    return int(re.search(r"^read_bytes: (\\d+)", open("/proc/self/io", encoding="utf-8").read(), re.M)[1])
def resident(name):
    return 1024 * int(re.search(rf"^{name}:\\s+(\\d+) kB", open("/proc/self/status", encoding="utf-8").read(), re.M)[1])
with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
    file.write("5")  # the peak starts from here
memory, read, start = resident("VmRSS"), read_bytes(), time.perf_counter()
model = ESSMForCausalLM.from_pretrained(folder, **({} if K is None else {"spectral_capacity": K}))
seconds, read, memory = time.perf_counter() - start, read_bytes() - read, resident("VmHWM") - memory
held = sum(p.nbytes for p in model.parameters())
ids = torch.arange(64)[None]
with torch.no_grad():
    logits = model(ids).logits[0, -1, :4].tolist()
print(json.dumps({"seconds": seconds, "read": read, "memory": memory, "held": held, "logits": logits}))
"""


def load(folder: Path, K: int | None) -> dict[str, Any]:
    command = [sys.executable, "-c", _LOAD, str(folder), json.dumps(K)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"loading at K = {K} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compute_table(args: argparse.Namespace) -> dict[str, Any]:
    small = {"hidden_size": 32, "num_hidden_layers": 2} if args.quick else {}
    config = common.configuration(args.config, **small)
    budgets = clip_budgets(BUDGETS, config.num_spectral_channels)
    prompt, length, steps = (64, 32, 4) if args.quick else (args.prompt, args.length, 32)
    settings = {"prompt": prompt, "length": length, "batch": 1, "threads": 1, "rounds": args.rounds}
    _, report = common.start("budget_cost", args, config, **settings)
    torch.manual_seed(0)
    model = ESSMForCausalLM(config)
    tokens = torch.randint(0, 256, (1, max(prompt, CONTEXT)))
    rows: dict[int, dict[str, Any]] = {K: {"K": K, "parameters": model.num_active_parameters(K)} for K in budgets}
    with common.threads(1):
        caches = {K: prefill(model.eval(), tokens[:, :CONTEXT], K) for K in budgets}
        for K, cache in caches.items():
            rows[K]["state_bytes"] = cache.num_bytes
        calls: dict[str, Callable[[int], Any]] = {
            "token": lambda K: decoder(model, caches[K], tokens[:, :1], K, steps)(),
            "prompt": functools.partial(read, model, tokens[:, :prompt]),
            "update": make_step(model, 1, length),
        }
        for name, call in calls.items():
            model.train(name == "update")
            turns = {K: functools.partial(call, K) for K in budgets}
            seconds = common.paired(turns, model.device, args.rounds, warmup=1, limit_seconds=240.0)
            for K in budgets:
                rows[K][name] = common.per(seconds[K], steps if name == "token" else 1)
                rows[K][f"{name}_over"] = common.ratio(seconds[K], seconds[budgets[-1]])
    for name in ("parameters", "state_bytes"):
        for row in rows.values():
            row[f"{name}_over"] = row[name] / rows[budgets[-1]][name]
    report["results"] = list(rows.values())
    return common.finish(report, args)


@torch.inference_mode()
def read(model: ESSMForCausalLM, ids: Tensor, K: int) -> None:
    model(ids, use_cache=True, spectral_budget=K, logits_to_keep=1)


def loading_table(args: argparse.Namespace) -> dict[str, Any]:
    sizes = {"hidden_size": 1024, "num_hidden_layers": 8} if args.config is None else {}
    config = common.configuration(args.config, **({"hidden_size": 64, "num_hidden_layers": 2} if args.quick else sizes))
    budgets = [*clip_budgets((2,) if args.quick else BUDGETS, config.num_spectral_channels), None]
    _, report = common.start("budget_cost_loading", args, config, rounds=args.rounds)
    with tempfile.TemporaryDirectory() as temporary:
        folder, small = Path(temporary, "whole"), Path(temporary, "small")
        torch.manual_seed(0)
        model = ESSMForCausalLM(config).eval()
        model.save_pretrained(folder)
        os.sync()  # pages that are not on the disk yet cannot be dropped
        report["settings"]["checkpoint_bytes"] = file_bytes(folder)
        with torch.no_grad():
            ids = torch.arange(64)[None]
            expected = {K: model(ids, spectral_budget=K).logits[0, -1, :4].tolist() for K in budgets}
        del model
        samples: dict[int | None, list[dict[str, Any]]] = {K: [] for K in budgets}
        for K in budgets * args.rounds:
            samples[K].append(load(folder, K))
            if any(abs(a - b) > ROUNDING for a, b in zip(samples[K][-1]["logits"], expected[K], strict=True)):
                raise RuntimeError(f"the model loaded at K = {K} is not the large one at that budget")
        report["results"] = []
        for K, found in samples.items():
            row = {"K": K or "whole", "held": found[0]["held"]}
            for name in ("read", "memory", "seconds"):
                row[name] = common.spread([sample[name] for sample in found])
                row[f"{name}_over"] = common.ratio([s[name] for s in found], [s[name] for s in samples[None]])
            if K is not None:
                ESSMForCausalLM.from_pretrained(folder, spectral_capacity=K).save_pretrained(small)
                int8 = TorchAoConfig(Int8WeightOnlyConfig())
                ESSMForCausalLM.from_pretrained(small, quantization_config=int8).save_pretrained(small)
                row["int8_bytes"] = file_bytes(small)
            report["results"].append(row)
    return common.finish(report, args)


def file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


TABLES = {"compute": compute_table, "loading": loading_table}


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    p = common.parser(__doc__, on_cpu=True)
    common.add_config(p)
    p.add_argument("--table", choices=("all", *TABLES), default="all")
    p.add_argument("--prompt", type=common.positive, default=4096, help="tokens of a prompt")
    p.add_argument("--length", type=common.positive, default=1024, help="tokens of an update")
    args = p.parse_args(argv)
    if args.out and args.table == "all":
        p.error("--out is one file: give one --table")
    return [table(args) for name, table in TABLES.items() if args.table in ("all", name)]


if __name__ == "__main__":
    main()
