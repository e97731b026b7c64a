"""`octavo eval`: what a precision costs. A text's perplexity under two settings, how far their distributions are apart, and one's own tasks.

Both models are loaded, and go over the text in step, so no more than one chunk's distributions is ever held.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from octavo import LLM
from octavo.bench import result
from octavo.bench.scoring import CHUNK, Scorer
from octavo.bench.tables import percentile, table
from octavo.bench.tasks import Task, run_tasks
from octavo.engine.report import Report
from octavo.errors import ConfigError, InvalidRequest

PROSE = "prose.txt"  # written for this purpose: no model has seen it
MOST_TEXT = 1 << 26  # bytes


@dataclass(slots=True)
class Tally:
    """What is known of one text under two settings."""

    tokens: int = 0  # predicted
    nats: float = 0.0  # of the tested setting: minus the log-probabilities of the text's tokens
    reference_nats: float = 0.0
    agreed: int = 0  # tokens whose most likely ids are the same
    kl: list[float] = field(default_factory=list)  # per token, reference to tested, nats

    def add(self, tested: np.ndarray, reference: np.ndarray, targets: Sequence[int]) -> None:
        """Rows of log-probabilities [n, V], and the tokens that came: [n]."""
        rows = np.arange(len(targets))
        self.tokens += len(targets)
        self.nats -= float(tested[rows, targets].sum(dtype=np.float64))
        self.reference_nats -= float(reference[rows, targets].sum(dtype=np.float64))
        self.agreed += int((tested.argmax(axis=1) == reference.argmax(axis=1)).sum())
        p = np.exp(reference.astype(np.float64))
        self.kl += (p * (reference.astype(np.float64) - tested)).sum(axis=1).tolist()

    def facts(self) -> dict[str, Any]:
        """For the result."""
        mean = sum(self.kl) / self.tokens
        spread = math.sqrt(sum((each - mean) ** 2 for each in self.kl) / self.tokens / self.tokens)
        return {
            "tokens": self.tokens, "perplexity": math.exp(self.nats / self.tokens),
            "reference_perplexity": math.exp(self.reference_nats / self.tokens), "kl_mean": mean, "kl_standard_error": spread,
            "kl_p99": percentile(self.kl, 0.99), "kl_max": max(self.kl),
            "greedy_agreement": self.agreed / self.tokens,
        }


class Pair:
    """A model under the settings that are tested, and under those of the reference. A context manager. Raises: as LLM does."""

    def __init__(self, model: str, tested: Mapping[str, Any], reference: Mapping[str, Any], report: Report) -> None:
        fixed = {"enable_prefix_caching": False, "max_logprobs": -1, "max_num_batched_tokens": CHUNK}
        if taken := sorted(fixed.keys() & (tested.keys() | reference.keys())):
            raise ConfigError(f"eval sets {', '.join(taken)} itself", taken[0])
        self.tested = LLM(model, report=report, **tested, **fixed)
        try:
            self.reference = LLM(model, report=report, **reference, **fixed)
        except BaseException:
            self.tested.shutdown()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.tested.shutdown()
        self.reference.shutdown()

    def text(self, text: str, window: int) -> Tally:
        """Go over a text in windows of so many tokens, each by itself. Raises: InvalidRequest for a text with nothing to predict."""
        tokens = self.tested.get_tokenizer().encode(text)
        if len(tokens) < 2:
            raise InvalidRequest(f"the text has {len(tokens)} tokens: nothing to predict", "text")
        scorers, tally = (Scorer(self.tested), Scorer(self.reference)), Tally()
        for begin in range(0, len(tokens) - 1, window):
            piece, at = tokens[begin : begin + window], 1
            for one, other in zip(*(scorer.distributions(piece) for scorer in scorers), strict=True):
                tally.add(one, other, piece[at : at + len(one)])
                at += len(one)
        return tally


def run(pair: Pair, text: str | None, source: str, tasks: Sequence[Task], window: int) -> tuple[str, dict[str, Any]]:
    """Everything that was asked for. → a table, and the result. Raises: ConfigError, InvalidRequest, ContextTooLong."""
    context = min(pair.tested.max_model_len, pair.reference.max_model_len)
    if not 2 <= window <= context:
        raise ConfigError(f"window must be from 2 to {context} tokens, not {window}", "window")
    found: dict[str, Any] = {
        "benchmark": "eval", **result.head(pair.tested.config), "reference_config": result.head(pair.reference.config)["config"]}
    rows: list[Sequence[Any]] = []
    if text is not None:
        facts = pair.text(text, window).facts()
        found["text"] = {"source": source, "window": window, **facts}
        change = 100 * (facts["perplexity"] / facts["reference_perplexity"] - 1)
        rows += [
            ("perplexity", f"{facts['perplexity']:.3f}", f"{facts['reference_perplexity']:.3f}", f"{change:+.2f} %"),
            ("mean KL to the reference, nats", f"{facts['kl_mean']:.2e}", None, f"± {facts['kl_standard_error']:.1e}, P99 {facts['kl_p99']:.1e}"),
            ("greedy agreement", f"{100 * facts['greedy_agreement']:.2f} %", None, f"of {facts['tokens']} tokens"),
        ]
    if tasks:
        tested, reference = run_tasks(pair.tested, tasks), run_tasks(pair.reference, tasks)
        found["tasks"] = {"tested": tested.facts(), "reference": reference.facts()}
        for name, ours, theirs in zip(tested.names, tested.shares, reference.shares, strict=True):
            rows.append((name, f"{100 * ours:.1f} %", f"{100 * theirs:.1f} %", f"{100 * (ours - theirs):+.1f} points"))
        same = sum(a == b for a, b in zip(tested.answers, reference.answers, strict=True))
        found["tasks"]["same_answers"] = same / len(tasks)
        rows.append(("same answer as the reference", f"{100 * same / len(tasks):.1f} %", None, f"of {len(tasks)} tasks"))
    heads = ("", _label(pair.tested), f"reference: {_label(pair.reference)}", "")
    return f"{source}, windows of {window} tokens\n" * (text is not None) + table(heads, rows), found


def _label(llm: LLM) -> str:
    """The precision in a few words."""
    model, kv = llm.config.model, llm.config.kv
    parts = [model.quantization or model.dtype]
    if kv.kv_cache_dtype not in ("auto", model.dtype):
        parts.append(f"KV {kv.kv_cache_dtype}")
    if llm.config.runner.backend != "native":
        parts.append(llm.config.runner.backend)
    return ", ".join(parts)


def read_text(path: Path | None) -> tuple[str, str]:
    """A text file, or the one that comes with Octavo. → the text, and what it is. Raises: InvalidRequest."""
    if path is None:
        return resources.files("octavo.bench").joinpath("texts", PROSE).read_text(encoding="utf-8"), f"Octavo's own {PROSE}"
    try:
        if path.stat().st_size > MOST_TEXT:
            raise InvalidRequest(f"{path} has more than {MOST_TEXT} bytes", "text")
        return path.read_text(encoding="utf-8"), path.name
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}", "text") from None


def settings_of(pairs: Sequence[str], table: Mapping[str, Any]) -> dict[str, Any]:
    """NAME=VALUE settings as LLM takes them; ``table``: options.ENGINE_OPTIONS, for their types. Raises: ConfigError."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not equals or (name not in table and name != "backend"):
            raise ConfigError(f"reference {pair!r}: NAME=VALUE with an engine setting's name is asked for, as in dtype=float32", "reference")
        kind = table[name][0] if name in table else str
        try:
            found[name] = json.loads(value) if kind is not str else value
        except ValueError:
            raise ConfigError(f"reference {pair!r}: {value!r} is no {kind.__name__}", "reference") from None
    return found
