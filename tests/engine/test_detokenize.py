"""Streaming text against decoding at once, and stop strings against brute force."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.sampling import SamplingParams
from octavo.engine.detokenize import IncrementalDetokenizer, StopStrings
from octavo.text.gguf_tokenizer import from_gguf

_SAME = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_REST = [b for b in range(256) if b not in _SAME]
_CHARS = [chr(b) if b in _SAME else chr(0x100 + _REST.index(b)) for b in range(256)]


def _spell(text: str | bytes) -> str:
    return "".join(_CHARS[b] for b in (text.encode() if isinstance(text, str) else text))


def _byte_level():
    """All single bytes, words, and tokens that begin or end inside a character."""
    pieces = [" the", "STOP", "ab", "你好", "é", b"\xe4\xbd", b"\xa0!", b"x\xf0\x9f", b"\x98\x80y", b"\xf0\x9f\x98", "\ufffd"]
    tokens = _CHARS + [_spell(p) for p in pieces] + ["<|s|>", "<|e|>", "<tool>"]
    kinds = [1] * (len(tokens) - 3) + [3, 3, 4]
    return from_gguf({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
                      "tokenizer.ggml.merges": [], "tokenizer.ggml.token_type": kinds})  # fmt: skip


BPE = _byte_level()
SPM = from_gguf(json.loads((Path(__file__).parents[1] / "fixtures" / "tiny_spm.json").read_text())["metadata"])
SPM_BARE = from_gguf({**json.loads((Path(__file__).parents[1] / "fixtures" / "tiny_spm.json").read_text())["metadata"],
                      "tokenizer.ggml.add_space_prefix": False})  # fmt: skip
TOKENIZERS = [BPE, SPM, SPM_BARE]
S, E = BPE.token_to_id("<|s|>"), BPE.token_to_id("<|e|>")

ids_of = st.sampled_from(TOKENIZERS).flatmap(
    lambda t: st.tuples(
        st.just(t),
        st.lists(st.integers(0, t.vocab_size + 2), max_size=5),
        st.lists(st.one_of(st.integers(0, t.vocab_size + 2), st.sampled_from(t.encode("ab STOP 你好 é😀 ab", False))), max_size=30),
    )
)


def stream(tokenizer, prompt, ids, params, sizes=(1,)):
    """All deltas, then what flush gives; → the detokenizer and the text."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, params)
    deltas, at, k = [], 0, 0
    while at < len(ids):
        size = sizes[k % len(sizes)]
        deltas.append(detokenizer.push(ids[at : at + size]))
        at, k = at + size, k + 1
    deltas.append(detokenizer.flush())
    assert detokenizer.flush() == ""
    assert detokenizer.text == "".join(deltas)
    return detokenizer, "".join(deltas)


def continuation(tokenizer, prompt, ids, skip):
    """What the whole sequence shows beyond its prompt: by definition, at once."""
    before, both = tokenizer.visible_bytes(prompt, skip), tokenizer.visible_bytes([*prompt, *ids], skip)
    if tokenizer.strip_first_space and both[:1] == b" ":
        both, before = both[1:], before[1:]
    rest = next((before[-k:] for k in (1, 2, 3) if k <= len(before) and _open_ended(before[-k:])), b"")
    shown = both[len(before) - len(rest) :].decode("utf-8", "replace")
    if rest:  # the prompt's open character: the output's if the output finishes it, else the prompt's U+FFFD
        size = 2 if rest[0] < 0xE0 else 3 if rest[0] < 0xF0 else 4
        first = both[len(before) - len(rest) :][:size]
        try:
            finished = len(first.decode("utf-8")) == 1
        except UnicodeDecodeError:
            finished = False
        return shown if finished else shown[1:]
    return shown


def _open_ended(data: bytes) -> bool:
    """Whether some bytes after ``data`` make it exactly one character."""
    for more in (b"\x80", b"\xa0", b"\x90", b"\x80\x80", b"\xa0\x80", b"\x90\x80", b"\x90\x80\x80", b"\x80\x80\x80"):
        try:
            if len((data + more).decode("utf-8")) == 1:
                return True
        except UnicodeDecodeError:
            pass
    return False


