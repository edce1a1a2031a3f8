# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Does drafting at a small budget make decoding at the full one faster, and how many drafts are accepted?

    python -m benchmarks.speculative --model runs/train_clm/model [--prompt "def main("] [--compiled]

A trained byte-level model decodes greedily at its full budget, batch 1, through `generate`: plainly, and with every
draft budget and draft length (0: adaptive), in turn within every round. The tokens must be the same. Speed-ups are
ratios within rounds, over plain decoding by the same steps: eager ones, or with --compiled also such as
`compile_decoding` makes, while calls that verify stay eager.
"""

from __future__ import annotations

import copy
import functools
import itertools
from pathlib import Path
from typing import Any

import torch

from modeling_essm import ESSMForCausalLM
from modeling_essm.decoding import compile_decoding, speculate

from . import common


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    p.add_argument("--model", type=Path, required=True, help="saved language model of bytes")
    p.add_argument("--prompt", default="def main(", help="text to continue")
    p.add_argument("--tokens", type=common.positive, default=128, help="new tokens of one sample")
    p.add_argument("--draft_budgets", type=common.positive, nargs="+", default=[2, 3, 4, 8])
    p.add_argument("--draft_lengths", type=int, nargs="+", default=[0, 2, 4, 8], help="0 adapts")
    p.add_argument("--compiled", action="store_true", help="compiled steps beside eager ones; needs a C++ compiler")
    args = p.parse_args(argv)
    if args.quick:
        args.tokens, args.draft_budgets, args.draft_lengths = 8, [2], [0]
    model = ESSMForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    capacity = model.config.num_spectral_channels
    settings = {"parameters": model.num_parameters(), "layers": model.config.num_hidden_layers, "capacity": capacity}
    settings |= {"config": common.name_of(args.model), "prompt": args.prompt, "tokens": args.tokens}
    device, report = common.start("speculative", args, **settings)
    model.eval().to(device, common.dtype_of(device))
    ids = torch.tensor([list(args.prompt.encode())], device=device)
    greedy = {"max_new_tokens": args.tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    drafts = [K for K in args.draft_budgets if capacity > K]
    models = {"eager": model}
    if args.compiled:
        models["compiled"] = compile_decoding(copy.deepcopy(model), [None, *drafts])

    def decode(steps: str, draft: int = 0, length: int = 0) -> Any:
        extra = {"custom_generate": speculate(draft, length or None)} if draft else {}
        return models[steps].generate(ids, **greedy, **extra, return_dict_in_generate=True)

    plain, calls, rates = decode("eager").sequences, {}, {}
    for key in itertools.product(models, [(0, 0), *itertools.product(drafts, args.draft_lengths)]):
        steps, (draft, length) = key
        found = decode(steps, draft, length)
        if device.type == "cpu" and not torch.equal(found.sequences, plain):
            raise RuntimeError(f"{steps} steps, drafts at K = {draft}: other tokens; wrong results are not timed")
        rates[key] = found.acceptance_rate if draft else None
        calls[key] = functools.partial(decode, steps, draft, length)
    with common.threads(1):
        samples = common.paired(calls, device, args.rounds, warmup=1, limit_seconds=240.0)
    report["results"] = []
    for key, seconds in samples.items():
        steps, (draft, length) = key
        row = {"steps": steps, "draft_budget": draft, "draft_length": length, "acceptance_rate": rates[key]}
        row |= {"tokens_per_second": common.rate(seconds, args.tokens)}
        row |= {"speedup": common.ratio(samples[steps, (0, 0)], seconds)}
        row |= {"over_eager_plain": common.ratio(samples["eager", (0, 0)], seconds)}
        report["results"].append(row)
    return common.finish(report, args)


if __name__ == "__main__":
    main()
