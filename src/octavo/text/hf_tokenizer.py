"""The tokenizer of a directory in Hugging Face layout.

    tokenizer.json              vocabulary, merges, rules                      needed
    tokenizer_config.json       bos, eos, added tokens, chat template          optional
    special_tokens_map.json     bos, eos, where the config has none            optional
    chat_template.jinja         the template; wins over the two other places   optional
    additional_chat_templates/  NAME.jinja: more of them                       optional
    chat_template.json          {"chat_template": …}                           optional
"""

import json
import os
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import CheckpointError, UnsupportedError, shown
from octavo.files import is_there, read_small
from octavo.text.tokenizer import SPACE_MARK, Pieces, Tokenizer, check_coverage

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

MAX_TOKENIZER = 1 << 28  # bytes of tokenizer.json; the largest real ones have 35 MB
MAX_TEXT = 1 << 25  # bytes of any other file here
MOST_IDS = 1 << 24  # ids are below this, and below a multiple of the number of entries: memory is taken for each
HOLES, SPARE = 16, 1 << 16  # ids per entry, and ids that even the smallest vocabulary may have

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def from_directory(path: Path) -> Tokenizer:
    """Read a tokenizer as transformers' fast tokenizers would: same ids, same special tokens, same template.

    Raises: CheckpointError naming the file that is missing or damaged; UnsupportedError for a vocabulary that is
    neither byte-level nor SentencePiece-like.
    """
    path = Path(path)
    backend = _backend(path)
    config = _json(path / "tokenizer_config.json")
    special_map = _json(path / "special_tokens_map.json")
    named = {role: text for role in _ROLES if (text := _content(config.get(role)) or _content(special_map.get(role)))}
    _add_missing(backend, config, named, path)
    added = backend.get_added_tokens_decoder()
    special_ids = {i for i, token in added.items() if token.special}
    special_ids.update(i for text in named.values() if (i := backend.token_to_id(text)) is not None and i in added)
    size = _size(backend, path)
    pieces, strips = _decoding(backend, path)
    dropped = check_coverage(backend, pieces, str(path / "tokenizer.json"))
    bos, eos = (backend.token_to_id(named[r]) if r in named else None for r in ("bos_token", "eos_token"))
    prefix, suffix = _around(backend)
    return Tokenizer(
        backend,
        pieces=pieces,
        vocab_size=size,
        added={i: token.content for i, token in added.items()},
        special_ids=special_ids,
        prefix=prefix,
        suffix=suffix,
        bos_id=bos,
        eos_id=eos,
        strip_first_space=strips,
        special_tokens=named,
        chat_template=_template(path, config),
        dropped=dropped,
    )


def _backend(path: Path) -> "Backend":
    from tokenizers import Tokenizer as Backend

    file = path / "tokenizer.json"
    try:
        data = read_small(file, MAX_TOKENIZER)
    except FileNotFoundError:
        if not os.path.isdir(path):
            raise CheckpointError(f"{path} is not a directory") from None
        if is_there(path / "tokenizer.model"):
            raise UnsupportedError(
                f"{path} has a tokenizer.model only; a tokenizer.json is needed (transformers writes one: save_pretrained)"
            ) from None
        raise CheckpointError(f"{path} has no tokenizer.json") from None
    try:
        backend = Backend.from_buffer(data)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file} cannot be read as a tokenizer: {error}") from error
    backend.no_truncation()  # a file may carry settings of its training
    backend.no_padding()
    return backend


def _json(file: Path) -> dict[str, Any]:
    text = _text(file)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(value).__name__}")
    return value


def _text(file: Path) -> str | None:
    """A text file, or None where there is none."""
    try:
        return read_small(file, MAX_TEXT).decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not UTF-8 text: {error}") from error


