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
import math
import os
import platform
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file, logging

from .fingerprint import Fingerprint, fingerprint

logger = logging.get_logger(__name__)

FILE_NAME = "budget_profile.json"
FORMAT_VERSION = 1
PHASES = ("prefill", "decode")
SWEET_SPOT_DROP = 0.02  # of the full budget's quality, the paper's
COLLAPSE_QUALITY = 0.90  # what is left of the quality above the collapse boundary

_LARGEST = 2**63 - 1  # integer of a file
_ROUNDING = 1e-9  # a drop of exactly 2% is within 2%


# ---------------------------------------------------------------------------------------------------------------------
# What a profile holds.


@dataclass(frozen=True)
class Quality:
    """The metric at each budget, ascending; the last budget is the full one.

    Attributes:
        metric, higher_is_better: what the values are. data: what they were measured on, for people.
        samples: blocks or samples measured. length: positions of the longest. date: ISO. dtype: that it ran in.
        standard_errors: of each value, over the samples.
        drop_errors: of each value's difference to the full budget's, relative to the latter as `drops` are. All budgets
            saw the same samples, so these are the smaller ones, and the ones that a comparison of budgets needs.
    """

    metric: str
    higher_is_better: bool
    data: str
    samples: int
    length: int
    date: str
    dtype: str
    budgets: tuple[int, ...]
    values: tuple[float, ...]
    standard_errors: tuple[float, ...]
    drop_errors: tuple[float, ...]

    @property
    def drops(self) -> tuple[float, ...]:
        """Relative loss of quality against the full budget: 0.02 is 2% worse, negative is better."""
        full = self.values[-1]
        losses = ((full - value if self.higher_is_better else value - full) for value in self.values)
        return tuple(loss / abs(full) if full else math.copysign(math.inf, loss) if loss else 0.0 for loss in losses)

    def smallest_within(self, drop: float) -> int:
        """The smallest budget that loses at most `drop`."""
        return next(K for K, loss in zip(self.budgets, self.drops) if loss <= drop + _ROUNDING)

    def presets(self) -> dict[str, int]:
        """Names for config.budget_presets: the sweet spot loses at most 2%, the collapse boundary keeps 90%.

        Where lower is better, quality is 1 / value.
        """
        kept = COLLAPSE_QUALITY
        collapse = 1 - kept if self.higher_is_better else 1 / kept - 1
        marks = {"sweet-spot": SWEET_SPOT_DROP, "collapse-boundary": collapse}
        return {name: self.smallest_within(drop) for name, drop in marks.items()} | {"full": self.budgets[-1]}


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
        lists = ("budgets", "values", "standard_errors", "drop_errors")
        cut = replace(quality, **{name: getattr(quality, name)[:kept] for name in lists})
        devices = {
            name: replace(entry, rows=tuple(row for row in entry.rows if row.budget <= capacity))
            for name, entry in self.devices.items()
        }
        model = replace(self.model, capacities=tuple(min(held, capacity) for held in self.model.capacities))
        return BudgetProfile(model, cut, {name: entry for name, entry in devices.items() if entry.rows})

    def presets(self) -> dict[str, int]:
        """See `Quality.presets`."""
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
            return self.quality.smallest_within(max_quality_drop or 0.0)
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
        good = [K for K in drops if drops[K] <= max_quality_drop + _ROUNDING]
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
                "or run train/calibrate.py --timing_only here"
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
        for name, K in quality.presets().items():
            marks[K] += f"  {_MARKS[name]}" if name in _MARKS else ""
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

    def save(self, path: str | os.PathLike) -> Path:
        """Write the file, or budget_profile.json in that folder, in one move; returns its path."""
        path = _file(path)
        devices = {name: asdict(entry) for name, entry in self.devices.items()}
        for entry in devices.values():
            del entry["device"]  # it is the key
        record = {"format_version": FORMAT_VERSION, "model": asdict(self.model), "quality": asdict(self.quality)}
        write_text(path, json.dumps(record | {"devices": devices}, indent=1, allow_nan=False) + "\n")
        return path


_VERBS = {"prefill": "reads its input", "decode": "decodes a token"}
_MARKS = {"sweet-spot": "* sweet spot", "collapse-boundary": "^ collapse boundary"}


def _check_limit(name: str, value: Any, positive: bool) -> None:
    if not _is_number(value) or value < 0 or (positive and value == 0):
        raise ValueError(f"{name} must be a finite number {'>' if positive else '>='} 0, got {reprlib.repr(value)}")


