"""`bench checkpoint`: how long a save blocks training, with synchronous and with background writing.

The state is that of a model on one worker. Both ways alternate and write the same files to the same disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from pretrain.bench.baselines import bench_config
from pretrain.checkpoint.saver import Saver
from pretrain.commands import local_path, positive_int, program
from pretrain.common.files import disk_errors
from pretrain.common.wording import aligned
from pretrain.common.worker import Worker
from pretrain.config import PretrainConfig
from pretrain.model.heads import PretrainingModel
from pretrain.training.engine import Engine
from pretrain.training.optim import make_optimizer, parameter_groups
from pretrain.training.session import process_group

_VOCABULARY = 30522


def main(argv: list[str]) -> int:
    """Run the comparison and print a table, or JSON with `--json`."""
    parser = argparse.ArgumentParser(prog=f"{program()} bench checkpoint", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", default="base", help="model size (default: base)")
    parser.add_argument("--zero", type=int, default=1, choices=[0, 1, 2, 3], help="ZeRO stage (default: 1)")
    parser.add_argument("--rounds", type=positive_int, default=5, help="saves of each kind; the median is reported")
    parser.add_argument("--dir", type=local_path, help="folder to write to (default: the temporary folder)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args(argv)
    config = bench_config("unused", options.size, 128, 8)
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"zero_stage": options.zero})})
    place = options.dir or Path(tempfile.gettempdir())
    with disk_errors(place):
        place.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=place)
    with scratch as folder, process_group(Worker()):
        result = measure(config, Path(folder), options.rounds)
    print(json.dumps(result) if options.json else _table(result))
    return 0


def measure(config: PretrainConfig, folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds per round and the size in bytes.

    Returns `plain`: a synchronous save; `held`: how long a background save blocks training; `written`: until the
    background save is on disk.
    """
    engine = _engine(config)
    state = {"step": 0, "shapes": {name: list(shape) for name, shape in engine.shapes.items()}}
    savers = {
        background: Saver(folder, engine.side_group(), keep_last=1, background=background, retry_seconds=0)
        for background in (False, True)
    }
    result: dict[str, Any] = {"plain": [], "held": [], "written": []}
    for number in range(rounds + 1):
        for background, saver in savers.items():
            started = time.perf_counter()
            saver.save(number, engine.fragments(), {**state, "step": number})
            held = time.perf_counter() - started
            saver.wait()
            if number == 0:
                continue  # the first round allocates the memory of the copies
            result["held" if background else "plain"].append(held)
            if background:
                result["written"].append(time.perf_counter() - started)
    result["bytes"] = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    engine.close()
    return result


def _engine(config: PretrainConfig) -> Engine:
    model = PretrainingModel(config.model, _VOCABULARY, True, compile=False)
    return Engine(
        model,
        lambda named: make_optimizer(config.optimizer, parameter_groups(named, config.weight_decay)),
        config.engine,
    )


def _table(result: dict[str, Any]) -> str:
    rows = [("", "median s", "range")]
    labels = {
        "plain": "synchronous save",
        "held": "background save, training blocked",
        "written": "background save, on disk",
    }
    for key, label in labels.items():
        seconds = result[key]
        rows.append((label, f"{statistics.median(seconds):.3f}", f"{min(seconds):.3f}-{max(seconds):.3f}"))
    share = statistics.median(result["held"]) / statistics.median(result["plain"])
    rows.append(("blocked / synchronous", f"{share:.1%}", f"{result['bytes'] / 1e9:.2f} GB"))
    return "\n".join(aligned(rows, (1, 2)))
