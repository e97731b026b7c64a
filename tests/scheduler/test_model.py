"""The scheduler's rule restated by brute force, and compared plan by plan. Lengths only: no token, slot or block has a name.

With a cache the model says who may share what by text alone: a block's worth of text is held once for all whose table begins with it,
and in the cache until it was used longest ago of all that nobody holds.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import SchedulerConfig
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.kv.manager import KvManager
from octavo.scheduler.policy import make_policy
from octavo.scheduler.scheduler import Scheduler
from octavo.simulate.executor import SimExecutor, hash_sequence, next_token

VOCAB = 3


class Block:
    """A block that somebody has, or that is kept. ``text``: all tokens up to its end, once they are computed."""

    def __init__(self) -> None:
        self.text: tuple[int, ...] | None = None
        self.stamp = 0  # when it was given up last


class Seq:
    """One request of the model."""

    def __init__(self, name: str, order: int, prompt: list[int], end: int, urgency: int) -> None:
        self.name, self.order, self.end, self.urgency = name, order, end, urgency
        self.text = list(prompt)  # tokens that it has
        self.done = 0  # tokens computed
        self.blocks: list[Block] = []
        self.sealed = 0  # blocks that others may find
        self.turn = 0  # when it was served last
        self.state = "waiting"

    @property
    def known(self) -> int:
        return len(self.text)


class Model:
    """The rule, as one would say it."""

    def __init__(self, seqs: list[Seq], blocks: int, size: int, places: int, caching: bool) -> None:
        self.seqs, self.total, self.size, self.places, self.caching = seqs, blocks, size, places, caching
        self.turns = self.stamps = 0
        self.kept: list[Block] = []  # what can be found

    def live(self) -> set[Block]:
        return {block for s in self.seqs for block in s.blocks}

    def cached(self) -> list[Block]:
        return sorted((b for b in self.kept if b not in self.live()), key=lambda b: b.stamp)

    def available(self) -> int:
        return self.total - len(self.live())

    def take(self, s: Seq, count: int) -> None:
        for _ in range(count):
            if self.total - len(self.live()) - len(self.cached()) == 0:
                self.kept.remove(self.cached()[0])
            s.blocks.append(Block())

    def find(self, text: tuple[int, ...]) -> Block | None:
        return next((b for b in self.kept if b.text == text), None)

    def match(self, s: Seq) -> list[Block]:
        found: list[Block] = []
        while (len(found) + 1) * self.size < s.known and (block := self.find(tuple(s.text[: (len(found) + 1) * self.size]))):
            found.append(block)
        return found

    def seal(self, s: Seq, end: int) -> None:
        for number in range(s.sealed, end // self.size if self.caching else 0):
            s.sealed = number + 1
            block, text = s.blocks[number], tuple(s.text[: (number + 1) * self.size])
            if self.find(text) is None:
                block.text = text
                self.kept.append(block)

    def give_up(self, s: Seq, state: str) -> None:
        sealed, s.sealed = s.sealed, 0
        for number in reversed(range(sealed)):  # the end goes before the beginning
            text = tuple(s.text[: (number + 1) * self.size])
            block = self.find(text)
            if block is None:  # whoever had it was evicted
                block = s.blocks[number]
                block.text = text
                self.kept.append(block)
            self.stamps += 1
            block.stamp = self.stamps
        s.state, s.blocks = state, []

    def need(self, tokens: int) -> int:
        return (tokens + self.size - 1) // self.size

    def in_state(self, state: str) -> list[Seq]:
        return [s for s in self.seqs if s.state == state]

    def step(self, budget: int) -> dict[str, tuple[int, int, bool]]:
        """Name → (first position, tokens, samples?)."""
        part: dict[Seq, int] = {}
        seen: set[Seq] = set()
        while budget > 0:
            rest = [s for s in self.in_state("running") if s not in seen]
            if not rest:
                break
            fewest = min(s.known - s.done for s in rest)
            rest = [s for s in rest if s.known - s.done == fewest]
            most_urgent = min(s.urgency for s in rest)
            s = min((s for s in rest if s.urgency == most_urgent), key=lambda s: s.turn)
            seen.add(s)
            count = min(fewest, budget)
            while s.state == "running" and self.need(s.done + count) > len(s.blocks) + self.available():
                loser = self.in_state("running")[0]
                for other in self.in_state("running"):
                    if other.urgency > loser.urgency or (other.urgency == loser.urgency and other.order > loser.order):
                        loser = other
                budget += part.pop(loser, 0)
                self.give_up(loser, "waiting")
                loser.done = 0
            if s.state == "running":
                self.take(s, self.need(s.done + count) - len(s.blocks))
                part[s] = count
                budget -= count
        for s, count in part.items():
            self.seal(s, s.done + count)
        while budget > 0 and self.in_state("waiting") and len(self.in_state("running")) < self.places:
            s = min(self.in_state("waiting"), key=lambda s: (s.urgency, s.order))
            wanted = min(self.need(s.known) + 1, self.need(s.end - 1))  # its context and a block, if it can ever use that
            matched = self.match(s)
            s.blocks = list(matched)
            if wanted - len(matched) > self.available():  # the matched ones are live now, so they are in nobody's way
                s.blocks = []
                break
            self.take(s, self.need(s.known) - len(matched))
            s.state, s.done, s.sealed = "running", len(matched) * self.size, len(matched)
            part[s] = min(s.known - s.done, budget)
            budget -= part[s]
            self.seal(s, s.done + part[s])
        plan = {}
        for s, count in part.items():
            samples = s.done + count == s.known
            plan[s.name] = (s.done, count, samples)
            self.turns += 1
            s.turn = self.turns
            s.done += count
            if samples:
                s.text.append(next_token(hash_sequence(s.text), 0, VOCAB))
                if s.known == s.end:
                    self.give_up(s, "finished")
        return plan


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int, bool, bool, list[tuple[int, int, int, int, int]], list[int]]:
    blocks, size = draw(st.integers(1, 7)), draw(st.sampled_from([1, 2, 4]))
    seqs = draw(
        st.lists(
            st.tuples(st.integers(1, blocks * size), st.integers(1, 10), st.integers(-1, 1), st.integers(0, 12), st.integers(0, 1)),
            min_size=1, max_size=6,
        )
    )  # prompt, output, priority, the step it comes at, what it is about
    budgets = draw(st.lists(st.integers(1, 10), min_size=1, max_size=8))
    return blocks, size, draw(st.integers(1, 4)), draw(st.booleans()), draw(st.booleans()), seqs, budgets


@settings(max_examples=800, deadline=None)
@given(cases())
def test_every_plan_is_the_models(case: tuple[int, int, int, bool, bool, list[tuple[int, int, int, int, int]], list[int]]) -> None:
    blocks, size, places, by_priority, caching, wanted, budgets = case
    most = max(budgets)
    kv = KvManager(blocks, size, prefix_caching=caching)
    step = 0
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=places, max_num_batched_tokens=most, max_model_len=1000),
        kv,
        make_policy("priority" if by_priority else "fcfs"),
        budget=lambda now: budgets[step % len(budgets)],
    )
    executor = SimExecutor(places, blocks, size, vocab=VOCAB, max_tokens=most)
    model = Model([], blocks, size, places, caching)
    slot_of: dict[int, str] = {}
    late = max(arrival for _, _, _, arrival, _ in wanted)
    while step <= late or scheduler.has_unfinished or model.in_state("waiting"):
        for i, (prompt, output, priority, arrival, topic) in enumerate(wanted):
            if arrival == step:
                name = f"r{i}"
                params = SamplingParams(max_tokens=output, ignore_eos=True)
                scheduler.add(Request(name, [topic] * prompt, params, prompt + output, priority=priority))
                end = min(prompt + output, blocks * size + 1)
                model.seqs.append(Seq(name, len(model.seqs), [topic] * prompt, end, priority if by_priority else 0))
        expected = model.step(budgets[step % len(budgets)])
        plan = scheduler.plan(0.0)
        got = {}
        for item in plan.items if plan else []:
            if item.init is not None:
                slot_of[item.slot] = item.init.request_id
            got[slot_of[item.slot]] = (item.start, len(item.tokens), item.sample)
        assert got == expected, f"step {step}"
        if plan is not None:
            scheduler.commit(plan, executor.execute(plan))
        assert {r.id for r in scheduler.running} == {s.name for s in model.in_state("running")}
        ledger = kv.ledger()
        assert (ledger.live, ledger.cached) == (len(model.live()), len(model.cached())), f"step {step}"
        scheduler.check()
        step += 1
        assert step < 3000
