"""A state machine drives kv + scheduler + SimExecutor through random histories; everything is checked after each action."""

import itertools
import zlib

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.config import SchedulerConfig
from octavo.core.output import Delta
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.core.step import IN, OUT, StepPlan
from octavo.errors import ContextTooLong, InvalidRequest
from octavo.kv.manager import KvManager
from octavo.kv.tier import SwapTier
from octavo.observe.events import Admitted, Event, Finished, Preempted, Recovered, TierFailed
from octavo.scheduler.policy import POLICIES, FairShare, LongestPrefix, make_policy
from octavo.scheduler.scheduler import Scheduler
from octavo.simulate.executor import SimExecutor, hash_sequence, logprob, next_token

VOCAB = 9
MAX_MODEL_LEN = 40


def the_answer(request: Request, capacity: int) -> tuple[list[int], str, int | None]:
    """What a request must get in any company: its output, finish_reason and stop_reason. Written from the rules, not the code."""
    params, tokens, output = request.params, list(request.prompt), []
    enders = request.eos_ids | set(params.stop_token_ids)
    while True:
        banned = frozenset(enders) if len(output) < params.min_tokens else frozenset()
        output.append(next_token(hash_sequence(tokens + output), request.seed, VOCAB, banned))
        if len(output) >= params.min_tokens:
            if output[-1] in request.eos_ids and not params.ignore_eos:
                return output, "stop", None
            if output[-1] in params.stop_token_ids:
                return output, "stop", output[-1]
        total = len(tokens) + len(output)
        if total >= request.max_total or total >= MAX_MODEL_LEN or total > capacity:
            return output, "length", None


def the_beams(request: Request, width: int, blocks: int, size: int, sliding: bool = False) -> list[tuple[list[int], str, int | None]]:
    """What a group of beams must get, best first: every continuation of every beam is looked at."""
    params, prompt, whole = request.params, request.prompt, 0 if sliding else len(request.prompt) // size
    total = len(prompt) + 1
    while total < min(request.max_total, MAX_MODEL_LEN) and whole + width * (-(-total // size) - whole) <= blocks:
        total += 1  # one more can be computed
    most = total - len(prompt)
    enders = set(params.stop_token_ids) if params.ignore_eos else request.eos_ids | set(params.stop_token_ids)
    banned = request.eos_ids | set(params.stop_token_ids)
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int], str, int | None]] = []
    for length in range(1, most + 1):
        every = [
            (-(score + logprob(state, token)), place, -logprob(state, token), token, output)
            for place, (score, output) in enumerate(beams)
            for state in [hash_sequence(prompt + output)]
            for token in range(VOCAB)
            if length > params.min_tokens or token not in banned
        ]
        every = sorted(every)[: max(2, 1 + len(enders)) * width]
        for minus, _, _, token, output in every[:width]:
            if token in enders:
                stop = None if token in request.eos_ids and not params.ignore_eos else token
                done.append((-minus / length**params.length_penalty, [*output, token], "stop", stop))
            elif length == most:
                done.append((-minus / length**params.length_penalty, [*output, token], "length", None))
        done = sorted(done, key=lambda found: -found[0])[:width]
        beams = [(-minus, [*output, token]) for minus, _, _, token, output in every if token not in enders][:width]
        if not beams or length == most:
            break
        reach = most if params.early_stopping == "never" and params.length_penalty > 0 else length
        if len(done) == width and (params.early_stopping is True or beams[0][0] / reach**params.length_penalty <= done[-1][0]):
            break
    return [found[1:] for found in done]


