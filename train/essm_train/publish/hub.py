# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A saved model goes to the Hugging Face Hub in one commit, by essm-push or after a training."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from safetensors import SafetensorError, safe_open
from transformers.dynamic_module_utils import get_relative_import_files

from modeling_essm import modeling_essm
from modeling_essm.configuration_essm import AUTO_MAP

_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "spiece.model", "sentencepiece.bpe.model"),
)
_PUBLISHED = (  # beside code, and pictures that the card shows
    *("model*.safetensors", "model.safetensors.index*.json", "config.json", "generation_config.json", "features.json"),
    *("preprocessor_config.json", "processor_config.json", "*tokenizer_config.json", *TOKENIZER_FILES),
    *("budget_profile.*", "budget_sweep.*", "training.json", "README.md", "LICENSE*", "NOTICE"),
)
PACKAGE_CODE = "essm.py"  # in hub_configs: it imports the installed package, which is published in its place
_PICTURES = (".png", ".jpg", ".jpeg", ".svg", ".gif", ".webp")
_SHOWN = re.compile(r"""!\[[^\]]*\]\(\s*<?([^\s)>]+)|<img\b[^>]*?\bsrc\s*=\s*["']?([^"'\s>]+)""")


def check_can_push(hub_model_id: str, *, private: bool = False) -> str:
    """Make sure, before a month of training, that a push will be let in; creates the repository if need be.

    Returns:
        The full id, "namespace/name".
    Raises:
        ValueError: a malformed id, or `private` for a repository that is public. OSError: no token or no right to write
        there, by the client's own words; or the Hub cannot be reached.
    """
    if get_token() is None:
        raise PermissionError(f"{hub_model_id!r} needs a token: run `hf auth login`, or set HF_TOKEN")
    api = HfApi()
    with _online():
        repository = api.create_repo(hub_model_id, private=private or None, exist_ok=True).repo_id
        # An existing repository passes create_repo even if the token may only read it.
        api.auth_check(repository, write=True)
        if private and not api.model_info(repository).private:
            raise ValueError(f"{repository!r} exists and is public, but private was asked for: choose another name")
    return repository


def commit_files(files: Mapping[str, Path | bytes], repository: str, message: str) -> str:
    """Upload files by name in one commit; its id, to be used as `revision`, or the present one's if nothing has
    changed. Weights of an earlier push that are not among the files are deleted in it, all else there stays."""
    api = HfApi()
    with _online():
        present = api.list_repo_files(repository)
        stale = [name for name in present if name not in files and any(fnmatch(name, pattern) for pattern in _WEIGHTS)]
        # Not upload_folder: where hf_xet is installed it may make several commits.
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(CommitOperationDelete(path_in_repo=name) for name in stale),
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()),
        ]
        return api.create_commit(repository, operations, commit_message=message).oid


def fetch(repository: str, name: str) -> Path | None:
    """A file of a repository as it is there now; None if it is not."""
    api = HfApi()
    with _online():
        return Path(api.hf_hub_download(repository, name)) if name in api.list_repo_files(repository) else None


def split_files(folder: Path) -> tuple[dict[str, Path | bytes], list[str]]:
    """What of a saved model's folder belongs on the Hub, path or contents by name, and all else in it.

    Published are weights as safetensors, the configuration, tokenizer files, the code that auto_map names with what it
    imports from beside it, what this project writes beside a model, the card with the pictures that it shows, and a
    licence. Symbolic links and folders never are. The package's own code takes the place of PACKAGE_CODE.

    Raises:
        ValueError, OSError: what would be published lacks the configuration, weights or code.
    """
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is not a folder; a run's saved model is its `model` folder")
    code, card, weights = _code(folder), folder / "README.md", weight_files(folder)
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    shown = {(a or b).removeprefix("./") for a, b in _SHOWN.findall(text)}
    files: dict[str, Path | bytes] = {}
    left_out = []
    for path in sorted(folder.iterdir()):
        known = path in code or any(fnmatch(path.name, pattern) for pattern in _PUBLISHED)
        if any(fnmatch(path.name, pattern) for pattern in _WEIGHTS):  # or of an earlier save
            known = path.name in weights
        if path.is_symlink():
            left_out.append(f"{path.name} (a symbolic link)")
        elif path.is_file() and (known or (path.suffix in _PICTURES and path.name in shown)):
            files[path.name] = path
        else:
            left_out.append(path.name + "/" * path.is_dir())
    needed = {"config.json", *weights, *(path.name for path in code if path.parent == folder)}
    if missing := sorted(needed - {*files}):
        raise ValueError(f"{folder} lacks {', '.join(missing)}: save_pretrained writes them, and no link is published")
    if package := {path.name: path for path in sorted(code) if path.parent != folder}:
        config = read_json(folder / "config.json") | {"auto_map": AUTO_MAP}
        files |= {**package, "config.json": f"{json.dumps(config, indent=2)}\n".encode()}
    return files, left_out


def weight_files(folder: Path) -> set[str]:
    """Names of the weights that the library reads of a folder, with their index if they are shards, there or not.

    Raises:
        ValueError: one file and shards lie there, of which the library reads the file, whichever was saved last.
    """
    single, index = "model.safetensors", "model.safetensors.index.json"
    shards = set(read_json(folder / index)["weight_map"].values()) if (folder / index).is_file() else set()
    if not (folder / single).is_file():
        return shards | {index} if shards else {single}
    if both := sorted(name for name in shards if (folder / name).is_file()):
        raise ValueError(f"{folder} holds {single} and {', '.join(both)}, of two saves: save to an empty folder")
    return {single}


def _code(folder: Path) -> set[Path]:
    """The Python files that the configurations' auto_map names, with all that these import from beside them."""
    found: set[Path] = set()
    for config in (folder / "config.json", *folder.glob("*_config.json")):
        for classes in (read_json(config).get("auto_map") or {}).values():
            for name in filter(None, [classes] if isinstance(classes, str) else classes):
                if "--" not in name:  # else it lies in another repository
                    module = folder / f"{name.split('.')[0]}.py"
                    module = Path(modeling_essm.__file__) if module.name == PACKAGE_CODE else module
                    found |= {module, *map(Path, get_relative_import_files(module))}
    if not found:
        raise ValueError(f"{folder / 'config.json'} has no auto_map: the Hub would not know which code loads the model")
    return found


def check_weights(folder: Path) -> None:
    """Raises ValueError for a damaged safetensors file and for NaN or infinite numbers."""
    for path in folder.glob("model*.safetensors"):
        try:
            with safe_open(path, "pt") as file:
                bad = [name for name in file.keys() if not file.get_tensor(name).float().isfinite().all()]  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is truncated or damaged: {error}") from error
        if bad:
            raise ValueError(f"{', '.join(bad)} in {path} hold NaN or infinite values: push an earlier checkpoint")


def read_json(path: Path, advice: str = "") -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read{advice}: {error}") from error


@contextmanager
def _online() -> Iterator[None]:
    """The client's errors say what to do, but for that of a lost connection."""
    try:
        yield
    except HfHubHTTPError:
        raise
    except (HTTPError, RuntimeError) as error:  # the latter is that of hf_xet
        raise ConnectionError(
            f"{constants.ENDPOINT}: {error}; it shows the last complete revision, and the same command goes on"
        ) from error
