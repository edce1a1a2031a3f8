# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The 259-symbol byte-level tokenizer: ids 0..255 are the bytes of UTF-8, then pad, bos and eos.

It is a byte-level BPE without merges. Any Unicode text makes an exact round trip, and AutoTokenizer loads the saved
tokenizer.json without remote code. No symbol is added to a prompt. Padding is on the left, as generation needs it.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

PAD_ID, BOS_ID, EOS_ID, VOCAB_SIZE = 256, 257, 258, 259


def build_byte_tokenizer(model_max_length: int | None = None) -> PreTrainedTokenizerFast:
    """A new tokenizer. `model_max_length` only sets when the library warns about long input."""
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    vocabulary = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
    vocabulary |= {token: PAD_ID + i for i, token in enumerate(special.values())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    limit = {} if model_max_length is None else {"model_max_length": model_max_length}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="left", clean_up_tokenization_spaces=False, **special, **limit
    )
