"""Builds and runs the native core's fuzz targets (tests/fuzz): ``python tests/fuzzing.py --seconds 600 [TARGET...]``.

What a target is fed first is its corpus, tests/fuzz/corpus/TARGET. What breaks it is put there too, as crash-*, and
stays: `test_fuzz.py` feeds each file of the corpus to its target. ``--seed`` makes the corpus' first files anew.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "tests" / "fuzz"
CORPUS = SOURCES / "corpus"
CLANG = shutil.which("clang++")
BUILT = ROOT / "build" / ("fuzz-clang" if CLANG else "fuzz")
TARGETS = ("otlp", "records", "ring", "ledger", "digest")
CASES = ROOT / "tests" / "data" / "cases"


def tool(name: str) -> str:
    """The program, that of this environment before others."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is missing: pip install {name}")
    return found


def build() -> None:
    """Builds what is not built, with clang (and libFuzzer) where it is, else with the system's compiler."""
    configure = [tool("cmake"), "-S", str(SOURCES), "-B", str(BUILT), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", *([f"-DCMAKE_CXX_COMPILER={CLANG}"] if CLANG else [])]
    for command in (configure, [tool("cmake"), "--build", str(BUILT)]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-8000:]}{done.stderr[-2000:]}")


def command(target: str, seconds: int | None) -> list[str]:
    """Runs a target on its corpus, once, or as long as `seconds` with changes to it."""
    corpus = CORPUS / target
    corpus.mkdir(parents=True, exist_ok=True)
    program = str(BUILT / f"fuzz_{target}")
    if seconds is None:
        return [program, *sorted(map(str, corpus.iterdir()))]
    found = BUILT / "found" / target  # what libFuzzer adds, kept from run to run and out of the repository
    found.mkdir(parents=True, exist_ok=True)
    limits = [f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=2048", "-print_final_stats=1"]
    return [program, *limits, f"-artifact_prefix={corpus}/", "-max_len=16384", str(found), str(corpus)]


def seeds() -> Iterator[tuple[str, str, bytes]]:
    """(target, name, bytes) of the first files of each corpus: the cases, and a message made at random."""
    from google.protobuf import json_format
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from otlp_random import random_request, typical
    from otlp_wire import BROKEN, KEYS, pair, request, span, value

    from guard.native import _core
    from guard.records import KINDS

    for path in sorted(CASES.glob("*.jsonl")):
        message = ExportTraceServiceRequest()
        for line in path.read_text(encoding="utf-8").splitlines():
            message.MergeFrom(json_format.Parse(line, ExportTraceServiceRequest(), ignore_unknown_fields=True))
        data = message.SerializeToString()
        yield "otlp", path.stem, data
        rows = _core.decode_otlp(data).rows
        # A ring with these records: the header and first lane as they should be, see ring.cpp.
        lane = bytes([0, 5, 0, 60, 0, 1, 1, ord("s")])
        in_rows = b"".join(row + bytes(-len(row) % 64) for row in map(_core.encode, list(rows)[:20]))
        yield "ring", path.stem, b"\0\0" + lane + lane + b"\7" + in_rows
    rng = random.Random(1)
    fixed = {"kv.pages": "4-7", "kv.peer.pages": "9,3-5", "kv.digests": "ab,cd,ef,01", "kv.pool.pages": "64"}
    for name in KINDS:
        pairs = [pair(key, value(fixed.get(key) or typical(key, rng))) for key in KEYS]
        for record in _core.decode_otlp(request(span(name, 1, *pairs))).rows:
            yield "records", name.removeprefix("kv."), _core.encode(record)
    for number in range(8):
        yield "otlp", f"random-{number}", random_request(rng)
        yield "ledger", f"random-{number}", rng.randbytes(1500)
        yield "digest", f"random-{number}", random.Random(number).randbytes(6200 + 4096 * (number % 3) + 411 * number)
    yield "otlp", "broken", request(*BROKEN)


def write_seeds() -> None:
    for target, name, data in seeds():
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        (CORPUS / target / name).write_bytes(data)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600, help="how long each target runs")
    parser.add_argument("--seed", action="store_true", help="write the corpus' first files and stop")
    parser.add_argument("targets", nargs="*", help=", ".join(TARGETS))
    options = parser.parse_args(words)
    if options.seed:
        write_seeds()
        return 0
    build()
    if CLANG is None:
        print("clang++ is missing: changes are made blindly; libFuzzer finds more", file=sys.stderr)
    failed = []
    for target in options.targets or TARGETS:
        print(f"== {target}: {options.seconds} s ==", flush=True)
        log = BUILT / f"{target}.log"
        with log.open("w") as output:
            done = subprocess.run(
                command(target, options.seconds), cwd=BUILT, stdout=output, stderr=subprocess.STDOUT,
                timeout=options.seconds + 120, check=False,
            )  # fmt: skip
        lines = log.read_text(errors="replace").splitlines()
        print("\n".join(line for line in lines if line.startswith(("Done", "stat::number"))))
        if done.returncode != 0:
            failed.append(target)
            last = BUILT / "last-input"  # the driver's; libFuzzer has put the input into the corpus itself
            if CLANG is None and last.exists():
                shutil.move(last, CORPUS / target / f"crash-{hashlib.sha1(last.read_bytes()).hexdigest()}")
            print("\n".join(lines[-60:]))
    if failed:
        print(f"broken: {', '.join(failed)}; the input is in tests/fuzz/corpus/TARGET, crash-* or timeout-*")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
