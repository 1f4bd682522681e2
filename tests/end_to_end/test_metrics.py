"""What every process exports is what docs/architecture.md names, and docs/grafana.json draws nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.end_to_end.local_cluster import LocalCluster, local_cluster, wait_until

ROOT = Path(__file__).parent.parent.parent
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
SECTION = ARCHITECTURE.split("## Metrics and counters")[1].split("\n### ")[0]
OF_THE_ROUTER, OF_A_WORKER = SECTION.split("Each worker, at")
PANELS = json.loads((ROOT / "docs/grafana.json").read_text(encoding="utf-8"))["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
NOT_IN_HEALTH = {"kv_pieces_rejected_total"}
OF_ONE_ROLE = {"prefills_total", "local_prefills_total", "received_prefills_total"}
FOUND_BY_PROMETHEUS = {"worker", "role", "job", "instance"}  # labels that it adds, from /metrics/targets among others
HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")


@dataclass(frozen=True)
class Metric:
    kind: str
    labels: frozenset[str]


def documented(table: str) -> dict[str, Metric]:
    found = {}
    for names, kind in re.findall(r"^\| (`[a-z].*?`) \| (\w+) \|", table, re.MULTILINE):
        for name, labels in re.findall(r"`(\w+)(?:\{([\w,]+)\})?`", names):
            found[name] = Metric(kind, frozenset(labels.split(",")) - {""})
    return found


def exported(text: str) -> dict[str, Metric]:
    """Without what Python itself exports, and without the moment at which each counter was made."""
    kinds = {
        name: kind
        for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE)
        if not name.startswith("process_") and not name.endswith("_created")
    }
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(re.sub("_(bucket|sum|count)$", "", sample.name), set()).update(sample.labels)
    return {name: Metric(kind, frozenset(labels.get(name, set()) - {"le"})) for name, kind in kinds.items()}


def assert_the_same(found: dict[str, Metric], told: dict[str, Metric]) -> None:
    """Labels are known once there is a series."""
    assert found.keys() == told.keys()
    for name, metric in found.items():
        assert metric.kind == told[name].kind, name
        assert metric.labels in (told[name].labels, frozenset()), name


async def scraped(url: str) -> str:
    async with httpx.AsyncClient(timeout=30) as http:
        response = await http.get(url)
        assert response.status_code == 200, response.text
        return response.text


async def workers(cluster: LocalCluster) -> dict[str, str]:
    """Their metrics by role, found as Prometheus finds them."""
    targets = (await cluster.http.get("/metrics/targets")).json()
    return {each["labels"]["role"]: await scraped(f"http://{each['targets'][0]}/metrics") for each in targets}


async def test_every_process_exports_exactly_what_the_documents_name(tiny_model: Path) -> None:
    async with local_cluster(tiny_model) as cluster:
        await cluster.complete("Hello there", max_tokens=6, ignore_eos=True)
        assert_the_same(exported(await scraped(cluster.router.metrics_url)), documented(OF_THE_ROUTER))
        found = await workers(cluster)
    assert set(found) == {"prefill", "decode"}
    told = documented(OF_A_WORKER)
    for text, of_its_role in (
        (found["prefill"], {"prefills_total"}),
        (found["decode"], {"local_prefills_total", "received_prefills_total"}),
    ):
        left_out = (OF_ONE_ROLE - of_its_role) | NOT_IN_HEALTH
        assert_the_same(exported(text), {name: metric for name, metric in told.items() if name not in left_out})


async def test_a_workers_metrics_are_its_status(tiny_model: Path) -> None:
    async with local_cluster(tiny_model) as cluster:
        await cluster.complete("Hello there", max_tokens=6, ignore_eos=True)
        await cluster.wait_all_free()
        status, text = await cluster.prefill_status(), (await workers(cluster))["prefill"]
        values = values_of(text)
        for name, count in status.counters.items():
            assert values.get(name, values.get(f"{name}_total")) == count, name
        assert values["kv_transfer_bytes_total"] > 0
        assert values["kv_blocks"] == status.load.total_blocks
        assert [link.num_bytes for link in status.links] == [values["link_bytes_total"]]
        assert values["link_bytes_total"] == values["kv_transfer_bytes_total"]  # there is one link


async def test_the_router_tells_what_each_link_has_carried_and_how_fast_tokens_came(tiny_model: Path) -> None:
    async with local_cluster(tiny_model) as cluster:
        for _ in range(2):
            await cluster.complete("Hello there", max_tokens=6, ignore_eos=True)
        carried = (await cluster.prefill_status()).links[0].num_bytes

        async def is_told() -> bool:
            return values_of(await scraped(cluster.router.metrics_url)).get("link_bytes_total") == carried

        await wait_until(is_told, 5, "the link's bytes have come with a heartbeat")
        values = values_of(await scraped(cluster.router.metrics_url))
    assert values["ttft_seconds_count"] == 2
    assert values["itl_seconds_count"] == 2 * 5
    assert values["worker_fit"] == 1
    assert values["link_bytes_per_second"] > 0


def values_of(text: str) -> dict[str, float]:
    """The last series of each metric."""
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_panel_asks_only_for_metrics_and_labels_that_are_exported(expression: str) -> None:
    told = documented(OF_A_WORKER) | documented(OF_THE_ROUTER)
    names = metrics_in(expression)
    assert names
    labels = {"le"} | FOUND_BY_PROMETHEUS
    for name in names:
        if name.startswith("process_"):
            continue
        base = next((name.removesuffix(end) for end in HISTOGRAM_SUFFIXES if name.endswith(end)), name)
        assert base in told, f"{name} is exported by nobody"
        assert (told[base].kind == "histogram") == (base != name)
        labels |= told[base].labels
    grouped = ",".join(re.findall(r"\bby \(([^)]*)\)", expression)).replace(" ", "")
    asked = {*grouped.split(","), *re.findall(r"(\w+)!?=~?\"", expression)} - {""}
    assert asked <= labels


def metrics_in(expression: str) -> set[str]:
    """What is neither a function, nor a label, nor a duration."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\bby \([^)]*\)", " ", expression)
    return set(re.findall(r"\b([a-z]\w*)\b(?!\s*\()", bare)) - {"by", "sum"}


def test_the_dashboard_draws_every_kind_of_thing_that_it_is_for() -> None:
    drawn = set().union(*map(metrics_in, EXPRESSIONS))
    assert {
        *("ttft_seconds_bucket", "itl_seconds_bucket", "tpot_seconds_bucket", "queued_requests", "worker_fit"),
        *("worker_running_sequences", "worker_kv_blocks_used", "link_bytes_total", "request_retries_total"),
        *("request_migrations_total", "placements_total", "preemptions_total", "prefix_hit_tokens_total"),
    } <= drawn
