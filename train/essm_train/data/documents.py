# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Rows of files, folders and the Hub, read by `datasets`; sound by `wave`; texts of Python's own library."""

from __future__ import annotations

import glob
import hashlib
import io
import itertools
import os
import sys
import sysconfig
import wave
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

TABLES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}  # else a file is one text
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# The default corpus: programs, not their tests, tables or generated files.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
_MAX_FILE_BYTES, _MAX_CORPUS_BYTES = 1 << 18, 1 << 24
_MAX_TEXT_BYTES = 2**31 - 2  # of a cell of Arrow
_HELD_OUT_ONE_IN = 50
_DIGEST_ROWS = 64  # of a stream
_CONVERT = "convert it, for example by `ffmpeg -i in.wav -c:a pcm_s16le out.wav`"


def standard_library() -> tuple[list[str], list[str]]:
    """Python's own standard-library sources, in sorted order: texts to train on, and held-out ones.

    About one file in 50 is held out, chosen by a hash of its relative path: the same ones on every machine.

    Raises:
        ValueError: this Python has no library sources on disk.
    """
    root, total = Path(sysconfig.get_path("stdlib")), 0
    train: list[str] = []
    held_out: list[str] = []
    for name in sorted((path.relative_to(root) for path in root.rglob("*.py")), key=Path.as_posix):
        size = (root / name).stat().st_size
        if _SKIPPED_FOLDERS.intersection(name.parts) or name.name.startswith("_sysconfigdata"):
            continue
        if not 0 < size <= _MAX_FILE_BYTES or total + size > _MAX_CORPUS_BYTES:
            continue
        total += size
        digest = hashlib.blake2b(name.as_posix().encode(), digest_size=8).digest()
        part = train if int.from_bytes(digest, "big") % _HELD_OUT_ONE_IN else held_out
        part.append((root / name).read_bytes().decode(errors="replace"))
    if not train or not held_out:
        raise ValueError(f"no standard-library sources below {root}; give --train_file")
    return train, held_out


def files_of(paths: Sequence[str]) -> list[str]:
    """The paths, and for a folder all files below it, sorted, without hidden ones; empty files are left out."""
    found = chain.from_iterable(_below(path) if path.is_dir() else [path] for path in map(Path, paths))
    return [str(path) for path in found if not path.exists() or (path.is_file() and path.stat().st_size)]


def _below(folder: Path) -> list[Path]:
    """What is no folder, also in linked ones, of which each is entered once."""
    found, entered = list[Path](), set[str]()
    for place, folders, files in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in entered:
            folders.clear()
            continue
        entered.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(place, name) for name in files if not name.startswith(".")]
    return sorted(found)


def describe_files(paths: Sequence[str]) -> str:
    """Their names, and for a folder how many files it stands for."""
    counts = {path: f" ({len(files_of([path])):,} files)" for path in paths if Path(path).is_dir()}
    return ", ".join(f"{Path(path).name or path}{counts.get(path, '')}" for path in paths)


