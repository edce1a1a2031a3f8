# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Files and folders that are whole or not there at all: filled under a temporary name, synced to disk, then renamed.

Every writer has a temporary name of its own, `.partial-*` for a file and `.tmp-*` for a folder, so two of one target do
not meet: the last one wins. The model's `replacing` (_files) is another one, because generators of data start without
torch.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTIAL = ".partial-"
TEMPORARY = ".tmp-"
_REPLACED = f"{TEMPORARY}replaced-"
_DELETED = f"{TEMPORARY}deleted-"
_LEFT = re.compile(rf"({TEMPORARY}|{_REPLACED}|{_DELETED}|{PARTIAL})[0-9a-f]{{8}}-".replace(".", r"\."))


def claim(
    folder: Path,
    names: Iterable[str],
    *,
    overwrite: bool = False,
    reads: Iterable[object] = (),
    flag: str = "--overwrite",
) -> None:
    """Make the folder in which a command will write those files and folders, before it does any work.

    Args:
        overwrite: whether its user has said, by `flag`, that what is there may go; "" where there is no such flag.
        reads: what the command will read; what is no path here does not count.
    Raises:
        ValueError: the folder cannot be written; one of the names is, or holds, what the command reads; or one is
            there already, and not to be overwritten. An empty folder is not there.
    """
    check_writable(folder)
    found = [path for path in (folder / name for name in names) if os.path.lexists(path) and not _is_empty(path)]
    for source in reads:
        for path in found:
            if (
                isinstance(source, str)
                and os.path.exists(source)
                and Path(source).resolve().is_relative_to(path.resolve())
            ):
                raise ValueError(f"{source!r} is read, and {str(path)!r} would be replaced: write to another folder")
    if not overwrite:
        refuse_replacing([path.name for path in found], folder, flag)


def refuse_replacing(found: Iterable[str], folder: Path, flag: str = "--overwrite") -> None:
    """Raises ValueError if anything is found that the command would replace."""
    if names := ", ".join(found):
        raise ValueError(
            f"{str(folder)!r} holds {names}, which this run did not write: write to another folder, or move it away"
            + (f", or give {flag} to replace it" if flag else "")
        )


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A disk that is full, or broken, says which file it was that could not be written."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
    except (RuntimeError, SafetensorError) as error:
        if isinstance(error, SafetensorError) or "inline_container" in str(error):  # of torch.save
            raise OSError(f"cannot write {path}: {error}") from error
        raise


def _own_name(path: Path, kind: str) -> Path:
    """A path beside `path` that no other writer has."""
    return path.with_name(f"{kind}{secrets.token_hex(4)}-{path.name}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to. It takes its place when the block ends; after an error nothing has changed."""
    temporary = _own_name(path, PARTIAL)
    try:
        with naming(path):
            yield temporary
            _sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


@contextmanager
def filling(path: Path) -> Iterator[Path]:
    """An empty folder beside `path` to fill. It takes its place when the block ends; an error leaves nothing."""
    temporary = _own_name(path, TEMPORARY)
    temporary.mkdir(parents=True)
    try:
        with naming(path):
            yield temporary
            publish(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def write_json(path: Path, record: Any, indent: int = 2) -> None:
    write_text(path, json.dumps(record, indent=indent) + "\n")


def recorded(path: Path) -> dict[str, Any]:
    """The table that `write_json` left there; empty where there is none, or a damaged one."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


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
        raise ValueError(f"folder {str(folder)!r} cannot be written: {error.strerror}") from error


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish(temporary: Path, path: Path) -> None:
    """Give a filled temporary folder its name, atomically and durably; what had the name before is deleted."""
    for folder, _, files in os.walk(temporary):
        for name in (*files, "."):
            _sync(Path(folder, name))
    replaced: list[Path] = []
    while True:
        aside = _own_name(path, _REPLACED)
        with suppress(FileNotFoundError):
            os.replace(path, aside)
            replaced.append(aside)
        try:
            os.replace(temporary, path)
            break
        except OSError as error:  # of another writer that was here in between, whose folder may be gone already
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) and not path.exists():
                if replaced:
                    os.replace(replaced[-1], path)
                raise
    _sync(path.parent)
    for aside in replaced:
        _remove(aside)


def set_aside(path: Path, name: str) -> str:
    """Give a file or folder another name, with the first number where it is taken; the name."""
    names = (f"{name}-{n}" if n else name for n in itertools.count())
    free = next(each for each in names if not os.path.lexists(path.with_name(each)))
    os.replace(path, path.with_name(free))
    return free


def delete(path: Path) -> None:
    """Delete so that a kill halfway leaves a temporary folder, not a damaged one under the old name."""
    doomed = _own_name(path, _DELETED)
    os.replace(path, doomed)
    _remove(doomed)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, and clean up after a killed holder. The system frees it when a process ends, however.

    Raises:
        ValueError: another process holds it.
    """
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"output_dir {str(folder)!r} is in use by another run, which has not ended: wait for it, end it, or choose "
            "another output_dir"
        ) from None
    except OSError as error:  # a file system without locks
        print(f"{folder} cannot be locked ({error}): make sure that no other run uses it")
    try:
        for path in folder.glob(f"{_REPLACED}*"):
            original = path.with_name(path.name.removeprefix(_REPLACED).partition("-")[2])
            if not original.exists():
                os.replace(path, original)  # killed between the two renames of `publish`
        for path in [path for path in folder.iterdir() if _LEFT.match(path.name)]:
            _remove(path)
        yield
    finally:
        lock.release()


def _remove(path: Path) -> None:
    """A file or link, or a folder with all that is in it; or nothing."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    """To disk; the entries of a folder as far as the system can, as Windows opens no folder."""
    try:
        descriptor = os.open(path, os.O_RDWR if os.name == "nt" and path.is_file() else os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        if not path.is_dir():
            raise
