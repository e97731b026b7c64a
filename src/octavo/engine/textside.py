"""The text side of an engine: tokenizer, chat template, end tokens, sampling defaults. The server's process holds it, the engine's never."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.config import Config
from octavo.core.sampling import SamplingParams
from octavo.errors import CheckpointError, ConfigError, InvalidRequest
from octavo.models.spec import ModelSpec
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import load_tokenizer
from octavo.weights import hub
from octavo.weights.checkpoint import open_checkpoint

SAMPLING_DEFAULTS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")  # vLLM's choice of keys
# Normalizers by class: how many times fewer bytes they can make of a text. Others may drop any number of spaces, say.
# NFC: three bytes each of up to three Hangul jamo become one syllable of three; Prepend and Replace serve SentencePiece's spaces.
SHRINKS = {"NoneType": 1, "NFC": 3}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True, slots=True)
class TextSide:
    """What turns text into tokens and back."""

    tokenizer: Any | None  # None: the checkpoint has none
    end_ids: tuple[int, ...]  # the tokens that end an answer, the model's and the tokenizer's
    defaults: SamplingParams  # the model's own sampling parameters
    template: ChatTemplate | None  # None: without a tokenizer

    def longest_token(self) -> int | None:
        """The most bytes of a text that one token takes in; None where no number can be told. Cost: one pass over the vocabulary."""
        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "_backend", None)
        if tokenizer is None or backend is None:
            return None
        shrink = SHRINKS.get(type(backend.normalizer).__name__)
        return shrink and shrink * max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))


def load_text(config: Config, path: Path, checkpoint: Any, spec: ModelSpec) -> TextSide:
    """Tokenizer, end tokens and sampling defaults. Raises: CheckpointError, UnsupportedError."""
    if config.model.tokenizer is not None:
        path = hub.resolve(config.model.tokenizer, config.model.revision if "/" in config.model.tokenizer else None)
        checkpoint = open_checkpoint(path) if path.is_file() else None
    metadata = getattr(checkpoint, "metadata", None) if path.is_file() else None
    has_one = "tokenizer.ggml.model" in metadata if metadata is not None else any((path / name).exists() for name in TOKENIZER_FILES)
    tokenizer = load_tokenizer(path, metadata) if has_one or config.model.tokenizer is not None else None
    ends = (*spec.eos_ids, *(() if tokenizer is None else tokenizer.end_ids))
    generation = getattr(checkpoint, "generation_config", None) if config.model.generation_config else None
    override = None if config.model.chat_template is None else read_template(config.model.chat_template)
    template = None if tokenizer is None else ChatTemplate.of(tokenizer, override)
    return TextSide(tokenizer, tuple(dict.fromkeys(token for token in ends if token < spec.vocab)), sampling_defaults(generation), template)


def read_template(given: str) -> str:
    """The setting chat_template: a file's path, or the template itself. Raises: ConfigError."""
    try:
        if "{" not in given:
            return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template is neither a template nor a file that can be read: {error}", "chat_template") from None
    return given


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
