from __future__ import annotations

from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from loadgen.sse import sse_data


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def read(*parts: bytes) -> list[str]:
    return [data async for data in sse_data(chunks(*parts))]


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1), max_size=8),
    st.data(),
)
async def test_data_survives_any_cut_of_the_stream(events: list[str], draw: st.DataObject) -> None:
    stream = "".join(f"data: {event}\n\n" for event in events).encode()
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    parts = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert await read(*parts) == events


async def test_line_separators_inside_json_do_not_end_an_event() -> None:
    assert await read("data: a\u2028b\x85c\x0bd\n\n".encode()) == ["a\u2028b\x85c\x0bd"]


async def test_comments_other_fields_and_carriage_returns_are_tolerated() -> None:
    assert await read(b": ping\r\n\r\nevent: error\r\nid: 3\r\ndata:{}\r\n\r\n") == ["{}"]


async def test_several_data_lines_are_one_event() -> None:
    assert await read(b"data: a\ndata: b\n\ndata: c\n\n") == ["a\nb", "c"]


async def test_an_event_without_its_blank_line_is_not_an_event() -> None:
    assert await read(b"data: a\n\ndata: b\n") == ["a"]
