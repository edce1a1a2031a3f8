# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A saved model at fixed budgets as programs for another runtime, checked against it before they appear."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from essm_train.console import Failed
from essm_train.data.readers import FEATURES, read_record
from essm_train.files import claim, filling
from essm_train.models import is_causal, read_saved_config
from essm_train.publish.arguments import ExportArguments
from essm_train.publish.hub import read_json
from modeling_essm import ESSMForCausalLM, ESSMForSequenceClassification
from modeling_essm.cache_essm import CACHE
from modeling_essm.export import WeightFile, empty_states, export_programs, save_executorch, save_onnx, signature

DESCRIPTION, WEIGHTS = "export.json", "weights.bin"
_SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
_TOLERANCE = 1e-3  # of the largest value; fp32 rounding is 1e-5 of it at most
Run = Callable[[Mapping[str, Tensor]], list[Any]]  # inputs by name -> outputs, both in the order of the signature


def check_output(folder: Path, overwrite: bool, model: str) -> None:
    """Raises ValueError unless the folder is absent, empty, or an earlier export alone, which is to be overwritten."""
    present = {path.name for path in folder.iterdir()} if folder.exists() else set()
    found = read_json(folder / DESCRIPTION) if DESCRIPTION in present else None
    known = {DESCRIPTION, *found["files"]} if isinstance(found, dict) and "files" in found else set()
    if present - known:
        raise ValueError(f"output_dir {str(folder)!r} holds {min(present - known)!r}, which no export wrote")
    if folder.exists() and (os.path.ismount(folder) or Path.cwd().is_relative_to(folder.resolve())):
        raise ValueError(
            f"output_dir {str(folder)!r} cannot be replaced, as it is mounted or current: name a folder in it"
        )
    claim(folder.parent, [folder.name], overwrite=overwrite, reads=[model])


def write_programs(
    programs: Mapping[str, ExportedProgram], folder: Path, key: str, format_: str, weights: WeightFile | None
) -> tuple[dict[str, str], int]:
    """Write every program of a budget: the name of its file, and bytes of the file of weights that they read."""
    if format_ == "executorch":
        save_executorch(programs, folder / f"model-{key}.pte")
        return dict.fromkeys(programs, f"model-{key}.pte"), 0
    files, read = {name: f"{name}-{key}{_SUFFIXES[format_]}" for name in programs}, 0
    for name, program in programs.items():
        path = folder / files[name]
        if format_ == "onnx":
            read = max(read, save_onnx(program, path, weights))
        else:
            torch.export.save(program, whole := io.BytesIO())  # on a full disk its writer of files ends the process
            path.write_bytes(whole.getvalue())
    return files, read


def open_program(path: Path, name: str) -> Run:
    """A written program under its runtime."""
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        return lambda inputs: session.run(None, {name: value.numpy() for name, value in inputs.items()})
    if path.suffix == ".pte":
        from executorch.runtime import Runtime

        method = Runtime.get().load_program(path).load_method(name)
        # Copies, because the next call writes over them.
        return lambda inputs: [x.clone() for x in method.execute([x.contiguous() for x in inputs.values()])]
    module = torch.export.load(path).module()

    def run(inputs: Mapping[str, Tensor]) -> list[Any]:
        states = {key.removeprefix("past."): value for key, value in inputs.items() if key.startswith("past.")}
        plain = [value for key, value in inputs.items() if not key.startswith("past.")]
        return tree_leaves(module(*plain, states) if states else module(*plain))

    return run


@torch.inference_mode()
def check(
    model: PreTrainedModel, budget: Any, run: Mapping[str, Run], empty: Mapping[str, Tensor], max_length: int, B: int
) -> None:
    """Compare with the model: rows padded on the left; of a language model also what is read on, and two steps.

    Args:
        run: the programs. empty: a language model's states before any token, by their names as inputs. B: rows.
    Raises:
        Failed: logits or states are too far off.
    """
    H, F = model.config.filter_length, model.config.num_input_features
    found: dict[str, list[tuple[float, float]]] = {}
    for L in sorted({1, min(model.config.chunk_size + 1, max_length), max_length}):
        generator, past, position, cache = torch.Generator().manual_seed(L), empty, 0, None
        mask = torch.arange(L) >= torch.arange(B)[:, None] * L // 3 % L
        pieces = [("prefill", L), ("prefill", min(3, L)), ("step", 1), ("step", 1)] if past else [("classify", L)]
        for name, length in pieces:
            if (position := position + length) > H:
                break
            inputs = {"input_ids": torch.randint(0, model.config.vocab_size, (B, length), generator=generator)}
            if F is not None:
                inputs = {"input_features": torch.randn(B, length, F, generator=generator)}
            inputs["attention_mask"] = mask.long() if cache is None else torch.ones(B, length, dtype=torch.int64)
            kept = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1} if past else {}
            expected = model(**inputs, **kept, spectral_budget=budget)
            if name == "step":
                del inputs["attention_mask"]
            logits, *states = map(torch.as_tensor, run[name]({**inputs, **past}))
            cache, past = expected.get(CACHE), dict(zip(past, states, strict=True))
            compared = [("logits", logits, expected.logits[:, -1] if past else expected.logits)]
            if position <= H // 8:  # later, rounding in fp32 fills the states beyond K, which count for little
                states_of = {key: cache.states[key.removeprefix("past.")] for key in past}
                compared += [("states", past[key], state) for key, state in states_of.items() if state.numel()]
            for kind, actual, wanted in compared:
                found.setdefault(kind, []).append((float((actual - wanted).abs().max()), float(wanted.abs().max())))
    for kind, pairs in found.items():
        worst, largest = torch.tensor(pairs).amax(0).tolist()  # NaN if any is
        said = f"in {kind}: {worst:.1e}, of values up to {largest:.1e}"
        print(f"largest difference from the model {said}")
        if not worst <= _TOLERANCE * largest:
            raise Failed(f"the exported programs differ from the model {said}: nothing was written")


