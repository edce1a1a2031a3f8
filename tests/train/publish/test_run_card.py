# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/publish/run_card.py: a card that its user has edited stays, one that was written is written anew."""

from pathlib import Path

import pytest

from essm_train.arguments import RunArguments
from essm_train.publish import run_card
from essm_train.publish.run_card import write_card_and_push


@pytest.fixture
def pushed(monkeypatch) -> list:
    """What `push_run` is called with; it writes a card that tells how often."""
    calls = []

    def push(args, on_card) -> None:
        calls.append((args.hub_model_id, args.card_only, args.keep_card))
        if not args.keep_card:
            card = Path(args.run) / "model" / "README.md"
            card.write_text(f"card {len(calls)}")
            on_card(card)
        if args.hub_model_id == "killed":
            raise KeyboardInterrupt

    monkeypatch.setattr(run_card, "push_run", push)
    return calls


def test_an_edited_card_stays(pushed, tmp_path, capsys):
    args = RunArguments(output_dir=str(tmp_path))
    card = tmp_path / "model" / "README.md"
    card.parent.mkdir()
    write_card_and_push(args)
    write_card_and_push(args)
    assert (
        pushed == [(None, True, False)] * 2 and card.read_text() == "card 2" and "kept" not in capsys.readouterr().out
    )
    card.write_text("mine")
    write_card_and_push(args)
    assert len(pushed) == 2 and card.read_text() == "mine" and "was edited" in capsys.readouterr().out
    write_card_and_push(RunArguments(output_dir=str(tmp_path), push_to_hub=True, hub_model_id="me/mine"))
    assert pushed[2:] == [("me/mine", False, True)] and card.read_text() == "mine"
    card.unlink()  # with the model it described
    write_card_and_push(args)
    assert pushed[3:] == [(None, True, False)] and card.read_text() == "card 4"


def test_a_killed_push_leaves_our_card_ours(pushed, tmp_path):
    (tmp_path / "model").mkdir()
    args = RunArguments(output_dir=str(tmp_path), push_to_hub=True, hub_model_id="killed")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            write_card_and_push(args)
    assert pushed == [("killed", False, False)] * 2  # written anew, not kept as if its user had edited it
