"""The library on a CPU of 2008: imported, chosen and run without an illegal instruction, with the same bits."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import octavo

QEMU = shutil.which("qemu-x86_64")
CODE = """
import sys; sys.path[:0] = {path!r}
import hashlib
from octavo.ops.native import native_info
from tests.native.test_pool import busy_rig
from tests.ops.native_support import provider
rig, out = busy_rig(provider("bfloat16", "generic", 2)); rig.run(9)
print(native_info()["variant"] if {bare} else "generic", hashlib.sha1(rig.read(out, 9).tobytes()).hexdigest())
"""


@pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 (package qemu-user) is not installed")
def test_nehalem():
    root = Path(__file__).parents[2]
    python = str(Path(sys.executable).resolve())
    path = [str(Path(octavo.__file__).parents[1]), str(root), *(p for p in sys.path if p.endswith("site-packages"))]
    runs = [
        subprocess.run([*command, python, "-c", CODE.format(path=path, bare=bare)], capture_output=True, text=True, timeout=240)
        for command, bare in (([], False), ([QEMU, "-cpu", "Nehalem"], True))
    ]
    assert runs[1].returncode == 0, runs[1].stderr[-2000:]
    assert runs[0].stdout == runs[1].stdout and runs[1].stdout.startswith("generic "), [r.stdout for r in runs]
