"""The ledger: a deterministic state machine that turns records into findings.

This is the readable specification of the guard. `ledger` drives it; `streams` puts each stream's records in
order; `world` holds the tables; the rules stand in `lifecycle` (pools, requests, restarts), `ownership`
(alloc, share, free), `access` (write, read, respond), `moves` (transfers) and `late` (writers that come too
late); `taint` is the graph of labels that follows the bytes.
"""

from guard.ledger.ledger import Ledger
from guard.ledger.requests import Request
from guard.ledger.world import LedgerSettings

__all__ = ["Ledger", "LedgerSettings", "Request"]
