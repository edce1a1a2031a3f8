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
import functools
from typing import Any

import torch
from transformers import MambaConfig, MambaForCausalLM

from modeling_essm.companions import DiagonalSSMConfig, DiagonalSSMForCausalLM, allocate, importance, prune, remove

from . import common

RATIOS = (0.0, 0.2, 0.5, 0.8)
KINDS = ("s5", "lru", "s4d", "mamba")


def make_model(kind: str, width: int, layers: int, modes: int) -> Any:
    sizes = {"vocab_size": 259, "hidden_size": width, "num_hidden_layers": layers, "state_size": modes}
    torch.manual_seed(0)
    if kind == "mamba":
        return MambaForCausalLM(MambaConfig(**sizes, pad_token_id=256, bos_token_id=257, eos_token_id=258)).eval()
    return DiagonalSSMForCausalLM(DiagonalSSMConfig(parameterization=kind, **sizes)).eval()


def smaller(model: Any, ratio: float) -> Any:
    """A copy with the same share of every layer's modes removed, of S4D the same number in every channel."""
    found = copy.deepcopy(model)
    if ratio:
        scores = importance(found, "random", granularity="mode_index")
        prune(found, allocate(scores, amount=ratio, scope="uniform"))
        remove(found)
    return found


@torch.inference_mode()
def measure(kind: str, device: torch.device, rounds: int, quick: bool) -> list[dict[str, Any]]:
    width, layers, length, batch = (16, 1, 32, 1) if quick else (256, 6, 1024, 4)
    modes = {"s4d": 64, "mamba": 64}.get(kind, 256) if not quick else 10
    whole = make_model(kind, width, layers, modes).to(device)
    ids = torch.randint(0, 256, (batch, length), device=device)
    cache_name = "cache_params" if kind == "mamba" else "past_key_values"
    forwards, steps, rows = {}, {}, []
    for ratio in RATIOS:
        model = smaller(whole, ratio)
        cache = {cache_name: model(ids[:1, :16], use_cache=True)[cache_name]}
        forwards[ratio] = functools.partial(model, ids, use_cache=False)
        steps[ratio] = functools.partial(model, ids[:1, 15:16], use_cache=True, **cache)
        rows.append({"model": kind, "pruned": ratio, "parameters": model.num_parameters()})
        rows[-1] |= {"state_bytes": common.state_bytes(cache)}
        rows[-1] |= {"peak_bytes": common.peak_memory(forwards[ratio], device)}
    for name, calls in (("forward", forwards), ("step", steps)):
        seconds = common.paired(calls, device, rounds)
        for row, samples in zip(rows, seconds.values()):
            row[f"{name}_seconds"] = common.spread(samples)
            row[f"{name}_speedup"] = common.ratio(seconds[0.0], samples)
    return rows


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    p.add_argument("--only", nargs="+", choices=KINDS, default=[*KINDS])
    args = p.parse_args(argv)
    device, report = common.start("state_removal", args, models=args.only)
    with common.threads(1):
        report["results"] = [row for kind in args.only for row in measure(kind, device, args.rounds, args.quick)]
    return common.finish(report, args)


if __name__ == "__main__":
    main()
