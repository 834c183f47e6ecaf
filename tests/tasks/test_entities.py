"""Named entities: files of every form in, every word asked once, spans out."""

from __future__ import annotations

import gzip
import json
import string
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from finetune.artifacts.predictor import Predictor
from finetune.tasks.base import Windows
from finetune.tasks.datasets.sentences import Sentence
from finetune.tasks.datasets.text import TextEncoder
from finetune.tasks.datasets.word_cuts import WordSegmenter
from finetune.tasks.datasets.words import cut_words
from finetune.tasks.entities import Entities, EntitiesSettings
from finetune.tasks.entities import metrics as metrics
from finetune.tasks.entities.decoding import best_sequences
from pretrain.common.errors import InputError
from pretrain.common.settings import load
from pretrain.corpus.vocabulary import SPECIAL_TOKENS, bert_tokenizer
from tests.tasks.refusals import refused
from tests.tasks.test_entities_metrics import compare

NOTHING = "\u200b"  # a zero-width space: a word of it becomes no token


def make_encoder(max_length: int) -> TextEncoder:
    """Every word is its letters: `cat` is c ##a ##t."""
    letters = string.ascii_lowercase + string.digits
    entries = [*SPECIAL_TOKENS, *letters, *(f"##{one}" for one in letters), *string.punctuation]
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    return TextEncoder(bert_tokenizer(vocabulary, normalizers.BertNormalizer(lowercase=True)), max_length)


def make_task(types: str = "PER LOC", **options: Any) -> Entities:
    return Entities(EntitiesSettings(**options), {"types": types.split(), "scheme": "iob2"})


def write(path: Path, text: str) -> str:
    path.write_bytes(text.encode())
    return str(path)


def write_records(path: Path, *records: Any) -> str:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


def read(path: str, **options: Any) -> list[Sentence]:
    return Entities(EntitiesSettings(train=path, **options)).read_train()


def text_of(windows: Windows, encoder: TextEncoder, number: int) -> list[str]:
    ids = windows.ids[windows.starts[number] : windows.starts[number + 1]]
    return [str(encoder.tokenizer.id_to_token(one)) for one in ids.tolist()]


def logits_of(windows: Windows, labels: np.ndarray, classes: int, certainty: float = 9.0) -> np.ndarray:
    logits = np.zeros((len(windows.queries), classes), np.float32)
    logits[np.arange(len(labels)), labels] = certainty
    return logits


# ---------------------------------------------------------------- forms of other tools


ANN = [(0, 3, "PER"), (9, 12, "LOC")]
SPANS = [list(one) for one in ANN]
LABELED = [{"start": a, "end": b, "text": "Ann left Rio"[a:b], "labels": [name]} for a, b, name in ANN]
FORMS: dict[str, list[Any]] = {
    "doccano": [{"id": 7, "text": "Ann left Rio", "label": SPANS}, {"text": "it", "label": []}],
    "doccano's older": [{"text": "Ann left Rio", "labels": SPANS}, {"text": "it", "labels": []}],
    "doccano's newer": [
        {
            "text": "Ann left Rio",
            "entities": [{"id": 1, "label": name, "start_offset": a, "end_offset": b} for a, b, name in ANN],
            "relations": [],
        },
        {"text": "it", "entities": []},
    ],
    "label studio": [
        {
            "id": 7,
            "data": {"text": "Ann left Rio"},
            "annotations": [
                {"was_cancelled": True, "result": []},
                {
                    "result": [
                        *({"type": "labels", "value": one} for one in LABELED),
                        {"type": "choices", "value": {"choices": ["x"]}},
                    ]
                },
            ],
        },
        {"data": {"text": "it"}, "annotations": [{"result": []}]},
    ],
    "label studio's short": [{"text": "Ann left Rio", "label": LABELED}, {"text": "it", "label": []}],
    "spacy": [["Ann left Rio", {"entities": SPANS}], ["it", {"entities": []}]],
    "spacy's documents": [
        {"text": "Ann left Rio", "ents": [{"start": a, "end": b, "label": name} for a, b, name in ANN]},
        {"text": "it", "ents": []},
    ],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_spans_of_other_tools_are_read(form: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    if suffix == ".json":
        write(path, json.dumps(FORMS[form]))
    else:
        write_records(path, *FORMS[form])
    sentences = read(str(path))
    assert [list(one.words) for one in sentences] == [["Ann", "left", "Rio"], ["it"]]
    assert [one.tags for one in sentences] == [["B-PER", "O", "B-LOC"], ["O"]]
    to_predict = make_task().read_file(str(path), labeled=False)
    assert [one.tags for one in to_predict] == [one.tags for one in sentences]


def test_tags_without_types_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "Ann B\nLee I\nleft O\n\nhere O\n")
    one = Entities(EntitiesSettings(train=path))
    assert [sentence.tags for sentence in one.read_train()] == [["B-_", "I-_", "O"], ["O"]]
    assert one.labels == ("O", "B-_", "I-_")
    # A file to predict has the same columns, not lines of text.
    words = [list(sentence.words) for sentence in one.read_file(path, labeled=False)]
    assert words == [["Ann", "Lee", "left"], ["here"]]
    text = write(tmp_path / "b.txt", "vitamin B\n")
    assert [list(sentence.words) for sentence in one.read_file(text, labeled=False)] == [["vitamin", "B"]]


def test_numbers_of_tags_have_names(tmp_path):
    path = write_records(tmp_path / "a.jsonl", {"tokens": ["Ann", "Lee", "left"], "ner_tags": [1, 2, 0]})
    names = ("O", "B-PER", "I-PER")
    assert read(path, tag_names=names)[0].tags == ["B-PER", "I-PER", "O"]
    for few in ((), names[:2]):
        refused(r"a.jsonl:1: tags is .* set `tag_names`", read, path, tag_names=few)


def test_an_interval_is_that_of_resampled_sentences(tmp_path: Path) -> None:
    lines = ["a B-PER\nb I-PER\n", "c O\n", "d B-PER\ne O\nf B-LOC\n"] * 30
    task = Entities(EntitiesSettings(train=write(tmp_path / "a.txt", "\n".join(lines))))
    gold, draw = task.read_train(), np.random.default_rng(1)
    assert task.interval(gold, [{"tags": one.tags} for one in gold]) == (1 - 3 / len(gold), 1)
    made = [{"tags": one.tags if n % 6 else ["O", "O"]} for n, one in enumerate(gold)]
    drawn = [draw.integers(0, len(gold), len(gold)) for _ in range(200)]
    scores = [task.score([gold[row] for row in rows], [made[row] for row in rows])["f1"] for rows in drawn]
    assert task.interval(gold, made) == pytest.approx(tuple(np.quantile(scores, [0.025, 0.975])), abs=0.02)


def test_dev_share_holds_sentences_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "\n".join(f"w{n % 150} B-PER\nleft O\n" for n in range(200)))
    one = Entities(EntitiesSettings(train=path, dev_share=0.25))
    train, dev = one.read_train(), one.read_held_out()["dev"]
    assert len(train) + len(dev) == 200
    assert 20 < len(dev) < 80
    assert not {tuple(each.words) for each in train} & {tuple(each.words) for each in dev}
    rare = write(tmp_path / "b.txt", "".join(f"w{n} B-{'PER' if n % 40 else 'LOC'}\n\n" for n in range(80)))
    kept = Entities(EntitiesSettings(train=rare, dev_share=0.9)).read_train()
    assert {tag for each in kept for tag in each.tags or ()} == {"B-PER", "B-LOC"}
    assert one.origin("dev") == "25% of the training set, stratified by entity type"
    with pytest.raises(InputError, match=r"leaves the dev set empty\. Raise it"):
        Entities(EntitiesSettings(train=path, dev_share=1e-9)).read_held_out()
    with pytest.raises(ValueError, match="use one of the two"):
        EntitiesSettings(train=path, dev=path, dev_share=0.1)


# ---------------------------------------------------------------- columns


IN_SCHEMES = {
    "iob1": "I-PER I-PER O I-LOC B-LOC I-PER",
    "iob2": "B-PER I-PER O B-LOC B-LOC B-PER",
    "bioes": "B-PER E-PER O S-LOC S-LOC S-PER",
    "bilou": "B-PER L-PER O U-LOC U-LOC U-PER",
}


@pytest.mark.parametrize("scheme", IN_SCHEMES)
def test_every_scheme_becomes_iob2(tmp_path, scheme):
    lines = [f"w{number} {tag}" for number, tag in enumerate(IN_SCHEMES[scheme].split())]
    task = Entities(EntitiesSettings(train=write(tmp_path / "a.conll", "\n".join(lines))))
    (one,) = task.read_train()
    assert one.tags == IN_SCHEMES["iob2"].split()
    state = task.state()
    assert (state["types"], state["scheme"]) == (["LOC", "PER"], scheme.replace("bilou", "bioes"))
    assert (task.labels, task.outputs) == (("O", "B-LOC", "I-LOC", "B-PER", "I-PER"), 5)
    assert not task.remarks


