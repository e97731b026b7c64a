import statistics
import time

import pytest

from octavo.config import SchedulerConfig
from octavo.core.output import Delta
from octavo.core.request import Request, State
from octavo.core.sampling import SamplingParams
from octavo.core.step import PlanItem, SlotResult, StepPlan, StepResult
from octavo.errors import ConfigError, ContextTooLong, InvalidRequest, WorkerDied
from octavo.kv.manager import KvManager
from octavo.observe.events import Admitted, Finished, Preempted
from octavo.scheduler.policy import make_policy
from octavo.scheduler.scheduler import Scheduler
from octavo.simulate.executor import SimExecutor

BIG = 100_000


def make(
    blocks: int = 64, seqs: int = 8, tokens: int = 64, policy: str = "fcfs", context: int = BIG, size: int = 16,
    caching: bool = False, **hooks: object,
) -> tuple[Scheduler, SimExecutor]:
    config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=context, policy=policy)
    scheduler = Scheduler(config, KvManager(blocks, size, prefix_caching=caching), make_policy(policy), **hooks)  # type: ignore[arg-type]
    return scheduler, SimExecutor(seqs, blocks, size, max_tokens=tokens)


def make_request(name: str, prompt: int, output: int = 8, priority: int = 0, eos: frozenset[int] = frozenset(), **params: object) -> Request:
    """Never ends by itself unless ``eos`` or stop tokens say so."""
    sampling = SamplingParams(max_tokens=output, **params)  # type: ignore[arg-type]
    tokens = [(7 * ord(name[-1]) + i) % 1000 for i in range(prompt)]
    return Request(name, tokens, sampling, prompt + output, eos, priority=priority)


def shape(plan: StepPlan | None) -> list[tuple[int, int, int, bool]]:
    """(slot, start, tokens, sample) of each item."""
    return [(i.slot, i.start, len(i.tokens), i.sample) for i in plan.items] if plan else []


def step(scheduler: Scheduler, executor: SimExecutor) -> tuple[StepPlan | None, list[Delta]]:
    plan = scheduler.plan()
    deltas = scheduler.commit(plan, executor.execute(plan)) if plan else []
    scheduler.check()
    return plan, deltas


def answer(plan: StepPlan, tokens: dict[int, int]) -> StepResult:
    """A result with the given token for each slot that samples."""
    return StepResult(plan.number, [SlotResult(i.slot, i.epoch, [tokens[i.slot]] if i.sample else []) for i in plan.items])


def drain(scheduler: Scheduler, executor: SimExecutor, most: int = 5000) -> dict[str, list[Delta]]:
    news: dict[str, list[Delta]] = {}
    for _ in range(most):
        if not scheduler.has_unfinished:
            assert scheduler.kv.pool.num_available == scheduler.kv.pool.num_blocks
            return news
        for delta in step(scheduler, executor)[1]:
            news.setdefault(delta.request_id, []).append(delta)
    raise AssertionError(f"not drained after {most} steps")


# -- the catch-up rule


def test_a_prompt_goes_in_chunks_and_the_last_one_samples() -> None:
    scheduler, executor = make(tokens=10)
    scheduler.add(make_request("a", 25, 3))
    shapes = [shape(step(scheduler, executor)[0]) for _ in range(5)]
    assert shapes == [[(0, 0, 10, False)], [(0, 10, 10, False)], [(0, 20, 5, True)], [(0, 25, 1, True)], [(0, 26, 1, True)]]
    assert not scheduler.has_unfinished and scheduler.plan() is None


def test_decodes_come_before_chunks_and_admission_gets_the_rest() -> None:
    scheduler, executor = make(tokens=10)
    scheduler.add(make_request("a", 4))
    scheduler.add(make_request("b", 100))
    assert shape(step(scheduler, executor)[0]) == [(0, 0, 4, True), (1, 0, 6, False)]
    scheduler.add(make_request("c", 2))
    assert shape(step(scheduler, executor)[0]) == [(0, 4, 1, True), (1, 6, 9, False)]  # nothing is left for c


def test_an_items_token_is_minus_one_exactly_when_the_slot_sampled_it() -> None:
    scheduler, executor = make(tokens=4)
    scheduler.add(make_request("a", 5, 4))
    plans = [step(scheduler, executor)[0] for _ in range(3)]
    request = scheduler.running[0]
    assert [p.items[0].tokens for p in plans if p] == [request.prompt[:4], request.prompt[4:], [-1]]


