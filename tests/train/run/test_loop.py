# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/run: what an update does to the weights, what is measured and saved, and what stops a run."""

import copy
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training_run import NUM_BLOCKS, final_state, model_weights, read_log, same, train
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from essm_train.arguments import RunArguments
from essm_train.baselines.config import BaselineConfig
from essm_train.baselines.models import BaselineForCausalLM
from essm_train.files import delete
from essm_train.measure.scoring import Metric
from essm_train.run import accelerator as run_accelerator
from essm_train.run import loop
from essm_train.run.checkpoints import list_checkpoints
from essm_train.run.loop import Progress, eval_budgets
from essm_train.run.steps import Muon, adamw, make_optimizer, parameter_groups
from essm_train.run.weights import WeightAverage
from modeling_essm import ESSMConfig, ESSMForCausalLM, ESSMForSequenceClassification


def test_validated_budgets():
    schedule = SimpleNamespace(budgets=(2, 3, 4, 6, 8))
    assert eval_budgets(RunArguments(), schedule, 8) == (2, 4, 8)
    assert eval_budgets(RunArguments(eval_budgets=[8, 5, 5]), schedule, 8) == (5, 8)


def test_only_matrices_decay():
    model = ESSMForCausalLM(ESSMConfig(hidden_size=8, num_hidden_layers=1, num_spectral_channels=4, filter_length=64))
    decayed, others = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    exempt = {names[id(p)] for p in others["params"]}
    assert exempt == {n for n in names.values() if n.endswith(".bias") or "norm" in n or "embed" in n}
    assert len(decayed["params"]) + len(exempt) == len(names)


def muon_step(matrix):
    """What moves a weight by Muon at rate 1, by what five Newton-Schulz steps do to singular values."""
    U, S, V = torch.linalg.svd(matrix, full_matrices=False)
    S = S / S.norm()
    for _ in range(5):
        S = 3.4445 * S - 4.7750 * S**3 + 2.0315 * S**5
    return U * S @ V * 0.2 * max(matrix.shape) ** 0.5


