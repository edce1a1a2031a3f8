# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The root of the package is what a checkpoint carries, and nothing in it needs the rest."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import random_model
from transformers.dynamic_module_utils import get_imports

import modeling_essm
from modeling_essm import ESSMForCausalLM, ESSMForPairClassification, ESSMForSequenceClassification, ESSMModel

PACKAGE = Path(modeling_essm.__file__).parent
ROOT = {path.stem: path for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
SUBPACKAGES = ("budgets", "checkpoints", "companions", "decoding", "export", "parallel", "training")
ROOMS = ("companions/pruning", "companions/truncation")
ISLANDS = (
    "companions/diagonal_ssm",
    "companions/elastic_state",
)  # whose checkpoints carry them


def code_lines(path):
    """Lines that are neither blank, nor comments, nor docstrings."""
    text = path.read_text()
    documented = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(1 for i, line in lines if i not in documented and line.strip() and not line.strip().startswith("#"))


def relative_imports(path):
    """(dots, module) of every relative import in a file, at its top or in its functions."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return [(node.level, node.module or "") for node in nodes if node.level]


@pytest.mark.parametrize(
    ("cls", "others"),
    [
        (ESSMModel, {"pair_essm"}),
        (ESSMForCausalLM, {"pair_essm"}),
        (ESSMForSequenceClassification, {"pair_essm"}),
        (ESSMForPairClassification, set()),
    ],
)
def test_a_checkpoint_carries_the_root(cls, others, tmp_path):
    """All of it but the files that only other classes need."""
    random_model(cls).save_pretrained(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.py")} == set(ROOT) - others


def test_the_root_is_little_to_read():
    """Lines of the root but for __init__.py: of code alone, and of everything, with docstrings and blank lines."""
    assert sum(map(code_lines, ROOT.values())) <= 3569
    assert sum(len(path.read_text().splitlines()) for path in ROOT.values()) <= 5470
    assert len(ROOT["modeling_essm"].read_text().splitlines()) <= 520


@pytest.mark.parametrize("name", ROOT)
def test_the_root_imports_the_root(name):
    assert all(dots == 1 and module in ROOT for dots, module in relative_imports(ROOT[name]))
    nodes = list(ast.walk(ast.parse(ROOT[name].read_text())))
    absolute = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    absolute |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert not any(module.partition(".")[0] == "modeling_essm" for module in absolute)


@pytest.mark.parametrize("name", ROOT)
def test_a_checkpoint_requires_what_the_package_does(name):
    """transformers refuses remote code whose files import, outside of a `try`, what is not installed."""
    declared = {"torch", "transformers", "safetensors", "numpy", "huggingface_hub"}
    assert set(get_imports(ROOT[name])) <= declared | sys.stdlib_module_names


def test_no_circle_in_the_root():
    graph = {name: {module for _, module in relative_imports(path)} for name, path in ROOT.items()}
    assert set(graphlib.TopologicalSorter(graph).static_order()) == set(ROOT)


@pytest.mark.parametrize("name", SUBPACKAGES)
def test_subpackages_import_the_root_and_budgets(name):
    for path in (PACKAGE / name).glob("*.py"):
        upwards = [module for dots, module in relative_imports(path) if dots == 2]
        assert all(module in ROOT or module.partition(".")[0] == "budgets" for module in upwards), path
        assert all(dots <= 2 for dots, _ in relative_imports(path))


@pytest.mark.parametrize("name", ROOMS)
def test_rooms_of_companions_import_each_other_and_the_root(name):
    for path in (PACKAGE / name).glob("*.py"):
        assert all(module in ROOT for dots, module in relative_imports(path) if dots == 3), path
        assert all(dots <= 3 for dots, _ in relative_imports(path))


@pytest.mark.parametrize("name", ISLANDS)
def test_islands_import_themselves(name):
    own = {path.stem for path in (PACKAGE / name).glob("*.py")}
    for path in (PACKAGE / name).glob("*.py"):
        assert all(dots == 1 and module in own for dots, module in relative_imports(path)), path
        assert "modeling_essm" not in get_imports(path)


def test_the_package_imports_without_extras():
    """In a process where nothing but its own dependencies can be imported."""
    code = """
import sys
extras = {"accelerate", "datasets", "evaluate", "matplotlib", "torchao", "onnx", "onnxscript", "executorch"}

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in extras else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
import modeling_essm
before = set(sys.modules)
assert not {f"modeling_essm.{name}" for name in ("budgets", "companions", "decoding", "export")} & before
import modeling_essm.companions, modeling_essm.budgets, modeling_essm.decoding, modeling_essm.export
import modeling_essm.training  # budget_dropout needs a Trainer, which needs accelerate
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=PACKAGE.parent)
