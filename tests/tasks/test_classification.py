"""Classification: files in, windows, predictions and scores out; scores equal scikit-learn's and scipy's."""

from __future__ import annotations

import gzip
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.stats
import sklearn.metrics
import sklearn.utils.class_weight
import torch
from corpora import make_vocabulary, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import make_bert
from tokenizers import Tokenizer

from finetune.tasks.base import Windows
from finetune.tasks.classification import Classification, ClassificationSettings, Example
from finetune.tasks.classification import metrics as metrics
from finetune.tasks.classification.decoding import LabelDecoder
from finetune.tasks.datasets.arrays import concatenate_ranges
from finetune.tasks.datasets.arrow import read_dataset
from finetune.tasks.datasets.table import TableLayout
from finetune.tasks.datasets.tables import read_table
from finetune.tasks.datasets.text import TextEncoder
from finetune.tasks.datasets.windows import cut_pairs
from finetune.tasks.entities import Entities, EntitiesSettings
from finetune.tasks.questions import QuestionsSettings
from finetune.training.config import FinetuneConfig, load_config
from finetune.training.model.batches import Batches
from finetune.training.model.task_model import LOSSES
from finetune.training.saved import result_lines
from pretrain.common.settings import load
from tests.tasks.refusals import refused

WORDS = ["word11", "word12", "word13", "word14", "word16", "word17", "word18", "word19", "word21", "word22"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, make_vocabulary(200))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def write(name: str, content: str | bytes | list[Any]) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(record) + "\n" for record in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def task(**values: Any) -> Classification:
    return Classification(ClassificationSettings(**values))


AB = {"labels": ("a", "b")}
MULTI, REGRESSION = {"problem_type": "multi_label"}, {"problem_type": "regression"}


def sayings(*labels: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"text": f"{WORDS[n % 10]} {WORDS[n % 7]}", "label": label, **more} for n, label in enumerate(labels)]


# ---------------------------------------------------------------- scores


@given(
    st.integers(2, 5).flatmap(
        lambda c: st.lists(st.tuples(st.integers(0, c - 1), st.integers(0, c - 1)), min_size=1, max_size=30)
    )
)
@settings(max_examples=150, deadline=None)
def test_class_scores_equal_sklearns(pairs: list[tuple[int, int]]) -> None:
    true, predicted = np.array(pairs).T
    classes = 5
    matrix = metrics.confusion(true, predicted, classes)
    counts = metrics.class_counts(matrix)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert matrix.tolist() == sklearn.metrics.confusion_matrix(true, predicted, labels=range(5)).tolist()
        of_each: Any = sklearn.metrics.precision_recall_fscore_support(true, predicted, labels=range(classes))
        precision, recall, f1, support = of_each
        assert counts.precision == pytest.approx(precision, abs=1e-12)
        assert counts.recall == pytest.approx(recall, abs=1e-12)
        assert counts.f1 == pytest.approx(f1, abs=1e-12)
        assert counts.true.tolist() == list(support)
        assert metrics.accuracy(matrix) == pytest.approx(sklearn.metrics.accuracy_score(true, predicted))
        assert metrics.matthews(matrix) == pytest.approx(sklearn.metrics.matthews_corrcoef(true, predicted), abs=1e-12)
        for average in ("macro", "micro"):
            wanted = sklearn.metrics.f1_score(true, predicted, average=average)
            found = counts.macro_f1(only_present=True) if average == "macro" else counts.micro_f1
            assert found == pytest.approx(wanted, abs=1e-12)


def test_matthews_of_a_million_examples_does_not_overflow() -> None:
    matrix = np.array([[600_000, 400_000], [300_000, 700_000]]) * 1000
    small = matrix // 100_000_000
    assert metrics.matthews(matrix) == pytest.approx(metrics.matthews(small))


