"""One process of the matrix: an instruction set is chosen at start, so each has a process of its own.

    OCTAVO_ISA=… python worker.py JOB.json OUT.json

JOB: {"model", "count", "max_prompt", "max_tokens", "dtype", "kv_cache_dtype", "cells": [{"alone", "budget", "blocks", "threads", "cache"}, …]}.
OUT: {"isa", "cells": [{"answers", "preemptions", "hits"}, …]}.

cache: off; cold; warm (everything was asked before); partial (the first half of each prompt, and of those with few tokens none, was).
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
        with LLM(job["model"], dtype=job["dtype"], kv_cache_dtype=job.get("kv_cache_dtype", "auto"),
                 max_model_len=job["max_model_len"], max_num_seqs=cell.get("seqs", 64), max_num_batched_tokens=cell["budget"], num_kv_blocks=cell["blocks"], num_threads=cell["threads"],
                 enable_prefix_caching=cell["cache"] != "off") as llm:
            wanted = workload.requests(llm.vocab_size, job["count"], job["max_prompt"], job["max_tokens"])
            if cell["cache"] == "warm":
                workload.answers(llm, wanted, False)
            elif cell["cache"] == "partial":
                workload.answers(llm, [(prompt[: len(prompt) // 2 + 1], {"max_tokens": 1}) for prompt, _ in wanted], False)
            _, before = llm.prefix_cache_stats
            answers = workload.answers(llm, wanted, cell["alone"])
            out.append({"answers": answers, "preemptions": llm.num_preemptions, "hits": llm.prefix_cache_stats[1] - before})
            chosen = llm.instruction_set
    Path(sys.argv[2]).write_text(json.dumps({"isa": chosen, "cells": out}))


if __name__ == "__main__":
    main()
