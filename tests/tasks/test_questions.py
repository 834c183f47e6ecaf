"""Span questions: files, windows, answers, thresholds. The reference behaviors are written again, slowly, below."""

from __future__ import annotations

import gzip
import json
import logging
import math
import unicodedata
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from corpora import make_vocabulary, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from finetune.tasks.base import Windows
from finetune.tasks.datasets.squad import Answer, Question, read
from finetune.tasks.datasets.text import TextEncoder
from finetune.tasks.questions import Questions, QuestionsSettings
from finetune.tasks.questions.decoding import N_BEST, has_most_context
from pretrain.common.errors import InputError
from pretrain.common.settings import load
from tests.tasks.refusals import refused

# A tokenizer with a vocabulary of letters: `cat` is c ##a ##t, what is not ASCII is [UNK].


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, make_vocabulary(120))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def encoder(tokenizer) -> TextEncoder:
    return TextEncoder(tokenizer, 32)


@pytest.fixture(scope="session")
def cased() -> Tokenizer:
    """WordPiece that changes nothing in the text."""
    words = [*make_vocabulary(120), *"éü中京", "##\u0301", "##\ufe0f"]
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


@pytest.fixture(scope="session")
def bytewise() -> Tokenizer:
    """A byte-level BPE without merges, as RoBERTa has it: several tokens for one character."""
    words = ["<s>", "<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return tokenizer


def task(state: dict[str, Any] | None = None, **given: Any) -> Questions:
    return Questions(QuestionsSettings(**{"stride": 5, "max_question_tokens": 8, **given}), state)


def ask(
    context: str, answer: str | None = None, start: int | None = None, text: str = "who", id: str = "1"
) -> Question:
    """A question; answer None is none known, "" is none in the context."""
    if not answer:
        return Question(id, text, context, None if answer is None else ())
    return Question(id, text, context, (Answer(answer, context.index(answer) if start is None else start),))


def nested(*questions: Question, **more: Any) -> dict[str, Any]:
    paragraphs = []
    for one in questions:
        qa: dict[str, Any] = {"id": one.id, "question": one.text}
        if one.answers is not None:
            qa["answers"] = [{"text": a.text, "answer_start": a.start} for a in one.answers]
        paragraphs.append({"context": one.context, "qas": [qa]})
    return {"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}], **more}


def write(path: Path, content: Any) -> str:
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    else:
        path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return str(path)


CAT = ask("The cat sat.", "cat", text="Who sat?", id="a")
DOG = ask("The cat sat.", "", text="Who ran?", id="b")


# ---------------------------------------------------------------- files


def test_folds_keep_the_questions_of_a_text_together_and_intervals_are_of_means() -> None:
    asked = [ask(f"The cat {n // 2} sat.", "cat", id=str(n)) for n in range(60)]
    one = task(train="x", unanswerable=False)
    folds = one.folds(asked, 3)
    assert folds[::2] == folds[1::2]
    assert sorted(folds) == sorted([0, 1, 2] * 20)
    made = [
        {"id": each.id, "no_answer_score": 0.0, "best_non_empty": "cat" if n % 4 else "sat"}
        for n, each in enumerate(asked)
    ]
    low, high = one.interval(asked, made) or (0, 0)
    half = 1.96 * (0.75 * 0.25 / 60) ** 0.5
    assert (low, high) == pytest.approx((0.75 - half, 0.75 + half), abs=0.02)


def test_forms_read_alike(tmp_path):
    flat = [
        {"id": "a", "question": "Who sat?", "answers": {"text": ["cat"], "answer_start": [4]}},
        {"id": "b", "question": "Who ran?", "answers": []},
    ]
    flat = [one | {"context": "The cat sat."} for one in flat]
    lines = "\n\n".join(map(json.dumps, flat)) + "\n"
    files = [
        write(tmp_path / "nested.json", nested(CAT, DOG)),
        write(tmp_path / "list.json", flat),
        write(tmp_path / "data.json", {"version": "x", "data": flat}),
        write(tmp_path / "lines.jsonl", lines),
        write(tmp_path / "bom.JSONL", b"\xef\xbb\xbf" + lines.encode()),
        write(tmp_path / "packed.jsonl.gz", gzip.compress(lines.encode())),
    ]
    for file in files:
        assert read(file, labeled=True) == [CAT, DOG], file
    first, second = read(files[3], labeled=True)
    assert first.context is second.context


def test_odd_but_right(tmp_path):
    answers = [{"text": "y\r z", "answer_start": 2}]
    record = {"question": "a\u2028b\u0085?", "context": "x\u2028y\r z", "answers": answers}
    lines = json.dumps(record, ensure_ascii=False) + "\r\n" + json.dumps({**record, "id": 7, "is_impossible": False})
    with (tmp_path / "a.jsonl").open("w", encoding="utf-8", newline="") as file:
        file.write(lines)
    found = read(str(tmp_path / "a.jsonl"), labeled=True)
    assert [one.id for one in found] == ["1", "7"]
    assert found[0].text == "a\u2028b\u0085?"
    assert found[0].answers == (Answer("y\r z", 2),)
    unlabeled = read(write(tmp_path / "b.json", nested(ask("The cat."))), labeled=False)
    assert unlabeled[0].answers is None


def good(**change: Any) -> str:
    record = {"id": "q", "question": "Who?", "context": "The cat.", "answers": [], **change}
    return json.dumps({key: value for key, value in record.items() if value != "left out"})


LINES = [
    ("", r"a.jsonl: is empty. Give a SQuAD file"),
    ("\n \n", r"a.jsonl: is empty"),
    (b'{"id": "1",\n "\xff', r"a.jsonl:2: byte 14 \(0xff\) is not UTF-8. Save the file as UTF-8"),
    (b'\xef\xbb\xbf\n"\xff', r"a.jsonl:2: byte 5 \(0xff\) is not UTF-8"),
    (good() + "\n{", r"a.jsonl:2: not JSON \(.* column 2 .*\). Write one object on each line"),
    ("[" * 200_000, r"a.jsonl:1: not JSON"),
    ("1" * 5000, r"a.jsonl:1: not JSON \(Exceeds the limit"),
    ("[1]", r"a.jsonl:1: is a list of 1; expected a flat record"),
    (json.dumps(nested(CAT)), r'1: is an object of version, data; .* A nested SQuAD file must be named "\.json"'),
    (good(context="left out"), r"a.jsonl:1: is an object of id, question, answers; expected a flat record"),
    (good(context=None), r"a.jsonl:1 \(id q\): context is missing; expected text"),
    (good(question=3), r"a.jsonl:1 \(id q\): question is 3; expected text"),
    (good(id=["x"]), r"a.jsonl:1: id is a list of 1; expected text"),
    (good(id=True), r"a.jsonl:1: id is true; expected text"),
    (good(answers="left out"), r"a.jsonl: 1 of 1 rows left out: 1 unlabeled. Give answers to questions."),
    (good(answers="cat"), r"answers is text \('cat'\); expected \[\{"),
    (good(answers=["cat"]), r"an answer is text \('cat'\); expected \{"),
    (good(answers={"text": ["cat"]}), r"answers is an object of text; expected"),
    (good(answers={"text": ["cat"], "answer_start": []}), r"answers has 1 text and 0 answer_start"),
    (good(answers=[{"text": "cat"}]), r"answer_start is missing; expected a character index"),
    (good(answers=[{"text": "cat", "answer_start": "4"}]), r"answer_start is text \('4'\)"),
    (good(answers=[{"text": None, "answer_start": 4}]), r"the text of an answer is missing"),
    (good(is_impossible=False), r"a.jsonl:1 \(id q\): is_impossible is false, but there are 0 answers"),
    (good(is_impossible=True, answers=[{"text": "cat", "answer_start": 4}]), r"is_impossible is true, but there are 1"),
    (good() + "\n\n" + good(), r"a.jsonl:3: id 'q' is already used in .*a.jsonl:1. .* make them unique"),
    (good(context="ab\ud83dc"), r"a.jsonl:1 \(id q\): context has half of a surrogate pair at character 2 \(\\ud83d\)"),
    (good(id="\ud83d"), r"a.jsonl:1: id has half of a surrogate pair at character 0"),
    ("5", r"a.jsonl:1: is 5; expected a flat record with id, question, context and answers\.$"),
    ("true", r"a.jsonl:1: is true; expected a flat record with id, question, context and answers\.$"),
]

DOCUMENTS = [
    ("{", r"a.json: not JSON \(.* line 1 column 2"),
    ("1" * 5000, r"a.json: not JSON \(Exceeds the limit"),
    (good() + "\n" + good(), r'a.json: not JSON \(Extra data: line 2 column 1 .*\). A file .* must be named ".jsonl"'),
    ("3", r"a.json: is 3; expected a SQuAD file .* or flat records"),
    ('{"version": "1.1", "data": []}', r"a.json: has no questions\."),
    ('{"data": [{"title": "", "paragraphs": []}]}', r"a.json: has no questions\."),
    ('{"Data": []}', r"a.json: is an object of Data; expected a SQuAD file"),  # TriviaQA
    ('{"data": [{"story": "", "questions": []}]}', r"data\[0\]: is an object of story, questions; expected"),  # CoQA
    ('{"data": {"a": 1}}', r"a.json: is an object of data; expected"),
    ("[3]", r"a.json: record\[0\]: is 3; expected"),
    ('{"data": [{"paragraphs": {}}]}', r"a.json: data\[0\]: paragraphs is an object; expected a list"),
    ('{"data": [{"paragraphs": [3]}]}', r"data\[0\].paragraphs\[0\]: is 3; expected an object of context and qas"),
    ('{"data": [{"paragraphs": [{"context": ""}]}]}', r"data\[0\].paragraphs\[0\]: qas is missing; expected a list"),
    ('{"data": [{"paragraphs": [{"context": "", "qas": ["x"]}]}]}', r"qas\[0\]: is text \('x'\)"),
    ('{"data": [{"paragraphs": [{"qas": [{"id": "i", "question": ""}]}]}]}', r"qas\[0\] \(id i\): context is missing"),
    ('{"data": [{"paragraphs": [{"context": "", "qas": [{"question": ""}]}]}]}', r"qas\[0\]: id is missing"),
]


PACKED = [
    ("a.json.gz", b"no archive", r"a.json.gz: cannot be read \(.+\)"),
    ("a.json.xz", b"no archive", r"a.json.xz: cannot be read \(.+\)"),
    ("cut.json.gz", gzip.compress(json.dumps(nested(CAT)).encode())[:-9], r"cannot be read .* Fetch it again"),
    ("none.json", None, r"none.json: not found. Check"),
]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("a.jsonl", *one) for one in LINES] + [("a.json", *one) for one in DOCUMENTS] + PACKED,
)
def test_bad_files(tmp_path, name, content, message):
    path = str(tmp_path / name) if content is None else write(tmp_path / name, content)
    refused(message, read, path, labeled=True)


