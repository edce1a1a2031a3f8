# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Files and folders that are whole or not there at all: filled under a temporary name, synced to disk, then renamed.

A file that is replaced is `.partial-<name>` until then, a folder `.tmp-<name>`. The model's `replacing` (_files) is
another one, because generators of data start without torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTIAL = ".partial-"
TEMPORARY = ".tmp-"
_REPLACED = f"{TEMPORARY}replaced-"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to. It takes its place when the block ends; after an error nothing has changed."""
    temporary = path.with_name(PARTIAL + path.name)
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def write_json(path: Path, record: Any, indent: int = 2) -> None:
    write_text(path, json.dumps(record, indent=indent) + "\n")


def write_figure(path: Path, figure: Figure, dpi: int = 150) -> None:
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=dpi)


def check_writable(folder: Path) -> None:
    """Make the folder. Raises ValueError if it cannot be written, before any work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"output_dir {str(folder)!r} cannot be written: {error.strerror}") from error


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def temporary_folder(path: Path) -> Path:
    """An empty folder next to `path`, to be filled and published under that name."""
    temporary = path.with_name(TEMPORARY + path.name)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def publish(temporary: Path, path: Path) -> None:
    """Give a filled temporary folder its name, atomically and durably; what had the name before is deleted."""
    for folder, _, files in os.walk(temporary):
        for name in (*files, "."):
            _sync(Path(folder, name))
    replaced = path.with_name(_REPLACED + path.name)
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)  # what an earlier one could not delete
        os.replace(path, replaced)
    os.replace(temporary, path)
    _sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def set_aside(path: Path, name: str) -> None:
    """Give a folder another name; what had that name before is deleted."""
    aside = path.with_name(name)
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)


def delete_folder(path: Path) -> None:
    """Delete so that a kill halfway leaves a temporary folder, not a damaged one under the old name."""
    doomed = f"{TEMPORARY}deleted-{path.name}"
    set_aside(path, doomed)
    shutil.rmtree(path.with_name(doomed))


def delete_temporary_folders(output_dir: Path) -> None:
    """Clean up after a killed run."""
    for path in output_dir.glob(f"{_REPLACED}*"):
        if not (original := path.with_name(path.name.removeprefix(_REPLACED))).exists():
            os.replace(path, original)  # killed between the two renames of `publish`
    for path in output_dir.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
