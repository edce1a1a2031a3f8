# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What is inside a trained ES-SSM: which channels its gates use, how far it can amplify, and what a budget costs.

    essm-analyze --model runs/train_clm/model --text_files some.txt --output_dir runs/analysis

What is measured, and how: essm_train/measure/analysis.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from essm_train.arguments import TRUST_HELP, arg
from essm_train.console import command
from essm_train.files import check_writable, write_figure, write_json


@dataclass
class AnalyzeArguments:
    """Arguments of the script."""

    model: str = field(metadata={"help": "Folder or Hub name of a byte-level ES-SSM language model."})
    text_files: list[str] = field(metadata={"help": "Text to run it on, read as bytes."})
    output_dir: str = field(metadata={"help": "Where analysis.json, gates.png and cost.png go."})
    block_size: int = arg(512, "Tokens per block.")
    max_blocks: int = arg(32, "Blocks to run, spread evenly over the text.")
    trust_remote_code: bool = arg(False, TRUST_HELP)


def main(args: AnalyzeArguments) -> None:
    """Analyse a saved model."""
    from transformers import AutoModel

    from essm_train.data.text import read_blocks
    from essm_train.data.tokens import ByteEncoder
    from essm_train.measure.analysis import (
        draw_cost,
        draw_gates,
        gate_statistics,
        layer_cost,
        measured_cost,
        parts_of,
        rows_of,
        stability_bounds,
    )
    from essm_train.models import load_model
    from modeling_essm.loading_essm import spectral_mixers
    from modeling_essm.training.budget_dropout import BUDGETS, clip_budgets

    output_dir = Path(args.output_dir)
    check_writable(output_dir)
    input_ids, _ = read_blocks(args.text_files, ByteEncoder(), args.block_size, args.max_blocks)
    model = load_model(AutoModel, args.model, trust_remote_code=args.trust_remote_code)
    config = model.config
    budgets = clip_budgets((*BUDGETS, config.num_spectral_channels), config.num_spectral_channels)
    _, largest = max(zip(spectral_mixers(model), parts_of(model)), key=lambda both: len(both[0].channel_mixing))
    modelled = [layer_cost(largest, K, args.block_size) for K in budgets]
    measured = measured_cost(largest, budgets, args.block_size)
    record: dict[str, Any] = {"model": args.model, "budgets": budgets}
    record["multiply_adds_per_token"] = {name: [cost[name] for cost in modelled] for name in modelled[0]}
    record["seconds_per_layer"] = measured
    write_figure(output_dir / "cost.png", draw_cost(budgets, record["multiply_adds_per_token"], measured))
    record["stability_bound_by_layer"] = {K: stability_bounds(model, K) for K in budgets}
    for K in (budgets[0], budgets[-1]):
        shown = ", ".join(f"{bound:.3g}" for bound in record["stability_bound_by_layer"][K])
        print(f"stability bound by layer at K={K}: {shown}")
    if config.gating == "softmax":
        means, entropies = gate_statistics(model, input_ids, budgets[-1])
        record["gates"] = {"budget": budgets[-1], "mean": means.tolist(), "entropy": entropies.tolist()}
        rows = rows_of(means, entropies)
        write_figure(output_dir / "gates.png", draw_gates(rows))
        for name, mean, entropy in rows:
            most = ", ".join(f"{int(k) + 1}: {float(mean[k]):.3f}" for k in mean.argsort(descending=True)[:4])
            print(f"{name}: largest mean gates {most}; entropy {entropy:.3f} of {math.log(budgets[-1]):.3f}")
    write_json(output_dir / "analysis.json", record)
    print(f"saved {output_dir / 'analysis.json'}, gates.png and cost.png")


run = command(main, AnalyzeArguments)


if __name__ == "__main__":
    run()
