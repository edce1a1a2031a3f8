# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What holds for all tests: one CPU thread, a cache of their own, and markers for what a machine may lack."""

import os
import tempfile

import pytest
import torch

_cache = tempfile.TemporaryDirectory(prefix="datasets-")
os.environ["HF_DATASETS_CACHE"] = _cache.name  # before `datasets` is imported; subprocesses inherit it
os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"  # or each file that is read asks the Hub, 5 seconds without a network


def pytest_collection_modifyitems(items):
    """Tests marked `gpu` are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The models are tiny: threads only wait for each other. Training runs set a number of their own."""
    torch.set_num_threads(1)
