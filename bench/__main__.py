"""`python -m bench [--quick] [NAME ...]`."""

from __future__ import annotations

import importlib
import os
import sys

NAMES = ("ledger", "emit", "receive", "latency", "sidecar", "engine", "digest", "transport", "gpu")


def main() -> int:
    names = [name for name in sys.argv[1:] if name != "--quick"] or list(NAMES)
    if "--quick" in sys.argv:
        os.environ["KVG_BENCH_QUICK"] = "1"
        importlib.reload(sys.modules["bench"])
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"bench: there is no {unknown[0]}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    failed = 0
    for name in names:
        print(f"== {name} ==", flush=True)
        failed |= importlib.import_module(f"bench.{name}").main() or 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
