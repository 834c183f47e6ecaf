"""Named entities: a tag for every word, predicted at its first subword (Devlin et al. 2018, section 5.3).

The model's labels are IOB2 tags, whatever the scheme of the files. Gold tags of other schemes are converted without
changing the entities that conlleval finds. Words without a token (control characters, unusual spaces) get the tag O.
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
from pretrain.common.extensions import is_custom
from pretrain.common.wording import counted

_CUT_CONTEXT = 64  # tokens of context on each side of a cut in a long sentence, but at most a quarter of a window


class Entities(Task[Sentence]):
    """Finds named entities. An example is a `Sentence` with IOB2 tags. A prediction is:

        {"entities": [{"type", "text", "score", "start", "end", "first_word", "last_word"}], "tags": ["O", ...]}

    `start` and `end` (exclusive) are indices of characters in the text, or in the tokens joined by spaces if there is
    no text; `last_word` is inclusive. `score` is the mean probability of the words' tags.

    Plain text is segmented into words like the training set (see `WordSegmenter`).
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
            self.read_train()  # sets the types
        return decoding.label_names(self._source.types)

    @property
    def outputs(self) -> int:
        return len(self.labels)

    @property
    def remarks(self) -> list[str]:
        """Warnings about the files, as logged."""
        return self._source.remarks

    def state(self) -> dict[str, Any]:
        """Return `SentenceSource.state` ("types", "scheme", "word_cuts") and, if tuned, "outside_penalty" in nats."""
        penalty = {"outside_penalty": self.outside_penalty} if self.tunes else {}
        return {**self._source.state(), **penalty}

    def origin(self, name: str) -> str:
        share = self.settings.dev_share if name == "dev" else 0
        return f"{share:.0%} of the training set, stratified by entity type" if share else super().origin(name)

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
        """Return a sentence, without context, from a string, {"text": ...} or {"tokens": [...]}; labels are ignored."""
        if isinstance(record, Mapping):
            record = {key: value for key, value in record.items() if key in ("id", "text", "tokens", "document")}
        return to_sentence(record, where, Remarks(), self._source.segment)

    def with_context(
        self, examples: Sequence[Sentence], *, is_end_of_input: bool
    ) -> tuple[list[Sentence], list[Sentence]]:
        num_ready = len(examples)
        is_last_incomplete = not is_end_of_input and self.settings.document_context and bool(examples)
        if is_last_incomplete and (name := examples[-1].document_name) is not None:
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
        """With `tune_outside`, choose the penalty of O with the best `metric` (f1 if it is custom) on `examples`."""
        if self.tunes and examples:
            metric = "f1" if is_custom(self.settings.metric) else self.metric
            self.outside_penalty = self._decoder().best_penalty(examples, windows, logits, metric)

    def _decoder(self) -> decoding.Decoder:
        return decoding.Decoder(self._source.types, self.outside_penalty)

    def scorer_files(self, examples: Sequence[Sentence], predictions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return conlleval's input file; {} for unlabeled plain text, which has no official segmentation into words."""
        if all(example.from_text and example.tags is None for example in examples):
            return {}
        return {".tags.conll": decoding.conll_columns(*_labeled_only(examples, predictions))}

    def score(self, examples: Sequence[Sentence], predictions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return precision, recall and f1 (as conlleval), macro_f1, strict_* (seqeval's strict mode), and accuracy."""
        examples, predictions = _labeled_only(examples, predictions)
        scores = decoding.score(self._source.types, examples, predictions)
        gold, predicted = [example.tags for example in examples], [prediction["tags"] for prediction in predictions]
        return scores | custom_score(self.settings.metric, gold, predicted)

    def interval(self, examples: Sequence[Sentence], predictions: Predictions) -> tuple[float, float] | None:
        tags = decoding.gold_and_predicted(self._source.types, examples, predictions)
        return metrics.f1_interval(*tags) if self.metric == "f1" else None

    def details(self, examples: Sequence[Sentence], predictions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return {"types": {type: {precision, recall, f1, support}}, "sentences", "words", "entities"}."""
        return decoding.details(self._source.types, *_labeled_only(examples, predictions))

    # ------------------------------------------------------------ windows: F windows of N examples, R query positions

    def windows(self, examples: Sequence[Sentence], encoder: TextEncoder, *, training: bool) -> Windows:
        """Build windows with one query position per word: its first token, in the window with the most context.

        In training, each window counts as an example, so that long sentences fit into micro-batches.
        """
        capacity = encoder.capacity(pair=False)
        if capacity < 1:
            raise InputError(f"max_length: windows of {encoder.max_length} tokens have no room for a word. Raise it.")
        sentences = _tokenize(examples, encoder, with_documents=bool(self.settings.document_context))
        example_F, start_F, length_F = self._window_ranges(sentences, capacity)
        window_R, word_R = _assign_words(sentences, example_F, start_F, length_F)
        # A window inside one very long word has no query position.
        is_kept = np.bincount(window_R, minlength=len(example_F)) > 0
        if not training:  # every example keeps a window, even if it has no words
            is_kept |= np.bincount(example_F[is_kept], minlength=len(examples))[example_F] == 0
        window_R = (np.cumsum(is_kept) - 1)[window_R]
        example_F, start_F, length_F = example_F[is_kept], start_F[is_kept], length_F[is_kept]
        framed = frame(encoder, (sentences.tokens.ids, start_F, length_F))
        queries = framed.first[window_R] + sentences.tokens.starts[word_R] - start_F[window_R]
        word_in_sentence = word_R - sentences.first_word[example_F[window_R]]
        return Windows(
            ids=framed.ids,
            types=framed.types,
            starts=framed.starts,
            examples=np.arange(len(example_F)) if training else example_F,
            queries=queries,
            labels=self._label_indices(examples, example_F[window_R], word_in_sentence),
            weights=np.ones(len(queries), np.float32),
            extra={"word": word_in_sentence},
        )

    def _window_ranges(self, sentences: _WordTokens, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (index of its example, index of its first token, number of tokens) of each window, int64 [F] each."""
        starts = sentences.tokens.starts
        first_token_N, end_token_N = starts[sentences.first_word], starts[sentences.end_word]
        overlap = 2 * min(_CUT_CONTEXT, capacity // 4)
        example_F, start_F, length_F = slide(end_token_N - first_token_N, capacity, overlap)
        start_F = start_F + first_token_N[example_F]
        # Extend the last window of a long sentence to the left until it is full.
        is_long_F = (end_token_N - first_token_N > capacity)[example_F]
        free_F = np.where(is_long_F, capacity - length_F, 0)
        start_F, length_F = start_F - free_F, length_F + free_F
        context = self.settings.document_context
        if context:
            limit = capacity if context is True else int(context)
            context_start_N, context_length_N = _context_ranges(sentences, first_token_N, end_token_N, capacity, limit)
            start_F = np.where(is_long_F, start_F, context_start_N[example_F])
            length_F = np.where(is_long_F, length_F, context_length_N[example_F])
        return example_F, start_F, length_F

    def _label_indices(self, examples: Sequence[Sentence], example_R: np.ndarray, word_R: np.ndarray) -> np.ndarray:
        """Return the label index of word `word_R[r]` of example `example_R[r]`, int64 [R]; 0 (O) for unknown labels."""
        indices = {tag: index for index, tag in enumerate(self.labels)}
        word_counts = np.fromiter((len(sentence.words) for sentence in examples), np.int64, len(examples))
        tags = chain.from_iterable(sentence.tags or ["O"] * len(sentence.words) for sentence in examples)
        gold = np.fromiter((indices.get(tag, 0) for tag in tags), np.int64, int(word_counts.sum()))
        return gold[(np.cumsum(word_counts) - word_counts)[example_R] + word_R]


def _labeled_only(
    examples: Sequence[Sentence], predictions: Sequence[Mapping[str, Any]]
) -> tuple[list[Sentence], list[Mapping[str, Any]]]:
    """Return the examples that have gold tags, and their predictions; if no example has any, return all."""
    pairs = [pair for pair in zip(examples, predictions, strict=True) if pair[0].tags is not None]
    labeled = [example for example, _ in pairs], [prediction for _, prediction in pairs]
    return labeled if pairs else (list(examples), list(predictions))


@dataclass(frozen=True)
class _WordTokens:
    """Tokens of the words of all documents, and the ranges of words of the N examples and of their documents."""

    tokens: TokenizedTexts  # tokens of each word
    first_word: np.ndarray  # int64 [N], index of each example's first word
    end_word: np.ndarray  # int64 [N], index after each example's last word
    document_first_word: np.ndarray  # int64 [N], index of the first word of each example's document
    document_end_word: np.ndarray  # int64 [N], index after the last word of each example's document


def _tokenize(examples: Sequence[Sentence], encoder: TextEncoder, *, with_documents: bool) -> _WordTokens:
    """Tokenize the documents of the examples; unless `with_documents`, each example counts as a separate document."""
    if with_documents:
        documents = list({id(sentence.document): sentence.document for sentence in examples}.values())
        indices = {id(document): index for index, document in enumerate(documents)}
        sentence_counts = np.fromiter(map(len, documents), np.int64, len(documents))
        document_N = np.fromiter((indices[id(sentence.document)] for sentence in examples), np.int64, len(examples))
        sentence_words = list(chain.from_iterable(documents))
        index_in_document = np.fromiter((sentence.index for sentence in examples), np.int64, len(examples))
        sentence_N = (np.cumsum(sentence_counts) - sentence_counts)[document_N] + index_in_document
    else:
        sentence_words = [sentence.words for sentence in examples]
        sentence_counts = np.ones(len(sentence_words), np.int64)
        sentence_N = document_N = np.arange(len(sentence_words))
    word_counts = np.fromiter(map(len, sentence_words), np.int64, len(sentence_words))
    bounds = np.concatenate([[0], np.cumsum(word_counts)])  # first word of each sentence, and the number of words
    document_bounds = bounds[np.concatenate([[0], np.cumsum(sentence_counts)])]
    return _WordTokens(
        tokens=encoder.encode_words(list(chain.from_iterable(sentence_words))),
        first_word=bounds[sentence_N],
        end_word=bounds[sentence_N + 1],
        document_first_word=document_bounds[document_N],
        document_end_word=document_bounds[document_N + 1],
    )


def _context_ranges(
    sentences: _WordTokens, first_token_N: np.ndarray, end_token_N: np.ndarray, capacity: int, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (index of first token, number of tokens) of each sentence with its context, int64 [N] each.

    Context is whole words. Each side gets half of the free tokens, or more if the other has fewer, but at most `limit`.
    """
    starts = sentences.tokens.starts
    max_left = np.minimum(first_token_N - starts[sentences.document_first_word], limit)
    max_right = np.minimum(starts[sentences.document_end_word] - end_token_N, limit)
    free = np.maximum(capacity - (end_token_N - first_token_N), 0)
    left = np.minimum(max_left, free // 2)
    right = np.minimum(max_right, free - left)
    left = np.minimum(max_left, free - right)
    context_start = starts[np.searchsorted(starts, first_token_N - left, "left")]
    context_end = starts[np.searchsorted(starts, end_token_N + right, "right") - 1]
    return context_start, context_end - context_start


def _assign_words(
    sentences: _WordTokens, example_F: np.ndarray, start_F: np.ndarray, length_F: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Assign each word that has a token to one window; return (window indices, word indices), int64 [R], in order.

    If several windows contain a word, take the one in which the smaller of the word's left and right context is largest
    (google-research/bert run_squad.py, _check_is_max_context).
    """
    starts = sentences.tokens.starts
    first_word_F = np.maximum(sentences.first_word[example_F], np.searchsorted(starts, start_F, "left"))
    end_word_F = np.minimum(sentences.end_word[example_F], np.searchsorted(starts, start_F + length_F, "left"))
    counts = np.maximum(end_word_F - first_word_F, 0)
    windows, words = np.repeat(np.arange(len(example_F)), counts), concatenate_ranges(first_word_F, counts)
    has_token = starts[words + 1] > starts[words]
    windows, words = windows[has_token], words[has_token]
    has_several_windows = np.bincount(example_F)[example_F[windows]] > 1 if len(windows) else np.zeros(0, bool)
    candidates = np.flatnonzero(has_several_windows)
    if not len(candidates):
        return windows, words
    windows_K, words_K = windows[candidates], words[candidates]
    # The start and the end of a sentence need no special case: only its first and its last window contain them.
    left, right = starts[words_K] - start_F[windows_K], start_F[windows_K] + length_F[windows_K] - starts[words_K + 1]
    order = np.lexsort((windows_K, -np.minimum(left, right), words_K, example_F[windows_K]))
    is_best = np.ones(len(order), bool)
    is_best[1:] = (np.diff(words_K[order]) != 0) | (np.diff(example_F[windows_K][order]) != 0)
    is_kept = ~has_several_windows
    is_kept[candidates[order[is_best]]] = True
    return windows[is_kept], words[is_kept]
