# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How far does the elastic model get in a minute or more of a GPU, beside Llama and Mamba-2 of its size?

    python -m benchmarks.gpu_train --train_file novels-train.parquet --text_file novels-validation.parquet \\
        --output_dir runs/gpu_train --seconds 480 [--configs hub_configs/essm-elastic-21m] [--compile]

Byte-level language models of about 21M and 130M parameters read random windows of the same text: the elastic ones of
hub_configs, trained at all their sizes, Llama, and Mamba-2 by chunks. Each has a share of the seconds; the learning
rate rises over the first updates and falls to zero over the last quarter of the share. bf16 autocast over fp32 weights.
Held-out bits per byte are measured at the end, of the elastic models at several budgets. A model that fails is noted
with its error, and the next one begins.

A run that was stopped goes on from its last checkpoint in --output_dir when started again: seconds already spent count.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
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
HUB = Path(__file__).parent.parent / "hub_configs"
SHARES = {"elastic": 0.4, "Mamba-2": 0.3, "Llama": 0.3}
# Width, layers and inner width of Llama, layers of Mamba-2 of that width, by the configuration whose size they have.
PEERS = {"essm-elastic-21m": (512, 6, 1600, 12), "essm-elastic-130m": (1024, 10, 2816, 20)}
QUICK = (32, 2, 88, 2)