def test_sets_that_are_not_named_are_empty_but_for_training():
    refused(r"questions.train: empty. Give a file", task().read_train)
    assert task().read_held_out() == task().read_test() == {}


def records(path: Path, *changes: dict[str, Any]) -> str:
    """A .jsonl of questions, each with the changes of one."""
    usual = {"question": "Who sat?", "context": "The cat sat.", "answers": [{"text": "cat", "answer_start": 4}]}
    return write(path, "".join(json.dumps({"id": str(n), **usual, **one}) + "\n" for n, one in enumerate(changes)))


@pytest.mark.parametrize("blank", ["", " "])
def test_a_blank_answer_at_minus_1_is_none(tmp_path: Path, blank: str) -> None:
    for answers in ([{"text": blank, "answer_start": -1}], {"text": [blank], "answer_start": [-1]}):
        path = records(tmp_path / "a.jsonl", {}, {"answers": answers}, {"answers": answers, "is_impossible": True})
        made = task(train=path, bad_answers="skip")
        assert [one.answers for one in made.read_train()][1:] == [(), ()]
        assert made.unanswerable


def test_a_file_to_be_answered_may_leave_its_answers_out(tmp_path: Path) -> None:
    path = records(tmp_path / "a.jsonl", *({"answers": [], "is_impossible": one} for one in (False, True)))
    assert [one.answers for one in task(test=path, unanswerable=True).read_test()["test"]] == [None, ()]
    assert [one.answers for one in task().read_file(path, labeled=False)] == [None, ()]
    refused("is_impossible is false, but there are 0 answers", task(dev=path).read_held_out)


