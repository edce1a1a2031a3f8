# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Draw the pictures of docs/theory.md and of the architecture: python docs/figures/make.py docs/figures

Two of them draw rounding errors, which depend on the kernels that OpenBLAS has for a processor: those of Haswell are
taken everywhere.
"""

import os
import sys
from pathlib import Path

os.environ["OPENBLAS_CORETYPE"] = "Haswell"
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

from modeling_essm.spectral_basis import chunk_operators, spectral_basis

H = 1024
BLUE, RED, GREY, GREEN, SAND = COLORS = "#2b6cb0", "#c0392b", "#8a8f98", "#2f855a", "#b7791f"
FILL = dict(zip(COLORS, ("#e3eefa", "#fbe6e3", "#f1f2f4", "#e2f3e8", "#fbf1dc")))
FOUR = BLUE, RED, GREEN, SAND


def unroll(N: int, length: int) -> np.ndarray:
    """phi(0) A^tau of the first N states, (length, N): the features of an impulse by (R)."""
    basis = spectral_basis(H)
    rows = [basis.filters(N, np.zeros(1))[0]]
    for _ in range(length - 1):
        rows.append(rows[-1] @ basis.A[:N, :N])
    return np.stack(rows)


def two_panels(height: float):
    figure = Figure(figsize=(8.5, height), layout="constrained")
    return figure, figure.subplots(1, 2)


def filters() -> Figure:
    phi = spectral_basis(H).filters(32)
    figure, axes = two_panels(3)
    for ax, channels in zip(axes, ((1, 2, 3, 4), (8, 16, 32))):
        for k, color in zip(channels, FOUR):
            ax.plot(np.arange(1, H + 1), phi[:, k - 1] / np.abs(phi[:, k - 1]).max(), color=color, label=f"k = {k}")
        ax.axhline(0, color=GREY, lw=0.6)
        ax.set(xscale="log", xlim=(1, H), xlabel=r"$\tau + 1$")
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncol=4, frameon=False)
    axes[0].set_ylabel(r"$\phi_k(\tau)\ /\ \max|\phi_k|$")
    return figure


def eigenvalues() -> Figure:
    basis, k = spectral_basis(H), np.arange(1, 33)
    phi, i = basis.filters(32), np.arange(1, H + 1)
    n = i[:, None] + i
    Z = 2.0 / (n**3 - n)
    figure, (left, right) = two_panels(3.2)
    left.semilogy(k, basis.sigma[:32], color=BLUE, label="SVD of F, fp64")
    for dtype, name, color, marker in ((np.float64, "fp64", GREEN, "."), (np.float32, "fp32", RED, "x")):
        values, vectors = np.linalg.eigh(Z.astype(dtype))
        values, vectors = values[:-33:-1], vectors[:, :-33:-1]
        vectors *= np.sign((vectors * phi).sum(0))
        for ax, shown in ((left, np.abs(values)), (right, np.linalg.norm(vectors - phi, axis=0))):
            ax.semilogy(k, shown, marker, color=color, label=f"eigh of Z, {name}")
    right.axhline(np.sqrt(2), color=GREY, lw=0.8, ls="--")
    right.text(1, 4, "orthogonal to the filter: noise", color=GREY, fontsize=9)
    left.set(xlabel="k", ylabel=r"$|\sigma_k|$")
    right.set(xlabel="k", ylabel=r"$\|v_k - \phi_k\|$", ylim=(1e-15, 1e3))
    left.legend(frameon=False)
    right.legend(loc="lower right", frameon=False)
    return figure


def impulse() -> Figure:
    phi, lags = spectral_basis(H).filters(32), np.unique(np.geomspace(1, H, 60).astype(int)) - 1
    features, margins = unroll(48, H), np.arange(0, 17, 2)
    figure, (left, right) = two_panels(3.2)
    for k, color in zip((1, 4, 8, 16), FOUR):
        scale = np.abs(phi[:, k - 1]).max()
        left.plot(np.arange(1, H + 1), phi[:, k - 1] / scale, color=color, lw=1)
        left.plot(lags + 1, features[lags, k - 1] / scale, ".", color=color, ms=4, label=f"k = {k}")
    left.set(xscale="log", xlim=(1, H), xlabel="steps since the impulse + 1", ylabel="feature, scaled")
    spacing = {"columnspacing": 1.0, "handletextpad": 0.2}
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncol=4, frameon=False, **spacing)
    for K, color in zip((4, 8, 16, 32), FOUR):
        error = [np.linalg.norm(unroll(K + m, H)[:, :K] - phi[:, :K], axis=0).max() for m in margins]
        right.semilogy(margins, error, ".-", color=color, label=f"K = {K}")
    right.set(xticks=margins[::2], xlabel="margin N - K", ylabel="largest error of K filters")
    right.legend(frameon=False)
    return figure


def chunk() -> Figure:
    K, N, C = 4, 16, 16
    W = chunk_operators(H, N, C).readout[:, :K].transpose(1, 0, 2)  # channel by channel to look at
    shown = (W / np.abs(W).max((1, 2), keepdims=True)).reshape(K * C, C + N)
    figure = Figure(figsize=(7.4, 5.0))
    ax = figure.subplots()
    ax.imshow(shown, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", extent=(0, C + N, K * C, 0))
    for k in range(K):
        ax.plot((0, C + N), (k * C, k * C), color="black", lw=0.8)
        ax.text(-0.6, (k + 0.5) * C, f"$f_{k + 1}(t_0..t_0{{+}}15)$", ha="right", va="center")
    ax.plot((C, C), (0, K * C), color="black", lw=1.6)
    ax.set(xticks=[], yticks=[], xlim=(0, 42), ylim=(K * C, 0))
    ax.text(C / 2, -1.5, r"$\phi_k(i-j)$: the chunk's inputs", ha="center", va="bottom")
    ax.text(C + N / 2, -1.5, r"$(A^{i+1})_{nk}$: the state", ha="center", va="bottom")
    u, f = "$u(t_0)$\n...\n$u(t_0{+}15)$", "$f_1(t_0{-}1)$\n...\n$f_{16}(t_0{-}1)$"
    for y, color, text in ((24, BLUE, u), (40, GREEN, f)):
        box(ax, 39, y, text, color, 6, 16, fontsize=9, lw=1.0, clip_on=False)
    ax.text(34, 32, r"$\times$", ha="center", va="center", fontsize=16)
    ax.text(-7.6, 32, "f  =", ha="right", va="center", fontsize=13)
    ax.text(C, K * C + 1, "W, each channel scaled to its largest entry", ha="center", va="top", fontsize=9)
    ax.spines[:].set_visible(False)
    return figure


def box(ax, x, y, text, color=GREY, width=4.0, height=1.3, fontsize=8, lw=1.2, **style) -> None:
    """A box around its centre."""
    corner = (x - width / 2, y - height / 2)
    ax.add_patch(Rectangle(corner, width, height, fc=FILL[color], ec=color, lw=lw, **style))
    ax.text(x, y, text, ha="center", va="center", fontsize=fontsize)


def line(ax, *points, head: bool = True, color="black", **style) -> None:
    """A line through points, with an arrow head at the last."""
    ax.plot(*zip(*points), solid_capstyle="butt", color=color, lw=1.1, **style)
    if head:
        arrow = {"arrowstyle": "-|>", "color": color, "lw": 1.1, "shrinkA": 0, "shrinkB": 0}
        (x0, y0), (x1, y1) = points[-2:]
        away = 2 * max(abs(x1 - x0), abs(y1 - y0))
        ax.annotate("", (x1, y1), (x1 - (x1 - x0) / away, y1 - (y1 - y0) / away), arrowprops=arrow)


def circle(ax, x, y, sign) -> None:
    ax.add_patch(Circle((x, y), 0.5, fc="white", ec="black", lw=1.1, zorder=3))
    ax.text(x, y, sign, ha="center", va="center", fontsize=11, zorder=4)


def rises(ax, x, *spans) -> None:
    """Arrows straight up."""
    for bottom, top in spans:
        line(ax, (x, bottom), (x, top))


def draw_mixer(ax) -> None:
    ax.set_title("Spectral mixer at budget K = 3 of 5", fontsize=11)
    columns = np.array([4.4, 6.4, 8.4, 10.4, 12.4])
    line(ax, (8.4, -0.4), (8.4, 1.0), head=False)
    ax.text(8.4, -0.9, "u", ha="center", va="center")
    line(ax, (1.0, 1.0), (14.6, 1.0), head=False)
    for k, x in enumerate(columns, 1):
        active = k <= 3
        style, color = ({}, BLUE) if active else ({"ls": "--"}, GREY)
        for bottom, top in ((1.0, 2.6), (4.0, 6.6), (7.4, 9.1), (10.5, 11.9)):
            line(ax, (x, bottom), (x, top), color="black" if active else "#c3c7cd", **style)
        box(ax, x, 3.3, rf"$\phi_{k} *$", color, 1.6, 1.4, **style)
        box(ax, x, 9.8, rf"$M_{k}$", color, 1.6, 1.4, **style)
        if active:
            line(ax, (1.0 if k == 1 else x - 1.5, 6.9), (x - 0.5, 6.9), color=RED)
            circle(ax, x, 6.9, r"$\times$")
    ax.text(0.9, 7.7, r"$\alpha_k(t)\,\sigma_k^{1/4}$", ha="left", va="center", fontsize=10, color=RED)
    line(ax, (1.0, 1.0), (1.0, 2.4))
    box(ax, 1.0, 3.6, "gate (8):\nsoftmax over\nk = 1, .., K", RED, 3.6, 2.4)
    line(ax, (1.0, 4.8), (1.0, 6.9), head=False, color=RED)
    line(ax, (14.6, 1.0), (14.6, 5.9))
    box(ax, 14.6, 6.6, "D", GREY, 1.4, 1.4)
    line(ax, (14.6, 7.3), (14.6, 12.5), (13.4, 12.5))
    box(ax, 8.4, 12.5, r"sum (7)", BLUE, 10.0, 1.2)
    line(ax, (8.4, 13.1), (8.4, 14.6))
    ax.text(8.4, 15.1, "y", ha="center", va="center")
    ax.text(11.4, 7.1, "not read", ha="center", va="center", fontsize=9, color=GREY)
    ax.set(xlim=(-1.0, 15.6), ylim=(-1.6, 18.9))


def draw_paper_block(ax) -> None:
    ax.set_title("The paper's block", fontsize=11)
    x, side = 3.0, 6.2
    ax.text(x, -0.9, "x", ha="center", va="center")
    stack = [(2.2, "LayerNorm", GREY), (4.6, "spectral mixer", BLUE)]
    stack += [(9.8, "LayerNorm", GREY), (12.6, "D to 4D, GELU,\n4D to D", GREEN)]
    rises(ax, x, (-0.4, 1.55), (2.85, 3.95), (5.25, 6.5), (7.5, 9.15), (10.45, 11.6), (13.6, 14.9), (15.9, 17.4))
    for start, end in ((0.4, 7.0), (8.0, 15.4)):
        line(ax, (x, start), (side, start), (side, end), (x + 0.5, end))
        circle(ax, x, end, "+")
    for y, text, color in stack:
        box(ax, x, y, text, color, 4.6, 2.0 if "\n" in text else 1.3)
    ax.set(xlim=(0.2, 7.0), ylim=(-1.6, 18.9))


def draw_elastic_block(ax) -> None:
    ax.set_title("The elastic block at budget K = 3 of 5", fontsize=11)
    columns, middle, side = np.array([2.0, 5.0, 8.0, 11.0, 14.0]), 5.0, 16.2
    ax.text(middle, -0.9, "x", ha="center", va="center")
    rises(ax, middle, (-0.4, 0.75), (11.4, 11.7), (12.7, 13.2), (14.4, 14.75), (16.35, 16.7), (17.7, 18.4))
    box(ax, middle, 1.3, "RMSNorm", GREY, 8.5, 1.1)
    rows = [(3.2, "in$_{}$", GREY), (4.9, "conv$_{}$", SAND), (8.4, "norm$_{}$,\n" + r"SiLU$(z_{})$", GREY)]
    rows += [(10.5, "out$_{}$", GREY), (15.4, "ffn$_{}$", GREEN)]
    for j, x in enumerate(columns, 1):
        active = j <= 3
        style = {} if active else {"ls": "--"}
        for y, text, color in rows:
            height = 1.7 if "\n" in text else 1.2
            box(ax, x, y, text.replace("{}", str(j)), color if active else GREY, 2.5, height, **style)
        if active:
            rises(ax, x, (1.85, 2.6), (3.8, 4.3), (5.5, 6.0), (7.2, 7.55), (9.25, 9.9))
            for y, up in ((11.1, 11.4), (16.0, 16.35)):
                line(ax, (x, y), (x, up), (middle, up), head=False)
    box(ax, middle, 6.6, r"(7), (8): head $j$ by $\phi_1, .., \phi_j$", BLUE, 8.5, 1.2)
    box(ax, 12.5, 6.6, "not read", GREY, 5.5, 1.2, ls="--")
    box(ax, middle, 13.8, "RMSNorm", GREY, 8.5, 1.1)
    for start, end in ((0.2, 12.2), (12.95, 17.2)):
        line(ax, (middle, start), (side, start), (side, end), (middle + 0.5, end))
        circle(ax, middle, end, "+")
    ax.set(xlim=(0.4, 16.8), ylim=(-1.6, 18.9))


def architecture() -> Figure:
    figure = Figure(figsize=(13, 6))
    axes = figure.subplots(1, 3, width_ratios=[16.6, 6.8, 16.4])
    for ax, draw in zip(axes, (draw_mixer, draw_paper_block, draw_elastic_block)):
        draw(ax)
        ax.set_aspect("equal")
        ax.axis("off")
    return figure


if __name__ == "__main__":
    for draw in (filters, eigenvalues, impulse, chunk, architecture):
        path = Path(sys.argv[1], f"{draw.__name__}.png")
        draw().savefig(path, dpi=90, bbox_inches="tight", metadata={"Software": None})
