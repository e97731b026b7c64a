"""The scheduler's invariants, restated from nothing: what tests ask after every action. It looks into the scheduler and changes nothing."""

from typing import TYPE_CHECKING

from octavo.core.request import Request, State

if TYPE_CHECKING:
    from octavo.scheduler.scheduler import Scheduler


def check(scheduler: "Scheduler") -> None:
    """Restate the invariants from nothing, those of the KV manager included.

    Raises: AssertionError, saying what is wrong.
    """
    scheduler.kv.check()
    parked = [r for parked in scheduler._parked.values() for r in parked]
    waiting = [*scheduler.waiting, *parked, *_check_groups(scheduler)]
    assert scheduler._parked.keys() <= scheduler._requests.keys(), "somebody waits for a request that is gone"
    scheduler._preempter.check({r.id for r in waiting} | {r.id for r in scheduler.running if r.idle}, set(scheduler._requests))
    for request, (source, target) in scheduler._copies.items():
        assert request.fresh and request.state is State.RUNNING, f"a block is to be copied for {request.id}, which has begun, or is gone"
        assert scheduler.kv.table(request.id)[request.num_computed // scheduler.kv.block_size] == target != source
    assert sorted(r.id for r in [*waiting, *scheduler.running]) == sorted(scheduler._requests), "a request is lost, or in two places"
    assert scheduler.kv.holders() == {r.id for r in scheduler.running}, "a table without a running request, or the reverse"
    slots = [r.slot for r in scheduler.running] + scheduler._slots
    assert sorted(slots) == list(range(scheduler.config.max_num_seqs)), f"slots are lost or doubled: {sorted(slots)}"
    unused = sum(len(scheduler.kv.table(r.id)) * scheduler.kv.block_size - r.num_computed for r in scheduler.running)
    assert scheduler.kv.ledger().reserved_slots == unused, f"{unused} token slots are reserved and unused, the ledger says otherwise"
    for request in waiting:
        assert request.state is State.WAITING and request.slot == -1 and request.num_computed == 0 and request.ahead == 0, request
    for request in scheduler.running:
        known = len(request.tokens) + request.ahead
        assert request.state is State.RUNNING and 0 <= request.num_computed <= known, request
        assert len(request.tokens) < request.limit, f"{request.id} should have ended"
        flying = [(r, n) for n, requests in scheduler._in_flight.items() for r in requests if r is request]
        assert request.ahead <= len(flying), f"{request.id} waits for a token that no plan samples"


def _check_groups(scheduler: "Scheduler") -> list[Request]:
    """Restate the groups' invariants: all run, or all wait. Returns the beams that wait outside the queue."""
    outside = []
    for group in {r.group: None for r in scheduler._requests.values() if r.group is not None}:
        running = {member.state is State.RUNNING for member in group.members}
        assert len(running) == 1, f"the group of {group.leader.id} runs in part"
        assert (group.leader in scheduler.waiting) == (group.complete and running == {False}), f"{group.leader.id} is not in its place"
        outside += [m for m in group.members if m not in scheduler.waiting] if running == {False} else []
        assert not group.leader.idle and group.width >= len(group.members)
        group.check(scheduler.kv)
    return outside
