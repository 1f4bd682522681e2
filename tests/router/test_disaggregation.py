"""Who computes a prompt: a table of examples."""

from __future__ import annotations

import pytest

from router.disaggregation import Disaggregation, Local, Reason, Remote, Yardsticks, choose

YARDSTICKS = Yardsticks(ttft_goal_s=1.0, handoff_s=0.01)
IDLE, BUSY, FULL = Remote(True, 0.3), Remote(True, 0.9, has_queue=True), Remote(False, 0.9, has_queue=True)
LONG, UNMEASURED = Remote(True, 0.9), Remote(True, None, has_queue=True)
QUICK, SLOW, SHORT, NO_TIME = Local(0.2, 0.4), Local(0.2, 1.5), Local(0.005, 0.005), Local(0.2, None)
UNKNOWN, HARDLY_SOONER = Local(None, None), Local(0.6, 0.8)
NEARLY_IDLE, LONG_THERE_TOO = Remote(True, 2.3, has_queue=True), Local(1.6, 1.7)


@pytest.mark.parametrize(
    ("mode", "remote", "local", "expected"),
    [
        ("auto", IDLE, QUICK, "disaggregated"),
        ("auto", IDLE, SHORT, "short_prompt"),
        ("auto", IDLE, None, "disaggregated"),
        ("auto", BUSY, QUICK, "prefill_queue"),
        ("auto", LONG, QUICK, "disaggregated"),  # its own length takes so long, and running streams are spared
        ("auto", BUSY, SLOW, "disaggregated"),
        ("auto", BUSY, HARDLY_SOONER, "disaggregated"),  # not worth the disturbance
        ("auto", NEARLY_IDLE, LONG_THERE_TOO, "disaggregated"),  # a long prompt disturbs for long
        ("auto", NEARLY_IDLE, QUICK, "prefill_queue"),
        ("auto", BUSY, NO_TIME, "disaggregated"),
        ("auto", BUSY, UNKNOWN, "disaggregated"),
        ("auto", FULL, QUICK, "prefill_queue"),
        ("auto", FULL, SLOW, None),
        ("auto", UNMEASURED, QUICK, "disaggregated"),
        ("auto", None, QUICK, "no_prefill_worker"),
        ("auto", None, UNKNOWN, "no_prefill_worker"),
        ("auto", None, None, None),
        ("always", IDLE, None, "disaggregated"),
        ("always", FULL, None, None),
        ("never", IDLE, QUICK, "never"),
        ("never", IDLE, None, None),
    ],
)
def test_the_choice(mode: Disaggregation, remote: Remote | None, local: Local | None, expected: Reason | None) -> None:
    assert choose(mode, remote, local, YARDSTICKS) == expected


def test_a_request_that_has_waited_is_late_sooner() -> None:
    short_queue = Remote(True, 0.3, has_queue=True)
    assert choose("auto", short_queue, Local(0.1, 0.1), YARDSTICKS) == "disaggregated"
    waited = Yardsticks(ttft_goal_s=1.0, handoff_s=0.01, age_s=0.2)
    assert choose("auto", short_queue, Local(0.1, 0.1), waited) == "prefill_queue"
