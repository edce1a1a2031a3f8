# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A trained model with diagonal state spaces, or a Mamba, made smaller without training: at a ratio, or to a limit.

    python train/prune.py --model runs/s5/model --task smnist --data_dir data --amount 0.5 --output_dir runs/s5-half
    python train/prune.py --model runs/lru/model --text_files heldout.txt --max_loss 0.01 --output_dir runs/lru-small
    python train/prune.py --model folder-of-a-mamba --text_files heldout.txt --calibration_files train.txt \\
        --amount 0.25 --output_dir runs/mamba-12

Modes are ranked by `modeling_essm.companions.importance` and masked at a ladder of ratios; the quality at each is
measured on held-out data. At --amount, or at the largest ratio up to which no step of the ladder loses more than
--max_loss, modes are then taken out of the weights.

Left in output_dir: the smaller model with its card in `model`, pruning.json, pruning.md and pruning.png, and plan.json,
which says what was kept. A command that was killed goes on where it was.
"""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import essm_train.baselines.models  # noqa: F401, whose Mamba and Mamba-2 the Auto classes then know
from essm_train.arguments import arg
from essm_train.commands.errors import command
from essm_train.data.documents import files_of
from essm_train.data.text import read_blocks
from essm_train.data.tokens import ByteEncoder, Encoder, TokenizerEncoder, open_tokenizer
from essm_train.files import (
    check_writable,
    publish,
    sha256_of,
    temporary_folder,
    write_figure,
    write_json,
    write_text,
)
from essm_train.measure.evaluation import load_for, open_task, open_text
from essm_train.measure.pruning import PruningCurve, measure_ratios
from essm_train.measure.scoring import HeldOut
from essm_train.models import TRUST_HELP, capacity_of
from modeling_essm.companions import Plan, allocate, certificate, describe, importance, prune, remove, state_layers
from modeling_essm.companions.pruning.plans import SCOPES
from modeling_essm.companions.pruning.scores import METHODS
from modeling_essm.companions.systems import StateLayer

_FILES = ("pruning.json", "pruning.md", "pruning.png", "plan.json")


@dataclass
class PruneArguments:
    """Arguments of the script."""

    model: str = field(metadata={"help": "Folder or Hub name of a trained diagonal SSM, Mamba or Mamba-2."})
    output_dir: str = field(metadata={"help": "Where the smaller model and what was measured go."})
    amount: float | None = arg(None, "Share of the modes to prune, in (0, 1).")
    max_loss: float | None = arg(
        None, "Instead of amount: the most that quality may lose, in accuracy (0.01 is a point) or in bits per byte."
    )
    method: str = arg("aire", f"How modes are ranked, one of {', '.join(METHODS)}.")
    scope: str = arg("global", "'global' ranks over all layers, 'uniform' takes the same share of each.")
    granularity: str | None = arg(None, "'mode' or 'mode_index' (S4D), by default what the layers offer first.")
    bidirectional: str = arg("paper", "How two directions count: 'paper', 'exact' or 'released'.")
    task: str | None = arg(None, "Held-out data: of a task that train/list_tasks.py names, or of your own .yaml file.")
    data_dir: str = arg("data", "Folder of the tasks' data.")
    scale: str = arg("full", "'full', 'medium' or 'small', as the model was trained.")
    text_files: list[str] | None = arg(None, "Held-out text of a language model, instead of a task.")
    block_size: int = arg(512, "Tokens per block of held-out and calibration text.")
    max_blocks: int = arg(64, "Blocks of each, spread evenly over the text.")
    calibration_files: list[str] | None = arg(None, "Text that the energies of Mamba's states are measured on.")
    horizon: int | None = arg(
        None, "Steps that energies are summed over, for modes that are not stable (|lam| >= 1); by default all."
    )
    step: float = arg(0.05, "Between the ratios that are measured.")
    seed: int = arg(0, "Of method 'random'.")
    trust_remote_code: bool = arg(False, TRUST_HELP)

    def __post_init__(self) -> None:
        if (self.amount is None) == (self.max_loss is None):
            raise ValueError(f"give amount or max_loss, got {self.amount} and {self.max_loss}")
        if self.amount is not None and not 0 < self.amount < 1:
            raise ValueError(f"amount must be the share of the modes to prune, in (0, 1), got {self.amount}")
        if self.max_loss is not None and not self.max_loss >= 0:
            raise ValueError(f"max_loss must be at least 0, got {self.max_loss}")
        if not 0.001 <= self.step <= 0.5:
            raise ValueError(f"step must be in [0.001, 0.5], got {self.step}")
        if (self.task is None) == (self.text_files is None):
            raise ValueError(f"give task or text_files, got {self.task!r} and {self.text_files!r}")
        for name, legal in (("method", METHODS), ("scope", SCOPES)):
            if getattr(self, name) not in legal:
                raise ValueError(f"{name} must be one of {', '.join(legal)}, got {getattr(self, name)!r}")
        if self.horizon is not None and self.horizon < 1:
            raise ValueError(f"horizon must be at least 1, got {self.horizon}")
        for name in ("block_size", "max_blocks"):
            if getattr(self, name) < 2 - (name == "max_blocks"):
                raise ValueError(f"{name} must be at least {2 - (name == 'max_blocks')}, got {getattr(self, name)}")

    @property
    def ratios(self) -> tuple[float, ...]:
        """Shares to measure, ascending; the first is 0."""
        count = int(round(0.999 / self.step, 9))
        ladder = {round(i * self.step, 6) for i in range(count + 1)} | ({self.amount} if self.amount else set())
        return tuple(sorted(ladder))

    def identity(self, model: PreTrainedModel) -> dict[str, Any]:
        """What measured values depend on: the arguments, and what the weights and the files of text hold."""
        silent = {"output_dir", "amount", "max_loss", "step", "trust_remote_code"}
        found = {name: value for name, value in vars(self).items() if name not in silent}
        files = files_of([*(self.text_files or []), *(self.calibration_files or [])])
        return found | {"sha256": [digest_of(model), *(sha256_of(Path(path)) for path in files)]}


def _encoder(model: str) -> Encoder:
    """The tokenizer that lies beside the weights; bytes where a folder has none."""
    if Path(model).is_dir() and not any(Path(model).glob("tokenizer*")):
        return ByteEncoder()  # the library would make an empty tokenizer of the model's type
    return TokenizerEncoder(open_tokenizer(model), model)


def _open(args: PruneArguments) -> tuple[HeldOut, Encoder | None]:
    """Held-out data, and what makes tokens of text."""
    if args.task is not None:
        return open_task(args.task, args.data_dir, args.scale), None
    encoder = _encoder(args.model)
    return open_text(args.text_files or [], encoder, args.block_size, args.max_blocks), encoder


def digest_of(model: PreTrainedModel) -> str:
    """SHA-256 of all weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _calibration(args: PruneArguments, encoder: Encoder | None) -> list[dict[str, torch.Tensor]] | None:
    """Batches of 8 blocks of text; what fills up the last block is masked."""
    if args.calibration_files is None:
        return None
    encoder = encoder or _encoder(args.model)
    blocks, _ = read_blocks(args.calibration_files, encoder, args.block_size, args.max_blocks)
    real = (blocks != encoder.pad_id).flip(1).cumsum(1).flip(1) > 0  # up to the last token of text
    return [{"input_ids": ids, "attention_mask": mask} for ids, mask in zip(blocks.split(8), real.long().split(8))]