def test_muon_moves_the_matrices_of_the_body_channel_by_channel_and_adamw_all_else():
    """As AdamW does alone, at the decay and rate of RunArguments. An attention layer has no channels."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_spectral_channels": 4, "filter_length": 64, "intermediate_size": 16}
    hybrid = {"layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2, "num_hidden_layers": 2}
    model, other = (
        ESSMForSequenceClassification(ESSMConfig(block="elastic", num_labels=3, **sizes, **hybrid)) for _ in range(2)
    )
    other.load_state_dict(model.state_dict())
    exact = {name: p.detach().double() for name, p in model.named_parameters()}
    momenta = {name: torch.zeros_like(p) for name, p in exact.items()}
    names = {0: ("mixer.in_proj", "mixer.gate_in", "mixer.out_proj", "ffn.up", "ffn.down")}
    names[1] = ("ffn.up", "ffn.down", *(f"self_attn.{x}_proj" for x in "qkvo"))
    matrices = {f"model.layers.{layer}.{name}.weight" for layer, inside in names.items() for name in inside}
    assert matrices < exact.keys() and "score.weight" in exact

    def parts(name: str) -> dict[str, int]:
        """Arguments of `chunk`: channels lie beside each other in what a projection reads or in what it writes."""
        return {"chunks": 4 if ".0." in name else 1, "dim": int("out_proj" in name or "down" in name)}

    args = RunArguments(optimizer="muon", learning_rate=0.02, weight_decay=0.3, adam_beta2=0.9)
    both, alone = make_optimizer(model, args), adamw(other, 0.02, 0.3, (0.9, 0.9))
    for rate in (0.02, 0.01):
        both.load_state_dict(copy.deepcopy(both.state_dict()))  # what a checkpoint brings, and the schedule after it
        for group in (*both.param_groups, *alone.param_groups):
            group["lr"] = rate
        for (name, p), q in zip(model.named_parameters(), other.parameters()):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
            if name in matrices:
                momenta[name] = 0.95 * momenta[name] + 0.05 * p.grad
                moves = [muon_step(part) for part in (0.05 * p.grad + 0.95 * momenta[name]).chunk(**parts(name))]
                exact[name] = (1 - rate * 0.3) * exact[name] - rate * torch.cat(moves, parts(name)["dim"])
        both.step()
        alone.step()
    for (name, p), q in zip(model.named_parameters(), other.parameters()):
        if name in matrices:
            # A step of Newton-Schulz multiplies an error by at most 3.45, and these are as long as the moves.
            rounding = 3.45**5 * torch.finfo().eps * 0.03 * 0.2 * max(p.shape) ** 0.5
            torch.testing.assert_close(p.double(), exact[name], atol=rounding, rtol=2 * torch.finfo().eps)
        else:
            assert torch.equal(p, q), name


@pytest.mark.parametrize(("architecture", "shares"), [("mamba2", 1), ("matmamba", 2)])
def test_muon_moves_the_parts_of_mamba2_one_by_one(architecture, shares):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 64, "state_size": 5}
    capacity = {"num_spectral_channels": shares} if shares > 1 else {}
    model = BaselineForCausalLM(BaselineConfig(architecture=architecture, **sizes, **capacity))
    (mixer,) = (module for module in model.modules() if isinstance(module, Mamba2Mixer))
    units = [64 // shares] * shares
    parts = {mixer.in_proj.weight: ([*units, *units, 5, 5, mixer.num_heads], 0), mixer.out_proj.weight: (units, 1)}
    before = {p: p.detach().clone() for p in parts}
    for p in parts:
        p.grad = torch.randn_like(p)
    Muon(model, 0.01, weight_decay=0.0).step()
    for p, (apart, dim) in parts.items():
        moves = torch.cat([muon_step(part) for part in p.grad.double().split(apart, dim)], dim)
        rounding = 3.45**5 * torch.finfo().eps * 0.01 * 0.2 * max(p.shape) ** 0.5  # as above
        torch.testing.assert_close((p - before[p]).double(), -0.01 * moves, atol=rounding, rtol=1e-5)


@pytest.mark.parametrize(
    "schedule",
    [{}, {"budget_schedule": "sandwich", "distillation_weight": 0.5}, {"budget_schedule": "family"}],
    ids=str,
)
def test_accumulated_gradients_equal_one_large_batch(schedule, arguments, tmp_path, monkeypatch):
    shared = {"dropout": 0.0, "max_steps": 3, "learning_rate": 1e-3, **schedule}
    train(arguments(tmp_path / "large", per_device_train_batch_size=4, **shared))
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")  # of another program
    train(arguments(tmp_path / "accumulated", gradient_accumulation_steps=4, per_device_train_batch_size=1, **shared))
    for a, b in zip(final_state(tmp_path / "large"), final_state(tmp_path / "accumulated"), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)  # fp32 sums in another order
    for a, b in zip(read_log(tmp_path / "large"), read_log(tmp_path / "accumulated"), strict=True):
        names = ("loss", "bits/byte", "budget", "gradient_norm")
        assert [a[name] for name in names] == pytest.approx([b[name] for name in names], rel=1e-4)


def test_an_update_trains_the_budgets_and_weighs_the_logits_as_the_arguments_say(arguments, tmp_path, monkeypatch):
    given, losses = [], loop.budget_losses

    def spy(forward, parts, **options):
        given.append((len(parts), options["distillation_weight"]))
        return losses(forward, parts, **options)

    monkeypatch.setattr(loop, "budget_losses", spy)
    sandwich = {"budget_schedule": "sandwich", "sandwich_random": 1, "distillation_weight": 0.25}
    for name, changes in (("sandwich", sandwich), ("family", {"budget_schedule": "family"})):
        train(arguments(tmp_path / name, max_steps=1, **changes))
    assert given[0] == (3, 0.25) and given[1][1] == 0.5


def test_gradients_are_clipped(arguments, tmp_path):
    train(arguments(tmp_path, max_steps=1, max_grad_norm=1e-3, optimizer="adamw"))
    moments = torch.load(tmp_path / "checkpoint-00000001" / "optimizer.bin")["state"].values()
    total = math.sqrt(sum(float(state["exp_avg"].square().sum()) for state in moments))
    assert total == pytest.approx(1e-4, rel=1e-3)  # AdamW's first moment is a tenth of the gradient
    assert read_log(tmp_path)[0]["gradient_norm"] > 0.1  # before


def test_weights_are_averaged():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(torch.float64)
    expected, average = model.weight.detach().clone(), WeightAverage(model, 0.5)
    for n in range(1, 13):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        average.update()
        decay = min(0.5, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    own = model.weight.clone()
    with average.applied():
        torch.testing.assert_close(model.weight, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(model.weight, own) and not torch.allclose(own, expected)


def test_averages_do_not_stay_in_gathered_weights(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = nn.Linear(3, 2)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=False)
        average, x = WeightAverage(model, 0.5), torch.ones(1, 3)
        for mean in average.average:
            mean.zero_()
        with torch.no_grad():
            trained = model(x)
            with average.applied():
                assert torch.equal(model(x), torch.zeros(1, 2))
            assert torch.equal(model(x), trained)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"full_determinism": True}], ids=str)
def test_settings_that_change_no_weight(changes, arguments, finished, tmp_path, monkeypatch):
    if "full_determinism" in changes:
        for name in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
            monkeypatch.setenv(name, "")  # restored afterwards
    called, forward = [], ESSMForCausalLM.forward

    def noting(self, *args, **kwargs):
        called.append((self.is_gradient_checkpointing, torch.are_deterministic_algorithms_enabled()))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(ESSMForCausalLM, "forward", noting)
    try:
        train([*arguments(tmp_path), *(f"--{name}" for name in changes)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(called) == {("gradient_checkpointing" in changes, "full_determinism" in changes)}
    assert same(tmp_path, finished)


def test_bf16_keeps_fp32_weights(arguments, finished, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    seen, forward = [], torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *a: [y := forward(*a), seen.append(y.dtype)][0])
    try:
        AcceleratorState._reset_state(reset_partial_state=True)
        train(arguments(tmp_path))
        with pytest.raises(ValueError, match="mixed_precision was 'no' and is now 'bf16'"):
            train(arguments(finished))
    finally:
        monkeypatch.undo()
        AcceleratorState._reset_state(reset_partial_state=True)
    assert torch.bfloat16 in seen
    checkpoint = list_checkpoints(tmp_path)[-1]
    assert {t.dtype for t in torch.load(checkpoint / "pytorch_model.bin").values()} == {torch.float32}
    assert {t.dtype for t in model_weights(tmp_path / "model").values()} == {torch.float32}
    loss, expected = (read_log(folder)[-1]["loss"] for folder in (tmp_path, finished))
    assert loss != expected and loss == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
def test_compiled_training(arguments, tmp_path, monkeypatch):
    """Without code generation: what is captured, and under which names weights are saved."""
    compile_model = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compile_model(self, backend="eager", **options))
    shared = {"max_steps": 2, "dropout": 0.0, "num_hidden_layers": 3, "eval_budgets": 2}
    train(arguments(tmp_path / "plain", **shared))
    torch._dynamo.reset()
    captured = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    train([*arguments(tmp_path / "compiled", **shared), "--torch_compile"])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - captured
    assert 0 < graphs <= 4  # as many as of one layer
    ours, theirs = (model_weights(tmp_path / name / "model") for name in ("compiled", "plain"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-5, rtol=0.0)


@pytest.mark.slow
def test_every_kind_of_block_has_graphs_of_its_own(arguments, tmp_path, monkeypatch):
    """A rate of its own in every block is compiled in, so that a limit for one kind of block would be met."""
    compile_model = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compile_model(self, backend="eager", **options))
    torch._dynamo.reset()
    ramp = {"stochastic_depth": 0.2, "stochastic_depth_ramp": True, "num_hidden_layers": 4, "num_spectral_channels": 2}
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=8):
        train([*arguments(tmp_path, max_steps=4, **ramp), "--torch_compile"])


def test_the_best_model_is_the_earlier_of_equals(arguments, validations, tmp_path):
    validations([3.0, 2.0, 2.0, 2.5])
    train(arguments(tmp_path, eval_steps=2, save_steps=4, load_best_model_at_end=True))
    best = json.loads((tmp_path / "best" / "best.json").read_text())
    assert best["update"] == 4 and best["validation"] == {"1": 2.0, "4": 2.0, "8": 2.0}
    assert [line.get("validation bits/byte K=4") for line in read_log(tmp_path)] == [
        None, 3.0, None, 2.0, None, 2.0, None, 2.5,
    ]  # fmt: skip
    then = torch.load(tmp_path / "checkpoint-00000004" / "average.pt")["average"]
    final = model_weights(tmp_path / "model")
    assert sorted(t.norm().item() for t in then) == sorted(t.norm().item() for t in final.values())
    assert not (tmp_path / "model" / "best.json").exists()
    shutil.rmtree(tmp_path / "best")  # which the finished model does not need
    train(arguments(tmp_path, eval_steps=2, save_steps=4, load_best_model_at_end=True))


def test_a_best_model_of_later_updates_is_not_taken(arguments, validations, tmp_path, capsys):
    validations([3.0, 2.0])
    fields = {"eval_steps": 2, "save_steps": 4, "load_best_model_at_end": True}
    train(arguments(tmp_path, **fields, max_steps=4))
    validations([2.5, 1.0])
    train([*arguments(tmp_path, **fields, max_steps=8), "--extend"])
    back = arguments(tmp_path, **fields, max_steps=4, resume_from_checkpoint=tmp_path / "checkpoint-00000004")
    message = r"best holds the weights of update 8, and the best ones .* of update 4, are gone"
    with pytest.raises(ValueError, match=message):
        train(back)
    shutil.rmtree(tmp_path / "best")
    capsys.readouterr()
    validations([2.5, 0.5])
    train([*arguments(tmp_path, **fields, max_steps=8), "--extend"])
    assert "best is not there, and the best ones of this run, of update 4, are gone. Without" in capsys.readouterr().out
    assert json.loads((tmp_path / "best" / "best.json").read_text())["update"] == 8


def test_what_counts_as_better():
    accuracy, loss = Metric("accuracy", True), Metric("loss", False)
    progress = Progress(update=3, best=0.5, best_update=1, validations_without_best=1)
    assert not progress.record_validation(0.5, accuracy) and progress.validations_without_best == 2
    assert progress.record_validation(0.6, accuracy)
    assert progress == Progress(update=3, best=0.6, best_update=3, validations_without_best=0)
    assert not progress.record_validation(0.6, loss) and not progress.record_validation(math.nan, loss)
    progress.best, counts = math.nan, []
    for mean in (3.0, 2.95, 2.9, 2.5, 2.45, 2.6):  # a small gain does not end the patience
        progress.update += 1
        assert progress.record_validation(mean, loss, threshold=0.1) == (mean != 2.6)
        counts.append(progress.validations_without_best)
    assert counts == [0, 1, 2, 0, 1, 2] and (progress.best, progress.best_update) == (2.45, 8)


def test_a_validation_that_is_not_finite_does_not_end_the_run(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(Metric, "compute", lambda *_: math.nan)
    train(arguments(tmp_path))
    assert math.isnan(read_log(tmp_path)[-1]["validation bits/byte K=4"]) and (tmp_path / "model").is_dir()


def test_early_stopping_holds_over_a_restart(arguments, validations, tmp_path, capsys):
    stop = {"eval_steps": 1, "early_stopping_patience": 2, "save_steps": 3, "save_total_limit": 9}
    stop["early_stopping_threshold"] = 0.2  # 1.9 is not a new best
    validations([3.0, 2.0, 2.5, 1.9, 1.0])
    train(arguments(tmp_path, **stop))
    assert "stopped early: no new best by more than 0.2 in 2 validations" in capsys.readouterr().out
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-00000003", "checkpoint-00000004"]
    validations([])
    train(arguments(tmp_path, **stop))
    assert "finished already" in capsys.readouterr().out
    delete(tmp_path / "checkpoint-00000004")
    validations([1.9])  # of update 4: the count goes on
    train(arguments(tmp_path, **stop))
    assert "stopped early" in capsys.readouterr().out and len(read_log(tmp_path)) == 4


def test_epochs_are_counted_in_samples(arguments, tmp_path):
    train(arguments(tmp_path, num_train_epochs=0.5, per_device_train_batch_size=4, save_steps=100))
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"checkpoint-{NUM_BLOCKS // 2 // 4:08d}"]
    with pytest.raises(ValueError, match="num_train_epochs needs a data set of known length"):
        train(arguments(tmp_path / "stream", "streaming", num_train_epochs=1))


def test_trackers_get_what_the_log_gets(arguments, tmp_path, monkeypatch):
    class Memory(GeneralTracker):
        name, requires_logging_directory, tracker = "memory", False, None
        started, logged, finished = [], [], []

        def store_init_configuration(self, values):
            self.started.append(values)

        def log(self, values, step=None, **kwargs):
            self.logged.append({"update": step, **values})

        def finish(self):
            self.finished.append(True)

    with pytest.raises(ValueError, match=r"report_to must name installed trackers, .* got 'nonsense'"):
        train(arguments(tmp_path, report_to="nonsense"))
    monkeypatch.setattr(run_accelerator, "get_available_trackers", lambda: ["memory"])
    accelerator = run_accelerator.Accelerator
    monkeypatch.setattr(
        run_accelerator, "Accelerator", lambda log_with, **rest: accelerator(log_with=[Memory()], **rest)
    )
    train(arguments(tmp_path, report_to="memory"))
    named = [{name.replace("=", " "): value for name, value in line.items()} for line in read_log(tmp_path)]
    assert Memory.logged == named and len(Memory.logged) == 8 and Memory.finished == [True]
    assert any("K 4" in name for line in named for name in line)  # MLflow takes no "="
    assert Memory.started[0]["learning_rate"] == 0.005
    assert all(isinstance(value, (int, float, str)) for value in Memory.started[0].values())
