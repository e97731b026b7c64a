"""The tokenizer inside a GGUF file's metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

Building takes 0.1 s for 49 k tokens and 0.4 s for 152 k, less than reading the same back as tokenizer.json would
(0.12 s and 0.64 s), so nothing is cached.
"""

import logging
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from octavo.errors import CheckpointError, UnsupportedError
from octavo.text.pretokenizers import pre_tokenizer
from octavo.text.tokenizer import SPACE_MARK, Pieces, Tokenizer, check_coverage

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_log = logging.getLogger(__name__)
_KEY = "tokenizer.ggml."

# Texts of tokens that end a turn or an answer. Files name one eos_token_id; chat models stop at these as well.
_END_TEXTS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "<|end_of_text|>", "</s>"}
    | {"<|return|>", "<|call|>", "<｜end▁of▁sentence｜>"}
)


class Kind(IntEnum):
    """tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that a GGUF file's keys describe.

    Raises: CheckpointError for keys that are missing, of a wrong type or contradict each other; UnsupportedError for
    another tokenizer model or an unknown pre-tokenizer.
    """
    model = _get(metadata, "model", str)
    if model not in ("gpt2", "llama"):
        raise UnsupportedError(f"tokenizer.ggml.model is {model!r}; known are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)", _KEY + "model")
    tokens = _texts(metadata, "tokens")
    if not tokens:
        raise CheckpointError("tokenizer.ggml.tokens is empty")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(i for i, token in enumerate(tokens) if vocab[token] != i)
        raise CheckpointError(f"tokenizer.ggml.tokens has {tokens[twice]!r} twice, as ids {twice} and {vocab[tokens[twice]]}")
    kinds = _numbers(metadata, "token_type", len(tokens)) or [Kind.NORMAL] * len(tokens)
    if model == "gpt2":
        backend, add_bos, strips = _byte_level(metadata, vocab)
    else:
        backend, add_bos, strips = _sentencepiece(metadata, tokens, vocab, kinds)
    pieces = Pieces.BYTE_LEVEL if model == "gpt2" else Pieces.SENTENCEPIECE
    dropped = check_coverage(backend, pieces, "tokenizer.ggml.tokens")
    special = [i for i, kind in enumerate(kinds) if kind in (Kind.CONTROL, Kind.UNKNOWN)]
    defined = [i for i, kind in enumerate(kinds) if kind == Kind.USER_DEFINED]
    _add(backend, tokens, special, defined)
    fallback = {"bos": 1, "eos": 2} if model == "llama" else {}
    ids = {role: _token_id(metadata, f"{key}_token_id", len(tokens), fallback.get(role)) for role, key in _ROLE_KEYS.items()}
    bos, eos = ids["bos"], ids["eos"]
    ends = [i for role in ("eot", "eom") if (i := ids[role]) is not None]
    ends += [i for i in special if tokens[i] in _END_TEXTS]
    return Tokenizer(
        backend,
        pieces=pieces,
        vocab_size=len(tokens),
        added={i: tokens[i] for i in special + defined},
        special_ids=special,
        prefix=_wanted(metadata, "bos", add_bos, bos),
        suffix=_wanted(metadata, "eos", False, eos),
        bos_id=bos,
        eos_id=eos,
        end_ids=ends,
        strip_first_space=strips,
        special_tokens={f"{role}_token": tokens[i] for role in ("bos", "eos", "unk", "pad") if (i := ids[role]) is not None},
        chat_template=_templates(metadata),
        dropped=dropped,
    )


