"""The server's parts by hand: text with stop strings, messages in pieces."""

import pytest
from command import DEMO
from hypothesis import given
from hypothesis import strategies as st

from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.params import SamplingParams
from tilerank.runtime.server.messages import Cancel, Submit, encode, engine_inbox
from tilerank.runtime.server.text import TextStream

TOKENIZER = Tokenizer(DEMO)


def texts(ids: list[int], stop: list[str]) -> tuple[list[str], bool]:
    stream = TextStream(TOKENIZER.stream(), stop)
    pieces = []
    for id in ids:
        pieces.append(stream.push(id))
        if stream.stopped:
            return pieces, True
    return [*pieces, stream.flush()], stream.stopped


@given(st.text("abé🙂 \n", max_size=30), st.lists(st.text("abé🙂 ", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_at_its_first_stop_string(text: str, stop: list[str]) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    whole = TOKENIZER.decode(ids)
    # The one that is complete first, however the text is cut into tokens.
    found = [(whole.index(one) + len(one), whole.index(one)) for one in stop if one in whole]
    pieces, stopped = texts(ids, stop)
    assert "".join(pieces) == (whole[: min(found)[1]] if found else whole)
    assert stopped == bool(found)
    assert all("\ufffd" not in piece for piece in pieces)


def test_text_is_held_only_as_long_as_it_may_become_a_stop_string() -> None:
    ids = TOKENIZER.encode("abcabd", add_special_tokens=False)
    assert "".join(texts(ids, ["abd"])[0]) == "abc"
    pieces, stopped = texts(TOKENIZER.encode("the end is ab", add_special_tokens=False), ["abd"])
    assert "".join(pieces) == "the end is ab" and not stopped
    assert pieces[-1] == "ab"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_messages_come_out_of_pieces_of_any_size(size: int) -> None:
    params = SamplingParams(max_new_tokens=5, temperature=0.5, logit_bias={3: -1.5}, stop_token_ids=(1, 2))
    sent = [Submit(1, [5, 6], params), Cancel(1), Submit(2, list(range(300)), SamplingParams())]
    data = b"".join(map(encode, sent))
    inbox = engine_inbox()
    assert [message for at in range(0, len(data), size) for message in inbox.feed(data[at : at + size])] == sent
