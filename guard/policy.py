"""What is done about each kind of finding, and which optional rules are on: the operator's word."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from guard.findings import SEVERITY, Action, Confidence, Kind, Severity

_BY_SEVERITY = {Severity.CRITICAL: Action.KILL, Severity.HIGH: Action.ALERT, Severity.WARNING: Action.ALERT}

DEFAULT_ACTIONS: dict[Kind, Action] = {
    **{kind: _BY_SEVERITY[SEVERITY[kind]] for kind in Kind},
    Kind.SHORT_TRANSFER: Action.KILL,
    Kind.FREE_IN_FLIGHT: Action.QUARANTINE,
    Kind.FOREIGN_SHARE: Action.KILL,
    Kind.UNVERIFIED_TRANSFER: Action.OBSERVE,
    Kind.UNSCRUBBED_REUSE: Action.OBSERVE,
}
"""What is done about each kind unless the operator says otherwise."""


class Policy(BaseModel):
    """The operator's word. Immutable: a changed policy is a new object."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefix_sharing: Literal["isolate", "permit"] = "isolate"
    """May one tenant's cached prefix be shared to another's request?"""
    digests: Literal["optional", "require"] = "optional"
    """`require`: a transfer that one side gave no digest for is an `unverified-transfer`."""
    scrub: Literal["optional", "require"] = "optional"
    """`require`: a page that goes to another tenant unscrubbed is an `unscrubbed-reuse`."""
    on_degraded: Literal["alert", "act"] = "alert"
    """Findings that rest on pages the guard lost sight of (a gap, its own restart): `alert` reports them and
    kills nobody (fail open), `act` takes the kind's action all the same (fail closed)."""
    actions: dict[Kind, Action] = Field(default_factory=dict)
    """Kind → action, over the defaults."""

    def action(self, kind: Kind, confidence: Confidence = Confidence.FULL) -> Action:
        """What is done about a finding of this kind and confidence."""
        action = self.actions.get(kind, DEFAULT_ACTIONS[kind])
        if confidence is Confidence.DEGRADED and self.on_degraded == "alert":
            return min(action, Action.ALERT, key=lambda a: a.rank)
        return action
