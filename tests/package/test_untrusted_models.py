# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""No script runs code that lies beside weights unless it is told to. The code here leaves a file when it runs."""

import contextlib
import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, random_ids, random_model
from transformers import AutoConfig, AutoModelForCausalLM

from essm_train.data.tokens import ByteEncoder
from essm_train.measure import evaluation
from essm_train.models import load_model
from modeling_essm import ESSMForCausalLM, build_byte_tokenizer

FOREIGN = """
from pathlib import Path
from transformers import PreTrainedConfig, PreTrainedModel

Path(MARKER).touch()


class Config(PreTrainedConfig):
    model_type = "foreign"


class Model(PreTrainedModel):
    config_class = Config
"""
DERIVED = """
from pathlib import Path
from .modeling_essm import ESSMForCausalLM

Path(MARKER).touch()


class Mine(ESSMForCausalLM):
    pass
"""


@pytest.fixture
def marker(tmp_path) -> Path:
    return tmp_path / "the code ran"


@pytest.fixture
def foreign(tmp_path, marker) -> Path:
    """A model of a type that neither the library nor this package knows."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "their_code.py").write_text(FOREIGN.replace("MARKER", repr(str(marker))))
    names = {"AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"}
    auto_map = dict.fromkeys(names, "their_code.Model") | {"AutoConfig": "their_code.Config"}
    config = {"model_type": "foreign", "architectures": ["Model"], "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


TEXT = ["--text_files", "TEXT"]
SCRIPTS = {
    "analyze": ["--model", "MODEL", *TEXT, "--output_dir", "OUT"],
    "budget_sweep": ["--model", "MODEL", *TEXT, "--output_dir", "OUT"],
    "calibrate": ["--model", "MODEL", *TEXT, "--device", "cpu"],
    "export": ["--model", "MODEL", "--output_dir", "OUT", "--format", "torch"],
    "evaluate_model": ["--models", "MODEL", "--task", "words", "--output_dir", "OUT"],
    "benchmarks.speculative": ["--model", "MODEL", "--quick", "--out", "OUT.json"],
    "benchmarks.length_extrapolation": ["--models", "a=MODEL", *TEXT, "--training_length", "64"],
}

MODULES = {
    name: f"essm_train.commands.{name}" for name in ("analyze", "budget_sweep", "calibrate", "evaluate_model", "export")
}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """(script, model, further arguments) to its run from the command line; SystemExit with what it says of an error."""
    monkeypatch.syspath_prepend(str(ROOT))
    text = tmp_path / "text.txt"
    text.write_text("spectral budget " * 200)
    (tmp_path / "more.txt").write_text("channel " * 400)

    def main(name: str, model: Path, *further: str) -> None:
        if name == "evaluate_model":
            module = importlib.import_module(MODULES[name])
            task = evaluation.open_text([str(text)], ByteEncoder(), 64, 4)
            monkeypatch.setattr(module, "open_task", lambda *args: task)
        else:
            module = importlib.import_module(MODULES.get(name, name))
        places = {
            "MODEL": str(model),
            "TEXT": str(text),
            "MORE": str(tmp_path / "more.txt"),
            "OUT": str(tmp_path / "out"),
        }
        arguments = SCRIPTS[name]
        for place, path in places.items():
            arguments = [argument.replace(place, path) for argument in arguments]
        monkeypatch.setattr(sys, "argv", [name, *arguments, *further])
        try:
            getattr(module, "run", module.main)()
        except SystemExit as stopped:
            raise SystemExit(f"{stopped.code} {capsys.readouterr().err}") from stopped

    return main


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_no_code_of_a_model(script, run, foreign, marker):
    says = "give --trust_remote_code|model_type must be 'essm'"  # and what can only be ours has no use for the flag
    with pytest.raises((ValueError, SystemExit), match=says):
        run(script, foreign)
    assert not marker.exists()
    if script in ("calibrate", "export"):
        return
    with contextlib.suppress(Exception, SystemExit):  # there are no weights
        run(script, foreign, "--trust_remote_code")
    assert marker.exists()


def test_our_own_checkpoint_needs_none_of_its_code(run, tmp_path, marker):
    """Whatever its files say: config, model and tokenizer are read by this package."""
    folder = tmp_path / "ours"
    random_model().save_pretrained(folder)
    build_byte_tokenizer(512).save_pretrained(folder)
    for path in folder.glob("*.py"):
        path.write_text(f"open({str(marker)!r}, 'w')\n{path.read_text()}")
    for script in ("analyze", "budget_sweep"):
        run(script, folder)
        run(script, folder, "--trust_remote_code")
    assert not marker.exists()


def test_a_derived_class_runs_only_with_leave(tmp_path, marker):
    folder, ids = tmp_path / "derived", random_ids(1, 9)
    model = random_model()
    model.save_pretrained(folder)
    (folder / "mine.py").write_text(DERIVED.replace("MARKER", repr(str(marker))))
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"]["AutoModelForCausalLM"] = "mine.Mine"
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_model(AutoModelForCausalLM, folder)
    assert type(loaded) is ESSMForCausalLM and not marker.exists()
    loaded = load_model(AutoModelForCausalLM, folder, trust_remote_code=True)
    assert type(loaded).__name__ == "Mine" and marker.exists()
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_other_errors_stay_as_they_are(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "unheard of"}')
    with pytest.raises(ValueError, match="unheard of"):
        load_model(AutoConfig, tmp_path)
