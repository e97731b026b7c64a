"""Swap or recompute: what is chosen, what it costs, and what becomes of a request whose blocks are in the tier."""

from dataclasses import replace

import pytest

from octavo.config import SchedulerConfig
from octavo.core.output import Delta
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.core.step import IN, OUT, Move, StepPlan
from octavo.kv.manager import KvManager
from octavo.kv.tier import SwapTier
from octavo.observe.events import Admitted, Event, Preempted, Recovered, TierFailed
from octavo.scheduler.preempt import Preempter
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.times import StepTimes
from octavo.simulate.drive import Job, LinearCost, simulate
from octavo.simulate.executor import SimExecutor, hash_sequence, next_token


class Rig:
    """A scheduler with a tier over the checking executor; remembers all that happened."""

    def __init__(self, blocks: int, tier: int = 64, mode: str = "swap", tokens: int = 64, caching: bool = False, step: float = 0.001,
                 move: float = 0.0001, seqs: int = 8) -> None:
        config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=10_000, preemption_mode=mode)
        self.kv, self.tier = KvManager(blocks, 4, prefix_caching=caching), SwapTier(tier)
        self.scheduler = Scheduler(config, self.kv, tier=self.tier, block_seconds=move)
        self.broken: set[str] = set()
        self.executor = SimExecutor(
            seqs, blocks, 4, max_tokens=tokens, cost=lambda plan: step * plan.num_tokens, tier_slots=tier, block_seconds=move,
            breaks=lambda m: m.kind in self.broken,
        )
        self.requests: dict[str, Request] = {}
        self.deltas: dict[str, list[Delta]] = {}
        self.plans: list[StepPlan] = []
        self.events: list[Event] = []

    def add(self, name: str, prompt: int, output: int = 8, topic: int = 0, fork_of: str = "", **params: object) -> Request:
        tokens = [(topic * 100 + i) % 1000 for i in range(prompt)]
        sampling = SamplingParams(max_tokens=output, ignore_eos=True, **params)  # type: ignore[arg-type]
        request = Request(name, tokens, sampling, prompt + output, fork_of=fork_of)
        self.requests[name], self.deltas[name] = request, []
        self.scheduler.add(request)
        return request

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan is not None
        self.plans.append(plan)
        self.events += plan.events
        self.scheduler.check()
        return plan

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.deltas[delta.request_id].append(delta)
        self.events += self.scheduler.take_events()
        self.scheduler.check()

    def commit(self, plan: StepPlan) -> None:
        self.take(self.scheduler.commit(plan, self.executor.execute(plan)))

    def until(self, name: str, state: str) -> None:
        """Steps until a request has been preempted, or is back."""
        for _ in range(500):
            kinds = [type(e).__name__ for e in self.events if e.request_id == name]
            if kinds and kinds[-1] == state:
                return
            self.commit(self.plan())
        raise AssertionError(f"{name} was never {state}")

    def finish(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_unfinished:
                break
            self.commit(self.plan())

    def drain(self) -> None:
        self.finish()
        assert not self.scheduler.has_unfinished and self.tier.num_used == 0 and self.kv.pool.num_available == self.kv.pool.num_blocks
        for name, request in self.requests.items():
            deltas = self.deltas[name]
            if deltas[-1].finish_reason == "length":
                assert [t for d in deltas for t in d.tokens] == answer(request)

    def of(self, kind: type, name: str | None = None) -> list[Event]:
        return [e for e in self.events if isinstance(e, kind) and (name is None or e.request_id == name)]


def answer(request: Request) -> list[int]:
    tokens = list(request.prompt)
    while len(tokens) < request.max_total:
        tokens.append(next_token(hash_sequence(tokens), request.seed, 1000))
    return tokens[request.num_prompt :]


@pytest.mark.parametrize("caching", [False, True])
def test_a_swapped_request_computes_nothing_twice(caching: bool) -> None:
    rig = Rig(8, caching=caching)
    rig.add("a", 10, 20, 1)
    rig.add("b", 12, 20, 2)
    rig.drain()
    away, back, whole = rig.of(Preempted, "b"), rig.of(Admitted, "b")[1:], rig.of(Recovered, "b")
    assert away and len(away) == len(back) == len(whole)
    for gone, returned, recovered in zip(away, back, whole):
        assert (gone.how, gone.tokens_lost) == ("swap", 0) and gone.blocks_swapped == gone.blocks_freed > 0 and gone.seconds > 0
        assert returned.swapped_tokens + returned.cached_tokens >= 12 and returned.resumed and recovered.recomputed_tokens == 0
        assert recovered.seconds == pytest.approx(0.0001 * (gone.blocks_swapped + recovered.blocks_swapped))
    c = rig.scheduler.counters
    assert rig.scheduler._times.each(64) == pytest.approx(0.001)  # moves are no part of a step's time
    assert (c.preemptions, c.tokens_lost, c.tokens_recomputed) == (len(away), 0, 0)
    assert c.tokens_planned == 10 + 19 + 12 + 19  # each row once
    kinds = [m.kind for p in rig.plans for m in p.moves]
    assert (c.blocks_out, c.blocks_in) == (kinds.count(OUT), kinds.count(IN))


def test_recomputed_tokens_are_those_that_were_computed_again() -> None:
    for caching, again in ((False, True), (True, False)):
        rig = Rig(8, mode="recompute", caching=caching)
        rig.add("a", 10, 9, 1)  # ends before it needs what the cache keeps of b
        rig.add("b", 12, 20, 2)
        rig.drain()
        c = rig.scheduler.counters
        assert c.tokens_recomputed == c.tokens_planned - (10 + 8 + 12 + 19)
        assert c.preemptions and c.tokens_lost >= 12 and (c.tokens_recomputed == c.tokens_lost) == again
        assert sum(e.recomputed_tokens for e in rig.of(Recovered)) == c.tokens_recomputed and c.cache_hits == 0


def test_a_prompt_in_the_middle_goes_on_where_it_was() -> None:
    """Preempted with its prompt half computed and half scored: neither is done twice."""
    rig = Rig(16, tokens=8, seqs=2)
    rig.add("a", 12, 40, 1)
    rig.add("b", 40, 4, 2, prompt_logprobs=0)
    for _ in range(5):
        rig.commit(rig.plan())
    request = rig.requests["b"]
    assert 0 < request.num_computed < 40
    done = request.num_computed
    rig.scheduler._preempt(request, "for the test")
    rig.take([])
    rig.until("b", "Recovered")
    (back,) = rig.of(Admitted, "b")[1:]
    assert back.swapped_tokens == done
    rig.drain()
    rows = [row.token for d in rig.deltas["b"] for row in d.prompt_logprobs or ()]
    assert rows == request.prompt[1:] and rig.scheduler.counters.tokens_recomputed == 0


def test_what_was_in_flight_is_not_kept() -> None:
    """Two plans ahead of their results: tokens sampled in them are dropped with them, and so are the rows they scored."""
    rig = Rig(16)
    rig.add("b", 12, 9, 2)
    first, second = rig.plan(), rig.plan()
    assert rig.requests["b"].num_computed == 13
    rig.scheduler._preempt(rig.requests["b"], "for the test")
    rig.take([])
    assert rig.tier.get("b").num_tokens == 11  # type: ignore[union-attr]
    rig.commit(first)
    rig.commit(second)
    rig.drain()
    assert rig.of(Admitted, "b")[1].swapped_tokens == 11 and rig.scheduler.counters.tokens_recomputed == 1
    rig = Rig(16, tokens=8)
    request = rig.add("s", 40, 4, 2, prompt_logprobs=0)
    rig.commit(rig.plan())
    first, second = rig.plan(), rig.plan()
    rig.scheduler._preempt(request, "for the test")
    rig.take([])
    rig.commit(first)
    rig.commit(second)
    rig.drain()
    assert rig.of(Admitted, "s")[1].swapped_tokens == 8 and rig.of(Preempted, "s")[0].blocks_swapped == 6
    assert [row.token for d in rig.deltas["s"] for row in d.prompt_logprobs or ()] == request.prompt[1:]


@pytest.mark.parametrize("tier", [1, 2, 3])
def test_a_full_tier_means_recompute(tier: int) -> None:
    rig = Rig(8, tier=tier)
    rig.add("a", 10, 20, 1)
    rig.add("b", 12, 20, 2)
    rig.until("b", "Preempted")
    (event,) = rig.of(Preempted, "b")
    assert event.how == "recompute" and event.tokens_lost >= 12 and event.blocks_swapped == 0
    rig.drain()


@pytest.mark.parametrize("end", ["abort", "error"])
def test_whoever_ends_while_swapped_frees_its_slots(end: str) -> None:
    rig = Rig(8)
    rig.add("a", 10, 20, 1)
    rig.add("b", 12, 20, 2)
    rig.until("b", "Preempted")
    assert rig.tier.num_used > 0
    if end == "abort":
        rig.take(rig.scheduler.abort("b"))
    else:
        plan = rig.plan()
        rig.take(rig.scheduler.fail(plan, "broken"))  # ends a; b, which waits, is not concerned
        assert rig.tier.num_used > 0
        rig.take(rig.scheduler.abort("b"))
    assert rig.tier.num_used == 0
    rig.drain()


def test_a_block_that_two_victims_share_goes_out_once() -> None:
    rig = Rig(16, caching=True)
    rig.add("a", 8, 40, 1)
    rig.add("b", 21, 9, 2)
    rig.add("c", 23, 9, 2)  # begins as b does: 5 full blocks
    for _ in range(2):
        rig.commit(rig.plan())
    for name in ("c", "b"):
        rig.scheduler._preempt(rig.requests[name], "for the test")
    rig.scheduler.check()
    c, b = rig.scheduler.take_events()
    assert (c.blocks_swapped, b.blocks_swapped) == (6, 1) and rig.tier.num_used == 7
    rig.take(rig.scheduler.abort("c"))
    assert rig.tier.num_used == 6  # b still holds what they shared
    rig.drain()


def test_a_move_that_was_not_made_is_not_trusted() -> None:
    """The step that was to move blocks out fails: they are computed again."""
    rig = Rig(8)
    rig.add("a", 10, 20, 1)
    rig.add("b", 12, 20, 2)
    while not rig.of(Preempted, "b"):
        plan = rig.plan()
        if any(m.kind == OUT for m in plan.moves):
            rig.take(rig.scheduler.fail(plan, "broken"))
            break
        rig.commit(plan)
    assert rig.tier.num_used == 0 and [d.finish_reason for d in rig.deltas["a"]][-1] == "error"
    rig.drain()
    assert rig.scheduler.counters.tokens_recomputed >= 12 and rig.deltas["b"][-1].finish_reason == "length"


def test_who_came_back_from_there_starts_anew() -> None:
    """Plans in flight: one moves blocks out, the next brings them back, and the first fails."""
    rig = Rig(8)
    rig.add("a", 10, 3, 1)
    rig.add("b", 12, 20, 2)
    for _ in range(2):
        rig.commit(rig.plan())
    rig.scheduler._preempt(rig.requests["b"], "for the test")
    first = rig.plan()
    assert [m.kind for m in first.moves] == [OUT] * 4 + [IN] * 4  # back at once
    assert not any(i.sample for i in first.items if i.init and i.init.request_id == "a")
    rig.scheduler._preempt(rig.requests["b"], "for the test, again")
    second = rig.plan()
    assert {m.kind for m in second.moves} == {OUT, IN}
    rig.take(rig.scheduler.fail(first, "broken"))
    assert [e.request_id for e in rig.of(Preempted)][-1] == "b" and rig.of(Preempted)[-1].how == "recompute" and rig.tier.num_used == 0
    rig.executor._number = second.number
    rig.executor._slots.clear()
    assert rig.scheduler.commit(second, sound(second)) == []
    rig.drain()


def sound(plan: StepPlan):  # type: ignore[no-untyped-def]
    from octavo.core.step import SlotResult, StepResult

    return StepResult(plan.number, [SlotResult(i.slot, i.epoch, [5] if i.sample else []) for i in plan.items])


@pytest.mark.parametrize("kind", [OUT, IN])
@pytest.mark.parametrize("caching", [False, True])
def test_a_broken_tier_costs_time_and_nothing_else(kind: str, caching: bool) -> None:
    rig = Rig(12, caching=caching)
    for name, topic in (("a", 1), ("b", 2), ("c", 2), ("d", 3)):
        rig.add(name, 13, 20, topic)
    rig.broken = {kind}
    rig.drain()
    (failure,) = rig.of(TierFailed)  # told once
    assert failure.message and all(d[-1].finish_reason == "length" for d in rig.deltas.values())
    later = rig.events[rig.events.index(failure) :]
    assert all(e.how == "recompute" for e in later if isinstance(e, Preempted)) and rig.scheduler.counters.tokens_recomputed > 0
    swapped = [m for p in rig.plans for m in p.moves if m.kind == kind]
    assert swapped and len({p.number for p in rig.plans if any(m.kind == OUT for m in p.moves)}) >= 1


def test_who_shares_what_could_not_be_brought_back_starts_anew() -> None:
    """In one step a request comes back from a broken tier, and another finds its blocks in the cache as they are filled."""
    rig = Rig(20, caching=True)
    rig.add("a", 13, 12, 2)
    rig.commit(rig.plan())
    rig.scheduler._preempt(rig.requests["a"], "for the test")
    rig.kv.reset_cache()
    rig.add("b", 14, 6, 2)
    rig.broken = {IN}
    rig.commit(rig.plan())
    assert [(e.request_id, e.cached_tokens, e.swapped_tokens) for e in rig.of(Admitted)[1:]] == [("a", 0, 13), ("b", 12, 0)]
    assert [e.request_id for e in rig.of(Preempted)] == ["a", "a", "b"] and len(rig.of(TierFailed)) == 1
    rig.drain()


def test_blocks_that_could_not_be_filled_take_nobodys_key() -> None:
    """What comes back is the double of cached blocks, which are evicted in the same step: the keys stay without a block."""
    rig = Rig(16, tokens=16, caching=True)
    rig.add("h", 17, 1, 2)
    rig.commit(rig.plan())
    rig.commit(rig.plan())
    scored = rig.add("s", 19, 4, 2, prompt_logprobs=0)  # reads no cached block, and here completes none that is new
    rig.commit(rig.plan())
    rig.scheduler._preempt(scored, "for the test")
    rig.add("x", 40, 4, 3)
    rig.broken = {IN}
    evicted = rig.kv.ledger().cached
    rig.commit(rig.plan())
    back = [(e.request_id, e.swapped_tokens) for e in rig.of(Admitted)]
    assert back[-2:] == [("s", 16), ("x", 0)] and rig.of(Preempted, "s")[-1].how == "recompute" and evicted == 4
    rig.take(rig.scheduler.abort("x"))
    rig.add("y", 17, 4, 2)
    rig.drain()


def test_who_comes_back_in_the_step_that_could_not_take_it_out_starts_anew() -> None:
    """The move out fails and the move in does not: it brought back what was there before."""
    rig = Rig(8)
    rig.add("a", 10, 20, 1)
    rig.add("b", 12, 20, 2)
    for _ in range(2):
        rig.commit(rig.plan())
    rig.scheduler._preempt(rig.requests["b"], "for the test")
    rig.broken = {OUT}
    rig.commit(rig.plan())
    assert {m.kind for m in rig.plans[-1].moves} == {OUT, IN} and len(rig.of(TierFailed)) == 1
    rig.drain()


# -- forks and resets


def test_no_fork_copies_what_is_yet_to_be_filled() -> None:
    """A parent comes back and finds its blocks in the cache as the same step fills them; copies are made before: its sample cannot fork it."""
    rig = Rig(12, mode="recompute", caching=True, seqs=2)
    rig.add("q", 6, 20)
    rig.add("p", 6, 20)
    rig.add("s", 6, 20, fork_of="p")  # all slots are taken
    for _ in range(8):
        rig.commit(rig.plan())
    assert rig.requests["q"].tokens == rig.requests["p"].tokens
    for name in ("q", "p"):
        rig.scheduler._preempt(rig.requests[name], "for the test")
    rig.scheduler.reset_cache()
    rig.executor._memory = [None] * len(rig.executor._memory)
    for request in rig.requests.values():
        request.block_keys = rig.kv.root("", "")  # as if others had driven all of it out of the cache
    rig.scheduler._slots.insert(0, 2)  # a third slot is free by now
    rig.executor._num_slots = 3
    rig.scheduler.config = replace(rig.scheduler.config, max_num_seqs=3)
    rig.commit(rig.plan())
    assert [(e.request_id, e.cached_tokens, e.forked_tokens) for e in rig.of(Admitted)[2:]] == [("q", 0, 0), ("p", 12, 0), ("s", 4, 0)]
    rig.drain()


@pytest.mark.parametrize("away", [False, True])
def test_nobody_finds_what_was_computed_before_a_reset(away: bool) -> None:
    """Neither through a sample that forks later, nor through the tier."""
    rig = Rig(40, caching=True)
    rig.add("p", 22, 4)
    rig.add("s", 22, 4, fork_of="p")
    rig.commit(rig.plan())
    if away:
        rig.scheduler._preempt(rig.requests["p"], "for the test")
    rig.scheduler.reset_cache()
    rig.drain()
    assert sum(e.forked_tokens + e.swapped_tokens for e in rig.of(Admitted)) == 21 + 22 * away
    new = rig.add("new", 22, 4)
    rig.drain()
    assert new.num_cached == 0 and rig.add("again", 22, 4).num_cached == 0
    rig.drain()
    assert rig.requests["again"].num_cached == 20


# -- the choice


def preempter(mode: str = "auto", tier: int = 64, move: float = 0.001) -> Preempter:
    times = StepTimes()
    times.add(512, 0.5)
    times.add(1, 0.01)
    return Preempter(mode, 16, SwapTier(tier), times, 512, move)


def victim(tokens: int, name: str = "v") -> Request:
    return Request(name, [1] * tokens, SamplingParams(), tokens + 9, num_computed=tokens - 1)


@pytest.mark.parametrize(("move", "how"), [(0.001, "swap"), (0.0077, "swap"), (0.0079, "recompute"), (1.0, "recompute")])
def test_the_faster_way_is_chosen(move: float, how: str) -> None:
    """A full step computes a token in half a second over 512, so 16 of them in 15.6 ms; a block goes out and in again."""
    away = preempter(move=move).give_way(victim(1025), list(range(65)), 1, sound=True)
    assert away.how == how and away.seconds == pytest.approx(min(2 * move * 64, 1024 * 0.5 / 512))


def test_modes_force_either() -> None:
    for mode in ("swap", "recompute"):
        for move in (0.0, 1.0):
            assert preempter(mode, move=move).give_way(victim(1025), list(range(65)), 1, sound=True).how == mode


def test_unsound_blocks_are_never_kept() -> None:
    assert preempter("swap").give_way(victim(33), [1, 2, 3], 1, sound=False).how == "recompute"


def test_what_the_cache_spares_makes_recompute_cheaper() -> None:
    """Whoever comes back and finds nine tenths cached would have had a tenth to compute, but moved every block out."""
    made = preempter(move=0.004)
    assert made.give_way(victim(1025), list(range(65)), 1, sound=True).how == "swap"
    for _ in range(30):
        made.come_back(victim(1025), list(range(65)), 922 // 16 * 16, 1025, 2)
        last = made.give_way(victim(1025), list(range(65)), 3, sound=True)
    assert last.how == "recompute" and last.seconds == pytest.approx(0.11, rel=0.05)


def test_the_speed_of_moves_is_learned() -> None:
    from octavo.core.step import StepResult

    made = preempter(move=0.001)
    for number in range(1, 40):
        away = made.give_way(victim(33, f"v{number}"), [1, 2], number, sound=True)
        moves = made.take_moves()
        assert away.how == ("swap" if moves else "recompute")
        if not moves:
            break
        made.committed(StepPlan(number, [], moves=moves), StepResult(number, [], 1.0, 0.02 * len(moves)))
        made.forget(f"v{number}")
    assert not moves and number > 2  # slower than computing: found out after a few


def test_a_slot_given_again_is_not_anothers_block() -> None:
    """A victim's slot is dropped in the plan that filled it: who shared the block goes out anew."""
    made = preempter("swap")
    made.give_way(victim(33, "a"), [1, 2], 1, sound=True)
    made.forget("a")
    made.give_way(victim(33, "b"), [5, 6], 1, sound=True)
    assert made.give_way(victim(33, "c"), [1, 2], 1, sound=True).blocks == 2
    slots = {name: made.tier.get(name).slots for name in "bc"}  # type: ignore[union-attr]
    assert set(slots["b"]).isdisjoint(slots["c"])
    assert made.moves[-2:] == [Move(OUT, 1, slots["c"][0]), Move(OUT, 2, slots["c"][1])]


def test_in_virtual_time_the_choice_is_as_good_as_the_better_way() -> None:
    """A pool of a fifth of the need, long prompts: the whole load's time under each way, at three speeds of the tier."""
    jobs = [Job(0.0, [place * 7 % 97 + 2] * (40 + place * 37 % 300), 60 + place * 13 % 90) for place in range(40)]
    for block_seconds in (0.0001, 0.01, 0.1):
        seconds = {}
        for mode in ("auto", "swap", "recompute"):
            config = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=128, max_model_len=1000, preemption_mode=mode)
            out = simulate(jobs, config, KvManager(80), LinearCost(0.002, 0.0005), tier=SwapTier(400), block_seconds=block_seconds)
            assert out.counters.preemptions > 10 and all(r.finish_reason in ("stop", "length") for r in out.records)
            seconds[mode] = out.seconds
        assert seconds["auto"] <= 1.1 * min(seconds.values()), (block_seconds, seconds)
        assert (seconds["swap"] < seconds["recompute"]) == (block_seconds < 0.005)


@pytest.mark.parametrize("tokens", [5, 64])
@pytest.mark.parametrize("kind", ["samples", "beams", "swapped samples", "swapped beams"])
def test_nothing_from_before_a_reset_of_the_cache_is_found_after_it(kind: str, tokens: int) -> None:
    """Whenever it comes: also not what samples or beams take over from each other later, and what the tier brings back."""
    resets = 0
    for steps in range(1, 40):
        rig = Rig(40, caching=True, tokens=tokens)
        beams = {"use_beam_search": True, "best_of": 3} if kind.endswith("beams") else {}
        for index in range(3):
            params = SamplingParams(max_tokens=12, ignore_eos=True, **beams)  # type: ignore[arg-type]
            request = Request(f"r{index}", list(range(18)), params, 30, seed=index, fork_of="r0" if index else "")
            rig.requests[request.id], rig.deltas[request.id] = request, []
            rig.scheduler.add(request)
        for _ in range(steps):
            if rig.scheduler.has_unfinished:
                rig.commit(rig.plan())
        if not rig.scheduler.has_unfinished:
            break
        if kind.startswith("swapped"):
            for request in list(rig.scheduler.running):
                rig.scheduler._preempt(request, "for the test")
        rig.scheduler.reset_cache()
        resets += 1
        rig.finish()
        assert rig.kv.ledger().cached == 0, f"reset after {steps} steps"
        rig.add("later", 18)
        rig.finish()
        assert rig.requests["later"].num_cached == 0 and rig.kv.ledger().cached > 0
    assert resets >= 10
