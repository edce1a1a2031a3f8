# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The model card of a saved folder: what the model is, its quality at every budget, how it was made, how to load it.

A card is a Markdown template with a YAML head and five markers, `<!-- model -->`, `<!-- results -->`,
`<!-- training -->`, `<!-- loading -->` and `<!-- limits -->`, each replaced by a section written from config.json, the
budget sweep and training.json. hub_configs/*/README.md are such templates; without one a plain card is written. The
same inputs give the same bytes, so that pushing twice makes one commit.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

SECTIONS = ("model", "results", "training", "loading", "limits")
PICTURE = "budget_sweep.png"
PAPER = "https://arxiv.org/abs/2601.22488"
TAGS = ["essm", "state-space-model", "spectral-filtering", "elastic-inference"]

_PLAIN = "\n\n".join(
    [
        "# {title}",
        "An elastic spectral state-space model (ES-SSM): trained once at its full number of spectral channels, it runs "
        f"at any number of them, chosen per call with `spectral_budget`. Method: [Song and Wang]({PAPER}).",
        *(f"<!-- {name} -->" for name in SECTIONS),
    ]
)


@dataclass(frozen=True)
class Curve:
    """A budget sweep, whichever script measured it; ascending budgets, the last one is the full budget.

    Attributes:
        metric: its identifier, such as bits_per_byte or accuracy. values: one per budget.
        speed_unit: "tokens/s" or "samples/s". speeds: one per budget, or empty.
    """

    budgets: tuple[int, ...]
    metric: str
    higher_is_better: bool
    values: tuple[float, ...]
    speed_unit: str
    speeds: tuple[float, ...]
    sweet_spot: int | None
    collapse_boundary: int | None

    @property
    def name(self) -> str:
        return self.metric.replace("_", " ")

    @classmethod
    def read(cls, sweep: dict[str, Any]) -> Curve:
        """From the record of budget_sweep.json.

        Raises:
            ValueError: no budgets, no metric, lists of different lengths, or values that are not finite.
        """
        metric = sweep.get("metric") or {"name": "bits_per_byte", "higher_is_better": False}
        if isinstance(metric, str):
            metric = {"name": metric, "higher_is_better": sweep.get("higher_is_better", metric != "bits_per_byte")}
        values = sweep.get("values", sweep.get(metric["name"]))
        budgets = sweep.get("budgets")
        if not budgets or values is None or len(values) != len(budgets):
            raise ValueError(
                f"a budget sweep needs `budgets` and as many values of {metric['name']!r}, "
                f"got {budgets!r} and {values!r}"
            )
        unit = next((unit for unit in ("tokens", "samples") if sweep.get(f"{unit}_per_second")), "tokens")
        speeds = sweep.get(f"{unit}_per_second") or []
        if len(speeds) not in (0, len(budgets)):
            raise ValueError(f"{unit}_per_second must have {len(budgets)} values, got {len(speeds)}")
        for value in (*values, *speeds):
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"a budget sweep must hold finite numbers, got {value!r}")
        return cls(
            tuple(budgets),
            str(metric["name"]),
            bool(metric.get("higher_is_better", False)),
            tuple(values),
            f"{unit}/s",
            tuple(speeds),
            sweep.get("sweet_spot"),
            sweep.get("collapse_boundary"),
        )


def write_model_card(
    folder: Path,
    *,
    sweep: dict[str, Any] | None,
    training: dict[str, Any] | None,
    hub_model_id: str | None,
    template: Path | None,
    picture: Path | None = None,
) -> Path:
    """Write `folder`/README.md and put the curve picture beside it.

    Args:
        folder: a saved model (config.json at least).
        sweep: record of budget_sweep.json. training: record of training.json, every field optional.
        hub_model_id: the repository it will have; else the card says `org/name`.
        template: a card with the five markers; None for a plain one.
        picture: the drawn curve; by default `folder`/../budget_sweep.png or the one already in `folder`, if there.
    Returns:
        The path of the card.
    Raises:
        ValueError: no config.json, a template without its markers or with a broken head, or a damaged sweep.
    """
    config = _read_json(folder / "config.json")
    training = training or {}
    curve = None if sweep is None else Curve.read(sweep)
    place = folder.resolve()
    title = (hub_model_id or (place.parent.name if place.name == "model" else place.name)).split("/")[-1]
    card = _open_template(template, title)
    task = card.data.get("pipeline_tag") or _pipeline_tag(folder, config)

    data = card.data.to_dict()
    data.setdefault("license", "apache-2.0")
    data.setdefault("library_name", "transformers")
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
        data["eval_results"] = _eval_results(curve, task, dataset, _summary(training), (sweep or {}).get("split"))
    card.data = ModelCardData(**data)

    pictured = curve is not None and _place_picture(folder, picture)
    repository = hub_model_id or "org/name"
    sections = {
        "model": _model_section(folder, config),
        "results": _results_section(curve, sweep or {}, training, pictured),
        "training": _training_section(training),
        "loading": _loading_section(folder, config, repository, card.data.get("widget")),
        "limits": _limits_section(config),
    }
    text = card.text
    for name, section in sections.items():
        text = text.replace(f"<!-- {name} -->", section)
    card.text = text
    path = folder / "README.md"
    path.write_text(str(card).rstrip() + "\n", encoding="utf-8")
    return path


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


def _open_template(template: Path | None, title: str) -> ModelCard:
    if template is None:
        return ModelCard("---\nlicense: apache-2.0\n---\n\n" + _PLAIN.format(title=title))
    try:
        return check_template(template.read_text(encoding="utf-8"), str(template))
    except OSError as error:
        raise ValueError(f"card template {str(template)!r} cannot be read: {error.strerror}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; a saved model folder has one") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def _architecture(config: dict[str, Any]) -> str:
    return (config.get("architectures") or [""])[0]


def _pipeline_tag(folder: Path, config: dict[str, Any]) -> str | None:
    """The Hub's name of the task, where the folder tells."""
    if "CausalLM" in _architecture(config):
        return "text-generation"
    if "SequenceClassification" not in _architecture(config):
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
    curve: Curve, task: str | None, dataset: str | None, data: str, split: str | None
) -> list[EvalResult]:
    return [
        EvalResult(
            task_type=task or "other",
            dataset_type=dataset or "custom",
            dataset_name=data if len(data) <= 100 else data[:97] + "...",
            dataset_split=split,
            metric_type=curve.metric,
            metric_name=f"{curve.name} (K = {K})",
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


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _model_section(folder: Path, config: dict[str, Any]) -> str:
    reads = "token ids"
    if config.get("num_input_features") is not None:
        reads = f"`input_features` of shape (batch, length, {config['num_input_features']})"
    rows = [
        ["class", f"`{_architecture(config)}`" if _architecture(config) else "not stated"],
        ["reads", reads],
        ["width, blocks", f"{config['hidden_size']}, {config['num_hidden_layers']}"],
        ["spectral channels (the largest budget)", str(config["num_spectral_channels"])],
        ["longest sequence (`filter_length`)", f"{config['filter_length']:,}"],
    ]
    parameters = _num_parameters(folder)
    if parameters:
        rows.insert(1, ["parameters", f"{parameters:,}"])
    if config.get("trained_budgets"):
        rows.append(["budgets seen in training", ", ".join(map(str, config["trained_budgets"]))])
    return "## Model\n\n" + _table(["", ""], rows)


def _num_parameters(folder: Path) -> int:
    """Numbers stored in the folder's safetensors files; 0 if there are none."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total


def _results_section(curve: Curve | None, sweep: dict[str, Any], training: dict[str, Any], pictured: bool) -> str:
    title = "## Quality at every budget\n\n"
    if curve is None:
        return title + "Not measured."
    full = curve.values[-1]
    rows = []
    for i, (K, value) in enumerate(zip(curve.budgets, curve.values)):
        change = f"{value / full - 1:+.1%}" if full else "n/a"
        marks = [("sweet spot", curve.sweet_spot), ("collapse boundary", curve.collapse_boundary)]
        speed = f"{curve.speeds[i]:,.0f}" if curve.speeds else ""
        rows.append([str(K), f"{value:.4f}", change, speed, ", ".join(name for name, at in marks if at == K)])
    better = "higher" if curve.higher_is_better else "lower"
    machine = [str(training["hardware"])] if training.get("hardware") else []
    machine += [f"{sweep['threads']} CPU threads"] if sweep.get("threads") else []
    machine += [f"torch {sweep['torch']}"] if sweep.get("torch") else []
    text = f"One set of weights; K is the `spectral_budget`. {curve.name.capitalize()}: {better} is better."
    if curve.metric == "bits_per_byte":
        blocks = f"{sweep['blocks']} blocks" if sweep.get("blocks") else "blocks"
        size = f" of {sweep['block_size']} tokens" if sweep.get("block_size") else ""
        text += f" Held-out text in {blocks}{size}; every token is predicted from those before it in its own block."
    elif sweep.get("samples"):
        text += f" Measured on {sweep['samples']:,} samples of the {sweep.get('split', 'held-out')} data."
    if curve.speeds:
        text += f" Speed is that of forward passes without a cache{' on ' if machine else ''}{', '.join(machine)}."
    text += (
        " Sweet spot: the smallest K within 2% of the full budget."
        " Collapse boundary: the smallest K that keeps 90% of its quality."
    )
    header = ["K", curve.name, f"against K = {curve.budgets[-1]}", curve.speed_unit, ""]
    picture = f"![{curve.name} against the spectral budget]({PICTURE})\n\n" if pictured else ""
    return title + picture + text + "\n\n" + _table(header, rows)


def _training_section(training: dict[str, Any]) -> str:
    rows = [["data", _summary(training)]]
    updates = training.get("updates")
    if updates is not None:
        rows.append(["updates", _count(updates)])
    for unit in ("tokens", "samples"):
        count = training.get(f"{unit}_per_update")
        if count is not None:
            rows.append([f"{unit} per update", _count(count)])
            if isinstance(updates, int) and isinstance(count, int):
                rows.append([f"{unit} in all", _count(updates * count)])
        if training.get(unit) is not None:
            rows.append([unit, _count(training[unit])])
    rows += [[name, str(training[name])] for name in ("schedule", "hardware", "script") if training.get(name)]
    text = "## Training\n\n" + _table(["", ""], rows)
    arguments = {name: _public(name, value) for name, value in (training.get("arguments") or {}).items()}
    lines = [f"{name}: {json.dumps(value)}" for name, value in arguments.items() if value is not None]
    if lines:
        text += "\n\n<details><summary>Arguments</summary>\n\n```yaml\n" + "\n".join(lines) + "\n```\n\n</details>"
    return text


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)


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


def _loading_section(folder: Path, config: dict[str, Any], repository: str, widget: Any) -> str:
    """How to load and call the model; the code blocks run as they stand once the revision is filled in.

    `widget`: the card's metadata of that name, whose first text is the example.
    """
    causal = "CausalLM" in _architecture(config)
    auto = "AutoModelForCausalLM" if causal else "AutoModelForSequenceClassification"
    tokens = config.get("num_input_features") is None
    budget = max(1, min(6, config["num_spectral_channels"] - 1))
    remote = "repository, revision=revision, trust_remote_code=True"
    names, example = [auto], []
    if tokens:
        names.append("AutoTokenizer")
        text = json.dumps(widget[0]["text"] if widget else "def main(", ensure_ascii=False)
        example = [f"tokenizer = AutoTokenizer.from_pretrained({remote})", ""]
        example += [f'inputs = tokenizer({text}, return_tensors="pt")']
    elif (folder / "preprocessor_config.json").exists():
        names.insert(0, "AutoFeatureExtractor")
        rate = _read_json(folder / "preprocessor_config.json")["sampling_rate"]
        example = [f"extractor = AutoFeatureExtractor.from_pretrained({remote})", ""]
        example += [f"waveform = torch.randn({rate}).numpy()  # one second of sound, mono: yours here"]
        example += [f'inputs = extractor(waveform, sampling_rate={rate}, return_tensors="pt")']
    else:
        shape = f"1, {config['filter_length']}, {config['num_input_features']}"
        example = ["", f'inputs = {{"input_features": torch.zeros({shape})}}  # (batch, length, features): yours here']
    if causal:
        example += [f"output = model.generate(**inputs, spectral_budget={budget}, max_new_tokens=40)"]
        example += ["print(tokenizer.decode(output[0], skip_special_tokens=True))"]
    else:
        example += [f"probabilities = model(**inputs, spectral_budget={budget}).logits.softmax(-1)"]
        example += ["print(model.config.id2label[probabilities.argmax().item()])"]
    code = "\n".join(
        [
            *([] if tokens else ["import torch"]),
            f"from transformers import {', '.join(names)}",
            "",
            f'repository = "{repository}"',
            'revision = "the 40 digits of the commit you have read"',
            f"model = {auto}.from_pretrained({remote}).eval()",
            *example,
        ]
    )
    return f"""## How to load it

The model's code is part of this repository and runs on your machine, which is what `trust_remote_code=True` allows.
A branch can change after you have read it: load a commit, not a branch. The newest one is

```python
from huggingface_hub import model_info

print(model_info("{repository}").sha)
```

Read its `*.py` files, then pin it:

```python
{code}
```

`spectral_budget` is an integer from 1 to {config["num_spectral_channels"]}, one per layer as a list, or one per row of
the batch as a tensor; without it the model runs at its full budget. `from_pretrained(..., spectral_budget={budget})`
makes a budget the default; `from_pretrained(..., spectral_capacity={budget})` loads the first {budget} channels
alone, a smaller model that equals this one at that budget.{_profile_note(folder, config)}"""


def _profile_note(folder: Path, config: dict[str, Any]) -> str:
    """What a calibrated model offers besides."""
    notes = ""
    if presets := config.get("budget_presets"):
        named = ", ".join(f"`{name}` ({budget})" for name, budget in presets.items())
        notes += f" `spectral_budget` also takes the names {named}."
    if (folder / "budget_profile.json").exists():
        notes += (
            " `budget_profile.json` holds quality, latency and memory as measured: "
            "`modeling_essm.budgets.choose_budget(model, max_quality_drop=0.02)`, or `max_latency_ms=5`."
        )
    return notes


def _limits_section(config: dict[str, Any]) -> str:
    points = [
        'There is no attention: `attn_implementation` other than "eager" is refused.',
        f"Beyond {config['filter_length']:,} positions (`filter_length`) the recurrence is no longer the trained "
        "convolution; the model warns once.",
        "Packed sequences with a cache; without one, and with padding, each sequence is computed as if alone.",
        "`nn.DataParallel`, training quantised weights, and serving engines that bring their own model code.",
        "A budget per row inside `torch.compile(fullgraph=True)`; `torch.export` in strict mode.",
    ]
    if config.get("num_input_features") is not None:
        points.append("`pipeline`: its audio and image tasks look for other classes; load the model as shown above.")
    if "CausalLM" in _architecture(config):
        assisted = (
            "The library's assisted generation, which rolls states back; "
            "`modeling_essm.decoding.speculate` does without."
        )
        points.insert(1, assisted)
    return "## What is not supported\n\n" + "\n".join(f"- {point}" for point in points)