@pytest.mark.parametrize(
    "text",
    [
        "Ann B-PER\nleft O\n\nBob B-PER\n",
        "Ann B-PER\nleft O\n\nBob B-PER",  # no line end at the end
        "\n\nAnn B-PER\nleft O\n\n\n\nBob B-PER\n\n",
        "Ann\tB-PER\nleft\tO\n\t\nBob\tB-PER\n",  # WNUT-17: a lone tab between sentences
        "Ann\tB-PER\nleft\tO\n \t \nBob\tB-PER\n",
        "Ann B-PER\r\nleft O\r\n\r\nBob B-PER\r\n",
        "\ufeffAnn B-PER\nleft O\n\nBob B-PER\n",  # a byte order mark
        "Ann   NNP\t I-NP B-PER \nleft VBD B-VP O\n\nBob NNP\tI-NP B-PER\n".replace("\t", " "),
        "-DOCSTART- -X- O O\n\nAnn NNP I-NP B-PER\nleft VBD B-VP O\n\nBob NNP I-NP B-PER\n",
        "-DOCSTART-\n\nAnn\tB-PER\nleft\tO\n-DOCSTART-\tO\nBob\tB-PER\n",
    ],
)
def test_columns_of_every_form(tmp_path, text):
    sentences = read(write(tmp_path / "a.conll", text))
    assert [one.words for one in sentences] == [["Ann", "left"], ["Bob"]]
    assert [one.tags for one in sentences] == [["B-PER", "O"], ["B-PER"]]
    last = next(number for number, line in enumerate(text.split("\n"), 1) if line.startswith("Bob"))
    assert sentences[1].where() == f"{tmp_path}/a.conll:{last}"


def test_white_space_of_other_alphabets_is_a_word_and_no_line_end(tmp_path):
    (one,) = read(write(tmp_path / "a.txt", "\u00a0 O\na\u2028b O\n\x85c B-PER\n"))
    assert one.words == ["\u00a0", "a\u2028b", "\x85c"]
    (one,) = read(write(tmp_path / "a.tsv", "New York\tB-LOC\n\u3000\tO\n"))  # a blank within a tab's column
    assert one.words == ["New York", "\u3000"]


def test_columns_and_encoding_are_chosen_and_files_may_be_compressed(tmp_path):
    (tmp_path / "a.txt").write_bytes("B-X Zürich 1 B-LOC y\n".encode("latin-1"))
    (one,) = read(str(tmp_path / "a.txt"), token_column=1, label_column=-2, encoding="latin-1")
    assert (one.words, one.tags) == (["Zürich"], ["B-LOC"])
    for name, content in (("a.conll.gz", b"Ann B-PER\n"), ("a.jsonl.gz", b'{"tokens": ["Ann"], "tags": ["B-PER"]}\n')):
        (tmp_path / name).write_bytes(gzip.compress(content))
        assert read(str(tmp_path / name))[0].tags == ["B-PER"]


def test_wikianns_language_prefix_is_removed_with_a_remark(tmp_path):
    task = Entities(EntitiesSettings(train=write(tmp_path / "a.txt", "en:Ann\tB-PER\nen::\tO\n\nen:it\tO\n")))
    assert [one.words for one in task.read_train()] == [["Ann", ":"], ["it"]]
    assert len(task.remarks) == 1
    assert "every word starts with 'en:'" in task.remarks[0]
    assert read(write(tmp_path / "b.txt", "re:Ann\tB-PER\nleft\tO\n"))[0].words == ["re:Ann", "left"]


def test_gold_that_violates_its_scheme_is_read_as_conlleval_does_with_a_remark(tmp_path):
    text = "a B-PER\nb O\nc I-PER\nd I-LOC\n\ne B-LOC\nf I-LOC\n\ng B-LOC\nh B-PER\n"
    task = Entities(EntitiesSettings(train=write(tmp_path / "a.conll", text)))
    assert task.read_train()[0].tags == ["B-PER", "O", "B-PER", "B-LOC"]
    assert task.remarks == [
        f"{tmp_path}/a.conll:3: a tag that does not follow iob2; it is read as conlleval reads it; 2 in total, "
        "this is the first"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "# id 0c6f\tdomain=en\nAnn\tB-PER\n#\tO\n\n# id 0c70\tdomain=en\n#\tO\nBob\tB-PER\n",
        "# id 1\nAnn B-PER\n# O\n\n# a comment\n#2\n# O\nBob B-PER\n#end of it\n",
        "# global.columns = FORM NER\n\n# sent_id = 1\nAnn\tB-PER\n#\tO\n\n"
        "# sent_id = 2\n# text = # Bob\n#\tO\nBob\tB-PER\n",
        "Ann _ _ B-PER\n# _ _ O\n\n# id 3 _ x\n# _ _ O\nBob _ _ B-PER\n",
    ],
)
def test_comments_are_not_words_and_symbols_are(tmp_path, text):
    text = text.replace("#end of it\n", "\n#end of it\n")
    sentences = read(write(tmp_path / "a.conll", text))
    assert [one.words for one in sentences] == [["Ann", "#"], ["#", "Bob"]]
    assert [one.tags for one in sentences] == [["B-PER", "O"], ["O", "B-PER"]]
    lines = text.split("\n")
    assert sentences[1].where(1) == f"{tmp_path}/a.conll:{lines.index(next(x for x in lines if x[:3] == 'Bob')) + 1}"


@pytest.mark.parametrize("blank", [" ", "\t"])
def test_a_comment_of_one_word_may_begin_a_file(tmp_path, blank):
    text = f"#doc1\nAnn{blank}B-PER\n#{blank}O\n\n#doc2\nBob{blank}B-PER\n"
    path = write(tmp_path / "a.conll", text)
    assert [one.words for one in read(path)] == [["Ann", "#"], ["Bob"]]
    task = Entities(EntitiesSettings(train=path, test=path))
    assert [one.tags for one in task.read_test()["test"]] == [["B-PER", "O"], ["B-PER"]]


def test_words_alone_may_begin_with_the_sign_of_comments(tmp_path):
    train = write(tmp_path / "a.txt", GOOD)
    task = Entities(EntitiesSettings(train=train, test=write(tmp_path / "b.txt", "#ff\nAnn\n\n# two words\n#\nB\n")))
    assert [one.words for one in task.read_test()["test"]] == [["#ff", "Ann"], ["#", "B"]]


def test_a_comment_may_begin_a_document(tmp_path):
    text = "# newdoc id = 1\na B-PER\n\nb O\n\n# newdoc\n# text = c\nc O\n"
    sentences = read(write(tmp_path / "a.conll", text))
    assert [list(one.document) for one in sentences] == [[["a"], ["b"]], [["a"], ["b"]], [["c"]]]


# ---------------------------------------------------------------- records


def test_json_is_a_list_an_object_or_lines(tmp_path):
    records = [{"tokens": ["Ann"], "tags": ["B-PER"]}, {"text": "Ann left", "entities": [SPAN]}]
    as_list = read(write(tmp_path / "list.json", json.dumps(records, indent=1)))
    as_lines = read(write_records(tmp_path / "lines.json", *records))
    for read_so in (as_list, as_lines):
        assert [(one.words, one.tags) for one in read_so] == [(["Ann"], ["B-PER"]), (["Ann", "left"], ["B-PER", "O"])]
    assert [one.where() for one in as_list] == [f"{tmp_path}/list.json: record {number}" for number in (1, 2)]
    assert [one.where() for one in as_lines] == [f"{tmp_path}/lines.json:{number}" for number in (1, 2)]
    assert len(read(write(tmp_path / "one.json", json.dumps(records[0], indent=1)))) == 1


@pytest.mark.parametrize("labeled", [True, False])
def test_a_csv_needs_columns_of_words(tmp_path, labeled):
    task = Entities(EntitiesSettings(train=write(tmp_path / "train", GOOD)))
    path = write(tmp_path / "a.csv", "id,text\n1,hello\n2,bye\n")
    refused(
        r"a.csv: needs the columns Sentence #, Word and Tag, .* or give .jsonl", task.read_file, path, labeled=labeled
    )


def test_a_held_out_file_may_have_another_scheme_than_the_training_file(tmp_path):
    """conlleval reads both alike; `evaluate` has only the saved model's settings, so they must do."""
    dev = write(tmp_path / "dev.conll", "Ann B-PER\nBell E-PER\nRome S-LOC\n")
    train = write(tmp_path / "a.conll", "Ann B-PER\nRome B-LOC\n")
    settings = EntitiesSettings(train=train, dev=dev)
    task = Entities(settings)
    task.read_train()
    expected = ["B-PER", "I-PER", "B-LOC"]
    assert task.read_held_out()["dev"][0].tags == expected
    assert task.state()["scheme"] == "iob2"
    assert Entities(settings, task.state()).read_file(dev)[0].tags == expected


