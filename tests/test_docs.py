from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from documents import DOCUMENTS, ROOT, Block, blocks, code_spans, links, prose, text_of
from pydantic import BaseModel

import guard
from engine.config import EngineConfig
from engine.faults import Fault
from engine.resolve import read
from engine.supervisor import EXIT_CONFIG, EXIT_FAILED, EXIT_IN_USE
from guard import daemon
from guard.cli import COMMANDS
from guard.cli import main as guardctl
from guard.config import Config, load
from guard.findings import Kind
from guard.policy import DEFAULT_ACTIONS

DEPLOY = ROOT / "deploy"
_COMMAND_S = 120


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z.-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commented_in(text: str) -> str:
    """A sample configuration with its ``#name:`` lines made fields."""
    return re.sub(r"^#(?=\w|  )", "", text, flags=re.MULTILINE)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Bench:
    """The repository as a reader sees it, save that paths and ports are a test's own and the model is the tiny one."""

    def __init__(self, folder: Path) -> None:
        self._replacements = {
            "/run/kvguard": f"{folder}/r",
            "/dev/shm/kvguard": f"{folder}/shm",
            "/var/lib/kvguard": f"{folder}/lib",
            "127.0.0.1:8000": f"127.0.0.1:{(engine := free_port())}",
            "port: 8000": f"port: {engine}",
            "127.0.0.1:9464": f"127.0.0.1:{free_port()}",
            "smollm2": "tiny",
        }
        self.tree = folder / "tree"
        self.tree.mkdir()
        for entry in ROOT.iterdir():
            if entry.name != "deploy":
                (self.tree / entry.name).symlink_to(entry)
        (self.tree / "deploy").mkdir()
        for sample in DEPLOY.glob("*.yaml"):
            (self.tree / "deploy" / sample.name).write_text(self.adapt(sample.read_text()))
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVGUARD_")}
        # The nested pytest must not write over what this one remembers.
        self._environment = {**kept, "PATH": path, "TERM": "dumb", "PYTEST_ADDOPTS": "-p no:cacheprovider"}
        # Nothing in the documents uses it, and another guard on this machine may have its port.
        self._environment["KVGUARD_LISTEN__OTLP_HTTP"] = "127.0.0.1:0"

    def adapt(self, text: str) -> str:
        for theirs, ours in self._replacements.items():
            text = text.replace(theirs, ours)
        return text

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.tree,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )

    @contextmanager
    def serving(self, command: str) -> Iterator[None]:
        """Runs a command that serves, from when it says that it is ready."""
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.tree,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                if "ready" not in line:
                    process.wait(30)
                    errors.seek(0)
                    raise AssertionError(f"{command}: {errors.read()}")
                yield
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
                assert process.stdout is not None
                process.stdout.close()

    def incident(self) -> str:
        """The newest incident's id."""
        found = self.run("guardctl", "incidents", "--config", "deploy/guard.yaml", "list", "-o", "json")
        match = re.search(r'"id": "([^"]+)"', found.stdout)
        assert match, found.stdout + found.stderr
        return match[1]


