"""The queue: order, room, bounds, and that every place is given back."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from common.errors import IncompatiblePeer, QueueFull, WorkerLost, WouldMissDeadline
from common.kv_layout import KVLayout
from common.pb import serving_pb2 as pb
from common.sampling import SamplingParams
from router.admission import RETURN_WAIT_S, Admission
from router.disaggregation import Disaggregation
from router.placement import DOUBT_S, Placement, PlacementGoals, Placer
from router.policy import PREFILL_QUEUE_TOKENS, make_policies
from router.prefix_index import PrefixIndex
from router.registry import Registry
from router.request import Request
from router.server import LONE_DECODE_S
from router.tenant import Tenant
from router.waiting_line import QueueBounds
from router.worker import HEARTBEAT_LOST_S, Worker

ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "colocated": pb.ROLE_COLOCATED}

TTFT_GOAL_S = 2.0


class Pool:
    """A registry with workers that nobody calls, and an admission in front of them."""

    def __init__(
        self,
        max_queued: int = 10,
        *,
        max_queued_tokens: int = 100_000,
        must_check_pairs: bool = False,
        disaggregation: Disaggregation = "auto",
        max_ttft_s: float | None = None,
    ) -> None:
        lone_decode_s = LONE_DECODE_S[disaggregation]
        self.registry = Registry(
            "tiny", PrefixIndex(1000), must_check_pairs=must_check_pairs, lone_decode_s=lone_decode_s
        )
        goals = PlacementGoals(disaggregation, ttft_s=TTFT_GOAL_S, tpot_s=0.1)
        self.placer = Placer(self.registry, make_policies("kv_aware", random.Random(0)), goals)
        self.admission = Admission(self.registry, self.placer, QueueBounds(max_queued, max_queued_tokens), max_ttft_s)
        self.workers: list[Worker] = []

    def join(
        self,
        name: str,
        max_num_seqs: int = 1,
        free_blocks: int = 1000,
        dtype: str = "float32",
        wire_dtype: str = "same",
        block_size: int = 16,
    ) -> Worker:
        hello = pb.WorkerHello(
            worker_id=name,
            role=ROLES[name.partition("-")[0]],
            incarnation="i",
            model="tiny",
            layout=KVLayout("f00d", 4, 2, 8, dtype, "theta=10000").to_pb(),
            address="127.0.0.1:1",
            max_num_seqs=max_num_seqs,
            kv_capacity_tokens=16000,
            block_size=block_size,
            max_model_len=1600,
            wire_dtype=wire_dtype,
        )
        worker = Worker(hello)
        worker.load = pb.WorkerLoad(free_blocks=free_blocks, total_blocks=1000)
        self.workers.append(worker)
        self.registry.join(worker)
        return worker


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    made = Pool()
    yield made
    for worker in made.workers:
        assert worker.num_assigned == worker.assigned_tokens == 0
        await worker.close_when_idle()
    assert made.admission.num_queued == made.admission.num_placed == 0


def request(num_tokens: int = 10, tenant: str = "anonymous") -> Request:
    deadline_s = time.monotonic() + 60
    return Request("r", [1] * num_tokens, SamplingParams(max_tokens=4), deadline_s, Tenant(tenant))


async def test_a_request_is_placed_at_once_when_a_pair_has_room(pool: Pool) -> None:
    prefill, decode = pool.join("prefill-0"), pool.join("decode-0")
    async with pool.admission.place(request(), is_retry=False) as placement:
        assert (placement.prefill, placement.decode) == (prefill, decode)
        assert (prefill.num_assigned, decode.assigned_tokens) == (1, 10)
        async with pool.admission.prefilling(placement):
            assert prefill.num_assigned == 1
        assert prefill.num_assigned == 0
        assert decode.num_assigned == 1


async def test_requests_are_placed_in_the_order_they_came(pool: Pool) -> None:
    pool.join("prefill-0")
    pool.join("decode-0", max_num_seqs=1)
    order: list[int] = []
    gates = [asyncio.Event() for _ in range(4)]

    async def one(index: int) -> None:
        async with pool.admission.place(request(), is_retry=False) as placement:
            async with pool.admission.prefilling(placement):
                order.append(index)
            await gates[index].wait()

    tasks = [asyncio.create_task(one(index)) for index in range(4)]
    for index, gate in enumerate(gates):
        while len(order) <= index:
            await asyncio.sleep(0)
        gate.set()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3]


async def test_one_that_leaves_the_queue_is_passed_over(pool: Pool) -> None:
    pool.join("prefill-0")
    pool.join("decode-0", max_num_seqs=1)
    first = AsyncExitStack()
    await first.enter_async_context(pool.admission.place(request(), is_retry=False))
    leaving = asyncio.create_task(_placed(pool))
    staying = asyncio.create_task(_placed(pool))
    while pool.admission.num_queued < 2:
        await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait({leaving})
    assert pool.admission.num_queued == 1
    await first.aclose()
    await asyncio.wait_for(staying, 5)


async def test_a_full_queue_refuses_at_once() -> None:
    pool = Pool(max_queued=1)
    pool.join("prefill-0")
    pool.join("decode-0", max_num_seqs=1)
    async with pool.admission.place(request(), is_retry=False):
        waiting = asyncio.create_task(_placed(pool))
        while not pool.admission.num_queued:
            await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await _placed(pool)
    await waiting


async def test_a_new_request_is_refused_at_once_when_nothing_can_serve_it(pool: Pool) -> None:
    pool.join("decode-0")
    with pytest.raises(WorkerLost, match="no prefill worker"):
        await _placed(pool)


async def test_a_retried_request_waits_for_a_worker_to_come_back(pool: Pool) -> None:
    pool.join("decode-0")
    waiting = asyncio.create_task(_placed(pool, is_retry=True))
    while not pool.admission.num_queued:
        await asyncio.sleep(0)
    pool.join("prefill-0")
    assert (await asyncio.wait_for(waiting, 5)).decode.worker_id == "decode-0"


async def test_prompts_wait_in_the_router_once_a_prefill_worker_has_enough(pool: Pool) -> None:
    pool.join("prefill-0")
    pool.join("decode-0", max_num_seqs=10)
    async with pool.admission.place(request(PREFILL_QUEUE_TOKENS), is_retry=False) as first:
        waiting = asyncio.create_task(_placed(pool))
        for _ in range(10):
            await asyncio.sleep(0)
        assert pool.admission.num_queued == 1
        async with pool.admission.prefilling(first):
            pass
        await asyncio.wait_for(waiting, 5)


def caches(pool: Pool, worker: Worker, prompt: Request, num_blocks: int) -> None:
    """A heartbeat that tells of the prompt's first blocks."""
    stored = prompt.prompt_hashes.of(worker.hello.block_size)[:num_blocks]
    pool.registry.heard(worker, pb.WorkerLoad(free_blocks=1000, total_blocks=1000, stored_blocks=stored))


