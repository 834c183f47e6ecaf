"""Mutation testing of twelve components: `python -m tests.bench.mutants` changes one operator or number at a time.

A mutant is killed if a test in its component's folder fails, or the tests take three times as long. The sample
depends only on the seed and the code. `--again FILE` repeats the mutants of an earlier result on the current code.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {
    "batches": "pretrain/batches",
    "model": "pretrain/model",
    "training": "pretrain/training",
    "checkpoint": "pretrain/checkpoint",
    "tasks": "finetune/tasks",
    "workers": "cluster/workers",
    "run": "pretrain/run",
    "storage": "pretrain/storage",
    "reporting": "pretrain/reporting",
    "scores": "finetune/scores",
    "experiments": "finetune/experiments",
    "workflows": "finetune/workflows",
}
SLOWER = 3  # a mutant is killed if the tests take this many times as long as without a mutant
_SPARE_SECONDS = 60
_SWAPS: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
# Files that run only on a GPU: Triton kernels and their launches.
_ON_GPU = re.compile(r"kernels/(fused|triton|flash)\w*\.py$")


class Mutant(NamedTuple):
    """A changed expression in a file: bytes `start` to `end` are replaced by `text`."""

    room: str
    file: str
    line: int
    start: int
    end: int
    before: str
    text: str


def mutants(room: str, file: str) -> Iterator[Mutant]:
    """Yield all mutants of a file, in order. Annotations, strings and error messages are not changed."""
    source = (ROOT / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _expressions(ast.parse(source)):
        if (changed := _changed(node)) is not None:
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
            text = f"({ast.unparse(changed)})"
            yield Mutant(room, file, node.lineno, start, end, ast.unparse(node), text)


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions in `node`, except where a change has no effect or no position in the source."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.JoinedStr | ast.Raise | ast.Assert) or not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.expr):
                yield child
            yield from _expressions(child)


def _changed(node: ast.expr) -> ast.expr | None:
    """Return the expression with its operator swapped, plus one, or without `not`; None if there is no such change."""
    new: Any = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in _SWAPS:
        new.ops[0] = _SWAPS[type(new.ops[0])]()
    elif isinstance(new, ast.BinOp) and type(new.op) in _SWAPS and not isinstance(new.left, ast.JoinedStr):
        if any(
            isinstance(side, ast.Constant) and not isinstance(side.value, int | float) for side in (new.left, new.right)
        ):
            return None
        new.op = _SWAPS[type(new.op)]()
    elif isinstance(new, ast.BoolOp):
        new.op = _SWAPS[type(new.op)]()
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        new = new.operand
    elif isinstance(new, ast.Constant) and type(new.value) is bool:
        new.value = not new.value
    elif isinstance(new, ast.Constant) and type(new.value) is int:
        new.value += 1
    else:
        return None
    return new


def sample(per_room: int, seed: int, rooms: list[str]) -> list[Mutant]:
    """Return a sample with the same number of mutants from each component, interleaved."""
    chosen: list[list[Mutant]] = []
    for room in rooms:
        files = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / ROOMS[room]).rglob("*.py"))
        found = [one for file in files if not _ON_GPU.search(file) for one in mutants(room, file)]
        chosen.append(random.Random(f"{seed} {room}").sample(found, per_room))
    return [one for ones in zip(*chosen, strict=True) for one in ones]


def again(results: Path, rooms: list[str]) -> list[tuple[Mutant, str]]:
    """Return the mutants of an earlier result in the current code (nearest equal expression), and their killers."""
    chosen = []
    for row in map(json.loads, results.read_text(encoding="utf-8").splitlines()):
        if row["room"] not in rooms or not (ROOT / row["file"]).is_file():
            continue
        same = [
            one for one in mutants(row["room"], row["file"]) if (one.before, one.text) == (row["before"], row["text"])
        ]
        if same:
            chosen.append((min(same, key=lambda one: abs(one.start - row["start"])), row["by"]))
    return chosen


def copy_tree(folder: Path) -> None:
    """Copy the tracked files of the working tree into `folder`."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())


def run_tests(folder: Path, tests: list[str], limit: float | None) -> tuple[bool, str]:
    """Return whether all of these test files pass in the copy within `limit` seconds, and the first failure."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            output = process.communicate(timeout=limit)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return False, "time"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return process.returncode in (0, 5), failed[1] if failed else "collection"


def order_tests(folder: Path, mutant: Mutant, killer: str, near: bool) -> list[str]:
    """Return the test files of the mutant's component: its earlier killer, files that name its module, then others.

    With `near`, the others are omitted if some files name its module or its package.
    """
    package, _, module = mutant.file.removesuffix(".py").replace("/", ".").rpartition(".")
    names = (rf"{re.escape(package)}(\.| import .*\b){module}\b", rf"{re.escape(package)}\b")
    files = {one: one.read_text() for one in sorted((folder / "tests" / mutant.room).glob("test_*.py"))}
    rank = {file: [not re.search(name, text) for name in names] for file, text in files.items()}
    first = folder / killer.split("::")[0]
    chosen = [one for one in files if one == first or not all(rank[one])] if near else []
    return [
        one.relative_to(folder).as_posix() for one in sorted(chosen or files, key=lambda one: (one != first, rank[one]))
    ]


def main() -> None:
    """Sample mutants, run tests, write a line of JSON for each mutant, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a line of JSON for each mutant; mutants in it are not repeated")
    parser.add_argument("--per-room", type=int, default=10)
    parser.add_argument("--seed", type=int, default=20261128)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--again", type=Path, metavar="FILE", help="repeat the mutants of an earlier result")
    parser.add_argument("--near", action="store_true", help="run only test files that name the module or its package")
    parser.add_argument("--limit", type=float, help="seconds after which a mutant counts as killed, not measured")
    options = parser.parse_args()
    if options.again:
        chosen = again(options.again, options.rooms)
    else:
        chosen = [(one, "") for one in sample(options.per_room, options.seed, options.rooms)]
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    seen = {(row["file"], row["start"], row["text"]) for row in done}
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder, limits = Path(name), dict[str, float]()
        copy_tree(folder)
        for mutant, killer in chosen:
            if (mutant.file, mutant.start, mutant.text) in seen:
                continue
            if mutant.room not in limits:
                limits[mutant.room] = options.limit or time_without_change(folder, mutant.room)
            row = run(folder, mutant, killer, limits[mutant.room], options.near)
            done.append(row)
            with options.out.open("a") as file:
                file.write(f"{json.dumps(row)}\n")
    for room in options.rooms:
        results = [row["killed"] for row in done if row["room"] == room]
        print(f"{room:12} {sum(results):3} of {len(results):3} killed")


def time_without_change(folder: Path, room: str) -> float:
    """Return the seconds after which a mutant counts as killed."""
    began = time.monotonic()
    passes, failed = run_tests(folder, [f"tests/{room}"], None)
    assert passes, f"{failed} fails without a change"
    return SLOWER * (time.monotonic() - began) + _SPARE_SECONDS


def run(folder: Path, mutant: Mutant, killer: str, limit: float, near: bool) -> dict[str, Any]:
    """Test the copy with this change, revert the change, and return the result."""
    file, began = folder / mutant.file, time.monotonic()
    source = file.read_bytes()
    file.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
    try:
        passes, by = run_tests(folder, order_tests(folder, mutant, killer, near), limit)
    finally:
        file.write_bytes(source)
    return {
        **mutant._asdict(),
        "killed": not passes,
        "by": "" if passes else by,
        "seconds": round(time.monotonic() - began),
    }


if __name__ == "__main__":
    main()