def test_a_trained_model_is_scored_with_wrong_offsets(tmp_path: Path, caplog: Any) -> None:
    path = records(tmp_path / "a.jsonl", {"answers": [{"text": "cat", "answer_start": 3}]})
    refused("bad_answers: skip", task(dev=path).read_held_out)
    state = {"unanswerable": False, "threshold": 0.0}
    trained = task(state, train="gone.jsonl")
    for labeled in (True, False):
        caplog.clear()
        (found,) = trained.read_file(path, labeled=labeled)
        assert found.answers == (Answer("cat", 3),)
        assert "1 of 1 answers are not at their answer_start" in caplog.text
    refused("bad_answers: skip", task(state, train=path).read_train)


def test_bad_answers(tmp_path, caplog):
    bad = [
        CAT,
        ask("The cat sat.", "cat", 5, id="late"),
        ask("The  cat sat.", "The cat", 0, id="blank"),
        ask("The cat sat.", "dog", 99, id="far"),
        ask("The cat sat.", "The", -12, id="negative"),
        Question("both", "who", "The cat sat.", (Answer("sat", 7), Answer("sat", 8))),
        ask("The cat sat.", " ", 3, id="white"),
    ]
    file = write(tmp_path / "train.json", nested(*bad))
    shown = (
        r"train.json: 6 of 8 answers are not at their answer_start \(question late: 'cat' at 5, where the context "
        r"of 12 characters has 'at '; it is at 4; question blank: 'The cat' at 0, .* has 'The  ca'; "
        r"the context does not contain it; question far: 'dog' at 99, .* has ''; "
        r"the context does not contain it; \.\.\.\)"
    )
    refused(shown + r". Correct answer_start, .* bad_answers: skip", task(train=file).read_train)
    with caplog.at_level(logging.WARNING):
        kept = task(train=file, bad_answers="skip").read_train()
    assert [(one.id, one.answers) for one in kept] == [("a", (Answer("cat", 4),)), ("both", (Answer("sat", 8),))]
    assert "6 of 8 answers" in caplog.text
    assert "skipped, with 5 questions that have no other answer" in caplog.text
    # To score on, texts alone are compared: leaving any out would not be the official score.
    held_out = task(dev=file, bad_answers="skip").read_held_out()["dev"]
    assert [len(one.answers or ()) for one in held_out] == [1, 1, 1, 1, 1, 2, 1]
    refused("5 of 8 answers", task(dev=file).read_held_out)
    spaced = task(train=write(tmp_path / "b.json", nested(ask("a\u00a0b c", "a b", 0))))
    refused(r"'a b' at 0, .* has 'a\\xa0b'; only whitespace differs", spaced.read_train)
    only = write(tmp_path / "only.json", nested(bad[1]))
    refused(r"only.json: no question has a good answer", task(train=only, bad_answers="skip").read_train)


def test_unanswerable_follows_the_training_set(tmp_path):
    v1, v2 = write(tmp_path / "1.json", nested(CAT)), write(tmp_path / "2.json", nested(CAT, DOG))
    one = task(train=v1, dev=v2, metric="exact")
    one.read_train()
    assert (one.unanswerable, one.metric, one.state()["unanswerable"]) == (False, "exact_match", False)
    refused(r"2.json: 1 of 2 questions have no answer, first b, but the training set has", one.read_held_out)
    two = task(train=v2, dev=v1, metric="exact")
    two.read_train()
    assert (two.unanswerable, two.metric) == (True, "exact")
    assert two.read_held_out() == {"dev": [CAT]}
    refused(r"but unanswerable is false. Set unanswerable: true", task(train=v2, unanswerable=False).read_train)
    trained = task(two.state(), test=v1)
    assert trained.unanswerable
    assert trained.read_test() == {"test": [CAT]}
    forced = task(one.state(), unanswerable=True)
    assert forced.read_file(v2) == [CAT, DOG]
    # A released model, never trained here: the labeled set decides.
    released = task(test=write(tmp_path / "3.json", nested(ask("The cat."))))
    released.read_test()
    released.read_file(v2)
    assert released.unanswerable


