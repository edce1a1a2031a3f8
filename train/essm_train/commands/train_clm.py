# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Train an ES-SSM language model with budget dropout, then measure it at every budget.

    accelerate launch train/train_clm.py                                   # a few CPU minutes, no data needed
    accelerate launch train/train_clm.py --train_file a.txt b.txt --validation_file c.txt --output_dir runs/books
    accelerate launch train/train_clm.py --dataset_name owner/name --streaming --tokenizer_name gpt2 --max_steps 50000
    accelerate launch train/train_clm.py --config_name hub_configs/essm-21m --block_size 4096 --train_file books.parquet
    accelerate launch --mixed_precision bf16 train/train_clm.py arguments.yaml --learning_rate 1e-3
    python train/train_clm.py --help                                       # every argument

Several processes and nodes: train/launch/. Without data arguments it reads the sources of Python's standard library.
A run that was interrupted continues from its last checkpoint when started again, bit for bit as if nothing had happened
(on as many CPU threads); see engine.py. Left in `output_dir`: checkpoint-*, best and model (for from_pretrained),
log.jsonl, training.json, budget_sweep.json and budget_sweep.png.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: threads that wait spin for microseconds, then sleep

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from essm_train.commands.errors import run_script
from essm_train.data.samples import even_shares
from essm_train.data.text import (
    ByteEncoder,
    Encoder,
    TextData,
    TokenizerEncoder,
    choose_tokenizer,
    load_text,
    text_labels,
    with_end_token,
)
from essm_train.measure.budget_sweep import num_scored, sweep_budgets, total_nats
from essm_train.models import ModelArguments, check_vocabulary, make_model, read_config
from essm_train.publish.hub import check_can_push
from essm_train.publish.run_card import write_card_and_push
from essm_train.run.engine import (
    Metric,
    RunArguments,
    Task,
    _arg,
    capacity_of,
    make_schedule,
    open_run,
    parse_arguments,
    say,
    train_and_record,
)
from modeling_essm import ESSMForCausalLM

SAMPLE_BUDGETS = (2, 4, 32)


