# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm-train-clm by transformers' own Trainer: the same arguments, text, model and budgets.

    python examples/train_with_trainer.py --output_dir runs/trainer
    python examples/train_with_trainer.py --train_file a.txt b.txt --max_steps 2000 --torch_compile

It leaves `output_dir/model` and prints bits per byte at every budget that was trained. The figures are near those of
essm-train-clm: Trainer orders the samples in its own way and keeps no average of the weights. It reads no streams,
stops at no patience, and a run goes on only with --resume_from_checkpoint.
"""

import dataclasses
import math
import sys
from pathlib import Path

from datasets import Dataset
from transformers import Trainer, TrainingArguments, default_data_collator, set_seed

from essm_train.arguments import parse_arguments
from essm_train.data.arguments import CLMArguments
from essm_train.data.blocks import text_labels
from essm_train.data.text import load_text
from essm_train.files import claim
from essm_train.run.language import build_model, make_encoder
from essm_train.run.loop import make_schedule
from essm_train.run.steps import make_optimizer
from modeling_essm.training import BudgetDropoutCallback

args = parse_arguments(CLMArguments)
if args.is_baseline:
    sys.exit(f"--architecture {args.architecture} has no budgets to train: use essm-train-clm")
folder, goes_on = Path(args.output_dir), args.resume_from_checkpoint or args.overwrite_output_dir
claim(folder.parent, [folder.name], overwrite=bool(goes_on), flag="--overwrite_output_dir")
encoder = make_encoder(args)
set_seed(args.seed)
model = build_model(args, encoder)
schedule = dataclasses.replace(make_schedule(args, model), updates=0)  # Trainer counts them
model.config.trained_budgets = list(schedule.budgets)
text = load_text(args, encoder)
blocks = text.source.load(range(text.source.num_samples))
held_out, labels = text.held_out, text_labels(text.held_out, encoder.special_ids)

names = {field.name for field in dataclasses.fields(TrainingArguments)}
shared = {name: value for name, value in vars(args).items() if name in names and value is not None}
shared |= {"max_steps": -1} if args.num_train_epochs else {}
shared["lr_scheduler_kwargs"] = args.lr_scheduler_kwargs
trainer = Trainer(
    model,
    TrainingArguments(**shared, eval_strategy="steps"),
    data_collator=default_data_collator,
    train_dataset=Dataset.from_dict({"input_ids": blocks, "labels": blocks}),
    eval_dataset=Dataset.from_dict({"input_ids": held_out.numpy(), "labels": labels.numpy()}),
    callbacks=[BudgetDropoutCallback(schedule, args.distillation_weight)],
    optimizers=(make_optimizer(model, args), None),
)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model(f"{args.output_dir}/model")
encoder.save_pretrained(f"{args.output_dir}/model", args.block_size)
for K in schedule.budgets:
    model.config.spectral_budget = K
    print(f"K = {K}: {trainer.evaluate()['eval_loss'] / math.log(2) / text.bytes_per_token:.3f} bits per byte")
