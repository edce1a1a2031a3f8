# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""ElasticStateConfig: everything that defines an elastic state model besides its weights and its objective."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np
from transformers import CONFIG_MAPPING, PreTrainedConfig

# Which class each Auto class loads, from the files beside the weights.
AUTO_MAP = {
    "AutoConfig": "configuration_elastic_state.ElasticStateConfig",
    "AutoModel": "modeling_elastic_state.ElasticStateModel",
}
_MOST = 2**24
_INTEGERS = {  # field: least value
    **dict.fromkeys(("num_input_features", "hidden_size", "latent_size", "metric_rank", "max_refine_depth"), 1),
    **dict.fromkeys(("readout_hidden_size", "history_length"), 0),
}
_CHOICES = {
    "metric": ("cholesky", "diagonal", "low_rank"),
    "trust_radius_kind": ("constant", "kappa"),
    "retraction": ("ball", "sphere", "none"),
    "acceptance": ("none", "reject", "backtrack"),
    "training_acceptance": ("none", "reject", "backtrack"),
    "gate_training": ("straight_through", "relaxed", "policy_gradient"),
    "gradient_order": (1, 2),
    **dict.fromkeys(("feedback", "use_cache"), (True, False)),
}
_POSITIVE = ("metric_epsilon", "trust_kappa", "gate_temperature", "gate_threshold_gap")
_NOT_NEGATIVE = ("drift", "compute_penalty", "proposal_weight", "policy_entropy")


