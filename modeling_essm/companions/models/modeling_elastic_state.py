# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""An elastic state model: a causal recurrence whose state is refined where its self-supervised objective says so.

    z0_t = backbone(x_t, z_{t-1}),    K_t = gate(l(g(z0_t))),    z_t = corrector(z0_t, K_t),    y_t = g(z_t)

The refined state is committed: the next proposal starts from it. Backbone, gate, corrector and objective l have files.
Letters: B batch, L sequence, F input features, d width of the latent, K depth.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from .backbone_elastic_state import ElasticStateLatent, ElasticStateRecurrence
from .cache_states import StateCache, tree_map
from .checks_states import check_cache, check_inputs, check_mode, read_mask, the_cache
from .configuration_elastic_state import ElasticStateConfig
from .corrector_elastic_state import ElasticStateCorrector, InnerWork
from .gate_elastic_state import ElasticStateGate, policy_loss
from .objectives_elastic_state import OBJECTIVES, commit, initial_history, make_objective


@dataclass
class ElasticStateOutput(ModelOutput):
    """
    Args:
        loss: () mean over real positions of l_K + lambda_E K + w_0 l_0, in training with "policy_gradient" plus its
            surrogate; None without an objective. The loss of a task on `readouts` is for the caller to add.
        readouts: (B, L, d_y) y = g(z_K); of no meaning, like what else is told of them, at positions that are not real.
        latents: (B, L, d) z_K, committed. proposals: (B, L, d) z_0.
        proposal_losses, losses: (B, L) the objective of proposals and of refined states; None without an objective.
        refine_depths: (B, L) int64 K. expected_depths: (B, L) the same with gradients to the gate; of "relaxed" gates
            in training the sum of the p_j.
        cache: StateCache after the last position, if asked for. past_key_values is the same.
        gradient_calls: how many rows the objective's gradient was computed for; outside of training of the gate the
            sum of refine_depths.
    """

    loss: Tensor | None = None
    readouts: Tensor | None = None
    latents: Tensor | None = None
    proposals: Tensor | None = None
    proposal_losses: Tensor | None = None
    losses: Tensor | None = None
    refine_depths: Tensor | None = None
    expected_depths: Tensor | None = None
    cache: Any = None
    gradient_calls: int | None = None

    @property
    def past_key_values(self) -> Any:
        return self.cache


def mean_over(each: Tensor, real: Tensor) -> Tensor:
    """() of (B, L) where real (B, L) is true; 0 if it is nowhere."""
    return each.masked_fill(~real, 0.0).sum() / real.sum().clamp(min=1)


def distillation_loss(output: ElasticStateOutput, attention_mask: Tensor | None = None) -> Tensor:
    """() mean over real positions of |z_0 - z_K|^2, where z_K is data: proposals learn what they were refined to, which
    saves steps (section 8 of the poster). attention_mask: (B, L), 1 for real positions; None if all are."""
    assert output.proposals is not None and output.latents is not None
    each = (output.proposals - output.latents.detach()).square().sum(-1)
    return each.mean() if attention_mask is None else mean_over(each, attention_mask.bool())


class ElasticStatePreTrainedModel(PreTrainedModel):
    config_class = ElasticStateConfig
    base_model_prefix = "model"
    main_input_name = "input_features"
    accepts_loss_kwargs = False
    _is_stateful = True
    _supports_context_parallel = False  # a state is not handed from process to process
    # The poles, the metric, the step size and the gate: what bf16 rounds off of them moves every later state. Names are
    # searched as regular expressions in those of all weights, and backbones have gates too.
    _keep_in_fp32_modules_strict: ClassVar = [
        rf"^(?:model\.)?{name}" for name in (r"source\.(?:nu_log|theta_log|gamma_log)$", r"corrector\.", r"gate\.")
    ]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (ElasticStateCorrector, ElasticStateGate, ElasticStateRecurrence)):
            module.reset_parameters()
        elif isinstance(module, nn.Linear):
            init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        else:
            super()._init_weights(module)
        if module is getattr(self, "objective", None):
            self._restore_constants(module)

    def _restore_constants(self, objective: nn.Module) -> None:
        """Buffers that no checkpoint holds, which from_pretrained leaves without values, as the objective is made."""
        made = make_objective(self.config)
        for name, part in made.named_modules() if type(made) is type(objective) else ():
            for key in part._non_persistent_buffers_set:
                init.copy_(objective.get_buffer(f"{name}.{key}" if name else key), part.get_buffer(key))


