"""Under overload a fair share keeps a light tenant's first token near, and every tenant's share equal; each policy favours whom it says.

Claim: a virtual token counter per tenant bounds what a heavy one can take from the others, work-conserving. Source: Sheng et al. 2024, "Fairness in
Serving Large Language Models", OSDI; Jain, Chiu & Hawe 1984 for the index.
Switched: ``--scheduling-policy``. Requests of two tenants arrive at random over some seconds, 1.6 times what the engine can serve; the light tenant's
are a tenth of its capacity. Prompts are short, medium or long (priority 0, 1, 2), and half of them begin as others do. Then four tenants of
unequal loads, each at least twice its share: what each was served while all of them waited.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from octavo.bench.lab import Lab
from octavo.bench.outcome import Outcome, Spread, ratio
from octavo.scheduler.policy import GENERATED_WEIGHT, PROMPT_WEIGHT
from octavo.simulate.drive import Job, Record, jain, quantile

POLICIES = ("fcfs", "priority", "lpm", "fair")
CLASSES = {"short": 16, "medium": 64, "long": 192}
HEAD = 64
OUT = 16
SEQS = 8


def run(lab: Lab) -> Outcome:
    """Two tenants under each policy, then four under fcfs and fair."""
    draw, heads = Random(3), [lab.ids(Random(seed), HEAD) for seed in (1, 2)]
    sample = [_job(lab, draw, 0.0, heads, "") for _ in range(12 if lab.quick else 32)]
    rate = len(sample) / lab.arm(max_num_seqs=SEQS).run(sample).seconds  # requests a second
    seconds = (12 if lab.quick else 30) / rate
    lab.tell(f"the engine serves {rate:.1f} such requests a second")

    def serve(policy: str, rates: dict[str, float], until: float | None = None) -> Callable[[Random], list[Record]]:
        def once(draw: Random) -> list[Record]:
            jobs = [job for tenant, each in rates.items() for job in _arrivals(lab, draw, each * rate, seconds, heads, tenant)]
            arm = lab.arm(max_num_seqs=SEQS, policy=policy)

            def end(now: float, records: Mapping[str, Record]) -> None:
                if until is not None and now >= until:
                    for name in records:
                        arm.core.abort(name)

            return arm.run(jobs, observe=end).records
        return once

    two = lab.rounds({policy: serve(policy, {"heavy": 1.5, "light": 0.1}) for policy in POLICIES})
    four = lab.rounds({policy: serve(policy, {"a": 0.5, "b": 1.0, "c": 2.0, "d": 4.0}, until=seconds) for policy in ("fcfs", "fair")})
    light = {policy: [_p99([r for r in records if r.job.tenant == "light"]) for records in runs] for policy, runs in two.items()}
    by_class = {policy: {name: [_p99([r for r in records if r.job.priority == level]) for records in runs] for level, name in enumerate(CLASSES)}
                for policy, runs in two.items()}
    index = {policy: [jain(_served(records)) for records in runs] for policy, runs in four.items()}
    rows = [[policy, Spread.of(light[policy]).text(".2f", " s"), *(Spread.of(by_class[policy][name]).text(".2f", " s") for name in CLASSES),
             Spread.of(index[policy]).text(".3f") if policy in index else "–"] for policy in POLICIES]
    gain = ratio(light["fcfs"], light["fair"])
    finding = (f"Under overload the light tenant's P99 time to first token is {Spread.of(light['fcfs']).median:.2f} s under fcfs and "
               f"{Spread.of(light['fair']).median:.2f} s under fair ({gain.median:.1f}× sooner); Jain's index of four tenants rises from "
               f"{Spread.of(index['fcfs']).median:.2f} to {Spread.of(index['fair']).median:.2f}")
    return Outcome(finding, ["P99 time to first token", "light tenant", *(f"{name} prompts" for name in CLASSES), "Jain's index"], rows,
                   {"light": light, "classes": by_class, "jain": index, "requests_per_second": rate, "seconds": seconds})


def _job(lab: Lab, draw: Random, arrival: float, heads: Sequence[list[int]], tenant: str) -> Job:
    level = draw.randrange(len(CLASSES))
    prompt = lab.ids(draw, list(CLASSES.values())[level])
    return Job(arrival, draw.choice(heads) + prompt if draw.random() < 0.5 else prompt, OUT, tenant, level)


def _arrivals(lab: Lab, draw: Random, rate: float, seconds: float, heads: Sequence[list[int]], tenant: str) -> list[Job]:
    """A Poisson process's, at least one."""
    jobs, now = [_job(lab, draw, seconds * draw.random(), heads, tenant)], 0.0
    while (now := now + draw.expovariate(rate)) < seconds:
        jobs.append(_job(lab, draw, now, heads, tenant))
    return jobs


def _p99(records: Sequence[Record]) -> float:
    return quantile([r.ttft for r in records], 0.99) if records else 0.0


def _served(records: Sequence[Record]) -> list[float]:
    """What each tenant was served, in the policy's own measure; prompts count at admission, less what was cached."""
    found: dict[str, float] = {}
    for r in records:
        prompt = 0 if r.admitted is None else len(r.job.prompt) - r.cached
        found[r.job.tenant] = found.get(r.job.tenant, 0.0) + PROMPT_WEIGHT * prompt + GENERATED_WEIGHT * len(r.ids)
    return list(found.values())


def draw(figure: Any, data: dict[str, Any]) -> None:
    """The light tenant, the classes, the index."""
    from octavo.bench.picture import COLOURS, bars

    left, middle, right = figure.subplots(1, 3, width_ratios=(3, 5, 2))
    bars(left, list(data["light"]), list(data["light"].values()), ".1f", first_ours=False)
    bars(right, list(data["jain"]), list(data["jain"].values()), ".2f", first_ours=False)
    for axes, policies in ((left, data["light"]), (right, data["jain"])):
        for bar, policy in zip(axes.patches, policies):
            bar.set_color(COLOURS[0 if policy == "fair" else 3])
    width = 0.8 / len(CLASSES)
    for place, name in enumerate(CLASSES):
        heights = [Spread.of(data["classes"][policy][name]).median for policy in POLICIES]
        middle.bar([at + (place - 1) * width for at in range(len(POLICIES))], heights, width, label=name, color=COLOURS[place])
    middle.set_xticks(range(len(POLICIES)), POLICIES)
    middle.legend(title="prompts", ncols=3, loc="upper center")
    middle.margins(y=0.4)
    left.set(title="light tenant: P99 time to\nfirst token, s")
    middle.set(title="P99 time to first token by length of prompt, s")
    right.set(title="Jain's index,\nfour tenants", ylim=(0, 1.15))
