# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Draw the pictures of docs/theory.md and of the architecture: python docs/figures/make.py docs/figures"""

import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from modeling_essm.spectral_basis import chunk_operators, spectral_basis

H = 1024
BLUE, RED, GREY, GREEN, SAND = "#2b6cb0", "#c0392b", "#8a8f98", "#2f855a", "#b7791f"
FILL = {BLUE: "#e3eefa", RED: "#fbe6e3", GREY: "#f1f2f4", GREEN: "#e2f3e8", SAND: "#fbf1dc"}


def unroll(N: int, length: int) -> np.ndarray:
    """phi(0) A^tau of the first N states, (length, N): the features of an impulse by (R)."""
    basis = spectral_basis(H)
    rows = [basis.filters(N, np.zeros(1))[0]]
    for _ in range(length - 1):
        rows.append(rows[-1] @ basis.A[:N, :N])
    return np.stack(rows)


def filters(folder: Path) -> None:
    phi = spectral_basis(H).filters(32)
    figure, axes = plt.subplots(1, 2, figsize=(8.5, 3), layout="constrained")
    for ax, channels in zip(axes, ((1, 2, 3, 4), (8, 16, 32))):
        for k, color in zip(channels, (BLUE, RED, GREEN, SAND)):
            ax.plot(np.arange(1, H + 1), phi[:, k - 1] / np.abs(phi[:, k - 1]).max(), color=color, label=f"k = {k}")
        ax.axhline(0, color=GREY, lw=0.6)
        ax.set(xscale="log", xlim=(1, H), xlabel=r"$\tau + 1$")
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncol=4, frameon=False)
    axes[0].set_ylabel(r"$\phi_k(\tau)\ /\ \max|\phi_k|$")
    save(figure, folder / "filters.png")


def eigenvalues(folder: Path) -> None:
    basis, k = spectral_basis(H), np.arange(1, 33)
    phi, i = basis.filters(32), np.arange(1, H + 1)
    n = i[:, None] + i
    Z = 2.0 / (n**3 - n)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.2), layout="constrained")
    left.semilogy(k, basis.sigma[:32], color=BLUE, label="SVD of F, fp64")
    for dtype, color, marker in ((np.float64, GREEN, "."), (np.float32, RED, "x")):
        values, vectors = np.linalg.eigh(Z.astype(dtype))
        values, vectors = values[:-33:-1], vectors[:, :-33:-1]
        vectors *= np.sign((vectors * phi).sum(0))
        name = f"eigh of Z, {'fp64' if dtype is np.float64 else 'fp32'}"
        left.semilogy(k, np.abs(values), marker, color=color, label=name)
        right.semilogy(k, np.linalg.norm(vectors - phi, axis=0), marker, color=color, label=name)
    right.axhline(np.sqrt(2), color=GREY, lw=0.8, ls="--")
    right.text(1, 4, "orthogonal to the filter: noise", color=GREY, fontsize=9)
    left.set(xlabel="k", ylabel=r"$|\sigma_k|$")
    right.set(xlabel="k", ylabel=r"$\|v_k - \phi_k\|$", ylim=(1e-15, 1e3))
    left.legend(frameon=False)
    right.legend(loc="lower right", frameon=False)
    save(figure, folder / "eigenvalues.png")


def impulse(folder: Path) -> None:
    phi, lags = spectral_basis(H).filters(32), np.unique(np.geomspace(1, H, 60).astype(int)) - 1
    features = unroll(48, H)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.2), layout="constrained")
    for k, color in zip((1, 4, 8, 16), (BLUE, RED, GREEN, SAND)):
        scale = np.abs(phi[:, k - 1]).max()
        left.plot(np.arange(1, H + 1), phi[:, k - 1] / scale, color=color, lw=1)
        left.plot(lags + 1, features[lags, k - 1] / scale, ".", color=color, ms=4, label=f"k = {k}")
    left.set(xscale="log", xlim=(1, H), xlabel="steps since the impulse + 1", ylabel="feature, scaled")
    left.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1), ncol=4, frameon=False, columnspacing=1.0, handletextpad=0.2
    )
    margins = np.arange(0, 17, 2)
    for K, color in zip((4, 8, 16, 32), (BLUE, RED, GREEN, SAND)):
        error = [np.linalg.norm(unroll(K + m, H)[:, :K] - phi[:, :K], axis=0).max() for m in margins]
        right.semilogy(margins, error, ".-", color=color, label=f"K = {K}")
    right.set(xticks=margins[::2], xlabel="margin N - K", ylabel="largest error of K filters")
    right.legend(frameon=False)
    save(figure, folder / "impulse.png")


