"""Who computes a prompt: a prefill worker, which leaves running streams alone, or the decode worker itself. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Disaggregation = Literal["auto", "always", "never"]
Reason = Literal[
    "disaggregated",  # a prefill worker: the rule
    "short_prompt",  # less work for the decode worker than a handoff takes
    "prefill_queue",  # the prefill workers' queue would miss the goal for the first token, the decode worker would not
    "no_prefill_worker",  # none is alive that could send to a decode worker with room
    "never",  # router.disaggregation says so
    "colocated_worker",
]

# Of the goal for the first token: what is left is for prompts that come later and are shorter, and for errors of the
# prediction.
GOAL_SHARE = 0.35
# Of the time that a decode worker's streams would share with the prompt: the first token must come that much sooner, or
# they are disturbed for hardly anything, or for what two predictions differ by.
SOONER_SHARE = 0.5


@dataclass(frozen=True)
class Remote:
    """The best that the prefill workers can do."""

    has_room: bool  # the prompt need not wait in the router
    ttft_s: float | None  # predicted, from now; None: nobody has measured yet
    has_queue: bool = False  # it is not just the prompt itself that takes so long


@dataclass(frozen=True)
class Local:
    """The best that a decode worker can do, in the time that its streams leave."""

    compute_s: float | None  # the prompt alone; None: nobody has measured yet
    ttft_s: float | None  # predicted, from now; None: not known, or its streams leave no time


@dataclass(frozen=True)
class Yardsticks:
    ttft_goal_s: float  # from arrival
    handoff_s: float  # that a handoff takes beyond the prompt's computation; 0: none was seen yet
    age_s: float = 0.0  # of the request


def choose(mode: Disaggregation, remote: Remote | None, local: Local | None, yardsticks: Yardsticks) -> Reason | None:
    """None: the request waits. `remote` is None without a live prefill worker, `local` without a decode worker that has
    room and may compute prompts."""
    if mode == "never":
        return None if local is None else "never"
    if mode == "auto" and local is not None:
        if remote is None:
            return "no_prefill_worker"
        if local.compute_s is not None and local.compute_s <= yardsticks.handoff_s:
            return "short_prompt"
        if _is_late(remote, yardsticks) and _is_sooner(local, remote):
            return "prefill_queue"
    return "disaggregated" if remote is not None and remote.has_room else None


def _is_late(remote: Remote, yardsticks: Yardsticks) -> bool:
    if not remote.has_queue or remote.ttft_s is None:
        return False
    return yardsticks.age_s + remote.ttft_s > GOAL_SHARE * yardsticks.ttft_goal_s


def _is_sooner(local: Local, remote: Remote) -> bool:
    if local.ttft_s is None or local.compute_s is None or remote.ttft_s is None:
        return False
    return remote.ttft_s - local.ttft_s > SOONER_SHARE * local.compute_s
