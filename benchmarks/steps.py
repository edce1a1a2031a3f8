# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What the tables of benchmarks.training_step share: the ES-SSM, one training step, its memory, its compilation."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

from modeling_essm import ESSMConfig, ESSMForCausalLM

from . import common

MODES = ("eager", "compiled")
RECOMPILE_LIMIT = 64  # more than there are graphs at once here
TOLERANCE = {"cpu": 1e-4, "cuda": 5e-2}  # of checkpointed and compiled gradients: fp32, bf16 autocast


def essm_config(length: int, args: argparse.Namespace) -> ESSMConfig:
    if args.quick:
        return common.configuration(args, hidden_size=64, num_hidden_layers=2, filter_length=max(length, 512))
    return common.configuration(args, filter_length=max(length, common.configuration(args).filter_length))


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
