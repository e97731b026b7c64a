"""The matrix's requests, and what an engine answers to them as exactly comparable data."""

import random
import struct
from typing import Any

BLOCK = 16


def requests(vocab: int, count: int, max_prompt: int, max_tokens: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts (token ids) and parameters: every kind of sampling, lengths around block boundaries first."""
    rng = random.Random(20261129)
    edges = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.8, "seed": 11, "logprobs": 1},
        {"temperature": 1.0, "top_k": 20, "seed": 12},
        {"temperature": 1.3, "top_p": 0.8, "seed": 13, "logprobs": 0},
        {"use_beam_search": True, "n": 2, "logprobs": 2},
        {"temperature": 0.9, "min_p": 0.05, "seed": -14},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 0.7, "presence_penalty": 0.6, "frequency_penalty": 0.4, "seed": 15, "logprobs": 2},
        {"temperature": 0.0, "prompt_logprobs": 2},
        {"temperature": 1.0, "seed": 2**63 + 5, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 0.9},
        {"temperature": 0.6, "seed": 16, "logit_bias": {5: 4.0, 9: -100.0}, "logprobs": 4},
        {"temperature": 1.0, "seed": 17, "n": 2, "logprobs": 1},
        {"temperature": 0.0, "allowed_token_ids": list(range(3, min(vocab, 203))), "min_tokens": 2},
        {"use_beam_search": True, "n": 4, "length_penalty": 2.0, "early_stopping": "never", "logprobs": 0},
        {"use_beam_search": True, "n": 2, "best_of": 3, "length_penalty": -1.0, "early_stopping": True, "logprobs": 1},
        {"temperature": 1.1, "seed": 18, "stop": ["e", "th"]},
    ]
    out = []
    for i in range(count):
        length = edges[i] if i < len(edges) else rng.randint(1, max_prompt)
        prompt = [rng.randrange(3, vocab) for _ in range(min(length, max_prompt))]
        if i >= len(edges) and i % 4 == 3:  # begins as an earlier one does
            earlier = out[i - 2][0]
            prompt[: len(earlier) * 3 // 4] = earlier[: min(len(earlier) * 3 // 4, len(prompt))]
        params = {"max_tokens": rng.randint(max(1, max_tokens // 2), max_tokens), "ignore_eos": i % 3 != 0, **kinds[i % len(kinds)]}
        if "use_beam_search" in params:  # a search must fit the smallest pool alone, or it is cut there
            params["max_tokens"] = min(params["max_tokens"], 12)
            prompt = prompt[:20] if max(params["n"], params.get("best_of", 0)) > 2 else prompt[:70]
        out.append((prompt, params))
    return out


def bits(value: float) -> str:
    """A float as its 32 bits: equality of text is equality of bits."""
    return struct.pack("<f", value).hex()


def rows(logprobs: list[Any] | None) -> list[Any] | None:
    """Log-probabilities with every bit kept."""
    if logprobs is None:
        return None
    return [None if row is None else [[token, bits(lp.logprob), lp.rank] for token, lp in sorted(row.items())] for row in logprobs]


def answers(llm: Any, wanted: list[tuple[list[int], dict[str, Any]]], alone: bool) -> list[Any]:
    """Every request's tokens, reasons and log-probabilities; one at a time or all at once."""
    from octavo import SamplingParams

    prompts = [{"prompt_token_ids": p} for p, _ in wanted]
    params = [SamplingParams(**k) for _, k in wanted]
    if alone:
        done = [llm.generate([p], [k], use_tqdm=False)[0] for p, k in zip(prompts, params)]
    else:
        done = llm.generate(prompts, params, use_tqdm=False)
    for (_, given), r in zip(wanted, done, strict=True):
        assert not (r.num_cached_tokens and given.get("prompt_logprobs") is not None), "a prompt to be scored was read from the cache"
    return [
        [rows(r.prompt_logprobs), [[list(o.token_ids), o.text, o.finish_reason, o.stop_reason, rows(o.logprobs)] for o in r.outputs]] for r in done
    ]
