"""What is built from the tree: a wheel that needs no compiler where it is installed, and an sdist that has it all."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CASE = ROOT / "tests" / "data" / "cases" / "overlong-rejected-prefill.jsonl"
HEADERS = {f"guard/native/include/kvguard/{path.name}" for path in (ROOT / "guard/native/include/kvguard").iterdir()}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make` builds, so that what it has compiled is taken as it is."""
    to = tmp_path_factory.mktemp("wheel")
    how = ("--no-deps", "--no-build-isolation")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", *how, "-w", to, ROOT, cwd=to)
    (built,) = to.glob("kvguard-*.whl")
    return built


@pytest.mark.slow
def test_a_wheel_has_the_core_its_types_and_headers_and_not_its_sources(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    native = {name for name in names if name.startswith("guard/native/")}
    cores = {name for name in native if name.endswith(".so")}
    assert cores == {"guard/native/_core" + sysconfig.get_config_var("EXT_SUFFIX")}
    assert native >= HEADERS | {"guard/native/_core.pyi"}
    assert "guard/py.typed" in names
    assert not any(name.endswith((".cpp", ".hpp")) or name.startswith("tests/") for name in names)


@pytest.mark.slow
def test_a_wheel_runs_where_there_is_no_compiler(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    inside = tmp_path / "venv" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # What kvguard depends on is taken from here; the tree's own kvguard is not, since a .pth file is not read twice.
    ours = [path for path in sys.path if path.endswith("-packages")]
    inside.joinpath("dependencies.pth").write_text("\n".join(ours))
    run(sys.executable, "-m", "pip", "-q", "--python", tmp_path / "venv/bin/python", "install", "--no-deps",
        "--disable-pip-version-check", "--ignore-installed", wheel, cwd=tmp_path)  # fmt: skip
    bin_ = tmp_path / "venv" / "bin"
    where = run(bin_ / "python", "-c", "import guard.native._core as c; print(c.__file__)", cwd=tmp_path, PATH="")
    assert where.startswith(str(inside))
    assert "kvguard" in run(bin_ / "guardctl", "version", cwd=tmp_path, PATH="")
    assert "tainted-response" in run(bin_ / "guardctl", "replay", CASE, cwd=tmp_path, PATH="")


def test_an_sdist_has_what_a_build_needs(tmp_path: Path) -> None:
    build = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
    name = run(sys.executable, "-c", build, tmp_path, cwd=ROOT).split()[-1]
    with tarfile.open(tmp_path / name) as archive:
        names = {member.partition("/")[2] for member in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "guard" / "native" / "src").rglob("*.[ch]pp")}
    assert names >= sources | HEADERS | {"CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"}
    assert not any(name.endswith(".so") or name.startswith((".ci", ".venv", "build/")) for name in names)
