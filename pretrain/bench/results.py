"""The results of `bench all`: rows, JSON and text table.

Every value is a rate, so higher is always better. A range spans the lowest to the highest repetition.

JSON keys keep their original names: a row's `peer` and `peer_name` describe the baseline.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError

from pretrain.common.errors import InputError
from pretrain.common.files import write_json
from pretrain.common.wording import aligned
from pretrain.tracking.metrics import FORMER_NAMES

FORMAT = 1


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False, populate_by_name=True)


class Figure(_Part):
    """The median over the repetitions, with the lowest and the highest value."""

    median: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat


class Limit(_Part):
    """A rate to compare with: an upper limit of the machine, or the rate that training needs."""

    name: str
    meaning: str
    value: PositiveFloat
    share: PositiveFloat  # ours over `value`


class Comparison(_Part):
    """One row: our rate, the baseline's rate, and the ratio ours / baseline over the repetitions."""

    what: str
    unit: str
    ours: Figure
    baseline_name: str = Field(validation_alias="peer_name", serialization_alias="peer_name")
    baseline: Figure = Field(validation_alias="peer", serialization_alias="peer")
    ratio: Figure
    limit: Limit | None = None


class FailedMeasurement(_Part):
    """A benchmark that produced no result."""

    what: str
    failed: str


class Machine(_Part):
    """The machine and the software that the results depend on."""

    cpu: str
    cores: int
    threads: int | None  # torch threads in the step benchmark; None if it did not run
    gpus: list[str]
    memory_bytes: int
    platform: str
    python: str
    packages: dict[str, str]


class BenchResult(_Part):
    """One benchmark: its command, duration and the JSON that it printed."""

    what: str
    kind: str  # the benchmark's name on the command line
    command: str
    seconds: float
    result: dict[str, Any] | None
    failed: str = ""  # the reason if there is no result


class Results(_Part):
    """The results of one `bench all`."""

    format: Literal[1] = FORMAT
    date: str  # ISO 8601, UTC
    commit: str | None  # `git describe`; ends in -dirty if the code has uncommitted changes
    machine: Machine
    inputs: dict[str, str]  # digests of the corpus and the text
    rows: list[Comparison | FailedMeasurement]
    runs: list[BenchResult] = []

    @property
    def measured(self) -> dict[str, Comparison]:
        """The measured rows, by name."""
        return {row.what: row for row in self.rows if isinstance(row, Comparison)}

    @property
    def failed(self) -> dict[str, str]:
        """The reasons of the failed rows, by name."""
        return {row.what: row.failed for row in self.rows if isinstance(row, FailedMeasurement)}


def short_commit(commit: str | None) -> str:
    """The commit with a short hash; keeps the suffix -dirty."""
    return re.sub(r"([0-9a-f]{7})[0-9a-f]{33}", r"\1", commit) if commit else "unknown"


def read(path: Path) -> Results:
    """The results in the file `path`, which an older version may have written.

    Raises `InputError` if the file cannot be read or is not a result of `bench all`.
    """
    try:
        results = Results.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}). Give the bench.json of a `bench all`.") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        fault = f"{field}: {first['msg']}" if field else first["msg"]
        raise InputError(f"{path}: not a result of `bench all` ({fault}). Run `bench all` again.") from None
    return results.model_copy(
        update={
            "rows": [row.model_copy(update={"what": _current_row(row.what)}) for row in results.rows],
            "runs": [run.model_copy(update={"result": _with_current_names(run.result)}) for run in results.runs],
        }
    )


def write(results: Results, path: Path) -> None:
    """Write `results` as JSON, atomically."""
    write_json(path, results.model_dump(mode="json", by_alias=True))


def _current_row(what: str) -> str:
    for former, current in _FORMER_WORDS.items():
        what = what.replace(former, current)
    return what


def _with_current_names(value: Any) -> Any:
    """The JSON that a benchmark printed, with former metric names replaced by today's."""
    if isinstance(value, dict):
        return {FORMER_NAMES.get(key, key): _with_current_names(item) for key, item in value.items()}
    return [_with_current_names(item) for item in value] if isinstance(value, list) else value


_WITHOUT_IDS = "baseline to ids only"
# Parts of row names that older versions wrote.
_FORMER_WORDS = {"peer to ids alone": _WITHOUT_IDS, "tokenise ": "tokenize "}

# ---- from the output of the benchmarks to rows


def step_rows(result: dict[str, Any]) -> list[Comparison]:
    """Rows of `bench step --json`: ours against the fastest baseline without torch.compile and the fastest with it.

    Their limit is the matmul peak measured with the steps.
    """
    return [
        _step_row(step, min(kinds, key=lambda kind: step["ratios"][kind][0]), suffix)
        for step in _with_current_names(result["results"])
        for suffix, kinds in (
            ("", [kind for kind in step["ratios"] if kind != "bare" and "compiled" not in kind]),
            (", compiled", [kind for kind in step["ratios"] if "compiled" in kind]),
        )
        if kinds
    ]


