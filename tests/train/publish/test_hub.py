# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Publishing: the unmodified huggingface_hub client in child processes against `hub_server.FakeHub`, and the card.

The client is told where the Hub is by HF_ENDPOINT, as a mirror's user would. HF_HUB_DISABLE_XET=1 because a client
with hf_xet uploads large files through xet only, which the server does not offer.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import BLOCK, ROOT, random_ids, random_model
from hub_server import FakeHub, Fault, Repository, pointer
from huggingface_hub import EvalResult, ModelCard
from safetensors.torch import load_file, save_file

from essm_train.publish import hub as push_module
from essm_train.publish.hub import check_can_push, check_folder
from essm_train.publish.model_card import Curve, write_model_card
from essm_train.publish.run_card import PushArguments, push_run
from modeling_essm import ESSMForCausalLM, ESSMForSequenceClassification, build_byte_tokenizer

SCRIPT = ROOT / "train/push_to_hub.py"
REPO = "essm-tests/elastic"
IDS = random_ids(2, 21)
SWEEP = {
    "budgets": [2, 8, 32],
    "bits_per_byte": [2.75, 2.55, 2.5],
    "tokens_per_second": [9000.0, 5000.4, 2000.0],
    "sweet_spot": 8,
    "collapse_boundary": 2,
    "block_size": 512,
    "blocks": 128,
    "threads": 2,
    "torch": "2.13.0",
    "model": "/home/somebody/runs/x/model",
}
TRAINING = {
    "script": "train_clm.py",
    "data": "A | tiny corpus",
    "updates": 600,
    "tokens_per_update": 2048,
    "schedule": "discrete",
    "hardware": "2 cores of an AMD EPYC",
    "arguments": {"learning_rate": 0.005, "train_file": ["/home/somebody/book.txt"], "hub_token": "hf_secret"},
}
PICTURE = b"\x89PNG\r\n\x1a\n\0not really"

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
sys.path.insert(0, sys.argv[1])
from modeling_essm import ESSMForCausalLM, build_byte_tokenizer
ESSMForCausalLM.from_pretrained(sys.argv[2]).push_to_hub(sys.argv[3])
build_byte_tokenizer(512).push_to_hub(sys.argv[3])
"""


@pytest.fixture
def hub():
    with FakeHub() as hub:
        yield hub


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run folder as train_clm.py leaves it."""
    run = tmp_path_factory.mktemp("saved") / "run"
    random_model(gate_hidden_size=4).save_pretrained(run / "model")
    build_byte_tokenizer(512).save_pretrained(run / "model")
    (run / "budget_sweep.json").write_text(json.dumps(SWEEP))
    (run / "training.json").write_text(json.dumps(TRAINING))
    (run / "budget_sweep.png").write_bytes(PICTURE)
    return run


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def environment(hub: FakeHub | str, home: Path, token: str | None = "hf_writer") -> dict[str, str]:
    """A machine that knows nothing but the server and, perhaps, a token."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING")) and "proxy" not in k.lower()}
    kept |= {"HF_ENDPOINT": hub if isinstance(hub, str) else hub.url, "HF_HOME": str(home / "hf_home")}
    kept |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    kept |= {"OMP_NUM_THREADS": "1"} | ({"HF_TOKEN": token} if token else {})
    return kept


def start(hub, run: Path, *arguments: str, repo: str = REPO, token: str | None = "hf_writer") -> subprocess.Popen:
    command = [sys.executable, SCRIPT, "--run", run, "--hub_model_id", repo, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(list(map(str, command)), env=environment(hub, run.parent, token), cwd=run.parent, **pipes)


def push(hub, run: Path, *arguments: str, **options) -> str:
    """The revision that the script reports."""
    child = start(hub, run, *arguments, **options)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    return re.search(r"at revision ([0-9a-f]{40})", out)[1]


def push_fails(hub, run: Path, *arguments: str, **options) -> str:
    """What the script says, without a traceback."""
    child = start(hub, run, *arguments, **options)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 1 and "Traceback" not in err, err
    return err


def shas(hub: FakeHub, repo: str = REPO) -> list[str]:
    return [sha for sha, _, _ in hub.repositories[repo].commits]


def change_weights(run: Path) -> None:
    path = run / "model" / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})


# --- The way that everything goes well


@pytest.fixture(scope="module")
def published(saved, tmp_path_factory):
    """Pushed by the script and by transformers' own method, then loaded in one process without the package."""
    work = tmp_path_factory.mktemp("published")
    run = Path(shutil.copytree(saved, work / "run"))
    torch.save(IDS, work / "ids.pt")
    with FakeHub() as hub:
        sha = push(hub, run)
        package = ROOT
        child = [sys.executable, "-c", OWN_PUSH, package, run / "model", "essm-tests/own"]
        own = subprocess.run(list(map(str, child)), env=environment(hub, work), capture_output=True, text=True)
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


