"""A reference engine that splits prefill from decode, small enough to read in a sitting.

It exists so that the guard can be tried on the real thing: real processes, a real model, a paged KV pool,
KV transfers between processes, and the historic bugs of such engines behind `--fault`. It knows of the
guard only `hooks.emit`, through which it says what it does, and the verdict board, which it reads.
"""
