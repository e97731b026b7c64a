"""Who comes first, and who gives way. A policy only ranks; the Scheduler does."""

from collections.abc import Iterable

from octavo.core.request import Request
from octavo.errors import ConfigError


class Policy:
    """Base: order by rank, then by arrival; the victim is the last in that order.

    Requests of one rank are equals: they go by arrival, and take turns when a step cannot serve them all. The rank of
    a request must not change while it waits.
    """

    def rank(self, request: Request) -> float:
        """Smaller goes first."""
        raise NotImplementedError

    def order(self, request: Request) -> tuple[float, int]:
        """The place in policy order; no two requests share one."""
        return self.rank(request), request.order

    def victim(self, running: Iterable[Request]) -> Request:
        """Who gives way when blocks are short: the last in policy order.

        So the first in order never gives way to another, which is what bounds preemption (see Scheduler).
        """
        return max(running, key=self.order)

    def charge(self, request: Request, tokens: int) -> None:
        """Hear that a step computes so many tokens for a request. The policies here keep no accounts."""


class Fcfs(Policy):
    """First come, first served."""

    def rank(self, request: Request) -> float:
        """All are equal."""
        return 0


class Priority(Policy):
    """The smallest ``priority`` first (vLLM's sense), then first come, first served."""

    def rank(self, request: Request) -> float:
        """The request's own number."""
        return request.priority


POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "priority": Priority}


def make_policy(name: str) -> Policy:
    """The policy of this name.

    Raises: ConfigError for an unknown one.
    """
    if name not in POLICIES:
        raise ConfigError(f"scheduling policy {name!r} is unknown; there are: {', '.join(POLICIES)}", "policy")
    return POLICIES[name]()
