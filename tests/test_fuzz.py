"""The fuzz targets on their corpora: what once broke the native core stays mended. `make fuzz` looks for more."""

from __future__ import annotations

import subprocess

import fuzzing
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    fuzzing.build()


@pytest.mark.parametrize("target", fuzzing.TARGETS)
def test_the_corpus(target: str) -> None:
    done = subprocess.run(
        fuzzing.command(target, None), cwd=fuzzing.BUILT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-8000:]
    assert list((fuzzing.CORPUS / target).iterdir())


@pytest.mark.parametrize("target", fuzzing.TARGETS)
def test_the_first_files_are_what_they_are_made_of(target: str) -> None:
    for of, name, data in fuzzing.seeds():
        if of == target:
            assert (fuzzing.CORPUS / target / name).read_bytes() == data, "python tests/fuzzing.py --seed"
