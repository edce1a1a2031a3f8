# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The budget profile: quality of one model at every budget K, and its speed and memory on devices, as measured.

essm-calibrate writes it beside the weights as `budget_profile.json`. Quality belongs to the model and is there once.
Times and memory belong to a device, and several devices stand side by side. The file names the checksum of the weights
that were measured; a model with other weights refuses it. It answers one question: which budget, for this much time or
this much quality?

    choose_budget(model, max_quality_drop=0.02)
    choose_budget(model, max_latency_ms=2.5, batch_size=8)
"""

from __future__ import annotations

import contextlib
import json
import numbers
import os
import platform
import reprlib
import sys
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file, logging

from .._files import write_text
from .curve import BudgetCurve, Times
from .weights import same_weights, weights_checksum

logger = logging.get_logger(__name__)

PROFILE_NAME = "budget_profile.json"
FORMAT_VERSION = 2
PHASES = ("prefill", "decode")
_VERBS = {"prefill": "reads its input", "decode": "decodes a token"}


# --- What a profile holds


@dataclass(frozen=True, kw_only=True)
class Quality(BudgetCurve):
    """A curve with its errors, and what it was measured on.

    Attributes:
        data: for people.
        samples: blocks or samples measured. length: positions of the longest.
        date: ISO. dtype: that it ran in.
        drop_errors: standard error of each value's difference to the full budget's, relative to the latter as `drops`
            are. All budgets saw the same samples, so these are smaller than `errors`, and decide a comparison.
    """

    data: str
    samples: int
    length: int
    date: str
    dtype: str
    drop_errors: tuple[float, ...]


@dataclass(frozen=True)
class Measurement:
    """One budget in one phase at one batch size on one device.

    Attributes:
        phase: "prefill", a call over the whole prompt (or sample), or "decode", one token for each row after it.
        median_ms, min_ms, max_ms: of a call, over rounds in which the budgets take turns.
        tokens_per_second: of the whole batch.
        peak_bytes: needed beside the weights. cache_bytes: held between calls.
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

    def batch_sizes(self, phase: str) -> tuple[int, ...]:
        return tuple(sorted({row.batch_size for row in self.rows if row.phase == phase}))

    def at(self, phase: str, batch_size: int) -> dict[int, Measurement]:
        """By budget, ascending; empty if that was not measured."""
        rows = (row for row in self.rows if (row.phase, row.batch_size) == (phase, batch_size))
        return {row.budget: row for row in sorted(rows, key=lambda row: row.budget)}

    def times(self, phase: str, batch_size: int) -> Times:
        """(median, least) milliseconds of those measurements by budget, as curve.py compares them."""
        return {K: (row.median_ms, row.min_ms) for K, row in self.at(phase, batch_size).items()}


