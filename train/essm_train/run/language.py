# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What essm-train-clm trains: a model of a text's tokens, judged by bits per byte of the held-out text."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from accelerate.utils import set_seed
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from essm_train.data.arguments import CLMArguments
from essm_train.data.text import TextData, load_text
from essm_train.data.tokens import ByteEncoder, Encoder, TokenizerEncoder, choose_tokenizer, with_end_token
from essm_train.measure.scoring import Metric, hold_out_blocks
from essm_train.models import capacity_of, check_vocabulary, make_config, make_model
from essm_train.run.accelerator import open_run
from essm_train.run.loop import Task, train_and_sweep
from modeling_essm import ESSMForCausalLM
from modeling_essm.training.budget_dropout import clip_budgets

SAMPLE_BUDGETS = (2, 4, 32)


def make_encoder(args: CLMArguments) -> Encoder:
    """Bytes or a tokenizer, as `choose_tokenizer` finds and refuses it."""
    tokenizer = choose_tokenizer(args)
    if tokenizer is None:
        return ByteEncoder()
    return TokenizerEncoder(with_end_token(tokenizer), str(args.tokenizer_name or args.model_name_or_path))


def build_model(args: CLMArguments, encoder: Encoder) -> PreTrainedModel:
    """A new model, or the weights that the arguments name. Raises ValueError if it does not fit the text."""
    ids = {"vocab_size": encoder.vocab_size, "pad_token_id": encoder.pad_id}
    if isinstance(encoder, TokenizerEncoder):
        ids |= {name: getattr(encoder.tokenizer, name) for name in ("eos_token_id", "bos_token_id")}
    config = make_config(args)
    if not args.is_diagonal:
        args.check_length(config.filter_length)
    if args.replace_tokenizer:
        del ids["vocab_size"]  # which may have room to spare
    elif args.model_name_or_path:
        check_vocabulary(args, config, encoder.name, encoder.vocab_size, isinstance(encoder, ByteEncoder))
        ids = {}  # it has its own
    model = make_model(args, ESSMForCausalLM, **ids)
    if args.replace_tokenizer:
        if encoder.vocab_size > model.config.vocab_size:
            model.resize_token_embeddings(encoder.vocab_size)
        model.generation_config = GenerationConfig.from_model_config(model.config)
    return model


def make_task(args: CLMArguments, model: PreTrainedModel, text: TextData, encoder: Encoder) -> Task:
    """Next-token prediction. Validation reads blocks that are spread evenly over the held-out ones."""
    spread = np.linspace(0, len(text.held_out) - 1, min(len(text.held_out), args.validation_blocks)).round()
    blocks = text.held_out[spread.astype(int)]
    longest = getattr(model.config, "max_position_embeddings", VERY_LARGE_INTEGER)  # a diagonal_ssm has no limit

    def collate(blocks: list[np.ndarray]) -> dict[str, Tensor]:  # default_data_collator makes no labels
        input_ids = torch.from_numpy(np.stack(blocks).astype(np.int64))
        return {"input_ids": input_ids, "labels": input_ids}

    validation, held_out = (
        hold_out_blocks(part, encoder.special_ids, text.bytes_per_token, args.per_device_train_batch_size, "")
        for part in (blocks, text.held_out)
    )
    bits_per_nat = 1 / (math.log(2) * text.bytes_per_token)
    return Task(
        script="essm-train-clm",
        description=text.description,
        model=model,
        source=text.source,
        collate=collate,
        figure=lambda outputs, batch: outputs.loss * bits_per_nat,
        metric=Metric("bits/byte", higher_is_better=False),
        validation=validation,
        held_out=held_out,
        tokens_per_sample=args.block_size,
        save_beside=lambda folder: encoder.save_pretrained(folder, longest),
        identity={
            "sha256 of the training text": text.sha256,
            "sha256 of the validation blocks": hashlib.sha256(blocks.numpy().tobytes()).hexdigest(),
        },
        swept={"block_size": args.block_size, "blocks": len(text.held_out)},
        show=lambda saved: show_samples(args, saved, text.held_out[0, :64]),
    )


def train_language_model(args: CLMArguments) -> None:
    """Train, save, sweep, push. Raises ValueError for arguments or text that cannot work, and as `train_and_sweep`."""
    with open_run(args) as accelerator:
        # Whatever is wrong with the arguments shows here, before anything is deleted or computed.
        encoder = make_encoder(args)
        set_seed(args.seed)  # the same weights on every process
        model = build_model(args, encoder)
        with accelerator.main_process_first(), accelerator.local_main_process_first():  # caches may be local
            text = load_text(args, encoder)
        train_and_sweep(accelerator, args, make_task(args, model, text, encoder))


def show_samples(args: CLMArguments, model: PreTrainedModel, prompt_ids: Tensor) -> None:
    """200 tokens after the prompt at three budgets, drawn with the same random numbers; others cannot generate."""
    if args.architecture != "essm":
        return
    tokenizer = AutoTokenizer.from_pretrained(f"{args.output_dir}/model", trust_remote_code=False)
    prompt = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False, return_token_type_ids=False)
    if not inputs["input_ids"].numel():  # of special tokens alone
        return
    print(f"--- prompt ---\n{prompt}")
    inputs = inputs.to(model.device)
    for K in clip_budgets(SAMPLE_BUDGETS, capacity_of(model)):
        set_seed(0)
        ids = model.generate(**inputs, spectral_budget=K, max_new_tokens=200, do_sample=True, temperature=0.7)
        text = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"--- sample at K={K} ---\n{text}")
