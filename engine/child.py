"""One process that the supervisor keeps alive."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
STEADY_S = 10.0
"""A process that lived this long starts without history when it dies."""

_PR_SET_PDEATHSIG = 1
# Looked up before any fork: between fork and exec as little as possible may happen.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class Child:
    """A process, and its successors under the same name.

    Args:
        name: The worker's name.
        command: What to run, after the Python interpreter.
        keep: File descriptors that it inherits.
    """

    def __init__(self, name: str, command: Sequence[str], keep: Sequence[int] = ()) -> None:
        self.name = name
        self.restarts = 0
        self.next_start: float | None = 0.0
        """When to start it, by `time.monotonic`; None while it runs or after it was told to stop."""
        self._command = [sys.executable, *command]
        self._keep = tuple(keep)
        self._pause = FIRST_PAUSE_S
        self._started = 0.0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the process lives, as far as was looked."""
        return self.process is not None

    def start(self) -> None:
        """Starts the process. It dies with the supervisor, however that dies."""
        parent = os.getpid()

        def die_with_parent() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # The supervisor died before the wish was heard.
                os._exit(1)

        self.next_start = None
        self._started = time.monotonic()
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            # Standard output is the supervisor's alone: its one line says that the engine is ready.
            stdout=2,
            pass_fds=self._keep,
            # Ctrl-C in a terminal is for the supervisor, which stops its children in order.
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def died(self) -> int | None:
        """The exit status (negative: the signal) if the process has ended since the last look."""
        if self.process is None:
            return None
        status = self.process.poll()
        if status is not None:
            self.process = None
        return status

    def plan_restart(self) -> float:
        """Sets when the successor starts: later and later while they die young. Returns the pause in seconds."""
        now = time.monotonic()
        if now - self._started >= STEADY_S:
            self._pause = FIRST_PAUSE_S
        pause, self._pause = self._pause, min(self._pause * 2, LONGEST_PAUSE_S)
        self.restarts += 1
        self.next_start = now + pause
        return pause

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal if the process lives."""
        self.next_start = None
        if self.process is not None:
            self.process.send_signal(number)
