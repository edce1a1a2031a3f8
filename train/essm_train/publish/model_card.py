# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The model card of a saved folder: what the model is, its quality at every budget, how it was made, how to load it.

A card is Markdown with a YAML head and five markers, `<!-- model -->`, `<!-- results -->`, `<!-- training -->`,
`<!-- loading -->` and `<!-- limits -->`, each replaced by that section. hub_configs/*/README.md are such cards; without
one a plain card is written. The same inputs give the same bytes, so that pushing twice makes one commit.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import safe_open

from essm_train.data.readers import read_record
from essm_train.files import write_text
from essm_train.measure.budget_sweep import read_sweep
from essm_train.publish.hub import read_json, weight_files
from modeling_essm import ESSMConfig
from modeling_essm.budgets.curve import BudgetCurve
from modeling_essm.loading_essm import channel_blocks, layer_of
from modeling_essm.spectral_budget import spectral_layers

SECTIONS = ("model", "results", "training", "loading", "limits")
PICTURE = "budget_sweep.png"
TAGS = ("essm", "state-space-model", "spectral-filtering", "elastic-inference")
_PLAIN = (
    "An elastic spectral state-space model (ES-SSM): trained once, it runs with any number of its spectral channels, "
    "chosen per call with `spectral_budget`. Method: [Song, Yin, Hu and Wang](https://arxiv.org/abs/2601.22488v2)."
)

_ON_THE_HUB = """\
The model's code is part of this repository and runs on your machine, which is what `trust_remote_code=True` allows.
A branch can change after you have read it: load a commit, not a branch. The newest one is

```python
from huggingface_hub import model_info

print(model_info("{}").sha)
```

Read its `*.py` files, then pin it:"""
_IN_A_CLONE = (
    "The model's code is that of the package, which has to be installed (`pip install .` in a clone):\n"
    "`trust_remote_code=True` lets `essm.py` in this folder import it. From the root of the clone:"
)


def write_model_card(
    folder: Path,
    *,
    sweep: dict[str, Any] | None,
    training: dict[str, Any] | None,
    hub_model_id: str | None,
    template: Path | None,
    local: str | None = None,
) -> Path:
    """Write `folder`/README.md, put the curve's picture of its run, ../budget_sweep.png, beside it; the card's path.

    Args:
        folder: a saved model (config.json at least).
        sweep: record of budget_sweep.json; what ran it is its "hardware", or that of the training.
        training: record of training.json, every field optional.
        hub_model_id: the repository it will have; else the card says `org/name`.
        template: a card with the five markers; None for a plain one.
        local: the folder it is loaded from, where it lies in a clone and is not on the Hub.
    Raises:
        ValueError, OSError: no config.json, a template without its markers or with a broken head, or a damaged sweep.
    """
    config, curve = read_json(folder / "config.json"), None if sweep is None else read_sweep(sweep)
    sweep, training, place = sweep or {}, training or {}, folder.resolve()
    title = (hub_model_id or (place.parent.name if place.name == "model" else place.name)).split("/")[-1]
    own, text = {}, "\n\n".join([f"\n# {title}", _PLAIN, *(f"<!-- {name} -->" for name in SECTIONS)])
    if template is not None:
        user = check_template(template.read_text(encoding="utf-8"), str(template))
        own, text = user.data.to_dict(), user.text
    task = own.get("pipeline_tag") or _task(folder, config)
    data = _metadata(own, task, title, curve, sweep.get("split"), training)
    if place.name == "model" and (place.parent / PICTURE).is_file():  # else what lies there is another model's
        shutil.copyfile(place.parent / PICTURE, folder / PICTURE)
    example = next((w["text"] for w in data.get("widget") or () if "text" in w), "def main(")
    sections = (
        _model(folder, config),
        _results(folder, config, curve, sweep, training),
        _training(training),
        _loading(folder, config, json.dumps(example, ensure_ascii=False), hub_model_id or "org/name", local),
        _limits(config),
    )
    for name, section in zip(SECTIONS, sections):
        text = text.replace(f"<!-- {name} -->", section)
    path = folder / "README.md"
    write_text(path, f"---\n{ModelCardData(**data).to_yaml()}\n---\n{text.rstrip()}\n")
    return path


def check_template(text: str, name: str = "template") -> ModelCard:
    """The template as a card. Raises ValueError if its head is no YAML or one of the five markers is missing."""
    try:
        card = ModelCard(text)
    except Exception as error:  # yaml's own errors have no common base with huggingface_hub's
        raise ValueError(f"{name}: the YAML head of a model card cannot be read: {error}") from error
    if missing := [section for section in SECTIONS if f"<!-- {section} -->" not in text]:
        raise ValueError(f"{name}: a card template needs the markers {SECTIONS}, it lacks {missing}")
    return card


def _metadata(
    data: dict[str, Any], task: str | None, title: str, curve: BudgetCurve | None, split: str | None, training: Any
) -> dict[str, Any]:
    """Fields of ModelCardData: those of the user's card, and what is known besides."""
    dataset = (training.get("arguments") or {}).get("dataset_name")
    if not (isinstance(dataset, str) and re.fullmatch(r"[\w-]+(/[\w.-]+)?", dataset) and not Path(dataset).exists()):
        dataset = None  # a path, which no other machine has
    found = {"pipeline_tag": task, "datasets": dataset and [dataset]}
    data = {"library_name": "transformers", **found} | data
    data["tags"] = list(dict.fromkeys([*(data.get("tags") or []), *TAGS]))
    if curve is None:
        return data
    summary = str(training.get("data") or "not stated")
    results = [
        EvalResult(
            task_type=task or "other",
            dataset_type=dataset or "custom",
            dataset_name=summary if len(summary) <= 100 else summary[:97] + "...",
            dataset_split=split,
            metric_type=curve.metric,
            metric_name=f"{curve.title} (K = {K})",
            metric_value=round(value, 6),
            metric_args={"spectral_budget": K},
        )
        for K, value in zip(curve.budgets, curve.values)
    ]
    return data | {"metrics": [curve.metric], "model_name": title, "eval_results": results}


def _task(folder: Path, config: dict[str, Any]) -> str | None:
    """The Hub's name of the task, where the folder tells."""
    if "Classification" not in _architecture(config):
        return "text-generation" if "CausalLM" in _architecture(config) else None
    if config.get("num_input_features") is None:
        return "text-classification"
    return "audio-classification" if (folder / "preprocessor_config.json").exists() else None


def _architecture(config: dict[str, Any]) -> str:
    return (config.get("architectures") or [""])[0]


def _table(*rows: Iterable[Any]) -> str:
    """A Markdown table, its head first."""
    head, *body = ([str(cell).replace("|", "\\|") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body))


def _facts(facts: Mapping[str, Any]) -> str:
    """Names and values, but for those that are None."""
    values = {name: f"{value:,}" if isinstance(value, (int, float)) else value for name, value in facts.items()}
    return _table(("", ""), *((name, value) for name, value in values.items() if value is not None))


def _model(folder: Path, config: dict[str, Any]) -> str:
    kind, features, record = _architecture(config), config.get("num_input_features"), _scale(folder)
    reads = "token ids" if features is None else f"`input_features` of shape (batch, length, {features})"
    facts = {
        "class": f"`{kind}`" if kind else "not stated",
        "parameters": _parameters(folder, config, config["num_spectral_channels"]) or None,
        "reads": reads,
        "numbers x (`features.json`)": f"{record['multiplier']:.6g} x {record['offset']:+g}" if record else None,
        "numbers in a frame": record.get("frame_length"),
        "width, blocks": f"{config['hidden_size']}, {config['num_hidden_layers']}",
        "spectral channels (the largest budget)": config["num_spectral_channels"],
        "longest sequence (`filter_length`)": config["filter_length"],
        "budgets seen in training": ", ".join(map(str, config.get("trained_budgets") or ())) or None,
    }
    return f"## Model\n\n{_facts(facts)}"


def _scale(folder: Path) -> dict[str, Any]:
    """features.json, if it changes numbers before the model reads them."""
    record = read_record(folder)
    changed = (record.get("multiplier", 1.0), record.get("offset", 0.0)) != (1.0, 0.0) or "frame_length" in record
    return {"multiplier": 1.0, "offset": 0.0} | record if changed else {}


def _parameters(folder: Path, config: dict[str, Any], budget: int) -> int:
    """Saved parameters that a call at that budget reads; 0 without weights."""
    made, total = ESSMConfig.from_dict(config), 0
    blocks, spectral = channel_blocks(made), spectral_layers(made)
    for path in (folder / name for name in sorted(weight_files(folder)) if name.endswith(".safetensors")):
        if not path.is_file():
            return 0
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118
                shape, (layer, inside) = file.get_slice(name).get_shape(), layer_of(name)
                held = blocks.get(inside, ()) if layer in spectral else ()
                read = [min(n, size * budget) if size else n for n, size in zip(shape, held)]
                total += math.prod([*read, *shape[len(read) :]])
    return total


def _results(
    folder: Path, config: dict[str, Any], curve: BudgetCurve | None, sweep: dict[str, Any], training: dict[str, Any]
) -> str:
    text = "## Quality at every budget\n\n"
    if curve is None:
        return text + "Not measured."
    marked = curve.marks
    if (calibrated := (config.get("budget_presets") or {}).get("medium")) in curve.budgets:
        marked["sweet spot"] = calibrated  # by more times than those of a sweep
    if (folder / PICTURE).is_file():
        text += f"![{curve.title} against the spectral budget]({PICTURE})\n\n"
    better = "higher" if curve.higher_is_better else "lower"
    said = [f"One set of weights; K is the `spectral_budget`. {curve.title.capitalize()}: {better} is better."]
    if curve.metric == "bits_per_byte":
        blocks = f"{sweep['blocks']} blocks" if sweep.get("blocks") else "blocks"
        blocks += f" of {sweep['block_size']} tokens" if sweep.get("block_size") else ""
        said += [f"Held-out text in {blocks}; every token is predicted from those before it in its own block."]
    elif sweep.get("samples"):
        said += [f"Measured on {sweep['samples']:,} samples of the {sweep.get('split', 'held-out')} data."]
    if curve.speeds:
        ran_on = {"{}": sweep.get("hardware") or training.get("hardware")}
        ran_on |= {"{} CPU threads": sweep.get("threads"), "torch {}": sweep.get("torch")}
        machine = ", ".join(words.format(value) for words, value in ran_on.items() if value)
        said += [f"Speed is that of forward passes without a cache{' on ' if machine else ''}{machine}."]
    said += ["Sweet spot: the smallest K within 2% of the full budget, unless a better one is as fast."]
    said += filter(None, [curve.time_note()])
    if "collapse boundary" in marked:
        said += ["Collapse boundary: the smallest K that keeps 90% of its quality."]
    full = curve.values[-1]
    rows = [("K", "parameters read", curve.title, f"against K = {curve.budgets[-1]}", "tokens/s", "")]
    for i, (K, value) in enumerate(zip(curve.budgets, curve.values)):
        change = f"{value / full - 1:+.1%}" if full else "n/a"
        speed = f"{curve.speeds[i]:,.0f}" if curve.speeds else ""
        marks = ", ".join(mark for mark, at in marked.items() if at == K)
        rows.append((str(K), f"{_parameters(folder, config, K):,}", f"{value:.4f}", change, speed, marks))
    return f"{text}{' '.join(said)}\n\n{_table(*rows)}"


def _training(training: dict[str, Any]) -> str:
    updates = training.get("updates")
    facts: dict[str, Any] = {"data": str(training.get("data") or "not stated"), "updates": updates}
    arguments = training.get("arguments") or {}
    if arguments.get("load_best_model_at_end"):
        facts["weights"] = f"those after update {training.get('best_update')}, the best validation"
    for unit in ("tokens", "samples"):
        count = training.get(f"{unit}_per_update")
        facts[f"{unit} per update"] = count
        if isinstance(updates, int) and isinstance(count, int):
            facts[f"{unit} in all"] = updates * count
    facts |= {name: training.get(name) for name in ("schedule", "hardware", "script")}
    text = f"## Training\n\n{_facts(facts)}"
    arguments = {name: _public(name, value) for name, value in arguments.items()}
    if arguments:
        lines = "\n".join(f"{name}: {json.dumps(value)}" for name, value in arguments.items() if value is not None)
        text += f"\n\n<details><summary>Arguments</summary>\n\n```yaml\n{lines}\n```\n\n</details>"
    return text


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
    path = PurePath(value)
    return path.name if path.is_absolute() or value.startswith(("~", "..")) else value


def _loading(folder: Path, config: dict[str, Any], example: str, repository: str, local: str | None) -> str:
    causal, features = "CausalLM" in _architecture(config), config.get("num_input_features")
    auto = "AutoModelForCausalLM" if causal else "AutoModelForSequenceClassification"
    channels = config["num_spectral_channels"]
    budget, extractor = max(1, min(6, channels - 1)), folder / "preprocessor_config.json"
    rate = read_json(extractor)["sampling_rate"] if features is not None and extractor.exists() else None
    where, remote = f'folder = "{local}"', "folder, trust_remote_code=True"
    if local is None:
        where = f'repository = "{repository}"\nrevision = "the 40 digits of the commit you have read"'
        remote = "repository, revision=revision, trust_remote_code=True"
    imports = f"from transformers import {auto}, AutoTokenizer"
    if rate:
        imports = f"import torch\nfrom transformers import AutoFeatureExtractor, {auto}"
        prepare = f"""extractor = AutoFeatureExtractor.from_pretrained({remote})

waveform = torch.randn({rate}).numpy()  # one second of sound, mono: yours here
inputs = extractor(waveform, sampling_rate={rate}, return_tensors="pt")"""
    elif features is not None:
        imports = f"import torch\nfrom transformers import {auto}"
        shape = f"1, {config['filter_length']}, {features}"
        numbers = f"torch.zeros({shape})"
        if record := _scale(folder):
            numbers = f"{record['multiplier']!r} * {numbers} + {record['offset']!r}"
        prepare = f'\ninputs = {{"input_features": {numbers}}}  # (batch, length, features): yours here'
    else:
        prepare = f"tokenizer = AutoTokenizer.from_pretrained({remote})\n\n"
        prepare += f'inputs = tokenizer({example}, return_tensors="pt")'
    if causal:
        use = f"""output = model.generate(**inputs, spectral_budget={budget}, max_new_tokens=40)
print(tokenizer.decode(output[0], skip_special_tokens=True))"""
    else:
        use = f"""probabilities = model(**inputs, spectral_budget={budget}).logits.softmax(-1)
print(model.config.id2label[probabilities.argmax().item()])"""
    text = f"""## How to load it

{_IN_A_CLONE if local else _ON_THE_HUB.format(repository)}

```python
{imports}

{where}
model = {auto}.from_pretrained({remote}).eval()
{prepare}
{use}
```

`spectral_budget` is an integer from 1 to {channels}, one per layer as a list, or one per row of
the batch as a tensor; without it the model runs at its full budget. `from_pretrained(..., spectral_budget={budget})`
makes a budget the default; `from_pretrained(..., spectral_capacity={budget})` loads the first {budget} channels
alone, a smaller model that equals this one at that budget."""
    if config.get("dtype") in ("bfloat16", "float16"):
        text += f" The weights are in {config['dtype']}: give `dtype=torch.float32` to train them, or on a CPU."
    if presets := config.get("budget_presets"):
        names = ", ".join(f"`{name}` ({K})" for name, K in presets.items())
        text += f" `spectral_budget` also takes the names {names}."
    if (folder / "budget_profile.json").exists():
        text += (
            " `budget_profile.json` holds quality, latency and memory as measured: `modeling_essm.budgets.choose_budget"
            "(model, max_quality_drop=0.02)`, or `max_latency_ms=5`."
        )
    return text


def _limits(config: dict[str, Any]) -> str:
    hybrid = set(config.get("layer_types") or ()) - {"linear_attention"}
    lines = [
        '`cache_implementation="static"` and compiled steps: keys of the attention layers grow with the text.'
        if hybrid
        else 'There is no attention: `attn_implementation` other than "eager" is refused.',
        f"Exact results beyond {config['filter_length']:,} positions (`filter_length`): the recurrence is no longer "
        "the trained convolution there, and the model warns once.",
        "Packed sequences with a cache; without one, and with padding, each sequence is computed as if alone.",
        "`nn.DataParallel`, training quantised weights, and serving engines that bring their own model code.",
        "A budget per row inside `torch.compile(fullgraph=True)`; `torch.export` in strict mode.",
    ]
    if "CausalLM" in _architecture(config):
        speculation = "`modeling_essm.decoding.speculate` does without."
        lines.insert(1, f"The library's assisted generation, which rolls states back; {speculation}")
    if config.get("num_input_features") is not None:
        lines.append("`pipeline`: its audio and image tasks look for other classes; load the model as shown above.")
    return "\n".join(["## What is not supported\n", *(f"- {line}" for line in lines)])
