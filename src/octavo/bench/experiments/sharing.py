"""Samples and beams of one prompt hold its KV blocks together.

Claim: sharing saves 6 to 30 % of the KV memory with parallel samples, 38 to 66 % with beams. Source: Kwon et al. 2023, section 6.3 (Alpaca and
ShareGPT, 2 to 6 sequences).
Switched: nothing. Saved is what the tables would take without sharing, less what they take: 1 - unique blocks / logical blocks, each summed over
time. The prefix cache is off, so that only forks share.
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
SAMPLES, BEAMS = "samples", "beams"


def run(lab: Lab) -> Outcome:
    """Prompts and outputs as chats have them, each prompt continued 2, 4 and 6 times, by samples and by beams."""
    lengths = lognormal(4, 3.6, 3.2, most_in=96, most_out=48) if lab.quick else lognormal(8, 5.0, 4.0, most_in=512, most_out=128)

    def serve(kind: str, n: int) -> Callable[[Random], float]:
        def once(draw: Random) -> float:
            jobs = []
            for place, job in enumerate(jobs_of(lab, draw, lengths)):
                jobs += [Job(0.0, job.prompt, job.output, params=_params(kind, n, child_seed(place, index))) for index in range(n)]
            return 1 - lab.arm(prefix_caching=False).run(jobs, lambda name, job: _member(name, job, n)).averages.unique
        return once

    arms = {f"{n} {kind}": serve(kind, n) for kind in (SAMPLES, BEAMS) for n in SIZES}
    saved = lab.rounds(arms, repeats=min(lab.repeats, 2))  # the lengths are those of every round: hardly any spread
    rows = [[name, Spread.of(values).text(".1f", " %", 100)] for name, values in saved.items()]
    middle = {kind: ", ".join(f"{100 * Spread.of(saved[f'{n} {kind}']).median:.0f}" for n in SIZES) for kind in (SAMPLES, BEAMS)}
    finding = f"2, 4 and 6 samples of a prompt save {middle[SAMPLES]} % of their KV memory, as many beams {middle[BEAMS]} %"
    return Outcome(finding, ["", "KV memory saved"], rows, {"saved": saved, "lengths": lengths})


def _params(kind: str, n: int, seed: int) -> SamplingParams:
    if kind == BEAMS:
        return SamplingParams(use_beam_search=True, n=n, temperature=0.0, ignore_eos=True)
    return SamplingParams(temperature=1.0, seed=seed & (2**63 - 1), ignore_eos=True)


def _member(name: str, job: Job, n: int) -> Request:
    """A job's request as one of a group of n in order."""
    place = int(name[1:])
    made = request(name, job)
    made.fork_of = "" if place % n == 0 else f"j{place - place % n}"
    return made


def draw(figure: Any, data: dict[str, Any]) -> None:
    """A bar per number of samples, and of beams."""
    from octavo.bench.picture import COLOURS, bars

    axes = figure.subplots()
    bars(axes, list(data["saved"]), [[100 * each for each in values] for values in data["saved"].values()], ".0f", first_ours=False)
    for bar, name in zip(axes.patches, data["saved"]):
        bar.set_color(COLOURS[0 if SAMPLES in name else 1])
    axes.set(ylabel="KV memory saved, %", ylim=(0, 100))