@dataclass(frozen=True)
class BudgetProfile:
    """The contents of budget_profile.json.

    Attributes:
        weights: checksum of the model that was measured, see `weights_checksum`.
        capacities: channels of each of its spectral layers.
        devices: by name.
    """

    weights: str
    capacities: tuple[int, ...]
    quality: Quality
    devices: Mapping[str, DeviceProfile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        entries = self.devices.values()
        cases = [(e, phase, size) for e in entries for phase in e.phases for size in e.batch_sizes(phase)]
        timings = tuple(e.times(phase, size) for e, phase, size in cases)
        object.__setattr__(self, "quality", replace(self.quality, timings=timings))

    def merge(self, entry: DeviceProfile) -> BudgetProfile:
        """With that device's measurements in place of older ones; those of other devices stay."""
        return replace(self, devices={**self.devices, entry.device: entry})

    def up_to(self, budget: int) -> BudgetProfile:
        """Without larger budgets; the largest one left then counts as full.

        `drop_errors` stay those against the model that was measured.
        """
        kept = bisect_right(self.quality.budgets, budget)
        lists = ("budgets", "values", "speeds", "errors", "drop_errors")
        quality = replace(self.quality, **{name: getattr(self.quality, name)[:kept] for name in lists})
        entries = (
            replace(entry, rows=tuple(row for row in entry.rows if row.budget <= budget))
            for entry in self.devices.values()
        )
        return replace(self, quality=quality, devices={entry.device: entry for entry in entries if entry.rows})

    def presets(self) -> dict[str, int]:
        """Names for config.budget_presets, see curve.py."""
        return self.quality.presets()

    def choose(
        self,
        *,
        max_latency_ms: float | None = None,
        max_quality_drop: float | None = None,
        phase: str | None = None,
        batch_size: int | None = None,
        device: str | torch.device | None = None,
    ) -> int:
        """A measured budget that keeps to limits of time, quality or both.

        Args:
            max_latency_ms: median time of a call, per decoded token or per prompt. Alone it gives the best budget that
                keeps to it, the smallest of equals. The times are those of `forward`; `generate` adds its own.
            max_quality_drop: relative to the full budget, 0.02 is 2%. It gives the smallest budget that keeps to it,
                and with both limits the smallest that keeps to both; but none that is dominated, see curve.py: one that
                saves no time in anything that was measured gives way to a better one.
            phase, batch_size, device: where max_latency_ms counts. phase is "decode" or "prefill", by default decode,
                where it was measured. batch_size is one that was measured, by default 1. device is the name of one that
                was measured, by default this machine's; if only one was, that one is taken, with a warning.
        Raises:
            ValueError: a bad argument, or limits that no budget keeps to: the error names the fastest.
        """
        if max_latency_ms is None and max_quality_drop is None:
            raise ValueError("choose_budget needs max_latency_ms, max_quality_drop or both")
        for name, value in (("max_latency_ms", max_latency_ms), ("max_quality_drop", max_quality_drop)):
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 <= value <= sys.float_info.max):
                raise ValueError(f"{name} must be a finite number >= 0, got {reprlib.repr(value)}")
        quality = self.quality
        good = quality.budgets if max_quality_drop is None else quality.within(max_quality_drop)
        if max_latency_ms is None:
            if unused := [x for x in (phase, batch_size, device) if x is not None]:
                raise ValueError(f"phase, batch_size and device need max_latency_ms, got {unused[0]!r} without it")
            return quality.undominated(good)[0]

        entry = self._device(device)
        phase, batch_size = phase or entry.phases[-1], 1 if batch_size is None else batch_size
        if phase not in entry.phases:
            raise ValueError(f"phase must be one of {list(entry.phases)}, measured on {entry.device}, got {phase!r}")
        rows = entry.at(phase, batch_size)
        if not rows:
            sizes = list(entry.batch_sizes(phase))
            raise ValueError(f"batch_size must be one of {sizes}, measured on {entry.device}, got {batch_size!r}")
        times = {K: rows[K].median_ms for K in good if K in rows}
        fast = [K for K in times if times[K] <= max_latency_ms]
        if not fast:
            which = "no budget" if max_quality_drop is None else f"no budget that loses at most {max_quality_drop:g}"
            best = "none of them was timed"
            if times:
                K = min(times, key=lambda K: times[K])
                best = f"the fastest, K={K}, needs {times[K]:.3g} ms"
            raise ValueError(
                f"{which} {_VERBS[phase]} within {max_latency_ms:g} ms on {entry.device} at batch size {batch_size}; "
                f"{best}"
            )
        if max_quality_drop is not None:
            return quality.undominated(fast, [entry.times(phase, batch_size)])[0]
        drops = dict(zip(quality.budgets, quality.drops))
        return min(fast, key=lambda K: (drops[K], K))

    def _device(self, device: str | torch.device | None) -> DeviceProfile:
        """The entry of a device by its name, of the one given, or of this machine's first."""
        measured = ", ".join(map(repr, self.devices)) or "none"
        name = device if isinstance(device, str) else device_name(device)
        if name in self.devices:
            return self.devices[name]
        if isinstance(device, str):
            raise ValueError(f"device must be one of those measured, {measured}, got {device!r}")
        if len(self.devices) != 1:
            raise ValueError(
                f"no times were measured on {name!r}: name another device (measured: {measured}), "
                "or run essm-calibrate --timing_only here"
            )
        (entry,) = self.devices.values()
        logger.warning_once(f"budgets are chosen by times measured on {entry.device!r}; this is {name!r}")
        return entry

    def table(self, device: str) -> str:
        """Quality, time and memory at every budget on one device, for people."""
        entry, quality = self.devices[device], self.quality
        versions = ", ".join(f"{library} {version}" for library, version in entry.versions.items())
        lines = [
            f"{entry.device}, {entry.dtype}, CPU threads: {entry.threads}, {versions}, {entry.date}; "
            f"weights {entry.weight_bytes / 2**20:.1f} MiB",
            f"quality: {quality.data}; {quality.date}",
        ]
        for phase, after, per in (("prefill", "of", "ms/call"), ("decode", "after", "ms/token")):
            for size in entry.batch_sizes(phase):
                lines += ["", f"{phase}, batch size {size}, {after} {entry.prompt_length} positions"]
                lines.append(
                    f"{'K':>4}  {quality.column:>9}  {'drop':>15}  {per:>8}  {'(min-max)':>17}  {'tokens/s':>9}"
                    f"  {'peak MiB':>8}  {'cache KiB':>9}"
                )
                rows = entry.at(phase, size)
                values = zip(quality.budgets, quality.values, quality.drops, quality.drop_errors)
                for K, value, drop, error in (line for line in values if line[0] in rows):
                    row = rows[K]
                    lines.append(
                        f"{K:>4}  {value:>9.4f}  {f'{drop:+.1%} ± {error:.1%}':>15}  {row.median_ms:>8.4g}  "
                        f"{f'({row.min_ms:.4g}-{row.max_ms:.4g})':>17}  {row.tokens_per_second:>9,.0f}  "
                        f"{row.peak_bytes / 2**20:>8.2f}  {row.cache_bytes / 2**10:>9.1f}{quality.marks_at(K)}"
                    )
                lines += filter(None, [quality.time_note([entry.times(phase, size)])])
        return "\n".join(lines)

    def save(self, path: str | os.PathLike) -> Path:
        """Write the file, or budget_profile.json in that folder, in one move; returns its path."""
        path = _profile_path(path)
        record = {"format_version": FORMAT_VERSION, **asdict(self)}
        del record["quality"]["timings"]  # they follow from the rows
        write_text(path, json.dumps(record, indent=1, allow_nan=False) + "\n")
        return path