def test_the_first_item_of_a_slot_introduces_its_request() -> None:
    scheduler, _ = make()
    request = make_request("a", 20, eos=frozenset([3]))
    request.seed, request.bad_words = 2**64 - 1, ((1, 2),)
    scheduler.add(request)
    plan = scheduler.plan()
    assert plan is not None
    init = plan.items[0].init
    assert init is not None
    assert (init.request_id, init.seed, init.prompt_len, init.tokens) == ("a", 2**64 - 1, 20, request.prompt)
    assert (init.params, init.eos_ids, init.bad_words) == (request.params, frozenset([3]), ((1, 2),))
    assert init.tokens is not request.tokens
    assert plan.items[0].new_blocks == [0, 1]
    scheduler.commit(plan, answer(plan, {0: 5}))
    after = scheduler.plan()
    assert after is not None and after.items[0].init is None and after.items[0].new_blocks == []


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("budget", [1, 16, 64])
def test_lengths_around_a_block_take_the_blocks_they_need(length: int, budget: int) -> None:
    scheduler, executor = make(blocks=4, tokens=budget)
    scheduler.add(make_request("a", length, 20))
    most = 0
    while scheduler.has_unfinished:
        step(scheduler, executor)
        most = max(most, scheduler.kv.ledger().live)
        assert all(r.num_computed <= 16 * len(scheduler.kv.table(r.id)) for r in scheduler.running)
    assert most == -(-(length + 19) // 16)  # the last token is never computed
    assert scheduler.counters.tokens_planned == length + 19 and scheduler.counters.tokens_sampled == 20


def test_one_sequence_and_one_token_at_a_time() -> None:
    scheduler, executor = make(seqs=1, tokens=1)
    for name in "abc":
        scheduler.add(make_request(name, 5, 3))
    ends = []
    while scheduler.has_unfinished:
        plan, deltas = step(scheduler, executor)
        assert plan is not None and plan.num_tokens == 1 and len(scheduler.running) <= 1
        ends += [d.request_id for d in deltas if d.finish_reason]
    assert ends == ["a", "b", "c"] and scheduler.counters.steps == 3 * 7


def test_a_steady_budget_below_max_num_seqs_starves_nobody() -> None:
    """Nobody is admitted whom the budget cannot serve at every step, so each running one gets on at each step."""
    scheduler, executor = make(seqs=8, tokens=3)
    for name in "abcdefgh":
        scheduler.add(make_request(name, 4, 40))
    while scheduler.has_unfinished:
        before = {r: r.num_computed for r in scheduler.running}
        plan, _ = step(scheduler, executor)
        assert plan is not None and len(plan.items) <= 3
        assert all(r.num_computed > computed or r.state is State.FINISHED for r, computed in before.items())


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_decodes_take_turns_when_the_budget_shrinks_below_their_number(policy: str) -> None:
    budget = 16
    scheduler, executor = make(tokens=16, policy=policy, budget=lambda now: budget)
    for name in "abcdefg":
        scheduler.add(make_request(name, 2, 100))
    step(scheduler, executor)
    assert len(scheduler.running) == 7
    budget = 3
    scheduler.add(make_request("late", 1, 100))
    for _ in range(21):
        step(scheduler, executor)
    outputs = {r.id: r.num_output - 1 for r in scheduler.running}
    assert outputs == dict.fromkeys("abcdefg", 9)  # 63 tokens, evenly; "late" is not let in


def test_turns_are_taken_within_a_priority_only() -> None:
    budget = 16
    scheduler, executor = make(tokens=16, policy="priority", budget=lambda now: budget)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", 0)):
        scheduler.add(make_request(name, 2, 50, priority))
    step(scheduler, executor)
    budget = 3
    for _ in range(10):
        step(scheduler, executor)
    assert {r.id: r.num_output - 1 for r in scheduler.running} == {"a": 5, "b": 10, "c": 5, "d": 10}


def test_the_budget_hook_is_given_the_time_and_cannot_raise_the_limit() -> None:
    times: list[float] = []

    def budget(now: float) -> int:
        times.append(now)
        return 0 if now < 5 else 1000

    scheduler, _ = make(tokens=8, budget=budget)
    scheduler.add(make_request("a", 20))
    assert scheduler.plan(1.0) is None
    plan = scheduler.plan(7.0)
    assert plan is not None and plan.num_tokens == 8 and times == [1.0, 7.0]


# -- admission


def test_the_policies_admit_in_their_order() -> None:
    for policy, expected in (("fcfs", ["a", "b", "c"]), ("priority", ["c", "a", "b"])):
        scheduler, executor = make(seqs=1, policy=policy)
        for name, priority in (("a", 0), ("b", 0), ("c", -1)):
            scheduler.add(make_request(name, 3, 2, priority))
        assert list(drain(scheduler, executor)) == expected


def test_admission_asks_for_the_whole_context_and_one_block() -> None:
    scheduler, executor = make(blocks=4, seqs=4)
    scheduler.add(make_request("a", 16, 20))
    scheduler.add(make_request("b", 32, 20))  # 2 blocks and 1, of 3: in
    assert len(step(scheduler, executor)[0].items) == 2  # type: ignore[union-attr]
    scheduler, executor = make(blocks=4, seqs=4)
    scheduler.add(make_request("a", 17, 20))
    scheduler.add(make_request("b", 32, 20))  # of 2: out
    assert len(step(scheduler, executor)[0].items) == 1  # type: ignore[union-attr]
    scheduler, executor = make(blocks=4, seqs=4)
    scheduler.add(make_request("a", 17, 20))
    scheduler.add(make_request("b", 32, 1))  # it never uses a third: in
    assert len(step(scheduler, executor)[0].items) == 2  # type: ignore[union-attr]


def test_nobody_passes_the_head_of_the_queue() -> None:
    scheduler, executor = make(blocks=4)
    scheduler.add(make_request("a", 20, 8))
    scheduler.add(make_request("b", 60, 2))
    scheduler.add(make_request("c", 1, 2))
    step(scheduler, executor)
    assert [r.id for r in scheduler.running] == ["a"]
    assert list(drain(scheduler, executor)) == ["a", "b", "c"]


def test_an_admission_predicate_holds_the_queue() -> None:
    allowed = {"a"}
    scheduler, executor = make(admission=[lambda r: True, lambda r: r.id in allowed])
    for name in "abc":
        scheduler.add(make_request(name, 3, 4))
    step(scheduler, executor)
    assert [r.id for r in scheduler.running] == ["a"]
    allowed.add("c")
    step(scheduler, executor)
    assert [r.id for r in scheduler.running] == ["a"]  # c does not pass b
    allowed.add("b")
    step(scheduler, executor)
    assert [r.id for r in scheduler.running] == ["a", "b", "c"]


def test_lookahead_reserves_slots_beyond_the_known_tokens() -> None:
    scheduler, executor = make(blocks=4, lookahead=5)
    scheduler.add(make_request("a", 12, 40))
    step(scheduler, executor)
    assert len(scheduler.kv.table("a")) == 2  # 12 + 5 > 16
    drain(scheduler, executor)
    assert scheduler.counters.tokens_sampled == 40


# -- the prefix cache


def alike(name: str, prompt: int, output: int = 9, salt: str = "", tail: int = 0, priority: int = 0, **params: object) -> Request:
    """A request whose prompt begins as all of these do; the last ``tail`` tokens are its own."""
    tokens = [*range(prompt - tail), *[900 + ord(name[-1])] * tail]
    return Request(name, tokens, SamplingParams(max_tokens=output, **params), prompt + output, cache_salt=salt, priority=priority)  # type: ignore[arg-type]


def admitted(plan: StepPlan | None) -> dict[str, int]:
    """Cached tokens of those that a plan admits."""
    return {e.request_id: e.cached_tokens for e in plan.events if isinstance(e, Admitted)} if plan else {}


def test_what_one_request_computed_the_next_need_not() -> None:
    scheduler, executor = make(tokens=200, caching=True)
    scheduler.add(alike("a", 40))
    step(scheduler, executor)
    for name, prompt, tail in (("b", 40, 0), ("c", 48, 16), ("d", 33, 0), ("e", 32, 0), ("f", 40, 40)):
        scheduler.add(alike(name, prompt, tail=tail))
    plan, _ = step(scheduler, executor)
    assert admitted(plan) == {"b": 32, "c": 32, "d": 32, "e": 16, "f": 0}
    assert shape(plan)[1:] == [(1, 32, 8, True), (2, 32, 16, True), (3, 32, 1, True), (4, 16, 16, True), (5, 0, 40, True)]
    assert {r.id: r.num_cached for r in scheduler.running} == {"a": 0, **admitted(plan)}
    assert (scheduler.counters.cache_queries, scheduler.counters.cache_hits) == (40 + 40 + 48 + 33 + 32 + 40, 32 * 3 + 16)
    assert [d.num_cached for deltas in drain(scheduler, executor).values() for d in deltas[-1:]] == [0, 32, 32, 32, 16, 0]


def test_requests_of_one_step_share_what_it_computes() -> None:
    scheduler, executor = make(tokens=100, caching=True)
    for name in "abc":
        scheduler.add(alike(name, 40, tail=4))
    plan, _ = step(scheduler, executor)
    assert shape(plan) == [(0, 0, 40, True), (1, 32, 8, True), (2, 32, 8, True)]
    drain(scheduler, executor)


def test_a_prompt_is_shared_as_it_fills() -> None:
    scheduler, executor = make(tokens=40, caching=True)
    scheduler.add(alike("a", 100))
    step(scheduler, executor)
    scheduler.add(alike("b", 100, priority=0))
    assert admitted(step(scheduler, executor)[0]) == {}  # a takes the whole step
    plan, _ = step(scheduler, executor)
    assert shape(plan)[:2] == [(0, 80, 20, True), (1, 96, 4, True)]
    drain(scheduler, executor)


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    scheduler, executor = make(caching=True)
    scheduler.add(alike("a", 20, 30))
    first = [t for d in drain(scheduler, executor)["a"] for t in d.tokens]
    turn = [*range(20), *first, *[7] * 10]
    scheduler.add(Request("b", turn, SamplingParams(max_tokens=3), len(turn) + 3))
    assert admitted(step(scheduler, executor)[0]) == {"b": 48}  # 49 were computed: the last token never is
    drain(scheduler, executor)


def test_salts_never_meet() -> None:
    scheduler, executor = make(tokens=300, caching=True)
    for name, salt in (("a", ""), ("b", "x"), ("c", "y"), ("d", "x"), ("e", "")):
        scheduler.add(alike(name, 40, salt=salt))
    assert admitted(step(scheduler, executor)[0]) == {"a": 0, "b": 0, "c": 0, "d": 32, "e": 32}
    drain(scheduler, executor)


def test_a_scored_prompt_reads_no_cached_block_and_fills_the_cache() -> None:
    scheduler, executor = make(tokens=300, caching=True)
    scheduler.add(alike("a", 40, prompt_logprobs=1))
    scheduler.add(alike("b", 40, prompt_logprobs=1))
    scheduler.add(alike("c", 40))
    plan, news = step(scheduler, executor)
    assert admitted(plan) == {"a": 0, "b": 0, "c": 32}
    assert [len(d.prompt_logprobs or ()) for d in news] == [39, 39, 0]
    assert scheduler.counters.cache_queries == 40
    drain(scheduler, executor)


def test_what_a_resumption_finds_in_the_cache_is_no_hit_of_its_prompt() -> None:
    scheduler, executor = make(blocks=5, caching=True)
    for name, output in (("a", 40), ("b", 18)):
        scheduler.add(make_request(name, 16, output))
    plans = []
    while scheduler.has_unfinished:
        plans.append(step(scheduler, executor)[0])
    (lost,) = [e for plan in plans if plan for e in plan.events if isinstance(e, Preempted)]
    assert (lost.request_id, lost.tokens_lost) == ("b", 32)
    (resumed,) = [e for plan in plans if plan for e in plan.events if isinstance(e, Admitted) and e.resumed]
    assert resumed.cached_tokens == 16
    assert (scheduler.counters.cache_queries, scheduler.counters.cache_hits) == (32, 0)


def test_a_step_that_fails_leaves_nothing_in_the_cache() -> None:
    scheduler, executor = make(tokens=40, caching=True)
    scheduler.add(alike("a", 100))
    step(scheduler, executor)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.abort("a")  # its blocks are cached, with what was never computed in some of them
    assert len(scheduler.fail(plan, "no")) == 0
    scheduler.check()
    scheduler.add(alike("b", 100))
    assert admitted(step(scheduler, executor)[0]) == {"b": 32}
    drain(scheduler, executor)


def test_who_built_on_a_step_that_fails_starts_anew() -> None:
    scheduler, executor = make(tokens=100, caching=True)
    scheduler.add(alike("a", 60))
    lost = scheduler.plan()
    scheduler.add(alike("b", 60, tail=4))
    assert lost is not None
    built = scheduler.plan()  # b shares three blocks of a, which are to be computed
    assert admitted(built) == {"b": 48} and built is not None
    (ended,) = scheduler.fail(lost, "no")
    scheduler.check()
    assert (ended.request_id, ended.finish_reason) == ("a", "error")
    (event,) = [e for e in scheduler.take_events() if isinstance(e, Preempted)]
    assert event.request_id == "b" and event.cause == "step 1 failed, on which b depends"
    assert scheduler.commit(built, answer(built, {0: 5, 1: 5})) == []
    executor._number = 2
    assert sum(len(d.tokens) for d in drain(scheduler, executor)["b"]) == 9


def test_a_full_cache_holds_nobody_up() -> None:
    scheduler, executor = make(blocks=6, tokens=100, caching=True)
    for number in range(12):
        scheduler.add(make_request(f"r{number}", 40 + number, 5))
    drain(scheduler, executor)
    ledger = scheduler.kv.ledger()
    assert (ledger.free, ledger.cached) != (6, 0) and scheduler.counters.preemptions == 0


# -- n > 1: forks


def group(prompt: int, n: int, output: int = 9) -> list[Request]:
    """The n samples of one prompt."""
    tokens = list(range(prompt))
    return [
        Request(f"g/{i}", tokens, SamplingParams(max_tokens=output), prompt + output, seed=i, fork_of="g/0" if i else "") for i in range(n)
    ]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("prompt", [1, 2, 15, 16, 17, 31, 32, 33, 40])
def test_a_prompt_is_computed_once_for_all_its_samples(prompt: int, caching: bool) -> None:
    scheduler, executor = make(tokens=20, caching=caching)
    for request in group(prompt, 4):
        scheduler.add(request)
    assert (scheduler.num_waiting, len(scheduler.waiting)) == (4, 1)
    plans, news = [], {}
    while scheduler.has_unfinished:
        plan, deltas = step(scheduler, executor)
        assert plan is not None
        plans.append(plan)
        for delta in deltas:
            news.setdefault(delta.request_id, []).extend(delta.tokens)
    assert [len(tokens) for tokens in news.values()] == [9] * 4 and len({tuple(tokens) for tokens in news.values()}) == 4
    assert sum(plan.num_tokens for plan in plans) == prompt + 8 + 3 * 9  # each fork computes the prompt's last row with its seed
    copies = [copy for plan in plans for copy in plan.moves]
    assert len(copies) == (3 if (prompt - 1) % 16 else 0)
    lives = [e for plan in plans for e in plan.events if isinstance(e, Admitted)]
    assert [(e.cached_tokens, e.forked_tokens) for e in lives] == [(0, 0)] + [(0, prompt - 1)] * 3


def test_memory_is_reported_as_unique_and_as_logical_blocks() -> None:
    scheduler, executor = make(tokens=100)
    for request in group(40, 4):
        scheduler.add(request)
    for _ in range(2):
        step(scheduler, executor)
    ledger = scheduler.kv.ledger()
    assert (ledger.live, ledger.logical, ledger.shared) == (2 + 4, 12, 2)


@pytest.mark.parametrize("caching", [False, True])
def test_a_sample_goes_on_without_the_one_it_would_have_forked(caching: bool) -> None:
    for steps in range(4):
        scheduler, executor = make(tokens=20, caching=caching)
        for request in group(50, 3):
            scheduler.add(request)
        for _ in range(steps):
            step(scheduler, executor)
        assert scheduler.abort("g/0")
        scheduler.check()
        news = drain(scheduler, executor)
        assert {name: sum(len(d.tokens) for d in deltas) for name, deltas in news.items()} == {"g/1": 9, "g/2": 9}


@pytest.mark.parametrize(("outputs", "taken"), [((99, 2, 2), (0, 39)), ((4, 8, 2), (32, 0))], ids=["forked", "found"])
def test_samples_that_another_request_comes_between_share_their_prompt_all_the_same(outputs: tuple[int, ...], taken: tuple[int, int]) -> None:
    """Under lpm. The last sample takes the prompt over from the first one while that runs, and later finds it in the cache."""
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=200, policy="lpm"), KvManager(64, prefix_caching=True))
    executor = SimExecutor(2, 64, max_tokens=200)
    long = make_request("w", 120, 1)
    scheduler.add(long)
    drain(scheduler, executor)
    for request, output in zip(group(40, 3), outputs, strict=True):
        request.max_total = 40 + output
        scheduler.add(request)
    for _ in range(2):
        step(scheduler, executor)
    scheduler.add(Request("x", long.prompt, SamplingParams(max_tokens=2), 122))
    assert [request.id for request in scheduler.waiting] == ["x", "g/2"] and {r.id for r in scheduler.running} == {"g/0", "g/1"}
    admitted = []
    while scheduler.has_unfinished:
        plan, _ = step(scheduler, executor)
        assert plan is not None
        admitted += [(e.request_id, e.cached_tokens, e.forked_tokens) for e in plan.events if isinstance(e, Admitted)]
    assert admitted == [("x", 112, 0), ("g/2", *taken)]