def test_boundaries_inside_of_words_are_counted(tmp_path):
    cut = {"text": "in NYCity now", "entities": [{"start": 3, "end": 5, "type": "LOC"}]}
    cut_too = {"text": "the NYState", "entities": [{"start": 4, "end": 6, "type": "LOC"}]}
    spans = [{"start": 0, "end": 4, "type": "LOC"}, {"start": 4, "end": 9, "type": "X"}]
    lost = {"text": "RomeParis", "entities": spans}
    half_lost = {"text": "RomeParis Bo", "entities": [spans[0], spans[1] | {"end": 12}]}
    blanks = {"text": " Ann ", "entities": [{"start": 0, "end": 5, "type": "PER"}]}
    task = Entities(
        EntitiesSettings(train=write_records(tmp_path / "a.jsonl", blanks, cut, cut_too, lost, lost, half_lost))
    )
    assert [one.tags for one in task.read_train()] == [
        ["B-PER"],
        ["O", "B-LOC", "O"],
        ["O", "B-LOC"],
        ["B-LOC"],
        ["B-LOC"],
        ["B-LOC", "B-X"],
    ]
    assert task.remarks == [
        f'{tmp_path}/a.jsonl:2, "NY": an entity has a boundary inside a word; such entities are extended to whole '
        "words; 6 in total, this is the first",
        f'{tmp_path}/a.jsonl:4, "Paris": an entity shares a word with the previous entity and is skipped; give '
        "`tokens` that separate them; 2 in total, this is the first",
    ]


def test_half_a_surrogate_pair_keeps_its_place():
    task, encoder = make_task(), make_encoder(16)
    one = task.example({"text": "x \ud83d Ann"}, "line 1")
    windows = task.windows([one], encoder, training=False)
    (prediction,) = task.decode([one], windows, logits_of(windows, np.array([0, 1]), 5))
    assert prediction["entities"][0]["start"] == 4
    json.dumps(prediction, ensure_ascii=False).encode()


def test_parquet_has_records(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ["O", "B-PER", "I-PER"]
    rows = [
        {"id": "1", "tokens": ["Ann", "B", "left"], "ner_tags": [1, 2, 0], "document": 1},
        {"id": "2", "tokens": ["Bob"], "ner_tags": [1], "document": 1},
    ]
    table = pa.Table.from_pylist(rows)
    path = tmp_path / "a.parquet"
    pq.write_table(table, path)
    refused(r"a.parquet: row 1: tags is \[1, 2, 0\]; .* If they are numbers, set `tag_names`", read, str(path))
    tags = {"feature": {"names": names, "_type": "ClassLabel"}, "_type": "Sequence"}
    features = json.dumps({"info": {"features": {"ner_tags": tags}}})
    pq.write_table(table.replace_schema_metadata({"huggingface": features}), path)
    sentences = read(str(path))
    assert [one.tags for one in sentences] == [["B-PER", "I-PER", "O"], ["B-PER"]]
    assert sentences[1].where(0) == f"{path}: row 2"
    assert list(sentences[1].document) == [["Ann", "B", "left"], ["Bob"]]
    spans = [{"start": 0, "end": 3, "type": "PER"}]
    pq.write_table(pa.Table.from_pylist([{"text": "Ann left", "entities": spans}]), path)
    assert read(str(path))[0].tags == ["B-PER", "O"]
    pq.write_table(pa.table({"words": [["Ann"]]}), path)
    refused(r"a.parquet: has neither a column tokens nor text", read, str(path))


def test_a_file_to_predict_may_hold_texts(tmp_path):
    task = Entities(EntitiesSettings(train=write(tmp_path / "train", GOOD)))
    texts = task.read_file(write(tmp_path / "a.txt", "Ann left, O\n\nB O\n"), labeled=False)
    assert [one.words for one in texts] == [["Ann", "left", ",", "O"], [], ["B", "O"]]
    assert [one.where() for one in texts] == [f"{tmp_path}/a.txt:{line}" for line in (1, 2, 3)]
    columns = write(tmp_path / "b.txt", "-DOCSTART- O\n\nAnn B-PER\nB. I-PER\n\nleft O\n")
    labeled, unlabeled = task.read_file(columns), task.read_file(columns, labeled=False)
    assert [(one.words, one.tags) for one in labeled] == [(one.words, one.tags) for one in unlabeled]
    assert labeled[0].words == ["Ann", "B."]
    refused(
        r"d.txt:1: lines end with CR only",
        task.read_file,
        write(tmp_path / "d.txt", "Ann left\rBob saw\r"),
        labeled=False,
    )
    alone = task.read_file(write(tmp_path / "c.conll", "Ann\nB.\n\nleft\n"), labeled=False)
    assert [one.words for one in alone] == [["Ann", "B."], ["left"]]


# ---------------------------------------------------------------- what is wrong in files

GOOD = "Ann B-PER\nleft O\n"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "Ann B-PER\nleft\n",
            {},
            r"a.txt:2: has 1 column, separated by spaces, but the first line .* has 2\.",
        ),
        ("Ann\tB-PER\n\nleft it\tO\tx\n", {}, r"a.txt:3: has 3 columns, separated by tabs, but .* has 2\."),
        ("", {}, r"a.txt: has no sentences"),
        ("\n-DOCSTART- O\n\n", {}, r"a.txt: has no sentences"),
        ("Ann O\n\nleft O\n", {}, r"a.txt: no entity in 2 sentences, only O"),
        ("Ann O\n", {"labels": ("PER",)}, r"a.txt: no entity in 1 sentence, only O"),
        ("Ann\nleft\n", {}, r"a.txt: 1 of 1 rows left out: 1 unlabeled\. Give columns"),
        ("Ann NNP\n", {}, r"a.txt:1: 'NNP' is not a tag; expected O, or a prefix and a type"),
        ("Ann B-PER\nleft B-\n", {}, r"a.txt:2: 'B-' is not a tag"),
        ("Ann B-PER\nRome S-LOC\n", {"scheme": "iob2"}, r"a.txt:2: a bioes tag, but the scheme is iob2"),
        ("Ann B-PER\nRome B-LOC\n", {"labels": ("PER",)}, r"a.txt:2: the type 'LOC' is not in labels \(PER\)"),
        ("id\ttext\n1\tAnn left\n", {}, r"a.txt:1: 'text' is not a tag.* each line has one word and its tag\."),
        ("Ann B-PER\rleft O\r\rBob B-PER\r", {}, r"a.txt:1: lines end with CR only. Convert"),
        ("Ann B-PER\r\nleft O\rBob O\r\n", {}, r"a.txt:2: lines end with CR only. Convert"),
        (GOOD, {"label_column": 2}, r"a.txt:1: the line has 2 columns, numbered from 0, but label_column is 2\."),
        (GOOD, {"token_column": -3}, r"a.txt:1: the line has 2 columns, numbered from 0, but token_column is -3\."),
    ],
)
def test_bad_columns(tmp_path, text, options, message):
    refused(message, read, write(tmp_path / "a.txt", text), **options)


