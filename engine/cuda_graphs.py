"""Decode steps as CUDA graphs: launching hundreds of kernels one by one costs the CPU more time than the GPU computes.

A graph repeats the same kernels on the same memory, so one is captured per batch size of a short list. A step is copied
into the memory that the graph reads, padded to the next size with rows that belong to nobody:

    5 decodes, graph of 8     rows  d d d d d p p p     p: token 0 at position 0 of the scratch block, length 1

Any other step (a prefill chunk in it, or more sequences than the largest graph) runs eagerly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.sampling import SamplingParams
from engine.attention.base import AttentionMetadata
from engine.batch import Batch, build_batch
from engine.forward import Forward
from engine.sequence import ScheduledSequence, Sequence

MAX_GRAPH_SEQS = 512
NUM_WARM_UPS = 2  # runs before a capture: libraries set themselves up, kernels are compiled


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending: close together where padding would cost most."""
    most = min(max_num_seqs, MAX_GRAPH_SEQS)
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, MAX_GRAPH_SEQS, 32)]
    return [size for size in steps if size < most] + [most]


@dataclass(frozen=True)
class DecodeShape:
    """What bounds every decode step of an engine."""

    max_num_seqs: int
    max_model_len: int  # tokens
    block_size: int
    num_layers: int
    scratch_block: int  # a block of the cache that no sequence is ever given; padding rows write there

    @property
    def max_num_blocks(self) -> int:
        """Of one sequence."""
        return -(-self.max_model_len // self.block_size)


class Captured(Protocol):
    @property
    def output(self) -> Tensor:
        """Overwritten by every replay."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], Tensor]], Captured]  # records what the call does, after warming it up


class DecodeGraphs:
    """A Forward that replays decode steps. `eager` must read a batch's lengths from its tensors alone."""

    def __init__(self, eager: Forward, capture: Capture, shape: DecodeShape, device: torch.device) -> None:
        self._eager = eager
        self._num_layers = shape.num_layers
        self._sizes = graph_sizes(shape.max_num_seqs)
        self._inputs = DecodeInputs(self._sizes[-1], shape, device)
        _warm_up_prefill(eager, shape, device)
        # The largest first: the others then fit into the memory that it has taken for its intermediate results.
        self._graphs = {size: capture(self._step_of(size)) for size in reversed(self._sizes)}

    def __call__(self, batch: Batch, on_layer_computed: Callable[[int], None] | None) -> Tensor:
        size = self._size_for(batch)
        if size is None:
            return self._eager(batch, on_layer_computed)
        graph = self._graphs[size]
        self._inputs.fill(batch, size)
        graph.replay()
        if on_layer_computed is not None:
            for layer in range(self._num_layers):
                on_layer_computed(layer)
        num_seqs = batch.token_ids.shape[0]
        if batch.logits_indices.shape[0] == num_seqs:
            return graph.output[:num_seqs]
        return graph.output.index_select(0, batch.logits_indices)  # a one-token chunk of a longer prompt is not sampled

    def _size_for(self, batch: Batch) -> int | None:
        """The smallest graph that holds the batch, if any does."""
        num_seqs = batch.attention.num_decodes
        if num_seqs < batch.token_ids.shape[0] or num_seqs > self._sizes[-1]:
            return None
        return self._sizes[bisect_left(self._sizes, num_seqs)]

    def _step_of(self, size: int) -> Callable[[], Tensor]:
        batch = self._inputs.batch(size)
        return lambda: self._eager(batch, None)


@torch.inference_mode()
def _warm_up_prefill(eager: Forward, shape: DecodeShape, device: torch.device) -> None:
    """Compile now what a first prompt would wait for; its K and V go to the scratch block."""
    if shape.block_size > 1:
        nobody = Sequence([0, 0], SamplingParams(max_tokens=1), block_table=[shape.scratch_block])
        eager(build_batch([ScheduledSequence(nobody, 0, 2)], shape.block_size, device), None)


class DecodeInputs:
    """The memory that every graph reads: one set of tensors, of which a graph uses the first rows."""

    def __init__(self, max_size: int, shape: DecodeShape, device: torch.device) -> None:
        self._shape = shape
        self._scratch_slot = shape.scratch_block * shape.block_size
        self._token_ids, self._positions, self._slots, self._rows = (
            torch.zeros(max_size, dtype=torch.int64, device=device) for _ in range(4)
        )
        self._rows.copy_(torch.arange(max_size))
        self._query_start_loc = torch.arange(max_size + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(max_size, dtype=torch.int32, device=device)
        self._block_table = torch.zeros(max_size, shape.max_num_blocks, dtype=torch.int32, device=device)
        self._pad(0, max_size)

    def fill(self, batch: Batch, size: int) -> None:
        """Copy a decode batch into the first rows, and make padding of the rest up to `size`. Queued on the device."""
        num_seqs = batch.token_ids.shape[0]
        table = batch.attention.block_table[:, : self._shape.max_num_blocks]
        self._token_ids[:num_seqs].copy_(batch.token_ids)
        self._positions[:num_seqs].copy_(batch.positions)
        self._slots[:num_seqs].copy_(batch.slot_mapping)
        self._seq_lens[:num_seqs].copy_(batch.attention.seq_lens)
        self._block_table[:num_seqs, : table.shape[1]].copy_(table)  # what lies beyond is never read
        if num_seqs < size:
            self._pad(num_seqs, size)

    def batch(self, size: int) -> Batch:
        """The first `size` rows as a Batch that shares this memory. Its limits are the engine's, and it has no
        lengths on the host: whoever reads those cannot be captured."""
        return Batch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slot_mapping=self._slots[:size],
            logits_indices=self._rows[:size],
            attention=AttentionMetadata(
                query_start_loc=self._query_start_loc[: size + 1],
                seq_lens=self._seq_lens[:size],
                block_table=self._block_table[:size],
                query_lens_list=[],
                seq_lens_list=[],
                num_decodes=size,
                max_query_len=1,
                max_seq_len=self._shape.max_model_len,
            ),
        )

    def _pad(self, start: int, end: int) -> None:
        self._token_ids[start:end].zero_()
        self._positions[start:end].zero_()
        self._slots[start:end].fill_(self._scratch_slot)
        self._seq_lens[start:end].fill_(1)
        self._block_table[start:end, 0].fill_(self._shape.scratch_block)


class CudaCapture:
    """Captures on one device; all graphs share one pool of memory, as only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> CapturedGraph:
        with torch.cuda.device(self._device), torch.inference_mode():
            side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(side):
                for _ in range(NUM_WARM_UPS):
                    run()
            torch.cuda.current_stream(self._device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # thread_local: what other threads do with the device meanwhile is not ours to forbid
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = run()
        return CapturedGraph(graph, output)


@dataclass(frozen=True)
class CapturedGraph:
    graph: torch.cuda.CUDAGraph
    output: Tensor

    def replay(self) -> None:
        self.graph.replay()
