"""Tokenizer: text to token ids and back, the same for offline use and the server.

Ids come from the ``tokenizers`` library (hf_tokenizer.py and gguf_tokenizer.py build its object). The way back is our
own and goes by bytes: a token is a byte string, a text is the UTF-8 decoding of its tokens' bytes, one after another.
So a streamed text (engine/detokenize.py) and a text decoded at once are the same by construction.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import CheckpointError, InvalidRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

LONG_TEXT = 4096  # characters: about 5 ms of tokenizing
SPACE_MARK = "▁"  # SentencePiece's visible space (U+2581)


class Pieces(Enum):
    """How a vocabulary spells bytes."""

    BYTE_LEVEL = "byte-level"  # GPT-2's: each of 256 printable characters stands for a byte
    SENTENCEPIECE = "sentencepiece"  # text with ▁ for a space, and <0xE4> for bytes that no piece covers


def _byte_of_char() -> dict[int, int]:
    """GPT-2's alphabet: printable Latin-1 characters are themselves, the other 68 bytes follow from U+0100 on.

    Source: Radford et al. 2019 (the released encoder).
    """
    same = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(same)]
    return {b: b for b in same} | {0x100 + i: b for i, b in enumerate(rest)}


_BYTE_OF_CHAR = _byte_of_char()
_BYTE_PIECES = {f"<0x{b:02X}>": bytes([b]) for b in range(256)}


class Tokenizer:
    """A vocabulary with its rules. Immutable and safe to share between threads.

    ``bos_id`` and ``eos_id`` are None where the model has none; ``end_ids`` are all tokens that end an answer as far
    as the tokenizer knows (the model's generation config may name more). ``special_ids`` are the control tokens, which
    ``decode`` leaves out on request. ``special_tokens`` maps "bos_token", "eos_token" … to text, for chat templates.
    ``chat_template`` is a template, several named ones, or None.
    """

    def __init__(
        self,
        backend: "Backend",
        *,
        pieces: Pieces,
        vocab_size: int,
        added: Mapping[int, str],
        special_ids: Iterable[int],
        prefix: tuple[int, ...] = (),
        suffix: tuple[int, ...] = (),
        bos_id: int | None = None,
        eos_id: int | None = None,
        end_ids: Iterable[int] = (),
        strip_first_space: bool = False,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | dict[str, str] | None = None,
        dropped: tuple[int, ...] = (),
    ) -> None:
        """``added`` tokens are spelled as they are, never in the vocabulary's byte spelling.

        ``prefix`` and ``suffix`` are what ``add_special_tokens`` adds. ``strip_first_space``: SentencePiece put a
        space before the text, which decoding takes away again. ``dropped``: bytes that have no token, so that text loses them.
        """
        self._backend = backend
        self._literal: Backend | None = None
        self._pieces = pieces
        self._added = dict(added)
        self._bytes: list[bytes | None] = [None] * vocab_size
        self.vocab_size = vocab_size
        self.special_ids = frozenset(special_ids)
        self.prefix = prefix
        self.suffix = suffix
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.end_ids = tuple(dict.fromkeys(([] if eos_id is None else [eos_id]) + list(end_ids)))
        self.strip_first_space = strip_first_space
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.dropped = dropped

    # text → ids

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of ``text``.

        ``add_special_tokens`` adds what the model expects around a text (a BOS, mostly), but never a second time: a
        text that begins with its BOS is left as it is. Text rendered by a chat template is complete: pass False.
        ``parse_special`` False reads "<|im_start|>" and the like as plain text (for text from strangers).

        Raises: InvalidRequest when the text holds lone surrogates, which no encoding has.
        """
        try:
            encoding = _encode(self._backend if parse_special else self._plain(), text)
        except (UnicodeEncodeError, TypeError):
            raise _not_text(text) from None
        except Exception as error:  # the library raises bare Exception, say for a character that a vocabulary without an unk_token lacks
            raise InvalidRequest(f"the text cannot be tokenized: {error}", "prompt") from error
        ids: list[int] = encoding.ids
        if add_special_tokens:
            if self.prefix and tuple(ids[: len(self.prefix)]) != self.prefix:
                ids = [*self.prefix, *ids]
            if self.suffix and tuple(ids[-len(self.suffix) :]) != self.suffix:
                ids = [*ids, *self.suffix]
        return ids

    def _plain(self) -> "Backend":
        """A second backend that does not know special tokens; made when first asked for (the flag is a state of it)."""
        if self._literal is None:
            copy = type(self._backend).from_str(self._backend.to_str())
            copy.encode_special_tokens = True
            self._literal = copy
        return self._literal

    # as transformers' tokenizers are called

    def __call__(self, text: str | list[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """Ids of a text, or of several: {"input_ids": …, "attention_mask": …}. Raises: as encode()."""
        if isinstance(text, list):
            every = [self.encode(each, add_special_tokens) for each in text]
            return {"input_ids": every, "attention_mask": [[1] * len(ids) for ids in every]}
        ids = self.encode(text, add_special_tokens)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    @property
    def bos_token_id(self) -> int | None:
        """``bos_id``."""
        return self.bos_id

    @property
    def eos_token_id(self) -> int | None:
        """``eos_id``."""
        return self.eos_id

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], chat_template: str | None = None, *, tokenize: bool = True, **options: Any
    ) -> str | list[int]:
        """A conversation as the model was trained on it: its text or, with ``tokenize``, its ids.

        ``options`` are ChatTemplate.render's; as in transformers, the model's turn is not begun by default. Raises: as that.
        """
        from octavo.text.chat_template import ChatTemplate

        text = ChatTemplate.of(self, chat_template).render(conversation, **({"add_generation_prompt": False} | options))
        return self.encode(text, add_special_tokens=False) if tokenize else text

    # ids → text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; none for the padding rows that a model may have beyond its vocabulary.

        Raises: InvalidRequest for a negative id.
        """
        if token >= self.vocab_size:
            return b""
        if token < 0:
            raise InvalidRequest(f"token ids are not negative, and this one is {token}", "token_ids")
        found = self._bytes[token]
        if found is None:
            found = self._bytes[token] = self._spell(token)
        return found

    def _spell(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None:
            return added.encode("utf-8", "replace")
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""  # a hole in the vocabulary
        if self._pieces is Pieces.SENTENCEPIECE:
            return _BYTE_PIECES.get(piece) or piece.replace(SPACE_MARK, " ").encode("utf-8", "replace")
        try:
            return bytes([_BYTE_OF_CHAR[ord(c)] for c in piece])
        except KeyError:  # not in the byte alphabet: padding entries and the like are spelled as they are
            return piece.encode("utf-8", "replace")

    def id_to_token(self, token: int) -> str | None:
        """The vocabulary's own spelling of a token; None when it has no such id."""
        if not 0 <= token < self.vocab_size:
            return None
        piece: str | None = self._backend.id_to_token(token)
        return piece

    def token_to_id(self, piece: str) -> int | None:
        """The id of a piece in the vocabulary's own spelling."""
        found: int | None = self._backend.token_to_id(piece)
        return found

    def token_text(self, token: int) -> str:
        """One token as text (logprobs' ``decoded_token``): special tokens spelled out, parts of a character as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def visible_bytes(self, ids: Iterable[int], skip_special_tokens: bool) -> bytes:
        """The bytes of a sequence of tokens."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        return b"".join([self.token_bytes(i) for i in ids if i not in skip])

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids`` as a whole sequence; bytes that are not UTF-8 become U+FFFD, nothing else is touched."""
        data = self.visible_bytes(ids, skip_special_tokens)
        if self.strip_first_space and data[:1] == b" ":
            data = data[1:]
        return data.decode("utf-8", "replace")


def _encode(backend: "Backend", text: str) -> Any:
    """One text's encoding. The library holds the interpreter's lock all through ``encode`` and not in a batch: a long text
    (a microsecond or two a character) would stop every other thread, and with it a server's event loop."""
    if isinstance(text, str) and len(text) > LONG_TEXT:
        return backend.encode_batch_fast([text], add_special_tokens=False)[0]
    return backend.encode(text, add_special_tokens=False)


# UTF-8 never has these bytes.
_NEVER = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])
# Control characters, and the first bytes of planes without an assigned character: SmolLM2's vocabulary, for one, lacks some.
_RARE = frozenset([*range(0x20), 0x7F, 0xF1, 0xF2, 0xF4]).difference(b"\t\n\r")


