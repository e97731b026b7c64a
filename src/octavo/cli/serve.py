"""`octavo serve`: an OpenAI-compatible HTTP server."""

import sys
import time
from typing import Annotated, Any

import typer

from octavo.cli import options as o

SERVER, LIMITS = "Server", "Limits"


@o.engine_options(own_seed=False)
def serve(
    model: o.Model,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine's.", rich_help_panel=SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", rich_help_panel=SERVER)] = 8000,
    uds: Annotated[str | None, typer.Option(help="Listen on this Unix socket instead.", rich_help_panel=SERVER)] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="Key that clients must send: KEY, or NAME=KEY for its tenant's name; repeat for several.",
                                                      envvar="OCTAVO_API_KEY", show_envvar=True, rich_help_panel=SERVER)] = None,
    served_model_name: Annotated[list[str] | None, typer.Option(help="Name that requests call the model by; repeat for several (default: MODEL).",
                                                                rich_help_panel=SERVER)] = None,
    shutdown_timeout: Annotated[float, typer.Option(help="Seconds that open requests may take to finish after SIGTERM or Ctrl-C.",
                                                    min=0, rich_help_panel=SERVER)] = 25.0,
    cors_origin: Annotated[list[str] | None, typer.Option(help="Origin whose web pages may call; repeat for several, * for all.",
                                                          rich_help_panel=SERVER)] = None,
    stream_interval: Annotated[int, typer.Option(help="Tokens gathered before a stream sends them (the first goes at once).", min=1,
                                                 rich_help_panel=SERVER)] = 1,
    max_num_queued_reqs: Annotated[int, typer.Option(help="Requests that may wait; more are answered 429.", min=1, rich_help_panel=LIMITS)] = 2048,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request body.", min=1, rich_help_panel=LIMITS)] = 32 * 2**20,
    allow_unknown_fields: Annotated[bool, typer.Option("--allow-unknown-fields", help="Ignore unknown fields of requests instead of refusing them.",
                                                       rich_help_panel=LIMITS)] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tell all settings at start.")] = False,
    *, settings: dict[str, Any],
) -> None:
    """Serve a model over HTTP, as OpenAI's API does. SIGTERM or Ctrl-C lets open requests finish first; a second one ends at once."""
    from octavo.cli.terminal import Startup
    from octavo.engine.console import show_log
    from octavo.server import run
    from octavo.server.settings import ServerSettings, named_keys

    began = time.perf_counter()
    keys, key_names = named_keys(api_key or ())
    show_log()
    web = ServerSettings(
        served_model_names=tuple(served_model_name or (model,)), api_keys=keys, key_names=key_names, allow_unknown_fields=allow_unknown_fields,
        stream_interval=stream_interval, max_body_bytes=max_body_bytes, cors_origins=tuple(cors_origin or ()),
    )
    with run.bind(host, port, uds) as sock, Startup(verbose) as startup:
        from octavo.engine.async_engine import AsyncLLM  # its process starts before anything of the web is imported

        def ready(address: str) -> None:
            startup.close()
            startup.console.print(f"  ready at {address} in {time.perf_counter() - began:.2f} s", soft_wrap=True)

        llm = AsyncLLM(model, report=startup, max_num_queued_reqs=max_num_queued_reqs, **settings)
        status = run.run(llm, web, sock, shutdown_timeout=shutdown_timeout, ready=ready)
    sys.exit(status)
