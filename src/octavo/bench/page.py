"""The page of all results: what stands between its two marks is written from the JSON files, so no figure on it was ever typed."""

import json
import os
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

BEGIN, END = "<!-- written by octavo bench experiments: begin -->", "<!-- written by octavo bench experiments: end -->"


def rewrite(page: Path, folder: Path, names: tuple[str, ...]) -> None:
    """Write the table and the pictures of the results in ``folder`` into a page; what stands outside of the marks stays.

    Raises: ConfigError when the page is not there, or has no marks.
    """
    found = [json.loads(path.read_text()) for name in names if (path := folder / f"{name}.json").exists()]
    put(page, BEGIN, END, _results(found, Path(os.path.relpath(folder, page.parent)), folder))


def put(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two marks of a page. Raises: ConfigError when the page is not there, or has no marks."""
    try:
        old = page.read_text()
    except OSError as error:
        raise ConfigError(f"the page {page} cannot be read: {error.strerror}", "page") from error
    before, begun, rest = old.partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise ConfigError(f"the page {page} lacks the marks between which results are written: {begin} and {end}", "page")
    page.write_text(f"{before}{begin}\n{text}{end}{after}")


def _results(found: list[dict[str, Any]], link: Path, folder: Path) -> str:
    lines = ["| claim | command | result |", "|---|---|---|"]
    for each in found:
        small = " (a quick run: no figure to quote)" if each["quick"] else ""
        lines.append(f"| {each['claim']} | `octavo bench experiments {each['experiment']}` | {each['finding']}.{small} |")
    lines.append("")
    for where in dict.fromkeys(map(where_measured, found)):
        lines.append(f"Measured with {where}.")
    lines.append("")
    for each in found:
        if (folder / f"{each['experiment']}.png").exists():
            lines.append(f"![{each['experiment']}]({(link / each['experiment']).as_posix()}.png)\n")
    return "\n".join(lines)


def where_measured(found: dict[str, Any]) -> str:
    """Model, machine and code of a result, in words."""
    model, machine = found["config"]["model"], found["machine"]
    commit = f"commit {(found['commit'] or 'unknown')[:9]}{' with changes' if found['changed'] else ''}"
    return f"{model['model']}, {model['dtype']}; {machine['threads']} threads of {machine['cpu']}, {machine['isa']}; {commit}"
