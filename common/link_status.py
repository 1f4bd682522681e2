"""A worker's KV links as messages. What kv_transfer reports is described here by its form: common imports nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.pb import serving_pb2 as pb


class LinkSpeed(Protocol):
    @property
    def bytes_per_s(self) -> float: ...

    @property
    def round_trip_s(self) -> float: ...


class LinkReport(Protocol):
    """kv_transfer/transport.py's."""

    @property
    def peer(self) -> str: ...

    @property
    def transport(self) -> str: ...

    @property
    def speed(self) -> LinkSpeed | None: ...

    @property
    def num_bytes(self) -> int: ...


class LinkSource(Protocol):
    """A KV sender or receiver."""

    def links(self) -> Sequence[LinkReport]: ...


def link_statuses(source: LinkSource) -> list[pb.LinkStatus]:
    return [_status(link) for link in source.links()]


def _status(link: LinkReport) -> pb.LinkStatus:
    status = pb.LinkStatus(peer_incarnation=link.peer, transport=link.transport, num_bytes=link.num_bytes)
    if link.speed is not None:
        status.bytes_per_s = link.speed.bytes_per_s
        status.round_trip_s = link.speed.round_trip_s
    return status
