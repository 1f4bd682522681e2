"""From 你好 to 世界, with every number on the screen: what prefill, decode and the KV cache are.

python scripts/walkthrough.py        docs/walkthrough.md explains what it prints
"""

from __future__ import annotations

import torch
from torch import Tensor

from tiny_transformer import D_MODEL, LAYERS, VOCABULARY, Cache, Step, forward, forward_batch

PROMPT = "你好"
ROUNDING = 1e-12


def main() -> None:
    for section in (
        prefill_and_decode,
        a_token_by_token_is_the_same,
        b_the_cache_holds_k_and_v,
        c_one_row_of_logits_every_row_of_k_and_v,
        d_decode_is_the_last_row,
        e_new_tokens_are_masked_among_themselves,
        f_a_mixed_step_is_one_batch,
        g_the_cache_can_move,
    ):
        section()
        print()


def prefill_and_decode() -> None:
    heading("你好 → 世 → 界")
    cache = Cache()
    step = forward(PROMPT, cache)
    print(f"prefill: {len(PROMPT)} new tokens, nothing cached")
    show_layers(step, PROMPT, PROMPT)
    show_prediction(step)
    first = step.next_token
    print(f"decode: 1 new token, {cache.num_tokens} cached")
    step = forward(first, cache)
    show_layers(step, first, PROMPT + first)
    show_prediction(step)


def a_token_by_token_is_the_same() -> None:
    heading("(a) token by token gives the same cache and the same logits")
    at_once, one_by_one = Cache(), Cache()
    parallel = forward(PROMPT, at_once)
    for token in PROMPT:
        serial = forward(token, one_by_one)
    print(f"steps: parallel 1, token by token {len(PROMPT)}")
    print(f"largest difference in the cache:  {difference(stacked(at_once), stacked(one_by_one))}")
    print(f"largest difference in the logits: {difference(parallel.logits, serial.logits)}")


def b_the_cache_holds_k_and_v() -> None:
    heading("(b) the cache is per layer, and holds K and V, never attention weights")
    cache = Cache()
    for tokens in (PROMPT, "世", "界"):
        step = forward(tokens, cache)
        weights = " and ".join(shape(trace.weights) for trace in step.layers)
        numbers = stacked(cache).numel()
        print(f"after {tokens}: {len(LAYERS)} layers × (K {shape(cache.keys[0])} + V {shape(cache.values[0])})", end="")
        print(f" = {numbers} numbers; attention weights of this step, {weights}, are gone")
    print(f"each token adds {len(LAYERS)} × 2 × {D_MODEL} = {len(LAYERS) * 2 * D_MODEL} numbers")
    print(f"layer 1's K and layer 2's K differ by up to {largest_difference(*cache.keys):.2f}")


def c_one_row_of_logits_every_row_of_k_and_v() -> None:
    heading("(c) only the last position's logits are needed, but every position's K and V is")
    cache = Cache()
    step = forward(PROMPT, cache)
    print(f"hidden states after prefill {shape(step.hidden)}; logits needed: {shape(step.logits[None])}, {PROMPT[-1]}")
    whole = forward("世", cache)
    print(f"世 with the K and V of 你 and 好: {numbers_of(whole.logits)} → {whole.next_token}")
    forward(PROMPT, without_last := Cache())
    without_last.keys = [keys[:1] for keys in without_last.keys]
    without_last.values = [values[:1] for values in without_last.values]
    partial = forward("世", without_last)
    print(f"世 with the K and V of 你 only:   {numbers_of(partial.logits)} → {partial.next_token}")


def d_decode_is_the_last_row() -> None:
    heading("(d) a decode step's 1×3 attention is the last row of the 3×3 one")
    whole = forward("你好世", Cache())
    forward(PROMPT, cache := Cache())
    decode = forward("世", cache)
    for number, (full, row) in enumerate(zip(whole.layers, decode.layers, strict=True), start=1):
        show(f"layer {number}, prefill of 你好世: weights", full.weights, "你好世", "你好世")
        show(f"layer {number}, decode of 世 after 你好: weights", row.weights, "世", "你好世")
        print(f"largest difference from the last row: {difference(full.weights[-1:], row.weights)}")


def e_new_tokens_are_masked_among_themselves() -> None:
    heading("(e) several new tokens at once still need the causal mask among themselves")
    forward(PROMPT, cache := Cache())
    masked = forward("世界", cache)
    show("世界 after 你好, layer 1, masked: weights", masked.layers[0].weights, "世界", "你好世界")
    forward(PROMPT, cache := Cache())
    unmasked = forward("世界", cache, is_masked=False)
    show("世界 after 你好, layer 1, no mask: weights", unmasked.layers[0].weights, "世界", "你好世界")
    whole = forward("你好世界", Cache())
    print(f"masked,  largest difference from one step over 你好世界: {difference(masked.hidden, whole.hidden[2:])}")
    print(f"no mask, largest difference from one step over 你好世界: {difference(unmasked.hidden, whole.hidden[2:])}")


