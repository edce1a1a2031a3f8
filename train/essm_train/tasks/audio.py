# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Spoken words as log-mel frames, for essm-prepare-audio, which says what a row holds. A row depends on its clip only.

`Speech4` are four words of Speech Commands V2 as 8 kHz mu-law codes, a task of our own; `SpeechCommands` is the
unpacked official archive, one folder of 16 kHz wav files per word. Its frames are those of the feature extractor in
hub_configs/essm-audio, which knows that rate alone.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, Features, List, Value
from transformers import Speech2TextFeatureExtractor
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from essm_train.arguments import arg
from essm_train.data.documents import decode_wav
from essm_train.files import sha256_of
from essm_train.tasks.shards import SPLITS, RowGenerator

SPEECH4_WORDS = ("yes", "no", "up", "down")
SC10_WORDS = (*SPEECH4_WORDS, "left", "right", "on", "off", "stop", "go")
SC10_URL = "http://download.tensorflow.org/data/speech_commands_v0.02.tar.gz"
NUM_BANDS, NUM_FRAMES = 40, 98
LOWEST_HZ = 20.0
_MEL_FLOOR = 1e-6  # power of a window of mu-law's zero, a constant of 1e-4; below it all is silence

Clip = tuple[np.ndarray, int, str]  # samples (n,), class and name


def mu_law_decode(codes: np.ndarray) -> np.ndarray:
    """Codes 0..255 of continuous mu-law companding to float32 samples in [-1, 1].

    A code c stands for y = 2 c / 255 - 1, and x = sign(y) ((1 + 255)^|y| - 1) / 255.
    """
    y = 2 * np.arange(256) / 255 - 1
    return (np.sign(y) * np.expm1(np.abs(y) * np.log1p(255)) / 255).astype(np.float32)[codes]


@functools.cache
def _extractor() -> Speech2TextFeatureExtractor:
    return Speech2TextFeatureExtractor(NUM_BANDS, sampling_rate=16000, num_mel_bins=NUM_BANDS)


@functools.cache
def _front_end() -> tuple[np.ndarray, np.ndarray]:
    """At 8 kHz: a window of 25 ms, and (257, 40) mel filters between 20 Hz and half the sampling rate."""
    return window_function(200, "hann"), mel_filter_bank(257, NUM_BANDS, LOWEST_HZ, 4000.0, 8000)


def log_mel(samples: np.ndarray) -> np.ndarray:
    """Logarithm of the power in 40 mel bands, every 10 ms: (n,) at 8 kHz -> (frames, 40) float32."""
    window, filters = _front_end()
    options: dict[str, Any] = {"power": 2.0, "center": False, "mel_floor": _MEL_FLOOR, "log_mel": "log"}
    return spectrogram(samples, window, 200, 80, 512, mel_filters=filters, **options).T


def clip_frames(samples: np.ndarray, sampling_rate: int) -> np.ndarray:
    """(n,) at most a second of sound -> (frames, 40) float16, at most 98, normalised per band.

    At 8 kHz there are always 98, 0 after the clip's end.

    Raises:
        ValueError: less than one window of 25 ms, more than one second, or numbers that are not finite.
    """
    least = sampling_rate // 40
    if not (least <= len(samples) <= sampling_rate and np.isfinite(samples).all()):
        raise ValueError(f"a clip must have {least} to {sampling_rate} finite samples, got {len(samples)}")
    if sampling_rate == _extractor().sampling_rate:
        with np.errstate(all="ignore"):  # what has no deviation, as digital silence, is divided by 0
            real = _extractor()(samples, sampling_rate=sampling_rate)["input_features"][0]
        return np.where(np.isfinite(real), real, 0.0)[:NUM_FRAMES].astype(np.float16)
    real = log_mel(samples).astype(np.float64)
    deviation = real.std(0)
    real = (real - real.mean(0)) / np.where(deviation > 1e-3, deviation, 1.0)  # a silent band stays 0
    frames = np.zeros((NUM_FRAMES, NUM_BANDS), np.float16)
    frames[: len(real)] = real[:NUM_FRAMES]
    return frames


class SpeechFrames(RowGenerator):
    """Clips as frames.

    Attributes:
        words: the classes. sampling_rate: Hz. sizes: rows by split. source: changes if the clips do.
    """

    words: ClassVar[tuple[str, ...]]
    sampling_rate: ClassVar[int]
    sizes: Mapping[str, int]
    source: str
    rows_per_shard = 2000

    def read(self, split: str, rows: range) -> list[Clip]:
        raise NotImplementedError

    def size(self, split: str) -> int:
        return self.sizes[split]

    @property
    def parameters(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("words", "sampling_rate", "sizes", "source")}

    def rows(self, split: str, indices: range) -> pa.Table:
        """Columns frames (lists of 40 float16), label and clip. Raises ValueError naming a clip that cannot be."""
        columns: dict[str, list] = {"frames": [], "label": [], "clip": []}
        for samples, label, name in self.read(split, indices):
            try:
                columns["frames"].append(clip_frames(samples, self.sampling_rate))
            except ValueError as error:
                raise ValueError(f"{name} of {self.name}-{split}: {error}") from error
            columns["label"].append(label)
            columns["clip"].append(name)
        classes = ClassLabel(names=list(self.words))
        features = Features({"frames": List(List(Value("float16"))), "label": classes, "clip": Value("string")})
        return Dataset.from_dict(columns, features).data.table


