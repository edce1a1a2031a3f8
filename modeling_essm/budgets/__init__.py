# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Budgets of a model: its profile, the choice of one by limits of time or quality, and one for each layer."""

from .allocation import allocate_spectral_budget
from .choice import choose_budget
from .profile import BudgetProfile
from .profile_file import budget_profile, read_profile

__all__ = ["BudgetProfile", "allocate_spectral_budget", "budget_profile", "choose_budget", "read_profile"]
