"""Threads, errors, memory and the life of the native objects."""

import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from tests.ops.native_support import BEST, ISAS, Rig, f32, provider, same_bits

import octavo
from octavo import _native
from octavo.errors import CheckpointError, ConfigError, OctavoError, UnsupportedError
from octavo.kv.spec import KvSpec
from octavo.ops.native import NativeProvider
from octavo.ops.threads import allowed_threads, cgroup_quota


def run_python(code, **env):
    here = os.pathsep.join([str(Path(octavo.__file__).parents[1]), str(Path(__file__).parents[2])])  # this Octavo, and the tests
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": here} | env)


def busy_rig(p, seed=0):
    rng = np.random.default_rng(seed)
    rig = Rig(p)
    x = rig.ops.embed(p.table(rng.standard_normal((64, 64)).astype(f32)))
    w, m = p.vector([np.ones(64, f32)]), p.linear([rng.standard_normal((64, 64)).astype(f32)])
    for _ in range(20):
        x = rig.ops.linear(rig.ops.norm(x, w, 1e-5), m, residual=x)
    rig.finish(x)
    rig.step["tokens"][:] = np.arange(64)
    return rig, x


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 33])
def test_more_threads_than_cores_or_panels(threads):
    """Same bits, no hang, no crawl."""
    want_rig, out = busy_rig(provider("bfloat16", BEST, 1))
    want_rig.run(64)
    want = want_rig.read(out, 64)
    rig, out = busy_rig(provider("bfloat16", BEST, threads))
    began = time.monotonic()
    for rows in (1, 9, 64):
        rig.run(rows)
        assert same_bits(rig.read(out, rows), want[:rows])
    assert time.monotonic() - began < 20


def test_threads_that_wait_asleep_are_woken():
    """All threads on one core, unknown to the pool: whoever waits must go to sleep, in a run and behind it, and nobody may stay there."""
    code = """
import os
from tests.native.test_pool import busy_rig
from tests.ops.native_support import provider
rig, out = busy_rig(provider('bfloat16', 'generic', 3))
rig.run(9); want = rig.read(out, 9)
for task in os.listdir('/proc/self/task'):
    os.sched_setaffinity(int(task), {min(os.sched_getaffinity(0))})
for _ in range(300):
    rig.run(9)
    assert (rig.read(out, 9) == want).all()
print('fine')
"""
    done = run_python(code)
    assert done.stdout.strip() == "fine", done.stderr


def test_two_callers_take_turns():
    p = provider("bfloat16", BEST, 2)
    rigs = [busy_rig(p, seed) for seed in (1, 2)]
    want = []
    for rig, out in rigs:
        rig.run(9)
        want.append(rig.read(out, 9))
    wrong = []

    def work(i):
        for _ in range(50):
            rigs[i][0].run(9)
            if not same_bits(rigs[i][0].read(rigs[i][1], 9), want[i]):
                wrong.append(i)

    callers = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for c in callers:
        c.start()
    for c in callers:
        c.join(30)
    assert not wrong and not any(c.is_alive() for c in callers)


def test_a_forked_child_runs_on():
    code = """
import os, numpy as np
from tests.native.test_pool import busy_rig
from tests.ops.native_support import provider
rig, out = busy_rig(provider('bfloat16', 'generic', 2))
rig.run(9); want = rig.read(out, 9)
pid = os.fork()
rig.run(9)
ok = (rig.read(out, 9) == want).all()
if pid == 0: os._exit(0 if ok else 3)
assert ok and os.waitpid(pid, 0)[1] == 0
print('fine')
"""
    done = run_python(code)
    assert done.stdout.strip() == "fine", done.stderr


def test_exit_while_a_thread_computes():
    code = """
import threading
from tests.native.test_pool import busy_rig
from tests.ops.native_support import provider
rig, out = busy_rig(provider('bfloat16', 'generic', 2))
def forever():
    while True: rig.run(64)
threading.Thread(target=forever, daemon=True).start()
import time; time.sleep(0.2)
"""
    done = run_python(code)
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_idle_workers_sleep():
    p = NativeProvider("bfloat16", 2, "generic")
    rig, _ = busy_rig(p)
    rig.run(9)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05
    rig.run(9)


