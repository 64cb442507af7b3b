from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from receiving import RecordingSink, free, over_grpc, request

from guard.counters import ReceiverCounts
from guard.receive.access import Tokens
from guard.receive.address import Address, BindError
from guard.receive.grpc import SERVICE, GrpcReceiver
from guard.receive.intake import Intake
from guard.records import Free, PageSet, Record
from hooks.emit import configure


def receiver_on(address: str) -> GrpcReceiver:
    return GrpcReceiver(Address.parse(address), Intake(RecordingSink(), ReceiverCounts()))


@contextmanager
def receiving(address: str, sink: Any, **options: Any) -> Iterator[Callable[..., ExportTraceServiceResponse]]:
    with over_grpc(sink, address, **options) as receiver:
        channel = grpc.insecure_channel(
            str(receiver.address),
            options=[("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)],
        )
        call = channel.unary_unary(f"/{SERVICE}/Export", response_deserializer=ExportTraceServiceResponse.FromString)
        with channel:
            yield lambda data, **kwargs: call(data, timeout=30, **kwargs)


def test_records_are_queued_before_the_answer(tmp_path: Path) -> None:
    sink, counts = RecordingSink(), ReceiverCounts()
    data = request(free(0), free(1, name="chat"), free(2))
    with receiving(f"unix:{tmp_path}/sock", sink, counts=counts) as export:
        assert not export(data).HasField("partial_success")
        assert [record.seq for record in sink.records] == [0, 2]
    assert sink.times[0] > 1_700_000_000_000_000_000
    assert (counts.calls, counts.bytes, counts.read, counts.ignored, counts.invalid) == (1, len(data), 3, 1, 0)


def test_an_empty_message_is_fine() -> None:
    sink = RecordingSink()
    with receiving("127.0.0.1:0", sink) as export:
        assert not export(b"").HasField("partial_success")
    assert not sink.times


def test_invalid_records_are_a_partial_success_that_names_them() -> None:
    sink, counts = RecordingSink(), ReceiverCounts()
    bad = [free(seq, pages="3-1") for seq in range(1, 6)]
    with receiving("127.0.0.1:0", sink, counts=counts) as export:
        partial = export(request(free(0), *bad)).partial_success
    assert partial.rejected_spans == counts.invalid == 5
    assert "kv.free (stream decode-0, seq 1): kv.pages" in partial.error_message
    assert partial.error_message.endswith("and 2 more")
    assert [type(record) for record in sink.records] == [Free] + [Record] * 5, "their places in the stream"


def test_a_full_queue_is_retryable_and_keeps_nothing() -> None:
    sink, counts = RecordingSink(3), ReceiverCounts()
    with receiving("127.0.0.1:0", sink, counts=counts) as export:
        export(request(free(0), free(1)))
        with pytest.raises(grpc.RpcError) as error:
            export(request(free(2), free(3)))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = Status.FromString(dict(error.value.trailing_metadata())["grpc-status-details-bin"])
        assert status.code == 8
        retry = RetryInfo()
        (detail,) = status.details
        assert isinstance(detail, AnyMessage)
        assert detail.Unpack(retry)
        assert retry.retry_delay.nanos == 50_000_000
        export(request(free(2)))  # one more fits
        with pytest.raises(grpc.RpcError):
            export(request(free(3)))
        assert len(sink.records) == 3
        sink.drain()
        export(request(free(3)))
    assert [record.seq for record in sink.records] == [0, 1, 2, 3]
    assert counts.refused["full"] == 2


def test_what_is_no_otlp_is_refused_for_good() -> None:
    sink, counts = RecordingSink(), ReceiverCounts()
    with receiving("127.0.0.1:0", sink, counts=counts) as export:
        with pytest.raises(grpc.RpcError) as error:
            export(b"\xff\xff\xff")
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.value.details()
        export(request(free(0)))  # and the receiver goes on
    assert counts.refused["malformed"] == 1
    assert len(sink.records) == 1


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_a_message_over_the_limit_is_refused_by_grpc(compression: grpc.Compression) -> None:
    sink = RecordingSink()
    with receiving("127.0.0.1:0", sink, max_message_bytes=1 << 20) as export:
        with pytest.raises(grpc.RpcError) as error:
            export(bytes(64 << 20), compression=compression)  # 64 kB when it is compressed
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        export(request(free(0)), compression=compression)
    assert sink.places == [("decode-0", 0)]


def test_calls_beyond_what_is_worked_on_wait_and_none_is_refused() -> None:
    sink, counts = RecordingSink(), ReceiverCounts()
    with over_grpc(sink, counts=counts) as receiver, grpc.insecure_channel(str(receiver.address)) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Export")
        call(request(free(0)), timeout=30)  # by now the sender knows how many calls may be under way
        for answer in [call.future(request(free(seq)), timeout=60) for seq in range(1, 300)]:
            answer.result(60)
    assert sorted(sink.places) == [("decode-0", seq) for seq in range(300)]
    assert not any(counts.refused.values())


def test_a_connection_too_many_may_come_back() -> None:
    sink = RecordingSink()
    with over_grpc(sink, max_connections=1) as receiver:
        target, options = str(receiver.address), [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(target, options) as first:
            first.unary_unary(f"/{SERVICE}/Export")(request(free(0)), timeout=30)
            with grpc.insecure_channel(target, options) as second, pytest.raises(grpc.RpcError) as error:
                second.unary_unary(f"/{SERVICE}/Export")(request(free(1)), timeout=30)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE, "which senders try again"
            first.unary_unary(f"/{SERVICE}/Export")(request(free(1)), timeout=30)
    assert len(sink.records) == 2


def test_an_emitter_shows_its_token(tmp_path: Path) -> None:
    sink, counts = RecordingSink(), ReceiverCounts()
    endpoint = f"unix:{tmp_path}/sock"
    with receiving(endpoint, sink, tokens=Tokens(["swordfish"]), counts=counts):
        for token, counted in ((None, "records_failed"), ("sword", "records_failed"), ("swordfish", "records_sent")):
            emitter, provider = configure("decode-0", endpoint=endpoint, token=token)
            emitter.emit(Free(request="r1", tenant="tenant-a", pages=PageSet.parse("0-3")))
            assert provider is not None
            provider.shutdown()
            assert emitter.counts[counted] == 1
    assert len(sink.records) == 1
    assert counts.refused["unauthenticated"] == 2


def test_only_this_users_processes_can_reach_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "run" / "otlp.sock"
    with receiving(f"unix:{path}", RecordingSink()):
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert os.stat(path.parent).st_mode & 0o777 == 0o700


def test_a_dead_guards_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dead.bind(str(path))
    dead.close()
    sink = RecordingSink()
    with receiving(f"unix:{path}", sink) as export:
        with pytest.raises(BindError, match="another process listens there"):
            receiver_on(f"unix:{path}").start()
        export(request(free(0)))
    assert len(sink.records) == 1


def test_what_is_in_the_way_of_a_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    path.write_text("precious")
    with pytest.raises(BindError, match="a file that is no socket"):
        receiver_on(f"unix:{path}").start()
    assert path.read_text() == "precious"
    tmp_path.chmod(0o777)
    with pytest.raises(BindError, match="others may write the directory"):
        receiver_on(f"unix:{tmp_path}/x").start()


def test_an_occupied_port_is_an_error() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(BindError, match=address):
            receiver_on(address).start()


def test_two_receivers_do_not_share_a_port() -> None:
    first = receiver_on("127.0.0.1:0")
    bound = first.start()
    try:
        with pytest.raises(BindError):
            receiver_on(str(bound)).start()
    finally:
        first.stop(0)
