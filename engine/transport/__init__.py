"""How KV pages get from the prefill worker's pool into the decode worker's.

Five verbs, the same for every kind of transport (`engine.transport.link`):

* the receiver **registers** the pages of a transfer for the worker that will write them, and gets the address for it;
* that worker's sender connects to the address and **posts** batches of pages, each page with its owner tag,
* **polls** until the transport itself says that a batch is over,
* and may **abort** one, which is over only when a poll says so;
* the receiver **confirms** that nothing of the transfer can be written any more: then its pages may be given away.

No clock confirms anything. A transfer of which neither completion nor end is known keeps its pages on both sides.

Over shared memory the sender maps the pool and copies; over TCP it frames the pages to the receiver's threads, which
write only what was registered; with NIXL and Mooncake the library writes into the pool by itself, and what ends a
doubtful writer's access is that the instance of the library that gave it to that writer is destroyed. Messages do not
come this way: see `engine.messages`.
"""
