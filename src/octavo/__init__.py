"""Octavo: a high-throughput LLM inference engine with its own CPU kernels. The public names; each is imported when asked for."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "LLM": "octavo.engine.llm",
    "AsyncLLM": "octavo.engine.async_engine",
    "SamplingParams": "octavo.core.sampling",
    **dict.fromkeys(("BeamSearchParams", "BeamSearchOutput", "BeamSearchSequence"), "octavo.engine.beams"),
    **dict.fromkeys(("RequestOutput", "CompletionOutput", "Logprob", "RequestMetrics"), "octavo.core.output"),
    **dict.fromkeys(
        ("OctavoError", "ConfigError", "CheckpointError", "UnsupportedError", "WorkerDied", "RemoteError", "RequestError", "InvalidRequest",
         "ContextTooLong", "QueueFull", "GrammarError", "Cancelled"), "octavo.errors",
    ),
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from octavo.core.output import CompletionOutput as CompletionOutput
    from octavo.core.output import Logprob as Logprob
    from octavo.core.output import RequestMetrics as RequestMetrics
    from octavo.core.output import RequestOutput as RequestOutput
    from octavo.core.sampling import SamplingParams as SamplingParams
    from octavo.engine.async_engine import AsyncLLM as AsyncLLM
    from octavo.engine.beams import BeamSearchOutput as BeamSearchOutput
    from octavo.engine.beams import BeamSearchParams as BeamSearchParams
    from octavo.engine.beams import BeamSearchSequence as BeamSearchSequence
    from octavo.engine.llm import LLM as LLM
    from octavo.errors import Cancelled as Cancelled
    from octavo.errors import CheckpointError as CheckpointError
    from octavo.errors import ConfigError as ConfigError
    from octavo.errors import ContextTooLong as ContextTooLong
    from octavo.errors import GrammarError as GrammarError
    from octavo.errors import InvalidRequest as InvalidRequest
    from octavo.errors import OctavoError as OctavoError
    from octavo.errors import QueueFull as QueueFull
    from octavo.errors import RemoteError as RemoteError
    from octavo.errors import RequestError as RequestError
    from octavo.errors import UnsupportedError as UnsupportedError
    from octavo.errors import WorkerDied as WorkerDied


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
