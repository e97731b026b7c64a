"""`octavo generate`: complete prompts."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli import options as o


def generate(
    model: o.Model,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeat for several. Without any, standard input is one prompt.")] = None,
    prompts_file: Annotated[Path | None, typer.Option(help="A file with one prompt a line.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send each prompt as a user's message through the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt, with token ids and times.")] = False,
    n: Annotated[int, typer.Option(help="Completions per prompt.", rich_help_panel=o.SAMPLING)] = 1,
    logprobs: Annotated[int | None, typer.Option(help="Alternatives per token (with --json).", rich_help_panel=o.SAMPLING)] = None,
    max_tokens: o.MaxTokens = 128, temperature: o.Temperature = None, top_p: o.TopP = None, top_k: o.TopK = None, min_p: o.MinP = None,
    seed: o.Seed = None, repetition_penalty: o.Repetition = None, stop: o.Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end token.", rich_help_panel=o.SAMPLING)] = False,
    revision: o.Revision = None, tokenizer: o.Tokenizer = None, dtype: o.Dtype = "auto", max_model_len: o.MaxModelLen = None,
    max_num_seqs: o.MaxNumSeqs = 256, max_num_batched_tokens: o.MaxNumBatchedTokens = None, num_kv_blocks: o.NumKvBlocks = None,
    kv_cache_memory_bytes: o.KvBytes = None, num_threads: o.NumThreads = None, engine_seed: o.EngineSeed = 0, chat_template: o.ChatTemplate = None,
) -> None:
    """Complete prompts. A single prompt streams; several run as one batch."""
    prompts = _prompts(prompt, prompts_file)
    llm = o.load(
        model, revision=revision, tokenizer=tokenizer, dtype=dtype, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, num_kv_blocks=num_kv_blocks, kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_threads=num_threads, seed=engine_seed, chat_template=chat_template,
    )
    with llm:
        params = o.sampling(
            llm, n=n, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed,
            repetition_penalty=repetition_penalty, stop=stop, ignore_eos=ignore_eos or None, logprobs=logprobs,
        )
        if len(prompts) == 1 and n == 1 and not as_json:
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
    from octavo.errors import InvalidRequest

    if given:
        return given
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"cannot read {file}: {error}", "prompts-file") from None
        if not any(lines):
            raise InvalidRequest(f"{file} holds no prompt", "prompts-file")
        return [line for line in lines if line]
    if sys.stdin.isatty():
        raise InvalidRequest("give --prompt TEXT, --prompts-file FILE, or a prompt on standard input", "prompt")
    text = sys.stdin.read()
    return [text]


def _stream(llm: Any, text: str, params: Any, chat: bool) -> None:
    started = time.perf_counter()
    first, count = None, 0
    stream = llm.stream_chat([{"role": "user", "content": text}], params) if chat else llm.stream(text, params)
    for piece in stream:
        first = first or time.perf_counter()
        sys.stdout.write(piece.outputs[0].text)
        sys.stdout.flush()
        count += len(piece.outputs[0].token_ids)
    sys.stdout.write("\n")
    now = time.perf_counter()
    _say(count, now - started, (first or now) - started)


def _plain(out: Any, label: bool) -> str:
    head = f"\n>>> {out.prompt if out.prompt is not None else out.prompt_token_ids}\n" if label else ""
    return head + "".join(f"{f'[{c.index}] ' if len(out.outputs) > 1 else ''}{c.text}\n" for c in out.outputs)


def _say(tokens: int, seconds: float, first: float | None = None) -> None:
    ttft = f", first token after {first * 1e3:.0f} ms" if first is not None else ""
    if first is not None and tokens > 1:
        rate = (tokens - 1) / max(seconds - first, 1e-9)
    else:
        rate = tokens / max(seconds, 1e-9)
    sys.stderr.write(f"{tokens} tokens in {seconds:.2f} s: {rate:.1f} tokens/s{ttft}\n")
