# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Classes that a user derived from ours: saved with their own files beside ours, and loaded as what they are."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_class_from_dynamic_module, get_relative_imports
from transformers.utils import logging

from ..loading_essm import HUB_ARGUMENTS

logger = logging.get_logger(__name__)

_PACKAGE = "modeling_essm"
_ROOT = Path(__file__).parents[1]


def derived_class(cls: type, source: Any, arguments: Mapping[str, Any]) -> Any:
    """The class beside the weights that an Auto class should have loaded instead of `cls`; None if there is none.

    With this package imported the Auto classes take its own classes for every ES-SSM, whatever auto_map says.

    Args:
        source: folder or Hub name. arguments: what the Auto class gave to `cls.from_pretrained`.
    Returns:
        the class, if trust_remote_code allows its code to run; without that a warning tells of it.
    """
    if "trust_remote_code" not in arguments:  # which every Auto class passes on, with the config
        return None
    auto = getattr(cls, "_auto_class", None)
    reference = (getattr(arguments.get("config"), "auto_map", None) or {}).get(auto)
    named = f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"
    if not isinstance(reference, str) or reference.split("--")[-1] == named:
        return None
    if not arguments["trust_remote_code"]:
        logger.warning(
            f"the model in {str(source)!r} is a {reference}, and is loaded as a plain {cls.__name__}: with "
            "trust_remote_code=True its own code would run"
        )
        return None
    where = {name: arguments[name] for name in HUB_ARGUMENTS if arguments.get(name) is not None}
    derived: Any = get_class_from_dynamic_module(reference, source, **where)
    derived.register_for_auto_class(auto)
    return derived


def code_of_derived_classes(model: Any) -> dict[str, str]:
    """By name, the text of the files outside the package that the classes of a model and of its config need.

    They read there what they import from the package with a dot: the folder is enough.
    """
    classes = (*type(model).__mro__, *type(model.config).__mro__)
    homes = [cls.__module__ for cls in classes if getattr(cls, "_auto_class", None) is not None]
    waiting = [Path(getattr(sys.modules[name], "__file__", None) or "") for name in homes if name != "__main__"]
    texts: dict[str, str] = {}
    while waiting:
        path = waiting.pop(0)
        if path.is_file() and path.parent != _ROOT and path.name not in texts:
            texts[path.name] = _beside_the_package(path.read_text(encoding="utf-8"))
            waiting += [path.parent / f"{name}.py" for name in get_relative_imports(path)]
    return texts


def _beside_the_package(text: str) -> str:
    """The source with `from modeling_essm import name` as it must be where the package's files lie beside it."""
    lines = text.splitlines(keepends=True)
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and not node.level]
    for node in sorted(statements, key=lambda node: -node.lineno):
        package, _, module = (node.module or "").partition(".")
        if package != _PACKAGE:
            continue
        homes = [module or _home(alias.name) for alias in node.names]
        if not all(home and (_ROOT / f"{home}.py").is_file() for home in homes):
            continue  # of a subpackage, or a module, which transformers would not find either: it needs the package
        imports = [
            f"from .{home} import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
            for home, alias in zip(homes, node.names)
        ]
        indent = lines[node.lineno - 1][: node.col_offset]
        lines[node.lineno - 1 : node.end_lineno] = [f"{indent}{line}\n" for line in imports]
    return "".join(lines)


def _home(name: str) -> str | None:
    """The module of the root that defines what the package offers under that name."""
    package, _, home = getattr(getattr(sys.modules.get(_PACKAGE), name, None), "__module__", "").rpartition(".")
    return home if package == _PACKAGE else None
