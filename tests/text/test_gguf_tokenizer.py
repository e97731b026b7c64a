"""Tokenizers from GGUF metadata, against ids of llama.cpp, transformers and sentencepiece (tests/fixtures/*.json say which)."""

import io
import json
import os
import random
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import CheckpointError, InvalidRequest, UnsupportedError
from octavo.text.gguf_tokenizer import Kind, from_gguf
from octavo.text.pretokenizers import PRE_TOKENIZERS
from octavo.text.tokenizer import Pieces, load_tokenizer
from octavo.weights.gguf import GgufFile

FIXTURES = Path(__file__).parents[1] / "fixtures"


@cache
def fixture(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / name).read_text("utf-8"))


def wrong(tokenizer, texts, expected, **how) -> list[tuple[str, list[int], list[int]]]:
    found = [(text, tokenizer.encode(text, False, **how), ids) for text, ids in zip(texts, expected, strict=True)]
    return [(text[:60], got[:20], ids[:20]) for text, got, ids in found if got != ids]


@pytest.fixture(scope="module")
def smollm2_metadata(smollm2) -> dict[str, Any]:
    with GgufFile(smollm2) as file:
        return {key: file.metadata[key] for key in file.metadata if key.startswith("tokenizer.")}


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_metadata):
    return load_tokenizer("model.gguf", smollm2_metadata)


def test_smollm2_ids_are_llama_cpps(smollm2_tokenizer):
    data = fixture("smollm2_token_ids.json")
    assert len(data["texts"]) > 300
    assert wrong(smollm2_tokenizer, data["texts"], data["ids"]) == []
    plain = [ids if other is None else other for ids, other in zip(data["ids"], data["plain"], strict=True)]
    assert plain != data["ids"]
    assert wrong(smollm2_tokenizer, data["texts"], plain, parse_special=False) == []


@pytest.mark.parametrize("pre", sorted(fixture("smollm2_token_ids.json")["families"]))
def test_every_family_cuts_as_llama_cpp_does(smollm2_metadata, pre):
    data = fixture("smollm2_token_ids.json")
    expected = [ids if other is None else other for ids, other in zip(data["ids"], data["families"][pre], strict=True)]
    tokenizer = from_gguf({**smollm2_metadata, "tokenizer.ggml.pre": pre})
    # (?i:'s) of the original regex also takes the long s; llama.cpp writes the letters out
    pairs = [(t, e) for t, e in zip(data["texts"], expected, strict=True) if "'ſ" not in t]
    assert wrong(tokenizer, *zip(*pairs, strict=True)) == []
    assert pre == "starcoder" or any(data["families"][pre])


def test_text_comes_back(smollm2_tokenizer):
    for text in fixture("smollm2_token_ids.json")["texts"]:
        ids = smollm2_tokenizer.encode(text)
        assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == text
        assert smollm2_tokenizer.visible_bytes(ids, skip_special_tokens=False) == text.encode()


