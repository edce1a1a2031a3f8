# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Publish a saved model on the Hugging Face Hub: code, weights, tokenizer, generation config and card in ONE commit.

Only what belongs to a model is published, see `split_files`: whatever else lies in its folder is named and stays at
home, and so do symbolic links. The repository shows the old revision until the one commit is made, whatever interrupts
the push; pushing again continues (files that arrived are not sent again) and makes no commit if nothing has changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.utils import HfHubHTTPError, HFValidationError, validate_repo_id
from safetensors import SafetensorError, safe_open

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_ANY_WEIGHTS = re.compile(r"model(\.[\w-]+)?\.safetensors")  # in one file, or a variant of them; shards an index names
_ANY_INDEX = re.compile(r"model\.safetensors\.index(\.[\w-]+)?\.json")
_CONFIGS = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
_FILES = {
    *(*_CONFIGS, "generation_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json", "features.json", "budget_profile.json", "budget_profile.png"),
    *("budget_sweep.json", "budget_sweep.png", "training.json", "README.md"),
    *("LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE"),
}
_PICTURES = (".png", ".jpg", ".jpeg", ".svg", ".gif", ".webp")
_SHOWN = re.compile(r"""!\[[^\]]*\]\(\s*<?([^\s)>]+)|<img\b[^>]*?\bsrc\s*=\s*["']?([^"'\s>]+)""")
_OWN_WEIGHTS = (WEIGHTS, INDEX, "model-?????-of-?????.safetensors")  # removed from the Hub when the folder lacks them
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def commit_folder(folder: Path, repository: str, message: str) -> str:
    """Upload the checked folder to the checked repository in one commit; the commit's id, to be used as `revision`.

    What belongs to a model is uploaded, and what was left out is printed, see `split_files`. Weight files of an earlier
    push that the folder no longer has (other shards) are deleted in the same commit; whatever else the repository holds
    stays. If nothing has changed, the id is that of the present commit.

    Raises:
        PermissionError, ConnectionError: as `check_can_push`; the repository shows its old revision or the new one.
    """
    files, left_out = split_files(folder)
    if left_out:
        print(f"not published, because it is no part of a model: {', '.join(left_out)}", flush=True)
    api = HfApi()
    with _explained(repository, "push to"):
        present = [sibling.rfilename for sibling in api.model_info(repository).siblings or []]
        stale = [
            name for name in present if name not in files and any(fnmatch(name, pattern) for pattern in _OWN_WEIGHTS)
        ]
        # Not upload_folder: where hf_xet is installed it may make several commits.
        commit = api.create_commit(
            repository,
            [
                *(CommitOperationDelete(path_in_repo=name) for name in stale),
                *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in files),
            ],
            commit_message=message,
        )
    return commit.oid


def check_can_push(hub_model_id: str, token: str | None = None, *, private: bool = False) -> str:
    """Make sure, before a month of training, that a push will be let in; creates the repository if need be.

    Returns:
        The full id, "namespace/name".
    Raises:
        ValueError: a malformed id, or `private` for a repository that is public.
        PermissionError: no token, a token that the Hub refuses, or no right to write there.
        ConnectionError: the Hub cannot be reached or failed.
    """
    try:
        validate_repo_id(hub_model_id)
    except HFValidationError as error:
        raise ValueError(f"hub_model_id must be 'name' or 'namespace/name', got {hub_model_id!r}: {error}") from error
    if not (token or get_token()):
        raise PermissionError(
            f"no Hugging Face token found, so {hub_model_id!r} cannot be pushed to: run `hf auth login` with a token "
            f"that may write ({constants.ENDPOINT}/settings/tokens), or set HF_TOKEN"
        )
    api = HfApi(token=token)
    with _explained(hub_model_id, "write to"):
        user = api.whoami()["name"]
        repository = hub_model_id if "/" in hub_model_id else f"{user}/{hub_model_id}"
        api.create_repo(repository, private=private or None, exist_ok=True)
        # An existing repository passes create_repo even if the token may only read it.
        api.auth_check(repository, write=True)
        public = private and api.model_info(repository).private is False
    if public:
        raise ValueError(
            f"{repository!r} exists and is public, but private was asked for: choose another name or change its "
            f"visibility at {constants.ENDPOINT}/{repository}/settings"
        )
    return repository


def check_folder(folder: Path) -> list[str]:
    """Names of the files to upload. Raises ValueError if `from_pretrained` would not load what they hold."""
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is not a folder; a run's saved model is its `model` folder")
    files, left_out = split_files(folder)
    indices = [name for name in files if _ANY_INDEX.fullmatch(name)]
    weights = {name for index in indices for name in _shards(folder / index)}
    if INDEX not in indices:
        weights.add(WEIGHTS)
    if not _references(folder / "config.json"):
        raise ValueError(f"{folder / 'config.json'} has no auto_map: the Hub would not know which code loads the model")
    for kind, needed in (("configuration", {"config.json"}), ("weights", weights), ("code file", _code(folder))):
        if missing := sorted(needed - set(files)):
            linked = any(f"{name} (a symbolic link)" in left_out for name in missing)
            raise ValueError(
                f"{str(folder)!r} lacks the {kind} {', '.join(missing)}"
                + ("; a symbolic link is never published: put the file there" if linked else "")
                + ("; save_pretrained writes it" if kind == "code file" else "")
            )
    for name in files:
        if name.endswith(".safetensors"):
            _check_weights(folder / name)
    return files


