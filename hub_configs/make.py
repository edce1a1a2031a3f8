# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Write every published configuration: config, generation config, tokenizer or feature extractor, card template, and
a link to the code, so that `from_pretrained(folder, trust_remote_code=True)` works from a clone.

    python hub_configs/make.py           # into this folder; a test compares what is committed with what this makes

A configuration is changed here, never in the files. The size of each and where it is from stands in SIZES below.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Speech2TextFeatureExtractor

import modeling_essm
from modeling_essm import (
    ESSMConfig,
    ESSMForCausalLM,
    ESSMForPairClassification,
    ESSMForSequenceClassification,
    build_byte_tokenizer,
)

CODE = "code"  # the link in each folder
PACKAGE = Path(modeling_essm.__file__).parent
LISTOPS_SYMBOLS = (*map(str, range(10)), "[MIN", "[MAX", "[MED", "[SM", "]")
LISTOPS_PAD = len(LISTOPS_SYMBOLS)
SPEECH_WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

SIZES = {
    "paper": (
        "The size is that of the paper's language model: width 256, 8 blocks, 32 channels. Width (64) and bias (1) of "
        "the gate and the initialisation are ours; the authors' notebook has 128 and -2, which the recipe of PG19 sets."
    ),
    "own": (
        "Size and block are ours: the paper's Eq. (7-8) with diagonal matrices inside a gated block with a short "
        "convolution, which learns faster than the paper's block at equal parameters and text, and as many channels as "
        "its text can use. Small enough to train on a laptop in minutes."
    ),
    "gated": (
        "Size and block are ours: the paper's Eq. (7-8) with diagonal matrices inside a gated block with a short "
        "convolution, which learns faster than the paper's block at equal parameters and text. Sixteen channels reach "
        "some thousand steps back."
    ),
    "task": (
        "Width 256, 8 blocks and 32 channels are the paper's, which has one size for every task; the gate's width and "
        "bias, the filter length, pooling and initialisation, which it does not give, are ours."
    ),
    "task-dropout": (
        "Width 256, 8 blocks and 32 channels are the paper's, which has one size for every task; the gate's width and "
        "bias, the filter length, pooling, initialisation and dropout, which it does not give, are ours."
    ),
}


@dataclass(frozen=True)
class Published:
    """One folder.

    Attributes:
        title, text: of the card. size: key of SIZES. fields: of its configuration. labels: class names; none for
            language. pairs: whether it classifies pairs of documents.
        inputs: "bytes", "listops", "pixels" or "speech". example: text for the card's example.
        pipeline_tag, language: card metadata.
    """

    title: str
    text: str
    size: str
    fields: dict[str, Any]
    inputs: str
    labels: tuple[str, ...] = ()
    pairs: bool = False
    example: str | None = None
    pipeline_tag: str = "text-classification"
    language: str | None = None
    tags: tuple[str, ...] = field(default=("long-range-arena",))

    def config(self) -> ESSMConfig:
        ids: dict[str, int | None] = {}  # bytes: the defaults of ESSMConfig
        if self.inputs == "listops":
            ids = {"vocab_size": LISTOPS_PAD + 1, "pad_token_id": LISTOPS_PAD, "bos_token_id": None}
            ids |= {"eos_token_id": None}
        elif self.inputs != "bytes":
            ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        labels = {}
        if self.labels:
            labels["id2label"] = dict(enumerate(self.labels))
            labels["label2id"] = {label: i for i, label in enumerate(self.labels)}
        config = self.model_class().config_class(**ids, **labels, **self.fields)
        config.architectures = [self.model_class().__name__]
        config.dtype = torch.float32
        return config

    def model_class(self) -> Any:
        if self.pairs:
            return ESSMForPairClassification
        return ESSMForSequenceClassification if self.labels else ESSMForCausalLM

    def tokenizer(self) -> PreTrainedTokenizerFast | None:
        length = self.fields["filter_length"]
        if self.inputs == "bytes":
            return build_byte_tokenizer(model_max_length=length)
        return listops_tokenizer(length) if self.inputs == "listops" else None


def listops_tokenizer(model_max_length: int) -> PreTrainedTokenizerFast:
    """Ids 0..14 are the 15 symbols (digits, four operators with their bracket, the closing bracket), 15 is padding.

    Symbols stand between spaces. There is no unknown symbol: any other word is an error.
    """
    vocabulary = {symbol: i for i, symbol in enumerate((*LISTOPS_SYMBOLS, "<pad>"))}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        padding_side="right",
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
    )


def speech_features() -> Speech2TextFeatureExtractor:
    """Log-mel frames (B, L, 40), one per 10 ms of 16 kHz sound, each band normalised over the clip; in numpy alone."""
    return Speech2TextFeatureExtractor(feature_size=40, num_mel_bins=40, sampling_rate=16000)


