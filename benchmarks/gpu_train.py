# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How far does the flagship get in a few minutes of a GPU, beside Llama and Mamba-2 of its size?

    python -m benchmarks.gpu_train --train_file novels-train.parquet --text_file novels-validation.parquet \\
        --output_dir runs/gpu_train --seconds 480 [--models flagship] [--compile]

Byte-level language models of about 130M parameters read random windows of the same text: that of
hub_configs/essm-elastic-130m, trained at all its sizes, Llama, and Mamba-2 by chunks. Each has a share of the seconds;
the learning rate rises over the first updates and falls to zero over the last quarter of the share. bf16 autocast over
fp32 weights. Held-out bits per byte are measured at the end, of the flagship at several budgets.

A run that was stopped goes on from its last checkpoint in --output_dir when started again: seconds already spent count.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from essm_train.baselines.mamba import by_chunks
from essm_train.files import replacing, write_json
from essm_train.run.steps import adamw, update
from modeling_essm import ESSMConfig, ESSMForCausalLM
from modeling_essm.training.budget_dropout import Part, allow_compiled_budgets, budget_losses, budget_schedule

from . import common

VOCABULARY, END = 259, 258
WARMUP, DECAY = 100, 0.25  # updates, share of the seconds
DISTILLATION = 0.5  # as train_clm has it for that schedule
FLAGSHIP = Path(__file__).parent.parent / "hub_configs/essm-elastic-130m"
SHARES = {"flagship": 0.6, "Mamba-2": 0.2, "Llama": 0.2}


def make_model(name: str, quick: bool) -> nn.Module:
    torch.manual_seed(0)
    if name == "flagship":
        small = {"hidden_size": 32, "num_hidden_layers": 2, "filter_length": 512} if quick else {}
        return ESSMForCausalLM(common.configuration(argparse.Namespace(config=FLAGSHIP), **small))
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "hidden_size": 32 if quick else 1024,
    }
    if name == "Llama":
        fields |= {"num_hidden_layers": 2 if quick else 10, "intermediate_size": 88 if quick else 2816}
        return LlamaForCausalLM(LlamaConfig(**fields, num_attention_heads=2 if quick else 16))
    sizes = (2, 4, 16, 16) if quick else (20, 32, 64, 128)
    fields |= dict(zip(("num_hidden_layers", "num_heads", "head_dim", "state_size"), sizes))
    fields |= {"n_groups": 1, "chunk_size": 64, "use_cache": False}
    model = Mamba2ForCausalLM(Mamba2Config(**fields, pad_token_id=256, bos_token_id=257, eos_token_id=END))
    by_chunks(model)
    return model


def read_stream(path: Path) -> Tensor:
    """(n,) int16: the bytes of every text in the column `text` of a Parquet file, each text ended by <eos>."""
    end, pieces = torch.tensor([END], dtype=torch.int16), []
    for text in pq.read_table(path, columns=["text"])["text"].to_pylist():
        pieces += [torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(torch.int16), end]
    return torch.cat(pieces)


def outputs_of(model: nn.Module, ids: Tensor, budget: int | None) -> Any:
    """() mean nats of the next byte, and the logits."""
    options = {} if budget is None else {"spectral_budget": budget}
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        logits = model(input_ids=ids[:, :-1], use_cache=False, **options).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    return SimpleNamespace(loss=loss, logits=logits)


@torch.no_grad()
def bits_per_byte(model: nn.Module, stream: Tensor, length: int, count: int, budget: int | None) -> float:
    """Over `count` windows spread evenly over the text; <eos> counts as a byte."""
    model.eval()
    device = next(model.parameters()).device
    starts = torch.linspace(0, len(stream) - length - 1, count).long()
    windows = (stream[None, s : s + length + 1].to(device, torch.long) for s in starts)
    losses = [outputs_of(model, window, budget).loss for window in windows]
    model.train()
    return float(torch.stack(losses).mean()) / math.log(2)


def rate(number: int, share: float) -> float:
    """Factor of the learning rate at an update, when that share of the seconds is over."""
    return min(1.0, (number + 1) / WARMUP, max(0.0, (1 - share) / DECAY))