class ElasticStateConfig(PreTrainedConfig):
    r"""
    Configuration of an elastic state model: a causal recurrence whose state is refined at inference by a few natural
    gradient steps on a self-supervised objective, as many as a gate asks for.

    Args:
        num_input_features (`int`): F, width of the continuous inputs.
        latent_size (`int`): d, width of the state z that is refined. Without a backbone the real and imaginary parts of
            d / 2 modes, so that d must be even.
        hidden_size (`int`): width H of what the model's own recurrence reads; not read with a backbone.
        backbone_config (`PreTrainedConfig` or `dict`, *optional*): any causal model that transformers knows, ESSMConfig
            included once `modeling_essm` is imported; z is then a latent beside it. By default the backbone is a
            diagonal recurrence (LRU) of the model's own, whose state is z itself.
        feedback (`bool`): with a backbone, whether the refined z enters its next input. Without feedback the backbone
            reads a whole sequence in one call.
        readout_size (`int`, *optional*): width of y = g(z); num_input_features by default.
        readout_hidden_size (`int`): hidden width of g; 0 makes g linear.
        objective (`str`, *optional*): a name given to `register_objective`, or "squared_error". An objective without a
            name is attached with `model.set_objective` after loading.
        objective_arguments (`dict`, *optional*): keyword arguments of its factory.
        history_length (`int`): how many committed steps an objective sees that keeps no history of its own.
        max_refine_depth (`int`): K_max, the most inner steps at one position.
        metric (`str`): G = L L^T + eps I ("cholesky"), softplus(delta) + eps ("diagonal") or diag(s) + U U^T + eps I
            ("low_rank", Woodbury).
        metric_rank (`int`): columns of U. metric_epsilon (`float`): eps, a lower bound of G's eigenvalues.
        step_size (`float`): alpha of a new model in (0, 1], which is trained.
        drift (`float`): beta, the pull back to the proposal.
        trust_radius (`float`, *optional*): rho_0, the longest step in the norm of G; None: no bound.
        trust_radius_kind (`str`): "constant", or "kappa": rho_0 sqrt(kappa / (kappa + trust_kappa)).
        retraction (`str`, *optional*): "ball", "sphere" or "none". By default "ball" with a backbone; "none" without,
            because a recurrence that is cut off is no longer linear.
        retraction_radius (`float`, *optional*): Euclidean norm; sqrt(latent_size) by default.
        acceptance, training_acceptance (`str`): what happens to a step that raises the objective: "none" takes it,
            "reject" keeps the state, "backtrack" halves alpha, at most twice, and then keeps the state.
        gradient_order (`int`): 2 trains through the inner gradient too, for objectives that are twice differentiable.
        gate_training (`str`): "straight_through", "relaxed" or "policy_gradient".
        gate_temperature (`float`): T of the gate's sigmoids in training; anneal it with `model.set_gate_temperature`.
        gate_first_threshold, gate_threshold_gap (`float`): first threshold and gaps of a new gate, in units of the
            logarithm of the objective.
        compute_penalty (`float`): lambda_E, objective per inner step.
        proposal_weight (`float`): w_0, weight of the objective of proposals in the loss, which keeps them honest.
        policy_discount, policy_entropy (`float`): discount of later costs, and weight of the entropy, with
            "policy_gradient".
        r_min, r_max, max_phase (`float`): range of |lam|, and of its phase, in a new recurrence of the model's own.

    Raises:
        ValueError: a field of another type or out of range, or a backbone that transformers does not know.
    """

    model_type = "elastic_state"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values", "gradient_calls", "objective_calls", "kept_steps"]

    num_input_features: int = 8
    latent_size: int = 32
    hidden_size: int = 64
    backbone_config: Any = None
    feedback: bool = True
    readout_size: int = None  # type: ignore[assignment]
    readout_hidden_size: int = 64
    objective: str | None = None
    objective_arguments: Any = None
    history_length: int = 0
    max_refine_depth: int = 4
    metric: str = "cholesky"
    metric_rank: int = 4
    metric_epsilon: float = 1e-3
    step_size: float = 0.5
    drift: float = 0.02
    trust_radius: float | None = 1.0
    trust_radius_kind: str = "constant"
    trust_kappa: float = 1.0
    retraction: str = None  # type: ignore[assignment]
    retraction_radius: float = None  # type: ignore[assignment]
    acceptance: str = "reject"
    training_acceptance: str = "none"
    gradient_order: int = 1
    gate_training: str = "straight_through"
    gate_temperature: float = 1.0
    gate_first_threshold: float = -2.0
    gate_threshold_gap: float = 0.5
    compute_penalty: float = 0.01
    proposal_weight: float = 0.2
    policy_discount: float = 0.9
    policy_entropy: float = 0.01
    r_min: float = 0.4
    r_max: float = 0.99
    max_phase: float = 6.28
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name, None), np.generic):
                setattr(self, field.name, value.item())
        self.backbone_config = _read_backbone(self.backbone_config)
        _check_integer("latent_size", self.latent_size, 1)
        if self.readout_size is None:
            self.readout_size = self.num_input_features
        if self.retraction is None:
            self.retraction = "none" if self.backbone_config is None else "ball"
        if self.retraction_radius is None:
            self.retraction_radius = math.sqrt(self.latent_size)
        self._validate()
        given = kwargs.get("auto_map") or {}
        if not isinstance(given, dict):
            raise ValueError(f"auto_map must be a dict of Auto classes and the classes they load, got {given!r}")
        kwargs["auto_map"] = {**AUTO_MAP, **given}  # every folder loads through every Auto class
        super().__post_init__(**kwargs)

    def _validate(self) -> None:
        for name, least in _INTEGERS.items():
            _check_integer(name, getattr(self, name), least)
        _check_integer("readout_size", self.readout_size, 1)
        for name, legal in _CHOICES.items():
            value = getattr(self, name)
            if not any(type(value) is type(choice) and value == choice for choice in legal):
                raise ValueError(f"{name} must be one of {legal}, got {value!r}")
        if self.backbone_config is None and self.latent_size % 2:
            raise ValueError(
                "latent_size must be even without backbone_config: z is real and imaginary parts of modes, "
                f"got {self.latent_size}"
            )
        for name in _POSITIVE:
            _check_number(name, getattr(self, name), 0.0, math.inf)
        for name in _NOT_NEGATIVE:
            _check_number(name, getattr(self, name), 0.0, math.inf, include_low=True)
        _check_number("metric_epsilon", self.metric_epsilon, 0.0, 1.0)  # a new G is the identity
        _check_number("step_size", self.step_size, 0.0, 1.0, include_high=True)
        _check_number("policy_discount", self.policy_discount, 0.0, 1.0, include_low=True, include_high=True)
        _check_number("gate_first_threshold", self.gate_first_threshold, -math.inf, math.inf)
        if self.trust_radius is not None:
            _check_number("trust_radius", self.trust_radius, 0.0, math.inf)
        _check_number("retraction_radius", self.retraction_radius, 0.0, math.inf)
        _check_number("r_max", self.r_max, 0.0, 1.0)
        _check_number("r_min", self.r_min, 0.0, self.r_max, include_low=True, include_high=True)
        _check_number("max_phase", self.max_phase, 0.0, 2 * math.pi, include_high=True)
        if self.objective is not None and not isinstance(self.objective, str):
            raise ValueError(f"objective must be a registered name or None, got {type(self.objective).__name__}")
        if self.objective_arguments is not None and not isinstance(self.objective_arguments, dict):
            raise ValueError(f"objective_arguments must be a dict or None, got {self.objective_arguments!r}")


def _read_backbone(given: Any) -> PreTrainedConfig | None:
    if given is None or isinstance(given, PreTrainedConfig):
        return given
    if not isinstance(given, dict) or not isinstance(given.get("model_type"), str):
        raise ValueError(f"backbone_config must be a configuration or a dict with model_type, got {given!r}")
    fields = dict(given)
    if (kind := fields.pop("model_type")) not in CONFIG_MAPPING:
        raise ValueError(
            f"backbone_config.model_type must be one that transformers knows, got {kind!r}: import the package that "
            "registers it first, for example modeling_essm"
        )
    return CONFIG_MAPPING[kind](**fields)


def _check_integer(name: str, value: Any, least: int) -> None:
    if type(value) is not int or not least <= value <= _MOST:
        raise ValueError(f"{name} must be an integer in [{least}, {_MOST}], got {value!r}")


def _check_number(
    name: str, value: Any, low: float, high: float, include_low: bool = False, include_high: bool = False
) -> None:
    inside = type(value) in (int, float) and math.isfinite(value)
    inside = inside and (low < value < high or (include_low and value == low) or (include_high and value == high))
    if not inside:
        left, right = "[" if include_low else "(", "]" if include_high else ")"
        raise ValueError(f"{name} must be a number in {left}{low:g}, {high:g}{right}, got {value!r}")


__all__ = ["ElasticStateConfig"]
