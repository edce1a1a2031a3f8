# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Write every published configuration: config, generation config, tokenizer or feature extractor, card template, and
a link to the code, so that `from_pretrained(folder, trust_remote_code=True)` works from a clone.

    python hub_configs/make.py           # into this folder; a test compares what is committed with what this makes

A configuration is changed here, never in the files. README.md beside this file lists them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Speech2TextFeatureExtractor

import modeling_essm
from essm_train.pairs import ESSMForPairClassification
from modeling_essm import (
    ESSMConfig,
    ESSMForCausalLM,
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
    "ours": (
        "Size and block are ours: the paper's Eq. (7-8) with diagonal matrices, in a gated block with a short "
        "convolution. At equal parameters and text this block learns faster than the paper's."
    ),
    "paper": (
        "The size is that of the paper's language model: width 256, 8 blocks, 32 channels. Width (64) and bias (1) of "
        "the gate and the initialisation are ours; the authors' notebook has 128 and -2, which the recipe of PG19 sets."
    ),
    "task": (
        "Width 256, 8 blocks and 32 channels are the paper's, which has one size for every task. The paper does not "
        "give the gate's width and bias, the filter length, pooling, initialisation and dropout; these are ours."
    ),
}
NO_IDS: dict[str, int | None] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
IDS = {  # of each kind of input; for bytes the defaults of ESSMConfig
    "bytes": {},
    "listops": NO_IDS | {"vocab_size": LISTOPS_PAD + 1, "pad_token_id": LISTOPS_PAD},
    "pixels": NO_IDS,
    "speech": NO_IDS,
}


@dataclass(frozen=True)
class Published:
    """One folder: a language model, or a classifier where there are labels.

    Attributes:
        title, text: of the card. size: key of SIZES. fields: of its configuration.
        inputs: key of IDS. labels: class names. pairs: whether it classifies pairs of documents.
        example: text for the card's example. pipeline_tag, language, tags: card metadata.
    """

    title: str
    text: str
    size: str
    fields: dict[str, Any]
    inputs: str = "bytes"
    labels: tuple[str, ...] = ()
    pairs: bool = False
    example: str | None = None
    pipeline_tag: str = "text-classification"
    language: str | None = None
    tags: tuple[str, ...] = ("long-range-arena",)

    def model_class(self) -> Any:
        if self.pairs:
            return ESSMForPairClassification
        return ESSMForSequenceClassification if self.labels else ESSMForCausalLM

    def config(self) -> ESSMConfig:
        labels = {}
        if self.labels:
            labels["id2label"] = dict(enumerate(self.labels))
            labels["label2id"] = {label: i for i, label in enumerate(self.labels)}
        config = self.model_class().config_class(**IDS[self.inputs], **labels, **self.fields)
        config.architectures = [self.model_class().__name__]
        config.dtype = torch.float32
        return config

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


def language_model(title: str, text: str, size: str, fields: dict[str, Any], **metadata: Any) -> Published:
    """A byte-level language model."""
    metadata = {"example": "It was a dark and stormy night", "language": "en"} | metadata
    return Published(title, text, size, fields, pipeline_tag="text-generation", tags=("byte-level",), **metadata)


def gated(width: int, blocks: int, channels: int, filter_length: int) -> dict[str, Any]:
    """Fields of a model with our block."""
    sizes = {"hidden_size": width, "num_hidden_layers": blocks, "num_spectral_channels": channels}
    return {"block": "gated", "filter_length": filter_length} | sizes


def paper(filter_length: int, **fields: Any) -> dict[str, Any]:
    """Fields of a model of the paper's size."""
    return {"hidden_size": 256, "num_hidden_layers": 8, "filter_length": filter_length} | fields


def images(title: str, text: str, labels: tuple[str, ...], side: int, **fields: Any) -> Published:
    """A classifier of grey images that are read pixel by pixel."""
    text += f" Pixels are read row by row as `input_features` of shape (batch, {side**2:,}, 1), scaled to [-1, 1]."
    fields = paper(side**2, num_input_features=1, **fields)
    return Published(title, text, "task", fields, "pixels", labels, pipeline_tag="image-classification")


_JOINED = "Tells whether two marked points of a {0} x {0} image are joined by a dashed path."

