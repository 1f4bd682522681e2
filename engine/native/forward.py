"""A dense model's step in three calls of the kernels: it is short, and calls from Python add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from engine.batch import Batch
from engine.kv_cache import KVCache
from engine.model.decoder import Decoder, Layer
from engine.native import abi
from engine.native.kernels import NativeKernels, address_of
from engine.native.layer import PackedLayer
from engine.native.packing import Output, WeightFormat


class NativeForward:
    """A Forward, see engine/forward.py."""

    def __init__(
        self,
        model: Decoder,
        kernels: NativeKernels,
        kv_cache: KVCache,
        angles: Tensor,
        weights: WeightFormat = WeightFormat.BFLOAT16,
    ) -> None:
        """Takes the model's layers away one by one, so that there are never two copies of all weights.

        angles: attention.angle_table. weights: of the linear layers, the head included; the embedding, of which a step
        reads a row for each token, stays bfloat16.
        """
        layers = []
        while len(model.layers) > 0:
            layers.append(PackedLayer(cast(Layer, model.layers.pop(0)), kernels, kv_cache, weights))
        lm_head = kernels.pack_linear(model.lm_head.weight, model.lm_head.bias, weights)
        lm_head.operation.output = Output.FLOAT32  # logits are compared
        embedding, norm = model.embed_tokens.weight, model.norm
        self._kernels = kernels
        self._owned = layers, lm_head, embedding, norm, angles, kv_cache  # the structures hold addresses only
        self._num_layers = len(layers)
        self._model = abi.Model(
            embedding=address_of(embedding),
            layers=(abi.Layer * len(layers))(*(layer.operation for layer in layers)),
            norm=address_of(norm.weight),
            lm_head=lm_head.operation,
            vocab_size=embedding.shape[0],
            num_positions=angles.shape[0],
            eps=norm.eps,
        )
        self._step = Step(model.lm_head.weight.shape, max(layer.numbers_per_token for layer in layers), angles)

    def __call__(self, batch: Batch, on_layer_computed: Callable[[int], None] | None) -> Tensor:
        """Raises: IndexError when a token or a position is none of the model's."""
        logits = self._step.prepare(batch)
        kernels, model, step = self._kernels, self._model, self._step.operation
        kernels.embed(model, step)
        if on_layer_computed is None:
            kernels.layers(model, step, 0, self._num_layers)
        else:
            for index in range(self._num_layers):
                kernels.layers(model, step, index, index + 1)
                on_layer_computed(index)
        kernels.logits(model, step)
        return logits


class Step:
    """A step's tensors as the kernels take them, and the memory that they compute in, kept from step to step."""

    def __init__(self, lm_head_shape: torch.Size, numbers_per_token: int, angles: Tensor) -> None:
        self._vocab_size, hidden_size = lm_head_shape
        self.operation = abi.ModelStep()
        self._of_layers = self.operation.of_layers  # the same memory
        self._of_layers.angles = address_of(angles, torch.float32)
        self._x = torch.empty(0, hidden_size, dtype=torch.bfloat16)
        self._workspace = torch.empty(0, numbers_per_token, dtype=torch.bfloat16)
        self._logits = torch.empty(0, self._vocab_size)

    def prepare(self, batch: Batch) -> Tensor:
        """Where the step's logits will be: [num_sampled, vocab_size] float32, overwritten by the next."""
        operation, layers, attention = self.operation, self._of_layers, batch.attention
        num_tokens, num_sampled = batch.token_ids.shape[0], batch.logits_indices.shape[0]
        assert batch.positions.shape == batch.slot_mapping.shape == (num_tokens,)
        self._grow(num_tokens, num_sampled)
        layers.tokens, operation.sampled = num_tokens, num_sampled
        layers.sequences, layers.table_width = attention.block_table.shape
        operation.token_ids = address_of(batch.token_ids, torch.int64)
        operation.logits_indices = address_of(batch.logits_indices, torch.int64)
        layers.positions = address_of(batch.positions, torch.int64)
        layers.slots = address_of(batch.slot_mapping, torch.int64)
        layers.block_table = address_of(attention.block_table, torch.int32)
        layers.query_start = address_of(attention.query_start_loc, torch.int32)
        layers.seq_lens = address_of(attention.seq_lens, torch.int32)
        return self._logits[:num_sampled]

    def _grow(self, num_tokens: int, num_sampled: int) -> None:
        if num_tokens > len(self._x):
            self._x = self._x.new_empty(num_tokens, self._x.shape[1])
            self._workspace = self._workspace.new_empty(num_tokens, self._workspace.shape[1])
            self._of_layers.x, self._of_layers.workspace = self._x.data_ptr(), self._workspace.data_ptr()
        if num_sampled > len(self._logits):
            self._logits = self._logits.new_empty(num_sampled, self._vocab_size)
            self.operation.logits = self._logits.data_ptr()