# --- A model's profile, and its choice


def choose_budget(model: Any, *, profile: BudgetProfile | None = None, **limits: Any) -> int:
    """The budget that keeps to limits of time, quality or both; only budgets that were measured are considered.

    Args:
        model: an ES-SSM. profile: its own, by default read from where the model was loaded from.
        limits: of `BudgetProfile.choose`; device is by default the model's.
    Returns:
        K, for `spectral_budget`.
    Raises:
        ValueError: no profile, or as `BudgetProfile.choose`.
    """
    profile = budget_profile(model) if profile is None else profile
    if profile is None:
        raise ValueError(
            f"choose_budget needs {PROFILE_NAME} beside the model, and there is none at {model.name_or_path!r}: "
            "write it with essm-calibrate"
        )
    if limits.get("max_latency_ms") is None or limits.get("device") is not None:
        return profile.choose(**limits)
    budget = profile.choose(**limits | {"device": model.device})
    entry, dtype, threads = profile._device(model.device), str(model.dtype)[6:], torch.get_num_threads()
    if model.device.type != "cpu":
        threads = entry.threads
    if (entry.dtype, entry.threads) != (dtype, threads):
        logger.warning_once(
            f"budgets are chosen by times measured in {entry.dtype} with {entry.threads} CPU threads; this model runs "
            f"in {dtype}, with {threads}"
        )
    return budget


def budget_profile(model: Any) -> BudgetProfile | None:
    """Quality, speed and memory of a model at every budget, as essm-calibrate measured them; None without a file.

    The file lies beside the weights that the model was loaded from, in a folder or a Hub repository.

    Raises:
        ValueError: as `read_profile`.
    """
    path = _profile_beside(model)
    return None if path is None else read_profile(path, model)


