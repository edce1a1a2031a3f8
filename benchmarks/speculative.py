# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Does drafting at a small budget make decoding at the full one faster, and how many drafts are accepted?

    python -m benchmarks.speculative --model runs/train_clm/model [--prompt "def main("]

A trained byte-level model decodes greedily at its full budget, batch 1, through `generate`: plainly, and with every
draft budget and draft length (0: adaptive), in turn within every round. The tokens must be the same. Speed-ups are
ratios within rounds. Without --model the weights are random, and the figures mean nothing.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from essm_train.arguments import TRUST_HELP
from essm_train.models import load_model
from modeling_essm import ESSMConfig, ESSMForCausalLM
from modeling_essm.decoding import speculate

from . import common


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    p.add_argument("--model", help="saved model")
    p.add_argument("--prompt", default="def main(", help="text to continue")
    p.add_argument("--tokens", type=int, default=128, help="new tokens of one sample")
    p.add_argument("--draft_budgets", type=int, nargs="+", default=[2, 3, 4, 8])
    p.add_argument("--draft_lengths", type=int, nargs="+", default=[0, 2, 4, 8], help="0 adapts")
    p.add_argument("--trust_remote_code", action="store_true", help=TRUST_HELP)
    args = p.parse_args(argv)
    if args.quick:
        args.tokens, args.draft_budgets, args.draft_lengths = 8, [2], [0]
    torch.manual_seed(0)
    if args.model:
        model = load_model(AutoModelForCausalLM, args.model, trust_remote_code=args.trust_remote_code)
    else:
        model = ESSMForCausalLM(ESSMConfig(hidden_size=64, num_hidden_layers=2))
    capacity = model.config.num_spectral_channels
    settings = {"parameters": model.num_parameters(), "layers": model.config.num_hidden_layers, "capacity": capacity}
    settings |= {"config": model.config.block, "trained": bool(args.model), "tokens": args.tokens}
    device, report = common.start("speculative", args, **settings)
    model.eval().to(device, common.dtype_of(device))
    ids = torch.tensor([list(args.prompt.encode())], device=device)
    greedy = {"max_new_tokens": args.tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def decode(draft: int = 0, length: int = 0) -> Any:
        extra = {"custom_generate": speculate(draft, length or None)} if draft else {}
        return model.generate(ids, **greedy, **extra, return_dict_in_generate=True)

    plain, calls, rates = decode(), {(0, 0): decode}, {}
    drafts = [K for K in args.draft_budgets if capacity > K]
    for draft, length in itertools.product(drafts, args.draft_lengths):
        found = decode(draft, length)
        if device.type == "cpu" and not torch.equal(found.sequences, plain.sequences):
            raise RuntimeError(f"drafting at K = {draft} changed the tokens; wrong results are not timed")
        rates[draft, length] = found.acceptance_rate
        calls[draft, length] = functools.partial(decode, draft, length)
    with common.threads(1):
        samples = common.paired(calls, device, args.rounds, warmup=1)
    report["results"] = []
    for key, seconds in samples.items():
        row = {"draft_budget": key[0], "draft_length": key[1], "tokens_per_second": common.rate(seconds, args.tokens)}
        row |= {"speedup": common.ratio(samples[0, 0], seconds), "acceptance_rate": rates.get(key)}
        report["results"].append(row)
    return common.finish(report, args)


if __name__ == "__main__":
    main()
