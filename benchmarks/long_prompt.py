# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How much memory and time does it take to read a prompt of a million bytes?

    python -m benchmarks.long_prompt [--text_files book.txt] [--chunk 8192] [--config hub_configs/essm-gated-20m]

The paper's 21M-parameter model, or that of --config, with random weights and filter_length 2^20 reads prompts of
growing length through `generate(prefill_chunk_size=..)` and writes one byte; short ones also in one piece. Peak memory
is that of the tensors of the whole call above those held before (such as the prompt's ids, 8 bytes each), beside the
growth of the process's largest resident set, which a former length may have raised already. The state after chunks must
be that after one piece. Without --text_files the bytes are random.
"""

from __future__ import annotations

import contextlib
import functools
import resource
from typing import Any

import torch
from torch import Tensor

from modeling_essm import ESSMCache, ESSMForCausalLM

from . import common


def read_prompt(paths: list[str] | None, length: int) -> Tensor:
    """(1, length) byte ids. Raises ValueError for too short a text."""
    if not paths:
        return torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(0))
    from essm_train.data.blocks import to_stream
    from essm_train.data.documents import read_files
    from essm_train.data.tokens import ByteEncoder

    stream, _ = to_stream(read_files(paths), ByteEncoder())
    if len(stream) < length:
        raise ValueError(f"the text must hold {length} tokens, got {len(stream)}")
    return torch.from_numpy(stream[:length].astype("int64"))[None]


@torch.inference_mode()
def read(model: ESSMForCausalLM, ids: Tensor, budget: int, chunk: int | None) -> ESSMCache:
    """The state after the prompt and one new byte."""
    output = model.generate(
        ids,
        max_new_tokens=1,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        spectral_budget=budget,
        prefill_chunk_size=chunk,
        return_dict_in_generate=True,
    )
    return output.past_key_values


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    common.add_config(p)
    p.add_argument("--lengths", type=int, nargs="+", default=None)
    p.add_argument("--one_piece", type=int, default=None, help="longest prompt that is also read in one piece")
    p.add_argument("--chunk", type=int, default=None)
    p.add_argument("--budget", type=int, default=4)
    p.add_argument("--text_files", nargs="+")
    args = p.parse_args(argv)
    lengths = sorted(args.lengths or ([256, 512] if args.quick else [1 << 14, 1 << 16, 1 << 18, 1 << 20]))
    chunk, one_piece = args.chunk or (128 if args.quick else 8192), args.one_piece or (256 if args.quick else 1 << 16)
    small = {"num_hidden_layers": 2, "hidden_size": 32, "filter_length": 512} if args.quick else {}
    config = common.configuration(args, **{"filter_length": max(*lengths, 1 << 20), **small})
    settings = {"budget": args.budget, "chunk": chunk, **common.model_settings(args, config)}
    device, report = common.start(
        "long_prompt", args, **settings, threads=torch.get_num_threads(), text=bool(args.text_files)
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = ESSMForCausalLM(config).eval().to(device, dtype)
    ids = read_prompt(args.text_files, lengths[-1]).to(device)
    common.check_peak_memory(device)
    read(model, ids[:, : 2 * chunk], args.budget, chunk)  # constants of the basis
    report["results"], calls = [], []
    for length in lengths:  # before anything is profiled, which takes memory of its own
        for size in (chunk, None) if length <= one_piece else (chunk,):
            call = functools.partial(read, model, ids[:, :length], args.budget, size)
            resident = _largest_resident_set()
            seconds = common.timed(call, device)
            row: dict[str, Any] = {"length": length, "chunk": size, "seconds": seconds}
            row |= {"tokens_per_second": length / seconds}
            row["resident_growth_bytes"] = _largest_resident_set() - resident
            report["results"].append(row)
            calls.append(call)
    for row, call in zip(report["results"], calls):
        row["peak_bytes"] = common.peak_memory(call, device)
        if row["chunk"] is None:
            states = [
                [layer.tensors["features"] for layer in read(model, ids[:, : row["length"]], args.budget, n).layers]
                for n in (chunk, None)
            ]
            tolerance = 1e-3 if dtype == torch.float32 else 5e-2
            pairs = zip(*states)
            row["relative_error"] = max(common.require_close("state", a, b, tolerance) for a, b in pairs)
    columns = ("peak_bytes", "resident_growth_bytes")
    common.table(
        "length chunk peak_MiB resident_MiB seconds tokens/s",
        [
            [r["length"], r["chunk"] or "-", *(r[c] / 2**20 for c in columns), r["seconds"], r["tokens_per_second"]]
            for r in report["results"]
        ],
    )
    chunked = [r for r in report["results"] if r["chunk"]]
    peaks = [r["peak_bytes"] for r in chunked]
    report["targets"] = [common.target("peak memory, longest prompt over shortest", peaks[-1] / peaks[0], most=1.05)]
    return common.finish(report, args, device)


def _largest_resident_set() -> int:
    """Bytes; 0 where the system does not tell."""
    with contextlib.suppress(OSError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return 0


if __name__ == "__main__":
    main()