def choose(curve: PruningCurve, args: PruneArguments) -> float:
    """The ratio to prune at. Raises ValueError if the first step loses too much already."""
    if args.amount is not None:
        return args.amount
    assert args.max_loss is not None
    ratio = curve.largest_within(args.max_loss)
    if ratio == 0:
        raise ValueError(
            f"max_loss {args.max_loss:g} is exceeded by the first step, {curve.ratios[1]:g} of the modes, which loses "
            f"{curve.losses[1]:.4f}: allow more, or measure a smaller --step"
        )
    return ratio


def _table(facts: dict[str, Any], curve: PruningCurve, plan: Plan, bounds: list[str]) -> str:
    """What was done to every layer, with its certificate where it has one, and the ladder of ratios."""
    value, modes = facts[curve.metric], facts["modes"]
    lines = [
        f"{facts['model']} pruned at {facts['ratio']:.1%} of its modes by {facts['method']} ({facts['scope']}).",
        f"{curve.title}: {value['before']:.4f} before, {value['after']:.4f} after; on {facts['data']}.",
        f"Parameters: {facts['parameters']['before']:,} before, {facts['parameters']['after']:,} after.",
        "",
        "| layer | kind | modes | kept | stored | error bound (H-infinity) |",
        "|---|---|---|---|---|---|",
    ]
    for layer, kept, stored, bound in zip(plan.layers, modes["kept"], modes["stored"], bounds):
        lines.append(f"| {layer.name} | {layer.kind} | {layer.modes} | {kept} | {stored} | {bound} |")
    return "\n".join([*lines, "", curve.markdown()])