def test_settings_from_yaml(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("train: a.json\nunanswerable: true\nthreshold: -1.5\n")
    assert load(path, QuestionsSettings).unanswerable is True
    assert Questions(load(path, QuestionsSettings), {"threshold": 2.0}).threshold == -1.5
    path.write_text("unanswerable: maybe\n")
    refused(r"a.yaml:1: unanswerable is 'maybe'; expected 'auto', true or false", load, path, QuestionsSettings)


def test_example():
    assert task().example({"question": "who", "context": "The cat."}, "here:3") == Question("here:3", "who", "The cat.")
    assert task().example({"id": 5, "question": "w", "context": "c", "answers": "?"}, "x").id == "5"
    refused(r'here: is text \(\'who\'\)\. A span question needs a context: .*"context"', task().example, "who", "here")
    refused(r"here: context is missing; expected text", task().example, {"question": "who"}, "here")


# ---------------------------------------------------------------- windows


def window(windows: Windows, number: int) -> slice:
    return slice(int(windows.starts[number]), int(windows.starts[number + 1]))


letters = st.text("abc  .", max_size=60)


@given(st.lists(st.tuples(letters, st.text("abc ", max_size=8)), max_size=4), st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_windows_are_those_of_the_tokenizer(tokenizer, encoder, made, stride):
    """With `only_second` truncation and a stride, tokenizers cut a pair as run_qa.py does."""
    questions = [ask(context, text=text, id=str(number)) for number, (context, text) in enumerate(made)]
    windows = task(stride=stride).windows(questions, encoder, training=False)
    reference = Tokenizer.from_str(tokenizer.to_str())
    reference.enable_truncation(32, stride=stride, strategy="only_second")
    expected = []
    for number, (context, text) in enumerate(made):
        encoding = reference.encode(text.strip(), context)
        expected += [(number, part.ids, part.type_ids) for part in (encoding, *encoding.overflowing)]
    found = [
        (int(example), windows.ids[window(windows, number)].tolist(), windows.types[window(windows, number)].tolist())
        for number, example in enumerate(windows.examples)
    ]
    assert found == expected
    assert windows.queries.tolist() == list(range(len(windows.ids)))
    assert (windows.ids.dtype, windows.types.dtype, windows.starts.dtype) == (np.int32, np.uint8, np.int64)
    assert not windows.labels.any()  # nobody has said the answers
    assert not windows.weights.any()


def test_labels(encoder):
    context = "aaaa bbbb cccc dddd eeee ffff gggg"  # 28 tokens, one a letter
    made = [
        ask(context, "cccc", id="1"),
        ask(context, "", id="2"),
        ask(context, "bbb", 6, id="3"),
        ask("ab", "b", id="4"),
    ]
    windows = task(max_question_tokens=4).windows(made, encoder, training=True)
    # who is 3 tokens: 26 of the context in a window; the second begins 21 further on.
    assert np.diff(windows.starts).tolist() == [32, 13, 32, 13, 32, 13, 8]
    assert windows.examples.tolist() == list(range(7)), "in training each window is an example"
    predicted_from = task(max_question_tokens=4).windows(made, encoder, training=False)
    assert predicted_from.examples.tolist() == [0, 0, 1, 1, 2, 2, 3]
    context_start = 5  # behind [CLS] w ##h ##o [SEP]
    first, third = (context_start + 8, context_start + 11), (context_start + 5, context_start + 7)
    expected = [first, (0, 0), (0, 0), (0, 0), third, (0, 0), (6, 6)]
    for number, places in enumerate(expected):
        labels = windows.labels[window(windows, number)]
        assert (labels.sum(0) == 1).all()
        assert tuple(labels.argmax(0)) == places
    assert windows.labels.dtype == np.uint8
    assert np.flatnonzero(windows.weights).tolist() == windows.starts[:-1].tolist()
    assert (windows.weights[windows.starts[:-1]] == 1).all()
    assert windows.weights.dtype == np.float32


def test_an_answer_must_be_whole_in_its_window(encoder):
    context = "abcdefghij" * 5  # 50 tokens in windows of 26, at 0, 21 and 42
    for start, length, holds in ((24, 2, [1, 1, 0]), (25, 2, [0, 1, 0]), (20, 2, [1, 0, 0]), (20, 7, [0, 0, 0])):
        question = Question("1", "who", context, (Answer(context[start : start + length], start),))
        windows = task().windows([question], encoder, training=True)
        assert [1 - int(windows.labels[first, 0]) for first in windows.starts[:-1]] == holds
        assert [1 - int(windows.labels[first, 1]) for first in windows.starts[:-1]] == holds


def test_answers_longer_than_the_overlap(encoder, caplog):
    context = "abcdefghij" * 5
    made = [Question(str(n), "who", context, (Answer(context[20 : 20 + n], 20),)) for n in (5, 7, 30)] + [DOG]
    with caplog.at_level(logging.WARNING):
        task().windows(made, encoder, training=True)
    assert (
        "2 questions are trained as having no answer, since no window contains their whole answer; the first is 7."
        in caplog.text
    )
    caplog.clear()
    task().windows([made[0], DOG], encoder, training=True)
    assert not caplog.text


def test_long_questions_are_truncated_with_a_warning(encoder, caplog):
    made = [ask("cat", "cat", text="abcdefghijkl", id="long"), ask("cat", "cat", text="  abcdefgh ", id="just")]
    with caplog.at_level(logging.WARNING):
        windows = task().windows(made, encoder, training=True)
    assert np.diff(windows.starts).tolist() == [14, 14]
    assert windows.ids[:14].tolist() == windows.ids[14:].tolist()
    assert (
        "1 of 2 questions are longer than max_question_tokens 8 and are cut; the longest, long, has 12." in caplog.text
    )


def test_spaces_around_a_question_are_not_tokens(bytewise):
    windows = task().windows(
        [ask("cat", text=" who\n"), ask("cat", text="who")], TextEncoder(bytewise, 32), training=True
    )
    assert windows.ids[window(windows, 0)].tolist() == windows.ids[window(windows, 1)].tolist()


def test_windows_too_short(encoder):
    with pytest.raises(
        InputError, match=r"a window of 32 tokens holds 29 tokens of text.* set stride to at most 10\."
    ) as raised:
        task(stride=21).windows([CAT], encoder, training=True)
    task(stride=20).windows([CAT], encoder, training=True)
    assert "\n" not in str(raised.value)
    with pytest.raises(InputError, match=r"set max_question_tokens to at most 7 and stride to at most 7"):
        task(max_question_tokens=29).windows([CAT], encoder, training=True)


def test_an_answer_without_a_token_is_not_learned_from(encoder, caplog):
    made = [Question("1", "who", "ab \u0301 c", (Answer("\u0301", 3),)), ask("ab", "ab", id="2")]
    with caplog.at_level(logging.WARNING):
        windows = task().windows(made, encoder, training=True)
    assert windows.weights[windows.starts[:-1]].tolist() == [0, 1]
    assert r"1 answers have no token and are ignored in training; the first is '\u0301', of question 1." in caplog.text


# ---------------------------------------------------------------- answers


def decoded(questions: list[Question], encoder: TextEncoder, **given: Any) -> list[dict[str, Any]]:
    """Predictions of a model that has learned the labels by heart."""
    one = task(unanswerable=True, **given)
    windows = one.windows(questions, encoder, training=False)
    return one.decode(questions, windows, windows.labels.astype(np.float32) * 9)


UNICODE = [
    ("Le café est là.", "café", "composed"),
    ("Le cafe\u0301 est la\u0300", "cafe\u0301", "decomposed"),
    ("Le cafe\u0301 est la\u0300", "la\u0300", "decomposed at the end"),
    ("北京是中国的首都。", "中国", "Chinese"),
    ("東京タワーは高い", "東", "Japanese"),
    ("I saw \U0001f469\u200d\U0001f469\u200d\U0001f466 today", "\U0001f469\u200d\U0001f469\u200d\U0001f466", "joined"),
    ("so \U0001f44d\U0001f3fd good", "\U0001f44d\U0001f3fd", "emoji of a skin color"),
    ("I \u2764\ufe0f it", "\u2764\ufe0f", "variation selector"),
    ("\U0001d518\U0001d52b\U0001d526 code page", "code", "behind the basic plane"),
    ("ab\x00cd\x07 ef\u200bgh", "ef\u200bgh", "control characters"),
    ("ab\x00cd\x07 ef", "ab\x00cd", "NUL"),
    ("\u202bשָׁלוֹם\u202c עולם", "שָׁלוֹם", "right to left"),
    ("مَرْحَبًا بالعالم", "مَرْحَبًا", "Arabic with vowels"),
    ("यह हिन्दी है", "हिन्दी", "Devanagari"),
    ("\u1112\u1161\u11ab\u1100\u1173\u11af 한글", "\u1112\u1161\u11ab\u1100\u1173\u11af", "Hangul letters"),
    ("가 한글 나", "한글", "Hangul syllables"),
    ("die ﬁnale Straße İzmir ﷺ ẞ", "İzmir", "longer in lower case"),
    ("a\u0301\u0323\u0308\u0304 b", "a\u0301\u0323\u0308\u0304", "many marks"),
    ("\ufeffab cd\u00a0ef", "cd\u00a0ef", "mark of byte order and a fixed blank"),
    ("x\u3000y\u2003z", "y", "wide blanks"),
    ("soft\u00adhyphen here", "soft\u00adhyphen", "soft hyphen"),
]


@pytest.mark.parametrize("kind", ["tokenizer", "cased", "bytewise"])
@pytest.mark.parametrize(("context", "answer"), [one[:2] for one in UNICODE], ids=[one[2] for one in UNICODE])
def test_answers_are_stretches_of_any_text(request, kind, context, answer):
    encoder = TextEncoder(request.getfixturevalue(kind), 128)
    question = ask(context, answer)
    (found,) = decoded([question], encoder)
    assert found["answer"] == answer
    assert context[found["start"] : found["end"]] == answer
    assert found["start"] == context.index(answer)


@given(st.text(st.characters(codec="utf-8"), max_size=30), st.integers(0, 29), st.integers(1, 30), st.integers(0, 2))
@settings(max_examples=300, deadline=None)
def test_offsets_in_any_text(tokenizer, cased, bytewise, context, start, length, kind):
    answer = context[start : start + length]
    if not answer.strip():
        return
    encoder = TextEncoder((tokenizer, cased, bytewise)[kind], 160)
    question = Question("1", "who", context, (Answer(answer, start),))
    windows = task(unanswerable=True, max_answer_tokens=999).windows([question], encoder, training=True)
    offsets, length_of = windows.extra["offsets"], int(windows.extra["context_length"][0])
    covering = [
        number for number, (begin, end) in enumerate(offsets.tolist()) if begin < start + len(answer) and end > start
    ]
    if not covering:
        assert not windows.weights.any()
        return
    first, last = windows.labels.argmax(0) - int(windows.extra["context_start"][0])
    assert (first, last) == (covering[0], covering[-1])
    assert len(offsets) == length_of
    (found,) = decoded([question], encoder, max_answer_tokens=999)
    assert found["answer"] == context[found["start"] : found["end"]]
    assert found["answer"] == found["answer"].strip()
    # Nothing but marks is added to what the tokens cover, and only white space is left out of it.
    begin, end = int(offsets[first, 0]), int(offsets[last, 1])
    assert not context[begin : found["start"]].strip()
    if found["end"] < end:
        assert not context[found["end"] : end].strip()
    assert all(unicodedata.category(character)[0] == "M" for character in context[end : found["end"]])


def test_spaces_within_a_token_are_not_part_of_answers():
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġc"]
    model = models.BPE({word: n for n, word in enumerate(words)}, [("Ġ", "c")])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0), trim_offsets=False)
    assert tokenizer.encode("ab c").offsets[-2] == (2, 4)
    (found,) = decoded([ask("ab c  ", "c")], TextEncoder(tokenizer, 32))
    assert (found["answer"], found["start"], found["end"]) == ("c", 3, 4)
    assert all(entry["text"] == entry["text"].strip() for entry in found["nbest"])


