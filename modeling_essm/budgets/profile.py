# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The budget profile: quality of one model at every budget K, and its speed and memory on devices, as measured.

train/calibrate.py writes it beside the weights as `budget_profile.json`. Quality belongs to the model and is there
once; times and memory belong to a device, and several devices stand side by side. A profile knows which model it was
measured on (`Fingerprint`) and answers one question: which budget, for this much time or this much quality?

    read_profile("runs/x/model").choose(max_quality_drop=0.02)
    read_profile("runs/x/model").choose(max_latency_ms=2.5, batch_size=8)
"""

from __future__ import annotations

import json
import os
import platform
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ..loading_essm import PROFILE_NAME, write_text
from .curve import MARK_SYMBOLS, BudgetCurve
from .fingerprint import Fingerprint

logger = logging.get_logger(__name__)

FORMAT_VERSION = 1
PHASES = ("prefill", "decode")


# ---------------------------------------------------------------------------------------------------------------------
# What a profile holds.


@dataclass(frozen=True, kw_only=True)
class Quality(BudgetCurve):
    """A curve with its errors, and what it was measured on.

    Attributes:
        data: for people. samples: blocks or samples measured. length: positions of the longest. date: ISO.
        dtype: that it ran in.
        drop_errors: of each value's difference to the full budget's, relative to the latter as `drops` are. All budgets
            saw the same samples, so these are smaller than `errors`, and the ones that a comparison of budgets needs.
    """

    data: str
    samples: int
    length: int
    date: str
    dtype: str
    drop_errors: tuple[float, ...]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        names = ("metric", "higher_is_better", "data", "samples", "length", "date", "dtype", "budgets", "values")
        errors = {"standard_errors": self.errors, "drop_errors": self.drop_errors}
        return {name: getattr(self, name) for name in names} | errors


@dataclass(frozen=True)
class Measurement:
    """One budget in one phase at one batch size on one device.

    Attributes:
        phase: "prefill", a call over the whole prompt (or sample), or "decode", one token for each row after it.
        median_ms, min_ms, max_ms: of a call, over rounds in which the budgets take turns.
        tokens_per_second: of the whole batch. peak_bytes: needed beside the weights. cache_bytes: held between calls.
    """

    phase: str
    batch_size: int
    budget: int
    median_ms: float
    min_ms: float
    max_ms: float
    tokens_per_second: float
    peak_bytes: int
    cache_bytes: int


@dataclass(frozen=True)
class DeviceProfile:
    """All that was measured on one device.

    Attributes:
        device: its name, see `device_name`. date: ISO. threads: of the CPU. versions: of torch and transformers.
        prompt_length: positions of a prefill call, and the context that decoding starts from.
        weight_bytes: of the model in `dtype`.
    """

    device: str
    date: str
    dtype: str
    threads: int
    versions: Mapping[str, str]
    prompt_length: int
    rounds: int
    weight_bytes: int
    rows: tuple[Measurement, ...]

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(phase for phase in PHASES if any(row.phase == phase for row in self.rows))

    def at(self, phase: str, batch_size: int) -> dict[int, Measurement]:
        """By budget, ascending; empty if that was not measured."""
        rows = (row for row in self.rows if (row.phase, row.batch_size) == (phase, batch_size))
        return {row.budget: row for row in sorted(rows, key=lambda row: row.budget)}

    def batch_sizes(self, phase: str) -> tuple[int, ...]:
        return tuple(sorted({row.batch_size for row in self.rows if row.phase == phase}))


@dataclass(frozen=True)
class BudgetProfile:
    """The contents of budget_profile.json.

    Attributes:
        model: the fingerprint of the model that was measured. devices: by name.
    """

    model: Fingerprint
    quality: Quality
    devices: Mapping[str, DeviceProfile] = field(default_factory=dict)

    def merge(self, entry: DeviceProfile) -> BudgetProfile:
        """With that device's measurements in place of older ones; those of other devices stay."""
        return replace(self, devices={**self.devices, entry.device: entry})

    def restricted_to(self, capacity: int) -> BudgetProfile | None:
        """For the model truncated to `capacity` channels: without larger budgets, or None if nothing is left.

        The largest budget left then counts as full; drop_errors stay those against the model that was measured.
        """
        quality = self.quality
        kept = sum(budget <= capacity for budget in quality.budgets)
        if kept == 0:
            return None
        lists = ("budgets", "values", "errors", "drop_errors")
        cut = replace(quality, **{name: getattr(quality, name)[:kept] for name in lists})
        devices = {
            name: replace(entry, rows=tuple(row for row in entry.rows if row.budget <= capacity))
            for name, entry in self.devices.items()
        }
        model = replace(self.model, capacities=tuple(min(held, capacity) for held in self.model.capacities))
        return BudgetProfile(model, cut, {name: entry for name, entry in devices.items() if entry.rows})

    def presets(self) -> dict[str, int]:
        """Names for config.budget_presets, see curve.py."""
        return self.quality.presets()

    def choose(
        self,
        *,
        max_latency_ms: float | None = None,
        max_quality_drop: float | None = None,
        phase: str | None = None,
        batch_size: int = 1,
        device: str | torch.device | None = None,
    ) -> int:
        """A measured budget that keeps to the given limits; see `choose_budget` for arguments and errors."""
        if max_latency_ms is None and max_quality_drop is None:
            raise ValueError("choose_budget needs max_latency_ms, max_quality_drop or both")
        if max_quality_drop is not None:
            _check_limit("max_quality_drop", max_quality_drop, positive=False)
        if max_latency_ms is None:
            return self.quality.within(max_quality_drop or 0.0)[0]
        _check_limit("max_latency_ms", max_latency_ms, positive=True)

        entry = self._device(device)
        phase = self._phase(entry, phase)
        rows = entry.at(phase, batch_size)
        if not rows:
            sizes = list(entry.batch_sizes(phase))
            raise ValueError(f"batch_size must be one of {sizes}, measured on {entry.device}, got {batch_size!r}")
        quality = self.quality
        drops = {K: drop for K, drop in zip(quality.budgets, quality.drops) if K in rows}
        if not drops:
            raise ValueError(f"no budget has both a quality (of {list(quality.budgets)}) and a time (of {list(rows)})")
        times = {K: rows[K].median_ms for K in drops}
        fast = [K for K in drops if times[K] <= max_latency_ms]
        what = f"{_VERBS[phase]} within {max_latency_ms:g} ms on {entry.device} at batch size {batch_size}"
        if not fast:
            K = min(drops, key=lambda K: times[K])
            raise ValueError(f"no budget {what}; the fastest, K={K}, needs {times[K]:.3g} ms")
        best = min(fast, key=lambda K: (drops[K], K))
        if max_quality_drop is None:
            return best
        good = [K for K in quality.within(max_quality_drop) if K in drops]
        both = [K for K in good if K in fast]
        if not both:
            needed = "none timed there loses so little"
            if good:
                K = min(good, key=lambda K: times[K])
                needed = f"the fastest, K={K}, needs {times[K]:.3g} ms"
            raise ValueError(
                f"no budget that loses at most {max_quality_drop:g} of the quality {what}: {needed}; "
                f"within that time the best is K={best}, which loses {drops[best]:.3g}"
            )
        return both[0]

    def _device(self, device: str | torch.device | None) -> DeviceProfile:
        measured = ", ".join(map(repr, self.devices)) or "none"
        if isinstance(device, str):
            if device not in self.devices:
                raise ValueError(f"device must be one of those measured, {measured}, got {device!r}")
            return self.devices[device]
        here = device_name(device)
        if here in self.devices:
            return self.devices[here]
        if len(self.devices) != 1:
            raise ValueError(
                f"no times were measured on {here!r}: name another device (measured: {measured}), "
                "or run essm-calibrate --timing_only here"
            )
        (entry,) = self.devices.values()
        logger.warning_once(f"budgets are chosen by times measured on {entry.device!r}; this is {here!r}")
        return entry

    @staticmethod
    def _phase(entry: DeviceProfile, phase: str | None) -> str:
        if phase is None:
            return entry.phases[-1]
        if phase not in entry.phases:
            raise ValueError(f"phase must be one of {list(entry.phases)}, measured on {entry.device}, got {phase!r}")
        return phase

    def table(self, device: str) -> str:
        """Quality, time and memory at every budget on one device, for people."""
        entry, quality = self.devices[device], self.quality
        marks = {K: "" for K in quality.budgets}
        for name, K in quality.marks.items():
            marks[K] += f"  {MARK_SYMBOLS[name]} {name}"
        name = "bits/byte" if quality.metric == "bits_per_byte" else quality.metric
        versions = ", ".join(f"{library} {version}" for library, version in entry.versions.items())
        lines = [
            f"{entry.device}, {entry.dtype}, CPU threads: {entry.threads}, {versions}, {entry.date}; "
            f"weights {entry.weight_bytes / 2**20:.1f} MiB",
            f"quality: {quality.data}; {quality.date}",
        ]
        for phase in entry.phases:
            for size in entry.batch_sizes(phase):
                after = "after" if phase == "decode" else "of"
                per = "ms/token" if phase == "decode" else "ms/call"
                lines += ["", f"{phase}, batch size {size}, {after} {entry.prompt_length} positions"]
                lines.append(
                    f"{'K':>4}  {name:>9}  {'drop':>15}  {per:>8}  {'(min-max)':>17}  {'tokens/s':>9}  {'peak MiB':>8}"
                    f"  {'cache KiB':>9}"
                )
                rows = entry.at(phase, size)
                for i, K in enumerate(quality.budgets):
                    if K not in rows:
                        continue
                    row = rows[K]
                    drop = f"{quality.drops[i]:+.1%} ± {quality.drop_errors[i]:.1%}"
                    spread = f"({row.min_ms:.4g}-{row.max_ms:.4g})"
                    lines.append(
                        f"{K:>4}  {quality.values[i]:>9.4f}  {drop:>15}  {row.median_ms:>8.4g}  {spread:>17}  "
                        f"{row.tokens_per_second:>9,.0f}  {row.peak_bytes / 2**20:>8.2f}  "
                        f"{row.cache_bytes / 2**10:>9.1f}{marks[K]}"
                    )
        return "\n".join(lines)

    def text(self) -> str:
        """The contents of the file."""
        devices = {name: asdict(entry) for name, entry in self.devices.items()}
        for entry in devices.values():
            del entry["device"]  # it is the key
        record = {"format_version": FORMAT_VERSION, "model": asdict(self.model), "quality": self.quality.record()}
        return json.dumps(record | {"devices": devices}, indent=1, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike) -> Path:
        """Write the file, or budget_profile.json in that folder, in one move; returns its path."""
        path = profile_path(path)
        write_text(path, self.text())
        return path


def profile_path(path: str | os.PathLike) -> Path:
    """The file itself, or the one that belongs into that folder."""
    path = Path(path)
    return path / PROFILE_NAME if path.is_dir() else path


_VERBS = {"prefill": "reads its input", "decode": "decodes a token"}


def is_finite(value: Any) -> bool:
    """Whether it is finite, as a float too."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _check_limit(name: str, value: Any, positive: bool) -> None:
    if not is_finite(value) or value < 0 or (positive and value == 0):
        raise ValueError(f"{name} must be a finite number {'>' if positive else '>='} 0, got {reprlib.repr(value)}")


# ---------------------------------------------------------------------------------------------------------------------
# Which device.


def device_name(device: torch.device | None = None) -> str:
    """The hardware by its parts, as profiles name it: the GPU's model, or the CPU's and its cores.

    Args:
        device: by default the one that this machine would compute on, a GPU if there is one.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cpu}, {cores} cores"
