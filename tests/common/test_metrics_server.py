from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from common import metrics_server
from common.errors import ConfigError
from common.metrics_server import MAX_CONNECTIONS, MAX_HEAD_BYTES, MetricsServer

PATIENCE_S = 10.0


async def ones() -> bytes:
    return b"ones 1\n"


@asynccontextmanager
async def serving(render: Callable[[], object] = ones) -> AsyncIterator[str]:
    server = MetricsServer("127.0.0.1", 0, "prefill.metrics_port")
    await server.start(render)
    try:
        yield server.address
    finally:
        await server.stop()


async def test_get_metrics_answers_what_is_rendered_at_that_moment() -> None:
    values = iter([b"a 1\n", b"a 2\n"])

    async def render() -> bytes:
        return next(values)

    async with serving(render) as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        first, second = await http.get("/metrics"), await http.get("/metrics?name=a")
    assert (first.text, second.text) == ("a 1\n", "a 2\n")
    assert first.headers["Content-Type"].startswith("text/plain; version=")


async def test_head_has_the_length_and_no_body() -> None:
    async with serving() as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        answer = await http.head("/metrics")
    assert (answer.status_code, answer.headers["Content-Length"], answer.content) == (200, "7", b"")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/", 404), ("POST", "/metrics", 405)])
async def test_there_is_nothing_else(method: str, path: str, status: int) -> None:
    async with serving() as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        assert (await http.request(method, path)).status_code == status


async def test_a_taken_port_is_named_with_the_key_that_changes_it() -> None:
    async with serving() as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: Address already in use.*decode\.metrics_port"):
            MetricsServer("127.0.0.1", port, "decode.metrics_port")


@pytest.mark.parametrize("said", [b"", b"GET /metrics HTTP/1.1\r\n", b"x" * (2 * MAX_HEAD_BYTES)])
async def test_who_says_nothing_or_too_much_is_hung_up_on(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "TIMEOUT_S", 0.05)
    async with serving() as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(said)
        try:
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        except ConnectionResetError:
            assert len(said) > MAX_HEAD_BYTES  # it left unread what it was sent
        writer.close()


async def test_strangers_who_hold_all_connections_are_a_nuisance_only_as_long_as_they_hold_them() -> None:
    async with serving() as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        host, _, port = address.rpartition(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(MAX_CONNECTIONS)]
        with pytest.raises(httpx.TransportError):
            await http.get("/metrics")
        for _, writer in held:
            writer.close()
        async with asyncio.timeout(PATIENCE_S):
            while not await answers(http):
                await asyncio.sleep(0.01)


async def answers(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/metrics")).status_code == 200
    except httpx.TransportError:
        return False
