"""The HTML page of `bench all`: a chart per row, the table, the machine."""

from __future__ import annotations

from pathlib import Path

from pretrain.bench.results import HEADINGS, RIGHT_ALIGNED, Comparison, Results, cells, limits, number, short_commit
from pretrain.reporting.charts import Bar, bar_chart
from pretrain.reporting.pages import write_page


def write(results: Results, out: Path) -> Path:
    """Write the page to the file `out`, atomically, and return it."""
    rows = list(results.measured.values())
    return write_page(
        out,
        "bench.html.j2",
        commit=short_commit(results.commit),
        date=results.date[:16].replace("T", ", ") + " UTC",
        machine=f"{results.machine.cores} cores of {results.machine.cpu}",
        rows=rows,
        charts=[_chart(row) for row in rows],
        headings=HEADINGS,
        right_aligned=RIGHT_ALIGNED,
        cells=[cells(row) for row in rows],
        failed=results.failed,
        notes=_notes(results),
    )


def _chart(row: Comparison) -> str:
    return bar_chart(
        row.what,
        row.unit,
        [
            Bar("ours", row.ours.median, row.ours.low, row.ours.high),
            Bar(row.baseline_name, row.baseline.median, row.baseline.low, row.baseline.high, "baseline"),
        ],
        form=number,
        limit=(row.limit.name, row.limit.value) if row.limit else None,
    )


def _notes(results: Results) -> list[tuple[str, list[tuple[str, str]]]]:
    """(title, rows of label and value) of the collapsible sections at the end of the page; empty ones are left out."""
    machine = results.machine
    facts = {
        "cpu": machine.cpu,
        "cores": machine.cores,
        "torch threads": machine.threads,
        "gpus": ", ".join(machine.gpus) or "none",
        "memory": f"{machine.memory_bytes / 2**30:.1f} GiB",
        "platform": machine.platform,
        "python": machine.python,
        **machine.packages,
        **{f"SHA-256 of the {name}": digest for name, digest in results.inputs.items()},
        "commit": results.commit,
    }
    notes = [
        ("Limits", [(f"{kinds}: {name}", meaning) for kinds, name, meaning in limits(results)]),
        ("Machine", [(name, str(value)) for name, value in facts.items() if value is not None]),
        ("Commands", [(f"{run.what}, {run.seconds:.0f} s", f"python {run.command}") for run in results.runs]),
    ]
    return [(title, rows) for title, rows in notes if rows]
