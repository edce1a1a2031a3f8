# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Publishing: the unmodified huggingface_hub client in child processes against `hub_server.FakeHub`."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import BLOCK, random_ids
from hub_run import REPO, change_weights, environment, push, push_fails, shas, start
from hub_server import FakeHub, Fault, pointer

from modeling_essm import ESSMForCausalLM

IDS = random_ids(2, 21)

LOAD = """
import json, sys
from pathlib import Path
import torch
from huggingface_hub import ModelCard, model_info
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
out, ids, results = Path(sys.argv[1]), torch.load(Path(sys.argv[1]) / "ids.pt"), {}
for repository, revision in json.loads(sys.argv[2]).items():
    for again in range(2 if revision != "main" else 1):  # the second time from the cache
        model = AutoModelForCausalLM.from_pretrained(repository, revision=revision, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    tokenizer = AutoTokenizer.from_pretrained(repository, revision=revision, trust_remote_code=True)
    with torch.no_grad():
        results[repository, "logits"] = model(ids).logits
        results[repository, "budget"] = model(ids, spectral_budget=3).logits
    results[repository, "tokens"] = tokenizer("h\\u00e9llo")["input_ids"]
    results[repository, "generation"] = model.generation_config.eos_token_id
    results[repository, "newest"] = model_info(repository).sha
repository, revision = next(iter(json.loads(sys.argv[2]).items()))
blocks = ModelCard.load(repository).text.split("```python\\n")
variables = {}
exec(blocks[1].split("```")[0])
exec(blocks[2].split("```")[0].replace("the 40 digits of the commit you have read", revision), variables)
results["card"] = variables["output"].shape
torch.save(results, out / "results.pt")
"""


@pytest.fixture(scope="module")
def published(saved, tmp_path_factory):
    """Pushed, then loaded in a process without the package."""
    work = tmp_path_factory.mktemp("published")
    run = Path(shutil.copytree(saved, work / "run"))
    torch.save(IDS, work / "ids.pt")
    with FakeHub() as hub:
        sha = push(hub, run)
        which = json.dumps({REPO: sha})
        child = [sys.executable, "-P", "-c", BLOCK + LOAD, work, which]
        load = subprocess.run(
            list(map(str, child)), env=environment(hub, work, None), capture_output=True, text=True, cwd=work
        )
        assert load.returncode == 0, load.stderr
        yield hub, run, sha, torch.load(work / "results.pt", weights_only=False)


def test_loads_from_the_hub_bit_for_bit(published):
    _, run, sha, results = published
    model = ESSMForCausalLM.from_pretrained(run / "model").eval()
    with torch.no_grad():
        assert torch.equal(results[REPO, "logits"], model(IDS).logits)
        assert torch.equal(results[REPO, "budget"], model(IDS, spectral_budget=3).logits)
    assert results[REPO, "tokens"] == list("h\u00e9llo".encode()) and results[REPO, "generation"] == 258
    assert results[REPO, "newest"] == sha


def test_the_cards_own_example_runs(published):
    assert published[3]["card"][1] == len("def main(") + 40


def test_everything_arrives_in_one_commit(published):
    hub, run, sha, _ = published
    repository = hub.repositories[REPO]
    assert shas(hub) == [shas(hub)[0], sha] and repository.private is False
    names = {path.name for path in (run / "model").iterdir()}
    assert {"README.md", "budget_sweep.png", "model.safetensors", "generation_config.json"} <= names
    assert {"tokenizer.json", "modeling_essm.py", "spectral_ops.py"} <= names
    assert set(repository.files) == names | {".gitattributes"}
    for name in names:
        assert hub.content(REPO, name) == (run / "model" / name).read_bytes()
    assert {name for name, blob in repository.files.items() if blob.sha256} == {"model.safetensors", "budget_sweep.png"}


def test_later_pushes_commit_what_has_changed_alone(hub, run):
    """Nothing, then other weights, then shards in their place; what else the repository holds stays."""
    first, uploads = push(hub, run), hub.count("PUT", "/store/")
    assert push(hub, run) == first and hub.count("PUT", "/store/") == uploads
    old = hub.content(REPO, "model.safetensors")
    change_weights(run)
    second = push(hub, run, "--commit_message", "Train longer")
    repository = hub.repositories[REPO]
    assert shas(hub)[1:] == [first, second] and repository.commits[-1][1] == "Train longer"
    assert hub.objects[repository.at(first)[1]["model.safetensors"].sha256] == old
    sharded = run.with_name("sharded") / "model"
    ESSMForCausalLM.from_pretrained(run / "model").save_pretrained(sharded, max_shard_size="60KB")
    repository.commit("by hand", repository.files | {"notes.txt": pointer("0" * 64, 4)})
    push(hub, sharded.parent)
    weights = {name for name in repository.files if name.endswith(".safetensors")}
    assert "notes.txt" in repository.files and weights == {path.name for path in sharded.glob("model-*.safetensors")}


# --- Interruptions


@pytest.mark.slow
def test_a_push_killed_anywhere_leaves_the_old_revision_and_can_be_repeated(hub, run):
    first = push(hub, run)
    change_weights(run)
    for method, where in (("PUT", "/store/"), ("POST", "/commit/")):
        fault = Fault(method, where, "hang")
        hub.faults.append(fault)
        child = start(hub, run)
        assert fault.reached.wait(60)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert hub.repositories[REPO].sha == first
    uploads = hub.count("PUT", "/store/")
    second = push(hub, run)
    assert shas(hub)[1:] == [first, second] and hub.content(REPO, "model.safetensors") != b""
    assert hub.count("PUT", "/store/") == uploads  # the second child had sent the weights, only the commit was missing


def test_a_failing_server_leaves_the_old_revision(hub, run):
    hub.faults += [Fault("PUT", "/store/", 400), Fault("POST", "/commit/", 500), Fault("POST", "/commit/", "drop")]
    for _ in range(3):
        message = push_fails(hub, run)
        assert "run the same command again" in message and hub.url in message
        assert len(shas(hub)) == 1
    push(hub, run)
    assert len(shas(hub)) == 2 and not hub.faults


def test_a_short_outage_is_sat_out_by_the_client(hub, run):
    hub.faults.append(Fault("PUT", "/store/", 503))
    push(hub, run)
    assert hub.count("PUT", "/store/") == 3  # the weights, the picture, and one of them again


def test_a_commit_whose_answer_is_lost_is_not_made_twice(hub, run):
    hub.faults.append(Fault("POST", "/commit/", "drop-after"))
    assert "run the same command again" in push_fails(hub, run)
    assert push(hub, run) == shas(hub)[-1]
    assert len(shas(hub)) == 2
