# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which budget for this machine? Quality of a saved model at every budget, and its speed and memory on this device.

    python train/calibrate.py --model runs/x/model --text_files held_out.txt             # a language model
    python train/calibrate.py --model runs/y/model --test_file test.csv --features_column "t*"      # a classifier
    python train/calibrate.py --model runs/y/model --task smnist --data_dir data         # of train/list_tasks.py
    python train/calibrate.py --model runs/x/model --timing_only                         # the same on another device

Left in the model's folder: budget_profile.json, with which `choose_budget` answers; the presets "sweet-spot",
"collapse-boundary" and "full" in config.json, for `spectral_budget="sweet-spot"`; and budget_profile.png. Calibrated
again, quality and this device's figures are replaced; those of other devices and presets of other names stay.

Quality is bits per byte by the context rule of budget_sweep.py, or accuracy. The drop against the full budget is given
with its standard error over blocks or samples. Prefill is a forward pass over the whole prompt (a sample, for a
classifier), decode one greedy step after it, as `forward` runs it: what `generate` does around it comes on top. Times
are medians over rounds in which budgets and batch sizes take turns, memory is what a call needs beside the weights;
the inputs are random.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
)

from essm_train.commands.errors import run_script
from essm_train.commands.train_classification import ACCURACY, ClassificationArguments, check_weights, class_names
from essm_train.data.classification import Reader, Split, collate, load_classification, load_test, read_record
from essm_train.data.text import (
    ByteEncoder,
    TokenizerEncoder,
    evaluation_blocks,
    load_text,
    open_tokenizer,
    read_files,
    text_labels,
    to_stream,
)
from essm_train.measure.budget_sweep import BITS_PER_BYTE
from essm_train.measure.timing import check_peak_memory, decoder, paired, peak_memory, pick_device, threads
from essm_train.models import TRUST_HELP, load_model
from essm_train.run.engine import Metric, check_writable, run_at_budget
from modeling_essm import ESSMConfig
from modeling_essm.budgets.fingerprint import fingerprint
from modeling_essm.budgets.profile import (
    BudgetProfile,
    DeviceProfile,
    Measurement,
    Quality,
    device_name,
)
from modeling_essm.budgets.profile_file import read_profile
from modeling_essm.loading_essm import PROFILE_NAME, write_text
from modeling_essm.training.budget_dropout import BUDGETS, clip_budgets

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Case = tuple[int, int]  # batch size, budget


