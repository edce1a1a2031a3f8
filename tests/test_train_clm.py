# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""train/: text, checkpoints that survive SIGKILL, errors before work is lost, and the budget sweep."""

import json
import math
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

import text_data
import train_clm
from budget_sweep import BudgetSweep, sweep_budgets
from checkpoints import list_checkpoints
from text_data import BlockOrder, byte_labels, evaluation_blocks, to_stream

from modeling_essm import ESSMConfig, ESSMForCausalLM
from modeling_essm.byte_tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE

TRAIN = Path(train_clm.__file__).parent

# Eight updates, checkpoints after 3, 6 and 8; dropout makes the random states matter.
TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_spectral_channels": 8,
    "filter_length": 512,
    "block_size": 64,
    "per_device_batch_size": 2,
    "max_steps": 8,
    "warmup_steps": 2,
    "dropout": 0.1,
    "validate_every": 4,
    "validation_blocks": 2,
    "sweep_blocks": 4,
    "checkpoint_every": 3,
    "cpu_threads": 1,  # more would wait for each other
}


@pytest.fixture(scope="module", autouse=True)
def restore_threads():
    """The runs below set the number of threads of this process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory) -> str:
    words = ["spectral", "budget", "state", "channel", "filter", "gate\n", "größe"]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(random.Random(0).choices(words, k=1500)))
    return str(path)


@pytest.fixture(scope="module")
def arguments(text_file):
    """Arguments of a tiny run in that folder, as a list for the command line; keywords override."""

    def build(output_dir: Path, **changes) -> list[str]:
        values = {**TINY, "train_file": text_file, "output_dir": output_dir} | changes
        return [part for name, value in values.items() for part in (f"--{name}", str(value))]

    return build


def train(arguments: list[str]) -> None:
    train_clm.main(train_clm.parse_arguments(arguments))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, arguments) -> Path:
    """The folder of a run that nothing interrupted."""
    output_dir = tmp_path_factory.mktemp("finished")
    train(arguments(output_dir))
    return output_dir


def final_tensors(output_dir: Path) -> list[torch.Tensor]:
    """Weights and optimizer moments of the last checkpoint."""
    checkpoint = list_checkpoints(output_dir)[-1]
    weights = torch.load(checkpoint / "pytorch_model.bin")
    moments = torch.load(checkpoint / "optimizer.bin")["state"]
    return [*weights.values(), *(t for state in moments.values() for t in state.values())]


def same(a: Path, b: Path) -> bool:
    return all(torch.equal(x, y) for x, y in zip(final_tensors(a), final_tensors(b), strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# A whole run.


def test_run_leaves_a_model_a_sweep_and_the_newest_checkpoints(finished):
    assert [path.name for path in list_checkpoints(finished)] == ["checkpoint-00000006", "checkpoint-00000008"]
    assert not list(finished.glob(".tmp-*"))
    names = {path.name for path in (finished / "model").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "modeling_essm.py"} <= names
    assert AutoConfig.from_pretrained(finished / "model").trained_budgets == [2, 3, 4, 6, 8]
    sweep = json.loads((finished / "budget_sweep.json").read_text())
    assert sweep["budgets"] == [2, 3, 4, 6, 8]
    assert all(0 < bits < 8.1 for bits in sweep["bits_per_byte"]) and sweep["sweet_spot"] in sweep["budgets"]
    assert (finished / "budget_sweep.png").read_bytes().startswith(b"\x89PNG")


def test_finished_run_is_measured_but_not_retrained(finished, arguments, capsys, monkeypatch):
    before = list_checkpoints(finished)[-1].stat().st_mtime_ns
    monkeypatch.setattr(train_clm, "save_checkpoint", None)  # an update would call it
    train(arguments(finished))
    out = capsys.readouterr().out
    assert "finished already" in out and "validation" not in out
    assert all(f"--- sample at K={K} ---" in out for K in (2, 6, 8))
    assert list_checkpoints(finished)[-1].stat().st_mtime_ns == before


def test_accumulated_gradients_equal_one_large_batch(tmp_path, arguments):
    shared = {"dropout": 0.0, "max_steps": 2, "weight_decay": 0.0}
    train(arguments(tmp_path / "large", per_device_batch_size=4, **shared))
    train(arguments(tmp_path / "accumulated", gradient_accumulation_steps=2, **shared))
    large, accumulated = (
        torch.load(tmp_path / name / "checkpoint-00000002" / "optimizer.bin")["state"]
        for name in ("large", "accumulated")
    )
    for i in large:  # first moments are averages of clipped gradients, of norm 1: fp32 sums in another order
        torch.testing.assert_close(large[i]["exp_avg"], accumulated[i]["exp_avg"], atol=1e-6, rtol=1e-4)


def test_only_matrices_decay():
    model = ESSMForCausalLM(ESSMConfig(hidden_size=8, num_hidden_layers=1, num_spectral_channels=4, filter_length=64))
    decayed, others = train_clm.parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    exempt = {names[id(p)] for p in others["params"]}
    assert exempt == {n for n in names.values() if n.endswith(".bias") or "norm" in n or "embed" in n}
    assert len(decayed["params"]) + len(exempt) == len(names)


def test_arguments_may_come_from_a_file(tmp_path):
    (tmp_path / "a.yaml").write_text("learning_rate: 0.5\ntrain_file: [x.txt, y.txt]\n")
    (tmp_path / "a.json").write_text(json.dumps({"max_steps": 7}))
    from_yaml = train_clm.parse_arguments([str(tmp_path / "a.yaml")])
    assert (from_yaml.learning_rate, from_yaml.train_file) == (0.5, ["x.txt", "y.txt"])
    assert train_clm.parse_arguments([str(tmp_path / "a.json")]).max_steps == 7


# ---------------------------------------------------------------------------------------------------------------------
# Interruption. The scripts know nothing of this: a wrapper patches what they call so that the process kills itself.

_DIE = "def die(): os.kill(os.getpid(), signal.SIGKILL)"
_KILLS = {
    "between checkpoints": """
