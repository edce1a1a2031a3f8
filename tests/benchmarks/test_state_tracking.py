# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Tracked runs: what is told of figures that are known, directions that changed their half, a run."""

import json

import numpy as np
import pytest
import torch

from benchmarks import state_tracking
from benchmarks.state_tracking import phases, still_there, summarise
from modeling_essm.companions import DiagonalSystem


def test_phases_cover_all_updates_but_the_first():
    spans = phases(100, 10)
    rows = np.arange(100)
    assert [*np.concatenate([rows[span] for span in spans.values()])] == [*range(1, 100)]
    assert len(rows[spans["warm-up"]]) == 9 and len(rows[spans["second half"]]) == 50


def test_figures_are_counted_over_the_rows_asked_for():
    figures = {
        "distance": np.array([np.nan, 0.1, 0.2, 0.6, 9.0]),
        "movement": np.array([np.nan, 0.1, 0.3, 0.5, 9.0]),  # the second is beyond the bound
        "gap": np.array([1.0, 1.0, 0.3, 1.0, 9.0]),
        "swaps": np.array([np.nan, 0.0, 3.0, 0.0, 9.0]),
        "bottom_share": np.array([0.5, 0.4, 0.3, 0.2, 9.0]),
    }
    found = summarise(figures, slice(1, 4))
    assert found["within_bound"] == pytest.approx(2 / 3) and found["order_proved"] == pytest.approx(1 / 3)
    assert found["order_kept"] == pytest.approx(2 / 3) and found["swaps_an_update"] == 1.0
    assert found["median_movement_over_gap"] == pytest.approx(0.5) and found["bottom_share"] == 0.2


def test_directions_that_became_strong_are_not_in_the_bottom_any_more():
    """Four modes with inputs and outputs of their own: their directions are the modes themselves."""
    lam, eye = torch.tensor([0.9, 0.8, 0.5, 0.3], dtype=torch.complex128), torch.eye(4, dtype=torch.complex128)

    def system(gains):
        return DiagonalSystem(lam, eye, eye * torch.tensor(gains), "complex")

    early = system([100.0, 10.0, 1.0, 0.1])
    assert still_there(early, early) == 1.0
    assert still_there(early, system([100.0, 1e-3, 50.0, 0.1])) == 0.5
    assert still_there(early, system([1e-3, 1e-2, 50.0, 10.0])) == 0.0


def test_a_run_from_end_to_end(tmp_path, data_dir):
    out = tmp_path / "found.json"
    state_tracking.main(["--quick", "--data_dir", data_dir, "--out", str(out), "--seeds", "0"])
    report = json.loads(out.read_text())
    assert [r["modes"] for r in report["results"]] == [8, 64] and (tmp_path / "found_64.png").exists()
    assert all(found["within_bound"] == 1 for r in report["results"] for found in r["phases"].values())
