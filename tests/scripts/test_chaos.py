"""chaos.py: its schedule, its judgement, its figures; and its short form, which is a test of the whole system."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from io import StringIO
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from fastapi.responses import JSONResponse
from rich.console import Console

from chaos import main
from chaoslab.asks import Answer, Ask, cut_at_stop, make_asks, stopping
from chaoslab.client import Client
from chaoslab.faults import FaultRecord, Injector
from chaoslab.figures import Run, figures_of
from chaoslab.load import Known, Load, Sent
from chaoslab.outcome import Break, Ending, Failure, Outcome
from chaoslab.report import complaints, figure_table, timeline_table
from chaoslab.router_log import Retries, count_retries
from chaoslab.schedule import Fault, FaultKind, FaultPlan
from chaoslab.system import Processes, Size, plan_for
from chaoslab.watch import Leftover, Watch
from cluster.host import Ending as ProcessEnding
from cluster.host import MemberSpec
from cluster.processes import ProcessHost
from cluster.supervisor import MemberDied
from common.cluster_access import NO_SECRET
from common.config import ServeConfig
from loadgen.workload import LengthRange
from tests.end_to_end.tiny_model import save_tiny_model
from tests.scripts.conftest import OpenAIServer

SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos.py"
KINDS = tuple(FaultKind)
TARGETS = ("router", "prefill-0", "prefill-1", "decode-0", "decode-1")
ASK = Ask("a stone", max_tokens=3, temperature=0.0, seed=1, ignore_eos=True)
RIGHT = Answer(" word word word", "length", 2, 3)
ROUTERS = frozenset({"router"})
SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


def fault_plan(seed: int = 1, **changes: object) -> FaultPlan:
    fields: dict[str, object] = {"interval_s": 10.0, "duration_s": 600.0, "kinds": KINDS, "targets": TARGETS}
    return FaultPlan(seed, **{**fields, **changes})


# ---------------------------------------------------------------- the schedule


def test_the_same_seed_gives_the_same_faults_and_another_one_others() -> None:
    assert fault_plan(1).faults() == fault_plan(1).faults()
    assert fault_plan(1).faults() != fault_plan(2).faults()


def test_a_longer_run_begins_with_the_faults_of_a_shorter_one() -> None:
    short, long = fault_plan(duration_s=100.0).faults(), fault_plan().faults()
    assert short[:-1] == long[: len(short) - 1]


def test_faults_come_once_in_every_interval_and_end_with_the_load() -> None:
    for seed in range(20):
        faults = fault_plan(seed).faults()
        assert len(faults) in (59, 60)
        for number, fault in enumerate(faults, 1):
            assert abs(fault.at_s - 10 * number) <= 2
            assert fault.at_s + fault.lasts_s <= 600
            assert (fault.lasts_s > 0) is (fault.kind in (FaultKind.FREEZE, FaultKind.SLOW))


def test_even_a_few_faults_are_of_every_kind_and_meet_everybody() -> None:
    for seed in range(20):
        faults = fault_plan(seed, duration_s=62.0).faults()
        assert {fault.kind for fault in faults[:4]} == set(KINDS)
        assert {fault.target for fault in faults[:5]} == set(TARGETS)
        assert all(one.target != later.target for one, later in pairwise(faults))


# ---------------------------------------------------------------- what is asked


def test_requests_follow_from_the_seed_and_are_of_every_kind() -> None:
    asks = make_asks(7, 40, LengthRange(16, 96))
    assert asks == make_asks(7, 40, LengthRange(16, 96))
    assert len(set(asks)) == 40
    assert {ask.temperature for ask in asks} == {0.0, 0.8}
    assert {ask.ignore_eos for ask in asks} == {True, False}
    assert all(16 <= ask.max_tokens <= 96 for ask in asks)
    beginnings = [" ".join(ask.prompt.split()[:20]) for ask in asks]
    assert len(set(beginnings)) < len(beginnings)  # shared prefixes


def test_a_stop_string_ends_its_answer_before_the_end() -> None:
    answer = Answer("the river went under the road", "length", 5, 6)
    stopped = stopping(ASK, answer, Random(1))
    assert stopped is not None
    assert stopped.stop is not None
    assert len(cut_at_stop(answer, stopped.stop)) < len(answer.text) - 3
    assert stopping(ASK, Answer("\ufffd" * 30, "length", 5, 30), Random(1)) is None


# ---------------------------------------------------------------- the judgement of one answer


@pytest.mark.parametrize(
    "answer",
    [
        Answer(" word word wort", "length", 2, 3),
        Answer(" word word word", "stop", 2, 3),
        Answer(" word word word", "length", 2, 4),
        Answer(" word word word", "length", 3, 3),
    ],
)
def test_an_answer_that_differs_in_text_reason_or_usage_is_wrong(answer: Answer) -> None:
    assert outcome(answer=RIGHT).mistake(RIGHT) is None
    assert outcome(answer=answer).mistake(RIGHT) is not None


def test_what_came_of_a_broken_answer_must_be_its_beginning() -> None:
    assert outcome(texts=[" word", " wo"]).mistake(RIGHT) is None
    assert outcome(texts=[" word", " word", " word", " word"]).mistake(RIGHT) is not None
    assert outcome(texts=["word"]).mistake(RIGHT) is not None


@pytest.mark.parametrize(
    ("failure", "after_s", "ending"),
    [
        (Failure("queue_full", is_before_answer=True), 0.1, Ending.REFUSED),
        (Failure("worker_lost", is_before_answer=True), 0.1, Ending.REFUSED),
        (Failure("worker_lost", is_before_answer=True), 9.0, Ending.FAILED),  # it had been admitted
        (Failure("worker_lost"), 0.1, Ending.FAILED),
        (Failure("deadline_exceeded", is_before_answer=True), 0.1, Ending.FAILED),
        (Failure("invalid_request", is_before_answer=True), 0.1, Ending.FAILED),  # nobody sends any
        (Failure("HTTP 500 server_error", is_before_answer=True), 0.1, Ending.UNTYPED),
    ],
)
def test_an_error_is_a_refusal_only_when_it_is_typed_and_comes_at_once(
    failure: Failure, after_s: float, ending: Ending
) -> None:
    assert failure.ending(after_s) is ending


# ---------------------------------------------------------------- the client


async def test_a_whole_answer_is_completed(openai_server) -> None:
    openai_server.answer = scripted(" word", " word", " word")
    result = await sent_to(openai_server.url)
    assert (result.ending, result.answer) == (Ending.COMPLETED, RIGHT)
    assert result.ttft_s is not None
    assert openai_server.bodies[0]["seed"] == 1


async def test_a_client_that_leaves_keeps_what_it_has_seen(openai_server) -> None:
    openai_server.answer = scripted(" word", " word", " word")
    result = await sent_to(openai_server.url, leaves_after=2)
    assert (result.ending, result.texts) == (Ending.LEFT, [" word", " word"])
    assert result.mistake(RIGHT) is None


async def test_an_error_in_the_stream_is_told_by_its_code(openai_server) -> None:
    openai_server.answer = scripted(" word", error={"code": "worker_lost", "message": "gone"})
    result = await sent_to(openai_server.url)
    assert (result.ending, result.failure) == (Ending.FAILED, Failure("worker_lost", "gone"))


async def test_a_refusal_is_told_by_its_code(openai_server, queue_full: JSONResponse) -> None:
    openai_server.refusal = queue_full
    result = await sent_to(openai_server.url)
    assert result.ending is Ending.REFUSED
    assert result.failure is not None
    assert result.failure.code == "queue_full"


async def test_a_stream_that_breaks_begins_again(openai_server) -> None:
    whole, tries = scripted(" word", " word", " word"), []

    async def breaks_once(body: dict[str, object]) -> AsyncIterator[str]:
        tries.append(body)
        if len(tries) == 1:
            yield openai_server.token(" word")
            return
        async for event in whole(body):
            yield event

    openai_server.answer = breaks_once
    result = await sent_to(openai_server.url)
    assert (result.ending, result.answer, len(result.breaks)) == (Ending.COMPLETED, RIGHT, 1)


async def test_without_any_router_a_request_ends_at_its_deadline(free_port: int) -> None:
    result = await sent_to(f"http://127.0.0.1:{free_port}", deadline_s=0.3)
    assert (result.ending, result.failure) == (Ending.UNTYPED, Failure("no router answered"))


async def test_an_answer_without_an_end_hangs(openai_server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(body: dict[str, object]) -> AsyncIterator[str]:
        yield openai_server.token(" word")
        await asyncio.sleep(30)

    monkeypatch.setattr("chaoslab.client.MARGIN_S", 0.1)
    openai_server.answer = silent
    result = await sent_to(openai_server.url, deadline_s=0.3)
    assert result.ending is Ending.HUNG


async def test_load_leaves_at_its_rate_whatever_becomes_of_it(openai_server) -> None:
    openai_server.answer = scripted(*[" word"] * 13)
    known = [Known(ASK, Answer(" word" * 13, "length", 2, 13))]
    sent: list[Sent] = []
    client = Client(openai_server.url, "tiny", deadline_s=5.0)
    start_s = time.monotonic()
    await Load(seed=3, rate=40.0, duration_s=0.5).run(client, known, start_s, sent)
    await client.close()
    assert len(sent) == 20
    assert all(each.outcome.sent_s >= start_s + number / 40 for number, each in enumerate(sent))
    assert {each.outcome.ending for each in sent} == {Ending.COMPLETED, Ending.LEFT}
    assert [each.mistake for each in sent] == [None] * 20


# ---------------------------------------------------------------- the figures


def test_figures_count_every_request_once_and_judge_the_goals() -> None:
    run = Run(
        start_s=0.0,
        routers=ROUTERS,
        sent=[
            *(sent(outcome(Ending.COMPLETED, answer=RIGHT)) for _ in range(98)),
            sent(outcome(Ending.COMPLETED, answer=Answer("?", "length", 2, 3))),
            sent(outcome(Ending.FAILED, failure=Failure("worker_lost"))),
            sent(outcome(Ending.REFUSED, failure=Failure("queue_full"))),
            sent(outcome(Ending.LEFT, texts=[" word"])),
        ],
        leftovers=[Leftover("decode-0", 3, 0), Leftover("router", 0, 2)],
        retries=Retries(num_retried=4, num_migrated=1),
    )
    figures = {figure.name: figure for figure in figures_of(run)}
    counted = ("requests", "admitted", "completed", "failed.worker_lost", "refused.queue_full", "left", "retried")
    assert [figures[name].value for name in counted] == [102, 100, 99, 1, 1, 1, 4]
    goals = {name: (figure.value, figure.holds) for name, figure in figures.items() if figure.goal is not None}
    assert goals == {
        "completed_of_admitted": (0.99, True),
        "wrong": (1, False),
        "hung": (0, True),
        "untyped": (0, True),
        "leaked_blocks": (3, False),
        "leaked_requests": (2, False),
        "not_back": (0, True),
        "crashes": (0, True),
    }
    assert figures["wrong"].as_json() == {"name": "wrong", "value": 1, "unit": "", "goal": "<= 0", "holds": False}


def test_a_stream_may_break_only_with_its_router() -> None:
    killed = record(FaultKind.KILL, "router", 10.0, 12.0)
    frozen = record(FaultKind.FREEZE, "router", 20.0, 22.0)
    other = record(FaultKind.KILL, "decode-0", 30.0, 32.0)
    endings = {
        at_s: Run(0.0, ROUTERS, records=[killed, frozen, other]).ending(
            outcome(Ending.COMPLETED, answer=RIGHT, breaks=[Break(at_s, "reset", is_typed=False)])
        )
        for at_s in (5.0, 11.0, 21.0, 31.0)
    }
    assert endings == {5.0: Ending.UNTYPED, 11.0: Ending.COMPLETED, 21.0: Ending.UNTYPED, 31.0: Ending.UNTYPED}


def test_a_ttft_belongs_to_the_fault_that_it_met() -> None:
    run = Run(
        0.0,
        ROUTERS,
        sent=[
            sent(outcome(sent_s=sent_s, first_text_s=sent_s + ttft_s))
            for sent_s, ttft_s in ((8.0, 1.0), (9.0, 2.0), (11.0, 0.5), (12.5, 3.0), (40.0, 4.0))
        ],
        records=[record(FaultKind.FREEZE, "decode-0", 10.0, 12.0), record(FaultKind.KILL, "decode-0", 39.0, None)],
    )
    assert run.ttft_s(in_fault=False) == [1.0, 3.0]
    assert run.ttft_s(in_fault=True) == [2.0, 0.5, 4.0]


def test_a_fault_without_a_return_misses_a_goal_unless_it_hit_nobody() -> None:
    missed = record(FaultKind.KILL, "decode-0", 10.0, None)
    nobody = FaultRecord(missed.fault, began_s=10.0, hit=False)
    not_back = {figure.name: figure.value for figure in figures_of(Run(0.0, ROUTERS, records=[missed, nobody]))}[
        "not_back"
    ]
    assert not_back == 1


def test_the_report_shows_figures_faults_and_what_went_wrong() -> None:
    run = Run(
        100.0,
        ROUTERS,
        sent=[
            sent(outcome(Ending.FAILED, failure=Failure("worker_lost", "none is alive"), sent_s=110.0 + n))
            for n in range(5)
        ],
        records=[record(FaultKind.FREEZE, "decode-1", 104.0, 107.5), record(FaultKind.KILL, "router", 120.0, None)],
        leftovers=[Leftover("decode-0", 3, 1)],
    )
    console = Console(file=StringIO(), width=100)
    console.print(timeline_table(run), figure_table(figures_of(run)))
    assert isinstance(console.file, StringIO)
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["4.0", "s", "freeze", "decode-1", "2.0", "s", "3.5", "s"] in rows
    assert ["20.0", "s", "kill", "router", "NEVER"] in rows
    assert ["leaked_blocks", "3", "<=", "0", "NO"] in rows
    failed, leak = complaints(run)
    assert failed.startswith("failed: worker_lost: none is alive (x, 10.0 to ? s; x, 11.0 to ? s;")
    assert failed.endswith("and 2 more)")
    assert leak == "left over: 3 blocks, 1 requests (decode-0)"


def test_retries_are_counted_by_what_each_request_leaves_in_the_log() -> None:
    lines = [
        "22:15:34 I router router.metrics chaos-1 finished prompt=4 prefill=p decode=d attempts=1 migrations=0",
        "22:15:34 W router router.pipeline chaos-2: attempt 1 failed: decode-0: UNAVAILABLE",
        "22:15:35 I router router.metrics chaos-2 failed prompt=4 attempts=3 migrations=1 error=WorkerLost: attempts=9",
        "22:15:35 I router router.metrics chaos-3 failed prompt=4 attempts=0 migrations=0 error=WorkerDraining: x",
    ]
    assert count_retries(lines) == Retries(num_retried=2, num_migrated=1)


# ---------------------------------------------------------------- processes


def test_the_system_is_exact_small_and_on_ports_of_its_own() -> None:
    config = ServeConfig.model_validate({"model": {"dtype": "bfloat16"}, "decode": {"kv_cache_gib": 2}})
    plan = plan_for(Size(2, 3, transport="tcp"), config)
    assert plan.worker_names == ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert (plan.config.model.dtype, plan.config.transfer.transport) == ("float32", "tcp")
    assert (plan.config.prefill.kv_cache_gib, plan.config.decode.kv_cache_gib) == (0.25, 2)
    assert not {plan.config.router.http_port, plan.config.router.control_port} & {0, 8000, 8002}


async def test_signals_reach_a_member_by_its_name_until_it_has_ended(tmp_path: Path) -> None:
    processes = Processes(ProcessHost(lambda spec: SLEEPER, tmp_path))
    member = await processes.start(MemberSpec("decode-0", None))
    assert processes.signal("decode-0", signal.SIGSTOP)
    assert processes.signal("decode-0", signal.SIGKILL)
    assert (await member.ended()).reason == "killed by SIGKILL"
    assert not processes.signal("decode-0", signal.SIGCONT)
    assert not processes.signal("decode-1", signal.SIGCONT)
    await processes.close()


async def test_a_death_that_no_fault_explains_is_a_crash(tmp_path: Path) -> None:
    processes = Processes(ProcessHost(lambda spec: SLEEPER, tmp_path))
    injector = Injector(processes, Watch({}, NO_SECRET), say=lambda line: None)
    spec = MemberSpec("decode-0", None)
    await processes.start(spec)
    assert await injector._inflict(Fault(0.0, FaultKind.KILL, "decode-0"))
    killed = MemberDied(spec, ProcessEnding("killed by SIGKILL"), 0.5)
    injector.note(killed)
    assert injector.unexplained == []
    injector.note(killed)
    assert [death.name for death in injector.unexplained] == ["decode-0"]
    await processes.close()


# ---------------------------------------------------------------- the script


@pytest.mark.parametrize(
    "arguments",
    [
        ["--faults", "kill,flood"],
        ["--targets", "client"],
        ["--rate", "0"],
        ["--prefill", "0"],
        ["--transport", "tin"],
        ["--output-tokens", "9:1"],
        ["--json", "/absent/x.json"],
    ],
)
def test_a_wrong_argument_exits_2_and_names_it(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_config_that_is_not_there_exits_2(tmp_path: Path, capsys) -> None:
    assert main(["--config", str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml" in capsys.readouterr().err


def test_a_folder_with_the_logs_of_another_run_is_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "router.log").touch()
    config = tmp_path / "serve.yaml"
    config.write_text(f"model: {{source: {save_tiny_model(tmp_path / 'model')}, name: tiny}}\n")
    assert main(["--config", str(config), "--logs", str(tmp_path)]) == 2
    assert "another run's logs" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_under_kills_freezes_slowness_and_restarts_no_answer_is_wrong_and_nothing_hangs_or_leaks(
    tmp_path: Path,
) -> None:
    """The short form. How many requests can be served under a fault every two seconds is not judged here."""
    pool = "{num_threads: 1, kv_cache_gib: 0.02}"
    model = save_tiny_model(tmp_path / "model")
    config, result = tmp_path / "serve.yaml", tmp_path / "result.json"
    config.write_text(f"model: {{source: {model}, name: tiny}}\nprefill: {pool}\ndecode: {pool}\n")
    times = ["--duration", "20", "--fault-interval", "2", "--rate", "6", "--seed", "5"]
    files = ["--config", str(config), "--logs", str(tmp_path / "logs"), "--json", str(result)]
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, str(SCRIPT), *files, *times, "--num-asks", "16", "--output-tokens", "16:200"]
    script = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    output, progress = (text.decode() for text in await script.communicate())
    assert result.exists(), progress
    figures = {figure["name"]: figure for figure in json.loads(result.read_text())}
    must_hold = ("wrong", "hung", "untyped", "leaked_blocks", "leaked_requests", "not_back", "crashes")
    assert {name: figures[name]["value"] for name in must_hold} == dict.fromkeys(must_hold, 0), output
    assert figures["requests"]["value"] == 120
    assert figures["faults"]["value"] >= 8
    assert figures["completed"]["value"] >= 60
    assert script.returncode == (0 if all(figure["holds"] is not False for figure in figures.values()) else 1)
    for kind in KINDS:
        assert f" {kind} " in output
    assert "learned 16 answers" in progress
    assert processes_that_name(tmp_path) == []


# ---------------------------------------------------------------- made for these tests


def outcome(ending: Ending = Ending.COMPLETED, *, sent_s: float = 0.0, **fields: object) -> Outcome:
    made = Outcome("x", sent_s, ending)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def sent(of: Outcome) -> Sent:
    return Sent(Known(ASK, RIGHT), of)


def record(kind: FaultKind, target: str, began_s: float, served_again_s: float | None) -> FaultRecord:
    lasts_s = 2.0 if kind is FaultKind.FREEZE else 0.0
    return FaultRecord(Fault(began_s, kind, target, lasts_s), began_s, served_again_s=served_again_s)


async def sent_to(url: str, *, deadline_s: float = 10.0, leaves_after: int | None = None) -> Outcome:
    client = Client(url, "tiny", deadline_s)
    result = Outcome("x", time.monotonic())
    await client.send(ASK, result, leaves_after)
    await client.close()
    return result


def scripted(*texts: str, error: dict[str, str] | None = None):
    async def answer(body: dict[str, object]) -> AsyncIterator[str]:
        for number, text in enumerate(texts, 1):
            is_last = error is None and number == len(texts)
            yield OpenAIServer.token(text, "length" if is_last else None)
        if error is not None:
            yield f"data: {json.dumps({'error': error})}\n\n"
            return
        yield OpenAIServer.usage(2, len(texts))
        yield OpenAIServer.done

    return answer


def processes_that_name(folder: Path) -> list[str]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [line for line in lines if str(folder) in line]
