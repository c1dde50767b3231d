"""Compile every program for every TPU and write what came out as a table: python -m tests.support.tpu_table FILE."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from app.tpu.page_carriers import GROUP_SIZES
from tests.support.tpu_matrix import MORE_PAGES, PAGES, SIZES, Case, Compiled, full_cases, run

HEAD = f"""# The step programs on TPU

Written by `make test-tpu-full`, which compiles the programs that the runtime calls, for chips that need not be there,
and fails when a program breaks a gate. Nothing is run: no speed can be read from this. That a step calls these
programs, with such types and shardings, and no others is a test on CPU (tests/unit/runtime/test_step_programs.py).

Models are two layers deep (on tpu7x in a row, elsewhere a loop, whose body the text has once), bfloat16, pages of 16
tokens; {SIZES.batch} rows of up to {SIZES.context_pages * 16:,} tokens, prompts of {SIZES.chunk_tokens} tokens a step,
{GROUP_SIZES[0]} pages a copy. SmolLM2 runs on one device, the others are cut over four. Programs that know nothing
of the model are listed once a target.

Gates, all read from the compiled program: what is donated is written in place, to the byte; temporaries are at most a
tenth of the pool, and {MORE_PAGES:,} pages need no more of them than {PAGES:,}; exactly the planned operations between
devices (app/runtime/programs.py); the chip's memory suffices. MB of one device; `in place` is the pool for prefill,
decode and restore, and the table that is written for the others; `accessed` is XLA's estimate, a loop's body
counted once.
"""


def line(case: Case, compiled: Compiled) -> str:
    facts = compiled.facts
    sent = ", ".join(f"{count} {kind}" for kind, count in sorted(facts.collectives.items())) or "nothing"
    sizes = (facts.alias_bytes, facts.temp_bytes, facts.accessed_bytes)
    numbers = " | ".join(f"{size / 1e6:,.2f}" for size in sizes)
    return f"| {case.program} | {numbers} | {sent} | {facts.seconds:.1f} |"


def table(cases: list[Case], results: list[Compiled]) -> str:
    lines = [HEAD]
    heading = None
    for case, compiled in zip(cases, results, strict=True):
        if (case.target, case.model) != heading:
            heading = case.target, case.model
            lines += ["", f"## {case.target}, {case.model}", "", f"Pool: {compiled.pool_bytes / 1e6:,.0f} MB a device."]
            lines += [
                "",
                "| program | in place | temporaries | accessed | sends | seconds |",
                "|---|---|---|---|---|---|",
            ]
        lines.append(line(case, compiled))
    return "\n".join(lines) + "\n"


def main(path: Path) -> int:
    cases = full_cases()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as workers:
        results = []
        for case, compiled in zip(cases, workers.map(run, cases), strict=True):
            print(case, "ok" if not compiled.broken else compiled.broken, flush=True)
            results.append(compiled)
    path.write_text(table(cases, results))
    return int(any(compiled.broken for compiled in results))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
