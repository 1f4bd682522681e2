"""What the page is told, without a browser: tests/end_to_end/test_dashboard.py has one."""

from __future__ import annotations

import time

import pytest

from common.errors import WorkerLost
from common.lifecycle import State
from common.pb import serving_pb2 as pb
from common.sampling import SamplingParams
from router.cluster_metrics import ClusterCollector
from router.dashboard.history import WINDOW_TICKS, History
from router.dashboard.reading import Reading
from router.dashboard.state import Dashboard
from router.metrics import RouterMetrics
from router.request import Request

PROMPT = [1234567, 7654321]
CLUSTER = pb.ClusterStatus(
    model="tiny",
    is_ready=True,
    num_queued=3,
    num_active=4,
    workers=[
        pb.WorkerSummary(
            hello=pb.WorkerHello(worker_id="decode-0", role=pb.ROLE_DECODE, address="127.0.0.1:1"),
            load=pb.WorkerLoad(total_blocks=100, free_blocks=60, num_running=2),
            num_assigned=2,
        ),
        pb.WorkerSummary(
            hello=pb.WorkerHello(worker_id="prefill-0", role=pb.ROLE_PREFILL), unfit_reason="suspect: a call failed"
        ),
    ],
    pairs=[
        pb.PairSummary(
            prefill_worker="prefill-0",
            decode_worker="decode-0",
            standing=pb.PAIR_GOOD,
            link=pb.LinkStatus(transport="shm", bytes_per_s=2e9, round_trip_s=0.001, num_bytes=500),
        )
    ],
)


class Scene:
    def __init__(self) -> None:
        self.cluster = pb.ClusterStatus()
        self.cluster.CopyFrom(CLUSTER)
        self.metrics = RouterMetrics()
        self.running: list[Request] = []
        self.metrics.registry.register(ClusterCollector(lambda: self.cluster))
        self.dashboard = Dashboard(lambda: self.cluster, self.metrics.registry, lambda: self.running)
        self.metrics.on_ended = self.dashboard.request_ended


@pytest.fixture
def scene() -> Scene:
    return Scene()


def new_request(request_id: str = "r-1") -> Request:
    return Request(request_id, PROMPT, SamplingParams(max_tokens=4), time.monotonic() + 60)


def served(request: Request, metrics: RouterMetrics, num_tokens: int = 3) -> Request:
    for state in (State.RESERVING, State.PREFILLING, State.TRANSFERRING, State.DECODING):
        request.timeline.enter(state)
    for _ in range(num_tokens):
        metrics.note_token(request.timeline, request.timeline.count_token())
    return request


def test_each_worker_is_there_with_its_state_and_its_metrics_by_their_own_names(scene: Scene) -> None:
    decode, prefill = scene.dashboard.state()["workers"]
    assert (decode["worker"], decode["role"], decode["state"]) == ("decode-0", "decode", "fit")
    assert decode["metrics"]["worker_kv_blocks_used"] == 40
    assert decode["metrics"]["worker_running_sequences"] == 2
    assert (prefill["state"], prefill["reason"]) == ("unfit", "suspect: a call failed")
    assert prefill["metrics"]["worker_fit"] == 0


def test_a_worker_that_is_no_longer_a_member_is_shown_as_gone_at_the_next_look(scene: Scene) -> None:
    scene.dashboard.state()
    del scene.cluster.workers[0]
    del scene.cluster.pairs[:]
    gone = scene.dashboard.state()["workers"][-1]
    assert (gone["worker"], gone["state"]) == ("decode-0", "gone")
    assert gone["gone_s"] >= 0


def test_a_pair_is_there_with_what_its_link_has_carried(scene: Scene) -> None:
    (pair,) = scene.dashboard.state()["pairs"]
    assert (pair["prefill"], pair["decode"], pair["standing"], pair["transport"]) == (
        "prefill-0",
        "decode-0",
        "good",
        "shm",
    )
    assert pair["metrics"] == {
        "link_bytes_total": 500,
        "link_bytes_per_second": 2e9,
        "link_round_trip_seconds": 0.001,
    }


