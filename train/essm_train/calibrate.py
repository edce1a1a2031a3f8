# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which budget for this machine? Quality of a saved model at every budget, and its speed and memory on this device.

    essm-calibrate --model runs/x/model --text_files held_out.txt             # a language model
    essm-calibrate --model runs/y/model --test_file test.csv --features_column "t*"      # a classifier
    essm-calibrate --model runs/y/model --task smnist --data_dir data         # of essm-list-tasks
    essm-calibrate --model runs/z/model --task retrieval --data_dir data      # of pairs of documents
    essm-calibrate --model runs/x/model --timing_only                         # the same on another device

Left in the model's folder: budget_profile.json, with which `choose_budget` answers; the sizes "small" (the
collapse boundary), "medium" (the sweet spot) and "full" as presets in config.json, for `spectral_budget="small"`; and
budget_profile.png. Where quality, this device's figures or those presets are there already, --overwrite replaces them;
other devices and names stay.

Quality is bits per byte by the context rule of budget_sweep.py, or accuracy. The drop against the full budget is given
with its standard error over blocks or samples. Prefill is a forward pass over the whole prompt (a sample, for a
classifier), decode one greedy step after it, as `forward` runs it: what `generate` does around it comes on top. Times
are medians over rounds in which budgets and batch sizes take turns, memory is what a call needs beside the weights;
the inputs are random.
"""

from __future__ import annotations

from essm_train.console import command
from essm_train.publish.arguments import CalibrateArguments

run = command("essm_train.publish.profile:calibrate", CalibrateArguments)

if __name__ == "__main__":
    run()
