"""Transfers by NIXL (extra ``nixl``): its UCX backend writes from pool to pool, DRAM to DRAM.

A write is done, to NIXL, when the bytes are in the destination. So a batch is two posts: the pages, and when these are
done, their tags, from a small registered table. A tag can thus never be visible before the bytes that it vouches for,
and a page that nobody wrote keeps the cleared tag that it was handed out with. (The receiver could set the tags itself
when it is told that all is there; but then they would vouch for what was said, not for what was written.) One post
would not do: the UCX backend issues its writes one by one and flushes them together, over up to two rails, and UCX
orders nothing in between. The second post costs 5 µs, and 2 µs more for each break in the order of the pages.

What every page's descriptor is, on both sides, is prepared once a link; a post only names indices.

NIXL cannot cancel a write that UCX has begun: releasing its handle gives up the handle, and the bytes still arrive. An
abort therefore destroys the sender's agent, which closes its connections.

NIXL's own progress thread keeps a core busy, for every agent, all the time. Here whoever posts and polls makes the
progress; at the receiving end, where connections are made and what does not go by one-sided copies is written, it is a
thread that sleeps while no transfer is expected.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.digest import PageDigester
from engine.segment import TAG_WORDS, Segment
from engine.transport.access import check_page_bytes, seal, unseal
from engine.transport.link import Batch, Fate, TransferError, ask

BATCH_PAGES = 1024
_TAG_BYTES = 8 * TAG_WORDS
_PLACES = np.arange(BATCH_PAGES, dtype=np.int32)
_PROGRESS_S = 100e-6


def prepare() -> None:
    """What the libraries read when they are loaded; whoever has set these keeps their own."""
    # UCX would listen on every interface of the machine; the engine is one machine's.
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # what goes wrong is raised, and told by us
    logging.getLogger("nixl").setLevel(logging.WARNING)


def _agent(name: str) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    try:
        return nixl_agent(
            name, nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"])
        )
    except Exception as error:  # the bindings raise types of their own, derived from Exception
        raise TransferError(f"transport nixl: no UCX agent can be made: {error}") from error


class NixlLink:
    """See `engine.transport.link.Link`. A link is an agent of its own, so that destroying it ends nobody else's."""

    def __init__(self, address: str, segment: Segment, digester: PageDigester) -> None:
        fields = unseal("nixl", address, digester)
        try:
            metadata, base, pages, page_bytes = base64.b64decode(fields[0], validate=True), *map(int, fields[1:])
        except (ValueError, binascii.Error) as error:
            raise TransferError(f"transfer address nixl:{address!r:.100}: {error}") from error
        check_page_bytes("nixl", page_bytes, segment.page_bytes)
        self._segment = segment
        self._pages = pages
        self._staged = np.zeros((BATCH_PAGES, TAG_WORDS), dtype=np.int64)
        staged = self._staged.ctypes.data
        self._steps: Iterator[None] = iter(())
        self._data: tuple[Any, ...] = ()
        self._tags: tuple[Any, ...] = ()
        self.error = ""
        self._agent: Any = _agent(f"send-{secrets.token_hex(8)}")
        try:
            # The whole mapping is the segment: pages and tags.
            self._agent.register_memory(
                [
                    (segment.address, segment.size, 0, ""),
                    (staged, self._staged.nbytes, 0, ""),
                ],
                mem_type="DRAM",
            )
            peer = self._agent.add_remote_agent(metadata)
            self._data = (
                self._prepare("", segment.address, page_bytes, segment.pages),
                self._prepare(peer, base, page_bytes, pages),
            )
            self._tags = (
                self._prepare("", staged, _TAG_BYTES, BATCH_PAGES),
                self._prepare(peer, base + pages * page_bytes, _TAG_BYTES, pages),
            )
        except Exception as error:
            self.close()
            raise TransferError(f"transport nixl: {error}") from error

    def post(self, batch: Batch) -> None:
        """Posts the pages; the tags follow when these are done."""
        batch.check(self._segment.pages, self._pages)
        if len(batch.tags) > BATCH_PAGES:
            raise TransferError(f"{batch.transfer}: a batch of {len(batch.tags)} pages; {BATCH_PAGES} can be posted")
        self._steps = self._write(batch)

    def poll(self, wait_s: float) -> Fate:
        """Asks NIXL, more and more seldom."""
        if self._agent is None:
            return Fate.FAILED
        try:
            return ask(self._steps, wait_s)
        except Exception as error:  # the bindings' own types; whatever it was, the batch is not known to be done
            self.error = f"NIXL: {str(error) or type(error).__name__}"
        self.close()
        return Fate.FAILED

    def abort(self) -> None:
        """Destroys the agent."""
        self.error = self.error or "aborted"
        self.close()

    def close(self) -> None:
        """Destroys the agent, and with it whatever it has under way."""
        # What is prepared, or under way, holds on to the agent.
        self._steps = iter(())
        self._data = self._tags = ()
        self._agent = None

    def _prepare(self, agent: str, address: int, size: int, count: int) -> Any:
        """Descriptors of so many pieces of that size behind each other; without an agent's name they are our own."""
        pieces = np.zeros((count, 3), dtype=np.uint64)  # address, bytes, device
        pieces[:, 0] = np.arange(count, dtype=np.uint64) * size + address
        pieces[:, 1] = size
        return self._agent.prep_xfer_dlist(agent, pieces, mem_type="DRAM")

    def _write(self, batch: Batch) -> Iterator[None]:
        """Writes the pages and then the tags; comes up for breath while NIXL is at it."""
        # A chance to notice that the other side's access is closed: within one machine a write needs nobody's help
        # there, and would find its way all the same.
        self._agent.get_new_notifs()
        destination = np.array(batch.destination, dtype=np.int32)
        yield from self._transfer(self._data, np.array(batch.source, dtype=np.int32), destination)
        count = len(destination)
        self._staged[:count] = batch.tags
        yield from self._transfer(self._tags, _PLACES[:count], destination)

    def _transfer(self, sides: tuple[Any, ...], here: Any, there: Any) -> Iterator[None]:
        """Writes what has these indices on the two sides; NIXL joins what follows one another on both."""
        agent, (local, remote) = self._agent, sides
        handle = agent.make_prepped_xfer("WRITE", local, here, remote, there)
        state = agent.transfer(handle)
        while state == "PROC":
            yield
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise TransferError(f"the write ended in state {state}")
        agent.release_xfer_handle(handle)


class NixlAccess:
    """See `engine.transport.access.Access`."""

    def __init__(self, segment: Segment, digester: PageDigester) -> None:
        self._segment = segment
        self._agent: Any = _agent(f"recv-{secrets.token_hex(8)}")
        try:
            self._registered = self._agent.register_memory([(segment.address, segment.size, 0, "")], mem_type="DRAM")
            metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        except Exception as error:
            raise TransferError(f"transport nixl: the pool cannot be registered: {error}") from error
        self.address = seal("nixl", f"{metadata}:{segment.address}:{segment.pages}:{segment.page_bytes}", digester)
        self._expecting = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._progress, name="kv-nixl", daemon=True)
        self._thread.start()

    def expect(self, transfers: int) -> None:
        """Progress is made while there are any."""
        if transfers:
            self._expecting.set()
        else:
            self._expecting.clear()

    def close(self) -> None:
        """Deregisters the pool and destroys the agent."""
        self._closed = True
        self._expecting.set()
        self._thread.join()
        if self._agent is not None:
            self._agent.deregister_memory(self._registered)
            self._agent = None

    def _progress(self) -> None:
        while self._expecting.wait() and not self._closed:
            self._agent.get_new_notifs()
            time.sleep(_PROGRESS_S)
