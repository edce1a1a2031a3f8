# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Who imports whom: the model knows nothing of training, the library nothing of its commands, and nothing is circular.

Imports inside of functions count like all others.
"""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers import ROOT

LIBRARY = ROOT / "train" / "essm_train"
MODEL = ROOT / "modeling_essm"
SCRIPTS = {path.stem for path in (ROOT / "train").glob("*.py")}
FOLDERS = ("modeling_essm", "train", "benchmarks", "tests", "examples", "hub_configs", "docs")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path, package: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, package: Path) -> set[str]:
    """Modules, or names in them, that a file imports, with their full names."""
    found, inside = set(), module_name(path, package).split(".")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            drop = node.level - (path.name == "__init__.py")
            base = inside[: len(inside) - drop] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{source}.{alias.name}" for alias in node.names}
    return found


def graph(package: Path) -> dict[str, set[str]]:
    """Each module of a package to the modules of it that it imports."""
    files = {module_name(path, package): path for path in package.rglob("*.py") if "metrics" not in path.parts}
    edges = {}
    for name, path in files.items():
        edges[name] = set()
        for imported in imports(path, package):
            parts = imported.split(".")
            while parts and ".".join(parts) not in files:
                parts.pop()
            if parts and len(parts) > 1 and ".".join(parts) != name:
                edges[name].add(".".join(parts))
    return edges


def test_library_has_no_circle():
    try:
        order = list(TopologicalSorter(graph(LIBRARY)).static_order())
    except CycleError as error:
        pytest.fail(f"import circle: {error.args[1]}")
    assert order.index("essm_train.arguments") < order.index("essm_train.models") < order.index("essm_train.run.loop")


def test_library_does_not_know_its_commands():
    for name, imported in graph(LIBRARY).items():
        if not name.startswith("essm_train.commands"):
            assert not [other for other in imported if other.startswith("essm_train.commands")], name


@pytest.mark.parametrize("package", [LIBRARY, MODEL], ids=["essm_train", "modeling_essm"])
def test_packages_import_no_scripts(package):
    for path in package.rglob("*.py"):
        first = {name.split(".")[0] for name in imports(path, package)}
        assert not first & {"benchmarks", "tests", "examples", *SCRIPTS}, path
        assert package == LIBRARY or "essm_train" not in first, path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_of_a_sitting(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert not [node.name for node in functions if node.end_lineno - node.lineno >= 80]
    edits = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    assert not [edit.lineno for edit in edits if ast.unparse(edit.func).startswith("sys.path.")]
    targets = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Attribute, ast.Subscript))]
    assert not [t.lineno for t in targets if isinstance(t.ctx, ast.Store) and ast.unparse(t).startswith("sys.path")]


@pytest.mark.parametrize("path", sorted((ROOT / "train").glob("*.py")), ids=lambda path: path.stem)
def test_scripts_are_short(path):
    assert len(path.read_text().splitlines()) <= 60
