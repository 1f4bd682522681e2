from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import DEFAULT_MODEL
from common.errors import ModelError
from common.model_source import resolve_model
from router.gguf_metadata import read_gguf_metadata
from router.gguf_tokenizer import PRE_TOKENIZERS, TokenType
from router.tokenizer import Tokenizer, load_tokenizer

PIECES = {"▁": -5.0, "a": -6.0, "b": -6.5, "c": -7.0, "ab": -2.0, "▁a": -1.5, "bc": -1.0, "abc": -3.0, "▁ab": -2.5}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CONTROL = ["<unk>", "<s>", "</s>"]


def sentencepiece_file(path: Path) -> Path:
    """A vocabulary as llama.cpp's converter writes one for Llama 2."""
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*CONTROL, *BYTES, *PIECES])
    writer.add_token_scores([*[0.0] * (len(CONTROL) + len(BYTES)), *PIECES.values()])
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    writer.add_token_types([*kinds, *[TokenType.BYTE] * len(BYTES), *[TokenType.NORMAL] * len(PIECES)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    return written(writer, path)


def byte_level_file(path: Path, change: Callable[[GGUFWriter], None]) -> Path:
    writer = GGUFWriter(path, "llama")
    change(writer)
    return written(writer, path)


def written(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(sentencepiece_file(tmp_path_factory.mktemp("gguf") / "spm.gguf"))


def merged_by_score(text: str) -> list[bytes]:
    """The oracle: join the neighbours whose union scores highest, leftmost first, until none is in the vocabulary."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [(PIECES[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in PIECES]
        if not joins:
            return [part.replace("▁", " ").encode() for part in parts]
        index = -max(joins)[1]
        parts[index : index + 2] = [parts[index] + parts[index + 1]]


@given(st.text(st.sampled_from("abc "), min_size=1, max_size=24))
def test_sentencepiece_merges_by_score(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text)
    assert [sentencepiece.token_bytes(token_id) for token_id in ids[1:]] == merged_by_score(text)


def test_sentencepiece_begins_with_bos_and_falls_back_to_bytes(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("a好")
    assert ids[0] == 1
    assert [sentencepiece.token_bytes(token_id) for token_id in ids] == [b"", b" a", b"\xe5", b"\xa5", b"\xbd"]
    assert sentencepiece.decode(ids) == " a好"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", ["I", "'ll", "Ġpay", "Ġ12345", "!!!", "Ċ"]),
        ("smollm", ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "5", "!!!", "Ċ"]),
        ("llama-bpe", ["I", "'ll", "Ġpay", "Ġ", "123", "45", "!!!Ċ"]),
        ("qwen2", ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "5", "!!!Ċ"]),
    ],
)
def test_each_pre_tokenizer_splits_as_its_model_was_trained(name: str, expected: list[str]) -> None:
    words = ["I'll pay 12345!!!\n"]
    for step in PRE_TOKENIZERS[name]:
        words = [word for text in words for word, _ in step.pre_tokenize_str(text)]
    assert words == expected


def test_an_unknown_pre_tokenizer_says_to_use_the_folder(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("from-the-future")
        writer.add_token_list(["a"])

    with pytest.raises(ModelError, match=r"'from-the-future' is not known.*Hugging Face folder"):
        load_tokenizer(byte_level_file(tmp_path / "m.gguf", change))


def test_an_unknown_kind_of_tokenizer_says_to_use_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'rwkv' are not supported.*Hugging Face folder"):
        load_tokenizer(byte_level_file(tmp_path / "m.gguf", lambda writer: writer.add_tokenizer_model("rwkv")))


def test_a_file_without_a_vocabulary_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.model is missing"):
        load_tokenizer(byte_level_file(tmp_path / "m.gguf", lambda writer: writer.add_name("nothing")))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model file at all"])
def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.gguf"):
        load_tokenizer(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gone\.gguf"):
        load_tokenizer(tmp_path / "gone.gguf")


@settings(deadline=None)
@given(st.data())
def test_a_cut_or_damaged_header_never_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    content = bytearray(sentencepiece_file(path).read_bytes())
    position = data.draw(st.integers(0, 200))
    content[position] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    complaint = complaint_about(path)
    assert complaint is None or "m.gguf" in complaint


def complaint_about(path: Path) -> str | None:
    try:
        load_tokenizer(path)
    except ModelError as error:
        return str(error)
    return None


def test_the_header_agrees_with_the_gguf_library() -> None:
    path = resolve_model(DEFAULT_MODEL)
    theirs = {name: field.contents() for name, field in GGUFReader(path).fields.items() if not name.startswith("GGUF.")}
    assert read_gguf_metadata(path) == theirs
