from __future__ import annotations

import pytest

from common.block_hash import BlockHash, extend_chain
from router.prompt_hashes import PromptHashes

PROMPT = list(range(100, 133))


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_the_block_of_the_last_token_is_left_out(num_tokens: int, num_blocks: int) -> None:
    assert len(PromptHashes(PROMPT[:num_tokens]).of(16)) == num_blocks


def test_hashes_are_the_engines_by_block_size_and_salt() -> None:
    prompt = PromptHashes(PROMPT, b"salt")
    for block_size in (4, 16):
        expected: list[BlockHash] = []
        extend_chain(expected, PROMPT[:32], block_size, b"salt")
        assert prompt.of(block_size) == expected
    assert not set(prompt.of(16)) & set(PromptHashes(PROMPT).of(16))


def test_each_size_is_computed_once() -> None:
    prompt = PromptHashes(PROMPT)
    assert prompt.of(8) is prompt.of(8)
