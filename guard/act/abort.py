"""Asks the engine to abort what was killed.

The board has already stopped the request's bytes; this call frees its pages and batch slot.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import httpx

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_CALL_TIMEOUT_S = 2.0
_AT_ONCE = 32
_QUEUE = 10_000


class Aborter:
    """Calls the engine from a thread of its own, several calls at once, each tried again until ``retry_s``.

    Attributes:
        ok: Calls that the engine took, or for requests that it no longer knew.
        failed: Calls given up.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        *,
        retry_s: float = 5.0,
        on_done: Callable[[str, int, str], None] = lambda _incident, _time_ns, _result: None,
    ) -> None:
        """Makes the caller; `start` begins.

        Args:
            url: Where to POST ``{"rid": request, "incident": id}``.
            key: Sent as ``Authorization: Bearer KEY``.
            retry_s: How long a failed call is tried again.
            on_done: Called with the incident, the time (`time.time_ns`) and what came of the call, from the
                aborter's thread.
        """
        self.ok = self.failed = 0
        self._url = url
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._retry_s = retry_s
        self._on_done = on_done
        self._loop = asyncio.new_event_loop()
        self._pending = 0
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="abort", daemon=True)

    @property
    def pending(self) -> int:
        """Calls under way or waiting."""
        return self._pending

    def start(self) -> None:
        """Begins calling."""
        self._thread.start()

    def abort(self, request: str, incident: str) -> None:
        """Queues a call; never waits and never raises."""
        with self._lock:
            if self._pending >= _QUEUE:
                self.failed += 1
                return
            self._pending += 1
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._call(request, incident)))

    def stop(self, timeout_s: float = 1.0) -> None:
        """Lets calls end within the time, and ends."""
        with self._idle:
            self._idle.wait_for(lambda: self._pending == 0, timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s + 1)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        # Not the environment's proxies: the engine is next door, and the key must not go through a third party.
        self._client = httpx.AsyncClient(timeout=_CALL_TIMEOUT_S, trust_env=False, headers=self._headers)
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._loop.run_forever()
        unfinished = asyncio.all_tasks(self._loop)
        for task in unfinished:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*unfinished, return_exceptions=True))
        self._loop.run_until_complete(self._client.aclose())
        self._loop.close()

    async def _call(self, request: str, incident: str) -> None:
        try:
            result = await self._try(request, incident)
        except asyncio.CancelledError:
            return
        finally:
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()
        self._on_done(incident, time.time_ns(), result)

    async def _try(self, request: str, incident: str) -> str:
        deadline = time.monotonic() + self._retry_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                async with self._slots:
                    response = await self._client.post(self._url, json={"rid": request, "incident": incident})
                status = response.status_code
                if status < 300 or status in (404, 410):
                    self.ok += 1
                    return f"status {status}"
                result = f"status {status}"
                hopeless = status < 500 and status not in (408, 429)
            except Exception as error:  # whatever the HTTP library makes of a broken peer, it is one failed call
                result, hopeless = type(error).__name__, False
            if hopeless or time.monotonic() + pause > deadline:
                self.failed += 1
                return f"failed: {result}"
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)
