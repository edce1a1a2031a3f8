# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A trained model with diagonal state spaces, or a Mamba, made smaller without training: at a ratio, or to a limit.

    essm-prune --model runs/s5/model --task smnist --data_dir data --amount 0.5 --output_dir runs/s5-half
    essm-prune --model runs/lru/model --text_files heldout.txt --max_loss 0.01 --output_dir runs/lru-small
    essm-prune --model folder-of-a-mamba --text_files heldout.txt --calibration_files train.txt \\
        --amount 0.25 --output_dir runs/mamba-12

Modes are ranked by `modeling_essm.companions.importance` and masked at a ladder of ratios; the quality at each is
measured on held-out data. At --amount, or at the largest ratio up to which no step of the ladder loses more than
--max_loss, modes are then taken out of the weights.

Left in output_dir: the smaller model with its card in `model`, pruning.json, pruning.md and pruning.png, and plan.json,
which says what was kept. A command that was killed goes on where it was. A model that is there is refused, or replaced
with --overwrite, but never the one that is pruned.
"""

from __future__ import annotations

from essm_train.console import command
from essm_train.publish.arguments import PruneArguments

run = command("essm_train.publish.pruned:prune_model", PruneArguments)

if __name__ == "__main__":
    run()
