"""The one table of `bench all`: its rows, their JSON, and how they are written out.

Every figure is a rate, so more is better everywhere. A range goes from the lowest to the highest alternation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, ValidationError

from pretrain.common.errors import InputError
from pretrain.common.files import write_json

FORMAT = 1


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Figure(_Part):
    """A median over alternations, with the lowest and the highest of them."""

    median: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat


class Limit(_Part):
    """What a rate is held against: a ceiling of the machine, or what somebody needs of it."""

    name: str
    meaning: str
    value: PositiveFloat
    share: PositiveFloat  # ours over `value`


class Comparison(_Part):
    """One comparison. `ratio` is ours over the peer's, alternation by alternation."""

    what: str
    unit: str
    ours: Figure
    peer_name: str
    peer: Figure
    ratio: Figure
    limit: Limit | None = None


class Failure(_Part):
    """A benchmark that ended without figures."""

    what: str
    failed: str


class Machine(_Part):
    """What the figures depend on besides the code."""

    cpu: str
    cores: int
    threads: int | None  # of torch, in the step; None where no step was measured
    gpus: list[str]
    memory_bytes: int
    platform: str
    python: str
    packages: dict[str, str]


class BenchResult(_Part):
    """One benchmark as it was run, with the JSON that it printed."""

    what: str
    kind: str  # the benchmark's name on the command line
    command: str
    seconds: float
    result: dict[str, Any] | None
    failed: str = ""  # why there is no result


class Results(_Part):
    """All that one `bench all` found out."""

    format: Literal[1] = FORMAT
    date: str  # ISO 8601, UTC
    commit: str | None  # `git describe`, ends in -dirty where the code was changed
    machine: Machine
    inputs: dict[str, str]  # digests of the corpus and the text
    rows: list[Comparison | Failure]
    runs: list[BenchResult] = []

    @property
    def measured(self) -> dict[str, Comparison]:
        """The rows with figures, by name."""
        return {row.what: row for row in self.rows if isinstance(row, Comparison)}

    @property
    def failed(self) -> dict[str, str]:
        """Reasons of the rows without figures, by name."""
        return {row.what: row.failed for row in self.rows if isinstance(row, Failure)}


def short_commit(commit: str | None) -> str:
    """A commit as people write it, with -dirty where it has that."""
    return re.sub(r"([0-9a-f]{7})[0-9a-f]{33}", r"\1", commit) if commit else "unknown"


def read(path: Path) -> Results:
    """The results in the file `path`; `InputError` where it is missing, damaged or something else."""
    try:
        return Results.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}). Give a file of `bench all`.") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        fault = f"{place}: {first['msg']}" if place else first["msg"]
        raise InputError(f"{path}: no results of `bench all` ({fault}). Measure again.") from None


def write(results: Results, path: Path) -> None:
    """Write `results` as JSON, atomically."""
    write_json(path, results.model_dump(mode="json"))


# ---- rows of what the benchmarks print


def step_rows(result: dict[str, Any]) -> list[Comparison]:
    """Rows of `bench step --json`, against the fastest peer that is compiled and the fastest that is not.

    They are held against the matmul peak measured in the same turns.
    """
    return [
        _step_row(one, min(kinds, key=lambda kind: one["ratios"][kind][0]), suffix)
        for one in result["results"]
        for suffix, kinds in (
            ("", [kind for kind in one["ratios"] if kind != "bare" and "compiled" not in kind]),
            (", compiled", [kind for kind in one["ratios"] if "compiled" in kind]),
        )
        if kinds
    ]


def _step_row(one: dict[str, Any], peer: str, suffix: str) -> Comparison:
    ours = one["tokens_per_second"]["ours"]
    peak = Limit(
        name="matmul peak",
        meaning="where all of the step's FLOPs run as fast as a large square matmul, measured in the same turns",
        value=ours / one["peak_fraction"],
        share=one["peak_fraction"],
    )
    return Comparison(
        what=f"step {one['size']} @{one['length']}{suffix}",
        unit="useful tokens/s",
        ours=_figure(ours, one["spread"]["ours"]),
        peer_name=f"transformers {peer}",
        peer=_figure(one["tokens_per_second"][peer], one["spread"][peer]),
        ratio=_figure(one["ratios"][peer][0], one["ratios"][peer][1:]),
        limit=peak,
    )


def loader_rows(result: dict[str, Any], steps: list[dict[str, Any]]) -> list[Comparison]:
    """Rows of `bench loader --json`; `steps` are the measured steps, of which the fastest tells the need."""
    rows = []
    for one in result["loader"]:
        rates = one["sequences_per_second"]
        rows.append(
            Comparison(
                what=f"loader @{one['length']}",
                unit="sequences/s per core",
                ours=_figure(rates["ours"], one["spread"]["ours"]),
                peer_name="transformers collator",
                peer=_figure(rates["transformers"], one["spread"]["transformers"]),
                ratio=_figure(one["ratio"], one["ratio_spread"]),
                limit=_need(rates["ours"], [step for step in steps if step["length"] == one["length"]]),
            )
        )
    return rows