@given(st.lists(st.tuples(*[st.booleans()] * 6), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_scores_of_sets_equal_sklearns(rows: list[tuple[bool, ...]]) -> None:
    true, predicted = np.array(rows)[:, :3], np.array(rows)[:, 3:]
    counts = metrics.label_counts(true, predicted)
    for average, found in (("micro", counts.micro_f1), ("macro", counts.macro_f1(only_present=False))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = sklearn.metrics.f1_score(true, predicted, average=average)
        assert found == pytest.approx(wanted, abs=1e-12)
    assert metrics.subset_accuracy(true, predicted) == sklearn.metrics.accuracy_score(true, predicted)


# Tenths, so that there are ties; both signs.
_VALUES = st.lists(st.tuples(st.integers(-30, 30), st.integers(-30, 30)), min_size=2, max_size=30)


@given(_VALUES)
@settings(max_examples=150, deadline=None)
def test_correlations_equal_scipys(pairs: list[tuple[int, int]]) -> None:
    true, predicted = np.array(pairs).T / 10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = [scipy.stats.pearsonr(true, predicted)[0], scipy.stats.spearmanr(true, predicted)[0]]
    found = [metrics.pearson(true, predicted), metrics.spearman(true, predicted)]
    # scipy: NaN where one is constant; see the module's docstring.
    assert found == pytest.approx(np.nan_to_num(np.array(wanted, float)).tolist(), abs=1e-9)
    assert metrics.ranks(true).tolist() == scipy.stats.rankdata(true).tolist()


def test_correlation_with_a_constant_is_nothing_and_with_huge_values_something() -> None:
    assert metrics.pearson(np.array([1.0, 2.0]), np.array([3.0, 3.0])) == 0
    assert metrics.spearman(np.array([1.0]), np.array([3.0])) == 0
    assert metrics.pearson(np.array([1.0, 2, 4]) * 1e200, np.array([1.0, 2, 4]) * 1e-200) == pytest.approx(1)


# ---------------------------------------------------------------- tables


def test_every_format_gives_the_same_columns(write: Callable[..., str], tmp_path: Path) -> None:
    rows = [("pos", 'He said "no", twice'), ("neg", "a\u2028b\x85c é"), ("pos", " blanks ")]
    records = [{"label": label, "text": text} for label, text in rows]
    tsv = "text\tid\tlabel\n" + "".join(f"{text}\t{n}\t{label}\r\n" for n, (label, text) in enumerate(rows))
    quoted = "".join('{},"{}"\n'.format(label, text.replace('"', '""')) for label, text in rows)
    paths = [
        write("a.tsv", tsv),
        write("bom.tsv", "\ufeff" + tsv.rstrip()),
        write("a.csv", "label,text\r\n\r\n" + quoted),
        write("a.csv.gz", gzip.compress(("label,text\n" + quoted).encode())),
        write("a.jsonl", records),
        write("lines.json", records),
        write("a.json", json.dumps(records, indent=1)),
    ]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    for path in [*paths, str(tmp_path / "a.parquet")]:
        table = read_table(path, ["text", "label"])
        assert list(zip(table.columns["label"], table.columns["text"], strict=True)) == rows, path
    numbered = read_table(write("n.csv", quoted), [1, 0], layout=TableLayout(header=False))
    assert numbered.columns[1] == [text for _, text in rows]
    latin = write("x.data", "text\tlabel\nWho was Señor  X ?\tHUM\n".encode("latin-1"))
    table = read_table(latin, ["label", "text"], layout=TableLayout("tsv", encoding="latin-1"))
    assert table.columns == {"label": ["HUM"], "text": ["Who was Señor  X ?"]}


def test_places_are_lines_also_behind_quoted_line_ends(write: Callable[..., str]) -> None:
    table = read_table(write("a.csv", 'text,label\n"one\ntwo",a\n\nthree,b\n'), ["text", "label"])
    assert [table.where(row).rpartition(":")[2] for row in range(2)] == ["2", "5"]
    tsv = read_table(write("a.tsv", 'text\tlabel\none"\ta\n\nthree\tb\n'), ["text", "label"])
    assert [tsv.where(row).rpartition(":")[2] for row in range(2)] == ["2", "4"]
    assert tsv.columns["text"] == ['one"', "three"]
    # Of a single column an empty line is an empty text: predictions, which have no id, are to stand in its order.
    alone = read_table(write("b.tsv", "text\na b\n\nc d\n\n"), ["text"])
    assert alone.columns["text"] == ["a b", "", "c d"]
    led = read_table(write("c.tsv", "\n\ntext\tlabel\n\none\ta\n"), ["text", "label"])
    assert led.columns["text"] == ["one"]


def test_a_field_of_more_than_128_kb_is_read(write: Callable[..., str]) -> None:
    text = "x" * 1_000_000
    assert read_table(write("a.csv", f'text,label\n"{text}",a\n'), ["text"]).columns["text"] == [text]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,label\na,b\na,b,c\n", "a.csv:3: 3 columns, but the header has 2. Quote cells"),
        ("a.tsv", "text\tlabel\na\n", "a.tsv:2: 1 column, but the header has 2. Set `quoting: standard`"),
        ("a.tsv", b"text\tlabel\nok\tx\nb\xe4d\ty\n", "a.tsv:3: byte 17 (0xe4) is not UTF-8"),
        ("a.csv", "", "a.csv: empty file"),
        ("a.csv", "\n \n", "a.csv: empty file"),
        ("a.csv", 'text,label\na,b\n"open,b\nc,d\n', "a.csv:3: not CSV (unexpected end of data)"),
        ("a.csv", "sentence,label\na,b\n", "a.csv:1: no column 'text'; it has sentence, label"),
        ("a.csv", "text,label,text\na,b,c\n", "a.csv:1: column 'text' occurs 2 times"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": \n', "a.jsonl:2: not JSON"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"txt": "a", "label": 1}\n', "a.jsonl:2: no 'text'; it has txt"),
        ("a.jsonl", "[1, 2]\n", "a.jsonl:1: found [1, 2]; expected an object"),
        ("a.json", '[{"text": "a", "label": 1}, 3]', "a.json: record 2: found 3; expected an object"),
        ("a.json", '{\n"train": []\n}', "a.json:1: no 'text'; it has train"),
        ("a.parquet", "no", "a.parquet: not a Parquet file"),
        ("a.csv.gz", "no", "a.csv.gz: cannot be read (Not a gzipped file"),
        ("a.txt", "a b", "a.txt: unknown suffix '.txt'"),
        ("a.csv", "text , label\nw,a\n", "no column 'text'; it has 'text ', ' label'."),
        ("none.csv", None, "none.csv: not found"),
    ],
)
def test_bad_files_are_named_with_their_line(write: Callable[..., str], name: str, content: Any, message: str) -> None:
    path = name if content is None else write(name, content)
    refused(re.escape(message), read_table, path, ["text", "label"])


def test_other_bad_files(write: Callable[..., str], tmp_path: Path) -> None:
    refused(r"a folder, not a file", read_table, write("d.parquet/a", "") and tmp_path / "d.parquet", ["text"])
    for column in (2, -1):
        message = rf"b\.csv:1: no column {column}; each row has 2, numbered from 0"
        refused(message, read_table, write("b.csv", "a,b\n"), [column], layout=TableLayout(header=False))
    bad = pa.array([b"ok", b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": bad}), tmp_path / "bad.parquet")
    refused(r"bad\.parquet: row 2: bytes that are not UTF-8", read_table, tmp_path / "bad.parquet", ["text"])
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    message = r"twice\.parquet: column 'text' occurs 2 times\. Rename all but one\."
    refused(message, read_table, tmp_path / "twice.parquet", ["text"])


@pytest.mark.parametrize("encoding", ["punycode", "undefined"])
def test_encodings_that_say_nothing_of_the_place(write: Callable[..., str], encoding: str) -> None:
    path, message = write("a.csv", "text,label\na-!,b\n"), rf"a\.csv.* not {encoding.upper()}.* Save the file as UTF-8"
    refused(message, read_table, path, ["text"], layout=TableLayout(encoding=encoding))


def test_ids_are_read_only_if_there_is_one_column_of_them(write: Callable[..., str], tmp_path: Path) -> None:
    """They are ours alone, so no setting could name another column."""
    csv = write("a.csv", "id,text,label,id\n1,a,x,2\n3,b,y,4\n")
    columns = [pa.array([1, 3]), pa.array(["a", "b"]), pa.array(["x", "y"]), pa.array([2, 4])]
    pq.write_table(pa.Table.from_arrays(columns, names=["id", "text", "label", "id"]), tmp_path / "a.parquet")
    for path in (csv, str(tmp_path / "a.parquet")):
        assert [(one.text, one.id) for one in task(train=path).read_train()] == [("a", None), ("b", None)]


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.jsonl"])
@pytest.mark.parametrize("setting", ["text_column", "label_column"])
def test_a_column_id_that_a_setting_names_is_required(write, tmp_path, name, setting) -> None:
    def put(text: str, label: str) -> Classification:
        rows = [{text: "a", label: "x"}, {text: "b", label: "y"}]
        if name == "a.parquet":
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
        else:
            write(name, rows if name == "a.jsonl" else f"{text},{label}\na,x\nb,y\n")
        return task(train=str(tmp_path / name), **{setting: "id"})

    refused(r"a\.\w+.*: no (column )?'id'; it has text, label", put("text", "label").read_train)
    named = put("id", "label") if setting == "text_column" else put("text", "id")
    assert [(one.text, one.label) for one in named.read_train()] == [("a", "x"), ("b", "y")]


def test_data_sets_keep_the_names_and_order_of_their_classes(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["spam", "ham", "eggs"])}
    )
    train = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    test = datasets.Dataset.from_dict({"text": ["c"], "label": [-1]}, features=features)
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "saved")
    train.to_parquet(tmp_path / "a.parquet")
    saved = task(dataset=str(tmp_path / "saved"), test="test")
    assert [example.label for example in saved.read_train()] == ["ham", "spam"]
    assert saved.labels == ("spam", "ham", "eggs")
    assert [example.label for example in saved.read_test()["test"]] == [None]
    assert saved.read_file(str(tmp_path / "a.parquet"))[0].label == "ham"
    bare = datasets.DatasetDict({"train": train, "test": test.remove_columns("label")})
    bare.save_to_disk(tmp_path / "bare")
    unlabeled = task(dataset=str(tmp_path / "bare"), test="test").read_test()["test"]
    assert [(example.text, example.label) for example in unlabeled] == [("c", None)]
    parquet = task(train=str(tmp_path / "a.parquet"))
    parquet.read_train()
    assert parquet.labels == saved.labels
    refused(r"no split 'dev'; it has train, test", task(dataset=str(tmp_path / "saved"), dev="dev").read_held_out)
    train.save_to_disk(tmp_path / "one")
    refused("has no splits, so no 'test'", read_dataset, str(tmp_path / "one"), ["text"], split="test")
    refused(r"classification\.revision: empty", task(dataset="some/name").read_train)


def test_a_data_set_of_the_hub_is_read_at_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def load_dataset(*arguments: Any, **more: Any) -> Any:
        asked.append((arguments, more))
        names = datasets.Features(
            {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
        )
        rows = {"sentence": ["a", "b"], "label": [1, 0]}
        return datasets.Dataset.from_dict(rows, features=names).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub = task(dataset="a/b", subset="c", revision="abc", train="train[:2]", text_column="sentence")
    assert [(example.text, example.label) for example in hub.read_train()] == [("a", "yes"), ("b", "no")]
    assert asked == [(("a/b", "c"), {"split": "train[:2]", "revision": "abc", "streaming": True})]


# ---------------------------------------------------------------- labels


def test_labels_are_sorted_by_number_if_all_are_and_kept_by_name(write: Callable[..., str]) -> None:
    path = write("a.jsonl", sayings(10, 9, 2.0, 10))
    numbers = task(train=path)
    assert [example.label for example in numbers.read_train()] == ["10", "9", "2", "10"]
    assert numbers.labels == ("2", "9", "10")
    words = task(train=write("b.jsonl", sayings("b", True, "a", 10)))
    words.read_train()
    assert words.labels == ("10", "a", "b", "true")
    fixed = task(train=path, labels=("10", "9", "2", "1"))
    assert fixed.labels == ("10", "9", "2", "1")
    # A trained model knows its labels without the files.
    state = json.loads(json.dumps(numbers.state()))
    again = Classification(ClassificationSettings(train="gone.jsonl", dev=path), state)
    assert again.labels == ("2", "9", "10")
    assert again.read_held_out()["dev"][0].label == "10"


def test_labels_are_known_whichever_set_is_read_first(write: Callable[..., str]) -> None:
    train, dev = write("a.jsonl", sayings("a", "b")), write("b.jsonl", sayings("b"))
    assert [example.label for example in task(train=train, dev=dev).read_held_out()["dev"]] == ["b"]
    assert task(train=train).outputs == 2


@pytest.mark.parametrize("values", [{}, {"label_separator": ";"}])
def test_sets_of_labels(write: Callable[..., str], values: dict[str, str]) -> None:
    cells = ["b; a", "", "a ;"] if values else ['["b", "a"]', "", '["a"]']
    path = write("a.tsv", "text\tlabel\n" + "".join(f"x\t{cell}\n" for cell in cells))
    multi = task(train=path, problem_type="multi_label", **values)
    examples = multi.read_train()
    assert [example.label for example in examples] == [("b", "a"), (), ("a",)]
    assert (multi.labels, multi.outputs, multi.objective) == (("a", "b"), 2, "labels")
    lists = task(train=write("a.jsonl", sayings(["b", "a"], [], ["a"])), problem_type="multi_label")
    assert [example.label for example in lists.read_train()] == [("b", "a"), (), ("a",)]


VECTORS = [[1, 0, 1], [0, 0, 0], [True, 1.0, False]]


def write_parquet(path: str, columns: dict[str, list[Any]]) -> str:
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("form", ["csv", "separated", "jsonl", "parquet", "one-hot", "one-hot parquet"])
def test_vectors_of_0_and_1_are_sets_of_labels(form: str, write: Callable[..., str], tmp_path: Path) -> None:
    values: dict[str, Any] = {"labels": ("x", "y", "z"), "problem_type": "multi_label"}
    path, floats = str(tmp_path / "a.parquet"), [[float(value) for value in row] for row in VECTORS]
    if form == "csv":
        path = write("a.csv", "text,label\n" + "".join(f'w,"{json.dumps(row)}"\n' for row in floats))
    elif form == "separated":
        cells = [" ".join(str(int(one)) for one in row) for row in VECTORS]
        path = write("a.csv", "text,label\n" + "".join(f"w,{cell}\n" for cell in cells))
        values["label_separator"] = " "
    elif form == "jsonl":
        path = write("a.jsonl", sayings(*VECTORS))
    elif form == "parquet":
        write_parquet(path, {"text": ["w"] * 3, "label": floats})
    else:
        values = {"label_columns": ("x", "y", "z"), "problem_type": "multi_label"}
        rows = [",".join(map(str, row)).lower() for row in VECTORS]
        if form == "one-hot":
            path = write("a.csv", "y,text,x,z\n" + "".join("{1},w,{0},{2}\n".format(*row.split(",")) for row in rows))
        else:
            write_parquet(
                path, {"text": ["w"] * 3, **dict(zip("xyz", map(list, zip(*floats, strict=True)), strict=True))}
            )
    multi = task(train=path, **values)
    assert [example.label for example in multi.read_train()] == [("x", "z"), (), ("x", "y")]
    assert multi.labels == ("x", "y", "z")
    again = Classification(ClassificationSettings(train="gone.csv", dev=path, **values), multi.state())
    assert [example.label for example in again.read_held_out()["dev"]] == [("x", "z"), (), ("x", "y")]
    unlabeled = write("b.jsonl", [{"text": "w"}])
    assert [example.label for example in again.read_file(unlabeled, labeled=False)] == [None]


def test_numbers_and_names_that_are_no_vectors_stay_names(write: Callable[..., str]) -> None:
    for rows in ([[0], [1], [0, 1]], [[0], [1], [1]], [["0", "1"], ["1", "0"]]):
        multi = task(train=write("a.jsonl", sayings(*rows)), problem_type="multi_label")
        assert [example.label for example in multi.read_train()] == [tuple(map(str, row)) for row in rows]


@pytest.mark.parametrize(
    ("rows", "values", "message"),
    [
        (sayings([1, 0, 1], [0, 0, 1]), {}, ":1: labels is [1, 0, 1]. Set `labels` to the names of these values"),
        (sayings([1, 0, 1]), {"labels": ("x", "y")}, ":1: labels is [1, 0, 1], but there are 2 labels: x, y"),
        (sayings([1, 0, 1], [0, 1]), {}, ":1: labels is [1, 0, 1], with a repeated label. Give each once; or if"),
        (sayings(["a", "b"], ["a", "a"]), {}, ":2: labels is ['a', 'a'], with a repeated label"),
        ([{"text": "w", "x": 1, "y": 2}], {"label_columns": ("x", "y")}, ":1: labels is [1, 2]; expected 0 or 1 for"),
        ([{"text": "w", "x": 1, "y": None}], {"label_columns": ("x", "y")}, "expected 0 or 1 for each of x, y"),
        ([{"text": "w", "x": 1}], {"label_columns": ("x", "y")}, ":1: no 'y'; it has text, x"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(rows, values, message, write) -> None:
    refused(re.escape(message), task(train=write("a.jsonl", rows), problem_type="multi_label", **values).read_train)


def test_a_vector_that_does_not_fit_is_left_out_where_a_model_predicts(write: Callable[..., str], caplog: Any) -> None:
    rows = [{"text": "w", "x": 1, "y": 0}, {"text": "w", "x": 1, "y": 2}]
    for file, labels in ((rows, [("x",), None]), (sayings([1, 0, 1], [0, 0, 1]), [None, None])):
        settings: dict[str, Any] = {"label_columns": ("x", "y")} if file is rows else {"labels": ("x", "y")}
        train = rows[:1] if file is rows else sayings([1, 0], [0, 1])
        trained = task(train=write("a.jsonl", train), problem_type="multi_label", **settings)
        trained.read_train()
        examples = trained.read_file(write("b.jsonl", file), labeled=False)
        assert [example.label for example in examples] == labels
        assert f"{labels.count(None)} of 2 labels are missing or unknown" in caplog.text


def test_a_hint_does_not_lead_to_another_task(write: Callable[..., str]) -> None:
    path = write("a.yaml", "name: x\nstart_from: y\nquestions: {train: x, dev_share: 0.1}\n")
    refused(r"a\.yaml:3: questions\.dev_share is not a known setting; known here: train", load_config, path)
    path = write("a.yaml", "name: x\nstart_from: y\ndev_share: 0.1\n")
    refused(r"did you mean \w+\.dev_share\?", load_config, path)


def test_values_begin_at_their_mean(write: Callable[..., str], tmp_path: Path) -> None:
    from finetune.training.train import make_model
    from pretrain.checkpoint.released import read_released

    make_bert(tmp_path / "bert")
    path = write("a.jsonl", sayings(3, 4, 8))
    section = {"train": path, "problem_type": "regression"}
    values = {"name": "x", "start_from": str(tmp_path / "bert"), "classification": section}
    for random in (False, True):
        config = FinetuneConfig.model_validate({**values, "random_weights": random})
        made = task(**section)
        model = make_model(config, made, read_released(tmp_path / "bert"), made.read_train())
        assert model.head.out_bias.tolist() == [5.0]


def test_a_test_set_is_scored_where_it_has_labels(write: Callable[..., str], caplog: Any) -> None:
    rows = [{"text": "w", "label": label} for label in ("a", "-1", "", "-", None, "b")]
    one = task(train=write("a.jsonl", sayings("a", "b")), test=write("b.jsonl", rows))
    examples = one.read_test()["test"]
    assert [example.label for example in examples] == ["a", None, None, None, None, "b"]
    assert "4 of 6 labels are missing or unknown, and ignored; the first:" in caplog.text
    assert one.is_labeled(examples)
    assert one.score(examples, [{"label": "a"}] * 6)["accuracy"] == 0.5
    assert one.details(examples, [{"label": "a"}] * 6)["confusion"]["counts"] == [[1, 0], [1, 0]]


def test_text_in_utf_16_is_read(tmp_path: Path) -> None:
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        mark = "" if encoding == "utf-16" else "\ufeff"
        (tmp_path / "a.csv").write_bytes(f"{mark}text,label\né,a\n".encode(encoding))
        table = read_table(tmp_path / "a.csv", ["text", "label"])
        assert table.columns == {"text": ["é"], "label": ["a"]}


@pytest.mark.parametrize(
    ("train", "dev", "values", "message"),
    [
        (sayings("a", "b"), sayings("b", "c"), {}, "dev.jsonl:2: label 'c' is not in the training set"),
        (sayings("positive", "b"), sayings("positiv"), {}, "did you mean 'positive'?"),
        (sayings("1", "2"), sayings("1.0"), {}, "'1.0' is not in the training set or `labels`; known: 1, 2"),
        (sayings("a", "b"), [], {}, "dev.jsonl: empty file"),
        (sayings("a", "b"), "text,label\n", {}, "dev.csv: no examples"),
        (sayings(1, 2), sayings(2, 2.0), REGRESSION, "dev.jsonl: all dev examples have the value 2.0, so no"),
        (sayings("a", "a"), None, {}, "train.jsonl: every example has the label 'a'"),
        (sayings("a", "a"), None, AB, "train.jsonl: every example has the label 'a'"),
        (sayings("a", "b", "d"), None, AB, "train.jsonl:3: label 'd' is not in"),
        (sayings(None, " "), None, {}, "train.jsonl: 2 of 2 rows left out: 2 unlabeled. Give a file with labels."),
        (sayings("a", [3]), None, {}, "train.jsonl:2: label is [3]. Give each example the name of its label"),
        (sayings("a", "b"), None, {"positive": "c"}, "classification.positive: 'c' is not a label; known: a, b"),
        (sayings("a", "b", "c"), None, {"metric": "f1"}, "classification.metric: f1 needs two classes"),
        (sayings("a", "b", "c"), None, {"positive": "c"}, "classification.positive: only supported for single_label"),
        (
            sayings(["a"], ["b"]),
            None,
            {**MULTI, "positive": "b"},
            "classification.positive: only supported for single_label",
        ),
        (
            sayings("a", "b"),
            None,
            {"class_weights": {"c": 2}},
            "class_weights: 'c' is not a label; known: a, b",
        ),
        (sayings("a", "b"), None, {"metric": "f1"}, "train.jsonl has 'a' and 'b'. Set classification.positive"),
        ([{"text": None, "label": "a"}], None, AB, "train.jsonl:1: the text is empty, not text"),
        ([{"text": 7, "label": "a"}], None, AB, "train.jsonl:1: the text is 7, not text"),
        ([{"text": "x\ud83d", "label": "a"}], None, AB, "1: the text has half of a surrogate pair at character 1 ("),
        (sayings("a", "b\ud83d"), None, {}, "train.jsonl:2: the label has half of a surrogate pair at character 1"),
        (sayings("a", "b", id="\ud83d"), None, {}, "train.jsonl:1: the id has half of a surrogate pair at character 0"),
        (sayings(["a", "\ud83d"]), None, MULTI, "train.jsonl:1: the label has half of a surrogate pair"),
        (sayings("a", "b", pair=None), None, {"pair_column": "pair"}, "train.jsonl:1: the second text is empty"),
        (sayings("a", "b"), None, {"pair_column": "pair"}, "train.jsonl:1: no 'pair'; it has text, label"),
        (sayings("a,b"), None, MULTI, "labels is 'a,b', not a JSON list. Write one, or set"),
        (sayings(3), None, MULTI, "train.jsonl:1: labels is 3, not a JSON list"),
        (sayings([]), None, MULTI, "no example has a label"),
        (sayings(1, "x"), None, REGRESSION, "train.jsonl:2: label is 'x', not a number"),
        (sayings(1, "nan"), None, REGRESSION, "train.jsonl:2: label is 'nan', not a number"),
        (sayings(True), None, REGRESSION, "train.jsonl:1: label is True, not a number"),
        (sayings(2, 2), None, REGRESSION, "every example has the label 2.0. Give"),
        (
            sayings("a", "b"),
            None,
            {"dev_share": 1e-9},
            "of 2 examples leaves the dev set empty; one example of each class",
        ),
        (sayings("a", "b"), None, {"dev_share": 1 - 1e-9}, "leaves the dev set empty; one example of each class"),
        (sayings(1, 2), None, {"dev_share": 1 - 1e-9, **REGRESSION}, "leaves no training examples. Lower it"),
    ],
)
def test_bad_labels_and_sets_are_named(write, train, dev, values, message) -> None:
    if dev is not None:
        values = {**values, "dev": write("dev.csv" if isinstance(dev, str) else "dev.jsonl", dev)}
    bad = task(train=write("train.jsonl", train), **values)
    refused(re.escape(message), lambda: (bad.read_train(), bad.read_held_out()))


def test_a_test_set_may_have_labels_or_none(write: Callable[..., str]) -> None:
    train = write("a.csv", "text,label\na,x\nb,y\n")
    for content, wanted in (("text\nc\n", None), ("text,label\nc,\n", None), ("text,label\nc,x\n", "x")):
        part = task(train=train, test=write("t.csv", content))
        assert [example.label for example in part.read_test()["test"]] == [wanted]


def test_train_examples_draws_a_part(write: Callable[..., str]) -> None:
    rows = [{"text": f"text {number % 50}", "label": "ab"[number % 2]} for number in range(100)]
    path = write("train.jsonl", rows)

    def drawn(**values: Any) -> list[tuple[str, str]]:
        return [(one.where, one.text) for one in task(train=path, **values).read_train()]

    everything, some = drawn(), drawn(train_examples=30)
    assert len(some) == 30
    assert some == [one for one in everything if one in some]  # in the order of the file
    assert drawn(train_examples=30) == some
    assert some != everything[:30]
    assert drawn(train_examples=100) == everything
    # What is held out is neither drawn nor counted.
    held_out = {one.text for one in task(train=path, dev_share=0.3).read_held_out()["dev"]}
    left = drawn(dev_share=0.3, train_examples=20)
    assert len(left) == 20
    assert not held_out & {text for _, text in left}
    refused(r"train_examples: 101, but .* has 100 training examples", drawn, train_examples=101)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.9])
def test_every_class_has_its_part_on_both_sides(write: Callable[..., str], share: float) -> None:
    counts = {"cat": 200, "dog": 95, "newt": 3, "yak": 1}
    records = [{"text": f"{label} {n}", "label": label} for label, count in counts.items() for n in range(count)]
    whole = task(train=write("a.jsonl", records), dev_share=share)
    train, dev = Counter(one.label for one in whole.read_train()), whole.read_held_out()["dev"]
    assert set(train) == set(counts)
    assert all(abs(counts[label] - train[label] - share * counts[label]) <= 2 for label in counts)
    assert abs(len(dev) - share * len(records)) <= 2
    drawn = task(train=write("b.jsonl", records), train_examples=30).read_train()
    assert Counter(one.label for one in drawn) == {"cat": 18, "dog": 9, "newt": 2, "yak": 1}


@pytest.mark.parametrize("classes", [2, 5])
def test_calibration_is_that_of_sklearn(classes: int) -> None:
    draw = np.random.default_rng(0)
    probabilities, true = draw.dirichlet(np.ones(classes), 300), draw.integers(0, classes, 300)
    found, numbers = metrics.calibration(probabilities, true), list(range(classes))
    assert found["nll"] == pytest.approx(sklearn.metrics.log_loss(true, probabilities, labels=numbers))
    given = probabilities[:, 1] if classes == 2 else probabilities
    assert found["brier"] == pytest.approx(sklearn.metrics.brier_score_loss(true, given, labels=numbers))
    sets = draw.random((300, classes)) < 0.3
    found = metrics.calibration(probabilities, sets)
    assert found["nll"] == pytest.approx(sklearn.metrics.log_loss(sets.ravel(), probabilities.ravel()))
    assert found["brier"] == pytest.approx(sklearn.metrics.brier_score_loss(sets.ravel(), probabilities.ravel()))


def test_the_calibration_error_is_that_of_the_bins() -> None:
    # Confidences 0.9, 0.9, 0.7, 0.5, of which the second and the last are wrong: |1.8 - 1|, |0.7 - 1| and 0.5 of 4.
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.3, 0.7], [0.5, 0.5]])
    assert metrics.calibration(probabilities, np.array([0, 1, 1, 1]))["ece"] == pytest.approx(1.6 / 4)
    assert metrics.calibration(np.eye(2)[[0, 1]], np.array([0, 1])) == {"nll": 0, "brier": 0, "ece": 0}
    sets = np.array([[True, False]])
    assert metrics.calibration(np.array([[0.9, 0.2]]), sets)["ece"] == pytest.approx((0.1 + 0.2) / 2)


