"""BLiMP: how often a model prefers the acceptable sentence of a pair (Warstadt et al. 2020, arXiv:1912.00582).

A sentence is scored by its pseudo-log-likelihood (Salazar et al. 2020, "Masked Language Model Scoring", section 2.1):
each token is masked separately, and the log probabilities of the true tokens are summed, without special tokens. A pair
is correct if the acceptable sentence scores higher; a tie counts as wrong.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.scores.masked_model import Advance, MaskedModel, MaskedSequence, progress_bar, text_digest
from pretrain.common.errors import InputError

NAME = "blimp"  # name of the score
_KEYS = ("sentence_good", "sentence_bad", "UID", "linguistics_term")  # keys of each JSON line
MAX_TOKENS = 1 << 18  # limit on the tokens in a batch of masked copies; copies of its last sentence may exceed it


@dataclass(frozen=True)
class Paradigm:
    """The sentence pairs of one file, which test one grammatical contrast.

    Attributes:
        name: UID of the paradigm, such as `causative`.
        phenomenon: its `linguistics_term`, such as `argument_structure`.
        pairs: (acceptable, unacceptable) sentences.
    """

    name: str
    phenomenon: str
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ParadigmScore:
    """Number of pairs of a paradigm, and number of pairs that a model gets right."""

    phenomenon: str
    pairs: int
    right: int

    @property
    def accuracy(self) -> float:
        return self.right / self.pairs


@dataclass(frozen=True)
class BlimpScore:
    """Accuracies of one model; chance is 0.5."""

    paradigms: Mapping[str, ParadigmScore]

    @property
    def phenomena(self) -> dict[str, float]:
        """{phenomenon: mean accuracy of its paradigms}, sorted by name."""
        accuracies: dict[str, list[float]] = {}
        for score in self.paradigms.values():
            accuracies.setdefault(score.phenomenon, []).append(score.accuracy)
        return {name: statistics.fmean(accuracies[name]) for name in sorted(accuracies)}

    @property
    def overall(self) -> float:
        """Mean accuracy of the paradigms."""
        return statistics.fmean(score.accuracy for score in self.paradigms.values())

    def as_data(self) -> dict[str, Any]:
        """Return the score as data for JSON."""
        paradigms = {name: {**asdict(score), "accuracy": score.accuracy} for name, score in self.paradigms.items()}
        return {"overall": self.overall, "phenomena": self.phenomena, "paradigms": paradigms}


def blimp_score(model: MaskedModel, paradigms: Sequence[Paradigm]) -> BlimpScore:
    """Compute the accuracies of a model on BLiMP, with progress on stderr.

    Raises `InputError` if the model has too few positions for a sentence.
    """
    with progress_bar("BLiMP, sentences", sum(2 * len(paradigm.pairs) for paradigm in paradigms)) as advance:
        scores = {}
        for paradigm in paradigms:
            right = count_right_pairs(model, paradigm.pairs, advance)
            scores[paradigm.name] = ParadigmScore(paradigm.phenomenon, len(paradigm.pairs), right)
        return BlimpScore(scores)


def read_blimp(data: Path, limit: int = 0) -> list[Paradigm]:
    """Read the paradigms in the .jsonl files of a folder, each with its first `limit` pairs (0: all).

    Raises `InputError` if there are none, a line is not a BLiMP pair, a file has several UIDs, or two files share one.
    """
    files = sorted(data.glob("*.jsonl"))
    if not files:
        raise InputError(f"{data}: has no .jsonl file. Give the folder `data` of BLiMP, with a file for each paradigm.")
    paradigms: dict[str, Paradigm] = {}
    for file in files:
        paradigm = _read_paradigm(file, limit)
        if paradigm.name in paradigms:
            raise InputError(f"{file}: another file has the same UID ({paradigm.name}). Remove one of them.")
        paradigms[paradigm.name] = paradigm
    return list(paradigms.values())


def _read_paradigm(file: Path, limit: int) -> Paradigm:
    pairs: list[tuple[str, str]] = []
    names: set[tuple[str, str]] = set()  # {(UID, linguistics term)}, which must be the same in all lines
    with file.open("rb") as lines:
        for line_number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
                good, bad, uid, term = (row[key] for key in _KEYS)
                if not all(isinstance(value, str) and value for value in (good, bad, uid, term)):
                    raise TypeError("a value is not text")
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"{file}: line {line_number} is not a BLiMP pair ({type(error).__name__}: {error}). Expected JSON "
                    f"in UTF-8 with the keys {', '.join(_KEYS)}."
                ) from None
            names.add((uid, term))
            if len(names) > 1:
                raise InputError(f"{file}: line {line_number} has another UID or term. Give one file for each UID.")
            pairs.append((good, bad))
    if not pairs:
        raise InputError(f"{file}: has no pair. Download BLiMP again.")
    return Paradigm(*names.pop(), tuple(pairs[:limit] if limit else pairs))


def pseudo_log_likelihoods(
    model: MaskedModel, sentences: Sequence[str], advance: Advance = lambda count: None
) -> np.ndarray:
    """Return the score of each sentence in nats, float64 [len(sentences)]. Equal token sequences are scored once.

    Raises `InputError` if a sentence has more tokens than the model has positions.
    """
    encoded = [model.encode(sentence) for sentence in sentences]
    distinct: dict[bytes, int] = {}  # {token ids: index among the distinct sequences}
    indices = [distinct.setdefault(ids.tobytes(), len(distinct)) for ids, _ in encoded]
    first_positions = {index: position for position, index in reversed(list(enumerate(indices)))}
    groups = [_masked_copies(model, *encoded[i], sentences[i]) for _, i in sorted(first_positions.items())]
    num_copies = [len(copies) for copies in groups]
    scores = np.zeros(len(groups))
    for start, stop in _batches(groups):
        predictions = model.predict([copy for copies in groups[start:stop] for copy in copies])
        sequence_of_copy = np.repeat(np.arange(start, stop), num_copies[start:stop])
        np.add.at(scores, sequence_of_copy, predictions.log_probabilities)
        advance(sum(start <= index < stop for index in indices))
    return scores[indices]


def count_right_pairs(model: MaskedModel, pairs: Sequence[tuple[str, str]], advance: Advance) -> int:
    """Count the pairs whose first sentence, the acceptable one, scores higher."""
    scores = pseudo_log_likelihoods(model, [sentence for pair in pairs for sentence in pair], advance)
    return int((scores[::2] > scores[1::2]).sum())


def _masked_copies(model: MaskedModel, ids: np.ndarray, is_content: np.ndarray, sentence: str) -> list[MaskedSequence]:
    """Return one copy of the sentence per token, with only this token masked."""
    if len(ids) > model.max_positions:
        raise InputError(
            f"a sentence has {len(ids)} tokens, but the model has {model.max_positions} positions: {sentence[:60]!r}. "
            "Remove it."
        )
    copies = []
    for position in np.flatnonzero(is_content):
        masked = ids.copy()
        masked[position] = model.mask_id
        copies.append(MaskedSequence(masked, np.array([position]), ids[position : position + 1]))
    return copies


def _batches(groups: Sequence[Sequence[MaskedSequence]]) -> Iterator[tuple[int, int]]:
    """Yield each batch as a range (start, stop) of indices into `groups`, the masked copies of each sentence."""
    start = tokens = 0
    for index, copies in enumerate(groups):
        tokens += sum(len(copy.ids) for copy in copies)
        if tokens > MAX_TOKENS:
            yield start, index + 1
            start, tokens = index + 1, 0
    if start < len(groups):
        yield start, len(groups)


def data_digest(paradigms: Sequence[Paradigm]) -> str:
    """Return the SHA-256 of the pairs, as hexadecimal digits."""
    return text_digest(json.dumps([asdict(paradigm) for paradigm in paradigms]))
