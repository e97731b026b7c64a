"""A real server on loopback over a tiny checkpoint, for the whole session."""

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from tests.checkpoints import make_tiny

from octavo import AsyncLLM
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_kv_blocks": 256, "max_num_seqs": 16, "max_model_len": 512, "num_threads": 1, "chat_template": None,
}


@dataclass
class Live:
    """A served model; ``llm`` belongs to the server's event loop, so tests only look at its numbers."""

    url: str
    llm: AsyncLLM
    loop: asyncio.AbstractEventLoop
    folder: str

    def until(self, check: Any, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < end, "did not come to be in time"
            time.sleep(0.01)


def serve(folder: str, settings: ServerSettings, **engine: Any) -> Iterator[Live]:
    llm = AsyncLLM(folder, **(SETTINGS | engine))
    ready: list[Any] = []
    server: list[uvicorn.Server] = []

    async def main() -> None:
        try:
            await llm.start()
            config = uvicorn.Config(create_app(llm, settings), port=0, lifespan="off", log_config=None, access_log=False, http="httptools")
            server.append(uvicorn.Server(config))
            serving = asyncio.create_task(server[0].serve())
            while not server[0].started:
                await asyncio.sleep(0.01)
            ready.append((server[0].servers[0].sockets[0].getsockname()[1], asyncio.get_running_loop()))
            await serving
        except BaseException as error:
            ready.append(error)
            raise
        finally:
            await llm.shutdown()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    while not ready:
        time.sleep(0.01)
        assert thread.is_alive() or ready
    if isinstance(ready[0], BaseException):
        raise ready[0]
    port, loop = ready[0]
    yield Live(f"http://127.0.0.1:{port}", llm, loop, folder)
    server[0].should_exit = True
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = make_tiny(tmp_path_factory.mktemp("served"), arch="llama", scale=0.3)
    return str(path)


@pytest.fixture(scope="session")
def live(tiny: str) -> Iterator[Live]:
    yield from serve(tiny, ServerSettings(served_model_names=("tiny", "alias")))