@pytest.fixture
def bench() -> Iterator[Bench]:
    # Not pytest's tmp_path: the path of a socket has to be short.
    folder = Path(tempfile.mkdtemp(prefix="kvg-"))
    yield Bench(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_the_blocks_say_happens(document: str, bench: Bench) -> None:
    said = ""
    with ExitStack() as stack:
        for block in blocks(document):
            if block.language == "text" and "exact" in block.marks:
                assert lines_of(said) == lines_of(block.text), block.where
            elif block.language in ("sh", "python"):
                said = run_block(block, bench, stack)
            elif block.language in ("yaml", "json"):
                assert yaml.safe_load(block.text), block.where


def run_block(block: Block, bench: Bench, stack: ExitStack) -> str:
    """Does what a reader does with the block; gives what it said."""
    text = bench.adapt(block.text)
    if "long" in block.marks:
        for command in block.commands():
            program, *words = command.split()
            assert program == "make", f"{block.where}: {command}: only a make target is too long to be run here"
            assert words, block.where
            assert set(words) <= makefile_targets(), f"{block.where}: {command}: there is no such target"
        return ""
    if "serve" in block.marks:
        for command in block.commands():
            stack.enter_context(bench.serving(bench.adapt(command)))
        return ""
    if re.search(r"\bcurl\b", text) and not shutil.which("curl"):
        return ""
    # An incident's id is another one each time.
    text = re.sub(r"\binc-[a-z2-7]{10}\b", lambda _: bench.incident(), text)
    if block.language == "python":
        done = bench.run(sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", text)
    else:
        done = bench.run("bash", "-euo", "pipefail", "-c", text)
    assert done.returncode == block.exit_status, f"{block.where}: {done.stdout}{done.stderr}"
    return done.stdout


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def test_the_readme_begins_with_the_two_commands_that_do_it_all() -> None:
    first, *_ = [block for block in blocks("README.md") if block.language == "sh"]
    assert first.commands() == ["make demo", "make test"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    for link in links(document):
        target, _, anchor = link.partition("#")
        if re.match(r"https?://|mailto:", target):
            continue
        path = (ROOT / document).parent / target if target else ROOT / document
        assert path.exists(), f"{document}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{document}: {link}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_and_targets_that_are_named_exist(document: str) -> None:
    tops = {entry.name for entry in ROOT.iterdir()}
    for span in code_spans(document):
        head, slash, _ = span.partition("/")
        if slash and head in tops and re.fullmatch(r"[\w./-]+", span):
            assert (ROOT / span).exists(), f"{document}: `{span}`"
        for target in re.findall(r"^make ([a-z.]+)$", span):
            assert target in makefile_targets(), f"{document}: `{span}`"


def command_options() -> set[str]:
    """Every long option of guardctl, guardd and the engine."""
    found: set[str] = set()

    def collect(command: click.Command) -> None:
        context = click.Context(command)
        for parameter in command.get_params(context):
            found.update(parameter.opts)
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                collect(inner)

    collect(guardctl)
    collect(daemon.main)
    helped = subprocess.run([sys.executable, "-m", "engine", "-h"], capture_output=True, text=True, check=True)
    return found | set(re.findall(r"--[a-z-]+", helped.stdout))


def test_options_that_are_named_exist() -> None:
    options = command_options()
    for document in DOCUMENTS:
        for span in code_spans(document):
            if span.split()[0] in ("pip", "ruff", "pytest", "git"):
                continue
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", span):
                assert option in options, f"{document}: `{span}`"


def config_fields() -> set[str]:
    """Every field of the guard's and the engine's configuration, as ``section.field``."""
    found: set[str] = set()

    def collect(name: str, kind: Any) -> None:
        found.add(name)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            for field, info in kind.model_fields.items():
                collect(f"{name}.{field}" if name else field, info.annotation)

    collect("", Config)
    defaults = EngineConfig()
    for field in EngineConfig.__struct_fields__:
        found.add(field)
        found.update(f"{field}.{inner}" for inner in getattr(getattr(defaults, field), "__struct_fields__", ()))
    return found


def test_fields_that_are_named_exist() -> None:
    fields = config_fields()
    sections = {field.partition(".")[0] for field in fields if "." in field}
    packages = {"guard", "engine", "hooks", "exporters"}
    for document in DOCUMENTS:
        for span in code_spans(document):
            name = span.partition(":")[0].partition("=")[0]
            if not re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", name):
                continue
            head = name.partition(".")[0]
            if head in sections and name not in fields:
                # `guard.ledger` is a room, not a field of the engine's section of that name.
                path = ROOT / name.replace(".", "/")
                assert head in packages, f"{document}: `{span}`"
                assert path.is_dir() or path.with_suffix(".py").is_file(), f"{document}: `{span}`"


def test_metrics_that_are_named_exist() -> None:
    source = (ROOT / "exporters" / "prometheus.py").read_text()
    for document in DOCUMENTS:
        for name in re.findall(r"\bkvguard_([a-z_]+)", text_of(document)):
            assert f'"{name.removesuffix("_total")}"' in source, f"{document}: kvguard_{name}"


def test_the_readme_names_every_command_and_every_exit_status() -> None:
    text = text_of("README.md")
    for command in COMMANDS:
        assert f"guardctl {command}" in text
    statuses = {
        "guardctl": {0, 1, 2},
        "guardd": {0, daemon.EXIT_CONFIG, daemon.EXIT_BIND, daemon.EXIT_FAILED},
        "python -m engine": {0, EXIT_FAILED, EXIT_CONFIG, EXIT_IN_USE},
    }
    for program, wanted in statuses.items():
        row = re.search(rf"^\| `{program}` \|(.*)$", text, re.MULTILINE)
        assert row, program
        assert {int(number) for number in re.findall(r"\b(\d+):", row[1])} == wanted, program


def test_the_demos_excerpt_names_what_there_is() -> None:
    (excerpt,) = [block.text for block in blocks("README.md") if block.text.startswith("FAULT")]
    rows = excerpt.splitlines()[2:]
    faults = [row.split()[0] for row in rows if row.split() and row.split()[0] in list(Fault)]
    assert len(faults) == len(set(faults)) > 2
    for word in re.findall(r"\b[a-z]+-[a-z-]+\b", "\n".join(row for row in rows if row.split()[0] in faults)):
        assert word in {*Fault, *Kind, *excerpt_words(excerpt)}, word


def excerpt_words(excerpt: str) -> set[str]:
    """Incident ids, which may look like kinds."""
    return set(re.findall(r"\binc-[a-z2-7]+\b", excerpt))


def test_kinds_that_are_listed_are_all_there_are() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|.*\| (\w+) \|$", text_of("README.md"), re.MULTILINE)
    assert dict(rows) == {kind.value: DEFAULT_ACTIONS[kind].value for kind in Kind}


def test_the_changelog_has_this_version() -> None:
    assert re.search(rf"^## {re.escape(guard.__version__)}\b", text_of("CHANGELOG.md"), re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_documents_are_plain_text(document: str) -> None:
    text = text_of(document)
    assert max(map(len, prose(document).splitlines()), default=0) < 1200
    assert not re.search("[\u2014\U0001f000-\U0001faff]", text), "no dashes where a full stop will do, no pictures"
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


@pytest.mark.parametrize("every_field", [False, True])
def test_the_samples_are_valid(every_field: bool, tmp_path: Path) -> None:
    for name in ("guard.yaml", "engine.yaml"):
        text = (DEPLOY / name).read_text()
        (tmp_path / name).write_text(commented_in(text) if every_field else text)
    guards = load(tmp_path / "guard.yaml", environ={})
    engines = read(tmp_path / "engine.yaml")
    assert engines.guard.endpoint == guards.listen.otlp_grpc
    assert engines.guard.board == guards.board.path
    assert engines.guard.wait_ms > (guards.ledger.reorder_window_ms or 0)
    if every_field:
        assert guards.engine.abort_url == f"http://{engines.host}:{engines.port}/abort_request"
        assert engines.guard.ring == guards.ring.path
        assert engines.tenants
        assert engines.admin_key
    else:
        assert not engines.tenants, "a sample with a key in it ends up in production"
        assert not engines.admin_key
        assert guards.mode == "monitor"


def test_the_engines_own_check_takes_its_sample() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engine", "--config", "deploy/engine.yaml", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "configuration: valid\n"
    assert "every request gets 401" in done.stderr