SPAN = {"start": 0, "end": 3, "type": "PER"}
BO = {"text": "Ann B", "tokens": ["Ann", "Bo"]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], r"a.jsonl:2: \[1\] is not an object\. Write"),
        ({"id": 1}, r'a.jsonl:2: has neither "text" nor "tokens"\. Its keys: id\.'),
        ({"tokens": "Ann", "tags": ["O"]}, r'a.jsonl:2: tokens is "Ann"; expected a list of strings'),
        ({"tokens": ["Ann"], "tags": [1]}, r"a.jsonl:2: tags is \[1\]; expected a list of strings such as B-PER"),
        ({"tokens": ["Ann"], "tags": []}, r"a.jsonl:2: 1 token and 0 tags"),
        ({"tokens": ["Ann"], "tags": ["PER"]}, r"a.jsonl:2: 'PER' is not a tag"),
        ({"tokens": ["Ann"], "tags": [""]}, r"a.jsonl:2: '' is not a tag"),
        (
            {"tokens": ["Rome"], "entities": [SPAN | {"start": 1}]},
            r"PER from 1 to 3 does not begin and end with a token",
        ),
        ({"text": "Ann", "tokens": [{"text": "Ann"}], "tags": ["O"]}, r"a.jsonl:2: tags need tokens that are strings"),
        ({"tokens": None, "tags": ["O"]}, r'a.jsonl:2: has neither "text" nor "tokens"'),
        ({"text": 5, "entities": []}, r"a.jsonl:2: text is 5; expected text"),
        ({"text": "", "entities": [], "id": ["\ud83d"]}, r"a.jsonl:2: the id has half of a surrogate pair"),
        ({"tokens": ["a"], "tags": ["B-\ud83d"]}, r"a.jsonl:2: the tag has half of a surrogate pair at character 2"),
        ({"text": "Ann", "entities": [SPAN | {"type": "\ud83d"}]}, r"a.jsonl:2: the tag has half of a surrogate pair"),
        ({"text": 5, "tokens": ["Ann"], "tags": ["O"]}, r"a.jsonl:2: text is 5; expected text"),
        (BO | {"tags": ["O", "O"]}, r'2: token 1, "Bo", is not in the text from character 3 on. Leave out "text"'),
        (BO | {"entities": [SPAN]}, r'2: token 1, "Bo", is not .* Leave out "tokens"'),
        ({"text": "Ann", "entities": {}}, r"a.jsonl:2: entities is \{\}; expected a list"),
        ({"text": "Ann", "label": [{"start": 0, "end": 3, "labels": ["A", "B"]}]}, r"2: entity 0 is .*; expected"),
        ({"text": "Ann", "entities": [[0, 3]]}, r"a.jsonl:2: entity 0 is \[0, 3\]; expected"),
        ({"text": "Ann", "entities": [{"start": 0, "end": 3}]}, r"a.jsonl:2: entity 0 is .*; expected"),
        ({"text": "Ann", "entities": [SPAN | {"end": "3"}]}, r"a.jsonl:2: entity 0 is .*; expected"),
        ({"text": "Ann", "entities": [SPAN | {"end": 4}]}, r"entity 0 is from 0 to 4, but the text has 3 characters"),
        ({"text": "Ann", "entities": [SPAN | {"start": -1}]}, r"entity 0 is from -1 to 3, but the text has 3"),
        ({"text": "Ann", "entities": [SPAN | {"start": 3}]}, r"entity 0 is from 3 to 3"),
        (
            {"text": "é Ann", "entities": [SPAN | {"text": "Ann"}]},
            r'entity 0 is "Ann", but 0 to 3 of the text is "é A"',
        ),
        (
            {"text": "Ann B", "entities": [SPAN | {"end": 5, "type": "X"}, SPAN]},
            r"PER from 0 to 3 and X from 0 to 5 overlap",
        ),
        (
            {"text": "Ann    ", "entities": [SPAN | {"start": 4, "end": 6}]},
            r"PER from 4 to 6 is \"  \", which contains no word",
        ),
        ({"text": "Ann", "entities": [SPAN], "document": [1]}, r"2: document is \[1\]; expected text or a number"),
    ],
)
def test_bad_records(tmp_path, record, message):
    path = write_records(tmp_path / "a.jsonl", {"text": "Ann", "entities": [SPAN]}, record)
    refused(message, read, path)


def test_tokens_with_a_text_get_its_offsets(tmp_path):
    record = {"text": "Ann  left,U.S. Bob.", "tokens": ["Ann", "left", ",", "U.S.", "Bob", "."]}
    record["tags"] = ["B-PER", "O", "O", "B-LOC", "B-PER", "O"]
    (one,) = read(write_records(tmp_path / "a.jsonl", record))
    text, offsets = one.text_and_offsets()
    assert text == record["text"]
    assert [text[begin:end] for begin, end in offsets.tolist()] == record["tokens"]
    made = Entities(EntitiesSettings(train="x")).example(record, "line 1")  # as `predict` reads it
    assert (made.words, made.text_and_offsets()[1].tolist()) == (one.words, offsets.tolist())


PLACES = [{"start": 0, "end": 4, "type": "LOC"}, {"start": 10, "end": 13, "type": "PER"}]
OBJECTS = [{"text": "Ann", "start": 0, "end": 3, "id": 0}, {"text": "left", "start": 4, "end": 8, "id": 1}]
NAMED = {"start": 4, "end": 8, "label": "LOC"}


@pytest.mark.parametrize(
    ("record", "words", "tags"),
    [
        ({"tokens": ["Ann", "left"], "tags": ["B-PER", "O"], "entities": []}, "Ann left", "B-PER O"),
        ({"tokens": ["Ann"], "ner_tags": ["B-PER"], "id": 7}, "Ann", "B-PER"),
        (
            {"text": "Go, Ann B.!", "entities": [{"start": 4, "end": 10, "type": "PER", "text": "Ann B."}]},
            "Go , Ann B . !",
            "O O B-PER I-PER I-PER O",
        ),
        ({"text": "in \U0001f600Rome", "spans": [NAMED]}, "in \U0001f600 Rome", "O O B-LOC"),
        ({"text": "nothing", "entities": []}, "nothing", "O"),
        ({"text": "", "entities": []}, "", ""),
        ({"text": "", "tokens": [], "tags": []}, "", ""),
        ({"text": "Ann left", "tokens": None, "entities": [SPAN]}, "Ann left", "B-PER O"),
        ({"text": "Ann left", "tokens": [], "entities": [SPAN]}, "Ann left", "B-PER O"),
        # Tokens that are objects leave the words to the text; those that are strings are the words.
        ({"text": "Ann left", "tokens": OBJECTS, "spans": [NAMED]}, "Ann left", "O B-LOC"),
        (
            {"text": "U.S. left Bob.", "tokens": ["U.S.", "left", "Bob", "."], "entities": PLACES},
            "U.S. left Bob .",
            "B-LOC O B-PER O",
        ),
        ({"tokens": ["U.S.", "left", "Bob", "."], "entities": PLACES}, "U.S. left Bob .", "B-LOC O B-PER O"),
        # Tags are of the file's scheme, also those of tokens that are given with their text.
        ({"text": "Ann B.", "tokens": ["Ann", "B."], "tags": ["B-PER", "E-PER"]}, "Ann B.", "B-PER I-PER"),
        ({"tokens": ["a", "b"], "tags": ["I-PER", "B-PER"]}, "a b", "B-PER B-PER"),
    ],
)
def test_records_have_these_words_and_tags(tmp_path, record, words, tags):
    task = Entities(EntitiesSettings(train=write_records(tmp_path / "a.jsonl", {"text": "I", "entities": []}, record)))
    task = task if "PER" in tags or "LOC" in tags else Entities(task.settings, make_task().state())
    one = task.read_file(task.settings.train)[1]
    assert (list(one.words), one.tags) == (words.split(), tags.split())
    assert one.where() == f"{tmp_path}/a.jsonl:2"
    assert list(task.example(record, "line 1").words) == words.split()  # as `predict` reads it


def test_a_test_file_of_words_alone_needs_no_columns(tmp_path):
    train = write(tmp_path / "a.txt", "Ann NNP B-PER\nleft VBD O\n")
    alone = write(tmp_path / "b.txt", "Ann\nleft\n\nBob\n")
    made = Entities(EntitiesSettings(train=train, test=alone, label_column=2))
    made.read_train()
    assert [one.words for one in made.read_test()["test"]] == [["Ann", "left"], ["Bob"]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"Ann B-PER\nZ\xfcrich B-LOC\n", r"a.txt:2: byte 11 \(0xfc\) is not UTF-8\. .*`encoding`"),
        ("a.jsonl", b'{"tokens": ["Z\xfcrich"], "tags": ["O"]}', r"a.jsonl:1: byte 14"),
        ("a.jsonl", b'{"tokens": \n', r"a.jsonl:1: not JSON"),
        ("a.json", b"[1]", r"a.json: record 1: 1 is not an object"),
        ("a.json", b"[1", r"a.json:1: not JSON"),
        ("a.gz", b"Ann B-PER\n", r"a.gz: cannot be read"),
        ("nowhere", None, r"nowhere: not found"),
        ("", None, r": a folder, not a file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    refused(message, read, str(tmp_path / name))


def test_other_files_are_held_to_the_training_set(tmp_path):
    train, dev = write(tmp_path / "train", GOOD), write(tmp_path / "dev", "it O\nRome B-LOC\n")
    task = Entities(EntitiesSettings(train=train, dev=dev))
    with pytest.raises(InputError, match=r"dev:2: the type 'LOC' is not in the training set \(PER\)"):
        task.read_held_out()  # reads the training set by itself
    refused(
        r"dev: no entity in 1 sentence",
        Entities(EntitiesSettings(train=train, dev=write(tmp_path / "dev", "it O\n"))).read_held_out,
    )
    refused(
        r"dev: has no sentences", Entities(EntitiesSettings(train=train, dev=write(tmp_path / "dev", ""))).read_held_out
    )
    refused(r"train: empty\.", read, "")
    assert Entities(EntitiesSettings(train=train)).read_held_out() == {}
    assert Entities(EntitiesSettings(train=train)).read_test() == {}


def test_test_files_need_no_labels(tmp_path):
    settings = EntitiesSettings(train=write(tmp_path / "train", GOOD), test=write(tmp_path / "test", "Ann\nB\n\nC\n"))
    task = Entities(settings)
    (one, two) = task.read_test()["test"]
    assert (one.words, one.tags, two.words) == (["Ann", "B"], None, ["C"])
    windows = task.windows([one, two], make_encoder(16), training=False)
    assert windows.labels.tolist() == [0, 0, 0]
    predictions = task.decode([one, two], windows, logits_of(windows, np.array([1, 0, 0]), 3))
    refused(r"test:1: no labels, so predictions cannot be scored", task.score, [one, two], predictions)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("labels: [O, B-PER, I-PER]", "'O'; expected types without prefixes"),
        ("labels: [B-PER, I-PER]", "'B-PER'; expected types without prefixes"),
        ("labels: [PER, PER]", "'PER'; expected types"),
        ("encoding: utf-9", "'utf-9' is not a Python encoding"),
        ("document_context: -1", "-1 tokens of context; expected true, false or an integer"),
        ("scheme: bio", "scheme is 'bio'; expected '"),
    ],
)
def test_bad_settings(tmp_path, line, message):
    path = write(tmp_path / "a.yaml", f"train: a\n{line}\n")
    refused(message, load, path, EntitiesSettings)


