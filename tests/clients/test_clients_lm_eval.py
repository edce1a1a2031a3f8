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
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers import random_model
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM

from essm_train.data.blocks import evaluation_blocks
from essm_train.measure.scoring import block_nats
from modeling_essm import build_byte_tokenizer

lm_eval = pytest.importorskip("lm_eval")
tasks = pytest.importorskip("lm_eval.tasks")

FILTER_LENGTH = 512
BOS, EOS = 257, 258
DOCUMENTS = 2 * FILTER_LENGTH, 90  # two whole windows, and part of one
TASKS = ["essm_choice", "essm_generate", "essm_rolling"]


def letters(source: random.Random, count: int) -> str:
    return "".join(source.choices("abcdefgh é", k=count))


def learn(model, text: bytes) -> None:
    """A few steps at the full budget, so that a smaller one is worse on any text and not by chance."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for block in torch.tensor(list(text[: len(text) // 512 * 512])).view(-1, 4, 128).repeat(5, 1, 1):
        model(block, labels=block).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, and tasks with their data."""
    folder, source = tmp_path_factory.mktemp("lm_eval"), random.Random(0)
    model = random_model(filter_length=FILTER_LENGTH, budget_presets={"small": 2})
    learn(model, letters(source, 4096).encode())
    model.save_pretrained(folder / "model")
    build_byte_tokenizer().save_pretrained(folder / "model")
    questions = [
        {"question": letters(source, 20), "choices": [letters(source, 5 + i) for i in range(3)], "answer": n % 3}
        for n in range(6)
    ]
    texts = [letters(source, count) for count in DOCUMENTS]
    texts[0] = texts[0].replace("é", "e")
    rows = {"questions": questions, "texts": [{"text": text} for text in texts]}
    for name, records in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    kinds = {
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
    (folder / "tasks").mkdir()
    for name, kind in kinds.items():
        data = folder / ("texts.jsonl" if name == "essm_rolling" else "questions.jsonl")
        source_of_data = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": source_of_data, "test_split": "test", **kind}
        (folder / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.fixture(scope="module")
def evaluate(folder):
    """From model_args to (results, answers of each task), computed once."""
    manager, known = tasks.TaskManager(include_path=str(folder / "tasks"), include_defaults=False), {}

    def run(model_args: str = "", names=tuple(TASKS)):
        if (model_args, names) not in known:
            output = lm_eval.simple_evaluate(
                model="hf",
                model_args=f"pretrained={folder / 'model'}{model_args}",
                tasks=list(names),
                task_manager=manager,
                device="cpu",
                batch_size=3,
                bootstrap_iters=0,
            )
            known[model_args, names] = (output["results"], answers(output["samples"]))
        return known[model_args, names]

    return run


def answers(samples: dict) -> dict[str, list]:
    """Of each task, the log-likelihoods or texts of its questions in order."""
    collected = {}
    for task, records in samples.items():
        records = sorted(records, key=lambda record: record["doc_id"])
        collected[task] = [record["filtered_resps"] for record in records]
    return collected


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model").eval()


def questions(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]


def bits_per_byte(model, folder, budget: int, prefix: int) -> float:
    """By our own code, the last part of a document in a window of its own."""
    nats, count = 0.0, 0
    for line in (folder / "texts.jsonl").read_text().splitlines():
        document = json.loads(line)["text"].encode()
        blocks = evaluation_blocks(np.array([prefix, *document]), min(FILTER_LENGTH, len(document)) + 1, 10)
        nats += float(block_nats(model, blocks, blocks, budget, 4).sum())
        count += len(document)
    return nats / math.log(2) / count


@pytest.mark.parametrize("budget", [2, 32])
def test_log_likelihood(evaluate, model, folder, budget):
    _, given = evaluate(f",spectral_budget={budget}")
    for question, likelihoods in zip(questions(folder), given["essm_choice"], strict=True):
        for choice, (likelihood, _) in zip(question["choices"], likelihoods, strict=True):
            ids = torch.tensor([list((question["question"] + choice).encode())])
            labels = ids.clone()
            labels[:, : len(question["question"].encode())] = -100
            assert float(likelihood) == pytest.approx(-float(block_nats(model, ids, labels, budget, 1)), abs=1e-3)


@pytest.mark.parametrize("budget", [2, 32])
def test_generation(evaluate, model, folder, budget):
    _, given = evaluate(f",spectral_budget={budget}")
    tokenizer = build_byte_tokenizer()
    for question, (text,) in zip(questions(folder), given["essm_generate"], strict=True):
        ids = torch.tensor([list(question["question"].encode())])
        tokens = model.generate(ids, spectral_budget=budget, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert text == tokenizer.decode(tokens, skip_special_tokens=True).split("\n\n")[0]


@pytest.mark.parametrize("budget", [2, 32])
def test_rolling_perplexity_is_ours_after_the_same_prefix(evaluate, model, folder, budget):
    results, _ = evaluate(f",spectral_budget={budget}")
    value = results["essm_rolling"]["bits_per_byte,none"]
    assert value == pytest.approx(bits_per_byte(model, folder, budget, BOS), abs=1e-5)
    assert results["essm_rolling"]["byte_perplexity,none"] == pytest.approx(2**value, rel=1e-6)
    results, _ = evaluate(f",spectral_budget={budget},prefix_token_id={EOS}", ("essm_rolling",))
    other = results["essm_rolling"]["bits_per_byte,none"]
    assert other == pytest.approx(bits_per_byte(model, folder, budget, EOS), abs=1e-5)
    assert abs(other - value) > 1e-4


def test_every_kind_of_result_depends_on_the_budget(evaluate):
    (results, given), (full_results, full) = evaluate(",spectral_budget=2"), evaluate(",spectral_budget=32")
    small, large = ([float(pair[0]) for pairs in x["essm_choice"] for pair in pairs] for x in (given, full))
    assert max(abs(a - b) for a, b in zip(small, large)) > 0.1
    assert given["essm_generate"] != full["essm_generate"]
    bits = [x["essm_rolling"]["bits_per_byte,none"] for x in (results, full_results)]
    assert abs(bits[0] - bits[1]) > 0.01  # 1000 times the rounding of the tests above


@pytest.mark.parametrize("model_args", [",spectral_budget=small", ",spectral_capacity=2"])
def test_presets_and_prefixes_of_a_checkpoint(evaluate, model_args):
    _, given = evaluate(model_args)
    _, expected = evaluate(",spectral_budget=2")
    assert given["essm_generate"] == expected["essm_generate"]
    assert [float(row[0]) for row in given["essm_rolling"]] == pytest.approx(
        [float(row[0]) for row in expected["essm_rolling"]], abs=1e-3
    )


def test_a_bad_budget_is_refused(evaluate):
    with pytest.raises(StrictDataclassError, match=r"spectral_budget must be an integer in \[1, 32\], got 33"):
        evaluate(",spectral_budget=33")


def test_command_line_with_remote_code(evaluate, folder, tmp_path):
    """One budget per layer as JSON: the short form splits at commas."""
    arguments = {"pretrained": str(folder / "model"), "trust_remote_code": True, "spectral_budget": [2, 2]}
    command = [sys.executable, "-c", "from lm_eval.__main__ import cli_evaluate; cli_evaluate()", "run"]
    command += ["--model", "hf", "--model_args", json.dumps(arguments), "--tasks", *TASKS, "--device", "cpu"]
    command += ["--include_path", str(folder / "tasks"), "--output_path", str(tmp_path), "--log_samples"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    (written,) = tmp_path.rglob("results_*.json")
    results, (expected, _) = json.loads(written.read_text())["results"], evaluate(",spectral_budget=2")
    for task, metric in {"essm_choice": "acc", "essm_generate": "exact_match", "essm_rolling": "bits_per_byte"}.items():
        assert results[task][f"{metric},none"] == pytest.approx(expected[task][f"{metric},none"], abs=1e-5)