_GATED = {"block": "gated"}
_SIZE = {"hidden_size": 256, "num_hidden_layers": 8}
_PIXELS = "Pixels are read row by row as `input_features` of shape (batch, {length}, 1), scaled to [-1, 1]."

CONFIGURATIONS = {
    "essm-tiny": Published(
        "ES-SSM tiny",
        "A byte-level language model for trying things out: what `train/train_clm.py` trains by default.",
        "own",
        _GATED | {"hidden_size": 128, "num_hidden_layers": 8, "num_spectral_channels": 8, "filter_length": 1024},
        "bytes",
        example="def main(",
        pipeline_tag="text-generation",
        tags=("byte-level",),
    ),
    "essm-gated-20m": Published(
        "ES-SSM gated 20M",
        "A byte-level language model with the gated block.",
        "gated",
        _GATED | {"hidden_size": 512, "num_hidden_layers": 12, "num_spectral_channels": 16, "filter_length": 16384},
        "bytes",
        example="It was a dark and stormy night",
        pipeline_tag="text-generation",
        language="en",
        tags=("byte-level",),
    ),
    "essm-gated-130m": Published(
        "ES-SSM gated 130M",
        "A byte-level language model with the gated block.",
        "gated",
        _GATED | {"hidden_size": 1024, "num_hidden_layers": 19, "num_spectral_channels": 16, "filter_length": 16384},
        "bytes",
        example="It was a dark and stormy night",
        pipeline_tag="text-generation",
        language="en",
        tags=("byte-level",),
    ),
    "essm-21m": Published(
        "ES-SSM 21M",
        "A byte-level language model of the size of the paper's.",
        "paper",
        _SIZE | {"filter_length": 4096},
        "bytes",
        example="It was a dark and stormy night",
        pipeline_tag="text-generation",
        language="en",
        tags=("byte-level",),
    ),
    "essm-lra-listops": Published(
        "ES-SSM for Long Range Arena, ListOps",
        "Evaluates nested list expressions of up to 2,000 symbols to one digit. Symbols stand between spaces and "
        "parentheses are removed: 15 symbols and padding.",
        "task",
        _SIZE | {"filter_length": 2048},
        "listops",
        tuple(map(str, range(10))),
        example="[MAX 2 9 [MIN 4 7 ] 0 ]",
    ),
    "essm-lra-text": Published(
        "ES-SSM for Long Range Arena, Text",
        "Tells the sentiment of film reviews (IMDb) read as bytes, cut at 4,096.",
        "task",
        _SIZE | {"filter_length": 4096},
        "bytes",
        ("negative", "positive"),
        example="A film that I will remember for years.",
        language="en",
    ),
    "essm-lra-retrieval": Published(
        "ES-SSM for Long Range Arena, Retrieval",
        "Tells whether two documents (AAN) of up to 4,000 bytes are linked by a citation. One encoder reads both, and "
        "a head of one hidden layer over [a, b, a * b, a - b] compares the means a and b of its outputs: two towers of "
        "the same weights. It reads `input_ids` of shape (batch, 2, length); `train/train_retrieval.py` trains it.",
        "task",
        _SIZE | {"filter_length": 4096},
        "bytes",
        ("unrelated", "related"),
        pairs=True,
        example="We propose a parser for free word order languages.",
        language="en",
    ),
    "essm-lra-image": Published(
        "ES-SSM for Long Range Arena, Image",
        "Classifies grey CIFAR-10 images, 32 x 32. " + _PIXELS.format(length="1,024"),
        "task-dropout",
        _SIZE | {"filter_length": 1024, "num_input_features": 1, "dropout": 0.1},
        "pixels",
        CIFAR_CLASSES,
        pipeline_tag="image-classification",
    ),
    "essm-lra-pathfinder": Published(
        "ES-SSM for Long Range Arena, Pathfinder",
        "Tells whether two marked points of a 32 x 32 image are joined by a dashed path. "
        + _PIXELS.format(length="1,024"),
        "task",
        _SIZE | {"filter_length": 1024, "num_input_features": 1},
        "pixels",
        ("separate", "connected"),
        pipeline_tag="image-classification",
    ),
    "essm-lra-pathx": Published(
        "ES-SSM for Long Range Arena, Path-X",
        "Tells whether two marked points of a 128 x 128 image are joined by a dashed path. "
        + _PIXELS.format(length="16,384"),
        "task",
        _SIZE | {"filter_length": 16384, "num_input_features": 1},
        "pixels",
        ("separate", "connected"),
        pipeline_tag="image-classification",
    ),
    "essm-audio": Published(
        "ES-SSM for spoken words",
        "Recognises ten words of Speech Commands (SC-10) in one second of 16 kHz sound, read as log-mel frames: "
        "`input_features` of shape (batch, 98, 40) and their `attention_mask`, as `preprocessor_config.json` makes "
        "them.",
        "task-dropout",
        _SIZE | {"filter_length": 512, "num_input_features": 40, "dropout": 0.1},
        "speech",
        SPEECH_WORDS,
        pipeline_tag="audio-classification",
        language="en",
        tags=("keyword-spotting",),
    ),
}


