"""From config and command line to what is started."""

import os
import socket
from pathlib import Path

import pytest

from cluster import up
from cluster.plan import Overrides, Plan, make_plan, with_free_ports
from common.config import PoolSection, Role, RouterSection, ServeConfig, load_config
from common.errors import ConfigError

PORTS = ("http_port", "grpc_port", "control_port")
FREE = Overrides(ports=dict.fromkeys(PORTS, 0))


def test_the_router_comes_first_and_workers_are_numbered_by_role() -> None:
    plan = make_plan(ServeConfig(), Overrides({Role.PREFILL: 2, Role.COLOCATED: 1}))
    assert [spec.name for spec in plan.specs] == ["router", "prefill-0", "prefill-1", "decode-0", "colocated-0"]
    assert plan.specs[0].role is None
    assert plan.specs[-1].role is Role.COLOCATED


def test_the_command_line_wins_over_the_file_and_silence_keeps_it() -> None:
    config = ServeConfig(decode=PoolSection(replicas=3), router=RouterSection(http_port=9000))
    plan = make_plan(config, Overrides({Role.PREFILL: 2, Role.DECODE: None}, {"grpc_port": 9001, "http_port": None}))
    assert (plan.config.prefill.replicas, plan.config.decode.replicas) == (2, 3)
    assert (plan.config.router.http_port, plan.config.router.grpc_port) == (9000, 9001)


@pytest.mark.parametrize(("cores", "workers", "threads"), [(8, 2, 4), (2, 2, 1), (2, 5, 1), (7, 3, 2)])
def test_cores_are_shared_among_the_workers(cores: int, workers: int, threads: int) -> None:
    plan = make_plan(ServeConfig(), Overrides({Role.DECODE: workers - 1}), num_cores=cores)
    assert [plan.config.pool(role).num_threads for role in Role] == [threads] * 3


def test_threads_named_in_the_config_are_kept() -> None:
    plan = make_plan(ServeConfig(prefill=PoolSection(num_threads=6)), Overrides(), num_cores=2)
    assert (plan.config.prefill.num_threads, plan.config.decode.num_threads) == (6, 1)


@pytest.mark.parametrize("replicas", [(0, 1, 0), (1, 0, 0), (0, 0, 0)])
def test_pools_that_could_never_serve_are_refused(replicas: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="cannot serve"):
        make_plan(ServeConfig(), Overrides(dict(zip(Role, replicas, strict=True))))


@pytest.mark.parametrize(("num_cores", "num_workers"), [(2, 17), (8, 33), (None, 1025)])
def test_more_workers_than_could_ever_get_anywhere_are_refused(num_cores: int | None, num_workers: int) -> None:
    most = Overrides({Role.PREFILL: num_workers - 2})
    assert make_plan(ServeConfig(), most, num_cores).config.prefill.replicas == num_workers - 2
    with pytest.raises(ConfigError, match=f"{num_workers} workers are too many .* at most {num_workers - 1}"):
        make_plan(ServeConfig(), Overrides({Role.PREFILL: num_workers - 1}), num_cores)


def test_a_colocated_worker_alone_can_serve() -> None:
    plan = make_plan(ServeConfig(), Overrides({Role.PREFILL: 0, Role.DECODE: 0, Role.COLOCATED: 1}))
    assert plan.worker_names == ["colocated-0"]


def test_port_zero_becomes_a_free_port_and_all_three_differ() -> None:
    router = with_free_ports(make_plan(ServeConfig(), FREE)).config.router
    ports = {getattr(router, key) for key in PORTS}
    assert len(ports) == 3
    assert 0 not in ports


def test_the_metrics_get_a_port_of_their_own_once_strangers_may_call() -> None:
    free = Overrides(ports={**FREE.ports, "metrics_port": 0})
    private = with_free_ports(make_plan(ServeConfig(), free)).config.router
    public = with_free_ports(make_plan(ServeConfig(router=RouterSection(host="0.0.0.0")), free)).config.router
    assert private.metrics_port == 0
    assert public.metrics_port not in (0, public.http_port, public.grpc_port, public.control_port)