def test_a_parked_sample_can_be_aborted() -> None:
    scheduler, executor = make(tokens=20)
    for request in group(50, 3):
        scheduler.add(request)
    step(scheduler, executor)
    assert scheduler.abort("g/1") and not scheduler.abort("g/1")
    scheduler.check()
    assert set(drain(scheduler, executor)) == {"g/0", "g/2"}


def test_who_forked_in_flight_of_a_step_that_fails_starts_anew() -> None:
    scheduler, executor = make(tokens=100)
    for request in group(40, 2):
        scheduler.add(request)
    lost = scheduler.plan()
    built = scheduler.plan()
    assert lost is not None and built is not None and len(built.moves) == 1
    assert [d.request_id for d in scheduler.fail(lost, "no")] == ["g/0"]
    scheduler.check()
    assert [e.request_id for e in scheduler.take_events() if isinstance(e, Preempted)] == ["g/1"]
    assert scheduler.commit(built, answer(built, {0: 5, 1: 5})) == []
    executor._number = 2
    assert sum(len(d.tokens) for d in drain(scheduler, executor)["g/1"]) == 9


# -- requests that cannot be served


def test_a_prompt_larger_than_the_pool_is_an_error_with_the_numbers() -> None:
    scheduler, executor = make(blocks=3)
    with pytest.raises(ContextTooLong, match=r"49 tokens, the KV pool holds 48 \(3 blocks of 16\)") as error:
        scheduler.add(make_request("a", 49))
    assert error.value.param == "prompt" and not scheduler.has_unfinished
    scheduler.add(make_request("a", 48, 30))  # exactly the pool
    (last,) = drain(scheduler, executor)["a"]
    assert (len(last.tokens), last.finish_reason) == (1, "length")


