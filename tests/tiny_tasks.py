# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Tiny data of every task of `benchmarks.classification_tasks`."""

from pathlib import Path

import datasets
import numpy as np

from essm_train.tasks.audio import SPEECH4_WORDS, SpeechFrames
from essm_train.tasks.listops import ListOps
from essm_train.tasks.shards import generate

ROWS_OF = {"train": 60, "validation": 10, "test": 50}


class Tones(SpeechFrames):
    """Clips whose word is their pitch."""

    name, words, sampling_rate, sizes, source = "speech4", SPEECH4_WORDS, 8000, ROWS_OF, "tones"

    def read(self, split, rows):
        t = np.arange(2000) / 8000
        return [(np.sin(2 * np.pi * 300 * (1 + i % 4) * t).astype(np.float32), i % 4, f"{split} {i}") for i in rows]


def write_tiny_tasks(folder: Path) -> None:
    """The class shows in the mean of pixels, and in the letters of a text."""
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        count = ROWS_OF[split]
        labels = rng.integers(3, size=count)
        pixels = (rng.integers(0, 90, (count, 24)) + 80 * labels[:, None]).tolist()
        types = {"pixels": datasets.List(datasets.Value("uint8")), "label": datasets.Value("int64")}
        for stem in ("mnist", "cifar10_gray"):
            table = datasets.Dataset.from_dict({"pixels": pixels, "label": labels}, features=datasets.Features(types))
            table.to_parquet(folder / f"{stem}-{split}.parquet")
        texts = ["ab"[label % 2] * int(rng.integers(20, 200)) for label in labels]
        table = datasets.Dataset.from_dict({"text": texts, "label": labels % 2})
        table.to_parquet(folder / f"imdb-{split}.parquet")
    generate(Tones(), folder / "speech4")
    sizes = {f"{split}_size": count for split, count in ROWS_OF.items()}
    generate(ListOps(min_length=10, max_length=100, max_depth=4, **sizes), folder / "listops")
