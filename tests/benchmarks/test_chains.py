# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Loop repair: reading of chains, what is disturbed and what is not, and each term of the energy."""

import gzip

import numpy as np
import pytest
import torch
from tiny_chains import helix, pdb_line, write_chains

from benchmarks import chains
from benchmarks.chains import BOND, WINDOW, RepairEnergy, collate, disturb, draw, internal


def test_a_chain_is_read_up_to_a_break_a_second_model_and_alternatives(tmp_path):
    atoms = helix(12)
    atoms[9:] += 20  # three residues elsewhere
    lines = [pdb_line(i, place) for i, place in enumerate(atoms)]
    lines.insert(3, pdb_line(2, (99, 99, 99), alternative="B"))
    lines.insert(3, pdb_line(2, (99, 99, 99), atom=" CB "))
    text = "".join(lines) + "ENDMDL\n" + pdb_line(50, (0, 0, 0))
    (tmp_path / "a.pdb").write_text(text)
    (tmp_path / "a.pdb.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.pdb", "a.pdb.gz"):
        np.testing.assert_allclose(chains.read_chain(tmp_path / name), helix(12)[:9], atol=1e-3)
    (tmp_path / "b.pdb").write_text("HEADER\n")
    with pytest.raises(ValueError, match=r"b\.pdb has no C-alpha"):
        chains.read_chain(tmp_path / "b.pdb")


def test_chains_are_split_by_name_and_too_few_are_named(tmp_path):
    write_chains(tmp_path, 20, WINDOW)
    (tmp_path / "07.pdb").write_text("".join(pdb_line(j, place) for j, place in enumerate(helix(30))))
    train, test = chains.read_chains(tmp_path)
    assert (len(train), len(test)) == (3, 16) and not {len(c) for c in train} & {len(c) for c in test}
    assert all(len(chain) >= WINDOW for chain in train + test)
    for i in range(4):
        (tmp_path / f"{i:02}.pdb").unlink()
    with pytest.raises(ValueError, match="has 15 chains of 64 residues, at least 17"):
        chains.read_chains(tmp_path)


def test_the_loop_alone_is_disturbed():
    native = helix(WINDOW) / BOND
    rng = np.random.default_rng(0)
    for _ in range(20):
        window = disturb(native, rng)
        start, stop = window.start, window.stop
        assert 8 <= stop - start <= 12 and start >= 4 and stop <= WINDOW - 3
        moved = np.linalg.norm(window.read - native, axis=1) > 1e-9
        assert moved[start:stop].all() and moved.sum() == stop - start
    kicked = disturb(native, np.random.default_rng(1), shake=0.0)
    lengths = [np.linalg.norm(np.diff(chain[: kicked.stop], axis=0), axis=1) for chain in (kicked.read, native)]
    np.testing.assert_allclose(*lengths)  # kicks keep lengths
    still = disturb(native, np.random.default_rng(1), kick=0.0, shake=0.0)
    np.testing.assert_allclose(still.read, native, atol=1e-9)
    turned = draw([helix(80) / BOND], rng).native
    assert not turned[0].any() and internal(turned[:4])[2] == pytest.approx(internal(native[:4])[2])  # not mirrored


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    return collate([disturb(helix(WINDOW) / BOND, rng) for _ in range(3)])


def energies(steps, batch):
    energy = RepairEnergy()
    history = energy.initial_history({name: value[:, 0] for name, value in batch["observations"].items()})
    found = []
    for t in range(steps.shape[1]):
        observation = {name: value[:, t] for name, value in batch["observations"].items()}
        found.append(energy(steps[:, t], observation, history))
        history = energy.commit(history, steps[:, t], observation)
    return torch.stack(found, 1)


def test_a_batch_tells_where_the_loop_is_and_where_it_ends(batch):
    assert batch["input_features"].shape == (3, WINDOW - 1, chains.FEATURES)
    for i in range(3):
        inside = batch["loop"][i].nonzero()[:, 0]
        left = batch["observations"]["left"][i]
        assert left[inside].tolist() == [*range(len(inside), 0, -1)] and left.sum() == left[inside].sum()
        after = batch["native"][i].cumsum(0)[inside[-1] + 1]  # the residue after the loop
        torch.testing.assert_close(batch["observations"]["anchor"][i, inside[-1]], after, atol=1e-5, rtol=0)


def test_lengths_angles_collisions_and_reach():
    energy = RepairEnergy()
    straight, zero = torch.tensor([[1.0, 0.0, 0.0]]), torch.zeros(1)
    long = 1.5 * straight
    observation = {"place": long, "step": long, "loop": zero, "left": zero, "anchor": torch.zeros(1, 3)}
    assert float(energy(long, observation, energy.initial_history(observation))) == pytest.approx(4 * 0.25)

    def at(y, history, **changes):
        observation = {"place": history["place"] + y, "step": y, "loop": torch.zeros(1), "left": torch.zeros(1)}
        observation |= {"anchor": torch.zeros(1, 3)} | changes
        return float(energy(y, observation, history))

    history = energy.initial_history({"place": torch.zeros(1, 3)})
    history = energy.commit(history, straight, None)
    assert at(straight, history) == pytest.approx(2 * 0.13**2, rel=1e-4)  # 180 degrees at the atom
    side = torch.tensor([[0.5, 0.75**0.5, 0.0]])  # 120 degrees
    assert at(side, history) == pytest.approx(0.0, abs=1e-6)
    assert at(-straight, history) == pytest.approx(2 * 0.83**2, rel=1e-4)  # back where it came from
    square = energy.commit(energy.commit(history, torch.tensor([[0.0, 1.0, 0.0]]), None), -straight, None)
    crash = at(torch.tensor([[0.0, -1.0, 0.0]]), square)  # onto the first atom, three before
    assert crash > 0.5 * 8 * chains.COLLISION / 2 * 0.9
    anchor = torch.tensor([[6.0, 0.0, 0.0]])
    inside = {"loop": torch.ones(1), "anchor": anchor}
    far = at(side, history, left=torch.ones(1), **inside)
    near = at(side, history, left=torch.full((1,), 6.0), **inside)
    gap = float((history["place"] + side - anchor).norm()) - 0.9
    assert near == pytest.approx(0.0, abs=1e-6) and far == pytest.approx(2 * gap**2, rel=1e-5)


def test_quality_is_in_angstrom(batch):
    native, read = (
        chains.quality(x, energies(x, batch), batch) for x in (batch["native"], batch["observations"]["step"])
    )
    assert native["energy"] < 0.1 * read["energy"]
    assert native["rmsd_loop"] == native["rmsd_outside"] == 0.0
    assert native["gap"] == pytest.approx(0.0, abs=0.05)  # the helix's bond is 3.8 A but for 0.02
    moved = batch["native"].clone()
    moved[:, 0] += torch.tensor([1.0, 0.0, 0.0])
    found = chains.quality(moved, energies(moved, batch), batch)
    assert found["rmsd_loop"] == found["rmsd_outside"] == pytest.approx(BOND, rel=1e-4)
