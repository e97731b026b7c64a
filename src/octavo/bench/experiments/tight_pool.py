"""With a tenth of the KV memory that the load needs side by side, every request is answered, with the same tokens.

Claim: users of other engines met thrashing, lost requests and recomputation of 32 to 79 % of the work in small pools. Source: vLLM issue 54644
for the tax; Gong et al. 2025, "Past-Future Scheduler for LLM Serving under SLA Guarantees", for predicted admission.
Switched: the pool (roomy, or a tenth), and ``--admission`` optimistic or predicted. The recompute tax is what was computed in the tight pool beyond
what the roomy one computes. The prefix cache is off, so that nothing softens a preemption. Requests ask for more tokens than they take, as
clients do: the scheduler does not know when they will end. Predicted admission has seen 16 outputs before.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from octavo.bench.lab import HISTORY, Lab, Run, jobs_of
from octavo.bench.outcome import Outcome, Spread, ratio

ROOMY, OPTIMISTIC, PREDICTED = "roomy", "tight, optimistic", "tight, predicted"
MOST = 128  # tokens that each asks for


def run(lab: Lab) -> Outcome:
    """The load in the three engines."""
    draw, count = Random(4), 32 if lab.quick else 64
    lengths = [(draw.randint(16, 96), draw.randint(8, 56)) for _ in range(count)]
    need = sum(-(-(tokens_in + tokens_out) // 16) for tokens_in, tokens_out in lengths)
    tight = need // 10

    def serve(**settings: Any) -> Callable[[Random], Run]:
        def once(draw: Random) -> Run:
            arm = lab.arm(prefix_caching=False, **settings)
            if "admission" in settings:
                arm.learn(lab, [tokens_out for _, tokens_out in lengths[:HISTORY]], MOST)
            return arm.run(jobs_of(lab, draw, lengths, most=MOST))
        return once

    found = lab.rounds({
        ROOMY: serve(num_kv_blocks=need + count), OPTIMISTIC: serve(num_kv_blocks=tight),
        PREDICTED: serve(num_kv_blocks=tight, admission="predicted"),
    })
    for runs in zip(*found.values(), strict=True):
        for records in zip(*(run.records for run in runs), strict=True):
            assert all(r.finish_reason == "abort" and len(r.ids) == r.job.output for r in records), "a request was lost or cut"
            assert len({tuple(r.ids) for r in records}) == 1, "a preemption changed a token"
    speed = {name: [r.tokens_per_second for r in runs] for name, runs in found.items()}
    preemptions = {name: [r.counters.preemptions for r in runs] for name, runs in found.items()}
    rows_of = {name: [r.counters.tokens_planned for r in runs] for name, runs in found.items()}
    tax = {name: [rows / least - 1 for rows, least in zip(values, rows_of[ROOMY], strict=True)] for name, values in rows_of.items()}
    resident = {name: [r.averages.resident for r in runs] for name, runs in found.items()}
    rows = [[name, Spread.of(speed[name]).text(".0f", " tokens/s"), ratio(speed[name], speed[ROOMY]).text(".2f", "×"),
             Spread.of(preemptions[name]).text(".0f"), Spread.of(tax[name]).text(".1f", " %", 100), Spread.of(resident[name]).text(".1f")]
            for name in found]
    middle = {name: Spread.of(values).median for name, values in tax.items()}
    finding = (f"In {100 * tight / need:.0f} % of the KV memory that they need, {count} requests are answered whole, with the same tokens: "
               f"optimistic admission preempts {Spread.of(preemptions[OPTIMISTIC]).median:.0f} times and computes "
               f"{100 * middle[OPTIMISTIC]:.0f} % anew, predicted {Spread.of(preemptions[PREDICTED]).median:.0f} times and "
               f"{100 * middle[PREDICTED]:.0f} %")
    return Outcome(finding, ["pool", "output", "of roomy", "preemptions", "computed anew", "requests at once"], rows, {
        "tokens_per_second": speed, "preemptions": preemptions, "tax": tax, "resident": resident, "blocks": tight, "need": need, "lengths": lengths,
    })


def draw(figure: Any, data: dict[str, Any]) -> None:
    """Throughput, preemptions, the tax."""
    from octavo.bench.picture import COLOURS, bars

    names = [name.replace(", ", "\n") for name in data["tax"]]
    panels = zip(figure.subplots(1, 3), (("tokens_per_second", "output tokens/s", ".0f", 1), ("preemptions", "preemptions", ".0f", 1),
                                         ("tax", "rows computed anew, %", ".1f", 100)))
    for axes, (key, title, form, times) in panels:
        bars(axes, names, [[times * each for each in values] for values in data[key].values()], form, first_ours=False)
        for bar, colour in zip(axes.patches, (COLOURS[3], COLOURS[1], COLOURS[0])):
            bar.set_color(colour)
        axes.set(title=title)
