# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A model beside its peers and the floors: each figure is what a few lines of plain Python give."""

import gzip
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import random_model

from benchmarks import released, text_floor
from essm_train.baselines.config import BaselineConfig
from essm_train.baselines.models import BaselineForCausalLM
from modeling_essm import ESSMForCausalLM

TRAIN, HELD_OUT = "the cat sat on the mat and the dog sat too", "the cat sat; that dog"


def witten_bell(train, held_out):
    """Bits per symbol, symbol by symbol."""
    bits = []
    for i in range(2, len(held_out)):
        probability = 1 / text_floor.SYMBOLS
        for order in (1, 2, 3):
            context = tuple(held_out[i - order + 1 : i])
            starts = range(len(train) - order + 1)
            following = Counter(train[j + order - 1] for j in starts if tuple(train[j : j + order - 1]) == context)
            if following:
                seen, ways = following[held_out[i]], len(following)
                probability = (seen + ways * probability) / (following.total() + ways)
        bits.append(-math.log2(probability))
    return sum(bits) / len(bits)


@pytest.mark.parametrize("piece", [20, 1 << 22])
def test_the_trigram_is_that_of_witten_and_bell(monkeypatch, piece):
    monkeypatch.setattr(text_floor, "PIECE", piece)
    train, held_out = (np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in (TRAIN, HELD_OUT))
    assert text_floor.trigram_bits(train, held_out) == pytest.approx(witten_bell(list(train), list(held_out)))
    with pytest.raises(ValueError, match="at least 3 symbols of each text, got 2 and"):
        text_floor.trigram_bits(train[:2], held_out)


def test_gzip_reads_the_held_out_text_as_one_file():
    floors = text_floor.floors([("a", TRAIN)], [("b", HELD_OUT), ("c", b"\xff")])
    text = HELD_OUT.encode() + b"\xff"
    assert floors["gzip -9"] == 8 * len(gzip.compress(text, 9)) / len(text)


def test_texts_are_named_both_or_neither():
    with pytest.raises(ValueError, match="give both"):
        text_floor.main(["--train_file", "a.txt"])


@pytest.fixture
def runs(tmp_path):
    torch.manual_seed(0)
    models: dict = {"mine": random_model(block="gated", num_spectral_channels=6)}
    for name, state_size in (("transformer", 0), ("mamba2", 8)):
        config = BaselineConfig(architecture=name, hidden_size=16, num_hidden_layers=2, state_size=state_size)
        models[name] = BaselineForCausalLM(config)
    for name, model in models.items():
        model.save_pretrained(tmp_path / name / "model")
        lines: list[dict] = [{"update": 5, "loss": 2.0}, {"update": 10, "validation bits/byte K=1": 1.5}]
        if name == "mine":
            lines[1] = {"update": 10, "validation bits/byte K=2": 1.25, "validation bits/byte K=6": 1.125}
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        training = {"parameters": 7, "tokens_per_update": 64, "seconds": 3.0, "arguments": {"learning_rate": 0.5}}
        (tmp_path / name / "training.json").write_text(json.dumps(training))
    (tmp_path / "text.txt").write_text(HELD_OUT * 10)
    return tmp_path


def test_released_scores_and_times_every_model(runs, tmp_path):
    text = ["--train_file", str(runs / "text.txt"), "--text_files", str(runs / "text.txt")]
    folders = [str(runs / name) for name in ("mine", "transformer", "mamba2")]
    out = [
        "--out",
        str(tmp_path / "released.json"),
        "--device",
        "cpu",
        "--quick",
        "--rounds",
        "1",
        "--block_size",
        "32",
    ]
    released.main(["--runs", *folders, *text, *out])
    report = json.loads((tmp_path / "released.json").read_text())
    assert [row["name"] for row in report["results"]] == ["mine K=2", "mine K=4", "mine K=6", "transformer", "mamba2"]
    assert report["curves"]["mine"].items() >= {"parameters": 7, "learning_rate": 0.5, "seconds": 3.0}.items()
    curves = {name: curve["points"] for name, curve in report["curves"].items()}
    assert curves.pop("mine") == {"2": [[640, 1.25]], "6": [[640, 1.125]]}
    assert curves == {"transformer": {"1": [[640, 1.5]]}, "mamba2": {"1": [[640, 1.5]]}}
    assert report["floors"].keys() == {"gzip -9", "trigram"}
    assert all(row["seconds_per_token"]["min"] > 0 for row in report["results"])
    text = [*(HELD_OUT * 10).encode(), 258]
    first, last = torch.tensor(text[:32]), torch.tensor(text[31 * ((len(text) - 2) // 31) :])
    model, nats = ESSMForCausalLM.from_pretrained(runs / "mine" / "model"), 0.0
    for ids in (first, last[:-1]):  # <eos> is not scored
        logits = model(ids[None], spectral_budget=4).logits[0, :-1]
        nats += float(F.cross_entropy(logits, ids[1:], reduction="sum"))
    bits = nats / (len(first) + len(last) - 3) / math.log(2)
    assert report["results"][1]["bits_per_byte"] == pytest.approx(bits, rel=1e-5)


def test_the_curve_of_a_run_that_has_not_ended_is_refused(runs):
    (runs / "mine" / "training.json").unlink()
    with pytest.raises(ValueError, match="has not ended"):
        released.learning_curve(runs / "mine")


def test_steps_that_do_not_give_the_whole_are_not_timed(runs):
    name, (model, budget, step) = next(iter(released.open_run(runs / "mine").items()))
    context = torch.randint(0, 256, (1, 20))
    released.decoder(name, model, budget, step, context, 2)()
    wrong = released.essm_step(model, 4)  # another budget than the one that is scored
    with pytest.raises(RuntimeError, match="wrong results are not timed"):
        released.decoder(name, model, budget, wrong, context, 2)
