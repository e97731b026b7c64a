"""The double must be right itself: its answers are pure, and each breach of the contract of plans is noticed."""

import msgspec
import pytest

from octavo.core.sampling import SamplingParams
from octavo.core.step import COPY, IN, OUT, Move, PlanItem, SlotInit, StepPlan
from octavo.simulate.executor import SimExecutor, VirtualClock, hash_sequence, logprob, next_token

PROMPT = [5, 6, 7, 8, 9, 10]


def init(name: str = "a", tokens: list[int] = PROMPT, seed: int = 3, **params: object) -> SlotInit:
    return SlotInit(name, SamplingParams(**params), seed, len(tokens), list(tokens), frozenset([0]))  # type: ignore[arg-type]


def started(**params: object) -> tuple[SimExecutor, int]:
    """An executor whose slot 0 has computed its prompt (blocks 0 and 1 of 4 tokens), and the token it sampled."""
    executor = SimExecutor(2, 6, 4, vocab=50, max_tokens=12, tier_slots=2)
    result = executor.execute(StepPlan(1, [PlanItem(0, 0, 0, PROMPT, True, [0, 1], init(**params))]))
    return executor, result.slots[0].tokens[0]


GOOD = PlanItem(0, 0, 6, [-1], True)
SECOND = PlanItem(1, 0, 0, [1, 2], True, [2], init("b", [1, 2]))


def test_a_sound_plan_is_accepted() -> None:
    executor, _ = started()
    assert len(executor.execute(StepPlan(2, [GOOD, SECOND])).slots) == 2
    assert executor.occupied == {0, 1}


BREACHES = {
    "comes after 1": StepPlan(1, [GOOD]),
    "has no items": StepPlan(2, []),
    "has 13 tokens": StepPlan(2, [PlanItem(1, 0, 0, [1] * 13, True, [2, 3, 4, 5], init("b", [1] * 13))]),
    "names a slot twice": StepPlan(2, [GOOD, GOOD]),
    "slot is out of range": StepPlan(2, [msgspec.structs.replace(SECOND, slot=2)]),
    "given out while occupied": StepPlan(2, [msgspec.structs.replace(SECOND, slot=0)]),
    "too few tokens": StepPlan(2, [msgspec.structs.replace(SECOND, init=init("b", []))]),
    "is empty": StepPlan(2, [PlanItem(1, 0, 0, [1, 2], True, [2])]),
    "0 \\(epoch 0\\) is empty": StepPlan(2, [GOOD], freed=[0]),
    "block out of range": StepPlan(2, [msgspec.structs.replace(SECOND, new_blocks=[6])]),
    "is given a block twice": StepPlan(2, [msgspec.structs.replace(GOOD, new_blocks=[1])]),
    "position 4 was overwritten": StepPlan(2, [GOOD, msgspec.structs.replace(SECOND, new_blocks=[1])]),
    "writes the cell of position 2, as": StepPlan(2, [GOOD, PlanItem(1, 0, 0, [1, 2, 3], True, [1], init("b", [1, 2, 3]))]),
    "position 0 was overwritten, or never": StepPlan(2, [PlanItem(1, 0, 4, [1], True, [3, 4], init("b", [5, 6, 7, 8, 1]))]),
    "is in epoch 0": StepPlan(2, [msgspec.structs.replace(GOOD, epoch=1)]),
    "6 tokens computed, the item starts at 5": StepPlan(2, [msgspec.structs.replace(GOOD, start=5)]),
    "0 tokens computed|has 6 tokens computed": StepPlan(2, [msgspec.structs.replace(GOOD, tokens=[])]),
    "has 7 tokens, the item ends at 8": StepPlan(2, [msgspec.structs.replace(GOOD, tokens=[-1, -1])]),
    "blocks for fewer than 2": StepPlan(2, [msgspec.structs.replace(SECOND, new_blocks=[])]),
    "expects tokens \\[-1\\], the item says \\[4\\]": StepPlan(2, [msgspec.structs.replace(GOOD, tokens=[4])]),
    "expects tokens \\[1, 2\\], the item says \\[1, 3\\]": StepPlan(2, [msgspec.structs.replace(SECOND, tokens=[1, 3])]),
    "samples exactly when": StepPlan(2, [msgspec.structs.replace(GOOD, sample=False)]),
    "has drafts": StepPlan(2, [msgspec.structs.replace(GOOD, num_draft=1)]),
    "moves what is out of range": StepPlan(2, [GOOD], moves=[Move(COPY, 0, 6)]),
    "range: Move\\(kind='out', source=0, target=2": StepPlan(2, [GOOD], moves=[Move(OUT, 0, 2)]),
    "range: Move\\(kind='in', source=2": StepPlan(2, [GOOD], moves=[Move(IN, 2, 3)]),
    "no known kind": StepPlan(2, [GOOD], moves=[Move("swap", 0, 1)]),
    "never moved out": StepPlan(2, [GOOD], moves=[Move(OUT, 0, 0), Move(IN, 1, 3)]),
    "position 4 was overwritten, or never": StepPlan(
        2, [GOOD, PlanItem(1, 0, 6, [1], True, [0, 2], init("b", [*PROMPT, 1]))], moves=[Move(COPY, 0, 2)]),
    "scores rows": StepPlan(2, [msgspec.structs.replace(SECOND, score_from=0, score_to=1)]),
}


