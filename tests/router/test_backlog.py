"""What a worker has to compute, as heartbeats and this router's own gifts tell."""

from __future__ import annotations

from router.backlog import UNDER_WAY_S, PromptBacklog


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_heartbeat_replaces_what_was_given_before_it() -> None:
    clock = Clock()
    backlog = PromptBacklog(clock)
    with backlog.holding(100):
        assert (backlog.tokens, backlog.given_tokens) == (100, 100)
        clock.now_s = 1.0
        backlog.heard(30)  # 70 of them are computed
        assert (backlog.tokens, backlog.given_tokens) == (30, 100)
        with backlog.holding(50):
            assert backlog.tokens == 80
    assert (backlog.tokens, backlog.given_tokens) == (30, 0)


def test_what_had_no_time_to_arrive_is_not_in_the_heartbeat_yet() -> None:
    clock = Clock()
    backlog = PromptBacklog(clock)
    clock.now_s = 1.0
    with backlog.holding(100):
        clock.now_s = 1.0 + UNDER_WAY_S / 2
        backlog.heard(0)
        assert backlog.tokens == 100
        clock.now_s = 2.0
        backlog.heard(60)
        assert backlog.tokens == 60


def test_it_is_idle_since_it_last_had_something_to_compute() -> None:
    clock = Clock()
    backlog = PromptBacklog(clock)
    clock.now_s = 3.0
    assert backlog.idle_s == 3.0
    with backlog.holding(100):
        clock.now_s = 5.0
        assert backlog.idle_s == 0.0
    clock.now_s = 6.0
    backlog.heard(10)  # another router's
    assert backlog.idle_s == 0.0
    clock.now_s = 8.0
    backlog.heard(0)
    assert backlog.idle_s == 2.0
