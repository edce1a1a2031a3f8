# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Publishing: what goes up, in which one commit, what stays at home, and what is refused before anything is sent."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from helpers import ROOT, random_ids
from huggingface_hub import CommitOperationDelete
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from essm_train.arguments import RunArguments
from essm_train.publish.arguments import PushArguments
from essm_train.publish.run_card import push_run, write_card_and_push
from modeling_essm import ESSMForCausalLM
from modeling_essm.configuration_essm import AUTO_MAP


def push(run: Path, **options) -> str | None:
    return push_run(PushArguments(**{"run": str(run), "hub_model_id": "org/name"} | options))


def sent(api) -> dict[str, bytes | None]:
    """The files of the last commit; None for one that it deletes."""

    def content(operation) -> bytes | None:
        if isinstance(operation, CommitOperationDelete):
            return None
        what = operation.path_or_fileobj
        return what if isinstance(what, bytes) else Path(what).read_bytes()

    return {operation.path_in_repo: content(operation) for operation in api.create_commit.call_args.args[1]}


def test_all_of_a_model_goes_up_in_one_commit(api, run, tmp_path):
    """The card with its picture and the code among it: what was sent loads by itself."""
    assert push(run, private=True, commit_message="Train longer") == "0" * 40
    assert api.create_commit.call_args.args[0] == "org/name"
    assert api.create_commit.call_args.kwargs == {"commit_message": "Train longer"}
    api.create_repo.assert_called_once_with("org/name", private=True, exist_ok=True)
    files = sent(api)
    assert set(files) == {path.name for path in (run / "model").iterdir()} > {"README.md", "budget_sweep.png"}
    assert api.create_commit.call_count == 1
    check_it_loads(files, run, tmp_path)


def check_it_loads(files, run, tmp_path):
    """What was sent is the run's model, by its own code."""
    (tmp_path / "there").mkdir()
    for name, content in files.items():
        (tmp_path / "there" / name).write_bytes(content)
    code = get_class_from_dynamic_module("modeling_essm.ESSMForCausalLM", str(tmp_path / "there"))
    assert code.__module__.startswith("transformers_modules.")
    model = code.from_pretrained(tmp_path / "there")
    ids, here = random_ids(2, 21), ESSMForCausalLM.from_pretrained(run / "model")
    with torch.no_grad():
        assert torch.equal(model.eval()(ids, spectral_budget=3).logits, here.eval()(ids, spectral_budget=3).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "there")
    assert tokenizer("h\u00e9")["input_ids"] == list("h\u00e9".encode()) and model.generation_config.eos_token_id == 258


