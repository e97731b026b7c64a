"""Tokenizers from Hugging Face directories, against transformers' reading of the same files."""

import json
import os
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from octavo.errors import CheckpointError, UnsupportedError
from octavo.text.gguf_tokenizer import Kind, merges_from_scores
from octavo.text.tokenizer import load_tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures"
TEXTS = json.loads((FIXTURES / "tiny_spm.json").read_text())["texts"]


def _byte_backend() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("Ġ", "t"), ("Ġt", "he"), ("l", "l"), ("i", "n")]
    vocab = {piece: i for i, piece in enumerate(alphabet + [a + b for a, b in merges])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|im_start|>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<mask>", lstrip=True, special=True)])
    return backend


def _spm_backend(style: str) -> Tokenizer:
    data = json.loads((FIXTURES / "tiny_spm.json").read_text())["metadata"]
    tokens, scores, kinds = (data[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    backend = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges_from_scores(tokens, scores, kinds), unk_token="<unk>",
                   fuse_unk=True, byte_fallback=True)
    )  # fmt: skip
    parts = [decoders.ByteFallback(), decoders.Fuse()]
    if style == "legacy":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), *parts, decoders.Strip(" ", 1, 0)])
    elif style == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), *parts, decoders.Strip(" ", 1, 0)])
    else:  # gemma
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), *parts])
    backend.add_special_tokens([t for t, k in zip(tokens, kinds) if k in (Kind.CONTROL, Kind.UNKNOWN)])
    backend.add_tokens([AddedToken(t, normalized=False) for t, k in zip(tokens, kinds) if k == Kind.USER_DEFINED])
    return backend


def save(path: Path, backend: Tokenizer, config: dict | None = None, **files) -> Path:
    backend.save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        file = path / name.replace("__", ".")
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def _with_bos(backend: Tokenizer) -> Tokenizer:
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    return backend


def _same_as_transformers(path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs, ours = PreTrainedTokenizerFast.from_pretrained(str(path)), load_tokenizer(path)
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == set(theirs.all_special_ids) | {i for i, t in theirs.added_tokens_decoder.items() if t.special}
    for text in [*TEXTS, "<s>the<|im_start|>user <mask>", "in <tool> e\u0301 1234567"]:
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"], text
        if not text.startswith("<s>"):  # a second BOS is theirs alone
            assert ours.encode(text) == theirs(text)["input_ids"], text
        ids = theirs(text)["input_ids"]
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip) == expected, text


@pytest.mark.parametrize("bos", [False, True])
def test_byte_level_directory(tmp_path, bos):
    backend = _byte_backend()
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}, "tokenizer_class": "PreTrainedTokenizerFast"}
    path = save(tmp_path, _with_bos(backend) if bos else backend, config)
    _same_as_transformers(path)
    ours = load_tokenizer(path)
    assert (ours.bos_id, ours.eos_id) == (backend.token_to_id("<s>"), backend.token_to_id("</s>"))
    assert ours.end_ids == (ours.eos_id,)
    assert ours.encode("<s>the") == [ours.bos_id, *ours.encode("the", add_special_tokens=False)]
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("style", ["legacy", "metaspace", "gemma"])
def test_sentencepiece_like_directory(tmp_path, style):
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast"}
    path = save(tmp_path, _with_bos(_spm_backend(style)), config)
    _same_as_transformers(path)
    assert load_tokenizer(path).strip_first_space is (style != "gemma")


def test_the_template_wins_over_flags_of_the_config(tmp_path):
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"}
    path = save(tmp_path, _with_bos(_byte_backend()), config)
    _same_as_transformers(path)
    ours = load_tokenizer(path)
    assert (ours.prefix, ours.suffix) == ((ours.bos_id,), ())


