"""What a kind of task must say of itself; `finetune.tasks` has the three there are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from finetune.datasets.text import TextEncoder

Head = Literal["sequence", "tokens", "spans"]
"""sequence: dense, activation, out at each window's first token. tokens, spans: out at every row asked for."""

Objective = Literal["classes", "labels", "value", "span"]
"""What is differentiated, a sum over rows times their weights:

    classes  cross-entropy in nats; labels int64 [R]
    labels   binary cross-entropy of each label, mean over labels; labels float32 [R, C]
    value    squared error; labels float32 [R], one output
    span     mean of the cross-entropies of start and end over the rows of a window; labels uint8 [R, 2] with one
             1 per window and column, and a window's weight is that of its first row
With the sequence head, the logits of an example's windows are averaged first, and its weight is its windows' sum.
"""


@dataclass(frozen=True)
class Windows:
    """Examples as the model sees them: F windows of T tokens end to end, special tokens included.

    An example has one window or more; they lie together, in order.
    """

    ids: np.ndarray  # int32 [T]
    types: np.ndarray  # uint8 [T], 0 in the first segment, 1 in the second
    starts: np.ndarray  # int64 [F + 1]
    examples: np.ndarray  # int64 [F], ascending: the example each window is of
    asked: np.ndarray  # int64 [R], ascending: token rows whose hidden states the head sees
    labels: np.ndarray  # [R] or [R, C], see `Objective`; zeros where there are no labels
    weights: np.ndarray  # float32 [R], how much each row counts in the loss
    extra: dict[str, np.ndarray]  # what the task itself needs again to decode

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def units(self) -> int:
        """Examples, as training counts them."""
        return int(self.examples.max(initial=-1)) + 1

    def digest(self, names: Sequence[str]) -> str:
        """SHA-256 of what is learnt from: tokens, labels with their `names`, weights."""
        made = hashlib.sha256("\n".join(names).encode())
        for part in (self.ids, self.starts, self.examples, self.asked, self.labels, self.weights):
            made.update(np.ascontiguousarray(part).data)
        return made.hexdigest()


def data_digest(names: Sequence[str], training: Windows, held_out: Mapping[str, Windows]) -> str:
    """SHA-256 of what a model is trained and scored on; runs that differ in it are not compared."""
    made = hashlib.sha256(training.digest(names).encode())
    for name, windows in held_out.items():
        made.update(f"{name}\0{windows.digest(names)}".encode())
    return made.hexdigest()


E = TypeVar("E")


class Task(Protocol[E]):
    """Labelled examples in, windows for the model, predictions and official scores out.

    Made from its section of the config, and, for a trained model, from the `state` that was kept with it.
    An example is the task's own type. Everything that is wrong with a file is an `InputError` that says the
    file, the line or record, what was found and what to do.
    """

    kind: str  # the config's section: classification, entities, questions
    head: Head
    objective: Objective
    metric: str  # the score that decides which checkpoint is the best; higher is better

    @property
    def asks(self) -> tuple[str, ...]:
        """What `example` needs of a record, and so the options of `predict`: text, pair, question, context."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the outputs in order of their numbers; () where outputs have no names."""
        ...

    @property
    def outputs(self) -> int:
        """Width C of the head's last layer."""
        ...

    def read_train(self) -> list[E]:
        """The training set; it decides what labels there are unless the settings do."""
        ...

    def read_held_out(self) -> dict[str, list[E]]:
        """Labelled sets to score on, by name; the first one chooses the checkpoint. {} without any."""
        ...

    def read_test(self) -> dict[str, list[E]]:
        """Sets to predict at the end, with labels or without. {} without any."""
        ...

    def read_file(self, path: str, *, labelled: bool = True) -> list[E]:
        """Another file in the form that its suffix and the settings say.

        With `labelled` false (for `predict`) labels may be missing, and `.txt` may hold a text a line. A labelled
        file gives the same examples either way.
        """
        ...

    def example(self, record: Mapping[str, Any] | str, where: str) -> E:
        """An unlabelled example from one JSON object or plain text of the user's; `where` is for messages."""
        ...

    def with_context(self, examples: Sequence[E], *, ended: bool) -> tuple[list[E], list[E]]:
        """Unlabelled examples in the order of their records, as context of each other where they are.

        Returns those that no later record can change, and those that wait for more; none wait where all `ended`.
        """
        ...

    def is_labelled(self, examples: Sequence[E]) -> bool:
        """Whether every example has its label, so that predictions on them can be scored."""
        ...

    def record(self, example: E) -> dict[str, Any]:
        """What a file of predictions says of the example: its id and text, and its label as "gold" if it has one."""
        ...

    def windows(self, examples: Sequence[E], encoder: TextEncoder, *, training: bool) -> Windows:
        """`examples` cut to what the model can see; labels where the examples have them."""
        ...

    def decode(self, examples: Sequence[E], windows: Windows, logits: np.ndarray) -> list[dict[str, Any]]:
        """One JSON-like prediction for each example from the logits, float32 [R, C], of the asked rows."""
        ...

    def scorer_files(self, examples: Sequence[E], predictions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """The predictions as the field's own scorers read them: name's suffix -> content. {} if JSON Lines will do."""
        ...

    @property
    def tunes(self) -> bool:
        """Whether `tune` chooses anything."""
        ...

    def tune(self, examples: Sequence[E], predictions: Sequence[Mapping[str, Any]]) -> None:
        """Set what is chosen on the dev set, such as a threshold; it becomes part of `state`."""
        ...

    def score(self, examples: Sequence[E], predictions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The official metrics, as shares of 1; `metric` is one of them."""
        ...

    def details(self, examples: Sequence[E], predictions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What the model card shows besides: a confusion matrix, scores per type. JSON."""
        ...

    def state(self) -> dict[str, Any]:
        """What a trained model must keep besides the settings, as JSON: labels, thresholds."""
        ...
