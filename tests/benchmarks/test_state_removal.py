# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Removing modes, measured: a tiny run, and what it says about sizes."""

import json

import pytest

from benchmarks import state_removal


@pytest.mark.parametrize("kind", state_removal.KINDS)
def test_sizes_fall_with_the_modes(kind, tmp_path):
    state_removal.main(["--quick", "--device", "cpu", "--only", kind, "--out", str(tmp_path / "r.json")])
    rows = json.loads((tmp_path / "r.json").read_text())["results"]
    assert [row["pruned"] for row in rows] == [0, 0.2, 0.5, 0.8]
    for name in ("parameters", "state_bytes"):
        values = [row[name] for row in rows]
        assert values == sorted(values, reverse=True) and values[-1] < values[0]
    per_mode = {"s5": 8, "lru": 8, "s4d": 8 * 16, "mamba": 4 * 32}[kind]  # complex64 or fp32; of every channel
    assert rows[0]["state_bytes"] - rows[-1]["state_bytes"] == 8 * per_mode  # 10 modes, 2 are left
