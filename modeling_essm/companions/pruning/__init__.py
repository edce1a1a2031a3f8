# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Modes ranked and taken out of a trained model: AIRE-Prune, LAST, baselines, masks and certificates."""
