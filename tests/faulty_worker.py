"""The worker's real entry point with the model of `random_worker` and, in prefill, the wires of `wire_faults`."""

from __future__ import annotations

import sys
from pathlib import Path

from random_worker import random_model
from wire_faults import FaultyLink

import engine.model
import engine.transport.sender

if __name__ == "__main__":
    engine.model.load = random_model  # type: ignore[assignment]
    run_dir = Path(sys.argv[sys.argv.index("--config") + 1]).parent
    connect = engine.transport.sender.connect
    engine.transport.sender.connect = lambda kind, address, segment, digester: FaultyLink(
        connect(kind, address, segment, digester), segment, run_dir
    )
    from engine.worker import leave, main

    leave(main())