async def test_a_prompt_goes_where_its_prefix_is_and_counts_there_as_what_is_left_to_compute(pool: Pool) -> None:
    pool.join("prefill-0"), pool.join("decode-0", 10)
    holder, decode = pool.join("prefill-1"), pool.join("decode-1", 10)
    caches(pool, holder, request(101), 4)
    caches(pool, decode, request(101), 2)
    for _ in range(20):
        async with pool.admission.place(request(101), is_retry=False) as placement:
            assert (placement.prefill, placement.decode) == (holder, decode)
            assert (holder.assigned_tokens, decode.assigned_tokens) == (101 - 64, 101)
    assert {(await _placed(pool, num_tokens=10)).prefill for _ in range(40)} == {holder, pool.workers[0]}


async def test_workers_of_unlike_block_sizes_are_each_asked_in_their_own(pool: Pool) -> None:
    small, large, _ = pool.join("prefill-0"), pool.join("prefill-1", block_size=64), pool.join("decode-0", 10)
    prompt = request(150)
    caches(pool, small, prompt, 3)
    caches(pool, large, prompt, 2)
    assert pool.registry.cached_tokens(prompt.prompt_hashes, [small, large]) == {small: 48, large: 128}
    assert (await _placed(pool, num_tokens=150)).prefill is large


async def test_a_worker_that_returns_holds_only_what_it_then_reports(pool: Pool) -> None:
    worker, prompt = pool.join("prefill-0"), request(101)
    caches(pool, worker, prompt, 6)
    assert pool.registry.num_cached_blocks(worker) == 6
    pool.registry.leave(worker)
    caches(pool, worker, prompt, 6)  # its last report, too late
    again = pool.join("prefill-0")
    assert pool.registry.num_cached_blocks(again) == 0
    caches(pool, again, prompt, 1)
    assert pool.registry.cached_tokens(prompt.prompt_hashes, [again]) == {again: 16}


