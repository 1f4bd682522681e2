"""Text to token ids and back, for the model that is served.

Built on the tokenizers library alone: transformers takes seconds to import, and the router must never load torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from common.errors import InvalidRequest, ModelError
from router.chat_template import ChatMessage, ChatTemplate
from router.gguf_tokenizer import TokenizerSource, read_gguf_tokenizer
from router.token_bytes import token_bytes_of


def load_tokenizer(model_path: Path) -> Tokenizer:
    """From a .gguf file, or from a Hugging Face folder with tokenizer.json.

    Raises: ModelError when the tokenizer is missing, unreadable or of an unsupported kind.
    """
    if model_path.is_dir():
        return Tokenizer(_read_folder(model_path))
    return Tokenizer(read_gguf_tokenizer(model_path))


class Tokenizer:
    """Immutable once built, and safe to use from several threads."""

    def __init__(self, source: TokenizerSource) -> None:
        self._tokenizer = source.tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._token_bytes = token_bytes_of(source.tokenizer)
        template = source.chat_template
        self._chat_template = None if template is None else ChatTemplate(template, source.special_tokens)
        added = source.tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = 1 + max(source.tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        """Includes the tokens that the model wants at the start of a text, if any."""
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The conversation as the model's chat template writes it, up to where the assistant's answer begins.

        Raises: InvalidRequest when the model has no template, or the template refuses the messages.
        """
        if self._chat_template is None:
            raise InvalidRequest("this model has no chat template; send a prompt to /v1/completions", param="messages")
        # the template writes the tokens at the start itself
        return list(self._tokenizer.encode(self._chat_template.render(messages), add_special_tokens=False).ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text; nothing for special tokens and for ids that stand for no token."""
        if token_id in self.special_token_ids:
            return b""
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._token_bytes(token)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")


def _read_folder(folder: Path) -> TokenizerSource:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json; save the model's fast tokenizer there (save_pretrained)")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"cannot read {path}: {error}") from error
    config = _read_json(folder / "tokenizer_config.json")
    return TokenizerSource(tokenizer, _chat_template(folder, config), _special_tokens(config))


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(tree, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return tree


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found if isinstance(found, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    values = {name: config.get(name) for name in names}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