def test_a_temperature_finds_what_the_logits_were_multiplied_by() -> None:
    draw = np.random.default_rng(0)
    logits = draw.normal(0, 2, (2000, 4))
    true = (logits + draw.gumbel(size=logits.shape)).argmax(1)
    classes = LabelDecoder("single_label", tuple("abcd"), "", 0.5)
    assert classes.best_temperature(true, 3 * logits) == pytest.approx(3, rel=0.1)
    assert classes.best_temperature(true, logits / 4) == pytest.approx(1 / 4, rel=0.1)
    sets = draw.random(logits.shape) < 1 / (1 + np.exp(-logits))
    labels = LabelDecoder("multi_label", tuple("abcd"), "", 0.5)
    assert labels.best_temperature(sets, 3 * logits) == pytest.approx(3, rel=0.1)
    # Few examples, none of them wrong, leave it near 1.
    assert 0.4 < classes.best_temperature(np.array([0, 1]), 2 * np.eye(4)[:2]) < 1


def test_an_interval_is_that_of_resampled_examples() -> None:
    one = task(train="x", labels=["a", "b"])
    examples = [Example("", None, "ab"[n % 5 == 0], "") for n in range(400)]
    predictions = [{"label": "a", "scores": {"a": 0.7, "b": 0.3}}] * 400
    half = 1.96 * (0.8 * 0.2 / 400) ** 0.5  # of a share of 0.8
    assert one.interval(examples, predictions) == pytest.approx((0.8 - half, 0.8 + half), abs=0.005)
    right = [{"label": each.label} for each in examples]
    assert one.interval(examples, right) == (1 - 3 / len(examples), 1)


