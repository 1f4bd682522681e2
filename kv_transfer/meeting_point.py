"""Where data connections find the link that waits for them, by a token that only its source has been told.

Every connection begins with a prologue: CONTROL, or DATA and a token.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from dataclasses import dataclass, field

from common.errors import PeerLost

CONTROL, DATA = b"pdKC", b"pdKD"
TOKEN_BYTES = 32
MAX_CONNECTIONS = 16  # for data, of one link


@dataclass(eq=False)
class Meeting:
    """What one link waits for. Lives on the event loop."""

    token: bytes
    num_missing: int
    _arrived: asyncio.Queue[socket.socket | None] = field(default_factory=asyncio.Queue)

    async def next(self) -> socket.socket:
        """Raises: PeerLost once it has ended."""
        arrived = await self._arrived.get()
        if arrived is None:
            raise PeerLost("the source has left before its data connections came")
        return arrived

    def take(self, connected: socket.socket) -> None:
        self.num_missing -= 1
        self._arrived.put_nowait(connected)

    def end(self) -> None:
        """Nobody new, nobody waits. Safe to call twice."""
        self.num_missing = 0
        while not self._arrived.empty():
            arrived = self._arrived.get_nowait()
            if arrived is not None:
                arrived.close()
        self._arrived.put_nowait(None)


class MeetingPoint:
    """One listener's."""

    def __init__(self) -> None:
        self._meetings: dict[bytes, Meeting] = {}

    def expect(self, num_connections: int) -> Meeting:
        self._meetings = {token: meeting for token, meeting in self._meetings.items() if meeting.num_missing > 0}
        meeting = Meeting(secrets.token_bytes(TOKEN_BYTES), num_connections)
        self._meetings[meeting.token] = meeting
        return meeting

    def deliver(self, token: bytes, connected: socket.socket) -> bool:
        """Whether somebody waits for it; the socket is theirs then. Each token is good for as many as are missing."""
        meeting = self._meetings.get(token)
        if meeting is None or meeting.num_missing == 0:
            return False
        meeting.take(connected)
        return True