def test_smollm2_facts(smollm2_tokenizer):
    t = smollm2_tokenizer
    assert (t.vocab_size, t.bos_id, t.eos_id, t.prefix, t.suffix) == (49152, 1, 2, (), ())
    assert t.end_ids == (2, 0)  # <|im_end|>, then <|endoftext|>
    assert t.special_ids == frozenset(range(17))
    assert t.dropped == (0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2)
    assert t.special_tokens["bos_token"] == "<|im_start|>"
    assert "add_generation_prompt" in t.chat_template
    ids = t.encode("<|im_start|>hi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert t.decode(ids) == "hi"
    assert t.id_to_token(t.encode(" the")[0]) == "Ġthe"
    assert t.token_to_id("Ġthe") == t.encode(" the")[0]
    assert t.token_text(1) == "<|im_start|>"
    assert t.token_bytes(49152 + 5) == b"" and t.id_to_token(60000) is None


@pytest.mark.skipif("OCTAVO_TEST_QWEN2" not in os.environ, reason="set OCTAVO_TEST_QWEN2 to Qwen2.5-Coder-0.5B-Instruct's GGUF file")
def test_qwen2_ids_are_transformers():
    with GgufFile(os.environ["OCTAVO_TEST_QWEN2"]) as file:
        metadata = dict(file.metadata)
    tokenizer = from_gguf(metadata)
    assert wrong(tokenizer, fixture("smollm2_token_ids.json")["texts"], fixture("qwen2_token_ids.json")["ids"]) == []
    assert tokenizer.end_ids == (151645, 151643)
    assert tokenizer.decode(tokenizer.encode("<|im_start|><tool_call>x</tool_call>")) == "<tool_call>x</tool_call>"  # user defined: shown


# A byte-level vocabulary small enough to write down.

_SAME = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_REST = [b for b in range(256) if b not in _SAME]
BYTE_CHARS = {b: chr(b) if b in _SAME else chr(0x100 + _REST.index(b)) for b in range(256)}


def byte_level(merges: list[str], special: list[str] = ("<|s|>", "<|e|>"), **more) -> dict[str, Any]:
    joined = [m.replace(" ", "") for m in merges or []]
    tokens = [*BYTE_CHARS.values()] + [j for j in joined if len(j) > 1]
    kinds = [1] * len(tokens) + [3] * len(special)
    tokens += special
    base = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": merges, "token_type": kinds, "bos_token_id": len(tokens) - 2,
            "eos_token_id": len(tokens) - 1}
    return {f"tokenizer.ggml.{key}": value for key, value in {**base, **more}.items() if value is not None}


@given(st.binary(max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_bytes_decode_as_python_does(data):
    tokenizer = TINY
    assert tokenizer.decode(list(data)) == data.decode("utf-8", "replace")


TINY = from_gguf(byte_level(["h e", "l l", "he ll", "Ġ hell"]))


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_cuts_are_those_of_another_regex_engine(name):
    """Oniguruma (in tokenizers) and the regex package must read each family's patterns alike."""
    family = PRE_TOKENIZERS[name]
    backend = from_gguf(byte_level([], pre=name))._backend
    for text in fixture("smollm2_token_ids.json")["texts"][:250]:
        text = backend.normalizer.normalize_str(text) if backend.normalizer else text
        pieces = [text]
        for cut in family.cuts:
            pieces = [part for piece in pieces for part in _split(cut, piece)]
        got = [text[a:b] for _, (a, b) in backend.pre_tokenizer.pre_tokenize_str(text)]
        assert got == pieces, text


def _split(cut: str, text: str) -> list[str]:
    parts, at = [], 0
    for match in regex.finditer(cut, text):
        parts += [text[at : match.start()], match.group()]
        at = match.end()
    return [part for part in [*parts, text[at:]] if part]


def test_bos_is_added_once_and_only_where_wanted():
    assert TINY.encode("hell") == [258]
    wanted = from_gguf(byte_level(["h e"], add_bos_token=True, add_eos_token=True))
    bos, eos = wanted.bos_id, wanted.eos_id
    assert wanted.encode("he") == [bos, 256, eos]
    assert wanted.encode("he", add_special_tokens=False) == [256]
    assert wanted.encode("<|s|>he<|e|>") == [bos, 256, eos]
    assert wanted.encode("<|s|>he", parse_special=False)[:2] == [bos, ord("<")]
    assert wanted.encode("") == [bos, eos]
    llama3 = from_gguf(byte_level(["h e"], pre="llama-bpe"))
    assert llama3.encode("he") == [llama3.bos_id, 256]
    assert from_gguf(byte_level(["h e"], pre="llama-bpe", add_bos_token=False)).encode("he") == [256]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["12345", " 12"]), ("default", ["123", "45", " ", "12"]), ("smollm", [*"12345", " ", *"12"]), ("qwen2", [*"12345", " ", *"12"]),
        ("tekken", [*"12345", " ", *"12"]), ("llama-bpe", ["123", "45", " ", "12"]), ("dbrx", ["123", "45", " ", "12"]),
        ("deepseek-v3", ["123", "45", " ", "12"]), ("deepseek-coder", [*"12345", " ", *"12"]),
    ],
)  # fmt: skip
def test_digits(pre, words):
    """SmolLM2's vocabulary has no token of two digits, so llama.cpp's ids above cannot tell these apart."""
    tokenizer = from_gguf(byte_level(["1 2", "12 3", "4 5", "123 45", "Ġ 12"], pre=pre, add_bos_token=False))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("12345 12")] == words


