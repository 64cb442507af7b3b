"""`python -m bench [NAME ...]`."""

from __future__ import annotations

import importlib
import sys

NAMES = ("engine", "ledger", "emit", "receive")


def main() -> int:
    names = sys.argv[1:] or list(NAMES)
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
