# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What every benchmark shares: command line, configurations, tables and the JSON report.

Timing and memory are those of `essm_train.measure.timing`, under the same names here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from essm_train.files import check_writable, refuse_replacing, write_json
from essm_train.measure.timing import machine, paired, peak_memory, pick_device, ratio, spread, threads, timed  # noqa: F401
from modeling_essm import ESSMConfig, ESSMForCausalLM

REPORTS = Path("runs/benchmarks")  # what is worth keeping is copied to benchmarks/results
HIDDEN = ("definition", "sizes", "rates", "by_seed", "cpu_seconds", "metric")  # in results, and not in tables
# Fields that get their defaults again with a new width, or a new number of layers.
_OF_WIDTH = ("head_size", "intermediate_size", "attention_intermediate_size", "gate_hidden_size")
_OF_LAYERS = ("layer_types", "spectral_capacities", "spectral_budget", "budget_presets")


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def above_zero(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


def parser(description: str | None, rounds: int | None = 7, on_cpu: bool = False) -> argparse.ArgumentParser:
    """--device unless it is the CPU, --quick, --out; where calls take turns also how many --rounds."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if on_cpu:
        p.set_defaults(device="cpu")
    else:
        p.add_argument("--device", default="auto", help="auto, cpu or cuda")
    p.add_argument("--quick", action="store_true", help="few and small shapes, to see that it runs")
    p.add_argument("--out", type=Path, help=f"new JSON file; by default in {REPORTS}")
    if rounds is not None:
        p.add_argument(
            "--rounds", type=positive, default=rounds, help="paired; long ones stop after three (see `paired`)"
        )
    return p


def add_config(p: argparse.ArgumentParser) -> None:
    text = "folder whose config.json makes the model, as hub_configs/essm-elastic-21m; by default the paper's model"
    p.add_argument("--config", type=config_folder, help=text)


def config_folder(text: str) -> Path:
    try:
        ESSMConfig.from_dict(json.loads(Path(text, "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, StrictDataclassError) as error:
        reason = f"needs a folder with the config.json of an ES-SSM, got {text}: {error}"
        raise argparse.ArgumentTypeError(reason) from error
    return Path(text).resolve()


def configuration(folder: Path | None, **fields: Any) -> ESSMConfig:
    """The configuration of a folder, or the paper's, with these fields in the place of its own."""
    if folder is None:
        return ESSMConfig(**fields)
    again = [*(_OF_WIDTH if "hidden_size" in fields else ()), *(_OF_LAYERS if "num_hidden_layers" in fields else ())]
    given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if values := given.get("memory_value_size"):  # as large a share of a head as before
        given["memory_value_size"] = max(
            1, values * fields.get("hidden_size", given["hidden_size"]) // given["hidden_size"]
        )
    return ESSMConfig.from_dict(given | dict.fromkeys(again) | fields)


def name_of(model: Path) -> str:
    """Of a saved model: its folder's name; that of the run where the folder is `model` in one of a run."""
    folder = model.resolve()
    return folder.parent.name if folder.name == "model" else folder.name


def weight_bytes(model: ESSMForCausalLM, K: int) -> int:
    """Bytes of the weights that a decoding step at budget K reads, but for the embedding's row."""
    read = model.num_active_parameters(K)
    if not model.config.tie_word_embeddings:
        read -= model.get_input_embeddings().weight.numel()
    return read * model.lm_head.weight.element_size()


def state_bytes(held: Any) -> int:
    """Bytes of all tensors in a cache, its lists, dicts and attributes."""
    if isinstance(held, torch.Tensor):
        return held.nbytes
    if isinstance(held, (list, tuple)):
        return sum(map(state_bytes, held))
    if isinstance(held, dict):
        return sum(map(state_bytes, held.values()))
    cached = "cache" in type(held).__module__ + type(held).__name__.lower()  # and not a configuration
    return state_bytes(vars(held)) if cached else 0


def dtype_of(device: torch.device) -> torch.dtype:
    """In which models that are not trained run: bf16 on a GPU, fp32 elsewhere."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def per(samples: Sequence[float], count: int) -> dict[str, float]:
    """Spread of the seconds of one of `count` things that each sample did."""
    return spread([seconds / count for seconds in samples])


def rate(samples: Sequence[float], count: int) -> dict[str, float]:
    """Spread of how many of `count` things a sample did in a second."""
    return spread([count / seconds for seconds in samples])


def require_close(name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> float:
    """Relative l2 error. Raises RuntimeError beyond the tolerance, by default that of logits."""
    if tolerance is None:
        tolerance = 1e-3 if expected.dtype == torch.float32 else 5e-2
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    if not error <= tolerance:
        raise RuntimeError(f"{name}: relative error {error:.2e} exceeds {tolerance:.0e}; wrong results are not timed")
    return error


def cells_of(row: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """What a table shows of a row, by column: numbers and words, spreads and means; of mappings one column a key."""
    cells = {}
    for name, value in row.items():
        column = f"{prefix}{name}".replace(" ", "_")
        if name in HIDDEN:
            continue
        if isinstance(value, dict) and "median" in value:
            cells[column] = "{median:.4g}({min:.4g}-{max:.4g})".format(**value)
        elif isinstance(value, dict) and "mean" in value:
            cells[column] = "{mean:.4f}±{deviation:.4f}".format(**value)
        elif isinstance(value, dict) and not prefix:
            cells |= cells_of(value, f"{name}:")
        elif isinstance(value, (float, int, str)):
            cells[column] = f"{value:.4g}" if isinstance(value, float) else str(value).replace(" ", "_")
    return cells


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    cells = [cells_of(row) for row in rows]
    columns = list(dict.fromkeys(name for row in cells for name in row))
    lines = [columns, *([row.get(name, "-") for name in columns] for row in cells)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)), flush=True)


def check_output(args: argparse.Namespace) -> None:
    """Raises ValueError where --out cannot be written, or it or its figure is there already."""
    if args.out:
        check_writable(args.out.parent)
        found = [path.name for path in (args.out, args.out.with_suffix(".png")) if path.exists()]
        refuse_replacing(found, args.out.parent, flag="")


def start(
    name: str,
    args: argparse.Namespace,
    model: ESSMConfig | None = None,
    measured_on: Mapping[str, Any] | None = None,
    continues: bool = False,
    **settings: Any,
) -> tuple[torch.device, dict[str, Any]]:
    """Print and return the device and the report that `finish` writes; `args.report` becomes its path.

    Args:
        model: what is measured, of which the settings tell whose configuration it is, and its shape.
        measured_on: the machine, unless it is this one.
        continues: whether --out may be there already.
    """
    device = pick_device(args.device)
    if model is not None:
        shape = {"layers": model.num_hidden_layers, "width": model.hidden_size}
        shape |= {"capacity": model.num_spectral_channels, "filter_length": model.filter_length}
        config = "paper" if args.config is None else name_of(args.config)
        settings = {"config": config, "block": model.block, **shape} | settings
    if not continues:
        check_output(args)
    report: dict[str, Any] = {
        "benchmark": name,
        "machine": measured_on or machine(device),
        "settings": {"quick": args.quick, **settings},
    }
    args.report = new_path(report, args)
    for part in ("machine", "settings"):
        print(f"{part}: " + ", ".join(f"{k} {v}" for k, v in report[part].items() if v is not None), flush=True)
    return device, report


def new_path(report: dict[str, Any], args: argparse.Namespace) -> Path:
    """--out, or a free name that tells benchmark, configuration (but for the paper's) and device; its folder exists."""
    if args.out:
        return args.out
    kind = (report["machine"]["gpu"] or "cpu").lower().replace(" ", "-")
    config = report["settings"].get("config", "paper")
    name = report["benchmark"] + ("" if config == "paper" else f"_{config}")
    name += f"-{kind}{'-quick' if args.quick else ''}"
    REPORTS.mkdir(parents=True, exist_ok=True)
    paths = (REPORTS / f"{name}{'' if n == 1 else f'-{n}'}.json" for n in itertools.count(1))
    return next(path for path in paths if not path.exists())


def finish(report: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Print the results, write the JSON in one move, return the report."""
    if isinstance(report["results"], list):
        table(report["results"])
    write_json(args.report, report, indent=1)
    print(f"written: {args.report}")
    return report
