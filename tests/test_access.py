"""Writers that nobody can stop page by page: when their pages may be given away."""

from __future__ import annotations

import threading

import pytest

from engine.digest import PageDigester
from engine.transport.access import AccessReceiver, seal, unseal
from engine.transport.link import TransferError

DIGESTER = PageDigester(bytes(range(32)))


class SlowAccess:
    """Takes as long to close as the test wants."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.expected: list[int] = []
        self.may_close, self.closed = threading.Event(), 0

    def expect(self, transfers: int) -> None:
        self.expected.append(transfers)

    def close(self) -> None:
        assert self.may_close.wait(20)
        self.closed += 1


class Opened:
    """A receiver, and the accesses it has opened."""

    def __init__(self) -> None:
        self.made: list[SlowAccess] = []
        self.woken = threading.Semaphore(0)
        self.receiver = AccessReceiver(self._open, self.woken.release)

    def _open(self) -> SlowAccess:
        self.made.append(SlowAccess(f"slow:{len(self.made)}"))
        return self.made[-1]

    def register(self, peer: str, transfer: str) -> str:
        return self.receiver.register(peer, transfer, [0], [1])


@pytest.fixture
def opened() -> Opened:
    return Opened()


def test_each_life_of_a_writer_has_an_access_of_its_own(opened: Opened) -> None:
    assert opened.register("p/1", "a") == opened.register("p/1", "b") == "slow:0"
    assert opened.register("p/2", "c") == "slow:1"
    assert opened.receiver.confirm("a", clean=True)
    assert opened.receiver.confirm("b", clean=True)
    assert [access.expected for access in opened.made] == [[1, 2, 1, 0], [1]]
    assert opened.register("p/1", "d") == "slow:0", "what ended well is used again"


def test_a_doubtful_transfer_is_over_when_its_access_is_closed_and_not_before(opened: Opened) -> None:
    opened.register("p/1", "doubtful")
    opened.register("p/1", "beside")
    opened.register("p/2", "elsewhere")
    assert not any(opened.receiver.confirm("doubtful", clean=False) for _ in range(100))
    assert opened.register("p/1", "next") == "slow:2", "nothing new goes through it"
    opened.made[0].may_close.set()
    assert opened.woken.acquire(timeout=20)
    assert opened.receiver.confirm("doubtful", clean=False)
    assert opened.receiver.confirm("beside", clean=False), "it went through the same one"
    assert [access.closed for access in opened.made] == [1, 0, 0]
    assert opened.receiver.confirm("elsewhere", clean=True)


def test_what_a_dead_writer_had_under_way_is_doubtful_until_then_too(opened: Opened) -> None:
    opened.register("p/1", "a")
    opened.receiver.forget("p/1")
    assert not opened.receiver.confirm("a", clean=False)
    opened.made[0].may_close.set()
    assert opened.woken.acquire(timeout=20)
    assert opened.receiver.confirm("a", clean=False)
    opened.receiver.forget("p/1")
    assert opened.made[0].closed == 1


def test_close_waits_for_all(opened: Opened) -> None:
    opened.register("p/1", "a")
    opened.register("p/2", "b")
    for access in opened.made:
        access.may_close.set()
    opened.receiver.close()
    assert [access.closed for access in opened.made] == [1, 1]


def test_an_address_is_of_who_has_the_key() -> None:
    address = seal("nixl", "a:1:2", DIGESTER)
    kind, _, rest = address.partition(":")
    assert unseal(kind, rest, DIGESTER) == ["a", "1", "2"]
    for wrong in ("", ":", rest[:-1], rest + "0", "a:1:3:" + rest.rpartition(":")[2], "a:1:2:é"):
        with pytest.raises(TransferError, match="not made with this digest_key"):
            unseal("nixl", wrong, DIGESTER)
    with pytest.raises(TransferError, match="not made"):
        unseal("mooncake", rest, DIGESTER)
    with pytest.raises(TransferError, match="not made"):
        unseal("nixl", rest, PageDigester(bytes(32)))
    with pytest.raises(TransferError, match="4096 can be sent"):
        seal("nixl", "x" * 4096, DIGESTER)
