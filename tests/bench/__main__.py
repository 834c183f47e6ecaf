"""`./launch.sh bench NAME`: benchmarks of bertrain against other software, run from a clone."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from pretrain.common.children import unwind_on_sigterm
from pretrain.common.commands import program, run_for_exit_code
from pretrain.common.errors import InputError

BENCHMARKS = {
    "step": ("tests.bench.step", "useful tokens/s of a training step against transformers"),
    "prepare": ("tests.bench.prepare", "MB/s from raw text to token shards against tokenizers and datasets"),
    "finetune": ("tests.bench.finetuning", "fine-tuning against transformers"),
    "workers": ("tests.bench.workers", "cost of Ray, DeepSpeed, tracking and a second worker"),
    "amx": ("tests.bench.amx", "bf16 matmuls and attention on this CPU, and the time oneDNN takes to generate kernels"),
    "gpu": ("tests.bench.gpu", "training steps on this machine's GPU, and the limit of --dry-run --on"),
    "scale": ("tests.bench.scale", "work of one rank for a step, by the number of ranks, simulated"),
    "stream": ("tests.bench.stream", "loaders on several machines that stream a synthetic corpus of 1 TB"),
    "speedrun": ("tests.bench.speedrun.command", "what a config learns per FLOP on a fixed text"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_for_exit_code(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in BENCHMARKS:
        with unwind_on_sigterm():
            return importlib.import_module(BENCHMARKS[arguments[0]][0]).main(arguments[1:]) or 0
    if arguments and not arguments[0].startswith("-"):
        raise InputError(f"bench: {arguments[0]!r} is not a benchmark; choose from {', '.join(BENCHMARKS)}.")
    names = "\n".join(f"  {name:10}  {purpose}" for name, (_, purpose) in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog=f"{program()} bench",
        description="Measure speed and quality against other software.",
        epilog=f"benchmarks:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="one of the benchmarks below; each takes --help")
    parser.parse_args(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
