# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Any checkpoint on any task at every budget: quality, retention, speed, peak memory and active parameters.

    essm-evaluate --task smnist --data_dir data --models runs/a/model --output_dir runs/a/evaluation
    essm-evaluate --task novels --data_dir data --models runs/seed0/model runs/seed1/model

Several models are seeds of one experiment: means and standard deviations (n - 1) over them are reported.

Left in output_dir: evaluation.json, evaluation.md and evaluation.png (star: sweet spot, triangle: collapse boundary).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from essm_train.arguments import DATA_HELP, OVERWRITE_HELP, TRUST_HELP, arg, check_at_least
from essm_train.console import command
from essm_train.files import claim, write_figure, write_json, write_text


@dataclass
class EvaluateArguments:
    """Which models, on which task."""

    models: list[str] = field(metadata={"help": "Saved models: one, or several seeds of the same experiment."})
    task: str = field(metadata={"help": "A task that essm-list-tasks names."})
    data_dir: str | None = arg(None, DATA_HELP)
    scale: str = arg("full", "'full', 'medium' or 'small', as the models were trained.")
    budgets: list[int] | None = arg(
        None, "Budgets K to evaluate, by default 2, 3, 4, 6, 8, .., 32 and the smallest one of training."
    )
    output_dir: str | None = arg(None, "By default `evaluation` beside the first model.")
    overwrite: bool = arg(False, OVERWRITE_HELP)
    trust_remote_code: bool = arg(False, TRUST_HELP)

    def __post_init__(self) -> None:
        check_at_least(self, 1, "budgets")


def main(args: EvaluateArguments) -> None:
    """Evaluate saved models."""
    import torch

    from essm_train.measure.evaluation import evaluate_models, open_task
    from essm_train.measure.plots import draw_curves
    from essm_train.measure.timing import machine, working_device

    output_dir = Path(args.output_dir or Path(args.models[0]).parent / "evaluation")
    claim(output_dir, [f"evaluation.{kind}" for kind in ("json", "md", "png")], overwrite=args.overwrite)
    task = open_task(args.task, args.data_dir, args.scale, args.models[0])
    evaluation = evaluate_models(args.models, task, args.budgets, args.trust_remote_code)
    print(f"{task.description}\n\n{evaluation.markdown()}")
    context = {"task": args.task, "scale": args.scale, "data": task.description, "models": args.models}
    context |= machine(working_device()) | {"threads": torch.get_num_threads()}
    figure = draw_curves({args.task: evaluation.curve})
    write_figure(output_dir / "evaluation.png", figure)  # first: a kill while it is drawn leaves no file
    write_text(output_dir / "evaluation.md", f"{task.description}\n\n{evaluation.markdown()}")
    write_json(output_dir / "evaluation.json", evaluation.record() | context)
    print(f"saved {output_dir / 'evaluation.json'}, .md and .png")


run = command(main, EvaluateArguments)


if __name__ == "__main__":
    run()
