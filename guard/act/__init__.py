"""What the guard does about a finding: it puts verdicts on the board that engines read (`guard.act.board`)
and asks the engine to abort what was killed (`guard.act.abort`).

`guard.act.board` is also imported by engines, so it needs nothing but the standard library.
"""