async def test_a_replacement_is_the_one_that_holds_the_prompt(pool: Pool) -> None:
    lost, _, holder, _ = (pool.join(name) for name in ("prefill-0", "prefill-1", "prefill-2", "decode-0"))
    caches(pool, lost, request(101), 6)
    caches(pool, holder, request(101), 3)
    async with pool.admission.place(request(101), is_retry=False) as placement:
        async with pool.admission.prefilling(placement):
            assert placement.prefill is lost
        replaced = pool.admission.replace_prefill(request(101), placement)
        async with pool.admission.prefilling(replaced):
            assert replaced.prefill is holder
            assert holder.assigned_tokens == 101 - 48


async def test_a_decode_worker_without_blocks_is_not_chosen(pool: Pool) -> None:
    pool.join("prefill-0")
    busy, roomy = pool.join("decode-0", 10, free_blocks=2), pool.join("decode-1", 10)
    busy.num_assigned = 1  # somebody's blocks: an idle worker is always tried
    for _ in range(20):
        assert (await _placed(pool, num_tokens=100)).decode is roomy
    busy.num_assigned = 0


async def test_colocated_workers_serve_when_there_is_no_pair(pool: Pool) -> None:
    alone = pool.join("colocated-0")
    async with pool.admission.place(request(), is_retry=False) as placement:
        assert placement.prefill is None
        assert placement.decode is alone


async def test_a_replacement_is_another_prefill_worker_or_nobody(pool: Pool) -> None:
    pool.join("prefill-0")
    pool.join("decode-0")
    async with pool.admission.place(request(), is_retry=False) as placement:
        async with pool.admission.prefilling(placement):
            pass
        with pytest.raises(WorkerLost):
            pool.admission.replace_prefill(request(), placement)
        other = pool.join("prefill-1")
        replaced = pool.admission.replace_prefill(request(), placement)
        assert (replaced.prefill, replaced.decode) == (other, placement.decode)
        async with pool.admission.prefilling(replaced):
            assert other.num_assigned == 1


async def test_only_workers_whose_kv_fits_are_paired(pool: Pool) -> None:
    pool.join("prefill-0", dtype="float32")
    pool.join("decode-0", 10, dtype="bfloat16")
    assert "layouts differ in dtype" in str(pool.registry.not_ready_reason())
    with pytest.raises(WorkerLost, match="dtype"):
        await _placed(pool)
    fitting = pool.join("prefill-1", dtype="bfloat16")
    assert pool.registry.not_ready_reason() is None
    for _ in range(20):
        assert (await _placed(pool)).prefill is fitting


async def test_unlike_dtypes_fit_where_both_sides_use_the_same_lossy_encoding(pool: Pool) -> None:
    pool.join("prefill-0", dtype="bfloat16", wire_dtype="fp8")
    pool.join("decode-0", 10, dtype="float32", wire_dtype="int8")
    assert "wire_dtype differs: prefill-0 writes 'fp8', decode-0 reads 'int8'" in str(pool.registry.not_ready_reason())
    fitting = pool.join("decode-1", 10, dtype="float32", wire_dtype="fp8")
    for _ in range(20):
        assert (await _placed(pool)).decode is fitting


async def test_only_pairs_that_passed_their_check_are_chosen() -> None:
    pool = Pool(must_check_pairs=True)
    first, second, decode = pool.join("prefill-0"), pool.join("prefill-1"), pool.join("decode-0", 10)
    with pytest.raises(WorkerLost, match="has not passed its check"):
        await _placed(pool)
    waiting = asyncio.create_task(_placed(pool, is_retry=True))
    while not pool.admission.num_queued:
        await asyncio.sleep(0)
    pairs = {pair.prefill: pair for pair in pool.registry.pairs}
    pairs[second].accept()
    pool.registry.on_change()
    assert (await asyncio.wait_for(waiting, 5)).prefill is second
    pairs[first].refuse("wrong")
    for _ in range(20):
        async with pool.admission.place(request(), is_retry=False) as placement:
            assert (placement.prefill, placement.decode) == (second, decode)
            with pytest.raises(WorkerLost):
                pool.admission.replace_prefill(request(), placement)
    pool.registry.leave(second)
    assert pool.registry.not_ready_reason() == "wrong"