def _step_row(step: dict[str, Any], baseline: str, suffix: str) -> Comparison:
    ours = step["tokens_per_second"]["ours"]
    peak = Limit(
        name="matmul peak",
        meaning="throughput at an MFU of 100 %: every FLOP as fast as in a large square matmul on this machine",
        value=ours / step["mfu"],
        share=step["mfu"],
    )
    return Comparison(
        what=f"step {step['size']} @{step['length']}{suffix}",
        unit="useful tokens/s",
        ours=_figure(ours, step["spread"]["ours"]),
        baseline_name=f"transformers {baseline}",
        baseline=_figure(step["tokens_per_second"][baseline], step["spread"][baseline]),
        ratio=_figure(step["ratios"][baseline][0], step["ratios"][baseline][1:]),
        limit=peak,
    )


def loader_rows(result: dict[str, Any], steps: list[dict[str, Any]]) -> list[Comparison]:
    """Rows of `bench loader --json`. Their limit is what the fastest of the measured `steps` consumes."""
    rows = []
    for one in result["loader"]:
        rates = one["sequences_per_second"]
        rows.append(
            Comparison(
                what=f"loader @{one['length']}",
                unit="sequences/s per core",
                ours=_figure(rates["ours"], one["spread"]["ours"]),
                baseline_name="transformers collator",
                baseline=_figure(rates["transformers"], one["spread"]["transformers"]),
                ratio=_figure(one["ratio"], one["ratio_spread"]),
                limit=_need(rates["ours"], [step for step in steps if step["length"] == one["length"]]),
            )
        )
    return rows


def prepare_rows(result: dict[str, Any]) -> list[Comparison]:
    """Rows of `bench prepare --json`. Their limit is the speed of reading the file."""
    return [
        _prepare_row(result, "prepare", "datasets", "text to shards", "datasets.map of run_mlm"),
        _prepare_row(result, "prepare", "tokenizers", f"text to shards, {_WITHOUT_IDS}", "encode_batch_fast"),
        _prepare_row(result, "tokenize", "tokenizers", "sentences to ids", "encode_batch_fast"),
    ]


def _prepare_row(result: dict[str, Any], ours: str, baseline: str, what: str, baseline_name: str) -> Comparison:
    speed, ratio = result["speed"], result["ratios"][f"{ours} / {baseline}"]
    rate, reading = speed[ours]["mb_per_second"], result["read_mb_per_second"]
    return Comparison(
        what=f"{ours} {result['file']['megabytes']:.3g} MB, {what}",
        unit="MB/s",
        ours=_figure(rate, speed[ours]["spread"]),
        baseline_name=baseline_name,
        baseline=_figure(speed[baseline]["mb_per_second"], speed[baseline]["spread"]),
        ratio=_figure(ratio["median"], ratio["spread"]),
        limit=Limit(
            name="reading the file",
            meaning="upper bound: all cores only copy the file from the page cache",
            value=reading,
            share=rate / reading,
        ),
    )


def _need(rate: float, steps: list[dict[str, Any]]) -> Limit | None:
    """The sequences/s that the fastest of the steps consumes; None if no step was measured."""
    consumption = {step["size"]: step["tokens_per_second"]["ours"] / step["mean_tokens"] for step in steps}
    if not consumption:
        return None
    fastest = max(consumption.values())
    return Limit(
        name="training step",
        meaning="sequences/s that the fastest measured step of this length consumes; a loader needs at least that",
        value=fastest,
        share=rate / fastest,
    )


def _figure(median: float, spread: Sequence[float]) -> Figure:
    return Figure(median=median, low=spread[0], high=spread[1])


# ---- from rows to text

HEADINGS = ("", "unit", "ours", "(range)", "baseline", "its rate", "ratio", "(range)", "limit", "ours / limit")
RIGHT_ALIGNED = frozenset({2, 3, 5, 6, 7, 8, 9})  # the columns of numbers


def table(results: Results) -> str:
    """The table for a terminal: a line per row, then the failures and the meaning of the limits."""
    rows = list(results.measured.values())
    lines = aligned([HEADINGS, *map(cells, rows)], RIGHT_ALIGNED) if rows else []
    lines += [f"{what}: failed: {reason}" for what, reason in results.failed.items()]
    lines += [f"limit of {kinds}: {name}, {meaning}" for kinds, name, meaning in limits(results)]
    return "\n".join(lines)


def cells(row: Comparison) -> tuple[str, ...]:
    """The row as text: one string per heading."""
    limit = (number(row.limit.value), share(row.limit.share)) if row.limit else ("-", "-")
    return (
        row.what,
        row.unit,
        number(row.ours.median),
        span(row.ours),
        row.baseline_name,
        number(row.baseline.median),
        f"{row.ratio.median:.2f}",
        f"({row.ratio.low:.2f}-{row.ratio.high:.2f})",
        *limit,
    )


def limits(results: Results) -> list[tuple[str, str, str]]:
    """(kinds of rows, name of their limit, its meaning); each limit once."""
    meanings = {row.limit.name: row.limit.meaning for row in results.measured.values() if row.limit}
    kinds: dict[str, list[str]] = {name: [] for name in meanings}
    for row in results.measured.values():
        kind = row.what.partition(" ")[0]
        if row.limit and kind not in kinds[row.limit.name]:
            kinds[row.limit.name].append(kind)
    return [(" and ".join(kinds[name]), name, meaning) for name, meaning in meanings.items()]


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
