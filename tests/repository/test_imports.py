# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Who imports whom: the model knows nothing of training, checkpoints carry nothing else, and nothing is circular.

Imports inside of functions count too, unless a test speaks of what is imported at once.
"""

import ast
import sys
import tomllib
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers import ROOT, random_model
from transformers.dynamic_module_utils import get_imports

MODEL, LIBRARY = ROOT / "modeling_essm", ROOT / "train" / "essm_train"
CARRIED = {path.stem for path in MODEL.glob("*.py") if not path.stem.startswith("_")}
COMPANIONS = MODEL / "companions/models"  # whose checkpoints carry them
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = {target.partition(":")[0] for target in PROJECT["scripts"].values()} - {"essm_train.console"}
# Of the package without extras; tokenizers comes with transformers.
DEPENDENCIES = {"huggingface_hub", "numpy", "safetensors", "tokenizers", "torch", "transformers"}
packages = pytest.mark.parametrize("package", [MODEL, LIBRARY], ids=lambda package: package.name)


def module_name(path: Path, package: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, package: Path, at_once: bool = False) -> set[str]:
    """Full names of what a file imports; `at_once` of what importing it does: no function, nothing that is tried."""
    tree, found = ast.parse(path.read_text()), set()
    nodes: Iterable[ast.AST] = tree.body if at_once else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = module_name(path, package).split(".")
            base = inside[: len(inside) - node.level + (path.name == "__init__.py")] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            found |= {f"{source}.{alias.name}" for alias in node.names}
    return found


def tops(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def graph(package: Path) -> dict[str, set[str]]:
    """Each module of a package to the modules of it that it imports."""
    files = {module_name(path, package): path for path in package.rglob("*.py")}
    edges: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for other in imports(path, package):
            while other and other not in files:
                other = other.rpartition(".")[0]
            if "." in other and other != name:
                edges[name].add(other)
    return edges


@packages
def test_nothing_is_circular(package):
    try:
        TopologicalSorter(graph(package)).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {error.args[1]}")


@packages
def test_packages_know_nothing_of_what_uses_them(package):
    for path in package.rglob("*.py"):
        users = {"benchmarks", "tests", "examples", *(["essm_train"] if package == MODEL else [])}
        assert not tops(imports(path, package)) & users, path


def test_checkpoints_carry_what_they_need_and_nothing_else(tmp_path):
    """The root, or a companion's folder: by `from .module import name`, which is all that transformers copies."""
    random_model().save_pretrained(tmp_path)
    saved = {path.stem for path in tmp_path.glob("*.py")}
    assert saved <= CARRIED and {"modeling_essm", "configuration_essm"} <= saved
    for folder, names in ((MODEL, saved), (COMPANIONS, {path.stem for path in COMPANIONS.glob("*.py")})):
        for path in (folder / f"{name}.py" for name in names):
            relative = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.ImportFrom) and x.level]
            assert all(node.level == 1 and node.module in names for node in relative), path
            assert set(get_imports(path)) <= DEPENDENCIES | sys.stdlib_module_names, path


def test_subpackages_import_the_root_and_budgets_alone():
    assert not any("companions" in name for path in MODEL.glob("*.py") for name in imports(path, MODEL))
    for path in MODEL.glob("*/*.py"):
        for name in imports(path, MODEL):
            package, *inside = name.split(".")
            if package == "modeling_essm" and inside and (MODEL / inside[0]).is_dir():
                assert inside[0] in (path.parent.name, "budgets"), (path, name)


def test_the_package_imports_without_extras():
    for path in MODEL.rglob("*.py"):
        known = DEPENDENCIES | sys.stdlib_module_names | {"modeling_essm"}
        assert tops(imports(path, MODEL, at_once=True)) <= known, path


def test_commands_are_known_to_nobody():
    for name, found in graph(LIBRARY).items():
        assert name in COMMANDS or not found & COMMANDS, name
