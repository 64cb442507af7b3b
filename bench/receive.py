"""OTLP in, over HTTP and gRPC: spans a second on one core, beside rotel's receivers (blackhole exporter).

The server runs on one core and the sender on another; both servers are sent the same messages by the same sender in
the same run. `decoded` ends at a sink that counts, `verdict` is a whole guardd, timed until the watermark of the last
record is on its board. Where there is one core only, or others use the machine, the rate for a second of the server's
CPU time is the one to look at.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import grpc
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from rotel_process import rotel  # the tests' way to run it

from guard.act.board import BoardReader
from guard.receive.grpc import SERVICE

SPANS = 512
MESSAGES = 64
"""Different ones; together they are one stream."""
SECONDS = float(os.environ.get("BENCH_SECONDS", "4"))
STREAMS = int(os.environ.get("BENCH_STREAMS", "40"))
_TAG = "t0000000"
"""In the ids of streams, pools and requests, to be replaced in a message."""
LANES, DEPTH = 4, 4
"""Connections, and messages under way on each. A stream stays on its connection, as an emitter's does."""
_CORES = sorted(os.sched_getaffinity(0))
SERVER, SENDER = _CORES[0], _CORES[-1]


# Messages.


def _life(n: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of one request that does no wrong."""
    pages = f"{n % 400 * 8}-{n % 400 * 8 + 7}"
    yield "kv.admit", {"kv.tokens": 120, "kv.max_tokens": 16}
    yield "kv.alloc", {"kv.pages": pages}
    for tokens in (120, 121):
        yield "kv.write", {"kv.pages": pages, "kv.tokens": tokens}
        yield "kv.read", {"kv.pages": pages, "kv.tokens": tokens}
    yield "kv.free", {"kv.pages": pages}
    yield "kv.request.end", {"kv.outcome": "finished"}


def _spans() -> Iterator[tuple[str, dict[str, Any]]]:
    pool = {"kv.pool.pages": 4096, "kv.page.tokens": 16, "kv.page.bytes": 32768, "kv.role": "decode"}
    yield "kv.pool", pool | {"kv.context.limit": 16384}
    for n in itertools.count():
        who = {"kv.request.id": f"chatcmpl-{_TAG}{n:016x}", "kv.tenant.id": f"tenant-{n % 50:08x}"}
        for name, attributes in _life(n):
            yield name, who | {"kv.pool.id": f"decode-{_TAG}"} | attributes


def messages() -> list[bytes]:
    """One stream: `MESSAGES` of `SPANS` spans of ten attributes, as an SDK's exporter writes them."""
    made = []
    spans = _spans()
    for index in range(MESSAGES):
        message = ExportTraceServiceRequest()
        resource = message.resource_spans.add()
        name = resource.resource.attributes.add(key="service.name")
        name.value.string_value = "engine"
        scope = resource.scope_spans.add()
        scope.scope.name = "kv"
        for offset in range(SPANS):
            seq = index * SPANS + offset
            name, attributes = next(spans)
            header = {"kv.stream.id": f"decode-{_TAG}", "kv.stream.epoch": 1, "kv.seq": seq}
            attributes = header | attributes
            for filler in ("engine.step", "engine.batch", "engine.slot", "engine.rank")[: max(0, 10 - len(attributes))]:
                attributes[filler] = seq % 1000
            span = scope.spans.add(
                name=name, trace_id=seq.to_bytes(16, "big"), span_id=(seq + 1).to_bytes(8, "big"), kind=1,
                parent_span_id=b"\x01" * 8, start_time_unix_nano=time.time_ns(), end_time_unix_nano=time.time_ns(),
            )  # fmt: skip
            for key, value in attributes.items():
                attribute = span.attributes.add(key=key)
                if isinstance(value, int):
                    attribute.value.int_value = value
                else:
                    attribute.value.string_value = value
        made.append(bytes(message.SerializeToString()))
    return made


def streams(first: list[bytes], lane: int) -> Iterator[bytes]:
    """A lane's share of `STREAMS` streams: the messages again and again, each time with ids of its own."""
    for number in range(lane, STREAMS, LANES):
        tag = _tag(number)
        for message in first:
            yield message.replace(_TAG.encode(), tag.encode())


def _tag(number: int) -> str:
    return f"t{number:07}"


# Senders.


class Source:
    """Hands out messages by lane, until there are no more or the time is over."""

    def __init__(self, lanes: list[Iterator[bytes]], seconds: float | None = None) -> None:
        self._lanes = lanes
        self._again: list[deque[bytes]] = [deque() for _ in lanes]
        self._end = None if seconds is None else time.monotonic() + seconds
        self._lock = threading.Lock()
        self.taken = 0
        self.refused = 0

    def next(self, lane: int) -> bytes | None:
        if self._end is not None and time.monotonic() >= self._end:
            return None
        again = self._again[lane]
        return again.popleft() if again else next(self._lanes[lane], None)

    def took(self) -> None:
        with self._lock:
            self.taken += 1

    def refuse(self, message: bytes, lane: int) -> None:
        with self._lock:
            self.refused += 1
        self._again[lane].append(message)
        time.sleep(0.001)


def send_http(address: str, source: Source, lane: int) -> None:
    host, _, port = address.rpartition(":")
    waiting: deque[bytes] = deque()
    with socket.create_connection((host, int(port))) as raw, raw.makefile("rb") as answers:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (message := source.next(lane)) is not None or waiting:
            if message is not None:
                head = (
                    b"POST /v1/traces HTTP/1.1\r\nhost: bench\r\ncontent-type: application/x-protobuf\r\n"
                    b"content-length: %d\r\n\r\n" % len(message)
                )
                waiting.append(message)
                _send_all(raw, head, message)
            if message is None or len(waiting) >= DEPTH:
                _answer(answers, waiting.popleft(), source, lane)


def _send_all(raw: socket.socket, head: bytes, message: bytes) -> None:
    sent = raw.sendmsg([head, message])
    if sent < len(head):
        raw.sendall(head[sent:])
        sent = len(head)
    raw.sendall(memoryview(message)[sent - len(head) :])


def _answer(answers: Any, message: bytes, source: Source, lane: int) -> None:
    status, length = answers.readline().split()[1], 0
    while (line := answers.readline()) not in (b"\r\n", b""):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    answers.read(length)
    if status == b"200":
        source.took()
    elif status == b"503":
        source.refuse(message, lane)
    else:
        raise RuntimeError(f"the server answered {status!r}")


def send_grpc(address: str, source: Source, lane: int) -> None:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    waiting: deque[tuple[Any, bytes]] = deque()
    with grpc.insecure_channel(address, options) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Export")
        while (message := source.next(lane)) is not None or waiting:
            if message is not None:
                waiting.append((call.future(message, timeout=60), message))
            if message is None or len(waiting) >= DEPTH:
                future, sent = waiting.popleft()
                error = future.exception()
                if error is None:
                    source.took()
                elif error.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
                    source.refuse(sent, lane)
                else:
                    raise error


SENDERS = {"http": send_http, "grpc": send_grpc}


# Servers.


class Server(NamedTuple):
    """A process that takes OTLP."""

    address: str
    pid: int
    board: str = ""


@contextmanager
def counting(protocol: str) -> Iterator[Server]:
    """The receiver, before a sink that counts."""
    code = f"from bench.receive import serve; serve({protocol!r})"
    command = ["taskset", "-c", str(SERVER), sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Server(process.stdout.readline().strip(), process.pid)
        process.communicate()


def serve(protocol: str) -> None:
    """The body of that process."""
    from guard.counters import ReceiverCounts
    from guard.native._core import Rows
    from guard.receive.address import Address
    from guard.receive.grpc import GrpcReceiver
    from guard.receive.http import HttpReceiver
    from guard.receive.intake import Intake

    class Count:
        def full(self) -> bool:
            return False

        def put(self, rows: Rows, received_ns: int) -> bool:
            return True

    sys.setswitchinterval(0.0005)
    kind = HttpReceiver if protocol == "http" else GrpcReceiver
    receiver = kind(Address.parse("127.0.0.1:0"), Intake(Count(), ReceiverCounts()))
    print(receiver.start(), flush=True)
    sys.stdin.read()
    receiver.stop(0)


@contextmanager
def guarding(protocol: str) -> Iterator[Server]:
    """A whole guard."""
    with tempfile.TemporaryDirectory() as directory:
        other = "otlp_grpc" if protocol == "http" else "otlp_http"
        config = {
            "listen": {f"otlp_{protocol}": "127.0.0.1:0", other: None, "http": "127.0.0.1:0"},
            "board": {"path": f"{directory}/board"},
            "incidents": {"path": f"{directory}/incidents.db"},
            # What was refused and comes again must not be given up meanwhile.
            "ledger": {"reorder_window_ms": 30_000},
        }
        (Path(directory) / "guard.yaml").write_text(yaml.safe_dump(config))
        command = ["taskset", "-c", str(SERVER), sys.executable, "-m", "guard.daemon", "--config"]
        with (
            open(f"{directory}/log", "wb") as log,
            subprocess.Popen([*command, f"{directory}/guard.yaml"], stdout=subprocess.PIPE, stderr=log) as process,
        ):
            assert process.stdout is not None
            fields = dict(field.split("=", 1) for field in process.stdout.readline().decode().split()[2:])
            yield Server(fields[f"otlp_{protocol}"], process.pid, f"{directory}/board")
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        said = (Path(directory) / "log").read_text()
        if said:
            raise RuntimeError(f"the guard had something to say, of records that do no wrong: {said[:500]}")


@contextmanager
def rotel_blackhole(protocol: str) -> Iterator[Server]:
    """rotel, which decodes and throws away."""
    pinned = ("taskset", "-c", str(SERVER))
    with (
        tempfile.TemporaryDirectory() as directory,
        rotel(Path(directory), "--exporter", "blackhole", prefix=pinned) as collector,
    ):
        yield Server(collector.http if protocol == "http" else collector.grpc, collector.process.pid)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# Measuring.


class Rate(NamedTuple):
    """What came of one run."""

    a_second: float
    a_cpu_second: float
    refused: int


def measure(server: Server, protocol: str, source: Source, judged: bool = False) -> Rate:
    """Sends all that the source has, and waits until it is judged if it will be."""
    started, used = time.perf_counter(), cpu_seconds(server.pid)
    with ThreadPoolExecutor(LANES) as pool:
        for sent in [pool.submit(SENDERS[protocol], server.address, source, lane) for lane in range(LANES)]:
            sent.result()
    if judged:
        board, last = BoardReader.open(server.board), MESSAGES * SPANS - 1
        for number in range(STREAMS):
            while board.watermark(f"decode-{_tag(number)}", 1) < last:
                time.sleep(0.001)
                if time.perf_counter() - started > 600:
                    raise TimeoutError("the last record was not judged")
    elapsed, cpu = time.perf_counter() - started, cpu_seconds(server.pid) - used
    spans = source.taken * SPANS
    return Rate(spans / elapsed, spans / max(cpu, 0.01), source.refused)


def _decoded(protocol: str, serving: Any, given: list[bytes]) -> Rate:
    with serving(protocol) as server:
        for seconds in (SECONDS / 4, SECONDS):  # the first to warm up
            rate = measure(server, protocol, Source([itertools.cycle(given) for _ in range(LANES)], seconds))
        return rate


def _judged(protocol: str, given: list[bytes]) -> Rate:
    with guarding(protocol) as server:
        return measure(server, protocol, Source([streams(given, lane) for lane in range(LANES)]), judged=True)


def main() -> int:
    """Prints spans a second by protocol and server."""
    os.sched_setaffinity(0, {SENDER})
    given = messages()
    size = sum(map(len, given)) / len(given)
    print(f"  messages of {SPANS} spans, {size / SPANS:.0f} bytes a span; server on core {SERVER}, sender on {SENDER}")
    if SERVER == SENDER:
        print("  there is one core: server and sender share it")
    for protocol in ("http", "grpc"):
        ours = _decoded(protocol, counting, given)
        theirs = _decoded(protocol, rotel_blackhole, given)
        judged = _judged(protocol, given)
        for name, rate in (("decoded", ours), ("rotel", theirs), ("verdict", judged)):
            print(
                f"  {protocol} {name:8} {rate.a_second / 1e6:6.2f} M spans/s, "
                f"{rate.a_cpu_second / 1e6:6.2f} M a second of CPU; {rate.refused} messages were sent again"
            )
        print(
            f"  {protocol} against rotel: decoded {ours.a_second / theirs.a_second:.2f} times, "
            f"verdict {judged.a_second / theirs.a_second:.2f} times"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
