# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""All measurements that a GPU makes possible, in one call that respects a time limit.

    python -m benchmarks.gpu_all --seconds 540 [--model runs/train_clm/model]

Every part is a process of its own, so that one that fails costs the others nothing. The file is written after every
part, so the call may be stopped at any time, and stops the part that runs. A part has its own limit, and never more
than what is left; one for which there is no time is not begun, and the file says so.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from essm_train.files import write_json

from . import common

ROOT = Path(__file__).resolve().parent.parent
LEAST_SECONDS = 15  # less is not enough to import torch and begin
TAIL = 2000  # characters of a part's output that are kept
_ELASTIC = "--config hub_configs/essm-elastic-21m"
_SHAPE = f"{_ELASTIC} --length 4096 --batch 8"
PARTS: dict[str, tuple[str, float]] = {  # what follows `python`, and the seconds that it may take
    "tests": ("-m pytest -q -m gpu -p no:cacheprovider tests/package/test_spectral_ops.py", 40),
    "contexts": (f"-m benchmarks.decoding {_ELASTIC} --contexts 1024 16384 --rounds 3", 80),
    "step": (f"-m benchmarks.training_step --table models {_SHAPE} --rounds 3", 50),
    "layer": ("-m benchmarks.spectral_layer --lengths 16384 --batches 4 --rounds 3", 40),
    "drafted": ("-m benchmarks.speculative --rounds 3 --draft_budgets 2 4 --draft_lengths 0 4 --model", 100),
    "limit": (f"-m benchmarks.decoding --table limit {_ELASTIC} --rounds 3", 90),
    "compiled": (f"-m benchmarks.training_step --table essm {_SHAPE} --rounds 3", 120),
}


def run_part(name: str, seconds: float, args: argparse.Namespace) -> dict[str, Any]:
    """Run it for so long at most: what became of it, its output's end and, if it wrote one, its report."""
    start, command = time.perf_counter(), PARTS[name][0].split()
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "report.json"), Path(folder, "log")
        command += [str(args.model)] if command[-1] == "--model" else []
        options = ["--device", args.device, "--out", str(out), *(["--quick"] if args.quick else [])]
        whole = [sys.executable, *command, *([] if name == "tests" else options)]
        with log.open("w", encoding="utf-8") as output:
            try:
                done = subprocess.run(whole, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=seconds)
                status = f"exit status {done.returncode}" if done.returncode else "done"
            except subprocess.TimeoutExpired:
                status = f"stopped after {seconds:.0f} s"
        record = {"status": status, "seconds": time.perf_counter() - start, "command": " ".join(command)}
        record["output"] = log.read_text(encoding="utf-8", errors="replace")[-TAIL:]
        return record | ({"report": json.loads(out.read_text(encoding="utf-8"))} if out.is_file() else {})


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run every part while there is time; the file is whole at any moment."""
    p = common.parser(__doc__, rounds=None)
    p.add_argument("--seconds", type=common.above_zero, default=540.0, help="in all")
    p.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    p.add_argument("--model", type=Path, help="saved language model, trained")
    args = p.parse_args(argv)
    if args.model is not None and not (args.model / "config.json").is_file():
        p.error(f"--model must be the folder of a saved model, and {args.model} has no config.json")
    args.model = args.model and args.model.resolve()
    _, report = common.start("gpu_all", args, seconds=args.seconds)
    end = time.monotonic() + args.seconds
    results = report["results"] = {name: {"status": "not begun"} for name in args.parts}
    for name in args.parts:
        command, limit = PARTS[name]
        left = end - time.monotonic()
        if command.endswith("--model") and args.model is None:
            results[name] = {"status": "not begun: no --model"}
        elif left < LEAST_SECONDS:
            results[name] = {"status": f"not begun: {max(0, left):.0f} s were left"}
        else:
            print(f"{name}: {command}", flush=True)
            results[name] = run_part(name, min(limit, left), args)
            print(f"{name}: {results[name]['status']}, {results[name]['seconds']:.0f} s", flush=True)
        write_json(args.report, report, indent=1)
    return common.finish(report, args)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by which `subprocess.run` ends its process
    main()
