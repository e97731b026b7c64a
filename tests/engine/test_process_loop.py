"""The engine process's loop over the simulator: messages in, one batch per step out, and nothing that can end it but Shutdown or a break."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from octavo import SamplingParams
from octavo.config import SchedulerConfig
from octavo.core.request import Request
from octavo.core.step import StepPlan, StepResult
from octavo.engine import messages as m
from octavo.engine.core import EngineCore
from octavo.engine.process import EngineLoop
from octavo.errors import RequestError, WorkerDied
from octavo.kv.manager import KvManager
from octavo.observe.events import Admitted, Finished, Preempted
from octavo.scheduler.scheduler import Scheduler
from octavo.simulate.executor import SimExecutor, VirtualClock


class Rig:
    """A loop whose messages the test writes and whose batches it reads."""

    def __init__(self, blocks: int = 32, seqs: int = 4, tokens: int = 64, admission: Any = (), caching: bool = False) -> None:
        self.clock = VirtualClock()
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=400), KvManager(blocks, prefix_caching=caching),
            admission=admission,
        )
        sim = SimExecutor(seqs, blocks, max_tokens=tokens, clock=self.clock, cost=lambda plan: 1.0)
        self.execute: Callable[[StepPlan], StepResult] = sim.execute
        self.plans: list[StepPlan] = []
        self.down = 0
        self.inbox: list[bytes] = []
        self.waits: list[bool] = []
        self.batches: list[m.Batch] = []
        outer = self

        class Spy:
            def execute(self, plan: StepPlan) -> StepResult:
                outer.plans.append(plan)
                return outer.execute(plan)

            def shutdown(self) -> None:
                outer.down += 1

        self.core = EngineCore(self.scheduler, Spy(), self.clock)
        self.loop = EngineLoop(self.core, self.scheduler, self.receive, self.send, self.clock)

    def receive(self, wait: bool) -> list[bytes]:
        self.waits.append(wait)
        frames, self.inbox = self.inbox, []
        assert frames or not wait, "it would wait for ever"
        return frames

    def send(self, frame: bytes) -> None:
        message = m.decode_from_engine(frame)
        assert isinstance(message, m.Batch)
        self.batches.append(message)

    def say(self, *messages: Any) -> None:
        self.inbox += [message if isinstance(message, bytes) else m.encode(message) for message in messages]

    def add(self, name: str, prompt: int = 5, output: int = 4, **more: Any) -> None:
        request = Request(name, list(range(1, prompt + 1)), SamplingParams(max_tokens=output), prompt + output, **more)
        self.say(m.Add.of([request]))

    def turns(self, most: int = 1000) -> None:
        for _ in range(most):
            if not (self.inbox or self.core.has_work or self.loop._refused):
                return
            self.loop.turn()
        raise AssertionError("not drained")

    @property
    def ends(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for batch in self.batches:
            for delta in batch.deltas:
                assert delta.request_id not in found, f"news of {delta.request_id} after its end"
                if delta.finish_reason is not None:
                    found[delta.request_id] = delta.finish_reason
        return found


def test_one_batch_per_step() -> None:
    rig = Rig()
    rig.add("a", output=3)
    rig.add("b", output=2)
    rig.turns()
    assert len(rig.batches) == len(rig.plans) == 3
    assert [[d.request_id for d in batch.deltas] for batch in rig.batches] == [["a", "b"], ["a", "b"], ["a"]]
    assert [batch.num_tokens for batch in rig.batches] == [10, 2, 1]
    assert [batch.ended - batch.begun for batch in rig.batches] == [1.0] * 3
    assert [(type(event), event.request_id) for event in rig.batches[0].events] == [(Admitted, "a"), (Admitted, "b")]
    assert rig.batches[2].events == [Finished("a", "length")]
    assert [(b.stats.running, b.stats.waiting, b.stats.kv_free) for b in rig.batches] == [(2, 0, 30), (1, 0, 31), (0, 0, 32)]
    assert rig.batches[2].stats == m.EngineStats(0, 0, 32, 32, 3, 13, 5, 0, 0)


def test_the_stats_are_the_schedulers_ledger() -> None:
    rig = Rig(caching=True)
    rig.add("a", prompt=40, output=4)
    rig.add("b", prompt=40, output=2)
    rig.turns()
    first, last = rig.batches[0].stats, rig.batches[-1].stats
    assert (first.kv_live, first.kv_free, first.kv_cached, first.kv_shared, first.kv_logical) == (4, 28, 0, 2, 6)
    assert (first.kv_reserved_slots, first.cache_queries, first.cache_hits) == (16, 80, 32)
    assert (last.kv_live, last.kv_free, last.kv_cached, last.kv_shared, last.kv_logical, last.kv_reserved_slots) == (0, 30, 2, 0, 0, 0)


def test_a_step_without_news_is_told_too() -> None:
    rig = Rig(tokens=4)
    rig.add("a", prompt=10, output=1)
    rig.turns()
    assert [(len(b.deltas), b.num_tokens) for b in rig.batches] == [(0, 4), (0, 4), (1, 2)]


def test_it_waits_only_when_there_is_nothing_to_do() -> None:
    rig = Rig()
    rig.add("a", output=3)
    rig.turns()
    assert rig.waits == [True, False, False]
    rig.say(m.Abort(["nobody"]))
    rig.loop.turn()
    assert rig.waits[3:] == [True] and len(rig.batches) == 3  # nothing happened, nothing is told


def test_an_abort_frees_its_blocks_before_the_next_step() -> None:
    rig = Rig(blocks=8)
    rig.add("a", prompt=40, output=20)
    rig.add("b", prompt=40, output=20)
    rig.loop.turn()
    rig.loop.turn()
    free = rig.batches[-1].stats.kv_free
    rig.say(m.Abort(["a"]))
    rig.add("c", prompt=40, output=1)  # comes after it and finds its blocks
    rig.loop.turn()
    batch = rig.batches[-1]
    assert free == 2 and "c" in [e.request_id for e in batch.events if isinstance(e, Admitted)]
    assert [(d.request_id, d.finish_reason) for d in batch.deltas if d.request_id == "a"] == [("a", "abort")]
    rig.say(m.Abort(["a", "b"]))
    rig.loop.turn()
    assert rig.batches[-1].stats.kv_free == 8 and rig.ends == {"a": "abort", "b": "abort", "c": "length"}


def test_all_messages_are_taken_before_a_step() -> None:
    rig = Rig()
    for name in "abc":
        rig.add(name)
    rig.say(m.Abort(["b"]))
    rig.loop.turn()
    assert {e.request_id for e in rig.batches[0].events if isinstance(e, Admitted)} == {"a", "c"} and rig.ends == {"b": "abort"}


@pytest.mark.parametrize("frame", [
    b"", b"\x00", b"nonsense", b"\xff" * 100, msgspec.msgpack.encode(["Nobody", 1]), msgspec.msgpack.encode(["Abort"]),
    msgspec.msgpack.encode(["Abort", 5]), msgspec.msgpack.encode({"type": "Add"}), msgspec.msgpack.encode(["Add"]),
    msgspec.msgpack.encode(["Add", 3]), msgspec.msgpack.encode(["Begin", "wrong way"]),
    msgspec.msgpack.encode([]), msgspec.msgpack.encode(None), m.encode(m.Abort(["a"]))[:-1],
])
def test_a_message_that_cannot_be_read_is_dropped(frame: bytes) -> None:
    rig = Rig()
    rig.add("a")
    rig.say(frame)
    rig.add("b")
    rig.turns()
    assert rig.ends == {"a": "length", "b": "length"}


def test_a_request_that_cannot_be_read_is_answered() -> None:
    rig = Rig()
    rig.say(m.encode(["Add", ["x", "y"], [1, 2], [1, 2], {"temperature": -1.0}, 5]), m.encode(["Add", ["z"], [2**63], ["no id"], {}, 5]))
    rig.turns()
    assert rig.ends == {"x": "error", "y": "error", "z": "error"}
    assert "temperature" in rig.batches[0].deltas[0].error
    assert rig.waits == [True], "nobody waits while an answer is due"


def test_refused_requests_get_an_error() -> None:
    rig = Rig(blocks=4)
    rig.add("long", prompt=399)
    rig.add("a", output=2)
    rig.add("more", prompt=100)  # than the pool holds
    rig.turns()
    assert rig.ends == {"long": "error", "more": "error", "a": "length"}
    errors = {d.request_id: d.error for b in rig.batches for d in b.deltas if d.error}
    assert "64" in errors["more"] and "num_kv_blocks" in errors["more"]


def test_an_id_in_use_does_not_disturb_its_owner() -> None:
    rig = Rig()
    rig.add("a", output=3)
    rig.loop.turn()
    rig.add("a", output=3)
    rig.turns()
    found = [d.finish_reason for b in rig.batches for d in b.deltas if d.request_id == "a" and d.finish_reason]
    assert sorted(found) == ["error", "length"]  # the client never does this: its ids are not used twice


def test_a_request_error_of_the_executor_ends_the_step_only() -> None:
    rig = Rig()
    right = rig.execute

    def fault(plan: StepPlan) -> StepResult:
        rig.execute = right
        raise RequestError("too large")

    rig.add("a")
    rig.execute = fault
    rig.loop.turn()
    rig.add("b")
    rig.turns()
    assert rig.ends == {"a": "error", "b": "length"}


def test_a_break_ends_the_loop_with_its_reason() -> None:
    rig = Rig()
    rig.add("a")
    rig.loop.turn()

    def fault(plan: StepPlan) -> StepResult:
        raise OSError("the memory is gone")

    rig.execute = fault
    with pytest.raises(WorkerDied, match="OSError: the memory is gone"):
        rig.loop.run()
    assert rig.ends == {}, "whoever is open hears of the death itself"


def test_no_step_and_no_end_is_a_bug_and_no_spinning() -> None:
    rig = Rig(admission=[lambda request: False])
    rig.add("a")
    with pytest.raises(WorkerDied, match="no step could be planned"):
        rig.loop.run()


def test_shutdown_answers_everybody() -> None:
    rig = Rig()
    rig.add("a", output=50)
    rig.loop.turn()
    rig.add("b")
    rig.say(m.Shutdown())
    rig.loop.run()
    assert rig.ends == {"a": "abort", "b": "abort"} and rig.down == 1


def test_preemption_is_in_the_batch() -> None:
    rig = Rig(blocks=4, seqs=2)
    rig.add("a", prompt=14, output=40)
    rig.add("b", prompt=14, output=40)
    rig.turns()
    assert rig.ends == {"a": "length", "b": "length"}
    assert any(isinstance(e, Preempted) for b in rig.batches for e in b.events)
    assert rig.batches[-1].stats.preemptions > 0 and rig.batches[-1].stats.tokens_lost > 0 and rig.batches[-1].stats.kv_free == 4
    assert rig.batches[-1].stats.tokens_recomputed == rig.batches[-1].stats.tokens_lost


@pytest.mark.parametrize("seed", range(30))
def test_random_histories(seed: int) -> None:
    """Everybody who was added ends once, whatever else is said, and all blocks come back."""
    rng = random.Random(seed)
    rig = Rig(blocks=rng.randint(4, 24), seqs=rng.randint(1, 5), tokens=rng.randint(1, 40))
    names: list[str] = []
    for number in range(120):
        for _ in range(rng.choice((0, 0, 1, 3))):
            what = rng.random()
            if what < 0.6:
                names.append(f"r{number}.{len(names)}")
                rig.add(names[-1], rng.randint(1, 90), rng.randint(1, 30), priority=rng.randint(0, 2), seed=rng.getrandbits(64))
            elif what < 0.9 and names:
                rig.say(m.Abort(rng.sample(names, rng.randint(1, min(3, len(names))))))
            else:
                rig.say(rng.randbytes(rng.randint(0, 40)))
        if rig.inbox or rig.core.has_work:
            rig.loop.turn()
            rig.scheduler.check()
    rig.turns(5000)
    assert set(rig.ends) == set(names)
    last = rig.batches[-1].stats
    assert last.kv_free == last.kv_total and last.running == last.waiting == 0
    admitted = {e.request_id for b in rig.batches for e in b.events if isinstance(e, Admitted)}
    tokens: dict[str, list[int]] = {}
    for batch in rig.batches:
        for delta in batch.deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.tokens)
    assert all(name in admitted for name in names if tokens[name])


def test_a_reset_is_counted_by_the_next_batch_after_which_nothing_is_found() -> None:
    rig = Rig(caching=True, tokens=256)
    rig.add("a", prompt=100, output=4)
    rig.turns()
    rig.add("b", prompt=100, output=4)
    rig.say(m.ResetCache(), m.ResetCache())
    rig.add("c", prompt=100, output=4)
    rig.loop.turn()
    assert rig.batches[-1].resets == 2 and rig.batches[-1].stats.cache_hits == 96, "c shares with b, nobody with a"
    rig.turns()
    assert rig.batches[-1].resets == 0 and rig.ends == dict.fromkeys("abc", "length")
    steps = len(rig.plans)
    rig.say(m.ResetCache())  # and with nothing to do
    rig.loop.turn()
    assert rig.batches[-1].resets == 1 and rig.batches[-1].stats.kv_free == 32 and len(rig.plans) == steps
    assert rig.batches[-1].num_tokens == 0 and rig.batches[-1].deltas == []
