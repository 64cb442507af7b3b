"""How KV pages get from the prefill worker's pool into the decode worker's.

A decode worker opens a receiver for its pool and tells its address to whoever it grants pages to; a prefill
worker's sender threads connect to that address and put pages there, each with its owner tag. Over shared memory
the sender maps the pool and copies; over TCP it frames the pages to the receiver's threads, which write only what
was granted. Messages do not come this way: see `engine.messages`.
"""
