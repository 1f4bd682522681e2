"""Names that must never be mistaken for one another: a process's incarnation, a transfer, an attempt at it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from common.errors import InvalidRequest
from common.pb import kv_transfer_pb2 as pb

TRANSFER_ID_BYTES = 16


def new_incarnation() -> str:
    """Random per process start: the same address with another incarnation is another worker."""
    return secrets.token_hex(8)


def new_transfer_id() -> bytes:
    return secrets.token_bytes(TRANSFER_ID_BYTES)


@dataclass(frozen=True)
class Ticket:
    """One attempt to move one prompt's KV from one process to another. Every piece and every commit carries it.

    Tokens [skip_tokens, num_tokens) are sent.
    """

    transfer_id: bytes
    attempt: int
    source_incarnation: str
    destination_incarnation: str
    num_tokens: int
    skip_tokens: int = 0

    def __post_init__(self) -> None:
        if len(self.transfer_id) != TRANSFER_ID_BYTES or self.attempt < 1:
            raise InvalidRequest(f"a ticket needs a transfer id of {TRANSFER_ID_BYTES} bytes and an attempt from 1 up")
        if not self.source_incarnation or not self.destination_incarnation:
            raise InvalidRequest("a ticket names the incarnations of both workers")
        if not 0 <= self.skip_tokens <= self.num_tokens:
            raise InvalidRequest(f"skip_tokens {self.skip_tokens} is not within the {self.num_tokens} tokens")

    def to_pb(self) -> pb.Ticket:
        return pb.Ticket(
            transfer_id=self.transfer_id,
            attempt=self.attempt,
            source_incarnation=self.source_incarnation,
            destination_incarnation=self.destination_incarnation,
            num_tokens=self.num_tokens,
            skip_tokens=self.skip_tokens,
        )

    @staticmethod
    def from_pb(message: pb.Ticket) -> Ticket:
        return Ticket(
            message.transfer_id,
            message.attempt,
            message.source_incarnation,
            message.destination_incarnation,
            message.num_tokens,
            message.skip_tokens,
        )
