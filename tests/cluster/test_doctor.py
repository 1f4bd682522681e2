"""What `pdserve doctor` finds, measures and advises: on real tiny workers, and on what is wrong on purpose."""

from __future__ import annotations

import io
import re
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest
from rich.console import Console

from cluster.config_checks import check_config, check_ports
from cluster.doctor import run_doctor
from cluster.findings import Finding, Grade
from cluster.machine_checks import check_clocks, check_machine
from cluster.plan import Overrides, make_plan
from cluster.running import find_running
from cluster.trial import measured_by
from cluster.up import UpOptions
from common.config import RouterSection, ServeConfig, load_config
from common.errors import WorkerUnavailable
from common.kv_layout import KVLayout
from common.pb import serving_pb2 as pb
from tests.cluster.pdserve_process import pdserve

WIDTH = 140


def graded(findings: Iterable[Finding], topic: str) -> list[Grade]:
    return [finding.grade for finding in findings if finding.topic == topic]


def test_it_starts_a_pair_measures_it_and_says_with_how_many_workers_to_start(
    tiny_config: Path, tmp_path: Path
) -> None:
    config = load_config(tiny_config)
    console = Console(file=io.StringIO(), width=WIDTH, record=True)
    found = find_running(config, None, None)
    assert run_doctor(UpOptions(config, Overrides(), tmp_path / "logs", None), found, console) == 0
    told = console.export_text()
    assert re.search(r"prefill +[\d,]+( to [\d,]+)? tokens/s", told)
    assert re.search(r"decode +[\d.]+ ms a step with 16 streams", told)
    assert re.search(r"link +shm, [\d.]+ GB/s, round trip [\d.]+ ms", told)
    assert re.search(r"^ *128 .* (\d\+? : \d\+? +(split|either)|- +colocate)", told, re.MULTILINE)
    prose = " ".join(told.split())
    advice = r"start with (at least )?\d prefill workers? and \d decode workers?|Nothing here speaks for splitting"
    assert re.search(advice, prose)


async def test_of_a_running_deployment_it_shows_pairs_and_clocks_and_starts_nothing(
    tiny_config: Path, tmp_path: Path
) -> None:
    async with pdserve("up", "--config", str(tiny_config), logs=tmp_path) as up:
        await up.url()
        async with pdserve("doctor", logs=tmp_path) as doctor:
            clocks = await doctor.line(r" *ok +clocks")
            pair = await doctor.line(r" *prefill-0 +decode-0 +good")
            assert await doctor.exit_code() == 0, await doctor.errors()
    assert "apart" in clocks
    assert "GB/s" not in pair  # a number under that head
    assert not any("registered" in line for line in doctor.lines)


def test_a_deployment_that_was_named_and_does_not_answer_is_no_reason_to_look_elsewhere(tiny_config: Path) -> None:
    config = load_config(tiny_config)
    found = find_running(config, "127.0.0.1:9", None)
    with pytest.raises(WorkerUnavailable, match=r"no router answers at 127\.0\.0\.1:9"):
        run_doctor(UpOptions(config, Overrides(), None, None), found, Console(quiet=True))


@pytest.mark.parametrize("host", ["x" * 64, "192.0.2.1"])
def test_an_address_that_is_not_this_machines_is_named_rather_than_its_port(tiny_config: Path, host: str) -> None:
    """The first cannot be a name, so nobody is asked for it."""
    config = load_config(tiny_config)
    plan = make_plan(config.model_copy(update={"router": RouterSection(host=host)}), Overrides())
    finding = check_ports(plan)
    assert finding.grade is Grade.BAD
    assert f"router.host is {host}, which is no address of this machine" in finding.text


