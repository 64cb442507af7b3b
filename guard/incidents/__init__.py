"""What the guard remembers: one incident a request that findings were about, with the findings, the records
that led to them and how long the answer took, in SQLite (`guard.incidents.store`). Ids and counts, never
contents.
"""
