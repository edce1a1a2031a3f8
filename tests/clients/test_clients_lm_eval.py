# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""lm-evaluation-harness, `--model hf` with a budget among the model_args, on local tasks of all three kinds.

Its rule for rolling perplexity: every document by itself, all of its bytes, the first one after the prefix token. That
is <bos> unless prefix_token_id says otherwise; training here separates documents by <eos> and shows no <bos>. Windows
are of max_position_embeddings = filter_length tokens, each beginning with the last of the one before; the last of them
sees as much text as fits. On whole windows this is our own context rule, see essm-sweep.
"""

import json
import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from helpers import VARIANTS, random_model
from transformers import AutoModelForCausalLM

from essm_train.data.blocks import evaluation_blocks
from essm_train.measure.scoring import block_nats
from modeling_essm import build_byte_tokenizer

pytestmark = pytest.mark.slow
lm_eval = pytest.importorskip("lm_eval")
tasks = pytest.importorskip("lm_eval.tasks")

LENGTH, BOS, EOS = 512, 257, 258
SOURCE = random.Random(0)


def letters(count: int, among="abcdefgh é") -> str:
    return "".join(SOURCE.choices(among, k=count))


LEARNED = letters(4096).encode()
QUESTIONS = [
    {"question": letters(20), "choices": [letters(5 + i) for i in range(3)], "answer": n % 3} for n in range(6)
]
TEXTS = [letters(2 * LENGTH, "abcdefgh "), letters(90)]  # two whole windows, and part of one
KINDS = {
    "essm_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "essm_generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "essm_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "byte_perplexity"}],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and tasks with their data."""
    fields = VARIANTS["memory"] | {"filter_length": LENGTH, "budget_presets": {"small": 2}}
    folder, model = tmp_path_factory.mktemp("lm_eval"), random_model(**fields)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for block in torch.tensor(list(LEARNED[:4096])).view(-1, 4, 128).repeat(5, 1, 1):
        model(block, labels=block).loss.backward()  # so that a smaller budget is worse on any text and not by chance
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "model")
    build_byte_tokenizer().save_pretrained(folder / "model")
    (folder / "tasks").mkdir()
    for name, kind in KINDS.items():
        data = [{"text": text} for text in TEXTS] if name == "essm_rolling" else QUESTIONS
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, data)))
        source = {"data_files": {"test": str(folder / f"{name}.jsonl")}, "cache_dir": str(folder / "cache")}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": source, "test_split": "test", **kind}
        (folder / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.fixture(scope="module")
def evaluate(folder):
    """From model_args to (results, log-likelihoods or texts of each task's questions in order), computed once."""
    manager, known = tasks.TaskManager(include_path=str(folder / "tasks"), include_defaults=False), {}

    def run(model_args: str, names=tuple(KINDS)):
        if model_args not in known:
            options = {"tasks": list(names), "task_manager": manager, "device": "cpu", "batch_size": 3}
            options |= {"model_args": f"pretrained={folder / 'model'},{model_args}", "bootstrap_iters": 0}
            output, answers = lm_eval.simple_evaluate(model="hf", **options), {}
            for task, records in output["samples"].items():
                records = sorted(records, key=lambda record: record["doc_id"])
                answers[task] = [record["filtered_resps"] for record in records]
            known[model_args] = output["results"], answers
        return known[model_args]

    return run


@pytest.mark.parametrize("budget", [2, 32])
def test_answers_are_the_models_at_the_budget(evaluate, folder, budget):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder / "model").eval(), build_byte_tokenizer()
    results, given = evaluate(f"spectral_budget={budget}")
    for row, likelihoods, (text,) in zip(QUESTIONS, given["essm_choice"], given["essm_generate"], strict=True):
        question = row["question"].encode()
        for choice, (likelihood, _) in zip(row["choices"], likelihoods, strict=True):
            ids = torch.tensor([list(question + choice.encode())])
            labels = ids.masked_fill(torch.arange(ids.shape[1]) < len(question), -100)
            assert float(likelihood) == pytest.approx(-float(block_nats(model, ids, labels, budget, 1).sum()), abs=1e-3)
        ids = torch.tensor([list(question)])
        tokens = model.generate(ids, spectral_budget=budget, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert text == tokenizer.decode(tokens, skip_special_tokens=True).split("\n\n")[0]
    # Rolling perplexity is ours after the same prefix, the last part of a document in a window of its own.
    other = evaluate(f"spectral_budget={budget},prefix_token_id={EOS}", ("essm_rolling",))[0]
    bits = []
    for prefix, found in ((BOS, results), (EOS, other)):
        nats, documents = 0.0, [text.encode() for text in TEXTS]
        for document in documents:
            blocks = evaluation_blocks(np.array([prefix, *document]), min(LENGTH, len(document)) + 1, 10)
            nats += float(block_nats(model, blocks, blocks, budget, 4).sum())
        bits.append(found["essm_rolling"]["bits_per_byte,none"])
        assert bits[-1] == pytest.approx(nats / math.log(2) / sum(map(len, documents)), abs=1e-5)
        assert found["essm_rolling"]["byte_perplexity,none"] == pytest.approx(2 ** bits[-1], rel=1e-6)
    assert abs(bits[0] - bits[1]) > 1e-4


@pytest.mark.parametrize("model_args", ["spectral_budget=small", "spectral_capacity=2"])
def test_presets_and_prefixes_of_a_checkpoint(evaluate, model_args):
    (_, given), (_, expected) = evaluate(model_args), evaluate("spectral_budget=2")
    assert given["essm_generate"] == expected["essm_generate"]
    rolling = [[float(row[0]) for row in answers["essm_rolling"]] for answers in (given, expected)]
    assert rolling[0] == pytest.approx(rolling[1], abs=1e-3)


def test_command_line_with_remote_code(evaluate, folder, tmp_path):
    """One budget per layer as JSON: the short form splits at commas."""
    arguments = {"pretrained": str(folder / "model"), "trust_remote_code": True, "spectral_budget": [2, 2]}
    command = [sys.executable, "-c", "from lm_eval.__main__ import cli_evaluate; cli_evaluate()", "run"]
    command += ["--model", "hf", "--model_args", json.dumps(arguments), "--tasks", *KINDS, "--device", "cpu"]
    command += ["--include_path", str(folder / "tasks"), "--output_path", str(tmp_path), "--log_samples"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    (written,) = tmp_path.rglob("results_*.json")
    results, (expected, _) = json.loads(written.read_text())["results"], evaluate("spectral_budget=2")
    for task, metric in {"essm_choice": "acc", "essm_generate": "exact_match", "essm_rolling": "bits_per_byte"}.items():
        assert results[task][f"{metric},none"] == pytest.approx(expected[task][f"{metric},none"], abs=1e-5)
