from __future__ import annotations

import pytest
import torch

from common.errors import ConfigError
from engine.model.dtype import resolve_device, resolve_dtype

CPU = torch.device("cpu")


def test_auto_is_bfloat16_exactly_where_the_cpu_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for capabilities, dtype in (
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": False, "amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": False, "avx512_f": True}, torch.float32),
        ({}, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        assert resolve_dtype("auto", CPU) == dtype


def test_a_dtype_that_is_named_is_taken() -> None:
    assert resolve_dtype("float32", CPU) == torch.float32
    assert resolve_dtype("bfloat16", CPU) == torch.bfloat16
    assert resolve_dtype("float16", CPU) == torch.float16


@pytest.mark.parametrize("name", ["fp8", "", "int8"])
def test_an_unknown_dtype_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown dtype"):
        resolve_dtype(name, CPU)


def test_auto_is_cuda_exactly_where_there_is_one() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device("cpu") == CPU


@pytest.mark.parametrize("name", ["cuda:99", "tpu0", "meta", "", "cpu:x"])
def test_a_device_that_is_unknown_or_absent_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        resolve_device(name)
