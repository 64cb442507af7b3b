"""``python -m engine``: starts the engine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.config import ConfigError
from engine.faults import SEEN_IN, Fault
from engine.resolve import read, warnings
from engine.supervisor import EXIT_CONFIG, EXIT_IN_USE, WORKER, InUseError, Supervisor


def main(arguments: list[str] | None = None, worker: Sequence[str] = WORKER) -> int:
    """The command line.

    Args:
        arguments: Its words; None: the process's own.
        worker: What the interpreter runs as a worker.

    Returns:
        0 stopped when told to; 1 the processes do not stay up; 2 the configuration cannot be used; 3 the port or
        the run directory is in use.
    """
    parser = argparse.ArgumentParser(
        prog="python -m engine",
        description="A reference LLM engine that splits prefill from decode.",
        epilog="faults:\n" + "\n".join(f"  {fault.value:24}{SEEN_IN[fault]}" for fault in Fault),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML; without it every field has its default")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change a field of the configuration, for example decode.pages=512 or tenants.KEY=NAME; repeatable",
    )
    parser.add_argument(
        "--fault", action="append", default=[], metavar="NAME", help="switch on a historic bug; repeatable"
    )
    parser.add_argument("--check", action="store_true", help="say whether the configuration is valid, and stop")
    options = parser.parse_args(arguments)
    try:
        config = read(options.config, options.set, options.fault)
        if options.check:
            for line in warnings(config):
                print(f"engine: WARNING: {line}", file=sys.stderr)
            print("configuration: valid")
            return 0
        return Supervisor(config, worker).run()
    except ConfigError as error:
        print(f"engine: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except InUseError as error:
        print(f"engine: {error}", file=sys.stderr)
        return EXIT_IN_USE


if __name__ == "__main__":
    sys.exit(main())
