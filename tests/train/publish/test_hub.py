# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Publishing: the unmodified huggingface_hub client in child processes against `hub_server.FakeHub`."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import BLOCK, ROOT, random_ids
from hub_run import REPO, change_weights, environment, push, push_fails, shas, start
from hub_server import FakeHub, Fault, Repository, pointer
from safetensors.torch import load_file, save_file

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

OWN_PUSH = """
import sys
from modeling_essm import ESSMForCausalLM, build_byte_tokenizer
ESSMForCausalLM.from_pretrained(sys.argv[1]).push_to_hub(sys.argv[2])
build_byte_tokenizer(512).push_to_hub(sys.argv[2])
"""


@pytest.fixture(scope="module")
def published(saved, tmp_path_factory):
    """Pushed by the script and by transformers' own method, then loaded in one process without the package."""
    work = tmp_path_factory.mktemp("published")
    run = Path(shutil.copytree(saved, work / "run"))
    torch.save(IDS, work / "ids.pt")
    with FakeHub() as hub:
        sha = push(hub, run)
        child = [sys.executable, "-c", OWN_PUSH, str(run / "model"), "essm-tests/own"]
        package = environment(hub, work) | {"PYTHONPATH": str(ROOT)}
        own = subprocess.run(child, env=package, capture_output=True, text=True)
        assert own.returncode == 0, own.stderr
        which = json.dumps({REPO: sha, "essm-tests/own": "main"})
        before = len(hub.requests)
        child = [sys.executable, "-P", "-c", BLOCK + LOAD, work, which]
        load = subprocess.run(
            list(map(str, child)), env=environment(hub, work, None), capture_output=True, text=True, cwd=work
        )
        assert load.returncode == 0, load.stderr
        yield hub, run, sha, torch.load(work / "results.pt", weights_only=False), hub.requests[before:]


def test_loads_from_the_hub_bit_for_bit(published):
    _, run, sha, results, _ = published
    model = ESSMForCausalLM.from_pretrained(run / "model").eval()
    for repo in (REPO, "essm-tests/own"):
        with torch.no_grad():
            assert torch.equal(results[repo, "logits"], model(IDS).logits)
            assert torch.equal(results[repo, "budget"], model(IDS, spectral_budget=3).logits)
        assert results[repo, "tokens"] == list("h\u00e9llo".encode())
        assert results[repo, "generation"] == 258
    assert results[REPO, "newest"] == sha


def test_the_cards_own_example_runs(published):
    assert published[3]["card"][1] == len("def main(") + 40


def test_weights_are_downloaded_once(published):
    hub, _, sha, _, requests = published
    weights = hub.repositories[REPO].files["model.safetensors"]
    fetched = [path for method, path in requests if method == "GET" and weights.sha256 in path]
    assert len(fetched) == 2  # once for each repository, though the first was loaded three times
    assert ("HEAD", f"/{REPO}/resolve/{sha}/model.safetensors") in requests


def test_everything_arrives_in_one_commit(published):
    hub, run, sha, *_ = published
    repository = hub.repositories[REPO]
    assert shas(hub) == [shas(hub)[0], sha] and repository.private is False
    names = {path.name for path in (run / "model").iterdir()}
    assert {"README.md", "budget_sweep.png", "model.safetensors", "generation_config.json"} <= names
    assert {"tokenizer.json", "modeling_essm.py", "spectral_ops.py"} <= names
    assert set(repository.files) == names | {".gitattributes"}
    for name in names:
        assert hub.content(REPO, name) == (run / "model" / name).read_bytes()
    assert {name for name, blob in repository.files.items() if blob.sha256} == {"model.safetensors", "budget_sweep.png"}


@pytest.mark.slow
def test_a_second_push_makes_no_commit(hub, run):
    first = push(hub, run)
    uploads = hub.count("PUT", "/store/")
    assert push(hub, run) == first
    assert len(shas(hub)) == 2 and hub.count("PUT", "/store/") == uploads