def f_a_mixed_step_is_one_batch() -> None:
    heading("(f) a mixed step is one batch: A decodes, B decodes, C prefills")
    num_cached = {"A": 500, "B": 200, "C": 0}
    num_new = {"A": 1, "B": 1, "C": 100}
    together, apart = ({name: prefilled(count) for name, count in num_cached.items()} for _ in range(2))
    new = {name: phrase(num_cached[name], num_new[name]) for name in num_new}
    steps = forward_batch([(new[name], together[name]) for name in num_new])
    rows = sum(num_new.values())
    print(f"{' + '.join(map(str, num_new.values()))} = {rows} rows through every matrix: [{rows}×4] @ [4×4]")
    for name, step in zip(num_new, steps, strict=True):
        alone = forward(new[name], apart[name])
        print(f"{name}: attention {shape(step.layers[0].weights)}, rows {shape(step.hidden)}", end="")
        print(f", largest difference from running alone: {difference(step.hidden, alone.hidden)}")


def g_the_cache_can_move() -> None:
    heading("(g) handing the cache to another worker changes nothing")
    prefill_slots = [3 * 2 + 0, 3 * 2 + 1]  # blocks of 2 tokens; this sequence owns block 3
    decode_slots = [5 * 1 + 0, 2 * 1 + 0]  # blocks of 1 token; it owns blocks 5, then 2
    forward(PROMPT, cache := Cache())
    prefill_pool = torch.full((len(LAYERS), 2, 8, D_MODEL), torch.nan, dtype=torch.float64)
    prefill_pool[:, :, prefill_slots] = stacked(cache)

    pieces = prefill_pool[:, :, prefill_slots]  # what travels: no block ids, no block size
    decode_pool = torch.full((len(LAYERS), 2, 6, D_MODEL), torch.nan, dtype=torch.float64)
    decode_pool[:, :, decode_slots] = pieces

    moved = unstacked(decode_pool[:, :, decode_slots])
    here, there = forward("世", cache), forward("世", moved)
    print(f"slots of 你 and 好 on the prefill worker {prefill_slots}, on the decode worker {decode_slots}")
    print(f"moved: {shape(pieces)} = {pieces.numel()} numbers (layers × K,V × tokens × d_model)")
    print(f"next token: stayed {here.next_token}, moved {there.next_token}", end="")
    print(f", largest difference in the logits: {difference(here.logits, there.logits)}")


# ---------------------------------------------------------------- the cache as one tensor


def stacked(cache: Cache) -> Tensor:
    """[layers, 2 (K, V), tokens, d_model], the order in which KV travels."""
    return torch.stack([torch.stack(pair) for pair in zip(cache.keys, cache.values, strict=True)])


def unstacked(data: Tensor) -> Cache:
    return Cache(keys=[layer[0] for layer in data], values=[layer[1] for layer in data])


def phrase(start: int, num_tokens: int) -> str:
    """你好世界你好世界… from position `start`."""
    return "".join(VOCABULARY[i % len(VOCABULARY)] for i in range(start, start + num_tokens))


def prefilled(num_tokens: int) -> Cache:
    cache = Cache()
    if num_tokens:
        forward(phrase(0, num_tokens), cache)
    return cache


def largest_difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def difference(one: Tensor, other: Tensor) -> str:
    """For people: whatever a sum taken in another order may differ by is nothing."""
    largest = largest_difference(one, other)
    return "none" if largest < ROUNDING else f"{largest:.2f}"


# ---------------------------------------------------------------- printing


def heading(text: str) -> None:
    print(f"── {text}")


def show_layers(step: Step, new: str, seen: str) -> None:
    for number, trace in enumerate(step.layers, start=1):
        for name, matrix in (("Q", trace.q), ("K", trace.k), ("V", trace.v)):
            show(f"layer {number} {name}", matrix, new)
        show(f"layer {number} weights", trace.weights, new, seen)


def show(name: str, matrix: Tensor, rows: str, columns: str = "") -> None:
    print(f"{name} {shape(matrix)}" + (f", columns {' '.join(columns)}" if columns else ""))
    for label, row in zip(rows, matrix, strict=True):
        print(f"   {label} {numbers_of(row)}")


def show_prediction(step: Step) -> None:
    share = step.logits.softmax(dim=-1).max()
    print(f"logits of {' '.join(VOCABULARY)}: {numbers_of(step.logits)} → {step.next_token} ({share:.0%})")


def shape(matrix: Tensor) -> str:
    return "[" + "×".join(map(str, matrix.shape)) + "]"


def numbers_of(row: Tensor) -> str:
    return " ".join(f"{float(value) + 0.0:5.2f}" for value in row)


if __name__ == "__main__":
    main()
