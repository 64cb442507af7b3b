"""Where records come in: `guard.receive.otlp` reads OTLP in each of its encodings, for replay and live
alike; `guard.receive.grpc` is the OTLP/gRPC server in front of it.
"""
