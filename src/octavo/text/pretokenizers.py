"""How byte-level vocabularies cut text into words before merging: ``tokenizer.ggml.pre`` by name.

GGUF names the rule and leaves its meaning to the reader. Each family below is what the original models' tokenizer.json
says, built from parts of the ``tokenizers`` library.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.errors import UnsupportedError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """One family: the cuts, in order (each one cuts what the earlier ones left), and what else comes with the name."""

    cuts: tuple[str, ...]
    nfc: bool = False  # compose characters first
    ignore_merges: bool = False  # a word that is a token is taken whole
    add_bos: bool = False  # unless the file says otherwise

    def apply(self, backend: "Backend") -> None:
        """Give a backend this family's normalizer and cuts."""
        from tokenizers import Regex, normalizers, pre_tokenizers

        parts: list[Any] = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in self.cuts]
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
        if self.nfc:
            backend.normalizer = normalizers.NFC()


_FAMILIES: list[tuple[PreTokenizer, tuple[str, ...]]] = [
    (PreTokenizer((_GPT2,)), ("gpt-2",)),
    (PreTokenizer((r"\p{N}", _GPT2)), ("smollm", "starcoder", "refact", "minerva-7b")),
    (PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True), ("llama-bpe", "llama3", "llama-v3", "falcon3")),
    (PreTokenizer((_LLAMA3,)), ("dbrx", "smaug-bpe")),
    (PreTokenizer((_QWEN2,), nfc=True), ("qwen2",)),
    (PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True), ("tekken",)),
    (PreTokenizer((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3)), ("deepseek-v3",)),
    (PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")), ("deepseek-coder",)),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")), ("default",)),
]
PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: family for family, names in _FAMILIES for name in names}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The family of a ``tokenizer.ggml.pre`` value.

    Raises: UnsupportedError for an unknown name: guessing would give other tokens than the model was trained on.
    """
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedError(f"tokenizer.ggml.pre is {name!r}, a pre-tokenizer that is not known here. Known: {known}", "tokenizer.ggml.pre")
    return found