class Machine(RuleBasedStateMachine):
    depth = 1  # plans in flight

    @initialize(
        blocks=st.integers(1, 8),
        block_size=st.sampled_from([1, 3, 4]),
        seqs=st.integers(1, 4),
        budget=st.integers(1, 9),
        policy=st.sampled_from(POLICIES),
        admission=st.sampled_from(["optimistic", "predicted"]),
        lookahead=st.sampled_from([0, 0, 2]),
        caching=st.sampled_from([True, True, False]),
        tier=st.sampled_from([0, 1, 3, 60]),
        mode=st.sampled_from(["auto", "swap", "swap", "recompute"]),
        block_seconds=st.sampled_from([0.0, 0.002, 0.02]),
        window=st.sampled_from([None, None, 1, 2, 5, 9, 17]),
    )
    def start(
        self, blocks: int, block_size: int, seqs: int, budget: int, policy: str, admission: str, lookahead: int, caching: bool,
        tier: int, mode: str, block_seconds: float, window: int | None,
    ) -> None:
        self.kv = KvManager(blocks, block_size, prefix_caching=caching, window=window)
        self.budget_now, self.full_budget, self.lookahead = budget, budget, lookahead
        self.allowed = True
        self.now = self.salt = 0
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=MAX_MODEL_LEN, admission=admission, preemption_mode=mode,
            ),
            self.kv,
            make_policy(policy, cached_tokens=lambda r: zlib.crc32(b"%d" % (r.seed + self.salt)) % len(r.tokens), weights={"a": 3.0}),
            admission=[lambda request: self.allowed],
            lookahead=lookahead,
            budget=lambda now: self.budget_now,
            tier=SwapTier(tier) if tier else None,
            block_seconds=block_seconds,
        )
        self.mode = mode
        self.tier = self.scheduler._preempter.tier
        self.broken: frozenset[str] = frozenset()  # kinds of moves that fail
        self.executor = SimExecutor(
            seqs, blocks, block_size, vocab=VOCAB, max_tokens=budget, cost=lambda plan: 0.005 + 0.001 * plan.num_tokens, tier_slots=tier,
            block_seconds=block_seconds, breaks=lambda move: move.kind in self.broken, window=window,
        )
        self.name_of: dict[int, str] = {}  # slot → request, as of the plans committed
        self.reached: dict[str, int] = {}  # request → tokens that were ever computed of it
        self.recomputed = 0
        self.requests: dict[str, Request] = {}
        self.beams: dict[str, list[str]] = {}  # of each beam: those of its group
        self.live: set[str] = set()
        self.answer: dict[str, tuple[list[int], str, int | None]] = {}
        self.output: dict[str, list[int]] = {}
        self.scored: dict[str, list[int]] = {}
        self.last: dict[str, Delta] = {}
        self.flying: list[StepPlan] = []
        self.events: list[Event] = []

    @rule(
        length=st.integers(1, 30),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 6),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from(["", "a", "b"]),
        seed=st.one_of(st.just(7), st.integers(0, 2**64 - 1)),  # often the same: then outputs are shared, too
        eos=st.sets(st.integers(0, VOCAB - 1), max_size=2),
        stop=st.lists(st.integers(0, VOCAB - 1), max_size=1),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        kind=st.integers(0, 2),
        salt=st.sampled_from(["", "", "a"]),
        n=st.sampled_from([1, 1, 2, 3]),
        beams=st.sampled_from([False, False, True]),
        length_penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
        early_stopping=st.sampled_from([False, True, "never"]),
    )
    def add(
        self, length: int, max_tokens: int, min_tokens: int, priority: int, tenant: str, seed: int, eos: set[int], stop: list[int],
        ignore_eos: bool, prompt_logprobs: int | None, kind: int, salt: str, n: int,
        beams: bool, length_penalty: float, early_stopping: bool | str,
    ) -> None:  # fmt: skip
        prompt = [(kind + i * i) % VOCAB for i in range(length)]  # so many begin alike
        first = f"r{len(self.requests)}"
        size, pool, sliding = self.kv.block_size, self.kv.pool.num_blocks, self.kv.window is not None
        names = [f"r{len(self.requests) + index}" for index in range(n)]
        for index in range(n):
            name = f"r{len(self.requests)}"
            params = SamplingParams(
                max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), stop_token_ids=stop, ignore_eos=ignore_eos,
                prompt_logprobs=None if index else prompt_logprobs, logprobs=1, use_beam_search=beams, best_of=n if beams else None,
                **({"length_penalty": length_penalty, "early_stopping": early_stopping} if beams else {}),
            )  # fmt: skip
            request = Request(
                name, prompt, params, length + max_tokens, frozenset(eos), (seed + index) % 2**64, self.now, priority, tenant,
                cache_salt=salt, fork_of=first if index else "",
            )
            self.requests[name] = request
            if length > self.kv.capacity:
                with pytest.raises(ContextTooLong, match=f"{length} tokens, the KV pool holds {self.kv.capacity} "):
                    self.scheduler.add(request)
            elif beams and n > self.scheduler.config.max_num_seqs:
                with pytest.raises(InvalidRequest, match=f"{n} beams .* at most {self.scheduler.config.max_num_seqs} run"):
                    self.scheduler.add(request)
            elif beams and n > 1 and (need := -(-length // size) * n if sliding else length // size + n) > pool:
                with pytest.raises(ContextTooLong, match=f"take {need} blocks of {size} at least, and the KV pool has {pool}"):
                    self.scheduler.add(request)
            else:
                self.scheduler.add(request)
                self.live.add(name)
                self.output[name], self.scored[name] = [], []
                if beams:
                    self.beams[name] = names
                    self.answer[name] = the_beams(request, n, pool, size, sliding)[index]
                else:
                    self.answer[name] = the_answer(request, self.kv.capacity)

    def family(self, name: str) -> set[str]:
        """Who ends with it."""
        return set(self.beams.get(name, [name]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        deltas = self.scheduler.abort(name)
        assert {delta.request_id for delta in deltas} == self.family(name)
        self.take(deltas)
        assert self.scheduler.abort(name) == []

    @rule(share=st.sampled_from([0, 1, 2, 100]))
    def change_budget(self, share: int) -> None:
        self.budget_now = min(share, self.full_budget)

    @precondition(lambda self: not self.flying)
    @rule()
    def reset_cache(self) -> None:
        cached, free = self.kv.ledger().cached, self.kv.ledger().free
        assert self.scheduler.reset_cache() == cached and self.kv.ledger().free == free + cached and self.kv.ledger().cached == 0

    @rule(seconds=st.integers(0, 60), salt=st.integers(0, 5))
    def time_passes(self, seconds: int, salt: int) -> None:
        self.now += seconds
        self.salt = salt  # the cache holds other things now

    @rule(allowed=st.booleans())
    def change_admission(self, allowed: bool) -> None:
        self.allowed = allowed

    @rule(kinds=st.sampled_from([(), (), (), (IN,), (OUT,), (IN, OUT)]))
    def break_the_tier(self, kinds: tuple[str, ...]) -> None:
        self.broken = frozenset(kinds)

    @precondition(lambda self: len(self.flying) < self.depth)
    @rule()
    def plan(self) -> None:
        plan = self.scheduler.plan(0.0)
        if plan is not None:
            assert 0 < plan.num_tokens <= self.budget_now
            self.flying.append(plan)
            self.events += plan.events

    @precondition(lambda self: self.flying)
    @rule()
    def commit(self) -> None:
        plan = self.flying.pop(0)
        found = self.executor.execute(plan)
        self.count(plan)
        self.take(self.scheduler.commit(plan, found))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def commit_with_one_error(self, data: st.DataObject) -> None:
        plan = self.flying.pop(0)
        found = self.executor.execute(plan)
        sick = data.draw(st.integers(0, len(found.slots) - 1))
        slots = list(found.slots)
        slots[sick] = type(slots[sick])(slots[sick].slot, slots[sick].epoch, error="sick")
        self.count(plan, sick)
        self.take(self.scheduler.commit(plan, msgspec.structs.replace(found, slots=slots)))

    @precondition(lambda self: len(self.flying) == 1)
    @rule(executed=st.booleans())
    def fail(self, executed: bool) -> None:
        plan = self.flying.pop(0)
        if executed:
            self.executor.execute(plan)
        self.take(self.scheduler.fail(plan, "it broke"))

    @precondition(lambda self: not self.flying)
    @rule(times=st.integers(1, 12))
    def steps(self, times: int) -> None:
        for _ in range(times):
            self.plan()
            if self.flying:
                self.commit()
            self.scheduler.check()

    def count(self, plan: StepPlan, sick: int = -1) -> None:
        """Tokens that are computed once more, counted from the plans."""
        for place, item in enumerate(plan.items):
            if item.init is not None:
                self.name_of[item.slot] = item.init.request_id
            name, end = self.name_of[item.slot], item.start + len(item.tokens)
            if name in self.live and place != sick:
                self.recomputed += max(0, min(end, self.reached.get(name, 0)) - item.start)
                self.reached[name] = max(self.reached.get(name, 0), end)

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            name, request = delta.request_id, self.requests[delta.request_id]
            assert name in self.live, "news of a request that has ended"
            assert delta.tokens or delta.prompt_logprobs or delta.finish_reason
            self.output[name] += delta.tokens
            self.scored[name] += [row.token for row in delta.prompt_logprobs or []]
            assert [row.token for row in delta.logprobs or []] == delta.tokens
            output, reason, stop_reason = self.answer[name]
            assert self.output[name] == output[: len(self.output[name])], "the tokens depend on the company"
            whole = request.prompt[1:] if request.params.prompt_logprobs is not None else []
            assert self.scored[name] == whole[: len(self.scored[name])]
            if delta.finish_reason is None:
                continue
            self.live.remove(name)
            self.last[name] = delta
            if delta.finish_reason in ("stop", "length"):
                assert (self.output[name], delta.finish_reason, delta.stop_reason) == (output, reason, stop_reason)
                assert self.scored[name] == whole
            else:
                assert delta.finish_reason in ("abort", "error") and (delta.error is not None) == (delta.finish_reason == "error")

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            self.check_cache()
            ledger = self.kv.ledger()
            assert ledger.live + ledger.cached + ledger.free == ledger.total == self.kv.pool.num_blocks
            assert self.scheduler.has_unfinished == bool(self.live)
            running = [r for r in self.scheduler.running if not (r.ahead and len(r.tokens) + r.ahead >= r.limit)]  # those have their last step
            assert len(running) <= self.full_budget or len({r.head for r in running}) == 1, "more run than a step can serve"
            assert self.tier is None or self.mode != "recompute" or self.tier.num_used == 0
            self.check_policy()

    def check_policy(self) -> None:
        """The queue is in the policy's order, restated by sorting; nothing is kept of who has ended."""
        policy, waiting = self.scheduler.policy, self.scheduler.waiting
        queue = list(waiting)
        known = self.live - {r.id for parked in self.scheduler._parked.values() for r in parked}  # the others have not arrived for it
        known -= {name for name in self.live if self.requests[name].head.id != name}  # their leader stands for them
        assert queue == sorted(queue, key=policy.place) and waiting.first() is (queue[0] if queue else None)
        if isinstance(policy, FairShare):
            assert policy._of.keys() == known and set(waiting.groups) == {policy.group(r) for r in queue}
            assert all(account.open == sum(policy._of[name] is account for name in known) for account in policy._accounts.values())
        if isinstance(policy, LongestPrefix):
            assert policy._hits.keys() == known

    def check_cache(self) -> None:
        """What is found under a key is what was hashed into it; no parent goes before its child; salts do not meet."""
        index, order = self.kv._index, {block: place for place, block in enumerate(self.kv.pool.eviction_order())}
        if index is None:
            assert not order
            return
        meaning: dict[bytes, tuple[object, ...]] = {}
        for request in self.requests.values():
            keys, size = request.block_keys or [], self.kv.block_size
            for number, key in enumerate(keys):
                said = request.cache_salt, tuple(request.tokens[: number * size])
                assert meaning.setdefault(key, said) == said
            places = [order[block] for key in keys[1:] if (block := index.holder(key)) in order]
            # Behind a window the beginning goes first: what follows is found without it.
            assert self.kv.window is not None or places == sorted(places, reverse=True), "a parent is evicted before its child"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.budget_now, self.allowed = self.full_budget, True
        served = [r for name, r in self.requests.items() if name in self.output]
        limits = [min(r.max_total, MAX_MODEL_LEN, self.kv.capacity + 1) for r in served]
        blocks = sum(self.kv.blocks_for(limit) for limit in limits)
        most = sum(limits) + blocks * 3 * max(limits, default=0)  # all tokens once, and the whole context of a group at each preemption
        steps = 0
        while self.flying or self.live:
            while self.live and len(self.flying) < self.depth and (plan := self.scheduler.plan(0.0)) is not None:
                self.flying.append(plan)
                self.events += plan.events
            assert self.flying, f"{self.live} are stuck"
            self.commit()
            self.scheduler.check()
            steps += 1
            assert steps <= most * self.depth, f"not drained after {steps} steps"
        self.events += self.scheduler.take_events()
        if self.depth == 1 and self.lookahead == 0:
            gone = [e for e in self.events if isinstance(e, Preempted) and "tier failed" not in e.cause]
            once = itertools.groupby(gone, key=lambda e: (e.cause, self.requests[e.request_id].fork_of or e.request_id))  # a group gives way at once
            effective = [key for key, events in once if any(e.blocks_freed for e in events)]
            assert len(effective) <= blocks, "more preemptions than block boundaries"
        assert set(self.last) == set(self.output) and not self.scheduler.has_unfinished
        ledger = self.kv.ledger()
        assert ledger.free + ledger.cached == self.kv.pool.num_blocks and not self.kv.holders()
        counters = self.scheduler.counters
        assert counters.cache_hits == sum(r.num_cached for r in self.requests.values())
        assert self.tier is None or self.tier.num_used == self.tier.num_requests == 0
        assert not self.scheduler._preempter._debts and not self.scheduler._preempter._movers and not self.scheduler._preempter._back
        failures = [e for e in self.events if isinstance(e, TierFailed)]
        assert len(failures) == self.scheduler._preempter.failed
        if self.depth == 1 and not failures:
            assert counters.tokens_recomputed == self.recomputed
        self.check_events()

    def check_events(self) -> None:
        """Each request's events tell a sensible life: (admitted, preempted)* then finished, once."""
        for name in self.output:
            life = [e for e in self.events if e.request_id == name and not isinstance(e, Recovered)]
            again = sum(e.recomputed_tokens for e in self.events if e.request_id == name and isinstance(e, Recovered))
            assert again <= self.scheduler.counters.tokens_recomputed
            assert isinstance(life[-1], Finished) and life[-1].reason == self.last[name].finish_reason
            running = False
            for i, event in enumerate(life[:-1]):
                assert isinstance(event, Admitted if not running else Preempted)
                if isinstance(event, Admitted):
                    assert event.resumed == (i > 0)
                    assert event.resumed or event.cached_tokens == self.requests[name].num_cached
                running = not running
            assert self.requests[name].preemptions == sum(isinstance(e, Preempted) for e in life)
        preempted, counters = [e for e in self.events if isinstance(e, Preempted)], self.scheduler.counters
        assert sum(e.tokens_lost for e in preempted) == counters.tokens_lost
        assert sum(e.blocks_swapped for e in preempted) == counters.blocks_out
        assert all(e.how == "swap" or e.blocks_swapped == 0 for e in preempted)
        assert all(e.how == "recompute" for e in preempted) or self.tier is not None


class Pipelined(Machine):
    depth = 2


def long(machine: type[Machine], histories: int) -> type:
    """The machine as a test of so many histories."""
    case = type(f"Test{machine.__name__}{histories}", (machine.TestCase,), {})
    case.settings = settings(max_examples=histories, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
    return case


TestSynchronous = long(Machine, 200)
TestPipelined = long(Pipelined, 100)
TestSynchronousLong = pytest.mark.matrix(long(Machine, 5000))
TestPipelinedLong = pytest.mark.matrix(long(Pipelined, 5000))
