"""Executor: what the engine core drives. Implemented by the runner, by the simulator, later by several workers."""

from typing import Protocol

from octavo.core.step import StepPlan, StepResult


class Executor(Protocol):
    """Executes plans, in the order of their numbers.

    What an item says of its slot (epoch, start, tokens) continues what the slot's earlier items said. A slot in
    ``freed`` may be empty already. One request's trouble goes into its ``SlotResult.error``: the others go on. A
    RequestError that is raised ends the requests of that plan only; any other exception ends the engine.
    """

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step. One result per item, in the plan's order."""

    def shutdown(self) -> None:
        """Give up memory, threads and processes. May be called twice."""