call = budget_dropout.BudgetDropout.__call__
budget_dropout.BudgetDropout.__call__ = lambda self, update: die() if update == 5 else call(self, update)
""",
    "half-written file": """
write = torch.save
def save(obj, file, *args, **kwargs):
    if list(pathlib.Path(output_dir).glob("checkpoint-*")):
        pathlib.Path(file).write_bytes(b"half a file")
        die()
    write(obj, file, *args, **kwargs)
torch.save = save
""",
    "before the rename": """
rename = os.replace
def replace(source, target):
    die() if str(target).endswith("checkpoint-00000006") else rename(source, target)
os.replace = replace
""",
}


@pytest.mark.parametrize("moment", _KILLS)
def test_killed_run_resumes_bit_for_bit(moment, tmp_path, arguments, finished, capsys):
    script = f"""
import os, pathlib, signal, sys
sys.path.insert(0, {str(TRAIN)!r})
import torch, budget_dropout, train_clm
{_DIE}
output_dir = {str(tmp_path)!r}
{_KILLS[moment]}
train_clm.main(train_clm.parse_arguments(sys.argv[1:]))
"""
    killed = subprocess.run([sys.executable, "-c", script, *arguments(tmp_path)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-00000003"]
    assert bool(list(tmp_path.glob(".tmp-*"))) == (moment != "between checkpoints")
    (tmp_path / ".tmp-checkpoint-00000099").mkdir()  # left by an earlier kill
    train(arguments(tmp_path))
    assert "checkpoint-00000003 holds update 3" in capsys.readouterr().out
    assert same(tmp_path, finished)
    assert not list(tmp_path.glob(".tmp-*"))


def test_resuming_with_another_value_is_refused(finished, arguments, tmp_path):
    with pytest.raises(ValueError, match=r"learning_rate was 0.005 and is now 0.001"):
        train(arguments(finished, learning_rate=0.001))
    text = tmp_path / "words.txt"
    text.write_text("another text " * 1000)
    with pytest.raises(ValueError, match=r"train_file was .*words.txt'\] and is now"):
        train(arguments(finished, train_file=text))


def test_resuming_on_a_changed_file_is_refused(arguments, tmp_path):
    text = tmp_path / "words.txt"
    text.write_text("one text " * 1000)
    train(arguments(tmp_path / "run", train_file=text, max_steps=1))
    text.write_text("two text " * 1000)
    with pytest.raises(ValueError, match="sha256 of the training text was"):
        train(arguments(tmp_path / "run", train_file=text, max_steps=1))


def test_overwriting_starts_afresh(arguments, tmp_path):
    train(arguments(tmp_path, max_steps=3))
    train([*arguments(tmp_path, max_steps=1, seed=1), "--overwrite_output_dir"])
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-00000001"]


# ---------------------------------------------------------------------------------------------------------------------
# Errors.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_file": "EMPTY"}, "text file .*EMPTY' is empty"),
        ({"train_file": "MISSING"}, "cannot read text file .*MISSING'"),
        ({"train_file": "SHORT"}, "shorter than one block: it holds 46 tokens and block_size is 64"),
        ({"validation_file": "EMPTY"}, "text file .*EMPTY' is empty"),
        ({"output_dir": "SHORT/run"}, "output_dir .*SHORT/run' cannot be written: Not a directory"),
        ({"num_spectral_channels": 40}, "filter_length 512 resolves at most .*got num_spectral_channels=40"),
        ({"block_size": 513}, r"block_size must be in \[2, filter_length = 512\], got 513"),
        ({"budget_schedule": "sandwich"}, "budget_schedule must be one of"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1, got 0"),
        ({"dataset_name": "imdb"}, "train_file or dataset_name, not both"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_errors_come_before_any_work(changes, message, arguments, tmp_path, monkeypatch):
    (tmp_path / "EMPTY").touch()
    (tmp_path / "SHORT").write_bytes(b"x" * 50)  # 51 tokens, 5 of them held out
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_clm, "get_cosine_schedule_with_warmup", None)  # training would call it
    with pytest.raises(ValueError, match=message):
        train(arguments(**{"output_dir": "run"} | changes))


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_training_stops_when_it_diverges(broken, arguments, tmp_path, monkeypatch):
    forward, calls = ESSMForCausalLM.forward, []

    def diverging(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        calls.extend([1] * self.training)
        if len(calls) == 5 and self.training:
            if broken == "loss":
                output.loss = output.loss * math.nan
            else:
                output.loss.register_hook(lambda gradient: gradient * math.inf)
        return output

    monkeypatch.setattr(ESSMForCausalLM, "forward", diverging)
    with pytest.raises(FloatingPointError, match=r"update 5: .*Last good checkpoint: .*checkpoint-00000003"):
        train(arguments(tmp_path))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-00000003"]


# ---------------------------------------------------------------------------------------------------------------------
# Text.


def test_every_target_of_a_stream_stands_in_exactly_one_block():
    stream = to_stream([bytes(range(100)), b"second document"])
    blocks = evaluation_blocks(stream, block_size=16, max_blocks=1000)
    targets = blocks[:, 1:].flatten()
    assert targets[: len(stream) - 1].tolist() == stream[1:].tolist()
    assert set(targets[len(stream) - 1 :].tolist()) <= {PAD_ID}
    assert blocks[1:, 0].tolist() == blocks[:-1, -1].tolist()  # one token of context
    labels = byte_labels(blocks)
    assert ((labels == -100) == (blocks >= 256)).all() and (blocks == EOS_ID).sum() >= 2


def test_evaluation_blocks_are_spread_over_the_text():
    stream = to_stream([bytes(range(250))])
    everything = evaluation_blocks(stream, 11, 1000)
    few = evaluation_blocks(stream, 11, 3)
    assert torch.equal(few, everything[[0, 12, 24]]) and len(everything) == 25


def test_training_order_is_a_new_permutation_in_every_epoch():
    order = BlockOrder(50, seed=0)
    first, second = ([order[position] for position in range(start, start + 50)] for start in (0, 50))
    assert sorted(first) == sorted(second) == list(range(50)) and first != second
    assert [order[position] for position in range(50)] == first  # and back again
    assert [BlockOrder(50, seed=1)[position] for position in range(50)] != first


def test_standard_library_is_split_by_whole_files(tmp_path, monkeypatch):
    for i in range(200):
        (tmp_path / f"m{i:03}.py").write_text(f"module {i}")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.py").touch()
    (tmp_path / "huge.py").write_bytes(b"#" * ((1 << 18) + 1))
    (tmp_path / "_sysconfigdata_x.py").write_text("generated")
    for folder in ("test", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "skipped.py").write_text("skipped")
    monkeypatch.setattr(text_data.sysconfig, "get_path", lambda name: str(tmp_path))
    train, held_out = (
        bytes(np.where(stream == EOS_ID, 0x0C, stream).astype(np.uint8)).split(b"\x0c")[:-1]
        for stream in text_data.standard_library()
    )
    kept = [f"module {i}".encode() for i in range(200)]
    assert sorted(train + held_out) == sorted([*kept, b"\xff\xfe\x00"])
    assert train == [b"\xff\xfe\x00"] * (b"\xff\xfe\x00" in train) + [text for text in kept if text in train]
    assert 0 < len(held_out) < 20
    (tmp_path / "m000.py").unlink()  # what is held out does not depend on the other files
    again = text_data.standard_library()[1]
    assert len(again) == sum(len(text) + 1 for text in held_out if text != b"module 0")


def test_datasets_are_read_from_a_local_folder(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    for split, rows in {"train": ["eins", "", "zwölf"], "validation": ["drei"]}.items():
        datasets.Dataset.from_dict({"content": rows}).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    train, held_out = text_data.load_text_dataset(str(folder), None, "content")
    assert train.tolist() == to_stream([b"eins", "zwölf".encode()]).tolist()
    assert held_out.tolist() == to_stream([b"drei"]).tolist()
    with pytest.raises(ValueError, match=r"text_column must be one of \['content'\].*got 'text'"):
        text_data.load_text_dataset(str(folder), None, "text")
    train, held_out = text_data.load_text_dataset(str(folder / "train-00000-of-00001.parquet"), None, "content")
    assert [*train, *held_out] == [*to_stream([b"eins", "zwölf".encode()])]


# ---------------------------------------------------------------------------------------------------------------------
# The sweep.


class FixedLogits(nn.Module):
    """A language model that is a table: logits of the next token given this one, (VOCAB_SIZE, VOCAB_SIZE)."""

    def __init__(self, table: torch.Tensor, capacity: int = 32):
        super().__init__()
        self.table, self.device = table, table.device
        self.config = SimpleNamespace(num_spectral_channels=capacity)
        self.seen: list[int] = []

    def forward(self, input_ids, use_cache, spectral_budget):
        self.seen.append(spectral_budget)
        return SimpleNamespace(logits=self.table[input_ids])


def byte_blocks(document: bytes, block_size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    input_ids = evaluation_blocks(to_stream([document[:40], document[40:]]), block_size, 1000)
    return input_ids, byte_labels(input_ids)


def test_uniform_model_has_eight_bits_per_byte():
    table = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    table[:, 256:] = -math.inf
    sweep = sweep_budgets(FixedLogits(table), *byte_blocks(random.Random(0).randbytes(1000)))
    assert sweep.budgets == (2, 3, 4, 6, 8, 12, 16, 24, 32)
    assert sweep.bits_per_byte == pytest.approx([8.0] * 9, abs=1e-5)
    assert all(speed > 0 for speed in sweep.tokens_per_second)


def test_bits_per_byte_score_the_next_byte():
    successor = torch.full((VOCAB_SIZE, VOCAB_SIZE), -100.0)
    successor[torch.arange(256), (torch.arange(256) + 1) % 256] = 0.0  # knows that bytes count upwards
    successor[EOS_ID] = 0.0  # and nothing after the end of a document
    input_ids, labels = byte_blocks(bytes(i % 256 for i in range(1000)))
    scored = 1000 - 1
    sweep = sweep_budgets(FixedLogits(successor), input_ids, labels, budgets=[4])
    assert sweep.bits_per_byte[0] == pytest.approx(math.log2(VOCAB_SIZE) / scored, rel=1e-3)
    halved = sweep_budgets(FixedLogits(successor), input_ids, labels, budgets=[4], num_bytes=2 * scored)
    assert halved.bits_per_byte[0] == pytest.approx(sweep.bits_per_byte[0] / 2)


def test_sweep_runs_each_budget_up_to_the_capacity():
    model = FixedLogits(torch.zeros(VOCAB_SIZE, VOCAB_SIZE), capacity=10)
    sweep = sweep_budgets(model, *byte_blocks(bytes(200)), budgets=(4, 2))
    assert sweep.budgets == (2, 4, 10) and set(model.seen) == {2, 4, 10}
    assert sweep_budgets(model, *byte_blocks(bytes(200)), budgets=(4, 16, 32)).budgets == (4, 10)


def test_sweet_spot_and_collapse_boundary():
    sweep = BudgetSweep((2, 3, 4, 6, 8, 12), (2.3, 2.23, 2.22, 2.05, 2.03, 2.0), (1.0,) * 6)
    assert (sweep.sweet_spot, sweep.collapse_boundary) == (8, 4)  # at most 2.04 and 2.2222
    budgets = (2, 3, 4, 6, 8)
    flat = BudgetSweep(budgets, (2.0,) * 5, (1.0,) * 5)
    assert (flat.sweet_spot, flat.collapse_boundary) == (2, 2)
    only_full = BudgetSweep(budgets, (9.0, 8.0, 7.0, 6.0, 2.0), (1.0,) * 5)
    assert (only_full.sweet_spot, only_full.collapse_boundary) == (8, 8)
    assert "  8     2.0000     +0.0%          1  * sweet spot  ^ collapse boundary" in only_full.table()
