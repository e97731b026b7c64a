import resource
import subprocess
import sys

import octavo
from octavo import errors

PROBE = """
import sys
before = set(sys.modules)
import octavo
octavo.LLM, octavo.SamplingParams, octavo.RequestOutput
heavy = {"torch", "transformers", "huggingface_hub", "jinja2", "tokenizers", "safetensors", "rich", "tqdm", "typer", "numpy"}
print(sorted(heavy & {name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def seconds(code: str) -> float:
    """Processor time of a fresh interpreter, the best of a few: other work on the machine does not count."""
    best = 9.0
    for _ in range(4):
        began = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime)
    return best


def test_importing_is_fast_and_pulls_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert seconds("import octavo; octavo.LLM") - seconds("pass") < 0.3


def test_names() -> None:
    assert octavo.LLM.__name__ == "LLM" and octavo.__version__.count(".") == 2
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None and name in dir(octavo)
    public = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert public <= set(octavo.__all__) and not hasattr(octavo, "nothing")