def write_text(path: Path, text: str) -> None:
    """Give the file its new text in one move: whoever is interrupted leaves the old file, and nothing else."""
    temporary = path.with_name(f".partial-{path.name}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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


# ---------------------------------------------------------------------------------------------------------------------
# Reading.


class _Fields:
    """Checked fields of a JSON object. Every ValueError names the file, the field, its value and what is legal."""

    def __init__(self, values: Any, path: Path, name: str = ""):
        self.path, self.prefix = path, f"{name}." if name else ""
        if not isinstance(values, dict):
            raise ValueError(f"{path}: {name or 'the file'} must be a JSON object, got {reprlib.repr(values)}")
        self.values = values

    def get(self, name: str, legal: str, check: Any) -> Any:
        value = self.values.get(name)
        if name not in self.values or not check(value):
            got = reprlib.repr(value) if name in self.values else "nothing"
            raise ValueError(f"{self.path}: {self.prefix}{name} must be {legal}, got {got}")
        return value

    def integer(self, name: str, least: int, most: int = _LARGEST) -> int:
        return self.get(name, f"an integer in [{least}, {most}]", lambda v: type(v) is int and least <= v <= most)

    def number(self, name: str, least: float = 0.0) -> float:
        return float(self.get(name, f"a finite number >= {least:g}", lambda v: _is_number(v) and v >= least))

    def numbers(self, name: str, count: int | None = None, least: float = -math.inf) -> tuple[float, ...]:
        legal = "a list of " + ("" if count is None else f"{count} ") + "finite numbers"
        legal += "" if least == -math.inf else f" >= {least:g}"
        fits = lambda v: isinstance(v, list) and len(v) == (len(v) if count is None else count)  # noqa: E731
        values = self.get(name, legal, lambda v: fits(v) and all(_is_number(x) and x >= least for x in v))
        return tuple(map(float, values))

    def budgets(self, name: str, most: int = _LARGEST, ascending: bool = False) -> tuple[int, ...]:
        legal = f"a list of {'ascending ' if ascending else ''}integers in [1, {most}]"
        fits = lambda v: isinstance(v, list) and v and all(type(K) is int and 1 <= K <= most for K in v)  # noqa: E731
        return tuple(self.get(name, legal, lambda v: fits(v) and (not ascending or v == sorted(set(v)))))

    def text(self, name: str) -> str:
        return self.get(name, "text", lambda v: isinstance(v, str))

    def one_of(self, name: str, legal: Sequence[Any]) -> Any:
        return self.get(name, f"one of {list(legal)}", lambda v: any(type(v) is type(x) and v == x for x in legal))

    def each(self, name: str) -> dict[str, _Fields]:
        """The objects of an object, by name."""
        objects = self.object(name).values
        return {key: _Fields(value, self.path, f"{self.prefix}{name}[{key!r}]") for key, value in objects.items()}

    def rows(self, name: str) -> list[_Fields]:
        """The objects of a list."""
        rows = self.get(name, "a list of at least one object", lambda v: isinstance(v, list) and len(v) > 0)
        return [_Fields(row, self.path, f"{self.prefix}{name}[{i}]") for i, row in enumerate(rows)]

    def object(self, name: str) -> _Fields:
        return _Fields(self.values.get(name), self.path, self.prefix + name)


def _is_number(value: Any) -> bool:
    """Whether it is finite, as a float too."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _file(path: str | os.PathLike) -> Path:
    path = Path(path)
    return path / FILE_NAME if path.is_dir() else path


def read_profile(path: str | os.PathLike, model: Any = None) -> BudgetProfile:
    """Read and check a profile.

    Args:
        path: the file, or the folder that holds budget_profile.json.
        model: the ES-SSM that it must belong to; where that has fewer channels, larger budgets are left out.
    Raises:
        FileNotFoundError: there is none.
        ValueError: not JSON, another format, a field that is missing or out of range, a budget above the capacity, or
            another model's profile.
    """
    path = _file(path)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {path}: write it with train/calibrate.py") from None
    except (OSError, ValueError, RecursionError) as error:  # damaged JSON or UTF-8
        raise ValueError(
            f"{path} cannot be read: {error}; delete it and run train/calibrate.py again, or fetch it again"
        ) from error
    fields = _Fields(record, path)
    fields.one_of("format_version", [FORMAT_VERSION])
    measured = _read_fingerprint(fields.object("model"))
    capacity = max(measured.capacities)
    devices = {name: _read_device(name, entry, capacity) for name, entry in fields.each("devices").items()}
    profile = BudgetProfile(measured, _read_quality(fields.object("quality"), capacity), devices)
    return profile if model is None else _for_model(profile, path, model)


def _for_model(profile: BudgetProfile, path: Path, model: Any) -> BudgetProfile:
    here = fingerprint(model)
    difference = profile.model.difference(here)
    if difference is not None:
        raise ValueError(
            f"{path} was measured on another model: this one has {difference}. Delete it, or measure this model with "
            "train/calibrate.py"
        )
    # At a budget K both run the same channels if every layer has K of them, or as many as it had.
    layers = list(zip(profile.model.capacities, here.capacities))
    same = [K for K in profile.quality.budgets if all(min(K, a) == min(K, b) for a, b in layers)]
    restricted = profile.restricted_to(max(same)) if same else None
    if restricted is None:
        raise ValueError(
            f"{path}: quality.budgets must hold one in [1, {min(here.capacities)}], the capacity of this model, "
            f"got {list(profile.quality.budgets)}"
        )
    return restricted


def _read_fingerprint(fields: _Fields) -> Fingerprint:
    samples = fields.object("samples")
    values = {name: samples.numbers(name) for name in samples.values}
    return Fingerprint(fields.integer("hidden_size", 1), fields.budgets("capacities"), values)


def _read_quality(fields: _Fields, capacity: int) -> Quality:
    budgets = fields.budgets("budgets", capacity, ascending=True)
    n = len(budgets)
    return Quality(
        fields.text("metric"),
        fields.one_of("higher_is_better", [True, False]),
        fields.text("data"),
        fields.integer("samples", 1),
        fields.integer("length", 1),
        fields.text("date"),
        fields.text("dtype"),
        budgets,
        fields.numbers("values", n),
        fields.numbers("standard_errors", n, 0.0),
        fields.numbers("drop_errors", n, 0.0),
    )


def _read_device(name: str, fields: _Fields, capacity: int) -> DeviceProfile:
    rows = []
    for row in fields.rows("rows"):
        low = row.number("min_ms")
        median = row.number("median_ms", low)
        rows.append(
            Measurement(
                row.one_of("phase", PHASES),
                row.integer("batch_size", 1),
                row.integer("budget", 1, capacity),
                median,
                low,
                row.number("max_ms", median),
                row.number("tokens_per_second"),
                row.integer("peak_bytes", 0),
                row.integer("cache_bytes", 0),
            )
        )
    versions = fields.object("versions")
    return DeviceProfile(
        name,
        fields.text("date"),
        fields.text("dtype"),
        fields.integer("threads", 1),
        {library: versions.text(library) for library in versions.values},
        fields.integer("prompt_length", 1),
        fields.integer("rounds", 1),
        fields.integer("weight_bytes", 0),
        tuple(rows),
    )


def load_profile(model: Any) -> BudgetProfile | None:
    """The profile beside the weights that the model was loaded from, a folder or a Hub repository; None without one.

    The Hub is asked only for a model that was loaded from there, never for one from a folder or made in memory.

    Raises:
        ValueError: as `read_profile`.
    """
    # Without an origin it was made in memory, perhaps from a saved configuration.
    source, where = getattr(model, "_origin", None) or (model.name_or_path, None)
    if not source:
        return None
    if where is None:
        path = os.path.join(source, FILE_NAME)
        return read_profile(path, model) if os.path.isfile(path) else None
    try:
        found = cached_file(source, FILE_NAME, **where, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):  # no repository any more, or the Hub cannot be reached
        return None
    return None if found is None else read_profile(found, model)


def origin_of(source: Any, arguments: Mapping[str, Any], config: Any) -> tuple[str, dict[str, Any] | None] | None:
    """Where `from_pretrained` reads a model, as `load_profile` finds it again whatever the working directory is then.

    Args:
        source, arguments: of from_pretrained. config: that of the loaded model.
    Returns:
        an absolute folder and None, or a Hub name and arguments of `cached_file`; None without a source.
    """
    if source is None:
        return None
    if os.path.exists(source):
        return os.path.abspath(os.path.join(source, arguments.get("subfolder") or "")), None
    where = {name: arguments.get(name) for name in ("cache_dir", "local_files_only", "subfolder")}
    revision = getattr(config, "_commit_hash", None) or arguments.get("revision")
    where["revision"] = getattr(revision, "resolved", revision)  # transformers may have found out the commit
    return str(source), {name: value for name, value in where.items() if value is not None}


def choose_budget(
    model: Any,
    *,
    profile: BudgetProfile | None = None,
    max_latency_ms: float | None = None,
    max_quality_drop: float | None = None,
    phase: str | None = None,
    batch_size: int = 1,
    device: str | torch.device | None = None,
) -> int:
    """The budget that keeps to limits of time, quality or both; only budgets that were measured are considered.

    Args:
        model: an ES-SSM. profile: its own, by default read from where the model was loaded from.
        max_latency_ms: median time of a call, per decoded token or per prompt: the best budget that keeps to it, of
            equals the smallest. The times are those of `forward`; `generate` adds some of its own to every token.
        max_quality_drop: relative to the full budget, 0.02 is 2%: the smallest budget that keeps to it. With both
            limits the smallest that keeps to both.
        phase: "decode" or "prefill"; by default decode, where it was measured.
        batch_size: one that was measured. device: name of one that was measured, by default the model's; where only one
            was measured, that one, with a warning.
    Returns:
        K, for `spectral_budget`.
    Raises:
        ValueError: no profile, a bad argument, or limits that no budget keeps to: the error names the best possible.
    """
    if profile is None:
        profile = load_profile(model)
    if profile is None:
        raise ValueError(
            f"choose_budget needs {FILE_NAME} beside the model, and there is none at {model.name_or_path!r}: "
            "write it with train/calibrate.py"
        )
    return profile.choose(
        max_latency_ms=max_latency_ms,
        max_quality_drop=max_quality_drop,
        phase=phase,
        batch_size=batch_size,
        device=model.device if device is None else device,
    )
