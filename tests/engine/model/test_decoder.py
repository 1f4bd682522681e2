"""Our forward pass against Hugging Face transformers, over a paged cache with scattered blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.model.weights import LoadedModel, load_model

CPU = torch.device("cpu")
PROMPT = torch.randint(0, 151, (90,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def loaded(oracle: Any) -> LoadedModel:
    return load_model(oracle.folder, torch.float32, CPU)


@pytest.mark.parametrize("attention", ["torch_reference", "cpu"])
@pytest.mark.parametrize("chunk", [90, 32, 7, 1], ids=lambda n: f"chunk{n}")
def test_logits_equal_transformers_however_the_prompt_is_cut(
    oracle: Any, loaded: LoadedModel, paged_run: Any, attention: str, chunk: int
) -> None:
    run = paged_run(loaded, attention)
    pieces = [run.step({"a": PROMPT[start : start + chunk]}) for start in range(0, len(PROMPT), chunk)]
    logits = torch.cat(pieces)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, oracle.logits(PROMPT), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [90, 32, 1], ids=lambda n: f"chunk{n}")
@pytest.mark.parametrize("length", [1, 3, 4, 5, 90])
def test_greedy_tokens_equal_transformers(
    oracle: Any, loaded: LoadedModel, paged_run: Any, length: int, chunk: int
) -> None:
    assert paged_run(loaded).greedy(PROMPT[:length], 12, chunk) == oracle.greedy(PROMPT[:length], 12)


def test_sequences_batched_with_others_give_what_they_give_alone(
    oracle: Any, loaded: LoadedModel, paged_run: Any
) -> None:
    run = paged_run(loaded)
    run.step({"a": PROMPT[:50], "b": PROMPT[50:61]})
    logits = run.step({"a": [PROMPT[50]], "b": [PROMPT[61]], "c": PROMPT[20:40]})
    expected = [
        oracle.logits(PROMPT[:51])[-1:],
        oracle.logits(PROMPT[50:62])[-1:],
        oracle.logits(PROMPT[20:40]),
    ]
    torch.testing.assert_close(logits, torch.cat(expected), atol=2e-4, rtol=1e-4)


def test_only_the_wanted_rows_have_logits(loaded: LoadedModel, paged_run: Any) -> None:
    everything = paged_run(loaded).step({"a": PROMPT[:20], "b": PROMPT[:9]})
    last = paged_run(loaded).step({"a": PROMPT[:20], "b": PROMPT[:9]}, wanted="last")
    torch.testing.assert_close(last, everything[[19, 28]], atol=1e-5, rtol=1e-5)
    assert paged_run(loaded).step({"a": PROMPT[:20]}, wanted="none").shape == (0, loaded.config.vocab_size)


def test_each_layer_is_reported_once_and_its_cache_is_final_by_then(loaded: LoadedModel, paged_run: Any) -> None:
    run = paged_run(loaded)
    num_layers = loaded.config.num_layers
    slots = torch.arange(run.num_blocks * run.block_size)
    run.cache.write_slots(0, slots, torch.zeros_like(run.cache.read_slots(0, num_layers, slots)))
    reported: list[int] = []
    seen: list[torch.Tensor] = []

    def on_layer_computed(layer: int) -> None:
        reported.append(layer)
        seen.append(run.cache.read_slots(layer, layer + 1, slots))

    run.step({"a": PROMPT[:5]}, on_layer_computed=on_layer_computed)
    assert reported == list(range(num_layers))
    final = run.cache.read_slots(0, num_layers, slots)
    assert torch.equal(torch.cat(seen), final)
    num_written = (final != 0).any(dim=-1).any(dim=-1).sum(dim=-1)  # [layers, K and V]
    assert (num_written == 5).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(
    loaded: LoadedModel, oracle: Any, paged_run: Any, dtype: torch.dtype
) -> None:
    half = paged_run(load_model(oracle.folder, dtype, CPU)).step({"a": PROMPT})
    full = paged_run(loaded).step({"a": PROMPT})
    assert half.dtype == torch.float32
    similarity = torch.nn.functional.cosine_similarity(half, full, dim=-1)
    # A rounding may tip a router's choice between two experts, and all that follows; only the rest is near.
    near = similarity.min() if loaded.config.experts is None else similarity.median()
    assert float(near) > 0.99
