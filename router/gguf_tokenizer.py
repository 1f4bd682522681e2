"""A tokenizer from the vocabulary inside a GGUF file.

GGUF names the pre-tokenizer ("tokenizer.ggml.pre") but does not describe it, so PRE_TOKENIZERS does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from common.errors import ModelError
from router.gguf_metadata import GGUFValue, read_gguf_metadata


@dataclass(frozen=True)
class TokenizerSource:
    """What a model's files say about its tokenizer."""

    tokenizer: tokenizers.Tokenizer
    chat_template: str | None
    special_tokens: dict[str, str]  # by the name that chat templates use: bos_token, eos_token, ...


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read_gguf_tokenizer(path: Path) -> TokenizerSource:
    """Raises: ModelError when the file is corrupt, has no vocabulary, or has one of a kind not known here."""
    metadata = read_gguf_metadata(path)
    try:
        return _from_metadata(metadata)
    except KeyError as error:
        raise ModelError(f"{path} holds no usable tokenizer: {error.args[0]} is missing") from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{path} holds no usable tokenizer: {error}") from error


def _from_metadata(metadata: Mapping[str, GGUFValue]) -> TokenizerSource:
    kind = _get(metadata, "tokenizer.ggml.model", str)
    if kind not in _BUILDERS:
        raise ValueError(f"tokenizers of the kind {kind!r} are not supported, only {sorted(_BUILDERS)}; {_ADVICE}")
    tokens = [str(token) for token in _get(metadata, "tokenizer.ggml.tokens", list)]
    tokenizer = _BUILDERS[kind](tokens, metadata)
    _add_special_tokens(tokenizer, tokens, metadata)
    special_tokens = _special_tokens(tokens, metadata)
    # GGUF leaves the flag out where the kind's own habit applies
    if _get(metadata, "tokenizer.ggml.add_bos_token", bool, default=kind == "llama"):
        _begin_with(tokenizer, special_tokens["bos_token"])
    template = metadata.get("tokenizer.chat_template")
    return TokenizerSource(tokenizer, template if isinstance(template, str) else None, special_tokens)


def _byte_level_bpe(tokens: list[str], metadata: Mapping[str, GGUFValue]) -> tokenizers.Tokenizer:
    name = _get(metadata, "tokenizer.ggml.pre", str, default="default")
    if name not in PRE_TOKENIZERS:
        raise ValueError(f"the pre-tokenizer {name!r} is not known here, only {sorted(PRE_TOKENIZERS)}; {_ADVICE}")
    merges = [_merge(str(merge)) for merge in _get(metadata, "tokenizer.ggml.merges", list)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name == "llama-bpe"))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[name])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(tokens: list[str], metadata: Mapping[str, GGUFValue]) -> tokenizers.Tokenizer:
    scores = [float(score) for score in _get(metadata, "tokenizer.ggml.scores", list) if isinstance(score, int | float)]
    unknown = tokens[_get(metadata, "tokenizer.ggml.unknown_token_id", int, default=0)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocabulary, _merges_by_score(vocabulary, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    begins_with_space = _get(metadata, "tokenizer.ggml.add_space_prefix", bool, default=True)
    spaces = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if begins_with_space else spaces)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


_BUILDERS: dict[str, Callable[[list[str], Mapping[str, GGUFValue]], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece_bpe,
}
_ADVICE = "use the model's Hugging Face folder (with tokenizer.json) instead of this file"


def _split_then_byte_level(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


# ByteLevel's own pattern is GPT-2's.
_GPT2: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
_DIGITS_THEN_GPT2: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True), *_GPT2]
# The patterns that Llama 3 and Qwen 2 were trained with; they differ in how many digits stay together.
_TIKTOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PRE_TOKENIZERS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "llama-bpe": _split_then_byte_level(_TIKTOKEN.format(digits="{1,3}")),
    "qwen2": _split_then_byte_level(_TIKTOKEN.format(digits="")),
}


def _merge(pair: str) -> tuple[str, str]:
    left, _, right = pair.partition(" ")
    if not left or not right:
        raise ValueError(f"{pair!r} is not a pair of tokens to merge")
    return left, right


def _merges_by_score(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece keeps no merges: it joins whichever neighbours make the token with the highest score."""
    if len(scores) != len(vocabulary):
        raise ValueError(f"{len(vocabulary)} tokens but {len(scores)} scores")
    merges = [
        (-scores[index], token[:cut], token[cut:])
        for token, index in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    merges.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in merges]


def _add_special_tokens(tokenizer: tokenizers.Tokenizer, tokens: list[str], metadata: Mapping[str, GGUFValue]) -> None:
    """Tokens that are matched before any splitting: control tokens, and those the model's authors added."""
    types = _get(metadata, "tokenizer.ggml.token_type", list, default=[])
    by_type = {
        kind: [token for token, found in zip(tokens, types, strict=False) if found == kind] for kind in TokenType
    }
    hidden = by_type[TokenType.CONTROL] + by_type[TokenType.UNKNOWN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in hidden])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in by_type[TokenType.USER_DEFINED]])


def _special_tokens(tokens: list[str], metadata: Mapping[str, GGUFValue]) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {name: tokens[index] for name, index in ids.items() if isinstance(index, int) and index < len(tokens)}


def _begin_with(tokenizer: tokenizers.Tokenizer, token: str) -> None:
    index = tokenizer.token_to_id(token)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=None, special_tokens=[(token, index)]
    )


T = TypeVar("T")


def _get(metadata: Mapping[str, GGUFValue], key: str, kind: type[T], default: T | None = None) -> T:
    """Raises: KeyError when the key is missing and has no default, TypeError when its value is of another kind."""
    value = metadata[key] if default is None else metadata.get(key, default)
    if not isinstance(value, kind):
        raise TypeError(f"{key} is a {type(value).__name__}, not a {kind.__name__}")
    return value
