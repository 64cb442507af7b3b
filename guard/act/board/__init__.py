"""The verdict board: what the guard has decided, in shared memory, for engines to read before each byte.

One process writes (the guard's ledger thread, by way of the native core's ``BoardWriter``), any number read
(`BoardReader`) without locks and without system calls; a look-up costs about two microseconds in Python and some
nanoseconds in C. The bytes are described in `guard.act.board.layout`. Engines import this package, so it needs nothing
but the standard library.
"""

from guard.act.board.layout import BoardError, Verdict
from guard.act.board.reader import BoardReader

__all__ = ["BoardError", "BoardReader", "Verdict"]
