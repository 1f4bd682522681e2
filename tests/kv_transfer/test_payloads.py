"""A payload on its way over a socket link, with nothing around it: whatever changes between the two ends shows."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
import torch

from common.pb import kv_transfer_pb2 as pb
from kv_transfer.codec import PieceCodec
from kv_transfer.data_connection import DataConnection
from kv_transfer.heads import HeadRange
from kv_transfer.link import Landing
from kv_transfer.shm import ShmReceiver, ShmSender
from kv_transfer.staging import FreshStaging
from kv_transfer.tcp import Tcp
from kv_transfer.wire_dtype import WireDtype
from tests.kv_transfer.wires import CPU, new_layout

NUM_BYTES = 24
PAYLOAD = torch.arange(1, NUM_BYTES + 1, dtype=torch.uint8)
HEADS = HeadRange(0, 2)
LANDING = Landing(FreshStaging(CPU), PieceCodec(new_layout(), HEADS, HEADS, WireDtype.SAME))


@contextmanager
def connected() -> Iterator[tuple[DataConnection, DataConnection]]:
    near, far = (DataConnection(end) for end in socket.socketpair())
    with closing(near), closing(far):
        yield near, far


def over_tcp(bit: int | None) -> tuple[pb.Piece, int]:
    """What arrives, and the checksum of it. bit: that flips on the way."""
    with connected() as (source, wire_in), connected() as (wire_out, destination):
        Tcp().new_sender().send(source, pb.LinkRequest(piece=pb.Piece()), PAYLOAD)
        sent = bytearray(wire_in._socket.recv(1024))
        if bit is not None:
            sent[-NUM_BYTES + bit // 8] ^= 1 << bit % 8
        wire_out.send(bytes(sent))
        request, num_bytes = destination.receive_frame()
        return request.piece, Tcp().new_receiver(LANDING).receive(destination, request.piece, num_bytes).checksum


def over_shm(bit: int | None) -> tuple[pb.Piece, int]:
    with connected() as (source, destination):
        sender, receiver = ShmSender(), ShmReceiver(LANDING)
        sender.meet(source)
        receiver.meet(destination)
        sender.send(source, pb.LinkRequest(piece=pb.Piece()), PAYLOAD)
        request, num_bytes = destination.receive_frame()
        if bit is not None:
            assert sender._ring is not None
            sender._ring.memory[request.piece.offset + bit // 8] ^= 1 << bit % 8
        return request.piece, receiver.receive(destination, request.piece, num_bytes).checksum


@pytest.mark.parametrize("over", [over_tcp, over_shm])
def test_every_bit_that_flips_between_source_and_destination_shows(
    over: Callable[[int | None], tuple[pb.Piece, int]],
) -> None:
    whole, checksum = over(None)
    assert whole.checksum == checksum
    for bit in range(8 * NUM_BYTES):
        piece, checksum = over(bit)
        assert piece.checksum != checksum