@dataclass
class CalibrateArguments:
    """Arguments of the script."""

    model: str = field(metadata={"help": "Folder of a saved ES-SSM; the results go there too."})
    text_files: list[str] | None = field(default=None, metadata={"help": "Held-out text, for a language model."})
    test_file: list[str] | None = field(
        default=None, metadata={"help": "Held-out parquet, json(l) or csv files, for a classifier, with their columns:"}
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Or a data set of the Hub or a local folder, whose test split counts if any."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Which configuration of that data set."})
    text_column: str | None = field(default=None, metadata={"help": "As in train_classification.py."})
    features_column: str | None = field(default=None, metadata={"help": "As in train_classification.py."})
    label_column: str = field(default="label", metadata={"help": "As in train_classification.py."})
    task: str | None = field(default=None, metadata={"help": "Or a task of train/list_tasks.py, by its held-out data."})
    data_dir: str = field(default="data", metadata={"help": "Folder of the tasks' data."})
    scale: str = field(default="full", metadata={"help": "'full' or 'small', as the model was trained."})
    timing_only: bool = field(default=False, metadata={"help": "Keep the quality measured before, needs no data."})
    budgets: list[int] | None = field(
        default=None, metadata={"help": "Budgets K, the full one always among them; by default those of training."}
    )
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8], metadata={"help": "Rows of a timed call."})
    prompt_length: int | None = field(
        default=None, metadata={"help": "Positions of a timed prefill; by default those of a held-out block or sample."}
    )
    decode_tokens: int = field(default=64, metadata={"help": "Tokens decoded for one timing."})
    rounds: int = field(default=7, metadata={"help": "Rounds of timing; beyond a minute, three."})
    dtype: str = field(default="auto", metadata={"help": "auto (as saved), float32, bfloat16 or float16."})
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda."})
    threads: int | None = field(default=None, metadata={"help": "CPU threads, by default those torch takes."})
    block_size: int | None = field(
        default=None, metadata={"help": "With text_files: tokens per block, by default 512 or filter_length if less."}
    )
    max_blocks: int = field(default=256, metadata={"help": "With text_files: blocks, spread evenly over the text."})
    eval_batch_size: int = field(default=8, metadata={"help": "Blocks or samples per forward pass for quality."})
    trust_remote_code: bool = field(default=False, metadata={"help": TRUST_HELP})

    def __post_init__(self) -> None:
        names = ("text_files", "test_file", "dataset_name", "task")
        given = [name for name in names if getattr(self, name)]
        if self.timing_only and given:
            raise ValueError(f"timing_only measures no quality: give it without {', '.join(given)}")
        if not self.timing_only and len(given) != 1:
            raise ValueError(f"give {', '.join(names)} or timing_only, one of them, got {given or 'none'}")
        names = ("decode_tokens", "rounds", "max_blocks", "eval_batch_size", "prompt_length", "threads", "block_size")
        values = {name: [getattr(self, name)] for name in names if getattr(self, name) is not None}
        for name, numbers in (values | {"batch_sizes": self.batch_sizes, "budgets": self.budgets or [1]}).items():
            for value in numbers:
                if value < 1:
                    raise ValueError(f"{name} must be at least 1, got {value}")
        if self.block_size == 1:
            raise ValueError("block_size must be at least 2, got 1")
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype must be one of {['auto', *DTYPES]}, got {self.dtype!r}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be one of ['auto', 'cpu', 'cuda'], got {self.device!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device must be 'auto' or 'cpu' on this machine, which has no CUDA device, got 'cuda'")


# ---------------------------------------------------------------------------------------------------------------------
# Quality.


@dataclass(frozen=True)
class HeldOut:
    """Held-out data of one kind.

    Attributes:
        score: (model, K) to two (n,) float64 tensors, one entry per block or sample; the metric is the ratio of their
            sums.
        length: positions of the longest. description: for people.
    """

    metric: Metric
    score: Callable[[PreTrainedModel, int], tuple[Tensor, Tensor]]
    length: int
    description: str


def hold_out_blocks(
    input_ids: Tensor, special_ids: Sequence[int], bytes_per_token: float, batch_size: int, description: str
) -> HeldOut:
    """Bits and bytes of each block (n, L); special tokens are not scored."""
    labels = text_labels(input_ids, special_ids)
    num_bytes = (labels[:, 1:] != -100).sum(1).double() * bytes_per_token

    @torch.no_grad()
    def score(model: PreTrainedModel, K: int) -> tuple[Tensor, Tensor]:
        bits = []
        for start in range(0, len(input_ids), batch_size):
            rows = slice(start, start + batch_size)
            logits = run_at_budget(model, {"input_ids": input_ids[rows].to(model.device)}, K).logits
            targets = labels[rows, 1:].to(logits.device)
            nats = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="none")
            bits.append(nats.view(targets.shape).double().sum(1).cpu() / math.log(2))
        return torch.cat(bits), num_bytes

    description = f"{description}; {len(input_ids)} blocks of {input_ids.shape[1]} tokens"
    return HeldOut(BITS_PER_BYTE, score, input_ids.shape[1], description)


def hold_out_samples(reader: Reader, split: Split, batch_size: int, description: str) -> HeldOut:
    """Hits among the samples of a split."""

    @torch.no_grad()
    def score(model: PreTrainedModel, K: int) -> tuple[Tensor, Tensor]:
        hits = []
        for start in range(0, len(split.samples), batch_size):
            rows = range(start, min(start + batch_size, len(split.samples)))
            batch = collate(reader, [split.samples[row] for row in rows])
            labels = batch.pop("labels")
            logits = run_at_budget(model, {name: v.to(model.device) for name, v in batch.items()}, K).logits
            hits.append((logits.argmax(-1).cpu() == labels).double())
        return torch.cat(hits), torch.ones(len(split.samples), dtype=torch.float64)

    length = max(len(sample.values) for sample in split.samples)
    return HeldOut(ACCURACY, score, length, f"{description}; {len(split.samples):,} samples: {split.name}")


def open_own_samples(args: CalibrateArguments) -> HeldOut:
    """The files or data set that the arguments name, read as the classifier was trained: see its features.json or
    tokenizer. Raises ValueError if they cannot be read, or do not fit the model."""
    folder, config = Path(args.model), ESSMConfig.from_pretrained(args.model)
    record, max_length = read_record(folder), config.filter_length
    if args.text_column and (folder / "tokenizer_config.json").exists():
        max_length = min(max_length, open_tokenizer(args.model).model_max_length)
    arguments = ClassificationArguments(
        model_name_or_path=args.model,
        train_file=args.test_file,  # is not looked at
        test_file=args.test_file,
        dataset_name=args.dataset_name,
        dataset_config_name=args.dataset_config_name,
        text_column=args.text_column,
        features_column=args.features_column,
        label_column=args.label_column,
        max_length=record.get("max_length", max_length),
        frame_length=record.get("frame_length"),
    )
    reader, split, names = load_test(arguments, class_names(config), record)
    check_weights(arguments, config, reader, len(names or config.id2label), names)
    title = args.dataset_name or ", ".join(Path(path).name for path in args.test_file or [])
    return hold_out_samples(reader, split, args.eval_batch_size, title)


def open_held_out(args: CalibrateArguments, config: dict[str, Any]) -> HeldOut:
    """The data that the arguments name.

    Raises:
        ValueError: data that cannot be read, or not of the model's kind. FileNotFoundError: a task's data is absent.
    """
    causal, batch_size = _is_causal(config), args.eval_batch_size
    if args.text_files:
        if not causal:
            raise ValueError("text_files measure language models; a classifier needs test_file, dataset_name or task")
        encoder: Any = ByteEncoder()
        if config["vocab_size"] != encoder.vocab_size:
            encoder = TokenizerEncoder(
                load_model(AutoTokenizer, args.model, trust_remote_code=args.trust_remote_code), "of the model"
            )
        stream, density = to_stream(read_files(args.text_files), encoder)
        block_size = args.block_size or min(512, config["filter_length"])
        blocks = evaluation_blocks(stream, block_size, args.max_blocks, encoder.pad_id)
        names = ", ".join(Path(path).name for path in args.text_files)
        return hold_out_blocks(blocks, encoder.special_ids, density, batch_size, names)

    if args.task is None:
        if causal:
            raise ValueError(
                "test_file and dataset_name measure classifiers; a language model needs text_files or task"
            )
        return open_own_samples(args)

    from essm_train.tasks.catalog import get_task, make_arguments

    spec = get_task(args.task)
    if spec.script == "retrieval":
        raise ValueError(f"task {args.task!r} is evaluated by its own script, train/train_retrieval.py")
    if causal != (spec.script == "train_clm"):
        kind = "a language model" if causal else "a classifier"
        raise ValueError(f"task {args.task!r} is one of {spec.script}.py, and {args.model} holds {kind}")
    arguments = make_arguments(spec.name, args.data_dir, args.scale)
    title = f"{spec.title} ({args.scale} scale)"
    if not causal:
        data = load_classification(arguments)
        return hold_out_samples(data.reader, data.test or data.validation, batch_size, title)
    byte_encoder = ByteEncoder()
    text = load_text(arguments, byte_encoder)
    return hold_out_blocks(text.held_out, byte_encoder.special_ids, text.bytes_per_token, batch_size, title)