def test_requests_that_run_come_first_then_the_last_that_ended_and_none_tells_its_prompt(scene: Scene) -> None:
    finished, failed, running = new_request("r-1"), new_request("r-2"), new_request("r-3")
    served(finished, scene.metrics).timeline.enter(State.FINISHED)
    scene.metrics.record(finished, None)
    failed.timeline.enter(State.FAILED)
    scene.metrics.record(failed, WorkerLost("to the prompt 'a secret'"))
    scene.running = [served(running, scene.metrics, num_tokens=1)]
    state = scene.dashboard.state()
    views = state["requests"]
    assert [(view["request_id"], view["state"], view["error"]) for view in views] == [
        ("r-3", "decoding", ""),
        ("r-2", "failed", "WorkerLost"),
        ("r-1", "finished", ""),
    ]
    stages = views[2]["stages"]
    assert [name for name, _, _ in stages] == ["queue", "reserve", "prefill_queue", "transfer", "decode"]
    assert [start for _, start, _ in stages[1:]] == [end for _, _, end in stages[:-1]]
    assert stages[-1][2] == pytest.approx(views[2]["end_to_end_s"])
    assert "secret" not in str(state)
    assert not any(str(token_id) in str(state) for token_id in PROMPT)


def test_the_latencies_are_those_of_the_histograms(scene: Scene) -> None:
    served(new_request(), scene.metrics)
    latencies = scene.dashboard.state()["latencies"]
    registry = scene.metrics.registry
    for name, count in (("ttft_seconds", 1), ("itl_seconds", 2), ("tpot_seconds", 0)):
        assert latencies[name]["count"] == registry.get_sample_value(f"{name}_count") == count
        assert latencies[name]["sum"] == registry.get_sample_value(f"{name}_sum")


def test_a_page_gets_only_the_points_that_it_does_not_have(scene: Scene) -> None:
    for _ in range(4):
        scene.dashboard.tick()
    points = scene.dashboard.state()["points"]
    assert [point["number"] for point in points] == [1, 2, 3]  # the first tick has nothing to look back at
    assert [point["number"] for point in scene.dashboard.state(after=2)["points"]] == [3]
    assert (points[0]["queued"], points[0]["active"]) == (3, 4)


def test_a_point_tells_rates_and_quantiles_of_the_window_before_it_and_nothing_older() -> None:
    scene, history = Scene(), History()

    def tick(second: int) -> None:
        history.note(Reading(scene.metrics.registry), float(second))

    tick(0)
    request = served(new_request(), scene.metrics, num_tokens=5)
    request.timeline.enter(State.FINISHED)
    scene.metrics.record(request, None)
    scene.cluster.pairs[0].link.num_bytes += 1000
    tick(1)
    busy = history.last
    assert busy is not None
    assert (busy.requests_per_s, busy.tokens_per_s) == (1, 5)
    assert busy.link_bytes_per_s == {("prefill-0", "decode-0"): 1000}
    assert None not in busy.quantiles["ttft_seconds"]
    for second in range(2, WINDOW_TICKS + 2):
        tick(second)
    idle = history.last
    assert idle is not None
    assert (idle.requests_per_s, idle.tokens_per_s) == (0, 0)
    assert idle.quantiles["ttft_seconds"] == (None, None)


def test_a_link_that_was_made_anew_has_no_negative_speed() -> None:
    scene, history = Scene(), History()
    history.note(Reading(scene.metrics.registry), 0.0)
    scene.cluster.pairs[0].link.num_bytes = 0
    history.note(Reading(scene.metrics.registry), 1.0)
    assert history.last is not None
    assert history.last.link_bytes_per_s == {("prefill-0", "decode-0"): 0}