def check_coverage(backend: "Backend", pieces: Pieces, where: str) -> tuple[int, ...]:
    """Whether texts have tokens: BPE drops in silence what its vocabulary lacks, unless it has an unknown token.

    Returns the bytes that it drops, which are control characters and the like (Tokenizer.dropped).
    Raises: CheckpointError naming another byte, or the rule, that is missing.
    """
    model = backend.model
    if type(model).__name__ != "BPE":
        return ()  # the others fail on what they do not know
    unknown = model.unk_token
    if unknown is not None and model.token_to_id(unknown) is not None:
        return ()
    if pieces is Pieces.BYTE_LEVEL:
        spelling = {b: chr(c) for c, b in _BYTE_OF_CHAR.items()}
    elif model.byte_fallback:
        spelling = {b: text for text, (b,) in _BYTE_PIECES.items()}
    else:
        raise CheckpointError(f"{where}: characters that no token covers would be dropped: it has neither byte_fallback nor an unk_token")
    missing = sorted(b for b, text in spelling.items() if b not in _NEVER and model.token_to_id(text) is None)
    for byte in missing:
        if byte not in _RARE:
            raise CheckpointError(f"{where}: there is no token for the byte 0x{byte:02X} ({spelling[byte]!r}): texts would lose it in silence")
    return tuple(missing)


def load_tokenizer(path: str | Path, metadata: Mapping[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of a model directory (Hugging Face layout), or of a GGUF file, whose ``metadata`` the caller has read.

    Raises: CheckpointError when something is missing or contradicts itself, UnsupportedError for unknown kinds.
    """
    from octavo.text.gguf_tokenizer import from_gguf
    from octavo.text.hf_tokenizer import from_directory

    if metadata is not None:
        return from_gguf(metadata)
    path = Path(path)
    if not os.path.isdir(path):
        raise CheckpointError(f"{path} is not a directory with a tokenizer.json (a GGUF file's tokenizer is in its metadata)")
    return from_directory(path)


def _not_text(text: object) -> InvalidRequest:
    if not isinstance(text, str):
        return InvalidRequest(f"a text is expected, not {type(text).__name__}", "prompt")
    where = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), -1)
    return InvalidRequest(f"the text is not valid Unicode: character {where} is a lone surrogate (U+{ord(text[where]):04X})", "prompt")
