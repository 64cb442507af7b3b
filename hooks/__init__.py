"""How records leave an engine: `hooks.emit` for engines that speak the convention themselves.

`hooks.digest` makes the digests of pages that are in them.

Adapters for engines that do not (SGLang, vLLM) and the agent that checks engines from outside live here too.
"""
