"""Where records come in over OTLP.

`guard.receive.grpc` and `guard.receive.http` (with `connection`, `head` and `body`) are the servers, `receivers` starts
those that the configuration asks for, `address` and `access` say where and from whom. A message goes through `intake`,
which decodes it (`decode`), puts its records into the `sink` and what is no record into the forwarder (`forward`,
`target`); `answer` is what the sender is told. `otlp` reads OTLP in Python, for replay and for JSON.
"""
