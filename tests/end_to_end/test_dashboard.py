"""The status page in a real browser, over a real deployment: `pdserve up`, whose workers are killed by their pid."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.pdserve_process import PdserveProcess, command_line, pdserve
from tests.end_to_end.chromium import FOUND, Page, chromium
from tests.end_to_end.tiny_model import save_tiny_model

pytestmark = [
    pytest.mark.skipif(FOUND is None, reason="there is no Chromium; Debian's package is called chromium"),
    pytest.mark.timeout(300),
]

MODEL = "<i id='injected'>tiny</i>"  # a name that must never become markup
SECRET = "an-unmistakable-secret"
SHOWN_S = 3.0  # the promise: by then a death is on the page
RETURN_S = 90.0  # torch has to be loaded


@dataclass
class Scene:
    up: PdserveProcess
    http: httpx.AsyncClient
    page: Page

    async def complete(self, **options: Any) -> None:
        body = {"model": MODEL, "prompt": SECRET, "max_tokens": 24, "ignore_eos": True, **options}
        response = await self.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {SECRET}"})
        assert response.status_code == 200, response.text

    async def scraped(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        text = (await self.http.get("/metrics")).text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    config = {
        "model": {"source": str(save_tiny_model(folder / "model")), "name": MODEL, "dtype": "float32"},
        "router": {"http_port": 0, "grpc_port": 0, "control_port": 0, "disaggregation": "always"},
        "prefill": {"kv_cache_gib": 0.02},
        "decode": {"kv_cache_gib": 0.02, "replicas": 2},
    }
    (folder / "serve.yaml").write_text(json.dumps(config))
    async with (
        pdserve("up", "--config", str(folder / "serve.yaml"), logs=folder / "logs") as up,
        chromium(folder / "profile") as page,
    ):
        url = await up.url()
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            await page.open(f"{url}/dashboard")
            await page.until(all_of("[data-state=fit]", 3))
            yield Scene(up, http, page)
        assert await up.stop() == 0


def all_of(selector: str, number: int) -> str:
    return f"document.querySelectorAll({json.dumps(f'.worker{selector}')}).length === {number}"


def state_of(worker: str, state: str) -> str:
    selector = f"[data-worker={worker}][data-state={state}]"
    return f"document.querySelector({json.dumps(selector)})?.innerText"


async def test_the_page_shows_a_killed_worker_within_three_seconds_and_its_return(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.complete()
        os.kill(s.up.child("decode-0"), signal.SIGKILL)
        text = await s.page.until(state_of("decode-0", "gone"), SHOWN_S)
        assert "lost" in text
        assert await s.page.evaluate("document.querySelector('[data-pool=decode]').dataset.fit") == "1"
        await s.complete()  # by the other one, meanwhile
        await s.page.until(state_of("decode-0", "fit"), RETURN_S)
        assert await s.page.evaluate("document.querySelector('[data-pool=decode]').dataset.fit") == "2"
        assert s.page.complaints == []


async def test_while_the_router_is_away_the_page_says_so_and_then_it_shows_the_new_one(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.complete()
        await s.page.until("document.querySelectorAll('[data-request]').length === 1")
        (router,) = [pid for pid in s.up.children() if "-m\0router\0" in command_line(pid)]
        os.kill(router, signal.SIGKILL)
        assert "no answer from the router" in await s.page.until(
            "!document.getElementById('contact').hidden && document.getElementById('contact').innerText"
        )
        await s.page.until("document.getElementById('contact').hidden", RETURN_S)
        await s.page.until(all_of("[data-state=fit]", 3), RETURN_S)
        assert await s.page.evaluate("document.querySelectorAll('[data-request]').length") == 0


async def test_what_the_page_says_is_what_the_metrics_say_and_nothing_secret(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await asyncio.gather(*(s.complete() for _ in range(6)))
        refused = await s.http.post("/v1/completions", json={"model": "another", "prompt": SECRET})
        assert refused.status_code == 404
        await s.page.until("document.querySelectorAll('[data-request][data-state=finished]').length === 6")
        await s.page.until(settled(), SHOWN_S * 4)
        metrics = await s.scraped()
        shown = await s.page.evaluate(SHOWN)
        assert shown["finished"] == metrics["requests_total", (("error", ""), ("state", "finished"))] == 6
        assert shown["ttft"] == [metrics["ttft_seconds_count", ()], metrics["ttft_seconds_sum", ()]]
        assert shown["itl"] == [metrics["itl_seconds_count", ()], metrics["itl_seconds_sum", ()]]
        assert shown["itl"][0] == 6 * 23
        for name in ("queued_requests", "active_requests", "request_migrations_total", "output_tokens_total"):
            assert shown["totals"][name] == metrics[name, ()], name
        assert len(shown["workers"]) == 3
        for worker, role, values in shown["workers"]:
            assert len(values) >= 6
            for name, value in values.items():
                assert value == metrics[name, (("role", role), ("worker", worker))], (worker, name)
        assert shown["pairs"] == {
            f"{labels['prefill']} {labels['decode']}": value
            for (name, pairs), value in metrics.items()
            if name == "link_bytes_total" and (labels := dict(pairs))
        }
        assert sum(shown["pairs"].values()) > 0
        assert shown["placements"] == {
            f"{labels['computed_by']}: {labels['reason']}": value
            for (name, pairs), value in metrics.items()
            if name == "placements_total" and (labels := dict(pairs))
        }

        page, text = s.page, (await s.http.get("/dashboard/state")).text
        assert MODEL in json.loads(text)["model"]
        assert await page.evaluate("document.getElementById('model').textContent") == MODEL
        assert await page.evaluate("document.getElementById('injected')") is None
        for told in (text, await page.evaluate("document.documentElement.outerHTML")):
            assert SECRET not in told
        assert {url.partition("?")[0] for url in page.requested} <= {
            f"{s.http.base_url}/dashboard",
            f"{s.http.base_url}/dashboard/state",
            "data:,",
        }
        assert page.complaints == []


def settled() -> str:
    """Nothing runs any more, and the page has heard it."""
    idle = ("active_requests", "worker_running_sequences", "worker_kv_blocks_used", "worker_assigned_requests")
    selector = ", ".join(f"[data-metric={name}]" for name in idle)
    return f"[...document.querySelectorAll({json.dumps(selector)})].every((it) => it.dataset.value === '0')"


SHOWN = """(() => {
  const value = (selector) => Number(document.querySelector(selector).dataset.value);
  const metrics = (root) => Object.fromEntries(
    [...root.querySelectorAll('[data-metric]')].map((e) => [e.dataset.metric, Number(e.dataset.value)]));
  const latency = (name) => { const { value, sum } = document.querySelector(`.tile[data-metric=${name}]`).dataset;
    return [Number(value), Number(sum)]; };
  return {
    finished: value('[data-metric=finished]'),
    ttft: latency('ttft_seconds'),
    itl: latency('itl_seconds'),
    totals: metrics(document.getElementById('tiles')),
    workers: [...document.querySelectorAll('[data-worker]')].map((card) =>
      [card.dataset.worker, card.closest('[data-pool]').dataset.pool, metrics(card)]),
    pairs: Object.fromEntries([...document.querySelectorAll('[data-pair]')].map((e) =>
      [e.dataset.pair, Number(e.dataset.value)])),
    placements: Object.fromEntries([...document.querySelectorAll('[data-metric=placements_total]')].map((e) =>
      [e.dataset.label, Number(e.dataset.value)])),
  };
})()"""
