"""`bench workers`: what Ray, DeepSpeed, tracking and a second worker cost, measured on whole runs of the product.

Every round runs `pretrain` once for each ZeRO stage and number of workers, the machine's cores divided among them,
and the same batches in a plain loop of torch without any of these (`bare` in contestants.py). Rates are medians over
a run's logged windows, the first of which is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pretrain.bench.contestants import BARE, Contestant, Entry, bench_config
from pretrain.common.errors import InputError, MachineError
from pretrain.common.settings import dump
from pretrain.config import PretrainConfig
from pretrain.tracking.records import is_training, read_records

_WINDOW = 10  # steps


def main(argv: list[str]) -> int:
    """Run the comparison and print a table, or JSON with `--json`."""
    parser = argparse.ArgumentParser(prog="./launch.sh bench workers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", required=True, help="prepared corpus folder")
    parser.add_argument("--size", default="mini", help="model size (default: mini)")
    parser.add_argument("--length", type=int, default=128, help="sequence length")
    parser.add_argument("--sequences", type=int, default=64, help="sequences per step")
    parser.add_argument("--steps", type=int, default=60, help=f"steps of each run, at least {2 * _WINDOW}")
    parser.add_argument("--zero", nargs="+", type=int, default=[1, 3], choices=[0, 1, 2, 3], help="ZeRO stages")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2], help="numbers of workers; the first is 1x")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each; the median is reported")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args(argv)
    if options.steps < 2 * _WINDOW:
        raise InputError(f"bench workers: --steps is {options.steps}; it takes at least {2 * _WINDOW}.")
    rows = measure(options)
    text = json.dumps({"options": vars(options), "rows": rows}) if options.json else "\n".join(map(_line, rows))
    print(text)
    return 0


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for `bare` and one for each way of running the product, with its useful tokens/s of every round."""
    bare: dict[str, Any] = {"name": BARE, "tokens_per_second": []}
    ways = [
        {
            "name": f"zero {zero} x {workers} workers",
            "zero": zero,
            "workers": workers,
            "tokens_per_second": [],
        }
        for zero in options.zero
        for workers in options.workers
    ]
    with tempfile.TemporaryDirectory(prefix="bench-workers-") as folder:
        for number in range(options.rounds):
            bare["tokens_per_second"].append(_bare(options))
            for way in ways:
                run = Path(folder) / f"{number}-{way['zero']}-{way['workers']}"
                way["tokens_per_second"].append(_product(run, way, options))
    return compare(bare, ways)


def compare(bare: dict[str, Any], ways: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with medians, and each way's share of bare and of its ZeRO stage's first way, round by round."""
    first = {way["zero"]: way for way in reversed(ways)}
    for way in ways:
        way["of bare"] = _share(way, bare)
        way["of the first"] = _share(way, first[way["zero"]])
    for row in (bare, *ways):
        row["median"] = statistics.median(row["tokens_per_second"])
    return [bare, *ways]


def _share(row: dict[str, Any], base: dict[str, Any]) -> float:
    pairs = zip(row["tokens_per_second"], base["tokens_per_second"], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def _config(options: argparse.Namespace) -> PretrainConfig:
    return bench_config(str(Path(options.corpus).resolve()), options.size, options.length, options.sequences)


def _product(run: Path, way: dict[str, Any], options: argparse.Namespace) -> float:
    path = run.with_suffix(".yaml")
    path.write_text(dump(_config(options)))
    settings = {
        "run_dir": run,
        "phases.0.steps": options.steps,
        "engine.zero_stage": way["zero"],
        "tracking.log_every_steps": _WINDOW,
        "scheduling.workers": way["workers"],
        "scheduling.cpus_per_worker": max(1, (os.cpu_count() or 1) // way["workers"]),
    }
    command = [sys.executable, "-m", "pretrain", "pretrain", str(path)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise MachineError(f"bench workers: {way['name']} failed: {done.stderr.strip()[-300:]}")
    windows = [record["tokens_per_second"] for record in read_records(run) if is_training(record)]
    return statistics.median(windows[1:])


def _bare(options: argparse.Namespace) -> float:
    contestant = Contestant(Entry(BARE, _config(options), steps=options.steps))
    reports = [contestant.train(1e-4) for _ in range(options.steps)]
    contestant.close()
    windows = [reports[start : start + _WINDOW] for start in range(_WINDOW, options.steps, _WINDOW)]
    return statistics.median(
        sum(report.tokens for report in window) / sum(report.seconds for report in window) for window in windows
    )


def _line(row: dict[str, Any]) -> str:
    rates = row["tokens_per_second"]
    text = f"{row['name']:<20} {row['median']:>9,.0f} tok/s ({min(rates):,.0f}-{max(rates):,.0f})"
    return text + "".join(f"   {row[key]:.1%} {key}" for key in ("of bare", "of the first") if key in row)
