"""The scheduler's rule restated by brute force, and compared plan by plan. Lengths only: no token, slot or block has a name."""

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import SchedulerConfig
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.kv.manager import KvManager
from octavo.scheduler.policy import make_policy
from octavo.scheduler.scheduler import Scheduler
from octavo.simulate.executor import SimExecutor


class Seq:
    """One request of the model."""

    def __init__(self, name: str, order: int, prompt: int, end: int, urgency: int) -> None:
        self.name, self.order, self.end, self.urgency = name, order, end, urgency
        self.known = prompt  # tokens that it has
        self.done = 0  # tokens computed
        self.blocks = 0
        self.turn = 0  # when it was served last
        self.state = "waiting"


class Model:
    """The rule, as one would say it."""

    def __init__(self, seqs: list[Seq], blocks: int, size: int, places: int) -> None:
        self.seqs, self.total, self.size, self.places = seqs, blocks, size, places
        self.turns = 0

    def free(self) -> int:
        return self.total - sum(s.blocks for s in self.seqs)

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
            while s.state == "running" and self.need(s.done + count) > s.blocks + self.free():
                loser = self.in_state("running")[0]
                for other in self.in_state("running"):
                    if other.urgency > loser.urgency or (other.urgency == loser.urgency and other.order > loser.order):
                        loser = other
                budget += part.pop(loser, 0)
                loser.state, loser.blocks, loser.done = "waiting", 0, 0
            if s.state == "running":
                s.blocks = max(s.blocks, self.need(s.done + count))
                part[s] = count
                budget -= count
        while budget > 0 and self.in_state("waiting") and len(self.in_state("running")) < self.places:
            s = min(self.in_state("waiting"), key=lambda s: (s.urgency, s.order))
            wanted = min(self.need(s.known) + 1, self.need(s.end - 1))  # its context and a block, if it can ever use that
            if wanted > self.free():
                break
            s.state, s.blocks = "running", self.need(s.known)
            part[s] = min(s.known, budget)
            budget -= part[s]
        plan = {}
        for s, count in part.items():
            samples = s.done + count == s.known
            plan[s.name] = (s.done, count, samples)
            self.turns += 1
            s.turn = self.turns
            s.done += count
            if samples:
                s.known += 1
                if s.known == s.end:
                    s.state, s.blocks = "finished", 0
        return plan


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int, bool, list[tuple[int, int, int, int]], list[int]]:
    blocks, size = draw(st.integers(1, 7)), draw(st.sampled_from([1, 2, 4]))
    seqs = draw(
        st.lists(
            st.tuples(st.integers(1, blocks * size), st.integers(1, 10), st.integers(-1, 1), st.integers(0, 12)), min_size=1, max_size=6
        )
    )  # prompt, output, priority, the step it comes at
    budgets = draw(st.lists(st.integers(1, 10), min_size=1, max_size=8))
    return blocks, size, draw(st.integers(1, 4)), draw(st.booleans()), seqs, budgets


@settings(max_examples=800, deadline=None)
@given(cases())
def test_every_plan_is_the_models(case: tuple[int, int, int, bool, list[tuple[int, int, int, int]], list[int]]) -> None:
    blocks, size, places, by_priority, wanted, budgets = case
    most = max(budgets)
    kv = KvManager(blocks, size)
    step = 0
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=places, max_num_batched_tokens=most, max_model_len=1000),
        kv,
        make_policy("priority" if by_priority else "fcfs"),
        budget=lambda now: budgets[step % len(budgets)],
    )
    executor = SimExecutor(places, blocks, size, max_tokens=most)
    model = Model([], blocks, size, places)
    slot_of: dict[int, str] = {}
    late = max(arrival for *_, arrival in wanted)
    while step <= late or scheduler.has_unfinished or model.in_state("waiting"):
        for i, (prompt, output, priority, arrival) in enumerate(wanted):
            if arrival == step:
                name = f"r{i}"
                params = SamplingParams(max_tokens=output, ignore_eos=True)
                scheduler.add(Request(name, [i] * prompt, params, prompt + output, priority=priority))
                end = min(prompt + output, blocks * size + 1)
                model.seqs.append(Seq(name, len(model.seqs), prompt, end, priority if by_priority else 0))
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
        assert kv.ledger().free == model.free()
        step += 1
        assert step < 3000
