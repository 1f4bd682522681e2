"""The proof that a caller knows the cluster's secret, which travels in the metadata of each call.

    <milliseconds since 1970>.<nonce>.<HMAC-SHA256(secret, label · method · milliseconds · nonce)>

It is good for one call of one method at one server: nonces are remembered for as long as a proof lives. Both ends'
clocks must agree within PROOF_LIFE_S.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from common.errors import ServingError, UnprovenCaller
from common.rpc import refusing

logger = logging.getLogger(__name__)

PROOF_KEY = "pdserve-proof"
PROOF_LIFE_S = 30.0
NONCE_BYTES = 16
_LABEL = b"pdserve call"

# Probes must not need a secret.
OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Clock = Callable[[], float]


def new_proof(secret: bytes, method: str, now_s: float) -> str:
    """method: its full name, as in /pdserve.v1.Decode/Generate. A few microseconds."""
    millis, nonce = str(int(now_s * 1000)), secrets.token_hex(NONCE_BYTES)
    return f"{millis}.{nonce}.{_mac(secret, method, millis, nonce)}"


class ProofChecker:
    """One server's."""

    def __init__(self, secret: bytes, clock: Clock = time.time) -> None:
        self._secret = secret
        self._clock = clock
        self._used: dict[str, float] = {}  # nonce → when it may be forgotten; oldest first

    def require(self, method: str, proof: str) -> None:
        """Raises: UnprovenCaller."""
        millis, _, rest = proof.partition(".")
        nonce, _, mac = rest.partition(".")
        if not hmac.compare_digest(_bytes(mac), _bytes(_mac(self._secret, method, millis, nonce))):
            raise UnprovenCaller(
                "this call does not prove that its caller knows this cluster's secret; "
                "compare the files that security.secret_file names on both sides"
            )
        now_s = self._clock()  # whoever gets here knows the secret, so all that follows was written by new_proof
        self._forget(now_s)
        ahead_s = int(millis) / 1000 - now_s
        if abs(ahead_s) > PROOF_LIFE_S:
            raise UnprovenCaller(
                f"the caller's clock is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}, "
                f"or its call was delayed or replayed; at most {PROOF_LIFE_S:.0f} s are accepted"
            )
        if nonce in self._used:
            raise UnprovenCaller("this proof was used before")
        self._used[nonce] = now_s + 2 * PROOF_LIFE_S

    def _forget(self, now_s: float) -> None:
        while self._used and next(iter(self._used.values())) < now_s:
            del self._used[next(iter(self._used))]


class GuardInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Turns strangers away before a byte of their message is read."""

    def __init__(self, checker: ProofChecker) -> None:
        self._checker = checker

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        if details.method not in OPEN_METHODS:
            try:
                self._checker.require(details.method, _proof_of(details.invocation_metadata))
            except ServingError as error:
                logger.warning("refused a call of %r: %s", details.method, error.message)
                return refusing(error)
        return await continuation(details)


class ProvingChannel(grpc.aio.Channel):
    """Another channel, with a proof in the metadata of every call. An interceptor would wrap each call's object too."""

    def __init__(self, channel: grpc.aio.Channel, secret: bytes) -> None:
        self._channel = channel
        self._secret = secret

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._proving(method, self._channel.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._proving(method, self._channel.unary_stream(method, *args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._proving(method, self._channel.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._proving(method, self._channel.stream_stream(method, *args, **kwargs))

    def _proving(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def proven(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            proof = (PROOF_KEY, new_proof(self._secret, method, time.time()))
            return call(*args, metadata=(*(metadata or ()), proof), **kwargs)

        return proven

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    async def __aenter__(self) -> ProvingChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()


def _proof_of(metadata: Any) -> str:
    values = [value for key, value in metadata or () if key == PROOF_KEY]
    return str(values[0]) if values else ""


def _mac(secret: bytes, method: str, millis: str, nonce: str) -> str:
    signed = b"\n".join((_LABEL, _bytes(method), _bytes(millis), _bytes(nonce)))
    return hmac.digest(secret, signed, "sha256").hex()


def _bytes(text: str) -> bytes:
    """Of whatever a stranger sends."""
    return text.encode("utf-8", "surrogateescape")
