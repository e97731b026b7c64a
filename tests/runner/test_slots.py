import random

import numpy as np
import pytest

from octavo.core.sampling import SamplingParams
from octavo.core.step import PlanItem, SlotInit
from octavo.runner.masks import TokenMask
from octavo.runner.slots import SeenTokens, Slots

VOCAB = 70


def init(prompt: list[int], output: tuple[int, ...] | list[int] = (), *, bad: tuple[tuple[int, ...], ...] = (), **params) -> SlotInit:
    known = [*prompt, *output]
    return SlotInit("r", SamplingParams(**params), seed=7, prompt_len=len(prompt), tokens=known, eos_ids=frozenset({2}), bad_words=bad)


def allowed(words: np.ndarray | None) -> set[int]:
    if words is None:
        return set(range(VOCAB))
    assert words.dtype == np.uint32 and len(words) == -(-VOCAB // 32)
    assert not any(words[i >> 5] >> (i & 31) & 1 for i in range(VOCAB, len(words) * 32))
    return {i for i in range(VOCAB) if words[i >> 5] >> (i & 31) & 1}


def expected(i: SlotInit) -> set[int]:
    """The rule, restated from nothing."""
    out = i.tokens[i.prompt_len :]
    left = set(range(VOCAB)) if i.params.allowed_token_ids is None else set(i.params.allowed_token_ids)
    if len(out) < i.params.min_tokens:
        left -= i.eos_ids | set(i.params.stop_token_ids)
    left -= {w[0] for w in i.bad_words if len(w) == 1}
    hit = {w[-1] for w in i.bad_words if len(w) > 1 and len(out) >= len(w) - 1 and tuple(out[len(out) - len(w) + 1 :]) == w[:-1]}
    return left - hit or left


def test_mask_follows_the_rule_token_by_token_and_after_a_preemption() -> None:
    rng = random.Random(3)
    for _ in range(150):
        params = {"min_tokens": rng.choice([0, 0, 1, 4]), "stop_token_ids": rng.sample(range(6), rng.randint(0, 2))}
        if rng.random() < 0.5:
            params["allowed_token_ids"] = [*rng.sample(range(VOCAB), 5), 69]
        bad = tuple(tuple(rng.randrange(4) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(0, 4)))
        prompt = [rng.randrange(4) for _ in range(3)]
        out: list[int] = []
        start = init(prompt, bad=bad, **params)
        if not TokenMask.needed(start):
            continue
        mask = TokenMask(start, VOCAB)
        for _ in range(8):
            now = init(prompt, out, bad=bad, **params)
            assert allowed(mask.words) == expected(now)
            assert allowed(TokenMask(now, VOCAB).words) == expected(now)
            out.append(rng.randrange(4))
            was_settled, before = mask.settled, allowed(mask.words)
            mask.advance(out[-1])
            assert not was_settled or allowed(mask.words) == before


def test_mask_is_gone_once_min_tokens_are_out() -> None:
    mask = TokenMask(init([1], min_tokens=2), VOCAB)
    assert allowed(mask.words) == set(range(VOCAB)) - {2}
    mask.advance(5)
    assert not mask.settled
    mask.advance(5)
    assert mask.words is None and mask.settled


def test_a_phrase_may_not_ban_the_last_token_left() -> None:
    mask = TokenMask(init([1], allowed_token_ids=[3, 4], bad=((3, 3), (3, 4))), VOCAB)
    mask.advance(3)
    assert allowed(mask.words) == {3, 4}


def test_seen_counts_prompt_and_output() -> None:
    seen = SeenTokens(init([5, 5, 6], [6, 7], presence_penalty=1.0))
    for token in range(10, 10 + 200):
        seen.add(token)
    seen.add(10)
    got = dict(zip(seen.ids[: seen.num].tolist(), seen.counts[: seen.num].tolist()))
    assert got == {5: 0, 6: 1, 7: 1, **dict.fromkeys(range(10, 210), 1), 10: 2}


def put(slots: Slots, slot: int, i: SlotInit, epoch: int = 0) -> None:
    slots.init(PlanItem(slot=slot, epoch=epoch, start=0, tokens=i.tokens, sample=True, init=i))


def memory(address: int, count: int, kind: type) -> list[float]:
    return list((kind * count).from_address(address))


def test_addresses_hold_what_the_lists_hold() -> None:
    import ctypes

    slots = Slots(4, 8, VOCAB)
    put(slots, 1, init([5, 6], [6], presence_penalty=0.5, logit_bias={3: 1.5, 69: -100}, allowed_token_ids=[1, 3, 69], min_tokens=3))
    a = slots.arrays
    assert memory(int(a["bias"][1]), VOCAB, ctypes.c_float) == [{3: 1.5, 69: -100.0}.get(i, 0.0) for i in range(VOCAB)]
    assert memory(int(a["mask"][1]), 3, ctypes.c_uint32) == slots.mask[1].tolist()
    for token in range(100):
        slots.advance(1, token % 64)
        n = int(a["num_seen"][1])
        ids, counts, shown = slots.seen[1]
        assert shown == n
        assert memory(int(a["seen_ids"][1]), n, ctypes.c_int32) == ids[:n].tolist()
        assert memory(int(a["seen_counts"][1]), n, ctypes.c_int32) == counts[:n].tolist()
        assert memory(int(a["mask"][1]), 3, ctypes.c_uint32) == slots.mask[1].tolist()
    assert dict(zip(ids[:n].tolist(), counts[:n].tolist())) == {t: 1 + (t < 36) + (t == 6) for t in range(64)}
    assert (a["mask"][[0, 2, 3]] == 0).all() and (a["bias"][[0, 2, 3]] == 0).all()
    slots.free(1)
    for name in ("mask", "bias", "seen_ids", "seen_counts", "num_seen"):
        assert (a[name] == 0).all(), name
    assert slots.mask[1] is slots.bias[1] is slots.seen[1] is None and not slots.busy


def test_plain_requests_cost_nothing() -> None:
    slots = Slots(2, 8, VOCAB)
    put(slots, 0, init([5, 6], temperature=0.0))
    assert slots.state[0] is None and not slots.busy and slots.top[0] == -1


@pytest.mark.parametrize(("given", "want"), [(0, 0), (-1, 0), (5, 5), (10**9, VOCAB)])
def test_scalars(given: int, want: int) -> None:
    slots = Slots(2, 8, VOCAB)
    put(slots, 1, init([5], top_k=given, temperature=0.5, top_p=0.25, min_p=0.125, repetition_penalty=1.5, frequency_penalty=-1, presence_penalty=2))
    got = {name: slots.arrays[name][1].item() for name in ("temperature", "top_k", "top_p", "min_p", "repetition", "frequency", "presence", "seed")}
    assert got == {"temperature": 0.5, "top_k": want, "top_p": 0.25, "min_p": 0.125, "repetition": 1.5, "frequency": -1.0, "presence": 2.0, "seed": 7}


def test_a_reused_slot_keeps_nothing() -> None:
    slots = Slots(1, 4, VOCAB)
    put(slots, 0, init([5, 6], presence_penalty=1, logit_bias={1: 1}, allowed_token_ids=[1], prompt_logprobs=1, logprobs=-1))
    slots.extend(0, [3, 2])
    assert slots.top[0] == VOCAB
    put(slots, 0, init([9]), epoch=4)
    assert slots.state[0] is None and slots.num_blocks[0] == 0 and slots.epoch[0] == 4 and slots.last[0] == 9 and slots.top[0] == -1
    assert all(slots.arrays[n][0] == 0 for n in ("mask", "bias", "seen_ids", "num_seen", "presence"))
    slots.extend(0, [1])
    slots.extend(0, [7, 8])
    assert slots.arrays["block_table"][0, :3].tolist() == [1, 7, 8]
