"""`bench workers`: the overhead of Ray, DeepSpeed, tracking and more workers, measured on complete runs.

Each round runs `pretrain` once for each ZeRO stage and number of workers; the workers share the machine's cores.
Each round also trains the same batches in a plain torch loop (`bare` in baselines.py). The throughput of a run is the
median over its records; the first record is excluded as warm-up.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from pretrain.common.children import run_program
from pretrain.common.commands import positive_int, program
from pretrain.common.errors import InputError, MachineError
from pretrain.common.records import is_training, read_records
from pretrain.common.settings import dump
from pretrain.config import PretrainConfig
from tests.bench.baselines import BARE, TrainerProcess, TrainerSpec, bench_config

_WINDOW = 10  # number of steps per record


def main(argv: list[str]) -> int:
    """Run the comparison and print a table."""
    parser = argparse.ArgumentParser(prog=f"{program()} bench workers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", required=True, help="prepared corpus folder")
    parser.add_argument("--size", default="mini", help="model size (default: mini)")
    parser.add_argument("--length", type=positive_int, default=128, help="sequence length")
    parser.add_argument("--sequences", type=positive_int, default=64, help="sequences per step")
    parser.add_argument("--steps", type=int, default=60, help=f"steps of each run, at least {2 * _WINDOW}")
    parser.add_argument("--zero", nargs="+", type=int, default=[1, 3], choices=[0, 1, 2, 3], help="ZeRO stages")
    parser.add_argument(
        "--workers",
        nargs="+",
        type=positive_int,
        default=[1, 2],
        help="numbers of workers; scaling is relative to the first",
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=3, help="runs of each combination; the median is reported"
    )
    options = parser.parse_args(argv)
    if options.steps < 2 * _WINDOW:
        raise InputError(f"bench workers: --steps is {options.steps}; give at least {2 * _WINDOW}.")
    print("\n".join(map(_line, measure(options))))
    return 0


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for `bare` and for each ZeRO stage and number of workers, with the throughput of every round."""
    bare: dict[str, Any] = {"name": BARE, "tokens_per_second": []}
    setups = [
        {"name": f"zero {zero} x {workers} workers", "zero": zero, "workers": workers, "tokens_per_second": []}
        for zero in options.zero
        for workers in options.workers
    ]
    with tempfile.TemporaryDirectory(prefix="bench-workers-") as folder:
        for number in range(options.rounds):
            bare["tokens_per_second"].append(_bare(options))
            for setup in setups:
                run = Path(folder) / f"{number}-{setup['zero']}-{setup['workers']}"
                setup["tokens_per_second"].append(_pretrain(run, setup, options))
    return compare(bare, setups)


def compare(bare: dict[str, Any], setups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add medians, and throughput relative to `bare` and to the first setup of the same stage; return all rows."""
    first = {setup["zero"]: setup for setup in reversed(setups)}
    for setup in setups:
        setup["of bare"] = _share(setup, bare)
        setup["of the first"] = _share(setup, first[setup["zero"]])
    for row in (bare, *setups):
        row["median"] = statistics.median(row["tokens_per_second"])
    return [bare, *setups]


def _share(row: dict[str, Any], base: dict[str, Any]) -> float:
    """Return the throughput of `row` divided by the throughput of `base`, as the median over rounds."""
    pairs = zip(row["tokens_per_second"], base["tokens_per_second"], strict=True)
    return statistics.median(rate / base_rate for rate, base_rate in pairs)


def _config(options: argparse.Namespace) -> PretrainConfig:
    return bench_config(str(Path(options.corpus).resolve()), options.size, options.length, options.sequences)


def _pretrain(run: Path, setup: dict[str, Any], options: argparse.Namespace) -> float:
    """Run the command `pretrain`, and return its throughput."""
    path = run.with_suffix(".yaml")
    path.write_text(dump(_config(options)))
    settings = {
        "run_dir": run,
        "phases.0.steps": options.steps,
        "engine.zero_stage": setup["zero"],
        "tracking.log_every_steps": _WINDOW,
        "scheduling.workers": setup["workers"],
        "scheduling.cpus_per_worker": max(1, (os.cpu_count() or 1) // setup["workers"]),
    }
    command = [sys.executable, "-m", "finetune.cli", "pretrain", str(path)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    process = run_program(command)
    if process.returncode:
        raise MachineError(f"bench workers: {setup['name']} failed: {process.stderr.strip()[-300:]}")
    windows = [record["tokens_per_second"] for record in read_records(run) if is_training(record)]
    return statistics.median(windows[1:])


def _bare(options: argparse.Namespace) -> float:
    trainer = TrainerProcess(TrainerSpec(BARE, _config(options), steps=options.steps))
    reports = [trainer.train(1e-4) for _ in range(options.steps)]
    trainer.close()
    windows = [reports[start : start + _WINDOW] for start in range(_WINDOW, options.steps, _WINDOW)]
    return statistics.median(
        sum(report.tokens for report in window) / sum(report.seconds for report in window) for window in windows
    )


def _line(row: dict[str, Any]) -> str:
    rates = row["tokens_per_second"]
    text = f"{row['name']:<20} {row['median']:>9,.0f} tok/s ({min(rates):,.0f}-{max(rates):,.0f})"
    return text + "".join(f"   {row[key]:.1%} {key}" for key in ("of bare", "of the first") if key in row)