# ---- the reference: google-research/bert run_squad.py, write_predictions, with this project's choices


def owners(windows: Windows, example: int) -> dict[int, int]:
    """The window with most context around each token of the example's context."""
    spans = []
    for number in np.flatnonzero(windows.examples == example):
        begin = int(windows.extra["context_token"][number])
        spans.append((int(number), begin, begin + int(windows.extra["context_length"][number]) - 1))
    best: dict[int, tuple[float, int]] = {}
    for number, begin, end in spans:
        for token in range(begin, end + 1):
            score = min(token - begin, end - token) + 0.01 * (end - begin + 1)
            if token not in best or score > best[token][0]:
                best[token] = (score, number)
    return {token: number for token, (_, number) in best.items()}


def answers_of(
    windows: Windows, logits: np.ndarray, example: int, n: int, longest: int
) -> list[tuple[float, int, int]]:
    """(score, start, end) of what the best `n` starts and ends of each window make."""
    owner = owners(windows, example)
    offsets = windows.extra["offsets"]
    found = []
    for number in np.flatnonzero(windows.examples == example):
        row, token = int(windows.extra["context_start"][number]), int(windows.extra["context_token"][number])
        size = int(windows.extra["context_length"][number])
        starts = [at for at in range(size) if owner[token + at] == number]
        starts = sorted(starts, key=lambda at: -logits[row + at, 0])[:n]
        ends = sorted(range(size), key=lambda at: -logits[row + at, 1])[:n]
        for start in starts:
            for end in ends:
                if start <= end < start + longest:
                    score = float(logits[row + start, 0]) + float(logits[row + end, 1])
                    found.append((score, int(offsets[token + start, 0]), int(offsets[token + end, 1])))
    return found


