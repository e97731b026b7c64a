"""One's own tasks, a JSON object a line:

    {"prompt": "Water freezes at", "choices": [" 0", " 100"], "answer": 0}      the choice with the largest log-probability
    {"prompt": "2 + 2 =", "target": "4"}                                        greedy text, compared with the target

``answer`` is a choice's place or its text. Log-probabilities of a choice are summed, and, as "per character", divided by its length.
An exact match takes the text up to ``stop`` (a string or a list, a line's end by default), without space around it; ``max_tokens`` bounds it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.bench.scoring import Scorer
from octavo.errors import InvalidRequest

MOST_TOKENS = 64  # of an exact match that gives no max_tokens
KEYS = {"prompt", "choices", "answer", "target", "stop", "max_tokens"}


@dataclass(frozen=True, slots=True)
class Task:
    """One line. Either ``choices`` with ``answer``, or ``target``."""

    prompt: str
    choices: tuple[str, ...] = ()
    answer: int = 0
    target: str = ""
    stop: tuple[str, ...] = ("\n",)
    max_tokens: int = MOST_TOKENS


@dataclass(slots=True)
class Score:
    """How a setting did. ``names`` and ``shares`` go together; ``answers`` are one per task."""

    names: list[str] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)

    def facts(self) -> dict[str, float]:
        """For the result."""
        return dict(zip(self.names, self.shares, strict=True))


def read_tasks(path: Path) -> list[Task]:
    """The tasks of a file. Raises: InvalidRequest naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}", "tasks") from None
    tasks = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            tasks.append(_task(json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{path}, line {number}: {error}", "tasks") from None
    if not tasks:
        raise InvalidRequest(f"{path} holds no task", "tasks")
    return tasks


def _task(value: Any) -> Task:
    """Raises: ValueError saying what is wrong."""
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    if unknown := sorted(value.keys() - KEYS):
        raise ValueError(f"unknown keys {', '.join(unknown)}; there are {', '.join(sorted(KEYS))}")
    prompt = value.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("prompt must be a text that is not empty")
    if ("choices" in value) == ("target" in value):
        raise ValueError("a task has either choices and an answer, or a target")
    if "choices" in value:
        choices, answer = value["choices"], value.get("answer")
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(choice, str) and choice for choice in choices):
            raise ValueError("choices must be at least two texts")
        if isinstance(answer, str) and answer in choices:
            answer = choices.index(answer)
        if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
            raise ValueError(f"answer must be one of the choices or its place, 0 to {len(choices) - 1}, not {answer!r}")
        return Task(prompt, tuple(choices), answer)
    stop, most = value.get("stop", "\n"), value.get("max_tokens", MOST_TOKENS)
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else ()
    if not stops or not all(isinstance(each, str) and each for each in stops):
        raise ValueError("stop must be a text or a list of them")
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"max_tokens must be a whole number from 1, not {most!r}")
    if not isinstance(value["target"], str) or not value["target"].strip():
        raise ValueError("target must be a text that is not empty")
    return Task(prompt, target=value["target"], stop=stops, max_tokens=most)


def run_tasks(llm: LLM, tasks: Sequence[Task]) -> Score:
    """All tasks under one setting. Raises: ContextTooLong."""
    scorer, encode = Scorer(llm), llm.get_tokenizer().encode
    answers: dict[int, Any] = {}
    right: dict[str, list[bool]] = {"choices": [], "choices, per character": [], "exact match": []}
    for place, task in enumerate(tasks):
        if task.choices:
            sums = [_continuation(scorer, encode(task.prompt), encode(task.prompt + choice)) for choice in task.choices]
            each = [total / len(choice) for total, choice in zip(sums, task.choices)]
            answers[place] = max(range(len(sums)), key=sums.__getitem__)
            right["choices"].append(answers[place] == task.answer)
            right["choices, per character"].append(max(range(len(each)), key=each.__getitem__) == task.answer)
    matches = [(place, task) for place, task in enumerate(tasks) if task.target]
    if matches:
        params = [SamplingParams(temperature=0.0, max_tokens=task.max_tokens, stop=list(task.stop)) for _, task in matches]
        outs = llm.generate([task.prompt for _, task in matches], params, use_tqdm=False)
        for (place, task), out in zip(matches, outs, strict=True):
            answers[place] = out.outputs[0].text.strip()
            right["exact match"].append(answers[place] == task.target.strip())
    score = Score(answers=[answers[place] for place in range(len(tasks))])
    for name, hits in right.items():
        if hits:
            score.names.append(f"{name} ({len(hits)})")
            score.shares.append(sum(hits) / len(hits))
    return score


def _continuation(scorer: Scorer, prompt: Sequence[int], whole: Sequence[int]) -> float:
    """Log-probability of what follows the prompt. A token that the two texts share in part belongs to what follows."""
    shared = 0
    while shared < min(len(prompt), len(whole) - 1) and prompt[shared] == whole[shared]:
        shared += 1
    return float(scorer.logprobs(whole)[max(shared, 1) - 1 :].sum(dtype="float64"))
