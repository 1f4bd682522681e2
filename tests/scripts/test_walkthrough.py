"""The walkthrough's statements on its own tiny transformer, and the document against what the script prints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiny_transformer import LAYERS, VOCABULARY, Cache, attention_weights, forward, forward_batch
from walkthrough import main, phrase, prefilled, stacked

DOCUMENT = Path(__file__).parents[2] / "docs" / "walkthrough.md"


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=1e-12)


def test_it_reads_你好_and_says_世_then_界() -> None:
    cache = Cache()
    first = forward("你好", cache).next_token
    assert (first, forward(first, cache).next_token) == ("世", "界")


def test_attention_decides_the_answer_and_not_the_last_token_alone() -> None:
    assert forward("你好", Cache()).next_token == "世"
    assert forward("好", Cache()).next_token == "界"


def test_a_token_by_token_prefill_gives_the_same_cache_and_logits() -> None:
    at_once, one_by_one = Cache(), Cache()
    parallel = forward("你好世界", at_once)
    for token in VOCABULARY:
        serial = forward(token, one_by_one)
    assert close(stacked(at_once), stacked(one_by_one))
    assert close(parallel.logits, serial.logits)


def test_b_the_cache_is_k_and_v_per_layer() -> None:
    forward("你好世", cache := Cache())
    assert stacked(cache).shape == (len(LAYERS), 2, 3, 4)
    assert not close(cache.keys[0], cache.keys[1])
    assert set(vars(cache)) == {"keys", "values"}


def test_c_a_missing_k_and_v_changes_the_answer() -> None:
    forward("你好", cache := Cache())
    cache.keys = [keys[:1] for keys in cache.keys]
    cache.values = [values[:1] for values in cache.values]
    assert forward("世", cache).next_token != "界"


def test_d_a_decode_step_is_the_last_row_of_the_whole() -> None:
    whole = forward("你好世", Cache())
    forward("你好", cache := Cache())
    for full, row in zip(whole.layers, forward("世", cache).layers, strict=True):
        assert full.weights.shape == (3, 3)
        assert close(full.weights[-1:], row.weights)


def test_e_new_tokens_need_the_mask_among_themselves() -> None:
    whole = forward("你好世界", Cache())
    forward("你好", masked := Cache())
    forward("你好", unmasked := Cache())
    assert close(forward("世界", masked).hidden, whole.hidden[2:])
    assert not close(forward("世界", unmasked, is_masked=False).hidden, whole.hidden[2:])


def test_attention_weights_are_causal_and_sum_to_one() -> None:
    keys = torch.arange(20, dtype=torch.float64).view(5, 4) / 20
    weights = attention_weights(keys[3:], keys)
    assert close(weights.sum(dim=-1), torch.ones(2, dtype=torch.float64))
    assert weights[0, 4] == 0
    assert (weights[1] > 0).all()


def test_f_a_mixed_step_equals_three_steps_apart() -> None:
    num_cached, num_new = (500, 200, 0), (1, 1, 100)
    new = [phrase(cached, count) for cached, count in zip(num_cached, num_new, strict=True)]
    together = forward_batch([(tokens, prefilled(cached)) for tokens, cached in zip(new, num_cached, strict=True)])
    assert sum(len(step.hidden) for step in together) == 102
    for step, tokens, cached in zip(together, new, num_cached, strict=True):
        alone = forward(tokens, prefilled(cached))
        assert close(step.hidden, alone.hidden)
        assert close(step.layers[0].weights, alone.layers[0].weights)


def test_the_document_shows_what_the_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    blocks = DOCUMENT.read_text(encoding="utf-8").split("```text\n")[1:]
    shown = [[line.rstrip() for line in block.split("```")[0].splitlines()] for block in blocks]
    assert len(shown) == 8  # the journey, then (a) to (g)
    for lines in shown:
        starts = [i for i in range(len(printed)) if printed[i : i + len(lines)] == lines]
        assert starts, "\n".join(["docs/walkthrough.md shows what scripts/walkthrough.py does not print:", *lines])
