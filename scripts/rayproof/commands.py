"""Types what README's "On several machines" says, and looks at what comes of it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rayproof.hosts import Host
from rayproof.stage import HOME, mount, tool_path
from rayproof.terminal import CTRL_C, Terminal

ROOT = Path(__file__).parent.parent.parent
LAUNCHER_FILE = ROOT / "cluster/local.yaml"
MAKE_TOKEN = "ray get-auth-token --generate > /dev/null"
RAY_UP = "ray up -y cluster/local.yaml"
PDSERVE_UP = "ray exec cluster/local.yaml --port-forward 8000 'cd pdserve && pdserve up --address auto'"
PDSERVE_STATUS = "ray exec cluster/local.yaml 'cd pdserve && pdserve status'"
RAY_DOWN = "ray down -y cluster/local.yaml"
RAY_STOP = "for host in 192.168.1.11 192.168.1.12; do ssh ubuntu@$host pdserve/.venv/bin/ray stop --force; done"
COMMANDS = (MAKE_TOKEN, RAY_UP, PDSERVE_UP, PDSERVE_STATUS, RAY_DOWN, RAY_STOP)
URL = "http://127.0.0.1:8000"
PROMPT = "Once upon a time there was a router that sent each prompt to one host and each answer to another. " * 8
COMMAND_TIMEOUT_S = 120.0
READY_TIMEOUT_S = 120.0
USER = "root"


class ProofFailed(Exception):
    pass


@dataclass(frozen=True)
class Hosts:
    head: Host
    prefill: Host
    decode: Host


def edit_launcher_file(hosts: Hosts, scratch: Path) -> None:
    """The lines marked EDIT, and nothing else, in a copy that only this stage sees in the file's place."""
    copy = scratch / LAUNCHER_FILE.name
    copy.write_text(edited(LAUNCHER_FILE.read_text(encoding="utf-8"), hosts), encoding="utf-8")
    replace_file(LAUNCHER_FILE, copy)


def replace_file(original: Path, replacement: Path) -> None:
    mount("--bind", str(replacement), str(original))


def edited(text: str, hosts: Hosts) -> str:
    """With our hosts and our user in place of the example's."""
    text = text.replace("192.168.1.10", hosts.head.address)
    text = text.replace("192.168.1.11", hosts.prefill.address).replace("192.168.1.12", hosts.decode.address)
    return text.replace("ubuntu", USER)


def prove(hosts: Hosts) -> None:
    """Raises: ProofFailed, CommandFailed, or what httpx meets."""
    typed(MAKE_TOKEN).end(COMMAND_TIMEOUT_S)
    typed(RAY_UP).end(COMMAND_TIMEOUT_S)
    up = typed(PDSERVE_UP)
    up.line(r"\s+OpenAI API", READY_TIMEOUT_S)
    check_places(up.lines, hosts)
    check_status(typed(PDSERVE_STATUS).end(COMMAND_TIMEOUT_S), hosts)
    check_timings(ask())
    up.type(CTRL_C)
    up.end(COMMAND_TIMEOUT_S)
    typed(RAY_DOWN).end(COMMAND_TIMEOUT_S)
    typed(edited(RAY_STOP, hosts)).end(COMMAND_TIMEOUT_S)
    if left := ray_processes():
        raise ProofFailed(f"after `ray down` and `ray stop` there are still: {left}")


def check_places(lines: Sequence[str], hosts: Hosts) -> None:
    """That each worker is on the host of its role."""
    found = [re.search(r"(\S+-\d) registered, ([\d.]+):", line) for line in lines]
    places = {match[1]: match[2] for match in found if match}
    expected = {"prefill-0": hosts.prefill.address, "decode-0": hosts.decode.address}
    if places != expected:
        raise ProofFailed(f"the workers are at {places}, not at {expected}")


def check_status(lines: Sequence[str], hosts: Hosts) -> None:
    text = "\n".join(lines)
    for wanted in (
        rf"prefill-0 +{re.escape(hosts.prefill.address)}:\d+ +fit",
        rf"decode-0 +{re.escape(hosts.decode.address)}:\d+ +fit",
        r"prefill-0 +decode-0 +good +tcp",
        r"ready, up ",
    ):
        if not re.search(rf"^\s*{wanted}", text, re.MULTILINE):
            raise ProofFailed(f"`pdserve status` has no line {wanted!r}")


def ask() -> dict[str, Any]:
    """Stream one answer over the forwarded port, and return the timings that came with it."""
    body = {
        "model": httpx.get(f"{URL}/v1/models", timeout=30).json()["data"][0]["id"],
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 16,
        "stream": True,
        "stream_options": {"include_usage": True, "include_timings": True},
    }
    text = ""
    timings: dict[str, Any] = {}
    with httpx.stream("POST", f"{URL}/v1/chat/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                timings = chunk.get("timings", timings)
    if not text or not timings:
        raise ProofFailed(f"no answer: HTTP {response.status_code}, {text!r}")
    say(f"answered: {text!r}")
    return timings


def check_timings(timings: dict[str, Any]) -> None:
    say(f"timings: {timings}")
    workers = (timings["prefill_worker"], timings["decode_worker"])
    if workers != ("prefill-0", "decode-0"):
        raise ProofFailed(f"prompt and answer were computed by {workers}")


def typed(command: str) -> Terminal:
    """In this folder, after `source .venv/bin/activate`, by somebody who has just logged in."""
    path = f"{sys.prefix}/bin:{tool_path()}"
    environment = {"HOME": str(HOME), "PATH": path, "USER": USER, "LANG": "C.UTF-8", "TERM": "xterm"}
    return Terminal(command, ROOT, environment | {"RAY_USAGE_STATS_ENABLED": "0"})


def ray_processes() -> list[str]:
    """On all hosts: a stage sees the processes of its hosts."""
    names = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                name = (folder / "comm").read_text().strip()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if name in ("raylet", "gcs_server") or name.startswith("ray::"):
                names.append(name)
    return names


def say(text: str) -> None:
    print(text, flush=True)