@given(ids_of, st.booleans(), st.lists(st.integers(1, 4), min_size=1, max_size=4))
@settings(max_examples=400, deadline=None)
def test_deltas_are_the_decoded_text(case, skip, sizes):
    tokenizer, prompt, ids = case
    _, text = stream(tokenizer, prompt, ids, SamplingParams(skip_special_tokens=skip), sizes)
    assert text == continuation(tokenizer, prompt, ids, skip)


@given(ids_of, st.booleans())
@settings(max_examples=300, deadline=None)
def test_without_a_prompt_it_is_decode(case, skip):
    tokenizer, _, ids = case
    _, text = stream(tokenizer, [], ids, SamplingParams(skip_special_tokens=skip))
    assert text == tokenizer.decode(ids, skip)


@given(ids_of)
@settings(max_examples=200, deadline=None)
def test_after_a_prompt_of_whole_characters_it_is_the_rest_of_decode(case):
    tokenizer, _, ids = case
    prompt = tokenizer.encode("ab 你好", add_special_tokens=False)
    _, text = stream(tokenizer, prompt, ids, SamplingParams())
    assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *ids])


@given(st.binary(max_size=12), st.binary(max_size=12))
@settings(max_examples=500, deadline=None)
def test_invalid_bytes_come_out_as_decode_shows_them(prompt, data):
    _, text = stream(BPE, list(prompt), list(data), SamplingParams())
    assert text == continuation(BPE, list(prompt), list(data), True)


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        (b"\xe4\xbd", b"\xa0!", "你!"),  # the output finishes the prompt's character
        (b"\xe4\xbd", b"A", "A"),  # it does not: the broken piece is the prompt's
        (b"\xe4\xbd", b"", ""),
        (b"\xe4", b"\xbd", ""),
        (b"\xf0\x9f", b"\x98\x80", "😀"),
        (b"\xef\xbf", b"\xbdx", "\ufffdx"),  # a U+FFFD that the model did write
        (b"\xef", b"\xbf\xbdx", "\ufffdx"),
        (b"a\xff", b"b", "b"),
        ("é".encode(), b"\x80", "\ufffd"),
    ],
)
def test_a_prompt_that_ends_inside_a_character(prompt, output, text):
    assert stream(BPE, list(prompt), list(output), SamplingParams())[1] == text


