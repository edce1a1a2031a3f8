# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which budget to run: a model's profile (quality, time and memory at every budget) and the choice by limits."""

from .curve import BudgetCurve
from .profile import BudgetProfile, budget_profile, choose_budget, read_profile

__all__ = ["BudgetCurve", "BudgetProfile", "budget_profile", "choose_budget", "read_profile"]
