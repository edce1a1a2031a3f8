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
         shapes usual for them. The models take turns. Mamba2ForCausalLM runs transformers' pure torch path wherever
         the mamba_ssm kernels are not installed, always on a CPU: its figure then is that path's, not the
         architecture's. A model whose step would exceed --memory, extrapolated from shorter lengths, is measured at the
         longest length that fits, and the output says so.
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
import copy
import functools
import importlib.util
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from modeling_essm import ESSMConfig, ESSMForCausalLM
from modeling_essm.training.budget_dropout import budget_schedule

from . import common

IDS = {"vocab_size": 259, "pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258, "tie_word_embeddings": True}
MODES = ("eager", "compiled")
RECOMPILE_LIMIT = 64  # more than there are graphs at once here
TOLERANCE = {"cpu": 1e-4, "cuda": 5e-2}  # of checkpointed and compiled gradients: fp32, bf16 autocast


# ---------------------------------------------------------------------------------------------------------------------
# Models and steps.


def essm_config(length: int, args: argparse.Namespace) -> ESSMConfig:
    if args.quick:
        return common.configuration(args, hidden_size=64, num_hidden_layers=2, filter_length=max(length, 512))
    return common.configuration(args, filter_length=max(length, common.configuration(args).filter_length))


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
        "Mamba-2": Mamba2ForCausalLM(Mamba2Config(**IDS, **mamba, n_groups=1, use_cache=False)),
    }
    return models if args.config is None else models | {args.config.name: ESSMForCausalLM(essm_config(length, args))}


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def make_essm(length: int, args: argparse.Namespace, device: torch.device) -> ESSMForCausalLM:
    """The ES-SSM of the tables that have no other model."""
    torch.manual_seed(0)
    return ESSMForCausalLM(essm_config(length, args)).to(device).train()


def random_tokens(model: Any, batch: int, length: int) -> Tensor:
    """(batch, length) bytes, always the same, where the model is."""
    tokens = torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(0))
    return tokens.to(next(model.parameters()).device)


def language_loss(model: Any, tokens: Tensor, arguments: dict[str, Any]) -> Tensor:
    """() cross-entropy, in the precision in which the device trains."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
        return model(input_ids=tokens, labels=tokens, use_cache=False, **arguments).loss


def make_step(
    model: Any, optimizer: torch.optim.Optimizer, calls: Sequence[dict], batch: int, length: int
) -> Callable[[], Tensor]:
    """A call that makes one whole training step: both passes with the arguments of each of `calls`, then an update."""
    tokens = random_tokens(model, batch, length)

    def step() -> Tensor:
        for arguments in calls:
            loss = language_loss(model, tokens, arguments)
            (loss / len(calls)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def check(model: ESSMForCausalLM, length: int, device: torch.device) -> float:
    """Gradients of the first layer's M_k by `chunked` and by the paper's FFT must agree in fp32; raises otherwise."""
    tokens = torch.randint(0, 256, (1, min(length, 512)), device=device)
    gradients = []
    for algorithm in ("fft", "chunked"):
        for layer in model.model.layers:
            layer.mixer.algorithm = algorithm
        loss = model(input_ids=tokens, labels=tokens).loss
        gradients += torch.autograd.grad(loss, model.model.layers[0].mixer.channel_mixing)
    expected, actual = gradients
    return common.require_close("gradient of channel_mixing by chunked and by FFT", actual, expected, 1e-3)


def peaks_that_fit(make: Callable[[int], Callable], longest: int, limit: int, device: torch.device) -> dict[int, int]:
    """Peak bytes at longest / 8 and its doubles, while memory that keeps growing as it did would stay in the limit."""
    length, growth, peaks = max(1, longest // 8), 2.0, {}
    make(length)()  # the optimizer's moments and other lasting things exist from here on
    while True:
        peaks[length] = common.peak_memory(make(length), device)
        if length // 2 in peaks:
            growth = max(2.0, peaks[length] / peaks[length // 2])
        if 2 * length > longest or peaks[length] * growth > limit:
            return peaks
        length *= 2


def on_gpu(args: argparse.Namespace) -> bool:
    return common.pick_device(args.device).type == "cuda"


def precision(args: argparse.Namespace) -> str:
    return "bfloat16 autocast" if on_gpu(args) else "float32"


def memory_limit(args: argparse.Namespace) -> int:
    """Bytes."""
    return int((args.memory or (100 if on_gpu(args) else 12)) * 2**30)


def shown(measured: dict[str, float], digits: int = 2) -> str:
    """A `spread` as median (min-max)."""
    return "{}({}-{})".format(*(f"{measured[k]:.{digits}f}" for k in ("median", "min", "max")))


# ---------------------------------------------------------------------------------------------------------------------
# models: beside other architectures.


def models_table(args: argparse.Namespace) -> dict[str, Any]:
    gpu = on_gpu(args)
    length = args.length or (128 if args.quick else 4096)
    batch = args.batch or (8 if gpu and not args.quick else 1)
    limit, dtype, rounds = memory_limit(args), precision(args), min(args.rounds, 7 if gpu else 3)
    settings = {"length": length, "batch": batch, "dtype": dtype, "warmup": 1, "rounds": rounds}
    settings |= common.model_settings(args, essm_config(length, args))
    device, report = common.start("training_step", args, **settings, threads=torch.get_num_threads())
    common.check_peak_memory(device)
    models = {name: model.to(device).train() for name, model in make_models(length, args).items()}
    report["parameters"] = {name: sum(p.numel() for p in m.parameters()) for name, m in models.items()}
    print("parameters: " + ", ".join(f"{name} {count}" for name, count in report["parameters"].items()))
    kernels = gpu and importlib.util.find_spec("mamba_ssm") is not None
    report["mamba2_path"] = "mamba_ssm kernels" if kernels else "pure torch"
    print(f"Mamba-2 runs on: {report['mamba2_path']}" + ("" if kernels else " (not its architecture's best speed)"))
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


# ---------------------------------------------------------------------------------------------------------------------
# Compilation.


def compiled_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def first_call(call: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Make a call that compiles.

    Returns:
        its result, and seconds and number of graphs; or None, and why it failed.
    """
    graphs, start = compiled_graphs(), time.perf_counter()
    try:
        result = call()
    except Exception as error:  # a compiler may raise anything
        return None, {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    return result, {"first_call_seconds": time.perf_counter() - start, "graphs": compiled_graphs() - graphs}


# ---------------------------------------------------------------------------------------------------------------------
# essm: over its own settings.


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


# ---------------------------------------------------------------------------------------------------------------------
# dropout: an update with budget dropout over one at the full budget.


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


# ---------------------------------------------------------------------------------------------------------------------


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