@pytest.mark.parametrize("message", BREACHES)
def test_each_breach_of_the_contract_is_noticed(message: str) -> None:
    executor, _ = started()
    with pytest.raises(AssertionError, match=message):
        executor.execute(BREACHES[message])


def test_blocks_may_be_shared_by_those_whose_sequences_agree() -> None:
    executor, _ = started()
    same, other = [*PROMPT[:4], 1], [*PROMPT[:3], 9, 1]
    shares = PlanItem(1, 0, 4, [1], True, [0, 2], init("b", same))
    assert len(executor.execute(StepPlan(2, [GOOD, shares])).slots) == 2
    executor.execute(StepPlan(3, [PlanItem(0, 0, 7, [-1], True), PlanItem(1, 0, 5, [-1], True)]))
    executor, _ = started()
    with pytest.raises(AssertionError, match="cell of position 3 was overwritten"):
        executor.execute(StepPlan(2, [GOOD, msgspec.structs.replace(shares, init=init("b", other))]))


def test_a_copied_block_is_written_by_either_and_read_by_both() -> None:
    executor, _ = started()
    fork = PlanItem(1, 0, 6, [1], True, [0, 2], init("b", [*PROMPT, 1]))
    executor.execute(StepPlan(2, [GOOD, fork], moves=[Move(COPY, 1, 2)]))
    assert len(executor.execute(StepPlan(3, [PlanItem(0, 0, 7, [-1], True), PlanItem(1, 0, 7, [-1], True, [3])])).slots) == 2


def test_moves_are_made_in_their_order() -> None:
    """Out, overwritten, and back elsewhere; a tier slot emptied and filled again; a chain of copies."""
    executor, _ = started()
    fork = PlanItem(1, 0, 6, [1], True, [4, 5], init("b", [*PROMPT, 1]))
    chain = [Move(OUT, 0, 0), Move(OUT, 1, 1), Move(COPY, 0, 2), Move(COPY, 2, 3), Move(COPY, 1, 2), Move(IN, 0, 4), Move(OUT, 2, 0), Move(IN, 0, 5)]
    assert len(executor.execute(StepPlan(2, [GOOD, fork], moves=chain)).slots) == 2
    executor, _ = started()
    with pytest.raises(AssertionError, match="was overwritten"):
        executor.execute(StepPlan(2, [GOOD, fork], moves=[*chain[:6], Move(IN, 0, 5)]))


def test_a_move_that_breaks_spoils_what_reads_it_and_nothing_else() -> None:
    executor, token = started()
    sound = executor.execute(StepPlan(2, [GOOD], moves=[Move(OUT, 0, 0), Move(OUT, 1, 1)]))
    assert not sound.failed_moves and sound.slots[0].tokens == [next_token(hash_sequence([*PROMPT, token]), 3, 50)]
    executor._breaks = lambda move: move == Move(IN, 1, 5)
    fork = PlanItem(1, 0, 6, [1], True, [4, 5], init("b", [*PROMPT, 1]))
    after = PlanItem(0, 0, 7, [-1], True)
    found = executor.execute(StepPlan(3, [after, fork], moves=[Move(IN, 0, 4), Move(IN, 1, 5)]))
    assert found.failed_moves == [1] and found.moves_error
    assert found.slots[1].tokens != [next_token(hash_sequence([*PROMPT, 1]), 3, 50)]
    assert found.slots[0].tokens == [next_token(hash_sequence([*PROMPT, token, *sound.slots[0].tokens]), 3, 50)]


