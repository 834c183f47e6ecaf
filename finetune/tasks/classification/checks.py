"""One-line warnings about labeled data that is valid but suspicious."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from finetune.tasks.datasets.labels import Label
from finetune.tasks.datasets.table import Table, listing
from pretrain.common.wording import counted

_MIN_EXAMPLES = 5  # minimum number of a class's examples for a warning that it is never predicted
_MAX_LISTED = 5  # maximum number of lines or labels listed in a message
_ADVICE = (
    "Train longer (training.epochs) or with another training.learning_rate; if one class is frequent, set "
    "classification.class_weights: balanced."
)


def rare_label_warnings(names: Iterable[str], labels: Sequence[Label | None], source: str) -> Iterator[str]:
    """Yield warnings about labels with no training example, and about labels with only one.

    Args:
        names: all labels.
        labels: the label, or the set of labels, of each training example.
        source: name of the file or data set, for messages.
    """
    counts = Counter(name for label in labels for name in (label if isinstance(label, tuple) else (label,)))
    names = list(names)
    for count, problem in ((0, "no training example"), (1, "only one training example")):
        if rare := [repr(name) for name in names if counts[name] == count]:
            subject = "label has" if len(rare) == 1 else "labels have"
            yield f"{source}: {len(rare)} {subject} {problem}: {listing(rare)}. Add examples, or remove such labels."


def empty_text_warnings(table: Table) -> Iterator[str]:
    """Yield a warning if a cell of the columns text and pair is empty or blank."""
    columns = [table.columns[name] for name in ("text", "pair") if name in table.columns]
    indexed_cells = enumerate(zip(*columns, strict=True))
    # Cells that are not strings are rejected elsewhere.
    rows = [row for row, cells in indexed_cells if any(isinstance(cell, str) and not cell.strip() for cell in cells)]
    if not rows:
        return
    row_noun = table.separator.strip(": ") or "line"  # what messages call a row of the table: line or row
    numbers = ", ".join(f"{table.numbers[row]:,}" for row in rows[:_MAX_LISTED]) + ", ..." * (len(rows) > _MAX_LISTED)
    row_list = f"{row_noun}{'s' * (len(rows) > 1)} {numbers}"
    yield (
        f"{table.source}: {len(rows):,} of {counted(len(table), 'example')} with an empty text: {row_list}. "
        "Fill them in, or remove them."
    )


def never_predicted_warnings(
    labels: Sequence[str], counts: Sequence[Sequence[int]], training_counts: Mapping[str, int], threshold: float = 0.5
) -> Iterator[str]:
    """Yield warnings, with causes and advice, if the model predicts only one class, or never predicts a frequent class.

    Args:
        counts: the confusion matrix: `counts[true][predicted]` is a number of examples.
        training_counts: number of training examples of each class; {} if unknown.
        threshold: minimum probability to predict the positive class, if there are two classes.
    """
    advice = _ADVICE if threshold == 0.5 else f"The decision threshold is {threshold:g}; try another."
    totals = {name: sum(row) for name, row in zip(labels, counts, strict=True)}
    predicted = [name for name, column in zip(labels, zip(*counts, strict=True), strict=True) if any(column)]
    if len(predicted) == 1 and sum(map(bool, totals.values())) > 1:
        yield f"the model predicts {predicted[0]!r} for every example. {advice}"
    names_by_cause: dict[str, list[str]] = {}
    for name in [name for name, total in totals.items() if total and name not in predicted]:
        if training_counts and not training_counts.get(name):
            names_by_cause.setdefault(": the training data has no such examples. Add some.", []).append(name)
        elif totals[name] >= _MIN_EXAMPLES and training_counts and training_counts[name] < _MIN_EXAMPLES:
            cause = f": only {counted(training_counts[name], 'training example')} of each. Add some."
            names_by_cause.setdefault(cause, []).append(name)
        elif totals[name] >= _MIN_EXAMPLES and len(predicted) > 1:
            names_by_cause.setdefault(f". {advice}", []).append(name)
    for cause, names in names_by_cause.items():
        listed = ", ".join(map(repr, names[:_MAX_LISTED])) + ", ..." * (len(names) > _MAX_LISTED)
        yield f"the model never predicts {listed} ({counted(sum(map(totals.__getitem__, names)), 'example')}){cause}"
