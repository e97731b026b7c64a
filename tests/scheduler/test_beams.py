"""Beam search: the rule of selection by itself, and groups in random company, whose answers are known (test_machine.py says them)."""

import random
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scheduler.test_machine import VOCAB, the_answer, the_beams

from octavo.config import SchedulerConfig
from octavo.core.output import Delta, LogprobRow
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.core.step import COPY, IN, StepPlan
from octavo.errors import ContextTooLong, InvalidRequest
from octavo.kv.manager import KvManager
from octavo.kv.tier import SwapTier
from octavo.observe.events import Preempted
from octavo.scheduler.beams import BeamSearch, most_tokens
from octavo.scheduler.policy import POLICIES
from octavo.scheduler.scheduler import Scheduler
from octavo.simulate.executor import SimExecutor


def row(logprobs: dict[int, float]) -> LogprobRow:
    ranked = sorted(logprobs.items(), key=lambda pair: (-pair[1], pair[0]))
    return LogprobRow(ranked[0][0], ranked[0][1], 1, [token for token, _ in ranked], [logprob for _, logprob in ranked])


# -- the rule


def test_a_search_by_hand() -> None:
    """Two beams; token 0 ends. Each step's numbers are small enough to be followed on paper."""
    search = BeamSearch(2, {0: None}, most_tokens=9, length_penalty=1.0)
    assert search.needs == 4
    assert search.step([row({1: -1.0, 2: -2.0, 0: -3.0, 3: -4.0})]) == [(0, 1), (0, 2)]  # 0 is the third: not kept
    assert search.finished == []
    # sums: 1→0 -1.5, 1→3 -2.0, 2→3 -2.5, 1→1 -3.0
    assert search.step([row({0: -0.5, 3: -1.0, 1: -2.0}), row({3: -0.5, 0: -2.0})]) == [(0, 3), (1, 3)]
    (first,) = search.finished
    assert (first.score, [r.token for r in first.path.rows()], first.finish_reason) == (-0.75, [1, 0], "stop")
    # sums: 1,3→0 -2.1, 2,3→2 -2.6, 2,3→1 -2.7. The first ends; with -2.6 / 3 < -0.75 the next beams are worse than what is finished
    assert search.step([row({0: -0.1, 1: -3.0}), row({2: -0.1, 1: -0.2})]) == []
    assert [(round(h.score, 6), [r.token for r in h.path.rows()]) for h in search.finished] == [(-0.7, [1, 3, 0]), (-0.75, [1, 0])]


@pytest.mark.parametrize(("early_stopping", "steps"), [(True, 2), (False, 3), ("never", 5)])
def test_when_a_search_is_over(early_stopping: bool | str, steps: int) -> None:
    """Hypotheses of -1 / 1² and -1.5 / 2²; the best beam then has -2.1 / 2², -9.1 / 3² and so on, and may come to five tokens."""
    search = BeamSearch(2, {0: None, 9: 9}, most_tokens=5, length_penalty=2.0, early_stopping=early_stopping)
    assert search.needs == 6
    unlikely = {2: -60.0, 3: -61.0, 4: -62.0, 9: -63.0, 0: -64.0}
    script = [
        [row({1: -0.5, 9: -1.0, 2: -1.5, 3: -60.0, 4: -61.0, 0: -62.0})],
        [row({0: -1.0, 1: -1.6, **{t: v for t, v in unlikely.items() if t}}), row({1: -1.0, **unlikely})],
        *[[row({1: -7.0, **unlikely}), row({1: -7.0, **unlikely})]] * 3,
    ]
    taken = 0
    for rows in script:
        taken += 1
        if not search.step(rows):
            break
    assert taken == steps
    ends = [(round(h.score, 6), h.finish_reason, h.stop_reason) for h in search.finished]
    assert ends[0] == (-0.375, "stop", None) and ends[1] == ((-23.1 / 25, "length", None) if early_stopping == "never" else (-1.0, "stop", 9))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4), st.sampled_from([-1.0, 0.0, 1.0, 2.0]))
