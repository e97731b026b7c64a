"""One process of the matrix: an instruction set is chosen at start, so each has a process of its own.

    OCTAVO_ISA=… python worker.py JOB.json OUT.json

JOB: {"model", "count", "max_prompt", "max_tokens", "dtype", "kv_cache_dtype", "quantization",
      "cells": [{"alone", "budget", "blocks", "threads", "cache", "swap"}, …]}.
OUT: {"isa", "cells": [{"answers", "preemptions", "swapped": blocks out and in, "hits"}, …]}.

cache: off; cold; warm (everything was asked before); partial (the first half of each prompt, and of those with few tokens none, was);
restored (everything was asked of an engine before this one, which kept its cached blocks in a file).
swap: recompute; memory; file: what is forced upon preempted requests.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


SWAP = {
    "recompute": {},
    "memory": {"kv_swap_bytes": 64 << 20, "preemption_mode": "swap"},
    "file": {"kv_swap_bytes": 64 << 20, "preemption_mode": "swap", "kv_swap_path": tempfile.gettempdir()},
}


def main() -> None:
    import workload

    from octavo import LLM

    def engine(cell: dict[str, Any], keep: str | None) -> LLM:
        return LLM(job["model"], dtype=job["dtype"], kv_cache_dtype=job.get("kv_cache_dtype", "auto"), max_model_len=job["max_model_len"],
                   max_num_seqs=cell.get("seqs", 64), max_num_batched_tokens=cell["budget"], num_kv_blocks=cell["blocks"],
                   num_threads=cell["threads"], enable_prefix_caching=cell["cache"] != "off", quantization=job.get("quantization"),
                   kv_cache_dir=keep, **SWAP[cell["swap"]])

    job = json.loads(Path(sys.argv[1]).read_text())
    out = []
    for cell in job["cells"]:
        keep = None
        if cell["cache"] == "restored":
            keep = tempfile.mkdtemp(dir=Path(sys.argv[2]).parent)
            with engine(cell, keep) as earlier:
                workload.answers(earlier, workload.requests(earlier.vocab_size, job["count"], job["max_prompt"], job["max_tokens"]), False)
        with engine(cell, keep) as llm:
            wanted = workload.requests(llm.vocab_size, job["count"], job["max_prompt"], job["max_tokens"])
            if cell["cache"] == "warm":
                workload.answers(llm, wanted, False)
            elif cell["cache"] == "partial":
                workload.answers(llm, [(prompt[: len(prompt) // 2 + 1], {"max_tokens": 1}) for prompt, _ in wanted], False)
            _, before = llm.prefix_cache_stats
            answers = workload.answers(llm, wanted, cell["alone"])
            lost, hits = llm.preemption_stats, llm.prefix_cache_stats[1] - before
            out.append({"answers": answers, "preemptions": lost.preemptions, "swapped": [lost.blocks_out, lost.blocks_in], "hits": hits})
            chosen = llm.instruction_set
    Path(sys.argv[2]).write_text(json.dumps({"isa": chosen, "cells": out}))


if __name__ == "__main__":
    main()