def test_tokens_that_only_the_config_knows(tmp_path):
    backend = _byte_backend()
    size = backend.get_vocab_size()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(size): {"content": "<new>", "special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False},
            str(size + 1): {"content": "<plain>", "special": False, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False},
        },
    }
    path = save(tmp_path, backend, config, special_tokens_map__json={"eos_token": {"content": "<new>"}, "bos_token": "<s>"})
    ours = load_tokenizer(path)
    assert ours.encode("a<new><plain>", False)[1:] == [size, size + 1]
    assert ours.decode([size, size + 1]) == "<plain>"
    assert (ours.eos_id, ours.vocab_size) == (size, size + 2)
    config["added_tokens_decoder"] = {str(size + 7): config["added_tokens_decoder"][str(size)]}
    save(path, backend, config)
    with pytest.raises(CheckpointError, match=f"'<new>' the id {size + 7}, tokenizer.json leads to {size}"):
        load_tokenizer(path)


def test_a_special_token_that_only_the_vocabulary_has(tmp_path):
    backend = _byte_backend()
    config = {"bos_token": "he", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    path = save(tmp_path, backend, config)
    _same_as_transformers(path)
    ours = load_tokenizer(path)
    assert ours.encode("the")[1:] == [ours.bos_id] == [backend.token_to_id("he")]
    assert ours.decode(ours.encode("the")) == "t"


def test_truncation_and_padding_of_training_are_off(tmp_path):
    backend = _byte_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64, pad_token="<s>", pad_id=0)
    assert len(load_tokenizer(save(tmp_path, backend)).encode("a b c d e f")) == 11


def test_templates(tmp_path):
    path = save(tmp_path, _byte_backend(), {})
    assert load_tokenizer(path).chat_template is None
    save(path, _byte_backend(), {"chat_template": "A"})
    assert load_tokenizer(path).chat_template == "A"
    save(path, _byte_backend(), {"chat_template": [{"name": "default", "template": "A"}, {"name": "rag", "template": "R"}]})
    assert load_tokenizer(path).chat_template == {"default": "A", "rag": "R"}
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert load_tokenizer(path).chat_template == {"default": "J", "rag": "R"}
    (path / "chat_template.jinja").write_text("ü")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    assert load_tokenizer(path).chat_template == {"default": "ü", "rag": "R", "tool_use": "T"}
    save(path, _byte_backend(), {"chat_template": [{"name": "default"}]})
    with pytest.raises(CheckpointError, match="chat_template must be text or a list"):
        load_tokenizer(path)


def test_what_is_missing_or_damaged_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="not a directory"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(UnsupportedError, match=r"tokenizer\.model only"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    path = save(tmp_path, _byte_backend(), special_tokens_map__json="[1]")
    with pytest.raises(CheckpointError, match=r"special_tokens_map\.json must hold a JSON object"):
        load_tokenizer(path)
    (path / "special_tokens_map.json").write_text("{nonsense")
    with pytest.raises(CheckpointError, match=r"special_tokens_map\.json is not valid JSON"):
        load_tokenizer(path)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])])
def test_an_unknown_decoder_is_refused(tmp_path, decoder):
    backend = _byte_backend()
    backend.decoder = decoder
    with pytest.raises(UnsupportedError, match="ByteLevel"):
        load_tokenizer(save(tmp_path, backend))


def lying(tmp_path: Path, **ids: int) -> Path:
    """The byte-level tokenizer with more entries in its vocabulary."""
    folder = save(tmp_path, _byte_backend())
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["vocab"] |= ids
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


def test_ids_with_holes(tmp_path):
    """The number of entries is an id that exists, and still not the largest."""
    folder = lying(tmp_path, zz=262, zzz=9000)
    data = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(data | {"added_tokens": []}))
    ours = load_tokenizer(folder)
    assert (ours.vocab_size, ours.decode([262, 500, 9000]), ours.token_to_id("zzz")) == (9001, "zzzzz", 9000)


@pytest.mark.parametrize("last", [2**30, 2**24, 80_000])
def test_an_absurd_id_costs_no_memory(tmp_path, last):
    with pytest.raises(CheckpointError, match=f"'zzzz' has the id {last}; ids of 267 tokens must be below 69808"):
        load_tokenizer(lying(tmp_path, zzzz=last))


