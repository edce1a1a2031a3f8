# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What `modeling_essm.companions` offers is there, also what is imported when it is asked for."""

import pytest

from modeling_essm import companions


def test_names():
    assert all(getattr(companions, name).__name__ == name for name in companions.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        companions.nothing  # noqa: B018
