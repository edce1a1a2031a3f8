# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Budget profiles made by hand, and the machine that they were measured on."""

from dataclasses import replace

from essm_train.measure import calibration
from modeling_essm.budgets import profile as profile_module
from modeling_essm.budgets.profile import BudgetProfile, DeviceProfile, Measurement, Quality
from modeling_essm.budgets.weights import weights_checksum

BUDGETS = (2, 4, 8, 16, 32)
HERE, THERE = "this machine", "another machine"


def quality(values, budgets=BUDGETS, higher=False) -> Quality:
    zeros = (0.0,) * len(budgets)
    metric = "accuracy" if higher else "bits_per_byte"
    facts = {"data": "words", "samples": 9, "length": 64, "date": "2026-01-01", "dtype": "float32"}
    return Quality(metric, higher, budgets, tuple(values), errors=zeros, drop_errors=zeros, **facts)


def device(name, decode=None, prefill=(10.0, 11.0, 12.0, 14.0, 20.0), sizes=(1,)) -> DeviceProfile:
    """Median times per budget, one tenth below and above; twice as long for each further batch size."""
    rows = []
    for phase, times in (("prefill", prefill), ("decode", decode)):
        for i, size in enumerate(sizes if times else ()):
            for K, ms in zip(BUDGETS, times):
                ms *= 2**i
                rows.append(Measurement(phase, size, K, ms, 0.9 * ms, 1.1 * ms, 1e3 * size / ms, 100 + K, K))
    return DeviceProfile(name, "2026-01-02", "float32", 1, {"torch": "2"}, 64, 3, 1000, tuple(rows))


def profile(values=(2.4, 2.1, 2.03, 2.01, 2.0), higher=False, **devices) -> BudgetProfile:
    """Loses 20%, 5%, 1.5%, 0.5% and 0; on HERE a token takes 1, 1.5, 2, 3 and 5 ms, twice that at batch size 4."""
    entries = devices or {HERE: device(HERE, (1.0, 1.5, 2.0, 3.0, 5.0), sizes=(1, 4))}
    return BudgetProfile("0123", (32, 32), quality(values, higher=higher), entries)


def of(model) -> BudgetProfile:
    """As if it had been measured on that model."""
    return replace(profile(), weights=weights_checksum(model), capacities=tuple(model.config.capacities))


def as_here(monkeypatch) -> None:
    """The tests run HERE."""
    monkeypatch.setattr(profile_module, "device_name", lambda device=None: HERE)
    monkeypatch.setattr(calibration, "device_name", lambda device=None: HERE)