def drop(tmp_path: Path, backend: Tokenizer, piece: str, **model: object) -> Path:
    folder = save(tmp_path, backend)
    data = json.loads((folder / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    vocab["(instead)"] = vocab.pop(piece)
    data["model"] |= {"merges": []} | model
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


def test_a_vocabulary_without_a_bytes_token_is_refused(tmp_path):
    """BPE would drop the byte's text in silence."""
    with pytest.raises(CheckpointError, match="no token for the byte 0x7A \\('z'\\)"):
        load_tokenizer(drop(tmp_path, _byte_backend(), "z"))
    with pytest.raises(CheckpointError, match="no token for the byte 0x20 \\('Ġ'\\)"):
        load_tokenizer(drop(tmp_path, _byte_backend(), "Ġ"))


@pytest.mark.parametrize("piece, dropped", [(chr(0xFF), ()), ("Ą", (4,))])
def test_a_byte_that_texts_hardly_have_may_lack_a_token(tmp_path, piece, dropped):
    """0xFF is in no UTF-8; the control character 0x04 is dropped, and the tokenizer says so."""
    ours = load_tokenizer(drop(tmp_path, _byte_backend(), piece))
    assert ours.dropped == dropped and len(ours.encode("z\x04z")) == 3 - len(dropped)


def test_an_unknown_token_stands_for_missing_bytes(tmp_path):
    ours = load_tokenizer(drop(tmp_path, _byte_backend(), "z", unk_token="(instead)"))
    assert ours.encode("z") == [ours.token_to_id("(instead)")]


def test_sentencepiece_needs_bytes_or_an_unknown_token(tmp_path):
    unknown = {"unk_token": None, "byte_fallback": True}
    with pytest.raises(CheckpointError, match="no token for the byte 0xE4 \\('<0xE4>'\\)"):
        load_tokenizer(drop(tmp_path, _spm_backend("gemma"), "<0xE4>", **unknown))
    with pytest.raises(CheckpointError, match="neither byte_fallback nor an unk_token"):
        load_tokenizer(drop(tmp_path, _spm_backend("gemma"), "<0xE4>", unk_token=None, byte_fallback=False))
    assert load_tokenizer(drop(tmp_path, _spm_backend("gemma"), "<0xE4>")).encode("中") != []  # has an unk_token


FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.json", "chat_template.jinja"]


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_regular_file_is_refused_and_never_waited_for(tmp_path, name):
    folder = save(tmp_path, _byte_backend(), {})
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name} is a named pipe, not a regular file"):
        load_tokenizer(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=f"{name} is a device, not a regular file"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", FILES)
def test_files_that_cannot_be_read_or_are_too_large(tmp_path, name):
    folder = save(tmp_path, _byte_backend(), {})
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/proc/self/mem")  # a regular file that gives an error
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        load_tokenizer(folder)
    (folder / name).unlink()
    with open(folder / name, "wb") as file:
        file.truncate(20 << 30)  # no byte of it is on the disk
    with pytest.raises(CheckpointError, match=f"{name} has more than"):
        load_tokenizer(folder)


def test_without_permission(tmp_path, monkeypatch):
    """Whatever the system says comes out typed (a test that runs as root has every permission, so it is played)."""
    folder = save(tmp_path, _byte_backend(), {})

    def denied(*_args, **_keywords):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("octavo.files.os.open", denied)
    with pytest.raises(CheckpointError, match=r"tokenizer.json cannot be read: .*Permission denied"):
        load_tokenizer(folder)



def test_the_names_that_transformers_has(tmp_path):
    template = "{% for m in messages %}<s>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    ours = load_tokenizer(save(tmp_path, _byte_backend(), {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}))
    assert (ours.bos_token_id, ours.eos_token_id) == (ours.token_to_id("<s>"), ours.token_to_id("</s>"))
    talk = [{"role": "user", "content": "the"}]
    assert ours.apply_chat_template(talk, tokenize=False) == "<s>the"
    assert ours.apply_chat_template(talk, add_generation_prompt=True) == ours.encode("<s>the>")
    assert ours("the") == {"input_ids": ours.encode("the"), "attention_mask": [1] * len(ours.encode("the"))}
    assert ours(["the", "t"])["input_ids"] == [ours.encode("the"), ours.encode("t")]
