# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What the installed package adds to loading and saving: classes that a user derived from ours, checked profiles."""

from .companions import PackageCompanions

__all__ = ["PackageCompanions"]