def test_a_lone_request_that_fills_the_pool_ends_with_length() -> None:
    scheduler, executor = make(blocks=2)
    scheduler.add(make_request("a", 20, 500))
    news = drain(scheduler, executor)["a"]
    assert sum(len(d.tokens) for d in news) == 13 and news[-1].finish_reason == "length"  # 32 computed, the 33rd is known


def test_a_prompt_that_fills_the_context_is_an_error_with_the_numbers() -> None:
    scheduler, executor = make(context=30)
    with pytest.raises(ContextTooLong, match="30 tokens, the context 30: at most 29"):
        scheduler.add(make_request("a", 30))
    scheduler.add(make_request("a", 29, 100))
    assert sum(len(d.tokens) for d in drain(scheduler, executor)["a"]) == 1


def test_impossible_requests_are_refused_and_leave_no_trace() -> None:
    scheduler, executor = make()
    scheduler.add(make_request("a", 3))
    for bad, field in ((make_request("b", 0), "prompt"), (make_request("a", 3), "request_id")):
        with pytest.raises(InvalidRequest) as error:
            scheduler.add(bad)
        assert error.value.param == field
    nothing_left = make_request("c", 3)
    nothing_left.max_total = 3
    with pytest.raises(InvalidRequest, match="max_total is 3"):
        scheduler.add(nothing_left)
    scheduler.check()
    assert list(drain(scheduler, executor)) == ["a"]
    scheduler.add(make_request("a", 3))  # the id is free again


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_impossible_settings_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be at least 1, not 0") as error:
        Scheduler(SchedulerConfig(**{field: 0}), KvManager(4))
    assert error.value.param == field