CONFIGURATIONS = {
    "essm-tiny": language_model(
        "ES-SSM tiny",
        "A byte-level language model to try things out, and the default of `essm-train-clm`. It trains on a laptop in "
        "minutes.",
        "ours",
        gated(128, 8, 8, 1024),
        example="def main(",
        language=None,
    ),
    "essm-gated-20m": language_model(
        "ES-SSM gated 20M", "A byte-level language model with the gated block.", "ours", gated(512, 12, 16, 16384)
    ),
    "essm-gated-130m": language_model(
        "ES-SSM gated 130M", "A byte-level language model with the gated block.", "ours", gated(1024, 19, 16, 16384)
    ),
    "essm-21m": language_model(
        "ES-SSM 21M", "A byte-level language model of the size of the paper's.", "paper", paper(4096)
    ),
    "essm-lra-listops": Published(
        "ES-SSM for Long Range Arena, ListOps",
        "Evaluates nested list expressions of up to 2,000 symbols to one digit. Symbols stand between spaces and "
        "parentheses are removed: 15 symbols and padding.",
        "task",
        paper(2048),
        "listops",
        tuple(map(str, range(10))),
        example="[MAX 2 9 [MIN 4 7 ] 0 ]",
    ),
    "essm-lra-text": Published(
        "ES-SSM for Long Range Arena, Text",
        "Tells the sentiment of film reviews (IMDb), read as bytes and cut at 4,096.",
        "task",
        paper(4096),
        labels=("negative", "positive"),
        example="A film that I will remember for years.",
        language="en",
    ),
    "essm-lra-retrieval": Published(
        "ES-SSM for Long Range Arena, Retrieval",
        "Tells whether two documents (AAN) of up to 4,000 bytes are linked by a citation. One encoder reads both; a "
        "head of one hidden layer reads [a, b, a * b, a - b], where a and b are the means of its outputs. Inputs are "
        "`input_ids` of shape (batch, 2, length). `essm-train-retrieval` trains it.",
        "task",
        paper(4096),
        labels=("unrelated", "related"),
        pairs=True,
        example="We propose a parser for free word order languages.",
        language="en",
    ),
    "essm-lra-image": images(
        "ES-SSM for Long Range Arena, Image",
        "Classifies grey CIFAR-10 images, 32 x 32.",
        CIFAR_CLASSES,
        32,
        dropout=0.1,
    ),
    "essm-lra-pathfinder": images(
        "ES-SSM for Long Range Arena, Pathfinder", _JOINED.format(32), ("separate", "connected"), 32
    ),
    "essm-lra-pathx": images(
        "ES-SSM for Long Range Arena, Path-X", _JOINED.format(128), ("separate", "connected"), 128
    ),
    "essm-audio": Published(
        "ES-SSM for spoken words",
        "Recognises ten words of Speech Commands (SC-10) in one second of 16 kHz sound. It reads log-mel frames, "
        "`input_features` of shape (batch, 98, 40) and their `attention_mask`, which `preprocessor_config.json` makes.",
        "task",
        paper(512, num_input_features=40, dropout=0.1),
        "speech",
        SPEECH_WORDS,
        pipeline_tag="audio-classification",
        language="en",
        tags=("keyword-spotting",),
    ),
}

# Folders with weights, which release.py makes from runs.
RELEASED = ("essm-novels-6m",)


def make(root: Path) -> None:
    """Write all folders into `root`; one of the same name is replaced."""
    code = os.path.relpath(PACKAGE, root.resolve() / "name")
    for name, published in CONFIGURATIONS.items():
        folder = root / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        config = published.config()
        if not published.pairs:  # which is a class of the training library
            config.auto_map = {auto: f"{CODE}/{reference}" for auto, reference in config.auto_classes.items()}
            (folder / CODE).symlink_to(code, target_is_directory=True)
        write_config_file(folder / "config.json", config.to_json_string(use_diff=True))
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


def write_config_file(path: Path, text: str) -> None:
    """Without the library's version, which would change the file at every upgrade, and without an empty auto_map."""
    record = json.loads(text)
    del record["transformers_version"]
    if not record.get("auto_map", True):
        del record["auto_map"]
    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def card_template(published: Published) -> str:
    """The card with markers, which `essm_train.publish.model_card` fills."""
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


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    make(Path(__file__).parent)
