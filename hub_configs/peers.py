# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Compare a released model with others of its size: their curves as peers.png, and a section of its card.

    python hub_configs/peers.py --name essm-novels-6m --report benchmarks/results/released-cpu.json

`python -m benchmarks.released` writes the report. An older section is replaced.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from essm_train.arguments import arg
from essm_train.console import command
from essm_train.files import write_figure, write_text
from essm_train.publish.hub import read_json

PICTURE = "peers.png"
HEADING, NEXT = "## Beside its peers\n", "## What it writes\n"
SECTION = re.compile(f"^{HEADING}.*?(?=^{NEXT})", re.DOTALL | re.MULTILINE)


@dataclass
class PeersArguments:
    """Arguments of the script."""

    name: str = field(metadata={"help": "Of a folder beside this file, as release.py made it."})
    report: str = arg("benchmarks/results/released-cpu.json", "Of benchmarks.released.")


def draw(report: dict[str, Any]) -> Figure:
    """Held-out bits per byte against the bytes that were read: a model's largest budget solid, its smallest dashed."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for i, (name, curve) in enumerate(report["curves"].items()):
        budgets = sorted(map(int, curve["points"]), reverse=True)
        for K in dict.fromkeys((budgets[0], budgets[-1])):
            read, bits = zip(*curve["points"][str(K)])
            of_budget = f", K = {K}" if len(budgets) > 1 else ""
            label = f"{name}{of_budget} ({curve['parameters'] / 1e6:.2f}M)"
            style = "-" if budgets[0] == K else "--"
            axes.plot([x / 1e6 for x in read], bits, style, color=f"C{i}", marker=".", label=label)
    axes.set(xlabel="megabytes of text", ylabel="bits per byte, held out")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def section(report: dict[str, Any]) -> str:
    """The section of a card, to its end."""
    read = {points[-1][0] for curve in report["curves"].values() for points in curve["points"].values()}
    rows = []
    for row in report["results"]:
        curve, milliseconds = report["curves"][row["name"].split()[0]], row["seconds_per_token"]["median"] * 1e3
        cells = [row["name"], f"{curve['parameters'] / 1e6:.2f}M", f"{curve['learning_rate']:g}"]
        rows.append(f"| {' | '.join(cells)} | {row['bits_per_byte']:.3f} | {milliseconds:.1f} |")
    rows += [f"| {name} |  |  | {bits:.3f} |  |" for name, bits in report["floors"].items()]
    context, table = report["settings"]["block_size"], "\n".join(rows)
    return f"""{HEADING}
![bits per byte against bytes read]({PICTURE})

These are other models of this size. Each was trained anew on the first {max(read) / 1e6:.1f} MB of the same text, with
one seed, the same script, a cosine schedule and one learning rate. Bits per byte are of held-out text; the picture
reads fewer blocks of it than the table. Milliseconds are of a decoded token after {context:,} bytes: batch 1,
one thread, fp32, {report["machine"]["cpu"]}. Llama and Mamba-2 decode by the library's code. The last two rows count
instead of learning: `gzip -9` of the held-out text, and a byte trigram of the same training text.

| model | parameters | learning rate | bits per byte | ms a token |
|---|---|---|---|---|
{table}

"""


def add_peers(folder: Path, report: dict[str, Any]) -> None:
    """Write `folder`/peers.png and the section into its card.

    Raises:
        ValueError: the card has no place for it.
    """
    card = (folder / "README.md").read_text(encoding="utf-8")
    rest = SECTION.sub("", card)
    if rest.count(NEXT) != 1:
        raise ValueError(f"{folder / 'README.md'} must have {NEXT.strip()!r} once, for the peers to stand before it")
    write_figure(folder / PICTURE, draw(report))
    write_text(folder / "README.md", rest.replace(NEXT, section(report) + NEXT))


def main(args: PeersArguments) -> None:
    """From the command line."""
    folder = Path(__file__).resolve().parent / args.name
    add_peers(folder, read_json(Path(args.report), "; benchmarks.released writes it"))
    print(f"wrote {folder / PICTURE} and the card's section")


if __name__ == "__main__":
    command(main, PeersArguments)()
