"""One process of the matrix: an instruction set is chosen at start, so each has a process of its own.

    OCTAVO_ISA=… python worker.py JOB.json OUT.json

JOB: {"model", "count", "max_prompt", "max_tokens", "dtype", "cells": [{"alone", "budget", "blocks", "threads"}, …]}.
OUT: {"isa", "cells": [{"answers", "preemptions"}, …]}.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main() -> None:
    import workload

    from octavo import LLM

    job = json.loads(Path(sys.argv[1]).read_text())
    out = []
    for cell in job["cells"]:
        with LLM(job["model"], dtype=job["dtype"], max_model_len=job["max_model_len"], max_num_seqs=cell.get("seqs", 64),
                 max_num_batched_tokens=cell["budget"], num_kv_blocks=cell["blocks"], num_threads=cell["threads"]) as llm:
            wanted = workload.requests(llm.vocab_size, job["count"], job["max_prompt"], job["max_tokens"])
            answers = workload.answers(llm, wanted, cell["alone"])
            out.append({"answers": answers, "preemptions": llm.num_preemptions})
            chosen = llm.instruction_set
    Path(sys.argv[2]).write_text(json.dumps({"isa": chosen, "cells": out}))


if __name__ == "__main__":
    main()
