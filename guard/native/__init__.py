"""The native core (C++20): record rows, OTLP decoder, ring, ledger, verdict board, journal.

`_core` is the extension module; its sources are in ``src/``, one file a part, and ``include/kvguard/`` holds the
plain C headers of the two formats that others may write: the record row and the ring. The ledger here yields the
findings of `guard.ledger`, which is its specification, to the field.
"""
