from __future__ import annotations

import pytest
from ledger_rig import Rig
from pydantic import ValidationError

from guard.findings import SEVERITY, Action, Confidence, Kind, Severity
from guard.policy import DEFAULT_ACTIONS, Policy

SPEC = {
    "foreign-read": ("critical", "kill"),
    "stale-read": ("critical", "kill"),
    "foreign-write": ("critical", "kill"),
    "tainted-response": ("critical", "kill"),
    "zombie-request": ("critical", "kill"),
    "double-owner": ("critical", "kill"),
    "digest-mismatch": ("critical", "kill"),
    "short-transfer": ("high", "kill"),
    "free-in-flight": ("high", "quarantine"),
    "foreign-share": ("high", "kill"),
    "double-free": ("high", "alert"),
    "wrong-status": ("high", "alert"),
    "over-capacity": ("high", "alert"),
    "page-leak": ("warning", "alert"),
    "unverified-transfer": ("warning", "observe"),
    "unscrubbed-reuse": ("warning", "observe"),
    "stream-gap": ("warning", "alert"),
    "hook-divergence": ("high", "alert"),
    "canary-hit": ("critical", "kill"),
}


def test_the_table_of_the_specification() -> None:
    assert {k.value: (SEVERITY[k].value, Policy().action(k).value) for k in Kind} == SPEC
    assert set(DEFAULT_ACTIONS) == set(Kind)


def test_actions_from_weakest() -> None:
    assert sorted(Action, key=lambda a: a.rank) == [Action.OBSERVE, Action.ALERT, Action.QUARANTINE, Action.KILL]
    assert [a.rank for a in Action] == [0, 1, 2, 3]
    assert [s.value for s in Severity] == ["warning", "high", "critical"]


def test_an_action_of_ones_own_per_kind() -> None:
    policy = Policy.model_validate({"actions": {"foreign-read": "observe", "page-leak": "kill"}})
    assert policy.action(Kind.FOREIGN_READ) is Action.OBSERVE
    assert policy.action(Kind.PAGE_LEAK) is Action.KILL
    assert policy.action(Kind.STALE_READ) is Action.KILL


def test_degraded_findings_alert_or_act() -> None:
    alert, act = Policy(), Policy(on_degraded="act")
    assert alert.action(Kind.FOREIGN_READ, Confidence.DEGRADED) is Action.ALERT
    assert alert.action(Kind.FREE_IN_FLIGHT, Confidence.DEGRADED) is Action.ALERT
    assert alert.action(Kind.UNSCRUBBED_REUSE, Confidence.DEGRADED) is Action.OBSERVE, "never more than without"
    assert act.action(Kind.FOREIGN_READ, Confidence.DEGRADED) is Action.KILL


@pytest.mark.parametrize(
    "bad",
    [
        {"actions": {"foreign-read": "explode"}},
        {"actions": {"no-such-kind": "kill"}},
        {"prefix_sharing": "maybe"},
        {"digests": True},
        {"no_such_rule": 1},
    ],
)
def test_what_is_no_policy_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Policy.model_validate(bad)


def test_a_policy_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Policy().digests = "require"


def crossing(policy: Policy) -> Rig:
    rig = Rig(policy)
    rig.left_behind("d", "a1", "0")
    rig.alloc("d", "b1", "0")
    rig.read("d", "b1", "0")
    rig.free("d", "b1", "9")
    rig.end()
    return rig


def test_kills_follow_the_actions() -> None:
    assert crossing(Policy()).ledger.requests["b1"].verdict == "kill"
    mild = {"foreign-read": "alert", "stale-read": "observe"}
    rig = crossing(Policy.model_validate({"actions": mild}))
    assert rig.ledger.requests["b1"].verdict == "allow"
    assert rig.one(Kind.FOREIGN_READ).action is Action.ALERT
    assert rig.one(Kind.FOREIGN_READ).severity is Severity.CRITICAL, "how bad it is, is not the operator's word"
    assert rig.one(Kind.FOREIGN_READ).kills == set()
    hard = {**mild, "double-free": "kill"}
    rig = crossing(Policy.model_validate({"actions": hard}))
    assert rig.one(Kind.DOUBLE_FREE).kills == {"b1"}
    assert rig.ledger.requests["b1"].verdict == "kill"


def test_a_gap_may_kill_what_can_no_more_be_vouched_for() -> None:
    rig = Rig(Policy.model_validate({"actions": {"stream-gap": "kill"}, "on_degraded": "act"}))
    rig.alloc("d", "a1", "0")
    rig.left_behind("d", "b1", "1")
    rig.lose("d")
    rig.admit("d", "c1")
    rig.end()
    assert rig.one(Kind.STREAM_GAP).kills == {"a1"}
    assert rig.ledger.requests["a1"].verdict == "kill"
    assert rig.ledger.requests["b1"].verdict == "allow"
