# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Where the data of a task is looked for, and what to do where it is absent.

Data is looked for in one or several folders, separated as in PATH; by default those of the environment variable
ESSM_DATA, else `data`. Where it is absent, the error says what to fetch, from where, and where to put it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from essm_train.tasks.shards import MANIFEST, SPLITS, shard_files

ENVIRONMENT = "ESSM_DATA"
Folders = str | os.PathLike | Sequence[str | os.PathLike] | None


def _writable(folders: Sequence[Path]) -> Path:
    """The first folder that can be written or made."""
    for folder in folders:
        exists = next(part for part in (folder, *folder.absolute().parents) if part.exists())
        if os.access(exists, os.W_OK):
            return folder
    return folders[0]


@dataclass(frozen=True)
class Files:
    """Files of a data folder, by split: a name, or a pattern for several. `how` says where they come from.

    `substitute` says what they are where they stand in the place of the official data.
    """

    files: dict[str, str]
    how: str
    substitute: str = ""

    def __post_init__(self) -> None:
        if not {"train"} <= self.files.keys() <= set(SPLITS):
            raise ValueError(f"files must be of train and others of {', '.join(SPLITS)}, got {', '.join(self.files)}")
        if absolute := [pattern for pattern in self.files.values() if Path(pattern).is_absolute()]:
            raise ValueError(f"files must be relative to the data folders, got {', '.join(absolute)}")

    def find(self, folder: Path) -> dict[str, list[str]] | None:
        """Paths of each split in that folder; None unless all are there."""
        found = {split: sorted(map(str, folder.glob(pattern))) for split, pattern in self.files.items()}
        return found if all(found.values()) else None

    def instructions(self, folders: Sequence[Path]) -> str:
        names = ", ".join(str(_writable(folders) / pattern) for pattern in self.files.values())
        return f"{self.how}, as {names}"


@dataclass(frozen=True)
class Shards:
    """A folder of a data folder that a command of this repository fills, see shards.py.

    In the command, `{data}` is that data folder and `{raw}` the one that holds what the command reads, the file or
    folder `raw`; `fetch` says where that comes from. `substitute` is as in `Files`.
    """

    folder: str
    name: str
    command: str
    raw: str | None = None
    fetch: str = ""
    substitute: str = ""

    def __post_init__(self) -> None:
        for text in (self.command, self.fetch):
            try:
                text.format(data="", raw="")
            except (KeyError, IndexError, ValueError) as error:
                raise ValueError(f"command and fetch may hold {{data}} and {{raw}} in braces, got {text!r}") from error

    def find(self, folder: Path) -> dict[str, list[str]] | None:
        """Paths of each split; None if there is no finished data. ValueError if it is damaged or another's."""
        if not (folder / self.folder / MANIFEST).is_file():
            return None
        try:
            return shard_files(folder / self.folder, self.name)
        except FileNotFoundError as error:  # unfinished, or a file is lost: the same command mends it
            reason = str(error).split(":")[0]
            raise FileNotFoundError(f"{reason}: {self.instructions([folder])} again") from error

    def instructions(self, folders: Sequence[Path]) -> str:
        target = _writable(folders)
        if self.raw is None:
            return f"run `{self.command.format(data=target)}`"
        holding = next((folder for folder in folders if (folder / self.raw).exists()), None)
        command = f"run `{self.command.format(data=target, raw=holding or target)}`"
        return command if holding else f"{self.fetch.format(raw=target)}, then {command}"


@dataclass(frozen=True)
class Hub:
    """A data set on the Hub; asked for explicitly, never used because a file is missing."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


def data_folders(data_dir: Folders = None) -> list[Path]:
    """The folders to look in: those given (a text may name several, separated as in PATH), or ESSM_DATA's, or data."""
    if data_dir is None:
        data_dir = os.environ.get(ENVIRONMENT) or "data"
    if isinstance(data_dir, str):
        data_dir = [part for part in data_dir.split(os.pathsep) if part]
    elif isinstance(data_dir, os.PathLike):
        data_dir = [data_dir]
    if not data_dir:
        raise ValueError("data_dir names no folder")
    return [Path(folder) for folder in data_dir]