def test_a_fold_is_scored_and_not_trained_on(write: Callable[..., str]) -> None:
    records = [{"text": f"{n % 40}", "label": "ab"[n % 4 == 0]} for n in range(80)]
    path = write("a.jsonl", records)
    values = {"name": "x", "classification": {"train": path, "test": write("t.jsonl", records[:3])}}
    folds: list[str] = []
    for number in (1, 2, 3):
        one = FinetuneConfig.model_validate({**values, "fold": f"{number}/3"}).make_task()
        train, tests = one.training_set(), one.test_sets()
        assert list(tests) == ["fold", "test"]
        texts = {example.text for example in tests["fold"]}
        assert not texts & {example.text for example in train}
        assert len(train) + len(tests["fold"]) == 80
        assert Counter(example.label for example in tests["fold"])["b"] in (6, 8)
        folds += texts
    assert len(folds) == len(set(folds)) == 40
    alone = FinetuneConfig.model_validate({**values, "fold": "50/60"}).make_task()
    refused("fold: 50/60 of 80 training examples is empty", alone.test_sets)


def test_dev_share_parts_the_set_by_its_texts_alone(write: Callable[..., str]) -> None:
    records = [{"text": f"{n % 50}", "label": "ab"[n % 2]} for n in range(200)]
    whole = task(train=write("a.jsonl", records), dev_share=0.3)
    train, dev = whole.read_train(), whole.read_held_out()["dev"]
    assert len(train) + len(dev) == 200
    assert 30 < len(dev) < 90
    assert not {example.text for example in train} & {example.text for example in dev}
    turned = task(train=write("b.jsonl", records[::-1]), dev_share=0.3)
    assert {example.text for example in turned.read_held_out()["dev"]} == {example.text for example in dev}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("{}", "train: one of train, dataset and glue is needed"),
        ("{glue: rte}", "glue_dir: glue needs the folder"),
        ("{glue: rte, glue_dir: x, train: y}", "only one of glue, dataset and train"),
        ("{glue: rte, glue_dir: x, dev: y}", "remove dev and test"),
        ("{glue: rte, glue_dir: x, problem_type: regression}", "labels: set by glue"),
        ("{glue: rte, glue_dir: x, metric: f1}", "metric: 'f1' is not one of accuracy; choose one."),
        ("{train: x, dev: y, dev_share: 0.1}", "dev_share: dev is set, too"),
        ("{train: x, encoding: utf-88}", "encoding: 'utf-88' is unknown"),
        ("{train: x, encoding: rot13}", "encoding: 'rot13' is unknown"),
        ("{train: x, delimiter: ', '}", "delimiter: ', ' is more than one character"),
        ('{train: x, delimiter: "\\n"}', "delimiter: '\\n' is a line end or a quote"),
        ('{train: "x\\ny"}', "train is 'x\\ny', which contains control characters (\\n)"),
        ("{train: s3://bucket/x.csv}", "train: 's3://bucket/x.csv' is a remote address"),
        ("{train: x, test: gs://b/x.csv}", "test: 'gs://b/x.csv' is a remote address"),
        ("{glue: rte, glue_dir: s3://b}", "glue_dir: 's3://b' is a remote address"),
        ("{dataset: hf://datasets/x}", "dataset: 'hf://datasets/x' is a remote address"),
        ("{train: ~nosuchuser/x.csv}", "train: '~nosuchuser/x.csv' names a user who does not exist on this"),
        ("{train: x, header: false}", "text_column: 'text', but without a header"),
        ("{train: x, labels: [a, a]}", "labels: an entry is repeated"),
        ("{train: x, labels: [a]}", "labels: only one class"),
        ("{train: x, labels: [a, b], problem_type: regression}", "labels: not supported for regression"),
        ("{train: x, class_weights: balanced, problem_type: multi_label}", "class_weights: balanced needs single_l"),
        ("{train: x, class_weights: {a: 2}, problem_type: regression}", "class_weights: balanced needs single_l"),
        *(
            (f"{{train: x, class_weights: {wrong}}}", "expected none, balanced, or weights")
            for wrong in ("{a: 0}", "3")
        ),
        (
            "{train: x, label_smoothing: 0.1, problem_type: multi_label}",
            "label_smoothing: only supported for single_label",
        ),
        ("{train: x, threshold: 0.1}", "threshold: only supported for multi_label, or for two classes with positive"),
        ("{train: x, metric: pearson}", "metric: 'pearson' is not one of accuracy"),
        ("{train: x, pair_colum: y}", "did you mean pair_column?"),
    ],
)
def test_settings_that_do_not_fit_are_refused(write: Callable[..., str], lines: str, message: str) -> None:
    refused(re.escape(message), load, write("a.yaml", lines), ClassificationSettings)


