# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A language model's run: its model and tokens, the task for the loop, and the report after it."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from essm_train.data.arguments import CLMArguments
from essm_train.data.blocks import text_labels
from essm_train.data.samples import even_shares
from essm_train.data.text import TextData, load_text
from essm_train.data.tokens import ByteEncoder, Encoder, TokenizerEncoder, choose_tokenizer, with_end_token
from essm_train.measure.budget_sweep import sweep_budgets
from essm_train.measure.metric import Metric
from essm_train.measure.scoring import hold_out_blocks, num_scored, total_nats
from essm_train.models import capacity_of, check_vocabulary, make_config, make_model
from essm_train.publish.run_card import write_card_and_push
from essm_train.run.accelerator import open_run, say
from essm_train.run.loop import make_schedule, train_and_record
from essm_train.run.task import Task, report_sweep
from modeling_essm import ESSMForCausalLM

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
        tokenizer = encoder.tokenizer
        ids |= {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    config = make_config(args)
    if not args.is_diagonal:
        args.check_block_size(config.filter_length)
    if args.model_name_or_path:
        check_vocabulary(args, config, encoder.name, encoder.vocab_size, isinstance(encoder, ByteEncoder))
        del ids["vocab_size"]  # which may have room to spare
        if not args.replace_tokenizer:
            ids = {}  # it has its own
    model = make_model(args, ESSMForCausalLM, **ids)
    if args.replace_tokenizer:
        model.generation_config = GenerationConfig.from_model_config(model.config)
    return model


def make_task(args: CLMArguments, model: PreTrainedModel, text: TextData, encoder: Encoder) -> Task:
    """Next-token prediction; judged by bits per byte of the held-out text."""
    spread = np.linspace(0, len(text.held_out) - 1, min(len(text.held_out), args.validation_blocks)).round()
    held_out = text.held_out[spread.astype(int)]
    labels = text_labels(held_out, encoder.special_ids)
    bits_per_nat = 1 / (math.log(2) * text.bytes_per_token)
    longest = getattr(model.config, "max_position_embeddings", VERY_LARGE_INTEGER)  # a diagonal_ssm has no limit

    def collate(blocks: list[np.ndarray]) -> dict[str, Tensor]:  # default_data_collator makes no labels
        input_ids = torch.from_numpy(np.stack(blocks).astype(np.int64))
        return {"input_ids": input_ids, "labels": input_ids}

    def evaluate(accelerator: Accelerator, module: nn.Module, K: int) -> float:
        rows = even_shares(len(held_out), accelerator.process_index, accelerator.num_processes)
        mine = labels[[row or 0 for row in rows]].clone()
        mine[torch.tensor([row is None for row in rows])] = -100  # one more forward pass, as other processes make it
        blocks = held_out[[row or 0 for row in rows]]
        nats = total_nats(accelerator.unwrap_model(module), blocks, mine, K, args.per_device_train_batch_size)
        total = accelerator.reduce(torch.tensor(nats, device=accelerator.device), "sum")
        return float(total) * bits_per_nat / num_scored(labels)

    return Task(
        model=model,
        source=text.source,
        collate=collate,
        training_figure=lambda outputs, batch: outputs.loss * bits_per_nat,
        evaluate=evaluate,
        metric=Metric("bits/byte", higher_is_better=False),
        tokens_per_sample=args.block_size,
        save_beside=lambda folder: encoder.save_pretrained(folder, longest),
        identity={
            "sha256 of the training text": text.sha256,
            "sha256 of the validation blocks": hashlib.sha256(held_out.numpy().tobytes()).hexdigest(),
        },
    )


def train_language_model(args: CLMArguments) -> None:
    """Train, save, sweep, push.

    Raises:
        ValueError: arguments, text or output folder that cannot work, or a run in output_dir with other arguments;
            all before the first update.
        FloatingPointError, OSError: see `loop.train`.
    """
    with open_run(args) as accelerator:
        # Whatever is wrong with the arguments shows here, before anything is deleted or computed.
        encoder = make_encoder(args)
        set_seed(args.seed)  # the same weights on every process
        model = build_model(args, encoder)
        schedule = make_schedule(args, capacity_of(model))
        if not args.is_baseline:
            model.config.trained_budgets = list(schedule.budgets)
        with accelerator.main_process_first():
            text = load_text(args, encoder)
        task = make_task(args, model, text, encoder)
        train_and_record(accelerator, args, task, schedule, script="essm-train-clm", data=text.description)

        # From here on only what was saved counts.
        if not accelerator.is_main_process:
            return
        loaded, tokenizer = load_saved(Path(args.output_dir) / "model", accelerator.device)
        batch_size = args.per_device_train_batch_size
        held_out = hold_out_blocks(text.held_out, encoder.special_ids, text.bytes_per_token, batch_size, "")
        sweep = sweep_budgets(loaded, held_out, progress=lambda K: say(accelerator, f"sweep: K={K}"))
        context = {"block_size": args.block_size, "blocks": len(text.held_out), "data": text.description}
        report_sweep(accelerator, args, sweep, "", **context)
        prompt = tokenizer.decode(text.held_out[0, :64], skip_special_tokens=True)
        if args.architecture == "essm":  # others cannot generate, or have no remote code
            say(accelerator, f"--- prompt ---\n{prompt}")
            for K in sorted({min(K, capacity_of(model)) for K in SAMPLE_BUDGETS}):
                say(accelerator, f"--- sample at K={K} ---\n{sample(loaded, tokenizer, prompt, K)}")
            write_card_and_push(args)


def load_saved(folder: Path, device: torch.device) -> tuple[PreTrainedModel, Any]:
    """Model and tokenizer as a user of the saved folder gets them."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def sample(model: PreTrainedModel, tokenizer: Any, prompt: str, budget: int) -> str:
    """200 tokens sampled after the prompt at that budget, without it; the same random numbers for every budget."""
    set_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(model.device)
    ids = model.generate(**inputs, spectral_budget=budget, max_new_tokens=200, do_sample=True, temperature=0.7)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
