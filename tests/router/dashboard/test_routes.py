"""The dashboard's three addresses as plain HTTP sees them."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncIterator

import httpx
import pytest

from common.pb import serving_pb2 as pb
from router.admin_pages import create_admin_app
from tests.router.conftest import admin_pages, running

WORKERS = pb.ClusterStatus(
    workers=[
        pb.WorkerSummary(
            hello=pb.WorkerHello(worker_id=name, role=role, metrics_address=f"127.0.0.1:{port}"), load=pb.WorkerLoad()
        )
        for name, role, port in (("decode-0", pb.ROLE_DECODE, 5001), ("prefill-0", pb.ROLE_PREFILL, 5002))
    ]
)


@pytest.fixture
async def admin() -> AsyncIterator[httpx.AsyncClient]:
    async with running(create_admin_app(admin_pages(lambda: WORKERS))) as url, httpx.AsyncClient(base_url=url) as http:
        yield http


async def test_the_page_may_run_and_load_nothing_but_what_is_in_it(admin: httpx.AsyncClient) -> None:
    page = await admin.get("/dashboard")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert not re.search(r"(?:src|href)=\"(?!data:|dashboard/)", page.text)
    assert " style=" not in page.text
    assert "innerHTML" not in page.text


@pytest.mark.parametrize("after", ["-1", "x", "1.5"])
async def test_a_number_that_is_none_is_refused(admin: httpx.AsyncClient, after: str) -> None:
    answer = await admin.get("/dashboard/state", params={"after": after})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "after"


async def test_the_state_is_json_that_nobody_keeps(admin: httpx.AsyncClient) -> None:
    answer = await admin.get("/dashboard/state", params={"after": 10**30})
    assert answer.headers["Cache-Control"] == "no-store"
    assert [worker["worker"] for worker in answer.json()["workers"]] == ["decode-0", "prefill-0"]


async def test_the_trace_is_a_file(admin: httpx.AsyncClient) -> None:
    answer = await admin.get("/dashboard/trace")
    assert answer.headers["Content-Disposition"] == 'attachment; filename="pdserve-trace.json"'
    assert [event["name"] for event in answer.json()["traceEvents"]] == ["process_name", "process_sort_index"]


async def test_prometheus_is_told_where_each_workers_metrics_are(admin: httpx.AsyncClient) -> None:
    assert (await admin.get("/metrics/targets")).json() == [
        {"targets": ["127.0.0.1:5001"], "labels": {"worker": "decode-0", "role": "decode"}},
        {"targets": ["127.0.0.1:5002"], "labels": {"worker": "prefill-0", "role": "prefill"}},
    ]
