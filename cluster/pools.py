"""How many workers of each role there shall be, and the steps from what is there to what is wished."""

from __future__ import annotations

import itertools

from cluster.plan import Plan, require_servable
from cluster.supervisor import MemberDropped, MemberEvent, MemberState, Supervisor
from common.config import Role
from common.errors import ConfigError, InvalidRequest, WorkerUnavailable
from common.pb import serving_pb2 as pb
from common.worker_server import ROLES


class Pools:
    """The wish for a pool is nothing but the number of workers that the supervisor keeps alive in it.

    So it falls by one when a worker is drained by hand, or dropped because it cannot be started.
    """

    def __init__(self, plan: Plan, supervisor: Supervisor) -> None:
        self._plan = plan
        self._supervisor = supervisor
        self._troubles: dict[Role, str] = {}

    def scale(self, role: Role, replicas: int) -> None:
        """Add workers, or drain those that do not run and then the newest. Returns at once.

        Raises: InvalidRequest when the pools could then serve nothing; WorkerUnavailable while everything stops.
        """
        if not self._supervisor.is_running:
            raise WorkerUnavailable("this deployment is stopping")
        staying = {each: self._staying(each) for each in Role}
        sizes = {each: len(workers) for each, workers in staying.items()} | {role: replicas}
        try:
            cores = self._plan.shared_cores
            require_servable(sizes, None if cores is None else cores.num_cores)
        except ConfigError as error:
            raise InvalidRequest(str(error), param="replicas") from error
        self._troubles.pop(role, None)
        for _ in range(replicas - len(staying[role])):
            self._supervisor.add(self._plan.added_worker(self._free_name(role), role, sum(sizes.values())))
        for worker in _least_missed(staying[role])[: max(0, len(staying[role]) - replicas)]:
            self._supervisor.let_go(worker.spec.name)

    def noted(self, event: MemberEvent) -> None:
        if isinstance(event, MemberDropped) and event.spec.role is not None:
            self._troubles[event.spec.role] = event.reason

    def statuses(self) -> list[pb.PoolStatus]:
        """One for each role, in their order."""
        return [
            pb.PoolStatus(
                role=ROLES[role],
                wished=len(self._staying(role)),
                members=[_member(state) for state in self._supervisor.members if state.spec.role is role],
                trouble=self._troubles.get(role, ""),
            )
            for role in Role
        ]

    def _staying(self, role: Role) -> list[MemberState]:
        return [state for state in self._supervisor.members if state.spec.role is role and not state.is_leaving]

    def _free_name(self, role: Role) -> str:
        """The first that nobody bears, be it one who is leaving: his successor would be refused by the router."""
        taken = {state.spec.name for state in self._supervisor.members}
        return next(name for i in itertools.count() if (name := f"{role}-{i}") not in taken)


def _least_missed(workers: list[MemberState]) -> list[MemberState]:
    """Those that do not run first, then the newest: it has the least in its prefix cache."""
    newest_first = workers[::-1]
    return sorted(newest_first, key=lambda worker: not worker.obstacle)


def _member(state: MemberState) -> pb.PoolMember:
    return pb.PoolMember(worker_id=state.spec.name, is_leaving=state.is_leaving, obstacle=state.obstacle)
