# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Every task as named arguments of a training script: where its data is, its shape, and two sizes of the run.

    task_arguments("smnist", "data", "small")         # a dict, ready for YAML; train/list_tasks.py prints it

`full` is the official data at the size of hub_configs/; `small` is a few minutes on one CPU thread: shorter sequences,
fewer updates, a narrower model. `note` says how the data differs from the official set. What is measured on other data
must not be called by the official name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from essm_train.tasks.audio import SC10_URL
from essm_train.tasks.sources import Files, Folders, Hub, Shards, data_folders

ROOT = Path(__file__).resolve().parents[3]
SPLITS = ("train", "validation", "test")
SCRIPTS = MappingProxyType(
    {
        "train_clm": "train_clm",
        "train_classification": "train_classification",
        "retrieval": "train_retrieval",
    }
)


@dataclass(frozen=True)
class TaskSpec:
    """One task.

    Attributes:
        name: its key. title: for people. script: key of SCRIPTS. metric: what the script measures.
        sources: places of the data, the first that is there counts. small_sources: those of the reduced data, if other.
        hub: a data set on the Hub that has the same columns, or None.
        columns: arguments that name columns. common: arguments of both sizes. full, small: arguments of each.
        origin: where the arguments of `full` come from. note: how the data differs from the official set.
    """

    name: str
    title: str
    script: Literal["train_clm", "train_classification", "retrieval"]
    metric: str
    sources: tuple[Files | Shards, ...]
    columns: Mapping[str, str]
    common: Mapping[str, Any]
    full: Mapping[str, Any]
    small: Mapping[str, Any]
    origin: str
    note: str
    hub: Hub | None = None
    small_sources: tuple[Files | Shards, ...] = ()

    def places(self, scale: str) -> tuple[Files | Shards, ...]:
        return self.small_sources if scale == "small" and self.small_sources else self.sources


# ---------------------------------------------------------------------------------------------------------------------
# The tasks.

_S4 = "batch, updates, warm-up and weight decay as in S4's published configuration; learning rate ours, not tuned"
_S4_SIZE = f"depth, width and dropout of hub_configs (S4's, see there), {_S4}"
_OURS = "size and training arguments are ours, not tuned"
_LRA_SIZE = MappingProxyType({"hidden_size": 256, "num_hidden_layers": 6, "learning_rate": 1e-3})
_LRA_ARCHIVE = (
    "fetch lra_release.gz, linked in the README of https://github.com/google-research/long-range-arena, unpack it "
    "(`tar -xvf lra_release.gz`) and copy lra_release/lra_release/tsv_data/new_aan_pairs.*.tsv"
)
_PIXELS = MappingProxyType({"features_column": "pixels", "label_column": "label"})
_FRAMES = MappingProxyType({"features_column": "frames", "label_column": "label"})
# Small runs: few and large validations cost as much as training.
_SMALL = MappingProxyType({"validation_samples": 500, "test_samples": 2000, "eval_steps": 500, "save_steps": 500})


def _generated(folder: str, name: str, *arguments: str) -> Shards:
    command = " ".join(["python train/make_task_data.py", name, f"--output_dir {{data}}/{folder}", *arguments])
    return Shards(folder, name, command)


def _frames(name: str, data_dir: str, raw: str, fetch: str = "") -> Shards:
    command = f"python train/prepare_audio.py {name} --data_dir {data_dir} --output_dir {{data}}/{name}"
    return Shards(name, name, command, raw, fetch)


def _parquet(stem: str, splits: Iterable[str], how: str) -> Files:
    return Files({split: f"{stem}-{split}.parquet" for split in splits}, how)


_PIXEL_FILES = (
    "save the splits train and test of https://huggingface.co/datasets/{name} as parquet files with the columns pixels "
    "(a list of {length} uint8, row by row{grey}) and label (0 to 9)"
)

