"""What a part of a plan says of its request, and whether a result answers its plan."""

from octavo.core.request import Request
from octavo.core.step import SlotInit, StepPlan, StepResult
from octavo.errors import WorkerDied


def introduce(request: Request) -> SlotInit:
    """All that a runner needs to know about a request that is given a slot."""
    params = request.params if request.group is None else request.group.told(request)
    return SlotInit(
        request.id, params, request.seed, request.num_prompt, list(request.tokens), request.eos_ids, request.bad_words
    )


def rows_to_score(request: Request, start: int, end: int) -> tuple[int, int]:
    """Which of the rows start … end - 1 give prompt_logprobs that are not out yet: [from, to), (0, 0) for none."""
    first, last = max(start, request.num_scored), min(end, request.num_prompt - 1)
    return (first, last) if request.params.prompt_logprobs is not None and first < last else (0, 0)


def compare(plan: StepPlan, result: StepResult) -> None:
    """Raises WorkerDied unless the result answers the plan item by item."""
    if result.number != plan.number or len(result.slots) != len(plan.items):
        raise WorkerDied(
            f"the executor answered plan {plan.number} ({len(plan.items)} items) with result {result.number} ({len(result.slots)} items)"
        )
    for item, found in zip(plan.items, result.slots, strict=True):
        if found.slot != item.slot or found.epoch != item.epoch:
            raise WorkerDied(f"plan {plan.number}: slot {item.slot} epoch {item.epoch} was answered as slot {found.slot} epoch {found.epoch}")
        if found.error is None:
            scored, rows = item.score_to - item.score_from, len(found.prompt_logprobs or ())
            if len(found.tokens) != item.sample or rows != scored:
                raise WorkerDied(
                    f"plan {plan.number}: slot {item.slot} should give {int(item.sample)} tokens and {scored} scored rows, "
                    f"and gave {len(found.tokens)} and {rows}"
                )
