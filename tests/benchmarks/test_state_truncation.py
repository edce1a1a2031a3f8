# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Truncation against born small: schedules, what is reported of runs that are known."""

import json

import pytest

from benchmarks import state_truncation
from benchmarks.state_truncation import ROWS, Settings, of_seeds, summarise


def test_attempts_fall_into_the_warm_up_or_at_equal_distances():
    settings = Settings(None, 1000)
    assert settings.warmup == 100 and settings.steps(ROWS["tau 0.15"]) == (25, 50, 75, 100)
    assert settings.steps(ROWS["tau 0.15, every 200"]) == (200, 400, 600, 800) and settings.steps(ROWS["full"]) == ()
    with pytest.raises(ValueError, match="got 800"):
        Settings(None, 500).steps(ROWS["tau 0.15, every 200"])


def test_of_seeds():
    found = of_seeds([0.1, 0.5, 0.4, 0.3])
    assert found["best"] == 0.5 and found["top_3"] == pytest.approx(0.4) and found["mean"] == pytest.approx(0.325)


def record(row, seed, error, seconds, born=None):
    found = {"task": "digits", "model": row, "seed": seed, "error": {"1": error}, "cpu_seconds": seconds, "sizes": [9]}
    return found if born is None else found | {"born_small": {"error": born[0], "cpu_seconds": born[1]}}


def test_summary_of_known_runs(capsys):
    runs = [record("full", 0, 0.1, 100.0), record("full", 1, 0.2, 100.0)]
    runs += [record("tau 0.15", 0, 0.3, 50.0, (0.4, 40.0)), record("tau 0.15", 1, 0.2, 60.0, (0.5, 40.0))]
    runs.append(record("tau 0.15", 2, 0.0, 1.0, (0.0, 1.0)) | {"error": None})  # diverged
    full, shrunk = summarise(runs)
    assert full["accuracy"]["mean"] == pytest.approx(0.85) and "born_small" not in full
    assert shrunk["seeds"] == [0, 1] and shrunk["diverged"] == 1 and shrunk["modes"]["mean"] == 9
    assert shrunk["difference"] == {"mean": pytest.approx(0.2), "deviation": pytest.approx(0.02**0.5)}
    assert shrunk["time_over_full"]["mean"] == pytest.approx(0.55)
    assert shrunk["time_over_born_small"]["mean"] == pytest.approx(1.375)
    state_truncation.print_tables([full, shrunk])
    assert "+0.2000±0.1414" in capsys.readouterr().out


def test_a_sweep_from_end_to_end(tmp_path, data_dir, capsys):
    out = tmp_path / "found.json"
    argv = ["--quick", "--data_dir", data_dir, "--tasks", "digits", "--seeds", "0", "--out", str(out)]
    argv += ["--runs_dir", str(tmp_path / "runs")]
    state_truncation.main(argv)
    report = json.loads(out.read_text())
    found = {r["row"]: r for r in report["results"]}
    assert found.keys() == {name for name, row in ROWS.items() if row.every is None}
    assert found["full"]["modes"]["mean"] == 8 and "difference" in found["tau 0.15"]
    capsys.readouterr()
    state_truncation.main(argv)
    assert f"{len(found)} of {len(found)} runs are there" in capsys.readouterr().out