def named_budgets(config: Any, asked: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """K of each spectral layer by the name of its files: K, or one for each layer where they are not alike; ascending.

    Raises:
        ValueError: a bad budget.
    """
    found = {layers: None for layers in sorted(config.resolve_budget(budget).layers for budget in asked)}
    return {_key(config, layers): layers for layers in found}


def _key(config: Any, layers: tuple[int, ...]) -> str:
    alike = config.resolve_budget(max(layers)).layers == layers
    return str(max(layers)) if alike else ",".join(map(str, layers))


def describe_budget(
    layers: tuple[int, ...], programs: Mapping[str, ExportedProgram], files: Mapping[str, str], weight_bytes: int
) -> dict[str, Any]:
    """The programs of a budget, what they read, and what a row keeps."""
    described: dict[str, Any] = {"layers": list(layers), "weight_bytes": weight_bytes, "state_bytes": 0}
    for name, program in programs.items():
        inputs, outputs = ([asdict(spec) for spec in specs] for specs in signature(program))
        described[name] = {"file": files[name], "inputs": inputs, "outputs": outputs}
        described["state_bytes"] = sum(state.nbytes for state in empty_states(program, 1).values())
    return described


def describe(model: PreTrainedModel, args: ExportArguments, budgets: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What a program that has never heard of ES-SSM needs in order to run these, beside what is said of each budget."""
    config, eos = model.config, getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    eos = config.eos_token_id if eos is None else eos
    causal = hasattr(model, "lm_head")
    presets = {name: config.resolve_budget(name).layers for name in config.budget_presets or ()}
    return {
        "format": args.format,
        "int8": args.int8,
        "max_length": args.max_length or config.filter_length,
        "filter_length": config.filter_length,
        "eos_token_ids": ([] if eos is None else eos if isinstance(eos, list) else [eos]) if causal else [],
        "bos_token_id": config.bos_token_id if causal else None,
        "pad_token_id": config.pad_token_id,
        "features": read_record(Path(args.model)) or None,  # x -> multiplier * x + offset, before input_features
        "labels": None if causal else [config.id2label[i] for i in range(config.num_labels)],
        "presets": {name: _key(config, layers) for name, layers in presets.items() if layers in budgets.values()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def export(args: ExportArguments) -> dict[str, Any]:
    """Export, check, and publish the folder; what export.json says.

    Raises:
        ValueError, OSError: arguments or a model that cannot work, before anything is exported.
        Failed: the exported programs differ from the model; nothing is published.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)  # torchvision is missing
    warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")  # torch's own pickling
    warnings.filterwarnings("ignore", message="No complete tensor found")  # embedding and head are one tensor
    source, folder = Path(args.model), Path(args.output_dir).absolute()
    load = ESSMForCausalLM if is_causal(read_saved_config(source)) else ESSMForSequenceClassification
    check_output(folder, args.overwrite, args.model)
    model = load.from_pretrained(source, dtype=torch.float32).eval()
    budgets = named_budgets(model.config, args.budgets)
    description = describe(model, args, budgets) | {"weights": None, "budgets": {}}
    model.truncate([max(layers) for layers in zip(*budgets.values())])
    B, began = 1 if args.format == "executorch" else 2, time.perf_counter()
    with filling(folder) as temporary:
        weights = WeightFile(model, temporary / WEIGHTS, args.int8) if args.format == "onnx" else None
        if weights is not None:
            description["weights"] = {"file": WEIGHTS, "bytes": weights.path.stat().st_size}
        for i, (key, layers) in enumerate(budgets.items()):

            def tell(what: str, where: str = f"budget {key} ({i + 1} of {len(budgets)})") -> None:
                print(f"[{time.perf_counter() - began:.0f} s] {where}: {what}", flush=True)

            tell("tracing the model")
            programs = export_programs(model, list(layers), args.max_length, 1 if B == 1 else None)
            tell(f"writing {' and '.join(programs)}")
            files, read = write_programs(programs, temporary, key, args.format, weights)
            description["budgets"][key] = describe_budget(layers, programs, files, read)
            tell("comparing with the model")
            run = {name: open_program(temporary / file, name) for name, file in files.items()}
            past = {f"past.{k}": v for k, v in empty_states(programs["step"], B).items()} if "step" in programs else {}
            check(model, list(layers), run, past, description["max_length"], B)
        beside = "tokenizer.json" if model.config.num_input_features is None else FEATURES
        if (source / beside).exists():
            shutil.copyfile(source / beside, temporary / beside)
        else:
            print(f"{source} has no {beside}: none is exported")
        description["files"] = sorted(path.name for path in temporary.iterdir())
        (temporary / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    print(f"saved {folder}: {', '.join([*description['files'], DESCRIPTION])}")
    return description
