"""`guardctl demo`: each historic bug on the real engine, without the guard and with it.

`stand` starts engine and guard as processes; `client` talks to the engine as its tenants do; `scenarios` knows
what to send so that a fault bites; `run` does it all and says what came of it.
"""
