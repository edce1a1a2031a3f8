# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What does a training step cost: beside other models, over its own settings, and with budget dropout?

    python -m benchmarks.training_step                                       the three tables, a file for each
    python -m benchmarks.training_step --table models --length 1024 --batch 4
    python -m benchmarks.training_step --config hub_configs/essm-elastic-21m  of that model, in files of its own

One step is forward, backward, AdamW and zero_grad on random bytes. fp32 on the CPU, bf16 autocast over fp32 weights on
a GPU.

models   The paper's 21M-parameter model at K = 4 and 32, that of --config, and a Llama and a Mamba-2 of the same
         parameters within 5%. Without the mamba_ssm kernels Mamba-2 runs `essm_train.baselines.mamba`.
essm     Speed and memory of every K, with gradient checkpointing and with torch.compile around the model. Their
         gradients must be the plain step's; where compilation fails, for want of a C++ compiler say, the row tells why.
dropout  An update with budget dropout over one at the capacity. A round trains every budget of the "discrete" schedule
         once, so that the ratio has no sampling noise.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM
from transformers.utils.import_utils import is_mamba_2_ssm_available

from essm_train.baselines.mamba import by_chunks
from modeling_essm import ESSMConfig, ESSMForCausalLM
from modeling_essm.training.budget_dropout import budget_schedule, clip_budgets

from . import common

