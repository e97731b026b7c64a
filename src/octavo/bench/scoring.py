"""Log-probabilities of given texts, from the engine's own runner: the same kernels and KV cache as in serving, without a scheduler.

Row purity makes that the same numbers, bit for bit, that a request with prompt_logprobs gets; going chunk by chunk over arrays keeps the
memory at one chunk's rows, where a request would hold a list of the whole vocabulary for each of its tokens.
"""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

from octavo.core.sampling import SamplingParams
from octavo.core.step import PlanItem, SlotInit
from octavo.errors import ContextTooLong, RequestError

CHUNK = 64  # rows whose whole distributions are held at once
_epochs = count(1 << 40)  # of slots in use here: the scheduler's own count from 0


class Scorer:
    """Over an LLM that serves nobody meanwhile and has no prefix cache (its blocks are written over)."""

    def __init__(self, llm: Any) -> None:
        assert not llm.config.kv.enable_prefix_caching and llm.config.scheduler.max_num_batched_tokens >= CHUNK
        self._runner = llm.engine.core.executor
        self._vocab = llm.vocab_size
        self._block_size = llm.config.kv.block_size
        self.max_model_len: int = llm.max_model_len

    def distributions(self, tokens: Sequence[int]) -> Iterator[np.ndarray]:
        """Log-probabilities of the whole vocabulary after each token but the last, in pieces: [≤ CHUNK, V] float32.

        Raises: ContextTooLong; RequestError where the model's logits are no numbers.
        """
        for rows in self._chunks(tokens, -1):
            arrays = self._runner.batch.arrays
            found = np.full((rows, self._vocab), -np.inf, np.float32)
            ids = arrays["top_ids"][:rows, : self._vocab].astype(np.int64)
            np.put_along_axis(found, ids, arrays["top_logprobs"][:rows, : self._vocab], axis=1)
            yield found

    def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Log-probability of each token but the first, given those before it: [n - 1] float32. Raises: as distributions()."""
        parts = [self._runner.batch.arrays["out_logprob"][:rows].copy() for rows in self._chunks(tokens, 0)]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def _chunks(self, tokens: Sequence[int], alternatives: int) -> Iterator[int]:
        """Compute CHUNK tokens after another. Yields how many rows the arrays hold: one for each of the piece's tokens that has a successor."""
        if len(tokens) > self.max_model_len:
            raise ContextTooLong(f"{len(tokens)} tokens to score; the context has {self.max_model_len}", "prompt")
        runner, tokens, epoch = self._runner, list(tokens), next(_epochs)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=alternatives)
        init = SlotInit("score", params, 0, len(tokens), tokens, frozenset())
        last = len(tokens) - 1
        for start in range(0, last, CHUNK):
            end = min(start + CHUNK, last)
            have, need = -(-start // self._block_size), -(-end // self._block_size)
            item = PlanItem(0, epoch, start, tokens[start:end], False, list(range(have, need)), init if start == 0 else None, 0, start, end)
            if item.init is not None:
                runner.slots.init(item)
            runner.slots.extend(0, item.new_blocks)
            rows = runner.batch.fill([item], runner.slots)
            runner.program.run()
            if (runner.batch.arrays["out_token"][: rows.num] < 0).any():
                raise RequestError(f"the model's logits between the tokens {start} and {end} are no numbers")
            yield rows.num
        runner.slots.free(0)
