"""Changes of held-out metrics during a run that continues from a checkpoint trained on other text."""

from dataclasses import dataclass
from pathlib import Path

from pretrain.common.records import read_records


@dataclass(frozen=True)
class Gain:
    """The change of one metric.

    Attributes:
        name: the metric's name, and the text on which it is measured.
        unit: "nats" for a loss (lower is better), or "accuracy" (higher is better).
    """

    name: str
    before: float
    after: float
    unit: str

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The cells of a table row: name, before, after, change."""
        change = self.after - self.before
        change_text = f"{change:+.3f} ({change / self.before:+.1%})" if self.before else ""
        return f"{self.name}, {self.unit}", f"{self.before:.3f}", f"{self.after:.3f}", change_text


def gains(run_dir: Path) -> list[Gain]:
    """Return the changes from an evaluation before the first step to the last one; [] if there is no such evaluation.

    Raises `InputError` if the run's records are damaged.
    """
    evaluations = [record for record in read_records(run_dir) if record.get("split") == "validation"]
    changes = []
    if len(evaluations) > 1 and evaluations[0].get("step") == 0:
        first, last = evaluations[0], evaluations[-1]
        for text, prefix in (("new text", ""), ("general text", "general_")):
            for name, label, unit in (("mlm_loss", "held-out MLM loss", "nats"), ("mlm_accuracy", "MLM", "accuracy")):
                before, after = first.get(prefix + name), last.get(prefix + name)
                if before is not None and after is not None:
                    changes.append(Gain(f"{text}: {label}", before, after, unit))
    return changes


def gain_lines(run_dir: Path) -> list[str]:
    """Return the gains as lines for the terminal."""
    rows = [gain.cells for gain in gains(run_dir)]
    width = max((len(name) for name, *_ in rows), default=0)
    return [f"{name:<{width}}  {before} -> {after}  {change}".rstrip() for name, before, after, change in rows]
