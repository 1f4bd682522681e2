"""Real child processes: nothing outlives its host, and the reason of a death is told."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.host import AdminPorts, HostError, MemberSpec
from cluster.processes import ProcessHost, last_words, python_command
from common.config import Role

SPEC = MemberSpec("decode-0", Role.DECODE)
WAIT_S = 20.0

SERVES_UNTIL_TERM = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", flush=True)
signal.pause()
"""
IGNORES_TERM = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
"""

DRAINS_UNTIL_INT = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: print("draining", flush=True))
signal.signal(signal.SIGINT, lambda *_: sys.exit(3))
print("up", flush=True)
while True:
    signal.pause()
"""


def host_running(script: str, logs: Path, stop_timeout_s: float = 10.0) -> ProcessHost:
    return ProcessHost(lambda _spec: [sys.executable, "-c", textwrap.dedent(script)], logs, stop_timeout_s)


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def says_up(log: Path) -> bool:
    return log.exists() and "up" in log.read_text()


async def test_a_death_is_noticed_with_its_exit_code_and_last_words(tmp_path: Path) -> None:
    member = await host_running("import sys; print('one'); sys.exit('out of luck')", tmp_path).start(SPEC)
    ending = await asyncio.wait_for(member.ended(), WAIT_S)
    assert ending.reason == "exit code 1"
    assert "out of luck" in ending.last_words
    assert not ending.is_config_error


async def test_exit_code_two_is_a_config_error(tmp_path: Path) -> None:
    script = "import sys; print('decode-0: unknown key `prefil`', file=sys.stderr); sys.exit(2)"
    ending = await (await host_running(script, tmp_path).start(SPEC)).ended()
    assert ending.is_config_error
    assert ending.last_words == "decode-0: unknown key `prefil`"


async def test_a_kill_is_told_by_the_name_of_its_signal(tmp_path: Path) -> None:
    member = await host_running(SERVES_UNTIL_TERM, tmp_path).start(SPEC)
    os.kill(member.pid, signal.SIGKILL)
    assert (await asyncio.wait_for(member.ended(), WAIT_S)).reason == "killed by SIGKILL"


async def test_last_words_are_those_of_this_life_only(tmp_path: Path) -> None:
    (tmp_path / "decode-0.log").write_text("an earlier life\n")
    ending = await (await host_running("print('this life')", tmp_path).start(SPEC)).ended()
    assert ending.last_words == "this life"


async def test_stop_asks_first_and_the_member_exits_by_itself(tmp_path: Path) -> None:
    member = await host_running(SERVES_UNTIL_TERM, tmp_path).start(SPEC)
    await until(lambda: says_up(tmp_path / "decode-0.log"))
    await member.stop()
    assert (await member.ended()).reason == "exit code 0"


async def test_stop_insists_after_its_bound(tmp_path: Path) -> None:
    member = await host_running(IGNORES_TERM, tmp_path, stop_timeout_s=0.2).start(SPEC)
    await until(lambda: says_up(tmp_path / "decode-0.log"))
    await asyncio.wait_for(member.stop(), WAIT_S)
    assert (await member.ended()).reason == "killed by SIGKILL"
    assert not is_alive(member.pid)


async def test_who_is_in_a_hurry_does_not_wait_for_a_member_that_drains(tmp_path: Path) -> None:
    host = host_running(DRAINS_UNTIL_INT, tmp_path, stop_timeout_s=WAIT_S)
    first, second = await host.start(SPEC), await host.start(MemberSpec("decode-1", Role.DECODE))
    for name in ("decode-0", "decode-1"):
        await until(lambda name=name: says_up(tmp_path / f"{name}.log"))
    stopping = asyncio.create_task(first.stop())
    await until(lambda: "draining" in (tmp_path / "decode-0.log").read_text())
    assert not stopping.done()
    host.hurry()
    async with asyncio.timeout(WAIT_S / 2):
        await stopping
        await second.stop()  # also what stops later
    assert [(await member.ended()).reason for member in (first, second)] == ["exit code 3"] * 2


