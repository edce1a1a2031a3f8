# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What is refused before anything is uploaded, and what of a folder is published."""

import json
import os
import shutil
from pathlib import Path

import pytest
from helpers import ROOT
from hub_run import REPO, push, push_fails
from safetensors.torch import load_file, save_file

from essm_train.publish.hub import check_can_push, check_folder
from essm_train.publish.run_card import PushArguments, push_run
from modeling_essm import ESSMForCausalLM


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


@pytest.mark.parametrize("repo", ["a/b/c", "org/", ""])
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
    "truncated": (lambda model: os.truncate(model / "model.safetensors", 5000), "truncated"),
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


def test_only_what_belongs_to_a_model_is_published(hub, run, capsys):
    model = litter(run)
    push(hub, run, "--keep_card")
    out = capsys.readouterr().out
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


@pytest.mark.parametrize("name", ["model.safetensors", "spectral_ops.py"])
def test_a_link_in_the_place_of_a_file_is_refused(run, name):
    target = (run / "model" / name).rename(run / name)
    (run / "model" / name).symlink_to(target)
    with pytest.raises(ValueError, match=f"lacks the .*{name}; a symbolic link is never published"):
        check_folder(run / "model")


@pytest.mark.parametrize("reference", ["../id_rsa.x", 3])
def test_an_auto_map_publishes_code_alone(run, reference):
    path = run / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoModel": reference}}))
    with pytest.raises(ValueError, match=r"auto_map must name classes as 'module.Class'"):
        check_folder(run / "model")
