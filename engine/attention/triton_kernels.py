"""The two device functions of triton_paged.py. Triton compiles them: types are its own."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first_sequence", "window", "table_stride"])
def attend_tile(
    query,  # [tokens, heads, HEAD_DIM]
    key_cache,  # [blocks, BLOCK_SIZE, kv heads, HEAD_DIM]
    value_cache,
    out,  # [tokens, heads, HEAD_DIM]; with splits: partial results [tokens, heads, NUM_SPLITS, HEAD_DIM] float32
    log_sums,  # with splits: log2 of each partial result's softmax sum, [tokens, heads, NUM_SPLITS] float32
    query_start_loc,  # [sequences + 1] int32
    seq_lens,  # [sequences] int32
    block_table,  # [sequences, table_stride] int32
    scale_log2,  # softmax scale * log2(e)
    first_sequence,
    window,
    table_stride,
    query_stride_token,
    query_stride_head,
    cache_stride_block,
    cache_stride_slot,
    cache_stride_head,
    out_stride_token,
    out_stride_head,
    out_stride_split,
    GROUP: tl.constexpr,  # query heads per kv head
    HEAD_DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,  # taken at a time
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Programs (tile, sequence, kv head × split): ROWS rows are the heads of one group for ROWS // GROUP tokens, so
    all of them share each K and V that is loaded. A split sees an equal share of the tile's keys."""
    tokens_per_tile: tl.constexpr = ROWS // GROUP
    sequence = first_sequence + tl.program_id(1)
    kv_head = tl.program_id(2) // NUM_SPLITS
    split = tl.program_id(2) % NUM_SPLITS

    query_start = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - query_start
    seq_len = tl.load(seq_lens + sequence)
    first_token = tl.program_id(0) * tokens_per_tile
    if first_token >= query_len:
        return

    rows = tl.arange(0, ROWS)
    tokens = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < tokens_per_tile * GROUP) & (tokens < query_len)
    positions = seq_len - query_len + tokens
    dims = tl.arange(0, HEAD_TILE)
    is_dim = dims < HEAD_DIM
    out_rows = (query_start + tokens).to(tl.int64)
    query_offsets = out_rows * query_stride_token + heads * query_stride_head
    q = tl.load(query + query_offsets[:, None] + dims[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
    q = q.to(DOT_DTYPE)

    first_position = seq_len - query_len + first_token
    end = tl.minimum(first_position + tokens_per_tile, seq_len)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(0, first_position - window + 1)
    if NUM_SPLITS > 1:
        keys_per_split = tl.cdiv(tl.cdiv(end - begin, KEYS), NUM_SPLITS) * KEYS
        begin += split * keys_per_split
        end = tl.minimum(begin + keys_per_split, end)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_TILE], tl.float32)
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_key = keys < end
        blocks = tl.load(block_table + sequence * table_stride + keys // BLOCK_SIZE, mask=is_key, other=0)
        offsets = blocks.to(tl.int64) * cache_stride_block + (keys % BLOCK_SIZE) * cache_stride_slot
        offsets += kv_head * cache_stride_head
        # Masked, not only hidden: memory after the last token may hold NaN, which no weight of zero takes back.
        k = tl.load(key_cache + offsets[None, :] + dims[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
        scores = tl.dot(q, k.to(DOT_DTYPE), input_precision=PRECISION) * scale_log2
        is_visible = is_key[None, :] & (keys[None, :] <= positions[:, None])
        if HAS_WINDOW:
            is_visible &= keys[None, :] > positions[:, None] - window
        scores = tl.where(is_visible, scores, float("-inf"))

        larger = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)  # a row that has seen no key yet: -inf - -inf is NaN
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(largest - base)
        total = total * rescale + tl.sum(weights, 1)
        v = tl.load(value_cache + offsets[:, None] + dims[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(v.dtype).to(DOT_DTYPE), v.to(DOT_DTYPE), acc, input_precision=PRECISION)
        largest = larger

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_offsets = out_rows * out_stride_token + heads * out_stride_head + split * out_stride_split
    tl.store(
        out + out_offsets[:, None] + dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_dim[None, :],
    )
    if NUM_SPLITS > 1:
        num_heads = tl.num_programs(2) // NUM_SPLITS * GROUP
        log_sum = tl.where(total == 0.0, float("-inf"), largest + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(log_sums + (out_rows * num_heads + heads) * NUM_SPLITS + split, log_sum, mask=is_row)


@triton.jit
def combine_splits(
    partial,  # [tokens, heads, NUM_SPLITS, HEAD_DIM] float32
    log_sums,  # [tokens, heads, NUM_SPLITS] float32
    out,  # [tokens, heads, HEAD_DIM]
    out_stride_token,
    out_stride_head,
    HEAD_DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Programs (token, head): the splits' results, weighted by their share of the softmax sum."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = (token * tl.num_programs(1) + head) * NUM_SPLITS
    splits = first + tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, HEAD_TILE)
    is_dim = dims < HEAD_DIM
    logs = tl.load(log_sums + splits)
    weights = tl.exp2(logs - tl.max(logs, 0))
    weights = weights / tl.sum(weights, 0)
    parts = tl.load(partial + splits[:, None] * HEAD_DIM + dims[None, :], mask=is_dim[None, :], other=0.0)
    acc = tl.sum(parts * weights[:, None], 0)
    offsets = token * out_stride_token + head * out_stride_head + dims
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=is_dim)
