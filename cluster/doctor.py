"""`pdserve doctor`: is everything here that serving needs, how fast is it, and does splitting pay?"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator

from rich.console import Console

from cluster.advice_report import advice_table, measured_lines, summary
from cluster.config_checks import check_config, check_ports
from cluster.deployment import until_ready
from cluster.display import Display
from cluster.findings import Finding, Grade, findings_table, is_healthy
from cluster.machine_checks import check_clocks, check_machine
from cluster.plan import Overrides, Plan, available_cores, make_plan
from cluster.private_run import private_run
from cluster.registry_client import cluster_status
from cluster.running import RunningDeployment
from cluster.split_advice import advise
from cluster.status import pair_table
from cluster.trial import Measured, Trial, measured_by
from cluster.up import UpOptions, deploy
from common.config import Role, ServeConfig
from common.errors import ConfigError, WorkerUnavailable
from common.model_source import resolve_model
from common.pb import serving_pb2 as pb
from engine.build import default_step_tokens
from engine.model.dtype import resolve_device

ONE_PAIR = {Role.PREFILL: 1, Role.DECODE: 1, Role.COLOCATED: 0}
STATUS_TIMEOUT_S = 3.0
INTERRUPTED = 130  # exit code, as of a shell


def run_doctor(options: UpOptions, found: RunningDeployment, console: Console) -> int:
    """0 when nothing is wrong. A deployment that runs is asked what it has measured itself; where none runs, and nobody
    said that one does, a pair of workers is started for a while.

    Raises: ServingError, MemberGivenUp, ConfigError when the pair cannot be measured.
    """
    running = asyncio.run(_status(found))
    asked_s = time.time()
    findings = list(_findings(options, running, asked_s))
    console.print(findings_table(findings))
    if not is_healthy(findings):
        return 1
    if running is not None:
        measured = _as_reported(options.config, running, console)
    elif (measured := _try_out(options, console)) is None:
        return INTERRUPTED
    if measured is not None:
        _advise(measured, console)
    return 0


def _findings(options: UpOptions, running: pb.ClusterStatus | None, asked_s: float) -> Iterator[Finding]:
    """asked_s: when `running` was told."""
    config = options.config
    yield from check_machine(config)
    try:
        plan = make_plan(config, options.overrides)
    except ConfigError as error:
        yield Finding("config", Grade.BAD, str(error))
        return
    try:
        model = resolve_model(config.model.source)
    except ConfigError as error:
        yield Finding("model", Grade.BAD, str(error))
    else:
        yield from check_config(plan, model)
    if running is None:
        yield check_ports(plan)
        return
    yield from check_clocks(running, asked_s)
    standing = "serves" if running.is_ready else f"does not serve: {running.reason}"
    yield Finding("running", Grade.GOOD if running.is_ready else Grade.BAD, f"{running.model} {standing}")


async def _status(found: RunningDeployment) -> pb.ClusterStatus | None:
    """None: nothing runs there. Raises: WorkerUnavailable if somebody said that something does."""
    try:
        return await cluster_status(found.control_address, found.access, STATUS_TIMEOUT_S)
    except WorkerUnavailable:
        if found.is_asked_for:
            raise
        return None


def _try_out(options: UpOptions, console: Console) -> Measured | None:
    """None: somebody said stop."""
    results: list[Measured] = []
    config = options.config
    router = config.router.model_copy(update={"disaggregation": "always"})
    slo = config.slo.model_copy(update={"ttft_s": None})
    config = config.model_copy(update={"router": router, "slo": slo})
    with private_run(dataclasses.replace(options, config=config, overrides=Overrides(ONE_PAIR))) as (private, api_key):

        async def work(plan: Plan, display: Display) -> None:
            await until_ready(plan, display)
            access = plan.config.security.cluster_access()
            chunk = _chunk_tokens(config)
            goal_s = config.slo.tpot_s
            trial = Trial(plan.grpc_address, api_key, plan.control_address, access, chunk, goal_s, display.doing)
            results.append(await trial.measure())

        deploy(private, console, work)
    return results[0] if results else None


def _as_reported(config: ServeConfig, running: pb.ClusterStatus, console: Console) -> Measured | None:
    console.print(pair_table(running))
    measured = measured_by(running, _chunk_tokens(config), config.slo.tpot_s)
    if measured is None:
        console.print("Its workers have not measured themselves yet: send it some requests, then ask again.")
    return measured


def _advise(measured: Measured, console: Console) -> None:
    advice = [advise(prompt, measured.speeds) for prompt in measured.prompts]
    for line in measured_lines(measured):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(advice_table(advice))
    for line in summary(advice, measured.speeds.tpot_goal_s, available_cores()):
        console.print(line, highlight=False, markup=False)


def _chunk_tokens(config: ServeConfig) -> int:
    """That a colocated worker would compute beside its streams."""
    pool = config.colocated
    return pool.max_num_batched_tokens or default_step_tokens(resolve_device(pool.device))