async def test_a_worker_that_was_lost_is_not_chosen_before_it_is_heard_of_again(pool: Pool) -> None:
    lost, other, _ = pool.join("prefill-0"), pool.join("prefill-1"), pool.join("decode-0", 10)
    with pytest.raises(WorkerLost), lost.called():
        raise WorkerLost("injected")
    for _ in range(20):
        assert (await _placed(pool)).prefill is other
    lost.heard(pb.WorkerLoad())
    assert {(await _placed(pool)).prefill for _ in range(40)} == {lost, other}


async def test_a_worker_whose_heartbeat_stopped_is_not_fit(pool: Pool) -> None:
    pool.join("prefill-0")
    silent = pool.join("decode-0")
    assert pool.registry.not_ready_reason() is None
    silent.heartbeat_s -= HEARTBEAT_LOST_S
    assert pool.registry.not_ready_reason() == "no decode worker is alive (decode-0: silent)"


async def test_a_second_worker_of_the_same_name_or_of_another_model_is_refused(pool: Pool) -> None:
    first = pool.join("decode-0")
    with pytest.raises(IncompatiblePeer, match="another --name"):
        pool.join("decode-0")
    assert pool.registry.workers == [first]
    hello = pb.WorkerHello(worker_id="decode-1", role=pb.ROLE_DECODE, model="other", address="127.0.0.1:1")
    stranger = Worker(hello)
    pool.workers.append(stranger)
    with pytest.raises(IncompatiblePeer, match="'other'"):
        pool.registry.join(stranger)


async def test_a_retry_goes_to_the_front_of_a_queue_that_is_full() -> None:
    pool = Pool(max_queued=1)
    pool.join("prefill-0")
    pool.join("decode-0", max_num_seqs=1)
    order: list[str] = []

    async def one(name: str, *, is_retry: bool) -> None:
        async with pool.admission.place(request(), is_retry=is_retry):
            order.append(name)

    async with pool.admission.place(request(), is_retry=False):
        fresh = asyncio.create_task(one("fresh", is_retry=False))
        while not pool.admission.num_queued:
            await asyncio.sleep(0)
        again = asyncio.create_task(one("again", is_retry=True))
        while pool.admission.num_queued < 2:
            await asyncio.sleep(0)
    await asyncio.gather(fresh, again)
    assert order == ["again", "fresh"]


async def test_a_burst_of_one_tenant_makes_room_for_another_and_does_not_delay_it() -> None:
    pool = Pool(max_queued=4)
    pool.join("prefill-0")
    pool.join("decode-0", max_num_seqs=1)
    order: list[str] = []

    async def one(tenant: str) -> None:
        async with pool.admission.place(request(tenant=tenant), is_retry=False):
            order.append(tenant)

    async with pool.admission.place(request(), is_retry=False):
        burst = [asyncio.create_task(one("burst")) for _ in range(4)]
        while pool.admission.num_queued < 4:
            await asyncio.sleep(0)
        lonely = asyncio.create_task(one("lonely"))
        results = await asyncio.wait_for(asyncio.gather(burst[3], return_exceptions=True), 5)
        assert isinstance(results[0], QueueFull)
        assert pool.admission.num_queued == 4
    await asyncio.wait_for(asyncio.gather(*burst[:3], lonely), 5)
    assert sorted(order) == ["burst", "burst", "burst", "lonely"]
    assert pool.admission.num_queued == pool.admission.num_placed == 0
    assert all(worker.num_assigned == 0 for worker in pool.workers)


async def test_a_queue_is_bounded_in_prompt_tokens() -> None:
    pool = Pool(max_queued_tokens=100)
    pool.join("prefill-0")
    pool.join("decode-0", max_num_seqs=1)
    async with pool.admission.place(request(), is_retry=False):
        waiting = asyncio.create_task(_placed(pool, num_tokens=90))
        while not pool.admission.num_queued:
            await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="90 prompt tokens"):
            await _placed(pool, num_tokens=11)
    await asyncio.wait_for(waiting, 5)


async def _placed(pool: Pool, *, is_retry: bool = False, num_tokens: int = 10) -> Placement:
    async with pool.admission.place(request(num_tokens), is_retry=is_retry) as placement:
        return placement