# -- preemption


def test_the_last_in_policy_order_gives_way_and_comes_back_whole() -> None:
    scheduler, executor = make(blocks=5, seqs=4)
    for name in "abc":
        scheduler.add(make_request(name, 15, 30))
    while not scheduler.counters.preemptions:
        plan, _ = step(scheduler, executor)
    assert plan is not None and [i.slot for i in plan.items] == [0, 1]
    assert plan.events == [Preempted("c", "c needed 2 blocks for 17 tokens, 0 of 5 were free", tokens_lost=16, blocks_freed=1)]
    assert scheduler.counters.tokens_lost == 16
    after, _ = step(scheduler, executor)
    assert after is not None and after.events == []  # its context and one block: 3, and 1 is free
    news = drain(scheduler, executor)
    assert all(d[-1].finish_reason == "length" for d in news.values()) and set(news) == set("abc")


def test_a_preempted_request_keeps_place_output_and_epoch_rises() -> None:
    scheduler, executor = make(blocks=4, seqs=2)
    scheduler.add(make_request("a", 16, 40))
    scheduler.add(make_request("b", 16, 40))
    scheduler.add(make_request("c", 1, 2))
    while not scheduler.counters.preemptions:
        plan, _ = step(scheduler, executor)
    b = scheduler.waiting.first()
    assert b is not None and b.id == "b" and len(scheduler.waiting) == 2  # before c, which came later
    assert b.num_output == 16 + 1 and b.num_computed == 0 and b.epoch == b.preemptions == 1 and b.slot == -1
    while b.state is State.WAITING:
        plan, _ = step(scheduler, executor)
    assert plan is not None
    item = next(i for i in plan.items if i.init is not None and i.init.request_id == "b")
    assert item.epoch == 1 and item.start == 0 and item.init is not None and item.init.tokens == b.tokens[:33] == item.tokens
    assert next(e for e in plan.events if isinstance(e, Admitted)).resumed
    drain(scheduler, executor)


