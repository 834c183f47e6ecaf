"""The interface of every kind of task: examples, windows for the model, predictions and scores.

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
"""sequence: dense layer, activation, output layer at a window's first token. tokens, spans: output layer at queries."""

Objective = Literal["classes", "labels", "value", "span"]
"""The loss, summed over rows (query positions) times their weights:

    classes  cross-entropy in nats; labels int64 [R], or weighted soft labels float32 [R, C]
    labels   binary cross-entropy of each label, mean over labels; labels float32 [R, C]: weight of a true label, else 0
    value    squared error; labels float32 [R], one output
    span     mean of the cross-entropies of start and end over the rows of a window; labels uint8 [R, 2] with one
             1 per window and column. The weight of a window is the weight of its first row.

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
    extra: dict[str, np.ndarray]  # further arrays that the task needs for decoding

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def training_examples(self) -> int:
        """Number of examples as training counts them: `examples_per_step` and `epochs` refer to these."""
        return int(self.examples.max(initial=-1)) + 1

    def digest(self, names: Sequence[str]) -> str:
        """Return the SHA-256 of the training input: tokens, labels with their `names`, weights."""
        sha256 = hashlib.sha256("\n".join(names).encode())
        for part in (self.ids, self.starts, self.examples, self.queries, self.labels, self.weights):
            sha256.update(np.ascontiguousarray(part).data)
        return sha256.hexdigest()


def data_digest(names: Sequence[str], training: Windows, held_out: Mapping[str, Windows]) -> str:
    """Return the SHA-256 of the training data and of all scored data. Only runs with equal digests are compared."""
    sha256 = hashlib.sha256(training.digest(names).encode())
    for name, windows in held_out.items():
        sha256.update(f"{name}\0{windows.digest(names)}".encode())
    return sha256.hexdigest()


E = TypeVar("E")
Predictions = Sequence[Mapping[str, Any]]


class Task(ABC, Generic[E]):
    """Turns labeled examples into windows for the model, and logits into predictions and official scores.

    Each task defines its type of example, E. Every error in a user's file is an `InputError` with the file, the
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
    outputs: int  # width C of the output layer
    labels: tuple[str, ...] = ()  # names of the outputs in order; () if they have no names
    columns: Mapping[str, str] = MappingProxyType({})  # key of `record` -> its column in files
    positive: str = ""  # with two classes: the class whose f1 is computed; "" for none
    summary: str  # phrase that says what a model of this task does, such as "Finds named entities"
    max_windows: int = 1  # of one example in training
    fold: tuple[int, int] | None = None  # (number from 1, K): the part of the training set that is scored instead
    sample: str | dict[str, str]  # input of `example`: a string, or a dict with text, pair, question, context
    settings: Any

    @abstractmethod
    def __init__(self, settings: Any, state: Mapping[str, Any] | None = None) -> None: ...

    # ------------------------------------------------------------ files in

    @abstractmethod
    def read_train(self) -> list[E]:
        """Return the training set. It defines the labels unless the settings do."""

    @abstractmethod
    def read_held_out(self) -> dict[str, list[E]]:
        """Return the labeled sets to score on, by name; the first one chooses the checkpoint. {} if there are none."""

    @abstractmethod
    def read_test(self) -> dict[str, list[E]]:
        """Return the sets to predict at the end, by name, labeled or not. {} if there are none."""

    @abstractmethod
    def read_file(self, path: str, *, labeled: bool = True) -> list[E]:
        """Return the examples of another file, in the format that its suffix and the settings define.

        With `labeled` false (for `predict`), labels may be missing, and a `.txt` may have one example per line.
        Otherwise, records without a label are left out, and their number is logged.
        """

    @abstractmethod
    def example(self, record: Mapping[str, Any] | str, where: str) -> E:
        """Return an unlabeled example from a JSON object or plain text; `where` is its location, for messages."""

    def with_context(self, examples: Sequence[E], *, ended: bool) -> tuple[list[E], list[E]]:
        """Add to unlabeled examples, given in order, their neighbors as context if the task uses them.

        Returns:
            (complete examples, examples whose context may still grow). With `ended` (no more input), all are complete.
        """
        return list(examples), []

    @abstractmethod
    def is_labeled(self, examples: Sequence[E]) -> bool:
        """Return whether the examples have labels, so that predictions can be scored."""

    @abstractmethod
    def record(self, example: E) -> dict[str, Any]:
        """Return the example's entry in a file of predictions: its id, its text, and its label, if any, as "gold"."""

    def others(self, example: E) -> Mapping[str, Any]:
        """Return the other columns of the example's row in a file; they are copied to the predictions unchanged."""
        return {}

    # ------------------------------------------------------------ cross-validation

    def training_set(self) -> list[E]:
        """Return `read_train` without the fold."""
        return self._part(in_fold=False)

    def test_sets(self) -> dict[str, list[E]]:
        """Return the fold as the set "fold", then the sets of `read_test`."""
        return {**({"fold": self._part(in_fold=True)} if self.fold else {}), **self.read_test()}

    def folds(self, examples: Sequence[E], count: int) -> list[int]:
        """Return the fold of each example, from 0, stratified by class; equal contexts or inputs share a fold."""
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
        part = [example for example, fold in zip(examples, numbers, strict=True) if (fold == number - 1) == in_fold]
        if not part:
            raise InputError(f"fold: {number}/{count} of {len(examples)} training examples is empty. Use fewer folds.")
        return part

    # ------------------------------------------------------------ the model's input and output

    def check(self, encoder: TextEncoder) -> None:
        """Raise `InputError` if the settings do not fit the encoder's windows, before any are cut."""
        return None

    @abstractmethod
    def windows(self, examples: Sequence[E], encoder: TextEncoder, *, training: bool) -> Windows:
        """Cut `examples` into windows of at most `encoder.max_length` tokens, with their labels if they have any."""

    @abstractmethod
    def decode(self, examples: Sequence[E], windows: Windows, logits: np.ndarray) -> list[dict[str, Any]]:
        """Return one JSON-ready prediction per example, from the logits of the query positions, float32 [R, C]."""

    def scorer_files(self, examples: Sequence[E], predictions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return the predictions in the formats of official scorers, {file name suffix: content}; {} if none exist."""
        return {}

    def first_value(self, examples: Sequence[E]) -> float:
        """For values: return the model's prediction before training on `examples`, such as their mean."""
        return 0.0

    # ------------------------------------------------------------ scores

    def set_threshold(self, value: float) -> None:
        """Replace the threshold from training: the minimum probability of a predicted label. `InputError` if unused."""
        raise InputError("threshold: is for several labels, or for two classes with classification.positive.")

    @property
    def tunes(self) -> bool:
        """True if `tune` chooses anything."""
        return False

    def tune(self, examples: Sequence[E], windows: Windows, logits: np.ndarray) -> None:
        """Choose, on the dev set, values that `state` then keeps, such as a threshold; arguments as in `decode`."""
        return None

    @abstractmethod
    def score(self, examples: Sequence[E], predictions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the official metrics, as fractions of 1; `metric` is one of them."""

    def calibration(self, examples: Sequence[E], predictions: Predictions) -> dict[str, float]:
        """Return calibration metrics, reported next to `score` at the end of a run; {} without probabilities."""
        return {}

    def temperature(self, examples: Sequence[E], windows: Windows, logits: np.ndarray) -> float:
        """Return the divisor of the logits that calibrates them on the dev set, or 1; arguments as in `decode`."""
        return 1.0

    def interval(self, examples: Sequence[E], predictions: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
        """Return the 95 % confidence interval of `metric`; None if the task has none."""
        return None

    def details(self, examples: Sequence[E], predictions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return more for the model card, ready for JSON: a confusion matrix, scores per type."""
        return {}

    def result_remarks(self, details: Mapping[str, Any]) -> list[str]:
        """Return warnings about the predictions on one set, from its `details`; a sentence or two each."""
        return []

    def state(self) -> dict[str, Any]:
        """Return the state that a trained model keeps besides the settings, ready for JSON: labels, thresholds."""
        return {}

    # ------------------------------------------------------------ descriptions

    @property
    def input_fields(self) -> tuple[str, ...]:
        """Fields of a record; `predict` has an option for each."""
        return ("text",) if isinstance(self.sample, str) else tuple(self.sample)

    def origin(self, name: str) -> str:
        """Return the source of the set `name` (train, dev, test or fold); "" if the config names none."""
        return str(getattr(self.settings, name, ""))