async def test_stop_after_the_end_does_nothing(tmp_path: Path) -> None:
    member = await host_running("pass", tmp_path).start(SPEC)
    await member.ended()
    await member.stop()


async def test_what_a_member_started_ends_with_it(tmp_path: Path) -> None:
    script = """
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.pid, flush=True)
        print("up", flush=True)
        sys.stdin.read()
    """
    member = await host_running(script, tmp_path).start(SPEC)
    await asyncio.wait_for(member.ended(), WAIT_S)
    grandchild = int((tmp_path / "decode-0.log").read_text().split()[0])
    await until(lambda: not is_alive(grandchild))


async def test_a_command_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    host = ProcessHost(lambda _spec: ["/no/such/program"], tmp_path)
    ending = await (await host.start(SPEC)).ended()
    assert ending.reason == "exit code 1"
    assert "No such file" in ending.last_words


async def test_a_log_folder_that_is_gone_is_a_host_error(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="cannot start decode-0"):
        await host_running("pass", tmp_path / "gone").start(SPEC)


def test_children_die_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    """SIGKILL gives the supervisor no chance to clean up: the kernel does."""
    parent_script = f"""
        import asyncio, sys
        from pathlib import Path
        from cluster.host import AdminPorts, MemberSpec
        from cluster.processes import ProcessHost

        async def main():
            host = ProcessHost(lambda spec: [sys.executable, "-c", {IGNORES_TERM!r}], Path({str(tmp_path)!r}))
            members = [await host.start(MemberSpec(name, None)) for name in ("one", "two")]
            print(*(member.pid for member in members), flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(parent_script)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        children = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(children) == 2
        asyncio.run(until(lambda: all(says_up(tmp_path / f"{name}.log") for name in ("one", "two"))))
        assert all(is_alive(pid) for pid in children)
        started_s = time.monotonic()
        parent.kill()
        parent.wait()
        asyncio.run(until(lambda: not any(is_alive(pid) for pid in children)))
        assert time.monotonic() - started_s < 5.0
    finally:
        parent.kill()
        parent.communicate()


@pytest.mark.parametrize(
    ("spec", "tail"),
    [
        (MemberSpec("router", None), ["-m", "router", "--config", "c.yaml"]),
        (
            MemberSpec("router-1", None, AdminPorts(9003, 9103)),
            ["-m", "router", "--config", "c.yaml", "--control-port", "9003", "--metrics-port", "9103"],
        ),
        (
            MemberSpec("prefill-1", Role.PREFILL),
            ["-m", "prefill_worker", "--config", "c.yaml", "--name", "prefill-1", "--router", "h:1"],
        ),
        (
            MemberSpec("colocated-0", Role.COLOCATED),
            ["-m", "decode_worker", "--config", "c.yaml", "--name", "colocated-0", "--router", "h:1", "--colocated"],
        ),
    ],
)
def test_members_run_by_the_command_a_person_would_type(spec: MemberSpec, tail: list[str]) -> None:
    assert python_command(spec, Path("c.yaml"), ["h:1"], python="py") == ["py", *tail]


def test_last_words_leave_out_the_lines_that_say_all_is_well(tmp_path: Path) -> None:
    log = tmp_path / "decode-0.log"
    log.write_text("12:00:00 I decode-0 engine loaded\n12:00:01 W decode-0 engine odd\nMemoryError\n12:00:02 D x y z\n")
    assert last_words(log) == "12:00:01 W decode-0 engine odd\nMemoryError"
    log.unlink()
    assert last_words(log) == ""


def test_a_worker_registers_at_every_router() -> None:
    command = python_command(SPEC, Path("c.yaml"), ["h:1", "h:2"], python="py")
    assert command[-4:] == ["--router", "h:1", "--router", "h:2"]


async def test_an_orderly_end_is_told_from_a_crash(tmp_path: Path) -> None:
    left = await (await host_running("pass", tmp_path).start(SPEC)).ended()
    crashed = await (await host_running("raise SystemExit(1)", tmp_path).start(SPEC)).ended()
    assert (left.has_left, crashed.has_left) == (True, False)
