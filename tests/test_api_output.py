from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.api.output import Output
from engine.model.tokenizer import ByteTokenizer


def output(*stops: str, silent: tuple[int, ...] = ()) -> Output:
    return Output(ByteTokenizer().stream(), stops, silent)


def run(out: Output, *chunks: bytes) -> list[str]:
    return [*(out.push(chunk) for chunk in chunks), out.finish()]


def test_text_before_a_stop_string_only() -> None:
    out = output("END")
    assert run(out, b"abc", b"dEN", b"Defg") == ["abc", "d", "", ""]
    assert out.stopped
    assert out.tokens == len(b"abcdEND")


def test_what_might_be_a_stop_string_is_held_back_and_given_when_it_is_not() -> None:
    out = output("END")
    assert run(out, b"E", b"E", b"N", b"x", b"EN") == ["", "E", "", "ENx", "", "EN"]
    assert not out.stopped


def test_nothing_after_a_stop() -> None:
    out = output("x")
    assert out.push(b"ax") == "a"
    assert out.push(b"more") == ""
    assert out.finish() == ""


def test_half_a_character_is_never_shown() -> None:
    text = "naïve €".encode()
    out = output()
    shown = [out.push([byte]) for byte in text]
    assert "".join(shown) == "naïve €"
    assert all("\ufffd" not in piece for piece in shown)
    out = output()
    assert run(out, text[:-1])[-1] == "\ufffd"


def test_a_stop_string_may_end_in_the_last_half_character() -> None:
    out = output("\ufffd")
    assert run(out, b"a\xe2\x82") == ["a", ""]
    assert out.stopped


def test_ending_tokens_are_counted_and_not_shown() -> None:
    out = output(silent=(0,))
    assert run(out, b"ab\0") == ["ab", ""]
    assert out.tokens == 3


def test_the_stop_string_that_is_complete_first_counts() -> None:
    assert "".join(run(output("abc", "b"), b"abc")) == "a"
    assert "".join(run(output("abc", "bc"), b"abc")) == ""


letters = st.text("ab", max_size=30)


@given(letters, st.lists(st.text("ab", min_size=1, max_size=4), max_size=4), st.data())
def test_the_cut_makes_no_difference(text: str, stops: list[str], data: st.DataObject) -> None:
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    expected = text
    if ends:
        expected = text[: ends[0] - max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    raw = text.encode()
    chunks = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    out = output(*stops)
    assert "".join(run(out, *chunks)) == expected
    assert out.stopped == bool(ends)