def test_separators_may_be_tabs_and_line_breaks(write: Callable[..., str]) -> None:
    settings = load(write("a.yaml", '{train: x, delimiter: "\\t", label_separator: "\\n"}'), ClassificationSettings)
    assert (settings.delimiter, settings.label_separator) == ("\t", "\n")


def test_columns_may_be_numbered() -> None:
    numbered = ClassificationSettings(train="x", header=False, text_column=1, label_column=0)
    assert (numbered.text_column, numbered.pair_column) == (1, "")


@pytest.mark.parametrize("kind", [ClassificationSettings, EntitiesSettings, QuestionsSettings])
def test_every_setting_is_described(kind: Any) -> None:
    assert all(field.description for field in kind.model_fields.values())


# ---------------------------------------------------------------- windows


def two_classes(**values: Any) -> Classification:
    return task(train="unread.jsonl", labels=("a", "b"), **values)


def shown(windows: Windows, window: int, segment: int) -> list[int]:
    """The tokens of one window's segment, special tokens (ids under 5) left out."""
    rows = slice(windows.starts[window], windows.starts[window + 1])
    ids, types = windows.ids[rows], windows.types[rows]
    return ids[(types == segment) & (ids >= 5)].tolist()


def test_short_texts_and_pairs_are_framed_as_the_tokenizer_does(tokenizer: Tokenizer) -> None:
    encoder = TextEncoder(tokenizer, 16)
    rows = [("word11 word12", "word13", "b"), ("", "word14", "a"), ("word16", "", "b")]
    examples = [Example(*row, "") for row in rows]
    windows = two_classes(pair_column="pair").windows(examples, encoder, training=True)
    for n, (text, pair, _) in enumerate(rows):
        wanted = tokenizer.encode(text, pair)
        rows_of = slice(windows.starts[n], windows.starts[n + 1])
        assert windows.ids[rows_of].tolist() == wanted.ids
        assert windows.types[rows_of].tolist() == wanted.type_ids
    assert windows.labels.tolist() == [1, 0, 1]
    assert windows.labels.dtype == np.int64
    assert windows.queries.tolist() == windows.starts[:-1].tolist()
    single = two_classes().windows(examples[:1], encoder, training=False)
    assert single.ids.tolist() == tokenizer.encode("word11 word12").ids


