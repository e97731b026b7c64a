import random
from collections import Counter

import pytest

from octavo.core.request import Request, State
from octavo.core.sampling import SamplingParams
from octavo.errors import ConfigError
from octavo.scheduler.policy import ASKS, POLICIES, FairShare, Fcfs, LongestPrefix, Priority, make_policy
from octavo.scheduler.queue import WaitingQueue


def request(order: int, priority: int = 0, arrival: float = 0.0, tenant: str = "") -> Request:
    return Request(f"r{order}", [1], SamplingParams(), 10, order=order, priority=priority, arrival=arrival, tenant=tenant)


def test_fcfs_goes_by_arrival_and_its_victim_came_last() -> None:
    requests = [request(3, -5), request(1, 7), request(2)]
    assert [r.order for r in sorted(requests, key=Fcfs().order)] == [1, 2, 3]
    assert Fcfs().victim(requests).order == 3


def test_priority_goes_by_the_number_then_by_arrival() -> None:
    requests = [request(1, 5), request(2, -1), request(3, 5), request(4, 0)]
    assert [r.order for r in sorted(requests, key=Priority().order)] == [2, 4, 1, 3]
    assert Priority().victim(requests).order == 3


def test_names() -> None:
    assert [type(make_policy(name)) for name in POLICIES] == [Fcfs, Priority, LongestPrefix, FairShare]
    with pytest.raises(ConfigError, match="'lifo' is unknown; there are: fcfs, priority, lpm, fair") as error:
        make_policy("lifo")
    assert error.value.param == "policy"


def test_the_queue_keeps_places_through_removal_and_return() -> None:
    queue = WaitingQueue(Priority())
    requests = [request(1, 5), request(2, -1), request(3, 5), request(4, 0)]
    assert queue.first() is None
    for r in requests:
        queue.push(r)
    assert [r.order for r in queue] == [2, 4, 1, 3] and len(queue) == 4
    queue.remove(requests[1])
    queue.remove(requests[0])
    assert queue.first() is requests[3] and len(queue) == 2
    queue.push(requests[0])  # preempted: back to its place, before the later arrival
    assert [r.order for r in queue] == [4, 1, 3]
    with pytest.raises(KeyError):
        queue.remove(requests[1])


def test_a_removed_request_does_not_come_back_under_a_reused_id() -> None:
    queue = WaitingQueue(Fcfs())
    old, new = request(1), request(2)
    new.id = old.id
    queue.push(old)
    queue.remove(old)
    queue.push(new)
    assert queue.first() is new and list(queue) == [new] and len(queue) == 1


def test_removed_entries_do_not_pile_up() -> None:
    queue = WaitingQueue(Fcfs())
    queue.push(request(0))
    for order in range(1, 5000):
        r = request(order)
        queue.push(r)
        queue.remove(r)
    assert len(queue) == 1 and len(queue._groups[None].heap) < 100
    first = queue.first()
    assert first is not None and first.order == 0


def test_pushing_anew_moves_a_waiting_request_and_entries_do_not_pile_up() -> None:
    policy = Priority()
    queue = WaitingQueue(policy)
    requests = [request(place) for place in range(3)]
    for r in requests:
        queue.push(r)
    for turn in range(1000):
        requests[1].priority = turn % 3 - 1
        queue.push(requests[1])
        assert len(queue) == 3 and next(iter(queue)) is queue.first() is requests[1 if requests[1].priority < 0 else 0]
    assert len(queue._groups[None].heap) < 100
    queue.remove(requests[1])
    assert list(queue) == [requests[0], requests[2]]


# -- aging


@pytest.mark.parametrize(("later", "first"), [(59, 1), (61, 0)])
def test_a_level_of_priority_is_worth_thirty_seconds(later: float, first: int) -> None:
    """One of priority 2 at 0 s, one of priority 0 later: after 60 s it does not pass any more."""
    requests = [request(0, 2, 1000.0), request(1, 0, 1000.0 + later)]
    assert min(requests, key=Priority().order).order == first


