"""Hypothesis looks for a sequence of wishes, faults and deaths after which something is wrong, leaked or stuck."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.kv_transfer.faultlab import Lab, running_lab
from tests.kv_transfer.faults import FRAME_FAULTS, HANDSHAKE, PAYLOAD_FAULTS, POINTS, Fault, FaultPlan
from tests.kv_transfer.lab_journey import Wish
from tests.kv_transfer.lab_workers import Patience
from tests.kv_transfer.truth import VOCAB_SIZE

HURRIED = Patience(connect_s=0.5, commit_s=0.2, stall_s=0.2)
STEMS = [[(7 * index + start) % VOCAB_SIZE for index in range(24)] for start in (1, 2)]


class TransfersThroughFaults(RuleBasedStateMachine):
    """A synchronous face on a lab and its event loop. The loop stands still between two rules, the engines do not."""

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._requests: list[asyncio.Task[None]] = []

    @initialize(seed=st.integers(0, 2**32 - 1))
    def open_lab(self, seed: int) -> None:
        self._random = Random(seed)
        self._plan = FaultPlan(self._random)
        self._running = running_lab("loopback", self._plan, HURRIED)
        self._lab: Lab = self._runner.run(self._running.__aenter__())

    @rule(
        stem=st.sampled_from([[], *STEMS]),
        num_more=st.integers(1, 50),
        leaves_after_s=st.sampled_from([None, None, 0.0, 0.001, 0.005, 0.02]),
        is_one_leg_aborted=st.booleans(),
    )
    def wish(self, stem: list[int], num_more: int, leaves_after_s: float | None, *, is_one_leg_aborted: bool) -> None:
        prompt = stem + [self._random.randrange(VOCAB_SIZE) for _ in range(num_more)]
        wish = Wish(prompt, leaves_after_s, 0.3 if is_one_leg_aborted else 0.0)

        async def begin() -> None:
            self._requests.append(asyncio.create_task(self._lab.request(wish)))

        self._runner.run(begin())

    @rule(
        fault=st.sampled_from([*FRAME_FAULTS, Fault.CUT, Fault.KILL_SOURCE, Fault.KILL_DESTINATION]),
        point=st.sampled_from(POINTS),
        num_spared=st.integers(0, 5),
    )
    def spoil_a_frame(self, fault: Fault, point: str, num_spared: int) -> None:
        self._plan.arm(fault, point, 0 if point in HANDSHAKE else num_spared)

    @rule(fault=st.sampled_from(PAYLOAD_FAULTS), num_spared=st.integers(0, 5))
    def spoil_a_payload(self, fault: Fault, num_spared: int) -> None:
        self._plan.arm(fault, "piece", num_spared)

    @rule(place=st.integers(0, 1))
    def kill_a_prefill_worker(self, place: int) -> None:
        self._runner.run(_at_once(self._lab.prefills[place].process.die))

    @rule(place=st.integers(0, 1))
    def kill_a_decode_worker(self, place: int) -> None:
        self._runner.run(_at_once(self._lab.decodes[place].process.die))

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.005, 0.02]))
    def let_time_pass(self, seconds: float) -> None:
        self._runner.run(asyncio.sleep(seconds))

    @rule()
    def await_the_oldest(self) -> None:
        if self._requests:
            self._runner.run(asyncio.wait_for(self._requests.pop(0), timeout=None))

    @invariant()
    def no_batch_has_seen_wrong_kv(self) -> None:
        assert self._lab.wrong == []

    def teardown(self) -> None:
        async def finish() -> None:
            await asyncio.gather(*self._requests)
            await self._running.__aexit__(None, None, None)

        self._runner.run(finish())
        self._runner.close()
        assert self._lab.tally.faults_found == []


async def _at_once(call: Callable[[], None]) -> None:
    call()


TestTransfersThroughFaults = TransfersThroughFaults.TestCase
TestTransfersThroughFaults.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # each step costs milliseconds: shrinking would take minutes
    suppress_health_check=list(HealthCheck),
)
