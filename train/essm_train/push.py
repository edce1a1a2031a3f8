# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Publish a saved model on the Hugging Face Hub: code, weights, tokenizer, generation config and card in ONE commit.

    hf auth login                                                             # once
    essm-push --run runs/train_clm --hub_model_id org/name [--private]
    essm-push --run runs/train_clm --card_only              # write model/README.md and stop
    essm-push --run runs/train_clm --dry_run                # say what would be published and what not

A run folder holds model/ and, if they were written, budget_sweep.json, budget_sweep.png and training.json. What belongs
to a model is published, see `split_files`; whatever else lies in its folder is named and stays at home. A card that was
edited is pushed as it is, and one that was edited on the Hub stays there, unless
--replace_card names it. The repository shows its old revision until the commit is made. Pushing again does not send
files twice, and makes no commit if nothing has changed.
"""

from __future__ import annotations

from essm_train.console import command
from essm_train.publish.arguments import PushArguments

run = command("essm_train.publish.run_card:push_run", PushArguments)

if __name__ == "__main__":
    run()
