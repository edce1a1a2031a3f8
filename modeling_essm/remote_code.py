# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The code that lies beside saved weights: which class `auto_map` names there, and which files that class needs.

A class derived from ours by a user is saved with its own file and with this package's root, and loads as what it is.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging

from .configuration_essm import AUTO_MAP

logger = logging.get_logger(__name__)

# Arguments of from_pretrained that say where files are, for `cached_file`.
HUB_ARGUMENTS = (
    *("cache_dir", "force_download", "proxies", "token", "local_files_only", "revision", "subfolder"),
    *("repo_type", "user_agent", "_commit_hash"),
)

_ROOT = Path(__file__).parent
_PACKAGE = "modeling_essm"
_RELATIVE = re.compile(r"^\s*from\s+\.(\w+)\s+import\b", re.MULTILINE)


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


def code_files(model: Any) -> dict[str, str]:
    """By name, the text of every file that the classes of a model and of its config need beside its weights.

    A file from outside the package reads there what it imports from the package with a dot: the folder is enough. None
    for a config whose auto_map was taken away: its class is asked for by import.
    """
    if getattr(model.config, "auto_map", None) is None:
        return {}
    classes = (*type(model).__mro__, *type(model.config).__mro__)
    files = [getattr(sys.modules[cls.__module__], "__file__", None) for cls in classes if _is_saved(cls)]
    waiting = [Path(file) for file in files if file is not None]
    texts: dict[str, str] = {}
    while waiting:
        path = waiting.pop(0)
        if path.name in texts or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        texts[path.name] = text if path.parent == _ROOT else _beside_the_package(text)
        for name in _RELATIVE.findall(texts[path.name]):
            file = path.parent / f"{name}.py"
            waiting.append(file if file.is_file() else _ROOT / file.name)
    return texts


def _is_saved(cls: type) -> bool:
    """Whether transformers saves the file of a class, or it is one of this package's."""
    if cls.__module__ == "__main__" or cls.__module__.startswith(("transformers.", "torch.")):
        return False
    return getattr(cls, "_auto_class", None) is not None or cls.__module__.rpartition(".")[0] == __package__


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


def prune_auto_map(config: Any, names: Mapping[str, Any], folder: str | os.PathLike) -> None:
    """Let auto_map name only classes whose files will be in the folder: of others, ours, or none. One that was taken
    away, as a model whose class is not saved does, stays away.

    Args:
        config: changed in place. names: of the files that will be written there.
    """
    if getattr(config, "auto_map", None) is None:
        return
    kept = {}
    for auto, references in config.auto_map.items():
        each = references if isinstance(references, (list, tuple)) else [references]
        files = [f"{name.split('.')[0]}.py" for name in each if isinstance(name, str) and "--" not in name]
        if all(file in names or (Path(folder) / file).is_file() for file in files):
            kept[auto] = references
    config.auto_map = {**AUTO_MAP, **kept}
