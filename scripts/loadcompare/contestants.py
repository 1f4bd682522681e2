"""Who is compared: a system that is started here for as long as it is measured, or a server that runs already."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster.plan import Plan, available_cores
from common.config import ServeConfig
from loadgen.arguments import Contestant
from loadgen.grpc_target import GrpcTarget
from loadgen.http_target import Endpoint, HttpTarget
from loadgen.record import Target
from servingbench.client import BenchFailed
from servingbench.system import Configuration, plan_for, run_system, until_ready

READY_TIMEOUT_S = 600.0

Work = Callable[[Target], Awaitable[None]]


@dataclass(frozen=True)
class Arena:
    """How every contestant is reached."""

    config: ServeConfig
    over_grpc: bool  # exact token counts; possible only where all contestants are pdserve's
    model: str | None
    api_key: str | None

    async def host(self, contestant: Contestant, work: Work) -> None:
        """Do `work` on the contestant, alone on this machine as far as it is ours.

        Raises: ConfigError, MemberGivenUp, BenchFailed, Unreachable; what `work` raises.
        """
        if contestant.url is not None:
            await _connected(HttpTarget(contestant.url, Endpoint.COMPLETIONS, self.model, self.api_key), work)
            return
        configuration = Configuration(self.config.transfer.transport if contestant.is_disaggregated else None)
        plan = plan_for(configuration, self.config, available_cores())

        async def once_ready(plan: Plan) -> None:
            try:
                await until_ready(plan, READY_TIMEOUT_S)
            except TimeoutError as error:
                raise BenchFailed(f"{contestant.name} was not ready within {READY_TIMEOUT_S:.0f} s") from error
            await _connected(self._target(contestant.name, plan), work)

        with TemporaryDirectory(prefix="pdserve-load-test-") as folder:
            await run_system(plan, Path(folder), once_ready)

    def _target(self, label: str, plan: Plan) -> Target:
        target: Target = (
            GrpcTarget(plan.grpc_address) if self.over_grpc else HttpTarget(plan.http_url, Endpoint.COMPLETIONS)
        )
        target.label = label
        return target


async def _connected(target: Target, work: Work) -> None:
    try:
        await target.connect()
        await work(target)
    finally:
        await target.close()
