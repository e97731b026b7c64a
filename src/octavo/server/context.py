"""What every route needs: the engine, the settings, and the names and numbers that answers carry."""

import hashlib
import itertools
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request

from octavo.server.errors import ApiError, invalid
from octavo.server.settings import ServerSettings

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncLLM


_ID = re.compile(r"[!-~]{1,128}")


class Context:
    """One per app."""

    def __init__(self, llm: "AsyncLLM", settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.names: Sequence[str] = settings.served_model_names or (str(llm.config.model.model),)
        self.created = int(time.time())
        self._numbers = itertools.count()

    @property
    def model(self) -> str:
        """The name in answers."""
        return self.names[0]

    @property
    def fingerprint(self) -> str:
        """The same for the same version, model and precision: tokens depend on nothing else."""
        from octavo import __version__

        model = self.llm.config.model
        facts = repr((__version__, model.model, model.revision, model.dtype, model.quantization, self.llm.config.kv.kv_cache_dtype))
        return f"fp_{hashlib.sha256(facts.encode()).hexdigest()[:12]}"

    def check_model(self, asked: str | None) -> None:
        """Raises: ApiError 404 for a model that is not served. None is the one that is."""
        if asked is not None and asked not in self.names:
            raise ApiError(404, f"there is no model {asked[:200]!r} here; served is: {', '.join(self.names)}", "model", "model_not_found")

    def new_id(self, prefix: str, wanted: str | None, http: Request) -> str:
        """An answer's id: the field request_id, else what the middleware calls the request. Raises: ApiError for an impossible one."""
        if wanted is not None and not _ID.fullmatch(wanted):
            raise invalid("request_id must be 1 to 128 visible ASCII characters", "request_id")
        return f"{prefix}-{wanted or http.state.request_id}"

    def tenant(self, user: str | None, http: Request) -> str:
        """Whose request this is: the name of its API key, else the header X-Tenant, else the field ``user``, else nobody's ("").

        Header and field are taken at their word: where tenants must not pass for each other, give each a key with a name.

        Raises: ApiError, InvalidRequest for a name that is impossible, even where another counts.
        """
        header = http.headers.get("x-tenant")
        if header is not None and not _ID.fullmatch(header):
            raise invalid("the header X-Tenant must be 1 to 128 visible ASCII characters", "X-Tenant")
        if user is not None:
            self.llm.inputs.check_tenant(user, "user")
        return getattr(http.state, "key_name", "") or header or user or ""

    def engine_id(self, answer_id: str) -> str:
        """The id in the engine, unique even where clients repeat themselves."""
        return f"{answer_id}.{next(self._numbers)}"
