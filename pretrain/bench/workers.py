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

import yaml

from pretrain.bench.contestants import BARE, Contestant, Entry
from pretrain.config import RunConfig
from pretrain.errors import MachineError

_WINDOW = 10  # steps


def main(argv: list[str]) -> int:
    """Run the comparison and print a table, or JSON with `--json`."""
    parser = argparse.ArgumentParser(prog="bench workers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", required=True, help="prepared corpus folder")
    parser.add_argument("--size", default="mini", help="model size (default: mini)")
    parser.add_argument("--length", type=int, default=128, help="sequence length")
    parser.add_argument("--sequences", type=int, default=64, help="sequences per step")
    parser.add_argument("--steps", type=int, default=60, help=f"steps of each run, more than {2 * _WINDOW}")
    parser.add_argument(
        "--zero", nargs="+", type=int, default=[1, 3], choices=[0, 1, 2, 3], help="ZeRO stages"
    )
    parser.add_argument(
        "--workers", nargs="+", type=int, default=[1, 2], help="numbers of workers; the first is 1x"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each; the median is reported")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args(argv)
    rates = measure(options)
    result = {"options": vars(options), "tokens_per_second": rates, "rows": _rows(rates, options)}
    print(json.dumps(result) if options.json else "\n".join(_line(row) for row in result["rows"]))
    return 0


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Useful tokens/s of each way, one value a round: "bare", and "zero 1 x 2 workers" and the like."""
    rates: dict[str, list[float]] = {BARE: []}
    with tempfile.TemporaryDirectory(prefix="bench-workers-") as folder:
        for number in range(options.rounds):
            rates[BARE].append(_bare(options))
            for zero in options.zero:
                for workers in options.workers:
                    run = Path(folder) / f"{number}-{zero}-{workers}"
                    rates.setdefault(_name(zero, workers), []).append(_product(run, zero, workers, options))
    return rates


def _name(zero: int, workers: int) -> str:
    return f"zero {zero} x {workers} workers"


def _config(options: argparse.Namespace, zero: int, workers: int) -> dict[str, Any]:
    return {
        "name": "bench-workers",
        "corpus": {"dir": str(Path(options.corpus).resolve())},
        "model": {"size": options.size},
        "phases": [
            {
                "sequence_length": options.length,
                "global_sequences": options.sequences,
                "steps": options.steps,
                "peak_learning_rate": 1e-4,
            }
        ],
        "engine": {"zero_stage": zero, "micro_batch_tokens": options.sequences * options.length},
        "evaluation": {"sequences": options.sequences},
        "tracking": {"log_every_steps": _WINDOW},
        "scheduling": {"workers": workers, "cpus_per_worker": max(1, (os.cpu_count() or 1) // workers)},
    }


def _product(run: Path, zero: int, workers: int, options: argparse.Namespace) -> float:
    path = run.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(_config(options, zero, workers)))
    command = [sys.executable, "-m", "pretrain", "pretrain", str(path), "--set", f"run_dir={run}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise MachineError(f"`pretrain` with {_name(zero, workers)} failed: {done.stderr.strip()[-300:]}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    windows = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    return statistics.median(windows[1:])


def _bare(options: argparse.Namespace) -> float:
    config = RunConfig.model_validate(_config(options, 0, 1))
    contestant = Contestant(Entry(BARE, config, steps=options.steps))
    reports = [contestant.train(1e-4) for _ in range(options.steps)][_WINDOW:]
    contestant.close()
    return statistics.median(report.tokens / report.seconds for report in reports)


def _rows(rates: dict[str, list[float]], options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, values in rates.items():
        row = {"name": name, "median": statistics.median(values), "low": min(values), "high": max(values)}
        bases = (
            {"of bare": BARE, "of one worker": _name(int(name.split()[1]), options.workers[0])}
            if name != BARE
            else {}
        )
        for against, base in bases.items():
            row[against] = statistics.median(a / b for a, b in zip(values, rates[base], strict=True))
        rows.append(row)
    return rows


def _line(row: dict[str, Any]) -> str:
    text = f"{row['name']:<20} {row['median']:>9,.0f} tok/s ({row['low']:,.0f}-{row['high']:,.0f})"
    return text + "".join(f"   {row[key]:.1%} {key}" for key in ("of bare", "of one worker") if key in row)
