# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What every benchmark shares: command line, the machine's name by its parts, targets, tables and JSON.

Timing and memory are those of `essm_train.measure.timing`, under the same names here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from essm_train.files import write_json
from essm_train.measure.timing import check_peak_memory as check_peak_memory
from essm_train.measure.timing import paired as paired
from essm_train.measure.timing import peak_memory as peak_memory
from essm_train.measure.timing import pick_device as pick_device
from essm_train.measure.timing import ratio as ratio
from essm_train.measure.timing import spread as spread
from essm_train.measure.timing import threads as threads
from essm_train.measure.timing import timed as timed
from modeling_essm import ESSMConfig, ESSMForCausalLM

RESULTS = Path(__file__).parent / "results"


# ---------------------------------------------------------------------------------------------------------------------
# Command line and machine.


def parser(description: str | None) -> argparse.ArgumentParser:
    """--device, --quick, --out and --rounds, as every benchmark has them."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="auto", help="auto, cpu or cuda")
    p.add_argument("--quick", action="store_true", help="few and small shapes, to see that it runs")
    p.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/<name>[_<config>]-<device>.json")
    p.add_argument("--rounds", type=int, default=7, help="paired rounds; long ones stop after three (see `paired`)")
    return p


def add_config(p: argparse.ArgumentParser) -> None:
    """--config, of benchmarks that make a model of their own."""
    text = "folder whose config.json makes the model, such as hub_configs/essm-gated-20m; by default the paper's model"
    p.add_argument("--config", type=_config_folder, help=text)


def _config_folder(text: str) -> Path:
    """The folder, whose configuration is known to be good. Raises ArgumentTypeError, which argparse prints."""
    folder = Path(text).resolve()
    try:
        record = json.loads((folder / "config.json").read_text())
        model_type = record.get("model_type") if isinstance(record, dict) else None
        if model_type != ESSMConfig.model_type:
            raise ValueError(f"model_type must be {ESSMConfig.model_type!r}, got {model_type!r}")
        if (width := ESSMConfig.from_pretrained(folder).num_input_features) is not None:
            raise ValueError(f"benchmarks read token ids: num_input_features must be None, got {width}")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"needs a folder with the config.json of an ES-SSM, got {text}: {error}"
        ) from error
    return folder


# Made again from a new width, or for a new number of layers.
_OF_WIDTH = ("inner_size", "num_heads", "mixing_size", "intermediate_size", "gate_hidden_size")
_OF_LAYERS = ("layer_types", "spectral_capacities", "spectral_budget", "budget_presets")


def configuration(args: argparse.Namespace, **fields: Any) -> ESSMConfig:
    """The configuration that --config names, or the paper's, with these fields in the place of its own.

    With another hidden_size or num_hidden_layers, fields that have to fit it get their defaults again.
    """
    if args.config is None:
        return ESSMConfig(**fields)
    again = [*(_OF_WIDTH if "hidden_size" in fields else ()), *(_OF_LAYERS if "num_hidden_layers" in fields else ())]
    given = json.loads((args.config / "config.json").read_text())
    return ESSMConfig.from_dict(given | dict.fromkeys(again) | fields)


def model_settings(args: argparse.Namespace, config: ESSMConfig) -> dict[str, Any]:
    """What a report says of the model: whose configuration it is, and its shape."""
    names = {"layers": "num_hidden_layers", "width": "hidden_size", "capacity": "num_spectral_channels"}
    shape = {name: getattr(config, field) for name, field in (names | {"filter_length": "filter_length"}).items()}
    return {"config": "paper" if args.config is None else args.config.name, "block": config.block, **shape}


def clipped(budgets: Sequence[int], config: ESSMConfig) -> list[int]:
    """The budgets that a model has; the capacity in the place of larger ones."""
    return list(dict.fromkeys(min(K, config.num_spectral_channels) for K in budgets))


def weight_bytes(model: ESSMForCausalLM, K: int) -> int:
    """Bytes of the weights that a decoding step at budget K reads, but for the embedding's row."""
    read = model.num_active_parameters(K)
    if not model.config.tie_word_embeddings:
        read -= model.get_input_embeddings().weight.numel()
    return read * model.lm_head.weight.element_size()


def state_bytes(held: Any, seen: set[int] | None = None) -> int:
    """Bytes of all tensors in an object, its lists, dicts and attributes."""
    seen = set() if seen is None else seen
    if id(held) in seen:
        return 0
    seen.add(id(held))
    if isinstance(held, torch.Tensor):
        return held.nbytes
    if isinstance(held, dict):
        return sum(state_bytes(value, seen) for value in held.values())
    if isinstance(held, (list, tuple)):
        return sum(state_bytes(value, seen) for value in held)
    ours = type(held).__module__.startswith(("transformers", "modeling_essm"))
    inside = vars(held) if ours and not isinstance(held, (type, torch.nn.Module, transformers.PreTrainedConfig)) else {}
    return sum(state_bytes(value, seen) for value in inside.values())


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware and versions; nothing that names a host or a person."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Correctness and output.


def require_close(name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    """Relative l2 error; raises RuntimeError beyond the tolerance: wrong results are not timed."""
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    if not error <= tolerance:
        raise RuntimeError(f"{name}: relative error {error:.2e} exceeds {tolerance:.0e}; wrong results are not timed")
    return error


def target(name: str, value: float, least: float | None = None, most: float | None = None) -> dict[str, Any]:
    """One stated target and whether the measurement meets it."""
    met = (least is None or value >= least) and (most is None or value <= most)
    return {"target": name, "value": value, "at_least": least, "at_most": most, "met": bool(met)}


def table(header: str, rows: Sequence[Sequence[Any]]) -> None:
    """Print rows under the words of the header, right-aligned."""
    names = header.split()
    cells = [names, *[[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths)), flush=True)


def ms(measured: dict[str, float]) -> str:
    """A `spread` of seconds in milliseconds: median (min-max)."""
    return "{median:.4g}({min:.4g}-{max:.4g})".format(**{k: v * 1e3 for k, v in measured.items()})


def start(name: str, args: argparse.Namespace, **settings: Any) -> tuple[torch.device, dict[str, Any]]:
    """Print and return the device and the report that `finish` writes."""
    device = pick_device(args.device)
    report = {"benchmark": name, "machine": machine(device), "settings": {"quick": args.quick, **settings}}
    for part in ("machine", "settings"):
        print(f"{part}: " + ", ".join(f"{k} {v}" for k, v in report[part].items() if v is not None), flush=True)
    return device, report


def report_path(report: dict[str, Any], args: argparse.Namespace, device: torch.device) -> Path:
    """--out, or a name that tells benchmark, configuration (but for the paper's) and device."""
    kind = "cpu" if device.type == "cpu" else report["machine"]["gpu"].lower().replace(" ", "-")
    config = report["settings"].get("config", "paper")
    name = report["benchmark"] + ("" if config == "paper" else f"_{config}")
    return args.out or RESULTS / f"{name}-{kind}{'-quick' if args.quick else ''}.json"


def finish(report: dict[str, Any], args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Print the targets, write the JSON in one move, return the report."""
    for t in report.get("targets", []):
        bound = f">= {t['at_least']:g}" if t["at_least"] is not None else f"<= {t['at_most']:g}"
        print(f"{'met    ' if t['met'] else 'NOT MET'}  {t['target']}: {t['value']:.3g} ({bound})")
    path = report_path(report, args, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, report, indent=1)
    print(f"written: {path}")
    return report