def test_a_port_in_use_is_named(tiny_config: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        plan = make_plan(load_config(tiny_config), Overrides(ports={"http_port": port}))
        finding = check_ports(plan)
    assert finding.grade is Grade.BAD
    assert str(port) in finding.text
    assert "router.http_port" in finding.text


def test_a_model_that_cannot_be_read_and_too_little_memory_are_bad(tiny_config: Path, tmp_path: Path) -> None:
    config = load_config(tiny_config)
    broken = tmp_path / "model.gguf"
    broken.write_bytes(b"GGUF but not really")
    assert graded(check_config(make_plan(config, Overrides()), broken), "model") == [Grade.BAD]

    greedy = config.model_copy(update={"decode": config.decode.model_copy(update={"kv_cache_gib": 1e6})})
    plan = make_plan(greedy, Overrides())
    assert graded(check_config(plan, Path(config.model.source)), "memory") == [Grade.BAD]
    assert graded(check_config(make_plan(config, Overrides()), Path(config.model.source)), "memory") == [Grade.GOOD]


def test_a_secret_that_others_may_read_and_an_open_router_are_noted(tiny_config: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0" * 64)
    secret.chmod(0o644)
    config = load_config(tiny_config)
    config = config.model_copy(
        update={
            "security": config.security.model_copy(update={"secret_file": secret}),
            "router": config.router.model_copy(update={"host": "0.0.0.0"}),
        }
    )
    findings = list(check_config(make_plan(config, Overrides()), Path(config.model.source)))
    assert graded(findings, "security") == [Grade.ODD] * 3
    text = " ".join(finding.text for finding in findings)
    assert "chmod 600" in text
    assert "security.tls" in text
    assert "router.api_keys_file" in text


def test_a_device_that_is_not_there_is_bad() -> None:
    config = ServeConfig.model_validate({"prefill": {"device": "cuda:63"}})
    findings = [finding for finding in check_machine(config) if finding.grade is Grade.BAD]
    assert [finding.topic for finding in findings] == ["GPUs"]
    assert "prefill.device" in findings[0].text


@pytest.mark.parametrize(("skew_s", "grade"), [(0.2, Grade.GOOD), (-12.0, Grade.ODD), (45.0, Grade.BAD)])
def test_clocks_that_differ_too_much_for_proofs_are_told(skew_s: float, grade: Grade) -> None:
    hello = pb.WorkerHello(worker_id="decode-0")
    worker = pb.WorkerSummary(hello=hello, load=pb.WorkerLoad(clock_s=1e9), clock_skew_s=skew_s)
    (finding,) = check_clocks(pb.ClusterStatus(clock_s=1e9, workers=[worker]), now_s=1e9 + 0.1)
    assert finding.grade is grade
    if grade is not Grade.GOOD:
        assert "decode-0" in finding.text


def reporting(role: pb.Role, **load: float) -> pb.WorkerSummary:
    layout = KVLayout("any", num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", rope="none")
    return pb.WorkerSummary(hello=pb.WorkerHello(role=role, layout=layout.to_pb()), load=pb.WorkerLoad(**load))


def test_what_a_running_deployment_reports_is_taken_from_its_busiest_decode_worker_and_its_slowest_link() -> None:
    workers = [
        reporting(pb.ROLE_PREFILL, prefill_s_per_token=0.001),
        reporting(pb.ROLE_PREFILL),  # new
        reporting(pb.ROLE_DECODE, decode_step_s=0.02, num_running=6),
        reporting(pb.ROLE_DECODE, decode_step_s=0.01, num_running=1),
    ]
    links = [pb.LinkStatus(bytes_per_s=speed, round_trip_s=0.001) for speed in (2e9, 1e9, 0.0)]
    running = pb.ClusterStatus(workers=workers, pairs=[pb.PairSummary(link=link) for link in links])
    measured = measured_by(running, max_chunk_tokens=256, tpot_goal_s=0.1)
    assert measured is not None
    assert (measured.speeds.step_s, measured.speeds.num_streams) == (0.02, 6)
    assert measured.speeds.prefill_s_per_token == 0.001
    assert measured.link.bytes_per_s == 1e9

    del workers[2:]
    assert measured_by(pb.ClusterStatus(workers=workers, pairs=running.pairs), 256, 0.1) is None