async def test_a_tenants_prompt_is_looked_for_under_its_own_salt(pool: Pool) -> None:
    prompt = list(range(33))
    salted = Request(
        "r", prompt, SamplingParams(max_tokens=4), time.monotonic() + 60, Tenant("acme", cache_salt=b"acme")
    )
    plain = Request("r", prompt, SamplingParams(max_tokens=4), time.monotonic() + 60)
    worker = pool.join("prefill-0")
    pool.registry.heard(worker, pb.WorkerLoad(stored_blocks=salted.prompt_hashes.of(16)))
    assert pool.registry.cached_tokens(salted.prompt_hashes, [worker]) == {worker: 32}
    assert pool.registry.cached_tokens(plain.prompt_hashes, [worker]) == {worker: 0}


async def test_one_who_waits_outlasts_moments_in_which_nobody_could_serve(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up only when they add up to one long time, not because one of them meets the moment of a look."""
    monkeypatch.setattr("router.admission.RETURN_POLL_S", 0.001)
    unready_s = RETURN_WAIT_S - 1
    monkeypatch.setattr(pool.registry, "unready_s", lambda: unready_s)
    pool.join("decode-0")
    waiting = asyncio.create_task(_placed(pool, is_retry=True))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    unready_s = RETURN_WAIT_S
    with pytest.raises(WorkerLost, match="no prefill worker"):
        await asyncio.wait_for(waiting, 5)


def measured(pool: Pool, worker: Worker, s_per_token: float, *, uncached: int = 0, decode_step_s: float = 0.0) -> None:
    """A heartbeat with what the worker's engine has measured. A decode step that is told of is one with streams."""
    load = pb.WorkerLoad(
        free_blocks=1000,
        total_blocks=1000,
        uncached_tokens=uncached,
        prefill_s_per_token=s_per_token,
        decode_step_s=decode_step_s,
        num_running=1 if decode_step_s else 0,
    )
    pool.registry.heard(worker, load)


def grown(pool: Pool, name: str) -> Worker:
    """A decode worker that has been a member for long enough to compute prompts."""
    worker = pool.join(name, 10)
    worker.joined_s -= 60
    return worker


async def test_a_request_that_cannot_make_its_deadline_is_refused_with_the_prediction(pool: Pool) -> None:
    prefill, _ = pool.join("prefill-0"), pool.join("decode-0", 10)
    hurried = request(1000)
    hurried.deadline_s = hurried.timeline.arrival_s + 0.5
    async with pool.admission.place(request(1000), is_retry=False) as first:
        assert first.ttft_s is None  # nobody has measured, so nobody is refused
    measured(pool, prefill, 0.002)
    with pytest.raises(WouldMissDeadline, match=r"2 s after .* at most 0\.5 s") as refusal:
        async with pool.admission.place(hurried, is_retry=False):
            raise AssertionError("it was placed")
    assert 1.4 < (refusal.value.retry_after_s or 0) < 1.7
    async with pool.admission.place(hurried, is_retry=True):
        pass  # somebody reads its answer already


async def test_a_worker_that_was_slow_once_is_tried_again_when_it_has_been_idle(pool: Pool) -> None:
    """Whoever is refused is never measured: without a trial it would be slow for ever."""
    prefill, _ = pool.join("prefill-0"), pool.join("decode-0", 10)
    measured(pool, prefill, 0.0001)
    measured(pool, prefill, 0.002)
    with pytest.raises(WouldMissDeadline):
        await _hurried(pool)
    prefill.prompts._busy_s -= DOUBT_S
    await _hurried(pool)
    with pytest.raises(WouldMissDeadline):  # one was tried, and nothing is known of it yet
        await _hurried(pool)


async def test_a_prompt_too_long_for_the_best_speed_is_refused_by_an_idle_worker_too(pool: Pool) -> None:
    prefill, _ = pool.join("prefill-0"), pool.join("decode-0", 10)
    measured(pool, prefill, 0.001)
    prefill.prompts._busy_s -= DOUBT_S
    with pytest.raises(WouldMissDeadline):
        await _hurried(pool)


async def _hurried(pool: Pool) -> None:
    """Placed, if it is not refused."""
    hurried = request(1000)
    hurried.deadline_s = hurried.timeline.arrival_s + 0.5
    async with (
        pool.admission.place(hurried, is_retry=False) as placement,
        pool.admission.prefilling(placement),
    ):
        pass


async def test_what_is_ahead_in_the_line_and_on_the_workers_counts(pool: Pool) -> None:
    pool.admission = Admission(pool.registry, pool.placer, QueueBounds(10, 100_000), 4.9)
    prefill, _ = pool.join("prefill-0"), pool.join("decode-0", 10)
    measured(pool, prefill, 0.001, uncached=1000)
    async with pool.admission.place(request(2500), is_retry=False):  # 1 s for others, 2.5 s of its own
        waiting = asyncio.create_task(_placed(pool, num_tokens=500))
        while not pool.admission.num_queued:
            await asyncio.sleep(0)
        with pytest.raises(WouldMissDeadline, match="behind 500 prompt tokens"):
            await _placed(pool, num_tokens=1000)
    assert (await asyncio.wait_for(waiting, 5)).prefill is prefill


async def test_one_whose_turn_comes_too_late_is_refused_before_anything_is_spent_on_it() -> None:
    pool = Pool(max_ttft_s=1.0)
    prefill, _ = pool.join("prefill-0"), pool.join("decode-0", max_num_seqs=1)
    async with pool.admission.place(request(), is_retry=False):
        waiting = asyncio.create_task(_placed(pool, num_tokens=100))
        while not pool.admission.num_queued:
            await asyncio.sleep(0)
        measured(pool, prefill, 0.02)
    with pytest.raises(WouldMissDeadline, match="now that its turn has come"):
        await asyncio.wait_for(waiting, 5)
    assert (await asyncio.wait_for(_placed(pool), 5)).prefill is prefill
    assert all(worker.num_assigned == worker.prompts.given_tokens == 0 for worker in pool.workers)


async def test_a_decode_worker_helps_when_the_prefill_queue_would_miss_the_goal(pool: Pool) -> None:
    prefill, decode = pool.join("prefill-0"), grown(pool, "decode-0")
    measured(pool, prefill, 0.002, uncached=100), measured(pool, decode, 0.002, decode_step_s=0.02)
    assert (await _placed(pool, num_tokens=200)).reason == "disaggregated"  # 0.2 + 0.4 s; the goal is 2 s
    measured(pool, prefill, 0.002, uncached=800)
    async with pool.admission.place(request(300), is_retry=False) as placement:
        assert (placement.prefill, placement.decode, placement.reason) == (None, decode, "prefill_queue")
        assert decode.prompts.given_tokens == 300
        async with pool.admission.prefilling(placement):
            pass
        assert decode.prompts.given_tokens == 0


async def test_streams_that_leave_no_time_keep_prompts_off_their_worker(pool: Pool) -> None:
    prefill, decode = pool.join("prefill-0"), grown(pool, "decode-0")
    measured(pool, prefill, 0.002, uncached=1500), measured(pool, decode, 0.002, decode_step_s=0.095)
    assert (await _placed(pool, num_tokens=300)).reason == "disaggregated"


async def test_a_prompt_that_costs_less_than_a_handoff_is_computed_where_it_is_decoded(pool: Pool) -> None:
    prefill, decode = pool.join("prefill-0"), grown(pool, "decode-0")
    measured(pool, prefill, 0.001), measured(pool, decode, 0.001)
    assert (await _placed(pool, num_tokens=20)).reason == "disaggregated"
    pool.admission.note_handoff(0.030)
    assert (await _placed(pool, num_tokens=20)).reason == "short_prompt"
    assert (await _placed(pool, num_tokens=40)).reason == "disaggregated"
    caches(pool, decode, request(40), 2)
    decode.load.prefill_s_per_token = 0.001
    assert (await _placed(pool, num_tokens=40)).reason == "short_prompt"


async def test_decode_workers_serve_alone_once_no_prefill_worker_is_left(pool: Pool) -> None:
    prefill, decode = pool.join("prefill-0"), grown(pool, "decode-0")
    pool.registry.leave(prefill)
    assert pool.registry.not_ready_reason() is None
    placement = await _placed(pool)
    assert (placement.prefill, placement.decode, placement.reason) == (None, decode, "no_prefill_worker")


@pytest.mark.parametrize(("mode", "reason"), [("always", None), ("never", "never")])
async def test_the_setting_overrules_measurement(mode: Disaggregation, reason: str | None) -> None:
    pool = Pool(disaggregation=mode)
    prefill = pool.join("prefill-0")
    grown(pool, "decode-0")
    assert (await _placed(pool)).reason == (reason or "disaggregated")
    pool.registry.leave(prefill)
    if reason is None:
        with pytest.raises(WorkerLost, match="no prefill worker"):
            await _placed(pool)
    else:
        assert (await _placed(pool)).reason == reason