def test_a_second_push_makes_no_commit(hub, run):
    first = push(hub, run)
    uploads = hub.count("PUT", "/store/")
    assert push(hub, run) == first
    assert len(shas(hub)) == 2 and hub.count("PUT", "/store/") == uploads


def test_a_card_edited_by_hand_can_be_kept(hub, run):
    (run / "model" / "README.md").write_text("# Mine\n")
    push(hub, run, "--keep_card")
    assert hub.content(REPO, "README.md") == b"# Mine\n"


def test_a_changed_model_makes_a_second_commit_and_the_first_stays(hub, run):
    first = push(hub, run)
    old = hub.content(REPO, "model.safetensors")
    change_weights(run)
    second = push(hub, run, "--commit_message", "Train longer")
    assert shas(hub)[1:] == [first, second] and hub.repositories[REPO].commits[-1][1] == "Train longer"
    _, then = hub.repositories[REPO].at(first)
    assert hub.objects[then["model.safetensors"].sha256] == old != hub.content(REPO, "model.safetensors")


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


# --- Refusals before anything is uploaded


def test_missing_token(hub, run):
    message = push_fails(hub, run, token=None)
    assert "hf auth login" in message and "HF_TOKEN" in message
    assert not hub.repositories and not any(method != "GET" for method, _ in hub.requests)


@pytest.mark.parametrize(
    "token, repo, says",
    [
        ("hf_wrong", REPO, "refused the token"),
        ("hf_reader", REPO, "may not write to 'essm-tests/elastic'"),
        ("hf_writer", "strangers/elastic", "may not write to 'strangers/elastic'"),
        ("hf_reader", "writer/existing", "may not write to 'writer/existing'"),
    ],
)
def test_tokens_without_the_right(hub, run, token, repo, says):
    if repo == "writer/existing":
        push(hub, run, repo=repo)
    commits, uploads = len(hub.repositories), hub.count("PUT", "/store/")
    assert says in push_fails(hub, run, token=token, repo=repo)
    assert (len(hub.repositories), hub.count("PUT", "/store/")) == (commits, uploads)


@pytest.mark.parametrize("repo", ["a/b/c", "a b", "--x", "org/", "org/x.git", ""])
def test_malformed_ids(repo):
    with pytest.raises(ValueError, match="hub_model_id must be"):
        check_can_push(repo, token="hf_any")


def test_private(hub, run):
    push(hub, run, "--private")
    assert hub.repositories[REPO].private
    push(hub, run, "--private")
    hub.repositories[REPO].private = False
    assert "is public, but private was asked for" in push_fails(hub, run, "--private")


def test_unreachable_hub_and_short_name(hub, run):
    assert "could not write to" in push_fails("http://127.0.0.1:9", run)
    push(hub, run, repo="short")
    assert list(hub.repositories) == ["writer/short"]


def test_bad_metadata_is_refused_by_the_hub_before_uploading(hub, run):
    template = run / "template.md"
    markers = "\n\n".join(f"<!-- {name} -->" for name in ("model", "results", "training", "loading", "limits"))
    template.write_text(f"---\npipeline_tag: 3\n---\n{markers}")
    assert '"pipeline_tag" must be a string' in push_fails(hub, run, "--template", str(template))
    assert hub.count("PUT", "/store/") == 0


def damage_nan(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, model / "model.safetensors")


