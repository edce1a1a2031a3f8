# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""From the value in a column to an array, and from samples to a batch: text, numbers or sound.

A reader checks a value and names the row that is wrong; what it read is cut to `max_length` when it is drawn, and
scaled and padded when it is put into a batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from essm_train.data.documents import decode_wav, is_sound
from essm_train.data.tokens import vocabulary_size
from modeling_essm import build_byte_tokenizer

FEATURES = "features.json"  # beside a model of features
_RECORD = {"multiplier": float, "offset": float, "max_length": int, "frame_length": int, "sampling_rate": int}
_RECORD |= {"columns": list}


class Sample(NamedTuple):
    """Values (L,) token ids, or (L, F) features as they are stored; and the class."""

    values: np.ndarray
    label: int


class TextReader:
    """Text to token ids: its UTF-8 bytes, or what a tokenizer of transformers makes of it."""

    input_name = "input_ids"

    def __init__(self, column: str, max_length: int, tokenizer: Any = None):
        self.column, self.max_length, self.is_bytes = column, max_length, tokenizer is None
        self.tokenizer = tokenizer or build_byte_tokenizer()
        self.name = "bytes" if self.is_bytes else f"tokens of {self.tokenizer.name_or_path}"
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)  # any id will do: padding is masked
        self.pad_id = next(i for i in ids if i is not None)

    def check(self, value: Any, where: str) -> bytes:
        """The row's text. Raises ValueError if it is empty or no text."""
        if not isinstance(value, str):
            raise ValueError(f"{where}: text_column {self.column!r} must hold text, got {type(value).__name__}")
        if not value:
            raise ValueError(f"{where}: text_column {self.column!r} holds an empty text")
        return value.encode()

    def length(self, value: Any, where: str) -> int:
        """Tokens before the cut. Raises ValueError as `read`."""
        return len(value.encode()) if self.is_bytes else len(self._tokens(value, where))

    def read(self, value: Any, where: str) -> np.ndarray:
        """(L,) at most max_length token ids. Raises ValueError as `check`, or if there is no token."""
        text = self.check(value, where)
        if self.is_bytes:  # faster than by the tokenizer
            return np.frombuffer(text[: self.max_length], np.uint8)
        return np.array(self._tokens(value, where, truncation=True, max_length=self.max_length), np.int32)

    def _tokens(self, value: str, where: str, **options: Any) -> list[int]:
        if not (ids := self.tokenizer(value, verbose=False, **options)["input_ids"]):
            raise ValueError(f"{where}: the tokenizer makes no token of its text")
        return ids

    def convert(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64))

    @property
    def config_fields(self) -> dict[str, Any]:
        """What the model's config must say."""
        special = {f"{name}_token_id": getattr(self.tokenizer, f"{name}_token_id") for name in ("bos", "eos")}
        return {"vocab_size": vocabulary_size(self.tokenizer), "pad_token_id": self.pad_id, **special}

    def save_pretrained(self, folder: Path) -> None:
        """The tokenizer, which pads and cuts as it was done here."""
        self.tokenizer.padding_side, self.tokenizer.model_max_length = "right", self.max_length
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.convert_ids_to_tokens(self.pad_id)
        self.tokenizer.save_pretrained(folder)


