# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""ElasticStateConfig: everything that defines an elastic state model besides its weights and its objective."""

import math
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import CONFIG_MAPPING, PreTrainedConfig

from .checks_states import SavedConfig, integer, number

# Which class each Auto class loads, from the files beside the weights.
AUTO_MAP = {
    "AutoConfig": "configuration_elastic_state.ElasticStateConfig",
    "AutoModel": "modeling_elastic_state.ElasticStateModel",
}


@strict  # which checks types as long as annotations are types, and not text
class ElasticStateConfig(SavedConfig, PreTrainedConfig):
    r"""
    Configuration of an elastic state model: a causal recurrence whose state is refined at inference by a few natural
    gradient steps on a self-supervised objective, as many as a gate asks for.

    Args:
        num_input_features (`int`): F, width of the continuous inputs.
        latent_size (`int`): d, width of the state z that is refined. Without a backbone the real and imaginary parts of
            d / 2 modes, so that d must be even.
        hidden_size (`int`): width H of what the model's own recurrence reads; not read with a backbone.
        backbone_config (`PreTrainedConfig` or `dict`, *optional*): any causal model that transformers knows, ESSMConfig
            included once `modeling_essm` is imported, and DiagonalSSMConfig once `modeling_essm.companions` is; z is
            then a latent beside it. By default the backbone is a diagonal recurrence (LRU) of the model's own, whose
            state is z itself.
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
        trust_radius (`float`, *optional*): rho, the longest step in the norm of G; None: no bound.
        retraction (`str`, *optional*): "ball" or "none". By default "ball" with a backbone; "none" without,
            because a recurrence that is cut off is no longer linear.
        retraction_radius (`float`, *optional*): Euclidean norm; sqrt(latent_size) by default.
        acceptance (`str`): what happens in eval mode to a step that raises the objective: "none" takes it, "reject"
            keeps the state, "backtrack" halves alpha, at most twice, and then keeps the state. Training takes all.
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
        StrictDataclassError: a field of another type or out of range.
        ValueError: a backbone that transformers does not know.
    """

    model_type = "elastic_state"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values", "cache", "gradient_calls"]

    num_input_features: int = integer(1, 8)
    latent_size: int = integer(1, 32)
    hidden_size: int = integer(1, 64)
    backbone_config: Any = None
    feedback: bool = True
    readout_size: int | None = integer(1)
    readout_hidden_size: int = integer(0, 64)
    objective: str | None = None
    objective_arguments: dict[str, Any] | None = None
    history_length: int = integer(0, 0)
    max_refine_depth: int = integer(1, 4)
    metric: Literal["cholesky", "diagonal", "low_rank"] = "cholesky"
    metric_rank: int = integer(1, 4)
    metric_epsilon: float | int = number(1e-3, high=1.0)  # a new G is the identity
    step_size: float | int = number(0.5, high=1.0, closed="]")
    drift: float | int = number(0.02, closed="[")
    trust_radius: float | int | None = number(1.0)
    retraction: Literal["ball", "none"] | None = None
    retraction_radius: float | int | None = number(None)
    acceptance: Literal["none", "reject", "backtrack"] = "reject"
    gate_training: Literal["straight_through", "relaxed", "policy_gradient"] = "straight_through"
    gate_temperature: float | int = number(1.0)
    gate_first_threshold: float | int = number(-2.0, low=-math.inf)
    gate_threshold_gap: float | int = number(0.5)
    compute_penalty: float | int = number(0.01, closed="[")
    proposal_weight: float | int = number(0.2, closed="[")
    policy_discount: float | int = number(0.9, high=1.0, closed="[]")
    policy_entropy: float | int = number(0.01, closed="[")
    r_min: float | int = number(0.4, closed="[")
    r_max: float | int = number(0.99, high=1.0)
    max_phase: float | int = number(6.28, high=2 * math.pi, closed="]")
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        self.backbone_config = _read_backbone(self.backbone_config)
        if self.readout_size is None:
            self.readout_size = self.num_input_features
        if self.retraction is None:
            self.retraction = "none" if self.backbone_config is None else "ball"
        if self.retraction_radius is None:
            self.retraction_radius = math.sqrt(self.latent_size)
        kwargs["auto_map"] = AUTO_MAP | (kwargs.get("auto_map") or {})  # every folder loads through every Auto class
        super().__post_init__(**kwargs)

    def validate_fields(self) -> None:
        """Fields that have to fit each other."""
        if self.backbone_config is None and self.latent_size % 2:
            raise ValueError(
                "latent_size must be even without backbone_config: z is real and imaginary parts of modes, "
                f"got {self.latent_size}"
            )
        if self.r_min > self.r_max:
            raise ValueError(f"r_min must be at most r_max = {self.r_max}, got {self.r_min}")


def _read_backbone(given: Any) -> PreTrainedConfig | None:
    if given is None or isinstance(given, PreTrainedConfig):
        return given
    if not isinstance(given, dict) or not isinstance(given.get("model_type"), str):
        raise ValueError(f"backbone_config must be a configuration or a dict with model_type, got {given!r}")
    fields = dict(given)
    if (kind := fields.pop("model_type")) not in CONFIG_MAPPING:
        raise ValueError(
            f"backbone_config.model_type must be one that transformers knows, got {kind!r}: import the package that "
            "registers it first, for example modeling_essm, or modeling_essm.companions for 'diagonal_ssm'"
        )
    return CONFIG_MAPPING[kind](**fields)


__all__ = ["ElasticStateConfig"]
