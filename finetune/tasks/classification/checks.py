"""What is suspicious in labeled texts without being wrong, as warnings of one line each."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from finetune.tasks.datasets.labels import Label
from finetune.tasks.datasets.table import Table, listed
from pretrain.common.wording import counted

_SEVERAL = 5  # examples of a class that is never predicted, for a warning
_MOST_PLACES = 5  # of empty texts, in a message
_ADVICE = (
    "Train longer (training.epochs) or with another training.learning_rate; if one class is frequent, set "
    "classification.class_weights: balanced."
)


def rare_labels(names: Iterable[str], labels: Sequence[Label | None], source: str) -> Iterator[str]:
    """A warning of the labels with no training example, and one of those with a single one.

    Args:
        names: all labels.
        labels: that of each training example, or the set of its labels.
        source: the file or data set.
    """
    counts = Counter(name for label in labels for name in (label if isinstance(label, tuple) else (label,)))
    names = list(names)
    for number, found in ((0, "no training example"), (1, "only one training example")):
        rare = [repr(name) for name in names if counts[name] == number]
        if rare:
            which = "label has" if len(rare) == 1 else "labels have"
            yield f"{source}: {len(rare)} {which} {found}: {listed(rare)}. Add examples, or remove such labels."


def empty_texts(table: Table) -> Iterator[str]:
    """A warning if texts of the table, or second texts, are empty or blank."""
    columns = [table.columns[name] for name in ("text", "pair") if name in table.columns]
    every = enumerate(zip(*columns, strict=True))
    # Cells that are no text are refused elsewhere.
    rows = [row for row, cells in every if any(isinstance(cell, str) and not cell.strip() for cell in cells)]
    if not rows:
        return
    unit = table.place.strip(": ") or "line"
    places = ", ".join(f"{table.places[row]:,}" for row in rows[:_MOST_PLACES]) + ", ..." * (len(rows) > _MOST_PLACES)
    where = f"{unit}{'s' * (len(rows) > 1)} {places}"
    yield (
        f"{table.source}: {len(rows):,} of {counted(len(table), 'example')} with an empty text: {where}. "
        "Fill them in, or remove them."
    )


def never_predicted(
    labels: Sequence[str], counts: Sequence[Sequence[int]], trained: Mapping[str, int]
) -> Iterator[str]:
    """A warning if the model predicts one class for every example, or never a class that has several; with the cause.

    From the examples [true][predicted], [C][C], and those of each class in training if they are known.
    """
    totals = {name: sum(row) for name, row in zip(labels, counts, strict=True)}
    predicted = [name for name, column in zip(labels, zip(*counts, strict=True), strict=True) if any(column)]
    if len(predicted) == 1 and sum(map(bool, totals.values())) > 1:
        yield f"the model predicts {predicted[0]!r} for every example. {_ADVICE}"
    causes: dict[str, list[str]] = {}
    for name in [name for name, total in totals.items() if total and name not in predicted]:
        if trained and not trained.get(name):
            causes.setdefault(": no training example has it. Add some.", []).append(name)
        elif totals[name] >= _SEVERAL and trained and trained[name] < _SEVERAL:
            cause = f": only {counted(trained[name], 'training example')} of each. Add some."
            causes.setdefault(cause, []).append(name)
        elif totals[name] >= _SEVERAL and len(predicted) > 1:
            causes.setdefault(f". {_ADVICE}", []).append(name)
    for cause, names in causes.items():
        shown = ", ".join(map(repr, names[:_MOST_PLACES])) + ", ..." * (len(names) > _MOST_PLACES)
        examples = counted(sum(totals[name] for name in names), "example")
        yield f"the model never predicts {shown} ({examples}){cause}"
