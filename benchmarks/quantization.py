# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What do small weights cost in quality, what do they save on disk and in memory, and how fast do they decode?

    python -m benchmarks.quantization --models runs/train_clm/model
    python -m benchmarks.quantization --models runs/a/model --text_files held_out.txt --names "novels"

Each model is loaded in fp32, bf16, int8 and int4, saved, and loaded again; what is measured is what came back. Quality
is bits per byte of held-out text at every budget, by default of the part of Python's standard library on which
train_clm.py validates, else of one file per model. Sizes are of model.safetensors, whole and cut to 4 channels; memory
is that of the weights. Decoding is greedy steps at batch 1 by `forward`, formats and budgets in turn in every round;
the same once more for the paper's 21M-parameter model, or that of --config, with random weights. Budgets above a
capacity become it.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from essm_train.measure.timing import decoder
from modeling_essm import ESSMCache, ESSMForCausalLM

from . import common
from .decoding import prefill

FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "int8": {"quantization_config": "int8"},
    "int4": {"quantization_config": "int4"},
}
BUDGETS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
SMALL = 4  # channels of the truncated checkpoint
TIMED = (4, 32)


def held_out(text_file: str | None, block_size: int, max_blocks: int) -> tuple[Tensor, str]:
    """(n, L) byte ids and what they are."""
    from essm_train.data.blocks import evaluation_blocks, to_stream
    from essm_train.data.documents import read_files, standard_library
    from essm_train.data.tokens import ByteEncoder

    documents = standard_library()[1] if text_file is None else list(read_files([text_file]))
    stream, _ = to_stream(documents, ByteEncoder())
    blocks = evaluation_blocks(stream, block_size, max_blocks)
    name = "Python's standard library, held out" if text_file is None else Path(text_file).name
    return blocks, f"{name}: {len(blocks)} blocks of {blocks.shape[1]} bytes"


def bits_per_byte(model: ESSMForCausalLM, blocks: Tensor, K: int, batch_size: int = 8) -> float:
    from essm_train.data.blocks import text_labels
    from essm_train.measure.scoring import num_scored, total_nats

    labels = text_labels(blocks)
    return total_nats(model, blocks, labels, K, batch_size) / math.log(2) / num_scored(labels)


def load_quantized(folder: Path, format: str, source: str | Path) -> tuple[ESSMForCausalLM, int, int]:
    """The model as its saved copy in that format gives it, and the bytes of the whole and the truncated file."""

    def size(name: str) -> int:
        return sum(path.stat().st_size for path in (folder / name).glob("*.safetensors"))

    ESSMForCausalLM.from_pretrained(source, **FORMATS[format]).save_pretrained(folder / "whole")
    kept = {name: value for name, value in FORMATS[format].items() if name == "dtype"}
    model = ESSMForCausalLM.from_pretrained(folder / "whole", **kept).eval()
    small = ESSMForCausalLM.from_pretrained(folder / "whole", spectral_capacity=SMALL, **kept)
    small.save_pretrained(folder / "small")
    return model, size("whole"), size("small")


def time_decoding(
    models: dict[str, ESSMForCausalLM], steps: int, device: torch.device, rounds: int
) -> list[dict[str, Any]]:
    """ms per token of every format and budget, and its ratio to fp32 within each round."""
    calls = {}
    for format, model in models.items():
        tokens = torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(0)).to(device)
        for K in common.clipped(TIMED, model.config):
            cache: ESSMCache = prefill(model, tokens, [64], K)[64]
            calls[format, K] = decoder(model, cache, tokens[:, -1:], K, steps)
    seconds = common.paired(calls, device, rounds, warmup=1, limit_seconds=180.0)
    return [
        {
            "format": format,
            "budget": K,
            "seconds_per_token": common.spread([s / steps for s in samples]),
            "time_over_fp32": common.ratio(samples, seconds["fp32", K]),
        }
        for (format, K), samples in seconds.items()
    ]


def print_decoding(rows: list[dict[str, Any]]) -> None:
    common.table(
        "format K ms_per_token(min-max) over_fp32",
        [
            [r["format"], r["budget"], common.ms(r["seconds_per_token"]), f"{r['time_over_fp32']['median']:.2f}"]
            for r in rows
        ],
    )


def measure(source: str | Path, blocks: Tensor | None, device: torch.device, steps: int, rounds: int) -> dict[str, Any]:
    """Quality (with held-out blocks), sizes and decoding of one model in every format."""
    models, formats = {}, []
    for format in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            model, whole, small = load_quantized(Path(folder), format, source)
        models[format] = model = model.to(device)
        budgets = [K for K in BUDGETS if model.config.num_spectral_channels >= K]
        quality = {} if blocks is None else {K: bits_per_byte(model, blocks, K) for K in budgets}
        row = {"format": format, "bits_per_byte": quality, "bytes_on_disk": whole}
        row |= {f"bytes_on_disk_K{SMALL}": small, "bytes_of_weights": model.get_memory_footprint()}
        formats.append(row)
    common.table(
        f"format MB MB_at_K={SMALL} " + " ".join(f"K={K}" for K in formats[0]["bits_per_byte"]),
        [
            [r["format"], r["bytes_on_disk"] / 1e6, r[f"bytes_on_disk_K{SMALL}"] / 1e6]
            + [f"{v:.4f}" for v in r["bits_per_byte"].values()]
            for r in formats
        ],
    )
    decoding = time_decoding(models, steps, device, rounds)
    print_decoding(decoding)
    return {"formats": formats, "decoding": decoding}


