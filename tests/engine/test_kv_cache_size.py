from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.engine_config import EngineConfig
from engine.kv_cache_size import kv_cache_bytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")  # only names


def never(device: torch.device) -> int:
    raise AssertionError("nobody needs to ask a GPU")


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_what_the_configuration_says_is_taken_as_it_is(device: torch.device) -> None:
    assert kv_cache_bytes(EngineConfig(Path("m"), kv_cache_bytes=12345), device, never) == 12345


def test_a_cpu_gets_one_gib() -> None:
    assert kv_cache_bytes(EngineConfig(Path("m")), CPU, never) == 2**30


def test_a_gpu_gives_its_fraction_of_what_is_free_there() -> None:
    config = EngineConfig(Path("m"), gpu_memory_fraction=0.75)
    assert kv_cache_bytes(config, CUDA, {CUDA: 1000, CPU: 1}.__getitem__) == 750
