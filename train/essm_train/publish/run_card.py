# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The card of a finished run: written, pushed if asked for, and left alone once its user has edited it."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants

from essm_train.arguments import RunArguments
from essm_train.files import sha256_of, write_text
from essm_train.publish.arguments import PushArguments
from essm_train.publish.hub import check_can_push, check_weights, commit_folder, read_json, split_files
from essm_train.publish.model_card import write_model_card

_WRITTEN = ".card.sha256"  # in a run: of the plain card that was written last


def push_run(args: PushArguments) -> str | None:
    """Write the card of a run's model and push it; the commit's id, or None for `card_only` and `dry_run`.

    Raises:
        ValueError, OSError: as the functions that it calls, before anything is uploaded.
    """
    run = Path(args.run)
    folder = run / "model" if (run / "model").is_dir() else run
    files, left_out = split_files(folder)
    check_weights(folder)
    if args.dry_run:
        print(f"to be published from {folder}: {', '.join(files)}")
        print(f"to be left out: {', '.join(left_out) or 'nothing'}")
        return None
    repository = args.hub_model_id
    if not args.card_only:
        repository = check_can_push(str(repository), private=args.private)
    if not args.keep_card:
        sweep, training = (
            read_json(run / name) if (run / name).exists() else None for name in ("budget_sweep.json", "training.json")
        )
        template = None if args.template is None else Path(args.template)
        card = write_model_card(folder, sweep=sweep, training=training, hub_model_id=repository, template=template)
        if template is None and folder != run:
            write_text(run / _WRITTEN, sha256_of(card))
        print(f"wrote {card}")
    if args.card_only:
        return None
    files, left_out = split_files(folder)  # with the card and its picture
    print(f"not published, because it is no part of a model: {', '.join(left_out) or 'nothing'}", flush=True)
    commit = commit_folder(folder, files, str(repository), args.commit_message)
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
    where = (args.output_dir, args.hub_model_id, args.hub_private_repo)
    push_run(PushArguments(*where, card_only=not args.push_to_hub, keep_card=edited))