def test_aging_leaves_running_equals_equal() -> None:
    policy = Priority()
    assert policy.urgency(request(0, 3, 0.0)) == policy.urgency(request(1, 3, 500.0)) < policy.urgency(request(2, 4, 0.0))


def test_the_aged_order_is_the_order_of_aged_numbers_at_any_moment() -> None:
    rng = random.Random(1)
    requests = [request(place, rng.randint(-3, 3), rng.uniform(0, 300)) for place in range(200)]
    for now in (300.0, 1e6):
        aged = sorted(requests, key=lambda r: r.priority - (now - r.arrival) / 30)
        assert sorted(requests, key=Priority().order) == aged


# -- longest prefix


def prefixes(cached: dict[str, int], count: int, pace: float = 0.0) -> tuple[LongestPrefix, WaitingQueue, list[Request], Counter[str]]:
    asked: Counter[str] = Counter()

    def ask(r: Request) -> int:
        asked[r.id] += 1
        return cached.get(r.id, 0)

    policy = LongestPrefix(ask)
    queue = WaitingQueue(policy)
    requests = [request(place, arrival=place * pace) for place in range(count)]
    for r in requests:
        policy.arrived(r, queue)
        queue.push(r)
    return policy, queue, requests, asked


def test_the_longest_prefix_goes_first_then_arrival() -> None:
    _, queue, _, _ = prefixes({"r2": 32, "r3": 64, "r4": 32}, 6)
    assert [r.order for r in queue] == [3, 2, 4, 0, 1, 5]


@pytest.mark.parametrize(("seconds", "first"), [(3.9, 1), (4.1, 0)])
def test_sixty_four_cached_tokens_are_worth_a_second(seconds: float, first: int) -> None:
    _, queue, _, _ = prefixes({"r1": 256}, 2, pace=seconds)
    head = queue.first()
    assert head is not None and head.order == first


def test_what_the_cache_holds_is_asked_again_a_few_at_a_time() -> None:
    cached: dict[str, int] = {}
    policy, queue, requests, asked = prefixes(cached, 100)
    cached["r77"] = 500
    plans = 0
    while queue.first() is not requests[77]:
        before = asked.total()
        policy.refresh(queue)
        plans += 1
        assert asked.total() - before <= ASKS + 1 and plans <= 100 / ASKS + 1
    assert plans > 1
    cached.clear()  # evicted: the head is asked at each plan, so it is not admitted for what is gone
    policy.refresh(queue)
    assert queue.first() is requests[0]


def test_running_requests_are_not_asked_for_and_ended_ones_are_forgotten() -> None:
    cached: dict[str, int] = {}
    policy, queue, requests, asked = prefixes(cached, 20)
    for r in requests[:15]:
        queue.remove(r)
        r.state = State.RUNNING
    asked.clear()
    for _ in range(10):
        policy.refresh(queue)
    assert set(asked) == {r.id for r in requests[15:]}
    for r in requests:
        policy.ended(r)
    assert not policy._hits


# -- fair


class Tenants:
    """A queue under FairShare, and what happens to it."""

    def __init__(self, weights: dict[str, float] | None = None, most: int = 256) -> None:
        self.policy = FairShare(weights, most)
        self.queue = WaitingQueue(self.policy)
        self.count = 0

    def arrive(self, tenant: str) -> Request:
        self.count += 1
        r = request(self.count, tenant=tenant)
        self.policy.arrived(r, self.queue)
        self.queue.push(r)
        return r

    def serve(self, prompt: int = 10, generated: int = 5) -> str:
        r = self.queue.first()
        assert r is not None
        self.queue.remove(r)
        self.policy.charge(r, prompt, 0)
        for _ in range(generated):
            self.policy.charge(r, 0, 1)
        self.policy.ended(r)
        return r.tenant

    def level(self, tenant: str) -> float:
        return self.policy._accounts[tenant].level