def damage_bf16(model: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    tensors["model.norm.bias"][0] = float("-inf")
    save_file(tensors, model / "model.safetensors")


DAMAGES = {
    "no-folder": (shutil.rmtree, "is not a folder"),
    "no-config": (lambda model: (model / "config.json").unlink(), "config.json"),
    "broken-config": (lambda model: (model / "config.json").write_text("{"), "not valid JSON"),
    "no-auto-map": (lambda model: (model / "config.json").write_text("{}"), "no auto_map"),
    "no-weights": (lambda model: (model / "model.safetensors").unlink(), "lacks the weights model.safetensors"),
    "no-code": (lambda model: (model / "modeling_essm.py").unlink(), "lacks the code file modeling_essm.py"),
    "no-helper": (lambda model: (model / "spectral_ops.py").unlink(), "lacks the code file spectral_ops.py"),
    "truncated": (lambda model: os.truncate(model / "model.safetensors", 5000), "truncated"),
    "short": (lambda model: os.truncate(model / "model.safetensors", 50_000), "truncated or damaged"),
    "empty": (lambda model: os.truncate(model / "model.safetensors", 0), "not a safetensors file"),
    "nan": (damage_nan, "model.norm.weight in .* contains NaN"),
    "infinite-bf16": (damage_bf16, "model.norm.bias in .* contains NaN or infinite"),
    "lost-shard": (
        lambda model: (model / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "model-1.safetensors"}}'
        ),
        "lacks the weights model-1.safetensors",
    ),
}


@pytest.mark.parametrize("damage, says", DAMAGES.values(), ids=DAMAGES.keys())
def test_folders_that_would_not_load(run, damage, says):
    assert "model.safetensors" in check_folder(run / "model")
    damage(run / "model")
    with pytest.raises(ValueError, match=says):
        check_folder(run / "model")


STRAYS = (
    *("credentials.json", "hf_token.txt", "id_rsa", "optimizer.bin", "training_args.bin", "config.json~"),
    *("#README.md#", "README.md.orig", "notes.txt", "other.py", "model-00001-of-00009.safetensors", "unseen.png"),
    *(".env", "pytorch_model.bin", "merged.safetensors", "data.csv", "config.yaml", "tokenizer.json.bak", "x.png.key"),
)


def litter(run: Path) -> Path:
    """A model folder with what has no place on the Hub, and with all that may have one."""
    model = run / "model"
    for name in STRAYS:
        (model / name).write_text("secret")
    (model / "checkpoint-1").mkdir()
    (run.parent / "id_ed25519").write_text("secret")
    for name in ("LICENSE", "vocab.json", "linked.png"):  # names that would be published, were they files
        (model / name).symlink_to(run.parent / "id_ed25519")
    for name in ("features.json", "budget_profile.json", "preprocessor_config.json"):
        (model / name).write_text("{}")
    for name in ("NOTICE", "seen.png", "also-seen.svg", "my_model.py", "my_layers.py"):
        (model / name).write_text("" if name != "my_model.py" else "from .my_layers import Layer\n")
    card = "![curve](seen.png) <img src='./also-seen.svg'> ![no](linked.png) ![](x.png.key) [no](notes.txt)\n"
    (model / "README.md").write_text(card)
    ESSMForCausalLM.from_pretrained(model).save_pretrained(model, variant="fp16", max_shard_size="60KB")
    config = json.loads((model / "config.json").read_text())
    config["auto_map"]["AutoModel"] = "my_model.Mine"
    (model / "config.json").write_text(json.dumps(config))
    return model


MAY_BE_PUBLISHED = {
    *("features.json", "budget_profile.json", "preprocessor_config.json", "NOTICE", "seen.png", "also-seen.svg"),
    *("my_model.py", "my_layers.py", "modeling_essm.py", "config.json", "generation_config.json", "tokenizer.json"),
    *("tokenizer_config.json", "README.md", "model.safetensors", "model.safetensors.index.fp16.json"),
}


