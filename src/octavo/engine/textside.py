"""The text side of an engine: tokenizer, chat template, end tokens, sampling defaults. The server's process holds it, the engine's never."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.config import Config
from octavo.core.sampling import SamplingParams
from octavo.errors import CheckpointError, ConfigError, InvalidRequest, UnsupportedError, shown
from octavo.files import is_there
from octavo.models.spec import ModelSpec
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import load_tokenizer
from octavo.weights import hub
from octavo.weights.checkpoint import open_checkpoint

SAMPLING_DEFAULTS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")  # vLLM's choice of keys
# Normalizers by class: how many times fewer bytes they can make of a text. Others may drop any number of spaces, say.
# NFC: three bytes each of up to three Hangul jamo become one syllable of three; Prepend and Replace serve SentencePiece's spaces.
SHRINKS = {"NoneType": 1, "NFC": 3}
MAX_TEMPLATE = 1 << 24  # bytes
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True, slots=True)
class TextSide:
    """What turns text into tokens and back."""

    tokenizer: Any | None  # None: the checkpoint has none
    end_ids: tuple[int, ...]  # the tokens that end an answer, the model's and the tokenizer's
    defaults: SamplingParams  # the model's own sampling parameters
    template: ChatTemplate | None  # None: without a tokenizer

    def notes(self, vocab: int) -> list[str]:
        """What a start should tell people. ``vocab``: rows of the model's embedding."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return ["no tokenizer came with the model: prompts must be token ids, and outputs have no text"]
        found = []
        if beyond := [token for token in range(vocab, tokenizer.vocab_size) if tokenizer.id_to_token(token) is not None]:
            found.append(
                f"the tokenizer has {len(beyond)} tokens beyond the model's {vocab}, the first is {shown(tokenizer.id_to_token(beyond[0]))} "
                f"({beyond[0]}): prompts that hold one are refused"
            )
        if tokenizer.dropped:
            names = bytes(tokenizer.dropped).hex(" ")
            found.append(f"the vocabulary has no token for the bytes {names} (control characters and the like): texts lose them")
        return found

    def longest_token(self) -> float:
        """The most bytes of a text that one token takes in; infinity where no number can be told. Cost: one pass over the vocabulary."""
        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "_backend", None)
        if tokenizer is None or backend is None:
            return math.inf
        shrink = SHRINKS.get(type(backend.normalizer).__name__)
        if shrink is None:
            return math.inf
        return shrink * max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))


def load_text(config: Config, path: Path, checkpoint: Any, spec: ModelSpec) -> TextSide:
    """Tokenizer, end tokens and sampling defaults. Raises: CheckpointError, UnsupportedError, ConfigError."""
    given = config.model.tokenizer
    if given is not None:
        path = _tokenizer_path(given, config.model.revision)
        checkpoint = None if os.path.isdir(path) else open_checkpoint(path)
    metadata = None if os.path.isdir(path) else getattr(checkpoint, "metadata", None)
    has_one = "tokenizer.ggml.model" in metadata if metadata is not None else any(is_there(path / name) for name in TOKENIZER_FILES)
    tokenizer = load_tokenizer(path, metadata) if has_one or given is not None else None
    ends = (*spec.eos_ids, *(() if tokenizer is None else tokenizer.end_ids))
    generation = getattr(checkpoint, "generation_config", None) if config.model.generation_config else None
    override = None if config.model.chat_template is None else read_template(config.model.chat_template)
    template = None if tokenizer is None else ChatTemplate.of(tokenizer, override)
    if override is not None:
        _check_template(override)
    return TextSide(tokenizer, tuple(dict.fromkeys(token for token in ends if token < spec.vocab)), sampling_defaults(generation), template)


def _tokenizer_path(given: str, revision: str | None) -> Path:
    """Where the setting tokenizer leads: also to a directory that holds a tokenizer and no model."""
    directory = Path(given)
    if os.path.isdir(directory) and is_there(directory / "tokenizer.json"):
        return directory
    return hub.resolve(given, revision if "/" in given and not os.path.exists(given) else None, setting="tokenizer")


def read_template(given: str) -> str:
    """The setting chat_template: a file's path, or the template itself. Raises: ConfigError."""
    try:
        if "{" in given:
            return given
        with open(given, "rb") as file:  # a pipe may be meant: <(echo …)
            data = file.read(MAX_TEMPLATE + 1)
        if len(data) > MAX_TEMPLATE:
            raise ConfigError(f"chat_template: {shown(given)} has more than {MAX_TEMPLATE} bytes", "chat_template")
        return data.decode()
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"chat_template is neither a template nor a file that can be read: {error}", "chat_template") from None


def _check_template(source: str) -> None:
    """Notice a broken template at the start, not at the first chat. Raises: ConfigError."""
    try:
        ChatTemplate(source).compile()
    except UnsupportedError as error:
        raise ConfigError(f"chat_template: {error.message}", "chat_template") from error


def sampling_defaults(generation: dict[str, Any] | None) -> SamplingParams:
    """The sampling parameters that generation_config.json asks for. Raises: CheckpointError for impossible ones."""
    found = {name: generation[name] for name in SAMPLING_DEFAULTS if generation and generation.get(name) is not None}
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    try:
        return SamplingParams(**found)
    except InvalidRequest as error:
        raise CheckpointError(f"generation_config.json: {error.message}", error.param) from error


def read_text(config: Config, path: Path) -> tuple[TextSide, int]:
    """The text side of the model at ``path``, and the size of its vocabulary, without its weights.

    Raises: CheckpointError, UnsupportedError, ConfigError.
    """
    from octavo.models import registry

    with open_checkpoint(path) as checkpoint:
        spec = registry.read_spec(checkpoint)
        return load_text(config, path, checkpoint, spec), spec.vocab
