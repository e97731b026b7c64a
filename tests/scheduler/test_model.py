"""The scheduler's rule restated by brute force, and compared plan by plan. Lengths only: no token, slot or block has a name."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import SchedulerConfig
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.kv.manager import KvManager
from octavo.scheduler.policy import POLICIES, make_policy
from octavo.scheduler.scheduler import Scheduler
from octavo.simulate.executor import SimExecutor

WEIGHTS = {"": 1.0, "a": 2.0, "b": 0.5}  # by which division is exact
PACE = 2  # seconds from step to step
Case = tuple[int, int, int, str, list[tuple[int, int, int, str, int]], list[int]]


class Seq:
    """One request of the model."""

    def __init__(self, name: str, order: int, prompt: int, end: int, priority: int, tenant: str, arrival: int) -> None:
        self.name, self.order, self.end, self.priority, self.tenant, self.arrival = name, order, end, priority, tenant, arrival
        self.prompt = self.known = prompt  # tokens that it has
        self.hit = 0  # what the cache held of it when last asked
        self.fresh = True  # never admitted
        self.done = 0  # tokens computed
        self.blocks = 0
        self.turn = 0  # when it was served last
        self.state = "waiting"


class Model:
    """The rule, as one would say it."""

    def __init__(self, policy: str, blocks: int, size: int, places: int) -> None:
        self.policy, self.total, self.size, self.places = policy, blocks, size, places
        self.seqs: list[Seq] = []
        self.turns = 0
        self.served = dict.fromkeys(WEIGHTS, 0.0)  # tenant → weighted tokens over weight
        self.last_waited: str | None = None

    def arrive(self, s: Seq, cached: int) -> None:
        waiting = {other.tenant for other in self.in_state("waiting")}
        if s.tenant not in waiting:
            if waiting:
                self.served[s.tenant] = max(self.served[s.tenant], min(self.served[tenant] for tenant in waiting))
            elif self.last_waited is not None:
                self.served[s.tenant] = max(self.served[s.tenant], self.served[self.last_waited])
        s.hit = cached
        self.seqs.append(s)

    def urgency(self, s: Seq) -> float:
        return {"fcfs": 0.0, "lpm": 0.0, "priority": s.priority, "fair": self.served[s.tenant]}[self.policy]

    def place(self, s: Seq) -> tuple[float, int]:
        value = {
            "fcfs": 0.0, "priority": s.priority + s.arrival / 30, "lpm": s.arrival - s.hit / 64, "fair": self.served[s.tenant],
        }[self.policy]
        return value, s.order

    def free(self) -> int:
        return self.total - sum(s.blocks for s in self.seqs)

    def need(self, tokens: int) -> int:
        return (tokens + self.size - 1) // self.size

    def in_state(self, state: str) -> list[Seq]:
        return [s for s in self.seqs if s.state == state]

    def step(self, budget: int, cached: Callable[[str], int]) -> dict[str, tuple[int, int, bool]]:
        """Name → (first position, tokens, samples?)."""
        part: dict[Seq, int] = {}
        seen: set[Seq] = set()
        while budget > 0:
            rest = [s for s in self.in_state("running") if s not in seen]
            if not rest:
                break
            fewest = min(s.known - s.done for s in rest)
            rest = [s for s in rest if s.known - s.done == fewest]
            most_urgent = min(self.urgency(s) for s in rest)
            s = min((s for s in rest if self.urgency(s) == most_urgent), key=lambda s: s.turn)
            seen.add(s)
            count = min(fewest, budget)
            while s.state == "running" and self.need(s.done + count) > s.blocks + self.free():
                loser = max(self.in_state("running"), key=self.place)
                budget += part.pop(loser, 0)
                loser.state, loser.blocks, loser.done = "waiting", 0, 0
            if s.state == "running":
                s.blocks = max(s.blocks, self.need(s.done + count))
                part[s] = count
                budget -= count
        if budget > 0 and len(self.in_state("running")) < self.places:
            for s in self.in_state("waiting"):
                s.hit = cached(s.name)
        while budget > 0 and self.in_state("waiting") and len(self.in_state("running")) < self.places:
            s = min(self.in_state("waiting"), key=self.place)
            wanted = min(self.need(s.known) + 1, self.need(s.end - 1))  # its context and a block, if it can ever use that
            if wanted > self.free():
                break
            s.state, s.blocks = "running", self.need(s.known)
            if s.tenant not in {other.tenant for other in self.in_state("waiting")}:
                self.last_waited = s.tenant
            if s.fresh:
                s.fresh = False
                self.served[s.tenant] += s.prompt / WEIGHTS[s.tenant]
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
                self.served[s.tenant] += 2 / WEIGHTS[s.tenant]
                s.known += 1
                if s.known == s.end:
                    s.state, s.blocks = "finished", 0
        return plan


@st.composite
def cases(draw: st.DrawFn) -> Case:
    blocks, size = draw(st.integers(1, 7)), draw(st.sampled_from([1, 2, 4]))
    seqs = draw(
        st.lists(
            st.tuples(
                st.integers(1, blocks * size), st.integers(1, 10), st.integers(-1, 1), st.sampled_from(sorted(WEIGHTS)), st.integers(0, 12)
            ), min_size=1, max_size=6,
        )
    )  # prompt, output, priority, tenant, the step it comes at
    budgets = draw(st.lists(st.integers(1, 10), min_size=1, max_size=8))
    return blocks, size, draw(st.integers(1, 4)), draw(st.sampled_from(POLICIES)), seqs, budgets


@settings(max_examples=800, deadline=None)
@given(cases())
def test_every_plan_is_the_models(case: Case) -> None:
    blocks, size, places, policy, wanted, budgets = case
    most = max(budgets)
    kv = KvManager(blocks, size)
    step = 0

    def cached(name: str) -> int:
        """What the cache holds of a request changes all the time. As the policies see it; nothing is really cached."""
        return (17 * int(name[1:]) + 29 * step) % 400

    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=places, max_num_batched_tokens=most, max_model_len=1000),
        kv,
        make_policy(policy, cached_tokens=lambda r: cached(r.id), weights=WEIGHTS),
        budget=lambda now: budgets[step % len(budgets)],
    )
    executor = SimExecutor(places, blocks, size, max_tokens=most)
    model = Model(policy, blocks, size, places)
    slot_of: dict[int, str] = {}
    late = max(arrival for *_, arrival in wanted)
    while step <= late or scheduler.has_unfinished or model.in_state("waiting"):
        for i, (prompt, output, priority, tenant, arrival) in enumerate(wanted):
            if arrival == step:
                name = f"r{i}"
                params = SamplingParams(max_tokens=output, ignore_eos=True)
                at = arrival * PACE
                scheduler.add(Request(name, [i] * prompt, params, prompt + output, arrival=at, priority=priority, tenant=tenant))
                end = min(prompt + output, blocks * size + 1)
                model.arrive(Seq(name, len(model.seqs), prompt, end, priority, tenant, at), cached(name))
        expected = model.step(budgets[step % len(budgets)], cached)
        plan = scheduler.plan(step * PACE)
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
