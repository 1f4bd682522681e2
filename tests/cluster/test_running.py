"""`pdserve status` finds the deployment it is asked about, and the secret that it asks for."""

from __future__ import annotations

import os
import ssl
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from cluster import up
from cluster.plan import Overrides, make_plan
from cluster.running import find_running
from cluster.status import show_status
from common.config import RouterSection, ServeConfig, load_config
from common.errors import ConfigError, UnprovenCaller
from common.security_config import SecuritySection
from tests.cluster.pdserve_process import pdserve
from tests.kv_transfer.certificates import Authority

NOBODY = 2**22 + 1  # above the kernel's largest process id


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user's runs have their logs."""
    monkeypatch.setattr(up, "user_log_path", lambda _: tmp_path)
    return tmp_path


def make_run(folder: Path, control_port: int) -> Path:
    """As `pdserve up` leaves it while it runs."""
    folder.mkdir()
    secret = folder / "secret"
    secret.write_text(f"the secret of {folder.name}")
    plan = make_plan(ServeConfig(router=RouterSection(control_port=control_port)), Overrides())
    plan.with_secret_file(secret).write(folder / "serve.yaml")
    return folder


def test_without_options_it_is_the_living_run_at_the_configs_port(runs: Path) -> None:
    make_run(runs / f"20260101-000000-{os.getpid()}", 8002)
    make_run(runs / f"20260102-000000-{os.getpid()}", 9002)
    make_run(runs / f"20260103-000000-{NOBODY}", 8002)
    found = find_running(ServeConfig(), None, None)
    assert found.control_address == "127.0.0.1:8002"
    assert found.access.secret == b"the secret of 20260101-000000-%d" % os.getpid()
    other = find_running(ServeConfig(), "127.0.0.1:9002", None)
    assert other.access.secret.startswith(b"the secret of 20260102")
    assert find_running(ServeConfig(), "127.0.0.1:7002", None).access.secret == b""


def test_each_of_several_routers_is_known_by_its_own_port(runs: Path) -> None:
    run = make_run(runs / f"20260101-000000-{os.getpid()}", 8002)
    router = RouterSection(control_port=8002, processes=2)
    make_plan(ServeConfig(router=router), Overrides()).with_secret_file(run / "secret").write(run / "serve.yaml")
    second = find_running(ServeConfig(), "127.0.0.1:8003", None)
    assert (second.control_address, second.is_asked_for) == ("127.0.0.1:8003", True)
    assert second.access.secret.startswith(b"the secret of 20260101")
    assert find_running(ServeConfig(), "127.0.0.1:8004", None).access.secret == b""
    assert not find_running(ServeConfig(), None, None).is_asked_for


def test_a_run_on_a_ray_cluster_is_found_on_its_nodes_own_address(runs: Path) -> None:
    run = make_run(runs / f"20260101-000000-{os.getpid()}", 8002)
    make_plan(load_config(run / "serve.yaml"), Overrides()).on_network("192.0.2.7").write(run / "serve.yaml")
    found = find_running(ServeConfig(), None, None)
    assert found.control_address == "192.0.2.7:8002"
    assert found.access.secret.startswith(b"the secret of 20260101")
    assert find_running(ServeConfig(), "127.0.0.1:8002", None).control_address == "127.0.0.1:8002"


def test_a_run_that_is_just_ending_is_passed_over(runs: Path) -> None:
    (make_run(runs / f"20260101-000000-{os.getpid()}", 8002) / "secret").unlink()
    (runs / f"20260102-000000-{os.getpid()}").mkdir()
    assert find_running(ServeConfig(), None, None).access.secret == b""


def test_a_configured_secret_and_a_named_folder_need_no_search(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("a secret of sufficient length")
    configured = ServeConfig(security=SecuritySection(secret_file=tmp_path / "mine"))
    assert find_running(configured, None, None).access.secret == b"a secret of sufficient length"
    found = find_running(configured, None, make_run(tmp_path / "elsewhere", 9002))
    assert (found.control_address, found.access.secret) == ("127.0.0.1:9002", b"the secret of elsewhere")


def test_a_folder_of_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config file .*serve\.yaml"):
        find_running(ServeConfig(), None, tmp_path)


# ---------------------------------------------------------------- a whole run


def tls_config(tiny_config: Path, folder: Path) -> Path:
    files = Authority(folder, "authority").certify("component")
    pair = f"certificate_file: {files.cert}, key_file: {files.key}"
    path = folder / "tls.yaml"
    path.write_text(
        f"{tiny_config.read_text()}security: {{tls: {{{pair}}}, cluster_tls: {{{pair}, ca_file: {files.ca}}}}}\n"
    )
    return path


def answers(url: str, authority: Path) -> bool:
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 2}
    with httpx.Client(verify=ssl.create_default_context(cafile=authority), timeout=60) as http:
        return http.post(f"{url}/v1/completions", json=body).status_code == 200


async def test_a_run_over_tls_serves_and_its_owner_alone_may_ask_for_its_status(
    tiny_config: Path, tmp_path: Path
) -> None:
    config, logs = tls_config(tiny_config, tmp_path), tmp_path / "logs"
    async with pdserve("up", "--config", str(config), logs=logs) as running:
        url = await running.url()
        assert url.startswith("https://")
        assert answers(url, tmp_path / "authority.pem")
        found = find_running(ServeConfig(), None, logs)
        assert await show_status(found, Console(quiet=True)) == 0
        stranger = replace(found, access=replace(found.access, secret=b""))
        with pytest.raises(UnprovenCaller, match="name its config with --config"):
            await show_status(stranger, Console(quiet=True))
        async with pdserve("status", logs=logs) as status:
            assert await status.exit_code() == 0
        assert await running.stop() == 0
        assert await running.errors() == ""


async def test_the_demo_of_a_config_with_tls_needs_no_certificate_that_fits(tiny_config: Path, tmp_path: Path) -> None:
    config = tls_config(tiny_config, tmp_path)
    async with pdserve("demo", "--config", str(config), "--max-tokens", "4", logs=tmp_path / "logs") as demo:
        await demo.line("TTFT")
        assert await demo.exit_code() == 0