_SPECS = (
    TaskSpec(
        name="listops",
        title="Long Range Arena, ListOps",
        script="train_classification",
        metric="accuracy",
        sources=(_generated("listops", "listops"),),
        small_sources=(
            _generated(
                "listops_small",
                "listops",
                "--train_size 20000 --validation_size 500 --test_size 2000",
                "--min_length 20 --max_length 200 --max_depth 5",
            ),
        ),
        columns={"text_column": "tokens", "label_column": "label"},
        common={"tokenizer_name": str(ROOT / "hub_configs" / "essm-lra-listops"), "num_labels": 10},
        full={
            **_LRA_SIZE,
            "max_length": 2000,
            "filter_length": 2048,
            "per_device_train_batch_size": 50,
            "max_steps": 80000,
        }
        | {"warmup_steps": 1000, "weight_decay": 0.05, "eval_steps": 2000, "save_steps": 2000},
        small={"max_length": 200, "filter_length": 512, "hidden_size": 64, "num_hidden_layers": 2, "max_steps": 1000}
        | {**_SMALL, "per_device_train_batch_size": 32, "learning_rate": 3e-3, "warmup_steps": 100},
        origin=_S4_SIZE,
        note="generated here by the official rules, so not the official rows; small: trees of 21 to 199 symbols",
    ),
    TaskSpec(
        name="text",
        title="Long Range Arena, Text (IMDb bytes)",
        script="train_classification",
        metric="accuracy",
        sources=(
            _parquet(
                "imdb",
                ("train", "test"),
                "save the splits train and test of https://huggingface.co/datasets/stanfordnlp/imdb (columns text, "
                "label) as parquet files",
            ),
        ),
        hub=Hub("stanfordnlp/imdb"),
        columns={"text_column": "text", "label_column": "label"},
        common={"num_labels": 2},
        full={
            **_LRA_SIZE,
            "max_length": 4096,
            "filter_length": 4096,
            "per_device_train_batch_size": 16,
            "max_steps": 50000,
        }
        | {"warmup_steps": 1000, "weight_decay": 0.05, "eval_steps": 2000, "save_steps": 2000},
        small={"max_length": 512, "filter_length": 512, "hidden_size": 64, "num_hidden_layers": 2, "max_steps": 2000}
        | {
            **_SMALL,
            "per_device_train_batch_size": 16,
            "learning_rate": 3e-3,
            "warmup_steps": 100,
            "test_samples": 2000,
        },
        origin=_S4_SIZE,
        note="all 25,000 + 25,000 official reviews; a tenth of the training ones is held out to select by, where the "
        "official pipeline has no validation split; small: the first 512 bytes of each, so not the official task",
    ),
    TaskSpec(
        name="retrieval",
        title="Long Range Arena, Retrieval (AAN pairs)",
        script="retrieval",
        metric="accuracy",
        sources=(
            Files(
                {split: f"new_aan_pairs.{end}.tsv" for split, end in zip(SPLITS, ("train", "eval", "test"))},
                _LRA_ARCHIVE,
            ),
            Files(
                {
                    split: f"lra_release/lra_release/tsv_data/new_aan_pairs.{end}.tsv"
                    for split, end in zip(SPLITS, ("train", "eval", "test"))
                },
                _LRA_ARCHIVE,
            ),
        ),
        columns={},  # of the files, see retrieval.py
        common={},
        full={
            **_LRA_SIZE,
            "max_length": 4000,
            "filter_length": 4096,
            "per_device_train_batch_size": 64,
            "max_steps": 50000,
        }
        | {"warmup_steps": 2500, "weight_decay": 0.05, "eval_steps": 2000, "save_steps": 2000},
        small={"max_length": 512, "filter_length": 512, "hidden_size": 64, "num_hidden_layers": 2, "max_steps": 500}
        | {
            **_SMALL,
            "per_device_train_batch_size": 16,
            "learning_rate": 3e-3,
            "warmup_steps": 50,
            "test_samples": 1000,
        },
        origin=_S4_SIZE,
        note="the official files, which were not at hand here: never run; small: the first 512 bytes of each document, "
        "so not the official task",
    ),
    TaskSpec(
        name="image",
        title="Long Range Arena, Image (grey CIFAR-10)",
        script="train_classification",
        metric="accuracy",
        sources=(
            _parquet(
                "cifar10_gray",
                ("train", "test"),
                _PIXEL_FILES.format(name="uoft-cs/cifar10", length=1024, grey=", in grey"),
            ),
        ),
        columns=_PIXELS,
        common={"max_length": 1024, "filter_length": 1024, "num_labels": 10},
        full={**_LRA_SIZE, "dropout": 0.1, "per_device_train_batch_size": 50, "max_steps": 200000}
        | {"warmup_steps": 1000, "weight_decay": 0.05, "eval_steps": 2000, "save_steps": 2000},
        small={"hidden_size": 32, "num_hidden_layers": 2, "max_steps": 500, "per_device_train_batch_size": 16}
        | {**_SMALL, "learning_rate": 3e-3, "warmup_steps": 50, "test_samples": 1000},
        origin=f"depth and dropout of hub_configs (S4's; width 256 for its 512), {_S4}",
        note="cifar10_gray is decoded from JPEG copies: slightly lossy, so not the official bytes; a tenth of the "
        "training rows is held out",
    ),
    TaskSpec(
        name="pathfinder",
        title="Long Range Arena, Pathfinder 32 x 32",
        script="train_classification",
        metric="accuracy",
        sources=(_generated("pathfinder32", "pathfinder32", "--difficulty hard"),),
        small_sources=(
            _generated(
                "pathfinder_small",
                "pathfinder32",
                "--train_size 20000 --validation_size 1000 --test_size 2000",
                "--image_size 16 --seed_distance 3 --contour_length 3 --distractor_paddles 2",
            ),
        ),
        columns=_PIXELS,
        common={"num_labels": 2},
        full={**_LRA_SIZE, "max_length": 1024, "filter_length": 1024, "per_device_train_batch_size": 64}
        | {"max_steps": 500000, "warmup_steps": 2500, "weight_decay": 0.03}
        | {"eval_steps": 2500, "save_steps": 2500},
        small={"max_length": 256, "filter_length": 512, "hidden_size": 64, "num_hidden_layers": 2, "max_steps": 1000}
        | {**_SMALL, "per_device_train_batch_size": 32, "learning_rate": 3e-3, "warmup_steps": 100},
        origin=_S4_SIZE,
        note="generated here with the official parameters by code of our own, so not the official images; small: "
        "16 x 16 pixels and snakes of 3 paddles",
    ),
    TaskSpec(
        name="pathx",
        title="Long Range Arena, Path-X (128 x 128)",
        script="train_classification",
        metric="accuracy",
        sources=(_generated("pathx", "pathx"),),
        small_sources=(
            _generated(
                "pathx_small",
                "pathx",
                "--train_size 10000 --validation_size 1000 --test_size 1000 --image_size 32 --seed_distance 7",
                "--paddle_length 2 --paddle_thickness 0.5 --paddle_margins 1 --marker_radius 1.5",
                "--difficulty baseline --distractor_paddles 6",
            ),
        ),
        columns=_PIXELS,
        common={"num_labels": 2},
        full={**_LRA_SIZE, "max_length": 16384, "filter_length": 16384, "per_device_train_batch_size": 16}
        | {"max_steps": 500000, "warmup_steps": 50000, "weight_decay": 0.05}
        | {"eval_steps": 5000, "save_steps": 5000},
        small={"max_length": 1024, "filter_length": 1024, "hidden_size": 32, "num_hidden_layers": 2, "max_steps": 300}
        | {
            **_SMALL,
            "per_device_train_batch_size": 16,
            "learning_rate": 3e-3,
            "warmup_steps": 50,
            "test_samples": 1000,
        },
        origin=_S4_SIZE,
        note="generated here with the official parameters by code of our own, so not the official images; small: a "
        "32 x 32 image that only shows that all works, chance accuracy is expected",
    ),
    TaskSpec(
        name="pg19",
        title="PG19, bytes",
        script="train_clm",
        metric="bits/byte",
        sources=(
            Files(
                {"train": "pg19/train-*.parquet", "validation": "pg19/validation-*.parquet"},
                "fetch the parquet files train-* and validation-* of https://huggingface.co/datasets/emozilla/pg19 "
                "(11 GB; `hf download emozilla/pg19 --repo-type dataset --local-dir pg19_hub` puts them into "
                "pg19_hub/data) and move them",
            ),
        ),
        hub=Hub("emozilla/pg19", {"streaming": True}),
        columns={"text_column": "text"},
        common={},
        full={"config_name": str(ROOT / "hub_configs" / "essm-21m"), "block_size": 4096, "streaming": True}
        | {"per_device_train_batch_size": 16, "max_steps": 50000, "learning_rate": 2e-3, "warmup_steps": 1000}
        | {"eval_steps": 1000, "save_steps": 1000, "validation_blocks": 64, "sweep_blocks": 512},
        small={"block_size": 256, "filter_length": 512, "hidden_size": 96, "num_hidden_layers": 3, "streaming": True}
        | {"per_device_train_batch_size": 8, "max_steps": 500, "eval_steps": 250, "save_steps": 250}
        | {"validation_blocks": 32, "sweep_blocks": 64},
        origin="the size is that of the paper's language model; training arguments ours, not tuned",
        note="a mirror of the official books; small: a tiny part of them, blocks of 256 bytes",
    ),
    TaskSpec(
        name="novels",
        title="85 English novels, bytes (in place of PG19)",
        script="train_clm",
        metric="bits/byte",
        sources=(
            _parquet(
                "english_novels",
                ("train", "validation"),
                "save the '100 English Novels' stylometry corpus (https://github.com/computationalstylistics) as "
                "parquet files with a column text, one book a row",
            ),
        ),
        columns={"text_column": "text"},
        common={},
        full={
            "config_name": str(ROOT / "hub_configs" / "essm-21m"),
            "block_size": 4096,
            "per_device_train_batch_size": 16,
        }
        | {"max_steps": 10000, "learning_rate": 2e-3, "warmup_steps": 500, "eval_steps": 500}
        | {"save_steps": 500, "validation_blocks": 64, "sweep_blocks": 256},
        small={"block_size": 256, "filter_length": 512, "hidden_size": 96, "num_hidden_layers": 3}
        | {"per_device_train_batch_size": 8, "max_steps": 500, "eval_steps": 250, "save_steps": 250}
        | {"validation_blocks": 32, "sweep_blocks": 64},
        origin="the size is that of the paper's language model; training arguments ours, not tuned",
        note="book-length prose of the kind of PG19, 66 MB: never call a number on it a PG19 number",
    ),
    TaskSpec(
        name="sc10",
        title="Speech Commands, 10 words (SC-10)",
        script="train_classification",
        metric="accuracy",
        sources=(
            _frames(
                "sc10",
                "{raw}/speech_commands",
                "speech_commands",
                f"fetch {SC10_URL} and unpack it into {{raw}}/speech_commands",
            ),
        ),
        columns=_FRAMES,
        common={"max_length": 98, "filter_length": 512},
        full={"hidden_size": 128, "num_hidden_layers": 6, "dropout": 0.1, "per_device_train_batch_size": 64}
        | {"max_steps": 20000, "learning_rate": 2e-3, "warmup_steps": 500}
        | {"eval_steps": 500, "save_steps": 500},
        small={"hidden_size": 64, "num_hidden_layers": 2, "per_device_train_batch_size": 32, "max_steps": 1000}
        | {**_SMALL, "learning_rate": 5e-3, "warmup_steps": 50},
        origin=f"the size is that of hub_configs/essm-audio, {_OURS}",
        note="the official V2 clips, validation_list.txt and testing_list.txt, ten words, no class of unknown words or "
        "silence; never run here",
    ),
    TaskSpec(
        name="speech4",
        title="Speech Commands, 4 words at 8 kHz",
        script="train_classification",
        metric="accuracy",
        sources=(
            _frames(
                "speech4",
                "{raw}",
                "speech_commands_4words-train.parquet",
                "put speech_commands_4words-train.parquet, -validation.parquet and -test.parquet (columns mulaw_8khz, "
                "label, num_samples, clip) into {raw}",
            ),
        ),
        columns=_FRAMES,
        common={"max_length": 98, "filter_length": 512},
        full={"hidden_size": 128, "num_hidden_layers": 6, "dropout": 0.1, "per_device_train_batch_size": 64}
        | {"max_steps": 5000, "learning_rate": 2e-3, "warmup_steps": 200}
        | {"eval_steps": 250, "save_steps": 250},
        small={"hidden_size": 64, "num_hidden_layers": 2, "per_device_train_batch_size": 32, "max_steps": 500}
        | {**_SMALL, "learning_rate": 5e-3, "warmup_steps": 50},
        origin=f"the size is that of hub_configs/essm-audio, {_OURS}",
        note="yes, no, up and down only, 2,000 training clips a word, 8 kHz mu-law: never call it SC-10 or SC-35",
    ),
    TaskSpec(
        name="smnist",
        title="Sequential MNIST",
        script="train_classification",
        metric="accuracy",
        sources=(_parquet("mnist", ("train", "test"), _PIXEL_FILES.format(name="ylecun/mnist", length=784, grey="")),),
        columns=_PIXELS,
        common={"max_length": 784, "filter_length": 1024, "num_labels": 10},
        full={"hidden_size": 128, "num_hidden_layers": 4, "per_device_train_batch_size": 50, "max_steps": 50000}
        | {"learning_rate": 2e-3, "warmup_steps": 1000, "eval_steps": 1000, "save_steps": 1000},
        small={"hidden_size": 32, "num_hidden_layers": 2, "max_steps": 2000, "per_device_train_batch_size": 16}
        | {**_SMALL, "learning_rate": 1e-2, "warmup_steps": 100, "test_samples": 2000},
        origin=_OURS,
        note="the official 60,000 + 10,000 images, pixels in order; a tenth of the training rows is held out",
    ),
)
TASKS: Mapping[str, TaskSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})


