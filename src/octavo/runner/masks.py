"""Which tokens a request may choose next, as bits: allowed_token_ids, min_tokens and bad_words.

The mask at a position is a function of the parameters and of the output tokens before it, nothing else, so it is the
same after a preemption.
"""

import numpy as np

from octavo.core.step import SlotInit


class TokenMask:
    """The allowed tokens of one request, kept up to date token by token.

    ``words``: ceil(V / 32) uint32, bit i of word w stands for token 32·w + i; None while every token is allowed.
    """

    def __init__(self, init: SlotInit, vocab: int) -> None:
        params = init.params
        self._vocab = vocab
        self._allowed = None if params.allowed_token_ids is None else np.array(sorted(set(params.allowed_token_ids)), np.int64)
        self._single = np.array(sorted({word[0] for word in init.bad_words if len(word) == 1}), np.int64)
        self._ends = np.array(sorted(init.eos_ids | set(params.stop_token_ids)), np.int64)
        self._min_tokens = params.min_tokens if len(self._ends) else 0
        self._phrases = [word for word in init.bad_words if len(word) > 1]
        self._keep = max((len(word) - 1 for word in self._phrases), default=0)
        self._tail = tuple(init.tokens[init.prompt_len :])[-self._keep :] if self._keep else ()
        self._num_output = len(init.tokens) - init.prompt_len
        self._phrase_bans: list[int] = []
        self._set_base()
        self._set_phrases()

    @staticmethod
    def needed(init: SlotInit) -> bool:
        """Whether the request restricts its tokens at all, now or later."""
        return init.params.allowed_token_ids is not None or init.params.min_tokens > 0 or bool(init.bad_words)

    @property
    def settled(self) -> bool:
        """Whether further tokens change nothing any more."""
        return not self._phrases and self._num_output >= self._min_tokens

    def advance(self, token: int) -> None:
        """Take note of one more output token."""
        self._num_output += 1
        if self._num_output == self._min_tokens:
            self._set_base()
        if self._phrases:
            self._tail = (*self._tail, token)[-self._keep :]
            self._set_phrases()

    def _set_base(self) -> None:
        """The words without the bans of multi-token bad words."""
        if self._allowed is None and not self._phrases and not len(self._single) and self._num_output >= self._min_tokens:
            self.words = None
            return
        bits = np.zeros(-(-self._vocab // 32) * 32, np.uint8)
        bits[: self._vocab] = self._allowed is None
        if self._allowed is not None:
            bits[self._allowed] = 1
        bits[self._single] = 0
        if self._num_output < self._min_tokens:
            bits[self._ends] = 0
        self._left = int(bits.sum())
        self._phrase_bans = []
        self.words: np.ndarray | None = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)

    def _set_phrases(self) -> None:
        """Ban the last token of each bad phrase whose beginning the output ends with.

        Bans that would leave no token at all are not applied: some token must come next.
        """
        if self.words is None:
            return
        self._flip(self._phrase_bans)
        found = {word[-1] for word in self._phrases if self._tail[max(0, len(self._tail) - len(word) + 1) :] == word[:-1]}
        bans = [token for token in found if self.words[token >> 5] >> (token & 31) & 1]
        self._phrase_bans = bans if len(bans) < self._left else []
        self._flip(self._phrase_bans)

    def _flip(self, tokens: list[int]) -> None:
        for token in tokens:
            self.words[token >> 5] ^= np.uint32(1 << (token & 31))
