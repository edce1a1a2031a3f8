# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What do weights of 16 and 8 bits cost in quality, what do they save on disk, and how fast do they decode?

    python -m benchmarks.quantization --model hub_configs/essm-novels-6m --text_files novels-validation.parquet

The first channels of a model are loaded in fp32, bf16 and int8 (torchao's weights of linear layers), as many as a
budget needs. Quality is bits per byte of held-out text. Decoding is greedy steps at batch 1, formats and budgets in
turn in every round.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torchao.quantization import Int8WeightOnlyConfig
from transformers import TorchAoConfig

from essm_train.data.tokens import ByteEncoder
from essm_train.measure.evaluation import open_text
from essm_train.measure.timing import decoder
from modeling_essm import ESSMConfig, ESSMForCausalLM
from modeling_essm.training.budget_dropout import clip_budgets

from . import common
from .decoding import prefill

BUDGETS = (1, 2, 4, 8, 16, 32)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    p.add_argument("--model", type=Path, required=True, help="folder of a saved byte-level language model")
    p.add_argument("--text_files", nargs="+", required=True, help="held-out text")
    p.add_argument("--block_size", type=common.positive, default=512)
    p.add_argument("--max_blocks", type=common.positive, default=128, help="blocks, spread evenly over the text")
    args = p.parse_args(argv)
    steps, max_blocks = (4, 2) if args.quick else (64, args.max_blocks)
    held_out = open_text(args.text_files, ByteEncoder(), args.block_size, max_blocks)
    name = common.name_of(args.model)
    device, report = common.start("quantization", args, config=name, threads=1, steps=steps, text=held_out.description)
    tokens = torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(0)).to(device)
    int8 = {"dtype": torch.float32, "quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}
    formats = {"fp32": {"dtype": torch.float32}, "bf16": {"dtype": torch.bfloat16}, "int8": int8}
    calls, report["results"] = {}, []
    budgets = clip_budgets(BUDGETS, ESSMConfig.from_pretrained(args.model).num_spectral_channels)
    with common.threads(1), torch.no_grad():
        for name, options in formats.items():
            row: dict[str, Any] = {"format": name, "bits_per_byte": {}, "bytes": {}}
            report["results"].append(row)
            for K in budgets:
                model = ESSMForCausalLM.from_pretrained(args.model, spectral_capacity=K, **options).eval().to(device)
                row["bits_per_byte"][K] = held_out.value(model, K)
                with tempfile.TemporaryDirectory() as folder:
                    model.save_pretrained(folder)
                    row["bytes"][K] = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
                cache = prefill(model, tokens, K)
                calls[name, K] = decoder(model, cache, tokens[:, -1:], K, steps)
        seconds = common.paired(calls, device, args.rounds, warmup=1, limit_seconds=180.0)
    for row in report["results"]:
        samples = {K: seconds[row["format"], K] for K in budgets}
        row["seconds_per_token"] = {K: common.per(samples[K], steps) for K in budgets}
        row["time_over_fp32"] = {K: common.ratio(samples[K], seconds["fp32", K]) for K in budgets}
    return common.finish(report, args)


if __name__ == "__main__":
    main()
