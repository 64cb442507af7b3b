from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import ledger_rig
import pytest
import ring_rig
from engine_fixtures import RunningEngine, running_engine

# Before anything imports triton: kernels are tested in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def engine() -> Iterator[RunningEngine]:
    """One engine with the tiny model for all tests that leave it as they found it."""
    with running_engine() as started:
        yield started


@pytest.fixture
def start_engine() -> Iterator[Callable[..., RunningEngine]]:
    """Starts engines that are the test's own; arguments as for `engine_fixtures.running_engine`."""
    with ExitStack() as stack:

        def start(*options: str, **fields: Any) -> RunningEngine:
            context: AbstractContextManager[RunningEngine] = running_engine(*options, **fields)
            return stack.enter_context(context)

        yield start


@pytest.fixture
def ring_path() -> Iterator[str]:
    """Where a ring may be made, alone in its directory."""
    directory = tempfile.mkdtemp(prefix="kvg-ring-", dir="/dev/shm")
    yield f"{directory}/ring"
    shutil.rmtree(directory)


@pytest.fixture
def start_writer(ring_path: str) -> Iterator[ring_rig.Start]:
    """Starts processes that write into the ring, see `ring_rig`."""
    with ring_rig.writers(ring_path) as start:
        yield start


@pytest.fixture(params=ledger_rig.LEDGERS)
def each_ledger(request: pytest.FixtureRequest) -> Iterator[str]:
    """See `ledger_rig.both_ledgers`."""
    with ledger_rig.ledgers_are(request.param):
        yield request.param
