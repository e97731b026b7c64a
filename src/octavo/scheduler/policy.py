"""Who comes first, and who gives way. A policy only ranks; the Scheduler does.

Where a request stands is (level of its group, rank, arrival order). The rank is fixed while nothing but time passes: waiting
counts the same for everybody, so a request that waits since ``arrival`` and gains ``v`` a second is compared by
``value + v · arrival``, and aging costs nothing. Only what a queue cannot know moves: levels (read anew each time), and what
``refresh`` says has changed.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING

from octavo.core.request import Request, State
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.scheduler.queue import WaitingQueue

CachedTokens = Callable[[Request], int]

AGING_SECONDS = 30.0  # waiting that makes up for one level of priority
CACHED_TOKENS_PER_SECOND = 64.0  # cached tokens that a second of waiting makes up for: 1,024 of them are worth 16 s
ASKS = 8  # waiting requests whose cached tokens are asked for anew in one plan
PROMPT_WEIGHT, GENERATED_WEIGHT = 1.0, 2.0  # of a token in a tenant's account; Sheng et al. 2024, section 5.1
MOST_TENANTS = 256  # accounts kept at once; tenants beyond them share one


class Policy:
    """Base: order by level, rank, then arrival; the victim is the last in that order.

    Requests with one ``urgency`` are equals while they run: they take turns when a step cannot serve them all. No request
    may be passed for ever: each policy says why it is not.
    """

    def rank(self, request: Request) -> float:
        """Smaller goes first. It may change while a request waits only when ``refresh`` then pushes it anew."""
        raise NotImplementedError

    def urgency(self, request: Request) -> float:
        """Smaller is served first among running requests with as many pending tokens."""
        return 0.0

    def group(self, request: Request) -> Hashable:
        """Requests of one group keep their order among each other; whole groups may change places."""
        return None

    def level(self, group: Hashable) -> float:
        """The group's place, smaller first. May change at any time."""
        return 0.0

    def order(self, request: Request) -> tuple[float, int]:
        """The place within the group; no two requests share one."""
        return self.rank(request), request.order

    def place(self, request: Request) -> tuple[float, float, int]:
        """The place among all."""
        return self.level(self.group(request)), self.rank(request), request.order

    def victim(self, running: Iterable[Request]) -> Request:
        """Who gives way when blocks are short: the last in policy order.

        So the first in order never gives way to another (see Scheduler).
        """
        return max(running, key=self.place)

    # What a policy hears. The ones that keep no accounts ignore it.

    def arrived(self, request: Request, waiting: "WaitingQueue") -> None:
        """A new request will now be queued."""

    def refresh(self, waiting: "WaitingQueue") -> None:
        """Requests are about to be admitted: push those anew whose rank has changed. Must be cheap however many wait."""

    def charge(self, request: Request, prompt: int, generated: int) -> None:
        """So many prompt tokens will be computed for a request (told once, at its first admission), or are sampled for it now."""

    def ended(self, request: Request) -> None:
        """A request is over; it waits and runs no more."""


class Fcfs(Policy):
    """First come, first served. Nobody is passed."""

    def rank(self, request: Request) -> float:
        """All are equal."""
        return 0.0


class Priority(Policy):
    """The smallest ``priority`` first (vLLM's sense), aged: a level counts as much as ``aging`` seconds of waiting.

    Why nobody starves: a request of priority p is passed only by those of a priority q < p that come less than
    (p - q) · aging seconds after it. Once running, equal priorities are equals, and the order of victims is the aged one.
    """

    def __init__(self, aging: float = AGING_SECONDS) -> None:
        self._aging = aging

    def rank(self, request: Request) -> float:
        """The request's own number, in which its arrival counts."""
        return request.priority + request.arrival / self._aging

    def urgency(self, request: Request) -> float:
        """The number alone: who runs at all gets on at every step, unless the budget shrinks."""
        return request.priority


class _Hit:
    """What the cache holds of a request, when last asked."""

    __slots__ = ("request", "tokens")

    def __init__(self, request: Request, tokens: int) -> None:
        self.request = request
        self.tokens = tokens


class LongestPrefix(Policy):
    """The longest cached prefix first, aged: ``rate`` cached tokens count as much as a second of waiting.

    ``cached_tokens``: what the cache holds of a request now; asking must change nothing. It is asked when a request arrives,
    and then of the head and some others of the queue at each plan, in turns.

    Samples of one prompt may have been asked at different times, so others can come between them. That costs no sharing: while one of
    them has the prompt's blocks, those are a hit of the next one's.

    Why nobody starves: a request is passed only by those that come less than (their cached tokens) / rate seconds after it,
    and those are at most the context.
    """

    def __init__(self, cached_tokens: CachedTokens, rate: float = CACHED_TOKENS_PER_SECOND) -> None:
        self._cached_tokens = cached_tokens
        self._rate = rate
        self._hits: OrderedDict[str, _Hit] = OrderedDict()  # of unfinished requests, the one asked longest ago first

    def rank(self, request: Request) -> float:
        """The arrival, brought forward by what is cached."""
        hit = self._hits.get(request.id)
        return request.arrival * self._rate - (hit.tokens if hit else 0)

    def arrived(self, request: Request, waiting: "WaitingQueue") -> None:
        """Ask for the first time."""
        self._hits[request.id] = _Hit(request, self._cached_tokens(request))

    def refresh(self, waiting: "WaitingQueue") -> None:
        """Ask anew: the head first, so that no stale hit is admitted before its turn, then those asked longest ago."""
        head = waiting.first()
        if head is not None:
            self._ask(head, waiting)
        asked = 0
        for _ in range(min(4 * ASKS, len(self._hits))):  # running ones are passed over
            name, hit = next(iter(self._hits.items()))
            self._hits.move_to_end(name)
            if hit.request.state is State.WAITING:
                self._ask(hit.request, waiting)
                asked += 1
                if asked == ASKS:
                    return

    def ended(self, request: Request) -> None:
        """Forget it."""
        del self._hits[request.id]

    def _ask(self, request: Request, waiting: "WaitingQueue") -> None:
        hit, tokens = self._hits[request.id], self._cached_tokens(request)
        if tokens != hit.tokens:
            hit.tokens = tokens
            waiting.push(request)


