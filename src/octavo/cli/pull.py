"""`octavo pull`: get a model into the cache."""

import sys

from octavo.cli import options as o


def pull(model: o.Model, revision: o.Revision = None) -> None:
    """Get a model (a short name or a Hub id) into the cache, verify it, and print where it lies."""
    from octavo.cli.terminal import Startup
    from octavo.weights import hub

    with Startup() as startup:
        path = hub.pull(model, revision, startup.progress)
    sys.stdout.write(f"{path}\n")
