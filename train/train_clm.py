# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Train a byte-level ES-SSM language model with budget dropout, then measure it at every budget.

    accelerate launch train/train_clm.py                                   # a few CPU minutes, no data needed
    accelerate launch train/train_clm.py --train_file a.txt b.txt --validation_file c.txt --output_dir runs/books
    accelerate launch train/train_clm.py --dataset_name my/parquet_folder --text_column text --max_steps 5000
    accelerate launch --mixed_precision bf16 train/train_clm.py arguments.yaml
    python train/train_clm.py --help                                       # every argument

Without data arguments it reads the sources of Python's standard library. A run that was interrupted continues from its
last checkpoint when started again, bit for bit as if nothing had happened (on as many CPU threads): the budget and the
data of an update depend on its index alone, everything else is in the checkpoint. Left in `output_dir`: checkpoint-*,
model (for from_pretrained), budget_sweep.json and budget_sweep.png.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from budget_dropout import budget_schedule
from budget_sweep import num_scored, sweep_budgets, total_nats
from checkpoints import (
    delete_folder,
    delete_temporary_folders,
    list_checkpoints,
    publish,
    read_run_state,
    save_checkpoint,
    temporary_folder,
)
from text_data import (
    BlockOrder,
    byte_labels,
    cut_blocks,
    evaluation_blocks,
    hold_out_end,
    load_text_dataset,
    read_files,
    standard_library,
)
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    get_cosine_schedule_with_warmup,
)

from modeling_essm import ESSMConfig, ESSMForCausalLM, build_byte_tokenizer

SAMPLE_BUDGETS = (2, 6, 32)