class ElasticStateModel(ElasticStatePreTrainedModel):
    """Continuous features in, readouts of refined states out. `objective` is what states are refined on, see
    `objectives_elastic_state`; None until one is attached, if the configuration names none."""

    def __init__(self, config: ElasticStateConfig):
        config = copy.deepcopy(config)  # a gate's temperature and a backbone's sizes change, of this model alone
        super().__init__(config)
        own = config.backbone_config is None
        self.source = ElasticStateRecurrence(config) if own else ElasticStateLatent(config)
        hidden, d = config.readout_hidden_size, config.latent_size
        self.readout: nn.Module = nn.Linear(hidden or d, config.readout_size or 0)
        if hidden:
            self.readout = nn.Sequential(nn.Linear(d, hidden), nn.GELU(), self.readout)
        self.corrector = ElasticStateCorrector(config)
        self.gate = ElasticStateGate(config)
        self.objective = make_objective(config)
        if not own:  # transformers looks for these in the modules of a model, not in what they hold
            for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
                given = (getattr(each, name, None) or () for each in (self, self.source.backbone))
                setattr(self, name, set().union(*given))
        self.post_init()

    def get_input_embeddings(self) -> None:
        return None

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers; a backbone that was truncated has another configuration than it was made with."""
        if self.config.backbone_config is not None:
            self.config.backbone_config = cast(Any, self.source).backbone.config
        super().save_pretrained(*args, **kwargs)

    def set_objective(self, objective: Any) -> ElasticStateModel:
        """Refine on this objective from now on; this model. A module's weights become part of the model's.

        A configuration that names an objective registered here no longer does, unless this is the model's own: what is
        loaded later would not be what was attached.
        """
        if self.config.objective in OBJECTIVES and objective is not self.objective:
            self.config.objective = self.config.objective_arguments = None
        del self.objective  # a module and a function are held in different places
        self.objective = objective
        return self

    def set_gate_temperature(self, temperature: float) -> None:
        """T of the gate from now on, for schedules."""
        self.config.gate_temperature = float(temperature)

    def step(
        self, input_features: Tensor, past_key_values: StateCache | None = None, observation: Any = None, **dials
    ) -> ElasticStateOutput:
        """One position of a stream: (B, F), and the observation (B, ..) if it is another; dials as of `forward`, L = 1.

        past_key_values is what the step before returned; None for the first.
        """
        observations = tree_map(lambda x: x[:, None], observation)
        dials = {"past_key_values": past_key_values, "use_cache": True, "return_dict": True} | dials
        return self(input_features[:, None], observations, **dials)

    @can_return_tuple
    def forward(
        self,
        input_features: Tensor,
        observations: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        use_cache: bool | None = None,
        refine_depth: int | Tensor | None = None,
        max_refine_depth: int | None = None,
        gate_threshold_shift: float = 0.0,
        spectral_budget: Any = None,
        return_loss: bool = True,
        cache: StateCache | None = None,
    ) -> ElasticStateOutput:
        """
        Args:
            input_features: (B, L, F). observations: what the objective sees, (B, L, ..) or a nest of such tensors;
                input_features by default.
            attention_mask: (B, L) or (B, past + L), 1 for real positions. Masked positions are skipped: they change
                neither state nor history, and their depth is 0. Only with the model's own recurrence.
            past_key_values: StateCache to continue from; updated in place. After a call that failed it is undefined. Or
                cache, its name in transformers 5.24.
            refine_depth: K of every position, instead of the gate's: an int, or integers (B,) or (B, L). With 0 the
                model is its backbone, and an objective is not needed.
            max_refine_depth: cap of this call on K. gate_threshold_shift: added to all thresholds: more for less work.
            spectral_budget: of the backbone, where it has one. return_loss: whether the output has `loss`; Trainer
                evaluates models that have the argument.
        Returns:
            ElasticStateOutput. In eval mode depths are hard and only the steps that are taken are computed; in training
            a gate's "straight_through" and "relaxed" compute all of them.
        Raises:
            ValueError: no objective where states are to be refined, an objective that does not give (B,), observations
                or arguments out of range or of another shape, a spectral_budget for a backbone without, or a mask for
                one.
        """
        config, cache = self.config, the_cache(cache, past_key_values)
        if input_features is None:
            raise ValueError("input_features must be given, got None")
        B, L = check_inputs(config, None, None, input_features)
        made_for = self._made_for()
        if cache is not None:
            check_cache(cache, made_for, B)
            check_mode(self, "every step of refinement is taken")
        use_cache = (config.use_cache and not self.training) if use_cache is None else use_cache
        if use_cache and cache is None:
            cache = StateCache()
        real = read_mask(attention_mask, B, L, 0 if cache is None else cache.get_seq_length())
        real = None if real is None else real.to(input_features.device)
        cap = config.max_refine_depth if max_refine_depth is None else max_refine_depth
        if type(cap) is not int or not 0 <= cap <= config.max_refine_depth:
            raise ValueError(f"max_refine_depth must be an integer in [0, {config.max_refine_depth}], got {cap!r}")
        if not isinstance(gate_threshold_shift, (int, float)) or math.isnan(gate_threshold_shift):
            raise ValueError(f"gate_threshold_shift must be a number, got {gate_threshold_shift!r}")
        forced = _read_depths(refine_depth, config.max_refine_depth, B, L, input_features.device)
        if spectral_budget is not None and not self.source.has_spectral_budget:
            raise ValueError(f"spectral_budget needs a backbone that has one, got {spectral_budget!r}")
        if self.objective is None and cap > 0 and (forced is None or bool(forced.any())):
            raise ValueError(
                "refinement needs an objective: model.set_objective(objective), a registered config.objective "
                f"(now {config.objective!r}), or refine_depth=0"
            )
        observations = input_features if observations is None else observations
        for leaf in pytree.tree_leaves(observations):
            if tuple(getattr(leaf, "shape", ())[:2]) != (B, L):
                raise ValueError(f"observations must be tensors ({B}, {L}, ..), as input_features, got {leaf}")
        if real is not None:  # masked positions may hold anything
            input_features, observations = (_blank(x, real) for x in (input_features, observations))
        propose = self.source.start(input_features, real, cache, spectral_budget)
        z, history = self._begin(cache, input_features, observations, real)
        work, steps = InnerWork(), []
        for t in range(L):
            observation = tree_map(lambda x: x[:, t], observations)  # noqa: B023 (used at once)
            z0 = self.corrector.retract(propose(t, z).to(z.dtype))
            here = None if real is None else real[:, t]
            depths = None if forced is None else forced[:, t]
            step = self._refine(z0, observation, history, here, depths, cap, gate_threshold_shift, work)
            z = step["latents"] if here is None else torch.where(here[:, None], step["latents"], z)
            step["latents"] = z
            history = commit(self.objective, history, step["readouts"], observation, here)
            steps.append(step)
        if cache is not None:
            cache.update([z], L, made_for, history)
        stacked: dict[str, Any] = {name: torch.stack([step[name] for step in steps], 1) for name in steps[0]}
        log_prob, entropy = stacked.pop("log_prob", None), stacked.pop("entropy", None)
        cached = cache if use_cache else None
        output = ElasticStateOutput(cache=cached, gradient_calls=work.gradients, **stacked)
        if return_loss and output.losses is not None:
            counted = torch.ones_like(output.losses, dtype=torch.bool) if real is None else real
            costs = output.losses + config.compute_penalty * output.expected_depths
            output.loss = mean_over(costs + config.proposal_weight * output.proposal_losses, counted)
            if log_prob is not None:
                output.loss = output.loss + policy_loss(costs, log_prob, entropy, counted, config)
        return output

    def _made_for(self) -> dict[str, Any]:
        """What another model must have in common with this one to go on from its cache."""
        config, inner, past = self.config, self.config.backbone_config, self.objective
        made_for = {"model_type": config.model_type, "latent_size": config.latent_size, "backbone_config": None}
        if inner is not None:
            sizes = (getattr(inner, name, None) for name in ("num_hidden_layers", "hidden_size"))
            made_for["backbone_config"] = "{} of {} layers and width {}".format(inner.model_type, *sizes)
        if past is not None:
            own = type(past).__name__ if hasattr(past, "initial_history") else ""
            made_for["history_length"] = f"of {own}" if own else config.history_length
            made_for["readout_size"] = config.readout_size
        return made_for

    def _begin(
        self, cache: StateCache | None, features: Tensor, observations: Any, real: Tensor | None
    ) -> tuple[Tensor, Any]:
        """The committed latent (B, d) and history before the first position that is real (B, L)."""
        z, history = (cache.states[0], cache.history) if cache is not None and cache.states else (None, None)
        if z is None:
            dtype = torch.promote_types(self.corrector.log_step_size.dtype, torch.float32)
            z = torch.zeros(len(features), self.config.latent_size, dtype=dtype, device=features.device)
        if self.objective is None or history is not None:
            return z, history
        rows = torch.arange(len(z), device=z.device)
        at = torch.zeros_like(rows) if real is None else real.int().argmax(1)
        first = tree_map(lambda x: x[rows.to(x.device), at.to(x.device)], observations)
        y = z.new_zeros(len(z), self.config.readout_size)
        return z, initial_history(self.objective, first, self.config.history_length, y)

    def _read(self, z: Tensor) -> Tensor:
        """y = g(z) in the latent's dtype, whatever that of the weights."""
        weight = next(self.readout.parameters())
        return self.readout(z.to(weight.dtype)).to(z.dtype)

    def _refine(
        self,
        z0: Tensor,
        observation: Any,
        history: Any,
        real: Tensor | None,
        depths: Tensor | None,
        cap: int,
        shift: float,
        work: InnerWork,
    ) -> dict[str, Tensor]:
        """One position: the fields of ElasticStateOutput without L, and those of a sampled depth."""
        if self.objective is None:
            none = torch.zeros(len(z0), dtype=torch.long, device=z0.device)
            y = self._read(z0)
            return {"latents": z0, "proposals": z0, "readouts": y, "refine_depths": none, "expected_depths": none}
        with torch.inference_mode(False):  # autograd cannot use tensors that were made under it
            observation, history, real = (
                tree_map(lambda x: x.clone() if x.is_inference() else x, tree) for tree in (observation, history, real)
            )

        def evaluate(z: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
            def chosen(tree: Any) -> Any:
                return tree if rows is None else tree_map(lambda x: x.index_select(0, rows.to(x.device)), tree)

            y = seen = self._read(z)
            if real is not None:  # masked positions give no gradient
                seen = torch.where(chosen(real)[:, None], y, y.detach())
            losses = self.objective(seen, chosen(observation), chosen(history))
            if losses.shape != y.shape[:1]:
                raise ValueError(f"an objective must give ({len(y)},) numbers, got shape {tuple(losses.shape)}")
            return y, losses.to(y.dtype)  # observations may be fp64

        refinable = cap > 0 and (depths is None or bool(depths.any()))
        start = self.corrector.judge(z0, evaluate, None, differentiable=refinable)
        masks, sampled = None, {}
        if depths is None and self.training and self.config.gate_training == "policy_gradient":
            depths, sampled["log_prob"], sampled["entropy"] = self.gate.sample(start.losses, shift, cap)
        elif depths is None:
            depths = self.gate.depths(start.losses, shift)
            masks = self.gate.masks(start.losses, shift)[:, :cap] if self.training else None
        depths = depths.clamp(max=cap)
        if real is not None:
            depths = depths * real
            masks = None if masks is None else masks * real[:, None]
        if masks is None:
            end, expected = self.corrector.refine(start, depths, evaluate, work), depths.to(z0.dtype)
        else:
            end, expected = self.corrector.refine_softly(start, masks, evaluate, work), masks.sum(1)
        return sampled | {
            "latents": end.z,
            "proposals": z0,
            "readouts": end.y,
            "proposal_losses": start.losses,
            "losses": end.losses,
            "refine_depths": depths,
            "expected_depths": expected,
        }


def _blank(tree: Any, real: Tensor) -> Any:
    """The nest (B, L, ..) with zeros at positions that are not real (B, L)."""
    return tree_map(lambda x: x.masked_fill(~real.view(*real.shape, *(1,) * (x.ndim - 2)), 0), tree)


def _read_depths(refine_depth: Any, most: int, B: int, L: int, device: torch.device) -> Tensor | None:
    """(B, L) int64 of an int, or of integers (B,) or (B, L); None stays None. Raises ValueError for anything else."""
    if refine_depth is None:
        return None
    depths = torch.as_tensor(refine_depth)
    integers = not depths.is_floating_point() and depths.dtype != torch.bool
    if not integers or (depths.numel() and not 0 <= int(depths.min()) <= int(depths.max()) <= most):
        raise ValueError(f"refine_depth must be integers in [0, {most}], got {refine_depth!r}")
    if tuple(depths.shape) not in ((), (B,), (B, L)):
        raise ValueError(f"refine_depth must have shape (), ({B},) or ({B}, {L}), got {tuple(depths.shape)}")
    return depths.long().to(device).view(-1, L if depths.ndim == 2 else 1).expand(B, L)