@dataclass
class CLMArguments(ModelArguments):
    """Text; the model is in models.ModelArguments, how to train in engine.RunArguments."""

    output_dir: str = _arg("runs/train_clm", "Where everything goes; a run found there is continued.")
    max_steps: int = _arg(900, "Updates.")

    train_file: list[str] | None = field(
        default=None,
        metadata={
            "help": "Local files to train on: parquet, json(l) or csv with a column of text, or any others, each one "
            "document, as bytes whatever their encoding. A folder stands for all files in it."
        },
    )
    validation_file: list[str] | None = field(
        default=None, metadata={"help": "Held-out files; without them, the last tenth of the text."}
    )
    dataset_name: str | None = _arg(
        None,
        "Instead of files: a data set on the Hub, a local folder (of tables, or of text files, each one document) or "
        "parquet file.",
    )
    dataset_config_name: str | None = _arg(None, "Which configuration of that data set.")
    text_column: str = _arg("text", "The column that holds the text.")
    streaming: bool = _arg(False, "Read while training instead of before: for text larger than memory.")
    shuffle_buffer: int = _arg(1000, "With streaming: blocks among which the next one is drawn.")
    tokenizer_name: str | None = _arg(
        None,
        "A tokenizer of the Hub, a local folder or a tokenizer.json; by default that of model_name_or_path, else bytes "
        "are tokens. One without an end-of-sequence token gets <eos>.",
    )
    replace_tokenizer: bool = _arg(False, "Take tokenizer_name although model_name_or_path has another one.")
    block_size: int = _arg(512, "Tokens per training sequence; at most filter_length.")

    validation_blocks: int = _arg(32, "Held-out blocks that a validation reads.")
    sweep_blocks: int = _arg(128, "Held-out blocks that the final sweep over all budgets reads.")

    # Where the text lies may change; what it says may not, and is compared by the hash of its tokens.
    RESUMABLE = RunArguments.RESUMABLE | {"train_file", "validation_file", "replace_tokenizer"}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("validation_blocks", "sweep_blocks", "shuffle_buffer"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.validation_blocks > self.sweep_blocks:
            raise ValueError(
                f"validation_blocks must be at most sweep_blocks = {self.sweep_blocks}, got {self.validation_blocks}"
            )
        if self.train_file and self.dataset_name:
            raise ValueError("give train_file or dataset_name, not both")
        if self.replace_tokenizer and not (self.tokenizer_name and self.model_name_or_path):
            raise ValueError("replace_tokenizer needs tokenizer_name and model_name_or_path")
        if self.validation_file and not (self.train_file or self.dataset_name):
            raise ValueError("validation_file needs train_file or dataset_name")
        if self.source is None:
            self.check_block_size(self.filter_length)

    def check_block_size(self, filter_length: int) -> None:
        """Raises ValueError if the filters do not cover a block."""
        if not 2 <= self.block_size <= filter_length:
            raise ValueError(f"block_size must be in [2, filter_length = {filter_length}], got {self.block_size}")


def make_encoder(args: CLMArguments) -> Encoder:
    """Bytes or a tokenizer, as `choose_tokenizer` finds and refuses it."""
    tokenizer = choose_tokenizer(args)
    if tokenizer is None:
        return ByteEncoder()
    return TokenizerEncoder(with_end_token(tokenizer), args.tokenizer_name or args.model_name_or_path)


def build_model(args: CLMArguments, encoder: Encoder) -> PreTrainedModel:
    """A new model, or the weights that the arguments name. Raises ValueError if it does not fit the text."""
    ids = {"vocab_size": encoder.vocab_size, "pad_token_id": encoder.pad_id}
    if isinstance(encoder, TokenizerEncoder):
        tokenizer = encoder.tokenizer
        ids |= {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    config = read_config(args)
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

    def collate(blocks: list[np.ndarray]) -> dict[str, Tensor]:
        input_ids = torch.from_numpy(np.stack(blocks).astype(np.int64))
        return {"input_ids": input_ids, "labels": input_ids}

    def evaluate(accelerator: Accelerator, module: nn.Module, K: int) -> float:
        rows = even_shares(len(held_out), accelerator.process_index, accelerator.num_processes)
        own = labels[[row or 0 for row in rows]].clone()
        own[torch.tensor([row is None for row in rows])] = -100  # one more forward pass, as other processes make it
        blocks = held_out[[row or 0 for row in rows]]
        nats = total_nats(accelerator.unwrap_model(module), blocks, own, K, args.per_device_batch_size)
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
        save_companions=lambda folder: encoder.save_pretrained(folder, model.config.max_position_embeddings),
        identity={
            "sha256 of the training text": text.fingerprint,
            "sha256 of the validation blocks": hashlib.sha256(held_out.numpy().tobytes()).hexdigest(),
        },
    )


def main(args: CLMArguments) -> None:
    """Train, save, sweep, push.

    Raises:
        ValueError: arguments, text or output folder that cannot work, or a run in output_dir with other arguments;
            all before the first update.
        FloatingPointError, OSError: see `engine.train`.
    """
    with open_run(args) as accelerator:
        _run(accelerator, args)


def _run(accelerator: Accelerator, args: CLMArguments) -> None:
    # Whatever is wrong with the arguments shows here, before anything is deleted or computed.
    if args.push_to_hub and accelerator.is_main_process:
        check_can_push(args.hub_model_id, private=args.hub_private)
    encoder = make_encoder(args)
    set_seed(args.seed)  # the same weights on every process
    model = build_model(args, encoder)
    schedule = make_schedule(args, capacity_of(model))
    if not args.is_baseline:
        model.config.trained_budgets = list(schedule.budgets)
    with accelerator.main_process_first():
        text = load_text(args, encoder)

    task = make_task(args, model, text, encoder)
    train_and_record(accelerator, args, task, schedule, script=__file__, data=text.description)

    # From here on only what was saved counts.
    if accelerator.is_main_process:
        output_dir = Path(args.output_dir)
        loaded, tokenizer = reload(output_dir / "model", accelerator.device)
        labels = text_labels(text.held_out, encoder.special_ids)
        sweep = sweep_budgets(
            loaded,
            text.held_out,
            labels,
            num_bytes=num_scored(labels) * text.bytes_per_token,
            batch_size=args.per_device_batch_size,
            progress=lambda K: say(accelerator, f"sweep: K={K}"),
        )
        say(accelerator, sweep.table())
        context = {"block_size": args.block_size, "blocks": len(text.held_out), "data": text.description}
        sweep.save(output_dir, model=str(output_dir / "model"), **context)
        say(accelerator, f"saved {output_dir / 'budget_sweep.json'} and budget_sweep.png")
        prompt = tokenizer.decode(text.held_out[0, :64], skip_special_tokens=True)
        if not args.is_baseline:  # which cannot generate, and has no remote code
            for K in sorted({min(K, capacity_of(model)) for K in SAMPLE_BUDGETS}):
                say(accelerator, f"--- sample at K={K} ---\n{sample(loaded, tokenizer, prompt, K)}")
            write_card_and_push(args)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def reload(folder: Path, device: torch.device) -> tuple[PreTrainedModel, Any]:
    """Model and tokenizer as a user of the saved folder gets them."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def sample(model: PreTrainedModel, tokenizer: Any, prompt: str, budget: int) -> str:
    """The prompt and 200 sampled tokens at that budget; the same random numbers for every budget."""
    set_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(model.device)
    ids = model.generate(**inputs, spectral_budget=budget, max_new_tokens=200, do_sample=True, temperature=0.7)
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def run() -> None:
    """The command."""
    run_script(lambda: main(parse_arguments(CLMArguments)))


if __name__ == "__main__":
    run()