_LENGTHS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


@given(_LENGTHS, st.integers(4, 30), st.data())
@settings(max_examples=200, deadline=None)
def test_windows_of_pairs_show_every_token_of_both(lengths, capacity, data) -> None:
    overlap = data.draw(st.integers(0, capacity // 2 - 1))
    sizes = np.array(lengths, np.int64).reshape(-1, 2)
    pair, *stretches = cut_pairs(sizes[:, 0], sizes[:, 1], capacity, overlap)
    assert (np.diff(pair) >= 0).all()
    assert set(pair.tolist()) == set(range(len(sizes)))
    assert (stretches[1] + stretches[3] <= capacity).all()
    for n, both in enumerate(lengths):
        of = pair == n
        for side, size in enumerate(both):
            begin, length = stretches[2 * side][of], stretches[2 * side + 1][of]
            assert set(concatenate_ranges(begin, length).tolist()) == set(range(size))
            assert (np.diff(begin) >= 0).all()  # both texts go forward together
            if min(both) <= capacity // 2 and size == min(both) and both[0] != both[1]:
                assert set(length.tolist()) == {size}  # the shorter stands whole everywhere
        if sum(both) <= capacity:
            assert of.sum() == 1


def test_two_long_texts_go_on_at_the_same_pace() -> None:
    pair, begin_a, length_a, begin_b, length_b = cut_pairs(np.array([100]), np.array([40]), 20, 0)
    assert len(pair) == 10
    assert begin_a.tolist() == list(range(0, 100, 10))
    assert begin_b.tolist() == [0, 0, 0, 10, 10, 20, 20, 20, 30, 30]
    assert set(length_a.tolist()) == set(length_b.tolist()) == {10}


def test_windows_of_one_example_share_its_label_and_weight(tokenizer: Tokenizer, write: Callable[..., str]) -> None:
    long = " ".join(WORDS * 4)
    records = [{"text": text, "label": label} for text, label in ((long, "a"), ("word11", "a"), ("word12", "b"))]
    balanced = task(train=write("a.jsonl", records), class_weights="balanced")
    examples = balanced.read_train()
    windows = balanced.windows(examples, TextEncoder(tokenizer, 16), training=True)
    assert np.bincount(windows.examples).tolist() == [4, 1, 1]
    wanted = sklearn.utils.class_weight.compute_sample_weight("balanced", [e.label for e in examples])
    assert np.bincount(windows.examples, windows.weights) == pytest.approx(wanted)
    assert windows.weights.dtype == np.float32
    # Also when only a part is asked for: the weights are those of the training set.
    part = balanced.windows(examples[2:], TextEncoder(tokenizer, 16), training=True)
    assert part.weights == pytest.approx(wanted[2:])
    scored = balanced.windows(examples, TextEncoder(tokenizer, 16), training=False)
    assert np.bincount(scored.examples, scored.weights) == pytest.approx([1, 1, 1])
    tokens = [token for n in range(4) for token in shown(windows, n, 0)]
    assert set(tokens) == {tokenizer.token_to_id(word) for word in WORDS}


@pytest.mark.parametrize(
    ("problem", "smoothing", "weights"),
    [
        ("single_label", 0.1, {"a": 20, "c": 0.5}),
        ("single_label", 0.3, None),
        ("single_label", 0.0, {"b": 3}),
        ("multi_label", 0.0, {"a": 20, "c": 0.5}),
    ],
)
def test_weights_and_smoothing_are_torchs(tokenizer: Tokenizer, problem, smoothing, weights) -> None:
    labels = ["c", "a", "b", "c", "a"] if problem == "single_label" else [("c",), ("a", "b"), (), ("c", "a"), ("b",)]
    examples = [Example(WORDS[number], None, label, "") for number, label in enumerate(labels)]
    given = {"problem_type": problem, "label_smoothing": smoothing, "class_weights": weights or "none"}
    one = task(train="unread.jsonl", labels=("a", "b", "c"), **given)
    encoder, logits = TextEncoder(tokenizer, 16), torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    scored = one.windows(examples, encoder, training=False)
    step = Batches(one.windows(examples, encoder, training=True), seed=0, budget=99, rank=0, world_size=1).step(0, 5)
    (batch,) = step.micro_batches
    loss = LOSSES["sequence", one.objective](logits, batch) / step.weight
    true, weight = torch.from_numpy(scored.labels)[batch.query_indices], torch.ones(3)
    for name, number in (weights or {}).items():
        weight["abc".index(name)] = number
    if problem == "single_label":
        expected = torch.nn.CrossEntropyLoss(weight, label_smoothing=smoothing)(logits, true)
    else:
        expected = torch.nn.BCEWithLogitsLoss(pos_weight=weight)(logits, true)
    torch.testing.assert_close(loss, expected)
    assert scored.weights.tolist() == [1] * 5, "the loss on held-out texts has none of them"


def test_a_class_without_examples_has_weight_one_and_a_warning(tokenizer, write, caplog) -> None:
    absent = task(train=write("a.jsonl", sayings("a", "a", "c")), labels=("a", "b", "c"), class_weights="balanced")
    (a, _, c) = absent.read_train()
    windows = absent.windows([a, replace(a, label="b"), c], TextEncoder(tokenizer, 16), training=True)
    assert windows.weights.tolist() == [0.75, 1.0, 1.5]
    assert "a.jsonl: 1 label has no training example: 'b'." in caplog.text


def test_suspicious_labels_and_empty_texts_are_warned_of(write: Callable[..., str], caplog: Any) -> None:
    """One line each, and none of a good set."""
    bad = write("a.csv", "text,label\na,good\n ,good\nb,Good\nc,Good\n,bad\nd,not bad\ne,not bad\nf,notbad\n")
    dev = write("b.csv", "text,label\na,good\n,good\n")
    one = task(train=bad, dev=dev)
    one.read_train()
    one.read_held_out()
    assert [record.getMessage() for record in caplog.records] == [
        f"{bad}: 2 of 8 examples with an empty text: lines 3, 6. Fill them in, or remove them.",
        f"{bad}: 2 labels have only one training example: 'bad', 'notbad'. Add examples, or remove such labels.",
        f"{dev}: 1 of 2 examples with an empty text: line 3. Fill them in, or remove them.",
    ]
    caplog.clear()
    task(train=write("c.jsonl", sayings("a", "b", "a", "b"))).read_train()
    assert not caplog.records


def test_labels_of_sets_are_counted_one_by_one(write: Callable[..., str], caplog: Any) -> None:
    rows = sayings(["a", "b"], ["a"], [])
    task(train=write("a.jsonl", rows), problem_type="multi_label").read_train()
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "1 label has only one training example: 'b'. Add examples, or remove such labels."
    ]


def test_a_model_that_predicts_one_class_is_remarked_on(write: Callable[..., str]) -> None:
    one = task(train=write("a.jsonl", sayings("a", "b", "a", "b")))
    examples = one.read_train()
    said = one.result_remarks(one.details(examples, [{"label": "b"}] * 4))
    assert len(said) == 1
    assert said[0].startswith("the model predicts 'b' for every example.")
    assert not one.result_remarks(one.details(examples, [{"label": label} for label in "bbba"]))
    assert not one.result_remarks(one.details(examples[1:2], [{"label": "b"}]))  # right: there is no other class


def test_a_text_of_a_megabyte_works_and_training_reports_skipped_windows(tokenizer: Tokenizer, caplog: Any) -> None:
    rng = np.random.default_rng(0)
    text = " ".join(rng.choice(WORDS, 1_000_000 // 7 + 1))
    assert len(text) > 1_000_000
    examples = [Example("word11", None, "a", ""), Example(text, None, "b", "")]
    encoder = TextEncoder(tokenizer, 128)
    every = two_classes().windows(examples, encoder, training=False)
    assert not caplog.records
    # Of 126 tokens, a quarter is the next window's too.
    tokens = [token for n in range(1, len(every) - 1) for token in shown(every, n, 0)[: 126 - 31]]
    tokens += shown(every, len(every) - 1, 0)
    assert tokens == tokenizer.encode(text, add_special_tokens=False).ids
    trained = two_classes(max_windows=5).windows(examples, encoder, training=True)
    assert trained.examples.tolist() == [0, 1, 1, 1, 1, 1]
    places = [next(n for n in range(1, len(every)) if shown(every, n, 0) == shown(trained, k, 0)) for k in range(1, 6)]
    last = len(every) - 1
    assert places == (1 + np.linspace(0, last - 1, 5).round().astype(int)).tolist()
    assert f"1 of 2 examples are longer than 5 windows (max_windows): training uses 5 of their {last}" in caplog.text
    alone = two_classes(max_windows=1).windows(examples, encoder, training=True)
    assert [shown(alone, n, 0) for n in range(2)] == [shown(every, n, 0) for n in range(2)]


def test_windows_without_room_for_an_overlap_are_refused(tokenizer: Tokenizer) -> None:
    given = [Example("word11", None, "a", "")], TextEncoder(tokenizer, 5)
    refused("max_length: windows hold 3 tokens", two_classes().windows, *given, training=False)


def test_labels_have_the_form_of_the_objective(tokenizer: Tokenizer) -> None:
    encoder = TextEncoder(tokenizer, 16)
    multi = two_classes(problem_type="multi_label")
    windows = multi.windows([Example("x", None, ("b",), ""), Example("x", None, (), "")], encoder, training=True)
    assert windows.labels.tolist() == [[0, 1], [0, 0]]
    assert windows.labels.dtype == np.float32
    value = task(train="unread.jsonl", problem_type="regression")
    windows = value.windows([Example("x", None, 2.5, ""), Example("x", None, None, "")], encoder, training=False)
    assert windows.labels.tolist() == [2.5, 0]
    assert (windows.labels.dtype, value.outputs, value.labels) == (np.float32, 1, ())
    assert two_classes().windows([Example("x", None, None, "")], encoder, training=False).labels.tolist() == [0]
    nothing = two_classes().windows([], encoder, training=False)
    assert len(nothing) == 0
    assert two_classes().decode([], nothing, np.zeros((0, 2), np.float32)) == []


# ---------------------------------------------------------------- predictions


def windowed(counts: list[int]) -> Windows:
    """Windows as `decode` needs them: `counts` of each example."""
    examples = np.repeat(np.arange(len(counts)), counts)
    nothing = np.zeros(0)
    return Windows(nothing, nothing, nothing, examples, nothing, nothing, nothing, {})


def some(count: int, label: Any = None) -> list[Example]:
    return [Example("x", None, label, "")] * count


def test_logits_of_an_examples_windows_are_averaged() -> None:
    logits = np.array([[0, 1], [4, 0], [2, -1], [-1, 3]], np.float32)
    windows = windowed([3, 1])
    made = two_classes().decode(some(2), windows, logits)
    chances = np.exp([2.0, 0.0]) / np.exp([2.0, 0.0]).sum()
    both = {"a": pytest.approx(chances[0]), "b": pytest.approx(chances[1])}
    assert made[0] == {"label": "a", "score": pytest.approx(chances[0]), "scores": both}
    assert [one["label"] for one in made] == ["a", "b"]
    multi = two_classes(problem_type="multi_label").decode(some(2), windows, logits)
    assert multi[0]["labels"] == ["a", "b"]
    assert multi[0]["scores"] == {"a": pytest.approx(1 / (1 + np.exp(-2))), "b": 0.5}
    value = task(train="unread.jsonl", problem_type="regression").decode(some(2), windows, logits[:, :1])
    assert value == [{"value": 2.0}, {"value": -1.0}]
    json.dumps([made, multi, value])
    with warnings.catch_warnings(record=True) as caught:
        far = two_classes(problem_type="multi_label").decode(some(1), windowed([1]), np.array([[1e4, -1e4]]))
    assert far[0]["scores"] == {"a": 1.0, "b": 0.0}
    assert not caught


def predicted(*labels: str) -> list[dict[str, Any]]:
    return [{"label": label, "score": 1.0, "scores": {}} for label in labels]


def test_scores_and_details_of_two_classes(write: Callable[..., str]) -> None:
    two = two_classes(positive="b")
    examples = [*some(3, "a"), *some(2, "b")]
    made = predicted("a", "b", "a", "b", "a")
    true, found = [0, 0, 0, 1, 1], [0, 1, 0, 1, 0]
    scores = two.score(examples, made)
    assert scores["f1"] == pytest.approx(sklearn.metrics.f1_score(true, found, pos_label=1))
    assert two_classes(positive="a").score(examples, made)["f1"] == pytest.approx(2 / 3)
    assert not {"f1", "accuracy_and_f1"} & two_classes().score(examples, made).keys(), "which class is not said"
    assert result_lines(two, "dev", scores, {})[0].endswith("f1 (b) 0.5000, accuracy_and_f1 (b) 0.5500")
    assert scores["accuracy"] == 0.6
    assert scores["matthews"] == pytest.approx(sklearn.metrics.matthews_corrcoef(true, found))
    assert two.metric in scores
    details = two.details(examples, made)
    assert (details["positive"], two_classes().details(examples, made).get("positive")) == ("b", None)
    assert details["confusion"] == {"labels": ["a", "b"], "counts": [[2, 1], [1, 1]]}
    assert details["by_type"]["b"] == {"precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 2}
    json.dumps(details)
    assert two.score(some(1), made[:1]) == {} == two.details(some(1), made[:1])


def test_a_threshold_decides_between_two_classes_and_for_each_label() -> None:
    logits = np.log([[0.7, 0.3], [0.9, 0.1], [0.2, 0.8]])
    two = two_classes(positive="b")
    two.set_threshold(0.3 - 1e-9)
    made = two.decode(some(3), windowed([1] * 3), logits)
    assert [(one["label"], round(one["score"], 6)) for one in made] == [("b", 0.3), ("a", 0.9), ("b", 0.8)]
    assert two.details([*some(1, "a"), *some(2, "b")], made)["threshold"] == pytest.approx(0.3)
    assert two.score([*some(1, "b"), *some(2, "b")], made)["f1"] == pytest.approx(0.8)
    multi = two_classes(problem_type="multi_label")
    multi.set_threshold(0.9)
    made = multi.decode(some(2), windowed([1] * 2), np.array([[3.0, 0], [0, 0]]))
    assert [one["labels"] for one in made] == [["a"], []]
    refused("threshold: 1; expected a probability", multi.set_threshold, 1.0)
    for other in (two_classes(), task(train="x", problem_type="regression"), Entities(EntitiesSettings(train="x"))):
        refused("threshold: only supported for multi_label, or for two", other.set_threshold, 0.5)


def test_scores_and_details_of_values() -> None:
    value = task(train="unread.jsonl", problem_type="regression")
    examples = [example for label in (1.0, 2.0, 4.0) for example in some(1, label)]
    made = [{"value": 2.0}, {"value": 1.0}, {"value": 5.0}]
    scores = value.score(examples, made)
    assert scores["pearson"] == pytest.approx(scipy.stats.pearsonr([1, 2, 4], [2, 1, 5])[0])
    assert scores[value.metric] == pytest.approx((scores["pearson"] + scores["spearman"]) / 2)
    assert value.details(examples, made) == {"mean_absolute_error": 1.0, "mean_squared_error": 1.0}


def tune(one: Classification, examples: list[Any], predictions: list[Any]) -> None:
    """Tune on logits that decode to `predictions`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one, "decode", lambda *_: predictions)
        one.tune(examples, cast(Windows, None), np.zeros((0, 0), np.float32))


def test_the_threshold_is_tuned_on_the_dev_set_and_kept() -> None:
    multi = two_classes(problem_type="multi_label")
    examples = [*some(2, ("a",)), *some(2, ())]
    made = [{"labels": [], "scores": {"a": a, "b": 0.1}} for a in (0.4, 0.3, 0.2, 0.05)]
    assert multi.score(examples, made)["micro_f1"] == 0
    tune(multi, examples, made)
    assert multi.threshold == pytest.approx(0.25)
    scores = multi.score(examples, made)
    assert (scores["micro_f1"], scores["macro_f1"], scores["subset_accuracy"]) == (1.0, 0.5, 1.0)
    again = Classification(multi.settings, json.loads(json.dumps(multi.state())))
    assert again.threshold == multi.threshold
    assert again.details(examples, made)["threshold"] == multi.threshold
    fixed = two_classes(problem_type="multi_label", threshold=0.6)
    tune(fixed, examples, made)
    assert fixed.threshold == 0.6
    # Of equally good ones (2 / 3 above 0.3 and above 0.05) the nearest to 0.5.
    made = [{"scores": {"a": a, "b": 0.01}} for a in (0.4, 0.2, 0.3, 0.25, 0.05)]
    tune(multi, [*some(2, ("a",)), *some(3, ())], made)
    assert multi.threshold == pytest.approx(0.35)
    # Where nothing is better than 0.5, it stays.
    sure = [{"labels": [], "scores": {"a": a, "b": 0.1}} for a in (0.9, 0.8, 0.2, 0.05)]
    tune(multi, examples, sure)
    assert multi.threshold == 0.5


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12)
)
@settings(max_examples=60, deadline=None)
def test_no_threshold_is_better_than_the_tuned_one(rows: list[tuple[bool, bool, int, int]]) -> None:
    for metric in ("micro_f1", "macro_f1", "subset_accuracy"):
        multi = two_classes(problem_type="multi_label", metric=metric)
        examples = [Example("x", None, tuple(n for n, on in zip("ab", row[:2], strict=True) if on), "") for row in rows]
        made = [{"scores": {"a": row[2] / 20, "b": row[3] / 20}} for row in rows]
        tune(multi, examples, made)
        best = multi.score(examples, made)[metric]
        for threshold in np.arange(0.025, 1, 0.05):
            multi.threshold = float(threshold)
            # All labels (below every probability) and none (above) are no thresholds to choose.
            values = {value for row in rows for value in row[2:]}
            if min(values) / 20 < threshold < max(values) / 20:
                assert multi.score(examples, made)[metric] <= best + 1e-12


def test_a_threshold_among_many_rare_labels_is_found() -> None:
    rng = np.random.default_rng(0)
    chances = rng.uniform(0, 0.01, (5000, 2))  # most are far below what matters
    chances[:40, 0] = np.linspace(0.2, 0.4, 40)
    examples = [*some(20, ()), *some(20, ("a",)), *some(4960, ())]
    multi = two_classes(problem_type="multi_label")
    tune(multi, examples, [{"scores": {"a": a, "b": b}} for a, b in chances.tolist()])
    assert multi.score(examples, [{"scores": {"a": a, "b": b}} for a, b in chances.tolist()])["micro_f1"] > 0.97


def test_values_far_from_one_are_reported(write: Callable[..., str], caplog: Any) -> None:
    task(train=write("a.jsonl", sayings(1000, 250000)), problem_type="regression").read_train()
    assert "values have a standard deviation of 1.24e+05" in caplog.text
    caplog.clear()
    task(train=write("b.jsonl", sayings(1, 5)), problem_type="regression").read_train()
    assert not caplog.records


def test_records_and_texts_of_the_users() -> None:
    single = two_classes(text_column="sentence")
    assert single.example("plain", "stdin:1").text == "plain"
    assert single.example({"sentence": "a", "id": 3}, "stdin:1").text == "a"
    assert single.example({"text": "a"}, "stdin:1").text == "a"
    assert single.example({"text": "a", "pair": None}, "stdin:1").text == "a"
    pairs = two_classes(pair_column="hypothesis")
    assert pairs.example({"text": "a", "hypothesis": "b"}, "").pair == "b"
    assert pairs.example({"text": "a", "pair": "b"}, "").pair == "b"
    for made, record, message in (
        (single, {"txt": "a"}, "stdin:1: no 'text'; it has txt"),
        (single, {}, "stdin:1: no 'text'; it has nothing"),
        (single, {"text": 3}, "stdin:1: 'text' is 3, not text"),
        (single, {"text": "a", "pair": "b"}, "was not trained on pairs"),
        (pairs, "a", 'a string, but a pair is needed. Give {"text": ..., "pair": ...}'),
        (pairs, {"text": "a"}, "stdin:1: no 'pair'; it has text"),
        (single, None, "stdin:1: empty is neither a string nor an object"),
        (single, float("nan"), "stdin:1: nan is neither a string nor an object"),
    ):
        refused(re.escape(message), made.example, record, "stdin:1")


def test_nothing_heavy_is_loaded_for_the_settings() -> None:
    import subprocess
    import sys

    code = (
        "import sys, finetune.tasks.classification; "
        "print([m for m in ('torch', 'pyarrow', 'datasets', 'mwparserfromhell') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
