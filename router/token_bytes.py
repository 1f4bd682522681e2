"""The bytes that each token stands for: the one place that knows how vocabularies spell bytes.

A token is bytes, not text: one character may be spread over several tokens. Joining bytes first and reading characters
afterwards is what makes incremental and whole decoding agree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import tokenizers

from common.errors import ModelError

TokenBytes = Callable[[str], bytes]  # a token as the vocabulary spells it → what it stands for


def token_bytes_of(tokenizer: tokenizers.Tokenizer) -> TokenBytes:
    """How this tokenizer's vocabulary spells bytes, read from its decoder.

    Raises: ModelError when it is neither byte-level (GPT-2, Llama 3, Qwen) nor SentencePiece with ▁ (Llama 2, Mistral).
    """
    description = json.loads(tokenizer.to_str())["decoder"] or {}
    steps = description.get("decoders", [description])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return byte_level_bytes
    if kinds & {"Metaspace", "ByteFallback"}:
        return sentencepiece_bytes
    raise ModelError(f"the tokenizer's decoder ({sorted(map(str, kinds))}) is neither ByteLevel nor SentencePiece")


def byte_level_bytes(token: str) -> bytes:
    """GPT-2 spells each byte as one printable character; an added token is spelled as plain text."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def sentencepiece_bytes(token: str) -> bytes:
    """▁ stands for a space, <0xE4> for one byte that is not in the vocabulary as part of a character."""
    fallback = _BYTE_FALLBACK.fullmatch(token)
    if fallback is not None:
        return bytes([int(fallback[1], 16)])
    return token.replace("▁", " ").encode("utf-8")


_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet (Radford et al. 2019): visible Latin-1 stands for itself, the rest from U+0100 up."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_alphabet()
