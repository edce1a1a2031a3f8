# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Long Range Arena's Retrieval: do two documents belong together? One encoder reads both, a small head compares.

    essm-train-retrieval --train_file data/new_aan_pairs.train.tsv \\
        --validation_file data/new_aan_pairs.eval.tsv --test_file data/new_aan_pairs.test.tsv
    essm-train-retrieval --train_file data/new_aan_pairs.train.tsv --architecture transformer   # a baseline
    essm-train-retrieval --help                                # every argument; also as `arguments.yaml`

The files are those of the archive lra_release.gz; essm_train/tasks/retrieval.py says what they hold. Interrupted runs
continue, see essm_train/run/loop.py.
"""

from __future__ import annotations

from essm_train.console import command
from essm_train.data.arguments import RetrievalArguments

run = command("essm_train.run.classifier:train_pair_classifier", RetrievalArguments)

if __name__ == "__main__":
    run()
