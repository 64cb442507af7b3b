"""The sidecar: it reads records of KV-cache operations, keeps the lineage of every page and request,
and stops a request whose lineage crosses tenants before its next byte leaves.

`guard.records` is the ground floor: the convention that engines, hooks and the guard share.
`guard.ledger` turns records into `guard.findings`; `guard.policy` says what is to be done about each;
`guard.act` does it; `guard.incidents` remembers it. `guard.daemon` runs all of that beside an engine and
`guard.cli` is `guardctl`. Nothing here imports `engine`, `hooks` or torch.
"""

__version__ = "0.1.0"
