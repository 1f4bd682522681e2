"""Each run has a secret that its workers alone know: where it is, where it is not, and what a stranger gets."""

from __future__ import annotations

import logging
import os
import signal
import stat
from pathlib import Path

import pytest

from cluster.plan import Overrides, Plan, make_plan
from cluster.run_secret import with_secret
from common.config import ServeConfig, load_config
from common.errors import ConfigError, IncompatiblePeer, PeerLost
from common.security_config import SecuritySection
from common.transfer_config import TransferConfig
from tests.cluster.pdserve_process import command_line, environment, pdserve
from tests.cluster.stranger import connect, control_address, decode_worker_of


def plan_with(secret_file: Path | None = None) -> Plan:
    return make_plan(ServeConfig(security=SecuritySection(secret_file=secret_file)), Overrides())


# ---------------------------------------------------------------- the file


def test_a_run_without_a_secret_gets_one_that_only_its_owner_reads_and_that_goes_with_it(tmp_path: Path) -> None:
    with with_secret(plan_with(), tmp_path) as plan:
        path = plan.config.security.secret_file
        assert path is not None
        assert path.parent == tmp_path
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert len(plan.config.cluster_secret()) == 64
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_private_whatever_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with with_secret(plan_with(), tmp_path):
            assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_two_runs_have_two_secrets(tmp_path: Path) -> None:
    made = []
    for _ in range(2):
        with with_secret(plan_with(), tmp_path) as plan:
            made.append(plan.config.cluster_secret())
    assert made[0] != made[1]


def test_the_file_goes_also_when_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(PeerLost), with_secret(plan_with(), tmp_path):
        raise PeerLost("gone")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_in_the_folder_is_replaced_and_no_link_is_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("of somebody else")
    (tmp_path / "secret").symlink_to(elsewhere)
    with with_secret(plan_with(), tmp_path):
        assert not (tmp_path / "secret").is_symlink()
    assert elsewhere.read_text() == "of somebody else"


def test_a_configured_secret_is_used_and_kept(tmp_path: Path) -> None:
    configured = tmp_path / "mine"
    configured.write_text("a secret of sufficient length\n")
    with with_secret(plan_with(configured), tmp_path) as plan:
        assert plan.config.cluster_secret() == b"a secret of sufficient length"
    assert list(tmp_path.iterdir()) == [configured]


def test_a_configured_secret_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    unreadable = with_secret(plan_with(tmp_path / "absent"), tmp_path)
    with pytest.raises(ConfigError, match=r"security\.secret_file: cannot read .*absent"), unreadable:
        pass


def test_members_are_told_the_path_and_not_the_secret(tmp_path: Path) -> None:
    with with_secret(plan_with(), tmp_path) as plan:
        plan.write(tmp_path / "serve.yaml")
        assert load_config(tmp_path / "serve.yaml").cluster_secret() == plan.config.cluster_secret()
        assert plan.config.cluster_secret().decode() not in (tmp_path / "serve.yaml").read_text()


def test_no_object_that_carries_the_secret_shows_it() -> None:
    assert "hidden words" not in repr(TransferConfig(secret=b"hidden words"))


# ---------------------------------------------------------------- a whole run


async def test_the_secret_is_in_no_argument_no_environment_and_no_log(tiny_config: Path, tmp_path: Path) -> None:
    async with pdserve("up", "--config", str(tiny_config), logs=tmp_path) as up:
        await up.url()
        secret = (tmp_path / "secret").read_bytes()
        assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
        processes = [up.process.pid, *up.children()]
        assert len(processes) == 4
        for pid in processes:
            assert secret.decode() not in command_line(pid)
            assert secret.decode() not in environment(pid)
        assert await up.stop(signal.SIGTERM) == 0
        assert secret.decode() not in "\n".join(up.lines)
    assert not (tmp_path / "secret").exists()
    logs = contents(tmp_path)
    assert {"router.log", "prefill-0.log", "decode-0.log", "serve.yaml"} <= set(logs)
    assert [name for name, content in logs.items() if secret in content] == []


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def test_a_worker_of_another_run_is_refused_and_both_sides_say_so(
    tiny_config: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = "this call does not prove that its caller knows this cluster's secret"
    async with pdserve("up", "--config", str(tiny_config), logs=tmp_path) as up:
        await up.url()
        decode = await decode_worker_of(control_address(tmp_path), (tmp_path / "secret").read_bytes())
        with caplog.at_level(logging.WARNING), pytest.raises(IncompatiblePeer, match=refusal):
            await connect(decode, secret=b"the secret of another run")
        assert f"no KV link to {decode.address}: {refusal}" in caplog.text
        with pytest.raises(IncompatiblePeer, match=refusal):
            await connect(decode, secret=b"")
        assert (tmp_path / "decode-0.log").read_text().count(
            f"refused a call of '/pdserve.v1.KVTransfer/Link': {refusal}"
        ) == 2
        await connect(decode, secret=(tmp_path / "secret").read_bytes())
        assert await up.stop() == 0
