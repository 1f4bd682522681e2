"""A pool as people see it: how many workers are wished, which of them can serve, and what the others are up to."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import Role
from common.pb import serving_pb2 as pb
from common.worker_server import ROLES


@dataclass(frozen=True)
class PoolView:
    role: Role
    num_wished: int
    ready: tuple[str, ...]  # names of workers that are given work
    under_way: tuple[str, ...]  # what each of the others is up to
    trouble: str  # why the last worker that could not be started was given up

    @property
    def is_as_wished(self) -> bool:
        return len(self.ready) == self.num_wished and not self.under_way

    def __str__(self) -> str:
        now = f"{self.role}: {len(self.ready)} of {self.num_wished} ready"
        return "; ".join([now, *self.under_way])


def pool_views(status: pb.ClusterStatus) -> dict[Role, PoolView]:
    """Empty where no supervisor tells of any."""
    by_number = {number: role for role, number in ROLES.items()}
    pools = [(by_number[pool.role], pool) for pool in status.pools if pool.role in by_number]
    return {role: _view(role, pool, status) for role, pool in pools}


def _view(role: Role, pool: pb.PoolStatus, status: pb.ClusterStatus) -> PoolView:
    doings = {member.worker_id: _doing(member, status) for member in pool.members}
    ready = tuple(name for name, doing in doings.items() if not doing)
    under_way = tuple(f"{name} {doing}" for name, doing in doings.items() if doing)
    return PoolView(role, pool.wished, ready, under_way, pool.trouble)


def _doing(member: pb.PoolMember, status: pb.ClusterStatus) -> str:
    """Empty if it serves."""
    worker = next((each for each in status.workers if each.hello.worker_id == member.worker_id), None)
    if member.is_leaving and worker is None:
        return "is leaving"
    if worker is not None and (member.is_leaving or worker.load.is_draining):
        return f"is draining: {num_under_way(worker.load)} under way"
    if member.obstacle:
        return member.obstacle
    if worker is None:
        return "is loading"
    if worker.unfit_reason:
        return f"gets no work: {worker.unfit_reason}"
    return _pairing(member.worker_id, status)


def num_under_way(load: pb.WorkerLoad) -> int:
    return load.num_running + load.num_waiting + load.num_reserved


def _pairing(worker_id: str, status: pb.ClusterStatus) -> str:
    """Empty once it makes a good pair with somebody, or has nobody to pair with."""
    pairs = [pair for pair in status.pairs if worker_id in (pair.prefill_worker, pair.decode_worker)]
    if not pairs or any(pair.standing == pb.PAIR_GOOD for pair in pairs):
        return ""
    if any(pair.standing == pb.PAIR_UNCHECKED for pair in pairs):
        return "is being checked"
    return f"is refused: {pairs[0].reason}"