def test_a_card_edited_by_hand_can_be_kept(hub, run):
    (run / "model" / "README.md").write_text("# Mine\n")
    push(hub, run, "--keep_card")
    assert hub.content(REPO, "README.md") == b"# Mine\n"


@pytest.mark.slow
def test_a_changed_model_makes_a_second_commit_and_the_first_stays(hub, run):
    first = push(hub, run)
    old = hub.content(REPO, "model.safetensors")
    change_weights(run)
    second = push(hub, run, "--commit_message", "Train longer")
    assert shas(hub)[1:] == [first, second] and hub.repositories[REPO].commits[-1][1] == "Train longer"
    _, then = hub.repositories[REPO].at(first)
    assert hub.objects[then["model.safetensors"].sha256] == old != hub.content(REPO, "model.safetensors")


@pytest.mark.slow
def test_an_existing_repository_keeps_its_other_files_but_no_stale_shards(hub, run):
    sharded = run.with_name("sharded") / "model"
    ESSMForCausalLM.from_pretrained(run / "model").save_pretrained(sharded, max_shard_size="60KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 1 and not (sharded / "model.safetensors").exists()
    push(hub, sharded.parent)
    repository = hub.repositories[REPO]
    repository.commit("by hand", repository.files | {"notes.txt": pointer("0" * 64, 4)})
    push(hub, run)
    files = set(repository.files)
    assert "notes.txt" in files and len(shas(hub)) == 4
    assert {name for name in files if "safetensors" in name} == {"model.safetensors"}


@pytest.mark.slow
def test_a_large_file_goes_through_lfs(hub, run):
    """12 MiB, in one piece and then, changed, in parts of 5 MiB, of which the last fails at first."""
    path = run / "model" / "model.safetensors"
    for in_parts in (False, True):
        ballast = torch.full((3 << 20,), float(in_parts))
        save_file({**load_file(path), "ballast": ballast}, path, metadata={"format": "pt"})
        oid = hashlib.sha256(path.read_bytes()).hexdigest()
        if in_parts:
            hub.part_size = 5 << 20
            hub.faults.append(Fault("PUT", f"/store/{oid}/3", 400))
            assert "run the same command again" in push_fails(hub, run)
            assert oid not in hub.objects
        push(hub, run)
        blob = hub.repositories[REPO].files["model.safetensors"]
        assert (blob.sha256, blob.size) == (oid, path.stat().st_size) and blob.size > 12 << 20
        assert hashlib.sha256(hub.objects[oid]).hexdigest() == oid
        assert hub.count("PUT", f"/store/{oid}/") == (6 if in_parts else 0)  # three parts, twice
    assert hub.count("POST", "/lfs/objects/verify") >= 2


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_commit_whose_answer_is_lost_is_not_made_twice(hub, run):
    hub.faults.append(Fault("POST", "/commit/", "drop-after"))
    assert "run the same command again" in push_fails(hub, run)
    assert push(hub, run) == shas(hub)[-1]
    assert len(shas(hub)) == 2


def test_a_download_cut_off_goes_on_where_it_stopped(hub, tmp_path):
    content = os.urandom(25 << 20)  # the client keeps what it has in pieces of 10 MB
    oid = hashlib.sha256(content).hexdigest()
    hub.objects[oid], hub.repositories[REPO] = content, Repository(private=False)
    hub.repositories[REPO].commit("large", {"model.safetensors": pointer(oid, len(content))})
    hub.faults.append(Fault("GET", "/store/", "cut"))
    code = f"from huggingface_hub import hf_hub_download as d; print(d({REPO!r}, 'model.safetensors'))"
    child = [sys.executable, "-c", code]
    child = subprocess.run(child, env=environment(hub, tmp_path, None), capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert Path(child.stdout.strip()).read_bytes() == content
    assert hub.ranges == ["bytes=10485760-"]
