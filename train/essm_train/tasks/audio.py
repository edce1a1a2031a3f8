# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Spoken words as log-mel frames, for essm-prepare-audio.

`MuLawClips` are four words of Speech Commands V2 as 8 kHz mu-law codes, a task of our own; `SpeechCommands` is the
unpacked official archive, one folder of 16 kHz wav files per word.

Every clip becomes (98, 40) numbers: 40 mel bands of 25 ms windows, one each 10 ms of one second. Each band is
normalised to mean 0 and deviation 1 over the frames of the clip; frames after the end of a short clip are 0. A row is a
function of its clip only.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Features, List, Value
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from essm_train.data.sound import decode_wav
from essm_train.files import sha256_of
from essm_train.tasks.shards import SPLITS, RowGenerator

SPEECH4_WORDS = ("yes", "no", "up", "down")
SC10_WORDS = (*SPEECH4_WORDS, "left", "right", "on", "off", "stop", "go")
SC10_URL = "http://download.tensorflow.org/data/speech_commands_v0.02.tar.gz"
NUM_BANDS, NUM_FRAMES = 40, 98
LOWEST_HZ = 20.0
_MU = 255
_MEL_FLOOR = 1e-6  # power of a window of mu-law's zero, a constant of 1e-4; below it all is silence


# ---------------------------------------------------------------------------------------------------------------------
# Sound to frames.


def mu_law_decode(codes: np.ndarray) -> np.ndarray:
    """uint8 codes of continuous mu-law companding to float32 samples in [-1, 1].

    A code c stands for y = 2 c / 255 - 1, and x = sign(y) ((1 + 255)^|y| - 1) / 255. Raises ValueError for other types.
    """
    if codes.dtype != np.uint8:
        raise ValueError(f"mu-law codes must be uint8, got {codes.dtype}")
    return _mu_law_table()[codes]


@functools.cache
def _mu_law_table() -> np.ndarray:
    y = 2 * np.arange(256) / _MU - 1
    return (np.sign(y) * np.expm1(np.abs(y) * np.log1p(_MU)) / _MU).astype(np.float32)


