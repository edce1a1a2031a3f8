# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Sound as labelled rows: a folder of WAV files, one sub-folder per class, read by Python's own `wave` module."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import datasets
import numpy as np

_CONVERT = "convert it, for example by `ffmpeg -i in.wav -c:a pcm_s16le out.wav`"


def sound_splits(builder: Any, streaming: bool) -> dict[str, Any]:
    """Splits of a local folder of sound as `datasets` finds them, columns audio and label.

    Label is the name of the folder that a file lies in, as text. (`datasets` itself cannot even list sound without
    torchcodec, so it says which files there are, and `decode_wav` reads them.)

    Raises:
        ValueError: sound in another format than WAV.
    """
    splits: dict[str, Any] = {}
    for split, files in builder.config.data_files.items():
        paths = [path for path in map(Path, files) if path.suffix.lower() in builder.EXTENSIONS]
        if other := [str(path) for path in paths if path.suffix.lower() != ".wav"]:
            raise ValueError(f"sound must be WAV files, got {other[0]!r}: {_CONVERT}")
        sounds = [{"bytes": None, "path": str(path)} for path in paths]
        rows = datasets.Dataset.from_dict({"audio": sounds, "label": [path.parent.name for path in paths]})
        splits[str(split)] = rows.to_iterable_dataset() if streaming else rows
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
            raw = np.frombuffer(file.readframes(file.getnframes()), np.uint8)
    except (wave.Error, EOFError, OSError) as error:
        raise ValueError(f"{where}: is no WAV file of PCM: {error or 'it ends too early'}; {_CONVERT}") from error
    raw = raw[: len(raw) // (width * channels) * width * channels].reshape(-1, width)
    wide = np.zeros((len(raw), 4), np.uint8)  # the sample in the highest bytes of 32 bits
    wide[:, 4 - width :] = raw ^ 128 if width == 1 else raw  # 8 bits are unsigned
    return (wide.view("<i4") / 2.0**31).astype(np.float32).reshape(-1, channels), rate
