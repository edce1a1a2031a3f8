# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A trained model with diagonal states made smaller at a ratio or to a limit: measured, pruned, saved with its card."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from essm_train.baselines.config import BaselineConfig
from essm_train.data.documents import files_of
from essm_train.data.readers import FEATURES
from essm_train.data.text import read_blocks
from essm_train.data.tokens import Encoder, encoder_beside, file_of
from essm_train.files import alone_in, claim, filling, sha256_of, write_figure, write_json, write_text
from essm_train.measure.evaluation import load_for, open_task, open_text
from essm_train.measure.pruning import PruningCurve, measure_ratios
from essm_train.measure.timing import machine, working_device
from essm_train.models import capacity_of
from essm_train.publish.arguments import PruneArguments
from essm_train.publish.hub import TOKENIZER_FILES
from essm_train.tasks.catalog import find_data, get_task
from modeling_essm.budgets.weights import checksum
from modeling_essm.companions import Plan, allocate, certificate, describe, importance, prune, remove, state_layers
from modeling_essm.companions.systems import StateLayer

_CARD = """---
library_name: transformers
tags:
- state-space-model
- pruned
---

# {name}, pruned

{table}
## How to load it

```python
{imports}from transformers import {auto}

model = {auto}.from_pretrained("this folder"{own})
```

Nothing was trained after pruning. Modes were ranked by `modeling_essm.companions.importance`, method `{method}`.
"""


def prune_model(args: PruneArguments) -> None:
    """Prune a saved model, and leave it with what was measured.

    Raises:
        ValueError, OSError: a model or data that cannot work, an output_dir that holds a model, or a limit that the
            first step exceeds.
    """
    output_dir, partial = Path(args.output_dir), Path(args.output_dir) / "pruning_partial.json"
    results = () if partial.exists() else ("pruning.json", "pruning.md", "pruning.png", "plan.json")
    claim(output_dir, ("model", *results), overwrite=args.overwrite, reads=[args.model])
    with alone_in(output_dir):
        _prune(args, output_dir, partial)


def _prune(args: PruneArguments, output_dir: Path, partial: Path) -> None:
    target = output_dir / "model"
    encoder = encoder_beside(args.model) if args.text_files or args.calibration_files else None
    if args.task is not None:
        data = open_task(args.task, args.data_dir, args.scale, args.model)
    else:
        assert args.text_files and encoder
        data = open_text(args.text_files, encoder, args.block_size, args.max_blocks)
    model = load_for(data, args.model, args.trust_remote_code)
    layers = state_layers(model)
    if args.calibration_files and not any(layer.adapter.selective for layer in layers):
        raise ValueError(f"calibration_files are for Mamba and Mamba-2: no energy of {layers[0].kind} depends on text")
    if args.granularity == "mode_index" and all(len(layer.adapter.shape(layer.module)) == 1 for layer in layers):
        raise ValueError(
            f"granularity 'mode_index' needs modes for every channel, which {layers[0].kind} does not have"
        )
    batches = calibration(args, encoder) if encoder and args.calibration_files else None
    if (device := working_device()).type != "mps":  # which has no fp64
        model.to(device)
    print(f"{describe(model)}\n{data.description}\n")
    options = {name: getattr(args, name) for name in ("bidirectional", "granularity", "horizon")}
    ranked = importance(model, args.method, batches, args.seed, **options)

    def plan(ratio: float) -> Plan:
        return allocate(ranked, amount=ratio, scope=args.scope)

    curve = measure_ratios(model, plan, args.ratios, data, partial, identity(args, model), args.overwrite)
    ratio = curve.largest_within(args.max_loss) if args.max_loss is not None else args.amount
    if not ratio:
        raise ValueError(
            f"max_loss {args.max_loss:g} is exceeded by the first step, {curve.ratios[1]:g} of the modes, which loses "
            f"{curve.losses[1]:.4f}: allow more, or measure a smaller --step"
        )
    chosen = plan(ratio)
    bounds = [bound(layer, keep) for layer, keep in zip(state_layers(model), chosen.keep)]
    prune(model, chosen)
    before = model.num_parameters()
    sizes = remove(model)
    facts = {
        "model": args.model,
        "data": data.description,
        "method": args.method,
        "scope": args.scope,
        "ratio": ratio,
        "modes": {"before": [layer.modes for layer in chosen.layers], "kept": chosen.kept, "stored": sizes},
        "parameters": {"before": before, "after": model.num_parameters()},
        curve.metric: {"before": curve.values[0], "after": data.value(model, capacity_of(model))},
    }
    text = table(facts, curve, chosen, bounds)
    print(f"\n{text}")
    here = machine(model.device) | {"threads": torch.get_num_threads()}
    chosen.save(output_dir / "plan.json")
    write_figure(output_dir / "pruning.png", curve.draw(ratio, f"{args.method}, {args.scope}"))
    write_text(output_dir / "pruning.md", text)
    write_json(output_dir / "pruning.json", {**facts, **curve.record(), **here, "arguments": vars(args)})
    auto = "AutoModelForCausalLM" if "CausalLM" in type(model).__name__ else "AutoModelForSequenceClassification"
    own = ", trust_remote_code=True" if getattr(model.config, "auto_map", None) else ""
    imports = "import essm_train.baselines.models\n" if model.config.model_type == BaselineConfig.model_type else ""
    card = _CARD.format(name=Path(args.model).name, table=text, imports=imports, auto=auto, own=own, method=args.method)
    with filling(target) as folder:
        model.save_pretrained(folder)
        for name, path in beside(args.model).items():
            shutil.copyfile(path, folder / name)
        write_text(folder / "README.md", card)
    partial.unlink(missing_ok=True)
    print(f"saved {target} and pruning.json, pruning.md, pruning.png, plan.json in {output_dir}")