def _bound(layer: StateLayer, keep: torch.Tensor) -> str:
    """What certifies a layer's error; "-" where nothing does, and "none" where an unstable mode goes."""
    if layer.adapter.selective:
        return "-"
    try:
        return f"{certificate(layer.read(), keep, layer.name)['best']:.4g}"
    except ValueError:
        return "none"


def _card(table: str, model: PreTrainedModel, args: PruneArguments) -> str:
    """A plain model card."""
    auto = "AutoModelForCausalLM" if "CausalLM" in type(model).__name__ else "AutoModelForSequenceClassification"
    own = ", trust_remote_code=True" if getattr(model.config, "auto_map", None) else ""
    facts = "\n".join(["---", "library_name: transformers", "tags:", "- state-space-model", "- pruned", "---"])
    usage = f'from transformers import {auto}\n\nmodel = {auto}.from_pretrained("this folder"{own})'
    return (
        f"{facts}\n\n# {Path(args.model).name}, pruned\n\n{table}\n## How to load it\n\n```python\n{usage}\n```\n\n"
        f"Nothing was trained after pruning. Modes were ranked by `modeling_essm.companions.importance`, method "
        f"`{args.method}`.\n"
    )


def save_pruned(model: PreTrainedModel, args: PruneArguments, card: str) -> Path:
    """The model, its tokenizer if it has one, and the card, in one move."""
    target = Path(args.output_dir) / "model"
    folder = temporary_folder(target)
    model.save_pretrained(folder)
    if args.task is None and isinstance(encoder := _encoder(args.model), TokenizerEncoder):
        encoder.save_pretrained(folder, args.block_size)
    write_text(folder / "README.md", card)
    publish(folder, target)
    return target


def main(args: PruneArguments) -> None:
    """Prune from the command line."""
    output_dir = Path(args.output_dir)
    check_writable(output_dir)
    data, encoder = _open(args)
    calibration = _calibration(args, encoder)
    model = load_for(data, args.model, args.trust_remote_code)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type != "mps":  # which has no fp64
        model.to(device)
    report, identity = describe(model), args.identity(model)
    print(f"{report}\n{data.description}\n")
    ranked = importance(
        model,
        args.method,
        calibration,
        args.seed,
        bidirectional=args.bidirectional,
        granularity=args.granularity,
        horizon=args.horizon,
    )

    def plan(ratio: float) -> Plan:
        return allocate(ranked, amount=ratio, scope=args.scope)

    curve = measure_ratios(model, plan, args.ratios, data, output_dir / "pruning_partial.json", identity)
    ratio = choose(curve, args)
    chosen = plan(ratio)
    bounds = [_bound(layer, keep) for layer, keep in zip(state_layers(model), chosen.keep)]
    prune(model, chosen)
    before = model.num_parameters()
    sizes = remove(model)
    quality = data.value(model, capacity_of(model))
    facts = {
        "model": args.model,
        "data": data.description,
        "method": args.method,
        "scope": args.scope,
        "ratio": ratio,
        "modes": {"before": [layer.modes for layer in chosen.layers], "kept": chosen.kept, "stored": sizes},
        "parameters": {"before": before, "after": model.num_parameters()},
        curve.metric: {"before": curve.values[0], "after": quality},
    }
    table = _table(facts, curve, chosen, bounds)
    print(f"\n{table}")
    machine = {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    chosen.save(output_dir / "plan.json")
    write_figure(output_dir / "pruning.png", curve.draw(ratio, f"{args.method}, {args.scope}"))
    write_text(output_dir / "pruning.md", table)
    write_json(output_dir / "pruning.json", {**facts, **curve.record(), **machine, "arguments": vars(args)})
    folder = save_pruned(model, args, _card(table, model, args))
    (output_dir / "pruning_partial.json").unlink(missing_ok=True)
    print(f"saved {folder} and {', '.join(_FILES)} in {output_dir}")


run = command(main, PruneArguments)


if __name__ == "__main__":
    run()