def twin(one: Questions, question: Question, example: int, windows: Windows, logits: np.ndarray) -> dict[str, Any]:
    n, longest = N_BEST, one.settings.max_answer_tokens
    cls = windows.starts[:-1][windows.examples == example]
    null = min(float(logits[row, 0]) + float(logits[row, 1]) for row in cls)
    # Where no start goes with an end: of all the starts and ends there are.
    found = answers_of(windows, logits, example, n, longest) or answers_of(windows, logits, example, 999, longest)
    found.sort(key=lambda entry: -entry[0])
    if one.unanswerable:
        found.append((null, 0, 0))
        found.sort(key=lambda entry: -entry[0])
    best, seen = [], set()
    for score, begin, end in found:
        text = question.context[begin:end]
        if len(best) < n and text not in seen:
            seen.add(text)
            best.append((score, begin, end, text))
    if one.unanswerable and "" not in seen:
        best.append((null, 0, 0, ""))
    weights = [math.exp(score - best[0][0]) for score, *_ in best]
    first = next(entry for entry in best if entry[3])
    difference = null - first[0] if one.unanswerable else 0.0
    answer = (null, 0, 0, "") if one.unanswerable and difference > one.threshold else first
    nbest = [
        {"text": text, "start": begin, "end": end, "probability": weight / sum(weights)}
        for (_, begin, end, text), weight in zip(best, weights, strict=True)
    ]
    return {
        "id": question.id,
        "answer": answer[3],
        "start": answer[1],
        "end": answer[2],
        "score": next(entry["probability"] for entry in nbest if entry["text"] == answer[3]),
        "no_answer_score": difference,
        "best_non_empty": first[3],
        "nbest": nbest,
        "windows": int((windows.examples == example).sum()),
    }


