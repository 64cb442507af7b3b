from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from guard.receive.address import Address, BindError
from guard.receive.grpc import SERVICE, GrpcReceiver
from guard.receive.inbox import Inbox
from guard.receive.otlp import Batch
from guard.records import Free, PageSet, RecordError
from hooks.emit import configure


def free(seq: int, pages: str = "0-3", name: str = "kv.free") -> dict[str, Any]:
    return {
        "name": name,
        "kv.stream.id": "decode-0",
        "kv.stream.epoch": 1,
        "kv.seq": seq,
        "kv.request.id": "r1",
        "kv.tenant.id": "tenant-a",
        "kv.pages": pages,
    }


def request(*spans: dict[str, Any]) -> bytes:
    message = ExportTraceServiceRequest()
    scope = message.resource_spans.add().scope_spans.add()
    for fields in spans:
        span = scope.spans.add(name=fields["name"], start_time_unix_nano=1_790_000_000_000_000_000)
        for key, value in fields.items():
            if key != "name":
                attribute = span.attributes.add(key=key)
                if isinstance(value, int):
                    attribute.value.int_value = value
                else:
                    attribute.value.string_value = value
    return bytes(message.SerializeToString())


@contextmanager
def receiving(address: str, inbox: Inbox, **options: Any) -> Iterator[Callable[..., ExportTraceServiceResponse]]:
    receiver = GrpcReceiver(Address.parse(address), inbox, **options)
    bound = receiver.start()
    channel = grpc.insecure_channel(str(bound))
    call = channel.unary_unary(f"/{SERVICE}/Export", response_deserializer=ExportTraceServiceResponse.FromString)
    try:
        yield lambda data, **kwargs: call(data, timeout=10, **kwargs)
    finally:
        channel.close()
        receiver.stop(0)


def test_records_are_queued_before_the_answer(tmp_path: Path) -> None:
    inbox = Inbox(100)
    batches: list[Batch] = []
    with receiving(f"unix:{tmp_path}/sock", inbox, on_batch=batches.append) as export:
        response = export(request(free(0), free(1, name="chat"), free(2)))
        assert not response.HasField("partial_success")
        received = inbox.take(0)
    assert received is not None
    assert [item.seq for item in received.batch.items if not isinstance(item, RecordError)] == [0, 2]
    assert [(b.read, b.kv, b.ignored, b.invalid) for b in batches] == [(3, 2, 1, 0)]
    assert received.received_ns > 1_700_000_000_000_000_000


def test_an_empty_message_is_fine(tmp_path: Path) -> None:
    with receiving("127.0.0.1:0", Inbox(100)) as export:
        assert not export(b"").HasField("partial_success")


def test_invalid_records_are_a_partial_success_that_names_them(tmp_path: Path) -> None:
    inbox = Inbox(100)
    bad = [free(seq, pages="3-1") for seq in range(1, 6)]
    with receiving("127.0.0.1:0", inbox) as export:
        partial = export(request(free(0), *bad)).partial_success
    assert partial.rejected_spans == 5
    assert "kv.free (stream decode-0, seq 1): kv.pages" in partial.error_message
    assert partial.error_message.endswith("and 2 more")
    received = inbox.take(0)
    assert received is not None
    assert len(received.batch.items) == 6, "the ledger hears of the places of the invalid ones"


def test_a_full_queue_is_retryable_and_keeps_nothing(tmp_path: Path) -> None:
    inbox = Inbox(3)
    refused: list[str] = []
    with receiving("127.0.0.1:0", inbox, on_refused=refused.append) as export:
        export(request(free(0), free(1)))
        for data in (request(free(2), free(3)),):
            with pytest.raises(grpc.RpcError) as error:
                export(data)
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            details = dict(error.value.trailing_metadata())["grpc-status-details-bin"]
            status = Status.FromString(details)
            assert status.code == 8
            retry = RetryInfo()
            (detail,) = status.details
            assert isinstance(detail, AnyMessage)
            assert detail.Unpack(retry)
            assert retry.retry_delay.nanos == 50_000_000
        export(request(free(2)))  # one more fits
        with pytest.raises(grpc.RpcError):
            export(request(free(3)))
        assert inbox.depth == 3
        assert inbox.take(0) is not None
        export(request(free(3)))
    assert refused == ["full", "full"]


def test_a_message_larger_than_the_queue_is_taken_when_nothing_waits(tmp_path: Path) -> None:
    inbox = Inbox(2)
    with receiving("127.0.0.1:0", inbox) as export:
        export(request(*(free(seq) for seq in range(5))))
    assert inbox.depth == 5
    assert inbox.full()