# Folders with weights, which release.py makes from runs.
RELEASED = {"essm-novels-6m": "6.1M parameters, gated block; English novels as bytes"}


def count_parameters(published: Published) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in published.model_class()(published.config()).parameters())


def make(root: Path) -> None:
    """Write all folders and README.md into `root`; a folder of the same name is replaced."""
    code = os.path.relpath(PACKAGE, root.resolve() / "name")
    for name, published in CONFIGURATIONS.items():
        folder = root / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        config = published.config()
        config.auto_map = {auto: f"{CODE}/{reference}" for auto, reference in config.auto_classes.items()}
        write_config_file(folder / "config.json", config.to_json_string(use_diff=True))
        (folder / CODE).symlink_to(code, target_is_directory=True)
        if not published.labels:
            with torch.device("meta"):
                generation_config = published.model_class()(config).generation_config
            write_config_file(folder / "generation_config.json", generation_config.to_json_string())
        tokenizer = published.tokenizer()
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if published.inputs == "speech":
            speech_features().save_pretrained(folder)
        (folder / "README.md").write_text(card_template(published), encoding="utf-8")
    (root / "README.md").write_text(overview(), encoding="utf-8")


def write_config_file(path: Path, text: str) -> None:
    """Without the library's version, which would change the file at every upgrade and means nothing to a loader."""
    record = {key: value for key, value in json.loads(text).items() if key != "transformers_version"}
    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def card_template(published: Published) -> str:
    """The card with markers, which train/essm_train/publish/model_card.py fills."""
    head = ["license: apache-2.0", "library_name: transformers", f"pipeline_tag: {published.pipeline_tag}"]
    head += [f"language: {published.language}"] if published.language else []
    head += ["tags:", *(f"- {tag}" for tag in published.tags)]
    head += ["widget:", f"- text: {json.dumps(published.example)}"] if published.example else []
    body = [
        f"# {published.title}",
        f"{published.text}\n\nAn elastic spectral state-space model (ES-SSM): trained once, it runs with any "
        "number of its spectral channels, chosen per call with `spectral_budget`. Method: [Song et "
        "al.](https://arxiv.org/abs/2601.22488).",
        "<!-- model -->",
        SIZES[published.size],
        *(f"<!-- {section} -->" for section in ("results", "training", "loading", "limits")),
    ]
    return "---\n" + "\n".join(head) + "\n---\n\n" + "\n\n".join(body) + "\n"


def overview() -> str:
    """README.md of the folder."""
    rows = []
    for name, published in CONFIGURATIONS.items():
        config = published.config()
        size = f"{config.num_hidden_layers} x {config.hidden_size}"
        origin = "ours" if published.size in ("own", "gated") else "paper"
        rows.append(
            f"| `{name}` | {count_parameters(published) / 1e6:.1f}M | {config.block} | {size} | "
            f"{config.filter_length:,} | {'pairs of ' * published.pairs}{published.inputs} | {origin} |"
        )
    table = "\n".join(rows)
    released = "\n".join(f"| [`{name}`]({name}/README.md) | {text} |" for name, text in RELEASED.items())
    return f"""# Published configurations

Each folder is one model: config.json, generation_config.json for language models, tokenizer or feature extractor
files, and README.md, the template of its card. `code` is a link to the package in this clone; `save_pretrained` writes
the files in its place. `python hub_configs/make.py` writes all of it, so change that file, not these.

| folder | parameters | block | blocks x width | filter_length | input | size from |
|---|---|---|---|---|---|---|
{table}

These are trained, with weights, a budget profile and a card of their own; `release.py` makes them from a run, and
`peers.py` sets other models of their size beside them:

| folder | what it is |
|---|---|
{released}

This makes a new model from one of them, in the folder that `train/push_to_hub.py` uploads:

```python
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

source, folder = "hub_configs/essm-21m", "runs/mine/model"
config = AutoConfig.from_pretrained(source, trust_remote_code=True)
model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)  # random weights, to be trained
model.save_pretrained(folder)  # config, weights and code: from here on the clone is not needed
AutoTokenizer.from_pretrained(source, trust_remote_code=True).save_pretrained(folder)
```

```bash
python train/push_to_hub.py --run runs/mine --hub_model_id org/name --template hub_configs/essm-21m/README.md
```

Inputs: `bytes` is the 259-symbol byte tokenizer, and pairs of bytes are two documents as it reads them, (batch, 2,
length); `listops` a word-level tokenizer of 15 symbols and padding; `pixels` are floats (batch, length, 1) in [-1, 1],
row by row, and need no tokenizer; `speech` are log-mel frames, made from a waveform by the
`Speech2TextFeatureExtractor` of preprocessor_config.json (numpy alone; with torchaudio installed the frames differ in
the last digits).
"""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    make(Path(__file__).parent)