def test_ignore_merges_takes_a_whole_word():
    metadata = byte_level(["h e"], pre="llama-bpe", add_bos_token=False)
    metadata["tokenizer.ggml.tokens"][257] = "hey"  # a token that no merge makes
    metadata["tokenizer.ggml.token_type"][257] = 1
    assert from_gguf(metadata).encode("hey") == [257]
    assert from_gguf({**metadata, "tokenizer.ggml.pre": "dbrx"}).encode("hey") == [256, ord("y")]


def test_token_types():
    metadata = byte_level([], special=["<|s|>", "<|e|>", "déjà  vu", "<unk>", "[PAD7]"])
    metadata["tokenizer.ggml.token_type"][-3:] = [Kind.USER_DEFINED, Kind.UNKNOWN, Kind.UNUSED]
    t = from_gguf(metadata)
    assert t.encode("a déjà  vu<unk>[PAD7]")[:5] == [ord("a"), ord(" "), 258, 259, ord("[")]
    assert t.encode("déjà  vu<unk>", parse_special=False) == [258, *b"<unk>"]  # what is user-defined is no secret
    assert t.decode([258, 259, 260]) == "déjà  vu[PAD7]"
    assert t.special_ids == {256, 257, 259}


def test_lone_surrogates_are_refused():
    with pytest.raises(InvalidRequest, match="character 1 is a lone surrogate"):
        TINY.encode("a\ud83d")
    with pytest.raises(InvalidRequest, match="int"):
        TINY.encode(5)
    with pytest.raises(InvalidRequest, match="-1"):
        TINY.decode([-1])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": None}, CheckpointError, "model is missing"),
        ({"model": "rwkv"}, UnsupportedError, "'rwkv'.*gpt2.*llama"),
        ({"pre": "klingon"}, UnsupportedError, "'klingon'.*smollm"),
        ({"pre": 5}, CheckpointError, "pre must be str"),
        ({"tokens": None}, CheckpointError, "tokens is missing"),
        ({"tokens": []}, CheckpointError, "empty"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, CheckpointError, "'a' twice, as ids 0 and 2"),
        ({"merges": None}, CheckpointError, "merges is missing"),
        ({"merges": ["he"]}, CheckpointError, r"merges\[0\] is 'he'"),
        ({"merges": ["h e", "x zz"]}, CheckpointError, r"merges\[1\]"),
        ({"token_type": [1, 2]}, CheckpointError, "2 entries for 258"),
        ({"token_type": ["x"] * 258}, CheckpointError, "numbers"),
        ({"bos_token_id": 999}, CheckpointError, "999.*258"),
        ({"bos_token_id": None, "add_bos_token": True}, CheckpointError, "bos_token_id is missing"),
        ({"add_bos_token": "yes"}, CheckpointError, "add_bos_token must be bool"),
    ],
)
def test_bad_metadata_is_named(change, error, words):
    with pytest.raises(error, match=words):
        from_gguf(byte_level(**{"merges": [], **change}))


def test_a_vocabulary_without_a_bytes_token_is_refused():
    """A text that holds the byte would lose it in silence."""
    metadata = byte_level([])
    metadata["tokenizer.ggml.tokens"] = [token.replace("Ċ", "(no newline)") for token in metadata["tokenizer.ggml.tokens"]]
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.tokens: there is no token for the byte 0x0A \('Ċ'\)"):
        from_gguf(metadata)


def test_a_missing_pre_is_told(caplog):
    assert from_gguf(byte_level([], pre=None)).encode("ab") == [97, 98]
    assert "tokenizer.ggml.pre is missing" in caplog.text


def test_templates_by_name():
    metadata = byte_level([])
    assert from_gguf(metadata).chat_template is None
    metadata["tokenizer.chat_template"] = "A"
    assert from_gguf(metadata).chat_template == "A"
    metadata["tokenizer.chat_template.tool_use"] = "B"
    assert from_gguf(metadata).chat_template == {"default": "A", "tool_use": "B"}


# SentencePiece


