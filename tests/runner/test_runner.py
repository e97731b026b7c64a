"""The runner over a fake program that reads the arrays as a kernel does: a token is a hash of the sequence's cache."""

import random

import numpy as np
import pytest

from octavo.core.sampling import SamplingParams
from octavo.core.step import PlanItem, SlotInit, StepPlan
from octavo.runner.batch import Batch
from octavo.runner.runner import Runner
from octavo.runner.slots import Slots

VOCAB = 97
BLOCK = 16


class FakeProgram:
    """K and V of a token are the token; the next token is a hash of everything in the cache up to the row."""

    def __init__(self, batch: Batch, slots: Slots, num_blocks: int = 64) -> None:
        self.a, self.slots = batch.arrays, slots
        self.cache = np.full(num_blocks * BLOCK, -1)
        self.closed = False

    def forward(self) -> None:
        t = int(self.a["header"][0])
        self.cache[self.a["kv_slots"][:t]] = self.a["tokens"][:t]

    def history(self, slot: int, length: int) -> list[int]:
        table = self.slots.arrays["block_table"][slot]
        return [int(self.cache[table[p // BLOCK] * BLOCK + p % BLOCK]) for p in range(length)]

    def sample(self) -> None:
        a = self.a
        num_seqs, num_rows = int(a["header"][1]), int(a["header"][2])
        owner = np.searchsorted(a["q_start"][: num_seqs + 1], np.arange(int(a["header"][0])), side="right") - 1
        for r in range(num_rows):
            row, slot = int(a["rows"][r]), int(a["row_slot"][r])
            assert a["seq_slot"][owner[row]] == slot
            assert a["row_pos"][r] == a["positions"][row] + 1 <= a["kv_len"][owner[row]]
            token = next_token(self.history(slot, int(a["row_pos"][r])))
            if a["row_target"][r] < 0:
                a["out_token"][r] = token
                a["out_logprob"][r], a["out_rank"][r] = -token / 8, 1
            else:
                a["out_token"][r] = a["row_target"][r]
                a["out_logprob"][r], a["out_rank"][r] = -abs(int(a["row_target"][r]) - token) / 8, 2
            top = int(a["row_top"][r])
            a["top_ids"][r, :max(top, 0)] = [(token + i) % VOCAB for i in range(top)]
            a["top_logprobs"][r, :max(top, 0)] = np.arange(max(top, 0))
        assert a["header"][3] == a["row_top"][:num_rows].max(initial=-1)

    def run(self) -> None:
        self.forward()
        self.sample()

    def close(self) -> None:
        self.closed = True


def next_token(history: list[int]) -> int:
    assert -1 not in history
    value = 17
    for token in history:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB


def make(**kw) -> tuple[Runner, FakeProgram]:
    made: list[FakeProgram] = []

    def bind(batch: Batch, slots: Slots) -> FakeProgram:
        made.append(FakeProgram(batch, slots))
        return made[0]

    args = {"kv": None, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, "max_logprobs": 4, "vocab": VOCAB, "block_size": BLOCK}
    return Runner(bind, **{**args, **kw}), made[0]


def item(slot: int, start: int, tokens: list[int], sample: bool, *, init: SlotInit | None = None, epoch: int = 0, blocks: tuple[int, ...] = (),
         score: tuple[int, int] = (0, 0)) -> PlanItem:
    return PlanItem(slot, epoch, start, tokens, sample, list(blocks), init, 0, *score)


def start(prompt: list[int], tokens: list[int] | None = None, **params) -> SlotInit:
    return SlotInit(request_id="r", params=SamplingParams(**params), seed=1, prompt_len=len(prompt), tokens=tokens or prompt, eos_ids=frozenset())


def test_chunks_and_decodes_give_the_tokens_of_the_whole() -> None:
    rng = random.Random(5)
    runner, _ = make()
    prompts = {s: [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for s in range(8)}
    known = {s: list(p) for s, p in prompts.items()}
    computed = dict.fromkeys(prompts, 0)
    free = rng.sample(range(64), 64)
    for number in range(60):
        items, budget = [], 64
        for s in rng.sample(range(8), 8):
            pending = len(known[s]) - computed[s]
            n = min(pending, rng.randint(1, 9), budget)
            if n == 0 or rng.random() < 0.3:
                continue
            budget -= n
            have, need = -(-computed[s] // BLOCK), -(-(computed[s] + n) // BLOCK)
            tokens = known[s][computed[s] : computed[s] + n]
            if computed[s] + n == len(known[s]) > len(prompts[s]):
                tokens = [*tokens[:-1], -1]
            items.append(item(s, computed[s], tokens, computed[s] + n == len(known[s]), blocks=[free.pop() for _ in range(need - have)],
                              init=start(prompts[s]) if computed[s] == 0 else None))
            computed[s] += n
        result = runner.execute(StepPlan(number=number, items=items))
        assert result.number == number and len(result.slots) == len(items)
        for i, r in zip(items, result.slots, strict=True):
            assert (r.slot, r.epoch, len(r.tokens)) == (i.slot, i.epoch, int(i.sample))
            if i.sample and len(known[i.slot]) < 110:
                assert r.tokens == [next_token(known[i.slot])]
                known[i.slot] += r.tokens
    assert sum(map(len, known.values())) > sum(map(len, prompts.values())) + 50


def test_scored_rows_and_sampled_rows_in_one_step() -> None:
    runner, _ = make()
    a, b = [3, 1, 4, 1, 5], [9, 2, 6]
    plan = StepPlan(number=0, items=[
        item(0, 0, a[:3], False, init=start(a, prompt_logprobs=2), blocks=(7,), score=(0, 3)),
        item(2, 0, b, True, init=start(b, logprobs=3), blocks=(1,)),
        item(1, 0, b, True, init=start(b, prompt_logprobs=0, logprobs=0), blocks=(2,), score=(1, 2)),
    ])
    first, second, third = runner.execute(plan).slots
    assert first.tokens == [] and first.logprobs is None
    assert [r.token for r in first.prompt_logprobs] == [1, 4, 1]
    for p, row in enumerate(first.prompt_logprobs):
        guess = next_token(a[: p + 1])
        assert (row.logprob, row.rank, row.top_ids, row.top_logprobs) == (-abs(a[p + 1] - guess) / 8, 2, [guess, (guess + 1) % VOCAB], [0.0, 1.0])
    want = next_token(b)
    assert second.tokens == [want] and second.prompt_logprobs is None
    assert second.logprobs[0].top_ids == [(want + i) % VOCAB for i in range(3)] and second.logprobs[0].token == want
    assert third.tokens == [want] and third.logprobs[0].top_ids == [] and [r.token for r in third.prompt_logprobs] == [6]
    last = runner.execute(StepPlan(number=1, items=[item(0, 3, a[3:], True, score=(3, 4)), item(2, 3, [-1], True)])).slots
    assert [r.token for r in last[0].prompt_logprobs] == [5] and last[0].tokens == [next_token(a)] and last[0].logprobs is None
    assert last[1].tokens == [next_token([*b, want])]


def test_a_broken_row_ends_its_request_and_no_other() -> None:
    """Sampled or scored; the slot stays usable for a plan that was made before anybody knew."""
    runner, program = make()
    whole, sample = program.sample, set()

    def breaking() -> None:
        whole()
        program.a["out_token"][list(sample)] = -1

    program.sample = breaking
    first = [
        item(0, 0, [3, 4], True, init=start([3, 4], logprobs=1, repetition_penalty=2.0, bad_words=["x"]), blocks=(1,)),
        item(1, 0, [3, 4], True, init=start([3, 4]), blocks=(2,)),
    ]
    sample.add(0)
    broken, fine = runner.execute(StepPlan(0, first)).slots
    assert broken.error is not None and "position 2 are no numbers" in broken.error and not broken.tokens and broken.logprobs is None
    assert fine.error is None and fine.tokens == [next_token([3, 4])]
    sample.clear()
    again = runner.execute(StepPlan(1, [item(0, 2, [-1], True), item(1, 2, [-1], True)])).slots
    assert again[1].tokens == [next_token([3, 4, *fine.tokens])]
    scoring = item(2, 0, [5, 6, 7], True, init=start([5, 6, 7], prompt_logprobs=0), blocks=(3,), score=(0, 2))
    sample.add(1)
    assert "position 2 are no numbers" in (runner.execute(StepPlan(2, [scoring])).slots[0].error or "")


def test_all_alternatives() -> None:
    runner, _ = make(max_logprobs=-1)
    row = runner.execute(StepPlan(number=0, items=[item(0, 0, [1], True, init=start([1], logprobs=-1), blocks=(0,))])).slots[0].logprobs[0]
    assert sorted(row.top_ids) == list(range(VOCAB))


def test_freed_slots_go_first_and_a_resumed_request_continues() -> None:
    runner, _ = make()
    one = runner.execute(StepPlan(number=0, items=[item(0, 0, [5, 6], True, init=start([5, 6]), blocks=(3,))])).slots[0].tokens
    known = [5, 6, *one]
    resumed = item(0, 0, known, True, init=start([5, 6], known), epoch=1, blocks=(9,))
    two = runner.execute(StepPlan(number=1, items=[resumed], freed=[0])).slots[0]
    assert two.tokens == [next_token(known)] and two.epoch == 1


def test_nothing_to_do_is_fine() -> None:
    runner, program = make()
    runner.execute(StepPlan(number=0, items=[item(0, 0, [5], True, init=start([5]), blocks=(3,))]))
    program.forward = program.sample = None  # a call would fail
    assert runner.execute(StepPlan(number=3, items=[], freed=[0])).slots == []
    assert runner.slots.epoch[0] == -1


@pytest.mark.parametrize("bad", [
    item(0, 1, [-1], True, epoch=5),  # another epoch
    item(1, 0, [4], True),  # nobody's slot
    item(0, 3, [-1], True),  # beyond the known tokens
    item(0, 0, [-1], False),  # not the last token
    item(0, 1, [], True),
    item(0, 0, [5, -1], False, score=(0, 1)),  # no prompt_logprobs asked
])
def test_a_plan_that_contradicts_the_slots_is_refused(bad: PlanItem) -> None:
    runner, _ = make()
    runner.execute(StepPlan(number=0, items=[item(0, 0, [5], True, init=start([5]), blocks=(3,))]))
    with pytest.raises(ValueError, match="slot"):
        runner.execute(StepPlan(number=1, items=[bad]))


def test_a_missing_block_is_refused() -> None:
    runner, _ = make()
    long = list(range(17))
    with pytest.raises(ValueError, match="1 blocks"):
        runner.execute(StepPlan(number=0, items=[item(0, 0, long, True, init=start(long), blocks=(3,))]))


def test_shutdown() -> None:
    runner, program = make()
    runner.shutdown()
    runner.shutdown()
    assert program.closed
    with pytest.raises(RuntimeError, match="shut down"):
        runner.execute(StepPlan(number=0, items=[]))


@pytest.mark.parametrize("tokens", [[1, -1, 2], [-1, -1], [-1]])
def test_only_the_last_token_may_be_left_to_the_slot(tokens: list[int]) -> None:
    runner, _ = make()
    with pytest.raises(ValueError, match="not the slot's last one"):
        runner.execute(StepPlan(number=0, items=[item(0, 0, tokens, True, init=start(list(range(4))), blocks=(3,))]))
    items = [item(1, 0, [5, 6, 7], False, init=start([5, 6, 7, 8]), blocks=(4,)), item(2, 0, [9], True, init=start([9]), blocks=(5,))]
    assert [r.tokens for r in runner.execute(StepPlan(number=1, items=items)).slots] == [[], [next_token([9])]]


def test_more_than_the_arrays_hold_is_refused() -> None:
    runner, _ = make(max_num_seqs=2, max_num_batched_tokens=20, max_model_len=32)
    long = list(range(21))
    with pytest.raises(ValueError, match="21 tokens or more exceeds 20"):
        runner.execute(StepPlan(number=0, items=[item(0, 0, long, True, init=start(long), blocks=(3, 4))]))
    with pytest.raises(ValueError, match="room for 2 blocks, and the plan gives it 3"):
        runner.execute(StepPlan(number=1, items=[item(1, 0, [1], True, init=start([1]), blocks=(5, 6, 7))]))
    with pytest.raises(ValueError, match="3 sequences exceeds 2"):
        runner.execute(StepPlan(number=2, items=[item(0, 0, [1], True, init=start([1]), blocks=(3,))] * 3))
