from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from common.pb import serving_pb2 as pb
from common.worker_metrics import exposition

STATUS = pb.WorkerStatus(
    hello=pb.WorkerHello(worker_id="decode-0", role=pb.ROLE_DECODE, model='a "model"', incarnation="i"),
    load=pb.WorkerLoad(
        num_waiting=1, num_running=2, num_reserved=3, free_blocks=90, total_blocks=100, decode_step_s=0.02
    ),
    counters={
        "engine_steps": 5,
        "kv_transfer_bytes_total": 2**40,
        "quarantined_blocks": 1,
        'kv_pieces_rejected_total{reason="size"}': 7,
        'kv_pieces_rejected_total{reason="range"}': 8,
    },
    uptime_s=12.5,
    links=[
        pb.LinkStatus(peer_incarnation="x", transport="shm", num_bytes=100, bytes_per_s=2e9, round_trip_s=0.001),
        pb.LinkStatus(peer_incarnation="y", transport="tcp", num_bytes=200),
    ],
)


def test_the_metrics_of_a_worker_are_its_status() -> None:
    found = {
        (sample.name, *sorted(sample.labels.values())): (sample.value, family.type)
        for family in text_string_to_metric_families(exposition(STATUS).decode())
        for sample in family.samples
    }
    assert found["worker_info", 'a "model"', "decode", "decode-0"] == (1, "gauge")
    assert found["uptime_seconds",] == (12.5, "gauge")
    assert found["waiting_sequences",] == (1, "gauge")
    assert found["running_sequences",] == (2, "gauge")
    assert found["reserved_sequences",] == (3, "gauge")
    assert found["kv_blocks",] == (100, "gauge")
    assert found["kv_blocks_used",] == (10, "gauge")
    assert found["decode_step_seconds",] == (0.02, "gauge")
    assert found["engine_steps_total",] == (5, "counter")
    assert found["kv_transfer_bytes_total",] == (2**40, "counter")
    assert found["quarantined_blocks",] == (1, "gauge")
    assert found["kv_pieces_rejected_total", "size"] == (7, "counter")
    assert found["kv_pieces_rejected_total", "range"] == (8, "counter")
    assert found["link_bytes_total", "shm", "x"] == (100, "counter")
    assert found["link_bytes_per_second", "shm", "x"] == (2e9, "gauge")
    assert found["link_bytes_total", "tcp", "y"] == (200, "counter")
    assert ("link_bytes_per_second", "tcp", "y") not in found  # the decode side measures nothing
