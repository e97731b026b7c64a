"""`octavo chat`: a conversation in the terminal."""

import sys
import time
from typing import Annotated, Any

import typer

from octavo.cli import options as o

HELP = "/clear starts anew, /system TEXT sets the system message, /again repeats the last answer's request, /exit (or Ctrl-D) ends"


def chat(
    model: o.Model,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: o.MaxTokens = None, temperature: o.Temperature = None, top_p: o.TopP = None, top_k: o.TopK = None, min_p: o.MinP = None,
    seed: o.Seed = None, repetition_penalty: o.Repetition = None, stop: o.Stop = None,
    revision: o.Revision = None, tokenizer: o.Tokenizer = None, dtype: o.Dtype = "auto", max_model_len: o.MaxModelLen = None,
    num_kv_blocks: o.NumKvBlocks = None, kv_cache_memory_bytes: o.KvBytes = None, num_threads: o.NumThreads = None,
    engine_seed: o.EngineSeed = 0, chat_template: o.ChatTemplate = None,
) -> None:
    """Talk to a model. Answers stream, with tokens/s after each. Ctrl-C stops an answer."""
    llm = o.load(
        model, revision=revision, tokenizer=tokenizer, dtype=dtype, max_model_len=max_model_len, num_kv_blocks=num_kv_blocks,
        kv_cache_memory_bytes=kv_cache_memory_bytes, num_threads=num_threads, seed=engine_seed, chat_template=chat_template, max_num_seqs=1,
    )
    with llm:
        params = o.sampling(llm, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed,
                            repetition_penalty=repetition_penalty, stop=stop)
        _talk(llm, params, system)


def _talk(llm: Any, params: Any, system: str | None) -> None:
    from octavo.errors import RequestError

    if sys.stdin.isatty():
        sys.stderr.write(HELP + "\n")
    head: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    turns: list[dict[str, str]] = []
    while True:
        line = _read()
        if line is None or line.strip() in ("/exit", "/quit"):
            return
        word, _, rest = line.strip().partition(" ")
        if word == "/clear":
            turns = []
        elif word == "/system":
            head, turns = ([{"role": "system", "content": rest}] if rest else []), []
        elif word == "/help":
            sys.stderr.write(HELP + "\n")
        elif word == "/again" and not turns:
            sys.stderr.write("nothing to repeat yet\n")
        elif word == "/again" or line.strip():
            if word == "/again":
                turns = turns[:-1]
            else:
                turns.append({"role": "user", "content": line})
            try:
                turns.append({"role": "assistant", "content": _answer(llm, [*head, *turns], params)})
            except RequestError as error:  # too long a conversation, say: this turn is taken back
                sys.stderr.write(f"{error.message} (/clear starts anew)\n")
                turns.pop()


def _read() -> str | None:
    """A line from the user, without its line end; None at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return None


def _answer(llm: Any, messages: list[dict[str, str]], params: Any) -> str:
    """Stream one answer; Ctrl-C ends it early and keeps what came."""
    started, first, count, text = time.perf_counter(), None, 0, ""
    stream = llm.stream_chat(messages, params)
    try:
        for piece in stream:
            first = first or time.perf_counter()
            text += piece.outputs[0].text
            count += len(piece.outputs[0].token_ids)
            sys.stdout.write(piece.outputs[0].text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        stream.close()  # aborts the request: its blocks are free
    sys.stdout.write("\n")
    sys.stdout.flush()
    now = time.perf_counter()
    if first is not None:
        rate = f", {(count - 1) / (now - first):.1f} tokens/s" if count > 1 else ""
        sys.stderr.write(f"[{count} tokens, first after {(first - started) * 1e3:.0f} ms{rate}]\n")
    return text