def test_spm_ids_are_llama_cpps():
    data = fixture("tiny_spm.json")
    tokenizer = from_gguf(data["metadata"])
    assert tokenizer._pieces is Pieces.SENTENCEPIECE
    assert tokenizer.prefix == (1,)
    got = [tokenizer.encode(text) if not text.startswith("<s>") else [1, *tokenizer.encode(text)] for text in data["texts"]]
    assert [(t, a, b) for t, a, b in zip(data["texts"], got, data["prefix"], strict=True) if a != b] == []
    bare = from_gguf({**data["metadata"], "tokenizer.ggml.add_space_prefix": False})
    assert wrong(bare, data["texts"], data["bare"]) == []


@pytest.fixture(scope="module")
def sentencepiece_pair():
    """A processor trained now, and the same vocabulary through our reader."""
    import sentencepiece

    texts = [t for t in fixture("smollm2_token_ids.json")["texts"] if t.strip() and "\n" not in t and "\0" not in t]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts + ["the cat sat on the mat, hahaha  ababab    aaaa aaa they    think"] * 20),
        model_writer=model, model_type="bpe", vocab_size=500, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, user_defined_symbols=["<ud>"], character_coverage=0.98,
        hard_vocab_limit=False, minloglevel=2,
    )
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    size = sp.get_piece_size()
    kinds = [
        Kind.UNKNOWN if sp.is_unknown(i) else Kind.BYTE if sp.is_byte(i) else Kind.CONTROL if sp.is_control(i)
        else Kind.USER_DEFINED if sp.id_to_piece(i) == "<ud>" else Kind.NORMAL for i in range(size)
    ]
    metadata = {"model": "llama", "tokens": [sp.id_to_piece(i) for i in range(size)], "scores": [sp.get_score(i) for i in range(size)],
                "token_type": [int(k) for k in kinds]}
    return sp, from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})


def test_spm_equals_sentencepiece(sentencepiece_pair):
    sp, ours = sentencepiece_pair
    rng = random.Random(3)
    alphabets = ["ab ", "ha ", "the catsn ", "a▁ ", "aé你😀 "] * 300
    texts = ["".join(rng.choice(letters) for _ in range(rng.randint(0, 30))) for letters in alphabets]
    for text in texts + fixture("smollm2_token_ids.json")["texts"]:
        expected = sp.encode(text)
        assert ours.encode(text, add_special_tokens=False, parse_special=False) == expected
        assert ours.decode(expected) == sp.decode(expected)
    assert any(ours._backend.id_to_token(i).startswith("<0x") for i in sp.encode("𠮷"))
    assert ours.bos_id == 1 and ours.eos_id == 2  # the type's own, where the file says nothing


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_derived_merges_do_what_scores_say(data):
    letters = data.draw(st.sampled_from(["a", "ab", "abc"]))
    pieces = list(letters)
    for _ in range(data.draw(st.integers(0, 16))):
        piece = data.draw(st.sampled_from(pieces)) + data.draw(st.sampled_from(pieces))
        if piece not in pieces and len(piece) <= 10:
            pieces.append(piece)
    longer = data.draw(st.permutations(pieces[len(letters) :]))
    scores = {piece: -float(i) for i, piece in enumerate(longer)}
    tokens = ["<unk>", "<s>", "</s>", *letters, *longer]
    kinds = [2, 3, 3] + [1] * (len(tokens) - 3)
    metadata = {"model": "llama", "tokens": tokens, "scores": [scores.get(t, -99.0) for t in tokens], "token_type": kinds,
                "add_space_prefix": False}
    tokenizer = from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    text = data.draw(st.text(letters, max_size=30))
    assert [tokens[i] for i in tokenizer.encode(text, add_special_tokens=False)] == _merge(list(text), scores)


def _merge(parts: list[str], scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule, the slow way: always the best union, the leftmost of equals."""
    while True:
        unions = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not unions:
            return parts
        i = -max(unions)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_spm_without_scores_is_refused():
    metadata = {k: v for k, v in fixture("tiny_spm.json")["metadata"].items() if not k.endswith("scores")}
    with pytest.raises(CheckpointError, match="scores is missing"):
        from_gguf(metadata)