class Run:
    def __init__(self, name: str, seconds: float, args: argparse.Namespace, device: torch.device):
        self.path, self.seconds, self.args, self.device = args.output_dir / f"{name}.pt", seconds, args, device
        self.model = make_model(name, args.quick).to(device).train()
        self.optimizer = adamw(self.model, args.learning_rate)
        self.draw = torch.Generator().manual_seed(0)
        self.state: dict[str, Any] = {"updates": 0, "seconds": 0.0, "losses": []}
        if self.path.is_file():
            saved = torch.load(self.path, map_location="cpu", weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.draw.set_state(saved["draw"])
            self.state = saved["state"]
        config: Any = self.model.config
        elastic = isinstance(config, ESSMConfig)
        self.schedule = budget_schedule("family", config.num_spectral_channels, 0) if elastic else None
        self.budgets: tuple[int | None, ...] = (None,) if self.schedule is None else self.schedule.budgets
        if args.compile:
            allow_compiled_budgets(len(self.budgets))
            self.model.compile()

    def save(self) -> None:
        record = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "state": self.state}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as temporary:
            torch.save(record | {"draw": self.draw.get_state()}, temporary)

    def windows(self, stream: Tensor) -> Tensor:
        """(batch, length + 1) ids from random places."""
        starts = torch.randint(0, len(stream) - self.args.length, (self.args.batch, 1), generator=self.draw)
        return stream[starts + torch.arange(self.args.length + 1)].to(self.device, torch.long)

    def train(self, stream: Tensor, wrote: Callable[[], None]) -> None:
        """To the end of its seconds; `wrote` is called after every checkpoint."""
        args, state, since = self.args, self.state, time.monotonic()
        begun, saved = state["seconds"], time.monotonic()
        while state["seconds"] < self.seconds:
            parts: tuple[Part, ...] = (Part(0, slice(None), 1.0, 1.0),)  # of a model without budgets
            if self.schedule is not None:
                parts = self.schedule.parts(state["updates"], args.batch)
            for group in self.optimizer.param_groups:
                group["lr"] = args.learning_rate * rate(state["updates"], state["seconds"] / self.seconds)
            ids = self.windows(stream)
            found: list[Tensor] = []

            def forward(part: Part, ids: Tensor = ids, found: list[Tensor] = found) -> Any:
                outputs = outputs_of(self.model, ids[part.rows], part.budget or None)
                found.append(outputs.loss.detach())
                return outputs

            losses = budget_losses(forward, parts, labels=ids, distillation_weight=DISTILLATION)
            update(self.optimizer, losses, self.model.parameters(), check=lambda *_: None)
            if state["updates"] % args.log_every == 0:
                bits = float(found[0]) / math.log(2)  # of the full budget; waits for the device
                state["losses"].append([state["updates"], parts[0].budget or None, bits])
            state["updates"] += 1
            state["seconds"] = begun + time.monotonic() - since
            if time.monotonic() - saved > args.save_seconds:
                self.save()
                wrote()
                saved = time.monotonic()
        self.save()

    def report(self, held_out: Tensor | None) -> dict[str, Any]:
        """What has been done so far, and the quality where a held-out text is given."""
        args, tokens = self.args, self.state["updates"] * self.args.batch * self.args.length
        record = {"parameters": sum(p.numel() for p in self.model.parameters()), **self.state, "tokens": tokens}
        record["tokens_per_second"] = tokens / max(self.state["seconds"], 1e-9)
        if held_out is not None:
            length = min(args.length, len(held_out) - 1)
            quality = {str(K): bits_per_byte(self.model, held_out, length, args.windows, K) for K in self.budgets}
            record["bits_per_byte"] = quality
        if self.device.type == "cuda":
            record["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
        return record


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    p.add_argument("--train_file", type=Path, required=True, help="Parquet with a column text")
    p.add_argument("--text_file", type=Path, required=True, help="held-out text, likewise")
    p.add_argument("--output_dir", type=Path, required=True, help="checkpoints")
    p.add_argument("--models", nargs="+", choices=SHARES, default=list(SHARES))
    p.add_argument("--seconds", type=float, default=480.0, help="of training, in all")
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--learning_rate", type=float, default=1e-3)
    p.add_argument("--windows", type=int, default=64, help="held-out windows that are scored")
    p.add_argument("--log_every", type=int, default=10, help="updates")
    p.add_argument("--save_seconds", type=float, default=60.0)
    p.add_argument("--compile", action="store_true", help="with torch.compile")
    args = p.parse_args(argv)
    settings = {name: getattr(args, name) for name in ("seconds", "batch", "length", "learning_rate", "compile")}
    device, report = common.start("gpu_train", args, **settings)
    stream, held_out = read_stream(args.train_file), read_stream(args.text_file)
    if min(len(stream), len(held_out)) <= args.length:
        p.error(f"--length must be below the bytes of each text, {len(stream)} and {len(held_out)}, got {args.length}")
    path, total = common.report_path(report, args), sum(SHARES[name] for name in args.models)
    report["results"] = {}
    for name in args.models:
        run = Run(name, args.seconds * SHARES[name] / total, args, device)

        def wrote(held_out: Tensor | None = None, name: str = name, run: Run = run) -> None:
            report["results"][name] = run.report(held_out)
            write_json(path, report, indent=1)

        run.train(stream, wrote)
        wrote(held_out)
        common.table([{"model": name} | report["results"][name]])
        del run, wrote
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    return common.finish(report, args)


if __name__ == "__main__":
    main()
