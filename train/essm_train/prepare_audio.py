# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Spoken words as log-mel frames, written once as parquet files that essm-train-classification reads.

    essm-prepare-audio speech4 --data_dir data --output_dir data/speech4
    essm-prepare-audio sc10 --data_dir data/speech_commands --output_dir data/sc10

`speech4` reads the files speech_commands_4words-{train,validation,test}.parquet of 8 kHz mu-law codes: four words of
Speech Commands V2, a task of our own. `sc10` reads the unpacked official archive of Speech Commands V2, one folder of
16 kHz wav files per word, and splits it by its validation_list.txt and testing_list.txt; the rest is for training.

Every clip becomes (98, 40) numbers: 40 mel bands of 25 ms windows, one each 10 ms of one second. Each band is
normalised to mean 0 and deviation 1 over the frames of the clip. A short clip has fewer frames in `sc10`; in `speech4`
those after its end are 0.
The same command continues after an interruption. essm-train-classification reads the data with
`--features_column frames --label_column label`.
"""

from __future__ import annotations

from collections.abc import Sequence

from essm_train.console import command
from essm_train.make_task_data import make


def main(argv: Sequence[str] | None = None) -> None:
    """Write the frames."""
    from essm_train.tasks.audio import Speech4, SpeechCommands

    make(argv, (Speech4, SpeechCommands), __doc__)


run = command(main)


if __name__ == "__main__":
    run()