def _content(token: object) -> str | None:
    """A token is written as text or as {"content": text, …}."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _add_missing(backend: "Backend", config: dict[str, Any], named: dict[str, str], path: Path) -> None:
    """Tokens that only tokenizer_config.json knows, in the order of their ids; then special tokens without an id."""
    from tokenizers import AddedToken

    known = backend.get_added_tokens_decoder()
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise CheckpointError(f"{path / 'tokenizer_config.json'}: added_tokens_decoder must be an object")
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        wanted = sorted((int(key), value) for key, value in listed.items())
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path / 'tokenizer_config.json'}: added_tokens_decoder has a key that is no token id: {error}") from error
    for token_id, entry in wanted:
        content = _content(entry)
        if content is None:
            raise CheckpointError(f"{path / 'tokenizer_config.json'}: added token {token_id} has no content")
        token = AddedToken(content, **{flag: bool(entry[flag]) for flag in flags if isinstance(entry, dict) and flag in entry})
        if token_id in known and repr(known[token_id]) == repr(token):
            continue
        backend.add_tokens([token])
        got = backend.token_to_id(content)
        if got != token_id:
            raise CheckpointError(f"{path}: tokenizer_config.json gives {content!r} the id {token_id}, tokenizer.json leads to {got}")
    found = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens([text for text in named.values() if text not in found])  # those of the vocabulary keep their ids


def _decoding(backend: "Backend", path: Path) -> tuple[Pieces, bool]:
    """How the pieces spell bytes, and whether decoding drops the first space: read off the decoder's description."""
    if backend.decoder is None:
        raise UnsupportedError(f"{path / 'tokenizer.json'} has no decoder; known are ByteLevel and SentencePiece's (Replace ▁, Metaspace)")
    described = json.loads(backend.decoder.__getstate__())
    parts = described["decoders"] if described["type"] == "Sequence" else [described]
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return Pieces.BYTE_LEVEL, False
    strips = False
    for part in parts:
        if part["type"] == "Metaspace" and part.get("replacement") == SPACE_MARK:
            strips = strips or part.get("prepend_scheme", "always") != "never"
        elif part["type"] == "Replace" and part.get("pattern") == {"String": SPACE_MARK} and part.get("content") == " ":
            pass
        elif part["type"] == "Strip" and part.get("content") == " " and part.get("start") in (0, 1) and part.get("stop") == 0:
            strips = strips or part["start"] == 1
        elif part["type"] not in ("ByteFallback", "Fuse"):
            kinds = []
    if not {"Metaspace", "Replace"} & set(kinds):
        raise UnsupportedError(
            f"{path / 'tokenizer.json'}: a decoder of {[p['type'] for p in parts]} is not known here; "
            "known are ByteLevel and SentencePiece's (Replace ▁ or Metaspace, ByteFallback, Fuse, Strip of one first space)"
        )
    return Pieces.SENTENCEPIECE, strips


def _around(backend: "Backend") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What goes before and after a text, by tokenizer.json's post-processor.

    tokenizer_config.json's add_bos_token and add_eos_token are for files without one; transformers 5 ignores them too.
    """
    try:
        inner = backend.encode("a", add_special_tokens=False).ids
        outer = backend.encode("a", add_special_tokens=True).ids
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"tokenizer.json cannot tokenize 'a': {error}") from error
    for at in range(len(outer) - len(inner) + 1):
        if outer[at : at + len(inner)] == inner:
            return tuple(outer[:at]), tuple(outer[at + len(inner) :])
    raise UnsupportedError("tokenizer.json has a post-processor that changes the text's own tokens")


def _size(backend: "Backend", path: Path) -> int:
    """One more than the largest id. Raises: CheckpointError for an id that no vocabulary of so many entries has."""
    vocab = backend.get_vocab(with_added_tokens=True)
    if not vocab:
        return 0
    text, last = max(vocab.items(), key=itemgetter(1))
    limit = min(MOST_IDS, HOLES * len(vocab) + SPARE)
    if last >= limit:
        raise CheckpointError(f"{path}: the token {shown(text)} has the id {last}; ids of {len(vocab)} tokens must be below {limit}")
    return last + 1


def _template(path: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """The chat template, or several by name."""
    found: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        found["default"] = inline
    elif isinstance(inline, list):
        for entry in inline:
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not isinstance(entry.get("template"), str):
                raise CheckpointError(f"{path / 'tokenizer_config.json'}: chat_template must be text or a list of {{name, template}}")
            found[entry["name"]] = entry["template"]
    elif inline is not None:
        raise CheckpointError(f"{path / 'tokenizer_config.json'}: chat_template must be text or a list, not {type(inline).__name__}")
    separate = _json(path / "chat_template.json").get("chat_template")
    if isinstance(separate, str):
        found["default"] = separate
    if (text := _text(path / "chat_template.jinja")) is not None:
        found["default"] = text
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        if (text := _text(file)) is not None:
            found[file.stem] = text
    if not found:
        return None
    return found["default"] if list(found) == ["default"] else found
