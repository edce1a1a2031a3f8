# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What does a training step cost: beside other models, over its own settings, and with budget dropout?

    python -m benchmarks.training_step                                       the three tables, a file for each
    python -m benchmarks.training_step --table models --length 1024 --batch 4
    python -m benchmarks.training_step --table essm --full                   every combination: hours on a CPU
    python -m benchmarks.training_step --table dropout --modes eager
    python -m benchmarks.training_step --config hub_configs/essm-gated-20m   of that model, in files of its own

One step is forward, backward, AdamW and zero_grad on random bytes. fp32 on the CPU, bf16 autocast over fp32 weights on
a GPU.

models   Is ES-SSM cheaper than a Transformer and a Mamba-2 of the same size from the same library? ES-SSM is the
         paper's 21M-parameter model at K = 4 and K = 32, and beside it that of --config at K = 4 and its capacity;
         LlamaForCausalLM and Mamba2ForCausalLM have the same vocabulary and a parameter count within 5% of it, in
         shapes usual for them. The models take turns. Where the mamba_ssm kernels are not installed, always on a CPU,
         Mamba-2 runs `essm_train.baselines.mamba`, matrix products over chunks in torch. A model whose step would
         exceed --memory, extrapolated from shorter lengths, is measured at the longest length that fits, and the output
         says so.
essm     What do K, length, batch, gradient checkpointing and torch.compile do to speed and memory of ES-SSM? One
         factor at a time: every K at the first of --lengths and of --batches, plain (eager, no checkpointing), and
         each other factor at two K. Rows take turns. Checkpointed and compiled steps must give the plain step's
         gradient. Shapes that would exceed --memory are skipped, and the output says so.
dropout  What does an update with budget dropout cost, over one at the capacity, K = 32? A round trains every budget of
         the "discrete" schedule of train/budget_dropout once, in the order in which it first draws them, each beside
         an update at K = 32; the ratio of the two sums has no sampling noise. All updates train one set of weights, on
         whose values the cost does not depend.

torch.compile stands as in a training script: around the model, with its defaults. Every budget gets a graph of its own,
so a run needs a torch._dynamo.config.recompile_limit (8) of at least its number of budgets: torch trains the others in
eager mode. It is raised here. Where compilation fails, for want of a C++ compiler say, the row tells why. A first call
compiles; it is short where inductor finds an earlier run's files.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch
import torch._dynamo
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM
from transformers.utils.import_utils import is_mamba_2_ssm_available

from essm_train.baselines.mamba import by_chunks
from modeling_essm import ESSMForCausalLM

from . import common
from .steps import (
    MODES,
    RECOMPILE_LIMIT,
    check,
    essm_config,
    make_optimizer,
    make_step,
    memory_limit,
    on_gpu,
    peaks_that_fit,
    precision,
    shown,
)
from .training_step_dropout import dropout_table
from .training_step_essm import essm_table

