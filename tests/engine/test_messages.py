"""What crosses the process cut comes out as it went in, and nothing that a caller may say fails to cross."""

import dataclasses

import msgspec
import pytest

from octavo import SamplingParams, errors
from octavo.config import Config, KvConfig, ModelConfig, RunnerConfig, SchedulerConfig
from octavo.core.output import Delta, LogprobRow
from octavo.core.request import Request
from octavo.core.sampling import MOST_COUNT
from octavo.engine import messages as m
from octavo.engine.inputs import Inputs, Prompt
from octavo.errors import ConfigError, OctavoError, QueueFull, WorkerDied
from octavo.observe.events import Admitted, Finished, Preempted
from octavo.runner.memory import Ledger

VOCAB = 320
CONFIG = Config(ModelConfig("here"), KvConfig(num_kv_blocks=3), SchedulerConfig(), RunnerConfig(seed=2**64 - 1))


def crossed(requests: list[Request]) -> list[Request]:
    message = m.decode_to_engine(m.encode(m.Add.of(requests)))
    assert isinstance(message, m.Add)
    return message.requests()


def inputs() -> Inputs:
    return Inputs(tokenizer=None, vocab=VOCAB, max_model_len=64, max_logprobs=-1, eos_ids=[2, 0], seed=0)


def test_requests_cross_with_all_that_the_engine_reads() -> None:
    params = SamplingParams(
        n=3, presence_penalty=0.5, frequency_penalty=-0.25, repetition_penalty=1.1, temperature=0.7, top_p=0.9, top_k=7, min_p=0.01, seed=-1,
        stop_token_ids=[5, 6], ignore_eos=True, max_tokens=9, min_tokens=3, logprobs=2, prompt_logprobs=1, logit_bias={"3": 1.5},
        allowed_token_ids=[3, 4, 5, 7],
    )
    sent = inputs().requests("a", Prompt("text", [1, 2, 3], "salt"), params, ((7,), (8, 9)), arrival=1.25, priority=-4, tenant="team é")
    came = crossed(sent)
    assert [r.id for r in came] == ["a/0", "a/1", "a/2"] and len({r.seed for r in came}) == 3 and came[0].seed == 2**64 - 1
    for before, after in zip(sent, came, strict=True):
        for field in dataclasses.fields(Request):
            if field.name != "params":
                assert getattr(after, field.name) == getattr(before, field.name), field.name
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "stop_token_ids",
                     "ignore_eos", "min_tokens", "logprobs", "prompt_logprobs", "logit_bias", "allowed_token_ids"):
            assert getattr(after.params, name) == getattr(before.params, name), name
    assert [r.params.prompt_logprobs for r in came] == [1, None, None] and {r.tenant for r in came} == {"team é"}


def test_text_stays_behind() -> None:
    params = SamplingParams(stop=["secret"], bad_words=["secret"])
    assert b"secret" not in m.encode(m.Add.of(inputs().requests("a", Prompt("secret", [1]), params, (), arrival=0.0)))


def test_the_largest_numbers_cross() -> None:
    huge = MOST_COUNT
    params = SamplingParams(max_tokens=huge, min_tokens=huge, top_k=huge, logprobs=huge, prompt_logprobs=huge, temperature=1e30, stop_token_ids=[3])
    (came,) = crossed(inputs().requests("a", Prompt(None, [1, 2]), params, (), arrival=0.0))
    assert came.max_total == 64  # the context
    assert {getattr(came.params, name) for name in ("min_tokens", "top_k", "logprobs", "prompt_logprobs")} == {huge}


def test_off_stays_off() -> None:
    params = SamplingParams(top_k=-1, logprobs=-1)
    (came,) = crossed(inputs().requests("a", Prompt(None, [1]), params, (), arrival=0.0))
    assert (came.params.top_k, came.params.logprobs, came.params.prompt_logprobs) == (-1, -1, None)


def test_the_settings_of_the_scheduler_cross() -> None:
    scheduler = SchedulerConfig(policy="fair", tenant_weights=(("a", 2.0), ("b", 0.5)), admission="predicted", target_itl_ms=40.0)
    boot = m.Boot(Config(CONFIG.model, CONFIG.kv, scheduler, CONFIG.runner), "ipc://x", None)
    assert m.decode_boot(m.encode(boot)) == boot


@pytest.mark.parametrize("message", [
    m.Begin("loading"), m.Progress("weights", 3, None), m.End("loading", 0.5), m.Note("n"), m.Ready(CONFIG, Ledger(1, 2, 3, None), "amx"),
    m.Batch(1.0, 2.0, 7,
            [Delta("a", [1], [LogprobRow(1, -0.5, 1, [1, 2], [-0.5, -1.5])], None, "stop", 5, 3), Delta("b", error="x", finish_reason="error")],
            [Admitted("a", 0, 0, False), Preempted("b", "why", 3, 1), Finished("a", "stop")], m.EngineStats(1, 2, 3, 4, 5, 6, 7, 8, 9)),
], ids=lambda message: type(message).__name__)
def test_from_the_engine(message: m.FromEngine) -> None:
    assert m.decode_from_engine(m.encode(message)) == message


@pytest.mark.parametrize("kind", [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, OctavoError)])
def test_last_words_are_the_same_error(kind: type[OctavoError]) -> None:
    again = m.decode_last_words(m.encode(m.LastWords.of(kind("what", "field")))).error()
    assert type(again) is kind and again.message == "what" and again.param == "field"


def test_last_words_of_strangers() -> None:
    again = m.LastWords.of(ZeroDivisionError("by zero")).error()
    assert type(again) is WorkerDied and again.message == "ZeroDivisionError: by zero"
    assert type(m.LastWords("SystemExit", "x").error()) is WorkerDied  # no other class is ever made
    assert len(m.encode(m.LastWords.of(ConfigError("long " * 10_000)))) < 65536  # fits a pipe that nobody reads
    assert m.decode_last_words(m.encode(m.LastWords())).kind is None
    assert QueueFull("m", None, 7).__reduce__() == (QueueFull, ("m", None, 7))


def test_a_large_batch_crosses_whole() -> None:
    batch = m.Batch(1.0, 2.0, 256, [Delta(f"cmpl-{i:032x}~{i}", [i]) for i in range(256)], [], m.EngineStats())
    assert m.decode_from_engine(m.encode(batch)) == batch


def test_bad_parameters_do_not_decode() -> None:
    frame = m.encode(["Add", ["a"], [1], [1, 2], {"temperature": -1.0}, 5])
    with pytest.raises(msgspec.MsgspecError):
        m.decode_to_engine(frame)
