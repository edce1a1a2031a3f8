# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What the Hub checks in the metadata of a model card."""

import re
from typing import Any

import yaml


def card_errors(text: str) -> list[str]:
    """What the Hub would say to a card's metadata: the rules that a model card of ours could break."""
    head = re.match(r"---\n(.*?)\n---\n", text, re.S)
    if head is None:
        return []
    try:
        data = yaml.safe_load(head[1])
    except yaml.YAMLError as error:
        return [f"invalid YAML: {error}"]
    if not isinstance(data, dict):
        return ['"metadata" must be an object']
    errors = [f'"{name}" must be a string' for name in ("license", "pipeline_tag") if not _is(data.get(name), str)]
    errors += [f'"{name}" must be an array' for name in ("tags", "metrics") if not _is(data.get(name), list)]
    for i, model in enumerate(data.get("model-index") or []):
        for j, result in enumerate(model.get("results") or []):
            at = f'"model-index[{i}].results[{j}]'
            for path in ("task.type", "dataset.type", "dataset.name"):
                part, key = path.split(".")
                if not isinstance((result.get(part) or {}).get(key), str):
                    errors.append(f'{at}.{path}" is required')
            metrics = result.get("metrics") or []
            errors += [] if metrics else [f'{at}.metrics" is required']
            errors += [f'{at}.metrics" need type and value' for m in metrics if not {"type", "value"} <= m.keys()]
        errors += [] if isinstance(model.get("name"), str) else [f'"model-index[{i}].name" is required']
    return errors


def _is(value: Any, kind: type) -> bool:
    return value is None or isinstance(value, kind)
