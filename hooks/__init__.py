"""How records leave an engine: `hooks.emit` for engines that speak the convention themselves.

Adapters for engines that do not (SGLang, vLLM) and the agent that checks engines from outside live here too.
"""