@functools.cache
def _front_end(sampling_rate: int) -> tuple[int, int, int, np.ndarray, np.ndarray]:
    """(window length, hop, FFT length, window, (bins, 40) mel filters): 25 ms, 10 ms, bins of 15.6 Hz."""
    if sampling_rate % 8000 or sampling_rate < 8000:
        raise ValueError(f"sampling_rate must be a multiple of 8000 Hz, got {sampling_rate}")
    length, hop, fft = sampling_rate // 40, sampling_rate // 100, sampling_rate // 8000 * 512
    filters = mel_filter_bank(1 + fft // 2, NUM_BANDS, LOWEST_HZ, sampling_rate / 2, sampling_rate)
    return length, hop, fft, window_function(length, "hann"), filters


def log_mel(samples: np.ndarray, sampling_rate: int) -> np.ndarray:
    """Logarithm of the power in 40 mel bands between 20 Hz and half the sampling rate: (n,) -> (frames, 40) float32.

    Raises:
        ValueError: less than one window of 25 ms, more than one second, or not one channel of finite numbers.
    """
    length, hop, fft, window, filters = _front_end(sampling_rate)
    if samples.ndim != 1 or not length <= len(samples) <= sampling_rate:
        raise ValueError(
            f"a clip must be one channel of {length} to {sampling_rate} samples (25 ms to a second), "
            f"got an array of shape {samples.shape}"
        )
    if not np.isfinite(samples).all():
        raise ValueError("a clip must hold finite samples")
    options: dict[str, Any] = {"power": 2.0, "center": False, "mel_floor": _MEL_FLOOR, "log_mel": "log"}
    return spectrogram(samples, window, length, hop, fft, mel_filters=filters, **options).T


def clip_frames(samples: np.ndarray, sampling_rate: int) -> np.ndarray:
    """(n,) at most a second of sound -> (98, 40) float16, normalised per band over its frames; 0 after the clip's end.

    Raises ValueError as `log_mel`.
    """
    real = log_mel(samples, sampling_rate).astype(np.float64)
    deviation = real.std(0)
    real = (real - real.mean(0)) / np.where(deviation > 1e-3, deviation, 1.0)  # a silent band stays 0
    frames = np.zeros((NUM_FRAMES, NUM_BANDS), np.float16)
    frames[: len(real)] = real[:NUM_FRAMES]
    return frames


# ---------------------------------------------------------------------------------------------------------------------
# Where clips come from: labelled sound of three splits, picklable. `words` are the classes, `sizes` the rows of each
# split, `fingerprint` changes if they do, and `read` gives (samples, label, name) of rows.


class MuLawClips:
    """The files speech_commands_4words-{train,validation,test}.parquet of a folder.

    Raises:
        FileNotFoundError: one is not there. ValueError: one is not such a file.
    """

    words, sampling_rate = SPEECH4_WORDS, 8000
    COLUMNS = ("mulaw_8khz", "label", "num_samples", "clip")

    def __init__(self, data_dir: Path):
        self.paths = {split: Path(data_dir) / f"speech_commands_4words-{split}.parquet" for split in SPLITS}
        digest = hashlib.sha256()
        for path in self.paths.values():
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} is not there: put speech_commands_4words-{{train,validation,test}}.parquet, with the "
                    f"columns {', '.join(self.COLUMNS)} (8,000 uint8 codes of 8 kHz mu-law), into {str(data_dir)!r}"
                )
            if missing := set(self.COLUMNS) - set(pq.read_schema(path).names):
                raise ValueError(f"{path} has no column {', '.join(sorted(missing))}")
            digest.update(bytes.fromhex(sha256_of(path)))
        self.sizes = {split: pq.read_metadata(path).num_rows for split, path in self.paths.items()}
        self.fingerprint = digest.hexdigest()

    def read(self, split: str, rows: range) -> list[tuple[np.ndarray, int, str]]:
        # memory_map keeps what is read to the row groups that hold these rows.
        table = pq.read_table(self.paths[split], columns=list(self.COLUMNS), memory_map=True)
        clips = []
        for codes, label, length, name in zip(*table.slice(rows.start, len(rows)).columns):
            real = -(-length.as_py() // 2)  # num_samples counts at 16 kHz; what follows is padding
            clips.append((mu_law_decode(np.asarray(codes.values)[:real]), label.as_py(), name.as_py()))
        return clips


class SpeechCommands:
    """Words of the unpacked archive of Speech Commands V2, split as its two lists say.

    Args:
        folder: holds validation_list.txt, testing_list.txt and a folder of wav files per word.
        words: the classes, in order.
    Raises:
        FileNotFoundError: the folder, a list or a word is not there, or a list names a missing file.
        ValueError: a file is listed twice.
    """

    sampling_rate = 16000
    LISTS: ClassVar = {"validation": "validation_list.txt", "test": "testing_list.txt"}

    def __init__(self, folder: Path, words: Sequence[str] = SC10_WORDS):
        self.folder, self.words = Path(folder), tuple(words)
        absent = [name for name in (*self.LISTS.values(), *words) if not (self.folder / name).exists()]
        if absent:
            raise FileNotFoundError(
                f"{str(self.folder)!r} lacks {', '.join(absent)}: fetch {SC10_URL} and unpack it into that folder "
                f"(`mkdir -p {self.folder} && tar -xzf speech_commands_v0.02.tar.gz -C {self.folder}`)"
            )
        self.files: dict[str, list[str]] = {}
        for split, file in self.LISTS.items():
            lines = (self.folder / file).read_text(encoding="utf-8").split()
            self.files[split] = sorted(line for line in lines if line.split("/")[0] in words)
        held_out = sorted(name for files in self.files.values() for name in files)
        if twice := [name for name, other in itertools.pairwise(held_out) if name == other]:
            raise ValueError(f"{self.folder}: {twice[0]} is listed twice in {' and '.join(self.LISTS.values())}")
        found = {f"{word}/{path.name}" for word in words for path in (self.folder / word).glob("*.wav")}
        if lost := sorted(set(held_out) - found):
            raise FileNotFoundError(f"{self.folder / lost[0]} is listed and not there: unpack {SC10_URL} again")
        self.files["train"] = sorted(found - set(held_out))
        self.sizes = {split: len(self.files[split]) for split in SPLITS}
        digest = hashlib.sha256(repr(self.words).encode())
        for split in SPLITS:
            for name in self.files[split]:
                digest.update(f"{split} {name} {(self.folder / name).stat().st_size}\n".encode())
        self.fingerprint = digest.hexdigest()

    def read(self, split: str, rows: range) -> list[tuple[np.ndarray, int, str]]:
        names = self.files[split][rows.start : rows.stop]
        return [(read_wav(self.folder / n, self.sampling_rate), self.words.index(n.split("/")[0]), n) for n in names]


def read_wav(path: Path, sampling_rate: int) -> np.ndarray:
    """float32 samples in [-1, 1), at most a second. Raises ValueError for another format than PCM mono at that rate."""
    samples, rate = decode_wav({"path": path, "bytes": None}, "a clip")
    if samples.shape[1] != 1 or rate != sampling_rate:
        raise ValueError(f"{path} must hold one channel at {sampling_rate} Hz, got {samples.shape[1]} at {rate} Hz")
    return samples[:sampling_rate, 0]


Clips = MuLawClips | SpeechCommands


@dataclass(frozen=True)
class SpeechFrames(RowGenerator):
    """Clips as frames; where the clips lie is no part of what defines the rows."""

    name: str
    words: tuple[str, ...]
    sampling_rate: int
    source: str
    train_size: int
    validation_size: int
    test_size: int
    clips: dataclasses.InitVar[Clips]
    rows_per_shard: int = 2000

    def __post_init__(self, clips: Clips) -> None:
        super().__post_init__()
        object.__setattr__(self, "_clips", clips)

    @classmethod
    def of(cls, name: str, clips: Clips) -> SpeechFrames:
        sizes = {f"{split}_size": clips.sizes[split] for split in SPLITS}
        return cls(name, clips.words, clips.sampling_rate, clips.fingerprint, clips=clips, **sizes)

    def rows(self, split: str, indices: range, attempts: Mapping[int, int]) -> pa.Table:
        """Columns frames (98 lists of 40 float16), label and clip. Raises ValueError naming a clip that cannot be."""
        clips = self._clips.read(split, indices)  # type: ignore[attr-defined]
        frames = []
        for samples, _, name in clips:
            try:
                frames.append(clip_frames(samples, self.sampling_rate))
            except ValueError as error:
                raise ValueError(f"{name} of {self.name}-{split}: {error}") from error
        _, labels, names = zip(*clips)
        classes = ClassLabel(names=list(self.words))
        features = Features({"frames": List(List(Value("float16"))), "label": classes, "clip": Value("string")})
        values = pa.array(np.stack(frames).reshape(-1))
        bands = pa.ListArray.from_arrays(np.arange(0, len(values) + 1, NUM_BANDS, dtype=np.int32), values)
        column = pa.ListArray.from_arrays(np.arange(0, len(bands) + 1, NUM_FRAMES, dtype=np.int32), bands)
        return pa.table([column, pa.array(labels, pa.int64()), pa.array(names)], schema=features.arrow_schema)
