# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What another run has left is refused by name, before a model or data is even looked for."""

import pytest

from essm_train import evaluate, make_pairs, reproduce, sweep
from essm_train.analyze import AnalyzeArguments
from essm_train.measure import analysis, evaluation
from essm_train.measure.evaluation import Evaluation
from modeling_essm.budgets.curve import BudgetCurve

TEXT = {"model": "nowhere", "text_files": ["nowhere.txt"]}
COMMANDS = {
    "budget_sweep.png": (sweep.main, sweep.SweepArguments, TEXT),
    "analysis.json": (analysis.analyze, AnalyzeArguments, TEXT),
    "evaluation.md": (evaluate.main, evaluate.EvaluateArguments, {"models": ["nowhere"], "task": "smnist"}),
    "test.tsv": (make_pairs.main, make_pairs.PairsArguments, {"books": "nowhere.parquet"}),
    "exponents-small.json": (reproduce.reproduce, reproduce.ReproduceArguments, {"experiment": "exponents"}),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_result_that_is_there_is_refused(name, tmp_path):
    main, arguments, values = COMMANDS[name]
    where = "results_dir" if main is reproduce.reproduce else "output_dir"
    (tmp_path / name).write_text("an earlier one")
    args = arguments(**values | {where: str(tmp_path)})
    with pytest.raises(ValueError, match=f"holds {name}, which this run did not write: .*give --overwrite to replace"):
        main(args)
    args.overwrite = True
    with pytest.raises((ValueError, OSError), match=r"nowhere|to put it|data"):
        main(args)
    assert (tmp_path / name).read_text() == "an earlier one"


def test_an_evaluation_keeps_the_sweep_of_the_run(tmp_path, monkeypatch, capsys):
    found = Evaluation((BudgetCurve("accuracy", True, (2, 8), (0.5, 0.75), (9.0, 4.0)),), (1, 2), (3, 4))
    monkeypatch.setattr(evaluation, "open_task", lambda *arguments: found)
    monkeypatch.setattr(Evaluation, "description", "ten samples", raising=False)
    monkeypatch.setattr(evaluation, "evaluate_models", lambda *arguments: found)
    args = evaluate.EvaluateArguments(models=[str(tmp_path / "model")], task="smnist")
    evaluate.main(args)
    sweep, new = tmp_path / "budget_sweep.json", (tmp_path / "budget_sweep.json").read_text()
    assert "ten samples" in new and (tmp_path / "evaluation" / "evaluation.png").exists()
    sweep.write_text("of the run")
    args.output_dir = str(tmp_path / "again")
    evaluate.main(args)
    assert sweep.read_text() == "of the run" and f"kept {sweep} as it is" in capsys.readouterr().out
    args.overwrite = True
    evaluate.main(args)
    assert sweep.read_text() == new
