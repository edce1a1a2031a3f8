# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Texts out of files, tables, data sets and Python's standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from essm_train.data.tokens import Document

TABLES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}  # else a file is one document
# The default corpus: programs, not their tests, tables or generated files.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
_MAX_FILE_BYTES, _MAX_CORPUS_BYTES = 1 << 18, 1 << 24
_HELD_OUT_ONE_IN = 50


def standard_library() -> tuple[list[Document], list[Document]]:
    """Python's own standard-library sources, in sorted order: documents to train on, and held-out ones.

    About one file in 50 is held out, chosen by a hash of its relative path: the same ones on every machine.

    Raises:
        ValueError: this Python has no library sources on disk.
    """
    root = Path(sysconfig.get_path("stdlib"))
    train: list[Document] = []
    held_out: list[Document] = []
    total = 0
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(name.parts) or name.name.startswith("_sysconfigdata"):
            continue
        size = path.stat().st_size
        if not 0 < size <= _MAX_FILE_BYTES or total + size > _MAX_CORPUS_BYTES:
            continue
        total += size
        digest = hashlib.blake2b(name.as_posix().encode(), digest_size=8).digest()
        is_held_out = int.from_bytes(digest, "big") % _HELD_OUT_ONE_IN == 0
        (held_out if is_held_out else train).append((str(name), path.read_bytes()))
    if not train or not held_out:
        raise ValueError(f"no standard-library sources below {root}; give --train_file")
    return train, held_out


def read_files(paths: Sequence[str], text_column: str = "text") -> Iterator[Document]:
    """Documents of local files in the given order: rows of parquet, json(l) and csv files, other files whole.

    A folder stands for the files in it, see `files_of`. (`datasets` would decode text files; here any bytes will do.)

    Raises:
        ValueError: a file is missing, unreadable or empty, or has no such column.
    """
    for path in files_of(paths):
        try:
            size = Path(path).stat().st_size
            if size and Path(path).suffix not in TABLES:
                yield f"text file {path!r}", Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read text file {path!r}: {error.strerror}") from error
        if not size:
            raise ValueError(f"text file {path!r} is empty")
        if Path(path).suffix in TABLES:
            yield from documents_of(open_table([path], streaming=False), text_column, f"file {path!r}")


def files_of(paths: Sequence[str]) -> list[str]:
    """The paths, and of a folder all files in it and its sub-folders, sorted, without hidden and empty ones.

    Raises:
        ValueError: a folder holds no such file.
    """
    found: list[str] = []
    for path in paths:
        if not Path(path).is_dir():
            found.append(path)
            continue
        inside = sorted(inside.relative_to(path) for inside in Path(path).rglob("*") if inside.is_file())
        shown = [name for name in inside if not any(part.startswith(".") for part in name.parts)]
        filled = [str(Path(path, name)) for name in shown if Path(path, name).stat().st_size]
        if not filled:
            raise ValueError(f"folder {path!r} holds no file with text")
        found += filled
    return found


def describe_files(paths: Sequence[str]) -> str:
    """Their names, and of a folder how many files it stands for."""
    counts = {path: f" ({len(files_of([path])):,} files)" for path in paths if Path(path).is_dir()}
    return ", ".join(f"{Path(path).name}{counts.get(path, '')}" for path in paths)


def open_table(paths: Sequence[str], streaming: bool) -> Any:
    """Local parquet, json(l) or csv files of one kind as one `datasets` data set.

    Raises:
        ValueError: files of another kind, or of several; or one is missing, empty or broken.
    """
    import datasets

    suffixes = {Path(path).suffix for path in paths}
    if len(suffixes) != 1 or not suffixes <= set(TABLES):
        raise ValueError(f"files must all be of one kind out of {sorted(TABLES)}, got {sorted(suffixes)}")
    for path in paths:
        if not Path(path).is_file():
            raise ValueError(f"cannot read text file {path!r}: No such file or directory")
        if not Path(path).stat().st_size:  # which `datasets` meets with errors of its own
            raise ValueError(f"text file {path!r} is empty")
    builder = TABLES[suffixes.pop()]
    try:
        return datasets.load_dataset(builder, data_files=list(paths), split="train", streaming=streaming)
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:  # Arrow's and UTF-8's are ValueErrors
        raise ValueError(f"cannot read {list(paths)} as {builder}: {error.__cause__ or error}") from error


def load_splits(name: str, config_name: str | None, streaming: bool) -> Any:
    """Splits of a data set on the Hub, in a local folder, or of one local file (its only split is "train").

    Of a local folder of text files a file is a row.

    Raises:
        ValueError: no split "train", or text that is not UTF-8.
    """
    import datasets

    if Path(name).is_file():
        return {"train": open_table([name], streaming)}
    options = {}
    if Path(name).is_dir() and datasets.load_dataset_builder(name, config_name).name == "text":
        options = {"sample_by": "document"}  # by default it makes a row of every line, and drops the line's end
    try:
        splits = datasets.load_dataset(name, config_name, streaming=streaming, **options)
    except datasets.exceptions.DatasetGenerationError as error:
        if not isinstance(error.__cause__, UnicodeDecodeError):
            raise
        raise ValueError(
            f"cannot read dataset {name!r}: a file is not UTF-8 ({error.__cause__}); --train_file takes any bytes"
        ) from error
    if "train" not in splits:
        raise ValueError(f"dataset {name!r} has no split 'train', only {sorted(splits)}")
    return splits


def documents_of(rows: Any, text_column: str, source: str) -> Iterator[Document]:
    """Non-empty texts of a column of a `datasets` data set, map-style or streaming.

    Raises:
        ValueError: no such column, something else than text in it, no text at all, or it cannot be read.
    """
    check_column(rows, text_column, source)
    found = False
    for row, item in enumerate(items_of(rows, source)):
        text = text_of(item, text_column, f"row {row} of {source}")
        if text:
            found = True
            yield f"row {row} of {source}", text
    if not found:
        raise ValueError(f"{source} holds no text in column {text_column!r}")


def items_of(rows: Any, source: str) -> Iterator[dict[str, Any]]:
    """Rows of a data set. Raises ValueError if it cannot be read on."""
    count = 0
    try:
        for item in rows:
            yield item
            count += 1
    except ValueError as error:  # Arrow's and UTF-8's
        raise ValueError(f"cannot read {source} after {count} rows: {error}") from error


def text_of(item: dict[str, Any], text_column: str, where: str) -> str | bytes | None:
    text = item[text_column]
    if text is not None and not isinstance(text, (str, bytes)):
        raise ValueError(f"{where}: column {text_column!r} must hold text, got {type(text).__name__}")
    return text


def check_column(rows: Any, text_column: str, source: str) -> None:
    """Raises ValueError if a data set has no such column, or a stream cannot be read."""
    columns = rows.column_names
    if columns is None:  # a stream of unknown features
        columns = list(next(items_of(rows, source), {}))
    if text_column not in columns:
        raise ValueError(f"text_column must be one of {columns} of {source}, got {text_column!r}")
