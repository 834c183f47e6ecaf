"""Named entities: a tag for every word, predicted at its first subword (Devlin et al. 2018, section 5.3).

The labels are IOB2 over the types, whatever the scheme of the files. Gold tags of other schemes are converted without
changing the entities that conlleval finds. Words without a token (control characters, unusual spaces) are O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import numpy as np

from finetune.tasks.base import Head, Objective, Predictions, Task, Windows
from finetune.tasks.custom_metric import custom_score, metric_name
from finetune.tasks.datasets.arrays import ragged
from finetune.tasks.datasets.sentence_records import sentence
from finetune.tasks.datasets.sentences import Remarks, Sentence, group_documents
from finetune.tasks.datasets.text import Column, TextEncoder, frame
from finetune.tasks.datasets.windows import slide
from finetune.tasks.entities import decoding
from finetune.tasks.entities import metrics as metrics
from finetune.tasks.entities.settings import EntitiesSettings
from finetune.tasks.entities.source import SentenceSource
from pretrain.common.errors import InputError
from pretrain.common.wording import counted

_OVERLAP = 64  # tokens of context on each side where a long sentence is cut, at most a quarter of the window


class Entities(Task[Sentence]):
    """Finds named entities. An example is a `Sentence` with IOB2 tags. A prediction is:

        {"entities": [{"type", "text", "score", "start", "end", "first_word", "last_word"}], "tags": ["O", ...]}

    `start` and `end` (exclusive) are indices of characters in the text, or in the tokens joined by spaces if there is
    no text; `last_word` is inclusive. `score` is the mean probability of the words' tags.

    Plain text is segmented into words like the training set, see `WordCuts`.
    """

    kind = "entities"
    settings_type = EntitiesSettings
    head: Head = "tokens"
    objective: Objective = "classes"
    summary = "Finds named entities"
    sample = "text of any length"

    def __init__(self, settings: EntitiesSettings, state: Mapping[str, Any] | None = None) -> None:
        self.settings = settings
        self.metric: str = metric_name(settings.metric)
        self.outside_penalty = float((state or {}).get("outside_penalty", 0.0))
        self._source = SentenceSource(settings, state)

    @property
    def labels(self) -> tuple[str, ...]:
        if not self._source.types:
            self.read_train()
        return decoding.label_names(self._source.types)

    @property
    def outputs(self) -> int:
        return len(self.labels)

    @property
    def remarks(self) -> list[str]:
        """Warnings about the files, as logged."""
        return self._source.remarks

    def state(self) -> dict[str, Any]:
        """Return {"types": in the order of the labels, "scheme": of the files, "word_cuts": of `WordCuts`}.

        With `tune_outside`, also "outside_penalty", in nats.
        """
        tuned = {"outside_penalty": self.outside_penalty} if self.tunes else {}
        return {**self._source.state(), **tuned}

    def origin(self, name: str) -> str:
        share = self.settings.dev_share
        return f"{share:.0%} of the training set, by type" if name == "dev" and share else super().origin(name)

    # ------------------------------------------------------------ files in

    def read_train(self) -> list[Sentence]:
        return self._source.read_train()

    def read_held_out(self) -> dict[str, list[Sentence]]:
        sentences = self._source.read_held_out()
        if not sentences:
            if self.tunes:
                raise InputError("entities.tune_outside: true, but there is no dev set to tune on. Give entities.dev.")
            return {}
        if not any(set(cast(Sequence[str], sentence.tags)) - {"O"} for sentence in sentences):
            raise InputError(
                f"{self.origin('dev')}: no entity in {counted(len(sentences), 'sentence')}, so nothing to choose a "
                "checkpoint by. "
                f"Check label_column ({self.settings.label_column}), or give another dev file."
            )
        return {"dev": sentences}

    def read_test(self) -> dict[str, list[Sentence]]:
        return {"test": self._source.read(self.settings.test, labeled=False)} if self.settings.test else {}

    def read_file(self, path: str, *, labeled: bool = True) -> list[Sentence]:
        return self._source.read(path, labeled=labeled, plain=not labeled)

    def example(self, record: Mapping[str, Any] | str, where: str) -> Sentence:
        """Return a sentence from a string, {"text": ...} or {"tokens": [...]}; its labels are ignored.

        `with_context` adds its neighbors.
        """
        if isinstance(record, Mapping):
            record = {key: value for key, value in record.items() if key in ("id", "text", "tokens", "document")}
        return sentence(record, where, Remarks(), self._source.cut)

    def with_context(self, examples: Sequence[Sentence], *, ended: bool) -> tuple[list[Sentence], list[Sentence]]:
        ready = len(examples)
        if not ended and self.settings.document_context and examples and (name := examples[-1].name) is not None:
            while ready and examples[ready - 1].name == name:
                ready -= 1
        return group_documents(examples[:ready]), list(examples[ready:])

    def is_labeled(self, examples: Sequence[Sentence]) -> bool:
        return any(example.tags is not None for example in examples)

    def record(self, example: Sentence) -> dict[str, Any]:
        """Return {"id", "text", "gold": tags}, without values that are unknown."""
        record = {"id": example.id, "text": example.characters()[0]}
        gold = {} if example.tags is None else {"gold": list(example.tags)}
        return {key: value for key, value in record.items() if value is not None} | gold

    # ------------------------------------------------------------ predictions and scores

    def decode(self, examples: Sequence[Sentence], windows: Windows, logits: np.ndarray) -> list[dict[str, Any]]:
        return self._decoder().predictions(examples, windows, logits)

    @property
    def tunes(self) -> bool:
        return self.settings.tune_outside

    def tune(self, examples: Sequence[Sentence], windows: Windows, logits: np.ndarray) -> None:
        """Choose the penalty of O with the best `metric` on these examples, or f1, if `tune_outside` is on."""
        if self.tunes and examples:
            tuned = "f1" if self.metric != self.settings.metric else self.metric
            self.outside_penalty = self._decoder().best_penalty(examples, windows, logits, tuned)

    def _decoder(self) -> decoding.Decoder:
        return decoding.Decoder(self._source.types, self.outside_penalty)

    def scorer_files(self, examples: Sequence[Sentence], predictions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return columns for conlleval; {} for unlabeled text, which has no official segmentation into words."""
        if all(example.from_text and example.tags is None for example in examples):
            return {}
        return {".tags.conll": decoding.conll_columns(*_labeled(examples, predictions))}

    def score(self, examples: Sequence[Sentence], predictions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return precision, recall, f1 (conlleval, seqeval's default), macro_f1, strict_* (IOB2), accuracy of tags."""
        examples, predictions = _labeled(examples, predictions)
        scores = decoding.score(self._source.types, examples, predictions)
        tags = [sentence.tags for sentence in examples], [sentence["tags"] for sentence in predictions]
        return scores | custom_score(self.settings.metric, *tags)

    def interval(self, examples: Sequence[Sentence], predictions: Predictions) -> tuple[float, float] | None:
        tags = decoding.gold_and_predicted(self._source.types, examples, predictions)
        return metrics.f1_interval(*tags) if self.metric == "f1" else None

    def details(self, examples: Sequence[Sentence], predictions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return {"types": {type: {precision, recall, f1, support}}, "sentences", "words", "entities"}."""
        return decoding.details(self._source.types, *_labeled(examples, predictions))

    # ------------------------------------------------------------ windows

    def windows(self, examples: Sequence[Sentence], encoder: TextEncoder, *, training: bool) -> Windows:
        """Build windows in which every word with tokens is queried once: at its first token, where it has most context.

        In training, each window is an example, so a sentence of any length fits into micro-batches.
        """
        capacity = encoder.capacity(pair=False)
        if capacity < 1:
            raise InputError(f"max_length: windows of {encoder.max_length} tokens fit no word. Raise it.")
        sentences = _align(examples, encoder, with_documents=bool(self.settings.document_context))
        example, start, length = self._cut(sentences, capacity)
        window, word = _assign(sentences, example, start, length)
        # A window in the middle of one very long word has no query position.
        kept = np.bincount(window, minlength=len(example)) > 0
        if not training:  # every example keeps a window, even without words
            kept |= np.bincount(example[kept], minlength=len(examples))[example] == 0
        window = (np.cumsum(kept) - 1)[window]
        example, start, length = example[kept], start[kept], length[kept]
        framed = frame(encoder, (sentences.column.ids, start, length))
        queries = framed.first[window] + sentences.column.starts[word] - start[window]
        number = word - sentences.first[example[window]]
        return Windows(
            ids=framed.ids,
            types=framed.types,
            starts=framed.starts,
            examples=np.arange(len(example)) if training else example,
            queries=queries,
            labels=self._numbers(examples, example[window], number),
            weights=np.ones(len(queries), np.float32),
            extra={"word": number},
        )

    def _cut(self, sentences: _AlignedSentences, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (example, first token, number of tokens), int64 [F] each."""
        first, end = sentences.column.starts[sentences.first], sentences.column.starts[sentences.end]
        overlap = 2 * min(_OVERLAP, capacity // 4)
        example, start, length = slide(end - first, capacity, overlap)
        start = start + first[example]
        # Extend the last window of a long sentence to the left until it is full.
        is_long = (end - first > capacity)[example]
        short_by = np.where(is_long, capacity - length, 0)
        start, length = start - short_by, length + short_by
        context = self.settings.document_context
        if context:
            limit = capacity if context is True else int(context)
            around_start, around_length = _with_neighbors(sentences, first, end, capacity, limit)
            start = np.where(is_long, start, around_start[example])
            length = np.where(is_long, length, around_length[example])
        return example, start, length

    def _numbers(self, examples: Sequence[Sentence], item: np.ndarray, word: np.ndarray) -> np.ndarray:
        """Return the label of each row, int64 [R], from its example and the word's index; 0 if unlabeled or unknown."""
        numbers = {tag: number for number, tag in enumerate(self.labels)}
        counts = np.fromiter((len(item.words) for item in examples), np.int64, len(examples))
        tags = chain.from_iterable(item.tags if item.tags is not None else ["O"] * len(item.words) for item in examples)
        gold = np.fromiter((numbers.get(tag, 0) for tag in tags), np.int64, int(counts.sum()))
        return gold[(np.cumsum(counts) - counts)[item] + word]


def _labeled(
    examples: Sequence[Sentence], predictions: Sequence[Mapping[str, Any]]
) -> tuple[list[Sentence], list[Mapping[str, Any]]]:
    """Return the examples that have tags, and their predictions."""
    pairs = [pair for pair in zip(examples, predictions, strict=True) if pair[0].tags is not None]
    labeled = [example for example, _ in pairs], [prediction for _, prediction in pairs]
    return labeled if pairs else (list(examples), list(predictions))


@dataclass(frozen=True)
class _AlignedSentences:
    """Tokenized words of all documents, concatenated, with the bounds of the N examples and of their documents."""

    column: Column
    first: np.ndarray  # int64 [N], first word
    end: np.ndarray  # int64 [N], word after the last
    document_first: np.ndarray  # int64 [N]
    document_end: np.ndarray  # int64 [N]


def _align(examples: Sequence[Sentence], encoder: TextEncoder, *, with_documents: bool) -> _AlignedSentences:
    if with_documents:
        documents = list({id(sentence.document): sentence.document for sentence in examples}.values())
        numbers = {id(doc): number for number, doc in enumerate(documents)}
        sizes = np.fromiter(map(len, documents), np.int64, len(documents))
        doc = np.fromiter((numbers[id(sentence.document)] for sentence in examples), np.int64, len(examples))
        pieces = list(chain.from_iterable(documents))
        piece = (np.cumsum(sizes) - sizes)[doc] + np.fromiter((row.index for row in examples), np.int64, len(examples))
    else:
        pieces = [sentence.words for sentence in examples]
        sizes = np.ones(len(pieces), np.int64)
        piece = doc = np.arange(len(pieces))
    bounds = np.concatenate([[0], np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))])
    document_bounds = bounds[np.concatenate([[0], np.cumsum(sizes)])]
    return _AlignedSentences(
        column=encoder.encode_words(list(chain.from_iterable(pieces))),
        first=bounds[piece],
        end=bounds[piece + 1],
        document_first=document_bounds[doc],
        document_end=document_bounds[doc + 1],
    )


def _with_neighbors(
    sentences: _AlignedSentences, first: np.ndarray, end: np.ndarray, capacity: int, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (first token, number of tokens) of each sentence with its context: whole words of its document.

    At most `limit` tokens on each side. Both sides get the same number; if one side has fewer, the other gets more.
    """
    starts = sentences.column.starts
    before = np.minimum(first - starts[sentences.document_first], limit)
    after = np.minimum(starts[sentences.document_end] - end, limit)
    spare = np.maximum(capacity - (end - first), 0)
    left = np.minimum(before, spare // 2)
    right = np.minimum(after, spare - left)
    left = np.minimum(before, spare - right)
    around_start = starts[np.searchsorted(starts, first - left, "left")]
    around_end = starts[np.searchsorted(starts, end + right, "right") - 1]
    return around_start, around_end - around_start


def _assign(
    sentences: _AlignedSentences, example: np.ndarray, start: np.ndarray, length: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (window, word), int64 [R] each, in order: every word that has a token, once.

    If several windows contain a word, the window with the largest context on the word's smaller side is chosen
    (google-research/bert run_squad.py, _check_is_max_context).
    """
    starts = sentences.column.starts
    first, end = sentences.first[example], sentences.end[example]
    seen_first = np.maximum(first, np.searchsorted(starts, start, "left"))
    seen_end = np.minimum(end, np.searchsorted(starts, start + length, "left"))
    seen = np.maximum(seen_end - seen_first, 0)
    window, word = np.repeat(np.arange(len(example)), seen), ragged(seen_first, seen)
    has_token = starts[word + 1] > starts[word]
    window, word = window[has_token], word[has_token]
    shared = np.bincount(example)[example[window]] > 1 if len(window) else np.zeros(0, bool)
    rival = np.flatnonzero(shared)
    if not len(rival):
        return window, word
    windows, words = window[rival], word[rival]
    # The bounds of a sentence need no special case: the first and last windows have all of the sentence there.
    before, after = starts[words] - start[windows], start[windows] + length[windows] - starts[words + 1]
    order = np.lexsort((windows, -np.minimum(before, after), words, example[windows]))
    is_first = np.ones(len(order), bool)
    is_first[1:] = (np.diff(words[order]) != 0) | (np.diff(example[windows][order]) != 0)
    kept = ~shared
    kept[rival[order[is_first]]] = True
    return window[kept], word[kept]
