import pytest

from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.errors import ConfigError
from octavo.scheduler.policy import Fcfs, Priority, make_policy
from octavo.scheduler.queue import WaitingQueue


def request(order: int, priority: int = 0) -> Request:
    return Request(f"r{order}", [1], SamplingParams(), 10, order=order, priority=priority)


def test_fcfs_goes_by_arrival_and_its_victim_came_last() -> None:
    requests = [request(3, -5), request(1, 7), request(2)]
    assert [r.order for r in sorted(requests, key=Fcfs().order)] == [1, 2, 3]
    assert Fcfs().victim(requests).order == 3


def test_priority_goes_by_the_number_then_by_arrival() -> None:
    requests = [request(1, 5), request(2, -1), request(3, 5), request(4, 0)]
    assert [r.order for r in sorted(requests, key=Priority().order)] == [2, 4, 1, 3]
    assert Priority().victim(requests).order == 3


def test_names() -> None:
    assert isinstance(make_policy("fcfs"), Fcfs) and isinstance(make_policy("priority"), Priority)
    with pytest.raises(ConfigError, match="'lifo' is unknown; there are: fcfs, priority") as error:
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
    assert len(queue) == 1 and len(queue._heap) < 100
    first = queue.first()
    assert first is not None and first.order == 0
