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
"""Kinds of heads: sequence predicts once per window, tokens and spans at each query position. The layers before the
output layer depend on the family (`TaskHead`)."""

Objective = Literal["classes", "labels", "value", "span"]
"""The loss at each of the R query positions, from C outputs; losses are weighted and summed:

    classes  cross-entropy in nats; labels int64 [R], or weighted soft labels float32 [R, C]
    labels   binary cross-entropy, mean over labels; labels float32 [R, C]: the weight of each true label, else 0
    value    squared error; labels float32 [R], one output
    span     mean of two cross-entropies over the positions of a window, of the start and of the end; labels uint8
             [R, 2]: 1 at the start (column 0) and the end, else 0. A window has the weight of its first position.

With the sequence head, the logits of an example's windows are averaged first. The example's weight is the sum of
its windows' weights.
"""


@dataclass(frozen=True)
class Windows:
    """Examples as the model sees them: F windows, concatenated to T tokens, special tokens included.

    An example has one or more windows. They are adjacent and in order.
    """

    ids: np.ndarray  # int32 [T]
    types: np.ndarray  # uint8 [T], token types: 0 in the first segment, 1 in the second
    starts: np.ndarray  # int64 [F + 1], index of each window's first token, and finally T
    examples: np.ndarray  # int64 [F], ascending: index of the example that each window belongs to
    queries: np.ndarray  # int64 [R], ascending: query positions, the tokens whose hidden states the head sees
    labels: np.ndarray  # [R] or [R, C], see `Objective`; zeros if there are no labels
    weights: np.ndarray  # float32 [R], weight of each query position in the loss
    extra: dict[str, np.ndarray]  # additional arrays that `decode` needs

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def training_examples(self) -> int:
        """Number of examples as training counts them: `examples_per_step` and `epochs` refer to these."""
        return int(self.examples.max(initial=-1)) + 1

    def digest(self, label_names: Sequence[str]) -> str:
        """Return the SHA-256 of the training input: tokens, labels, weights and the names of the labels."""
        sha256 = hashlib.sha256("\n".join(label_names).encode())
        for array in (self.ids, self.starts, self.examples, self.queries, self.labels, self.weights):
            sha256.update(np.ascontiguousarray(array).data)
        return sha256.hexdigest()


def data_digest(label_names: Sequence[str], training: Windows, held_out: Mapping[str, Windows]) -> str:
    """Return the SHA-256 of the training data and of all scored data. Only runs with equal digests are comparable."""
    sha256 = hashlib.sha256(training.digest(label_names).encode())
    for name, windows in held_out.items():
        sha256.update(f"{name}\0{windows.digest(label_names)}".encode())
    return sha256.hexdigest()


E = TypeVar("E")
Predictions = Sequence[Mapping[str, Any]]


