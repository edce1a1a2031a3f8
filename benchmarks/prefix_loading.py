# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What does it cost to load a part of a large checkpoint: bytes read, peak resident memory and time against K?

    python -m benchmarks.prefix_loading                  writes a checkpoint of 1.4 GB into a temporary folder
    python -m benchmarks.prefix_loading --config hub_configs/essm-gated-20m      of that model in its own size

Every load is `from_pretrained(folder, spectral_capacity=K)` in a process of its own, which first imports everything
and drops the checkpoint's pages from the page cache. Bytes are those that the disk delivered, read-ahead included;
memory is the peak resident set above the one before the load. The small model's logits must be the large one's at that
budget. "whole" is an ordinary load. Linux only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from modeling_essm import ESSMForCausalLM

from . import common

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


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    common.add_config(p)
    p.add_argument("--folder", type=Path, help="where the checkpoint is written; by default a temporary folder")
    p.set_defaults(device="cpu")
    args = p.parse_args(argv)
    sizes = {"hidden_size": 1024, "num_hidden_layers": 8} if args.config is None else {}
    config = common.configuration(args, **({"hidden_size": 64, "num_hidden_layers": 2} if args.quick else sizes))
    budgets = [*common.clipped([2, 32] if args.quick else [2, 4, 6, 8, 16, 32], config), None]
    rounds = 1 if args.quick else min(args.rounds, 3)
    settings = common.model_settings(args, config) | {"budgets": budgets, "rounds": rounds}
    _, report = common.start("prefix_loading", args, **settings)
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        torch.manual_seed(0)
        model = ESSMForCausalLM(config).eval()
        model.save_pretrained(folder)
        os.sync()  # pages that are not on the disk yet cannot be dropped
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        report["settings"]["checkpoint_bytes"] = size
        print(f"checkpoint: {size / 1e9:.2f} GB, {model.num_parameters():,} parameters")
        with torch.no_grad():
            ids = torch.arange(64)[None]
            expected = {K: model(ids, spectral_budget=K).logits[0, -1, :4].tolist() for K in budgets}
        del model
        samples: dict[int | None, list[dict[str, Any]]] = {K: [] for K in budgets}
        for K in budgets * rounds:
            samples[K].append(load(folder, K))
            if any(abs(a - b) > ROUNDING for a, b in zip(samples[K][-1]["logits"], expected[K], strict=True)):
                raise RuntimeError(f"the model loaded at K = {K} is not the large one at that budget")
    report["results"] = []
    for K, found in samples.items():
        row = {"K": K or "whole", "held": found[0]["held"]}
        row |= {name: common.spread([sample[name] for sample in found]) for name in ("read", "memory", "seconds")}
        report["results"].append(row)
    return common.finish(report, args)


if __name__ == "__main__":
    main()
