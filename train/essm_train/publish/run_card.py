# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The card of a finished run: written, pushed if asked for, and left alone once its user has edited it."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants

from essm_train.arguments import RunArguments
from essm_train.files import sha256_of, write_text
from essm_train.publish.arguments import PushArguments
from essm_train.publish.hub import check_can_push, check_weights, commit_files, fetch, read_json, split_files
from essm_train.publish.model_card import write_model_card

_KNOWN = ".card.sha256"  # in a run: "wrote", "filled" (a template) or "pushed", and the checksum of that card; lines


def push_run(args: PushArguments) -> str | None:
    """Write the card of a run's model and push it; the commit's id, or None for `card_only` and `dry_run`.

    A card that was edited, here or on the Hub, stays unless `replace_card` names it. So does one that was made from a
    template, unless a template is given again.

    Raises:
        ValueError, OSError: as the functions that it calls, before anything is uploaded.
    """
    run = Path(args.run)
    folder = run / "model" if (run / "model").is_dir() else run
    card, repository = folder / "README.md", args.hub_model_id
    files, left_out = split_files(folder)
    check_weights(folder)
    ours = ("wrote", "filled") if args.template else ("wrote",)
    edited = card.exists() and "local" not in args.replace_card and not _is_known(run, card, ours)
    config = read_json(folder / "config.json")
    if not edited and "num_spectral_channels" not in config:
        kind = config.get("model_type")
        raise ValueError(f"a card can be written for an ES-SSM; {folder} holds a {kind!r}: write {card} yourself first")
    if args.dry_run:
        missing = [] if card.name in files else [f"{card.name} (to be written)"]
        print(f"to be published from {folder}: {', '.join([*files, *missing])}")
        print(f"to be left out: {', '.join(left_out) or 'nothing'}")
        return None
    if not args.card_only:
        repository = check_can_push(str(repository), private=args.private)
    if edited:
        print(f"kept {card}, which was edited or has a template; `essm-push --replace_card local` writes it anew")
    else:
        sweep, training = (
            read_json(run / name) if (run / name).exists() else None for name in ("budget_sweep.json", "training.json")
        )
        template = None if args.template is None else Path(args.template)
        write_model_card(folder, sweep=sweep, training=training, hub_model_id=repository, template=template)
        _remember(run, card, ours[-1])
        print(f"wrote {card}")
    if args.card_only:
        return None
    files, left_out = split_files(folder)  # with the card and its picture
    there = fetch(str(repository), card.name)
    known = there is None or sha256_of(there) == sha256_of(card) or _is_known(run, there, ("wrote", "filled", "pushed"))
    if not known and "hub" not in args.replace_card:
        del files[card.name]
        print(f"kept the card of {repository}, which was edited there; --replace_card hub puts {card} in its place")
    print(f"not published, because it is no part of a model: {', '.join(left_out) or 'nothing'}", flush=True)
    commit = commit_files(files, str(repository), args.commit_message)
    if card.name in files:
        _remember(run, card, "pushed")
    print(f"pushed {constants.ENDPOINT}/{repository} at revision {commit}")
    return commit


def write_card_and_push(args: RunArguments) -> None:
    """`push_run` of a run that has ended."""
    push_run(PushArguments(args.output_dir, args.hub_model_id, args.hub_private_repo, card_only=not args.push_to_hub))


def _lines(run: Path) -> list[str]:
    record = run / _KNOWN
    return record.read_text(encoding="utf-8").splitlines() if record.exists() else []


def _is_known(run: Path, card: Path, done: tuple[str, ...]) -> bool:
    return not {f"{word} {sha256_of(card)}" for word in done}.isdisjoint(_lines(run))


def _remember(run: Path, card: Path, done: str) -> None:
    lines = dict.fromkeys([*_lines(run), f"{done} {sha256_of(card)}"])
    write_text(run / _KNOWN, "".join(f"{line}\n" for line in lines))
