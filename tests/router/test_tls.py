"""Both public APIs over TLS: who trusts the authority is served, and nobody in the clear."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

import grpc_client
import load_test
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.rpc import bind_port, new_channel
from common.server_certificate import CHECK_EVERY_S, ServerCertificate
from common.tls_files import CertificateFiles
from common.transfer_config import TlsFiles
from router.api import create_app
from router.frontend import Frontend
from router.grpc_api import InferenceServicer
from router.grpc_server import new_public_server
from tests.kv_transfer.certificates import Authority
from tests.router.conftest import running

HELLO: dict[str, Any] = {"model": "tiny", "prompt": "Hi"}


@dataclass(frozen=True)
class Secured:
    url: str
    grpc_address: str
    authority: Authority
    files: TlsFiles

    @property
    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.files.ca)

    def channel(self) -> grpc.aio.Channel:
        return new_channel(self.grpc_address, grpc.ssl_channel_credentials(self.files.ca.read_bytes()))


@pytest.fixture
async def secured(frontend: Frontend, tmp_path: Path) -> AsyncIterator[Secured]:
    authority = Authority(tmp_path, "authority")
    files = authority.certify("server")
    each_handshake_later = count(step=CHECK_EVERY_S).__next__
    certificate = ServerCertificate(CertificateFiles(files.cert, files.key, "security.tls"), each_handshake_later)
    server = new_public_server(frontend.gate)
    pb_grpc.add_InferenceServicer_to_server(InferenceServicer(frontend), server)
    address = bind_port(server, "127.0.0.1", 0, certificate.grpc_credentials())
    await server.start()
    async with running(create_app(frontend), certificate.http_context()) as url:
        yield Secured(url, address, authority, files)
    await server.stop(None)


async def test_who_trusts_the_authority_gets_answers_and_streams_over_https(secured: Secured) -> None:
    assert secured.url.startswith("https://")
    async with httpx.AsyncClient(verify=secured.trusting) as http:
        api = openai.AsyncOpenAI(base_url=f"{secured.url}/v1", api_key="none", http_client=http, max_retries=0)
        assert (await api.completions.create(**HELLO)).choices[0].text == "Hello"
        stream = await api.completions.create(**HELLO, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello"


async def test_who_trusts_the_authority_gets_answers_over_grpc(secured: Secured) -> None:
    async with secured.channel() as channel:
        call = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(prompt="Hi"), timeout=10)
        assert "".join([message.text async for message in call]) == "Hello"


async def test_who_does_not_trust_the_authority_says_so(secured: Secured) -> None:
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await http.get(f"{secured.url}/health")


async def test_nobody_is_served_in_the_clear(secured: Secured, pipeline: Any) -> None:
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.TransportError):
            await http.post(f"{secured.url.replace('https', 'http')}/v1/completions", json=HELLO)
    async with new_channel(secured.grpc_address) as channel:
        call = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(prompt="Hi"), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert pipeline.requests == []


@pytest.mark.parametrize(
    "noise", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\x01" * 50_000]
)
async def test_a_broken_tls_handshake_harms_nobody_else(secured: Secured, noise: bytes) -> None:
    url = httpx.URL(secured.url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(noise)
    async with httpx.AsyncClient(verify=secured.trusting) as http:
        assert (await http.get(f"{secured.url}/health")).status_code == 200
    writer.close()


async def test_a_new_certificate_is_served_by_both_without_a_restart(secured: Secured) -> None:
    """The old authority is gone with it: who still trusts that one alone is not served."""
    old = secured.trusting
    replaced = Authority(secured.files.cert.parent, "authority").certify("server")
    assert replaced == secured.files
    async with httpx.AsyncClient(verify=secured.trusting) as http:
        assert (await http.post(f"{secured.url}/v1/completions", json=HELLO)).status_code == 200
    async with secured.channel() as channel:
        call = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(prompt="Hi"), timeout=10)
        assert [message async for message in call]
    async with httpx.AsyncClient(verify=old) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"{secured.url}/health")


# ---------------------------------------------------------------- the clients that come with pdserve


@pytest.mark.parametrize("api", ["--url", "--grpc"])
@pytest.mark.parametrize("is_trusting", [True, False])
async def test_the_load_test_reaches_both_apis_by_their_authority(
    secured: Secured, pipeline: Any, api: str, is_trusting: bool
) -> None:
    address = secured.url if api == "--url" else secured.grpc_address
    trust = ["--ca", str(secured.files.ca)] if is_trusting else ["--tls"] if api == "--grpc" else []
    small = ["--num-requests", "2", "--input-tokens", "5", "--output-tokens", "2", "--timeout", "10"]
    # in a thread: it runs an event loop of its own while the server's keeps turning
    status = await asyncio.to_thread(load_test.main, [api, address, "--model", "tiny", *trust, *small])
    assert status == (0 if is_trusting else 1)
    assert len(pipeline.requests) == (2 if is_trusting else 0)


async def test_the_grpc_client_reaches_the_api_by_its_authority(secured: Secured) -> None:
    output = await asyncio.subprocess.create_subprocess_exec(
        sys.executable, grpc_client.__file__, "Hi", "--address", secured.grpc_address, "--ca", str(secured.files.ca),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(30):
        answer, _ = await output.communicate()
    assert output.returncode == 0
    assert answer.startswith(b"Hello")
