"""Measurements, each a module with a `main`; `python -m bench` runs them all, `python -m bench NAME` one.

Figures are medians of alternating rounds in one run, and ratios of figures from that same run: the machine's own
speed drifts. Those that were recorded stand in RESULTS.md, with the command that gave them. ``--quick`` makes every
part as small as it can be: it shows that a part runs, and its figures mean nothing.
"""

import os

QUICK = os.environ.get("KVG_BENCH_QUICK") == "1"
"""Whether only to see that it runs."""
