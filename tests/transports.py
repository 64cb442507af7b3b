"""Which kinds of transport can be tested here."""

from __future__ import annotations

from typing import get_args

import pytest

from engine.transport.link import Kind, MissingError, load

KINDS: tuple[Kind, ...] = get_args(Kind)


def need(kind: Kind) -> None:
    """Skips the test where the kind's library is not installed, and says what is missing."""
    try:
        load(kind)
    except MissingError as error:
        pytest.skip(str(error))