@pytest.mark.parametrize(("value", "expected"), [("64", 64), ("true", True)])
def test_context_is_a_number_or_all(tmp_path, value, expected):
    assert (
        load(write(tmp_path / "a.yaml", f"document_context: {value}\n"), EntitiesSettings).document_context is expected
    )


# ---------------------------------------------------------------- windows


words = st.one_of(
    st.text("abc", min_size=1, max_size=6), st.sampled_from([NOTHING, "\x00", "", "%", "Ä", "\U0001f600", "a-b"])
)


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[list[Sentence], int, Any]:
    """Sentences of documents with tags, in any order and some of them twice; max_length, context."""
    sentences = []
    for number in range(draw(st.integers(1, 3))):
        document = draw(st.lists(st.lists(words, max_size=12), min_size=1, max_size=4))
        for place, one in enumerate(document):
            tags = draw(
                st.lists(
                    st.sampled_from(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]), min_size=len(one), max_size=len(one)
                )
            )
            sentences.append(Sentence(one, tags, f"document {number}", document=document, index=place))
    chosen = draw(st.lists(st.sampled_from(sentences), min_size=1, max_size=8))
    context = draw(st.sampled_from([False, True, 0, 1, 5]))
    return chosen, draw(st.integers(3, 24)), context


@settings(deadline=None, max_examples=300)
@given(laid_out())
def test_every_word_has_one_query_position_at_its_first_token(case):
    sentences, max_length, context = case
    task, encoder = make_task(document_context=context), make_encoder(max_length)
    windows = task.windows(sentences, encoder, training=False)
    words = {word for one in sentences for word in one.words}
    tokens = {word: encoder.tokenizer.encode(word, add_special_tokens=False).ids for word in words}
    lengths = np.diff(windows.starts)
    assert lengths.min() >= 2
    assert lengths.max() <= max_length
    assert (windows.ids[windows.starts[:-1]] == encoder.prefix).all()
    assert (windows.ids[windows.starts[1:] - 1] == encoder.suffix).all()
    assert (np.diff(windows.queries) > 0).all()
    assert (np.unique(windows.examples) == np.arange(len(sentences))).all()
    assert (windows.types == 0).all()
    assert (windows.weights == 1).all()
    of = np.searchsorted(windows.starts, windows.queries, "right") - 1
    assert (windows.queries > windows.starts[of]).all()
    assert (windows.queries < windows.starts[of + 1] - 1).all()
    asked = [(int(windows.examples[window]), int(word)) for window, word in zip(of, windows.extra["word"], strict=True)]
    assert sorted(asked) == [
        (number, place) for number, one in enumerate(sentences) for place, word in enumerate(one.words) if tokens[word]
    ]
    for (number, place), row, label in zip(asked, windows.queries, windows.labels, strict=True):
        one = sentences[number]
        assert windows.ids[row] == tokens[one.words[place]][0]
        assert task.labels[label] == one.tags[place]  # pyright: ignore[reportOptionalSubscript]
    for window, number in enumerate(windows.examples):
        one = sentences[number]
        own = [token for word in one.words for token in tokens[word]]
        seen = windows.ids[windows.starts[window] + 1 : windows.starts[window + 1] - 1].tolist()
        if len(own) <= max_length - 2 and not context:
            assert seen == own
        elif len(own) > max_length - 2:
            assert len(seen) == max_length - 2


def test_in_training_every_window_is_an_example_and_empty_ones_are_left_out():
    task, encoder = make_task(), make_encoder(8)
    examples = [Sentence([], [], "1"), Sentence([*"abcdefgh"], ["B-PER"] * 8, "2"), Sentence([NOTHING], ["O"], "3")]
    asked = task.windows(examples, encoder, training=False)
    windows = task.windows(examples, encoder, training=True)
    assert asked.examples.tolist() == [0, 1, 1, 2]
    assert windows.examples.tolist() == [0, 1]
    assert windows.extra["word"].tolist() == asked.extra["word"].tolist() == list(range(8))
    assert windows.labels.tolist() == [1] * 8


def test_a_sentence_of_3000_words_with_windows_of_64():
    random = np.random.default_rng(0)
    names = ["".join(random.choice(list("abcd"), random.integers(1, 5))) for _ in range(3000)]
    labels = random.choice([0, 1, 3], 3000)
    task, encoder = make_task(), make_encoder(64)
    one = Sentence(names, [task.labels[label] for label in labels], "it")
    windows = task.windows([one], encoder, training=False)
    assert sorted(windows.extra["word"].tolist()) == list(range(3000))
    # By hand: of all windows that hold a word's first token, the one with most on its shorter side.
    token = np.concatenate([[0], np.cumsum([len(name) for name in names])])
    begins = [  # a window's tokens are a stretch of the text's: where its first asked word says
        int(token[windows.extra["word"][rows[0]]] - (windows.queries[rows[0]] - windows.starts[window] - 1))
        for window in range(len(windows))
        if len(
            rows := np.flatnonzero(
                (windows.queries > windows.starts[window]) & (windows.queries < windows.starts[window + 1])
            )
        )
    ]
    ends = [begin + int(length) - 2 for begin, length in zip(begins, np.diff(windows.starts), strict=True)]
    assert (begins[0], ends[-1]) == (0, token[-1])
    of = np.searchsorted(windows.starts, windows.queries, "right") - 1
    for window, word in zip(of.tolist(), windows.extra["word"].tolist(), strict=True):
        margins = [
            min(token[word] - begin if begin > 0 else np.inf, end - token[word + 1] if end < token[-1] else np.inf)
            if begin <= token[word] < end
            else -np.inf
            for begin, end in zip(begins, ends, strict=True)
        ]
        assert margins[window] == max(margins)
        assert margins[window] >= 62 // 4 - 4  # no word is longer than 4
    predictions = task.decode([one], windows, logits_of(windows, windows.labels, 5))
    assert predictions[0]["tags"] == one.tags
    assert task.score([one], predictions)["accuracy"] == 1.0


def test_context_is_that_of_the_document(tmp_path):
    lines = ["-DOCSTART- O", "", "aa O", "", "b B-PER", "c O", "", "dd O", "-DOCSTART- O", "", "e O"]
    path = write(tmp_path / "a.conll", "\n".join(lines))
    encoder = make_encoder(32)

    def shown(context: Any, max_length: int = 32) -> list[str]:
        task = Entities(EntitiesSettings(train=path, document_context=context))
        windows = task.windows(task.read_train(), make_encoder(max_length), training=True)
        assert windows.extra["word"].tolist() == [0, 0, 1, 0, 0]
        return [" ".join(text_of(windows, encoder, number)[1:-1]) for number in range(len(windows))]

    assert shown(False) == ["a ##a", "b c", "d ##d", "e"]
    assert shown(0) == shown(False)
    assert shown(True) == ["a ##a b c d ##d"] * 3 + ["e"]
    assert shown(1) == ["a ##a b", "b c", "c d ##d", "e"]  # `dd` has two tokens, and words stay whole
    assert shown(2) == ["a ##a b c", "a ##a b c d ##d", "b c d ##d", "e"]
    # Room for four: `b c` has two to spare, but no whole word goes in at either side; `aa` has nothing before it.
    assert shown(True, 6) == ["a ##a b c", "b c", "b c d ##d", "e"]