def chunk(folder: Path) -> None:
    K, N, C = 4, 16, 16
    W = (
        chunk_operators(H, N, C).readout[:, :K].transpose(1, 0, 2).reshape(K * C, C + N)
    )  # channel by channel to look at
    shown = W.reshape(K, -1) / np.abs(W.reshape(K, -1)).max(1, keepdims=True)
    figure, ax = plt.subplots(figsize=(7.4, 5.0))
    ax.imshow(shown.reshape(W.shape), cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", extent=(0, C + N, K * C, 0))
    for k in range(K):
        ax.plot((0, C + N), (k * C, k * C), color="black", lw=0.8)
        ax.text(-0.6, (k + 0.5) * C, f"$f_{k + 1}(t_0..t_0{{+}}15)$", ha="right", va="center")
    ax.plot((C, C), (0, K * C), color="black", lw=1.6)
    ax.set(xticks=[], yticks=[], xlim=(0, 42), ylim=(K * C, 0))
    ax.text(C / 2, -1.5, r"$\phi_k(i-j)$: the chunk's inputs", ha="center", va="bottom")
    ax.text(C + N / 2, -1.5, r"$(A^{i+1})_{nk}$: the state", ha="center", va="bottom")
    for top, bottom, color, text in (
        (0, C, BLUE, r"$u(t_0)$" "\n...\n" r"$u(t_0{+}15)$"),
        (C, C + N, GREEN, r"$f_1(t_0{-}1)$" "\n...\n" r"$f_{16}(t_0{-}1)$"),
    ):
        ax.add_patch(plt.Rectangle((36, 16 + top), 6, bottom - top, fc=FILL[color], ec=color, clip_on=False))
        ax.text(39, 16 + (top + bottom) / 2, text, ha="center", va="center", fontsize=9)
    ax.text(34, 32, r"$\times$", ha="center", va="center", fontsize=16)
    ax.text(-7.6, 32, "f  =", ha="right", va="center", fontsize=13)
    ax.text(C, K * C + 1, "W, each channel scaled to its largest entry", ha="center", va="top", fontsize=9)
    for side in ax.spines.values():
        side.set_visible(False)
    save(figure, folder / "chunk.png")


def box(ax, x: float, y: float, text: str, color: str = GREY, width: float = 4.0, height: float = 1.3, **style) -> None:
    """A box around its centre."""
    shape = plt.Rectangle((x - width / 2, y - height / 2), width, height, fc=FILL[color], ec=color, lw=1.2, **style)
    ax.add_patch(shape)
    ax.text(x, y, text, ha="center", va="center", fontsize=8)


def line(ax, *points: tuple[float, float], head: bool = True, **style) -> None:
    """A line through points, with an arrow head at the last."""
    style = {"color": "black", "lw": 1.1} | style
    ax.plot(*zip(*points), solid_capstyle="butt", **style)
    if head:
        arrow = {"arrowstyle": "-|>", "color": style["color"], "lw": style["lw"], "shrinkA": 0, "shrinkB": 0}
        (x0, y0), (x1, y1) = points[-2:]
        away = max(abs(x1 - x0), abs(y1 - y0))
        start = (x1 - 0.5 * (x1 - x0) / away, y1 - 0.5 * (y1 - y0) / away)
        ax.annotate("", (x1, y1), start, arrowprops=arrow)


def circle(ax, x: float, y: float, sign: str) -> None:
    ax.add_patch(plt.Circle((x, y), 0.5, fc="white", ec="black", lw=1.1, zorder=3))
    ax.text(x, y, sign, ha="center", va="center", fontsize=11, zorder=4)


def draw_mixer(ax) -> None:
    ax.set_title("Spectral mixer at budget K = 3 of 5", fontsize=11)
    columns = np.array([4.4, 6.4, 8.4, 10.4, 12.4])
    line(ax, (8.4, -0.4), (8.4, 1.0), head=False)
    ax.text(8.4, -0.9, "u", ha="center", va="center")
    line(ax, (1.0, 1.0), (14.6, 1.0), head=False)
    for k, x in enumerate(columns, 1):
        active = k <= 3
        style = {} if active else {"ls": "--"}
        color = BLUE if active else GREY
        pen = {"color": "black" if active else "#c3c7cd"} | style
        line(ax, (x, 1.0), (x, 2.6), **pen)
        box(ax, x, 3.3, rf"$\phi_{k} *$", color, 1.6, 1.4, **style)
        line(ax, (x, 4.0), (x, 6.6), **pen)
        line(ax, (x, 7.4), (x, 9.1), **pen)
        box(ax, x, 9.8, rf"$M_{k}$", color, 1.6, 1.4, **style)
        line(ax, (x, 10.5), (x, 11.9), **pen)
        if active:
            line(ax, (1.0 if k == 1 else x - 1.5, 6.9), (x - 0.5, 6.9), color=RED)
    for x in columns[:3]:
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
    ax.set(xlim=(-1.0, 15.6), ylim=(-1.6, 18.4))


def draw_paper_block(ax) -> None:
    ax.set_title("The paper's block", fontsize=11)
    x, side = 3.0, 6.2
    ax.text(x, -0.9, "x", ha="center", va="center")
    stack = [(2.2, "LayerNorm", GREY), (4.6, "spectral mixer", BLUE)]
    stack += [(9.8, "LayerNorm", GREY), (12.6, "D to 4D, GELU,\n4D to D", GREEN)]
    line(ax, (x, -0.4), (x, 1.55))
    line(ax, (x, 2.85), (x, 3.95))
    line(ax, (x, 5.25), (x, 6.5))
    line(ax, (x, 7.5), (x, 9.15))
    line(ax, (x, 10.45), (x, 11.6))
    line(ax, (x, 13.6), (x, 14.9))
    line(ax, (x, 15.9), (x, 17.4))
    for start, end in ((0.4, 7.0), (8.0, 15.4)):
        line(ax, (x, start), (side, start), (side, end), (x + 0.5, end))
        circle(ax, x, end, "+")
    for y, text, color in stack:
        box(ax, x, y, text, color, 4.6, 2.0 if "\n" in text else 1.3)
    ax.set(xlim=(0.2, 7.0), ylim=(-1.6, 18.4))


def draw_gated_block(ax) -> None:
    ax.set_title("The gated block", fontsize=11)
    v, z, middle, side = 3.0, 8.2, 5.6, 11.4
    ax.text(middle, -0.9, "x", ha="center", va="center")
    line(ax, (middle, -0.4), (middle, 0.95))
    box(ax, middle, 1.6, "RMSNorm", GREY)
    line(ax, (middle, 2.25), (middle, 2.95))
    box(ax, middle, 3.6, "linear, D to 2D + 2D", GREY, 9.4)
    stack = [(6.0, "causal convolution,\n4 taps, SiLU", SAND), (8.8, "spectral mixer", BLUE), (11.0, "RMSNorm", GREY)]
    for (y, text, color), (bottom, top) in zip(stack, ((4.25, 5.0), (7.0, 8.15), (9.45, 10.35))):
        line(ax, (v, bottom), (v, top))
        box(ax, v, y, text, color, 5.2, 2.0 if "\n" in text else 1.3)
    ax.text(v - 0.3, 4.6, "v", ha="right", va="center", fontsize=9)
    ax.text(z + 0.3, 4.6, "z", ha="left", va="center", fontsize=9)
    line(ax, (z, 4.25), (z, 8.15))
    box(ax, z, 8.8, "SiLU", RED, 3.0)
    line(ax, (z, 9.45), (z, 12.7), (middle + 0.5, 12.7))
    line(ax, (v, 11.65), (v, 12.7), (middle - 0.5, 12.7))
    circle(ax, middle, 12.7, r"$\times$")
    line(ax, (middle, 13.2), (middle, 13.75))
    box(ax, middle, 14.4, "linear, 2D to D", GREY, 4.6)
    line(ax, (middle, 15.05), (middle, 15.7))
    line(ax, (middle, 0.2), (side, 0.2), (side, 16.2), (middle + 0.5, 16.2))
    circle(ax, middle, 16.2, "+")
    line(ax, (middle, 16.7), (middle, 17.8))
    ax.set(xlim=(0.0, 12.0), ylim=(-1.6, 18.4))


def architecture(folder: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(12, 6), width_ratios=[16.6, 6.8, 11.8])
    for ax, draw in zip(axes, (draw_mixer, draw_paper_block, draw_gated_block)):
        draw(ax)
        ax.set_aspect("equal")
        ax.axis("off")
    save(figure, folder / "architecture.png")


def save(figure, path: Path) -> None:
    figure.savefig(path, dpi=90, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def main(folder: Path) -> None:
    for draw in (filters, eigenvalues, impulse, chunk, architecture):
        draw(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
