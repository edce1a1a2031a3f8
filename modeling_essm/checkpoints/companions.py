# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The files beside the weights, as the installed package knows them."""

from __future__ import annotations

from typing import Any

from ..loading_essm import Companions
from .derived_classes import code_of_derived_classes, derived_class


class PackageCompanions(Companions):
    """With the files of classes that a user derived from ours, and a budget profile that was read and checked."""

    def class_beside(self, cls: type, source: Any, arguments: Any) -> Any:
        return derived_class(cls, source, arguments)

    def code(self, model: Any) -> dict[str, str]:
        return super().code(model) | code_of_derived_classes(model)

    def profile(self, model: Any) -> str | None:
        """What the model can run of the profile beside its weights. Raises ValueError for a damaged one, or another
        model's."""
        from ..budgets import budget_profile

        profile = budget_profile(model)
        return None if profile is None else profile.text()