def test_documents_of_records(tmp_path):
    names = [1, 1, 2, 1, None]
    records = [{"tokens": [w], "tags": ["B-PER"], "document": n} for w, n in zip("abcde", names, strict=True)]
    task = Entities(EntitiesSettings(train=write_records(tmp_path / "a.jsonl", *records), document_context=True))
    sentences, encoder = task.read_train(), make_encoder(16)
    windows = task.windows([sentences[1], sentences[0], *sentences[2:]], encoder, training=False)
    assert ["".join(text_of(windows, encoder, number)[1:-1]) for number in range(5)] == ["ab", "ab", "c", "d", "e"]
    assert task.remarks == [
        f"{tmp_path}/a.jsonl:4: document '1' continues after another one; its parts are treated as separate documents"
    ]
    other = Entities(EntitiesSettings(train=str(tmp_path / "a.jsonl")))
    other.read_train()
    assert not other.remarks  # nothing depends on documents


class Shower(Predictor):
    """A predictor without a model: it predicts what its windows show."""

    def __init__(self, task: Entities, encoder: TextEncoder) -> None:
        self.task, self.encoder = task, encoder

    def predict(self, examples: Sequence[Any]) -> list[dict[str, Any]]:
        windows = self.task.windows(examples, self.encoder, training=False)
        assert len(windows) == len(examples)
        return [{"shown": text_of(windows, self.encoder, number)} for number in range(len(windows))]


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("context", [False, True, 3])
def test_a_document_is_the_same_in_a_file_and_in_lines(tmp_path, context, live):
    names = [7, 7, None, 7, *["long"] * 9, "x", None, None, 3, 3]
    records = [{"text": f"w{number}, it", "document": name, "id": number} for number, name in enumerate(names)]
    task = make_task(document_context=context)
    predictor = Shower(task, make_encoder(64))
    whole = predictor.predict(task.read_file(write_records(tmp_path / "a.jsonl", *records), labeled=False))
    made = list(predictor.stream(records, live=live))
    assert [one.pop("id") for one in made] == list(range(len(names)))
    assert made == whole
    assert ("7" in "".join(whole[11]["shown"])) == (context is True)  # the context is there at all
    assert [predictor([one])[0]["shown"] for one in records[:2]] == [predictor(one)["shown"] for one in records[:2]]


def test_a_sentence_waits_for_the_end_of_its_document_alone():
    predictor = Shower(make_task(document_context=True), make_encoder(64))
    taken = []

    def records():
        for number, name in enumerate(["a", "a", "b", None]):
            taken.append(number)
            yield {"text": f"w{number}", "document": name}

    made = predictor.stream(records())
    assert next(made)["shown"] == ["[CLS]", "w", "##0", "w", "##1", "[SEP]"]
    assert len(taken) < 4
    assert len(list(made)) == 3


def test_an_error_in_reading_comes_after_the_waiting_records():
    predictor = Shower(make_task(document_context=True), make_encoder(64))

    def records():
        yield from ({"text": f"w{number}", "document": "a"} for number in range(2))
        raise InputError("line 3: not JSON")

    made = predictor.stream(records(), live=True)
    assert [next(made)["shown"] for _ in range(2)] == [["[CLS]", "w", "##0", "w", "##1", "[SEP]"]] * 2
    refused("line 3", next, made)


def test_windows_too_short_for_a_word_are_refused():
    refused(
        "windows of 2 tokens have no room for a word",
        make_task().windows,
        [Sentence(["a"], None, "it")],
        make_encoder(2),
        training=False,
    )


def test_a_word_without_tokens_is_outside_and_scored():
    task, encoder = make_task(), make_encoder(8)
    one = Sentence([NOTHING, "ann", NOTHING, "\U0001f600"], ["B-PER", "B-PER", "I-PER", "O"], "it")
    windows = task.windows([one], encoder, training=False)
    assert windows.extra["word"].tolist() == [1, 3]
    assert text_of(windows, encoder, 0)[-2] == "[UNK]"
    (prediction,) = task.decode([one], windows, logits_of(windows, np.array([1, 1]), 5))
    assert prediction["tags"] == ["O", "B-PER", "O", "B-PER"]
    assert [entity["text"] for entity in prediction["entities"]] == ["ann", "\U0001f600"]
    scores = task.score([one], [prediction])
    assert scores["accuracy"] == 0.25
    assert (scores["precision"], scores["recall"]) == (0.0, 0.0)


def test_byte_level_bpe_asks_at_the_first_token_too():
    from tokenizers import models, processors

    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", "<unk>", "Ġ", "a", "b", "Ġa", ","])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "a")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0), add_prefix_space=False)
    encoder, task = TextEncoder(tokenizer, 16), make_task()
    one = task.example("ab, a", "it")
    windows = task.windows([one], encoder, training=False)
    assert text_of(windows, encoder, 0) == ["<s>", "Ġa", "b", "Ġ", ",", "Ġa", "</s>"]
    assert windows.queries.tolist() == [1, 3, 5]


# ---------------------------------------------------------------- predictions


def test_predictions_are_spans_of_the_original_text():
    task, encoder = make_task(), make_encoder(32)
    text = "  Über\u00a0\U0001f600 Ann-Li Bo\u0308,\nRome"
    one = task.example(text, "it")
    assert list(one.words) == ["Über", "\U0001f600", "Ann", "-", "Li", "Bo\u0308", ",", "Rome"]
    windows = task.windows([one], encoder, training=False)
    tags = ["O", "O", "B-PER", "I-PER", "I-PER", "I-PER", "O", "B-LOC"]
    logits = logits_of(windows, np.array([task.labels.index(tag) for tag in tags]), 5)
    logits[2] *= 0.1
    (prediction,) = task.decode([one], windows, logits)
    sure, unsure = (np.exp(x) / (np.exp(x) + 4) for x in (9.0, 0.9))
    assert prediction["tags"] == tags
    score = pytest.approx((3 * sure + unsure) / 4)
    person = {"type": "PER", "text": "Ann-Li Bo\u0308", "start": 9, "end": 19, "first_word": 2, "last_word": 5}
    place = {"type": "LOC", "text": "Rome", "start": 21, "end": 25, "first_word": 7, "last_word": 7}
    assert prediction["entities"] == [person | {"score": score}, place | {"score": pytest.approx(sure)}]
    json.dumps(prediction)


def test_tokens_are_joined_by_blanks():
    task = make_task()
    one = task.example({"tokens": ["go", "", "New", "York", "!"], "tags": "ignored"}, "it")
    windows = task.windows([one], make_encoder(16), training=False)
    (prediction,) = task.decode([one], windows, logits_of(windows, np.array([0, 3, 4, 0]), 5))
    (entity,) = prediction["entities"]
    assert entity["text"] == "New York"
    assert "go  New York !"[entity["start"] : entity["end"]] == "New York"
    assert one.tags is None


def is_valid(tags: Sequence[int]) -> bool:
    """Whether every I (an even number) follows B or I of its type."""
    return all(tag % 2 or not tag or before in (tag - 1, tag) for before, tag in zip([0, *tags], tags, strict=False))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 4), max_size=5), st.integers(1, 2), st.integers(0, 1000))
def test_viterbi_finds_the_most_probable_valid_sequence(lengths, types, seed):
    starts, outputs = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), 1 + 2 * types
    logits = np.random.default_rng(seed).normal(size=(starts[-1], outputs)) * 3
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    tags = best_sequences(log_probabilities, starts)
    for first, end in pairwise(starts.tolist()):
        candidates = filter(is_valid, product(range(outputs), repeat=end - first))
        words = np.arange(first, end)
        expected = max(candidates, key=lambda one: log_probabilities[words, list(one)].sum())
        assert tags[first:end].tolist() == list(expected)


@pytest.mark.parametrize("penalty", [0.0, 2.0])
def test_the_score_of_an_entity_is_its_probability_whatever_the_penalty(penalty):
    sentences, logits = [Sentence(["Ann"], ["B-PER"], "it")], np.array([[1.0, 2.0, -9, -9, -9]], np.float32)
    task = Entities(make_task().settings, {"types": ["PER", "LOC"], "scheme": "iob2", "outside_penalty": penalty})
    windows = task.windows(sentences, make_encoder(16), training=False)
    (entity,) = task.decode(sentences, windows, logits)[0]["entities"]
    assert entity["score"] == pytest.approx(1 / (1 + np.exp(-1)), abs=1e-3)


@pytest.mark.parametrize("penalty", [0.0, 2.0])
def test_a_word_without_a_token_does_not_end_an_entity(penalty):
    """Such as a variation selector: `tokenizers` drops it."""
    sentences = [Sentence(["Ann", "\ufe0f", "sat"], ["B-PER", "I-PER", "I-PER"], "it")]
    task = Entities(make_task().settings, {"types": ["PER", "LOC"], "scheme": "iob2", "outside_penalty": penalty})
    windows = task.windows(sentences, make_encoder(16), training=False)
    for labels, expected in (([1, 2], ["B-PER", "I-PER", "I-PER"]), ([0, 0], ["O", "O", "O"])):
        assert task.decode(sentences, windows, logits_of(windows, np.array(labels), 5))[0]["tags"] == expected