def _arg(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class TrainArguments:
    """Every hyperparameter. Precision, devices and processes are set through `accelerate launch`."""

    output_dir: str = _arg("runs/train_clm", "Where everything goes; a run found there is continued.")
    overwrite_output_dir: bool = _arg(False, "Delete the run found in output_dir and start afresh.")

    train_file: list[str] | None = field(
        default=None, metadata={"help": "Text files to train on, read as bytes, whatever their encoding."}
    )
    validation_file: list[str] | None = field(
        default=None, metadata={"help": "Held-out text files; without them, the last tenth of the text."}
    )
    dataset_name: str | None = _arg(None, "Instead of files: a data set on the Hub, a local folder or parquet file.")
    dataset_config_name: str | None = _arg(None, "Which configuration of that data set.")
    text_column: str = _arg("text", "Its column that holds the text.")
    block_size: int = _arg(512, "Tokens per training sequence; at most filter_length.")

    hidden_size: int = _arg(128, "Model width D.")
    num_hidden_layers: int = _arg(4, "Number of blocks.")
    num_spectral_channels: int = _arg(32, "Capacity: the largest budget the model will be able to run.")
    filter_length: int = _arg(1024, "Longest sequence the filters cover; longer costs nothing.")
    dropout: float = _arg(0.0, "Dropout rate after each sub-layer.")

    budget_schedule: str = _arg("discrete", "Budget of each update: 'discrete' (2,3,4,6,..,32) or 'uniform' (1..K).")
    max_steps: int = _arg(600, "Updates.")
    per_device_batch_size: int = _arg(4, "Sequences per process and forward pass.")
    gradient_accumulation_steps: int = _arg(1, "Forward and backward passes per update.")
    learning_rate: float = _arg(5e-3, "Peak of the learning rate, falling to 0 along a cosine.")
    warmup_steps: int = _arg(50, "Updates of linear warm-up before the peak.")
    weight_decay: float = _arg(0.1, "AdamW's, on matrices only: not on norms, biases and embeddings.")
    adam_beta2: float = _arg(0.95, "AdamW's decay of squared gradients.")
    max_grad_norm: float = _arg(1.0, "Gradients are clipped to this norm.")
    seed: int = _arg(0, "Of weights, data order, budgets and dropout.")

    validate_every: int = _arg(100, "Updates between validations at the smallest and the largest budget.")
    validation_blocks: int = _arg(32, "Held-out blocks that such a validation reads.")
    sweep_blocks: int = _arg(128, "Held-out blocks that the final sweep over all budgets reads.")
    checkpoint_every: int = _arg(100, "Updates between checkpoints; the last update always has one.")
    keep_checkpoints: int = _arg(2, "How many of the newest checkpoints to keep.")
    cpu_threads: int | None = field(
        default=None,
        metadata={"help": "CPU threads per process (`accelerate launch` sets 1); by default the cores, at most 8."},
    )

    # What may differ when a run is resumed: no weight depends on it (on the number of threads only by rounding).
    RESUMABLE = frozenset(
        {"output_dir", "overwrite_output_dir", "validate_every", "validation_blocks", "sweep_blocks"}
        | {"checkpoint_every", "keep_checkpoints", "cpu_threads"}
    )

    def __post_init__(self) -> None:
        positive = "max_steps per_device_batch_size gradient_accumulation_steps validate_every validation_blocks"
        for name in (*positive.split(), "sweep_blocks", "checkpoint_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 2 <= self.block_size <= self.filter_length:
            raise ValueError(f"block_size must be in [2, filter_length = {self.filter_length}], got {self.block_size}")
        if self.train_file and self.dataset_name:
            raise ValueError("give train_file or dataset_name, not both")
        if self.validation_file and not self.train_file:
            raise ValueError("validation_file needs train_file")


def parse_arguments(argv: list[str] | None = None) -> TrainArguments:
    """From the command line, or from a YAML or JSON file if that is the only argument."""
    argv = sys.argv[1:] if argv is None else argv
    parser = HfArgumentParser(TrainArguments)
    if len(argv) == 1 and argv[0].endswith((".yaml", ".yml")):
        return parser.parse_yaml_file(argv[0])[0]
    if len(argv) == 1 and argv[0].endswith(".json"):
        return parser.parse_json_file(argv[0])[0]
    return parser.parse_args_into_dataclasses(argv)[0]


def load_text(args: TrainArguments) -> tuple[np.ndarray, np.ndarray]:
    """(training stream, held-out stream) as the arguments say; see `text_data`."""
    if args.train_file:
        stream = read_files(args.train_file)
        return (stream, read_files(args.validation_file)) if args.validation_file else hold_out_end(stream)
    if args.dataset_name:
        return load_text_dataset(args.dataset_name, args.dataset_config_name, args.text_column)
    return standard_library()


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's groups: matrices decay; norms, biases and embeddings (with the tied head) do not."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    parameters = list(model.parameters())
    decayed = [p for p in parameters if p.ndim >= 2 and id(p) not in embeddings]
    others = [p for p in parameters if p.ndim < 2 or id(p) in embeddings]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def check_writable(folder: Path) -> None:
    """Make the folder. Raises ValueError if it cannot be written, before any work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"output_dir {str(folder)!r} cannot be written: {error.strerror}") from error


def check_same_run(checkpoint: Path, identity: dict[str, Any]) -> None:
    """Raises ValueError if the checkpoint belongs to a run that would have given other weights."""
    saved = read_run_state(checkpoint)["identity"]
    for name, new in identity.items():
        if saved.get(name) != new:
            raise ValueError(
                f"cannot resume {checkpoint}: {name} was {saved.get(name)!r} and is now {new!r}; go back to the old "
                "value, choose another output_dir, or start afresh with --overwrite_output_dir"
            )


def main(args: TrainArguments) -> None:
    """Train, save, sweep.

    Raises:
        ValueError: arguments, text or output folder that cannot work, or a run in output_dir with other arguments;
            all before the first update.
        FloatingPointError: the loss or its gradient is no longer finite.
    """
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    output_dir = Path(args.output_dir)
    torch.set_num_threads(args.cpu_threads or max(1, min(8, os.cpu_count() or 1) // accelerator.num_processes))

    def say(text: str) -> None:
        if accelerator.is_main_process:
            tqdm.write(text)

    # 1. Model and text. Whatever is wrong with the arguments shows here, before anything is deleted or computed.
    budget_of = budget_schedule(args.budget_schedule, args.num_spectral_channels, args.seed)
    config = ESSMConfig(
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_hidden_layers,
        num_spectral_channels=args.num_spectral_channels,
        filter_length=args.filter_length,
        dropout=args.dropout,
        trained_budgets=list(budget_of.budgets),
    )
    check_writable(output_dir)
    with accelerator.main_process_first():
        train_stream, held_out_stream = load_text(args)
    train_blocks = cut_blocks(train_stream, args.block_size)
    held_out = evaluation_blocks(held_out_stream, args.block_size, args.sweep_blocks)
    set_seed(args.seed)  # the same weights on every process
    model: PreTrainedModel = ESSMForCausalLM(config)
    set_seed(args.seed, device_specific=True)  # but other dropout masks
    say(
        f"{sum(p.numel() for p in model.parameters()):,} parameters on {accelerator.num_processes} x "
        f"{accelerator.device}; {len(train_stream):,} tokens to train on, {len(held_out_stream):,} held out"
    )

    # 2. What defines the run, and the run already in output_dir, if any.
    identity = {k: v for k, v in dataclasses.asdict(args).items() if k not in args.RESUMABLE}
    identity["num_processes"] = accelerator.num_processes
    identity["mixed_precision"] = accelerator.mixed_precision
    identity["sha256 of the training text"] = hashlib.sha256(train_stream.tobytes()).hexdigest()
    if accelerator.is_main_process:
        delete_temporary_folders(output_dir)
        if args.overwrite_output_dir:
            for old in (*list_checkpoints(output_dir), output_dir / "model"):
                if old.exists():
                    delete_folder(old)
    accelerator.wait_for_everyone()
    checkpoint = next(reversed(list_checkpoints(output_dir)), None)
    if checkpoint is not None:
        check_same_run(checkpoint, identity)

    # 3. Optimizer, learning rate, and the state of the run found.
    optimizer = torch.optim.AdamW(
        parameter_groups(model, args.weight_decay), lr=args.learning_rate, betas=(0.9, args.adam_beta2)
    )
    scheduler = get_cosine_schedule_with_warmup(optimizer, args.warmup_steps, args.max_steps)
    accelerator.register_for_checkpointing(scheduler)  # not prepared: it steps once per update, on any number of ranks
    model, optimizer = accelerator.prepare(model, optimizer)
    first_update = 0
    if checkpoint is not None:
        first_update = read_run_state(checkpoint)["update"]
        accelerator.load_state(str(checkpoint))
        finished = first_update == args.max_steps
        say(f"{'finished already' if finished else 'resuming'}: {checkpoint} holds update {first_update}")

    # 4. The loop.
    order = BlockOrder(len(train_blocks), args.seed)
    batch_size, ranks = args.per_device_batch_size, accelerator.num_processes
    blocks_per_update = batch_size * ranks * args.gradient_accumulation_steps
    progress = tqdm(
        total=args.max_steps,
        initial=first_update,
        unit="update",
        disable=not accelerator.is_main_process,
        mininterval=0.5 if sys.stderr.isatty() else 10,  # seconds between lines in a log file
    )
    model.train()
    for update in range(first_update, args.max_steps):
        started = time.perf_counter()
        K = budget_of(update)
        loss = torch.zeros((), device=accelerator.device)
        for micro_step in range(args.gradient_accumulation_steps):
            first = update * blocks_per_update + (micro_step * ranks + accelerator.process_index) * batch_size
            batch = train_blocks[[order[position] for position in range(first, first + batch_size)]]
            input_ids = torch.from_numpy(batch.astype(np.int64)).to(accelerator.device)
            with accelerator.accumulate(model):  # gradients are averaged over processes after the last pass only
                nats = model(input_ids=input_ids, labels=input_ids, use_cache=False, spectral_budget=K).loss
                accelerator.backward(nats)
            loss += nats.detach() / args.gradient_accumulation_steps
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        bits = accelerator.reduce(loss, "mean").item() / math.log(2)
        overflowed = accelerator.scaler is None and not torch.isfinite(grad_norm)  # fp16's scaler skips such updates
        if not math.isfinite(bits) or overflowed:
            raise FloatingPointError(
                f"update {update + 1}: loss is {bits} bits per byte, gradient norm {float(grad_norm)}; stopped. "
                f"Last good checkpoint: {next(reversed(list_checkpoints(output_dir)), 'none')}. "
                "Try a lower learning_rate or a longer warm-up"
            )
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        speed = blocks_per_update * args.block_size / (time.perf_counter() - started)
        progress.set_postfix_str(f"K={K}, {bits:.3f} bits/byte, {speed:,.0f} tokens/s", refresh=False)
        progress.update()

        done = update + 1
        if done % args.validate_every == 0 or done == args.max_steps:
            figures = validate(accelerator, model, held_out[: args.validation_blocks], budget_of.budgets, batch_size)
            say(f"update {done}: validation " + ", ".join(f"{b:.4f} bits/byte at K={k}" for k, b in figures.items()))
        if done % args.checkpoint_every == 0 or done == args.max_steps:
            run_state = {
                "update": done,
                "blocks_seen": done * blocks_per_update,
                "budget": {"trained": budget_of.budgets, "last": K},
                "identity": identity,
            }
            save_checkpoint(accelerator, output_dir, run_state, args.keep_checkpoints)
    progress.close()

    # 5. Save the model, and from here on use only what was saved.
    if accelerator.is_main_process:
        trained = accelerator.unwrap_model(model, keep_fp32_wrapper=False).eval()
        loaded, tokenizer = save_and_reload(trained, output_dir / "model", held_out[:1])
        say(f"saved {output_dir / 'model'}; the reloaded model gives the same logits")
        sweep = sweep_budgets(
            loaded, held_out, byte_labels(held_out), batch_size=batch_size, progress=lambda K: say(f"sweep: K={K}")
        )
        say(sweep.table())
        sweep.save(output_dir, model=str(output_dir / "model"), block_size=args.block_size, blocks=len(held_out))
        say(f"saved {output_dir / 'budget_sweep.json'} and budget_sweep.png")
        prompt = bytes(b for b in held_out[0, :64].tolist() if b < 256).decode(errors="ignore")
        for K in sorted({min(K, args.num_spectral_channels) for K in SAMPLE_BUDGETS}):
            say(f"--- sample at K={K} ---\n{sample(loaded, tokenizer, prompt, K)}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def validate(
    accelerator: Accelerator, model: nn.Module, blocks: Tensor, budgets: tuple[int, ...], batch_size: int
) -> dict[int, float]:
    """Bits per byte of the (n, L) held-out blocks at the smallest and the largest budget, shared by all processes."""
    labels = byte_labels(blocks)
    share = slice(accelerator.process_index, None, accelerator.num_processes)
    module = accelerator.unwrap_model(model).eval()
    figures = {}
    for K in sorted({budgets[0], budgets[-1]}):
        nats = torch.tensor(total_nats(module, blocks[share], labels[share], K, batch_size), device=accelerator.device)
        figures[K] = accelerator.reduce(nats, "sum").item() / math.log(2) / num_scored(labels)
    model.train()
    return figures


def save_and_reload(model: PreTrainedModel, folder: Path, input_ids: Tensor) -> tuple[PreTrainedModel, Any]:
    """Save model, generation config and tokenizer as one loadable folder; return model and tokenizer loaded from it.

    Raises:
        RuntimeError: the loaded model disagrees with the saved one on input_ids (B, L).
    """
    temporary = temporary_folder(folder)
    model.save_pretrained(temporary)
    build_byte_tokenizer(model_max_length=model.config.filter_length).save_pretrained(temporary)
    publish(temporary, folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).to(model.device).eval()
    with torch.no_grad():
        expected, got = (m(input_ids=input_ids.to(model.device)).logits for m in (model, loaded))
    if not torch.equal(expected, got):
        raise RuntimeError(f"{folder}: the reloaded model's logits differ by {(expected - got).abs().max().item():.3g}")
    return loaded, AutoTokenizer.from_pretrained(folder)


def sample(model: PreTrainedModel, tokenizer: Any, prompt: str, budget: int) -> str:
    """The prompt and 200 sampled tokens at that budget; the same random numbers for every budget."""
    set_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    ids = model.generate(**inputs, spectral_budget=budget, max_new_tokens=200, do_sample=True, temperature=0.7)
    return tokenizer.decode(ids[0], skip_special_tokens=True)


if __name__ == "__main__":
    main(parse_arguments())
