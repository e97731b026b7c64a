"""The scheduler's rule restated by brute force, and compared plan by plan. Lengths only: no token, slot or block has a name.

With a cache the model says who may share what by text alone: a block's worth of text is held once for all whose table begins with it,
and in the cache until it was used longest ago of all that nobody holds. With a tier, a victim's blocks are copied there, if all of them fit.
The beams of a search are requests that stand behind the first of them, and are chosen anew when the rows of all are in. Samples of a prompt
stand behind the first of them until it has computed the prompt; then each begins with that one's blocks, if it runs.
"""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import SchedulerConfig
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.kv.manager import KvManager
from octavo.kv.tier import SwapTier
from octavo.scheduler.policy import POLICIES, make_policy
from octavo.scheduler.scheduler import Scheduler
from octavo.simulate.executor import SimExecutor, hash_sequence, logprob, next_token

VOCAB = 3


class Block:
    """A block that somebody has, or that is kept. ``text``: all tokens up to its end, once they are computed."""

    def __init__(self) -> None:
        self.text: tuple[int, ...] | None = None
        self.stamp = 0  # when it was given up last

WEIGHTS = {"": 1.0, "a": 2.0, "b": 0.5}  # by which division is exact
PACE = 2  # seconds from step to step
Case = tuple[int, int, int, str, bool, int, list[tuple[int, int, int, str, int, int, int]], list[int]]


class Seq:
    """One request of the model."""

    def __init__(self, name: str, order: int, prompt: list[int], end: int, priority: int, tenant: str, arrival: int) -> None:
        self.name, self.order, self.end, self.priority, self.tenant, self.arrival = name, order, end, priority, tenant, arrival
        self.text = list(prompt)  # tokens that it has
        self.prompt = len(prompt)
        self.hit = 0  # what the cache held of it when last asked
        self.fresh = True  # never admitted
        self.done = 0  # tokens computed
        self.blocks: list[Block] = []
        self.sealed = 0  # blocks that others may find
        self.copies: list[object] = []  # of its blocks, in the tier
        self.kept = 0  # tokens that they hold
        self.turn = 0  # when it was served last
        self.state = "behind"
        self.group: Group | None = None
        self.first = self  # of the samples of its prompt
        self.seed = 0
        self.seat = 0  # rises with each admission

    @property
    def known(self) -> int:
        return len(self.text)

    @property
    def head(self) -> "Seq":
        return self.group.members[0] if self.group else self

    @property
    def family(self) -> "list[Seq]":
        return self.group.members if self.group else [self]


class Group:
    """The beams of one search."""

    def __init__(self, members: list[Seq]) -> None:
        self.members = members
        self.beams = [(0.0, members[0])]  # sums, the best first: one has the prompt for all
        self.rows: set[Seq] = set()  # whose next tokens are known
        self.idle: set[Seq] = set()  # have blocks, and nothing to compute yet
        self.trunk = 0  # tokens that the idle ones will have from the first member, once it has computed them
        for s in members:
            s.group = self

    def common(self) -> int:
        columns = zip(*(s.text for _, s in self.beams))
        return next(place for place, tokens in enumerate(columns) if len(set(tokens)) > 1)


