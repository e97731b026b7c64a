"""What ``make demo`` shows: a server in the background, one answer streamed through its HTTP API, how to go on."""

import sys
from pathlib import Path

from octavo.bench.server import Server
from octavo.cli.chat import show
from octavo.cli.remote import Remote
from octavo.cli.terminal import columns
from octavo.errors import OctavoError


def main() -> None:
    """``python -m octavo.bench.demo MODEL PROMPT``; status 1, with the server's log, when something fails."""
    model, prompt = sys.argv[1:3]
    command = Path(sys.argv[3] if len(sys.argv) > 3 else "octavo")
    print(f"Starting a server in the background: {command} serve {model} --port 0 (0: any free one)")
    try:
        with Server(model) as server:
            print(server.log(), end="")
            status, body = server.request("GET", "/health")
            if status != 200:
                raise OctavoError(f"/health answers {status}: {body.decode()}")
            remote = Remote(server.url)
            print(f"\nPOST {server.url}/v1/chat/completions, streamed. The user: {prompt}\n", flush=True)
            try:
                show(remote.stream_chat([{"role": "user", "content": prompt}], {"max_tokens": 128, "temperature": 0}))
            except OctavoError as error:
                raise OctavoError(f"{error.message}\nThe server's log:\n{server.log()}") from error
            status = server.stop()
            print(f"\nThe server was stopped by SIGTERM and ended with status {status}. To go on:")
    except OctavoError as error:
        sys.exit(f"The demo failed: {error.message}")
    print(columns([
        (f"{command} serve {model}", "http://127.0.0.1:8000/v1, for any OpenAI client"),
        (f"{command} chat --url http://127.0.0.1:8000", "talk to it"),
        (f"{command} chat {model}", "a conversation without a server"),
    ]), end="")


if __name__ == "__main__":
    main()