def test_no_half_characters_in_between():
    detokenizer = IncrementalDetokenizer(BPE, [], SamplingParams())
    assert [detokenizer.push([b]) for b in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert detokenizer.push([0xE4]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_first_space_of_sentencepiece():
    ids = SPM.encode("hello there", add_special_tokens=False)
    assert stream(SPM, [], ids, SamplingParams())[1] == "hello there"
    assert stream(SPM, [SPM.bos_id], ids, SamplingParams())[1] == "hello there"
    assert stream(SPM, [SPM.bos_id], ids, SamplingParams(skip_special_tokens=False))[1] == " hello there"
    assert stream(SPM, SPM.encode("x"), ids, SamplingParams())[1] == " hello there"
    assert stream(SPM_BARE, [], SPM_BARE.encode(" hi", False), SamplingParams())[1] == " hi"


def test_special_tokens():
    tool = BPE.token_to_id("<tool>")
    assert stream(BPE, [], [S, 97, tool, E], SamplingParams())[1] == "a<tool>"
    assert stream(BPE, [], [S, 97, E], SamplingParams(skip_special_tokens=False))[1] == "<|s|>a<|e|>"


def test_a_stop_token_is_not_shown():
    for include, text in ((False, "a"), (True, "ab")):
        detokenizer = IncrementalDetokenizer(BPE, [], SamplingParams(stop_token_ids=[98], include_stop_str_in_output=include))
        assert detokenizer.push([97, 98], stop_terminated=True) == text
        assert (detokenizer.num_tokens, detokenizer.finished) == (2, False)


def test_detokenize_false_makes_no_text():
    detokenizer, text = stream(BPE, [1], [97, 98], SamplingParams(detokenize=False))
    assert (text, detokenizer.num_tokens) == ("", 2)


# stop strings


def brute(texts_by_token, stops, min_tokens):
    """→ (end of the match, the string, tokens used) or None: the definition, character by character."""
    whole = "".join(texts_by_token)
    offset = len("".join(texts_by_token[:min_tokens]))
    for end in range(offset + 1, len(whole) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if whole[:end].endswith(stop):
                used = next(n for n in range(len(texts_by_token) + 1) if len("".join(texts_by_token[:n])) >= end)
                return end, stop, used
    return None


letters = st.text("ab", min_size=1, max_size=4)


@given(
    st.lists(st.sampled_from([97, 98, BPE.token_to_id("ab"), BPE.token_to_id("STOP"), S]), max_size=14),
    st.lists(letters | st.sampled_from(["ST", "OPa", "TOP", "STOPST", "b"]), min_size=1, max_size=4, unique=True),
    st.booleans(),
    st.integers(0, 5),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
@settings(max_examples=500, deadline=None)
def test_stop_strings_against_brute_force(ids, stops, include, min_tokens, sizes):
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    detokenizer, text = stream(BPE, [99], ids, params, sizes)
    texts = [BPE.decode([i]) for i in ids]
    found = brute(texts, stops, min_tokens)
    if found is None:
        assert (detokenizer.finished, text) == (False, "".join(texts))
        assert detokenizer.num_tokens == len(ids)
    else:
        end, stop, used = found
        assert detokenizer.stop_reason == stop
        assert text == "".join(texts)[: end if include else end - len(stop)]
        assert detokenizer.num_tokens == used
        assert detokenizer.push([97]) == "" and detokenizer.num_tokens == used


@given(st.text("ab", max_size=20), st.lists(letters, min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_only_a_possible_beginning_is_held_back(text, stops):
    """After each character without a match, what is out is everything but the longest proper beginning of a stop string."""
    detokenizer = IncrementalDetokenizer(BPE, [], SamplingParams(stop=stops, min_tokens=1000))  # matches do not count: only holding
    for n, char in enumerate(text, 1):
        detokenizer.push([ord(char)])
        held = max(k for k in range(n + 1) if k == 0 or any(len(s) > k and s.startswith(text[n - k : n]) for s in stops))
        assert detokenizer.text == text[: n - held]


def test_stop_across_tokens_and_characters():
    params = SamplingParams(stop=["好S"])
    detokenizer = IncrementalDetokenizer(BPE, [], params)
    out = [detokenizer.push([b]) for b in "你好".encode()]
    assert out == ["", "", "你", "", "", ""]
    assert detokenizer.push([BPE.token_to_id("STOP")]) == ""
    assert (detokenizer.stop_reason, detokenizer.text, detokenizer.num_tokens) == ("好S", "你", 7)


def test_a_stop_string_can_be_found_at_the_flush():
    detokenizer = IncrementalDetokenizer(BPE, [], SamplingParams(stop=["a\ufffd"]))
    assert detokenizer.push([97, 0xE4]) == ""
    assert detokenizer.flush() == ""
    assert detokenizer.stop_reason == "a\ufffd"


def test_min_tokens_counts_every_token():
    params = SamplingParams(stop=["ab"], min_tokens=2)
    first, text = stream(BPE, [], [97, 98, 97, 98], params)  # the match at tokens 1-2 does not count, 3-4 does
    assert (text, first.num_tokens) == ("ab", 4)
    across, text = stream(BPE, [], [99, 97, 98], params)  # begins inside the first two, ends after them
    assert (text, across.num_tokens) == ("c", 3)


def test_longest_of_those_that_end_together():
    detokenizer, text = stream(BPE, [], list(b"xabc"), SamplingParams(stop=["bc", "abc", "c"]))
    assert (detokenizer.stop_reason, text) == ("abc", "x")


def test_automaton_of_one_character():
    stops = StopStrings(["a"])
    assert stops.match(stops.step(0, "a")) == "a" and stops.held(stops.step(0, "a")) == 0


def test_a_long_stop_string_that_nearly_matches_stays_linear():
    stop = "a" * 20_000 + "b"
    detokenizer = IncrementalDetokenizer(BPE, [], SamplingParams(stop=[stop]))
    for _ in range(60_000):  # 0.1 s; copying the held text at each token would take 15 s and more
        detokenizer.push([97])
    assert detokenizer.text == "a" * 40_000