class Model:
    """The rule, as one would say it."""

    def __init__(self, policy: str, blocks: int, size: int, places: int, caching: bool, tier: int) -> None:
        self.policy, self.total, self.size, self.places, self.caching, self.tier = policy, blocks, size, places, caching, tier
        self.out = self.back = 0  # blocks copied to the tier and from it
        self.seqs: list[Seq] = []
        self.turns = self.stamps = self.seats = 0
        self.trunks: list[Group] = []  # resumed, and the others wait for the first member
        self.kept: list[Block] = []  # what can be found
        self.served = dict.fromkeys(WEIGHTS, 0.0)  # tenant → weighted tokens over weight
        self.last_waited: str | None = None

    def arrive(self, s: Seq, cached: int, others: list[Seq]) -> None:
        """``others``: the beams that it stands for, or samples of its prompt."""
        self.seqs += [s, *others]
        self.join(s, cached)

    def join(self, s: Seq, cached: int) -> None:
        """It waits from now on."""
        waiting = {other.tenant for other in self.in_state("waiting")}
        if s.tenant not in waiting:
            if waiting:
                self.served[s.tenant] = max(self.served[s.tenant], min(self.served[tenant] for tenant in waiting))
            elif self.last_waited is not None:
                self.served[s.tenant] = max(self.served[s.tenant], self.served[self.last_waited])
        s.hit, s.state = cached, "waiting"

    def follow(self, first: Seq, cached: Callable[[str], int]) -> None:
        """The prompt of these samples is computed, or the first of them is over."""
        for s in self.in_state("behind"):
            if s is not first and s.first is first:
                self.join(s, cached(s.name))

    def urgency(self, s: Seq) -> float:
        return {"fcfs": 0.0, "lpm": 0.0, "priority": s.priority, "fair": self.served[s.tenant]}[self.policy]

    def place(self, s: Seq) -> tuple[float, int]:
        value = {
            "fcfs": 0.0, "priority": s.priority + s.arrival / 30, "lpm": s.arrival - s.hit / 64, "fair": self.served[s.tenant],
        }[self.policy]
        return value, s.order

    def live(self) -> set[Block]:
        return {block for s in self.seqs for block in s.blocks}

    def cached(self) -> list[Block]:
        return sorted((b for b in self.kept if b not in self.live()), key=lambda b: b.stamp)

    def available(self) -> int:
        return self.total - len(self.live())

    def losers(self, needy: Seq) -> list[Seq]:
        """Who gives way together: the last in order, with its beams, or with all samples of its prompt unless one of them is in need."""
        last = max((s.head for s in self.in_state("running")), key=self.place)
        samples = sorted((s for s in self.in_state("running") if s.first is last.first), key=lambda s: s.seat)
        return last.family if last.group else [last] if needy in samples else samples

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

    def in_tier(self) -> int:
        return len({id(copy) for s in self.seqs for copy in s.copies})

    def swap(self, s: Seq, copied: dict[Block, object]) -> None:
        """A victim's blocks go to the tier, each once in a step, or none of them."""
        kept = min(s.done, s.known - 1)
        blocks = s.blocks[: self.need(kept)]
        new = [block for block in blocks if block not in copied]
        if blocks and self.in_tier() + len(new) <= self.tier:
            copied.update((block, object()) for block in new)
            s.copies, s.kept = [copied[block] for block in blocks], kept
            self.out += len(new)

    def come_back(self, s: Seq, matched: int) -> None:
        """The first blocks of a sequence are there; more of them may be in the tier."""
        s.done, s.sealed = max(matched * self.size, s.kept), matched if self.caching else 0
        self.back += max(0, self.need(s.kept) - matched)
        s.kept, s.copies = 0, []

    def take_trunk(self, group: Group) -> None:
        """The first member has what all beams begin with: the others take it over, or more of their own from the cache, or from the tier."""
        leader, *others = group.members
        self.trunks.remove(group)
        group.idle = set()
        shared = leader.blocks[: group.trunk // self.size]
        for s in others:
            s.blocks = shared + self.match(s)[len(shared) :]
            there = len(s.blocks)
            self.take(s, self.need(min(s.known + 1, s.end - 1)) - there)
            self.come_back(s, there)

    def select(self, group: Group) -> None:
        """The rows of all beams are in: of all that may follow the best are the next beams, or the search is over."""
        group.rows = set()
        if group.members[0].known + 1 == group.members[0].end:
            for s in group.members:
                self.give_up(s, "finished")
            return
        every = []
        for place, (total, s) in enumerate(group.beams):
            for token in range(VOCAB):
                more = logprob(hash_sequence(s.text), token)
                every.append((-(total + more), place, -more, token))
        best = sorted(every)[: len(group.members)]
        parents = [group.beams[place][1] for _, place, _, _ in best]
        spare = [s for s in group.members if s not in parents]
        beams = []
        for number, ((minus, _, _, token), parent) in enumerate(zip(best, parents)):
            s = parent
            if parent in parents[:number]:
                s = spare.pop()
                self.take_over(s, parent)
            beams.append((-minus, s, token))
        for _, s, token in beams:
            s.text.append(token)
        group.beams = [(total, s) for total, s, _ in beams]
        group.idle = set()

    def take_over(self, s: Seq, parent: Seq) -> None:
        """Its own blocks pay for a copy of what the parent has begun, or for its next token's place."""
        before = s.blocks
        self.give_up(s, "running")
        paid = any(block not in self.live() for block in before)
        full = parent.done // self.size
        s.text, s.done, s.blocks, s.sealed = list(parent.text), parent.done, parent.blocks[:full], full if self.caching else 0
        self.take(s, self.need(s.done + paid) - full)

    def need(self, tokens: int) -> int:
        return (tokens + self.size - 1) // self.size

    def in_state(self, state: str) -> list[Seq]:
        return [s for s in self.seqs if s.state == state]

    def step(self, budget: int, cached: Callable[[str], int]) -> dict[str, tuple[int, int, bool]]:
        """Name → (first position, tokens, samples?)."""
        for s in self.seqs:
            if s.done >= s.prompt:
                self.follow(s, cached)
        for group in list(self.trunks):
            if group.members[0].done >= group.trunk:
                self.take_trunk(group)
        part: dict[Seq, int] = {}
        seen: set[Seq] = set()
        copied: dict[Block, object] = {}
        while budget > 0:
            rest = [s for s in self.in_state("running") if s not in seen and s.known > s.done and not (s.group and s in s.group.idle)]
            if not rest:
                break
            fewest = min(s.known - s.done for s in rest)
            rest = [s for s in rest if s.known - s.done == fewest]
            most_urgent = min(self.urgency(s) for s in rest)
            s = min((s for s in rest if self.urgency(s) == most_urgent), key=lambda s: s.turn)
            seen.add(s)
            count = min(fewest, budget)
            while s.state == "running" and self.need(s.done + count) > len(s.blocks) + self.available():
                for loser in self.losers(s):
                    budget += part.pop(loser, 0)
                    self.swap(loser, copied)
                    self.give_up(loser, "waiting" if loser is loser.head else "behind")
                    loser.done = 0
                    if loser.group:
                        loser.group.rows, loser.group.idle = set(), set()
                        self.trunks = [group for group in self.trunks if group is not loser.group]
            if s.state == "running":
                self.take(s, self.need(s.done + count) - len(s.blocks))
                part[s] = count
                budget -= count
        for s, count in part.items():
            self.seal(s, s.done + count)
        if budget > 0 and len(self.in_state("running")) < self.places:
            for s in self.in_state("waiting"):
                s.hit = cached(s.name)
        budget -= sum(s.group is not None and s not in part for s in self.in_state("running"))  # beams that have their turn later
        seats = self.seats
        while budget > 0 and self.in_state("waiting") and len(self.in_state("running")) < self.places:
            s = min(self.in_state("waiting"), key=self.place)
            width, running = len(s.family), len(self.in_state("running"))
            if s.group and (running + width > self.places or (running and width > budget)):
                break
            wanted = min(self.need(s.known) + 1, self.need(s.end - 1))  # its context and a block, if it can ever use that
            resumed = s.group is not None and len(s.group.beams) > 1
            reserve = 0  # each other beam holds what it will not share, its next token's place included
            if s.group:
                s.group.trunk = s.group.common() // self.size * self.size if resumed else s.prompt
                reserve = max(1, self.need(min(s.known + 1, s.end - 1)) - s.group.trunk // self.size)
                wanted += (width - 1) * reserve
            first = s.first  # of its blocks all but the prompt's last token may be taken over, the last of them as a copy
            forks = s.fresh and first is not s and first.state == "running" and first.done >= s.prompt > 1 and first.seat <= seats
            matched = first.blocks[: (s.prompt - 1) // self.size] if forks else self.match(s)
            s.blocks = list(matched)
            if wanted - len(matched) > self.available():  # the matched ones are live now, so they are in nobody's way
                s.blocks = []
                break
            self.take(s, self.need(s.known) - len(matched))
            s.state = "running"
            self.seats += 1
            s.seat = self.seats
            self.come_back(s, len(matched))
            if forks:
                s.done = s.prompt - 1
            if s.tenant not in {other.tenant for other in self.in_state("waiting")}:
                self.last_waited = s.tenant
            if s.fresh:
                s.fresh = False
                self.served[s.tenant] += (s.prompt - s.done) / WEIGHTS[s.tenant]
            part[s] = min(s.known - s.done, budget)
            budget -= part[s]
            self.seal(s, s.done + part[s])
            if s.group:
                for other in s.family[1:]:
                    other.state = "running"
                    self.take(other, reserve)
                s.group.idle = set(s.family[1:])
                if resumed:
                    self.trunks.append(s.group)
                budget -= width - 1
        plan, over = {}, []
        for s, count in part.items():
            samples = s.done + count == s.known
            plan[s.name] = (s.done, count, samples)
            self.turns += 1
            s.turn = self.turns
            s.done += count
            if samples:
                self.served[s.tenant] += 2 / WEIGHTS[s.tenant]
                if s.group:
                    s.group.rows.add(s)
                    if len(s.group.rows) == len(s.group.beams):
                        self.select(s.group)
                    continue
                s.text.append(next_token(hash_sequence(s.text), s.seed, VOCAB))
                if s.known == s.end:
                    self.give_up(s, "finished")
                    over.append(s)
        for s in over:
            self.follow(s, cached)
        return plan


@st.composite
def cases(
    draw: st.DrawFn, blocks: tuple[int, int] = (1, 9), share: int = 1, outputs: tuple[int, int] = (1, 10), late: int = 12,
    beams: tuple[int, ...] = (0, -2, -3, 1, 2, 3), fewest: int = 1, budget: int = 10, tiers: tuple[int, ...] = (0, 1, 2, 4, 100),
    places: tuple[int, int] = (1, 5),
) -> Case:
    """``share``: a prompt takes at most one such part of the blocks; ``late``: the last step at which requests come; ``fewest``: requests."""
    count, size = draw(st.integers(*blocks)), draw(st.sampled_from([1, 2, 4]))
    seqs = draw(
        st.lists(
            st.tuples(
                st.integers(1, count * size // share), st.integers(*outputs), st.integers(-1, 1), st.sampled_from(sorted(WEIGHTS)),
                st.integers(0, late), st.integers(0, 1), st.sampled_from(beams),
            ), min_size=fewest, max_size=6,
        )
    )  # prompt, output, priority, tenant, the step it comes at, what it is about, beams (0: it samples, -n: n times)
    budgets = draw(st.lists(st.integers(1, budget), min_size=1, max_size=8))
    tier = draw(st.sampled_from(tiers))
    return count, size, draw(st.integers(*places)), draw(st.sampled_from(POLICIES)), draw(st.booleans()), tier, seqs, budgets


# Long outputs of searches, mostly, that come together, so that groups give way and come back.
CROWDS = cases(blocks=(4, 12), share=2, outputs=(4, 16), late=6, beams=(2, 0, -3, 2, 3), fewest=3, budget=8, tiers=(100, 0, 4), places=(4, 7))


@settings(max_examples=800, deadline=None)
@given(cases())
def test_every_plan_is_the_models(case: Case) -> None:
    follow(case)


@settings(max_examples=400, deadline=None)
@given(CROWDS)
def test_every_plan_of_a_crowd_is_the_models(case: Case) -> None:
    follow(case)


def follow(case: Case) -> None:
    blocks, size, places, policy, caching, tier, wanted, budgets = case
    most = max(budgets)
    kv = KvManager(blocks, size, prefix_caching=caching)
    step = 0

    def cached(name: str) -> int:
        """What the cache holds of a request changes all the time. As the policies see it; nothing is really cached."""
        return (17 * int(name[1]) + 41 * int(name[3:] or 0) + 29 * step) % 400

    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=places, max_num_batched_tokens=most, max_model_len=1000, preemption_mode="swap"),
        kv,
        make_policy(policy, cached_tokens=lambda r: cached(r.id), weights=WEIGHTS),
        budget=lambda now: budgets[step % len(budgets)],
        tier=SwapTier(tier) if tier else None,
    )
    executor = SimExecutor(places, blocks, size, vocab=VOCAB, max_tokens=most, tier_slots=tier)
    model = Model(policy, blocks, size, places, caching, tier)
    slot_of: dict[int, str] = {}
    late = max(arrival for *_, arrival, _, _ in wanted)
    while step <= late or scheduler.has_unfinished or model.in_state("waiting"):
        for i, (prompt, output, priority, tenant, arrival, topic, beams) in enumerate(wanted):
            if arrival == step:
                width, whole, samples = max(1, beams), prompt // size, max(1, -beams)
                if width > places or whole + width > blocks:  # the search could not run, even alone
                    beams, width = 0, 1
                params = SamplingParams(max_tokens=output, ignore_eos=True)
                if beams > 0:
                    params = SamplingParams(max_tokens=output, ignore_eos=True, use_beam_search=True, best_of=beams)
                names, at = [f"r{i}", *(f"r{i}/{number}" for number in range(1, max(width, samples)))], arrival * PACE
                end = min(prompt + output, (whole + (blocks - whole) // width) * size + 1)
                made = []
                for seed, name in enumerate(names):
                    scheduler.add(Request(name, [topic] * prompt, params, prompt + output, arrival=at, priority=priority, tenant=tenant,
                                          fork_of="" if name == names[0] else names[0], seed=seed))
                    made.append(Seq(name, len(model.seqs) + len(made), [topic] * prompt, end, priority, tenant, at))
                    made[-1].seed = seed
                    made[-1].first = made[0] if samples > 1 else made[-1]
                if beams > 0:
                    Group(made)
                model.arrive(made[0], cached(names[0]), made[1:])
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
        ledger = kv.ledger()
        assert (ledger.live, ledger.cached) == (len(model.live()), len(model.cached())), f"step {step}"
        held = scheduler._preempter.tier
        counters = scheduler.counters
        assert (counters.blocks_out, counters.blocks_in, held.num_used if held else 0) == (model.out, model.back, model.in_tier()), f"step {step}"
        scheduler.check()
        step += 1
        assert step < 3000