def test_an_item_may_read_what_another_of_its_step_writes() -> None:
    for turn in (1, -1):
        executor = SimExecutor(2, 6, 4, vocab=50)
        items = [PlanItem(0, 0, 0, PROMPT, True, [0, 1], init()), PlanItem(1, 0, 4, [1], True, [0, 2], init("b", [*PROMPT[:4], 1]))]
        assert [len(found.tokens) for found in executor.execute(StepPlan(1, items[::turn])).slots] == [1, 1]


@pytest.mark.parametrize(("first", "last"), [(0, 6), (1, 7), (5, 6)])
def test_only_rows_before_the_prompts_last_may_be_scored(first: int, last: int) -> None:
    executor = SimExecutor(1, 2, 4)
    with pytest.raises(AssertionError, match="scores rows"):
        executor.execute(StepPlan(1, [PlanItem(0, 0, 0, PROMPT, True, [0, 1], init(prompt_logprobs=0), 0, first, last)]))


def test_an_overwritten_block_is_noticed_when_it_is_read() -> None:
    executor, _ = started()
    executor._memory[1] = 12345
    with pytest.raises(AssertionError, match="cell of position 1 was overwritten"):
        executor.execute(StepPlan(2, [GOOD]))


def test_a_block_lost_to_another_and_kept_in_the_table_is_noticed() -> None:
    executor, _ = started()
    executor.execute(StepPlan(2, [SECOND]))
    executor._slots[1].table = [0]  # as if the scheduler had given block 0 to the second
    executor._memory[0] = executor._memory[2 * 4]
    with pytest.raises(AssertionError):
        executor.execute(StepPlan(3, [GOOD]))


def test_tokens_are_a_pure_function_of_sequence_and_seed() -> None:
    executor, token = started()
    assert token == next_token(hash_sequence(PROMPT), 3, 50)
    again = executor.execute(StepPlan(2, [GOOD])).slots[0].tokens
    assert again == [next_token(hash_sequence([*PROMPT, token]), 3, 50)]
    chunked = SimExecutor(1, 2, 4, vocab=50)
    assert chunked.execute(StepPlan(1, [PlanItem(0, 7, 0, PROMPT[:5], False, [0, 1], init())])).slots[0].tokens == []
    assert chunked.execute(StepPlan(2, [PlanItem(0, 7, 5, PROMPT[5:], True)])).slots[0].tokens == [token]
    assert len({next_token(hash_sequence(PROMPT), seed, 10**6) for seed in range(100)}) == 100


def test_end_tokens_are_banned_until_min_tokens_are_out() -> None:
    tokens = [1, 2, 3]
    seed = next(s for s in range(1000) if next_token(hash_sequence(tokens), s, 4) == 0)
    for least, banned in ((0, False), (1, True)):
        executor = SimExecutor(1, 2, 4, vocab=4)
        item = PlanItem(0, 0, 0, tokens, True, [0], init("a", tokens, seed, min_tokens=least))
        assert (executor.execute(StepPlan(1, [item])).slots[0].tokens != [0]) == banned


def test_logprobs_come_when_asked_for() -> None:
    executor = SimExecutor(1, 2, 4, vocab=50)
    item = PlanItem(0, 0, 0, PROMPT, True, [0, 1], init(logprobs=2, prompt_logprobs=0), 0, 0, 5)
    (found,) = executor.execute(StepPlan(1, [item])).slots
    assert found.logprobs is not None and found.prompt_logprobs is not None
    assert found.logprobs[0].token == found.tokens[0] and len(found.logprobs[0].top_ids) == 2
    assert [row.token for row in found.prompt_logprobs] == PROMPT[1:]
    assert [row.logprob for row in found.prompt_logprobs] == [logprob(hash_sequence(PROMPT[: i + 1]), PROMPT[i + 1]) for i in range(5)]
    assert all(-16 <= row.logprob <= 0 for row in found.prompt_logprobs)
    executor, _ = started()
    (found,) = executor.execute(StepPlan(2, [GOOD])).slots
    assert found.logprobs is None and found.prompt_logprobs is None


def test_the_virtual_clock_moves_by_the_cost_of_each_plan() -> None:
    clock = VirtualClock(10.0)
    executor = SimExecutor(1, 2, 4, clock=clock, cost=lambda plan: 0.5 * plan.num_tokens)
    result = executor.execute(StepPlan(1, [PlanItem(0, 0, 0, PROMPT, True, [0, 1], init())]))
    assert result.seconds == 3.0 and clock() == 13.0
    executor.shutdown()
    assert executor.occupied == set()
