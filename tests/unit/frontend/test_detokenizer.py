from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.frontend.detokenizer import IncrementalDetokenizer
from aioengine.frontend.tokenizer import Tokenizer, load_tokenizer
from tests.unit.frontend.tiny_vocabularies import (
    BOS_ID,
    END_ID,
    byte_level_directory,
    sentencepiece_gguf,
)

TEXTS = st.text(alphabet="ab was日😀é\n", max_size=30)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(byte_level_directory(tmp_path_factory.mktemp("tokenizer"), {}))


def one_by_one(detokenizer: IncrementalDetokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push((token_id,)) for token_id in token_ids), detokenizer.finish()]


@given(token_ids=st.lists(st.integers(0, 300), max_size=40), skip=st.booleans())
def test_pieces_are_the_full_decode(tokenizer: Tokenizer, token_ids: list[int], skip: bool) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    assert "".join(one_by_one(detokenizer, token_ids)) == tokenizer.decode(token_ids, skip)


@given(text=TEXTS)
def test_characters_come_whole(tokenizer: Tokenizer, text: str) -> None:
    token_ids = [*text.encode()]  # one token per byte
    pieces = one_by_one(IncrementalDetokenizer(tokenizer), token_ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_unfinished_character_shows_at_the_end_only(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(tuple("a😀".encode()[:3])) == "a"
    assert detokenizer.finish() == "\ufffd"


@given(
    text=TEXTS,
    stop=st.lists(st.text(alphabet="ab was日😀", min_size=1, max_size=4), max_size=3),
    include_stop=st.booleans(),
    size=st.integers(1, 5),
    min_tokens=st.sampled_from([0, 0, 1, 3, 10]),
)
def test_stop_strings(
    tokenizer: Tokenizer,
    text: str,
    stop: list[str],
    include_stop: bool,
    size: int,
    min_tokens: int,
) -> None:
    """Against a search for the stop string that is complete first, whatever the pushes."""
    token_ids = tokenizer.encode(text, False)
    detokenizer = IncrementalDetokenizer(
        tokenizer, tuple(stop), include_stop, min_tokens=min_tokens
    )
    sent, num_tokens = "", 0
    for start in range(0, len(token_ids), size):
        sent += detokenizer.push(tuple(token_ids[start : start + size]))
        num_tokens += detokenizer.num_counted
        if detokenizer.stopped is None:
            assert text.startswith(sent)
    sent += detokenizer.finish()

    # Characters that the first min_tokens tokens complete: no stop string may end among them.
    early = b"".join(map(tokenizer.token_bytes, token_ids[:min_tokens])).decode(errors="ignore")
    ends = {
        pattern: min(found)
        for pattern in stop
        if (found := [end for end in range(len(early) + 1, len(text) + 1)
                      if text[:end].endswith(pattern)])
    }  # fmt: skip
    if not ends:
        assert (sent, detokenizer.stopped, num_tokens) == (text, None, len(token_ids))
        return
    end = min(ends.values())
    expected = max((pattern for pattern in ends if ends[pattern] == end), key=len)
    assert detokenizer.stopped == expected
    assert sent == text[: end if include_stop else end - len(expected)]
    assert num_tokens > min_tokens
    counted = b"".join(map(tokenizer.token_bytes, token_ids[:num_tokens]))
    before_last = b"".join(map(tokenizer.token_bytes, token_ids[: num_tokens - 1]))
    assert len(before_last) < len(text[:end].encode()) <= len(counted)


def test_a_stop_string_counts_once_min_tokens_are_there(tokenizer: Tokenizer) -> None:
    """The first "abab" comes too early, the second shares its end, the third token ends it."""
    detokenizer = IncrementalDetokenizer(tokenizer, ("abab",), min_tokens=5)
    assert one_by_one(detokenizer, [*b"abababx"]) == ["", "", "", "ab", "", "", "", ""]
    assert detokenizer.stopped == "abab"


def test_holds_back_no_more_than_the_beginning_of_a_stop_string(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, ("aab!", "xyz"))
    assert one_by_one(detokenizer, [*b"caaabax"]) == ["c", "", "", "a", "", "aab", "a", "x"]


def test_counts_tokens_up_to_the_stop_string(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, ("END",))
    assert detokenizer.push(tuple(b"one E")) == "one "
    assert detokenizer.num_counted == 5
    assert detokenizer.push(tuple(b"ND more")) == ""
    assert (detokenizer.stopped, detokenizer.num_counted) == ("END", 2)
    assert detokenizer.push(tuple(b"more")) == ""
    assert (detokenizer.num_counted, detokenizer.finish()) == (0, "")


def test_special_tokens(tokenizer: Tokenizer) -> None:
    token_ids = [BOS_ID, ord("a"), END_ID]
    assert "".join(one_by_one(IncrementalDetokenizer(tokenizer), token_ids)) == "a"
    shown = IncrementalDetokenizer(tokenizer, ("<|end",), skip_special_tokens=False)
    assert "".join(one_by_one(shown, token_ids)) == "<s>a"
    assert shown.stopped == "<|end"


def test_sentencepiece_keeps_the_space_before_its_first_word(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_gguf(tmp_path / "t.gguf"))
    token_ids = tokenizer.encode("was 日é", False)
    pieces = one_by_one(IncrementalDetokenizer(tokenizer), token_ids)
    assert pieces == [" was", " ", "日", "", "é", ""]