IDS = {"vocab_size": 259, "pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258, "tie_word_embeddings": True}


def make_models(length: int, args: argparse.Namespace) -> dict[str, torch.nn.Module]:
    """The three models at matched parameter counts, after them that of --config."""
    if args.quick:
        llama = {"hidden_size": 64, "num_hidden_layers": 6, "intermediate_size": 208, "num_attention_heads": 2}
        mamba = {"hidden_size": 64, "num_hidden_layers": 11, "num_heads": 4, "head_dim": 32, "state_size": 32}
    else:
        llama = {"hidden_size": 384, "num_hidden_layers": 12, "intermediate_size": 1024, "num_attention_heads": 6}
        mamba = {"hidden_size": 384, "num_hidden_layers": 22, "num_heads": 12, "head_dim": 64, "state_size": 128}
    torch.manual_seed(0)
    paper = argparse.Namespace(quick=args.quick, config=None)
    models = {
        "ES-SSM": ESSMForCausalLM(essm_config(length, paper)),
        "Llama": LlamaForCausalLM(LlamaConfig(**IDS, **llama, max_position_embeddings=length)),
        "Mamba-2": Mamba2ForCausalLM(Mamba2Config(**IDS, **mamba, n_groups=1, chunk_size=64, use_cache=False)),
    }
    by_chunks(models["Mamba-2"])
    return models if args.config is None else models | {args.config.name: ESSMForCausalLM(essm_config(length, args))}


def models_table(args: argparse.Namespace) -> dict[str, Any]:
    gpu = on_gpu(args)
    length = args.length or (128 if args.quick else 4096)
    batch = args.batch or (8 if gpu and not args.quick else 1)
    limit, dtype, rounds = memory_limit(args), precision(args), min(args.rounds, 7 if gpu else 3)
    settings = {"length": length, "batch": batch, "dtype": dtype, "warmup": 1, "rounds": rounds}
    settings |= {"memory_gib": limit / 2**30, **common.model_settings(args, essm_config(length, args))}
    device, report = common.start("training_step", args, **settings, threads=torch.get_num_threads())
    common.check_peak_memory(device)
    models = {name: model.to(device).train() for name, model in make_models(length, args).items()}
    report["parameters"] = {name: sum(p.numel() for p in m.parameters()) for name, m in models.items()}
    print("parameters: " + ", ".join(f"{name} {count}" for name, count in report["parameters"].items()))
    kernels = gpu and is_mamba_2_ssm_available()
    report["mamba2_path"] = "mamba_ssm kernels" if kernels else "chunks in torch"
    print(f"Mamba-2 runs on: {report['mamba2_path']}")
    configured = "ES-SSM" if args.config is None else args.config.name
    report["gradient_error"] = check(models[configured], length, device)
    print(f"gradients by chunked and by FFT agree to {report['gradient_error']:.1e}")

    makers: dict[str, tuple[str, dict[str, Any]]] = {}
    for name in dict.fromkeys(("ES-SSM", configured)):
        budgets = common.clipped((4, 32), models[name].config)
        makers |= {f"{name} K={K}": (name, {"spectral_budget": K}) for K in budgets}
    reference, largest = f"{configured} K={budgets[-1]}", budgets[-1]
    makers |= {"Llama": ("Llama", {}), "Mamba-2": ("Mamba-2", {})}
    optimizers = {name: make_optimizer(model) for name, model in models.items()}
    steps, lengths, memory = {}, {}, {}
    for label, (name, arguments) in makers.items():
        make = functools.partial(make_step, models[name], optimizers[name], [arguments], batch)
        memory[label] = peaks_that_fit(make, length, limit, device)
        lengths[label] = max(memory[label])
        steps[label] = make(lengths[label])
        if lengths[label] < length:
            print(f"{label} does not fit {limit / 2**30:.0f} GiB at L = {length}: measured at L = {lengths[label]}")
    seconds = common.paired(steps, device, rounds, warmup=1, limit_seconds=240.0)
    rows, report["results"] = [], []
    for label, samples in seconds.items():
        rate = common.spread([batch * lengths[label] / s for s in samples])
        peak = memory[label][lengths[label]]
        relative = common.ratio(seconds[reference], samples) if lengths[label] == length else None
        report["results"].append(
            {
                "model": label,
                "length": lengths[label],
                "seconds": common.spread(samples),
                "tokens_per_second": rate,
                "peak_bytes": peak,
                "peak_bytes_by_length": memory[label],
                f"speed_over_essm_{largest}": relative,
            }
        )
        speed = shown(relative) if relative else "-"
        rows.append(
            [
                label.replace(" ", "_"),
                batch,
                lengths[label],
                common.ms(common.spread(samples)),
                shown(rate, 0),
                speed,
                f"{peak / 2**20:.0f}",
            ]
        )
    common.table(
        "model batch L step_ms(min-max) tokens/s(min-max) speed/" + reference.replace(" ", "_") + " peak_MiB", rows
    )
    counts = report["parameters"]
    worst = max(abs(count / counts[configured] - 1) for count in counts.values())
    report["targets"] = [common.target("parameter counts apart, worst", worst, most=0.05)]
    return common.finish(report, args, device)


TABLES = {"models": models_table, "essm": essm_table, "dropout": dropout_table}


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    p = common.parser(__doc__)
    common.add_config(p)
    p.add_argument("--table", choices=("all", *TABLES), default="all")
    p.add_argument("--length", type=int, default=None, help="of models and dropout")
    p.add_argument("--batch", type=int, default=None, help="of models and dropout")
    p.add_argument("--lengths", type=int, nargs="+", default=None, help="of essm; others are compared with the first")
    p.add_argument("--batches", type=int, nargs="+", default=None, help="of essm; others are compared with the first")
    p.add_argument("--budgets", type=int, nargs="+", default=None, help="of essm")
    p.add_argument("--full", action="store_true", help="every combination in essm")
    p.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="of essm and dropout")
    p.add_argument("--memory", type=float, default=None, help="GiB a step may take; default 12 on a CPU, 100 on a GPU")
    args = p.parse_args(argv)
    if args.out and args.table == "all":
        p.error("--out names one file: choose one --table")
    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, fail_on_recompile_limit_hit=True):
        return [table(args) for name, table in TABLES.items() if args.table in ("all", name)]


if __name__ == "__main__":
    main()