# ---------------------------------------------------------------------------------------------------------------------
# From a task to arguments.


def get_task(name: str) -> TaskSpec:
    """Raises ValueError for an unknown name."""
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {name!r}")
    return TASKS[name]


def find_data(spec: TaskSpec, scale: str, data_dir: Folders = None) -> dict[str, list[str]]:
    """Files of each split, of the first source that is in any of the folders.

    Raises:
        FileNotFoundError: there is none; says what to fetch, from where, and where to put it, or what to run.
        ValueError: generated data is damaged or belongs to another task.
    """
    folders, places = data_folders(data_dir), spec.places(scale)
    for place in places:
        for folder in folders:
            found = place.find(folder)
            if found is not None:
                return found
    searched = ", ".join(str(folder) for folder in folders)
    reduced = " (small)" if scale == "small" and spec.small_sources else ""
    message = f"no data for task {spec.name!r}{reduced} in {searched}: {places[0].instructions(folders)}"
    if spec.hub is not None:
        message += f"; or read {spec.hub.name!r} from the Hub (`use_hub=True`, of catalog.py --use_hub)"
    raise FileNotFoundError(message)


def task_arguments(name: str, data_dir: Folders = None, scale: str = "full", use_hub: bool = False) -> dict[str, Any]:
    """Arguments of the script of a task, ready for its dataclass or a YAML file; output_dir and seed are the caller's.

    Args:
        name: key of TASKS. data_dir: see `data_folders`. scale: "full" or "small".
        use_hub: read the task's data set on the Hub instead of files.
    Raises:
        ValueError: unknown name or scale, no data set on the Hub, or damaged data. FileNotFoundError: see `find_data`.
    """
    spec = get_task(name)
    if scale not in ("full", "small"):
        raise ValueError(f"scale must be 'full' or 'small', got {scale!r}")
    sizes = spec.full if scale == "full" else spec.small
    block = {} if "config_name" in sizes else {"block": "paper"}  # these are the paper's tasks
    arguments: dict[str, Any] = {**spec.columns, **spec.common, **block, **sizes}
    if use_hub:
        if spec.hub is None:
            raise ValueError(f"task {name!r} has no data set on the Hub with the columns that it needs")
        return {"dataset_name": spec.hub.name, **spec.hub.arguments, **arguments}
    found = find_data(spec, scale, data_dir)
    if spec.script == "train_clm":
        found.pop("test", None)  # it has no test file
    one_file = spec.script == "retrieval"
    return {f"{split}_file": paths[0] if one_file else paths for split, paths in found.items()} | arguments


def make_arguments(name: str, data_dir: Folders = None, scale: str = "full", **changes: Any) -> Any:
    """The dataclass of the task's script with these arguments; `changes` override them (output_dir, seed, ..).

    Raises:
        ValueError, FileNotFoundError: as `task_arguments`, and what the dataclass refuses.
    """
    from essm_train.data.arguments import ClassificationArguments, CLMArguments  # tasks are listed without torch
    from essm_train.tasks.retrieval import RetrievalArguments

    classes: dict[str, type] = {"train_clm": CLMArguments, "train_classification": ClassificationArguments}
    cls = classes.get(get_task(name).script, RetrievalArguments)
    return cls(**(task_arguments(name, data_dir, scale) | changes))
