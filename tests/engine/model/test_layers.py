from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.model.config import Llama3Scaling, RopeConfig
from engine.model.layers import RMSNorm, RotaryEmbedding, rotary_frequencies

CPU = torch.device("cpu")
LLAMA31 = Llama3Scaling(8.0, 1.0, 4.0, 8192)

ROPES = [
    (RopeConfig(10000.0), {"rope_type": "default", "rope_theta": 10000.0}),
    (RopeConfig(1e6, linear_factor=4.0), {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}),
    (
        RopeConfig(5e5, llama3=LLAMA31),
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), ROPES, ids=["default", "linear", "llama3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(ours: RopeConfig, theirs: dict[str, float], dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 5, 100, 8191, 100_000])
    query = torch.randn(6, 3, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=theirs)
    cos, sin = LlamaRotaryEmbedding(config)(query, positions[None])
    expected, _ = apply_rotary_pos_emb(query, query, cos[0], sin[0])
    rotated = RotaryEmbedding(ours, 128, CPU).rotation(positions, dtype).apply(query)
    # float32 frequencies may differ in the last bit, which position 100,000 multiplies
    torch.testing.assert_close(rotated, expected, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(rotated[:4], expected[:4], atol=1e-4, rtol=1e-3)


def test_divisors_as_gguf_files_store_them_equal_llama3_scaling() -> None:
    scaled = rotary_frequencies(RopeConfig(5e5, llama3=LLAMA31), 64)
    divisors = tuple((rotary_frequencies(RopeConfig(5e5), 64) / scaled).tolist())
    torch.testing.assert_close(rotary_frequencies(RopeConfig(5e5, frequency_divisors=divisors), 64), scaled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    ours = RMSNorm(48, 1e-5, dtype=dtype, device=CPU)
    ours.weight.copy_(torch.randn(48, generator=generator))
    theirs = LlamaRMSNorm(48, 1e-5).to(dtype)
    theirs.weight.data.copy_(ours.weight)
    x = (torch.randn(9, 48, generator=generator) * 30).to(dtype)
    assert torch.equal(ours(x), theirs(x))
