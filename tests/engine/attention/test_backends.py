"""Every backend against the oracle, over random batches; and the oracle against attention with no paging at all."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from engine.attention.base import AttentionBackend, AttentionMetadata
from engine.attention.cpu import CpuAttention
from engine.attention.flash import FlashAttention, torch_varlen
from engine.attention.torch_reference import TorchReferenceAttention

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """Sequences as (query_len, seq_len), decodes first. window: None, or how many tokens a query sees."""

    sequences: list[tuple[int, int]]
    block_size: int
    num_kv_heads: int
    group: int
    head_dim: int
    dtype: torch.dtype
    seed: int
    window: int | None = None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    decodes = draw(st.lists(st.integers(1, 150), max_size=6))
    prefills = draw(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 90)), max_size=4))
    sequences = [(1, length) for length in decodes] + [(new, new + cached) for new, cached in prefills]
    return Case(
        sequences=sequences or [(1, 1)],
        block_size=draw(st.integers(1, 64) | st.just(256)),
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7])),
        head_dim=draw(st.sampled_from([8, 16, 64])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 2**31)),
        window=draw(st.none() | st.integers(1, 200)),
    )


def metadata_for(case: Case, device: torch.device = CPU) -> AttentionMetadata:
    """Every sequence in its own shuffled blocks; as many of the leading query-length-1 ones as possible are decodes."""
    query_lens = [query_len for query_len, _ in case.sequences]
    seq_lens = [seq_len for _, seq_len in case.sequences]
    counts = [-(-seq_len // case.block_size) for seq_len in seq_lens]
    shuffled = torch.randperm(num_blocks(case), generator=torch.Generator().manual_seed(case.seed)).tolist()
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([shuffled.pop() for _ in range(count)])
    leading = next((i for i, query_len in enumerate(query_lens) if query_len != 1), len(query_lens))
    return AttentionMetadata(
        query_start_loc=F.pad(torch.tensor(query_lens).cumsum(0), (1, 0)).int().to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=tables.to(device),
        query_lens_list=query_lens,
        seq_lens_list=seq_lens,
        num_decodes=leading,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )


def num_blocks(case: Case) -> int:
    return sum(-(-seq_len // case.block_size) for _, seq_len in case.sequences) + 3


def tensors_for(case: Case, metadata: AttentionMetadata) -> tuple[Tensor, Tensor, Tensor]:
    """Query and cache. Slots that hold no token are NaN, as uninitialised memory may be."""
    generator = torch.Generator().manual_seed(case.seed)
    num_tokens = sum(query_len for query_len, _ in case.sequences)
    query = torch.randn(num_tokens, case.num_kv_heads * case.group, case.head_dim, generator=generator)
    cache = torch.full((2, num_blocks(case) * case.block_size, case.num_kv_heads, case.head_dim), float("nan"))
    for row, seq_len in enumerate(metadata.seq_lens_list):
        for position in range(seq_len):
            block = int(metadata.block_table[row, position // case.block_size])
            slot = block * case.block_size + position % case.block_size
            cache[:, slot] = torch.randn(2, case.num_kv_heads, case.head_dim, generator=generator)
    cache = cache.to(case.dtype).unflatten(1, (num_blocks(case), case.block_size))
    return query.to(case.dtype), cache[0], cache[1]


def assert_same_as_reference(backend: AttentionBackend, case: Case, device: torch.device = CPU) -> None:
    metadata = metadata_for(case)
    query, key_cache, value_cache = tensors_for(case, metadata)
    expected = TorchReferenceAttention()(query, key_cache, value_cache, metadata, 0.3, case.window)
    on_device = [tensor.to(device) for tensor in (query, key_cache, value_cache)]
    actual = backend(*on_device, metadata_for(case, device), 0.3, case.window).to(CPU)
    assert actual.dtype == case.dtype
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@given(case=cases())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_cpu_attention_equals_the_reference_on_any_batch(case: Case) -> None:
    assert_same_as_reference(CpuAttention(CPU), case)


def test_cpu_attention_keeps_nothing_of_one_step_in_the_next() -> None:
    backend = CpuAttention(CPU)
    for length in (5, 40, 5, 1):
        assert_same_as_reference(backend, Case([(1, length), (3, length + 3)], 4, 2, 2, 8, torch.float32, length))


def test_cpu_attention_serves_two_layers_of_one_step_from_different_caches() -> None:
    case = Case([(1, 9), (1, 30), (6, 6), (4, 21)], 8, 1, 3, 16, torch.float32, 5)
    metadata = metadata_for(case)
    query, key_cache, value_cache = tensors_for(case, metadata)
    backend, reference = CpuAttention(CPU), TorchReferenceAttention()
    for keys in (key_cache, -2 * key_cache):
        expected = reference(query, keys, value_cache, metadata, 0.5)
        torch.testing.assert_close(backend(query, keys, value_cache, metadata, 0.5), expected, atol=1e-5, rtol=1e-5)


def test_cpu_attention_serves_layers_with_and_without_a_window_in_one_step() -> None:
    case = Case([(1, 9), (1, 30), (6, 6), (4, 21)], 8, 1, 3, 16, torch.float32, 5)
    metadata = metadata_for(case)
    query, key_cache, value_cache = tensors_for(case, metadata)
    backend, reference = CpuAttention(CPU), TorchReferenceAttention()
    outputs = {}
    for window in (None, 5, None, 5, 1):
        expected = reference(query, key_cache, value_cache, metadata, 0.5, window)
        outputs[window] = backend(query, key_cache, value_cache, metadata, 0.5, window)
        torch.testing.assert_close(outputs[window], expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(outputs[None], outputs[5])


def test_the_reference_equals_plain_causal_attention_when_one_sequence_lies_in_order() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(12, heads, 8, generator=generator) for heads in (4, 2, 2))
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 12], dtype=torch.int32),
        seq_lens=torch.tensor([12], dtype=torch.int32),
        block_table=torch.tensor([[0, 1, 2]], dtype=torch.int32),
        query_lens_list=[12],
        seq_lens_list=[12],
        num_decodes=0,
        max_query_len=12,
        max_seq_len=12,
    )
    paged = TorchReferenceAttention()(query, key.view(3, 4, 2, 8), value.view(3, 4, 2, 8), metadata, scale=8**-0.5)
    q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)
    torch.testing.assert_close(paged, plain, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 5, 30])
def test_a_window_hides_from_the_reference_exactly_the_tokens_before_it(window: int) -> None:
    case = Case([(1, 12), (9, 20)], 4, 1, 1, 8, torch.float32, 3, window)
    metadata = metadata_for(case)
    query, key_cache, value_cache = tensors_for(case, metadata)
    before = TorchReferenceAttention()(query, key_cache, value_cache, metadata, 1.0, window)
    for position in range(20):  # of the second sequence
        changed = value_cache.clone()
        changed[int(metadata.block_table[1, position // 4]), position % 4] += 1000.0
        after = TorchReferenceAttention()(query, key_cache, changed, metadata, 1.0, window)
        sees = [position <= row < position + window for row in range(11, 20)]
        assert (before != after).any(dim=-1).any(dim=-1).tolist() == [False, *sees]


def test_the_reference_attends_to_no_later_token() -> None:
    case = Case([(7, 7)], 4, 1, 1, 8, torch.float32, 3)
    metadata = metadata_for(case)
    query, key_cache, value_cache = tensors_for(case, metadata)
    before = TorchReferenceAttention()(query, key_cache, value_cache, metadata, 1.0)
    last_block, last_offset = int(metadata.block_table[0, 6 // 4]), 6 % 4
    value_cache[last_block, last_offset] = 1000.0
    after = TorchReferenceAttention()(query, key_cache, value_cache, metadata, 1.0)
    assert torch.equal(before[:6], after[:6])
    assert not torch.equal(before[6], after[6])


@pytest.mark.parametrize("window", [None, 16])
def test_torch_accepts_our_varlen_call_and_keeps_the_shape(window: int | None) -> None:
    case = Case([(1, 300), (20, 270)], 256, 2, 3, 64, torch.bfloat16, 4)
    metadata = metadata_for(case, torch.device("meta"))
    query, cache = torch.empty(21, 6, 64, device="meta"), torch.empty(8, 256, 2, 64, device="meta")
    assert torch_varlen(query, cache, cache, metadata, 0.125, window).shape == (21, 6, 64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sequences", [[(1, 300), (1, 7)], [(64, 64)], [(1, 513), (40, 296), (256, 256)]])
@pytest.mark.parametrize("window", [None, 1, 40, 300, 1000])
def test_flash_attention_equals_the_reference(sequences: list[tuple[int, int]], window: int | None) -> None:
    device = torch.device("cuda")
    case = Case(sequences, 256, 2, 4, 64, torch.bfloat16, 11, window)
    assert_same_as_reference(FlashAttention(device), case, device)
