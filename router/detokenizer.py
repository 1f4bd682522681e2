"""Token ids to text while they arrive, never half a character."""

from __future__ import annotations

import codecs

from router.tokenizer import Tokenizer


class Detokenizer:
    """One answer's text. What `push` and `flush` return, joined, is Tokenizer.decode of all the ids.

    Bytes go through an incremental UTF-8 decoder, so a token costs the same however long the answer is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that became complete with this token; often empty inside a character of several tokens."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is left of a character that never became complete: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)
