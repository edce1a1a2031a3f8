# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Who imports whom: the model knows nothing of training, checkpoints carry nothing else, and nothing is circular.

Imports inside of functions count too, unless a test speaks of what is imported at once.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers import ROOT, random_model
from transformers.dynamic_module_utils import get_imports

MODEL, LIBRARY = ROOT / "modeling_essm", ROOT / "train" / "essm_train"
CARRIED = {path.stem for path in MODEL.glob("*.py") if not path.stem.startswith("_")}
ISLANDS = ("companions/models",)  # whose checkpoints carry them
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = {target.partition(":")[0] for target in PROJECT["scripts"].values()} - {"essm_train.console"}
# Of the package without extras; tokenizers comes with transformers.
DEPENDENCIES = {"huggingface_hub", "numpy", "safetensors", "tokenizers", "torch", "transformers"}


def module_name(path: Path, package: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(nodes: Iterator[ast.AST], path: Path, package: Path) -> set[str]:
    """Modules, or names in them, that these statements of a file import, with their full names."""
    found, inside = set(), module_name(path, package).split(".")
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            drop = node.level - (path.name == "__init__.py")
            base = inside[: len(inside) - drop] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{source}.{alias.name}" for alias in node.names}
    return found


def imports(path: Path, package: Path) -> set[str]:
    return imported(ast.walk(ast.parse(path.read_text())), path, package)


def at_once(path: Path, package: Path) -> set[str]:
    """What importing a file imports: no function, nothing that is tried, nothing for type checkers alone."""
    return imported(iter(ast.parse(path.read_text()).body), path, package)


def graph(package: Path) -> dict[str, set[str]]:
    """Each module of a package to the modules of it that it imports."""
    files = {module_name(path, package): path for path in package.rglob("*.py")}
    edges: dict[str, set[str]] = {}
    for name, path in files.items():
        edges[name] = set()
        for other in imports(path, package):
            parts = other.split(".")
            while parts and ".".join(parts) not in files:
                parts.pop()
            if len(parts) > 1 and ".".join(parts) != name:
                edges[name].add(".".join(parts))
    return edges


@pytest.mark.parametrize("package", [MODEL, LIBRARY], ids=lambda package: package.name)
def test_nothing_is_circular(package):
    try:
        TopologicalSorter(graph(package)).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {error.args[1]}")


@pytest.mark.parametrize("package", [MODEL, LIBRARY], ids=lambda package: package.name)
def test_packages_know_nothing_of_what_uses_them(package):
    for path in package.rglob("*.py"):
        first = {name.split(".")[0] for name in imports(path, package)}
        assert not first & {"benchmarks", "tests", "examples", *(["essm_train"] if package == MODEL else [])}, path


def test_a_checkpoint_carries_the_root_and_the_root_needs_nothing_else(tmp_path):
    """The root imports by `from .module import name`, which is all that transformers copies."""
    random_model().save_pretrained(tmp_path)
    saved = {path.stem for path in tmp_path.glob("*.py")}
    assert saved <= CARRIED and {"modeling_essm", "configuration_essm"} <= saved
    for name in saved:
        for node in ast.walk(ast.parse((MODEL / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module in saved, (name, ast.unparse(node))
        assert "modeling_essm" not in get_imports(MODEL / f"{name}.py")
        assert set(get_imports(MODEL / f"{name}.py")) <= DEPENDENCIES | sys.stdlib_module_names, name


@pytest.mark.parametrize("name", ISLANDS)
def test_what_other_checkpoints_carry_needs_nothing_else(name):
    own = {path.stem for path in (MODEL / name).glob("*.py")}
    for path in (MODEL / name).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module in own, (path, ast.unparse(node))
        assert "modeling_essm" not in get_imports(path)


def test_subpackages_import_the_root_and_budgets_alone():
    for path in MODEL.glob("*/*.py"):
        own = path.parent.name
        for name in imports(path, MODEL):
            package, *inside = name.split(".")
            if package == "modeling_essm" and inside and (MODEL / inside[0]).is_dir():
                assert inside[0] in (own, "budgets"), (path, name)


def test_the_package_imports_without_extras():
    for path in MODEL.rglob("*.py"):
        first = {name.split(".")[0] for name in at_once(path, MODEL)}
        assert first <= DEPENDENCIES | sys.stdlib_module_names | {"modeling_essm"}, path


def test_commands_are_known_to_nobody_and_start_without_torch():
    for name, found in graph(LIBRARY).items():
        assert name in COMMANDS or not found & COMMANDS, name
    for name in COMMANDS:
        first = {other.split(".")[0] for other in at_once(LIBRARY.parent / f"{name.replace('.', '/')}.py", LIBRARY)}
        assert not first & {"torch", "transformers", "datasets", "accelerate", "modeling_essm"}, name
