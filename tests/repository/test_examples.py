# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Every example runs offline from end to end."""

import pytest
import torch
from apart import run_script
from helpers import ROOT, random_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_essm import build_byte_tokenizer


def run_example(name: str, *arguments: str, stdin: bytes = b"") -> list[str]:
    """Lines that it writes."""
    run = run_script(ROOT / "examples" / name, *arguments, stdin=stdin)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.fixture
def saved(tmp_path):
    random_model(budget_presets={"small": 2}).save_pretrained(tmp_path)
    build_byte_tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


def test_classify_signals():
    lines = run_example("classify_signals.py", "3")
    assert [line.split(":")[0] for line in lines] == ["K =  2", "K =  4", "K =  8", "K = 16"]


def test_prune_a_state_space():
    """Whatever a few updates have learned: no ratio leaves more modes or parameters, and none changes nothing."""
    lines = run_example("prune_a_state_space.py", "2")[-12:]
    modes = [sum(map(int, line.split("[")[1].split("]")[0].split(","))) for line in lines]
    assert modes == [64] * 3 + [48] * 3 + [32] * 3 + [16] * 3
    assert len({line.split("accuracy")[1] for line in lines[:3]}) == 1


def test_refine_a_stream():
    """After a few updates the gate may do anything; what is refined at all fits better than what is not."""
    lines = run_example("refine_a_stream.py", "2")[-3:]
    none, _, everywhere = (float(line.split("error")[1].split(",")[0]) for line in lines)
    assert everywhere < none and "0.00 inner steps" in lines[0] and "4.00 inner steps" in lines[2]


def test_finetune_with_trainer():
    lines = run_example("finetune_with_trainer.py", "20")[-2:]
    before, after = ([float(part.split()[0]) for part in line.split(":")[1].split(",")] for line in lines)
    assert len(before) == 3 and all(new < old - 1 for old, new in zip(before, after))
    run = run_script(ROOT / "examples" / "finetune_with_trainer.py", "no/such/model", "1")
    assert run.returncode and "no/such/model" in run.stderr


def test_a_model_saved_in_bf16_is_finetuned_in_fp32(tmp_path):
    random_model().bfloat16().save_pretrained(tmp_path)
    run = run_script(ROOT / "examples" / "finetune_with_trainer.py", tmp_path, "1")
    assert run.returncode == 0 and "after" in run.stdout and "weights in 16 bits" not in run.stderr, run.stderr


def test_train_with_trainer(tmp_path):
    """Better than the frequencies of bytes would be, at every budget; the saved folder loads with its tokenizer."""
    (tmp_path / "a.txt").write_bytes(b"abcdefgh" * 500)
    options = "--config_overrides hidden_size=16,num_hidden_layers=1,filter_length=64 --block_size 32 --sweep_blocks 2"
    options += " --validation_blocks 2 --max_steps 40 --warmup_steps 2 --learning_rate 0.02 --eval_steps 40"
    options += " --lr_scheduler_type warmup_stable_decay --decay_steps 10 --optimizer muon"
    places = ["--output_dir", str(tmp_path / "run"), "--train_file", str(tmp_path / "a.txt")]
    lines = run_example("train_with_trainer.py", *places, *options.split())
    figures = [line.split() for line in lines if line.startswith("K = ")]
    assert [figure[2] for figure in figures] == ["1:", "2:", "3:", "4:", "6:", "8:"]
    assert all(float(figure[3]) < 2 for figure in figures)  # 8 letters, equally frequent, take 3 bits
    state = torch.load(tmp_path / "run" / "checkpoint-40" / "optimizer.pt")  # save_steps is 100, and the last has one
    assert any("slices" in group for group in state["param_groups"])
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", trust_remote_code=False)
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").vocab_size == 259
    again = run_script(ROOT / "examples" / "train_with_trainer.py", *places, *options.split())
    assert again.returncode and "holds run, which this run did not write" in again.stderr
    baseline = run_script(ROOT / "examples" / "train_with_trainer.py", *places, "--architecture", "s4d")
    assert baseline.returncode and "has no budgets to train: use essm-train-clm" in baseline.stderr


def test_byte_terminal(saved):
    """Two completions, the second at another budget; a number typed while text comes changes it at once."""
    # Lines that wait are read while text comes: the number, then the empty line, which stops the completion.
    output = "\n".join(run_example("byte_terminal.py", saved, "30", stdin=b"def main(\n4\n\nsmall\nx = 1\n\n\n"))
    assert output.startswith("K = 32 of 32> ")
    prompts = [int(part.split(" of 32> ")[0]) for part in output.split("K = ")[1:] if " of 32> " in part]
    assert prompts == [32, 4, 2, 2]
    assert output.count("[K = 4: ") == output.count("tokens/s, ") == 1


def test_byte_terminal_ends_with_its_input(tmp_path):
    """In the middle of a completion, and after bytes that are no UTF-8. It refuses a model of other tokens."""
    random_model().save_pretrained(tmp_path)
    run = run_script(ROOT / "examples/byte_terminal.py", tmp_path, "30", stdin=b"caf\xe9 x\n", timeout=60)
    assert run.returncode == 0 and run.stdout.count(" of 32> ") == 2, run.stderr
    random_model(vocab_size=300).save_pretrained(tmp_path)
    run = run_script(ROOT / "examples/byte_terminal.py", tmp_path)
    assert run.returncode and "a model of bytes has 259 tokens, and this one 300" in run.stderr