def make_model(config: Path, name: str, quick: bool) -> nn.Module:
    torch.manual_seed(0)
    if name == "elastic":
        small = {"hidden_size": 32, "num_hidden_layers": 2, "filter_length": 512} if quick else {}
        return ESSMForCausalLM(common.configuration(argparse.Namespace(config=config), **small))
    width, layers, inner, mamba_layers = QUICK if quick else PEERS[config.name]
    fields: dict[str, Any] = {"vocab_size": VOCABULARY, "tie_word_embeddings": True, "hidden_size": width}
    head = 16 if quick else 64
    if name == "Llama":
        fields |= {"num_hidden_layers": layers, "intermediate_size": inner, "num_attention_heads": width // head}
        return LlamaForCausalLM(LlamaConfig(**fields))
    fields |= {"num_hidden_layers": mamba_layers, "num_heads": 2 * width // head, "head_dim": head}
    fields |= {"state_size": 2 * head, "n_groups": 1, "chunk_size": 64, "use_cache": False}
    model = Mamba2ForCausalLM(Mamba2Config(**fields, pad_token_id=256, bos_token_id=257, eos_token_id=END))
    by_chunks(model)
    return model


def read_stream(path: Path) -> Tensor:
    """(n,) int16: the bytes of every text in the column `text` of a Parquet file, each text ended by <eos>."""
    end, pieces = torch.tensor([END], dtype=torch.int16), []
    for text in pq.read_table(path, columns=["text"])["text"].to_pylist():
        pieces += [torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(torch.int16), end]
    return torch.cat(pieces)


def outputs_of(model: nn.Module, ids: Tensor, budget: int | Tensor | None) -> Any:
    """() mean nats of the next byte, and the logits."""
    options = {} if budget is None else {"spectral_budget": budget}
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        logits = model(input_ids=ids[:, :-1], use_cache=False, **options).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    return SimpleNamespace(loss=loss, logits=logits)


def losses_of(model: nn.Module, ids: Tensor, parts: Sequence[Part]) -> Iterator[Tensor]:
    """Those of `budget_losses`, whose smaller budgets run as one forward pass with a budget for every row.

    Rows beside each other save a GPU launches, and their parts have one weight and all rows between them.
    """
    passes: list[tuple[Part, int | Tensor | None]] = [(parts[0], parts[0].budget or None)]
    if len(parts) > 1:
        rows = torch.empty(len(ids), dtype=torch.long)  # on the CPU, where its values are read
        for part in parts[1:]:
            rows[part.rows] = part.budget
        passes.append((Part(int(rows.max()), slice(None), 1.0, parts[1].weight), rows))
    budgets = {part.budget: budget for part, budget in passes}

    def forward(part: Part) -> Any:
        return outputs_of(model, ids, budgets[part.budget])

    return budget_losses(forward, [part for part, _ in passes], labels=ids, distillation_weight=DISTILLATION)


@torch.no_grad()
def bits_per_byte(model: nn.Module, stream: Tensor, length: int, count: int, batch: int, budget: int | None) -> float:
    """Over `count` windows spread evenly over the text, `batch` at a time; <eos> counts as a byte."""
    model.eval()
    starts = torch.linspace(0, len(stream) - length - 1, count).long()
    windows = stream[starts[:, None] + torch.arange(length + 1)].to(next(model.parameters()).device, torch.long)
    losses = [outputs_of(model, some, budget).loss * len(some) for some in windows.split(batch)]
    model.train()
    return float(torch.stack(losses).sum()) / count / math.log(2)


def rate(number: int, share: float) -> float:
    """Factor of the learning rate at an update, when that share of the seconds is over."""
    return min(1.0, (number + 1) / WARMUP, max(0.0, (1 - share) / DECAY))


class Run:
    def __init__(self, config: Path, name: str, seconds: float, args: argparse.Namespace, device: torch.device):
        self.path, self.seconds = args.output_dir / f"{config.name}-{name}.pt", seconds
        self.args, self.device = args, device
        self.model = make_model(config, name, args.quick).to(device).train()
        self.optimizer = adamw(self.model, args.learning_rate)
        self.draw = torch.Generator().manual_seed(0)
        self.state: dict[str, Any] = {"updates": 0, "seconds": 0.0, "losses": []}
        if self.path.is_file():
            saved = torch.load(self.path, map_location="cpu", weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.draw.set_state(saved["draw"])
            self.state = saved["state"]
        own: Any = self.model.config
        elastic = isinstance(own, ESSMConfig)
        self.schedule = budget_schedule("family", own.num_spectral_channels, 0) if elastic else None
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
        """To the end of its seconds, a first pass not counted; `wrote` is called after every checkpoint."""
        args, state = self.args, self.state
        ids = torch.zeros(args.batch, args.length + 1, dtype=torch.long, device=self.device)
        for loss in losses_of(self.model, ids, self.parts()):  # makes constants, and kernels are loaded
            loss.backward()
        self.optimizer.zero_grad()
        self.wait()
        since = time.monotonic()
        begun, saved = state["seconds"], time.monotonic()
        while state["seconds"] < self.seconds:
            parts = self.parts()
            for group in self.optimizer.param_groups:
                group["lr"] = args.learning_rate * rate(state["updates"], state["seconds"] / self.seconds)
            ids = self.windows(stream)
            found: list[Tensor] = []

            def noted(ids: Tensor = ids, parts: Any = parts, found: list[Tensor] = found) -> Iterator[Tensor]:
                for loss in losses_of(self.model, ids, parts):
                    found.append(loss.detach())
                    yield loss

            update(self.optimizer, noted(), self.model.parameters(), check=lambda *_: None)
            if state["updates"] % args.log_every == 0:
                bits = float(found[0]) / parts[0].weight / math.log(2)  # of the full budget; waits for the device
                state["losses"].append([state["updates"], parts[0].budget or None, bits])
            state["updates"] += 1
            state["seconds"] = begun + time.monotonic() - since
            if args.save_seconds and time.monotonic() - saved > args.save_seconds:
                self.save()
                wrote()
                saved = time.monotonic()
        self.wait()
        state["seconds"] = max(state["seconds"], begun + time.monotonic() - since)
        if args.save_seconds:
            self.save()

    def parts(self) -> tuple[Part, ...]:
        """Of the next update; one of budget 0 of a model without budgets."""
        if self.schedule is None:
            return (Part(0, slice(None), 1.0, 1.0),)
        return self.schedule.parts(self.state["updates"], self.args.batch)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def report(self, held_out: Tensor | None) -> dict[str, Any]:
        """What has been done so far, and the quality where a held-out text is given."""
        args, tokens = self.args, self.state["updates"] * self.args.batch * self.args.length
        record = {"parameters": sum(p.numel() for p in self.model.parameters()), **self.state, "tokens": tokens}
        if self.device.type == "cuda":
            record["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)  # of training
        record["tokens_per_second"] = tokens / max(self.state["seconds"], 1e-9)
        if held_out is not None:
            length = min(args.length, len(held_out) - 1)
            size = (length, args.windows, args.batch)
            record["bits_per_byte"] = {str(K): bits_per_byte(self.model, held_out, *size, K) for K in self.budgets}
        return record


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    p.add_argument("--train_file", type=Path, required=True, help="Parquet with a column text")
    p.add_argument("--text_file", type=Path, required=True, help="held-out text, likewise")
    p.add_argument("--output_dir", type=Path, required=True, help="checkpoints")
    configs = [HUB / name for name in PEERS]
    p.add_argument("--configs", nargs="+", type=Path, default=configs, help=f"folders of the names {[*PEERS]}")
    p.add_argument("--models", nargs="+", choices=SHARES, default=list(SHARES))
    p.add_argument("--seconds", type=float, default=480.0, help="of training, in all")
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--length", type=int, default=1024)
    p.add_argument("--learning_rate", type=float, default=1e-3)
    p.add_argument("--windows", type=int, default=64, help="held-out windows that are scored")
    p.add_argument("--log_every", type=int, default=10, help="updates")
    p.add_argument("--save_seconds", type=float, default=60.0, help="0: no checkpoints")
    p.add_argument("--compile", action="store_true", help="with torch.compile")
    args = p.parse_args(argv)
    if unknown := [str(config) for config in args.configs if config.name not in PEERS]:
        p.error(f"--configs must be folders of the names {[*PEERS]}, got {unknown}")
    settings = {name: getattr(args, name) for name in ("seconds", "batch", "length", "learning_rate", "compile")}
    device, report = common.start("gpu_train", args, **settings)
    stream, held_out = read_stream(args.train_file), read_stream(args.text_file)
    if min(len(stream), len(held_out)) <= args.length:
        p.error(f"--length must be below the bytes of each text, {len(stream)} and {len(held_out)}, got {args.length}")
    path, results = common.report_path(report, args), report.setdefault("results", {})
    total = sum(SHARES[name] for name in args.models) * len(args.configs)
    for config, name in itertools.product(args.configs, args.models):
        label = config.name if name == "elastic" else f"{name} as {config.name}"
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        try:
            run = Run(config, name, args.seconds * SHARES[name] / total, args, device)

            def wrote(held_out: Tensor | None = None, label: str = label, run: Run = run) -> None:
                results[label] = run.report(held_out)
                write_json(path, report, indent=1)

            run.train(stream, wrote)
            wrote()
            wrote(held_out)
        except Exception as error:  # out of memory, say
            results.setdefault(label, {})["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            write_json(path, report, indent=1)
        run = wrote = None  # type: ignore[assignment]
        common.table([{"model": label} | results[label]])
    return common.finish(report, args)


if __name__ == "__main__":
    main()
