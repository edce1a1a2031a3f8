# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A built wheel in an empty environment, outside the checkout: the model alone, then with the extra `train`.

pip fetches what the wheel depends on, in the versions of constraints.txt.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import COMMANDS, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
USE = """
import torch
from transformers import AutoModelForCausalLM
import modeling_essm
import modeling_essm.budgets, modeling_essm.companions, modeling_essm.decoding, modeling_essm.export
import modeling_essm.training
from modeling_essm import ESSMConfig, ESSMForCausalLM, build_byte_tokenizer

assert "site-packages" in modeling_essm.__file__
config = ESSMConfig(block="elastic", hidden_size=16, num_hidden_layers=2, num_spectral_channels=4, filter_length=64)
ESSMForCausalLM(config).save_pretrained("saved")
build_byte_tokenizer(64).save_pretrained("saved")
model = AutoModelForCausalLM.from_pretrained("saved", trust_remote_code=True, spectral_capacity=2)
print(model.generate(torch.tensor([[5, 6, 7]]), spectral_budget=1, max_new_tokens=4).shape)
"""


class Environment:
    """A virtual environment, a folder to work in, and no sign of the checkout."""

    def __init__(self, folder: Path):
        self.folder, self.bin = folder / "work", folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        self.folder.mkdir()
        venv.create(folder / "venv", with_pip=True)

    def run(self, command: str, *arguments: object, **variables: str) -> str:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV", "HF_", "PIP_QUIET"))}
        kept |= {"PATH": f"{self.bin}{os.pathsep}{kept['PATH']}", "OMP_NUM_THREADS": "1", **variables}
        result = subprocess.run(
            [str(self.bin / command), *map(str, arguments)], env=kept, cwd=self.folder, capture_output=True, text=True
        )
        assert result.returncode == 0, f"{command} {arguments}:\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        return result.stdout

    def install(self, requirement: object) -> None:
        self.run("python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", requirement)

    def installed(self) -> set[str]:
        listed = json.loads(self.run("python", "-m", "pip", "list", "--format", "json"))
        return {package["name"].lower().replace("_", "-") for package in listed}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("modeling_essm", "train"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(source)]
    subprocess.run(build, check=True)
    (path,) = out.glob("modeling_essm-*.whl")
    return path


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> SimpleNamespace:
    """The model alone: what is installed with it, what it generates, and what a command says."""
    environment = Environment(tmp_path_factory.mktemp("bare"))
    environment.install(wheel)
    command = [environment.bin / "essm-train-clm"]
    child = subprocess.run(command, capture_output=True, text=True, cwd=environment.folder)
    shape, found = environment.run("python", "-c", USE).strip(), environment.installed()
    return SimpleNamespace(environment=environment, installed=found, shape=shape, child=child)


@pytest.fixture(scope="module")
def training(wheel, bare) -> Environment:
    """The same environment with the extras."""
    bare.environment.install(f"{wheel}[train,export]")
    return bare.environment


def test_the_model_alone(bare):
    needless = {"accelerate", "datasets", "evaluate", "matplotlib", "pandas", "onnx", "torchao", "pytest"}
    assert not needless & bare.installed
    assert bare.shape == "torch.Size([1, 7])"


def test_its_commands_say_what_they_need(bare):
    """Without the extra a command names it."""
    child = bare.child
    assert child.returncode != 0 and "modeling-essm[train]" in child.stderr and "Traceback" not in child.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name, training):
    assert name in training.run(name, "--help")


def test_what_commands_need_is_installed(training):
    """Training sweeps too; there is nothing else that calibrating needs."""
    folder = training.folder
    (folder / "text.txt").write_text("A spectral channel looks at the past through one fixed filter.\n" * 200)
    (folder / "labels.csv").write_text("text,label\n" + "".join(f"line {i},{i % 2}\n" for i in range(64)))
    size = ["--config_overrides", "hidden_size=16,num_hidden_layers=2,num_spectral_channels=4,filter_length=64"]
    size += ["--max_steps", 2, "--warmup_steps", 1, "--cpu_threads", 1]
    text = ["--train_file", "text.txt", "--validation_file", "text.txt", "--block_size", 32]
    training.run("essm-train-clm", *text, *size, "--output_dir", "clm")
    training.run("essm-train-classification", "--train_file", "labels.csv", "--test_file", "labels.csv", *size,
                 "--text_column", "text", "--max_length", 16, "--output_dir", "labels")  # fmt: skip
    training.run("essm-export", "--model", "clm/model", "--output_dir", "exported", "--spectral_budget", 2)
    assert "modeling_essm.py" in training.run("essm-push", "--run", "clm", "--dry_run")
    made = ["clm/budget_sweep.png", "labels/model/model.safetensors"]
    assert all((folder / path).exists() for path in made) and list((folder / "exported").glob("*.onnx"))
    callback = "from modeling_essm.training import BudgetDropoutCallback; print(BudgetDropoutCallback.__module__)"
    assert training.run("python", "-c", callback).startswith("modeling_essm.training")
