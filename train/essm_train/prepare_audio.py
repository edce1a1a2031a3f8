# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Spoken words as log-mel frames, written once as parquet files that essm-train-classification reads.

    essm-prepare-audio speech4 --data_dir data --output_dir data/speech4
    essm-prepare-audio sc10 --data_dir data/speech_commands --output_dir data/sc10

`speech4` reads the files speech_commands_4words-{train,validation,test}.parquet of 8 kHz mu-law codes: four words of
Speech Commands V2, a task of our own. `sc10` reads the unpacked official archive of Speech Commands V2, one folder of
16 kHz wav files per word, and splits it by its validation_list.txt and testing_list.txt; the rest is for training.

Every clip becomes (98, 40) numbers: 40 mel bands of 25 ms windows, one each 10 ms of one second. Each band is
normalised to mean 0 and deviation 1 over the frames of the clip; frames after the end of a short clip are 0.
The same command continues after an interruption.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from essm_train.arguments import arg
from essm_train.console import command

SOURCES = {"speech4": "data", "sc10": "data/speech_commands"}  # where clips are by default


@dataclass
class AudioArguments:
    """Clips of spoken words as frames; the task comes first."""

    task: str = field(metadata={"help": f"One of {', '.join(SOURCES)}."})
    data_dir: str | None = arg(None, "Where the clips are; by default `data`, of sc10 `data/speech_commands`.")
    output_dir: str | None = arg(None, "Where the frames go; by default data/ and the name of the task.")
    num_workers: int | None = arg(None, "Processes; all cores by default.")

    def __post_init__(self) -> None:
        if self.task not in SOURCES:
            raise ValueError(f"task must be one of {', '.join(SOURCES)}, got {self.task!r}")


def main(args: AudioArguments) -> None:
    """Write the frames."""
    from essm_train.tasks.audio import Speech4, SpeechCommands
    from essm_train.tasks.shards import generate

    folder = Path(args.data_dir or SOURCES[args.task])
    clips = Speech4(folder) if args.task == "speech4" else SpeechCommands(folder)
    manifest = generate(clips, args.output_dir or f"data/{args.task}", args.num_workers or os.cpu_count() or 1)
    print(f"{manifest}: complete; train with --features_column frames --label_column label")


run = command(main, AudioArguments, positional="task")


if __name__ == "__main__":
    run()
