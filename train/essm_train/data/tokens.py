# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Texts to token ids and <eos>: every byte of UTF-8 a token, or any tokenizer of transformers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import cached_file

from modeling_essm import build_byte_tokenizer
from modeling_essm.training.byte_tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

# Names that an end-of-sequence token has in tokenizers that do not say which of their tokens it is.
_END_TOKENS = ("<eos>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "[EOS]")


class TokenizerEncoder:
    """Any tokenizer of transformers that has an end-of-sequence token. Raises ValueError if it has none."""

    def __init__(self, tokenizer: Any, name: str):
        if tokenizer.eos_token_id is None:
            raise ValueError(f"tokenizer {name!r} has no end-of-sequence token to put between documents")
        self.tokenizer, self.name, self.vocab_size = tokenizer, name, vocabulary_size(tokenizer)
        self.pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        others = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
        unknown = {tokenizer.unk_token_id} - {*others}  # stands for text, and counts
        self.special_ids = tuple(i for i in tokenizer.all_special_ids if i not in unknown)
        self.dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    def __call__(self, *texts: str) -> tuple[np.ndarray, int]:
        """Token ids of all texts, <eos> at the end of each, and the number of bytes they stand for.

        A fast tokenizer has a thread for each of several texts.
        """
        rows = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        ids = [np.array([*row, self.tokenizer.eos_token_id], self.dtype) for row in rows]
        return np.concatenate([np.empty(0, self.dtype), *ids]), sum(len(text.encode()) for text in texts)

    def save_pretrained(self, folder: Path, model_max_length: int) -> None:
        self.tokenizer.save_pretrained(folder)


class ByteEncoder:
    """Every byte is a token: as the byte tokenizer, but faster."""

    vocab_size, pad_id, dtype = VOCAB_SIZE, PAD_ID, np.uint16
    special_ids = (PAD_ID, BOS_ID, EOS_ID)
    name = "bytes"

    def __call__(self, *texts: str) -> tuple[np.ndarray, int]:
        """As `TokenizerEncoder`."""
        raw = [text.encode() for text in texts]
        ids = [np.append(np.frombuffer(text, np.uint8), np.uint16(EOS_ID)) for text in raw]
        return np.concatenate([np.empty(0, self.dtype), *ids]), sum(map(len, raw))

    def save_pretrained(self, folder: Path, model_max_length: int) -> None:
        build_byte_tokenizer(model_max_length=model_max_length).save_pretrained(folder)


Encoder = ByteEncoder | TokenizerEncoder


def open_tokenizer(name: str) -> Any:
    """A tokenizer of the Hub, of a local folder, or of a tokenizer.json by itself. Raises ValueError if it is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if not Path(name).is_file():
            return AutoTokenizer.from_pretrained(name, trust_remote_code=False)  # else it asks whether to run code
        return PreTrainedTokenizerFast(tokenizer_file=name, name_or_path=name)
    except Exception as error:  # a file that is no tokenizer raises the library's own type
        hint = "a file must be what `tokenizers.Tokenizer.save` writes: " if Path(name).is_file() else ""
        raise ValueError(f"cannot load tokenizer {name!r}: {hint}{error}") from error


def file_of(source: str, name: str) -> str | None:
    """The path of a file of a folder or a Hub repository; None where it is not there, or cannot be reached."""
    quietly = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    return cached_file(source, name, **quietly)


def vocabulary_size(tokenizer: Any) -> int:
    """One more than its largest id: `len(tokenizer)` is less where ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def digest_of(tokenizer: Any) -> str:
    """A SHA-256 of what decides its tokens, or of its vocabulary where it is not a fast one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    what = repr(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    return hashlib.sha256(what.encode()).hexdigest()


def encoder_beside(model: str) -> Encoder:
    """The tokenizer that lies beside a model's weights; bytes where a folder has none."""
    if Path(model).is_dir() and not any(Path(model).glob("tokenizer*")):
        return ByteEncoder()  # the library would make an empty tokenizer of the model's type
    return TokenizerEncoder(open_tokenizer(model), model)


def choose_tokenizer(args: Any) -> Any:
    """The tokenizer of a run: that of tokenizer_name, else that of the weights it starts from; None for bytes.

    Args:
        args: tokenizer_name, model_name_or_path and replace_tokenizer.
    Raises:
        ValueError: it cannot be loaded; or it gives tokens other ids than that of the weights, and replace_tokenizer
            does not say that this is meant.
    """
    learned, weights = None, args.model_name_or_path
    if weights and any(file_of(weights, name) for name in ("tokenizer.json", "tokenizer_config.json")):
        learned = open_tokenizer(weights)
    if args.tokenizer_name is None:
        is_bytes = learned is None or learned.get_vocab() == build_byte_tokenizer().get_vocab()
        return None if is_bytes else learned
    tokenizer = open_tokenizer(args.tokenizer_name)
    if learned is not None and learned.get_vocab() != tokenizer.get_vocab() and not args.replace_tokenizer:
        raise ValueError(
            f"tokenizer_name must be the tokenizer of {weights!r}, whose weights know its {len(learned)} tokens, got "
            f"{args.tokenizer_name!r} with {len(tokenizer)}: leave it out, or give --replace_tokenizer if the model "
            "shall learn other tokens"
        )
    return tokenizer


def with_end_token(tokenizer: Any) -> Any:
    """The same tokenizer with an end-of-sequence token: its own, a token of such a name, or else a new one, <eos>."""
    if tokenizer.eos_token_id is None:
        known = tokenizer.get_vocab()
        token = next((name for name in _END_TOKENS if name in known), _END_TOKENS[0])
        tokenizer.add_special_tokens({"eos_token": token})
    return tokenizer