class FeatureReader:
    """A flat sequence of numbers, one feature per position, a list of frames of F features each, or a WAV file.

    Args:
        num_features: F, or the channels of a sound; None for a flat sequence. dtype: of the column, for `datasets`.
        scale: "auto" maps columns of type uint8 onto [-1, 1] and leaves other numbers as they are; "uint8" maps
            [0, 255] onto [-1, 1] whatever the type; a number multiplies. A sound lies in [-1, 1) before it.
        frame_length: steps of a row that one position of the model reads, all their numbers; an incomplete end is
            left out.
        sampling_rate: of all sounds; None for numbers.
        columns: those that `column` stands for, if it is a pattern.
    """

    input_name, pad_id = "input_features", 0

    def __init__(
        self,
        column: str,
        max_length: int,
        num_features: int | None,
        dtype: str | None,
        scale: str,
        frame_length: int | None = None,
        sampling_rate: int | None = None,
        columns: Sequence[str] = (),
    ):
        self.column, self.max_length, self.num_features = column, max_length, num_features or 1
        self.frame_length, self.sampling_rate, self.columns = frame_length or 1, sampling_rate, [*columns]
        self.width = self.num_features * self.frame_length
        self.is_uint8 = scale == "uint8" or (scale == "auto" and dtype == "uint8")
        self.multiplier = 1 / 127.5 if self.is_uint8 else 1.0 if scale == "auto" else float(scale)
        self.offset = -1.0 if self.is_uint8 else 0.0

    def check(self, value: Any, where: str) -> np.ndarray:
        """(L, F * frame_length). Raises ValueError for anything but finite numbers of that shape, or such a sound."""
        where = f"{where}: features_column {self.column!r}"
        array, rate = as_array(value, where)
        if rate != self.sampling_rate:
            raise ValueError(
                f"{where}{', ' + str(value['path']) if rate else ''}: sound must have {self.sampling_rate} samples a "
                f"second, as in the first row (or the model), got {rate}: convert it, for example by `ffmpeg -i in.wav "
                f"-ar {self.sampling_rate} out.wav`"
            )
        array = array[:, None] if array.ndim == 1 else array
        if array.ndim != 2 or array.shape[1] != self.num_features:
            raise ValueError(
                f"{where} must hold frames of {self.num_features} numbers, as in the first row, got an array of shape "
                f"{array.shape}"
            )
        with np.errstate(over="ignore"):
            finite = np.isfinite(array.astype(np.float32))
        if not finite.all():
            raise ValueError(
                f"{where} must hold finite numbers, got {array[~finite][0]}; in float32 they end at 3.4e38"
            )
        if self.is_uint8 and (wrong := (array < 0) | (array > 255)).any():
            raise ValueError(f"{where} must hold numbers in [0, 255] for feature_scale uint8, got {array[wrong][0]}")
        if (frames := len(array) // self.frame_length) == 0:
            raise ValueError(f"{where} holds {len(array)} steps, and frame_length is {self.frame_length}")
        return array[: frames * self.frame_length].reshape(frames, self.width)

    def length(self, value: Any, where: str) -> int:
        """Positions before the cut. Raises ValueError as `check`."""
        return len(self.check(value, where))

    def read(self, value: Any, where: str) -> np.ndarray:
        """(L, F) the first max_length positions, as they are stored. Raises ValueError as `check`."""
        return self.check(value, where)[: self.max_length]

    def convert(self, values: np.ndarray) -> Tensor:
        scaled = values * np.float32(self.multiplier) + np.float32(self.offset)
        return torch.from_numpy(scaled.astype(np.float32))

    @property
    def config_fields(self) -> dict[str, Any]:
        """What the model's config must say."""
        return {"num_input_features": self.width}

    @property
    def name(self) -> str:
        unit = "numbers" if self.width == 1 else f"frames of {self.width} numbers"
        return f"{unit}, x -> {self.multiplier:.6g} x {self.offset:+g}"

    def take(self, record: dict[str, Any]) -> None:
        """Do what features.json says; it may be empty."""
        for name in ("multiplier", "offset", "sampling_rate"):
            setattr(self, name, record.get(name, getattr(self, name)))
        self.is_uint8 = (self.multiplier, self.offset) == (1 / 127.5, -1.0)

    def save_pretrained(self, folder: Path) -> None:
        """features.json: what has to be done to numbers before the model reads them, and which columns they are."""
        record: dict[str, Any] = {name: getattr(self, name) for name in ("multiplier", "offset", "max_length")}
        record |= {"frame_length": self.frame_length} if self.frame_length > 1 else {}
        record |= {"sampling_rate": self.sampling_rate} if self.sampling_rate else {}
        record |= {"columns": self.columns} if self.columns else {}
        (folder / FEATURES).write_text(json.dumps(record) + "\n", encoding="utf-8")


Reader = TextReader | FeatureReader


def as_array(value: Any, where: str) -> tuple[np.ndarray, int | None]:
    """Numbers of a row, from Arrow, Python lists or a sound, and the sampling rate of that.

    Raises:
        ValueError: no numbers, or ragged ones; or see `decode_wav`.
    """
    if is_sound(value):
        return decode_wav(value, where)
    if isinstance(value, pa.Array):
        value = value.to_numpy(zero_copy_only=False)
    try:
        array = np.asarray(value)
        if array.dtype == object and array.size and not np.isscalar(array.flat[0]):  # lists inside of Arrow's lists
            array = np.stack([np.asarray(frame) for frame in array])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} must hold numbers, or frames of one width: {error}") from error
    if array.ndim == 0 or (array.size and array.dtype.kind not in "buif"):
        wrong = [entry for entry in array.ravel().tolist() if not isinstance(entry, (int, float))]
        raise ValueError(f"{where} must hold numbers, got {wrong[:1] or array.tolist()}")
    return array, None


def read_record(folder: Path) -> dict[str, Any]:
    """features.json of a saved model; empty if there is none. Raises ValueError if it is damaged."""
    path = folder / FEATURES
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return {name: type_(record[name]) for name, type_ in _RECORD.items() if name in record}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} must hold numbers for {', '.join(_RECORD)}: {error}") from error
