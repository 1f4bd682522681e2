"""When a prompt's first token will come, from what is ahead of it and how fast workers have been. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A decode worker that has this share of its time left for prompts, or less, is left alone.
MIN_SPARE_SHARE = 0.1


@dataclass(frozen=True)
class Lane:
    """One worker as far as the computing of prompts goes."""

    backlog_tokens: int
    s_per_token: float  # above 0

    @property
    def free_s(self) -> float:
        """From now until it has computed what it was given."""
        return self.backlog_tokens * self.s_per_token


def spare_share(decode_step_s: float, tpot_goal_s: float) -> float:
    """What part of its time a worker can give to prompts if its streams are to have a token every `tpot_goal_s`."""
    return max(0.0, 1.0 - decode_step_s / tpot_goal_s)


def start_s(lanes: Sequence[Lane], tokens_ahead: int) -> float:
    """From now until a prompt can begin that waits behind as many tokens, if each goes to whoever is free first.

    The tokens ahead fill the lanes up to one level in time, like water; there must be a lane.
    """
    rate = filled = 0.0
    by_time = sorted(lanes, key=lambda lane: lane.free_s)
    for lane, following in zip(by_time, [*by_time[1:], None], strict=True):
        rate += 1 / lane.s_per_token
        filled += lane.free_s / lane.s_per_token
        level_s = (tokens_ahead + filled) / rate
        if following is None or level_s <= following.free_s:
            return max(level_s, by_time[0].free_s)
    raise AssertionError("there is a lane")
