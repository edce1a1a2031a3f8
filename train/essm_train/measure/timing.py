# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Paired timing, exact peak memory, and the machine that both are measured on.

    seconds = paired({"K=4": small, "K=32": large}, device, rounds=7)
    row = {"seconds": spread(seconds["K=4"]), "over K=32": ratio(seconds["K=4"], seconds["K=32"])}

Contenders run in turn within every round, in alternating order, so that a busy machine slows them alike; ratios are
taken within rounds. Times are seconds per call. Memory is bytes above what was held before the call.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import platform
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor
from torch._C._profiler import _EventType

from modeling_essm import ESSMCache, ESSMForCausalLM
from modeling_essm.budgets.profile import cpu_cores, cpu_name

Name = TypeVar("Name", bound=Hashable)


def pick_device(name: str) -> torch.device:
    """That of --device; "auto" is a GPU with CUDA, or the CPU."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def working_device() -> torch.device:
    """The accelerator, if this machine has one that torch was built for; else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """CPU threads of torch inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def timed(function: Callable[[], Any], device: torch.device, repeats: int = 1) -> float:
    """Seconds per call; on a GPU between two events, so that queued work is neither missed nor charged twice."""
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(repeats):
            function()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / repeats
    wait = (lambda: None) if device.type == "cpu" else functools.partial(torch.accelerator.synchronize, device)
    wait()
    started = time.perf_counter()
    for _ in range(repeats):
        function()
    wait()
    return (time.perf_counter() - started) / repeats


def paired(
    functions: Mapping[Name, Callable[[], Any]],
    device: torch.device,
    rounds: int = 7,
    warmup: int = 2,
    sample_seconds: float = 0.02,
    limit_seconds: float = 30.0,
) -> dict[Name, list[float]]:
    """Run the functions in turn, round after round, after warm-up; torch.utils.benchmark times one after the other.

    Args:
        sample_seconds: each sample repeats its function until these are filled; 0 makes a sample one call.
        limit_seconds: when these have passed, no new round starts after the third.
    Returns:
        seconds per call of each function, one entry per round.
    """
    repeats = {}
    for name, function in functions.items():
        fastest = min(timed(function, device) for _ in range(max(1, warmup)))
        repeats[name] = max(1, round(sample_seconds / max(fastest, 1e-7)))
    samples: dict[Name, list[float]] = {name: [] for name in functions}
    start = time.perf_counter()
    for i in range(rounds):
        if i >= 3 and time.perf_counter() - start > limit_seconds:
            break
        for name in list(functions)[:: 1 if i % 2 == 0 else -1]:
            samples[name].append(timed(functions[name], device, repeats[name]))
    return samples


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest and of how many rounds, as benchmarks store a measured quantity."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": len(values)}


def ratio(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    """a / b within each round."""
    return spread([x / y for x, y in zip(a, b)])


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware and versions; nothing that names a host or a person."""
    return {
        "cpu": cpu_name(),
        "cpu_cores": cpu_cores(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def peak_memory(function: Callable[[], Any], device: torch.device) -> int:
    """Most tensor bytes held at once during a call, above those held before it, results included.

    On a CPU every allocation and its release is summed in order of time: exact, unlike the resident set. Scratch space
    that MKL takes without asking torch is not seen. The profiler also tells of the release of a block from before the
    call, where an earlier profile knew one at its address; only what the call itself took is summed.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = function()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = function()
    del result
    events = list(profile.profiler.kineto_results.experimental_event_tree())
    for event in events:  # grows by the events inside each
        events.extend(event.children)
    memory = [event for event in events if event.tag == _EventType.Allocation]
    blocks: dict[int, int] = {}
    held = peak = 0
    for event in sorted(memory, key=lambda event: event.start_time_ns):
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size > 0:
            blocks[address] = size
            held += size
        else:
            held -= blocks.pop(address, 0)
        peak = max(peak, held)
    return peak


@torch.inference_mode()
def decode(model: ESSMForCausalLM, cache: ESSMCache, token: Tensor, budget: int, steps: int) -> Tensor:
    """Greedy steps from a cache, which advances; returns the last token (B, 1)."""
    for _ in range(steps):
        logits = model(token, past_key_values=cache, use_cache=True, spectral_budget=budget).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
    return token


def decoder(model: ESSMForCausalLM, cache: ESSMCache, token: Tensor, K: int, steps: int) -> Callable[[], Tensor]:
    """A call that decodes from its own copy of the cache, so that every round starts at the stated context."""
    return lambda: decode(model, copy.deepcopy(cache), token, K, steps)
