"""The C++ programs of ``bench/native``, built when they are needed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BUILT = ROOT / "build" / "bench"
_HERE, _CORE = ROOT / "bench" / "native", ROOT / "guard" / "native"
_INCLUDES = (_CORE / "include", _CORE / "src", _HERE)
NAMES = ("ledger", "spans", "writer")


def program(name: str) -> Path:
    """Builds one of `NAMES`, unless it is newer than all that it is made from."""
    core = [*(_CORE / "src").glob("records.cpp"), *(_CORE / "src").glob("utf8.cpp")]
    if name == "ledger":
        core += (_CORE / "src" / "ledger").glob("*.cpp")
    sources = [_HERE / f"{name}.cpp", _HERE / "trace.cpp", *sorted(core)]
    headers = [header for folder in _INCLUDES for header in folder.rglob("*.h*")]
    made = BUILT / name
    if not made.exists() or made.stat().st_mtime < max(p.stat().st_mtime for p in (*sources, *headers)):
        BUILT.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CXX", "g++")
        flags = ("-O3", "-DNDEBUG", "-std=c++20", *(f"-I{folder}" for folder in _INCLUDES))
        subprocess.run([compiler, *flags, *map(str, sources), "-o", str(made)], check=True)
    return made


def run(name: str, *arguments: str, **options: object) -> dict[str, Any]:
    """Runs one to its end; what it printed, as the object that it is.

    Raises:
        subprocess.CalledProcessError: It says that what it measured is not what was meant.
    """
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    done = subprocess.run([program(name), *arguments, *words], stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result
