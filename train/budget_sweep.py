# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Quality and speed of one model at every spectral budget: bits per byte, tokens/s, a table, a curve and a JSON file.

    python train/budget_sweep.py --model runs/train_clm/model --text_files some.txt --output_dir runs/sweep

Context rule: the text is cut into blocks of `block_size` tokens that share one token with the next. The first token of
a block is context only; every other byte is predicted once, from the bytes before it in its own block (1 to
block_size - 1 of them). Special tokens are not scored. A model that is uniform over 256 symbols gets 8 bits per byte.

Sweet spot: the smallest budget whose bits per byte are at most 2% above those of the full (largest) budget.
Collapse boundary: the smallest budget that keeps 90% of the quality, with quality = 1 / bits per byte relative to the
full budget: at most 1 / 0.9, or 11.1% above it. Below that boundary the model falls apart.

tokens/s is the speed of forward passes over whole blocks without a cache (prefill): after a warm-up, the median over
rounds in which every budget runs once, so that a machine that slows down hits all budgets alike.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from budget_dropout import BUDGETS, clip_budgets
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from text_data import byte_labels, evaluation_blocks, read_files
from torch import Tensor
from transformers import AutoModelForCausalLM, HfArgumentParser, PreTrainedModel

SWEET_SPOT_TOLERANCE = 0.02
COLLAPSE_QUALITY = 0.90


