# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A saved model at one budget as programs for another runtime, checked against it before they appear."""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.export import ExportedProgram
from transformers import PreTrainedModel

from essm_train.console import Failed
from essm_train.data.readers import FEATURES, read_record
from essm_train.files import check_writable, publish, temporary_folder
from essm_train.models import is_causal, read_saved_config
from essm_train.publish.arguments import ExportArguments
from modeling_essm import ESSMForCausalLM, ESSMForSequenceClassification
from modeling_essm.export import empty_states, export_programs, save_executorch, save_onnx, signature

DESCRIPTION = "export.json"
_TOLERANCE = 1e-3  # of the largest value; fp32 rounding is 1e-5 of it at most
Run = Callable[[str, Mapping[str, Tensor]], dict[str, Tensor]]  # program, inputs by name -> outputs by name


def check_output(folder: Path) -> None:
    """Raises ValueError unless the folder is absent, empty, or an earlier export and nothing else."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir must be a folder, got the file {str(folder)!r}")
    present = {path.name for path in folder.iterdir()} if folder.exists() else set()
    known = set()
    if DESCRIPTION in present:
        try:
            known = {DESCRIPTION, *json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))["files"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / DESCRIPTION} is not of an export: {error!r}") from error
    if present - known:
        raise ValueError(
            f"output_dir {str(folder)!r} holds {min(present - known)!r}, which no export wrote: choose a new folder"
        )
    check_writable(folder.absolute().parent)


# ---------------------------------------------------------------------------------------------------------------------
# Writing, and running what was written.


def write_programs(programs: Mapping[str, ExportedProgram], folder: Path, format_: str) -> dict[str, str]:
    """Write every program; the name of its file."""
    if format_ == "executorch":
        save_executorch(programs, folder / "model.pte")
        return dict.fromkeys(programs, "model.pte")
    files = {name: name + {"onnx": ".onnx", "torch": ".pt2"}[format_] for name in programs}
    for name, program in programs.items():
        if format_ == "onnx":
            save_onnx(program, folder / files[name])
        else:
            torch.export.save(program, folder / files[name])
    return files


def open_programs(description: Mapping[str, Any], folder: Path) -> Run:
    """The programs of a folder under the runtime of its format."""
    programs = description["programs"]
    paths = {name: str(folder / program["file"]) for name, program in programs.items()}
    names = {name: [spec["name"] for spec in program["outputs"]] for name, program in programs.items()}
    order = {name: [spec["name"] for spec in program["inputs"]] for name, program in programs.items()}
    if description["format"] == "onnx":
        import onnxruntime

        sessions = {name: onnxruntime.InferenceSession(path) for name, path in paths.items()}

        def call(name: str, inputs: Mapping[str, Tensor]) -> Sequence[Any]:
            return sessions[name].run(None, {key: value.numpy() for key, value in inputs.items()})

    elif description["format"] == "torch":
        modules = {name: torch.export.load(path).module() for name, path in paths.items()}

        def call(name: str, inputs: Mapping[str, Tensor]) -> Sequence[Any]:
            plain = [inputs[key] for key in order[name] if not key.startswith("past.")]
            states = {key.removeprefix("past."): inputs[key] for key in order[name] if key.startswith("past.")}
            if not states:
                return [modules[name](*plain)]
            logits, states = modules[name](*plain, states)
            return [logits, *states.values()]

    else:
        from executorch.runtime import Runtime

        methods = {name: Runtime.get().load_program(path).load_method(name) for name, path in paths.items()}

        def call(name: str, inputs: Mapping[str, Tensor]) -> Sequence[Any]:
            outputs = methods[name].execute([inputs[key].contiguous() for key in order[name]])
            return [output.clone() for output in outputs]  # the next call writes over them

    return lambda name, inputs: dict(zip(names[name], map(torch.as_tensor, call(name, inputs)), strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# The check.


@torch.inference_mode()
def largest_differences(
    model: PreTrainedModel,
    budget: Any,
    programs: Mapping[str, ExportedProgram],
    run: Run,
    max_length: int,
    batch_sizes: Sequence[int],
) -> dict[str, tuple[float, float]]:
    """The largest difference from the model in logits and in states, and the largest value there.

    Padded rows, several lengths up to max_length, reading on from states, and two steps, with every batch size.
    """
    longest: dict[str, tuple[float, float]] = {}
    for B in batch_sizes:
        for L in sorted({1, min(7, max_length), min(model.config.chunk_size + 1, max_length), max_length}):
            if "classify" in programs:
                compared = _classify(model, budget, run, B, L)
            else:
                compared = _decode(model, budget, empty_states(programs["prefill"], B), run, L)
            for kind, actual, expected in compared:
                difference, largest = longest.get(kind, (0.0, 0.0))
                difference = max(difference, float((actual - expected).abs().max()))
                longest[kind] = difference, max(largest, float(expected.abs().max()))
    return longest


Compared = Iterator[tuple[str, Tensor, Tensor]]  # "logits" or "states", exported, eager


def _decode(model: PreTrainedModel, budget: Any, states: Mapping[str, Tensor], run: Run, L: int) -> Compared:
    past = {f"past.{name}": state for name, state in states.items()}
    B, H, cache, position = len(next(iter(states.values()))), model.config.filter_length, None, 0
    for program, length in (("prefill", L), ("prefill", min(3, L)), ("step", 1), ("step", 1)):
        position += length
        if position > H:
            return
        ids, mask = _random_ids(model, B, length), _left_padded(B, length)
        if cache is not None:
            mask = torch.ones_like(mask)
        inputs = {"input_ids": ids, "attention_mask": mask} if program == "prefill" else {"input_ids": ids}
        outputs = run(program, inputs | past)
        expected = model(
            ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1, spectral_budget=budget
        )
        cache = expected.past_key_values
        yield "logits", outputs.pop("logits"), expected.logits[:, -1]
        past = {name.replace("present.", "past."): state for name, state in outputs.items()}
        if position > H // 8:  # later, rounding in fp32 fills the states beyond K, which count for little
            continue
        for name, state in outputs.items():
            _, layer, tensor = name.split(".")
            yield "states", state, cache.layers[int(layer)].tensors[tensor]


def _classify(model: PreTrainedModel, budget: Any, run: Run, B: int, L: int) -> Compared:
    F, mask = model.config.num_input_features, _left_padded(B, L)
    if F is None:
        inputs = {"input_ids": _random_ids(model, B, L)}
    else:
        inputs = {"input_features": torch.randn(B, L, F, generator=torch.Generator().manual_seed(L))}
    inputs["attention_mask"] = mask
    yield "logits", run("classify", inputs)["logits"], model(**inputs, spectral_budget=budget).logits


def _random_ids(model: PreTrainedModel, B: int, L: int) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (B, L), generator=torch.Generator().manual_seed(L))


def _left_padded(B: int, L: int) -> Tensor:
    """(B, L) mask: row b lacks its first b thirds."""
    return (torch.arange(L) >= torch.arange(B)[:, None] * L // 3 % L).long()


# ---------------------------------------------------------------------------------------------------------------------
# All of it together.


def describe(
    model: PreTrainedModel, args: ExportArguments, programs: Mapping[str, ExportedProgram], files: Mapping[str, str]
) -> dict[str, Any]:
    """What a program that has never heard of ES-SSM needs in order to run these."""
    config, eos = model.config, getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    eos = config.eos_token_id if eos is None else eos
    ports = {
        name: dict(zip(("inputs", "outputs"), [[asdict(spec) for spec in specs] for specs in signature(program)]))
        for name, program in programs.items()
    }
    causal = "step" in programs
    return {
        "format": args.format,
        "spectral_budget": list(config.resolve_budget(args.budget).layers),
        "max_length": args.max_length or config.filter_length,
        "filter_length": config.filter_length,
        "eos_token_ids": ([] if eos is None else eos if isinstance(eos, list) else [eos]) if causal else [],
        "bos_token_id": config.bos_token_id if causal else None,
        "pad_token_id": config.pad_token_id,
        "features": read_record(Path(args.model)) or None,  # x -> multiplier * x + offset, before input_features
        "labels": None if causal else [config.id2label[i] for i in range(config.num_labels)],
        "programs": {name: {"file": files[name], **ports[name]} for name in programs},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def export(args: ExportArguments) -> dict[str, Any]:
    """Export, check, and publish the folder; what export.json says.

    Raises:
        ValueError: arguments or a model that cannot work, before anything is exported.
        Failed: the exported programs differ from the model; nothing is published.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)  # torchvision is missing
    warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")  # torch's own pickling
    warnings.filterwarnings("ignore", message="No complete tensor found")  # embedding and head are one tensor
    source, folder = Path(args.model), Path(args.output_dir).absolute()
    causal = is_causal(read_saved_config(source))
    check_output(folder)
    load = ESSMForCausalLM if causal else ESSMForSequenceClassification
    model = load.from_pretrained(source, dtype=torch.float32).eval()
    batch_size = 1 if args.format == "executorch" else None
    programs = export_programs(model, args.budget, args.max_length, batch_size)
    temporary = temporary_folder(folder)
    try:
        files = write_programs(programs, temporary, args.format)
        description = describe(model, args, programs, files)
        beside = "tokenizer.json" if model.config.num_input_features is None else FEATURES
        if (source / beside).exists():
            shutil.copyfile(source / beside, temporary / beside)
        else:
            print(f"{source} has no {beside}: none is exported")
        sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        description["files"] = list(sizes)
        (temporary / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
        run = open_programs(description, temporary)
        found = largest_differences(
            model, args.budget, programs, run, description["max_length"], [1] if batch_size == 1 else [1, 3]
        )
        for kind, (difference, largest) in found.items():
            print(f"largest difference from the model in {kind}: {difference:.1e}, of values up to {largest:.1e}")
            if not difference <= _TOLERANCE * largest:
                raise Failed(
                    f"the exported {kind} differ from the model's by {difference:.1e}, of values up to {largest:.1e}: "
                    "nothing was written"
                )
        publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"saved {folder}: " + ", ".join(f"{name} ({size:,} bytes)" for name, size in sizes.items()))
    return description
