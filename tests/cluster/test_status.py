"""What `pdserve status` says of pairs, and what `pdserve up` says of those that are refused."""

from __future__ import annotations

import io

from rich.console import Console

from cluster.display import Display
from cluster.plan import Plan
from cluster.status import pair_table
from common.config import ServeConfig
from common.pb import serving_pb2 as pb

LINK = pb.LinkStatus(peer_incarnation="d1", transport="tcp", bytes_per_s=2.345e9, round_trip_s=0.00042)
STATUS = pb.ClusterStatus(
    pairs=[
        pb.PairSummary(prefill_worker="prefill-0", decode_worker="decode-0", standing=pb.PAIR_GOOD, link=LINK),
        pb.PairSummary(
            prefill_worker="prefill-0", decode_worker="decode-1", standing=pb.PAIR_UNCHECKED, reason="not yet"
        ),
        pb.PairSummary(prefill_worker="prefill-1", decode_worker="decode-0", standing=pb.PAIR_REFUSED, reason="wrong"),
    ]
)


def test_each_pair_is_shown_with_its_standing_transport_and_measured_speed() -> None:
    console = Console(file=io.StringIO(), record=True, width=120)
    console.print(pair_table(STATUS))
    rows = [line.split() for line in console.export_text().splitlines() if line.strip().startswith("prefill-")]
    assert rows == [
        ["prefill-0", "decode-0", "good", "tcp", "2.35", "0.42", "ms"],
        ["prefill-0", "decode-1", "unchecked", "-", "-", "-"],
        ["prefill-1", "decode-0", "refused", "-", "-", "-"],
    ]


def test_a_refused_pair_is_announced_once() -> None:
    output = io.StringIO()
    display = Display(Console(file=output))
    for _ in range(3):
        display.cluster_status(STATUS, Plan(ServeConfig()))
    assert output.getvalue().splitlines() == ["wrong"]
