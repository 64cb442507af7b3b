"""NIXL and Mooncake between two processes, and what is said where they are not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_house import without
from transports import need

from engine.transport.link import EXTRAS, Kind, MissingError, load

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("kind", EXTRAS)
def test_between_two_processes(kind: Kind) -> None:
    need(kind)
    program = Path(__file__).with_name("transport_pair.py")
    done = subprocess.run(
        [sys.executable, str(program), kind], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize("kind", EXTRAS)
def test_a_library_that_is_missing_is_named_with_its_extra(kind: str, tmp_path: Path) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text(f"transport: {kind}\nmodel: tiny\ndigest_key: '{'0' * 64}'\nrun_dir: {tmp_path}/run\n")
    arguments = ["--name", "prefill-0", "--role", "prefill", "--config", str(config)]
    done = without((kind,), f"from engine.worker import main\nraise SystemExit(main({arguments!r}))")
    assert done.returncode == 2, done.stderr
    assert f"transport {kind}: its library cannot be loaded" in done.stderr
    assert f"pip install 'kvguard[{kind}]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_mooncake_has_to_say_when_bytes_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(MissingError, match="MC_TCP_PROTO=1 is set"):
        load("mooncake")
