# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Table essm of benchmarks.training_step: speed and memory of ES-SSM over its own settings."""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch import Tensor

from modeling_essm import ESSMForCausalLM

from . import common
from .steps import (
    MODES,
    RECOMPILE_LIMIT,
    TOLERANCE,
    check,
    essm_config,
    first_call,
    language_loss,
    make_essm,
    make_optimizer,
    make_step,
    memory_limit,
    on_gpu,
    peaks_that_fit,
    precision,
    random_tokens,
    shown,
)


class Case(NamedTuple):
    """One row of the table; plain is eager without checkpointing."""

    length: int
    batch: int
    budget: int
    checkpointing: bool = False
    compiled: bool = False

    def plain(self) -> Case:
        return Case(self.length, self.batch, self.budget)


def every_case(
    lengths: Sequence[int], batches: Sequence[int], budgets: Sequence[int], modes: Sequence[str]
) -> list[Case]:
    """The cross product; plain cases come before the others of their shape."""
    options = [(checkpointing, mode == "compiled") for mode in modes for checkpointing in (False, True)]
    return [Case(L, B, K, *option) for L, B, K, option in itertools.product(lengths, batches, budgets, options)]


def one_factor_at_a_time(cases: Sequence[Case]) -> list[Case]:
    """Of the cross product: every budget at the first shape, and every other change from it at two budgets."""
    base, budgets = cases[0], [case.budget for case in cases]
    two = {4 if 4 in budgets else min(budgets), max(budgets)}

    def changes(case: Case) -> int:
        return sum(value != first for name, value, first in zip(case._fields, case, base) if name != "budget")

    return [case for case in cases if changes(case) == 0 or (changes(case) == 1 and case.budget in two)]


def first_gradient(model: Any, case: Case) -> Tensor:
    """Of the first layer's M_k, as a step of that case computes it."""
    loss = language_loss(model, random_tokens(model, case.batch, case.length), {"spectral_budget": case.budget})
    return torch.autograd.grad(loss, model.model.layers[0].mixer.channel_mixing)[0]


def measure_cases(
    cases: Sequence[Case], model: ESSMForCausalLM, optimizer: torch.optim.Optimizer, limit: int, rounds: int
) -> list[dict[str, Any]]:
    """One row for each case, all measured in turn.

    Raises:
        RuntimeError: a checkpointed or compiled step has another gradient than the plain one.
    """
    device, largest = model.device, max(case.budget for case in cases)
    checkpointed = copy.deepcopy(model, {id(p): p for p in model.parameters()})  # the same weights
    checkpointed.gradient_checkpointing_enable()
    eager = {False: model, True: checkpointed}
    torch._dynamo.reset()  # or the next length would be compiled as one that varies
    compiled = {checkpointing: torch.compile(m) for checkpointing, m in eager.items()}
    rows: dict[Case, dict[str, Any]] = {}
    steps, peaks = {}, {}
    for case in cases:
        row = rows[case] = case._asdict()
        m = (compiled if case.compiled else eager)[case.checkpointing]
        shape = (case.length, case.batch, case.checkpointing)
        if shape not in peaks:  # they hardly depend on the budget
            call = {"spectral_budget": largest}
            make = functools.partial(make_step, eager[case.checkpointing], optimizer, [call], case.batch)
            peaks[shape] = peaks_that_fit(make, case.length, limit, device)
        if case.length not in peaks[shape]:
            row["skipped"] = f"a step would exceed {limit / 2**30:g} GiB"
            continue
        if case != case.plain():
            actual, facts = first_call(functools.partial(first_gradient, m, case))
            if case.compiled:
                row |= facts
            elif actual is None:
                raise RuntimeError(f"{case}: {facts['failed']}")
            if actual is None:
                continue
            row["gradient_error"] = common.require_close(
                f"gradient, {case}", actual, first_gradient(model, case), TOLERANCE[device.type]
            )
            del actual
        steps[case] = make_step(m, optimizer, [{"spectral_budget": case.budget}], case.batch, case.length)
        row["peak_bytes"] = common.peak_memory(steps[case], device)
    seconds = common.paired(steps, device, rounds, warmup=1, limit_seconds=240.0)
    for case, samples in seconds.items():
        row, plain, full = rows[case], case.plain(), case._replace(budget=largest)
        row["rounds"] = len(samples)
        row["seconds"] = common.spread(samples)
        row["tokens_per_second"] = common.spread([case.batch * case.length / s for s in samples])
        if plain in seconds:
            row["speed_over_plain"] = common.ratio(seconds[plain], samples)
            row["memory_over_plain"] = row["peak_bytes"] / rows[plain]["peak_bytes"]
        if full in seconds:
            row["time_over_largest_budget"] = common.ratio(samples, seconds[full])
    return list(rows.values())


