# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Spoken words as log-mel frames, written once as parquet files that train_classification.py reads.

    python train/prepare_audio.py speech4 --data_dir data --output_dir data/speech4
    python train/prepare_audio.py sc10 --data_dir data/speech_commands --output_dir data/sc10

`speech4` reads the files speech_commands_4words-{train,validation,test}.parquet of 8 kHz mu-law codes: four words of
Speech Commands V2, a task of our own. `sc10` reads the unpacked official archive of Speech Commands V2, one folder of
16 kHz wav files per word, and splits it by its validation_list.txt and testing_list.txt; the rest is for training.

Every clip becomes (98, 40) numbers: 40 mel bands of 25 ms windows, one each 10 ms of one second. Each band is
normalised to mean 0 and deviation 1 over the frames of the clip; frames after the end of a short clip are 0.
An interrupted command is given again, see shards.py. A row is a function of its clip only.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from essm_train.commands.errors import command
from essm_train.tasks.audio import MuLawClips, SpeechCommands, SpeechFrames
from essm_train.tasks.shards import generate

SOURCES = {"speech4": MuLawClips, "sc10": SpeechCommands}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(SOURCES))
    parser.add_argument("--data_dir", help="Where the clips are; by default `data`, of sc10 `data/speech_commands`.")
    parser.add_argument("--output_dir", help="Where the frames go; by default data/ and the name of the task.")
    parser.add_argument("--num_workers", type=int, default=os.cpu_count() or 1, help="Processes; all cores by default.")
    args = parser.parse_args(argv)
    data_dir = Path(args.data_dir or ("data" if args.task == "speech4" else "data/speech_commands"))
    output_dir = Path(args.output_dir or f"data/{args.task}")
    manifest = generate(SpeechFrames.of(args.task, SOURCES[args.task](data_dir)), output_dir, args.num_workers)
    print(f"{manifest}: complete; train with --features_column frames --label_column label")


run = command(main)


if __name__ == "__main__":
    run()