def test_priority_decides_who_gives_way() -> None:
    scheduler, executor = make(blocks=4, seqs=2, policy="priority")
    scheduler.add(make_request("a", 16, 40, priority=5))
    scheduler.add(make_request("b", 16, 40, priority=1))
    while not scheduler.counters.preemptions:
        plan, _ = step(scheduler, executor)
    assert [e.request_id for e in (plan.events if plan else []) if isinstance(e, Preempted)] == ["a"]
    assert [r.id for r in scheduler.running] == ["b"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("tokens", [1, 3, 64])
def test_a_pool_that_holds_one_request_serves_them_all(policy: str, tokens: int) -> None:
    """No livelock: the requests together need 8 times the pool, and each alone could fill it."""
    scheduler, executor = make(blocks=3, seqs=8, tokens=tokens, policy=policy)
    for i, name in enumerate("abcdefgh"):
        scheduler.add(make_request(name, 1 + 5 * i, 100, priority=i % 3))
    news = drain(scheduler, executor)
    for i, name in enumerate("abcdefgh"):
        assert sum(len(d.tokens) for d in news[name]) == 49 - (1 + 5 * i) and news[name][-1].finish_reason == "length"
    assert scheduler.counters.preemptions <= 8 * 3


def test_the_tokens_of_a_victim_go_to_others_of_the_same_step() -> None:
    budget = 8
    scheduler, executor = make(blocks=3, size=4, tokens=8, budget=lambda now: budget)
    for name, prompt, output in (("a", 3, 9), ("c", 1, 3), ("b", 1, 3)):
        scheduler.add(make_request(name, prompt, output))
    step(scheduler, executor)
    budget = 2
    assert shape(step(scheduler, executor)[0]) == [(0, 3, 1, True), (1, 1, 1, True)]
    plan, _ = step(scheduler, executor)  # b's turn, then a's, whose second block is b's
    assert shape(plan) == [(0, 4, 1, True), (1, 2, 1, True)]
    assert plan is not None and plan.events == [Preempted("b", "a needed 2 blocks for 5 tokens, 0 of 3 were free", 1, 1)]


def test_results_of_an_older_epoch_are_dropped() -> None:
    scheduler, _ = make(blocks=2, seqs=2)
    scheduler.add(make_request("a", 15, 40))
    scheduler.add(make_request("b", 8, 8))  # never needs more than its first block
    first = scheduler.plan()
    assert first is not None and len(first.items) == 2
    scheduler.commit(first, answer(first, {0: 5, 1: 6}))
    second = scheduler.plan()  # a's position 15
    third = scheduler.plan()  # a's position 16: b loses its block while its second token is in flight
    assert second is not None and third is not None
    assert [e.request_id for e in third.events if isinstance(e, Preempted)] == ["b"]
    deltas = scheduler.commit(second, answer(second, {0: 7, 1: 8}))
    assert [(d.request_id, d.tokens) for d in deltas] == [("a", [7])]
    scheduler.check()
    (b,) = scheduler.waiting
    assert b.num_output == 1 and b.ahead == 0


# -- abort


def test_an_abort_ends_a_request_wherever_it_is_exactly_once() -> None:
    scheduler, executor = make(seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, 20, 50))
    step(scheduler, executor)
    plan = scheduler.plan()
    assert plan is not None
    ends = scheduler.abort("c") + scheduler.abort("a")  # waiting; in flight
    scheduler.check()
    assert [(d.request_id, d.finish_reason, d.tokens) for d in ends] == [("c", "abort", []), ("a", "abort", [])]
    assert scheduler.abort("a") == scheduler.abort("c") == scheduler.abort("unknown") == []
    assert [d.request_id for d in scheduler.commit(plan, executor.execute(plan))] == ["b"]
    after, _ = step(scheduler, executor)
    assert after is not None and after.freed == [0]
    assert [e for e in after.events if isinstance(e, Finished)] == [Finished("c", "abort"), Finished("a", "abort")]
    drain(scheduler, executor)


