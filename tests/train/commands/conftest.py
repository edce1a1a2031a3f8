# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Files and arguments of tiny classification runs, and runs that nothing interrupted."""

from pathlib import Path

import pytest
from training_run import PIXELS, TINY_CLASSIFIER, options, signals, texts, train_classes, write

from essm_train.data.arguments import ClassificationArguments

RUNS = {"pixels": {"kind": "pixels"}, "streamed text": {"kind": "text", "streaming": True}}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("data")
    named = {}
    for split, count in {"train": 120, "validation": 24, "test": 30}.items():
        named[f"text {split}"] = write(folder, f"text-{split}.jsonl", texts(count, seed=count))
        named[f"pixels {split}"] = write(folder, f"pixels-{split}.parquet", signals(count, seed=count), PIXELS)
    return named


@pytest.fixture(scope="module")
def arguments(files):
    """Arguments of a tiny run on "pixels" or "text" in that folder; keywords override, None takes away."""

    def build(output_dir: Path, kind: str = "pixels", **changes) -> list[str]:
        column = {"text": "text_column", "pixels": "features_column"}[kind]
        values = {**TINY_CLASSIFIER, "output_dir": output_dir, "train_file": files[f"{kind} train"], column: kind}
        if changes.get("streaming"):
            values |= {"validation_file": files[f"{kind} validation"], "num_labels": 3, "shuffle_buffer": 10}
        return options(ClassificationArguments, values | changes)

    return build


@pytest.fixture(scope="module")
def finished(tmp_path_factory, arguments, files) -> dict[str, Path]:
    """Folders of runs that nothing interrupted."""
    folders = {name: tmp_path_factory.mktemp("finished") for name in RUNS}
    for name, run in RUNS.items():
        train_classes(arguments(folders[name], **run, test_file=files[f"{run['kind']} test"]), whole=True)
    return folders
