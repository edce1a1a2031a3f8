# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The recipes of docs/train.md for data of one's own, as they stand there but for the size of the model."""

import csv
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT
from training_run import write_wav
from transformers import AutoTokenizer

from essm_train.arguments import parse_arguments
from essm_train.data.arguments import ClassificationArguments, CLMArguments
from essm_train.run.classifier import train_classifier
from essm_train.run.language import train_language_model

SMALL = (
    "--max_steps 2 --warmup_steps 1 --cpu_threads 1"
    " --config_overrides hidden_size=16,num_hidden_layers=1,num_spectral_channels=8,filter_length=512"
)
SMALL_TEXT = "--block_size 64 --validation_blocks 2 --sweep_blocks 2"
RNG = np.random.default_rng(0)


def recipe(title: str, language: str) -> list[str]:
    """The blocks of that section."""
    section = (ROOT / "docs/train.md").read_text().split(f"### {title}\n")[1].split("\n## ")[0].split("\n### ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def run(command: str, small: str = "") -> dict:
    """The command with a small model; the configuration of what it leaves."""
    _, script, arguments = re.split(r"(?:-m essm_train\.|essm-)(train[\w-]+) ", command)
    given = [*shlex.split(arguments), *f"{SMALL} {small}".split()]
    if script in ("train_clm", "train-clm"):
        train_language_model(parse_arguments(CLMArguments, given))
    else:
        train_classifier(parse_arguments(ClassificationArguments, given))
    folder = Path(given[given.index("--output_dir") + 1])
    assert (folder / "budget_sweep.json").exists()
    return json.loads((folder / "model/config.json").read_text())


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_table(name: str, columns: list[str], rows: list[list]) -> None:
    with open(name, "w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def test_a_folder_of_text_and_a_bpe_of_your_own(folder):
    for name in ("a.txt", "more/b.txt"):
        (folder / "books" / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / "books" / name).write_text(" ".join(RNG.choice(["the", "brown", "fox", "jumps"], 3000)))
    (code,) = recipe("A folder of text and a BPE of your own", "python")
    exec(code, {})
    (command,) = recipe("A folder of text and a BPE of your own", "bash")
    config = run(command, SMALL_TEXT)
    tokenizer = AutoTokenizer.from_pretrained("runs/books/model")
    assert config["vocab_size"] == len(tokenizer) < 300 and tokenizer.eos_token == "<eos>"
    assert len(tokenizer("the brown fox").input_ids) == 3


def test_a_csv():
    texts, numbers = recipe("A CSV", "bash")
    write_table("reviews.csv", ["review", "verdict"], [["fine" * 9, "good"], ["dull, long", "bad"]] * 20)
    assert run(texts)["id2label"] == {"0": "bad", "1": "good"}
    assert json.loads(Path("runs/reviews/budget_sweep.json").read_text())["split"] == "validation"
    rows = [[*RNG.normal(row % 2, 0.1, 6), ["walk", "run"][row % 2]] for row in range(40)]
    write_table("sensor.csv", [*(f"t{i}" for i in range(6)), "kind"], rows)
    assert run(numbers)["id2label"] == {"0": "run", "1": "walk"}


def test_a_folder_of_wav_files(folder):
    for i in range(24):
        path = folder / "clips" / ["train", "test"][i % 3 == 2] / ["yes", "no"][i % 2] / f"{i}.wav"
        write_wav(path, RNG.uniform(-0.03, 0.03, 4000))
    (command,) = recipe("A folder of WAV files", "bash")
    config = run(command)
    assert config["id2label"] == {"0": "no", "1": "yes"} and config["num_input_features"] == 160
