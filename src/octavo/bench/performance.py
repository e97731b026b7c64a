"""The page of performance: ``python -m octavo.bench.performance FOLDER PAGE`` writes its tables from the results in a folder.

What may lie there: results of `octavo bench throughput | latency | kernels | startup` and `octavo eval` (--save), under any names; and
comparisons with other engines, NAME.json and what has to be known of it, NAME.about.json:

    {"times": {WORKLOAD: {ENGINE: [seconds of each round]}}, "load_s": {ENGINE: seconds}, "rss_mb": {ENGINE: peak}}
    {"model": …, "cpu": …, "threads": …, "engines": {ENGINE: {"bits": of a weight, "kl": to float32, or null, "note": …}}}

A precision's KL comes from the eval result with the same model and precision, so a speed never stands without what it costs.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from octavo.bench.page import put
from octavo.bench.workloads import HIGHEST, WORKLOADS, make
from octavo.errors import ConfigError, OctavoError

BEGIN, END = "<!-- written by octavo.bench.performance: begin -->", "<!-- written by octavo.bench.performance: end -->"
ABOUT = ".about.json"
TOP_OPS = 6  # of a step, in the table of kernels

Result = dict[str, Any]


def write(folder: Path, page: Path) -> None:
    """Raises: ConfigError for a folder without results, one that cannot be read, or a page without marks."""
    found: dict[str, list[Result]] = {"throughput": [], "latency": [], "kernels": [], "startup": [], "eval": [], "versus": []}
    for path in sorted(folder.glob("*.json")):
        if path.name.endswith(ABOUT):
            continue
        result = _read(path)
        if "times" in result:
            result = {"benchmark": "versus", **_read(path.with_name(path.stem + ABOUT)), **result}
        if result.get("benchmark") not in found:
            raise ConfigError(f"{path} is no result of a benchmark that this page shows: {', '.join(found)}")
        found[result["benchmark"]].append(result)
    if not any(found.values()):
        raise ConfigError(f"{folder} holds no results: save some there (--save)")
    parts: list[str] = []
    for title, lines in (
        ("Beside other engines", _versus(found["versus"])), ("Throughput", _throughput(found["throughput"], found["eval"])),
        ("Latency", _latency(found["latency"], found["eval"])), ("Where a step goes", _kernels(found["kernels"])),
        ("From the start to the first token", _startup(found["startup"])), ("What a precision costs", _quality(found["eval"])),
    ):
        if text := "\n".join(lines):
            parts.append(f"## {title}\n\n{text}\n")
    put(page, BEGIN, END, "\n".join(parts))


def _read(path: Path) -> Result:
    """Raises: ConfigError."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(result, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return result


def _versus(results: Sequence[Result]) -> Iterator[str]:
    for each in results:
        names = list(each["engines"])
        base, rounds = names[0], max(len(times) for times in next(iter(each["times"].values())).values())
        yield (f"{each['model']}, {each['threads']} threads of {each['cpu']}. In turns, medians of {rounds}; whole wall time of a workload, output "
               f"tokens a second (prefill: prompt tokens); × is the median over the rounds of that time over {base}'s.\n")
        yield _row("", *names)
        yield _row("---", *["---"] * len(names))
        yield _row("bits of a weight", *(each["engines"][name]["bits"] for name in names))
        yield _row("mean KL to float32", *(_kl(each["engines"][name].get("kl")) for name in names))
        for workload, times in each["times"].items():
            cells = []
            for name in names:
                seconds = statistics.median(times[name])
                ratio = statistics.median(theirs / ours for ours, theirs in zip(times[base], times[name], strict=True))
                load = make(WORKLOADS[workload], HIGHEST, 0) if workload in WORKLOADS else None
                tokens = 0 if load is None else load.tokens_out if load.tokens_out > 1 else load.tokens_in
                rate = f", {tokens / seconds:.0f} tok/s" if tokens else ""
                cells.append(f"{seconds:.2f} s{rate}" + (f" ({ratio:.2f}×)" if name != base else ""))
            yield _row(workload, *cells)
        yield _row("load", *(f"{each['load_s'][name]:.1f} s" for name in names))
        yield _row("peak memory", *(f"{each['rss_mb'][name]:.0f} MB" for name in names))
        for name in names:
            if note := each["engines"][name].get("note"):
                yield f"\n{name}: {note}."
        yield ""


def _throughput(results: Sequence[Result], evals: Sequence[Result]) -> Iterator[str]:
    for where, group in _grouped(results):
        workloads = list(dict.fromkeys(name for each in group for name in each["results"]))
        yield f"{where}. Output tokens a second (share of the roofline in the same process).\n"
        yield _row("precision", "mean KL", "weights", *workloads, "outside kernels")
        yield _row(*["---"] * (4 + len(workloads)))
        for each in group:
            cells = [_rate(each["results"].get(name), "output_tokens_per_second") for name in workloads]
            outside = [run["outside_native"]["median"] for run in each["results"].values() if run["outside_native"]]
            share = f"{100 * min(outside):.1f} to {100 * max(outside):.1f} %" if outside else "–"
            yield _row(precision(each["config"]), _kl_of(each, evals), f"{each['weight_bytes'] / 1e6:.0f} MB", *cells, share)
        yield ""