def test_the_variable_picks_the_variant_and_names_what_there_is():
    code = "from octavo.ops.native import NativeProvider as P; print(P().isa)"
    for isa in ISAS:
        assert run_python(code, OCTAVO_ISA=isa).stdout.strip() == isa
    assert run_python(code, OCTAVO_ISA="").stdout.strip() == BEST  # the best, which need not be the last
    done = run_python(code, OCTAVO_ISA="neon9")
    assert "ConfigError" in done.stderr and "neon9" in done.stderr and "generic" in done.stderr


def test_thread_counts():
    assert provider().num_threads == 2 and 1 <= allowed_threads() <= os.cpu_count()
    for bad in (0, -1, 2000, True, "2"):
        with pytest.raises(ConfigError, match="num_threads"):
            NativeProvider(num_threads=bad)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert NativeProvider(num_threads=allowed_threads() + 1).num_threads == allowed_threads() + 1
    assert "wait for each other" in str(caught[0].message)


def test_cgroup_quota(tmp_path):
    own = tmp_path / "own"
    v2 = tmp_path / "v2"
    (v2 / "a" / "b").mkdir(parents=True)
    own.write_text("0::/a/b\n")
    assert cgroup_quota(v2, own) is None
    (v2 / "a" / "b" / "cpu.max").write_text("max 100000\n")
    (v2 / "a" / "cpu.max").write_text("150000 100000\n")
    assert cgroup_quota(v2, own) == 1.5
    (v2 / "cpu.max").write_text("50000 100000\n")
    assert cgroup_quota(v2, own) == 0.5
    v1 = tmp_path / "v1"
    (v1 / "cpu" / "x").mkdir(parents=True)
    own.write_text("4:cpu,cpuacct:/x\n3:memory:/y\n")
    (v1 / "cpu" / "x" / "cpu.cfs_quota_us").write_text("-1\n")
    (v1 / "cpu" / "x" / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_quota(v1, own) is None
    (v1 / "cpu" / "x" / "cpu.cfs_quota_us").write_text("300000\n")
    assert cgroup_quota(v1, own) == 3.0


def test_wrong_weights_are_named():
    p = provider()
    a = np.zeros((4, 8), f32)
    for parts, words in ([[a, np.zeros((4, 9), f32)], "inner"], [[a[0]], "dimensions"], [[a.astype(np.float64)], "float64"], [[], "at least one"]):
        with pytest.raises(CheckpointError, match=words):
            p.linear(parts)
    with pytest.raises(CheckpointError, match="gate and up"):
        p.linear([a, np.zeros((5, 8), f32)], interleave=True)
    with pytest.raises(CheckpointError, match="one dimension"):
        p.vector([a])
    with pytest.raises(ConfigError, match="dtype"):
        NativeProvider("float16")
    assert p.linear([a[:, ::2]]).k == 4  # not contiguous: copied


def test_wrong_programs_are_refused():
    p = provider()
    with pytest.raises(UnsupportedError, match="16 tokens"):
        p.kv_store(KvSpec(1, 1, 16, "bfloat16", 32), 4)
    with pytest.raises(UnsupportedError, match="compute dtype"):
        p.kv_store(KvSpec(1, 1, 16, "float32"), 4)  # wider than the compute dtype
    with pytest.raises(ConfigError, match="num_kv_blocks"):
        p.kv_store(KvSpec(1, 1, 16, "bfloat16"), 0)
    with pytest.raises(ConfigError, match="address space"):
        p.kv_store(KvSpec(1, 1, 16, "bfloat16"), 2**45)
    rig = Rig(p)
    x = rig.ops.input("f32", "T", 8)
    m, gated = p.linear([np.ones((4, 8), f32)]), p.linear([np.ones((4, 8), f32)] * 2, interleave=True)
    n = rig.ops.norm(x, p.vector([np.ones(8, f32)]), 1e-5)
    for call in (
        lambda: rig.ops.linear(x, m), lambda: rig.ops.norm(x, p.vector([np.ones(9, f32)]), 1e-5), lambda: rig.ops.linear(n, gated),
        lambda: rig.ops.linear(n, m, act="silu_mul"), lambda: rig.ops.linear(n, m, bias=p.vector([np.ones(5, f32)])),
        lambda: rig.ops.linear(n, m, residual=x), lambda: rig.ops.linear(n, m, act="gelu"), lambda: rig.ops.attention(n, 0, None),
        lambda: rig.ops.rope_store(x, 0, rig.spec.rope), lambda: rig.ops.head(n, m),
    ):  # fmt: skip
        with pytest.raises(OctavoError):
            call()


def test_steps_outside_the_buffers_are_refused():
    p = provider()
    rig = Rig(p, slots=12)  # more than a step has sequences
    table = p.table(np.ones((16, 64), f32))
    qkv = rig.ops.linear(rig.ops.norm(rig.ops.embed(table), p.vector([np.ones(64, f32)]), 1e-5), p.linear([np.ones((64, 64), f32)]))
    x = rig.ops.attention(rig.ops.rope_store(qkv, 0, rig.spec.rope), 0, None)
    out = rig.ops.linear(x, p.linear([np.ones((64, 32), f32)]))
    rig.ops.head(rig.ops.norm(rig.ops.take_rows(out), p.vector([np.ones(64, f32)]), 1e-5), table)
    rig.finish()
    rig.run(4)
    for name, index, value in (
        ("header", 0, 65), ("header", 1, 9), ("header", 2, 65), ("header", 0, -1), ("tokens", 3, 16), ("tokens", 0, -1), ("kv_slots", 1, 64 * 16),
        ("positions", 2, 32 * 16), ("positions", 2, 5), ("seq_slot", 0, 12), ("q_start", 1, 3), ("q_start", 0, 1), ("rows", 0, 4),
    ):  # fmt: skip
        rig.step["header"][:3], rig.step["q_start"][:2] = (4, 1, 1), (0, 4)
        kept = rig.step[name][index]
        rig.step[name][index] = value
        with pytest.raises(ValueError, match=name):
            rig.program.forward()
        rig.step[name][index] = kept
        rig.program.forward()
    rig.slots["block_table"][0, 0] = 64
    with pytest.raises(ValueError, match="block_table"):
        rig.program.forward()
    rig.step["row_target"][0] = 16
    with pytest.raises(ValueError, match="row_target"):
        rig.program.sample()


def test_raw_objects_check_their_arguments():
    for call in (
        lambda: _native.Memory(0), lambda: _native.Memory(-5), lambda: _native.Pool(0), lambda: _native.Pool(1, "sse9"), lambda: _native.Pool("x"),
        lambda: _native.Program(None, b"", b"", b"", b"", b"", None), lambda: _native.Program(_native.Pool(1), b"1", b"", b"", b"", b"", None),
        lambda: _native.Program(_native.Pool(1), bytes(96), bytes(136), bytes(112), bytes(151), b"", None),
        lambda: _native.Program(_native.Pool(1), bytes(96), bytes(136), bytes(112), b"\xff" * 152, b"", None),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError)):
            call()
    memory = _native.Memory(5000)
    assert memory.nbytes == 5000 and memory.address % (2 << 20) == 0 and not any(memoryview(memory))


def test_nothing_is_lost():
    """Providers, programs and stores free their memory and their threads."""
    def threads():
        return set(os.listdir("/proc/self/task"))

    def megabytes():
        return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

    before = threads()
    for i in range(12):
        p = NativeProvider("bfloat16", 2)
        p.linear([np.ones((4096, 1024), f32)])
        rig, _ = busy_rig(p)
        rig.run(9)
        del rig, p
        if i == 1:
            settled = megabytes()
    until = time.monotonic() + 10  # whoever made pages ready for a store is told that it is gone, and ends by itself
    while threads() - before and time.monotonic() < until:
        time.sleep(0.01)
    assert not threads() - before and megabytes() - settled < 40  # none is left that was not there; earlier tests' may have ended meanwhile
