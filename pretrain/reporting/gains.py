"""What a run that continues from a checkpoint gained and lost: losses and scores before its first step and after."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.common.records import read_records
from pretrain.common.run_files import COMPARED


@dataclass(frozen=True)
class Gain:
    """One figure before and after.

    Attributes:
        what: what was measured.
        before, after: the values, of several runs if there were several.
        unit: "nats" of a loss, which is better when lower; else the name of a score, which is better when higher.
    """

    what: str
    before: tuple[float, ...]
    after: tuple[float, ...]
    unit: str

    @property
    def change(self) -> float:
        """After minus before, of the means."""
        return statistics.fmean(self.after) - statistics.fmean(self.before)

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """(what, before, after, change) as text."""
        unit = self.unit.replace("_", " ")
        change = f"{self.change:+.3f} ({self.change / statistics.fmean(self.before):+.1%})" if self.before[0] else ""
        return f"{self.what}, {unit}", _spread(self.before), _spread(self.after), change


def gains(run_dir: Path) -> list[Gain]:
    """The figures of a run, [] if it was not evaluated before its first step.

    Raises `InputError` if its records are damaged.
    """
    evaluations = [record for record in read_records(run_dir) if record.get("split") == "validation"]
    found = []
    if len(evaluations) > 1 and evaluations[0].get("step") == 0:
        first, last = evaluations[0], evaluations[-1]
        for what, prefix in (("new text", ""), ("general text", "general_")):
            for name, label, unit in (("mlm_loss", "held-out MLM loss", "nats"), ("mlm_accuracy", "MLM", "accuracy")):
                before, after = first.get(prefix + name), last.get(prefix + name)
                if before is not None and after is not None:
                    found.append(Gain(f"{what}: {label}", (before,), (after,), unit))
    path = run_dir / COMPARED
    compared: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    for one in compared:
        what = f"fine-tuning {one['title']}, {one['set']}"
        found.append(Gain(what, tuple(one["before"]), tuple(one["after"]), one["metric"]))
    return found


def gain_lines(run_dir: Path) -> list[str]:
    """The figures as lines for the terminal."""
    rows = [gain.cells for gain in gains(run_dir)]
    wide = max((len(what) for what, *_ in rows), default=0)
    return [f"{what:<{wide}}  {before} -> {after}  {change}".rstrip() for what, before, after, change in rows]


def _spread(values: Sequence[float]) -> str:
    """The mean, with the sample's standard deviation if there are several."""
    mean = f"{statistics.fmean(values):.3f}"
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean
