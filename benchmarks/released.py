# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The frontier: bits per byte over the time of a token and over the weights it reads, of models that read one text.

    python -m benchmarks.released --models runs/gpu/essm-novels-6m runs/gpu/essm-novels-6m-alone-4 runs/matmamba \\
        --record benchmarks/results/released-cpu.json --writer hub_configs/essm-novels-6m \\
        --train_file novels-8mb.parquet --text_files novels-validation.parquet

Models are folders with weights, or runs of train_clm. An elastic one and a nested Mamba-2 are measured at every size
that they were trained for. All are scored on the same held-out blocks in fp32 and decode after the same context, at
batch 1 on one thread, eager, in turn within every round; peers decode by the library's own cache. Nothing is timed
before its steps give what one call over the whole text gives. Weights are those that a step reads: of an embedding that
is not also the head, it reads a row, which is not counted.

--record is an earlier report on the same held-out blocks: its models that are not named again keep their bits, and
weights drawn anew, which take the same time, are timed. So a report alone is enough to measure the times on another
machine. Below stand what a model of bytes has to beat: gzip -9, and counts of three bytes. Beside the report lie its
two pictures: the frontier, and a text that the model of --writer continues at each of its budgets.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import itertools
import json
import os
import textwrap
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import ModelOutput

from essm_train.baselines.models import BaselineForCausalLM
from essm_train.data import documents
from essm_train.data.blocks import evaluation_blocks, to_stream
from essm_train.data.tokens import ByteEncoder
from essm_train.files import write_figure
from essm_train.measure.scoring import hold_out_blocks
from essm_train.publish.hub import read_json
from modeling_essm import ESSMForCausalLM

from . import common
from .decoding import CHECKED_STEPS, Decoder

SYMBOLS = ByteEncoder.vocab_size
PIECE = 1 << 22  # symbols counted at a time
PROMPT, WRITTEN, TEMPERATURE, TEXT_BUDGETS = "She looked at him, and", 150, 0.7, (1, 2, 4, 8)
WIDTH = 90  # characters of a line in the picture of texts
WRITER = "writer"  # the name of its model in a report
ELASTIC, ALONE, NESTED = "elastic", "alone", "matmamba"
# By kind: name, colour, mark and whether its sizes are one model. Kinds of peers are their architectures.
KINDS: dict[str, tuple[str, str, str, bool]] = {
    ELASTIC: ("ES-SSM", "tab:blue", "o", True),
    ALONE: ("ES-SSM alone", "tab:blue", "D", False),
    NESTED: ("nested Mamba-2", "tab:orange", "o", True),
    "mamba2": ("Mamba-2", "tab:red", "s", False),
    "transformer": ("Llama", "tab:green", "^", False),
}
# Where a label may stand beside its point: offset in points, and its own sides there.
PLACES = [(7, 5, "left", "bottom"), (-7, -5, "right", "top"), (7, -5, "left", "top"), (-7, 5, "right", "bottom")]
PLACES += [(9, 0, "left", "center"), (-9, 0, "right", "center"), (0, 9, "center", "bottom"), (0, -9, "center", "top")]
PLACES += [(far * x, far * y, ha, va) for far in (2, 3) for x, y, ha, va in PLACES]


class WithCache:
    """A baseline that decodes by its backbone's own cache, as a whole it has none; called as a model of the library."""

    def __init__(self, model: BaselineForCausalLM):
        self.model, self.config = model, model.model.backbone.config

    def __call__(self, ids: Tensor, use_cache: bool, **cache: Any) -> Any:
        if not use_cache:
            return self.model(ids)
        embedded = self.model.model.embed_tokens(ids)
        out = self.model.model.backbone(inputs_embeds=embedded, use_cache=True, **cache)
        return ModelOutput(out, logits=self.model.lm_head(out.last_hidden_state))


def saved_model(folder: Path) -> Any:
    """In fp32, of a folder or of the run of train_clm in it. Raises ValueError if there is none."""
    folder = folder / "model" if (folder / "model" / "config.json").is_file() else folder
    read_json(folder / "config.json", "")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def new_model(config: dict[str, Any]) -> Any:
    """Of a configuration in a report, with weights drawn at random."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()


def sizes_of(model: Any) -> dict[int, Any]:
    """The models that decode, by budget from the largest down: one and the same, a nested Mamba-2 cut to each."""
    capacity = getattr(model.config, "num_spectral_channels", 1)
    budgets = sorted({capacity, *(getattr(model.config, "trained_budgets", None) or ())}, reverse=True)
    cut = model.truncate if isinstance(model, BaselineForCausalLM) and len(budgets) > 1 else lambda K: model
    return {K: cut(K) for K in budgets}


def kind_of(config: Any) -> str:
    """A key of KINDS. Raises ValueError for a model that has none."""
    kind = getattr(config, "architecture", {"llama": "transformer"}.get(config.model_type, config.model_type))
    if config.model_type == "essm":
        kind = ELASTIC if len(config.trained_budgets or ()) > 1 else ALONE
    if kind not in KINDS:
        raise ValueError(f"a model of --models must be an ES-SSM or one of {[*KINDS][2:]}, got {kind!r}")
    return kind


def weights_read(model: Any, budget: int) -> int:
    """Parameters that a decoding step reads."""
    if isinstance(model, ESSMForCausalLM):
        return common.weight_bytes(model, budget) // 4
    unread = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    return sum(p.numel() for p in model.parameters()) - unread


def runs_of(stream: np.ndarray, order: int) -> np.ndarray:
    """Every run of `order` symbols as one number."""
    number = np.zeros(max(0, len(stream) - order + 1), np.int64)
    for i in range(order):
        number = number * SYMBOLS + stream[i : i + len(number)]
    return number


def trigram_bits(train: np.ndarray, held_out: np.ndarray) -> float:
    """Bits per symbol of held_out, ids below SYMBOLS, from its third on.

    Contexts that the training text has not fall back on two bytes, on one, and on none (Witten and Bell, 1991):
    p(c | ab) = (n(abc) + T(ab) p(c | b)) / (n(ab) + T(ab)), where T counts in how many ways a context goes on.
    """
    probability = np.full(len(held_out) - 2, 1 / SYMBOLS)
    for order in (1, 2, 3):
        counts = np.zeros(SYMBOLS**order, np.int64)
        for start in range(0, len(train), PIECE):
            counts += np.bincount(runs_of(train[start : start + PIECE + order - 1], order), minlength=len(counts))
        by_context = counts.reshape(-1, SYMBOLS)
        symbols = runs_of(held_out, order)[3 - order :]
        seen, total = counts[symbols], by_context.sum(1)[symbols // SYMBOLS]
        ways = (by_context > 0).sum(1)[symbols // SYMBOLS]
        mixed = (seen + ways * probability) / np.maximum(total + ways, 1)
        probability = np.where(total > 0, mixed, probability)
    return float(-np.log2(probability).mean())


def floors(train: list[str], held_out: list[str]) -> dict[str, float]:
    """Bits per byte of the held-out text as one file by gzip -9, and by counts of three bytes of the other text."""
    text, encoder = "".join(held_out).encode(), ByteEncoder()
    trigram = trigram_bits(to_stream(train, encoder)[0], to_stream(held_out, encoder)[0])
    return {"gzip -9": 8 * len(gzip.compress(text, 9)) / len(text), "trigram": trigram}


def written(model: ESSMForCausalLM, budget: int) -> str:
    """What follows PROMPT: the first draw of seed 0."""
    torch.manual_seed(0)
    ids = torch.tensor([list(PROMPT.encode())])
    options: dict[str, Any] = {"do_sample": True, "temperature": TEMPERATURE, "min_new_tokens": WRITTEN, "top_k": 0}
    out = model.generate(ids, spectral_budget=budget, max_new_tokens=WRITTEN, **options)
    return bytes(t for t in out[0, ids.shape[1] :].tolist() if t < 256).decode(errors="replace")


def place(axes: Axes, labels: list[tuple[float, float, str, str]]) -> None:
    """Write each label, (x, y, text, colour), beside its point: where it lies on nothing that is drawn, if it can."""
    points = [axes.transData.transform([(x, y) for x, y, *_ in labels])]
    for line in axes.lines:
        at = axes.transData.transform(line.get_xydata())
        points += [np.linspace(a, b, 30) for a, b in itertools.pairwise(at)] if line.get_linestyle() == "-" else []
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in np.concatenate(points)]
    for x, y, text, colour in labels:
        for dx, dy, ha, va in PLACES:
            style: dict[str, Any] = {"ha": ha, "va": va, "color": colour, "fontsize": 8.5}
            note = axes.annotate(text, (x, y), (dx, dy), textcoords="offset points", **style)
            box = note.get_window_extent().padded(2)
            inside = axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1) and axes.bbox.y0 < box.y0
            if inside and box.y1 < axes.bbox.y1 and not box.count_overlaps(taken):
                break
            note.remove()
        else:
            dx, dy, ha, va = PLACES[0]
            box = axes.annotate(text, (x, y), (dx, dy), textcoords="offset points", **style).get_window_extent()
        taken.append(box)


def label_of(row: dict[str, Any], kind: str, largest: int) -> str:
    """Of one size: the name of its kind, once, and which size it is."""
    name, (K, several) = KINDS[kind][0], (row["budget"], KINDS[kind][3])
    if kind == NESTED:
        return name if largest == K else str(Fraction(K, largest))
    if kind == ALONE:
        return f"K = {K} alone"
    return name if not several else f"{name}, K = {K}" if largest == K else f"K = {K}"


def rows_of(report: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The models but for the writer, in the order of KINDS: kind, and rows of the report from the largest size down."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in report["models"]}
    for row in report["results"]:
        rows[row["name"]].append(row)
    for kind in KINDS:
        for name, model in report["models"].items():
            if model["kind"] == kind and name != WRITER:
                yield kind, rows[name]


def draw(report: dict[str, Any]) -> Figure:
    """Bits per byte over milliseconds a token, with the range of the rounds, and over the weights of a token."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    labels: dict[Axes, list[tuple[float, float, str, str]]] = {left: [], right: []}
    for kind, rows in rows_of(report):
        _, colour, mark, several = KINDS[kind]
        bits = [row["bits_per_byte"] for row in rows]
        style: dict[str, Any] = {"color": colour, "marker": mark, "markersize": 6, "zorder": 3}
        style |= {"linestyle": "-" if several else "", "markerfacecolor": "white" if kind == ALONE else colour}
        least, times, most = ([1e3 * row["seconds_per_token"][x] for row in rows] for x in ("min", "median", "max"))
        left.hlines(bits, least, most, color=colour, alpha=0.4)
        for axes, across in ((left, times), (right, [row["weights"] / 1e6 for row in rows])):
            axes.plot(across, bits, **style)
            for x, row in zip(across, rows):
                text = label_of(row, kind, rows[0]["budget"])
                labels[axes].append((x, row["bits_per_byte"], text, colour))
    left.set(xlabel="milliseconds a byte", ylabel="bits per byte, held out (lower is better)")
    right.set(xlabel="millions of weights that a byte reads")
    for axes in (left, right):
        axes.set_xlim(0, 1.2 * axes.get_xlim()[1])
        axes.margins(y=0.12)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.draw_without_rendering()  # lays it out, for good
    figure.set_layout_engine("none")
    for axes, some in labels.items():
        place(axes, some)
    return figure


def draw_texts(report: dict[str, Any]) -> Figure:
    """What the writer goes on with at each of its budgets, with the time of a byte and the bits beside it."""
    texts = {int(K): _lines(text) for K, text in report["texts"].items()}
    rows = {row["budget"]: row for row in report["results"] if row["name"] == WRITER}
    figure = Figure(figsize=(9.6, 0.21 * len(texts) * (1 + max(3, *map(len, texts.values())))))
    for i, (K, (first, *others)) in enumerate(texts.items()):
        row, top = rows[K], 1 - (i + 0.2) / len(texts)
        style: dict[str, Any] = {"va": "top", "fontsize": 10.5, "linespacing": 1.3, "parse_math": False}
        figure.text(0.01, top, f"K = {K}", weight="bold", color="tab:blue", **style)
        beside = f"\n{1e3 * row['seconds_per_token']['median']:.1f} ms a byte\n{row['bits_per_byte']:.2f} bits"
        figure.text(0.01, top, beside, color="0.35", **style)
        mono = style | {"family": "monospace"}
        figure.text(0.165, top, PROMPT, weight="bold", **mono)
        figure.text(0.165, top, "\n".join([" " * len(PROMPT) + first[len(PROMPT) :], *others]), **mono)
    return figure


def _lines(text: str) -> list[str]:
    shown = "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in f"{PROMPT}{text}")
    return textwrap.wrap(shown, WIDTH, break_on_hyphens=False)


def markdown(report: dict[str, Any]) -> str:
    """A table of all models and sizes; what the size of an elastic model has when it is trained alone stands beside."""
    head = ["", "ms per byte", "weights read per byte", "state of a sequence", "bits per byte", "trained alone"]
    lines, models = [head, ["---"] * len(head)], [*rows_of(report)]
    alone = {row["budget"]: f"{row['bits_per_byte']:.3f}" for kind, rows in models if kind == ALONE for row in rows}
    for kind, rows in models:
        for row in rows if kind != ALONE else []:
            K, share = row["budget"], Fraction(row["budget"], rows[0]["budget"])
            size = f", K = {K}" if kind == ELASTIC else f", {share}" if share != 1 else ""
            cells = [f"{1e3 * row['seconds_per_token']['median']:.1f}", f"{row['weights'] / 1e6:.2f}M"]
            cells += [f"{row['state_bytes'] / 1e3:,.0f} kB", f"{row['bits_per_byte']:.3f}"]
            lines.append([KINDS[kind][0] + size, *cells, alone.get(K, "") if kind == ELASTIC else ""])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__, on_cpu=True)
    p.add_argument("--models", nargs="*", type=Path, default=[], help="folders with weights, or of train_clm")
    p.add_argument("--record", type=Path, help="an earlier report, whose other models keep their bits")
    p.add_argument("--writer", type=Path, help="folder of the ES-SSM that continues a text; it is measured too")
    p.add_argument("--train_file", nargs="+", required=True, help="the text that they read")
    p.add_argument("--text_files", nargs="+", required=True, help="held-out text of the same kind")
    p.add_argument("--block_size", type=common.positive, default=1024, help="tokens per held-out block")
    p.add_argument(
        "--max_blocks", type=common.positive, default=256, help="held-out blocks, spread evenly over the text"
    )
    p.add_argument("--context", type=common.positive, default=256, help="tokens read before those that are timed")
    args = p.parse_args(argv)
    train, held_out = (list(documents.read_files(paths)) for paths in (args.train_file, args.text_files))
    if args.quick:
        train, held_out, args.max_blocks, args.context = train[:3], held_out[:1], 2, 32
    steps = 4 if args.quick else 32  # decoded tokens of one sample
    settings = {name: getattr(args, name) for name in ("block_size", "max_blocks", "context")} | {"steps": steps}
    record = json.loads(args.record.read_text(encoding="utf-8")) if args.record else {"models": {}, "results": []}
    named = [(common.name_of(path), path) for path in args.models] + ([(WRITER, args.writer)] if args.writer else [])
    folders = dict(named)
    if len(folders) < len(named):
        p.error(f"--models must be folders of different names, and none {WRITER!r}, got {[name for name, _ in named]}")
    if not folders.keys() | record["models"].keys():
        p.error("--models, --record or --writer must name a model")
    stream = to_stream(held_out, ByteEncoder())[0]
    blocks = evaluation_blocks(stream, args.block_size, args.max_blocks)
    settings["held_out"] = hashlib.sha256(blocks.numpy().tobytes()).hexdigest()
    if args.record and record["settings"]["held_out"] != settings["held_out"]:
        scored = {name: record["settings"][name] for name in ("block_size", "max_blocks")}
        p.error(f"--record has the bits of other held-out blocks, {scored}: give it the same text and sizes")
    if not CHECKED_STEPS < args.context < len(stream):
        legal = f"above {CHECKED_STEPS} and below the {len(stream)} tokens of the held-out text"
        p.error(f"--context must be {legal}, got {args.context}")
    device, report = common.start("released", args, threads=1, dtype="float32", **settings)
    text = hold_out_blocks(blocks, ByteEncoder.special_ids, 1.0, 8, "held-out text")
    models = {name: saved_model(path) for name, path in folders.items()}
    models |= {name: new_model(of["config"]) for name, of in record["models"].items() if name not in models}
    order = [*KINDS]
    models = dict(sorted(models.items(), key=lambda item: (order.index(kind_of(item[1].config)), item[0] == WRITER)))
    kept = {(row["name"], row["budget"]): row["bits_per_byte"] for row in record["results"]}
    report["models"] = {
        name: {
            "kind": kind_of(model.config),
            "parameters": sum(p.numel() for p in model.parameters()),
            "weights": "measured" if name in folders else "drawn anew; bits of the record",
            "config": record["models"][name]["config"] if name not in folders else model.config.to_diff_dict(),
        }
        for name, model in models.items()
    }
    sizes = {(name, K): cut for name, model in models.items() for K, cut in sizes_of(model).items()}
    context, calls, rows = torch.from_numpy(stream[: args.context].astype("int64"))[None], {}, {}
    for key, model in sizes.items():
        budget = key[1] if isinstance(model, ESSMForCausalLM) else None
        one = Decoder(WithCache(model) if isinstance(model, BaselineForCausalLM) else model, budget)
        one.check(context)
        one.read(context)
        calls[key] = functools.partial(one.sample, context[:, -1:], context.shape[1], steps)
        rows[key] = {"name": key[0], "budget": key[1], "weights": weights_read(model, key[1])}
        rows[key]["state_bytes"] = common.state_bytes(one.cache)
    report["load"] = [os.getloadavg()[0]]
    with common.threads(1):
        seconds = common.paired(calls, device, args.rounds, warmup=1, limit_seconds=240.0)
    report["load"].append(os.getloadavg()[0])
    for key, row in rows.items():
        row["bits_per_byte"] = kept[key] if key[0] not in folders else text.value(sizes[key], key[1])
        row["seconds_per_token"] = common.per(seconds[key], steps)
        row["time_over_first"] = common.ratio(seconds[key], next(iter(seconds.values())))
    report["results"] = [*rows.values()]
    if args.writer:
        own = {K: model for (name, K), model in reversed(sizes.items()) if name == WRITER and K in TEXT_BUDGETS}
        report["texts"] = {str(K): written(model, K) for K, model in own.items()}
    elif "texts" in record:
        report["texts"] = record["texts"]
    report["floors"] = floors(train, held_out)
    write_figure(args.report.with_suffix(".png"), draw(report))
    if "texts" in report:
        write_figure(args.report.with_name(f"{args.report.stem}_texts.png"), draw_texts(report))
    print(markdown(report))
    common.table([report["floors"]])
    return common.finish(report, args)


if __name__ == "__main__":
    main()
