"""Named entities: a tag for every word, asked at its first subword (Devlin et al. 2018, section 5.3).

Inside there is one set of tags, IOB2 over the types; gold of every scheme is converted, and what conlleval reads
off it stays the same. Words that become no token (control characters, blanks of other alphabets) are O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, Literal, cast

import numpy as np
from pydantic import Field, field_validator

from finetune.datasets.files import is_encoding
from finetune.datasets.sentences import Cut, Remarks, Sentence, in_documents, read_sentences, sentence
from finetune.datasets.text import Column, TextEncoder, frame, ragged, slide
from finetune.datasets.word_cuts import WordCuts
from finetune.datasets.words import cut_words
from finetune.metrics import entities as metrics
from finetune.tasks.base import Head, Objective, Windows
from pretrain.common.errors import InputError
from pretrain.common.settings import LocalPath, Section

logger = logging.getLogger(__name__)

_FORM = (
    ".jsonl and .parquet have records (tokens and tags, or text and entities), anything else columns; .gz, .bz2 and .xz "
    "too."
)


class EntitiesSettings(Section):
    """Named entities from CoNLL columns or JSON lines."""

    train: LocalPath = Field(default="", description=f"Training file. {_FORM}")
    dev: LocalPath = Field(default="", description="Labelled file that chooses the checkpoint; empty for none.")
    test: LocalPath = Field(default="", description="File to predict at the end, with labels or without; may be empty.")
    token_column: int = Field(
        default=0, description="Column of the words, from 0 on; negative numbers count from the last."
    )
    label_column: int = Field(default=-1, description="Column of the tags; a test file of one column has no labels.")
    scheme: Literal["auto", "iob1", "iob2", "bioes"] = Field(
        default="auto",
        description="How the files' tags mark entities (bioes: BILOU too); auto sees it in the training file.",
    )
    encoding: str = Field(default="utf-8", description="Of the files, such as utf-8 or latin-1.")
    labels: tuple[str, ...] = Field(
        default=(), description="Types of entities, such as PER; empty takes those of the training file."
    )
    document_context: bool | int = Field(
        default=False,
        description="Neighbours of a sentence in its document that the model sees around it: true fills the window "
        "(BERT paper), a number is tokens at each side (FLERT: 64). Documents end at -DOCSTART- or `# newdoc`, and columns "
        "without are one; records that follow each other are of one where their `document` is the same, and any other "
        "text is one. Each sentence is still a window of its own, so this costs time.",
    )
    overlap: int = Field(
        default=64,
        ge=0,
        description="Tokens of context kept at each side where a sentence longer than the window is cut; at most a "
        "quarter of the window.",
    )
    metric: Literal["f1", "macro_f1", "strict_f1", "accuracy"] = Field(
        default="f1",
        description="What chooses the checkpoint: entity F1 as conlleval and seqeval have it, its mean over types, "
        "that of seqeval's strict mode, or the share of right tags.",
    )

    @field_validator("document_context")
    @classmethod
    def _check_context(cls, value: bool | int) -> bool | int:
        if value < 0:
            raise ValueError(f"{value} tokens of context; expected true, false or a number from 0 on")
        return value

    @field_validator("encoding")
    @classmethod
    def _check_encoding(cls, value: str) -> str:
        if not is_encoding(value):
            raise ValueError(f"{value!r} is no encoding that Python knows; utf-8 is the usual one")
        return value

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            # B-cell may be a type; with I-cell beside it, it is a tag.
            is_tag = name == "O" or (name.startswith("B-") and f"I-{name[2:]}" in value)
            if is_tag or not name or value.count(name) > 1:
                raise ValueError(f"{name!r}; expected types without prefixes, each once, such as [PER, LOC]")
        return value


class Entities:
    """Implements `finetune.tasks.base.Task`; an example is a `Sentence`, its tags IOB2.

    A prediction:

        {"entities": [{"type", "text", "score", "start", "end", "first_word", "last_word"}], "tags": ["O", ...]}

    `start` and `end` are characters of the text (of the tokens joined by blanks, where there is none), `end` the one
    behind the last; `last_word` is within. `score` is the mean probability of the words' tags. `tags` are the most
    probable ones, whether they follow IOB2 or not; entities are read off them as conlleval does.

    A text is cut into words as those of the training set are, see `WordCuts`.

    What was odd in the files without being wrong is logged, and kept in `remarks`.
    """

    kind = "entities"
    head: Head = "tokens"
    objective: Objective = "classes"
    asks = ("text",)
    tunes = False

    def __init__(self, settings: EntitiesSettings, state: Mapping[str, Any] | None = None) -> None:
        self.settings = settings
        self.metric: str = settings.metric
        self.remarks: list[str] = []
        self._types: tuple[str, ...] = tuple(state["types"]) if state else settings.labels
        self._scheme: metrics.Scheme | None = settings.scheme if settings.scheme != "auto" else None
        self._cuts: WordCuts | None = None
        if state and self._scheme is None:
            self._scheme = state["scheme"]
        if state and "word_cuts" in state:
            self._cuts = WordCuts.from_state(state["word_cuts"])
        self._is_trained = state is not None

    @property
    def labels(self) -> tuple[str, ...]:
        if not self._types:
            self.read_train()
        return ("O", *chain.from_iterable((f"B-{name}", f"I-{name}") for name in self._types))

    @property
    def outputs(self) -> int:
        return len(self.labels)

    def state(self) -> dict[str, Any]:
        """{"types": in the order of the labels, "scheme": of the files, "word_cuts": of `WordCuts`}."""
        cuts = {"word_cuts": self._cuts.state()} if self._cuts else {}
        return {"types": list(self._types), "scheme": self._scheme or "iob2", **cuts}

    # ------------------------------------------------------------ reading

    def read_train(self) -> list[Sentence]:
        if not self.settings.train:
            raise InputError("train: empty. Name the file with the labelled sentences to learn from.")
        sentences = self._read(self.settings.train, labelled=True, is_train=True)
        self._cuts = WordCuts.learn(chain.from_iterable(one.words for one in sentences))
        self._is_trained = True
        return sentences

    def read_held_out(self) -> dict[str, list[Sentence]]:
        if not self.settings.dev:
            return {}
        sentences = self._read_known(self.settings.dev, labelled=True)
        if not any(set(cast(Sequence[str], one.tags)) - {"O"} for one in sentences):
            raise InputError(
                f"{self.settings.dev}: no entity in {len(sentences)} sentences, so nothing to choose a checkpoint by. "
                f"Check label_column ({self.settings.label_column}), or give another dev file."
            )
        return {"dev": sentences}

    def read_test(self) -> dict[str, list[Sentence]]:
        return {"test": self._read_known(self.settings.test, labelled=False)} if self.settings.test else {}

    def read_file(self, path: str, *, labelled: bool = True) -> list[Sentence]:
        return self._read_known(path, labelled=labelled, texts=not labelled)

    def example(self, record: Mapping[str, Any] | str, where: str) -> Sentence:
        """From text, {"text": ...} or {"tokens": [...]}; labels in it are not looked at.

        Its context is known when `with_context` has seen its neighbours.
        """
        if isinstance(record, Mapping):
            record = {key: value for key, value in record.items() if key in ("id", "text", "tokens", "document")}
        return sentence(record, where, Remarks(), self._cut_text)

    def with_context(self, examples: Sequence[Sentence], *, ended: bool) -> tuple[list[Sentence], list[Sentence]]:
        ready = len(examples)
        if not ended and self.settings.document_context and examples and (name := examples[-1].name) is not None:
            while ready and examples[ready - 1].name == name:
                ready -= 1
        return in_documents(examples[:ready]), list(examples[ready:])

    def is_labelled(self, examples: Sequence[Sentence]) -> bool:
        return bool(examples) and all(one.tags is not None for one in examples)

    def record(self, example: Sentence) -> dict[str, Any]:
        """{"id", "text", "gold": its tags}, of these what there is."""
        record = {"id": example.id, "text": example.characters()[0]}
        gold = {} if example.tags is None else {"gold": list(example.tags)}
        return {key: value for key, value in record.items() if value is not None} | gold

    @property
    def _cut_text(self) -> Cut:
        return self._cuts or cut_words

    def _read_known(self, path: str, *, labelled: bool, texts: bool = False) -> list[Sentence]:
        if not self._is_trained:
            self.read_train()
        return self._read(path, labelled=labelled, texts=texts)

    def _read(self, path: str, *, labelled: bool, is_train: bool = False, texts: bool = False) -> list[Sentence]:
        """The sentences of a file with IOB2 tags of known types; the training file is what makes them known."""
        remarks = Remarks()
        settings = self.settings
        sentences = read_sentences(
            path,
            remarks,
            token_column=settings.token_column,
            label_column=settings.label_column,
            encoding=settings.encoding,
            labelled=labelled,
            texts=texts,
            cut=cut_words if is_train else self._cut_text,
        )
        if settings.document_context:
            _check_documents(sentences, remarks)
        if sentences[0].tags is None:
            if labelled:
                raise InputError(
                    f'{sentences[0].where()}: no labels. Give columns of words and tags, or records with "tags" or '
                    f'"entities" ([] where there are none).'
                )
        else:
            sentences = self._with_iob2(sentences, remarks, is_train=is_train)
        self._remark(remarks)
        return sentences

    def _with_iob2(self, sentences: list[Sentence], remarks: Remarks, *, is_train: bool) -> list[Sentence]:
        """`sentences` with IOB2 tags in place of those of the files' scheme."""
        bilou = str.maketrans("LU", "ES")
        numbers = {
            tag: tag[:1].translate(bilou) + tag[1:] for one in sentences for tag in cast(Sequence[str], one.tags)
        }
        _check_tags(sentences, set(numbers))
        found = metrics.tagged([[numbers[tag] for tag in cast(Sequence[str], one.tags)] for one in sentences])
        scheme = "iob2" if all(one.from_spans for one in sentences) else self._scheme
        # A file may have another scheme than the training file: what conlleval reads off it says the same.
        differs = self.settings.scheme == "auto" and scheme != "bioes" and metrics.has_ends(found)
        if scheme is None or differs:
            scheme = metrics.detect(found)
            if is_train:
                self._scheme = scheme
        if is_train and not found.names:
            raise InputError(
                f"{sentences[0].source}: no entity in {len(sentences)} sentences, only O: nothing to learn. Check "
                f"label_column ({self.settings.label_column})."
            )
        if is_train and not self._types:
            self._types = tuple(sorted(found.names))
        self._check_types(sentences, found)
        self._check_scheme(sentences, found, scheme, remarks)
        prefixes = metrics.write(metrics.find(found), found.starts, "iob2")
        names = np.array([[f"{prefix}-{name}" for name in found.names] + ["O"] for prefix in "OBI"], object)
        tags = names[prefixes, np.where(prefixes == metrics.OUTSIDE, -1, found.types)].tolist()
        return [
            replace(one, tags=tags[first:behind])
            for one, first, behind in zip(sentences, found.starts[:-1].tolist(), found.starts[1:].tolist(), strict=True)
        ]

    def _check_types(self, sentences: list[Sentence], found: metrics.Tagged) -> None:
        unknown = np.array([name not in self._types for name in found.names] + [False])
        if not unknown.any():
            return
        where, word = _place(sentences, found, int(np.flatnonzero(unknown[found.types])[0]))
        raise InputError(
            f"{where}: the type {found.names[found.types[word]]!r} is not among those "
            f"{'set in labels' if self.settings.labels else 'of the training set'} ({', '.join(self._types)}). "
            f"Correct it, or train with `labels` set to all types there are."
        )

    def _check_scheme(
        self, sentences: list[Sentence], found: metrics.Tagged, scheme: metrics.Scheme, remarks: Remarks
    ) -> None:
        if scheme != "bioes" and metrics.has_ends(found):
            where, _ = _place(sentences, found, int(np.flatnonzero(found.prefixes > metrics.INSIDE)[0]))
            raise InputError(f"{where}: a tag of bioes, where the scheme is {scheme}. Set `scheme: bioes` or auto.")
        slips = metrics.slips(found, scheme)
        if len(slips):
            where, _ = _place(sentences, found, int(slips[0]))
            remarks.add(f"a tag that does not follow {scheme}; read as conlleval reads it", where, len(slips))

    def _remark(self, remarks: Remarks) -> None:
        for line in remarks.lines():
            self.remarks.append(line)
            logger.warning(line)

    # ------------------------------------------------------------ windows

    def windows(self, examples: Sequence[Sentence], encoder: TextEncoder, *, training: bool) -> Windows:
        """Every word that has a token is asked in one window, at its first: the one that sees most around it.

        In training each window counts as an example, since nothing joins them: a sentence of any length fits into
        micro-batches.
        """
        room = encoder.room(pair=False)
        if room < 1:
            raise InputError(f"windows of {encoder.max_length} tokens hold no word. Make them longer.")
        laid = _lay_out(examples, encoder, with_documents=bool(self.settings.document_context))
        example, begin, length = self._cut(laid, room)
        window, word = _assign(laid, example, begin, length)
        # A window in the middle of one endless word is asked nothing.
        kept = np.bincount(window, minlength=len(example)) > 0
        if not training:  # an example has one at least, also one without words
            kept |= np.bincount(example[kept], minlength=len(examples))[example] == 0
        window = (np.cumsum(kept) - 1)[window]
        example, begin, length = example[kept], begin[kept], length[kept]
        framed = frame(encoder, (laid.column.ids, begin, length))
        asked = framed.first[window] + laid.column.starts[word] - begin[window]
        number = word - laid.first[example[window]]
        return Windows(
            ids=framed.ids,
            types=framed.types,
            starts=framed.starts,
            examples=np.arange(len(example)) if training else example,
            asked=asked,
            labels=self._numbers(examples, example[window], number),
            weights=np.ones(len(asked), np.float32),
            extra={"word": number},
        )

    def _cut(self, laid: _Laid, room: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(example, first token, tokens), int64 [F] each."""
        first, behind = laid.column.starts[laid.first], laid.column.starts[laid.behind]
        overlap = 2 * min(self.settings.overlap, room // 4)
        example, begin, length = slide(behind - first, room, overlap)
        begin = begin + first[example]
        # The last window of a long sentence reaches back as far as it can, and sees more.
        is_long = (behind - first > room)[example]
        short_by = np.where(is_long, room - length, 0)
        begin, length = begin - short_by, length + short_by
        context = self.settings.document_context
        if context:
            most = room if context is True else int(context)
            around_begin, around_length = _with_neighbours(laid, first, behind, room, most)
            begin = np.where(is_long, begin, around_begin[example])
            length = np.where(is_long, length, around_length[example])
        return example, begin, length

    def _numbers(self, examples: Sequence[Sentence], example: np.ndarray, word: np.ndarray) -> np.ndarray:
        """int64 [R]: label of each row, given its example and which word of it is asked; 0 where none is known."""
        numbers = {tag: number for number, tag in enumerate(self.labels)}
        counts = np.fromiter((len(one.words) for one in examples), np.int64, len(examples))
        tags = chain.from_iterable(one.tags if one.tags is not None else ["O"] * len(one.words) for one in examples)
        gold = np.fromiter(map(numbers.__getitem__, tags), np.int64, int(counts.sum()))
        return gold[(np.cumsum(counts) - counts)[example] + word]

    # ------------------------------------------------------------ predictions

    def decode(self, examples: Sequence[Sentence], windows: Windows, logits: np.ndarray) -> list[dict[str, Any]]:
        names = np.array(self.labels, object)
        counts = np.fromiter((len(one.words) for one in examples), np.int64, len(examples))
        starts = np.concatenate([[0], np.cumsum(counts)])
        example = windows.examples[np.searchsorted(windows.starts, windows.asked, "right") - 1]
        at = starts[example] + windows.extra["word"]
        best, probability = np.zeros(starts[-1], np.int64), np.ones(starts[-1])
        best[at] = logits.argmax(-1)
        above = logits.astype(np.float64) - logits.max(-1, keepdims=True)
        probability[at] = 1 / np.exp(above).sum(-1)
        # Labels are O, then B and I of each type.
        prefixes = np.where(best == 0, metrics.OUTSIDE, 2 - best % 2).astype(np.uint8)
        spans = metrics.find(metrics.Tagged(prefixes, (best - 1) // 2, starts, self._types))
        total = np.concatenate([[0.0], np.cumsum(probability)])
        scores = (total[spans.behind] - total[spans.first]) / (spans.behind - spans.first)
        owner = np.searchsorted(starts, spans.first, "right") - 1
        tags = names[best].tolist()
        predictions: list[dict[str, Any]] = [
            {"entities": [], "tags": tags[first:behind]}
            for first, behind in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        ]
        for number, group in _groups(owner):
            text, offsets = examples[number].characters()
            predictions[number]["entities"] = [
                _entity(self._types[kind], text, offsets, first, last, score)
                for kind, first, last, score in zip(
                    spans.types[group].tolist(),
                    (spans.first[group] - starts[number]).tolist(),
                    (spans.behind[group] - starts[number] - 1).tolist(),
                    scores[group].tolist(),
                    strict=True,
                )
            ]
        return predictions

    def tune(self, examples: Sequence[Sentence], predictions: Sequence[Mapping[str, Any]]) -> None:
        """There is nothing to choose."""

    def scorer_files(self, examples: Sequence[Sentence], predictions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Columns for conlleval, parted by blanks: word, right tag where all have one, predicted tag. IOB2.

        None where the words are no one else's: texts without labels.
        """
        if all(one.from_text and one.tags is None for one in examples):
            return {}
        columns = []
        for one, prediction in zip(examples, predictions, strict=True):
            rows = [
                map(_as_field, one.words),
                *([one.tags] if one.tags is not None else []),
                prediction["tags"],
            ]
            columns += [" ".join(row) for row in zip(*rows, strict=True)] + [""]
        return {".tags.conll": "\n".join(columns) + "\n"}

    # ------------------------------------------------------------ scores

    def score(self, examples: Sequence[Sentence], predictions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """precision, recall, f1 (conlleval, seqeval's default mode), macro_f1, strict_* (IOB2), accuracy of tags."""
        gold, predicted = self._both(examples, predictions)
        counts = metrics.count(gold, predicted)
        strict = metrics.count(gold, predicted, "iob2")
        return {
            **counts.overall,
            "macro_f1": counts.macro_f1,
            **{f"strict_{name}": value for name, value in strict.overall.items()},
            "accuracy": metrics.accuracy(gold, predicted),
        }

    def details(self, examples: Sequence[Sentence], predictions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """{"types": {type: {precision, recall, f1, support}}, "sentences", "words", "entities"}."""
        gold, predicted = self._both(examples, predictions)
        counts = metrics.count(gold, predicted)
        return {
            "types": counts.by_type,
            "sentences": len(examples),
            "words": len(gold),
            "entities": int(counts.gold.sum()),
        }

    def _both(
        self, examples: Sequence[Sentence], predictions: Sequence[Mapping[str, Any]]
    ) -> tuple[metrics.Tagged, metrics.Tagged]:
        for one in examples:
            if one.tags is None:
                raise InputError(f"{one.where()}: no labels, so nothing to score against.")
        gold = metrics.tagged([cast(Sequence[str], one.tags) for one in examples], self._types)
        return gold, metrics.tagged([prediction["tags"] for prediction in predictions], gold.names)


@dataclass(frozen=True)
class _Laid:
    """The words of all texts end to end as tokens, and which of them the examples (N) and their documents are."""

    column: Column
    first: np.ndarray  # int64 [N], first word
    behind: np.ndarray  # int64 [N], the word behind the last
    document_first: np.ndarray  # int64 [N]
    document_behind: np.ndarray  # int64 [N]


def _lay_out(examples: Sequence[Sentence], encoder: TextEncoder, *, with_documents: bool) -> _Laid:
    if with_documents:
        documents = list({id(one.document): one.document for one in examples}.values())
        numbers = {id(document): number for number, document in enumerate(documents)}
        sizes = np.fromiter(map(len, documents), np.int64, len(documents))
        of = np.fromiter((numbers[id(one.document)] for one in examples), np.int64, len(examples))
        pieces = list(chain.from_iterable(documents))
        piece = (np.cumsum(sizes) - sizes)[of] + np.fromiter((one.place for one in examples), np.int64, len(examples))
    else:
        pieces = [one.words for one in examples]
        sizes = np.ones(len(pieces), np.int64)
        piece = of = np.arange(len(pieces))
    bounds = np.concatenate([[0], np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))])
    document_bounds = bounds[np.concatenate([[0], np.cumsum(sizes)])]
    return _Laid(
        column=encoder.encode_words(list(chain.from_iterable(pieces))),
        first=bounds[piece],
        behind=bounds[piece + 1],
        document_first=document_bounds[of],
        document_behind=document_bounds[of + 1],
    )


def _with_neighbours(
    laid: _Laid, first: np.ndarray, behind: np.ndarray, room: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """(first token, tokens) of each sentence with at most `most` tokens of its document at each side, whole words.

    Both sides get the same, unless the document ends; then the other side gets the rest.
    """
    starts = laid.column.starts
    before = np.minimum(first - starts[laid.document_first], most)
    after = np.minimum(starts[laid.document_behind] - behind, most)
    spare = np.maximum(room - (behind - first), 0)
    left = np.minimum(before, spare // 2)
    right = np.minimum(after, spare - left)
    left = np.minimum(before, spare - right)
    begin = starts[np.searchsorted(starts, first - left, "left")]
    end = starts[np.searchsorted(starts, behind + right, "right") - 1]
    return begin, end - begin


def _assign(laid: _Laid, example: np.ndarray, begin: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(window, word), int64 [R] each, in order: every word that has a token, once.

    Of several windows a word is given to the one that shows most of the sentence on the side where it shows less
    (google-research/bert run_squad.py, _check_is_max_context).
    """
    starts = laid.column.starts
    first, behind = laid.first[example], laid.behind[example]
    seen_first = np.maximum(first, np.searchsorted(starts, begin, "left"))
    seen_behind = np.minimum(behind, np.searchsorted(starts, begin + length, "left"))
    seen = np.maximum(seen_behind - seen_first, 0)
    window, word = np.repeat(np.arange(len(example)), seen), ragged(seen_first, seen)
    has_token = starts[word + 1] > starts[word]
    window, word = window[has_token], word[has_token]
    shared = np.bincount(example)[example[window]] > 1 if len(window) else np.zeros(0, bool)
    rival = np.flatnonzero(shared)
    if not len(rival):
        return window, word
    one, it = window[rival], word[rival]
    # The first and the last window miss nothing at the sentence's ends, and no other shows more there: no exception.
    before, after = starts[it] - begin[one], begin[one] + length[one] - starts[it + 1]
    order = np.lexsort((one, -np.minimum(before, after), it, example[one]))
    is_first = np.ones(len(order), bool)
    is_first[1:] = (np.diff(it[order]) != 0) | (np.diff(example[one][order]) != 0)
    kept = ~shared
    kept[rival[order[is_first]]] = True
    return window[kept], word[kept]


def _as_field(word: str) -> str:
    """A word that is one column for those who part them at white space."""
    return "_".join(word.split()) or "_"


def _check_documents(sentences: list[Sentence], remarks: Remarks) -> None:
    """Tell of documents that come in several parts."""
    seen: set[str] = set()
    for one in sentences:
        if one.place == 0 and one.name is not None:
            if one.name in seen:
                remarks.add(
                    f"document {one.name!r} goes on after another one; its parts are no context of each other",
                    one.where(),
                )
            seen.add(one.name)


def _check_tags(sentences: list[Sentence], distinct: set[str]) -> None:
    wrong = {tag for tag in distinct if tag != "O" and not (tag[:1] in "BIESLU" and tag[1:2] == "-" and tag[2:])}
    if not wrong:
        return
    for one in sentences:
        for number, tag in enumerate(cast(Sequence[str], one.tags)):
            if tag in wrong:
                raise InputError(
                    f"{one.where(number)}: {tag!r} is no tag; expected O, or a prefix and a type such as B-PER. "
                    f"Check label_column."
                )


def _place(sentences: list[Sentence], found: metrics.Tagged, word: int) -> tuple[str, int]:
    """File and line of a word counted over all sentences, and that word."""
    number = int(np.searchsorted(found.starts, word, "right")) - 1
    return sentences[number].where(word - int(found.starts[number])), word


def _groups(owner: np.ndarray) -> Iterator[tuple[int, slice]]:
    """(number, places) of each run of equal numbers."""
    edges = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
    for first, behind in pairwise(edges):
        if behind > first:
            yield int(owner[first]), slice(first, behind)


def _entity(kind: str, text: str, offsets: np.ndarray, first: int, last: int, score: float) -> dict[str, Any]:
    begin, end = int(offsets[first, 0]), int(offsets[last, 1])
    return {
        "type": kind,
        "text": text[begin:end],
        "score": score,
        "start": begin,
        "end": end,
        "first_word": first,
        "last_word": last,
    }
