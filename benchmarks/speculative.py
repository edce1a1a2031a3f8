# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Does drafting at a small budget make decoding at the full one faster, and how many drafts are accepted?

    python -m benchmarks.speculative --model runs/train_clm/model [--prompt "def main("]

A trained byte-level model decodes greedily at its full budget, batch 1, through `generate`: plainly, and with every
draft budget and draft length (0: adaptive), in turn within every round. The tokens must be the same. Speed-ups are
ratios within rounds. Without --model the weights are random, and the figures mean nothing. The report's name tells the
block, unless it is the paper's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from modeling_essm import ESSMConfig, ESSMForCausalLM
from modeling_essm.decoding import speculate

from . import common


def main(argv: list[str] | None = None) -> dict[str, Any]:
    from essm_train.models import TRUST_HELP, load_model

    p = common.parser(__doc__)
    p.add_argument("--model", help="saved model")
    p.add_argument("--prompt", default="def main(", help="text to continue")
    p.add_argument("--tokens", type=int, default=128, help="new tokens of one sample")
    p.add_argument("--draft_budgets", type=int, nargs="+", default=None)
    p.add_argument("--draft_lengths", type=int, nargs="+", default=None, help="0 adapts")
    p.add_argument("--trust_remote_code", action="store_true", help=TRUST_HELP)
    args = p.parse_args(argv)
    tokens = 8 if args.quick else args.tokens
    lengths = args.draft_lengths or ([0] if args.quick else [0, 2, 4, 8])
    if args.model:
        load = functools.partial(load_model, AutoModelForCausalLM, args.model, trust_remote_code=args.trust_remote_code)
    else:
        torch.manual_seed(0)
        load = functools.partial(ESSMForCausalLM, ESSMConfig(hidden_size=64, num_hidden_layers=2))
    model = load().eval()
    capacity = model.config.num_spectral_channels
    drafts = args.draft_budgets or ([2] if args.quick else [K for K in (2, 3, 4, 8) if capacity > K])
    settings = {
        "config": model.config.block,
        "parameters": model.num_parameters(),
        "layers": model.config.num_hidden_layers,
        "capacity": capacity,
        "trained": bool(args.model),
    }
    settings |= {"tokens": tokens, "draft_budgets": drafts, "draft_lengths": lengths}
    device, report = common.start("speculative", args, **settings)
    model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    ids = torch.tensor([list(args.prompt.encode())], device=device)
    greedy = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def decode(draft: int = 0, length: int = 0) -> Any:
        extra = {"custom_generate": speculate(draft, length or None)} if draft else {}
        return model.generate(ids, **greedy, **extra, return_dict_in_generate=True)

    plain = decode()
    functions = {(0, 0): decode}
    rates = {}
    for draft in drafts:
        for length in lengths:
            found = decode(draft, length)
            if device.type == "cpu" and not torch.equal(found.sequences, plain.sequences):
                raise RuntimeError(f"drafting at K = {draft} changed the tokens; wrong results are not timed")
            rates[draft, length] = (found.acceptance_rate, found.num_verifications)
            functions[draft, length] = functools.partial(decode, draft, length)
    with common.threads(1):
        samples = common.paired(functions, device, args.rounds, warmup=1)
    rows, report["results"] = [], []
    for (draft, length), seconds in samples.items():
        row = {
            "draft_budget": draft,
            "draft_length": length,
            "tokens_per_second": common.spread([tokens / s for s in seconds]),
        }
        row["speedup"] = common.ratio(samples[0, 0], seconds)
        if draft:
            row["acceptance_rate"], row["verifications"] = rates[draft, length]
        report["results"].append(row)
        accepted = f"{row['acceptance_rate']:.2f}" if draft else "-"
        rows.append(
            [draft or "plain", length or "-", row["tokens_per_second"]["median"], row["speedup"]["median"], accepted]
        )
    common.table("draft_K length tokens/s speedup accepted", rows)
    best = max(row["speedup"]["median"] for row in report["results"] if row["draft_budget"])
    report["targets"] = [common.target("best speed-up over plain decoding", best, least=1.0)]
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
