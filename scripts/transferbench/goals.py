"""What is asked of KV transfer, and what each transport is held against."""

from __future__ import annotations

from dataclasses import dataclass

from bench_goal import Goal
from transferbench.raw import Raw


@dataclass(frozen=True)
class Yardstick:
    """limit: what the transport's rate is a share of. beside: told for comparison alone."""

    limit: Raw
    least_share: Goal | None
    beside: Raw | None = None


YARDSTICKS = {
    "grpc": Yardstick(Raw.SOCKET, Goal(">=", 0.5), Raw.GRPC_STREAM),
    "tcp": Yardstick(Raw.SOCKET, Goal(">=", 0.8)),
    "shm": Yardstick(Raw.SHARED_MEMORY, Goal(">=", 0.6), Raw.SHARED_MEMORY_RING),
    "torch_dist": Yardstick(Raw.SOCKET, Goal(">=", 0.6), Raw.GLOO),
    "nixl": Yardstick(Raw.SOCKET, None),
}
CHECKSUM_SHARE = Goal("<=", 0.03)  # of a transfer's time
SENDING_COST = Goal("<=", 0.05)  # of the prefill time without sending


def exposed_goal(num_tokens: int) -> Goal | None:
    """In milliseconds, for short prompts."""
    return Goal("<=", 15) if num_tokens <= 128 else None


def exposed_share_goal(num_tokens: int) -> Goal | None:
    """Of the prefill time, for longer ones."""
    return Goal("<=", 0.1) if num_tokens >= 512 else None