def beside(model: str) -> dict[str, str]:
    """By name the files of its tokenizer, and of the scale of its numbers, that a folder or a Hub repository has."""
    found = {name: file_of(model, name) for name in (*TOKENIZER_FILES, FEATURES)}
    return {name: path for name, path in found.items() if path}


def calibration(args: PruneArguments, encoder: Encoder) -> list[dict[str, Tensor]]:
    """Batches of 8 blocks of the calibration text; what fills up the last block is masked."""
    blocks, _ = read_blocks(args.calibration_files or [], encoder, args.block_size, args.max_blocks)
    real = (blocks != encoder.pad_id).flip(1).cumsum(1).flip(1) > 0  # up to the last token of text
    return [{"input_ids": ids, "attention_mask": mask} for ids, mask in zip(blocks.split(8), real.long().split(8))]


def identity(args: PruneArguments, model: PreTrainedModel) -> dict[str, Any]:
    """What measured values depend on: the arguments, and what the weights and the files of text or the task hold."""
    silent = {"output_dir", "overwrite", "amount", "max_loss", "step", "trust_remote_code"}
    found = {name: value for name, value in vars(args).items() if name not in silent}
    splits = find_data(get_task(args.task), args.scale, args.data_dir) if args.task else {"text": args.text_files or []}
    held_out = [path for split, paths in splits.items() if split != "train" or len(splits) == 1 for path in paths]
    files = files_of([*held_out, *(args.calibration_files or [])])
    weights = checksum(sorted(model.state_dict().items()))
    return found | {"sha256": [weights, *(sha256_of(Path(path)) for path in files)]}


def bound(layer: StateLayer, keep: Tensor) -> str:
    """What certifies a layer's error; "-" where nothing does, and "none" where an unstable mode goes."""
    if layer.adapter.selective:
        return "-"
    try:
        return f"{certificate(layer.read(), keep, layer.name)['best']:.4g}"
    except ValueError:
        return "none"


def table(facts: dict[str, Any], curve: PruningCurve, plan: Plan, bounds: list[str]) -> str:
    """What was done to every layer, with its certificate where it has one, and the ladder of ratios."""
    value, modes = facts[curve.metric], facts["modes"]
    before, after = sum(modes["before"]), sum(modes["kept"])
    lines = [
        f"{facts['model']} with {after} of its {before} modes, ranked by {facts['method']} ({facts['scope']}).",
        f"{curve.title}: {value['before']:.4f} before, {value['after']:.4f} after; on {facts['data']}.",
        f"Parameters: {facts['parameters']['before']:,} before, {facts['parameters']['after']:,} after.",
        "",
        "| layer | kind | modes | kept | stored | error bound (H-infinity) |",
        "|---|---|---|---|---|---|",
    ]
    for layer, kept, stored, error in zip(plan.layers, modes["kept"], modes["stored"], bounds):
        lines.append(f"| {layer.name} | {layer.kind} | {layer.modes} | {kept} | {stored} | {error} |")
    return "\n".join([*lines, "", curve.markdown()])
