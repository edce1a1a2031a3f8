# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The card of a finished run: written, pushed if asked for, and left alone once its user has edited it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from essm_train.publish.hub import PushArguments, push_run
from essm_train.run.engine import RunArguments

_WRITTEN = ".card.sha256"  # in output_dir: of the card as it was written last


def write_card_and_push(args: RunArguments) -> None:
    """`push_run` of a run's model; a card that is not as it was written stays. Raises what `push_run` does."""
    output_dir = Path(args.output_dir)
    card, written = output_dir / "model" / "README.md", output_dir / _WRITTEN
    edited = card.exists() and (not written.exists() or written.read_text() != _digest(card))
    if edited:
        print(
            f"kept {card}, which was edited; `python train/push_to_hub.py --run {output_dir} --card_only` replaces it"
        )
        if not args.push_to_hub:
            return
    try:
        push_run(
            PushArguments(
                args.output_dir,
                args.hub_model_id,
                args.hub_private,
                card_only=not args.push_to_hub,
                keep_card=edited,
            )
        )
    finally:
        if card.exists() and not edited:
            written.write_text(_digest(card))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