MODES = ("eager", "checkpointed", "compiled")
RECOMPILE_LIMIT = 64  # more than there are graphs at once here
TOLERANCE = {"cpu": 1e-4, "cuda": 5e-2}  # of checkpointed and compiled gradients: fp32, bf16 autocast
IDS = {"vocab_size": 259, "pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258, "tie_word_embeddings": True}


def essm_config(folder: Path | None, length: int, quick: bool) -> ESSMConfig:
    if quick:
        return common.configuration(folder, hidden_size=64, num_hidden_layers=2, filter_length=max(length, 512))
    return common.configuration(folder, filter_length=max(length, common.configuration(folder).filter_length))


def make_models(length: int, args: argparse.Namespace) -> dict[str, Any]:
    """The three models at matched parameter counts, after them that of --config."""
    if args.quick:
        llama = {"hidden_size": 64, "num_hidden_layers": 6, "intermediate_size": 208, "num_attention_heads": 2}
        mamba = {"hidden_size": 64, "num_hidden_layers": 11, "num_heads": 4, "head_dim": 32, "state_size": 32}
    else:
        llama = {"hidden_size": 384, "num_hidden_layers": 12, "intermediate_size": 1024, "num_attention_heads": 6}
        mamba = {"hidden_size": 384, "num_hidden_layers": 22, "num_heads": 12, "head_dim": 64, "state_size": 128}
    torch.manual_seed(0)
    models = {
        "ES-SSM": ESSMForCausalLM(essm_config(None, length, args.quick)),
        "Llama": LlamaForCausalLM(LlamaConfig(**IDS, **llama, max_position_embeddings=length)),
        "Mamba-2": Mamba2ForCausalLM(Mamba2Config(**IDS, **mamba, n_groups=1, chunk_size=64, use_cache=False)),
    }
    by_chunks(models["Mamba-2"])
    if args.config is not None:
        models[common.name_of(args.config)] = ESSMForCausalLM(essm_config(args.config, length, args.quick))
    return models


def loss_of(model: Any, tokens: Tensor, options: dict[str, Any]) -> Tensor:
    """() cross-entropy, in the precision in which the device trains."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
        return model(input_ids=tokens, labels=tokens, use_cache=False, **options).loss


def random_tokens(model: Any, batch: int, length: int) -> Tensor:
    """(batch, length) bytes, always the same, where the model is."""
    tokens = torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(0))
    return tokens.to(next(model.parameters()).device)


def make_step(model: Any, batch: int, length: int, optimizer: Any = None) -> Callable[..., None]:
    """A call that makes one whole training step at each of these budgets, of a model that has none at (None,)."""
    tokens, optimizer = random_tokens(model, batch, length), optimizer or make_optimizer(model)

    def step(*budgets: int | None) -> None:
        for K in budgets:
            loss_of(model, tokens, {"spectral_budget": K} if K else {}).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def gradient(model: Any, tokens: Tensor, K: int) -> Tensor:
    loss = loss_of(model, tokens, {"spectral_budget": K})
    return torch.autograd.grad(loss, model.model.layers[0].mixer.channel_mixing)[0]


def begin(name: str, args: argparse.Namespace) -> tuple[torch.device, dict[str, Any]]:
    gpu = common.pick_device(args.device).type == "cuda"
    args.length = args.length or (128 if args.quick else 4096)
    args.batch = args.batch or (8 if gpu and not args.quick else 1)
    settings = {"length": args.length, "batch": args.batch, "rounds": args.rounds}
    settings |= {"dtype": "bfloat16 autocast" if gpu else "float32", "threads": torch.get_num_threads()}
    return common.start(name, args, essm_config(args.config, args.length, args.quick), **settings)


def new_model(args: argparse.Namespace, device: torch.device) -> ESSMForCausalLM:
    torch.manual_seed(0)
    return ESSMForCausalLM(essm_config(args.config, args.length, args.quick)).to(device).train()


def models_table(args: argparse.Namespace) -> dict[str, Any]:
    device, report = begin("training_step", args)
    models = {name: model.to(device).train() for name, model in make_models(args.length, args).items()}
    report["parameters"] = {name: sum(p.numel() for p in m.parameters()) for name, m in models.items()}
    kernels = device.type == "cuda" and is_mamba_2_ssm_available()
    report["mamba2_path"] = "mamba_ssm kernels" if kernels else "chunks in torch"
    configured = "ES-SSM" if args.config is None else common.name_of(args.config)
    rows: dict[str, tuple[str, int | None]] = {"Llama": ("Llama", None), "Mamba-2": ("Mamba-2", None)}
    for name in dict.fromkeys(("ES-SSM", configured)):
        rows |= {f"{name} K={K}": (name, K) for K in clip_budgets((4, 32), models[name].config.num_spectral_channels)}
    steps = {name: make_step(model, args.batch, args.length) for name, model in models.items()}
    calls = {label: functools.partial(steps[name], K) for label, (name, K) in rows.items()}
    for call in calls.values():
        call()  # the optimizer's moments and other lasting things exist from here on
    memory = {label: common.peak_memory(call, device) for label, call in calls.items()}
    seconds = common.paired(calls, device, args.rounds, warmup=1, limit_seconds=240.0)
    last, report["results"] = [*rows][-1], []  # the configured model at its capacity
    for label, samples in seconds.items():
        row = {"model": label, "seconds": common.spread(samples), "peak_bytes": memory[label]}
        row["tokens_per_second"] = common.rate(samples, args.batch * args.length)
        report["results"].append(row | {"speed_over_last": common.ratio(seconds[last], samples)})
    return common.finish(report, args)


def essm_table(args: argparse.Namespace) -> dict[str, Any]:
    device, report = begin("training_step_essm", args)
    model = new_model(args, device)
    budgets = clip_budgets((4,) if args.quick else (2, 4, 8, 16, 32), model.config.num_spectral_channels)
    checkpointed = copy.deepcopy(model, {id(p): p for p in model.parameters()})  # the same weights
    checkpointed.gradient_checkpointing_enable()
    torch._dynamo.reset()  # or the length would be compiled as one that varies
    models = {"eager": model, "checkpointed": checkpointed, "compiled": torch.compile(model)}
    tokens, optimizer = random_tokens(model, args.batch, args.length), make_optimizer(model)
    calls, rows = {}, {}
    for mode, K in itertools.product(args.modes, budgets):
        row = rows[mode, K] = {"mode": mode, "budget": K}
        started = time.perf_counter()
        try:
            actual = gradient(models[mode], tokens, K)
        except Exception as error:  # a compiler may raise anything
            if mode != "compiled":
                raise
            row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            continue
        row["first_call_seconds"] = time.perf_counter() - started
        expected, tolerance = gradient(model, tokens, K), TOLERANCE[device.type]
        row["gradient_error"] = common.require_close(f"gradient, {mode}, K = {K}", actual, expected, tolerance)
        calls[mode, K] = functools.partial(make_step(models[mode], args.batch, args.length, optimizer), K)
        calls[mode, K]()  # the optimizer's moments exist from here on
        row["peak_bytes"] = common.peak_memory(calls[mode, K], device)
    seconds = common.paired(calls, device, args.rounds, warmup=1, limit_seconds=240.0)
    for (mode, K), samples in seconds.items():
        row = rows[mode, K]
        row["tokens_per_second"] = common.rate(samples, args.batch * args.length)
        if (mode, budgets[-1]) in seconds:  # or it did not compile
            row["time_over_largest_budget"] = common.ratio(samples, seconds[mode, budgets[-1]])
        if ("eager", K) in seconds:
            row["speed_over_eager"] = common.ratio(seconds["eager", K], samples)
            row["memory_over_eager"] = row["peak_bytes"] / rows["eager", K]["peak_bytes"]
    report["results"] = list(rows.values())
    return common.finish(report, args)


def dropout_table(args: argparse.Namespace) -> dict[str, Any]:
    device, report = begin("training_step_dropout", args)
    model = new_model(args, device)
    capacity = model.config.num_spectral_channels
    budgets = budget_schedule("discrete", capacity, 0).budgets
    report["mean_budget"] = sum(budgets) / len(budgets)
    step = make_step(model, args.batch, args.length)
    calls = {f"K={K}": functools.partial(step, K) for K in dict.fromkeys((*budgets, capacity))}
    calls["dropout"] = functools.partial(step, *budgets)
    seconds = common.paired(calls, device, args.rounds, warmup=1, limit_seconds=240.0)
    seconds["dropout"] = [s / len(budgets) for s in seconds["dropout"]]
    full, report["results"] = seconds[f"K={capacity}"], []
    for name, samples in seconds.items():
        row = {"updates": name, "seconds": common.spread(samples)}
        report["results"].append(row | {"over_full": common.ratio(samples, full)})
    return common.finish(report, args)


TABLES = {"models": models_table, "essm": essm_table, "dropout": dropout_table}


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    p = common.parser(__doc__)
    common.add_config(p)
    p.add_argument("--table", choices=("all", *TABLES), default="all")
    p.add_argument("--length", type=common.positive)
    p.add_argument("--batch", type=common.positive)
    p.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="of essm")
    args = p.parse_args(argv)
    if args.out and args.table == "all":
        p.error("--out is one file: give one --table")
    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, fail_on_recompile_limit_hit=True):
        return [table(args) for name, table in TABLES.items() if args.table in ("all", name)]


if __name__ == "__main__":
    main()
