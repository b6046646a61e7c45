"""Stop strings over tokens that are pieces of characters, several characters, or spaces."""

import pytest
from hypothesis import given, strategies as st

from nearpolicy.sampler.stops import StopStrings


class Bytes:
    """Tokens are byte strings, decoded as UTF-8 together."""

    pieces = (b"a", b"b", b"ab", b"\n", b"\n\n", "é".encode()[:1], "é".encode()[1:], b" ", b"", b"</", b"s>")

    def decode(self, ids, **_):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


def first_end(stops, ids):
    """Number of tokens after which a stop string is complete, by the definition; None when never."""
    return next((t for t in range(1, len(ids) + 1) if any(stop in Bytes().decode(ids[:t]) for stop in stops)), None)


def found(stops, ids):
    tracker = StopStrings(Bytes(), stops, len(Bytes.pieces))
    return next((t for t in range(1, len(ids) + 1) if tracker.completed(ids[:t])), None)


@pytest.mark.parametrize(
    ("stops", "ids", "end"),
    [
        (("ba",), [0, 1, 2, 0], 3),  # completed inside a token
        (("\n\n",), [0, 3, 3], 3),
        (("\n\n",), [0, 4], 2),
        (("é",), [0, 5, 6, 0], 3),  # completed by the second half of a character
        (("</s>",), [9, 8, 10], 3),
        (("zz", "b "), [1, 7], 2),
        (("x",), [0, 1, 2], None),
    ],
)
def test_cases(stops, ids, end):
    assert first_end(stops, ids) == end
    assert found(stops, ids) == end


@given(
    st.lists(st.sampled_from(["ab", "b\n", "é", "aa", "</s>", " a", "\n", "b"]), min_size=1, max_size=3),
    st.lists(st.integers(0, len(Bytes.pieces) - 1), min_size=1, max_size=30),
)
def test_equals_decoding_everything(stops, ids):
    assert found(tuple(stops), ids) == first_end(tuple(stops), ids)


def test_only_tokens_that_can_complete_are_decoded():
    tracker = StopStrings(Bytes(), ("</s>",), len(Bytes.pieces))
    assert tracker.may_complete_V.nonzero()[0].tolist() == [5, 6, 10]
