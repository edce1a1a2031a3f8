# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What another run has left is refused by name, before a model or data is even looked for."""

import pytest

from essm_train import evaluate, make_pairs, reproduce, sweep
from essm_train.analyze import AnalyzeArguments
from essm_train.measure import analysis

TEXT = {"model": "/nowhere", "text_files": ["nowhere.txt"]}
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