def test_each_of_several_routers_has_a_dashboard_of_its_own_and_a_lone_private_one_has_it_on_its_http_port() -> None:
    free = Overrides(ports={**FREE.ports, "metrics_port": 0})
    alone = with_free_ports(make_plan(ServeConfig(), free))
    assert alone.dashboard_urls == [f"{alone.http_url}/dashboard"]
    several = with_free_ports(make_plan(ServeConfig(router=RouterSection(processes=2)), free))
    assert len({*several.dashboard_urls, f"{several.http_url}/dashboard"}) == 3


def test_a_port_in_use_is_named_with_the_option_to_change_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        plan = make_plan(ServeConfig(), Overrides(ports={**FREE.ports, "grpc_port": port}))
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} \(Address already in use\).*--grpc-port"):
            with_free_ports(plan)


def test_one_port_given_twice_is_refused() -> None:
    port = with_free_ports(make_plan(ServeConfig(), FREE)).config.router.http_port
    plan = make_plan(ServeConfig(), Overrides(ports={**FREE.ports, "http_port": port, "grpc_port": port}))
    with pytest.raises(ConfigError, match=rf"{port} .*router\.grpc_port"):
        with_free_ports(plan)


def test_several_routers_share_two_ports_and_each_has_a_control_port_of_its_own() -> None:
    plan = with_free_ports(make_plan(ServeConfig(), Overrides(ports=FREE.ports, router_processes=3)))
    routers = [spec for spec in plan.specs if spec.role is None]
    assert [spec.name for spec in routers] == ["router-0", "router-1", "router-2"]
    ports = [spec.admin_ports.control for spec in routers if spec.admin_ports is not None]
    assert len(set(ports)) == 3
    assert plan.control_addresses == [f"127.0.0.1:{port}" for port in ports]
    assert plan.config.router.control_port == ports[0]


def test_control_ports_count_up_from_the_one_that_is_given() -> None:
    plan = Plan(ServeConfig(router=RouterSection(processes=2, control_port=9000)))
    assert plan.control_addresses == ["127.0.0.1:9000", "127.0.0.1:9001"]


def test_an_address_of_another_machine_is_refused() -> None:
    plan = make_plan(ServeConfig(router=RouterSection(host="192.0.2.1")), FREE)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        with_free_ports(plan)


def test_what_members_read_is_what_was_planned(tmp_path: Path) -> None:
    plan = make_plan(ServeConfig(), Overrides({Role.DECODE: 2}, {"http_port": 9000}), num_cores=6)
    plan.write(tmp_path / "serve.yaml")
    assert load_config(tmp_path / "serve.yaml") == plan.config


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:8000"), ("0.0.0.0", "http://127.0.0.1:8000"), ("::", "http://[::1]:8000")],
)
def test_announced_urls_can_be_called(host: str, url: str) -> None:
    assert Plan(ServeConfig(router=RouterSection(host=host))).http_url == url


def test_on_several_machines_the_control_port_moves_to_the_nodes_address_and_the_apis_stay() -> None:
    moved = Plan(ServeConfig()).on_network("10.0.0.5")
    assert (moved.control_address, moved.http_url) == ("10.0.0.5:8002", "http://127.0.0.1:8000")
    chosen = Plan(ServeConfig(router=RouterSection(control_host="10.1.0.1")))
    assert chosen.on_network("10.0.0.5").control_address == "10.1.0.1:8002"


def test_old_log_folders_go_but_never_those_of_a_run_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "user_log_path", lambda _: tmp_path)
    nobody = 2**22 + 1  # above the kernel's largest process id
    ended = [tmp_path / f"20200101-0000{n:02}-{nobody}" for n in range(12)]
    alive = tmp_path / f"20190101-000000-{os.getpid()}"
    for folder in (*ended, alive):
        folder.mkdir()
    mine = up.new_log_folder(None)
    assert set(tmp_path.iterdir()) == {mine, alive, *ended[-up.RUNS_KEPT :]}