def test_code_that_imports_the_package_is_published_as_the_packages(api, run, tmp_path):
    """A folder of hub_configs, or a model loaded from one."""
    folder = shutil.copytree(run / "model", tmp_path / "released", ignore=shutil.ignore_patterns("*.py"))
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = json.loads((ROOT / "hub_configs/essm-tiny/config.json").read_text())["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(ROOT / "hub_configs/essm-tiny/essm.py", folder)
    push(folder)
    (files := sent(api)).pop("README.md")
    assert "essm.py" not in files and json.loads(files["config.json"]) == config | {"auto_map": AUTO_MAP}
    check_it_loads(files, run, tmp_path)
    ESSMForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").glob("*.py")} == {name for name in files if name.endswith("py")}


def test_weights_of_an_earlier_push_go_and_all_else_stays(api, run):
    shards = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    api.list_repo_files.return_value = [*shards, ".gitattributes", "notes.txt", "config.json", "model.safetensors"]
    push(run)
    assert [name for name, content in sent(api).items() if content is None] == shards


STRAYS = (
    *("credentials.json", "hf_token.txt", "id_rsa", "optimizer.bin", "training_args.bin", "config.json~", "notes.txt"),
    *("README.md.orig", "other.py", "unseen.png", ".env", "pytorch_model.bin", "merged.safetensors", "x.png.key"),
    *("een.png", "told.png"),  # the card's text holds these names, and shows no such picture
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
    for name in ("NOTICE", "seen.png", "my_model.py", "my_layers.py"):
        (model / name).write_text("" if name != "my_model.py" else "from .my_layers import Layer\n")
    (model / "README.md").write_text("![curve](seen.png) ![no](linked.png) ![](x.png.key) [no](notes.txt) told.png\n")
    ESSMForCausalLM.from_pretrained(model).save_pretrained(model, variant="fp16", max_shard_size="60KB")
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] |= {"AutoModel": "my_model.Mine", "AutoProcessor": "org/elsewhere--theirs.Mine"}
    (model / "config.json").write_text(json.dumps(config))
    return model


def test_only_what_belongs_to_a_model_is_published(api, run, capsys):
    """And a dry run says the same, and does nothing."""
    model = litter(run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert push(run, hub_model_id=None, dry_run=True) is None and not api.mock_calls
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    would_be, left_out = (line.split(": ")[1].split(", ") for line in capsys.readouterr().out.splitlines())
    push(run)
    published = set(sent(api))
    links = {f"{name} (a symbolic link)" for name in ("LICENSE", "vocab.json", "linked.png")}
    assert set(left_out) == {*STRAYS, "checkpoint-1/"} | links and set(would_be) == published
    assert not any(b"secret" in content for content in sent(api).values())
    shards = {path.name for path in model.glob("model*.safetensors")}
    own = {path.name for path in ROOT.glob("modeling_essm/*.py")} & {path.name for path in model.iterdir()}
    expected = {"features.json", "budget_profile.json", "preprocessor_config.json", "NOTICE", "seen.png"} | own
    expected |= {"my_model.py", "my_layers.py", "config.json", "generation_config.json", "tokenizer.json", "README.md"}
    assert len(shards) > 2 and published == expected | shards | {
        "tokenizer_config.json",
        "model.safetensors.index.fp16.json",
    }
    (model / "README.md").unlink()
    push(run, hub_model_id=None, dry_run=True)
    assert "README.md (to be written)" in capsys.readouterr().out


def spoil(model: Path, name: str, value: float) -> None:
    tensors = {key: tensor.bfloat16() for key, tensor in load_file(model / "model.safetensors").items()}
    tensors[name][3] = value
    save_file(tensors, model / "model.safetensors")


def link(model: Path, name: str) -> None:
    (model / name).symlink_to((model / name).rename(model.parent / name))


def index(model: Path) -> Path:
    """Written beside the weights; the one shard that it names."""
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    return model / "model-1.safetensors"


def refer(model: Path, reference: str) -> None:
    (model / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": reference}}))


def of_another_kind(model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"model_type": "diagonal_ssm"}
    del config["num_spectral_channels"]
    (model / "config.json").write_text(json.dumps(config))


DAMAGES = {
    "no-config": (lambda model: (model / "config.json").unlink(), "config.json"),
    "broken-config": (lambda model: (model / "config.json").write_text("{"), "config.json cannot be read"),
    "no-auto-map": (lambda model: (model / "config.json").write_text("{}"), "no auto_map"),
    "foreign-code": (lambda model: refer(model, "../id_rsa.x"), "No such file"),
    "no-weights": (lambda model: (model / "model.safetensors").unlink(), "lacks model.safetensors"),
    "no-code": (lambda model: (model / "spectral_ops.py").unlink(), "No such file.*spectral_ops.py"),
    "linked-weights": (lambda model: link(model, "model.safetensors"), "lacks model.safetensors.* no link is"),
    "truncated": (lambda model: os.truncate(model / "model.safetensors", 5000), "truncated"),
    "nan": (lambda model: spoil(model, "model.norm.weight", float("nan")), "model.norm.weight in .* hold NaN"),
    "lost-shard": (lambda model: (model / "model.safetensors").rename(index(model).parent / "x"), "lacks model-1.saf"),
    "no-essm": (of_another_kind, "can be written for an ES-SSM; .* holds a 'diagonal_ssm': write .*README.md yourself"),
    "two-saves": (lambda model: shutil.copy(model / "model.safetensors", index(model)), "holds model.safetensors and"),
}


def test_the_index_of_an_earlier_save_in_shards_is_not_published(api, run):
    """The library leaves it there, and reads the one file."""
    index(run / "model")
    push(run)
    names = {operation.path_in_repo for operation in api.create_commit.call_args.args[1]}
    assert "model.safetensors" in names and not any("index" in name for name in names)


@pytest.mark.parametrize("damage, says", DAMAGES.values(), ids=DAMAGES.keys())
def test_folders_that_would_not_load(api, run, damage, says):
    damage(run / "model")
    with pytest.raises((ValueError, OSError), match=says):
        push(run)
    assert not api.mock_calls


def test_what_the_hub_would_not_let_in_is_refused_before_uploading(api, run, monkeypatch):
    with pytest.raises(ValueError, match="replace_card must be local, hub or both, got there"):
        push(run, replace_card=["hub", "there"])
    with pytest.raises(ValueError, match="hub_model_id is needed"):
        push(run, hub_model_id=None)
    api.model_info.return_value.private = False
    with pytest.raises(ValueError, match="is public, but private was asked for"):
        push(run, private=True)
    refused = HfHubHTTPError("403: you may not write there", response=MagicMock())
    for error, says in ((refused, "403: you may not"), (HTTPError("no route"), "huggingface.co: no route; it shows")):
        api.auth_check.side_effect = error
        with pytest.raises(OSError, match=says):
            push(run)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(run / "none"))
    with pytest.raises(PermissionError, match="run `hf auth login`, or set HF_TOKEN"):
        push(run)
    assert not api.create_commit.called and not (run / "model" / "README.md").exists()


def test_a_push_that_breaks_off_is_repeated(api, run):
    """Until the one commit is made the repository shows its old revision."""
    api.create_commit.side_effect = HTTPError("connection reset"), api.create_commit.return_value
    with pytest.raises(ConnectionError, match="connection reset; it shows the last complete revision"):
        push(run)
    before = (run / "model" / "README.md").read_bytes()
    assert push(run) == "0" * 40 and (run / "model" / "README.md").read_bytes() == before


def on_the_hub(api, path: Path) -> None:
    """What the commit held is there now, and its card is at that path."""
    path.write_bytes(sent(api)["README.md"])
    api.list_repo_files.return_value = ["README.md"]
    api.hf_hub_download.return_value = str(path)


def test_a_card_is_written_anew_until_its_user_edits_it(api, run, capsys, tmp_path):
    card, record, told = run / "model" / "README.md", run / "training.json", capsys.readouterr
    ending = RunArguments(output_dir=str(run), push_to_hub=True, hub_model_id="org/name")
    api.create_commit.side_effect = KeyboardInterrupt  # killed: our card stays ours
    with pytest.raises(KeyboardInterrupt):
        write_card_and_push(ending)
    api.create_commit.reset_mock(side_effect=True)
    record.write_text('{"updates": 1}')
    write_card_and_push(dataclasses.replace(ending, hub_private_repo=True))
    assert api.create_repo.call_args.kwargs["private"] is True
    on_the_hub(api, tmp_path / "there")
    record.write_text('{"updates": 2}')
    push(run)
    assert b"| updates | 2 |" in sent(api)["README.md"] and "kept" not in told().out

    card.write_text("mine")
    for again in (lambda: push(run), lambda: write_card_and_push(ending), lambda: push(run, card_only=True)):
        again()
        assert (
            card.read_text() == "mine"
            and "which was edited or has a template; `essm-push --replace_card local`" in told().out
        )
        assert sent(api)["README.md"] == b"mine"
    on_the_hub(api, tmp_path / "there")
    card.write_text("mine again")
    push(run)
    assert sent(api)["README.md"] == b"mine again" and "edited there" not in told().out
    push(run, replace_card=["local"])
    assert b"| updates | 2 |" in sent(api)["README.md"] == card.read_bytes()
    card.unlink()  # with the model it described
    push(run, card_only=True)
    assert "## Training" in card.read_text()


def test_a_card_that_was_edited_on_the_hub_stays_there(api, run, capsys, tmp_path):
    push(run)
    on_the_hub(api, tmp_path / "there")
    (tmp_path / "there").write_text("edited on the page")
    push(run)
    assert "README.md" not in sent(api) and "model.safetensors" in sent(api)
    assert "kept the card of org/name, which was edited there; --replace_card" in capsys.readouterr().out
    (run / "model" / "README.md").write_text("edited here too")
    push(run)
    assert "README.md" not in sent(api)
    push(run, replace_card=["hub"])
    assert sent(api)["README.md"] == b"edited here too"


def test_a_card_from_a_template_is_not_replaced_by_a_plain_one(api, run):
    card, template = run / "model" / "README.md", str(ROOT / "hub_configs/essm-21m/README.md")
    for _ in range(2):
        push(run, template=template)
    push(run)
    write_card_and_push(RunArguments(output_dir=str(run)))
    assert "byte-level" in card.read_text()