class Account:
    """A tenant's, or that of all tenants for whom there was no room."""

    __slots__ = ("level", "open", "weight")

    def __init__(self, weight: float) -> None:
        self.level = 0.0  # weighted tokens served, divided by the weight
        self.weight = weight
        self.open = 0  # unfinished requests


class FairShare(Policy):
    """Tenants by the tokens they were served, the least served first; within a tenant first come, first served.

    Each tenant has a virtual token counter. It rises by the prompt tokens that are computed for it (at admission; cached ones
    cost nothing) and by twice the tokens that are sampled, divided by its weight; what a preemption makes compute again is
    nobody's debt. A tenant that comes back to the queue is lifted to the least counter there, or, when nobody waits, to that
    of the tenant that waited last: being away saves nothing up. Whoever can run does: it is work-conserving.

    Why nobody starves: while a tenant waits its counter stands still, those before it rise, and there are at most ``most``
    and the named ones. Tenants beyond that share one account, so that made-up names gain nothing.

    Source: Sheng et al. 2024, "Fairness in Serving Large Language Models", algorithm 2 (VTC) and its weighted form.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, most: int = MOST_TENANTS) -> None:
        self._weights = dict(weights or {})
        self._most = most
        self._accounts: dict[str, Account] = {}
        self._others = Account(1.0)
        self._of: dict[str, Account] = {}  # request id → whose account, from its arrival to its end

    def rank(self, request: Request) -> float:
        """All of one tenant are equal."""
        return 0.0

    def urgency(self, request: Request) -> float:
        """The least served tenant first."""
        return self._of[request.id].level

    def group(self, request: Request) -> Hashable:
        """The account."""
        return self._of[request.id]

    def level(self, group: Hashable) -> float:
        """Its counter."""
        assert isinstance(group, Account)
        return group.level

    def arrived(self, request: Request, waiting: "WaitingQueue") -> None:
        """Find the account, and lift it if none of its requests waits."""
        floor = self._floor(waiting)
        account = self._of[request.id] = self._account(request.tenant, floor)
        account.open += 1
        if account not in waiting.groups and account.level < floor:
            account.level = floor

    def charge(self, request: Request, prompt: int, generated: int) -> None:
        """Count what the tenant is served."""
        account = self._of[request.id]
        account.level += (PROMPT_WEIGHT * prompt + GENERATED_WEIGHT * generated) / account.weight

    def ended(self, request: Request) -> None:
        """One less of the tenant's."""
        self._of.pop(request.id).open -= 1

    @property
    def tenants(self) -> Collection[str]:
        """Those that have an account of their own now."""
        return self._accounts.keys()

    def _floor(self, waiting: "WaitingQueue") -> float:
        groups = waiting.groups or ((waiting.last_group,) if waiting.last_group is not None else ())
        return min(map(self.level, groups), default=0.0)

    def _account(self, tenant: str, floor: float) -> Account:
        account = self._accounts.get(tenant)
        if account is not None:
            return account
        named = tenant in self._weights
        if not named and len(self._accounts) >= self._most:
            # Who is away, and would be lifted to the floor anyway, loses nothing by being forgotten.
            self._accounts = {name: known for name, known in self._accounts.items() if known.open or known.level > floor}
            if len(self._accounts) >= self._most:
                return self._others
        account = self._accounts[tenant] = Account(self._weights.get(tenant, 1.0))
        return account


POLICIES: tuple[str, ...] = ("fcfs", "priority", "lpm", "fair")


def make_policy(name: str, *, cached_tokens: CachedTokens | None = None, weights: Mapping[str, float] | None = None) -> Policy:
    """The policy of this name. ``cached_tokens`` is lpm's, ``weights`` (tenant → weight, 1 where absent) fair's.

    Raises: ConfigError for an unknown one.
    """
    if name == "fcfs":
        return Fcfs()
    if name == "priority":
        return Priority()
    if name == "lpm":
        return LongestPrefix(cached_tokens or _nothing)
    if name == "fair":
        return FairShare(weights)
    raise ConfigError(f"scheduling policy {name!r} is unknown; there are: {', '.join(POLICIES)}", "policy")


def _nothing(request: Request) -> int:
    """There is no cache."""
    return 0
