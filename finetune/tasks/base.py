"""What every kind of task provides: examples, windows for the model, predictions and scores.

`finetune.tasks.registry` lists the kinds.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np

from finetune.tasks.datasets import splits
from finetune.tasks.datasets.text import TextEncoder
from pretrain.common.errors import InputError
from pretrain.common.sections import Section

Head = Literal["sequence", "tokens", "spans"]
"""sequence: dense, activation, out at the first token of each window. tokens, spans: out at every query position."""

Objective = Literal["classes", "labels", "value", "span"]
"""The loss, summed over rows (query positions) times their weights:

    classes  cross-entropy in nats; labels int64 [R], or float32 [R, C], what each class counts
    labels   binary cross-entropy of each label, mean over labels; labels float32 [R, C], the weight of a true one, or 0
    value    squared error; labels float32 [R], one output
    span     mean of the cross-entropies of start and end over the rows of a window; labels uint8 [R, 2] with one
             1 per window and column. The weight of a window is that of its first row.

With the sequence head, the logits of an example's windows are averaged first. The example's weight is the sum of
its windows' weights.
"""


@dataclass(frozen=True)
class Windows:
    """Examples as the model sees them: F windows of T tokens end to end, special tokens included.

    An example has one or more windows. They are adjacent and in order.
    """

    ids: np.ndarray  # int32 [T]
    types: np.ndarray  # uint8 [T], 0 in the first segment, 1 in the second
    starts: np.ndarray  # int64 [F + 1]
    examples: np.ndarray  # int64 [F], ascending: the example that each window belongs to
    queries: np.ndarray  # int64 [R], ascending: query positions, the tokens whose hidden states the head sees
    labels: np.ndarray  # [R] or [R, C], see `Objective`; zeros if there are no labels
    weights: np.ndarray  # float32 [R], weight of each row in the loss
    extra: dict[str, np.ndarray]  # what the task needs again to decode

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def training_examples(self) -> int:
        """Number of examples as training counts them: `examples_per_step` and `epochs` refer to these."""
        return int(self.examples.max(initial=-1)) + 1

    def digest(self, names: Sequence[str]) -> str:
        """SHA-256 of what training sees: tokens, labels with their `names`, weights."""
        made = hashlib.sha256("\n".join(names).encode())
        for part in (self.ids, self.starts, self.examples, self.queries, self.labels, self.weights):
            made.update(np.ascontiguousarray(part).data)
        return made.hexdigest()


def data_digest(names: Sequence[str], training: Windows, held_out: Mapping[str, Windows]) -> str:
    """SHA-256 of the training data and of all scored data. Runs with different digests are not compared."""
    made = hashlib.sha256(training.digest(names).encode())
    for name, windows in held_out.items():
        made.update(f"{name}\0{windows.digest(names)}".encode())
    return made.hexdigest()


E = TypeVar("E")
Predictions = Sequence[Mapping[str, Any]]


class Task(ABC, Generic[E]):
    """Turns labeled examples into windows for the model, and logits into predictions and official scores.

    An example, E, is a type of the task's own. Every fault in a user's file is an `InputError` with the file, the
    line or record, what was found and what to do.

    Args:
        settings: the task's section of the config.
        state: what `state()` of the trained model returned; None before training.
    """

    kind: ClassVar[str]  # the name of the config's section, such as classification
    settings_type: ClassVar[type[Section]]  # the section itself
    head: Head
    objective: Objective
    metric: str  # the score that chooses the checkpoint; higher is better
    outputs: int  # width C of the head's last layer
    labels: tuple[str, ...] = ()  # names of the outputs in order; () if they have no names
    columns: Mapping[str, str] = MappingProxyType({})  # key of `record` -> the column in files that it is read from
    positive: str = ""  # the class that f1 of two classes is of, if one is named
    summary: str  # what a model of this task does, such as "Finds named entities"
    most_windows: int = 1  # of one example in training
    fold: tuple[int, int] | None = None  # (number from 1, K): the part of the training set that is scored instead
    sample: str | dict[str, str]  # a record that `example` takes: a text, or an object of text, pair, question, context
    settings: Any

    @abstractmethod
    def __init__(self, settings: Any, state: Mapping[str, Any] | None = None) -> None: ...

    # ------------------------------------------------------------ files in

    @abstractmethod
    def read_train(self) -> list[E]:
        """The training set. It defines the labels unless the settings do."""

    @abstractmethod
    def read_held_out(self) -> dict[str, list[E]]:
        """Labeled sets to score on, by name; the first one chooses the checkpoint. {} without any."""

    @abstractmethod
    def read_test(self) -> dict[str, list[E]]:
        """Sets to predict at the end, with labels or without. {} without any."""

    @abstractmethod
    def read_file(self, path: str, *, labeled: bool = True) -> list[E]:
        """The examples of another file, in the format that its suffix and the settings define.

        With `labeled` false (for `predict`), labels may be missing, and a `.txt` may hold one text per line. Else
        records without a label are left out, and counted in the log.
        """

    @abstractmethod
    def example(self, record: Mapping[str, Any] | str, where: str) -> E:
        """An unlabeled example from a JSON object or plain text; `where` is its place, for messages."""

    def with_context(self, examples: Sequence[E], *, ended: bool) -> tuple[list[E], list[E]]:
        """Unlabeled examples in order, each with its neighbors as context if the task uses them.

        Returns:
            (examples that no later record can change, examples that wait for more). None wait once all have `ended`.
        """
        return list(examples), []

    @abstractmethod
    def is_labeled(self, examples: Sequence[E]) -> bool:
        """Whether examples have labels, so that predictions can be scored."""

    @abstractmethod
    def record(self, example: E) -> dict[str, Any]:
        """The example in a file of predictions: its id and text, and its label as "gold" if it has one."""

    def others(self, example: E) -> Mapping[str, Any]:
        """The other columns of the example's row in a file, which predictions give back as they are."""
        return {}

    # ------------------------------------------------------------ cross-validation

    def training_set(self) -> list[E]:
        """`read_train` without the fold."""
        return self._part(in_fold=False)

    def test_sets(self) -> dict[str, list[E]]:
        """`read_test`, after the fold as the set "fold"."""
        return {**({"fold": self._part(in_fold=True)} if self.fold else {}), **self.read_test()}

    def folds(self, examples: Sequence[E], count: int) -> list[int]:
        """The fold of each example, from 0, by class; equal texts, and the questions of a text, are in one."""
        records = [self.record(example) for example in examples]
        golds = (record.get("gold") for record in records)
        classes = [{gold} if isinstance(gold, str) else set(gold) if isinstance(gold, list) else () for gold in golds]
        texts = [str(record.get("context", [record.get("text"), record.get("pair")])) for record in records]
        return splits.folds(texts, classes, count)

    def _part(self, *, in_fold: bool) -> list[E]:
        examples = self.read_train()
        if self.fold is None:
            return examples
        number, count = self.fold
        numbers = self.folds(examples, count)
        part = [example for example, at in zip(examples, numbers, strict=True) if (at == number - 1) == in_fold]
        if not part:
            raise InputError(f"fold: {number}/{count} of {len(examples)} training examples is empty. Use fewer folds.")
        return part

    # ------------------------------------------------------------ the model's input and output

    def check(self, encoder: TextEncoder) -> None:
        """Raise `InputError` if the settings do not fit the encoder's windows, before any are cut."""
        return None

    @abstractmethod
    def windows(self, examples: Sequence[E], encoder: TextEncoder, *, training: bool) -> Windows:
        """`examples` cut to windows of `encoder.max_length` tokens, with their labels if they have any."""

    @abstractmethod
    def decode(self, examples: Sequence[E], windows: Windows, logits: np.ndarray) -> list[dict[str, Any]]:
        """One prediction per example, ready for JSON, from the logits of the query positions, float32 [R, C]."""

    def scorer_files(self, examples: Sequence[E], predictions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """The predictions in the formats of official scorers: suffix of the name -> content. {} if there are none."""
        return {}

    def first_value(self, examples: Sequence[E]) -> float:
        """For values: what a model predicts before training on `examples`, such as their mean."""
        return 0.0

    # ------------------------------------------------------------ scores

    def set_threshold(self, value: float) -> None:
        """Predict a label from this probability on, in place of that of the training; `InputError` if none fits."""
        raise InputError("threshold: is for several labels, or for two classes with classification.positive.")

    @property
    def tunes(self) -> bool:
        """Whether `tune` chooses anything."""
        return False

    def tune(self, examples: Sequence[E], windows: Windows, logits: np.ndarray) -> None:
        """Choose, on the dev set, what `state` then keeps, such as a threshold; arguments as those of `decode`."""
        return None

    @abstractmethod
    def score(self, examples: Sequence[E], predictions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The official metrics, as fractions of 1; `metric` is one of them."""

    def calibration(self, examples: Sequence[E], predictions: Predictions) -> dict[str, float]:
        """How well the probabilities fit, beside `score` at the end of a run; {} without any."""
        return {}

    def temperature(self, examples: Sequence[E], windows: Windows, logits: np.ndarray) -> float:
        """Divisor of the logits that fits the probabilities to the dev set, or 1; arguments as those of `decode`."""
        return 1.0

    def interval(self, examples: Sequence[E], predictions: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
        """The 95 % interval of `metric`, for other examples of the same kind; None if the task has none."""
        return None

    def details(self, examples: Sequence[E], predictions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """More for the model card, ready for JSON: a confusion matrix, scores per type."""
        return {}

    def result_remarks(self, details: Mapping[str, Any]) -> list[str]:
        """What is suspicious in the predictions on one set, from its `details`; a sentence or two each."""
        return []

    def state(self) -> dict[str, Any]:
        """What a trained model keeps besides the settings, ready for JSON: labels, thresholds."""
        return {}

    # ------------------------------------------------------------ for people

    @property
    def input_fields(self) -> tuple[str, ...]:
        """The fields of a record, which are the options of `predict`."""
        return ("text",) if isinstance(self.sample, str) else tuple(self.sample)

    def origin(self, name: str) -> str:
        """Where the set `name` (train, dev, test or fold) comes from; "" if the config names none."""
        return str(getattr(self.settings, name, ""))
