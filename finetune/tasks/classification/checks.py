"""What is suspicious in labeled texts without being wrong, as warnings of one line each."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from finetune.tasks.datasets.labels import Label
from finetune.tasks.datasets.table import Table, listed
from pretrain.common.wording import counted

_SEVERAL = 5  # examples of a class that is never predicted, for a warning
_MOST_PLACES = 5  # of empty texts, in a message


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


def never_predicted(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> Iterator[str]:
    """A warning if the model predicts the same class for every example, or never a class that has several.

    Args:
        labels: the names of the C classes.
        counts: examples [true][predicted], [C][C].
    """
    predicted = {number for number in range(len(labels)) if any(row[number] for row in counts)}
    missed = [number for number, row in enumerate(counts) if number not in predicted and sum(row) >= _SEVERAL]
    if len(predicted) == 1 and sum(any(row) for row in counts) > 1:
        what = f"predicts {labels[predicted.pop()]!r} for every example"
    elif missed:
        names = ", ".join(repr(labels[number]) for number in missed[:_MOST_PLACES]) + ", ..." * (
            len(missed) > _MOST_PLACES
        )
        what = f"never predicts {names}, of which there are {sum(sum(counts[number]) for number in missed):,} examples"
    else:
        return
    yield (
        f"the model {what}. Train longer (training.epochs) or with another training.learning_rate; if one class is "
        "frequent, set classification.class_weights: balanced."
    )