def test_what_is_no_otlp_is_refused_for_good(tmp_path: Path) -> None:
    refused: list[str] = []
    inbox = Inbox(10)
    with receiving("127.0.0.1:0", inbox, on_refused=refused.append) as export:
        with pytest.raises(grpc.RpcError) as error:
            export(b"\xff\xff\xff")
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "not an OTLP ExportTraceServiceRequest" in error.value.details()
        export(request(free(0)))  # and the receiver goes on
    assert refused == ["malformed"]
    assert inbox.depth == 1


def test_a_message_over_the_limit_is_refused_by_grpc(tmp_path: Path) -> None:
    inbox = Inbox(10)
    with receiving("127.0.0.1:0", inbox, max_message_bytes=1000) as export:
        with pytest.raises(grpc.RpcError) as error:
            export(bytes(2000))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert inbox.depth == 0


def test_a_token_is_asked_for(tmp_path: Path) -> None:
    refused: list[str] = []
    inbox = Inbox(10)
    with receiving("127.0.0.1:0", inbox, token="swordfish", on_refused=refused.append) as export:
        for metadata in ((), (("authorization", "Bearer sword"),), (("authorization", "swordfish"),)):
            with pytest.raises(grpc.RpcError) as error:
                export(request(free(0)), metadata=metadata)
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert inbox.depth == 0
        export(request(free(0)), metadata=(("authorization", "Bearer swordfish"),))
    assert inbox.depth == 1
    assert refused == ["unauthenticated"] * 3


def test_an_emitter_shows_its_token(tmp_path: Path) -> None:
    refused: list[str] = []
    inbox = Inbox(10)
    endpoint = f"unix:{tmp_path}/sock"
    with receiving(endpoint, inbox, token="swordfish", on_refused=refused.append):
        for token, counted in ((None, "records_failed"), ("sword", "records_failed"), ("swordfish", "records_sent")):
            emitter, provider = configure("decode-0", endpoint=endpoint, token=token)
            emitter.emit(Free(request="r1", tenant="tenant-a", pages=PageSet.parse("0-3")))
            assert provider is not None
            provider.shutdown()
            assert emitter.counts[counted] == 1
    assert inbox.depth == 1
    assert refused == ["unauthenticated"] * 2


def test_only_this_users_processes_can_reach_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "run" / "otlp.sock"
    with receiving(f"unix:{path}", Inbox(10)):
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert os.stat(path.parent).st_mode & 0o777 == 0o700


def test_a_dead_guards_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dead.bind(str(path))
    dead.close()
    inbox = Inbox(10)
    with receiving(f"unix:{path}", inbox) as export:
        with pytest.raises(BindError, match="another process listens there"):
            GrpcReceiver(Address.parse(f"unix:{path}"), Inbox(10)).start()
        export(request(free(0)))
    assert inbox.depth == 1


def test_what_is_in_the_way_of_a_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    path.write_text("precious")
    with pytest.raises(BindError, match="a file that is no socket"):
        GrpcReceiver(Address.parse(f"unix:{path}"), Inbox(10)).start()
    assert path.read_text() == "precious"
    tmp_path.chmod(0o777)
    with pytest.raises(BindError, match="others may write the directory"):
        GrpcReceiver(Address.parse(f"unix:{tmp_path}/x"), Inbox(10)).start()


def test_an_occupied_port_is_an_error() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = Address.parse(f"127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(BindError, match=str(address)):
            GrpcReceiver(address, Inbox(10)).start()


def test_two_receivers_do_not_share_a_port() -> None:
    first = GrpcReceiver(Address.parse("127.0.0.1:0"), Inbox(10))
    bound = first.start()
    try:
        with pytest.raises(BindError):
            GrpcReceiver(bound, Inbox(10)).start()
    finally:
        first.stop(0)


def test_the_inbox_wakes_who_waits_and_drains_when_closed() -> None:
    inbox = Inbox(10)
    taken: list[Any] = []
    thread = threading.Thread(target=lambda: taken.append(inbox.take(60)))
    thread.start()
    assert inbox.put(Batch(), 1)
    thread.join(60)
    assert taken[0].received_ns == 1
    assert inbox.put(Batch(), 2)
    inbox.close()
    assert not inbox.put(Batch(), 3)
    assert not inbox.drained
    received = inbox.take(60)
    assert received is not None
    assert received.received_ns == 2
    assert inbox.drained
    assert inbox.take(60) is None
