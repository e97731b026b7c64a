"""`octavo chat`: a conversation in the terminal, with a model in this process or on an OpenAI-compatible server."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import options as o

if TYPE_CHECKING:
    from octavo.cli.remote import Piece  # http.client and ssl come with it: 25 ms of every command's start

HELP = "/clear starts anew, /system TEXT sets the system message, /again answers once more, /exit (or Ctrl-D) ends"

Messages = list[dict[str, str]]
Ask = Callable[[Messages], Iterator["Piece"]]  # a generator: closing it aborts the answer


@o.engine_options()
@o.sampling_options
def chat(
    model: Annotated[str | None, typer.Argument(
        help="A directory, a .gguf file, a Hub id, or a short name such as smollm2. With --url: the served model's name.",
        show_default=False, metavar="[MODEL]")] = None,
    url: Annotated[str | None, typer.Option(help="Talk to an OpenAI-compatible server, such as http://127.0.0.1:8000.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key.", envvar="OCTAVO_API_KEY", show_envvar=True)] = None,
    served: Annotated[str | None, typer.Option("--model", help="The served model's name (default: the server's first).")] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tell all settings at start.")] = False,
    *, wanted: dict[str, Any], settings: dict[str, Any],
) -> None:
    """Talk to a model, here or on a server. Answers stream, with tokens/s after each. Ctrl-C stops an answer."""
    from octavo.errors import ConfigError

    if url is not None:
        if settings:
            raise ConfigError(f"{', '.join(settings)}: the server's own settings hold with --url", next(iter(settings)))
        if model is not None and served is not None and model != served:
            raise ConfigError(f"two model names: {model} and {served}", "model")
        from octavo.cli.remote import Remote

        remote = Remote(url, api_key, served or model)
        sys.stderr.write(f"{remote.model} at {remote.url}\n")
        if not _talk(lambda messages: remote.stream_chat(messages, wanted), system):
            raise typer.Exit(1)
        return
    if served is not None:
        raise ConfigError("--model names a model of a server, given by --url; a model to load here is given without it", "model")
    if model is None:
        raise ConfigError("give a MODEL to load here, or --url to talk to a server", "model")
    with o.load(model, settings, wanted, verbose=verbose) as llm:
        params = o.sampling(llm, wanted)
        done = _talk(lambda messages: _local(llm, messages, params), system)
    if not done:
        raise typer.Exit(1)


def _local(llm: Any, messages: Messages, params: Any) -> "Iterator[Piece]":
    """An answer by the model in this process."""
    from octavo.cli.remote import Piece
    from octavo.errors import RequestError

    count = 0
    with closing(llm.stream_chat(messages, params)) as stream:
        for news in stream:
            sample = news.outputs[0]
            count += len(sample.token_ids)
            yield Piece(sample.text, count)
            if sample.finish_reason == "error":
                raise RequestError(str(sample.stop_reason))


def _talk(ask: Ask, system: str | None) -> bool:
    """The conversation, until /exit or the end of the input. False when nobody looked on and every turn failed."""
    from octavo.errors import RemoteError, RequestError

    if sys.stdin.isatty():
        sys.stderr.write(HELP + "\n")
    head: Messages = [{"role": "system", "content": system}] if system else []
    turns: Messages = []
    answered = failed = 0
    while (line := _read()) is not None:
        word, _, rest = line.strip().partition(" ")
        if word in ("/exit", "/quit"):
            break
        if word == "/clear":
            turns = []
        elif word == "/system":
            head, turns = ([{"role": "system", "content": rest}] if rest else []), []
        elif word == "/help":
            sys.stderr.write(HELP + "\n")
        elif word == "/again" and not turns:
            sys.stderr.write("nothing to repeat yet\n")
        elif word.startswith("/") and word != "/again":
            sys.stderr.write(f"no command {word}. {HELP}\n")
        elif line.strip():
            asked = turns[:-1] if word == "/again" else [*turns, {"role": "user", "content": line}]
            try:
                turns = [*asked, {"role": "assistant", "content": show(ask([*head, *asked]))}]
                answered += 1
            except (RequestError, RemoteError) as error:  # too long a conversation, say: this turn is as if it had not been
                sys.stderr.write(f"{error.message} (/clear starts anew)\n")
                failed += 1
    return answered > 0 or failed == 0 or sys.stdin.isatty()


def _read() -> str | None:
    """A line from the user, without its line end; None at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return None


def show(pieces: "Iterator[Piece]") -> str:
    """Show one answer as it streams; Ctrl-C ends it early and keeps what came."""
    started, first, count, text = time.perf_counter(), None, 0, ""
    try:
        for piece in pieces:
            first = first or time.perf_counter()
            count = piece.num_tokens
            text += piece.text
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    finally:
        pieces.close()  # type: ignore[attr-defined]  # aborts an unfinished request: its blocks are free
        sys.stdout.write("\n")
        sys.stdout.flush()
    now = time.perf_counter()
    if first is not None:
        rate = f", {(count - 1) / (now - first):.1f} tokens/s" if count > 1 and now > first else ""
        sys.stderr.write(f"[{count} tokens, first after {(first - started) * 1e3:.0f} ms{rate}]\n")
    return text
