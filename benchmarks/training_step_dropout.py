# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Table dropout of benchmarks.training_step: an update with budget dropout over one at the full budget."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo

from modeling_essm import ESSMForCausalLM
from modeling_essm.training.budget_dropout import budget_schedule

from . import common
from .steps import (
    RECOMPILE_LIMIT,
    check,
    compiled_graphs,
    essm_config,
    first_call,
    make_essm,
    make_optimizer,
    make_step,
    on_gpu,
    precision,
    shown,
)


def balanced_updates(capacity: int) -> list[tuple[int, ...]]:
    """What the discrete schedule draws, each draw once, in the order in which it first makes them."""
    schedule, update = budget_schedule("discrete", capacity, 0), 0
    draws: dict[tuple[int, ...], None] = {}
    while {K for budgets in draws for K in budgets} != set(schedule.budgets):
        draws[schedule(update)] = None
        update += 1
    return list(draws)


def measure_dropout(
    mode: str, model: ESSMForCausalLM, updates: Sequence[tuple[int, ...]], batch: int, length: int, rounds: int
) -> dict[str, Any]:
    """Cost of updates at these budgets over the cost of as many at the capacity, the two in turn."""
    full = (model.config.num_spectral_channels,)
    row: dict[str, Any] = {"length": length, "batch": batch, "compiled": mode == "compiled"}
    torch._dynamo.reset()
    m, optimizer, device = torch.compile(model) if row["compiled"] else model, make_optimizer(model), model.device
    steps = {
        budgets: make_step(m, optimizer, [{"spectral_budget": K} for K in budgets], batch, length)
        for budgets in dict.fromkeys((*updates, full))
    }
    for step in (*steps.values(), *steps.values()):  # warm-up; the first time also compiles
        _, facts = first_call(step)
        if "failed" in facts:
            if not row["compiled"]:
                raise RuntimeError(facts["failed"])
            optimizer.zero_grad()
            return row | facts
        for name in facts if row["compiled"] else ():
            row[name] = row.get(name, 0) + facts[name]
    graphs = compiled_graphs()
    samples: dict[str, list[list[float]]] = {"dropout": [], "full": []}  # (rounds, updates)
    for i in range(rounds):
        for name in samples:
            samples[name].append([])
        for j, budgets in enumerate(updates):
            pair = {"dropout": steps[budgets], "full": steps[full]}
            for name in list(pair)[:: 1 if (i + j) % 2 == 0 else -1]:
                samples[name][-1].append(common.timed(pair[name], device))
    if compiled_graphs() != graphs:
        raise RuntimeError("a graph was compiled again after warm-up: its seconds are not an update's")
    means = {name: [sum(times) / len(times) for times in measured] for name, measured in samples.items()}
    row |= {"rounds": rounds, "updates_per_round": len(updates)}
    row["seconds_per_update"] = {name: common.spread(values) for name, values in means.items()}
    row["ratio"] = common.ratio(means["dropout"], means["full"])
    row["updates"] = []
    for j, budgets in enumerate(updates):
        dropout, full = ([times[j] for times in samples[name]] for name in ("dropout", "full"))
        row["updates"].append(
            {"budgets": budgets, "seconds": common.spread(dropout), "over_full": common.ratio(dropout, full)}
        )
    return row


def dropout_table(args: argparse.Namespace) -> dict[str, Any]:
    gpu = on_gpu(args)
    lengths = [args.length] if args.length else [128] if args.quick else [1024, 4096] if gpu else [1024]
    batch = args.batch or (8 if gpu and not args.quick else 1)
    rounds = min(args.rounds, 7 if gpu else 5)
    settings = {"batch": batch, "dtype": precision(args), "rounds": rounds, "recompile_limit": RECOMPILE_LIMIT}
    settings |= common.model_settings(args, essm_config(max(lengths), args))
    device, report = common.start("training_step_dropout", args, **settings, threads=torch.get_num_threads())
    model = make_essm(max(lengths), args, device)
    capacity = model.config.num_spectral_channels
    report["gradient_error"] = check(model, max(lengths), device)
    updates = balanced_updates(capacity)
    drawn = [K for budgets in updates for K in budgets]
    report["parameters"], report["mean_budget"] = model.num_parameters(), sum(drawn) / len(drawn)
    print(f"{report['parameters']} parameters; gradients by chunked and by FFT agree to {report['gradient_error']:.1e}")
    print(
        f"a round: budgets {', '.join(map(str, drawn))}, mean {report['mean_budget']:.2f}, each beside K = {capacity}"
    )
    report["results"], report["targets"], cells = [], [], []
    for length, mode in itertools.product(lengths, args.modes):
        row = measure_dropout(mode, model, updates, batch, length, rounds)
        report["results"].append(row)
        if "failed" in row:
            print(f"L = {length}, {mode}: failed: {row['failed']}")
            cells.append([batch, length, mode, "failed", *"-----"])
            continue
        for update in row["updates"]:
            K = "+".join(map(str, update["budgets"]))
            print(f"L = {length}, {mode}, K = {K}: {shown(update['over_full'])} of an update at K = {capacity}")
        compiling = [f"{row[name]:.3g}" if row["compiled"] else "-" for name in ("first_call_seconds", "graphs")]
        times = [common.ms(row["seconds_per_update"][name]) for name in ("dropout", "full")]
        cells.append([batch, length, mode, *times, shown(row["ratio"], 3), rounds, *compiling])
        name = f"uniform budget dropout over K={capacity}, per update, L={length}, {mode}"
        report["targets"].append(common.target(name, row["ratio"]["median"], most=0.5))
    header = f"B L mode dropout_ms/update(min-max) K={capacity}_ms/update(min-max) ratio(min-max) rounds"
    common.table(header + " compile_s graphs", cells)
    return common.finish(report, args, device)