def test_a_slot_freed_in_flight_goes_to_a_new_request_and_the_old_result_does_not() -> None:
    scheduler, _ = make(seqs=1)
    scheduler.add(make_request("a", 2, 50))
    old = scheduler.plan()
    scheduler.abort("a")
    scheduler.add(make_request("b", 2, 50))
    new = scheduler.plan()
    assert old is not None and new is not None
    assert new.freed == [0] and new.items[0].slot == old.items[0].slot == 0
    assert scheduler.commit(old, answer(old, {0: 111})) == []
    assert [(d.request_id, d.tokens) for d in scheduler.commit(new, answer(new, {0: 222}))] == [("b", [222])]


# -- how requests end


def ends(tokens: list[int], **params: object) -> tuple[list[int], object, object]:
    """Feed these sampled tokens: what came out, and how it ended."""
    scheduler, _ = make()
    scheduler.add(make_request("a", 3, 6, eos=frozenset([1, 2]), **params))
    out: list[int] = []
    for token in tokens:
        plan = scheduler.plan()
        assert plan is not None
        (delta,) = scheduler.commit(plan, answer(plan, {0: token}))
        out += delta.tokens
        if delta.finish_reason:
            assert not scheduler.has_unfinished
            return out, delta.finish_reason, delta.stop_reason
    return out, None, None


def test_end_tokens_stop_and_are_part_of_the_output() -> None:
    assert ends([9, 8, 2, 7]) == ([9, 8, 2], "stop", None)
    assert ends([9, 5, 2], stop_token_ids=[5]) == ([9, 5], "stop", 5)
    assert ends([9, 2], stop_token_ids=[2]) == ([9, 2], "stop", None)  # the model's own end token comes first


def test_ignore_eos_ignores_end_tokens_and_not_stop_tokens() -> None:
    assert ends([1, 2, 1, 2, 1, 2], ignore_eos=True) == ([1, 2, 1, 2, 1, 2], "length", None)
    assert ends([1, 2], ignore_eos=True, stop_token_ids=[2]) == ([1, 2], "stop", 2)


@pytest.mark.parametrize(("least", "count"), [(0, 1), (1, 1), (2, 2), (4, 4)])
def test_nothing_stops_a_request_before_min_tokens_are_out(least: int, count: int) -> None:
    assert ends([1] * 6, min_tokens=least) == ([1] * count, "stop", None)
    assert ends([5] * 6, min_tokens=least, stop_token_ids=[5]) == ([5] * count, "stop", 5)


def test_stop_wins_over_length_at_the_last_token() -> None:
    assert ends([9, 9, 9, 9, 9, 1]) == ([9, 9, 9, 9, 9, 1], "stop", None)
    assert ends([9] * 6) == ([9] * 6, "length", None)


# -- prompt_logprobs


@pytest.mark.parametrize(("prompt", "tokens"), [(1, 8), (2, 8), (17, 4), (17, 16), (17, 17), (17, 64)])
def test_each_prompt_row_is_scored_once_and_the_last_is_sampled(prompt: int, tokens: int) -> None:
    scheduler, executor = make(tokens=tokens)
    scheduler.add(make_request("a", prompt, 4, prompt_logprobs=0))
    rows: list[int] = []
    while scheduler.has_unfinished:
        plan, _ = step(scheduler, executor)
        for item in plan.items if plan else []:
            rows += range(item.score_from, item.score_to)
    assert rows == list(range(prompt - 1))


def test_rows_scored_before_a_preemption_are_not_scored_again() -> None:
    scheduler, executor = make(blocks=4, seqs=3, tokens=8)
    a, b = make_request("a", 15, 40), make_request("b", 30, 8, prompt_logprobs=1)
    scheduler.add(a)
    scheduler.add(b)
    news: list[Delta] = []
    rows: list[int] = []
    while scheduler.has_unfinished:
        plan, deltas = step(scheduler, executor)
        news += [d for d in deltas if d.request_id == "b"]
        for item in plan.items if plan else []:
            rows += range(item.score_from, item.score_to)
    assert b.preemptions > 0 and rows == list(range(29))
    assert [r.token for d in news for r in d.prompt_logprobs or []] == b.prompt[1:]


# -- what comes back