_ROLE_KEYS = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int]) -> tuple["Backend", bool, bool]:
    """→ backend, whether a BOS is added by default, whether decoding drops a first space."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    name = _get(metadata, "pre", str, "")
    if not name:
        _log.warning("tokenizer.ggml.pre is missing (a file from before May 2024): 'default' is used, words may be cut as the model never saw them")
    family = pre_tokenizer(name or "default")
    merges = []
    for i, merge in enumerate(_texts(metadata, "merges")):
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise CheckpointError(f"tokenizer.ggml.merges[{i}] is {merge!r}; two tokens with one space between are expected")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise CheckpointError(f"tokenizer.ggml.merges[{i}] is {merge!r}, which joins or makes tokens that tokenizer.ggml.tokens does not have")
        merges.append((left, right))
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=family.ignore_merges))
    family.apply(backend)
    return backend, family.add_bos, False


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], vocab: dict[str, int], kinds: Sequence[int]
) -> tuple["Backend", bool, bool]:
    """→ backend, whether a BOS is added by default, whether decoding drops a first space."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers

    scores = _numbers(metadata, "scores", len(tokens))
    if scores is None:
        raise CheckpointError("tokenizer.ggml.scores is missing: a SentencePiece vocabulary cannot be merged without it")
    unknown = _token_id(metadata, "unknown_token_id", len(tokens), 0)
    prefix = _get(metadata, "add_space_prefix", bool, True)
    backend = Backend(
        models.BPE(
            vocab=vocab,
            merges=merges_from_scores(tokens, scores, kinds),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    mark = normalizers.Replace(" ", SPACE_MARK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark]) if prefix else mark
    return backend, True, prefix


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Ranked merges that join what SentencePiece joins: it has no merges and takes the neighbours whose union scores best.

    Every cut of a token into two tokens is a merge, ranked by the token's score; equal scores (a trained vocabulary has
    none) go by id. Only normal tokens take part. The order among the cuts of one token makes no difference: where two
    of them overlap in a text, better unions have used up the pieces before (the tests compare with brute force).
    Source: Kudo & Richardson 2018; Sennrich et al. 2016.
    """
    normal = [i for i, kind in enumerate(kinds) if kind == Kind.NORMAL]
    known = {tokens[i] for i in normal}
    merges: list[tuple[str, str]] = []
    for i in sorted(normal, key=lambda i: (-scores[i], i)):
        piece = tokens[i]
        merges += [(piece[:at], piece[at:]) for at in range(1, len(piece)) if piece[:at] in known and piece[at:] in known]
    return merges


def _add(backend: "Backend", tokens: list[str], special: list[int], defined: list[int]) -> None:
    """Tokens that are found in the text before anything else. All have an id already."""
    from tokenizers import AddedToken

    backend.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in special])
    backend.add_tokens([AddedToken(tokens[i], special=False, normalized=False) for i in defined])


def _wanted(metadata: Mapping[str, Any], role: str, default: bool, token: int | None) -> tuple[int, ...]:
    """The token that goes around a text, if the file (or the tokenizer's type) wants one."""
    explicit = _get(metadata, f"add_{role}_token", bool, None)
    if not (default if explicit is None else explicit):
        return ()
    if token is None:
        raise CheckpointError(f"the tokenizer adds a {role.upper()} token, but tokenizer.ggml.{role}_token_id is missing")
    return (token,)


def _templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    plain = metadata.get("tokenizer.chat_template")
    named = {key.removeprefix("tokenizer.chat_template."): metadata[key] for key in metadata if key.startswith("tokenizer.chat_template.")}
    for text in [plain, *named.values()]:
        if text is not None and not isinstance(text, str):
            raise CheckpointError(f"tokenizer.chat_template must be text, not {type(text).__name__}")
    if not named:
        return plain
    return named if plain is None else {"default": plain, **named}


def _get(metadata: Mapping[str, Any], key: str, kind: type, *default: Any) -> Any:
    value = metadata.get(_KEY + key)
    if value is None:
        if default:
            return default[0]
        raise CheckpointError(f"{_KEY}{key} is missing: the file has no tokenizer")
    if not isinstance(value, kind):
        raise CheckpointError(f"{_KEY}{key} must be {kind.__name__}, not {type(value).__name__}")
    return value


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(_KEY + key)
    if value is None:
        raise CheckpointError(f"{_KEY}{key} is missing")
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise CheckpointError(f"{_KEY}{key} must be an array of texts")
    return value


def _numbers(metadata: Mapping[str, Any], key: str, size: int) -> list[Any] | None:
    value = metadata.get(_KEY + key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(number, int | float) for number in value):
        raise CheckpointError(f"{_KEY}{key} must be an array of numbers")
    if len(value) != size:
        raise CheckpointError(f"{_KEY}{key} has {len(value)} entries for {size} tokens")
    return value


def _token_id(metadata: Mapping[str, Any], key: str, size: int, fallback: int | None) -> int | None:
    """An id that the file names; the tokenizer type's own one, where the file says nothing and the vocabulary has it."""
    value: int | None = _get(metadata, key, int, None)
    if value is None:
        return fallback if fallback is not None and fallback < size else None
    if not 0 <= value < size:
        raise CheckpointError(f"{_KEY}{key} is {value}, and there are {size} tokens")
    return value