def test_the_penalty_of_o_is_tuned_on_the_dev_set_and_kept():
    encoder, task = make_encoder(16), make_task(tune_outside=True)
    sentences = [Sentence(["Ann", "sat"], ["B-PER", "O"], "it") for _ in range(3)]
    windows = task.windows(sentences, encoder, training=False)
    logits = np.zeros((6, 5), np.float32)
    logits[:, 0] = [1.6, 4.0, 1.6, 4.0, 9.0, 9.0]  # O, by 1.6 nats where "Ann" is
    assert task.score(sentences, task.decode(sentences, windows, logits))["f1"] == 0
    task.tune(sentences, windows, logits)
    assert task.outside_penalty == 1.75, "the smallest that finds two of three and no other word"
    assert task.score(sentences, task.decode(sentences, windows, logits))["f1"] == pytest.approx(0.8)
    state = json.loads(json.dumps(task.state()))
    assert Entities(task.settings, state).outside_penalty == 1.75
    fixed = make_task()
    fixed.tune(sentences, windows, logits)
    assert (fixed.outside_penalty, "outside_penalty" in fixed.state()) == (0.0, False)
    refused("there is no dev set to tune on", task.read_held_out)
    # What is found with probabilities as they are stays so.
    sure = logits_of(windows, windows.labels, 5)
    task.tune(sentences, windows, sure)
    assert task.outside_penalty == 0.0


@settings(deadline=None, max_examples=50)
@given(laid_out(), st.integers(0, 1000))
def test_decoded_tags_are_valid_and_differ_from_the_most_probable_ones_only_where_those_are_not(case, seed):
    sentences, max_length, context = case
    task = make_task(document_context=context)
    windows = task.windows(sentences, make_encoder(max_length), training=False)
    logits = np.random.default_rng(seed).normal(size=(len(windows.queries), 5)).astype(np.float32) * 3
    predictions = task.decode(sentences, windows, logits)
    expected = [["O"] * len(one.words) for one in sentences]
    of = windows.examples[np.searchsorted(windows.starts, windows.queries, "right") - 1]
    for row, (number, word) in enumerate(zip(of, windows.extra["word"], strict=True)):
        expected[number][word] = task.labels[int(np.argmax(logits[row]))]
    for prediction, most_probable in zip(predictions, expected, strict=True):
        ours, plain = ([task.labels.index(tag) for tag in tags] for tags in (prediction["tags"], most_probable))
        assert is_valid(ours)
        assert ours == plain or not is_valid(plain)
    for one, prediction in zip(sentences, predictions, strict=True):
        spans = metrics.find_entities(metrics.encode_tags([prediction["tags"]], ["PER", "LOC"]))
        found = [(e["first_word"], e["last_word"] + 1, e["type"]) for e in prediction["entities"]]
        assert found == [
            (first, behind, ("PER", "LOC")[kind])
            for first, behind, kind in zip(spans.first.tolist(), spans.end.tolist(), spans.types.tolist(), strict=True)
        ]
        text = " ".join(one.words)
        for entity in prediction["entities"]:
            assert text[entity["start"] : entity["end"]] == entity["text"]
            assert entity["text"] == " ".join(one.words[entity["first_word"] : entity["last_word"] + 1])
            assert 0 < entity["score"] <= 1
    scores = task.score(sentences, predictions)
    gold, tags = [list(one.tags or ()) for one in sentences], [one["tags"] for one in predictions]
    assert scores["f1"] == compare(gold, tags).overall["f1"]
    assert scores["strict_f1"] == compare(gold, tags, "iob2").overall["f1"]


def test_scores_and_details_by_hand():
    task = make_task()
    gold = [Sentence(["a", "b", "c"], ["B-PER", "I-PER", "B-LOC"], "1"), Sentence(["d"], ["O"], "2")]
    predictions = [{"tags": ["B-PER", "I-PER", "I-LOC"]}, {"tags": ["B-PER"]}]
    by_conlleval = {"precision": 2 / 3, "recall": 1.0, "f1": 0.8, "macro_f1": (2 / 3 + 1) / 2}
    strict = {"strict_precision": 0.5, "strict_recall": 0.5, "strict_f1": 0.5}
    assert task.score(gold, predictions) == pytest.approx({**by_conlleval, **strict, "accuracy": 0.5})
    details = task.details(gold, predictions)
    assert details["types"]["LOC"] == {"precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 1}
    assert (details["sentences"], details["words"], details["entities"]) == (2, 4, 2)
    json.dumps(details)


def test_a_trained_task_comes_back_from_its_state(tmp_path):
    path = write(tmp_path / "train", "a I-PER\nb I-LOC\nc B-LOC\n")
    task = Entities(EntitiesSettings(train=path))
    task.read_train()
    state = json.loads(json.dumps(task.state()))
    (tmp_path / "train").unlink()
    again = Entities(EntitiesSettings(train=path, metric="strict_f1"), state)
    assert again.labels == task.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert again.state() == task.state() == state
    assert (state["types"], state["scheme"]) == (["LOC", "PER"], "iob1")
    assert again.metric == "strict_f1"
    assert again.read_file(write(tmp_path / "other", "a I-PER\nb O\n"))[0].tags == ["B-PER", "O"]
    assert not again.remarks


def test_set_labels_keep_their_order(tmp_path):
    task = Entities(EntitiesSettings(train=write(tmp_path / "a", GOOD), labels=("PER", "LOC")))
    task.read_train()
    assert task.labels == ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
    assert EntitiesSettings(labels=("B-cell", "E-mail")).labels == ("B-cell", "E-mail")


@pytest.mark.parametrize("record", ["", " \n", {"text": ""}, {"tokens": []}, {"tokens": [NOTHING]}])
def test_nothing_predicts_nothing(record):
    task, encoder = make_task(), make_encoder(8)
    examples = [task.example(record, "it"), task.example("Ann", "it")]
    windows = task.windows(examples, encoder, training=False)
    assert windows.examples.tolist() == [0, 1]
    predictions = task.decode(examples, windows, logits_of(windows, np.array([1]), 5))
    assert predictions[0] == {"entities": [], "tags": ["O"] * len(examples[0].words)}
    assert predictions[1]["tags"] == ["B-PER"]
    windows = task.windows([], encoder, training=False)
    assert (len(windows), len(windows.queries)) == (0, 0)
    assert task.decode([], windows, np.zeros((0, 5), np.float32)) == []


@pytest.mark.parametrize(
    ("record", "message"),
    [({"words": []}, 'has neither "text" nor "tokens"'), ({}, "has neither"), (7, "7 is not an object")],
)
def test_records_of_another_form_are_refused(record, message):
    refused(f"line 3: {message}", make_task().example, record, "line 3")


def test_a_text_of_a_megabyte_is_predicted_whole():
    random = np.random.default_rng(0)
    lengths = random.integers(1, 9, 200_000)
    text = " ".join("abcdefgh"[:length] for length in lengths)
    text += ", " + "x" * 100_000  # one word of 100 kB is one [UNK]
    assert len(text) > 1_000_000
    task, encoder = make_task(), make_encoder(512)
    began = time.process_time()
    one = task.example(text, "it")
    windows = task.windows([one], encoder, training=False)
    labels = random.integers(0, 5, len(windows.queries))
    (prediction,) = task.decode([one], windows, logits_of(windows, labels, 5))
    assert time.process_time() - began < 10
    assert len(windows.queries) == len(one.words) == len(prediction["tags"]) == 200_002
    assert np.diff(windows.starts).max() == 512
    for entity in prediction["entities"][::1000]:
        assert text[entity["start"] : entity["end"]] == entity["text"]


def test_predictions_are_columns_for_conlleval():
    task = make_task()
    gold = [
        Sentence(["a b", "\u00a0", "c"], ["B-PER", "I-PER", "B-LOC"], "1"),
        Sentence([], [], "2"),
        Sentence(["d"], ["O"], "3"),
    ]
    predictions = [{"tags": ["B-PER", "I-PER", "I-LOC"]}, {"tags": []}, {"tags": ["B-PER"]}]
    files = task.scorer_files(gold, predictions)
    assert files == {".tags.conll": "a_b B-PER B-PER\n_ I-PER I-PER\nc B-LOC I-LOC\n\n\nd O B-PER\n\n"}
    bare = [replace(one, tags=None) for one in gold]
    assert task.scorer_files(bare, predictions)[".tags.conll"].splitlines()[2] == "c I-LOC"
    text = task.example("d", "it")
    assert task.scorer_files([text], predictions[2:]) == {}
    blanks = [Sentence(["a", "b"], ["B-Full Name", "I-Full Name"], "4")]
    columns = task.scorer_files(blanks, [{"tags": ["B-Full Name", "O"]}])[".tags.conll"]
    assert columns == "a B-Full_Name B-Full_Name\nb I-Full_Name O\n\n"
    assert task.scorer_files([replace(text, tags=["O"])], predictions[2:]) == {".tags.conll": "d O B-PER\n\n"}


def test_types_that_the_model_does_not_know_are_kept_and_count_as_not_found(tmp_path, caplog):
    train, other = write(tmp_path / "train", GOOD), write(tmp_path / "other", "it O\nRome B-LOC\nAnn B-PER\n")
    task = Entities(EntitiesSettings(train=train, test=other))
    (one,) = task.read_test()["test"]
    assert task.read_file(other, labeled=False)[0].tags == task.read_file(other)[0].tags == one.tags
    assert task.record(one)["gold"] == ["O", "B-LOC", "B-PER"]
    assert task.windows([one], make_encoder(16), training=False).labels.tolist() == [0, 0, 1]
    assert "other:2: the model does not know the types LOC; they stay in the gold labels and count as" in caplog.text
    scores = task.score([one], [{"tags": ["O", "O", "B-PER"]}])
    assert (scores["precision"], scores["recall"]) == (1.0, 0.5)


# ---------------------------------------------------------------- words of a text


TRAINED_WORDS = [
    *["Ann", "went", "home", "again"] * 20,
    *[".", ","] * 10,
    *["(", ")", "-", "U.S.", "U.S.", "J.", "G.I.", "Mr.", "Mr.", "anti-war", "co-op", "well-to-do"],
    *["'s", "'s", "'s", "n't", "n't", "does", "O'Neil", "4.5", "1,000", "$", "@ann", "@bo"],
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("He left the U.S., again.", "He|left|the|U.S.|,|again|."),
        ("Mr. X.Y. Bell's anti-Spanish (pro-war) aide.", "Mr.|X.Y.|Bell|'s|anti-Spanish|(|pro-war|)|aide|."),
        ("Bell’s right-to-left", "Bell|’s|right-to-left"),
        ("doesn't, isn’t", "does|n't|,|is|n’t"),
        ("It cost $6.5-$1,234.", "It|cost|$|6.5|-|$|1,234|."),
        ("@paul a+b 100%", "@paul|a|+|b|100|%"),
        ("東京tower", "東|京|tower"),
        (" \n", ""),
        ("", ""),
    ],
)
def test_text_is_cut_as_the_training_words_were(text, expected):
    cuts = WordSegmenter.learn(TRAINED_WORDS)
    again = WordSegmenter.from_state(json.loads(json.dumps(cuts.state())))
    for one in (cuts, again):
        assert "|".join(text[begin:end] for begin, end in one(text).tolist()) == expected
    assert again.state() == cuts.state()


