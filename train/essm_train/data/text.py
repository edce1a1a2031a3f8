# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Text as tokens, cut into blocks for training and evaluation.

A stream is a one-dimensional array of token ids: the tokens of each document, then <eos>. A block is a window of
`block_size` tokens, and neighbouring blocks share one token: the first of a block is context only, so that every
token of the stream but its very first is a target exactly once, seen with the tokens of its own block before it.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from essm_train.data.samples import MapSamples, SampleSource, StreamSamples
from torch import Tensor
from transformers.utils import cached_file

from modeling_essm import build_byte_tokenizer
from modeling_essm.training.byte_tokenizer import EOS_ID, PAD_ID

NUM_BYTES = 256  # ids below are bytes
HELD_OUT_FRACTION = 0.1  # of a text that comes without a validation part: its end
TABLES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}  # else a file is one document
_FINGERPRINT_DOCUMENTS = 64  # of a data set too long to be read whole
# Names that an end-of-sequence token has in tokenizers that do not say which of their tokens it is.
_END_TOKENS = ("<eos>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "[EOS]")

# The default corpus: programs, not their tests, tables or generated files.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
_MAX_FILE_BYTES, _MAX_CORPUS_BYTES = 1 << 18, 1 << 24
_HELD_OUT_ONE_IN = 50

Document = tuple[str, str | bytes]  # where it comes from, for error messages, and its text


# ---------------------------------------------------------------------------------------------------------------------
# Tokens.


class ByteEncoder:
    """Every byte is a token; any file is valid."""

    vocab_size, pad_id, dtype = 259, PAD_ID, np.uint16
    special_ids = (PAD_ID, EOS_ID - 1, EOS_ID)
    name = "bytes"

    def __call__(self, document: Document) -> tuple[np.ndarray, int]:
        """Token ids with <eos> at the end, and the number of bytes they stand for."""
        text = document[1].encode() if isinstance(document[1], str) else document[1]
        return np.append(np.frombuffer(text, np.uint8), np.uint16(EOS_ID)).astype(np.uint16), len(text)

    def save_pretrained(self, folder: Path, model_max_length: int) -> None:
        build_byte_tokenizer(model_max_length=model_max_length).save_pretrained(folder)


class TokenizerEncoder:
    """Any tokenizer of transformers that has an end-of-sequence token.

    Raises:
        ValueError: the tokenizer has none; or (called) a document is not UTF-8.
    """

    def __init__(self, tokenizer: Any, name: str):
        if tokenizer.eos_token_id is None:
            raise ValueError(f"tokenizer {name!r} has no end-of-sequence token to put between documents")
        self.tokenizer, self.name, self.vocab_size = tokenizer, name, len(tokenizer)
        self.pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.special_ids = tuple(tokenizer.all_special_ids)
        self.dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    def __call__(self, document: Document) -> tuple[np.ndarray, int]:
        """As `ByteEncoder`."""
        source, text = document
        raw = text.encode() if isinstance(text, str) else text
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{source} is not UTF-8: byte {raw[error.start]:#04x} at position {error.start}; convert it, or train "
                "on bytes (without --tokenizer_name), which takes any file"
            ) from error
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array([*ids, self.tokenizer.eos_token_id], self.dtype), len(raw)

    def save_pretrained(self, folder: Path, model_max_length: int) -> None:
        self.tokenizer.save_pretrained(folder)


Encoder = ByteEncoder | TokenizerEncoder


def open_tokenizer(name: str) -> Any:
    """A tokenizer of the Hub, of a local folder, or of a tokenizer.json by itself. Raises ValueError if it is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not Path(name).is_file():
        try:
            return AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot load tokenizer {name!r}: {error}") from error
    try:
        return PreTrainedTokenizerFast(tokenizer_file=name, name_or_path=name)
    except Exception as error:  # the library's own type
        raise ValueError(
            f"cannot load tokenizer {name!r}: a file must be what `tokenizers.Tokenizer.save` writes: {error}"
        ) from error


def choose_tokenizer(args: Any) -> Any:
    """The tokenizer of a run: that of tokenizer_name, else that of the weights it starts from; None for bytes.

    Args:
        args: tokenizer_name, model_name_or_path and replace_tokenizer.
    Raises:
        ValueError: it cannot be loaded; or it gives tokens other ids than that of the weights, and replace_tokenizer
            does not say that this is meant.
    """
    own, weights = None, args.model_name_or_path
    if weights and any(
        cached_file(
            weights, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
        for file in ("tokenizer.json", "tokenizer_config.json")
    ):
        own = open_tokenizer(weights)
    if args.tokenizer_name is None:
        return None if own is None or own.get_vocab() == build_byte_tokenizer().get_vocab() else own
    tokenizer = open_tokenizer(args.tokenizer_name)
    if own is not None and own.get_vocab() != tokenizer.get_vocab() and not args.replace_tokenizer:
        raise ValueError(
            f"tokenizer_name must be the tokenizer of {weights!r}, whose weights know its {len(own)} tokens, got "
            f"{args.tokenizer_name!r} with {len(tokenizer)}: leave it out, or give --replace_tokenizer if the model "
            "shall learn other tokens"
        )
    return tokenizer


def with_end_token(tokenizer: Any) -> Any:
    """The same tokenizer with an end-of-sequence token: its own, a token of such a name, or else a new one, <eos>."""
    if tokenizer.eos_token_id is None:
        known = tokenizer.get_vocab()
        token = next((name for name in _END_TOKENS if name in known), _END_TOKENS[0])
        tokenizer.add_special_tokens({"eos_token": token})
    return tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# Documents.


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

    A folder stands for the files in it, see `files_of`.

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
    for row, item in enumerate(_items(rows, source)):
        text = _text_of(item, text_column, f"row {row} of {source}")
        if text:
            found = True
            yield f"row {row} of {source}", text
    if not found:
        raise ValueError(f"{source} holds no text in column {text_column!r}")


def _items(rows: Any, source: str) -> Iterator[dict[str, Any]]:
    """Rows of a data set. Raises ValueError if it cannot be read on."""
    count = 0
    try:
        for item in rows:
            yield item
            count += 1
    except ValueError as error:  # Arrow's and UTF-8's
        raise ValueError(f"cannot read {source} after {count} rows: {error}") from error


def _text_of(item: dict[str, Any], text_column: str, where: str) -> str | bytes | None:
    text = item[text_column]
    if text is not None and not isinstance(text, (str, bytes)):
        raise ValueError(f"{where}: column {text_column!r} must hold text, got {type(text).__name__}")
    return text


def check_column(rows: Any, text_column: str, source: str) -> None:
    """Raises ValueError if a data set has no such column, or a stream cannot be read."""
    columns = rows.column_names
    if columns is None:  # a stream of unknown features
        columns = list(next(_items(rows, source), {}))
    if text_column not in columns:
        raise ValueError(f"text_column must be one of {columns} of {source}, got {text_column!r}")


# ---------------------------------------------------------------------------------------------------------------------
# Blocks.


def to_stream(documents: Iterable[Document], encoder: Encoder) -> tuple[np.ndarray, float]:
    """(n,) token ids of every document followed by <eos>, and bytes per token that is not <eos>."""
    parts, num_bytes = [], 0
    for document in documents:
        ids, size = encoder(document)
        parts.append(ids)
        num_bytes += size
    stream = np.concatenate(parts)
    return stream, num_bytes / max(1, len(stream) - len(parts))


def hold_out_end(stream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split off the last tenth."""
    end = len(stream) - int(len(stream) * HELD_OUT_FRACTION)
    return stream[:end], stream[end:]


def cut_blocks(stream: np.ndarray, block_size: int) -> np.ndarray:
    """Windows that share one token with the next: (n,) -> view (num_blocks, block_size); an incomplete end is left out.

    Raises:
        ValueError: the stream is shorter than one block.
    """
    if len(stream) < block_size:
        raise ValueError(
            f"the training text is shorter than one block: it holds {len(stream)} tokens and block_size is {block_size}"
        )
    return np.lib.stride_tricks.sliding_window_view(stream, block_size)[:: block_size - 1]


def evaluation_blocks(stream: np.ndarray, block_size: int, max_blocks: int, pad_id: int = PAD_ID) -> Tensor:
    """At most `max_blocks` blocks spread evenly over the stream, its end padded with <pad>: (n, block_size) int64.

    Raises:
        ValueError: the stream holds nothing to predict.
    """
    if len(stream) < 3:  # context, target, <eos>
        raise ValueError(f"the validation text must hold at least 2 tokens, got {len(stream) - 1}")
    padding = -(len(stream) - 1) % (block_size - 1)
    blocks = cut_blocks(np.pad(stream, (0, padding), constant_values=pad_id), block_size)
    chosen = np.linspace(0, len(blocks) - 1, min(len(blocks), max_blocks)).round().astype(int)
    return torch.from_numpy(blocks[chosen].astype(np.int64))


def text_labels(input_ids: Tensor, special_ids: Sequence[int] = ByteEncoder.special_ids) -> Tensor:
    """Labels that score text only: special tokens become -100."""
    special = torch.isin(input_ids, torch.tensor(special_ids, device=input_ids.device))
    return input_ids.masked_fill(special, -100)


class PackBlocks:
    """Blocks out of a stream of rows; see `samples.Expand`. What a row leaves over begins the next block."""

    def __init__(self, encoder: Encoder, block_size: int, text_column: str):
        self.encoder, self.block_size, self.text_column = encoder, block_size, text_column
        self.end_epoch()

    def __call__(self, item: dict[str, Any]) -> list[np.ndarray]:
        text = _text_of(item, self.text_column, "a row of the training stream")
        if not text:
            return []
        tokens = np.concatenate([self._rest, self.encoder(("a row of the training stream", text))[0]])
        step = self.block_size - 1
        count = (len(tokens) - 1) // step
        self._rest = tokens[count * step :].copy()
        return [tokens[i * step : i * step + self.block_size].copy() for i in range(count)]

    def state_dict(self) -> dict[str, Any]:
        return {"rest": self._rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rest = state["rest"]

    def end_epoch(self) -> None:
        self._rest = np.empty(0, self.encoder.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# All of it together.


@dataclass
class TextData:
    """What a language model trains on.

    Attributes:
        source: training blocks (block_size,).
        held_out: (n, block_size) int64.
        bytes_per_token: of the held-out text; 1 for bytes.
        description: for people.
        fingerprint: changes if the training text does. Of a stream it covers the first rows and the files' sizes only.
    """

    source: SampleSource
    held_out: Tensor
    bytes_per_token: float
    description: str
    fingerprint: str


def load_text(args: Any, encoder: Encoder) -> TextData:
    """The training and held-out text that the arguments (`CLMArguments`) name.

    Raises:
        ValueError: anything about it that cannot work; see the functions above.
    """
    if args.streaming:
        return _load_stream(args, encoder)
    held_out: np.ndarray | None = None
    if args.train_file:
        stream, density = to_stream(read_files(args.train_file, args.text_column), encoder)
        if args.validation_file:
            held_out, density = to_stream(read_files(args.validation_file, args.text_column), encoder)
        description = describe_files(args.train_file)
    elif args.dataset_name:
        splits = load_splits(args.dataset_name, args.dataset_config_name, streaming=False)
        stream, density = to_stream(_split(splits, "train", args), encoder)
        if args.validation_file:
            held_out, density = to_stream(read_files(args.validation_file, args.text_column), encoder)
        elif "validation" in splits:
            held_out, density = to_stream(_split(splits, "validation", args), encoder)
        description = " ".join(filter(None, (args.dataset_name, args.dataset_config_name)))
    else:
        documents, held_out_documents = standard_library()
        stream, _ = to_stream(documents, encoder)
        held_out, density = to_stream(held_out_documents, encoder)
        description = "the sources of Python's standard library"
    if held_out is None:
        stream, held_out = hold_out_end(stream)
        description += f" (the last {HELD_OUT_FRACTION:.0%} held out)"
    return TextData(
        MapSamples(cut_blocks(stream, args.block_size), args.seed),
        evaluation_blocks(held_out, args.block_size, args.sweep_blocks, encoder.pad_id),
        density,
        f"{description}: {len(stream):,} tokens of {encoder.name}, {len(held_out):,} held out",
        hashlib.sha256(stream).hexdigest(),
    )


def _split(splits: Any, name: str, args: Any) -> Iterator[Document]:
    return documents_of(splits[name], args.text_column, f"split {name!r} of dataset {args.dataset_name!r}")


def _load_stream(args: Any, encoder: Encoder) -> TextData:
    open_train: Callable[[], Any]
    validation: Iterable[Document]
    if args.validation_file:
        validation = read_files(args.validation_file, args.text_column)
    if args.train_file:
        if not args.validation_file:
            raise ValueError("streaming needs validation_file: the end of a stream cannot be held out")
        paths = files_of(args.train_file)
        open_train = lambda: open_table(paths, streaming=True)  # noqa: E731
        description = describe_files(args.train_file)
        sizes = [Path(path).stat().st_size for path in paths if Path(path).is_file()]
    elif args.dataset_name:
        splits = load_splits(args.dataset_name, args.dataset_config_name, streaming=True)
        if "validation" not in splits and not args.validation_file:
            raise ValueError(
                f"streaming needs a split 'validation', and dataset {args.dataset_name!r} has only {sorted(splits)}: "
                "give validation_file"
            )
        open_train = lambda: load_splits(args.dataset_name, args.dataset_config_name, streaming=True)["train"]  # noqa: E731
        if not args.validation_file:
            validation = _split(splits, "validation", args)
        description, sizes = args.dataset_name, []
    else:
        raise ValueError("streaming needs train_file (parquet, json, jsonl or csv) or dataset_name")
    rows = open_train()
    check_column(rows, args.text_column, description)
    digest = hashlib.sha256(repr(sizes).encode())
    for item in islice(_items(rows, description), _FINGERPRINT_DOCUMENTS):
        digest.update(repr(item[args.text_column]).encode())
    tokens_wanted, parts = args.sweep_blocks * args.block_size, []
    num_tokens = num_bytes = 0
    for document in validation:
        ids, size = encoder(document)
        parts.append(ids)
        num_tokens, num_bytes = num_tokens + len(ids) - 1, num_bytes + size
        if num_tokens >= tokens_wanted:
            break
    pack = PackBlocks(encoder, args.block_size, args.text_column)
    return TextData(
        StreamSamples(open_train, pack, args.shuffle_buffer, args.seed),
        evaluation_blocks(np.concatenate(parts), args.block_size, args.sweep_blocks, encoder.pad_id),
        num_bytes / max(1, num_tokens),
        f"{description}, streamed as {encoder.name}; {num_tokens:,} tokens held out",
        digest.hexdigest(),
    )
