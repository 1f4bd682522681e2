"""What a full KV block holds, as one number: a chain over every token up to its end.

Workers report by it what their prefix caches hold, and the router looks prompts up by it. Equal hashes mean equal
prefixes, so the hash must be one that nobody can make collide: 128 bits of BLAKE2b. The salt starts the chain: prompts
of different salts never share a block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from hashlib import blake2b

BlockHash = bytes
HASH_BYTES = 16


def extend_chain(chain: list[BlockHash], token_ids: Seq[int], block_size: int, salt: bytes) -> None:
    """Append the hashes of the full blocks of `token_ids` that `chain` lacks."""
    parent = chain[-1] if chain else blake2b(salt, digest_size=HASH_BYTES).digest()
    for start in range(len(chain) * block_size, len(token_ids) - block_size + 1, block_size):
        tokens = array("q", token_ids[start : start + block_size]).tobytes()
        parent = blake2b(parent + tokens, digest_size=HASH_BYTES).digest()
        chain.append(parent)