@dataclass
class Speech4(SpeechFrames):
    """Frames of the files speech_commands_4words-{train,validation,test}.parquet of a folder.

    Raises:
        FileNotFoundError: one is not there. ValueError: one lacks a column.
    """

    name, words, sampling_rate = "speech4", SPEECH4_WORDS, 8000
    COLUMNS: ClassVar = ("mulaw_8khz", "label", "num_samples", "clip")

    data_dir: str = arg("data", "Where the clips are.")

    def __post_init__(self) -> None:
        self.paths = {split: Path(self.data_dir) / f"speech_commands_4words-{split}.parquet" for split in SPLITS}
        for path in self.paths.values():
            schema = pq.read_schema(path)
            if missing := set(self.COLUMNS) - set(schema.names):
                raise ValueError(f"{path} has no column {', '.join(sorted(missing))}")
            codes, *numbers = (schema.field(name).type for name in self.COLUMNS[:3])
            if getattr(codes, "value_type", None) != pa.uint8() or not all(map(pa.types.is_integer, numbers)):
                raise ValueError(f"{path}: mulaw_8khz must be lists of uint8, label and num_samples integers")
        self.sizes = {split: pq.read_metadata(path).num_rows for split, path in self.paths.items()}
        self.source = " ".join(map(sha256_of, self.paths.values()))

    def read(self, split: str, rows: range) -> list[Clip]:
        table = pq.read_table(self.paths[split], columns=list(self.COLUMNS))
        clips = []
        for codes, *rest in zip(*table.slice(rows.start, len(rows)).columns):
            label, length, name = (value.as_py() for value in rest)
            count, classes = len(codes) if codes.is_valid else 0, len(self.words)
            if label not in range(classes) or length not in range(1, 16001) or not 0 < count <= 8000:
                raise ValueError(
                    f"{name} of {self.name}-{split}: label must be in [0, {classes}), num_samples in [1, 16000] and "
                    f"codes 1 to 8000, got label {label}, num_samples {length} and {count} codes"
                )
            real = -(-length // 2)  # num_samples counts at 16 kHz; what follows is padding
            clips.append((mu_law_decode(np.asarray(codes.values)[:real]), label, name))
        return clips


@dataclass
class SpeechCommands(SpeechFrames):
    """Frames of words of the unpacked archive of Speech Commands V2, split as its two lists say.

    Raises:
        FileNotFoundError: the folder, a list or a word is not there.
    """

    name, words, sampling_rate = "sc10", SC10_WORDS, 16000
    LISTS: ClassVar = {"validation": "validation_list.txt", "test": "testing_list.txt"}

    data_dir: str = arg("data/speech_commands", "The folder of the two lists and of a folder of wav files per word.")

    def __post_init__(self) -> None:
        folder, words = Path(self.data_dir), self.words
        if absent := [name for name in (*self.LISTS.values(), *words) if not (folder / name).exists()]:
            raise FileNotFoundError(
                f"{str(folder)!r} lacks {', '.join(absent)}: fetch {SC10_URL} and unpack it into that folder "
                f"(`mkdir -p {folder} && tar -xzf speech_commands_v0.02.tar.gz -C {folder}`)"
            )
        listed = {split: (folder / file).read_text(encoding="utf-8").split() for split, file in self.LISTS.items()}
        files = {split: {line for line in lines if line.split("/")[0] in words} for split, lines in listed.items()}
        found = {f"{word}/{path.name}" for word in words for path in (folder / word).glob("*.wav")}
        files["train"] = found - files["validation"] - files["test"]
        self.files = {split: sorted(files[split]) for split in SPLITS}
        self.sizes = {split: len(names) for split, names in self.files.items()}
        lines = (f"{split} {n} {(folder / n).stat().st_size}\n" for split in SPLITS for n in self.files[split])
        self.source = hashlib.sha256("".join(lines).encode()).hexdigest()

    def read(self, split: str, rows: range) -> list[Clip]:
        names = self.files[split][rows.start : rows.stop]
        return [
            (read_wav(Path(self.data_dir, n), self.sampling_rate), self.words.index(n.split("/")[0]), n) for n in names
        ]


def read_wav(path: Path, sampling_rate: int) -> np.ndarray:
    """float32 samples in [-1, 1), at most a second. Raises ValueError for another format than PCM mono at that rate."""
    samples, rate = decode_wav({"path": path, "bytes": None}, "a clip")
    if samples.shape[1] != 1 or rate != sampling_rate:
        raise ValueError(f"{path} must hold one channel at {sampling_rate} Hz, got {samples.shape[1]} at {rate} Hz")
    return samples[:sampling_rate, 0]
