"""A model whose every layer has a sliding window: its requests hold the window's blocks, and not a bit depends on what lies behind."""

from typing import Any

import pytest
from tests.checkpoints import make_tiny
from tests.engine.test_llm import BACKENDS, make, run

from octavo import LLM, SamplingParams
from octavo.config import NO_BLOCK
from octavo.kv.manager import KvManager
from octavo.models.spec import ModelSpec

WINDOW = 21
PROMPTS = [[(7 * i + kind) % 200 + 3 for i in range(length)] for kind, length in enumerate((5, 47, 48, 49, 130))]
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=60, ignore_eos=True, logprobs=1, n=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), arch="mistral", scale=0.3, sliding_window=WINDOW))


def told(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    samples = [sample for output in run(llm, prompts, PARAMS) for sample in output.outputs]
    return [(sample.token_ids, sample.logprobs if llm.config.runner.backend == "native" else None) for sample in samples]


@pytest.fixture(scope="module")
def expected(folder: str) -> dict[str, list[Any]]:
    """What an engine tells that gives nothing up."""
    found = {}
    for backend in ("torch", "native"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelSpec, "reach", None)
            with make(folder, backend, num_kv_blocks=200, enable_prefix_caching=False) as llm:
                found[backend] = told(llm)
                assert llm.engine.scheduler.kv.window is None
    return found


def poison(llm: LLM, patch: pytest.MonkeyPatch) -> list[int]:
    """Fill what a window leaves behind with NaN as soon as nobody has it. Returns the blocks, as they are given up."""
    store: Any = llm.engine.core.executor._kv
    gone: list[int] = []
    slide = KvManager.slide

    def and_fill(self: KvManager, request_id: str, start: int) -> int:
        before = self.table(request_id)
        freed = slide(self, request_id, start)
        blocks = [block for block, now in zip(before, self.table(request_id)) if block != now and self.pool._refs[block] == 0]
        assert len(blocks) == freed
        for block in blocks:
            store.write_block(block, memoryview(b"\xff" * store.block_bytes))
        gone.extend(blocks)
        return freed

    patch.setattr(KvManager, "slide", and_fill)
    return gone


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 32}, {"num_kv_blocks": 24, "max_num_batched_tokens": 64}])
def test_what_is_left_behind_may_hold_anything(
    folder: str, backend: str, settings: dict[str, Any], expected: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch,
) -> None:
    with make(folder, backend, enable_prefix_caching=False, **settings) as llm:
        assert llm.engine.scheduler.kv.window == WINDOW
        gone = poison(llm, monkeypatch)
        assert told(llm) == expected[backend]
        assert len(gone) > 20 and llm.kv_ledger.free == llm.kv_ledger.total


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_cache_keeps_and_finds_it(folder: str, backend: str, expected: dict[str, list[Any]]) -> None:
    with make(folder, backend) as llm:
        for _ in range(2):
            assert told(llm) == expected[backend]
        for prompt in PROMPTS:
            (output,) = run(llm, [prompt], SamplingParams(max_tokens=1))
            assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    with make(folder, backend, num_kv_blocks=16) as llm:  # most of it is evicted again and again
        for prompt, want in zip(PROMPTS, range(0, 10, 2)):
            for _ in range(2):
                assert told(llm, [prompt]) == expected[backend][want : want + 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_request_holds_no_more_than_its_window(folder: str, backend: str) -> None:
    with make(folder, backend, enable_prefix_caching=False) as llm:
        kv, most = llm.engine.scheduler.kv, 0
        for _ in llm.stream({"prompt_token_ids": [5]}, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)):
            most = max(most, kv.ledger().live)
            tables = [kv.table(name) for name in kv.holders()]
        assert most == 3 and (not tables or tables[0].count(NO_BLOCK) >= 10), "21 tokens lie in 3 blocks of 16 at most"


def test_one_layer_with_full_attention_keeps_all(tmp_path: Any) -> None:
    path = make_tiny(tmp_path / "m", arch="qwen2", scale=0.3, use_sliding_window=True, sliding_window=17, max_window_layers=1)
    with make(str(path), "native") as llm:
        assert set(llm.engine.spec.windows) == {None, 17} and llm.engine.scheduler.kv.window is None