def test_a_result_that_does_not_answer_the_plan_changes_nothing() -> None:
    scheduler, executor = make(tokens=8)
    scheduler.add(make_request("a", 3))
    scheduler.add(make_request("b", 20, prompt_logprobs=0))
    plan = scheduler.plan()
    assert plan is not None
    good = executor.execute(plan)
    first, second = good.slots
    for bad in (
        StepResult(plan.number + 1, good.slots),
        StepResult(plan.number, [first]),
        StepResult(plan.number, [second, first]),
        StepResult(plan.number, [SlotResult(first.slot, first.epoch + 1, first.tokens), second]),
        StepResult(plan.number, [SlotResult(first.slot, first.epoch), second]),
        StepResult(plan.number, [first, SlotResult(second.slot, second.epoch, [4], None, second.prompt_logprobs)]),
        StepResult(plan.number, [first, SlotResult(second.slot, second.epoch)]),
    ):
        with pytest.raises(WorkerDied):
            scheduler.commit(plan, bad)
    scheduler.check()
    assert [d.request_id for d in scheduler.commit(plan, good)] == ["a", "b"]


def test_one_requests_error_ends_it_and_no_other() -> None:
    scheduler, executor = make()
    scheduler.add(make_request("a", 3, 4))
    scheduler.add(make_request("b", 3, 4))
    plan = scheduler.plan()
    assert plan is not None
    result = executor.execute(plan)
    result.slots[0] = SlotResult(plan.items[0].slot, plan.items[0].epoch, error="no such adapter")
    deltas = scheduler.commit(plan, result)
    assert [(d.request_id, d.finish_reason, d.error) for d in deltas] == [("a", "error", "no such adapter"), ("b", None, None)]
    assert list(drain(scheduler, executor)) == ["b"]


def test_fail_ends_everybody_of_the_plan_and_nobody_else() -> None:
    scheduler, executor = make(seqs=3, tokens=8)
    for name in "bcd":
        scheduler.add(make_request(name, 4, 4))
    plan = scheduler.plan()
    assert plan is not None and len(plan.items) == 2
    assert [(d.request_id, d.finish_reason, d.error) for d in scheduler.fail(plan, "no")] == [("b", "error", "no"), ("c", "error", "no")]
    scheduler.check()
    assert list(drain(scheduler, executor)) == ["d"]


def test_slots_that_a_failed_plan_freed_are_freed_again_unless_taken() -> None:
    scheduler, executor = make(seqs=3)
    scheduler.add(make_request("a", 3, 1))
    scheduler.add(make_request("b", 3, 9))
    step(scheduler, executor)
    plan = scheduler.plan()
    assert plan is not None and plan.freed == [0]
    scheduler.fail(plan, "no")
    scheduler.add(make_request("c", 3, 1))
    scheduler.add(make_request("d", 3, 9))
    after, _ = step(scheduler, executor)
    assert after is not None and sorted(after.freed) == [0, 1]
    plan = scheduler.plan()  # d, without c's slot
    scheduler.add(make_request("e", 3, 9))
    ahead = scheduler.plan()  # e, in c's slot
    assert plan is not None and ahead is not None and plan.freed == [ahead.items[-1].slot]
    scheduler.fail(plan, "no")
    scheduler.commit(ahead, answer(ahead, {i.slot: 5 for i in ahead.items}))
    scheduler.check()
    last = scheduler.plan()
    assert last is not None and last.freed == [plan.items[0].slot]


def test_plans_can_be_made_ahead_of_results() -> None:
    """The same tokens, with one plan in flight while the next is made; the last token is not overrun."""
    outputs = []
    for depth in (1, 2, 3):
        scheduler, executor = make(tokens=16)
        for name in "abc":
            scheduler.add(make_request(name, 20, 9))
        flying: list[StepPlan] = []
        got: dict[str, list[int]] = {}
        while scheduler.has_unfinished:
            while len(flying) < depth and (plan := scheduler.plan()):
                flying.append(plan)
            plan = flying.pop(0)
            for delta in scheduler.commit(plan, executor.execute(plan)):
                got.setdefault(delta.request_id, []).extend(delta.tokens)
            scheduler.check()
        outputs.append(got)
        assert scheduler.counters.tokens_planned == 3 * 28
    assert outputs[0] == outputs[1] == outputs[2] and all(len(tokens) == 9 for tokens in outputs[0].values())


def test_plan_and_commit_of_256_decodes_cost_far_less_than_a_step() -> None:
    """About 0.5 ms on the machine that this was written on; the bound leaves room for a slow and busy one."""
    scheduler, _ = make(blocks=256 * 20, seqs=256, tokens=512)
    for i in range(256):
        scheduler.add(make_request(f"r{i}", 2, 300, eos=frozenset([2]), stop_token_ids=[3]))
    costs = []
    for _ in range(100):
        begin = time.process_time()
        plan = scheduler.plan()
        middle = time.process_time()
        assert plan is not None
        result = StepResult(plan.number, [SlotResult(i.slot, i.epoch, [5]) for i in plan.items])
        late = time.process_time()
        scheduler.commit(plan, result)
        costs.append(middle - begin + time.process_time() - late)
    assert isinstance(plan.items[0], PlanItem) and len(plan.items) == 256
    assert statistics.median(costs) < 3e-3
