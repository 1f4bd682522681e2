from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from engine.attention import flash, select
from engine.attention.cpu import CpuAttention
from engine.attention.flash import FlashAttention
from engine.attention.select import select_attention

CPU = torch.device("cpu")
CUDA = torch.device("cuda")  # only a name: selecting needs no device to be present


@pytest.mark.parametrize(
    ("name", "device", "dtype", "chosen"),
    [
        ("auto", CPU, torch.bfloat16, "cpu"),
        ("auto", CPU, torch.float32, "cpu"),
        ("auto", CUDA, torch.bfloat16, "flash"),
        ("auto", CUDA, torch.float16, "flash"),
        ("auto", CUDA, torch.float32, "triton"),
        ("triton", CUDA, torch.bfloat16, "triton"),
        ("cpu", CPU, torch.float32, "cpu"),
        ("flash", CUDA, torch.float16, "flash"),
        ("torch_reference", CPU, torch.float32, "torch_reference"),
        ("torch_reference", CUDA, torch.bfloat16, "torch_reference"),
    ],
)
def test_a_backend_is_chosen_by_name_device_and_dtype(
    name: str, device: torch.device, dtype: torch.dtype, chosen: str
) -> None:
    assert select_attention(name, device, dtype).name == chosen


def test_flash_attention_refuses_float32() -> None:
    with pytest.raises(ConfigError, match="triton for float32"):
        select_attention("flash", CUDA, torch.float32)


@pytest.mark.parametrize(("name", "device"), [("flash", CPU), ("cpu", CUDA), ("flsh", CPU), ("", CPU)])
def test_an_unknown_or_unfit_backend_is_a_config_error_that_names_it(name: str, device: torch.device) -> None:
    with pytest.raises(ConfigError, match=f"{name!r}"):
        select_attention(name, device, torch.bfloat16)


def test_an_unknown_backend_is_told_all_there_are() -> None:
    with pytest.raises(ConfigError, match="it may be auto, native, torch_reference, cpu, flash, triton"):
        select_attention("vulkan", CPU, torch.bfloat16)


def test_a_backend_that_cannot_run_on_the_device_cannot_be_made() -> None:
    with pytest.raises(ConfigError, match="needs a CUDA device, not cpu"):
        FlashAttention(CPU)
    with pytest.raises(ConfigError, match="does not run on cuda"):
        CpuAttention(CUDA)


def test_without_flash_and_block_tables_in_torch_our_own_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def older_varlen_attn(query: Tensor, seqused_k: Tensor) -> Tensor:
        raise AssertionError("selecting calls nothing")

    monkeypatch.setattr(flash, "flash_attn_varlen_func", None)
    monkeypatch.setattr(flash, "varlen_attn", older_varlen_attn)
    assert select_attention("auto", CUDA, torch.bfloat16).name == "triton"
    with pytest.raises(ConfigError, match="newer torch"):
        select_attention("flash", CUDA, torch.bfloat16)


def test_without_triton_float32_falls_back_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "find_spec", lambda name: None)
    assert select_attention("auto", CUDA, torch.float32).name == "torch_reference"
    with pytest.raises(ConfigError, match=r"pdserve\[triton\]"):
        select_attention("triton", CUDA, torch.float32)
