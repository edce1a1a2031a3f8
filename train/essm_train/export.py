# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Export a saved model at fixed budgets, to run where there is no torch: ONNX, ExecuTorch, or torch's own .pt2.

    essm-export --model runs/train_clm/model --spectral_budget small medium full --output_dir exported
    essm-export --model runs/train_clm/model --spectral_budget 1 2 4 8 --output_dir exported --int8
    essm-export --model runs/train_clm/model --spectral_budget 6 2,4,8,8 --output_dir exported --format torch
    python examples/decode_without_torch.py exported "import " --spectral_budget small

A language model leaves prefill-K.onnx and step-K.onnx for each budget K, a classifier classify-K.onnx, and all of them
read the leading parts of one weights.bin (a .pt2 holds its own weights; ExecuTorch puts all programs of a budget into
model-K.pte, for batches of one row); with them tokenizer.json, or features.json, which says how numbers are scaled, and
export.json, which names and describes inputs, outputs and states and repeats that scale. See modeling_essm/export for
what they compute. Weights are exported in fp32, or with --int8 their matrices in 8 bits, which runtimes turn into fp32
as they load them. What was written is loaded again and compared with the model (with --int8 one of the rounded weights)
before the folder appears under its name. An earlier export there is replaced with --overwrite, and nothing else is.
"""

from __future__ import annotations

from essm_train.console import command
from essm_train.publish.arguments import ExportArguments

run = command("essm_train.publish.export:export", ExportArguments)

if __name__ == "__main__":
    run()
