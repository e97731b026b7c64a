"""`octavo generate`: complete prompts."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli import options as o


@o.engine_options()
@o.sampling_options
def generate(
    model: o.Model,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeat for several. Without any, standard input is one prompt.")] = None,
    prompts_file: Annotated[Path | None, typer.Option(help="A file with one prompt a line.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send each prompt as a user's message through the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt, with token ids and times.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tell all settings at start.")] = False,
    n: Annotated[int | None, typer.Option(help="Completions per prompt.", rich_help_panel=o.SAMPLING)] = None,
    logprobs: Annotated[int | None, typer.Option(help="Alternatives per token (with --json).", rich_help_panel=o.SAMPLING)] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end token.", rich_help_panel=o.SAMPLING)] = False,
    *, wanted: dict[str, Any], settings: dict[str, Any],
) -> None:
    """Complete prompts, with 128 tokens at most unless --max-tokens says otherwise. A single prompt streams; several run as one batch."""
    from octavo.errors import InvalidRequest

    prompts = _prompts(prompt, prompts_file)
    if "" in prompts and not chat:  # a chat template says something around it
        raise InvalidRequest("a prompt is empty: at least one character is needed", "prompt")
    more = {"n": n, "logprobs": logprobs, "ignore_eos": ignore_eos or None}
    wanted = {"max_tokens": 128} | wanted | {name: value for name, value in more.items() if value is not None}
    with o.load(model, settings, wanted, verbose=verbose) as llm:
        params = o.sampling(llm, wanted)
        if len(prompts) == 1 and params.n == 1 and not as_json:
            _stream(llm, prompts[0], params, chat)
            return
        started = time.perf_counter()
        if chat:
            done = llm.chat([[{"role": "user", "content": text}] for text in prompts], params)
        else:
            done = llm.generate(prompts, params)
        seconds = time.perf_counter() - started
        for out in done:
            sys.stdout.write(json.dumps(out.to_dict(), ensure_ascii=False) + "\n" if as_json else _plain(out, len(prompts) > 1))
        _say(sum(len(c.token_ids) for out in done for c in out.outputs), seconds)


def _prompts(given: list[str] | None, file: Path | None) -> list[str]:
    """The prompts, from the first source that has any. Raises: InvalidRequest."""
    from octavo.errors import InvalidRequest

    if given and file is not None:
        raise InvalidRequest("give --prompt or --prompts-file, not both", "prompts_file")
    if given:
        return given
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"cannot read {file}: {error}", "prompts_file") from None
        if not any(lines):
            raise InvalidRequest(f"{file} holds no prompt", "prompts_file")
        return [line for line in lines if line]
    if sys.stdin.isatty():
        raise InvalidRequest("give --prompt TEXT, --prompts-file FILE, or a prompt on standard input", "prompt")
    try:
        return [sys.stdin.read()]
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"standard input is no UTF-8: {error}", "prompt") from None


def _stream(llm: Any, text: str, params: Any, chat: bool) -> None:
    started = time.perf_counter()
    first, count, failed = None, 0, None
    stream = llm.stream_chat([{"role": "user", "content": text}], params) if chat else llm.stream(text, params)
    for piece in stream:
        first = first or time.perf_counter()
        sample = piece.outputs[0]
        sys.stdout.write(sample.text)
        sys.stdout.flush()
        count += len(sample.token_ids)
        failed = sample.stop_reason if sample.finish_reason == "error" else None
    sys.stdout.write("\n")
    sys.stdout.flush()
    now = time.perf_counter()
    if failed is not None:
        from octavo.errors import RequestError

        raise RequestError(f"the request failed after {count} tokens: {failed}")
    _say(count, now - started, (first or now) - started)


def _plain(out: Any, label: bool) -> str:
    head = f"\n>>> {out.prompt if out.prompt is not None else out.prompt_token_ids}\n" if label else ""
    return head + "".join(f"{f'[{c.index}] ' if len(out.outputs) > 1 else ''}{c.text}\n" for c in out.outputs)


def _say(tokens: int, seconds: float, first: float | None = None) -> None:
    """The closing line on standard error. With the time of the first token, the rate is that of the others."""
    ttft = f", first token after {first * 1e3:.0f} ms" if first is not None else ""
    if first is not None and tokens > 1:
        rate = (tokens - 1) / max(seconds - first, 1e-9)
    else:
        rate = tokens / max(seconds, 1e-9)
    sys.stderr.write(f"[{tokens} tokens in {seconds:.2f} s, {rate:.1f} tokens/s{ttft}]\n")
