"""Stop strings against a search in the whole text."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from izh.text.stopping import StopStrings

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)
PIECES = st.lists(st.tuples(st.text("abc", max_size=4), st.booleans()), max_size=12)


def first_complete(text: str, stops: tuple[str, ...], active: list[bool]) -> tuple[int, str] | None:
    """(end, string) of the first stop string complete at an active character; the longest of several."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found and active[end - 1]:
            return end, max(found, key=len)
    return None


@settings(max_examples=500, deadline=None)
@given(stops=STOPS, text=st.text("abc", max_size=30), cuts=st.sets(st.integers(1, 29)), include=st.booleans())
def test_the_earliest_stop_string_is_found_however_the_text_is_cut(
    stops: tuple[str, ...], text: str, cuts: set[int], include: bool
) -> None:
    found = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    watch = StopStrings(stops, include)
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    out = ""
    for start, stop in pairwise(edges):
        out += watch.push(text[start:stop])
        if watch.matched is not None:
            break
    out += watch.flush()
    if not found:
        assert (out, watch.matched) == (text, None)
    else:
        end, _, string = min(found)
        assert (out, watch.matched) == (text[: end if include else end - len(string)], string)


@settings(max_examples=500, deadline=None)
@given(stops=STOPS, pieces=PIECES)
def test_exactly_what_may_become_a_stop_string_is_withheld(
    stops: tuple[str, ...], pieces: list[tuple[str, bool]]
) -> None:
    watch = StopStrings(stops)
    out, text, active = "", "", []
    for piece, is_active in pieces:
        out += watch.push(piece, active=is_active)
        text += piece
        active += [is_active] * len(piece)
        match = first_complete(text, stops, active)
        if match is not None:
            assert (watch.matched, out) == (match[1], text[: match[0] - len(match[1])])
            return
        assert watch.matched is None
        begun = max(k for s in stops for k in range(len(s)) if text.endswith(s[:k]))
        assert out == text[: len(text) - begun]
    assert out + watch.flush() == text


def test_a_stop_string_begun_while_inactive_counts() -> None:
    watch = StopStrings(("END",))
    assert watch.push("x END E", active=False) == "x END "
    assert watch.push("ND") == ""
    assert watch.matched == "END"


def test_a_very_long_stop_string_costs_only_what_the_text_matches() -> None:
    pattern = "ab" * 5_000_000
    watch = StopStrings((pattern,))
    assert watch.push("xabab") == "x"
    assert watch.push("c") == "ababc"
