"""Tiny random Hugging Face models, and a way to run ours over a paged cache with shuffled blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from engine.attention.base import AttentionMetadata
from engine.attention.select import select_attention
from engine.batch import Batch
from engine.kv_cache import KVCache, KVCacheShape
from engine.model.weights import LoadedModel

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 151,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large enough that the tokens' scores are far apart
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def llama_with_llama3_rope_and_its_own_head() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False))


def llama_with_linear_rope_tied_head_and_biases() -> PreTrainedModel:
    rope = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    config = LlamaConfig(**SIZES, rope_parameters=rope, tie_word_embeddings=True, attention_bias=True)
    return LlamaForCausalLM(config)


def llama_with_wide_heads() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=16))


def qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))


def qwen2_with_a_window_in_its_upper_layers() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=1))


def mistral_with_a_window() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=13))


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True))


def qwen3_with_biases_and_a_window_in_one_layer() -> PreTrainedModel:
    types = ["full_attention", "sliding_attention", "full_attention"]
    window = {"use_sliding_window": True, "sliding_window": 6, "layer_types": types}
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, attention_bias=True, **window))


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2))


def qwen3_moe() -> PreTrainedModel:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, norm_topk_prob=True))


def qwen3_moe_with_a_dense_layer_and_a_window() -> PreTrainedModel:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]}
    config = Qwen3MoeConfig(**SIZES, **experts, norm_topk_prob=False, use_sliding_window=True, sliding_window=21)
    return Qwen3MoeForCausalLM(config)


TINY_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    make.__name__: make
    for make in (
        llama_with_llama3_rope_and_its_own_head,
        llama_with_linear_rope_tied_head_and_biases,
        llama_with_wide_heads,
        qwen2,
        qwen2_with_a_window_in_its_upper_layers,
        mistral_with_a_window,
        qwen3,
        qwen3_with_biases_and_a_window_in_one_layer,
        mixtral,
        qwen3_moe,
        qwen3_moe_with_a_dense_layer_and_a_window,
    )
}


@dataclass(frozen=True)
class Oracle:
    """A transformers model and the folder it is saved in."""

    model: PreTrainedModel
    folder: Path

    def logits(self, token_ids: list[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor([token_ids])).logits[0]
        return logits

    def greedy(self, token_ids: list[int], count: int) -> list[int]:
        tokens = list(token_ids)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(token_ids) :]


def save_oracle(make: Callable[[], PreTrainedModel], folder: Path) -> Oracle:
    """Same weights every time. Norms and biases are random too: as initialised they would hide a mix-up."""
    torch.manual_seed(0)
    model = make().float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return Oracle(model, folder)


@pytest.fixture(scope="session", params=TINY_MODELS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return save_oracle(TINY_MODELS[request.param], tmp_path_factory.mktemp("model"))


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Oracle:
    return save_oracle(llama_with_llama3_rope_and_its_own_head, tmp_path / "model")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class PagedRun:
    """Our model over a paged cache in which every sequence's blocks are scattered."""

    loaded: LoadedModel
    attention: str = "cpu"
    block_size: int = 4
    num_blocks: int = 256
    lengths: dict[str, int] = field(default_factory=dict)  # tokens in the cache, per sequence

    def __post_init__(self) -> None:
        config = self.loaded.config
        shape = KVCacheShape(config.num_layers, self.num_blocks, self.block_size, config.num_kv_heads, config.head_dim)
        self.cache = KVCache(shape, self.loaded.model.dtype, CPU)
        self._backend = select_attention(self.attention, CPU, self.loaded.model.dtype)
        self._free = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(7)).tolist()
        self._tables: dict[str, list[int]] = {}

    def step(
        self,
        chunks: dict[str, list[int]],
        wanted: str = "all",
        on_layer_computed: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Run new tokens of some sequences in one batch; `wanted` rows: all, last (of each sequence), none."""
        ordered = sorted(chunks.items(), key=lambda item: len(item[1]) > 1)  # decodes first
        positions, slots, last_rows = [], [], []
        for name, token_ids in ordered:
            start = self.lengths.get(name, 0)
            end = self.lengths[name] = start + len(token_ids)
            table = self._tables.setdefault(name, [])
            while len(table) * self.block_size < end:
                table.append(self._free.pop())
            positions += range(start, end)
            slots += [table[p // self.block_size] * self.block_size + p % self.block_size for p in range(start, end)]
            last_rows.append(len(positions) - 1)
        rows = {"all": list(range(len(positions))), "last": last_rows, "none": []}[wanted]
        batch = Batch(
            token_ids=torch.tensor([token for _, token_ids in ordered for token in token_ids]),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            logits_indices=torch.tensor(rows, dtype=torch.int64),
            attention=self._metadata([name for name, _ in ordered], [len(token_ids) for _, token_ids in ordered]),
        )
        with torch.inference_mode():
            return self.loaded.model(batch, self.cache, self._backend, on_layer_computed)

    def greedy(self, token_ids: list[int], count: int, chunk: int) -> list[int]:
        """Prefill `chunk` tokens a step, then decode."""
        for start in range(0, len(token_ids), chunk):
            logits = self.step({"greedy": token_ids[start : start + chunk]}, wanted="last")
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < count:
            tokens.append(int(self.step({"greedy": tokens[-1:]}, wanted="last")[-1].argmax()))
        return tokens

    def _metadata(self, names: list[str], query_lens: list[int]) -> AttentionMetadata:
        seq_lens = [self.lengths[name] for name in names]
        width = max(len(self._tables[name]) for name in names)
        return AttentionMetadata(
            query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=torch.tensor(
                [self._tables[name] + [0] * (width - len(self._tables[name])) for name in names], dtype=torch.int32
            ),
            query_lens_list=query_lens,
            seq_lens_list=seq_lens,
            num_decodes=query_lens.count(1),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
        )


@pytest.fixture
def paged_run() -> type[PagedRun]:
    return PagedRun