@settings(deadline=None)
@given(st.text(max_size=40), st.lists(st.text(max_size=9), max_size=20))
def test_learned_words_are_whole_pieces_of_the_text(text, learned):
    pieces = cut_words(text)
    assert WordSegmenter.learn([text[begin:end] for begin, end in pieces.tolist()])(text).tolist() == pieces.tolist()
    found = WordSegmenter.learn(learned)(text)
    assert (found[:, 1] > found[:, 0]).all()
    assert set(found[:, 0]) <= set(pieces[:, 0])
    covered = [np.concatenate([np.zeros(0, int), *(np.arange(*one) for one in words)]) for words in (found, pieces)]
    assert covered[0].tolist() == covered[1].tolist()


def test_words_are_learned_from_the_training_file_and_kept(tmp_path):
    train = write(tmp_path / "a.conll", "Ann B-PER\nU.S. B-LOC\nanti-war O\n. O\n")
    task = Entities(EntitiesSettings(train=train, labels=("LOC", "PER")))
    record = {"text": "pro-war U.S. aide.", "entities": [{"start": 8, "end": 12, "type": "LOC"}]}
    (one,) = task.read_file(write_records(tmp_path / "b.jsonl", record))
    assert (one.words, one.tags) == (["pro-war", "U.S.", "aide", "."], ["O", "B-LOC", "O", "O"])
    again = Entities(EntitiesSettings(train=train), json.loads(json.dumps(task.state())))
    assert again.example(record["text"], "it").words == one.words
    earlier = Entities(EntitiesSettings(train=train), {"types": ["LOC", "PER"], "scheme": "iob2"})
    assert earlier.example("U.S.", "it").words == ["U", ".", "S", "."]  # as it was trained to be used


def test_words_of_scripts_without_blanks_are_cut_as_the_training_words_were():
    words = "タナカ カップ は を が ในไทย コーヒー これ 飲む ไทย แม่น้ำ"
    cuts = WordSegmenter.learn([*words.split(), *words.split()[6:]] * 3)
    for text in ("スミス|は|コーヒー|を|飲む", "แม่น้ำ|ไทย", "これ|が|ไทย"):
        assert "|".join(text.replace("|", "")[begin:end] for begin, end in cuts(text.replace("|", "")).tolist()) == text


@pytest.mark.parametrize(
    ("text", "name"),
    [("เขาไปกรุงเทพเมื่อวาน", "กรุงเทพ"), ("きのうスペインへいった", "スペイン"), ("ខ្ញុំទៅភ្នំពេញម្សិលមិញ", "ភ្នំពេញ")],
)
def test_an_entity_within_a_run_of_letters_has_its_own_words(tmp_path, text, name):
    start = text.index(name)
    record = {"text": text, "entities": [{"start": start, "end": start + len(name), "type": "LOC"}]}
    task = Entities(EntitiesSettings(train=write_records(tmp_path / "a.jsonl", record)))
    (one,) = task.read_train()
    assert not task.remarks
    tagged = [
        offsets for offsets, tag in zip(one.text_and_offsets()[1].tolist(), one.tags or (), strict=True) if tag != "O"
    ]
    assert (tagged[0][0], tagged[-1][1]) == (start, start + len(name))
    assert task.example(text, "it").words == one.words  # plain text is cut alike


def test_a_long_run_of_signs_is_cut_into_known_words():
    cuts = WordSegmenter.learn(["...", "...", "..", "..", "."])
    lengths = np.diff(cuts("." * 600), axis=1)
    assert set(lengths.ravel().tolist()) == {3}
    assert lengths.sum() == 600


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't!", "Don|'|t|!"),
        ("5€ on U.S.-China", "5|€|on|U|.|S|.|-|China"),
        ("नमस्ते दुनिया", "नमस्ते|दुनिया"),  # vowel signs are marks, not letters
        ("e\u0301a \u0301b", "e\u0301a|\u0301b"),
        ("东京tower", "东|京|tower"),
        ("コーヒーをﾊﾟっと人々", "コー|ヒー|を|ﾊﾟっ|と|人々"),
        ("แม่น้ำใน\u200bไทย2", "แ|ม่|น้ำ|ใ|น\u200b|ไ|ท|ย|2"),
        ("ក្រុង ကျွန်ုပ်", "ក្|រុ|ង|ကျွ|န်ု|ပ်"),
        ("❤\ufe0f👩\u200d👩x", "❤\ufe0f|👩\u200d|👩|x"),
        ("a\u200bb\u200b c\x00d", "a\u200bb\u200b|c\x00d"),
        ("\ufeffAnn\u00a0Li\u3000\u2028x\ty", "\ufeffAnn|Li|x|y"),
        (" \n ", ""),
        ("", ""),
    ],
)
def test_words_of_a_text(text, expected):
    assert "|".join(text[begin:end] for begin, end in cut_words(text).tolist()) == expected


@settings(deadline=None)
@given(  # few alphabets: theirs is of an older Unicode, and has a gap in the rarest ideographs
    st.text(
        st.characters(categories=["L", "N", "P", "Zs"], max_codepoint=0x5FF)
        | st.characters(min_codepoint=0x4E00, max_codepoint=0x9FFF),
        max_size=30,
    )
)
def test_words_of_letters_and_punctuation_are_those_of_berts_pre_tokenizer(text):
    pieces = pre_tokenizers.BertPreTokenizer().pre_tokenize_str(
        normalizers.BertNormalizer(clean_text=False, strip_accents=False, lowercase=False).normalize_str(text)
    )
    assert [text[begin:end] for begin, end in cut_words(text).tolist()] == [piece for piece, _ in pieces]


@settings(deadline=None)
@given(st.text(max_size=40))
def test_words_cover_whatever_is_not_white_space(text):
    offsets = cut_words(text)
    assert (offsets[:, 1] > offsets[:, 0]).all()
    assert (offsets[1:, 0] >= offsets[:-1, 1]).all()
    outside = set(range(len(text))) - {at for begin, end in offsets.tolist() for at in range(begin, end)}
    assert all(text[at].isspace() for at in outside)
    assert not any(
        text[at].isspace() and text[at] not in "\x1c\x1d\x1e\x1f"
        for begin, end in offsets.tolist()
        for at in range(begin, end)
    )