def print_cases(rows: Sequence[dict[str, Any]], largest: int) -> None:
    def cells(row: dict[str, Any]) -> list[str]:
        settings = [str(row[name]) for name in ("batch", "length", "budget")]
        settings += ["on" if row["checkpointing"] else "off", MODES[row["compiled"]]]
        if "seconds" not in row:
            return [*settings, "skipped" if "skipped" in row else "failed", *"-------"]
        results = [common.ms(row["seconds"]), shown(row["tokens_per_second"], 0)]
        results += [shown(row[k]) if k in row else "-" for k in ("speed_over_plain", "time_over_largest_budget")]
        results.append(f"{row['peak_bytes'] / 2**20:.0f}")
        results.append(f"{row['memory_over_plain']:.2f}" if "memory_over_plain" in row else "-")
        return [*settings, *results, *(f"{row[k]:.3g}" if k in row else "-" for k in ("first_call_seconds", "graphs"))]

    header = "B L K checkpointing mode step_ms(min-max) tokens/s(min-max) speed/plain "
    header += f"time/K={largest} peak_MiB memory/plain first_call_s graphs"
    common.table(header, [cells(row) for row in rows])
    for reason in dict.fromkeys(f"{k}: {row[k]}" for row in rows for k in ("skipped", "failed") if k in row):
        print(reason)


def essm_table(args: argparse.Namespace) -> dict[str, Any]:
    gpu = on_gpu(args)
    lengths = args.lengths or ((128, 64) if args.quick else (4096, 1024, 16384))
    batches = args.batches or ((1, 2) if args.quick else (8, 1) if gpu else (1, 4))
    config = essm_config(max(lengths), args)
    budgets = args.budgets or common.clipped((4, 32) if args.quick else (2, 4, 8, 16, 32), config)
    everything = every_case(lengths, batches, budgets, args.modes)
    cases = everything if args.full else one_factor_at_a_time(everything)
    rounds = min(args.rounds, 7 if gpu else 3)
    settings = {"dtype": precision(args), "warmup": 1, "rounds": rounds, "recompile_limit": RECOMPILE_LIMIT}
    settings |= common.model_settings(args, config)
    device, report = common.start("training_step_essm", args, **settings, threads=torch.get_num_threads())
    common.check_peak_memory(device)
    print(f"{len(cases)} of the {len(everything)} combinations of")
    print(f"  L {lengths}, batch {batches}, K {budgets}, checkpointing off and on, {' and '.join(args.modes)}")
    if len(cases) < len(everything):
        print(
            f"left out, for --full: combinations that change two or more of length, batch, checkpointing and mode from "
            f"{lengths[0]}, {batches[0]}, off, {args.modes[0]}, and those that change one, at other K than two"
        )
    report["left_out"] = len(everything) - len(cases)
    model = make_essm(max(lengths), args, device)
    report["parameters"] = model.num_parameters()
    report["gradient_error"] = check(model, max(lengths), device)
    print(f"{report['parameters']} parameters; gradients by chunked and by FFT agree to {report['gradient_error']:.1e}")
    optimizer, report["results"], report["targets"] = make_optimizer(model), [], []
    # All in turn, or each shape for itself.
    groups = itertools.groupby(cases, key=lambda case: (case.length, case.batch) if args.full else None)
    for _, group in groups:
        rows = measure_cases(list(group), model, optimizer, memory_limit(args), rounds)
        print_cases(rows, max(budgets))
        report["results"] += rows
    return common.finish(report, args, device)
