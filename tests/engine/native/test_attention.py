"""Paged attention against the oracle: ragged batches, shuffled blocks of any size, NaN wherever nothing was written."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from engine.attention.base import AttentionMetadata
from engine.attention.torch_reference import TorchReferenceAttention, gather_sequence
from engine.native.kernels import NativeKernels, supports_attention

TOLERANCE = 2e-2  # weights and results are rounded to bfloat16


@dataclass(frozen=True)
class Shape:
    block_size: int
    num_kv_heads: int
    group: int
    head_dim: int


@dataclass(frozen=True)
class Case:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    metadata: AttentionMetadata

    def run(self, kernels: NativeKernels, window: int | None = None, scale: float = 0.3) -> Tensor:
        return kernels.attention(self.query, self.key_cache, self.value_cache, self.metadata, scale, window)

    def expected(self, scale: float = 0.3) -> Tensor:
        return TorchReferenceAttention()(self.query, self.key_cache, self.value_cache, self.metadata, scale)


def make_case(sequences: list[tuple[int, int]], shape: Shape, seed: int) -> Case:
    """sequences: (query_len, seq_len), decodes first; each in its own shuffled blocks."""
    generator = torch.Generator().manual_seed(seed)
    query_lens, seq_lens = [list(lens) for lens in zip(*sequences, strict=True)]
    counts = [-(-seq_len // shape.block_size) for seq_len in seq_lens]
    num_blocks = sum(counts) + 3
    shuffled = torch.randperm(num_blocks, generator=generator)
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    cache = torch.full((2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim), float("nan"))
    start = 0
    for row, (count, seq_len) in enumerate(zip(counts, seq_lens, strict=True)):
        tables[row, :count] = shuffled[start : start + count]
        start += count
        slots = torch.arange(seq_len)
        blocks = tables[row].long()[slots // shape.block_size]
        written = torch.randn(2, seq_len, shape.num_kv_heads, shape.head_dim, generator=generator)
        cache[:, blocks, slots % shape.block_size] = written
    num_heads = shape.num_kv_heads * shape.group
    query = torch.randn(sum(query_lens), num_heads, shape.head_dim, generator=generator).bfloat16()
    metadata = AttentionMetadata(
        query_start_loc=F.pad(torch.tensor(query_lens).cumsum(0), (1, 0)).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=tables,
        query_lens_list=query_lens,
        seq_lens_list=seq_lens,
        num_decodes=query_lens.count(1),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    return Case(query, cache[0].bfloat16(), cache[1].bfloat16(), metadata)


def windowed(case: Case, window: int, scale: float = 0.3) -> Tensor:
    """Plain attention in which a query sees itself and the window - 1 tokens before it."""
    out = torch.empty_like(case.query)
    start = 0
    lengths = zip(case.metadata.query_lens_list, case.metadata.seq_lens_list, strict=True)
    for row, (query_len, seq_len) in enumerate(lengths):
        rows = slice(start, start + query_len)
        caches = (case.key_cache, case.value_cache)
        k, v = (gather_sequence(cache, case.metadata.block_table[row], seq_len).float() for cache in caches)
        age = torch.arange(seq_len - query_len, seq_len)[:, None] - torch.arange(seq_len)
        mask = (age >= 0) & (age < window)
        q = case.query[rows].float().transpose(0, 1)
        attended = F.scaled_dot_product_attention(
            q, k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, scale=scale, enable_gqa=True
        )
        out[rows] = attended.transpose(0, 1).bfloat16()
        start += query_len
    return out


sequence_lists = st.tuples(
    st.lists(st.tuples(st.just(1), st.integers(1, 400)), max_size=5),
    st.lists(st.tuples(st.integers(2, 150), st.integers(0, 200)).map(lambda t: (t[0], t[0] + t[1])), max_size=3),
).map(lambda both: both[0] + both[1] or [(1, 1)])
shapes = st.builds(
    Shape,
    block_size=st.integers(1, 256),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12]),
    head_dim=st.sampled_from([32, 64, 96, 128, 256]),
)
seeds = st.integers(0, 2**31)


@given(sequences=sequence_lists, shape=shapes, seed=seeds)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_attention_equals_the_reference_on_any_batch(
    one_thread: NativeKernels, two_threads: NativeKernels, sequences: list[tuple[int, int]], shape: Shape, seed: int
) -> None:
    case = make_case(sequences, shape, seed)
    actual = case.run(one_thread)
    torch.testing.assert_close(actual, case.expected(), atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(actual, case.run(two_threads))


@given(sequences=sequence_lists, shape=shapes, window=st.integers(1, 300), seed=seeds)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_attention_with_a_sliding_window_sees_only_the_window(
    one_thread: NativeKernels, sequences: list[tuple[int, int]], shape: Shape, window: int, seed: int
) -> None:
    case = make_case(sequences, shape, seed)
    torch.testing.assert_close(case.run(one_thread, window), windowed(case, window), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("length", [256, 257, 511, 512, 513, 2500])
def test_a_context_that_is_cut_into_chunks_is_joined(
    one_thread: NativeKernels, two_threads: NativeKernels, length: int
) -> None:
    case = make_case([(1, length), (3, length), (1, 5)], Shape(16, 3, 3, 64), length)
    actual = case.run(two_threads)
    torch.testing.assert_close(actual, case.expected(), atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(actual, case.run(one_thread))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_long_prompt_in_one_piece_and_in_chunks_gives_the_same(one_thread: NativeKernels, head_dim: int) -> None:
    shape = Shape(16, 2, 3, head_dim)
    whole = make_case([(700, 700)], shape, 3)
    torch.testing.assert_close(whole.run(one_thread), whole.expected(), atol=TOLERANCE, rtol=TOLERANCE)
    chunk = make_case([(200, 700)], shape, 3)
    last = Case(whole.query[500:], whole.key_cache, whole.value_cache, chunk.metadata)
    assert torch.equal(last.metadata.block_table, whole.metadata.block_table)
    assert torch.equal(last.run(one_thread), whole.run(one_thread)[500:])


def test_scores_far_apart_and_far_from_zero_are_no_trouble(one_thread: NativeKernels) -> None:
    """Scores of many hundreds, rising from tile to tile, so that the reference is raised over and over."""
    case = make_case([(1, 600), (90, 300)], Shape(16, 1, 3, 64), 1)
    rising = torch.linspace(-40, 40, case.key_cache.shape[0]).view(-1, 1, 1, 1).bfloat16()
    steep = Case(case.query, case.key_cache * rising, case.value_cache, case.metadata)
    for scale in (0.3, 3.0):
        torch.testing.assert_close(steep.run(one_thread, scale=scale), steep.expected(scale), atol=0.05, rtol=0.05)


def test_a_sequence_alone_gives_the_same_as_in_a_batch(two_threads: NativeKernels) -> None:
    shape = Shape(16, 3, 3, 64)
    batch = make_case([(1, 300), (1, 40), (60, 90)], shape, 9)
    alone = make_case([(1, 300)], shape, 0)
    table = batch.metadata.block_table[:1].contiguous()
    metadata = AttentionMetadata(alone.metadata.query_start_loc, alone.metadata.seq_lens, table, [1], [300], 1, 1, 300)
    lone = Case(batch.query[:1], batch.key_cache, batch.value_cache, metadata)
    assert torch.equal(lone.run(two_threads), batch.run(two_threads)[:1])


def test_the_query_may_be_a_view_into_the_fused_projection(one_thread: NativeKernels) -> None:
    case = make_case([(1, 70), (9, 9)], Shape(16, 2, 3, 64), 2)
    fused = torch.cat((case.query.flatten(1), torch.randn(10, 4 * 64).bfloat16()), dim=1)
    view = fused[:, : 6 * 64].view(10, 6, 64)
    assert torch.equal(
        Case(view, case.key_cache, case.value_cache, case.metadata).run(one_thread), case.run(one_thread)
    )


def test_head_sizes_it_cannot_do_are_refused(one_thread: NativeKernels) -> None:
    dims = (16, 32, 48, 64, 80, 96, 128, 256, 288)
    assert [dim for dim in dims if not supports_attention(dim, 3)] == [16, 48, 80, 288]
    case = make_case([(1, 4)], Shape(4, 1, 1, 16), 1)
    with pytest.raises(AssertionError):
        case.run(one_thread)


def test_as_many_heads_as_it_has_room_for_share_a_kv_head_and_no_more(one_thread: NativeKernels) -> None:
    assert [group for group in (1, 191, 192, 193, 256) if not supports_attention(64, group)] == [193, 256]
    for shape in (Shape(16, 1, 192, 32), Shape(16, 2, 97, 64)):
        case = make_case([(1, 300), (1, 1), (3, 5)], shape, 3)
        assert torch.allclose(case.run(one_thread).float(), case.expected().float(), atol=0.02, rtol=0.02)
    with pytest.raises(AssertionError):
        make_case([(1, 4)], Shape(4, 1, 193, 32), 1).run(one_thread)