def test_tenants_take_turns_however_many_requests_one_has() -> None:
    tenants = Tenants()
    for _ in range(10):
        tenants.arrive("heavy")
    for _ in range(3):
        tenants.arrive("light")
    assert "".join(tenants.serve()[0] for _ in range(13)) == "hlhlhl" + "h" * 7  # and nobody idles when one has no more


def test_shares_follow_the_weights() -> None:
    tenants = Tenants({"big": 3.0})
    for _ in range(40):
        tenants.arrive("big")
        tenants.arrive("small")
    first = Counter(tenants.serve() for _ in range(40))
    assert first == {"big": 30, "small": 10}


def test_a_generated_token_counts_as_two_of_the_prompt() -> None:
    tenants = Tenants({"b": 4.0})
    tenants.arrive("a")
    tenants.arrive("b")
    tenants.serve(7, 3), tenants.serve(8, 4)
    assert (tenants.level("a"), tenants.level("b")) == (13.0, 4.0)


def test_being_away_saves_nothing_up() -> None:
    tenants = Tenants()
    for _ in range(20):
        tenants.arrive("a")
    tenants.arrive("b")
    for _ in range(10):
        tenants.serve()  # b once, a nine times
    for _ in range(5):
        tenants.arrive("b")
    assert tenants.level("b") == tenants.level("a") == 9 * 20.0  # lifted to the least that waits
    assert Counter(tenants.serve() for _ in range(8)) == {"a": 4, "b": 4}


def test_where_nobody_waits_a_newcomer_is_lifted_to_who_waited_last() -> None:
    tenants = Tenants()
    for _ in range(3):
        tenants.arrive("a")
    for _ in range(3):
        tenants.serve()
    tenants.arrive("b")
    assert tenants.level("b") == tenants.level("a") == 60.0


def test_a_tenant_that_waits_is_not_lifted_by_its_own_newcomers() -> None:
    tenants = Tenants()
    tenants.arrive("a"), tenants.arrive("b"), tenants.arrive("a")
    tenants.serve()
    assert tenants.level("a") == 20.0
    tenants.arrive("b")
    assert tenants.level("b") == 0.0 and tenants.serve() == "b"


def test_the_last_of_the_most_served_gives_way() -> None:
    tenants = Tenants()
    running = [tenants.arrive(name) for name in "abab"]
    tenants.policy.charge(running[1], 5, 0)
    assert tenants.policy.victim(running) is running[3]
    assert tenants.policy.urgency(running[0]) < tenants.policy.urgency(running[1])


def test_made_up_names_share_one_account_and_starve_nobody() -> None:
    tenants = Tenants({"named": 1.0}, most=8)
    for _ in range(500):
        tenants.arrive("old")
    for _ in range(10):
        tenants.serve()
    served = Counter[str]()
    for number in range(400):  # each step somebody new comes, as fast as requests are served
        tenants.arrive(f"made up {number}")
        served[tenants.serve()] += 1
    assert 400 / 10 - 2 <= served["old"] < 300  # eight accounts, one for the rest, and its own
    assert len(tenants.policy._accounts) <= 8
    for number in range(8):  # eight new ones wait: there is no room left, but for who is named
        tenants.arrive(f"new {number}")
    tenants.arrive("unknown"), tenants.arrive("named")
    assert "unknown" not in tenants.policy.tenants and "named" in tenants.policy.tenants


def test_who_is_away_is_forgotten_without_loss() -> None:
    tenants = Tenants(most=2)
    tenants.arrive("a"), tenants.serve()
    tenants.arrive("b"), tenants.serve(), tenants.arrive("b"), tenants.serve()
    assert tenants.level("a") == 20.0 and tenants.level("b") == 60.0
    tenants.arrive("b"), tenants.arrive("c")  # a would be lifted anyway
    assert set(tenants.policy.tenants) == {"b", "c"}
    tenants.arrive("a")
    assert set(tenants.policy.tenants) == {"b", "c"}  # no room: with the others
    while tenants.queue.first() is not None:
        tenants.serve()
    assert not tenants.policy._of
