"""Samples of one prompt hold its KV blocks together: memory saved for n > 1.

Claim: sharing saves 6 to 30 % of the KV memory with parallel samples, 38 to 66 % with beams. Source: Kwon et al. 2023, section 6.3 (Alpaca and
ShareGPT, 2 to 6 sequences).
Switched: nothing. Saved is what the tables would take without sharing, less what they take: 1 - unique blocks / logical blocks, averaged over time.
The prefix cache is off, so that only forks share.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from octavo.bench.lab import Lab, jobs_of, lognormal, request
from octavo.bench.outcome import Outcome, Spread
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.engine.groups import child_seed
from octavo.simulate.drive import Job

SIZES = (2, 4, 6)


def run(lab: Lab) -> Outcome:
    """Prompts and outputs as chats have them, each prompt sampled 2, 4 and 6 times."""
    lengths = lognormal(4, 3.6, 3.2, most_in=96, most_out=48) if lab.quick else lognormal(8, 5.0, 4.0, most_in=512, most_out=128)

    def samples(n: int) -> Callable[[Random], float]:
        def once(draw: Random) -> float:
            jobs = []
            for place, job in enumerate(jobs_of(lab, draw, lengths)):
                jobs += [Job(0.0, job.prompt, job.output, params=_sampled(child_seed(place, index))) for index in range(n)]
            return 1 - lab.arm(prefix_caching=False).run(jobs, lambda name, job: _member(name, job, n)).averages.unique
        return once

    saved = lab.rounds({str(n): samples(n) for n in SIZES}, repeats=min(lab.repeats, 2))  # lengths are the same in each round: hardly any spread
    rows = [[f"{n} samples", Spread.of(saved[str(n)]).text(".1f", " %", 100)] for n in SIZES]
    finding = f"2, 4 and 6 samples of a prompt save {', '.join(f'{100 * Spread.of(saved[str(n)]).median:.0f} %' for n in SIZES)} of their KV memory"
    return Outcome(finding, ["", "KV memory saved"], rows, {"samples": saved, "lengths": lengths})


def _sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed & (2**63 - 1), ignore_eos=True)


def _member(name: str, job: Job, n: int) -> Request:
    """A job's request as one of a group of n in order."""
    place = int(name[1:])
    made = request(name, job)
    made.fork_of = "" if place % n == 0 else f"j{place - place % n}"
    return made


def draw(figure: Any, data: dict[str, Any]) -> None:
    """A bar per number of samples."""
    from octavo.bench.picture import COLOURS, bars

    axes = figure.subplots()
    saved = [[100 * each for each in values] for values in data["samples"].values()]
    bars(axes, [f"n = {n}" for n in data["samples"]], saved, ".0f", first_ours=False)
    for bar in axes.patches:
        bar.set_color(COLOURS[0])
    axes.set(ylabel="KV memory saved, %", ylim=(0, 100))