def _latency(results: Sequence[Result], evals: Sequence[Result]) -> Iterator[str]:
    for where, group in _grouped(results):
        yield f"{where}. {group[0]['tokens_in']} tokens in, {group[0]['tokens_out']} out.\n"
        yield _row("precision", "mean KL", "batch", "first token", "step", "P99", "decode tok/s", "of roofline", "outside kernels")
        yield _row(*["---"] * 9)
        for each in group:
            for size, run in each["results"].items():
                yield _row(
                    precision(each["config"]), _kl_of(each, evals), size, f"{1e3 * run['first_token_seconds']['median']:.0f} ms",
                    f"{1e3 * run['step_seconds']['median']:.2f} ms", f"{1e3 * run['step_seconds_p99']:.2f} ms",
                    f"{run['decode_tokens_per_second']:.0f}", _share(run["roofline"]), _share(run["outside_native"], 1))
        yield ""


def _kernels(results: Sequence[Result]) -> Iterator[str]:
    for where, group in _grouped(results):
        for each in group:
            yield f"{where}, {precision(each['config'])}. The longest ops of a step: share of its time, share of the roofline.\n"
            yield _row("rows", "step", *["op"] * TOP_OPS)
            yield _row(*["---"] * (2 + TOP_OPS))
            for rows, ops in each["results"].items():
                total = sum(op["seconds"] for op in ops)
                cells = [f"{op['op']}: {100 * op['seconds'] / total:.0f} %, {100 * op['roofline']:.0f} %" for op in ops[:TOP_OPS]]
                yield _row(rows, f"{1e3 * total:.2f} ms", *cells, *["–"] * (TOP_OPS - len(cells)))
            yield ""


def _startup(results: Sequence[Result]) -> Iterator[str]:
    for where, group in _grouped(results):
        yield (f"{where}. From the start of the process to the first token of an answer, median of {group[0]['repeat']}, and the memory that the "
               "computing process alone has then (RssAnon). First: nothing is packed yet; again: packed weights are mapped.\n")
        yield _row("precision", "weights", *(f"{way}, {when}" for way, times in group[0]["results"].items() for when in times))
        yield _row(*["---"] * (2 + sum(len(times) for times in group[0]["results"].values())))
        for each in group:
            cells = [f"{run['seconds']['median']:.2f} s, {run['anonymous_bytes']['median'] / 1e6:.0f} MB"
                     for times in each["results"].values() for run in times.values()]
            yield _row(precision(each["config"]), f"{each['weight_bytes'] / 1e6:.0f} MB", *cells)
        yield ""


def _quality(results: Sequence[Result]) -> Iterator[str]:
    results = [each for each in results if "text" in each]
    if not results:
        return
    yield _row("model", "precision", "reference", "text", "perplexity", "reference's", "mean KL", "greedy agreement")
    yield _row(*["---"] * 8)
    for each in results:
        text = each["text"]
        yield _row(
            each["config"]["model"]["model"], precision(each["config"]), precision(each["reference_config"]),
            f"{text['source']}, {text['tokens']} tokens",
            f"{text['perplexity']:.3f}", f"{text['reference_perplexity']:.3f}", _kl(text["kl_mean"]), f"{100 * text['greedy_agreement']:.2f} %")


def precision(config: Result) -> str:
    """A configuration's precision in a few words."""
    model, kv = config["model"], config["kv"]["kv_cache_dtype"]
    words = [model["quantization"] or model["dtype"]]
    return ", KV ".join(words if kv in ("auto", model["dtype"]) else [*words, kv])


def _grouped(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    """Results of one model on one machine by one commit, under words for that."""
    groups: dict[str, list[Result]] = {}
    for each in results:
        machine, commit = each["machine"], f"commit {(each['commit'] or 'unknown')[:9]}{' with changes' if each['changed'] else ''}"
        threads = each["config"]["runner"]["num_threads"] or machine["threads"]
        ceilings = each["ceilings"]
        rates = "" if ceilings is None else (
            f"; reading {ceilings['read_bytes_per_second'] / 1e9:.1f} GB/s, products {ceilings['operations_per_second'] / 1e9:.0f} GFLOP/s, "
            f"of codes {ceilings['codes_per_second'] / 1e9:.0f} Gop/s"
            + (f", of fewer bits {few / 1e9:.0f}" if (few := ceilings.get("few_bits_per_second", 0.0)) > 1.1 * ceilings["codes_per_second"] else ""))
        key = f"{each['config']['model']['model']}, {threads} threads of {machine['cpu']}, {machine['isa']}, {commit}"
        groups.setdefault(key, []).append(each | {"rates": rates})
    for key, group in groups.items():
        yield key + group[0]["rates"], group


def _kl_of(each: Result, evals: Sequence[Result]) -> str:
    """The KL of a result's precision, from the eval of the same model."""
    for other in evals:
        if "text" in other and all(other["config"][part][name] == each["config"][part][name] for part, name in (
                ("model", "model"), ("model", "dtype"), ("model", "quantization"), ("kv", "kv_cache_dtype"))):
            return _kl(other["text"]["kl_mean"])
    return "–"


def _kl(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def _rate(run: Result | None, name: str) -> str:
    return "–" if run is None else f"{run[name]:.1f} ({_share(run['roofline'])})"


def _share(spread: Result | None, digits: int = 0) -> str:
    return "–" if spread is None else f"{100 * spread['median']:.{digits}f} %"


def _row(*cells: Any) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def main() -> None:
    """``python -m octavo.bench.performance FOLDER PAGE``."""
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.performance", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the results are")
    parser.add_argument("page", type=Path, help="the page to write")
    given = parser.parse_args()
    try:
        write(given.folder, given.page)
    except OctavoError as error:
        sys.exit(f"{error.message}")


if __name__ == "__main__":
    main()
