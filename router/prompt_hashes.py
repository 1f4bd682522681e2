"""A prompt as the workers' prefix caches name it."""

from __future__ import annotations

from common.block_hash import BlockHash, extend_chain


class PromptHashes:
    """The hashes of a prompt's full blocks, computed once for each block size that somebody asks for."""

    def __init__(self, token_ids: list[int], salt: bytes = b"") -> None:
        self._token_ids = token_ids
        self._salt = salt
        self._by_size: dict[int, list[BlockHash]] = {}

    def of(self, block_size: int) -> list[BlockHash]:
        """Without the block that ends with the last token, which no worker takes from its cache."""
        chain = self._by_size.get(block_size)
        if chain is None:
            chain = self._by_size[block_size] = []
            extend_chain(chain, self._token_ids[:-1], block_size, self._salt)
        return chain
