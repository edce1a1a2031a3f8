# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What does it save to take modes out of a model: time of a forward pass and of a step, peak memory, weights, state?

    python -m benchmarks.state_removal

Language models of width 256 and 6 layers with random weights: S5 and LRU of 256 modes, S4D of 64 modes a channel and
the library's Mamba of 64 states. `remove` takes out 20, 50 and 80% of the modes of every layer, which ones does not
matter here. The whole model and the smaller ones take turns, round after round, in one process and on one thread;
ratios are of the same round. A step is one token with a cache, batch 1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM

from modeling_essm.companions import (
    DiagonalSSMConfig,
    DiagonalSSMForCausalLM,
    allocate,
    importance,
    prune,
    remove,
)

from . import common

RATIOS = (0.2, 0.5, 0.8)
KINDS = ("s5", "lru", "s4d", "mamba")


def make_model(kind: str, width: int, layers: int, modes: int) -> Any:
    """A new language model of bytes."""
    sizes = {"vocab_size": 259, "hidden_size": width, "num_hidden_layers": layers, "state_size": modes}
    torch.manual_seed(0)
    if kind == "mamba":
        return MambaForCausalLM(MambaConfig(**sizes, pad_token_id=256, bos_token_id=257, eos_token_id=258)).eval()
    return DiagonalSSMForCausalLM(DiagonalSSMConfig(parameterization=kind, **sizes)).eval()


def smaller(model: Any, ratio: float) -> Any:
    """A copy with the same share of every layer's modes removed, of S4D the same number in every channel."""
    found = copy.deepcopy(model)
    prune(found, allocate(importance(found, "random", granularity="mode_index"), amount=ratio, scope="uniform"))
    remove(found)
    return found


def stepper(model: Any, ids: Tensor) -> tuple[Callable[[], Any], int]:
    """One token after a prompt, again and again, and the bytes that the cache holds then."""
    outputs, token = model(ids, use_cache=True), ids[:, -1:]
    name = next(n for n in ("past_key_values", "cache_params") if getattr(outputs, n, None) is not None)
    cache = getattr(outputs, name)
    return lambda: model(token, use_cache=True, **{name: cache}), common.state_bytes(cache)


@torch.inference_mode()
def measure(kind: str, device: torch.device, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """The whole model and those with fewer modes."""
    width, layers, length, batch = (16, 1, 32, 1) if quick else (256, 6, 1024, 4)
    modes = {"s4d": 64, "mamba": 64}.get(kind, 256) if not quick else 10
    whole = make_model(kind, width, layers, modes).to(device)
    models = {0.0: whole} | {ratio: smaller(whole, ratio) for ratio in RATIOS}
    ids = torch.randint(0, 256, (batch, length), device=device)
    forwards = {ratio: (lambda model=model: model(ids, use_cache=False)) for ratio, model in models.items()}
    steps = {ratio: stepper(model, ids[:1, :16]) for ratio, model in models.items()}
    seconds = common.paired(forwards, device, rounds)
    step_seconds = common.paired({ratio: step for ratio, (step, _) in steps.items()}, device, rounds)
    return [
        {
            "model": kind,
            "pruned": ratio,
            "parameters": model.num_parameters(),
            "state_bytes": steps[ratio][1],
            "peak_bytes": common.peak_memory(forwards[ratio], device),
            "forward_seconds": common.spread(seconds[ratio]),
            "forward_speedup": common.ratio(seconds[0.0], seconds[ratio]),
            "step_seconds": common.spread(step_seconds[ratio]),
            "step_speedup": common.ratio(step_seconds[0.0], step_seconds[ratio]),
        }
        for ratio, model in models.items()
    ]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    p.add_argument("--only", nargs="+", choices=KINDS, default=[*KINDS])
    args = p.parse_args(argv)
    device, report = common.start("state_removal", args, quick=args.quick, models=args.only)
    rounds = 1 if args.quick else args.rounds
    with common.threads(1):
        report["results"] = [row for kind in args.only for row in measure(kind, device, rounds, args.quick)]
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
