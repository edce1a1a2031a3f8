# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Chains like an alpha helix, as PDB files."""

from pathlib import Path

import numpy as np


def pdb_line(i, place, atom=" CA ", alternative=" "):
    """An atom of residue i at a place in A."""
    x, y, z = place
    return f"ATOM  {i:5d} {atom}{alternative}ALA A{i:4d}    {x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00           C\n"


def helix(n: int) -> np.ndarray:
    """(n, 3); neighbours are 3.8 A apart."""
    turn = np.radians(100) * np.arange(n)
    return np.stack([2.3 * np.cos(turn), 2.3 * np.sin(turn), 1.5 * np.arange(n)], 1)


def write_chains(folder: Path, count: int, length: int = 64) -> None:
    """So many files, of as many residues as given and one more each."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        lines = [pdb_line(j, place) for j, place in enumerate(helix(length + i))]
        (folder / f"{i:02}.pdb").write_text("".join(lines))
