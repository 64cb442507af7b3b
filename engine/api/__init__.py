"""The engine's HTTP face: OpenAI's completion and chat API, and what operators ask of it.

`app` has the routes, `schema` what a body may hold, `errors` how a refusal looks, `output` the text that tokens
become (stop strings), `answer` the response that is written as tokens come, `keys` who is asking, `trace` the
request's span, `server` and `protocol` the listener. Nothing here knows how requests are computed: that is
`engine.router`, which these modules hand them to.
"""
