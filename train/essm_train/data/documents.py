# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Data sets out of files, folders and the Hub, read by `datasets`; texts out of them, and of Python's own library."""

from __future__ import annotations

import hashlib
import itertools
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TABLES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}  # else a file is one text
# The default corpus: programs, not their tests, tables or generated files.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
_MAX_FILE_BYTES, _MAX_CORPUS_BYTES = 1 << 18, 1 << 24
_HELD_OUT_ONE_IN = 50


def standard_library() -> tuple[list[str], list[str]]:
    """Python's own standard-library sources, in sorted order: texts to train on, and held-out ones.

    About one file in 50 is held out, chosen by a hash of its relative path: the same ones on every machine.

    Raises:
        ValueError: this Python has no library sources on disk.
    """
    root = Path(sysconfig.get_path("stdlib"))
    train: list[str] = []
    held_out: list[str] = []
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
        (held_out if is_held_out else train).append(path.read_bytes().decode(errors="replace"))
    if not train or not held_out:
        raise ValueError(f"no standard-library sources below {root}; give --train_file")
    return train, held_out


def files_of(paths: Sequence[str]) -> list[str]:
    """The paths, and for a folder all files in it and its sub-folders, sorted, without hidden and empty ones.

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
    """Their names, and for a folder how many files it stands for."""
    counts = {path: f" ({len(files_of([path])):,} files)" for path in paths if Path(path).is_dir()}
    return ", ".join(f"{Path(path).name}{counts.get(path, '')}" for path in paths)


def load(what: str, builder: str, config_name: str | None = None, **options: Any) -> Any:
    """`datasets.load_dataset`. Raises ValueError, which names `what` and the reason, if it cannot be read."""
    import datasets

    try:
        return datasets.load_dataset(builder, config_name, **options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:  # Arrow's and UTF-8's are ValueErrors
        raise ValueError(f"cannot read {what}: {_reason(error)}") from error


def _reason(error: BaseException) -> BaseException:
    """What is behind the general error that `datasets` raises."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def open_table(paths: Sequence[str], streaming: bool, what: str = "") -> Any:
    """Local files of one kind as one data set: rows of parquet, json(l) or csv files; another file is one row, text.

    Raises:
        ValueError: as `load`, `what` by default being the files' names; or a file is empty.
    """
    what = what or describe_files(paths)
    if any(Path(path).is_file() and not Path(path).stat().st_size for path in paths):
        raise ValueError(f"{what} is empty")
    builder = TABLES.get(Path(paths[0]).suffix, "text")
    options = {"sample_by": "document"} if builder == "text" else {}
    files = [str(Path(path).absolute()) for path in paths]
    return load(what, builder, data_files=files, split="train", streaming=streaming, **options)


def open_texts(paths: Sequence[str], column: str, streaming: bool) -> Any:
    """Texts of local files, in the given order, as one data set with that column; folders as in `files_of`.

    Raises:
        ValueError: a file cannot be read, or has no such column.
    """
    import datasets

    parts = []
    for builder, group in itertools.groupby(files_of(paths), lambda path: TABLES.get(Path(path).suffix)):
        files = list(group)
        rows = open_table(files, streaming)
        if builder is None and column != "text":
            rows = rows.rename_column("text", column)
        check_column(rows, column, describe_files(files))
        rows = rows.select_columns([column])
        if rows.features and getattr(rows.features[column], "dtype", "") == "large_string":  # as csv has it
            rows = rows.cast_column(column, datasets.Value("string"))
        parts.append(rows)
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def load_splits(name: str, config_name: str | None, streaming: bool) -> Any:
    """Splits of a data set on the Hub, in a local folder, or of one local file (its only split is "train").

    In a local folder of text files a file is a row.

    Raises:
        ValueError: it cannot be read.
    """
    import datasets

    if Path(name).is_file():
        return {"train": open_table([name], streaming)}
    options = {}
    if Path(name).is_dir() and datasets.load_dataset_builder(name, config_name).name == "text":
        options = {"sample_by": "document"}  # by default it makes a row of every line, and drops the line's end
    return load(f"dataset {name!r}", name, config_name, streaming=streaming, **options)


def read_files(paths: Sequence[str], column: str = "text") -> Iterator[str]:
    """Texts of local files. Raises ValueError as `open_texts` and `texts_of`."""
    return texts_of(open_texts(paths, column, streaming=False), column, describe_files(paths))


def texts_of(rows: Any, column: str, source: str) -> Iterator[str]:
    """Non-empty texts of a column of a data set. Raises ValueError for something else, or if there is none."""
    found = False
    for text in texts_in(items_of(rows, source), column, source):
        found = True
        yield text
    if not found:
        raise ValueError(f"{source} holds no text in column {column!r}")


def items_of(rows: Any, source: str) -> Iterator[dict[str, Any]]:
    """Rows of a data set. Raises ValueError if it cannot be read on."""
    try:
        yield from rows
    except ValueError as error:  # Arrow's and UTF-8's
        raise ValueError(f"cannot read {source}: {error}") from error


def texts_in(items: Any, column: str, source: str) -> Iterator[str]:
    for item in items:
        text = item[column]
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{source}: column {column!r} must hold text, got {type(text).__name__}")
        if text:
            yield text


def check_column(rows: Any, column: str, source: str) -> None:
    """Raises ValueError if a data set has no such column, or a stream cannot be read."""
    columns = rows.column_names
    if columns is None:  # a stream of unknown features
        columns = list(next(items_of(rows, source), {}))
    if column not in columns:
        raise ValueError(f"text_column must be one of {columns} of {source}, got {column!r}")