def test_only_what_belongs_to_a_model_is_published(hub, run):
    model = litter(run)
    child = start(hub, run, "--keep_card")
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    published = set(hub.repositories[REPO].files) - {".gitattributes"}
    own = {path.name for path in ROOT.glob("modeling_essm/*.py")}
    variant = set(json.loads((model / "model.safetensors.index.fp16.json").read_text())["weight_map"].values())
    assert len(variant) > 1 and MAY_BE_PUBLISHED | variant <= published <= MAY_BE_PUBLISHED | variant | own
    assert not any(b"secret" in hub.content(REPO, name) for name in published)
    (said,) = [line for line in out.splitlines() if line.startswith("not published")]
    left_out = set(said.split(": ", 1)[1].split(", "))
    links = {f"{name} (a symbolic link)" for name in ("LICENSE", "vocab.json", "linked.png")}
    assert left_out == {*STRAYS, "checkpoint-1/"} | links


def test_a_dry_run_says_both_and_writes_nothing(run, capsys):
    model = litter(run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert push_run(PushArguments(run=str(run), dry_run=True)) is None
    published, left_out, card = capsys.readouterr().out.splitlines()
    assert published == f"to be published from {model}: {', '.join(check_folder(model))}"
    assert "id_rsa" in left_out and "LICENSE (a symbolic link)" in left_out and "README.md would be written" in card
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "spectral_ops.py"])
def test_a_link_in_the_place_of_a_file_is_refused(run, name):
    target = (run / "model" / name).rename(run / name)
    (run / "model" / name).symlink_to(target)
    with pytest.raises(ValueError, match=f"lacks the .*{name}, of which a symbolic link is never published"):
        check_folder(run / "model")


@pytest.mark.parametrize(
    "index, says",
    [
        ({"weight_map": {"a": "../id_rsa"}}, "must name safetensors files"),
        ({"weight_map": {"a": "id_rsa"}}, "must name safetensors files"),
        ({"weight_map": ["a"]}, "must name safetensors files"),
        ({}, "must name safetensors files"),
    ],
)
def test_an_index_publishes_weights_alone(run, index, says):
    (run / "model" / "id_rsa").write_text("secret")
    (run / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=says):
        check_folder(run / "model")


@pytest.mark.parametrize("reference", ["../id_rsa.x", "id_rsa", 3])
def test_an_auto_map_publishes_code_alone(run, reference):
    path = run / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoModel": reference}}))
    with pytest.raises(ValueError, match=r"auto_map must name classes as 'module.Class'"):
        check_folder(run / "model")


# --- The card


def write(folder: Path, **options) -> str:
    defaults = {"sweep": SWEEP, "training": TRAINING, "hub_model_id": REPO, "template": None}
    return write_model_card(folder, **(defaults | options)).read_text()


def test_card_of_a_language_model(run):
    text = write(run / "model")
    card = ModelCard(text)
    assert card.data.license == "apache-2.0" and card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation" and "state-space-model" in card.data.tags
    assert card.data.model_name == "elastic" and card.data.metrics == ["bits_per_byte"]
    assert card.data.eval_results == [
        EvalResult(
            task_type="text-generation",
            dataset_type="custom",
            dataset_name="A | tiny corpus",
            metric_type="bits_per_byte",
            metric_name=f"bits per byte (K = {K})",
            metric_value=value,
            metric_args={"spectral_budget": K},
        )
        for K, value in zip(SWEEP["budgets"], SWEEP["bits_per_byte"])
    ]
    for row in (
        "| K | bits per byte | against K = 32 | tokens/s |  |",
        "| 2 | 2.7500 | +10.0% | 9,000 | collapse boundary |",
        "| 8 | 2.5500 | +2.0% | 5,000 | sweet spot |",
        "| 32 | 2.5000 | +0.0% | 2,000 |  |",
        "| data | A \\| tiny corpus |",
        "| tokens in all | 1,228,800 |",
    ):
        assert row in text
    parameters = sum(tensor.numel() for tensor in load_file(run / "model" / "model.safetensors").values())
    assert f"| parameters | {parameters:,} |" in text
    assert "![bits per byte against the spectral budget](budget_sweep.png)" in text
    assert (run / "model" / "budget_sweep.png").read_bytes() == PICTURE
    assert "trust_remote_code=True" in text and "revision=revision" in text and "not supported" in text
    assert text == write(run / "model")


