# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Export a saved model at one budget, to run where there is no torch: ONNX, ExecuTorch, or torch's own .pt2.

    essm-export --model runs/train_clm/model --spectral_budget 6 --output_dir exported
    essm-export --model runs/train_clm/model --spectral_budget 2 4 8 8 --output_dir exported --format torch
    python examples/decode_without_torch.py exported "import "

A language model leaves prefill.onnx and step.onnx, a classifier classify.onnx (.pt2 for torch; ExecuTorch puts all of
them into model.pte, for batches of one row); with them tokenizer.json, or features.json, which says how numbers are
scaled, and export.json, which names and describes inputs, outputs and states and repeats that scale. See
modeling_essm/export for what they compute. Weights are exported in fp32, those of the budget's channels only.
What was written is loaded again and compared with the model before the folder appears under its name. An earlier export
there is replaced with --overwrite, and nothing else is.
"""

from __future__ import annotations

from essm_train.console import command
from essm_train.publish.arguments import ExportArguments

run = command("essm_train.publish.export:export", ExportArguments)

if __name__ == "__main__":
    run()
