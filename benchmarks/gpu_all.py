# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Everything that a GPU has to tell, in one call of at most nine minutes, in one file.

    python -m benchmarks.gpu_all --seconds 540
    python -m benchmarks.gpu_all --parts tests layers            some of it
    python -m benchmarks.gpu_all --device cpu --quick            to see that it runs

Parts run one after the other, each in a process of its own, so that a crash of one costs the others nothing:

tests       what is marked `gpu`: fp32, bf16 and with TF32 allowed, against the definition in fp64
layers      operator and whole blocks against floor, FFT, plain torch, simple GLA and Mamba-2 (benchmarks.gpu_layers)
step        a training step beside Llama and Mamba-2 of the same size: time and memory (benchmarks.training_step);
            again with our Triton kernels
limit       decoding with CUDA graphs against the reading of the weights (benchmarks.decoding --table limit)
contexts    decoding after short and long contexts, batches of 1 and 16 (benchmarks.decoding)
quantized   weights of 8 and 4 bits: quality, memory, decoding; of --model (benchmarks.quantization)
drafted     drafts at a small budget; of --model (benchmarks.speculative)

The file is written every few seconds, with what the running part has written so far, so the call may be stopped at
any time. A part has its own limit, and never more than what is left; one for which there is no time is not begun, and
the file says so. `--model` is a trained language model; without one, the last two parts are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from essm_train.files import write_json

from . import common

ROOT = Path(__file__).resolve().parent.parent
LEAST_SECONDS = 15  # less is not enough to import torch and begin
POLL_SECONDS = 5
TAIL = 2000  # characters of a part's output that are kept
GATED = ("--config", "hub_configs/essm-gated-20m")


@dataclass(frozen=True)
class Part:
    """A process: what follows `python`, and the seconds it may take. `reports` ones write JSON to --out."""

    command: tuple[str, ...]
    seconds: float
    needs_model: str = ""  # the argument that takes --model
    reports: bool = True
    kernels: bool = False  # run with our Triton kernels


def _benchmark(name: str, seconds: float, *arguments: str, needs_model: str = "", kernels: bool = False) -> Part:
    return Part(("-m", f"benchmarks.{name}", *arguments), seconds, needs_model, kernels=kernels)


_STEP = ("--table", "models", *GATED, "--length", "4096", "--batch", "8")
PARTS = {
    "tests": Part(("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/package"), 120, reports=False),
    "layers": _benchmark("gpu_layers", 170, "--rounds", "5"),
    "step": _benchmark("training_step", 70, *_STEP),
    "step, kernels": _benchmark("training_step", 60, *_STEP, kernels=True),
    "limit": _benchmark("decoding", 70, "--table", "limit", *GATED),
    "contexts": _benchmark("decoding", 60, *GATED, "--contexts", "1024", "65536", "--rounds", "3"),
    "quantized": _benchmark("quantization", 60, needs_model="--models"),
    "drafted": _benchmark("speculative", 60, needs_model="--model"),
}


def run_part(part: Part, options: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Run it. Yields now and then, and at the end, what became of it: output's end and, if it wrote one, its report."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "report.json", Path(folder) / "log"
        command = [*part.command, *options, *(("--out", str(out)) if part.reports else ())]
        start = time.perf_counter()
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=os.environ | {"ESSM_TRITON": "1" if part.kernels else "0"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            code: int | None = None
            while code is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(POLL_SECONDS)
                passed = time.perf_counter() - start
                record: dict[str, Any] = {"status": "running", "seconds": passed, "command": " ".join(part.command)}
                record |= {"options": list(options), "output": log.read_text(errors="replace")[-TAIL:]}
                if out.is_file():
                    record["report"] = json.loads(out.read_text())
                if code is not None:
                    record["status"] = "done" if code == 0 else f"exit status {code}"
                elif passed > seconds:
                    record["status"], code = f"stopped after {passed:.0f} s", -1
                yield record
        finally:
            process.kill()
            process.wait()


def options_of(part: Part, args: argparse.Namespace) -> list[str]:
    """What every benchmark is told besides."""
    options = ["--device", args.device, *(["--quick"] if args.quick else [])] if part.reports else []
    return options + ([part.needs_model, str(args.model)] if part.needs_model else [])


def run_all(parts: dict[str, Part], args: argparse.Namespace, report: dict[str, Any], path: Path) -> None:
    """Every part while there is time; the file is whole at any moment."""
    end = time.monotonic() + args.seconds
    results = report["parts"] = {name: {"status": "not begun"} for name in parts}
    for name, part in parts.items():
        left = end - time.monotonic()
        if part.needs_model and args.model is None:
            results[name] = {"status": "not begun: no --model"}
        elif left < LEAST_SECONDS:
            results[name] = {"status": f"not begun: {max(0, left):.0f} s were left"}
        else:
            print(f"{name}: {' '.join(part.command)}", flush=True)
            for results[name] in run_part(part, options_of(part, args), min(part.seconds, left)):
                write_json(path, report, indent=1)
            print(f"{name}: {results[name]['status']}, {results[name]['seconds']:.0f} s", flush=True)
        write_json(path, report, indent=1)


def main(argv: list[str] | None = None) -> dict:
    p = common.parser(__doc__)
    p.add_argument("--seconds", type=float, default=540.0, help="in all")
    p.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    p.add_argument("--model", type=Path, help="saved language model, trained")
    args = p.parse_args(argv)
    if args.seconds <= 0:
        p.error(f"--seconds must be positive, got {args.seconds:g}")
    if args.model is not None and not (args.model / "config.json").is_file():
        p.error(f"--model must be the folder of a saved model, and {args.model} has no config.json")
    args.model = args.model and args.model.resolve()
    device, report = common.start("gpu_all", args, seconds=args.seconds)
    path = common.report_path(report, args, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    run_all({name: PARTS[name] for name in args.parts}, args, report, path)
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
