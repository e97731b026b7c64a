"""What `octavo serve` refuses before anything loads, and what its help shows."""

import re

import pytest
from tests.cli.conftest import Octavo


@pytest.mark.parametrize(("args", "env", "says"), [
    ((), {"OCTAVO_API_KEY": ""}, "OCTAVO_API_KEY is set, and empty"), ((), {"OCTAVO_API_KEY": " \n"}, "OCTAVO_API_KEY is set, and empty"),
    (("--api-key", " "), {}, "API key 1 is empty"),
    (("--uds", ""), {}, "the path of the Unix socket is empty (--uds)"),
    (("--served-model-name", ""), {}, "a served model's name is empty"), (("--served-model-name", " "), {}, "a served model's name is empty"),
    (("--tensor-parallel-size", "2"), {}, "(--tensor-parallel-size)"), (("-tp", "2"), {}, "(--tensor-parallel-size)"),
    (("--pipeline-parallel-size", "2"), {}, "(--pipeline-parallel-size)"), (("--load-format", "dummy"), {}, "(--load-format)"),
    (("--gpu-memory-utilization", "1.5"), {}, "(--gpu-memory-utilization)"), (("--swap-space", "-1"), {}, "(--swap-space)"),
])
def test_what_is_refused_at_once(octavo: Octavo, tiny: str, args: tuple[str, ...], env: dict[str, str], says: str) -> None:
    done = octavo("serve", tiny, "--port", "0", *args, env=env)
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1


def test_neutral_options_of_vllm_are_accepted(octavo: Octavo, tiny: str) -> None:
    neutral = ("-tp", "1", "--pipeline-parallel-size", "1", "--load-format", "auto", "--gpu-memory-utilization", "0.9", "--swap-space", "4",
               "--trust-remote-code", "--enforce-eager", "--no-enforce-eager")
    done = octavo("generate", tiny, "--prompt", "a", "--max-tokens", "1", *neutral)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "inspect", "pull"])
def test_names_are_whole_in_the_help_at_80_columns(octavo: Octavo, command: str) -> None:
    text = octavo(command, "--help", env={"COLUMNS": "80"}).stdout
    assert not re.search(r"--\S*…", text) and "tensor" not in text and "--help" in text
    assert max(map(len, text.splitlines())) <= 80
    if command == "serve":
        assert "--max-num-batched-tokens" in text and "--kv-cache-memory-bytes" in text
        assert "--no-enable-prefix-caching" in text and "--no-enable-weight-cache" in text