def _profile_beside(model: Any) -> str | None:
    """The path of the profile beside the weights that the model was loaded from; None without one.

    The Hub is asked only for a model that was loaded from there, never for one from a folder or made in memory.
    """
    source, where = getattr(model, "_origin", None) or (model.name_or_path, None)
    if where is None and not os.path.isdir(source or ""):
        return None
    try:
        return cached_file(source, PROFILE_NAME, **(where or {}), _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):  # no repository any more, or the Hub cannot be reached
        return None


def save_profile(model: Any, folder: str | os.PathLike) -> None:
    """Copy the profile beside a model to where the model is saved, if it was measured on these weights."""
    source = _profile_beside(model)
    if source is None or os.path.realpath(source) == os.path.realpath(os.path.join(folder, PROFILE_NAME)):
        return
    try:
        text = Path(source).read_text(encoding="utf-8")
        measured = json.loads(text)["weights"]
    except (ValueError, KeyError, TypeError, RecursionError):
        measured = None
    if isinstance(measured, str) and same_weights(measured, weights_checksum(model)):
        write_text(Path(folder, PROFILE_NAME), text)
    else:
        logger.warning_once(f"no budget profile is saved: {source} was measured on other weights")


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
    return f"{cpu_name()}, {cpu_cores()} cores"


def cpu_name() -> str:
    """The CPU's model, or on ARM the board's, as Linux tells it; elsewhere its family."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    with contextlib.suppress(OSError):
        return Path("/proc/device-tree/model").read_text(encoding="utf-8").rstrip("\0")
    return platform.processor() or platform.machine()


def cpu_cores() -> int | None:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


# --- The file


def read_profile(path: str | os.PathLike, model: Any = None) -> BudgetProfile:
    """Read and check a profile.

    Args:
        path: the file, or the folder that holds budget_profile.json.
        model: the ES-SSM that it must belong to. Budgets that it does not run as they were measured are left out:
            those above its capacity, or where a layer now has fewer channels.
    Raises:
        FileNotFoundError: there is none.
        ValueError: not JSON, another format, a field that is missing, or another model's profile.
    """
    path = _profile_path(path)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {path}: write it with essm-calibrate") from None
    except (OSError, ValueError, RecursionError) as error:  # damaged JSON or UTF-8
        raise ValueError(f"{path} cannot be read: {error}; run essm-calibrate again, or fetch it again") from error
    version = record.get("format_version") if isinstance(record, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version must be {FORMAT_VERSION}, got {reprlib.repr(version)}; "
            "delete the file and run essm-calibrate again"
        )
    try:
        devices = {
            name: _read(DeviceProfile, entry, rows=tuple(_read(Measurement, row) for row in entry["rows"]))
            for name, entry in record["devices"].items()
            if entry["rows"]
        }
        quality = _read(Quality, record["quality"], timings=())
        profile = _read(BudgetProfile, record, quality=quality, devices=devices)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): run essm-calibrate again, or fetch it again") from error
    if model is None:
        return profile
    if not same_weights(profile.weights, weights_checksum(model)):
        raise ValueError(
            f"{path} was measured on other weights: measure this model with essm-calibrate, or, if it was only "
            "quantised or cast to fp16, choose on the one that it was made from"
        )
    # A budget is the same if every layer runs as many channels as it did: K, or all that it had.
    layers = list(zip(profile.capacities, model.config.capacities))
    same = [K for K in quality.budgets if all(min(K, a) == min(K, b) for a, b in layers)]
    if not same:
        raise ValueError(f"{path}: this model runs none of its budgets {list(quality.budgets)} as they were measured")
    return profile.up_to(max(same))


def _read(cls: Any, record: Mapping[str, Any], **read: Any) -> Any:
    """An instance of a dataclass from a JSON object, but for the fields that are read already."""
    own = {each.name: record[each.name] for each in fields(cls) if each.name not in read}
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}, **read)


def _profile_path(path: str | os.PathLike) -> Path:
    """The file itself, or the one that belongs into that folder."""
    path = Path(path)
    return path / PROFILE_NAME if path.is_dir() else path
