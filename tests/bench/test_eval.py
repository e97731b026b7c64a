"""octavo eval: log-probabilities against the engine's own requests, the figures against numpy, tasks by their rules."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tests.checkpoints import make_tiny
from tests.cli.conftest import Octavo, octavo  # noqa: F401 - a fixture

from octavo import LLM, SamplingParams
from octavo.bench import quality
from octavo.bench.quality import Pair, Tally
from octavo.bench.scoring import CHUNK, Scorer
from octavo.bench.tasks import Task, read_tasks, run_tasks
from octavo.cli.options import ENGINE_OPTIONS
from octavo.engine.console import LOGGER
from octavo.engine.report import LogReport
from octavo.errors import ConfigError, ContextTooLong, InvalidRequest

REPORT = LogReport(LOGGER)
FIXED = {"enable_prefix_caching": False, "max_logprobs": -1, "max_num_batched_tokens": CHUNK}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("eval") / "tiny"))


@pytest.fixture(scope="module")
def llm(tiny: str):
    with LLM(tiny, report=REPORT, num_threads=2, **FIXED) as llm:
        yield llm


@pytest.mark.parametrize("length", [2, 17, CHUNK, CHUNK + 1, CHUNK + 2, 3 * CHUNK + 5])
def test_a_scorers_rows_are_those_of_a_request(llm: LLM, length: int) -> None:
    tokens = np.random.default_rng(length).integers(0, llm.vocab_size, length).tolist()
    out = llm.generate([{"prompt_token_ids": tokens}], SamplingParams(max_tokens=1, prompt_logprobs=-1, temperature=0), use_tqdm=False)[0]
    want = np.array([[row[token].logprob for token in range(llm.vocab_size)] for row in out.prompt_logprobs[1:]], np.float32)
    scorer = Scorer(llm)
    got = np.concatenate(list(scorer.distributions(tokens)))
    assert got.shape == (length - 1, llm.vocab_size) and np.array_equal(got, want)
    assert np.array_equal(scorer.logprobs(tokens), want[np.arange(length - 1), tokens[1:]])
    again = llm.generate([{"prompt_token_ids": tokens}], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)[0]
    assert len(again.outputs[0].token_ids) == 4 and again.outputs[0].token_ids[0] == out.outputs[0].token_ids[0], "the engine goes on as before"
    llm.engine.scheduler.check()


def test_too_long_and_too_short(llm: LLM) -> None:
    with pytest.raises(ContextTooLong, match="2049 tokens to score; the context has 2048"):
        list(Scorer(llm).distributions([1] * 2049))
    assert list(Scorer(llm).distributions([1])) == [] and Scorer(llm).logprobs([1]).size == 0


def test_figures_are_their_definitions() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((2, 7, 5))
    rows = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
    targets = [0, 4, 2, 2, 1, 3, 0]
    tally = Tally()
    tally.add(*rows[:, :3].astype(np.float32), targets[:3])
    tally.add(*rows[:, 3:].astype(np.float32), targets[3:])
    facts = tally.facts()
    kl = [sum(math.exp(r) * (r - t) for r, t in zip(reference, tested)) for tested, reference in zip(*rows)]
    assert facts["kl_mean"] == pytest.approx(np.mean(kl), rel=1e-5) and facts["kl_max"] == pytest.approx(max(kl), rel=1e-5)
    assert facts["kl_standard_error"] == pytest.approx(np.std(kl) / math.sqrt(7), rel=1e-5)
    for name, own in (("perplexity", rows[0]), ("reference_perplexity", rows[1])):
        assert facts[name] == pytest.approx(math.exp(-sum(own[i, t] for i, t in enumerate(targets)) / 7), rel=1e-5)
    assert facts["greedy_agreement"] == np.mean(rows[0].argmax(1) == rows[1].argmax(1)) and facts["tokens"] == 7


def test_a_model_is_no_distance_from_itself_and_some_from_another_precision(tiny: str) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 6
    with Pair(tiny, {"num_threads": 1}, {"num_threads": 2}, REPORT) as pair:
        same = pair.text(text, 40).facts()
        assert same["kl_max"] == 0 and same["greedy_agreement"] == 1 and same["perplexity"] == same["reference_perplexity"] > 1
        tokens = len(pair.tested.get_tokenizer().encode(text))
        assert same["tokens"] == tokens - -(-tokens // 40), "the first token of a window is not predicted"
        with pytest.raises(InvalidRequest, match="nothing to predict"):
            pair.text("", 40)
        with pytest.raises(ConfigError, match="window must be from 2 to 2048 tokens, not 1"):
            quality.run(pair, text, "x", [], 1)
    with Pair(tiny, {}, {"dtype": "float32", "num_threads": 1}, REPORT) as pair:
        other = pair.text(text, 40).facts()
        assert 0 < other["kl_mean"] < 1e-2 and other["perplexity"] != other["reference_perplexity"]
    with pytest.raises(ConfigError, match="eval sets max_num_batched_tokens itself"):
        Pair(tiny, {"max_num_batched_tokens": 8}, {}, REPORT)


def test_tasks_follow_their_rules(llm: LLM) -> None:
    encode, vocab = llm.get_tokenizer().encode, llm.vocab_size
    prompt, choices = "The quick brown", (" fox jumps", " lazy", " dog dog dog dog")
    sums = []
    for choice in choices:
        tokens = encode(prompt + choice)
        out = llm.generate([{"prompt_token_ids": tokens}], SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0), use_tqdm=False)[0]
        assert encode(prompt) == tokens[: len(encode(prompt))] and max(tokens) < vocab
        sums.append(sum(row[token].logprob for row, token in zip(out.prompt_logprobs, tokens) if row is not None) -
                    sum(row[token].logprob for row, token in zip(out.prompt_logprobs[: len(encode(prompt))], tokens) if row is not None))
    best, per = sums.index(max(sums)), max(range(3), key=lambda i: sums[i] / len(choices[i]))
    greedy = llm.generate([prompt], SamplingParams(max_tokens=5, temperature=0, stop=["\n"]), use_tqdm=False)[0].outputs[0].text.strip()
    assert greedy
    score = run_tasks(llm, [Task(prompt, choices, best), Task(prompt, target=greedy, max_tokens=5), Task(prompt, choices, (best + 1) % 3),
                            Task(prompt, target="never that", max_tokens=5)])
    assert score.answers == [best, greedy, best, greedy]
    assert score.names == ["choices (2)", "choices, per character (2)", "exact match (2)"]
    assert score.shares == [0.5, ((per == best) + (per == (best + 1) % 3)) / 2, 0.5]


@pytest.mark.parametrize(("line", "says"), [
    ("[1]", "no JSON object"), ('{"prompt": ""}', "prompt must be a text"),
    ('{"prompt": "a", "target": "b", "choices": ["c", "d"]}', "either choices"),
    ('{"prompt": "a"}', "either choices"), ('{"prompt": "a", "choices": ["b"], "answer": 0}', "at least two"),
    ('{"prompt": "a", "choices": ["b", "c"], "answer": 2}', "answer must be one of the choices or its place, 0 to 1, not 2"),
    ('{"prompt": "a", "choices": ["b", "c"], "answer": "d"}', "answer must be"), ('{"prompt": "a", "target": " "}', "target must be"),
    ('{"prompt": "a", "target": "b", "stop": []}', "stop must be"), ('{"prompt": "a", "target": "b", "max_tokens": 0}', "max_tokens must be"),
    ('{"prompt": "a", "target": "b", "gold": 1}', "unknown keys gold"), ("{", "line 2: Expecting"),
])
def test_a_task_that_is_none_names_its_line(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "a", "choices": ["b", "c"], "answer": "c"}\n' + line + "\n")
    with pytest.raises(InvalidRequest, match=f"line 2: .*{says}" if "line" not in says else says):
        read_tasks(file)
    file.write_text("\n")
    with pytest.raises(InvalidRequest, match="holds no task"):
        read_tasks(file)


def test_settings_of_the_reference() -> None:
    assert quality.settings_of(["dtype=float32", "--max-num-seqs=4", "enable-prefix-caching=false", "backend=torch"], ENGINE_OPTIONS) == {
        "dtype": "float32", "max_num_seqs": 4, "enable_prefix_caching": False, "backend": "torch"}
    for wrong in ("dtype", "colour=red", "max_num_seqs=many"):
        with pytest.raises(ConfigError, match="reference"):
            quality.settings_of([wrong], ENGINE_OPTIONS)


def test_the_command(octavo: Octavo, tiny: str, tmp_path: Path) -> None:  # noqa: F811
    tasks, saved = tmp_path / "tasks.jsonl", tmp_path / "out.json"
    tasks.write_text('{"prompt": "The quick", "choices": [" brown", " dog"], "answer": 0}\n{"prompt": "a", "target": "b", "max_tokens": 3}\n')
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 3)
    done = octavo("eval", tiny, "--text", str(text), "--tasks", str(tasks), "--save", str(saved), "--window", "50", "--num-threads", "1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads(saved.read_text()) and found["benchmark"] == "eval" and found["text"]["kl_mean"] > 0
    assert found["config"]["model"]["dtype"] == "bfloat16" and found["reference_config"]["model"]["dtype"] == "float32"
    assert set(found["tasks"]["tested"]) == {"choices (1)", "choices, per character (1)", "exact match (1)"} and "perplexity" in done.stdout
    only = octavo("eval", tiny, "--tasks", str(tasks), "--reference", "dtype=bfloat16", "--num-threads", "1")
    assert "text" not in json.loads(only.stdout.splitlines()[-1]) and json.loads(only.stdout.splitlines()[-1])["tasks"]["same_answers"] == 1
    assert "(--reference)" in octavo("eval", tiny, "--reference", "colour=red").stderr
    assert "cannot read" in octavo("eval", tiny, "--text", str(tmp_path / "none")).stderr


def test_the_text_that_comes_along_is_prose() -> None:
    text, source = quality.read_text(None)
    assert 1500 < len(text.split()) < 4000 and "\t" not in text and source == "Octavo's own prose.txt"
