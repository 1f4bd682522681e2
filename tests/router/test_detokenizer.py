from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from common.config import DEFAULT_MODEL
from common.model_source import resolve_model
from router.detokenizer import Detokenizer
from router.tokenizer import Tokenizer, load_tokenizer

TOKENIZER = load_tokenizer(resolve_model(DEFAULT_MODEL))


def pushed(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40))
def test_pieces_joined_equal_decoding_any_ids_at_once(token_ids: list[int]) -> None:
    assert "".join(pushed(TOKENIZER, token_ids)) == TOKENIZER.decode(token_ids)


@given(st.text(st.sampled_from("a é你好世界🙂👨\u200d👩\u200d👧🏽\ufeff\n\t'0"), max_size=40))
def test_real_text_streams_without_a_replacement_character(text: str) -> None:
    pieces = pushed(TOKENIZER, TOKENIZER.encode(text))
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text


def test_half_a_character_waits_for_its_other_half() -> None:
    ids = TOKENIZER.encode("你")
    assert len(ids) == 2
    assert pushed(TOKENIZER, ids) == ["", "你", ""]


def test_a_character_that_never_completes_is_replaced_at_the_end() -> None:
    first_half = TOKENIZER.encode("你")[:1]
    assert pushed(TOKENIZER, first_half) == ["", "\ufffd"]


def test_special_tokens_add_no_text_and_do_not_break_a_character_in_two() -> None:
    first, second = TOKENIZER.encode("你")
    end_of_turn = TOKENIZER.encode("<|im_end|>")
    assert len(end_of_turn) == 1
    assert "".join(pushed(TOKENIZER, [first, *end_of_turn, second])) == "你"
