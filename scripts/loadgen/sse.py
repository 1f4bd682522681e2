"""Server-sent events, as far as OpenAI-compatible servers use them."""

from __future__ import annotations

from collections.abc import AsyncIterator


async def sse_data(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each event. Splits at line feeds only: a JSON string may hold U+2028 or U+0085 unescaped."""
    pending = b""
    data: list[str] = []
    async for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" ").decode("utf-8", errors="replace"))
            elif not line and data:
                yield "\n".join(data)
                data = []