def test_card_of_a_calibrated_model(run):
    """Presets and the profile are told of where they are, and nowhere else."""
    folder = run / "model"

    def loading() -> str:
        return " ".join(write(folder).split("## How to load it")[1].split("\n## ")[0].split())

    assert "spectral_capacity=" in loading() and "sweet-spot" not in loading() and "choose_budget" not in loading()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"budget_presets": {"sweet-spot": 3, "full": 8}}))
    (folder / "budget_profile.json").write_text("{}")
    assert "the names `sweet-spot` (3), `full` (8)." in loading() and "model.choose_budget(max_" in loading()


def test_card_tells_no_secrets(run):
    text = write(run / "model")
    assert "somebody" not in text and "hf_secret" not in text
    assert 'train_file: ["book.txt"]' in text and "learning_rate: 0.005" in text


def test_card_of_a_classifier(tmp_path):
    model = random_model(ESSMForSequenceClassification, num_labels=3)
    model.save_pretrained(tmp_path / "model")
    sweep = {
        "budgets": [4, 32],
        "metric": {"name": "accuracy", "higher_is_better": True},
        "values": [0.5, 0.625],
        "samples_per_second": [80.0, 20.0],
        "sweet_spot": 32,
        "split": "test",
        "samples": 1655,
    }
    training = {"arguments": {"dataset_name": "stanfordnlp/imdb"}, "samples_per_update": 16, "updates": 10}
    text = write(tmp_path / "model", sweep=sweep, training=training, hub_model_id=None)
    card = ModelCard(text)
    assert card.data.pipeline_tag == "text-classification" and card.data.datasets == ["stanfordnlp/imdb"]
    assert [result.metric_value for result in card.data.eval_results] == [0.5, 0.625]
    assert card.data.eval_results[0].dataset_type == "stanfordnlp/imdb"
    assert card.data.eval_results[1].dataset_split == "test" and "on 1,655 samples of the test data" in text
    assert "| 4 | 0.5000 | -20.0% | 80 |  |" in text and "| 32 | 0.6250 | +0.0% | 20 | sweet spot |" in text
    assert "higher is better" in text and "| samples in all | 160 |" in text and "budget_sweep.png" not in text
    assert 'repository = "org/name"' in text and "AutoModelForSequenceClassification" in text


def test_card_without_measurements(run):
    text = write(run / "model", sweep=None, training=None)
    assert "Not measured" in text and "| data | not stated |" in text and ModelCard(text).data.eval_results is None


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"bits_per_byte": [2.0]}, "as many values"),
        ({"bits_per_byte": None}, "as many values"),
        ({"budgets": []}, "as many values"),
        ({"bits_per_byte": [2.0, float("nan"), 2.0]}, "finite"),
        ({"tokens_per_second": [1.0]}, "must have 3 values"),
    ],
)
def test_damaged_sweeps(changes, says):
    with pytest.raises(ValueError, match=says):
        Curve.read(SWEEP | changes)


@pytest.mark.parametrize("text, says", [("# no markers", "lacks"), ("---\n[\n---\n", "YAML"), (None, "cannot be read")])
def test_bad_templates(run, tmp_path, text, says):
    template = tmp_path / "template.md"
    if text is not None:
        template.write_text(text)
    with pytest.raises(ValueError, match=says):
        write(run / "model", template=template)


def test_card_only_needs_no_hub(run, capsys):
    assert push_run(PushArguments(run=str(run), card_only=True)) is None
    assert "wrote" in capsys.readouterr().out and (run / "model" / "README.md").exists()
    assert ModelCard.load(run / "model" / "README.md").text.strip().startswith("# run\n")
    with pytest.raises(ValueError, match="one of them"):
        push_run(PushArguments(run=str(run), card_only=True, keep_card=True))
    with pytest.raises(ValueError, match="hub_model_id is needed"):
        push_run(PushArguments(run=str(run)))


def test_every_float_type_is_checked(tmp_path):
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for value, bad in ((float("nan"), True), (float("inf"), True), (torch.finfo(dtype).max, False)):
            path = tmp_path / "model.safetensors"
            save_file({"a": torch.tensor([1.0, value], dtype=dtype), "n": torch.arange(3)}, path)
            if bad:
                with pytest.raises(ValueError, match=r"a in .* contains NaN"):
                    push_module._check_weights(path)
            else:
                push_module._check_weights(path)
    assert np.isfinite(load_file(path)["a"].float().numpy()).all()
