from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from common.config import DEFAULT_MODEL
from common.errors import InvalidRequest, ModelError
from common.model_source import resolve_model
from router.chat_template import ChatMessage
from router.gguf_tokenizer import read_gguf_tokenizer
from router.tokenizer import Tokenizer, load_tokenizer

GGUF = resolve_model(DEFAULT_MODEL)
TOKENIZER = load_tokenizer(GGUF)
CHAT = [ChatMessage("system", "Be brief."), ChatMessage("user", "你好 🙂"), ChatMessage("assistant", "Hi")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model's tokenizer as transformers saves one."""
    source = read_gguf_tokenizer(GGUF)
    saved = PreTrainedTokenizerFast(
        tokenizer_object=source.tokenizer, chat_template=source.chat_template, **source.special_tokens
    )
    path = tmp_path_factory.mktemp("saved")
    saved.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def pieces(text: str) -> list[bytes]:
    return [TOKENIZER.token_bytes(token_id) for token_id in TOKENIZER.encode(text)]


@pytest.mark.parametrize(
    "text",
    [
        "你好，世界",
        "🙂 👨‍👩‍👧 👋🏽",
        "def f(x):\n\treturn x ** 2  # ünïcode\r\n",
        "\x00\x01\x1b[0m",
        "  leading, trailing  \n\n",
        "2024-12-31 3.14159",
    ],
)
def test_text_survives_the_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_the_default_model_reads_every_digit_alone() -> None:
    assert pieces("in 1234 days") == [b"in", b" ", b"1", b"2", b"3", b"4", b" days"]


def test_words_take_their_leading_space_with_them() -> None:
    assert pieces("Hello world") == [b"Hello", b" world"]


def test_control_tokens_are_one_id_and_show_no_text() -> None:
    ids = TOKENIZER.encode("<|im_start|>user")
    assert ids[0] == 1
    assert ids[0] in TOKENIZER.special_token_ids
    assert TOKENIZER.decode(ids) == "user"


def test_the_vocabulary_size_is_the_models() -> None:
    assert TOKENIZER.vocab_size == 49152


def test_an_id_beyond_the_vocabulary_shows_no_text() -> None:
    assert TOKENIZER.token_bytes(TOKENIZER.vocab_size) == b""


def test_the_chat_template_writes_what_transformers_writes(folder: Path) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": message.role, "content": message.content} for message in CHAT]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert TOKENIZER.encode_chat(CHAT) == theirs.encode(expected, add_special_tokens=False)


@given(st.text(max_size=60))
def test_a_saved_folder_gives_the_same_ids_as_the_gguf_file(loaded: Tokenizer, text: str) -> None:
    assert loaded.encode(text) == TOKENIZER.encode(text)


def test_a_saved_folder_has_the_same_chat_and_special_tokens(loaded: Tokenizer) -> None:
    assert loaded.encode_chat(CHAT) == TOKENIZER.encode_chat(CHAT)
    assert loaded.special_token_ids == TOKENIZER.special_token_ids
    assert loaded.vocab_size == TOKENIZER.vocab_size


def test_loading_a_tokenizer_imports_neither_torch_nor_transformers() -> None:
    script = (
        "import sys; from pathlib import Path; from router.tokenizer import load_tokenizer; "
        f"load_tokenizer(Path({str(GGUF)!r})); print({{'torch', 'transformers'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_a_folder_without_a_tokenizer_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_in_the_folder_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text("{broken")
    with pytest.raises(ModelError, match=name):
        load_tokenizer(tmp_path)


def test_without_a_chat_template_a_chat_is_refused_and_says_what_to_use(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(InvalidRequest, match="no chat template"):
        load_tokenizer(tmp_path).encode_chat(CHAT)


def test_a_template_that_refuses_the_messages_is_the_clients_mistake(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    template = "{{ raise_exception('roles must alternate') }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        load_tokenizer(tmp_path).encode_chat(CHAT)


def test_a_template_cannot_reach_out_of_its_sandbox(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequest, match="unsafe"):
        load_tokenizer(tmp_path).encode_chat(CHAT)


def test_a_template_that_does_not_compile_is_the_models_fault(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ModelError, match="does not compile"):
        load_tokenizer(tmp_path)