@given(st.lists(st.integers(0, 150), max_size=5), st.integers(0, 18), st.integers(20, 32))
@settings(max_examples=60, deadline=None)
def test_each_token_belongs_to_the_window_with_most_context(tokenizer, lengths, stride, size):
    questions = [ask("a" * length) for length in lengths]  # of one length often: their context is one
    stride = min(stride, size - 12)
    windows = task(stride=stride).windows(questions, TextEncoder(tokenizer, size), training=False)
    sizes = windows.extra["context_length"]
    found = has_most_context(windows.examples, windows.extra["context_token"], sizes)
    expected = []
    for example in range(len(questions)):
        owner = owners(windows, example)
        for number in np.flatnonzero(windows.examples == example):
            begin = int(windows.extra["context_token"][number])
            expected += [owner[token] == number for token in range(begin, begin + int(sizes[number]))]
    assert found.tolist() == expected


@given(st.integers(1, 900), st.integers(1, 400), st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_a_longer_window_counts_as_in_the_script(context, size, step):
    """Its length decides if the last window is at least 100 tokens shorter."""
    starts = [
        start for start in range(0, context, min(step, size)) if start == 0 or start + size - min(step, size) < context
    ]
    lengths = [min(size, context - start) for start in starts]
    best: dict[int, tuple[float, int]] = {}
    for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for token in range(start, start + length):
            score = min(token - start, start + length - 1 - token) + 0.01 * length
            if token not in best or score > best[token][0] + 1e-9:
                best[token] = (score, number)
    found = has_most_context(np.zeros(len(starts), np.int64), np.array(starts), np.array(lengths))
    spans = enumerate(zip(starts, lengths, strict=True))
    assert found.tolist() == [best[t][1] == number for number, (start, n) in spans for t in range(start, start + n)]


@given(
    st.lists(st.text("ab .", min_size=1, max_size=90).filter(str.strip), min_size=1, max_size=4),
    st.integers(0, 2**32),
    st.integers(1, 9),
    st.integers(0, 18),
    st.booleans(),
    st.sampled_from([3, 1000]),
)
@settings(max_examples=80, deadline=None)
def test_decoding_equals_twin(encoder, contexts, seed, longest, stride, unanswerable, levels):
    questions = [ask(context, id=str(number)) for number, context in enumerate(contexts)]
    one = task(max_answer_tokens=longest, stride=stride, unanswerable=unanswerable, threshold=0.5)
    windows = one.windows(questions, encoder, training=False)
    random = np.random.default_rng(seed)
    logits = (random.integers(0, levels, (len(windows.queries), 2)) * (4 / levels)).astype(np.float32)  # with ties
    found = one.decode(questions, windows, logits)
    for number, question in enumerate(questions):
        expected = twin(one, question, number, windows, logits)
        nbest = [{**entry, "probability": pytest.approx(entry["probability"])} for entry in expected["nbest"]]
        assert found[number] == {
            **expected,
            "nbest": nbest,
            "score": pytest.approx(expected["score"]),
            "no_answer_score": pytest.approx(expected["no_answer_score"], abs=1e-9),
        }
    json.dumps(found, allow_nan=False)


def test_in_pieces_as_in_one(encoder, monkeypatch):
    questions = [ask("ab cd " * number, id=str(number)) for number in (1, 9, 0, 30, 4)]
    one = task(unanswerable=True)
    windows = one.windows(questions, encoder, training=False)
    logits = np.random.default_rng(1).normal(size=(len(windows.queries), 2)).astype(np.float32)
    whole = one.decode(questions, windows, logits)
    monkeypatch.setattr("finetune.tasks.questions.decoding.MAX_SCORES", 1)
    assert one.decode(questions, windows, logits) == whole


def test_no_answer_scores_are_the_least_over_windows(encoder):
    question = ask("ab cd ef gh " * 6)
    one = task(unanswerable=True, threshold=3.0)
    windows = one.windows([question], encoder, training=False)
    assert len(windows) == 3
    logits = np.zeros((len(windows.queries), 2), np.float32)
    logits[windows.starts[:-1]] = [[9, 9], [2, 2], [7, 0]]
    (found,) = one.decode([question], windows, logits)
    assert found["no_answer_score"] == 4.0
    assert (found["answer"], found["start"], found["end"]) == ("", 0, 0)
    assert found["best_non_empty"]
    always = task(unanswerable=False).decode([question], windows, logits)[0]
    assert (always["answer"], always["no_answer_score"]) == (found["best_non_empty"], 0.0)
    assert all(entry["text"] for entry in always["nbest"])


@pytest.mark.parametrize("unanswerable", [True, False])
@pytest.mark.parametrize("context", ["", " \n", "\u0301\x00"])
def test_contexts_without_a_token(encoder, context, unanswerable):
    one = task(unanswerable=unanswerable)
    questions = [ask(context, id="1"), ask("ab", id="2")]
    for asked in (questions, questions[:1]):
        windows = one.windows(asked, encoder, training=False)
        found = one.decode(asked, windows, np.ones((len(windows.queries), 2), np.float32))
        assert (found[0]["answer"], found[0]["best_non_empty"], found[0]["score"]) == ("", "", 1.0)
        json.dumps(found, allow_nan=False)
    assert found[0]["nbest"] == [{"text": "", "start": 0, "end": 0, "probability": 1.0}]
    windows = one.windows([], encoder, training=False)
    assert len(windows) == 0
    assert one.decode([], windows, np.zeros((0, 2), np.float32)) == []


def test_a_context_of_a_megabyte(encoder, cased):
    context = "m0ngers. " * 116_600 + "the cat sat"  # two tokens a word
    question = ask(context, "cat")
    assert len(context) > 1 << 20
    encoder = TextEncoder(cased, 384)
    one = task(unanswerable=True, stride=128)
    windows = one.windows([question, CAT], encoder, training=False)
    assert len(windows) > 900
    labels = one.windows([question, CAT], encoder, training=True).labels
    predictions = one.decode([question, CAT], windows, labels.astype(np.float32))
    assert (predictions[0]["start"], predictions[0]["answer"]) == (context.index("cat"), "cat")
    assert predictions[1]["answer"] == "cat"


# ---------------------------------------------------------------- scores


def predictions(*made: tuple[str, str, float]) -> list[dict[str, Any]]:
    """(id, best non-empty answer, no-answer score) as `decode` has them at threshold 0."""
    return [
        {"id": id, "answer": "" if score > 0 else best, "best_non_empty": best, "no_answer_score": score, "windows": 1}
        for id, best, score in made
    ]


def tune(one: Questions, examples: list[Any], predictions: list[Any]) -> None:
    """Tune on logits that decode to `predictions`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one, "decode", lambda *_: predictions)
        one.tune(examples, cast(Windows, None), np.zeros((0, 0), np.float32))


def test_the_threshold_is_tuned_kept_and_used(encoder):
    examples = [ask("the cat", "cat", id="1"), ask("the dog", "dog", id="2"), ask("the ox", "", id="3")]
    made = predictions(("1", "cat", 1.0), ("2", "dog", 2.5), ("3", "ox", 4.0))
    one = task(unanswerable=True)
    assert one.score(examples, made)["f1"] == pytest.approx(1 / 3)
    tune(one, examples, made)
    assert one.state() == {"unanswerable": True, "threshold": 2.5}
    scores = one.score(examples, made)
    assert (scores["exact"], scores["f1"], scores["best_f1"], scores["best_f1_thresh"]) == (1, 1, 1, 2.5)
    assert (scores["HasAns_total"], scores["NoAns_total"], scores["total"]) == (2, 1, 3)
    assert json.loads(json.dumps(one.state())) == one.state()
    # The same threshold decodes.
    again = task(one.state())
    windows = again.windows([CAT], encoder, training=False)
    logits = windows.labels.astype(np.float32)
    logits[0] = [2.25, 2.25]
    assert again.decode([CAT], windows, logits)[0]["no_answer_score"] == 2.5
    assert again.decode([CAT], windows, logits)[0]["answer"] == "cat"
    logits[0] = [2.5, 2.25]
    assert again.decode([CAT], windows, logits)[0]["answer"] == ""
    # The settings' own threshold is left alone.
    fixed = task(one.state(), threshold=0.25)
    tune(fixed, examples, made)
    assert fixed.threshold == 0.25
    always = task(unanswerable=False)
    tune(always, examples[:2], made)
    assert always.threshold == 0.0


def test_the_threshold_is_tuned_for_the_metric():
    examples = [ask("a cat sat", "cat", id="1"), ask("dog", "", id="2")]
    made = predictions(("1", "cat sat", 1.0), ("2", "dog", 3.0))
    for metric, threshold in (("f1", 1.0), ("exact", 0.0)):
        one = task(unanswerable=True, metric=metric)
        tune(one, examples, made)
        assert one.threshold == threshold


def test_a_threshold_that_answers_nothing_is_below_all_scores():
    """Scores are differences of logits and may all be negative; the script's 0 would answer everything then."""
    examples = [ask("a cat sat", "", id="1"), ask("a dog", "", id="2")]
    one = task(unanswerable=True)
    tune(one, examples, predictions(("1", "cat", -3.0), ("2", "dog", -1.0)))
    assert one.threshold < -3.0
    assert one.score(examples, predictions(("1", "cat", -3.0), ("2", "dog", -1.0)))["f1"] == 1


def test_scores_of_version_1():
    examples = [ask("the cat", "cat", id="1"), ask("the dog", "dog", id="2")]
    one = task(unanswerable=False)
    assert one.score(examples, predictions(("1", "the cat", 7.0))) == {"exact_match": 0.5, "f1": 0.5}
    refused("none is for one of these questions", one.score, examples, predictions(("x", "cat", 0.0)))


def test_details():
    examples = [
        ask("the cat", "cat", id="1"),
        Question("2", "w", "one two three", (Answer("one two three", 0), Answer("one two", 0))),
        ask("the ox", "", id="3"),
    ]
    made = predictions(("1", "cat", -1.0), ("2", "one two three four", -1.0), ("3", "ox", -1.0), ("4", "", 0.0))
    found = task(unanswerable=True).details(examples, made)
    assert found["answerable"] == {
        "HasAns": {"exact": 0.5, "f1": pytest.approx((1 + 6 / 7) / 2), "total": 2},
        "NoAns": {"exact": 0.0, "f1": 0.0, "total": 1},
    }
    assert found["threshold"] == 0.0
    json.dumps(found)


def test_the_files_of_the_scripts_hold_answers_and_probabilities_of_none():
    made = predictions(("1", "cat", -2.0), ("2", "dog", 0.0), ("3", "ox", 1e4))
    files = task(unanswerable=True, threshold=0.5).scorer_files([], made)
    assert json.loads(files[".answers.json"]) == {"1": "cat", "2": "dog", "3": ""}
    probabilities = json.loads(files[".no-answer.json"])
    assert probabilities == {"1": pytest.approx(1 / (1 + np.exp(2.0))), "2": 0.5, "3": 1.0}
    assert task(unanswerable=False).scorer_files([], made).keys() == {".answers.json"}
