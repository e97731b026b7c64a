"""What measures: one call per step, times of ops, ceilings."""

import numpy as np
import pytest
from tests.native.test_pool import busy_rig
from tests.ops.native_support import BEST, ISAS, Rig, f32, provider


@pytest.mark.parametrize("isa", ISAS)
def test_ceilings_do_the_work_that_they_count(isa: str) -> None:
    p = provider("bfloat16", isa, 2)
    memory = p.new_memory(3 << 20)
    np.frombuffer(memory, np.uint8)[:] = 7
    for nbytes in (0, 64, 4096, 3 << 20):
        done, seconds = p.pool.probe(memory.address, nbytes)
        assert 0 <= done <= nbytes and nbytes - done < 2 * 64 and seconds > 0
    for bits in (0, 8, 4):
        once, seconds = p.pool.probe(0, 1, bits)
        assert once > 0 and seconds > 0 and p.pool.probe(0, 1000, bits)[0] == 1000 * once
    with pytest.raises(ValueError, match="negative"):
        p.pool.probe(0, -1)


def test_times_of_ops_are_of_the_ops_that_ran_and_sum_to_no_more_than_the_call() -> None:
    p = provider("bfloat16", BEST, 2)
    rig, ones = Rig(p), p.vector([np.ones(64, f32)])
    x = rig.ops.embed(p.table(np.ones((64, 64), f32)))
    for _ in range(3):
        x = rig.ops.linear(rig.ops.norm(x, ones, 1e-5), p.linear([np.ones((64, 64), f32)]))
    rig.finish(x)
    program = rig.program
    assert program.profile(False) == [0.0] * len(program.ops) and program.busy_seconds == 0
    rig.run(1)
    assert sum(program.profile(True)) == 0 < program.busy_seconds, "measured only when asked"
    before = program.busy_seconds
    rig.run(1)  # one row: linear ops do the norms
    few = program.profile(True)
    assert 0 < sum(few) <= program.busy_seconds - before
    assert all((seconds > 0) == (op.name != "norm") for op, seconds in zip(program.ops, few))
    rig.run(64)
    assert all(seconds > 0 for seconds in program.profile(False))
    rig.run(64)
    assert sum(program.profile(False)) == 0


def test_ops_say_what_they_read() -> None:
    p = provider("bfloat16", BEST, 1)
    rig, _ = busy_rig(p)
    linear = [op for op in rig.program.ops if op.name == "linear 64→64"]
    assert len(linear) == 20 and {(op.weight_bytes, op.products, op.rows) for op in linear} == {(64 * 64 * 2, 64 * 64, "T")}


def test_one_call_is_both_segments() -> None:
    p, rng = provider("bfloat16", BEST, 2), np.random.default_rng(5)
    rig = Rig(p, tokens=160, alternatives=4)
    table = p.table(rng.standard_normal((300, 64)).astype(f32))
    x = rig.ops.norm(rig.ops.take_rows(rig.ops.embed(table)), p.vector([np.ones(64, f32)]), 1e-5)
    rig.ops.head(x, table)
    rig.finish()
    step, rows = rig.step, 130  # three tiles of the head
    step["tokens"][:] = rng.integers(0, 300, 160)
    step["rows"][:rows] = np.sort(rng.permutation(160)[:rows])
    step["row_top"][:] = 4
    outputs = "out_token", "out_logprob", "out_rank", "top_ids", "top_logprobs"
    step["header"][:3], step["q_start"][:2] = (160, 1, rows), (0, 160)
    rig.program.forward()
    rig.program.sample()
    want = {name: step[name].copy() for name in outputs}
    for name in outputs:
        step[name][:] = 0
    rig.program.run()
    assert all(np.array_equal(step[name], want[name]) for name in outputs) and len(set(want["out_token"][:rows].tolist())) > 1
    step["row_target"][0] = 300
    with pytest.raises(ValueError, match="row_target"):
        rig.program.run()
    step["row_target"][0] = -1
    step["header"][2] = 0
    rig.program.run()  # nothing to sample