class Task(ABC, Generic[E]):
    """Turns labeled examples into windows for the model, and logits into predictions and official scores.

    Each task defines its type of example, E. Every error in a user's file is an `InputError` with the file, the
    line or record, what was found and what to do.

    Args:
        settings: the task's section of the config.
        state: return value of `state()` of the trained model; None before training.
    """

    kind: ClassVar[str]  # name of the task's section in the config, such as classification
    settings_type: ClassVar[type[Section]]  # pydantic model of that section
    head: Head
    objective: Objective
    metric: str  # name of the score that selects the best checkpoint; higher is better
    outputs: int  # number C of outputs of the output layer
    labels: tuple[str, ...] = ()  # names of the outputs in order; () if they have no names
    columns: Mapping[str, str] = MappingProxyType({})  # {key of `record`: its column name in files}
    positive: str = ""  # positive class, for the f1 of two classes; "" if there is no f1
    summary: str  # phrase that says what a model of this task does, such as "Finds named entities"
    max_windows: int = 1  # maximum number of windows of a training example
    fold: tuple[int, int] | None = None  # (k, K): fold k of K, counted from 1, is not trained on but scored
    sample: str | dict[str, str]  # example of an input, for the model card; its keys are fields such as text, pair
    settings: Any

    @abstractmethod
    def __init__(self, settings: Any, state: Mapping[str, Any] | None = None) -> None: ...

    # ------------------------------------------------------------ reading files

    @abstractmethod
    def read_train(self) -> list[E]:
        """Return the training set. It defines the labels unless the settings do."""

    @abstractmethod
    def read_held_out(self) -> dict[str, list[E]]:
        """Return the labeled sets to score on, by name; the first selects the best checkpoint. {} if there are none."""

    @abstractmethod
    def read_test(self) -> dict[str, list[E]]:
        """Return the sets to predict after training, by name, labeled or not. {} if there are none."""

    @abstractmethod
    def read_file(self, path: str, *, labeled: bool = True) -> list[E]:
        """Return the examples of another file, in the format that its suffix and the settings define.

        With `labeled` false (for `predict`), labels may be missing, and a `.txt` may have one example per line.
        If true, records without a label are left out, and their number is logged.
        """

    @abstractmethod
    def example(self, record: Mapping[str, Any] | str, where: str) -> E:
        """Return an unlabeled example from a JSON object or plain text; `where` is its location, for messages."""

    def with_context(self, examples: Sequence[E], *, is_end_of_input: bool) -> tuple[list[E], list[E]]:
        """If the task uses context, add adjacent examples as context to unlabeled examples, given in document order.

        Returns:
            (complete examples, examples that need later ones as context). With `is_end_of_input`, all are complete.
        """
        return list(examples), []

    @abstractmethod
    def is_labeled(self, examples: Sequence[E]) -> bool:
        """Return whether the examples have labels, so that predictions can be scored."""

    @abstractmethod
    def record(self, example: E) -> dict[str, Any]:
        """Return the example's entry in a file of predictions: its id, its text, and its label, if any, as "gold"."""

    def unused_columns(self, example: E) -> Mapping[str, Any]:
        """Return the columns of the example's file that the task does not use; they are copied to the predictions."""
        return {}

    # ------------------------------------------------------------ cross-validation

    def training_set(self) -> list[E]:
        """Return the training set without the scored fold."""
        return self._select(in_fold=False)

    def test_sets(self) -> dict[str, list[E]]:
        """Return the scored fold as the set "fold", then the sets of `read_test`."""
        return {**({"fold": self._select(in_fold=True)} if self.fold else {}), **self.read_test()}

    def folds(self, examples: Sequence[E], count: int) -> list[int]:
        """Return the fold index of each example, stratified by class; equal contexts or inputs are in the same fold."""
        records = [self.record(example) for example in examples]
        golds = (record.get("gold") for record in records)
        classes = [{gold} if isinstance(gold, str) else set(gold) if isinstance(gold, list) else () for gold in golds]
        texts = [str(record.get("context", [record.get("text"), record.get("pair")])) for record in records]
        return splits.folds(texts, classes, count)

    def _select(self, *, in_fold: bool) -> list[E]:
        """Return the training examples inside or outside the scored fold."""
        examples = self.read_train()
        if self.fold is None:
            return examples
        number, count = self.fold
        folds = self.folds(examples, count)
        selected = [example for example, fold in zip(examples, folds, strict=True) if (fold == number - 1) == in_fold]
        if not selected:
            raise InputError(f"fold: {number}/{count} of {len(examples)} training examples is empty. Use fewer folds.")
        return selected

    # ------------------------------------------------------------ the model's input and output

    def check(self, encoder: TextEncoder) -> None:
        """Raise `InputError` if the settings do not fit the encoder's windows; called before `windows`."""
        return None

    @abstractmethod
    def windows(self, examples: Sequence[E], encoder: TextEncoder, *, training: bool) -> Windows:
        """Cut `examples` into windows of at most `encoder.max_length` tokens, with their labels if they have any."""

    @abstractmethod
    def decode(self, examples: Sequence[E], windows: Windows, logits: np.ndarray) -> list[dict[str, Any]]:
        """Return one JSON-ready prediction per example, from the logits of the query positions, float32 [R, C]."""

    def scorer_files(self, examples: Sequence[E], predictions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return the predictions in the formats of official scorers, {file name suffix: content}; {} without any."""
        return {}

    def initial_prediction(self, examples: Sequence[E]) -> float:
        """Return the initial output bias for the objective `value`, such as the mean of the values of `examples`."""
        return 0.0

    # ------------------------------------------------------------ scores

    def set_threshold(self, value: float) -> None:
        """Replace the threshold from training: the minimum probability of a predicted label."""
        raise InputError("threshold: only supported for multi_label, or for two classes with classification.positive.")

    @property
    def tunes(self) -> bool:
        """True if `tune` sets anything."""
        return False

    def tune(self, examples: Sequence[E], windows: Windows, logits: np.ndarray) -> None:
        """Tune values that `state` returns, such as a threshold, on the dev set; arguments as in `decode`."""
        return None

    @abstractmethod
    def score(self, examples: Sequence[E], predictions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the official metrics, as fractions of 1; `metric` is one of them."""

    def calibration(self, examples: Sequence[E], predictions: Predictions) -> dict[str, float]:
        """Return calibration metrics, reported next to `score` at the end of a run; {} without probabilities."""
        return {}

    def temperature(self, examples: Sequence[E], windows: Windows, logits: np.ndarray) -> float:
        """Return the temperature (divisor of the logits) fitted on the dev set, or 1; arguments as in `decode`."""
        return 1.0

    def interval(self, examples: Sequence[E], predictions: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
        """Return the 95 % confidence interval of `metric`; None if the task has none."""
        return None

    def details(self, examples: Sequence[E], predictions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return details for the model card, as JSON values: a confusion matrix, scores per type."""
        return {}

    def result_remarks(self, details: Mapping[str, Any]) -> list[str]:
        """Return warnings about the predictions on one set, given its `details`; each has one or two sentences."""
        return []

    def state(self) -> dict[str, Any]:
        """Return what is saved with a trained model besides the settings, as JSON values: labels, thresholds."""
        return {}

    # ------------------------------------------------------------ descriptions

    @property
    def input_fields(self) -> tuple[str, ...]:
        """Fields of a record; `predict` has an option for each."""
        return ("text",) if isinstance(self.sample, str) else tuple(self.sample)

    def origin(self, name: str) -> str:
        """Return where the set `name` (train, dev, test or fold) comes from; "" if the config does not say."""
        return str(getattr(self.settings, name, ""))
