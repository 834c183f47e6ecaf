"""Named entities: a tag for every word, predicted at its first subword (Devlin et al. 2018, section 5.3).

The model's labels are IOB2 tags, whatever the scheme of the files. Gold tags of other schemes are converted without
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
from finetune.tasks.datasets.arrays import concatenate_ranges
from finetune.tasks.datasets.sentence_records import to_sentence
from finetune.tasks.datasets.sentences import Remarks, Sentence, group_documents
from finetune.tasks.datasets.text import TextEncoder, TokenizedTexts, frame
from finetune.tasks.datasets.windows import slide
from finetune.tasks.entities import decoding
from finetune.tasks.entities import metrics as metrics
from finetune.tasks.entities.settings import EntitiesSettings
from finetune.tasks.entities.source import SentenceSource
from pretrain.common.errors import InputError
from pretrain.common.wording import counted

_OVERLAP = 64  # tokens of context on each side of a cut in a long sentence, at most a quarter of the window


class Entities(Task[Sentence]):
    """Finds named entities. An example is a `Sentence` with IOB2 tags. A prediction is:

        {"entities": [{"type", "text", "score", "start", "end", "first_word", "last_word"}], "tags": ["O", ...]}

    `start` and `end` (exclusive) are indices of characters in the text, or in the tokens joined by spaces if there is
    no text; `last_word` is inclusive. `score` is the mean probability of the words' tags.

    Plain text is segmented into words like the training set (see `WordCuts`).
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
        """Return {"types" in the order of the labels, "scheme" of the files, "word_cuts": `WordCuts.state()`}.

        With `tune_outside`, also "outside_penalty", in nats.
        """
        penalty = {"outside_penalty": self.outside_penalty} if self.tunes else {}
        return {**self._source.state(), **penalty}

    def origin(self, name: str) -> str:
        share = self.settings.dev_share
        return f"{share:.0%} of the training set, by type" if name == "dev" and share else super().origin(name)

    # ------------------------------------------------------------ reading files

    def read_train(self) -> list[Sentence]:
        return self._source.read_train()

    def read_held_out(self) -> dict[str, list[Sentence]]:
        sentences = self._source.read_held_out()
        if not sentences:
            if self.tunes:
                raise InputError("entities.tune_outside: true, but there is no dev set to tune on. Set entities.dev.")
            return {}
        if not any(set(cast(Sequence[str], sentence.tags)) - {"O"} for sentence in sentences):
            raise InputError(
                f"{self.origin('dev')}: no entity in {counted(len(sentences), 'sentence')}, so no score can "
                f"select the best checkpoint. Check label_column ({self.settings.label_column}), or set another file."
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
        return to_sentence(record, where, Remarks(), self._source.cut)

    def with_context(self, examples: Sequence[Sentence], *, ended: bool) -> tuple[list[Sentence], list[Sentence]]:
        num_ready = len(examples)
        waits = not ended and self.settings.document_context and bool(examples)
        if waits and (name := examples[-1].document_name) is not None:
            while num_ready and examples[num_ready - 1].document_name == name:
                num_ready -= 1
        return group_documents(examples[:num_ready]), list(examples[num_ready:])

    def is_labeled(self, examples: Sequence[Sentence]) -> bool:
        return any(example.tags is not None for example in examples)

    def record(self, example: Sentence) -> dict[str, Any]:
        """Return {"id", "text", "gold": tags}, without missing entries."""
        record = {"id": example.id, "text": example.text_and_offsets()[0]}
        gold = {} if example.tags is None else {"gold": list(example.tags)}
        return {key: value for key, value in record.items() if value is not None} | gold

    # ------------------------------------------------------------ predictions and scores

    def decode(self, examples: Sequence[Sentence], windows: Windows, logits: np.ndarray) -> list[dict[str, Any]]:
        return self._decoder().decode(examples, windows, logits)

    @property
    def tunes(self) -> bool:
        return self.settings.tune_outside

    def tune(self, examples: Sequence[Sentence], windows: Windows, logits: np.ndarray) -> None:
        """With `tune_outside`, choose the penalty of O with the best `metric` (f1 for a custom one) on `examples`."""
        if self.tunes and examples:
            metric = "f1" if self.metric != self.settings.metric else self.metric
            self.outside_penalty = self._decoder().best_penalty(examples, windows, logits, metric)

    def _decoder(self) -> decoding.Decoder:
        return decoding.Decoder(self._source.types, self.outside_penalty)

    def scorer_files(self, examples: Sequence[Sentence], predictions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return the input file of conlleval; {} for unlabeled text, which has no official segmentation into words."""
        if all(example.from_text and example.tags is None for example in examples):
            return {}
        return {".tags.conll": decoding.conll_columns(*_labeled(examples, predictions))}

    def score(self, examples: Sequence[Sentence], predictions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return precision, recall, f1 (conlleval, seqeval's default), macro_f1, strict_* (IOB2), accuracy of tags."""
        examples, predictions = _labeled(examples, predictions)
        scores = decoding.score(self._source.types, examples, predictions)
        tags = [sentence.tags for sentence in examples], [prediction["tags"] for prediction in predictions]
        return scores | custom_score(self.settings.metric, *tags)

    def interval(self, examples: Sequence[Sentence], predictions: Predictions) -> tuple[float, float] | None:
        tags = decoding.gold_and_predicted(self._source.types, examples, predictions)
        return metrics.f1_interval(*tags) if self.metric == "f1" else None

    def details(self, examples: Sequence[Sentence], predictions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return {"types": {type: {precision, recall, f1, support}}, "sentences", "words", "entities"}."""
        return decoding.details(self._source.types, *_labeled(examples, predictions))

    # ------------------------------------------------------------ windows

    def windows(self, examples: Sequence[Sentence], encoder: TextEncoder, *, training: bool) -> Windows:
        """Build windows with one query position per word: its first token, in the window with most context around it.

        In training, each window counts as an example, so that long sentences fit into micro-batches.
        """
        capacity = encoder.capacity(pair=False)
        if capacity < 1:
            raise InputError(f"max_length: windows of {encoder.max_length} tokens have no room for a word. Raise it.")
        sentences = _align(examples, encoder, with_documents=bool(self.settings.document_context))
        example, start, length = self._cut(sentences, capacity)
        window, word = _assign_words(sentences, example, start, length)
        # A window inside one very long word has no query position.
        kept = np.bincount(window, minlength=len(example)) > 0
        if not training:  # every example keeps a window, even if it has no words
            kept |= np.bincount(example[kept], minlength=len(examples))[example] == 0
        window = (np.cumsum(kept) - 1)[window]
        example, start, length = example[kept], start[kept], length[kept]
        framed = frame(encoder, (sentences.tokens.ids, start, length))
        queries = framed.first[window] + sentences.tokens.starts[word] - start[window]
        word_in_sentence = word - sentences.first[example[window]]
        return Windows(
            ids=framed.ids,
            types=framed.types,
            starts=framed.starts,
            examples=np.arange(len(example)) if training else example,
            queries=queries,
            labels=self._label_indices(examples, example[window], word_in_sentence),
            weights=np.ones(len(queries), np.float32),
            extra={"word": word_in_sentence},
        )

    def _cut(self, sentences: _AlignedSentences, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (index of example, first token, number of tokens) of each window, int64 [F] each."""
        first, end = sentences.tokens.starts[sentences.first], sentences.tokens.starts[sentences.end]
        overlap = 2 * min(_OVERLAP, capacity // 4)
        example, start, length = slide(end - first, capacity, overlap)
        start = start + first[example]
        # Extend the last window of a long sentence to the left until it is full.
        is_long = (end - first > capacity)[example]
        free = np.where(is_long, capacity - length, 0)
        start, length = start - free, length + free
        context = self.settings.document_context
        if context:
            limit = capacity if context is True else int(context)
            around_start, around_length = _context_ranges(sentences, first, end, capacity, limit)
            start = np.where(is_long, start, around_start[example])
            length = np.where(is_long, length, around_length[example])
        return example, start, length

    def _label_indices(self, examples: Sequence[Sentence], example: np.ndarray, word: np.ndarray) -> np.ndarray:
        """Return label indices, int64 [R], of the words with the indices `word` in `example`; 0 (O) if unknown."""
        indices = {tag: index for index, tag in enumerate(self.labels)}
        counts = np.fromiter((len(sentence.words) for sentence in examples), np.int64, len(examples))
        tags = chain.from_iterable(sentence.tags or ["O"] * len(sentence.words) for sentence in examples)
        gold = np.fromiter((indices.get(tag, 0) for tag in tags), np.int64, int(counts.sum()))
        return gold[(np.cumsum(counts) - counts)[example] + word]


def _labeled(
    examples: Sequence[Sentence], predictions: Sequence[Mapping[str, Any]]
) -> tuple[list[Sentence], list[Mapping[str, Any]]]:
    """Return the examples that have tags, and their predictions; all of both if none has tags."""
    pairs = [pair for pair in zip(examples, predictions, strict=True) if pair[0].tags is not None]
    labeled = [example for example, _ in pairs], [prediction for _, prediction in pairs]
    return labeled if pairs else (list(examples), list(predictions))


@dataclass(frozen=True)
class _AlignedSentences:
    """Tokenized words of all documents, and the word indices of the N examples and of their documents."""

    tokens: TokenizedTexts  # tokens of each word
    first: np.ndarray  # int64 [N], index of each example's first word
    end: np.ndarray  # int64 [N], index after its last word
    document_first: np.ndarray  # int64 [N], index of the first word of its document
    document_end: np.ndarray  # int64 [N], index after the last word of its document


def _align(examples: Sequence[Sentence], encoder: TextEncoder, *, with_documents: bool) -> _AlignedSentences:
    """Tokenize the examples; `with_documents`, their whole documents. Otherwise, each example counts as a document."""
    if with_documents:
        documents = list({id(sentence.document): sentence.document for sentence in examples}.values())
        indices = {id(document): index for index, document in enumerate(documents)}
        sizes = np.fromiter(map(len, documents), np.int64, len(documents))
        document = np.fromiter((indices[id(sentence.document)] for sentence in examples), np.int64, len(examples))
        word_lists = list(chain.from_iterable(documents))
        index = np.fromiter((sentence.index for sentence in examples), np.int64, len(examples))
        sentence_index = (np.cumsum(sizes) - sizes)[document] + index
    else:
        word_lists = [sentence.words for sentence in examples]
        sizes = np.ones(len(word_lists), np.int64)
        sentence_index = document = np.arange(len(word_lists))
    bounds = np.concatenate([[0], np.cumsum(np.fromiter(map(len, word_lists), np.int64, len(word_lists)))])
    document_bounds = bounds[np.concatenate([[0], np.cumsum(sizes)])]
    return _AlignedSentences(
        tokens=encoder.encode_words(list(chain.from_iterable(word_lists))),
        first=bounds[sentence_index],
        end=bounds[sentence_index + 1],
        document_first=document_bounds[document],
        document_end=document_bounds[document + 1],
    )


def _context_ranges(
    sentences: _AlignedSentences, first: np.ndarray, end: np.ndarray, capacity: int, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (first token, number of tokens) of each sentence with its context: surrounding words of its document.

    Each side gets half of the free tokens, at most `limit`; if one side has fewer tokens, the other gets more.
    """
    starts = sentences.tokens.starts
    before = np.minimum(first - starts[sentences.document_first], limit)
    after = np.minimum(starts[sentences.document_end] - end, limit)
    free = np.maximum(capacity - (end - first), 0)
    left = np.minimum(before, free // 2)
    right = np.minimum(after, free - left)
    left = np.minimum(before, free - right)
    around_start = starts[np.searchsorted(starts, first - left, "left")]
    around_end = starts[np.searchsorted(starts, end + right, "right") - 1]
    return around_start, around_end - around_start


def _assign_words(
    sentences: _AlignedSentences, example: np.ndarray, start: np.ndarray, length: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (index of window, index of word), int64 [R] each, in order; every word that has a token occurs once.

    If several windows contain a word, the window with the largest context on the word's smaller side is chosen
    (google-research/bert run_squad.py, _check_is_max_context).
    """
    starts = sentences.tokens.starts
    first, end = sentences.first[example], sentences.end[example]
    first_word = np.maximum(first, np.searchsorted(starts, start, "left"))
    end_word = np.minimum(end, np.searchsorted(starts, start + length, "left"))
    counts = np.maximum(end_word - first_word, 0)
    window, word = np.repeat(np.arange(len(example)), counts), concatenate_ranges(first_word, counts)
    has_token = starts[word + 1] > starts[word]
    window, word = window[has_token], word[has_token]
    is_ambiguous = np.bincount(example)[example[window]] > 1 if len(window) else np.zeros(0, bool)
    candidates = np.flatnonzero(is_ambiguous)
    if not len(candidates):
        return window, word
    windows, words = window[candidates], word[candidates]
    # Sentence boundaries need no special case: only the first and last windows contain them.
    before, after = starts[words] - start[windows], start[windows] + length[windows] - starts[words + 1]
    order = np.lexsort((windows, -np.minimum(before, after), words, example[windows]))
    is_first = np.ones(len(order), bool)
    is_first[1:] = (np.diff(words[order]) != 0) | (np.diff(example[windows][order]) != 0)
    kept = ~is_ambiguous
    kept[candidates[order[is_first]]] = True
    return window[kept], word[kept]
