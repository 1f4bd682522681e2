from __future__ import annotations

import socket

import pytest

from cluster.host_roles import main, roles_of_this_host

ELSEWHERE = "192.0.2.1"  # nobody's: RFC 5737


def test_a_host_has_the_role_that_it_is_named_for() -> None:
    assert roles_of_this_host([f"prefill={ELSEWHERE}", "decode=127.0.0.1"]) == {"decode": 1}


def test_a_host_may_be_named_by_its_name() -> None:
    assert roles_of_this_host([f"prefill={ELSEWHERE},localhost"]) == {"prefill": 1}


def test_a_host_takes_as_many_workers_as_it_is_named_for() -> None:
    named = ["prefill=127.0.0.1,127.0.0.1", f"decode={ELSEWHERE},127.0.0.1"]
    assert roles_of_this_host(named) == {"prefill": 2, "decode": 1}


def test_a_name_that_is_not_known_here_is_another_hosts() -> None:
    assert roles_of_this_host(["prefill=no-such-host.invalid", "decode=127.0.0.1"]) == {"decode": 1}


def test_a_host_without_a_role_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"prefill={ELSEWHERE}"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.rstrip() == f"host_roles: {socket.gethostname()} has no address of those in: prefill={ELSEWHERE}"


def test_a_role_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["encode=127.0.0.1"]) == 2
    assert "'encode'" in capsys.readouterr().err


def test_what_is_printed_is_what_ray_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefill=127.0.0.1"]) == 0
    assert capsys.readouterr().out == '{"prefill": 1}\n'
