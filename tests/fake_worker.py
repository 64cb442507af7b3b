"""A worker process without a model: says hello and lets decode answer ``ok`` to everything.

What it does amiss is said by the environment variable FAKE_WORKER: ``exit:NAME:STATUS`` ends the worker NAME at
once, ``deaf:NAME`` makes it take no SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from engine.config import load
from engine.mailbox import Mailbox
from engine.messages import Abort, Generate, Hello, Tokens, WorkerDown
from guard.records import Role


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--role", type=Role, required=True)
    parser.add_argument("--config", type=Path, required=True)
    options = parser.parse_args()
    fault = os.environ.get("FAKE_WORKER", "").split(":")
    if fault[:2] == ["exit", options.name]:
        return int(fault[2])
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: None if fault[:2] == ["deaf", options.name] else stopping.append(1))
    config = load(options.config)
    directory = Path(config.run_dir)
    mailbox = Mailbox(directory, options.name)
    signal.set_wakeup_fd(mailbox.wake_fd)
    pool = config.prefill if options.role is Role.PREFILL else config.decode
    epoch = time.time_ns() // 1_000_000
    hello = Hello(
        worker=options.name,
        epoch=epoch,
        role=options.role,
        pages=pool.pages,
        page_tokens=config.page_tokens,
        page_bytes=1,
        address="fake",
    )
    mailbox.send("router-0", hello)
    told = (directory / f"{options.name}.heard").open("a", buffering=1)
    while not stopping:
        for message in mailbox.receive(1000):
            if isinstance(message, Generate) and message.prompt != list(b"wait"):
                mailbox.send("router-0", Tokens(request=message.request, tokens=list(b"ok"), finish="stop"))
            if isinstance(message, WorkerDown):
                print(f"down {message.worker} {message.epoch}", file=told)
            if isinstance(message, Abort):
                print(f"abort {message.request}", file=told)
    mailbox.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
