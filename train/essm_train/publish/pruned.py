# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A trained model with diagonal states made smaller at a ratio or to a limit: measured, pruned, saved with its card."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import essm_train.baselines.models  # noqa: F401, whose Mamba and Mamba-2 the Auto classes then know
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
from essm_train.models import capacity_of
from essm_train.publish.arguments import PruneArguments
from modeling_essm.companions import Plan, allocate, certificate, describe, importance, prune, remove, state_layers
from modeling_essm.companions.systems import StateLayer

_FILES = ("pruning.json", "pruning.md", "pruning.png", "plan.json")


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


def _identity(args: PruneArguments, model: PreTrainedModel) -> dict[str, Any]:
    """What measured values depend on: the arguments, and what the weights and the files of text hold."""
    silent = {"output_dir", "amount", "max_loss", "step", "trust_remote_code"}
    found = {name: value for name, value in vars(args).items() if name not in silent}
    files = files_of([*(args.text_files or []), *(args.calibration_files or [])])
    return found | {"sha256": [digest_of(model), *(sha256_of(Path(path)) for path in files)]}


def prune_model(args: PruneArguments) -> None:
    """Prune a saved model, and leave it with what was measured."""
    output_dir = Path(args.output_dir)
    check_writable(output_dir)
    data, encoder = _open(args)
    calibration = _calibration(args, encoder)
    model = load_for(data, args.model, args.trust_remote_code)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type != "mps":  # which has no fp64
        model.to(device)
    report, identity = describe(model), _identity(args, model)
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