def split_files(folder: Path) -> tuple[list[str], list[str]]:
    """What of a saved model's folder belongs on the Hub, and all else in it, for people.

    Published are weights as safetensors (shards that an index names, and variants), the configuration, tokenizer files,
    the code that auto_map names with what it imports from beside it, what this project writes beside a model, the card,
    a licence, and pictures that the card shows. Symbolic links and folders never are.

    Raises:
        ValueError: config.json or another of the files that name others cannot be read.
    """
    plain = {path.name for path in folder.iterdir() if path.is_file() and not path.is_symlink()}
    belongs = _FILES | _code(folder) | _shown(folder / "README.md")
    belongs |= {name for name in plain if _ANY_WEIGHTS.fullmatch(name) or _ANY_INDEX.fullmatch(name)}
    for index in filter(_ANY_INDEX.fullmatch, plain):
        belongs |= _shards(folder / index)
    left_out = []
    for path in sorted(folder.iterdir()):
        if path.name not in plain or path.name not in belongs:
            kind = " (a symbolic link)" if path.is_symlink() else "/" if path.is_dir() else ""
            left_out.append(path.name + kind)
    return sorted(plain & belongs), left_out


def _shards(index: Path) -> set[str]:
    """The safetensors files that an index names. Raises ValueError if it is none."""
    record = read_json(index, "").get("weight_map")
    names = list(record.values()) if isinstance(record, dict) else []
    if not names or not all(isinstance(name, str) and re.fullmatch(r"[\w.-]+\.safetensors", name) for name in names):
        raise ValueError(f"{index} must name safetensors files in its weight_map, got {str(record)[:80]}")
    return set(names)


def _references(config: Path) -> list[str]:
    """`module.Class` of every class in an auto_map whose code lies beside it."""
    record = read_json(config, "save the model with save_pretrained first").get("auto_map") or {}
    values = record.values() if isinstance(record, dict) else [record]
    names = [name for value in values for name in (value if isinstance(value, list) else [value]) if name is not None]
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"(.+--)?\w+\.\w+", name):
            raise ValueError(f"{config}: auto_map must name classes as 'module.Class', got {name!r}")
    return [name for name in names if "--" not in name]


def _code(folder: Path) -> set[str]:
    """The Python files that the configurations name, with all that these import from beside them."""
    configs = [folder / name for name in _CONFIGS if name == "config.json" or (folder / name).is_file()]
    needed = {f"{name.split('.')[0]}.py" for config in configs for name in _references(config)}
    found: set[str] = set()
    while needed:
        name = needed.pop()
        found.add(name)
        if (folder / name).is_file():
            text = (folder / name).read_text(encoding="utf-8")
            imported = re.findall(r"^\s*from\s+\.(\w+)\s+import", text, re.M)
            needed |= {f"{module}.py" for module in imported} - found
    return found


def _shown(card: Path) -> set[str]:
    """Names of the pictures beside the card that it shows."""
    if not card.is_file():
        return set()
    names = {first or second for first, second in _SHOWN.findall(card.read_text(encoding="utf-8", errors="replace"))}
    return {name.removeprefix("./") for name in names if name.lower().endswith(_PICTURES)}


def _check_weights(path: Path) -> None:
    """Raises ValueError for a truncated safetensors file and for NaN or infinite numbers, named by tensor."""
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            for name in names:
                tensor = file.get_tensor(name)
                if tensor.dtype in _FLOATS and not tensor.isfinite().all():
                    raise ValueError(
                        f"{name} in {path} contains NaN or infinite values: push a checkpoint from before that"
                    )
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a safetensors file, or truncated or damaged: it has {path.stat().st_size:,} bytes; save "
            "the model again"
        ) from error


def read_json(path: Path, advice: str) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {advice}".rstrip("; ")) from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(record).__name__}")
    return record


@contextmanager
def _explained(repository: str, action: str) -> Iterator[None]:
    """Turn the client's errors into ones that say what to do."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError):
            raise  # the Hub's verdict on the card's metadata
        chain: list[BaseException] = [error]
        while chain[-1].__cause__ is not None:
            chain.append(chain[-1].__cause__)
        status = next((e.response.status_code for e in chain if isinstance(e, HfHubHTTPError)), None)
        if status == 401:
            raise PermissionError(
                f"{constants.ENDPOINT} refused the token: {_first_line(error)} Run `hf auth login` again or set "
                "HF_TOKEN (which wins over a login) to a token that may write"
            ) from error
        if status == 403:
            raise PermissionError(
                f"this token may not {action} {repository!r}: check the namespace and the token's rights at "
                f"{constants.ENDPOINT}/settings/tokens"
            ) from error
        network = any(type(e).__module__.split(".")[0].startswith("httpx") for e in chain)
        if status is not None or network or isinstance(error, (OSError, RuntimeError, json.JSONDecodeError)):
            hint = " A server without xet storage needs HF_HUB_DISABLE_XET=1." if "xet" in str(chain[-1]) else ""
            raise ConnectionError(
                f"could not {action} {repository!r} at {constants.ENDPOINT}: {_first_line(chain[-1])}{hint} The "
                "repository shows its last complete revision; run the same command again, or essm-push, to "
                "go on"
            ) from error
        raise


def _first_line(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if line.endswith(".") else line + "."
