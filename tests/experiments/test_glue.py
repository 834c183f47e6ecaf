"""GLUE: the nine tasks' official file forms, their scores, submissions, and the paper's table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.tasks.classification import Classification, ClassificationSettings
from finetune.tasks.datasets import glue
from pretrain.common.errors import InputError
from tests.tasks.refusals import refused

# One small file of each official form: (name, header, rows). Quotes are characters, and texts may begin with one.
_NLI = "index\tsentence1\tsentence2"
_MNLI = "index\tpromptID\tpairID\tgenre\tp1\tp2\tp3\tp4\tsentence1\tsentence2"
_STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
_QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
_MRPC = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
_FIVE = "\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label"
_TREES = "fiction\t(\t(\t(\t("
FILES: dict[str, dict[str, str]] = {
    "CoLA": {
        "train.tsv": 'gj04\t1\t\t"One" is fine.\ngj04\t0\t*\tOne fine "is.\n',
        "dev.tsv": "gj04\t0\t*\tBad one.\n",
        "test.tsv": "index\tsentence\n0\tBill whistled.\n",
    },
    "SST-2": {
        "train.tsv": 'sentence\tlabel\n"one fine film . \t1\nno wit , only gags \t0\n',
        "dev.tsv": "sentence\tlabel\nbleak \t0\n",
        "test.tsv": "index\tsentence\n0\tuneasy mishmash .\n",
    },
    "MRPC": {
        "train.tsv": f'{_MRPC}\r\n1\t1\t2\tHe "said .\tHe said .\r\n0\t3\t4\tA\tB\r\n',
        "dev.tsv": f"{_MRPC}\n1\t5\t6\tC\tC\n",
        "test.tsv": "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t7\t8\tD\tE\n",
    },
    "STS-B": {
        "train.tsv": f'{_STSB}\tscore\n0\tg\tf\t2012\t1\tn\tn\tA "plane.\tAn air plane.\t5.000\n'
        "1\tg\tf\t2012\t2\tn\tn\tA\tB\t3.800\n",
        "dev.tsv": f"{_STSB}\tscore\n0\tg\tf\t2012\t0\tn\tn\tA man.\tA hat.\t4.750\n"
        "1\tg\tf\t2012\t1\tn\tn\tA cat.\tA dog.\t1.250\n",
        "test.tsv": f"{_STSB}\n0\tg\tf\t2012\t0\tn\tn\tA girl.\tA boy.\n",
    },
    "QQP": {
        "train.tsv": f'{_QQP}\n0\t1\t2\tHow "so?\tWhy?\t1\n1\t3\t4\ttorn\n2\t5\t6\tWho?\tWhat?\t0\n',
        "dev.tsv": f"{_QQP}\n0\t1\t2\tHow?\tWhy?\t0\n",
        "test.tsv": "id\tquestion1\tquestion2\n0\tWhere?\tWhen?\n",
    },
    "MNLI": {
        "train.tsv": f"{_MNLI}\tlabel1\tgold_label\n0\t1\t2\t{_TREES}\tOne.\tTwo.\tneutral\tneutral\n"
        f'1\t1\t2\t{_TREES}\t"One.\tTwo.\tneutral\tcontradiction\n',
        "dev_matched.tsv": f"{_MNLI}{_FIVE}\n0\t1\t2\t{_TREES}\tOne.\tTwo." + "\tneutral" * 5 + "\tentailment\n",
        "dev_mismatched.tsv": f"{_MNLI}{_FIVE}\n0\t1\t2\t{_TREES}\tOne.\tTwo." + "\tneutral" * 6 + "\n",
        "test_matched.tsv": f"{_MNLI}\n0\t1\t2\t{_TREES}\tFive.\tSix.\n",
        "test_mismatched.tsv": f"{_MNLI}\n0\t1\t2\t{_TREES}\tSeven.\tEight.\n",
    },
    "QNLI": {
        "train.tsv": 'index\tquestion\tsentence\tlabel\n0\tWho?\t"He.\tentailment\n1\tWho?\tIt.\tnot_entailment\n',
        "dev.tsv": "index\tquestion\tsentence\tlabel\n0\tWho?\tHe.\tentailment\n",
        "test.tsv": "index\tquestion\tsentence\n0\tWho?\tHe.\n",
    },
    "RTE": {
        "train.tsv": f"{_NLI}\tlabel\n0\tA\tB\tnot_entailment\n1\tA\tA\tentailment\n",
        "dev.tsv": f"{_NLI}\tlabel\n0\tA\tB\tnot_entailment\n",
        "test.tsv": f"{_NLI}\n0\tA\tB\n",
    },
    "WNLI": {
        "train.tsv": f"{_NLI}\tlabel\n0\tA\tB\t1\n1\tA\tA\t0\n",
        "dev.tsv": f"{_NLI}\tlabel\n0\tA\tB\t1\n",
        "test.tsv": f"{_NLI}\n0\tA\tB\n",
    },
}

# Of the training set (text, pair, label), and the first label of the dev set.
TRAIN: dict[str, list[Any]] = {
    "cola": [('"One" is fine.', None, "acceptable"), ('One fine "is.', None, "unacceptable"), "unacceptable"],
    "sst2": [('"one fine film . ', None, "positive"), ("no wit , only gags ", None, "negative"), "negative"],
    "mrpc": [('He "said .', "He said .", "equivalent"), ("A", "B", "not_equivalent"), "equivalent"],
    "stsb": [('A "plane.', "An air plane.", 5.0), ("A", "B", 3.8), 4.75],
    "qqp": [('How "so?', "Why?", "duplicate"), ("Who?", "What?", "not_duplicate"), "not_duplicate"],
    "mnli": [("One.", "Two.", "neutral"), ('"One.', "Two.", "contradiction"), "entailment"],
    "qnli": [("Who?", '"He.', "entailment"), ("Who?", "It.", "not_entailment"), "entailment"],
    "rte": [("A", "B", "not_entailment"), ("A", "A", "entailment"), "not_entailment"],
    "wnli": [("A", "B", "entailment"), ("A", "A", "not_entailment"), "entailment"],
}


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    for folder, files in FILES.items():
        (tmp_path / folder).mkdir()
        for name, content in files.items():
            (tmp_path / folder / name).write_text(content, encoding="utf-8", newline="")
    return tmp_path


def task(name: str, folder: Path, **more: Any) -> Classification:
    return Classification(ClassificationSettings.model_validate({"glue": name, "glue_dir": str(folder), **more}))


@pytest.mark.parametrize("name", list(glue.TASKS))
def test_the_official_files_are_read(downloads: Path, name: str) -> None:
    one = task(name, downloads)
    found = [(example.text, example.pair, example.label) for example in one.read_train()]
    *expected, first = TRAIN[name]
    assert found == expected
    held_out, tests = one.read_held_out(), one.read_test()
    assert list(held_out) == (["dev_matched", "dev_mismatched"] if name == "mnli" else ["dev"])
    assert next(iter(held_out.values()))[0].label == first
    assert list(tests) == (["test_matched", "test_mismatched"] if name == "mnli" else ["test"])
    for examples in tests.values():
        assert [example.label for example in examples] == [None]
        assert (examples[0].pair is None) == (name in ("cola", "sst2"))
    dev = "dev_mismatched.tsv" if name == "mnli" else "dev.tsv"
    again = one.read_file(str(downloads / glue.TASKS[name].title / dev))
    assert again == list(held_out.values())[-1]


def test_labels_have_the_order_of_released_checkpoints(downloads: Path) -> None:
    # As the ClassLabel features of `datasets`' glue have them.
    assert task("mnli", downloads).labels == ("entailment", "neutral", "contradiction")
    assert task("rte", downloads).labels == ("entailment", "not_entailment")
    assert task("wnli", downloads).labels == ("not_entailment", "entailment")
    assert task("mrpc", downloads).labels == ("not_equivalent", "equivalent")
    assert (task("stsb", downloads).outputs, task("stsb", downloads).objective) == (1, "value")


def test_broken_rows_are_skipped_with_a_warning_only_in_qqp(downloads: Path, caplog: Any) -> None:
    task("qqp", downloads).read_train()
    assert "QQP/train.tsv: skipped 1 broken rows; the first is" in caplog.text
    assert "train.tsv:3" in caplog.text
    with (downloads / "RTE" / "train.tsv").open("a") as file:
        file.write("2\ttorn\n")
    refused(r"RTE/train\.tsv:4: 2 columns, but the header has 4", task("rte", downloads).read_train)
    with (downloads / "QQP" / "test.tsv").open("a") as file:
        file.write("1\ttorn\n")
    with pytest.raises(InputError, match=r"QQP/test\.tsv:3: 2 columns"):  # its rows are numbered
        task("qqp", downloads).read_test()


@pytest.mark.parametrize("folder", ["sst-2", "SST", "Sst2"])
def test_folders_and_files_in_any_letter_case(downloads: Path, folder: str) -> None:
    (downloads / "SST-2").rename(downloads / "x")
    (downloads / "x").rename(downloads / folder)
    (downloads / folder / "train.tsv").rename(downloads / folder / "Train.TSV")
    assert len(task("sst2", downloads).read_train()) == 2
    assert len(task("sst2", downloads / folder).read_train()) == 2  # the task's own folder


def test_missing_folders_and_files_are_named(downloads: Path) -> None:
    refused(r"glue_dir: .*nowhere: no such folder", task("rte", downloads / "nowhere").read_train)
    (downloads / "RTE" / "train.tsv").unlink()
    refused(r"no train\.tsv of RTE in .*RTE\. Download it\.", task("rte", downloads).read_train)
    (downloads / "MNLI" / "dev_mismatched.tsv").unlink()
    refused(r"no dev_mismatched\.tsv of MNLI", task("mnli", downloads).read_held_out)
    (downloads / "QNLI").rename(downloads / "other")
    message = r"no folder QNLI. Its folders: CoLA, MNLI, MRPC, QQP, RTE"
    refused(message, task("qnli", downloads).read_train)
    message = r"dev_share: CoLA has an official dev set"
    refused(message, lambda: task("cola", downloads, dev_share=0.1).read_train())


def test_an_unknown_label_is_named_by_the_official_ones(downloads: Path) -> None:
    with (downloads / "MNLI" / "dev_matched.tsv").open("a") as file:
        file.write("1" + "\tx" * 14 + "\t-\n")
    with pytest.raises(InputError, match=r"dev_matched\.tsv:3: label '-' .* known: entailment, neutral, contradiction"):
        task("mnli", downloads).read_held_out()


@pytest.mark.parametrize(
    ("name", "scores", "metric"),
    [
        ("cola", {"matthews", "accuracy"}, "matthews"),
        ("mrpc", {"accuracy", "f1", "accuracy_and_f1"}, "accuracy_and_f1"),
        ("qqp", {"accuracy", "f1", "accuracy_and_f1"}, "accuracy_and_f1"),
        ("stsb", {"pearson", "spearman", "pearson_and_spearman"}, "pearson_and_spearman"),
        *((name, {"accuracy"}, "accuracy") for name in ("sst2", "mnli", "qnli", "rte", "wnli")),
    ],
)
def test_the_official_scores(downloads: Path, name: str, scores: set[str], metric: str) -> None:
    one = task(name, downloads)
    examples = one.read_train()
    made = [
        {"value": example.label} if name == "stsb" else {"label": example.label, "scores": {}} for example in examples
    ]
    assert one.score(examples, made) == dict.fromkeys(scores, pytest.approx(1.0))
    assert one.metric == metric


def test_f1_is_that_of_paraphrases(downloads: Path) -> None:
    one = task("mrpc", downloads)
    examples = one.read_train() * 2  # equivalent, not, equivalent, not
    made = [{"label": label} for label in ("equivalent", "equivalent", "not_equivalent", "not_equivalent")]
    made[2] = {"label": "equivalent"}
    scores = one.score(examples, made)
    assert (scores["accuracy"], scores["f1"]) == (0.75, pytest.approx(0.8))
    assert scores["accuracy_and_f1"] == pytest.approx(0.775)


def test_submissions_have_the_official_form(tmp_path: Path, caplog: Any) -> None:
    def written(name: str, made: list[Any], part: str = "test") -> tuple[str, bytes]:
        (path,) = glue.write_submission(name, {part: made}, tmp_path / "out")
        return path.name, path.read_bytes()

    labels: Callable[..., list[Any]] = lambda *names: [{"label": name} for name in names]  # noqa: E731
    assert written("cola", labels("acceptable", "unacceptable")) == ("CoLA.tsv", b"index\tprediction\n0\t1\n1\t0\n")
    assert "CoLA.tsv: 2 predictions, but the official test set has 1063 rows" in caplog.text
    assert written("qnli", labels("not_entailment"))[1] == b"index\tprediction\n0\tnot_entailment\n"
    assert written("wnli", labels("entailment", "not_entailment"))[1].split()[3::2] == [b"1", b"0"]
    assert written("mnli", labels("neutral"), "test_matched") == ("MNLI-m.tsv", b"index\tprediction\n0\tneutral\n")
    assert written("mnli", labels("neutral"), "diagnostic")[0] == "AX.tsv"
    values = [{"value": value} for value in (-0.5, 2.71828, 7.0)]
    assert written("stsb", values) == ("STS-B.tsv", b"index\tprediction\n0\t0.000\n1\t2.718\n2\t5.000\n")
    caplog.clear()
    written("wnli", labels("entailment") * 146)
    assert not caplog.records


def test_predictions_of_every_test_set_can_be_submitted(downloads: Path) -> None:
    (downloads / "diagnostic").mkdir()
    (downloads / "diagnostic" / "diagnostic.tsv").write_text(f"{_NLI}\n0\tX\tY\n")
    names = set()
    for name in glue.TASKS:
        one = task(name, downloads)
        made = {
            part: [{"value": 1.0} if name == "stsb" else {"label": one.labels[0]} for _ in examples]
            for part, examples in one.read_test().items()
        }
        names |= {path.name for path in glue.write_submission(name, made, downloads / "out")}
    expected = ["CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI-m", "MNLI-mm", "QNLI", "RTE", "WNLI", "AX"]
    assert names == {f"{name}.tsv" for name in expected}
    assert task("mnli", downloads).read_test()["diagnostic"][0].text == "X"


def test_our_row_has_the_papers_scores_and_is_averaged_over_what_there_is() -> None:
    results = {
        "mnli": {"dev_matched": {"accuracy": 0.8}, "dev_mismatched": {"accuracy": 0.7}},
        "mrpc": {"dev": {"accuracy": 0.1, "f1": 0.9, "accuracy_and_f1": 0.5}},
        "stsb": {"dev": {"pearson": 0.1, "spearman": 0.85}},
        "wnli": {"dev": {"accuracy": 0.56}},
    }
    assert glue.paper_row(results) == [pytest.approx(80), pytest.approx(70), *[None] * 4, 85, 90, None]
    table = glue.format_table(glue.table_rows(results, name="mine"))
    ours = next(line for line in table.splitlines() if "mine, dev" in line).split("|")
    assert ours[-2].strip() == "81.2"
    base = next(line for line in table.splitlines() if "BERT-Base" in line).split("|")
    # The paper's over the same four columns: (84.6 + 83.4 + 85.8 + 88.9) / 4.
    assert base[-2].strip() == "85.7"
    assert "; missing: QQP, QNLI, SST-2, CoLA, RTE." in table
    full = {task: {"dev": {"accuracy": 0.5, "f1": 0.5, "matthews": 0.5, "spearman": 0.5}} for task in glue.TASKS}
    full["mnli"] = results["mnli"]
    assert [row[-1] for row in glue.table_rows(full, name="mine")[1:3]] == ["79.6", "82.1"]  # Devlin et al., table 1
