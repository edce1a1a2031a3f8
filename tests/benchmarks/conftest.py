# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Data that several benchmarks are tested on."""

import datasets
import pytest
from tiny_tasks import write_tiny_tasks


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A folder with tiny data of every task, read through a cache of its own."""
    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("data")
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
    datasets.disable_progress_bars()
    write_tiny_tasks(folder)
    yield str(folder)
    patch.undo()