def markdown(report: dict[str, Any]) -> str:
    """The tables for people."""
    lines = ["# Small weights: bits per byte, size and speed of every format", ""]
    lines.append("Written by `python -m benchmarks.quantization`; spreads, versions and machine are in the JSON file.")
    for result in report["results"]:
        budgets = list(result["formats"][0]["bits_per_byte"])
        title = f"{result['name']} ({result['data']}), bits per byte:" if budgets else f"{result['name']}:"
        header = ["weights", "MB", "MB, cut to K = 4", *[f"K = {K}" for K in budgets]]
        lines += ["", title, "", f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
        for r in result["formats"]:
            sizes = [f"{r['bytes_on_disk'] / 1e6:.2f}", f"{r[f'bytes_on_disk_K{SMALL}'] / 1e6:.2f}"]
            values = [f"{v:.4f}" for v in r["bits_per_byte"].values()]
            lines.append(f"| {' | '.join([r['format'], *sizes, *values])} |")
        lines += ["", f"{result['name']}, one decoded token:", "", "| weights | K | ms | time over fp32 |"]
        lines.append("|---|---|---|---|")
        for r in result["decoding"]:
            ms = r["seconds_per_token"]["median"] * 1e3
            lines.append(f"| {r['format']} | {r['budget']} | {ms:.2f} | {r['time_over_fp32']['median']:.2f} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    common.add_config(p)
    p.add_argument("--models", nargs="+", default=[], help="folders of saved byte-level language models")
    p.add_argument("--text_files", nargs="+", help="one held-out text per model, 'default' for the standard library")
    p.add_argument("--names", nargs="+", help="what to call the models, by default their order")
    p.add_argument("--block_size", type=int, default=512)
    p.add_argument("--max_blocks", type=int, default=128, help="blocks, spread evenly over the text")
    p.add_argument("--steps", type=int, default=64, help="decoded tokens of one sample")
    args = p.parse_args(argv)
    texts = args.text_files or ["default"] * len(args.models)
    names = args.names or [f"model {i}" for i in range(1, len(args.models) + 1)]
    if not len(args.models) == len(texts) == len(names):
        p.error(f"{len(args.models)} models need as many text_files and names, got {len(texts)} and {len(names)}")
    steps = 4 if args.quick else args.steps
    max_blocks = 2 if args.quick else args.max_blocks
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "filter_length": 512} if args.quick else {}
    config = common.configuration(args, **sizes)
    settings = {"block_size": args.block_size, "max_blocks": max_blocks, "steps": steps, "threads": 1}
    settings |= common.model_settings(args, config)
    device, report = common.start("quantization", args, **settings)
    report["results"] = []
    with common.threads(1), torch.no_grad(), tempfile.TemporaryDirectory() as temporary:
        for name, source, text in zip(names, args.models, texts):
            blocks, data = held_out(None if text == "default" else text, args.block_size, max_blocks)
            print(f"{name}: {data}", flush=True)
            result = {"name": name, "data": data, **measure(source, blocks, device, steps, args.rounds)}
            report["results"].append(result)
        torch.manual_seed(0)
        model = ESSMForCausalLM(config)
        size = "small" if args.quick else f"{model.num_parameters() / 1e6:.1f}M parameters"
        name = f"{size}, random weights"
        print(name, flush=True)
        model.save_pretrained(temporary)
        del model
        result = {"name": name, "data": None, **measure(temporary, None, device, steps, args.rounds)}
        report["results"].append(result)
    report["targets"] = targets(report)
    path = common.report_path(report, args, device)
    if not args.quick:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".md").write_text(markdown(report))
    return common.finish(report, args, device)


def targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Files below 0.35 and 0.25 of fp32; int8 within 0.2% and int4 within 3% of its bits per byte at every budget."""
    rows, found = [{r["format"]: r for r in result["formats"]} for result in report["results"]], []
    for format, size, loss in (("int8", 0.35, 0.002), ("int4", 0.25, 0.03)):
        share = max(r[format]["bytes_on_disk"] / r["fp32"]["bytes_on_disk"] for r in rows)
        found.append(common.target(f"{format} file over fp32, worst", share, most=size))
        ratios = [v / r["fp32"]["bits_per_byte"][K] for r in rows for K, v in r[format]["bits_per_byte"].items()]
        if ratios:
            name = f"{format} bits per byte over fp32, worst budget"
            found.append(common.target(name, max(ratios), most=1 + loss))
    return found


if __name__ == "__main__":
    main()