def prepare_rows(result: dict[str, Any]) -> list[Comparison]:
    """Rows of `bench prepare --json`, held against reading the file."""
    return [
        _prepare_row(result, "prepare", "datasets", "text to shards", "datasets.map of run_mlm"),
        _prepare_row(result, "prepare", "tokenizers", "text to shards, peer to ids alone", "encode_batch_fast"),
        _prepare_row(result, "tokenise", "tokenizers", "sentences to ids", "encode_batch_fast"),
    ]


def _prepare_row(result: dict[str, Any], ours: str, peer: str, what: str, peer_name: str) -> Comparison:
    speed, ratio = result["speed"], result["ratios"][f"{ours} / {peer}"]
    rate, reading = speed[ours]["mb_per_second"], result["read_mb_per_second"]
    return Comparison(
        what=f"{ours} {result['file']['megabytes']:.3g} MB, {what}",
        unit="MB/s",
        ours=_figure(rate, speed[ours]["spread"]),
        peer_name=peer_name,
        peer=_figure(speed[peer]["mb_per_second"], speed[peer]["spread"]),
        ratio=_figure(ratio["median"], ratio["spread"]),
        limit=Limit(
            name="reading the file",
            meaning="where all cores only copy the file from the page cache; nothing comes near it",
            value=reading,
            share=rate / reading,
        ),
    )


def _need(rate: float, steps: list[dict[str, Any]]) -> Limit | None:
    """What the fastest of the steps uses up, in sequences/s; None where no step was measured."""
    uses = {step["size"]: step["tokens_per_second"]["ours"] / step["mean_tokens"] for step in steps}
    if not uses:
        return None
    fastest = max(uses, key=uses.__getitem__)
    return Limit(
        name="the step's need",
        meaning="sequences/s that the fastest step measured here at this length uses; more is to spare",
        value=uses[fastest],
        share=rate / uses[fastest],
    )


def _figure(median: float, spread: Sequence[float]) -> Figure:
    return Figure(median=median, low=spread[0], high=spread[1])


# ---- writing out

HEADINGS = ("", "unit", "ours", "(range)", "peer", "its rate", "ratio", "(range)", "limit", "share of it")
TO_THE_RIGHT = frozenset({2, 3, 5, 6, 7, 8, 9})  # columns of figures


def table(results: Results) -> str:
    """The table for a terminal: a line per row, and below it what failed and what the limits mean."""
    rows = list(results.measured.values())
    lines = aligned([HEADINGS, *map(cells, rows)], TO_THE_RIGHT) if rows else []
    lines += [f"{what}: failed: {reason}" for what, reason in results.failed.items()]
    lines += [f"limit of {who}: {name}, {meaning}" for who, name, meaning in limits(results)]
    return "\n".join(lines)


def cells(row: Comparison) -> tuple[str, ...]:
    """The row as text, a string per heading."""
    limit = (number(row.limit.value), share(row.limit.share)) if row.limit else ("-", "-")
    return (
        row.what,
        row.unit,
        number(row.ours.median),
        span(row.ours),
        row.peer_name,
        number(row.peer.median),
        f"{row.ratio.median:.2f}",
        f"({row.ratio.low:.2f}-{row.ratio.high:.2f})",
        *limit,
    )


def limits(results: Results) -> list[tuple[str, str, str]]:
    """(which rows, the name of their limit, what it means), each limit once."""
    named = {row.limit.name: row.limit.meaning for row in results.measured.values() if row.limit}
    who: dict[str, list[str]] = {name: [] for name in named}
    for row in results.measured.values():
        kind = row.what.partition(" ")[0]
        if row.limit and kind not in who[row.limit.name]:
            who[row.limit.name].append(kind)
    return [(" and ".join(who[name]), name, meaning) for name, meaning in named.items()]


def aligned(rows: Sequence[Sequence[str]], to_the_right: Iterable[int]) -> list[str]:
    """Lines of columns that are as wide as their widest cell; those numbered in `to_the_right` end flush."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in to_the_right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def number(value: float) -> str:
    """12345.6 -> 12,346; 12.345 -> 12.3; 1.2345 -> 1.23."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def span(figure: Figure) -> str:
    """(lowest-highest)."""
    return f"({number(figure.low)}-{number(figure.high)})"


def share(value: float) -> str:
    """0.4 -> 40 %; 760 -> 760 times."""
    if value < 1:
        return f"{100 * value:.2g} %"
    return f"{value:,.0f} times" if value >= 10 else f"{value:.1f} times"
