# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The card of a finished run: written, pushed if asked for, and left alone once its user has edited it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import constants

from essm_train.arguments import RunArguments
from essm_train.files import sha256_of, write_text
from essm_train.publish.arguments import PushArguments
from essm_train.publish.hub import check_can_push, check_folder, commit_folder, read_json, split_files
from essm_train.publish.model_card import write_model_card

_WRITTEN = ".card.sha256"  # in output_dir: of the card as it was written last


def push_run(args: PushArguments, on_card: Callable[[Path], object] = lambda card: None) -> str | None:
    """Write the card of a run's model and push it; the commit's id, or None for `card_only` and `dry_run`.

    Args:
        on_card: called with a card that was written, before it is pushed: a push that is killed changes nothing there.
    """
    run = Path(args.run)
    folder = run / "model" if (run / "model").is_dir() else run
    if args.card_only and args.keep_card:
        raise ValueError("card_only writes the card and keep_card does not: give one of them")
    if not args.card_only and not args.dry_run and not args.hub_model_id:
        raise ValueError("hub_model_id is needed to push: --hub_model_id org/name")
    files = check_folder(folder)
    if args.dry_run:
        print(f"to be published from {folder}: {', '.join(files)}")
        print(f"to be left out: {', '.join(split_files(folder)[1]) or 'nothing'}")
        if not args.keep_card:
            print("README.md would be written anew, with the curve of the sweep beside it")
        return None
    sweep, training = (
        read_json(run / name, "") if (run / name).exists() else None for name in ("budget_sweep.json", "training.json")
    )
    repository = args.hub_model_id
    if not args.card_only and repository is not None:
        repository = check_can_push(repository, private=args.private)
    if not args.keep_card:
        template = None if args.template is None else Path(args.template)
        picture = run / "budget_sweep.png"
        card = write_model_card(
            folder, sweep=sweep, training=training, hub_model_id=repository, template=template, picture=picture
        )
        on_card(card)
        print(f"wrote {card}")
    if args.card_only or repository is None:
        return None
    commit = commit_folder(folder, repository, args.commit_message)
    print(f"pushed {constants.ENDPOINT}/{repository} at revision {commit}")
    return commit


def write_card_and_push(args: RunArguments) -> None:
    """`push_run` of a run's model; a card that is not as it was written stays. Raises what `push_run` does."""
    output_dir = Path(args.output_dir)
    card, written = output_dir / "model" / "README.md", output_dir / _WRITTEN
    edited = card.exists() and (not written.exists() or written.read_text() != sha256_of(card))
    if edited:
        print(f"kept {card}, which was edited; `essm-push --run {output_dir} --card_only` replaces it")
        if not args.push_to_hub:
            return
    push = PushArguments(
        args.output_dir,
        args.hub_model_id,
        args.hub_private_repo,
        card_only=not args.push_to_hub,
        keep_card=edited,
    )
    push_run(push, on_card=lambda card: write_text(written, sha256_of(card)))
