# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Publish a saved model on the Hugging Face Hub: code, weights, tokenizer, generation config and card in ONE commit.

    hf auth login                                                             # once
    python train/push_to_hub.py --run runs/train_clm --hub_model_id org/name [--private]
    python train/push_to_hub.py --run runs/train_clm --card_only              # write model/README.md and stop; edit it,
    python train/push_to_hub.py --run runs/train_clm --hub_model_id org/name --keep_card   # and push it as it is

A run folder holds model/ and, if they were written, budget_sweep.json, budget_sweep.png and training.json. The
repository shows the old revision until the one commit is made, whatever interrupts the push; pushing again continues
(files that arrived are not sent again) and makes no commit if nothing has changed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.utils import HfHubHTTPError, HFValidationError, validate_repo_id
from model_card import write_model_card
from transformers import HfArgumentParser

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_OWN_WEIGHTS = (WEIGHTS, INDEX, "model-?????-of-?????.safetensors")  # removed from the Hub when the folder lacks them
_EXPONENTS = {"F64": ("<u8", 0x7FF << 52), "F32": ("<u4", 0xFF << 23), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}


def push_to_hub(
    folder: Path,
    hub_model_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    commit_message: str = "Upload ES-SSM model",
) -> str:
    """Make the repository equal to a saved model folder, in one commit.

    Every plain file at the top of the folder is uploaded, hidden ones excepted. Weight files of an earlier push that
    the folder no longer has (other shards) are deleted in the same commit; whatever else the repository holds stays.

    Args:
        folder: as `save_pretrained` leaves it: config.json, weights, code; better with tokenizer and README.md.
        hub_model_id: "name" (in your own namespace) or "org/name"; created if it does not exist.
        private: create it private; a repository that exists and is public is refused rather than pushed to.
        token: a write token; by default the one of `hf auth login` or HF_TOKEN.
    Returns:
        The commit's 40-digit id, to be used as `revision`. If nothing has changed, the id of the present commit.
    Raises:
        ValueError: a folder that would not load, or a malformed id; before anything is sent.
        PermissionError: no token, a token that the Hub refuses, or no right to write; before anything is sent.
        ConnectionError: the Hub cannot be reached or failed; the repository shows its old revision or the new one.
    """
    folder = Path(folder)
    check_folder(folder)
    return _commit(folder, check_can_push(hub_model_id, token, private=private), token, commit_message)


def _commit(folder: Path, repository: str, token: str | None, message: str) -> str:
    """Upload the checked folder to the checked repository; the id of its newest commit."""
    files = _file_names(folder)
    api = HfApi(token=token)
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
    files = _file_names(folder)
    config = _read_json(folder / "config.json", "save the model with save_pretrained first")
    weights = [WEIGHTS]
    if INDEX in files:
        weights = sorted(set(_read_json(folder / INDEX, "").get("weight_map", {}).values()))
    missing = [name for name in weights if name not in files]
    if missing or not weights:
        raise ValueError(f"{str(folder)!r} lacks the weights {', '.join(missing or [WEIGHTS])}")
    needed = {target.split("--")[-1].split(".")[0] + ".py" for target in config.get("auto_map", {}).values()}
    if not needed:
        raise ValueError(f"{folder / 'config.json'} has no auto_map: the Hub would not know which code loads the model")
    checked: set[str] = set()
    while needed:
        name = needed.pop()
        if name not in files:
            raise ValueError(f"{str(folder)!r} lacks the code file {name}; save_pretrained writes it")
        checked.add(name)
        imported = re.findall(r"^\s*from\s+\.(\w+)\s+import", (folder / name).read_text(encoding="utf-8"), re.M)
        needed |= {f"{module}.py" for module in imported} - checked
    for name in weights:
        _check_weights(folder / name)
    return files


def _file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def _check_weights(path: Path) -> None:
    """Raises ValueError for a truncated safetensors file and for NaN or infinite numbers, named by tensor."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length) if 8 + length <= size else b"")
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{path} is not a safetensors file, or truncated; save the model again") from error
    if not entries or 8 + length + end != size:
        raise ValueError(f"{path} is truncated or damaged: it has {size:,} bytes; save the model again")
    data = np.memmap(path, np.uint8, "r", 8 + length, (end,)) if end else np.empty(0, np.uint8)
    for name, entry in entries.items():
        if entry["dtype"] not in _EXPONENTS:
            continue
        kind, exponent = _EXPONENTS[entry["dtype"]]
        first, last = entry["data_offsets"]
        bits = data[first:last]
        for start in range(0, len(bits), 1 << 24):  # a copy of at most 16 MB: offsets need not be aligned
            numbers = np.frombuffer(bits[start : start + (1 << 24)].tobytes(), kind)
            if np.any((numbers & exponent) == exponent):
                raise ValueError(
                    f"{name} in {path} contains NaN or infinite values: push a checkpoint from before that"
                )


def _read_json(path: Path, advice: str) -> dict[str, Any]:
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
                "repository shows its last complete revision; run the same command again, or train/push_to_hub.py, to "
                "go on"
            ) from error
        raise


def _first_line(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if line.endswith(".") else line + "."


@dataclass
class PushArguments:
    """Arguments of the script."""

    run: str = field(metadata={"help": "Folder of a run, which holds model/; or a saved model folder itself."})
    hub_model_id: str | None = field(default=None, metadata={"help": "'name' or 'org/name'."})
    private: bool = field(default=False, metadata={"help": "Create the repository private."})
    template: str | None = field(
        default=None, metadata={"help": "Card template, such as hub_configs/essm-21m/README.md; else a plain card."}
    )
    commit_message: str = field(default="Upload ES-SSM model", metadata={"help": "First line of the commit."})
    card_only: bool = field(default=False, metadata={"help": "Write model/README.md and stop."})
    keep_card: bool = field(default=False, metadata={"help": "Push model/README.md as it is, edited by hand."})


def push_run(args: PushArguments) -> str | None:
    """Write the card of a run's model and push it; the commit's id, or None for `card_only`."""
    run = Path(args.run)
    folder = run / "model" if (run / "model").is_dir() else run
    if args.card_only and args.keep_card:
        raise ValueError("card_only writes the card and keep_card does not: give one of them")
    if not args.card_only and not args.hub_model_id:
        raise ValueError("hub_model_id is needed to push: --hub_model_id org/name")
    check_folder(folder)
    sweep, training = (
        _read_json(run / name, "") if (run / name).exists() else None for name in ("budget_sweep.json", "training.json")
    )
    repository = args.hub_model_id
    if not args.card_only and repository is not None:
        repository = check_can_push(repository, private=args.private)
    if not args.keep_card:
        template = None if args.template is None else Path(args.template)
        picture = run / "budget_sweep.png"
        card = write_model_card(
            folder, sweep=sweep, training=training, hub_model_id=repository, template=template, picture=picture
        )
        print(f"wrote {card}")
    if args.card_only or repository is None:
        return None
    commit = _commit(folder, repository, None, args.commit_message)
    print(f"pushed {constants.ENDPOINT}/{repository} at revision {commit}")
    return commit


def main() -> None:
    """Push from the command line."""
    (args,) = HfArgumentParser(PushArguments).parse_args_into_dataclasses()
    try:
        push_run(args)
    except (ValueError, PermissionError, ConnectionError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
