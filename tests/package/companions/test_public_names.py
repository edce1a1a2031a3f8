# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What `modeling_essm.companions` offers is there, also what is imported when it is asked for."""

import pytest

from modeling_essm import companions


@pytest.mark.parametrize("name", companions.__all__)
def test_names(name):
    found = getattr(companions, name)
    assert found.__name__.rpartition(".")[2] == name


def test_unknown_names():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        companions.nothing  # noqa: B018
