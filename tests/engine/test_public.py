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
found = set(sys.modules) - before
print(sorted(heavy & {name.partition(".")[0] for name in found}), len(found) < 200 or found)
"""


def test_importing_pulls_little_and_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "True"], done.stdout


def test_names() -> None:
    assert octavo.LLM.__name__ == "LLM" and octavo.__version__.count(".") == 2
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None and name in dir(octavo)
    public = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert public <= set(octavo.__all__) and not hasattr(octavo, "nothing")