def test_with_beams_for_everything_the_best_of_all_sequences_are_found(seed: int, most: int, width: int, length_penalty: float) -> None:
    """As wide as all sequences are many, a search that never stops early is an exhaustive one."""
    rng, vocab, end = random.Random(seed), 3, 0
    table: dict[tuple[int, ...], dict[int, float]] = {}

    def after(tokens: tuple[int, ...]) -> dict[int, float]:
        return table.setdefault(tokens, {token: -rng.uniform(0.1, 5.0) for token in range(vocab)})

    everything = {}
    for length in range(1, most + 1):
        for tokens in product(range(vocab), repeat=length):
            if end not in tokens[:-1] and (tokens[-1] == end or length == most):
                total = 0.0
                for place, token in enumerate(tokens):
                    total += after(tokens[:place])[token]
                everything[tokens] = total / length**length_penalty
    wide = max(width, len(everything))
    search = BeamSearch(wide, {end: None}, most_tokens=most, length_penalty=length_penalty, early_stopping="never")
    beams: list[tuple[int, ...]] = [()]
    while children := search.step([row(after(beam)) for beam in beams]):
        beams = [(*beams[parent], token) for parent, token in children]
    found = {tuple(r.token for r in h.path.rows()): h.score for h in search.finished}
    assert found == pytest.approx(everything)
    assert [h.score for h in search.finished] == sorted(found.values(), reverse=True)


def test_no_end_among_the_first_tokens() -> None:
    search = BeamSearch(1, {0: None}, most_tokens=5, banned=frozenset({0, 7}), min_tokens=1, shown=1)
    assert search.needs == 4
    assert search.step([row({0: -0.1, 7: -0.2, 3: -1.0, 4: -2.0})]) == [(0, 3)]
    assert search.step([row({0: -0.1, 7: -0.2, 3: -1.0, 4: -2.0})]) == []
    (only,) = search.finished
    assert [(r.token, r.rank, r.top_ids) for r in only.path.rows()] == [(3, 3, [0]), (0, 1, [0])]


@pytest.mark.parametrize(("prompt", "width", "blocks", "tokens"), [(10, 1, 4, 17), (16, 1, 4, 17), (10, 2, 4, 13), (10, 3, 4, 0), (4, 3, 4, 9)])
def test_the_tokens_of_a_search_alone_in_a_pool(prompt: int, width: int, blocks: int, tokens: int) -> None:
    assert most_tokens(prompt, width, blocks, 4) == tokens


# -- groups


