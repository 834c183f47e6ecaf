"""`bench all`: runs every benchmark in a process of its own and writes one table, bench.json and bench.html.

It measures the training step (Mini at 512 and 128 tokens; Base too, unless --quick), the loader and the corpus
preparation. Each result has a baseline, the ratio to it, and a limit. A full run takes about half an hour on two cores,
a quick run about five minutes. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.bench import page, results
from pretrain.bench.results import BenchResult, Comparison, FailedMeasurement, Machine, Results
from pretrain.commands import local_path, program
from pretrain.common.children import run_program
from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import disk_errors, read_manifest, sha256_file
from pretrain.preflight import environment

LENGTHS = (512, 128)


@dataclass(frozen=True)
class Measurement:
    """One benchmark: its name in the table and its command, which prints JSON as its last line."""

    what: str
    kind: str
    command: tuple[str, ...]

    @classmethod
    def of(cls, what: str, kind: str, **options: object) -> Measurement:
        """The benchmark `kind` with command-line options; a tuple gives several values of one option."""
        command = [sys.executable, "-m", "pretrain", "bench", kind]
        for name, value in options.items():
            values = value if isinstance(value, tuple) else (value,)
            command += [f"--{name.replace('_', '-')}", *map(str, values)]
        return cls(what, kind, (*command, "--json"))


def main(argv: list[str]) -> int:
    """Run the benchmarks, print the table and write both files. Returns 3 if a benchmark failed."""
    options = _parser().parse_args(argv)
    inputs = _inputs(options.corpus, options.text)
    about = environment([])
    out: Path = options.out or _default_folder(about["git_commit"])
    with disk_errors(out):  # fails now, not after the long measurement
        out.mkdir(parents=True, exist_ok=True)
    measured = collect(jobs(options.corpus, options.text, quick=options.quick), out, about, inputs)
    results.write(measured, out / "bench.json")
    page.write(measured, out / "bench.html")
    print(f"{results.table(measured)}\n\n{out / 'bench.json'}\n{(out / 'bench.html').resolve().as_uri()}")
    return MachineError.exit_code if measured.failed else 0


def jobs(corpus: Path, text: Path, *, quick: bool) -> list[Measurement]:
    """The benchmarks in the order in which they run."""
    repeats = {"mini": 7} if quick else {"mini": 7, "base": 5}
    baselines = ("sdpa", "eager", "sdpa-compiled", "eager-compiled")
    steps = [
        Measurement.of(
            f"step {size} @{length}",
            "step",
            corpus=corpus,
            sizes=size,
            lengths=length,
            repeats=count,
            peers=baselines,
        )
        for size, count in repeats.items()
        for length in LENGTHS
    ]
    limit_mb = 10 if quick else 50
    return [
        *steps,
        Measurement.of("loader", "loader", corpus=corpus, lengths=LENGTHS),
        Measurement.of("prepare", "prepare", file=text, vocabulary=corpus, limit_mb=limit_mb, repeats=5),
    ]


def collect(planned: list[Measurement], out: Path, about: dict[str, Any], inputs: dict[str, str]) -> Results:
    """Run the benchmarks one at a time and collect their results.

    Args:
        planned: the benchmarks.
        out: existing folder; the stderr of a failed benchmark is written there.
        about: the machine and the code, from `preflight.environment`.
        inputs: digests of the corpus and the text.
    """
    runs = []
    for number, job in enumerate(planned, start=1):
        print(f"[{number}/{len(planned)}] {job.what} ... ", end="", file=sys.stderr, flush=True)
        runs.append(_run(job, out))
        failed = "failed after " if runs[-1].failed else ""
        print(f"{failed}{runs[-1].seconds:.0f} s", file=sys.stderr, flush=True)
    steps = [run.result for run in runs if run.kind == "step" and run.result]
    return Results(
        date=about["started"],
        commit=about["git_commit"],
        machine=_machine(about, steps),
        inputs=inputs,
        rows=[row for run in runs for row in _rows(run, steps)],
        runs=runs,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{program()} bench all",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit codes: 0 success, 2 invalid input, 3 a benchmark failed (its row says why; the others still run).",
        allow_abbrev=False,
    )
    parser.add_argument("--corpus", type=local_path, required=True, metavar="DIR", help="prepared corpus folder")
    parser.add_argument(
        "--text",
        type=local_path,
        required=True,
        metavar="FILE",
        help="WikiExtractor file; its first 50 MB are prepared, with --quick 10 MB",
    )
    parser.add_argument("--quick", action="store_true", help="leave BERT-Base out and prepare less text")
    parser.add_argument(
        "--out",
        type=local_path,
        metavar="FOLDER",
        help="output folder (default: runs/bench-DATE-TIME-COMMIT)",
    )
    return parser


def _inputs(corpus: Path, text: Path) -> dict[str, str]:
    """Digests of the corpus and the text, so that `bench compare` can warn if they differ."""
    if not text.is_file():
        raise InputError(f"--text: {text}: not found, or not a file. Give a file written by WikiExtractor.")
    fingerprint = read_manifest(corpus).get("fingerprint")
    if not isinstance(fingerprint, str):
        raise InputError(f"--corpus: {corpus}: not a prepared corpus. Prepare one with `prepare`.")
    return {"corpus": fingerprint[:16], "text": sha256_file(text)[:16]}


def _default_folder(commit: str | None) -> Path:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M")
    return Path("runs", f"bench-{now}-{results.short_commit(commit)}")


def _run(job: Measurement, out: Path) -> BenchResult:
    """Run one benchmark. If it fails, its stderr is written to a log in `out`; the last line is the reason."""
    started = time.perf_counter()
    process = run_program(job.command)
    seconds = time.perf_counter() - started
    result, failed = _outcome(process)
    if failed:
        log = out / f"{re.sub('[^a-z0-9]+', '-', job.what)}.log"
        log.write_text(process.stderr, encoding="utf-8")
        failed += f" (its output: {log})"
    command = shlex.join(job.command[1:])
    return BenchResult(what=job.what, kind=job.kind, command=command, seconds=seconds, result=result, failed=failed)


def _outcome(process: subprocess.CompletedProcess[str]) -> tuple[dict[str, Any] | None, str]:
    """(the printed JSON, ""), or (None, the reason of the failure)."""
    if process.returncode:
        last = process.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
        return None, last or f"exited with code {process.returncode}"
    try:
        return json.loads(process.stdout.strip().rpartition("\n")[2]), ""
    except ValueError:
        return None, "printed no JSON"


def _rows(run: BenchResult, steps: list[dict[str, Any]]) -> Sequence[Comparison | FailedMeasurement]:
    if run.result is None:
        return [FailedMeasurement(what=run.what, failed=run.failed)]
    if run.kind == "step":
        return results.step_rows(run.result)
    if run.kind == "loader":
        return results.loader_rows(run.result, [one for step in steps for one in step["results"]])
    return results.prepare_rows(run.result)


def _machine(about: dict[str, Any], steps: list[dict[str, Any]]) -> Machine:
    return Machine(
        cpu=about["cpu"],
        cores=about["cpu_cores"],
        threads=steps[0]["threads"] if steps else None,
        gpus=[gpu or "unknown" for gpu in about["gpus"]],
        memory_bytes=about["memory_bytes"],
        platform=about["platform"],
        python=about["python"],
        packages=about["packages"],
    )