@dataclass(frozen=True)
class BudgetSweep:
    """One entry per budget, ascending; the last one is the full budget.

    Attributes:
        budgets: K. bits_per_byte, tokens_per_second: measured at each K.
    """

    budgets: tuple[int, ...]
    bits_per_byte: tuple[float, ...]
    tokens_per_second: tuple[float, ...]

    @property
    def sweet_spot(self) -> int:
        """The smallest K within 2% of the full budget."""
        return self._smallest_within(self.bits_per_byte[-1] * (1 + SWEET_SPOT_TOLERANCE))

    @property
    def collapse_boundary(self) -> int:
        """The smallest K that keeps 90% of the quality."""
        return self._smallest_within(self.bits_per_byte[-1] / COLLAPSE_QUALITY)

    def _smallest_within(self, limit: float) -> int:
        return next(K for K, bits in zip(self.budgets, self.bits_per_byte) if bits <= limit)

    def table(self) -> str:
        """For people."""
        lines = [f"{'K':>4}  {'bits/byte':>9}  {'vs full':>8}  {'tokens/s':>9}"]
        full = self.bits_per_byte[-1]
        for K, bits, speed in zip(self.budgets, self.bits_per_byte, self.tokens_per_second):
            line = f"{K:>4}  {bits:>9.4f}  {bits / full - 1:>+8.1%}  {speed:>9,.0f}"
            line += "  * sweet spot" if self.sweet_spot == K else ""
            line += "  ^ collapse boundary" if self.collapse_boundary == K else ""
            lines.append(line)
        return "\n".join(lines)

    def save(self, output_dir: Path, **context: object) -> None:
        """Write budget_sweep.json, with whatever `context` should stand beside the figures, and budget_sweep.png."""
        record = asdict(self) | {"sweet_spot": self.sweet_spot, "collapse_boundary": self.collapse_boundary}
        record |= {**context, "torch": torch.__version__, "threads": torch.get_num_threads()}
        text, figure = json.dumps(record, indent=2) + "\n", self._draw()
        _write(output_dir / "budget_sweep.json", lambda path: path.write_text(text))
        _write(output_dir / "budget_sweep.png", lambda path: figure.savefig(path, dpi=150))

    def _draw(self) -> Figure:
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.plot(self.budgets, self.bits_per_byte, "o-", color="tab:blue", markersize=5, zorder=2)
        for K, marker, color, size, label in (
            (self.collapse_boundary, "^", "none", 22, "collapse boundary (at least 90% of the quality)"),
            (self.sweet_spot, "*", "tab:orange", 15, "sweet spot (within 2% of the full budget)"),
        ):
            bits = self.bits_per_byte[self.budgets.index(K)]
            (point,) = axes.plot(K, bits, marker, color=color, markersize=size, label=f"K = {K}: {label}", zorder=3)
            point.set_markeredgecolor("tab:red")
        axes.set_xscale("log")
        axes.set_xticks(self.budgets, [str(K) for K in self.budgets])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("spectral budget K (channels used, log scale)")
        axes.set_ylabel("bits per byte, held-out text")
        axes.set_title("One set of weights, every budget")
        axes.grid(alpha=0.3)
        axes.margins(y=0.12)
        axes.legend(markerscale=0.6)
        return figure


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file, then give it its name: a killed run leaves no half-written file."""
    temporary = path.with_name(".partial-" + path.name)
    write(temporary)
    os.replace(temporary, path)


def sweep_budgets(
    model: PreTrainedModel,
    input_ids: Tensor,
    labels: Tensor,
    *,
    budgets: Sequence[int] = BUDGETS,
    num_bytes: int | None = None,
    batch_size: int = 8,
    progress: Callable[[int], object] = lambda budget: None,
) -> BudgetSweep:
    """Evaluate a causal language model at every budget up to its capacity, which is always one of them.

    Args:
        model: takes `spectral_budget` and has config.num_spectral_channels; is left in evaluation mode.
        input_ids: (n, L) int64 blocks. labels: (n, L), the same before shifting, -100 where a token is not scored.
        num_bytes: bytes that the scored tokens stand for; by default each is one byte.
        batch_size: blocks per forward pass. progress: called with each K before its evaluation.
    """
    model.eval()
    capacity = model.config.num_spectral_channels
    budgets = clip_budgets((*budgets, capacity), capacity)
    num_bytes = num_bytes or num_scored(labels)
    bits = []
    for K in budgets:
        progress(K)
        bits.append(total_nats(model, input_ids, labels, K, batch_size) / math.log(2) / num_bytes)
    speeds = tokens_per_second(model, input_ids[:batch_size], budgets)
    return BudgetSweep(budgets, tuple(bits), tuple(speeds))


def num_scored(labels: Tensor) -> int:
    """How many targets `total_nats` sums over."""
    return int((labels[:, 1:] != -100).sum())


@torch.no_grad()
def total_nats(model: PreTrainedModel, input_ids: Tensor, labels: Tensor, budget: int, batch_size: int) -> float:
    """Summed cross-entropy of all scored targets, in nats; arguments as in `sweep_budgets`."""
    total = 0.0
    for start in range(0, len(input_ids), batch_size):
        rows = slice(start, start + batch_size)
        logits = model(input_ids=input_ids[rows].to(model.device), use_cache=False, spectral_budget=budget).logits
        targets = labels[rows, 1:].to(logits.device)
        total += F.cross_entropy(logits[:, :-1].float().transpose(1, 2), targets, reduction="sum").item()
    return total


@torch.no_grad()
def tokens_per_second(
    model: PreTrainedModel, input_ids: Tensor, budgets: Sequence[int], rounds: int = 5
) -> list[float]:
    """Median speed of forward passes over the (B, L) batch at each budget, measured as told at the top of this file."""
    input_ids = input_ids.to(model.device)
    seconds: dict[int, list[float]] = {K: [] for K in budgets}
    for _ in range(1 + rounds):
        for K in budgets:
            _synchronize(input_ids.device)
            start = time.perf_counter()
            model(input_ids=input_ids, use_cache=False, spectral_budget=K)
            _synchronize(input_ids.device)
            seconds[K].append(time.perf_counter() - start)
    return [input_ids.numel() / statistics.median(seconds[K][1:]) for K in budgets]  # the first round is the warm-up


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass
class SweepArguments:
    """Arguments of the script."""

    model: str = field(metadata={"help": "Folder or Hub name of a byte-level ES-SSM causal language model."})
    text_files: list[str] = field(metadata={"help": "Held-out text, read as bytes."})
    output_dir: str = field(metadata={"help": "Where budget_sweep.json and budget_sweep.png go."})
    budgets: list[int] = field(default_factory=lambda: [*BUDGETS], metadata={"help": "Budgets K to evaluate."})
    block_size: int = field(default=512, metadata={"help": "Tokens per block: the longest context."})
    max_blocks: int = field(default=256, metadata={"help": "Blocks to evaluate, spread evenly over the text."})
    batch_size: int = field(default=8, metadata={"help": "Blocks per forward pass."})


def main() -> None:
    """Sweep a saved model from the command line."""
    (args,) = HfArgumentParser(SweepArguments).parse_args_into_dataclasses()
    input_ids = evaluation_blocks(read_files(args.text_files), args.block_size, args.max_blocks)
    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(args.model, trust_remote_code=True)
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    labels = byte_labels(input_ids)
    sweep = sweep_budgets(model, input_ids, labels, budgets=args.budgets, batch_size=args.batch_size)
    print(sweep.table())
    sweep.save(output_dir, model=args.model, text_files=args.text_files, block_size=args.block_size)


if __name__ == "__main__":
    main()