def check_folders(train: Sequence[str], held_out: Sequence[str], output_dir: str) -> None:
    """Raises ValueError for a training folder that holds files which are held out, or those that the run will write.

    A file that is named twice, as training and as held-out text, was meant so.
    """
    for folder in filter(Path.is_dir, map(Path, train)):
        inside = {Path(file).resolve() for file in files_of([str(folder)])}
        for file in files_of(held_out):
            if Path(file).resolve() in inside:
                raise ValueError(f"the training folder {str(folder)!r} holds {file!r}, which is held out: move one")
        run, place = Path(output_dir).resolve(), folder.resolve()
        if run.is_relative_to(place) and not any(part.startswith(".") for part in run.relative_to(place).parts):
            raise ValueError(
                f"the training folder {str(folder)!r} holds output_dir {output_dir!r}, which would be read: move one"
            )


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raises ValueError, which names `what` and the reason behind it, for what `datasets` raises."""
    try:
        yield
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:  # ValueErrors of Arrow, UTF-8
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        raise ValueError(f"cannot read {what}: {reason}") from error


def load(what: str, builder: str, config_name: str | None = None, **options: Any) -> Any:
    """`datasets.load_dataset`. Raises ValueError as `reading`."""
    with reading(what):
        return datasets.load_dataset(builder, config_name, **options)


def _options(builder: str, text: str | None, label: str | None, streaming: bool) -> dict[str, Any]:
    """For `datasets`: a text file is one row; in csv only an empty cell is missing, and these columns are text."""
    if builder == "csv":  # by default NA, null, None, nan .. are missing too, and 007 is a number
        converters: dict[str, Any] = {text: str} if text else {}
        converters |= {label: _stripped} if label and not streaming else {}
        options = {"keep_default_na": False, "na_values": [""], "converters": converters or None}
        if not (text or streaming):  # by default a column of integers has no fraction after 10,000 rows
            options["chunksize"] = sys.maxsize
        return options
    return {"sample_by": "document"} if builder == "text" else {}  # by default a row is a line without end


def _stripped(cell: str) -> str | None:
    return cell.strip() or None


def _labels_of_csv(rows: Any, label: str | None, names: Sequence[str], what: str) -> Any:
    """Rows of csv files, whose labels are numbers where all of them are, in all files and rows, and text otherwise.

    (Left to itself, `datasets` decides for every 10,000 rows anew.)

    Args:
        names: of classes. Labels that are all among them are text, whatever they look like.
    Raises:
        ValueError: numbers, but not all of them integers.
    """
    found = {*rows.unique(label)} - {None} if label in rows.column_names else set()
    if found <= {*names}:
        return rows
    with suppress(pa.ArrowInvalid):
        return rows.cast_column(label, datasets.Value("int64"))
    with suppress(pa.ArrowInvalid):
        pa.array(found).cast(pa.float64())
        fractions = [value for value in found if not value.removeprefix("-").isdigit()]
        wrong = min(fractions, default=max(found, key=len))  # one that is too long
        raise ValueError(f"label column {label!r} of {what} must hold integers from 0, or text, got {wrong!r}")
    return rows


def _builder(path: str) -> str:
    """Which of `datasets` reads it, compressed or not."""
    name = Path(path.lower())
    return TABLES.get(Path(name.stem).suffix if name.suffix in _COMPRESSED else name.suffix, "text")


def open_files(
    paths: Sequence[str],
    streaming: bool,
    what: str = "",
    column: str | None = None,
    text: str | None = None,
    label: str | None = None,
    names: Sequence[str] = (),
) -> Any:
    """Local files, in the given order, as one data set: rows of parquet, json(l) and csv files; another file is a row.

    Args:
        what: to call them in errors. column: only this one, of text; files that are no tables have it too.
        text: a column of text among others. label: one of labels, and the names of classes that are known.
    Raises:
        ValueError: as `load`; there is nothing in them, or no such column.
    """
    what = what or describe_files(paths)
    found, parts = files_of(paths), []
    if absent := [path for path in found if not Path(path).exists()]:
        raise ValueError(f"cannot read {what}: there is no file {absent[0]!r}")
    if large := [path for path in found if _builder(path) == "text" and Path(path).stat().st_size > _MAX_TEXT_BYTES]:
        raise ValueError(f"cannot read {large[0]!r}: a text holds at most 2 GB; split it, as by `split -C 1G`")
    for builder, group in itertools.groupby(found, _builder):
        files = [glob.escape(str(Path(path).absolute())) for path in group]  # `datasets` takes patterns
        options = _options(builder, column or text, label, streaming)
        if builder == "csv" and column is not None:  # types of other columns may change after rows that have been read
            options["usecols"] = [column]
        options |= {"split": "train", "streaming": streaming}
        try:
            rows = load(what, builder, data_files=files, **options)
        except ValueError:
            if len(files) == 1:
                raise
            apart = [load(file, builder, data_files=[file], **options) for file in files]  # which one it was
            if column is None:
                raise
            with reading(what):  # none: their other columns differ
                rows = datasets.concatenate_datasets([only_text(part, column, what) for part in apart])
        if builder == "csv" and not streaming:
            rows = _labels_of_csv(rows, label, names, what)
        if builder == "text" and column not in (None, "text"):
            rows = rows.rename_column("text", column)
        parts.append(rows if column is None else only_text(rows, column, what))
    if not parts:
        raise ValueError(f"cannot read {what}: no file with anything in it")
    with reading(what):
        return parts[0] if len(parts) == 1 else datasets.concatenate_datasets([*map(_with_short_text, parts)])


def _with_short_text(rows: Any) -> Any:
    """Rows whose text is of Arrow's `string`, as json's is; that of csv is of `large_string`."""
    large = [name for name, kind in (rows.features or {}).items() if kind == datasets.Value("large_string")]
    string = dict.fromkeys(large, datasets.Value("string"))
    return rows.cast(datasets.Features({**rows.features, **string})) if large else rows


def only_text(rows: Any, column: str, what: str) -> Any:
    """Rows with that column alone. Raises ValueError if there is no such column, or it does not hold text."""
    with reading(what):
        rows = rows.select_columns([column])
        kind = getattr(features_of(rows).get(column, datasets.Value("null")), "dtype", "values of another kind")
    if kind not in ("string", "large_string", "null"):
        raise ValueError(f"column {column!r} of {what} must hold text, got {kind}")
    other = kind == "large_string" or (kind == "null" and isinstance(rows, datasets.Dataset))  # of csv; of no text
    return rows.cast_column(column, datasets.Value("string")) if other else rows


def cut_end(rows: datasets.Dataset, column: str, fraction: float) -> tuple[datasets.Dataset, datasets.Dataset]:
    """The rows, and as much of their end by the bytes of that column of text; the text at the cut is in two pieces."""
    sizes = pc.fill_null(pc.binary_length(rows.with_format("arrow")[:].column(column)), 0).to_numpy()
    ends = np.append(0, sizes).cumsum()
    cut = ends[-1] - int(ends[-1] * fraction)
    at = max(0, int(np.searchsorted(ends, cut)) - 1)  # the row that holds the last byte before the cut
    row, size = rows.select([at]), int(cut - ends[at])  # by `map`, which keeps a large text on disk
    first, last = (
        row.map(_piece, fn_kwargs={"column": column, "size": size, "end": end}, features=rows.features)
        for end in (False, True)
    )
    before, after = (
        [rows.select(part)] if part else [] for part in (range(at), range(at + 1, len(rows)))
    )  # the library selects no empty range
    return datasets.concatenate_datasets([*before, first]), datasets.concatenate_datasets([last, *after])


def _piece(row: dict[str, Any], column: str, size: int, end: bool) -> dict[str, str]:
    """The first bytes of a text, without a part of a character, or all that follows."""
    text = (row[column] or "").encode()
    head = text[:size].decode(errors="ignore")
    return {column: text[len(head.encode()) :].decode() if end else head}


def features_of(rows: Any) -> datasets.Features:
    """Types of the columns; those of the first row, where a stream does not know its own."""
    return rows.features or datasets.Dataset.from_list(list(itertools.islice(rows, 1))).features


def load_splits(
    name: str,
    config_name: str | None,
    streaming: bool,
    text: str | None = None,
    label: str | None = None,
    names: Sequence[str] = (),
) -> Any:
    """Splits of a data set on the Hub, in a local folder, or of one local file (its only split is "train").

    In a local folder of text files a file is a row; for a folder of sound see `sound_splits`.

    Args:
        text: the column of text, if there is one. label: that of labels, and the names of classes that are known.
    Raises:
        ValueError: it cannot be read.
    """
    if Path(name).is_file():
        return {"train": open_files([name], streaming, text=text, label=label, names=names)}
    what = f"dataset {name!r}"
    with reading(what):
        builder, local = datasets.load_dataset_builder(name, config_name), Path(name).is_dir()
        if local and builder.name == "audiofolder":
            return sound_splits(name, builder, streaming)
    is_csv = builder.name == "csv"
    options = _options(str(builder.name), text, label, streaming) if local or is_csv else {}
    splits = load(what, name, config_name, streaming=streaming, **options)
    if is_csv and not streaming:
        splits = {split: _labels_of_csv(rows, label, names, what) for split, rows in splits.items()}
    return splits


def sound_splits(name: str, builder: Any, streaming: bool) -> dict[str, Any]:
    """Splits of a local folder of sound as `datasets` finds them, columns audio and label.

    Label is the name of the folder that a file lies in, as text. (`datasets` itself cannot even list sound without
    torchcodec, so it says which files there are, and `decode_wav` reads them.)

    Raises:
        ValueError: sound in another format than WAV, a table of metadata, or sound that `datasets` leaves out.
    """
    splits, taken = dict[str, Any](), set[Path]()
    for split, files in builder.config.data_files.items():
        paths = [path for path in map(Path, files) if path.suffix.lower() in builder.EXTENSIONS]
        if tables := [str(file) for file in files if Path(file).stem == "metadata"]:
            raise ValueError(f"a sound's label is the name of its folder, so take out {tables[0]!r}, which is not read")
        if other := [str(path) for path in paths if path.suffix.lower() != ".wav"]:
            raise ValueError(f"sound must be WAV files, got {other[0]!r}: {_CONVERT}")
        sounds = [{"bytes": None, "path": str(path)} for path in paths]
        rows = datasets.Dataset.from_dict({"audio": sounds, "label": [path.parent.name for path in paths]})
        splits[str(split)] = rows.to_iterable_dataset() if streaming else rows
        taken |= {path.resolve() for path in paths}
    below = [path for path in files_of([name]) if Path(path).suffix.lower() in builder.EXTENSIONS]
    if left := [path for path in below if Path(path).resolve() not in taken]:
        raise ValueError(
            f"{left[0]!r}, as {len(left):,} of {len(below):,} files, is in no split of `datasets`: it enters no linked "
            "folder, and where the name of a file or folder holds train, test, dev or valid, it leaves out all others"
        )
    return splits


def is_sound(value: Any) -> bool:
    """Whether a cell holds a file of sound."""
    return isinstance(value, dict) and set(value) == {"bytes", "path"}


def decode_wav(value: dict[str, Any], where: str) -> tuple[np.ndarray, int]:
    """Samples (n, channels) float32 in [-1, 1), and the sampling rate.

    Raises:
        ValueError: the file is absent, broken, or not PCM of 8, 16, 24 or 32 bits.
    """
    path, data = value["path"], value["bytes"]
    where = f"{where}, {path}" if path else where
    try:
        with wave.open(str(path) if data is None else io.BytesIO(data), "rb") as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            if width > 4:
                raise wave.Error(f"{8 * width} bits a sample")
            raw = np.frombuffer(file.readframes(file.getnframes()), np.uint8)
    except (wave.Error, EOFError, OSError) as error:
        raise ValueError(f"{where}: is no WAV file of PCM: {error or 'it ends too early'}; {_CONVERT}") from error
    raw = raw[: len(raw) // (width * channels) * width * channels].reshape(-1, width)
    wide = np.zeros((len(raw), 4), np.uint8)  # the sample in the highest bytes of 32 bits
    wide[:, 4 - width :] = raw ^ 128 if width == 1 else raw  # 8 bits are unsigned
    return (wide.view("<i4") / 2.0**31).astype(np.float32).reshape(-1, channels), rate


def read_files(paths: Sequence[str], column: str = "text") -> Iterator[str]:
    """Texts of local files that are not empty. Raises ValueError as `open_files`."""
    return filter(None, open_files(paths, streaming=False, column=column)[column])


def items_of(rows: Any, source: str) -> Iterator[dict[str, Any]]:
    """Rows of a data set. Raises ValueError if it cannot be read on."""
    with reading(source):
        yield from rows


def stream_digest(rows: Any, paths: Sequence[str]) -> str:
    """Changes with the sizes of those of the paths that are local files, and with the first rows."""
    sizes = [Path(path).stat().st_size for path in files_of(paths) if Path(path).exists()]
    return hashlib.sha256(repr([sizes, *itertools.islice(rows, _DIGEST_ROWS)]).encode()).hexdigest()
