# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The model card of a saved folder: what the model is, its quality at every budget, how it was made, how to load it.

model_card.md.jinja writes it, by huggingface_hub's `ModelCard.from_template`, from config.json, the budget sweep and
training.json. A user's card is Markdown with a YAML head and five markers, `<!-- model -->`, `<!-- results -->`,
`<!-- training -->`, `<!-- loading -->` and `<!-- limits -->`, each replaced by that section; it is not read as Jinja.
hub_configs/*/README.md are such cards; without one a plain card is written. The same inputs give the same bytes, so
that pushing twice makes one commit.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path, PurePath
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import safe_open

from essm_train.files import write_text
from essm_train.measure.budget_sweep import read_sweep
from essm_train.publish.hub import read_json
from modeling_essm.budgets.curve import BudgetCurve

TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
SECTIONS = ("model", "results", "training", "loading", "limits")
PICTURE = "budget_sweep.png"
_ADVICE = "a saved model folder has one"
TAGS = ["essm", "state-space-model", "spectral-filtering", "elastic-inference"]


def write_model_card(
    folder: Path,
    *,
    sweep: dict[str, Any] | None,
    training: dict[str, Any] | None,
    hub_model_id: str | None,
    template: Path | None,
    picture: Path | None = None,
    local: str | None = None,
) -> Path:
    """Write `folder`/README.md and put the curve picture beside it.

    Args:
        folder: a saved model (config.json at least).
        sweep: record of budget_sweep.json; what ran it is its "hardware", or that of the training.
        training: record of training.json, every field optional.
        hub_model_id: the repository it will have; else the card says `org/name`.
        template: a card with the five markers; None for a plain one.
        local: the folder it is loaded from, where it lies in a clone and is not on the Hub.
        picture: the drawn curve; by default `folder`/../budget_sweep.png or the one already in `folder`, if there.
    Returns:
        The path of the card.
    Raises:
        ValueError: no config.json, a template without its markers or with a broken head, or a damaged sweep.
    """
    config = read_json(folder / "config.json", _ADVICE)
    curve = None if sweep is None else read_sweep(sweep)
    sweep, training = sweep or {}, training or {}
    place = folder.resolve()
    title = (hub_model_id or (place.parent.name if place.name == "model" else place.name)).split("/")[-1]
    user = None if template is None else _open_template(template)
    data = _metadata({} if user is None else user.data.to_dict(), folder, config, title, curve, sweep, training)
    causal, tokens = "CausalLM" in _architecture(config), config.get("num_input_features") is None
    extractor = folder / "preprocessor_config.json"
    ran_on = sweep.get("hardware") or training.get("hardware")
    machine = {"{}": ran_on, "{} CPU threads": sweep.get("threads"), "torch {}": sweep.get("torch")}
    card = ModelCard.from_template(
        ModelCardData(**data),
        template_path=str(TEMPLATE),
        body=None if user is None else user.text,
        title=title,
        repository=hub_model_id or "org/name",
        local=local,
        config=config,
        architecture=_architecture(config),
        causal=causal,
        tokens=tokens,
        pairs=_reads_pairs(config),
        auto="AutoModelForCausalLM" if causal else "AutoModelForSequenceClassification",
        sampling_rate=read_json(extractor, _ADVICE)["sampling_rate"] if not tokens and extractor.exists() else None,
        example=json.dumps(data["widget"][0]["text"] if data.get("widget") else "def main(", ensure_ascii=False),
        budget=max(1, min(6, config["num_spectral_channels"] - 1)),
        parameters=_num_parameters(folder),
        calibrated=(folder / "budget_profile.json").exists(),
        curve=curve,
        sweep=sweep,
        machine=[words.format(value) for words, value in machine.items() if value],
        picture=PICTURE,
        pictured=curve is not None and _place_picture(folder, picture),
        facts=_training_facts(training),
        arguments=_public_arguments(training),
    )
    path = folder / "README.md"
    write_text(path, str(card).rstrip() + "\n")
    return path


def _metadata(
    data: dict[str, Any],
    folder: Path,
    config: dict[str, Any],
    title: str,
    curve: BudgetCurve | None,
    sweep: dict[str, Any],
    training: dict[str, Any],
) -> dict[str, Any]:
    """Fields of ModelCardData: those of the user's card, and what the folder tells besides."""
    task = data.get("pipeline_tag") or _pipeline_tag(folder, config)
    data = {"license": "apache-2.0", "library_name": "transformers"} | data
    data["tags"] = list(dict.fromkeys([*(data.get("tags") or []), *TAGS]))
    if task:
        data["pipeline_tag"] = task
    dataset = _hub_dataset(training)
    if dataset:
        data.setdefault("datasets", [dataset])
    if training.get("language"):
        data.setdefault("language", training["language"])
    if curve is not None:
        data["metrics"] = [curve.metric]
        data["model_name"] = title
        data["eval_results"] = _eval_results(curve, task, dataset, _summary(training), sweep.get("split"))
    return data


def check_template(text: str, name: str = "template") -> ModelCard:
    """The template as a card. Raises ValueError if its head is no YAML or one of the five markers is missing."""
    try:
        card = ModelCard(text)
    except Exception as error:  # yaml's own errors have no common base with huggingface_hub's
        raise ValueError(f"{name}: the YAML head of a model card cannot be read: {error}") from error
    missing = [section for section in SECTIONS if f"<!-- {section} -->" not in text]
    if missing:
        raise ValueError(f"{name}: a card template needs the markers {SECTIONS}, it lacks {missing}")
    return card


def _open_template(path: Path) -> ModelCard:
    try:
        return check_template(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ValueError(f"card template {str(path)!r} cannot be read: {error.strerror}") from error


def _architecture(config: dict[str, Any]) -> str:
    return (config.get("architectures") or [""])[0]


def _reads_pairs(config: dict[str, Any]) -> bool:
    return "PairClassification" in _architecture(config)


def _pipeline_tag(folder: Path, config: dict[str, Any]) -> str | None:
    """The Hub's name of the task, where the folder tells."""
    if "CausalLM" in _architecture(config):
        return "text-generation"
    if not ("SequenceClassification" in _architecture(config) or _reads_pairs(config)):
        return None
    if config.get("num_input_features") is None:
        return "text-classification"
    return "audio-classification" if (folder / "preprocessor_config.json").exists() else None


def _summary(training: dict[str, Any]) -> str:
    return str(training.get("data") or "not stated")


def _hub_dataset(training: dict[str, Any]) -> str | None:
    """The data set's id on the Hub, if the run was given one rather than a path."""
    name = (training.get("arguments") or {}).get("dataset_name")
    if isinstance(name, str) and re.fullmatch(r"[\w-]+(/[\w.-]+)?", name) and not Path(name).exists():
        return name
    return None


def _eval_results(
    curve: BudgetCurve, task: str | None, dataset: str | None, data: str, split: str | None
) -> list[EvalResult]:
    return [
        EvalResult(
            task_type=task or "other",
            dataset_type=dataset or "custom",
            dataset_name=data if len(data) <= 100 else data[:97] + "...",
            dataset_split=split,
            metric_type=curve.metric,
            metric_name=f"{curve.title} (K = {K})",
            metric_value=round(value, 6),
            metric_args={"spectral_budget": K},
        )
        for K, value in zip(curve.budgets, curve.values)
    ]


def _place_picture(folder: Path, picture: Path | None) -> bool:
    """Copy the picture into the folder; whether there is one."""
    target, source = folder / PICTURE, picture or folder.resolve().parent / PICTURE
    if source.is_file() and (not target.is_file() or source.read_bytes() != target.read_bytes()):
        shutil.copyfile(source, target)
    return target.is_file()


def _num_parameters(folder: Path) -> int:
    """Numbers stored in the folder's safetensors files; 0 if there are none."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total


def _training_facts(training: dict[str, Any]) -> dict[str, Any]:
    """Rows of the table, by name."""
    facts: dict[str, Any] = {"data": _summary(training)}
    updates = training.get("updates")
    if updates is not None:
        facts["updates"] = updates
    for unit in ("tokens", "samples"):
        count = training.get(f"{unit}_per_update")
        if count is not None:
            facts[f"{unit} per update"] = count
            if isinstance(updates, int) and isinstance(count, int):
                facts[f"{unit} in all"] = updates * count
        if training.get(unit) is not None:
            facts[unit] = training[unit]
    return facts | {name: str(training[name]) for name in ("schedule", "hardware", "script") if training.get(name)}


def _public_arguments(training: dict[str, Any]) -> list[str]:
    """Lines of YAML."""
    arguments = {name: _public(name, value) for name, value in (training.get("arguments") or {}).items()}
    return [f"{name}: {json.dumps(value)}" for name, value in arguments.items() if value is not None]


def _public(name: str, value: Any) -> Any:
    """What a reader elsewhere may see of an argument: no secrets, and of a local path its last part only."""
    if isinstance(value, (list, tuple)):
        return [_public(name, item) for item in value]
    if isinstance(value, dict):
        return {key: _public(key, item) for key, item in value.items()}
    if not isinstance(value, str):
        return value if isinstance(value, (int, float, bool)) else None
    if re.search(r"token$|secret|password|key$", name):
        return None
    local = PurePath(value).is_absolute() or value.startswith(("~", "..")) or re.match(r"[A-Za-z]:\\|\\\\", value)
    return re.split(r"[/\\]", value.rstrip("/\\"))[-1] if local else value
