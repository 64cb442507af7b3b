"""The real engine with confused workers: ``python confused_engine.py --config FILE``."""

from __future__ import annotations

import sys
from pathlib import Path

from engine.__main__ import main

if __name__ == "__main__":
    sys.exit(main(worker=(str(Path(__file__).with_name("confused_worker.py")),)))
