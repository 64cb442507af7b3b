"""Measurements, each a module with a `main`; `python -m bench` runs them all, `python -m bench NAME` one.

Figures are medians of alternating rounds in one run, and ratios of figures from that same run: the machine's own
speed drifts. Those that were recorded stand in RESULTS.md, with the command that gave them.
"""