def measure_quality(model: PreTrainedModel, held_out: HeldOut, budgets: Sequence[int]) -> Quality:
    """The metric at every budget and its standard errors, those of a ratio of sums."""
    values, influences = [], []  # of each sample on the ratio
    for K in budgets:
        print(f"quality: K={K}", flush=True)
        totals, weights = held_out.score(model, K)
        value = float(totals.sum() / weights.sum())
        values.append(value)
        influences.append((totals - value * weights) / weights.sum())
    n, full = len(influences[0]), values[-1]
    error = lambda influence: float((influence.square().sum() * n / max(1, n - 1)).sqrt())  # noqa: E731
    drops = [
        (influence - v / full * influences[-1]) / full if full else influence
        for influence, v in zip(influences, values)
    ]
    return Quality(
        *held_out.metric,
        held_out.description,
        samples=n,
        length=held_out.length,
        date=_today(),
        dtype=str(model.dtype)[6:],
        budgets=tuple(budgets),
        values=tuple(values),
        standard_errors=tuple(map(error, influences)),
        drop_errors=tuple(map(error, drops)),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Time and memory.


@torch.inference_mode()
def measure_device(
    model: PreTrainedModel,
    budgets: Sequence[int],
    batch_sizes: Sequence[int],
    prompt_length: int,
    decode_tokens: int,
    rounds: int,
) -> DeviceProfile:
    """Prefill and, of a language model, decoding at every budget and batch size on the model's device."""
    causal = hasattr(model, "lm_head")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler tells of its every start and stop
    check_peak_memory(model.device)
    inputs = {size: random_inputs(model, size, prompt_length) for size in batch_sizes}
    keep = {"use_cache": True, "logits_to_keep": 1} if causal else {}
    cases = [(size, K) for size in batch_sizes for K in budgets]
    print(f"time and memory: prefill at batch sizes {list(batch_sizes)}", flush=True)
    prefills = {(size, K): _call(model, **inputs[size], **keep, spectral_budget=K) for size, K in cases}
    caches = {case: prefills[case]().past_key_values for case in cases} if causal else {}
    rows = _measure("prefill", prefills, prefills, caches, prompt_length, 1, model.device, rounds)
    if causal:
        print(f"time and memory: decode at batch sizes {list(batch_sizes)}", flush=True)
        token = {size: inputs[size]["input_ids"][:, -1:] for size in batch_sizes}
        decodes, steps = (
            {(size, K): decoder(model, caches[size, K], token[size], K, count) for size, K in cases}
            for count in (decode_tokens, 1)
        )
        rows += _measure("decode", decodes, steps, caches, 1, decode_tokens, model.device, rounds)
    return DeviceProfile(
        device_name(model.device),
        date=_today(),
        dtype=str(model.dtype)[6:],
        threads=torch.get_num_threads(),
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        prompt_length=prompt_length,
        rounds=rounds,
        weight_bytes=model.get_memory_footprint(),
        rows=tuple(rows),
    )


def random_inputs(model: PreTrainedModel, batch_size: int, length: int) -> dict[str, Tensor]:
    """What the model reads, (B, L) ids or (B, L, F) features."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    if config.num_input_features is not None:
        features = torch.rand(batch_size, length, config.num_input_features, generator=generator) * 2 - 1
        return {"input_features": features.to(model.device, model.dtype)}
    ids = torch.randint(0, min(256, config.vocab_size), (batch_size, length), generator=generator)
    return {"input_ids": ids.to(model.device)}


def _call(model: PreTrainedModel, **inputs: Any) -> Callable[[], Any]:
    return lambda: model(**inputs)


def _measure(
    phase: str,
    calls: dict[Case, Callable[[], Any]],
    memory_calls: dict[Case, Callable[[], Any]],
    caches: dict[Case, Any],
    positions: int,
    steps: int,
    device: torch.device,
    rounds: int,
) -> list[Measurement]:
    """Rows of one phase: time of `calls`, each `steps` steps of `positions`, and memory of `memory_calls`."""
    seconds = paired(calls, device, rounds, warmup=1, limit_seconds=60.0)
    rows = []
    for (size, K), samples in seconds.items():
        ms = [1e3 * s / steps for s in samples]
        median = statistics.median(ms)
        speed = size * positions / median * 1e3
        peak = max(0, peak_memory(memory_calls[size, K], device))
        cache_bytes = caches[size, K].num_bytes if caches else 0
        rows.append(Measurement(phase, size, K, median, min(ms), max(ms), speed, peak, cache_bytes))
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# The picture, and the presets.


def draw(profile: BudgetProfile) -> Figure:
    """Quality against the time of a decoded token (of a call, for a classifier): a panel per device."""
    quality, presets = profile.quality, profile.presets()
    value = dict(zip(quality.budgets, quality.values))
    figure = Figure(figsize=(7 * len(profile.devices), 4.8), layout="constrained")
    panels = figure.subplots(1, len(profile.devices), sharey=True, squeeze=False)[0]
    for axes, entry in zip(panels, profile.devices.values()):
        phase = entry.phases[-1]
        for i, size in enumerate(entry.batch_sizes(phase)):
            rows = [row for K, row in entry.at(phase, size).items() if K in value]
            x, y = [row.median_ms for row in rows], [value[row.budget] for row in rows]
            spread = [[r.median_ms - r.min_ms for r in rows], [r.max_ms - r.median_ms for r in rows]]
            axes.errorbar(x, y, xerr=spread, fmt="none", ecolor=f"C{i}", elinewidth=0.8, alpha=0.7)
            axes.plot(x, y, "o-", color=f"C{i}", markersize=4, label=f"batch size {size}")
            style: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 8, "color": f"C{i}"}
            style["path_effects"] = [withStroke(linewidth=2.5, foreground="white")]
            for row, at in zip(rows, zip(x, y)):
                axes.annotate(str(row.budget), at, (0, 7), zorder=4, **style)
        for name, marker, face in (("collapse-boundary", "^", "none"), ("sweet-spot", "*", "gold")):
            K = presets[name]
            at = [row.median_ms for row in entry.rows if (row.phase, row.budget) == (phase, K)]
            label = f"K = {K}: {name.replace('-', ' ')}"
            (points,) = axes.plot(at, [value[K]] * len(at), marker, color=face, markersize=14, zorder=3, label=label)
            points.set_markeredgecolor("tab:red")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        per = "decoded token" if phase == "decode" else f"call over {entry.prompt_length} positions"
        axes.set_xlabel(f"ms per {per}: median, and range of the rounds (log scale)")
        axes.set_title(f"{entry.device}\n{entry.dtype}, CPU threads: {entry.threads}", fontsize=10)
        axes.grid(alpha=0.3)
        axes.margins(y=0.12)
        axes.legend(markerscale=0.7)
    better = "higher" if quality.higher_is_better else "lower"
    panels[0].set_ylabel(f"{quality.metric.replace('_', ' ')} of held-out data ({better} is better)")
    return figure


def store_presets(folder: Path, presets: dict[str, int]) -> None:
    """Put them among config.json's budget_presets; all else in it stays, presets of other names too."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["budget_presets"] = {**(config.get("budget_presets") or {}), **presets}
    write_text(path, json.dumps(config, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# All of it together.


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises ValueError if it is absent, damaged, or not an ES-SSM's with a head."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"model must be the folder of a saved model, got {str(folder)!r}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if config.get("model_type") != "essm":
        raise ValueError(f"{path}: model_type must be 'essm', which has budgets, got {config.get('model_type')!r}")
    architecture = (config.get("architectures") or [None])[0]
    if architecture not in ("ESSMForCausalLM", "ESSMForSequenceClassification"):
        raise ValueError(
            f"{path}: the architecture must be ESSMForCausalLM or ESSMForSequenceClassification, got {architecture!r}"
        )
    return config


def _is_causal(config: dict[str, Any]) -> bool:
    return config["architectures"][0] == "ESSMForCausalLM"


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def choose_budgets(wanted: Sequence[int] | None, capacity: int, known: Sequence[int] | None) -> tuple[int, ...]:
    """The budgets to measure.

    Args:
        wanted: those asked for. known: those that have a quality, when only times are measured.
    Raises:
        ValueError: one above the capacity, or without a quality.
    """
    if known is not None:
        unknown = sorted(set(wanted or ()) - set(known))
        if unknown:
            raise ValueError(f"budgets must be among those with a quality, {list(known)}, got {unknown}")
        return tuple(sorted(set(wanted or known)))
    if wanted and max(wanted) > capacity:
        raise ValueError(f"budgets must be in [1, {capacity}], got {max(wanted)}")
    return clip_budgets((*(wanted or BUDGETS), capacity), capacity)


def check_lengths(args: CalibrateArguments, config: dict[str, Any]) -> None:
    """Raises ValueError if what was asked for passes the model's filter_length."""
    longest = config["filter_length"]
    room = longest - args.decode_tokens if _is_causal(config) else longest
    if room < 1:
        raise ValueError(f"decode_tokens must be in [1, {longest - 1}] (filter_length - 1), got {args.decode_tokens}")
    if args.prompt_length is not None and args.prompt_length > room:
        raise ValueError(
            f"prompt_length must be in [1, {room}] (filter_length - decode_tokens), got {args.prompt_length}"
        )
    if args.block_size is not None and args.block_size > longest:
        raise ValueError(f"block_size must be in [2, {longest}] (filter_length), got {args.block_size}")


def calibrate(args: CalibrateArguments) -> BudgetProfile:
    """Measure, and write the profile, the presets and the picture.

    Raises:
        ValueError: arguments, model, data or an existing profile that cannot work, before anything is measured.
        FileNotFoundError: the task's data, or with timing_only the profile, is absent.
    """
    folder = Path(args.model)
    config = read_config(folder)
    check_lengths(args, config)
    check_writable(folder)
    device = pick_device(args.device)
    load = AutoModelForCausalLM if _is_causal(config) else AutoModelForSequenceClassification
    dtype: Any = DTYPES.get(args.dtype, "auto")
    model = load_model(load, folder, trust_remote_code=args.trust_remote_code, dtype=dtype).to(device).eval()
    present = None
    if args.timing_only or (folder / PROFILE_NAME).exists():
        present = read_profile(folder, model)
    known = present.quality.budgets if args.timing_only and present is not None else None
    budgets = choose_budgets(args.budgets, config["num_spectral_channels"], known)
    held_out = None if args.timing_only else open_held_out(args, config)

    with threads(args.threads or torch.get_num_threads()):
        if held_out is None:
            assert present is not None
            profile = present
        else:
            quality = measure_quality(model, held_out, budgets)
            profile = BudgetProfile(fingerprint(model), quality, present.devices if present else {})
        length = args.prompt_length or profile.quality.length
        room = config["filter_length"] - (args.decode_tokens if _is_causal(config) else 0)
        entry = measure_device(model, budgets, args.batch_sizes, min(length, room), args.decode_tokens, args.rounds)
    profile = profile.merge(entry)
    path = profile.save(folder)
    store_presets(folder, profile.presets())
    print(profile.table(entry.device))
    picture = path.with_name(f".partial-{PROFILE_NAME}.png")
    draw(profile).savefig(picture, dpi=150)
    os.replace(picture, path.with_suffix(".png"))
    print(f"saved {path}, {path.with_suffix('.png').name}; presets in config.json: {profile.presets()}")
    return profile


def main(argv: Sequence[str] | None = None) -> BudgetProfile:
    """From the command line."""
    (args,) = HfArgumentParser(CalibrateArguments).parse_args_into_dataclasses(argv)
    return calibrate(args)


def run() -> None:
    """The command."""
    run_script(main)


if __name__ == "__main__":
    run()
