"""What a record costs the engine's thread: ``python bench/emit.py``.

First as spans: the records go through the SDK and over a Unix socket to a gRPC receiver in this process, which
shares the interpreter with the emitter, so the figures hold the receiver's share of it too. ``off`` is an emitter
that is off. ``paced`` emits in bursts of 16 with a pause between them, as the steps of a decode worker do; ``flat
out`` never pauses, and a thread that waits for the interpreter makes its tail, not its median.

Then through the ring, which a process of its own reads, as the guard does. One figure a record holds two readings
of the clock, as above; ``ring, batches`` is the mean of a record in each batch of 1,000, the clock read twice a batch.
``pack_into`` is the floor for Python without native code, measured between those batches: a row of numbers and the
time put into shared memory by `struct`, with no ids, no pages and nobody told.
"""

from __future__ import annotations

import mmap
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from bench import QUICK
from guard.records import PageSet, Read
from hooks.emit import NULL, Emitter, configure, context_from_traceparent

RECORDS = 2_000 if QUICK else 20_000
RING_BAR_US = 0.4
BURST = 16
RECORD = Read(request="req-0123456789", tenant="tenant-a", pages=PageSet.parse("12-15,40,7"), tokens=77)
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Receiver(TraceServiceServicer):
    """Counts what arrives, and how late the last span of each request is."""

    def __init__(self) -> None:
        self.spans = 0
        self.lateness_ns: list[int] = []

    def Export(self, request: ExportTraceServiceRequest, _context: grpc.ServicerContext) -> ExportTraceServiceResponse:
        spans = request.resource_spans[0].scope_spans[0].spans
        self.spans += len(spans)
        self.lateness_ns.append(time.time_ns() - spans[-1].start_time_unix_nano)
        return ExportTraceServiceResponse()


def measure(emitter: Emitter, pause_s: float) -> list[float]:
    """Microseconds in `Emitter.emit`, one figure a record."""
    context = context_from_traceparent(TRACEPARENT)
    clock = time.perf_counter_ns
    spent = []
    for done in range(RECORDS):
        start = clock()
        emitter.emit(RECORD, context)
        spent.append((clock() - start) / 1000)
        if pause_s and done % BURST == BURST - 1:
            time.sleep(pause_s)
    return spent


def show(name: str, spent: list[float], more: str = "") -> None:
    p50, p99, mean = statistics.median(spent), statistics.quantiles(spent, n=100)[98], statistics.fmean(spent)
    print(f"{name:14s} p50 {p50:6.2f}  p99 {p99:7.2f}  mean {mean:6.2f} µs/record  {more}")


READER = """
import sys
from guard.native._core import RingReader
reader = RingReader(sys.argv[1])
print("ready", flush=True)
count = 0
while True:
    taken = len(reader.take())
    count += taken
    if not taken and reader.lanes()[0].pid == 0 and not len(reader.take()):
        break
    reader.wait(0.1)
print(count)
"""
BATCH, BATCHES = 1000, 20 if QUICK else 200
_ROW = struct.Struct("=IBBHQQQQQ16x")
_floor: list[float] = []


def pack_batch(memory: mmap.mmap) -> None:
    """One batch of rows by `struct`, into a ring of as many."""
    pack, now, size = _ROW.pack_into, time.time_ns, _ROW.size
    start = time.perf_counter_ns()
    for number in range(BATCH):
        pack(memory, number * size, size, 1, 8, 0, now(), 1, number, 77, 0)
    _floor.append((time.perf_counter_ns() - start) / BATCH / 1000)


def batches(emitter: Emitter) -> list[float]:
    """Microseconds a record, one figure a batch; pauses between batches, so that the reader keeps up."""
    context = context_from_traceparent(TRACEPARENT)
    memory = mmap.mmap(-1, BATCH * _ROW.size)
    spent = []
    for _ in range(BATCHES):
        pack_batch(memory)
        start = time.perf_counter_ns()
        for _ in range(BATCH):
            emitter.emit(RECORD, context)
        spent.append((time.perf_counter_ns() - start) / BATCH / 1000)
        time.sleep(0.001)
    return spent


def ring(spans_us: float) -> bool:
    """The ring's part; returns whether every record arrived.

    Args:
        spans_us: What a record costs as a span, median.
    """
    whole = True
    rung = 0.0
    for name, run, count in (
        ("ring, paced", lambda emitter: measure(emitter, 0.002), RECORDS),
        ("ring, flat out", lambda emitter: measure(emitter, 0.0), RECORDS),
        ("ring, batches", batches, BATCH * BATCHES),
    ):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            path = f"{folder}/ring"
            # The first lane has to be taken before the reader sees it free.
            emitter, _ = configure("bench-0", endpoint=None, ring=path)
            reader = subprocess.Popen([sys.executable, "-c", READER, path], stdout=subprocess.PIPE, text=True)
            assert reader.stdout is not None
            reader.stdout.readline()
            spent = run(emitter)
            counts = emitter.counts
            del emitter
            arrived = int(reader.communicate(timeout=60)[0])
        show(name, spent, f"{arrived} of {count} arrived, {counts['records_dropped']} found no room")
        whole = whole and arrived == count
        rung = statistics.median(spent)
    show("pack_into", _floor)
    floor = statistics.median(_floor)
    print(
        f"  a record through the ring {rung:.3f} µs (bar {RING_BAR_US}); spans / ring {spans_us / rung:.1f}, "
        f"ring / pack_into {rung / floor:.2f}"
    )
    return whole


def main() -> int:
    show("off", measure(NULL, 0.0))
    whole = True
    for name, pause_s in (("paced", 0.002), ("flat out", 0.0)):
        receiver = Receiver()
        with tempfile.TemporaryDirectory() as folder:
            endpoint = f"unix:{Path(folder) / 'guard.sock'}"
            server = grpc.server(ThreadPoolExecutor(2))
            add_TraceServiceServicer_to_server(receiver, server)
            server.add_insecure_port(endpoint)
            server.start()
            emitter, provider = configure("bench-0", endpoint=endpoint)
            assert provider is not None
            spent = measure(emitter, pause_s)
            provider.force_flush(60_000)
            provider.shutdown()
            server.stop(None).wait()
        late = statistics.median(receiver.lateness_ns) / 1000
        show(
            name,
            spent,
            f"{receiver.spans} of {RECORDS} arrived, the last of a request {late:.0f} µs late (p50)",
        )
        whole = whole and receiver.spans == RECORDS
    whole = ring(statistics.median(spent)) and whole
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
