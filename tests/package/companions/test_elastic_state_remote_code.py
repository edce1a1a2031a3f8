# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The folder of elastic state models is an island: what it saves runs where this package cannot be imported."""

from pathlib import Path

import torch
from elastic_states import random_inputs, random_model
from helpers import BLOCK
from test_diagonal_remote_code import ISLAND as DIAGONAL
from test_diagonal_remote_code import PACKAGE, run_child
from transformers import GPT2Config

from modeling_essm.companions import elastic_state

ISLAND = {path.stem: path for path in Path(elastic_state.__file__).parent.glob("*.py") if path.stem != "__init__"}

LOAD = """
import torch
from transformers import AutoModel

torch.set_num_threads(1)
x, results = torch.load("x.pt"), {}
for kind in ("own", "gpt2"):
    for where in (kind, kind + "-again"):
        model = AutoModel.from_pretrained(where, trust_remote_code=True)
        assert type(model).__module__.startswith("transformers_modules."), type(model)
        with torch.inference_mode():
            results[where] = model(x, refine_depth=2).readouts
        if where == kind:
            model.save_pretrained(kind + "-again")
    model.set_objective(lambda y, observation, history: (y - observation).square().mean(-1))
    with torch.no_grad():
        results[kind + "-attached"] = model(x, refine_depth=2).readouts
torch.save(results, "results.pt")
"""


def test_a_saved_folder_needs_no_package(tmp_path):
    x, models = random_inputs(2, 3, 5, dtype=torch.float32), {}
    torch.save(x, tmp_path / "x.pt")
    gpt2 = GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=32, vocab_size=8)
    for kind, backbone in {"own": None, "gpt2": gpt2}.items():
        models[kind] = random_model(dtype=torch.float32, backbone_config=backbone)
        models[kind].save_pretrained(tmp_path / kind)
        assert {path.stem: path.read_text() for path in (tmp_path / kind).glob("*.py")} == {
            name: path.read_text() for name, path in ISLAND.items()
        }
    run_child(BLOCK + LOAD, tmp_path, isolated=True)
    results = torch.load(tmp_path / "results.pt")
    for kind, model in models.items():
        with torch.no_grad():
            expected = model(x, refine_depth=2).readouts
        for name in ("", "-again", "-attached"):  # fp32, weights lie elsewhere in memory: sums in another order
            torch.testing.assert_close(results[kind + name], expected, rtol=0, atol=1e-5)


def test_files_have_names_of_their_own():
    """Checkpoints lie flat in one folder, and Python in one process may load all kinds."""
    assert not set(ISLAND) & ({path.stem for path in PACKAGE.glob("*.py")} | set(DIAGONAL))