class Load:
    """Random requests over one scheduler; each answer is compared with what the rules say."""

    def __init__(self, seed: int, *, blocks: int, seqs: int, budget: int, tier: int = 0, **config: Any) -> None:
        self.rng, self.blocks, self.seqs = random.Random(seed), blocks, seqs
        self.size = self.rng.choice([2, 3, 4])
        self.kv = KvManager(blocks, self.size, prefix_caching=config.pop("caching"))
        config = {"policy": self.rng.choice(POLICIES), "preemption_mode": "swap" if tier else "auto", **config}
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=40, **config), self.kv,
            tier=SwapTier(tier) if tier else None,
        )
        self.executor = SimExecutor(seqs, blocks, self.size, vocab=VOCAB, max_tokens=budget, tier_slots=tier)
        self.expected: dict[str, tuple[list[int], str, int | None]] = {}
        self.got: dict[str, tuple[list[int], str | None, int | str | None]] = {}
        self.partly: dict[str, list[int]] = {}
        self.groups: list[list[str]] = []
        self.beams: set[str] = set()
        self.events: list[Any] = []
        self.moves: list[Any] = []
        self.flying: list[StepPlan] = []

    def add(self, number: int) -> None:
        rng = self.rng
        beams, width = rng.random() < 0.7, rng.randint(1, 3)
        length, max_tokens = rng.randint(1, 9), rng.randint(1, 12)
        prompt = [(number % 2 + i * i) % VOCAB for i in range(length)]
        params = SamplingParams(
            stop_token_ids=rng.choice([[], [3], [3, 5]]), ignore_eos=rng.random() < 0.3, min_tokens=rng.choice([0, 0, min(2, max_tokens)]),
            **({"use_beam_search": True, "best_of": width, "length_penalty": rng.choice([-1.0, 0.0, 1.0, 2.0]),
                "early_stopping": rng.choice([True, False, "never"])} if beams else {}),
        )  # fmt: skip
        names, made = [f"r{number}/{index}" for index in range(width)], []
        for index, name in enumerate(names):
            made.append(Request(
                name, prompt, params, length + max_tokens, frozenset(rng.choice([[], [1]])) if not index else made[0].eos_ids,
                seed=number * 7 + index, arrival=float(number), tenant=str(number % 3), fork_of=names[0] if index else "",
            ))
        try:
            for request in made:
                self.scheduler.add(request)
        except (ContextTooLong, InvalidRequest):
            assert request is made[0] and (length > self.kv.capacity or length // self.size + width > self.blocks or width > self.seqs)
            return
        self.groups.append(names)
        self.beams.update(names if beams else ())
        answers = the_beams(made[0], width, self.blocks, self.size) if beams else [the_answer(request, self.kv.capacity) for request in made]
        self.expected.update(zip(names, answers, strict=True))

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            tokens = self.partly.setdefault(delta.request_id, [])
            tokens += delta.tokens
            if delta.finish_reason is not None:
                assert delta.request_id not in self.got
                self.got[delta.request_id] = tokens, delta.finish_reason, delta.stop_reason

    def run(self, count: int, depth: int, *, trouble: float = 0.0) -> None:
        rng, number, idle = self.rng, 0, 0
        while number < count or self.scheduler.has_unfinished or self.flying:
            while number < count and rng.random() < 0.5:
                self.add(number)
                number += 1
            if trouble and rng.random() < trouble and self.scheduler._requests:
                self.take(self.scheduler.abort(rng.choice(sorted(self.scheduler._requests))))
            plan = self.scheduler.plan(0.0) if len(self.flying) < depth else None
            if plan is not None:
                self.events += plan.events
                self.moves += plan.moves
                self.flying.append(plan)
            if self.flying and (plan is None or len(self.flying) == depth):
                done = self.flying.pop(0)
                if trouble and not self.flying and rng.random() < trouble:
                    if rng.random() < 0.5:
                        self.executor.execute(done)
                    self.take(self.scheduler.fail(done, "it broke"))
                else:
                    self.take(self.scheduler.commit(done, self.executor.execute(done)))
            self.scheduler.check()
            idle = 0 if plan or self.flying else idle + 1
            assert idle < 20 or number < count, "nobody gets on"
        for name, expected in self.expected.items():
            assert self.got[name] == expected or self.got[name][1] in ("abort", "error"), name
        for names in self.groups:
            ends = {self.got[name][1] for name in names}
            assert names[0] not in self.beams or len(ends) == 1 or ends <= {"stop", "length"}, "a beam was ended without its group"
        assert self.kv.ledger().live == 0 and not self.scheduler._copies and not self.scheduler._trunks


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("tier", [0, 5, 60])
def test_groups_in_any_company_get_what_they_get_alone(caching: bool, depth: int, tier: int) -> None:
    preempted = swapped = copied = 0
    for seed in range(40):
        rng = random.Random(seed)
        load = Load(seed, blocks=rng.randint(5, 14), seqs=rng.randint(3, 7), budget=8, tier=tier, caching=caching)
        load.run(14, depth)
        preempted += sum(isinstance(event, Preempted) and event.request_id in load.beams for event in load.events)
        swapped += sum(move.kind == IN for move in load.moves)
        copied += sum(move.kind == COPY for move in load.moves)
    assert preempted > 50 and copied > 300 and (swapped > 40 if tier else swapped == 0), (preempted, copied, swapped)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_groups_in_trouble(caching: bool, depth: int) -> None:
    """Aborts and steps that fail: what is not ended by them is as ever."""
    for seed in range(40):
        Load(seed, blocks=9, seqs=5, budget=6, tier=seed % 2 * 20, caching=caching).run(14, depth, trouble=0.05)
