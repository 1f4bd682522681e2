"""`pdserve scale`: tells `pdserve up` how many workers a pool shall have, and watches until it has them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

from rich.console import Console

from cluster.pool_view import PoolView, pool_views
from cluster.registry_client import follow_status, scale_pool
from cluster.running import RunningDeployment
from common.config import Role
from common.pb import serving_pb2 as pb
from common.worker_server import ROLES


@dataclass(frozen=True)
class ScaleWish:
    role: Role
    replicas: int
    timeout_s: float  # to watch for; the wish itself has no end


async def scale(found: RunningDeployment, wish: ScaleWish, console: Console) -> int:
    """Returns 0 once every worker that was wished can serve, and every other has left; 1 if that does not come about.

    Raises: InvalidRequest if nothing could be served then; WorkerUnavailable if nobody is there to scale anything.
    """
    request = pb.ScalePoolRequest(role=ROLES[wish.role], replicas=wish.replicas)
    await scale_pool(found.control_address, found.access, request)
    watching = _Watching(wish, console)
    try:
        async with asyncio.timeout(wish.timeout_s):
            async with aclosing(follow_status(found.control_address, found.access)) as statuses:
                async for status in statuses:
                    view = pool_views(status).get(wish.role)  # none while a router that was restarted knows nothing
                    if view is not None and (code := watching.saw(view)) is not None:
                        return code
    except TimeoutError:
        watching.say(f"not done after {wish.timeout_s:g} s. The wish stays; `pdserve scale` takes it back")
    return 1


class _Watching:
    """Says what is new, and knows when there is nothing more to come."""

    def __init__(self, wish: ScaleWish, console: Console) -> None:
        self._wish = wish
        self._console = console
        self._told = ""

    def saw(self, view: PoolView) -> int | None:
        """The exit code, once it is over."""
        if view.num_wished != self._wish.replicas:
            reason = view.trouble or "somebody has wished otherwise, or drained one"
            self.say(f"{view.role}: {view.num_wished} wished now, and not {self._wish.replicas}: {reason}")
            return 1
        self.say(str(view))
        return 0 if view.is_as_wished else None

    def say(self, text: str) -> None:
        if text != self._told:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._told = text
