"""`predict` and `evaluate` as a user types them: which files they read, how, and what they write where."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny_checkpoints import make_bert, write_reviews

import finetune
from finetune.artifacts import command as commands
from finetune.artifacts import evaluation
from finetune.artifacts.predictor import Predictor
from finetune.cli import main
from finetune.tasks.classification.settings import ClassificationSettings
from finetune.tasks.classification.task import Classification
from finetune.tasks.questions.metrics import squad_v2
from finetune.training import runs
from finetune.training.config import FinetuneConfig
from finetune.training.rows import write_rows
from pretrain.common.errors import InputError
from tests.artifacts.untrained import save_untrained
from tests.tasks.refusals import refused

CONTEXT = "the film was good and the book was bad"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of models that were not trained: reviews, pairs (of a headed .csv with names of its own) and questions."""
    folder = tmp_path_factory.mktemp("predict")
    make_bert(folder / "bert")
    reviews = write_reviews(folder)
    rows = [["the film", "the book", "1", "a"], ["good", "bad", "0", "b"], ["a plot", "very fine", "1", "c"]]
    write_csv(folder / "pairs.csv", ["one", "two", "same", "id"], rows)
    save_untrained(folder, "reviews", {"classification": reviews})
    pairs = {"train": str(folder / "pairs.csv"), "dev": str(folder / "pairs.csv")}
    columns = {"text_column": "one", "pair_column": "two", "label_column": "same"}
    save_untrained(folder, "pairs", {"classification": {**pairs, **columns}})
    asked = [question("1", "what was good", "the film"), question("2", "what was bad", "the book", "book")]
    asked.append(question("3", "what is very poor"))
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in asked))
    section = {"train": str(path), "dev": str(path), "stride": 4, "max_question_tokens": 8}
    save_untrained(folder, "questions", {"questions": section})
    return folder


def question(identity: str, text: str, *answers: str) -> dict[str, Any]:
    found = [{"text": answer, "answer_start": CONTEXT.index(answer)} for answer in answers]
    return {"id": identity, "question": text, "context": CONTEXT, "answers": found}


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]], **form: Any) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, **form).writerows([header, *rows])
    return path


def predict(*arguments: Any) -> int:
    return main(["predict", *map(str, arguments), "--precision", "fp32"])


def evaluate(*arguments: Any) -> int:
    return main(["evaluate", *map(str, arguments), "--precision", "fp32"])


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def output(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_tables_are_rows_and_other_objects_are_refused(folder: Path) -> None:
    import pandas as pd

    model = Predictor(folder / "reviews", precision="fp32")
    rows = [{"text": "the film was good", "id": 3}, {"text": "bad", "id": 4}]
    wanted = model(rows)
    assert model(pd.DataFrame(rows, index=["x", "y"])) == wanted
    assert model(pa.Table.from_pylist(rows)) == wanted
    assert model([row["text"] for row in rows]) == [{key: one[key] for key in one if key != "id"} for one in wanted]
    for nothing in (None, 3):
        with pytest.raises(InputError, match="not a string, a record, or a list or table of them"):
            model(nothing)  # pyright: ignore[reportArgumentType]


def test_a_model_is_loaded_on_one_thread_without_sampling_weights(folder: Path) -> None:
    torch.manual_seed(0)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    Predictor(folder / "reviews", precision="fp32")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_no_output_replaces_an_input(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = write_csv(tmp_path / "mine.csv", ["text"], [["the film was good"]])
    before = given.read_bytes()
    assert predict(folder / "reviews", given, "--out", given) == 2
    assert "mine.csv: is also an input" in capsys.readouterr().err
    assert given.read_bytes() == before
    # The files for official scorers have names of their own.
    asked = tmp_path / "asked.answers.json"
    asked.write_text(json.dumps([{"id": "1", "question": "what was good", "context": CONTEXT}]))
    assert predict(folder / "questions", asked, "--out", tmp_path / "asked.jsonl") == 2
    assert "asked.answers.json: is also an input" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["asked.answers.json", "mine.csv"]
    rated = tmp_path / "predictions" / "rated.jsonl"
    rated.parent.mkdir()
    rated.write_text(json.dumps({"text": "the film", "label": "positive"}))
    assert evaluate(folder / "reviews", rated, "--out", tmp_path) == 2
    assert "rated.jsonl: is also an input" in capsys.readouterr().err


FORMATS = {".csv": ".csv", ".tsv": ".jsonl", ".jsonl": ".parquet", ".json": ".csv", ".parquet": ".jsonl"}


@pytest.mark.parametrize(("suffix", "written"), [*FORMATS.items(), (".txt", ".parquet")])
def test_names_decide_the_formats_and_other_columns_come_back(folder, tmp_path, capsys, suffix, written) -> None:
    texts, labels = ["the film was good, very", "awful", "a book"], ["positive", "negative", "positive"]
    given, out = tmp_path / f"in{suffix}", tmp_path / f"out{written}"
    rows = [{"label": labels[n], "text": text, "id": f"r{n}", "day": "a,b"} for n, text in enumerate(texts)]
    if suffix in (".csv", ".tsv"):
        delimiter = "\t" if suffix == ".tsv" else ","
        write_csv(given, list(rows[0]), [list(row.values()) for row in rows], delimiter=delimiter)
    elif suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), given)
    elif suffix == ".txt":
        given.write_text("".join(f"{text}\n" for text in texts))
    else:
        given.write_text(json.dumps(rows) if suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows))
    assert predict(folder / "reviews", given, "--out", out) == 0
    if written == ".csv":
        with out.open(newline="") as file:
            made: list[dict[str, Any]] = [{**row, "scores": json.loads(row["scores"])} for row in csv.DictReader(file)]
    else:
        made = pq.read_table(out).to_pylist() if written == ".parquet" else read_lines(out)
    assert [one["text"] for one in made] == texts
    if suffix != ".txt":
        expected = [(row["label"], row["id"], row["day"]) for row in rows]
        assert [(one["gold"], one["id"], one["day"]) for one in made] == expected
    assert {one["label"] for one in made} <= {"negative", "positive"}
    assert len({one["scores"]["negative"] for one in made}) == 3
    capsys.readouterr()
    assert predict(folder / "reviews", "--text", texts[0]) == 0
    (alone,) = output(capsys)
    assert alone["scores"] == pytest.approx(made[0]["scores"], abs=1e-6)


def test_columns_of_several_types_become_text_in_parquet(tmp_path: Path) -> None:
    assert write_rows(tmp_path / "a.parquet", [{"id": 1}, {"id": "b", "more": [1]}, {"id": None}]) == 3
    expected = [{"id": "1", "more": None}, {"id": "b", "more": [1]}, {"id": None, "more": None}]
    assert pq.read_table(tmp_path / "a.parquet").to_pylist() == expected


def test_predictions_go_into_a_device(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = tmp_path / "asked.json"
    asked.write_text(json.dumps([{"id": "1", "question": "what was good", "context": CONTEXT}]))
    (tmp_path / "null").symlink_to("/dev/null")
    assert predict(folder / "questions", asked, "--out", tmp_path / "null") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["asked.json", "null"]
    assert (tmp_path / "null").is_char_device()


def test_unlabeled_files_and_pairs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_csv(tmp_path / "new.csv", ["two", "one"], [["the book", "the film, too"], ["", "good"]])
    assert predict(folder / "pairs", path) == 0
    made = output(capsys)
    assert [(one["text"], one["pair"]) for one in made] == [("the film, too", "the book"), ("good", "")]
    assert all("gold" not in one and "id" not in one for one in made)
    # Records may have our names instead of the columns'.
    (tmp_path / "new.jsonl").write_text(json.dumps({"text": "the film, too", "pair": "the book"}))
    assert predict(folder / "pairs", tmp_path / "new.jsonl") == 0
    assert output(capsys)[0]["scores"] == pytest.approx(made[0]["scores"], abs=1e-6)


def test_gold_that_is_not_a_label_of_the_model_is_skipped(folder, tmp_path, capsys, caplog) -> None:
    path = write_csv(tmp_path / "a.csv", ["text", "label"], [["good", "positive"], ["bad", "mixed"], ["it", ""]])
    assert predict(folder / "reviews", path) == 0
    assert [one.get("gold") for one in output(capsys)] == ["positive", None, None]
    assert "2 of 3 labels are missing or unknown" in caplog.text
    assert "a.csv:3: label 'mixed'" in caplog.text
    assert evaluate(folder / "reviews", path) == 2
    assert "a.csv:3: label 'mixed'" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_columns_of_a_file_stay_and_ours_get_other_names(folder, tmp_path, caplog, suffix) -> None:
    theirs = {name: f"their {name}" for name in ("text", "pair", "gold", "label", "scores", "predicted_label", "id2")}
    row, path, out = {"one": "the film", "two": "the book", **theirs}, tmp_path / f"a.{suffix}", tmp_path / "b.jsonl"
    write_rows(path, [row, {**row, "one": "good"}])
    assert predict(folder / "pairs", path, "--out", out) == 0
    made = read_lines(out)
    assert [{name: one[name] for name in row} for one in made] == [row, {**row, "one": "good"}]
    assert set(made[0]) == {*row, "predicted_predicted_label", "score", "predicted_scores"}
    assert "so predictions rename text to one, pair to two, label to predicted_predicted_" in caplog.text
    write_rows(path, [{**row, "same": "1", "score": "9"}])
    assert evaluate(folder / "pairs", path, "--out", tmp_path) == 0
    (made,) = read_lines(tmp_path / "predictions/a.jsonl")
    assert {name: made[name] for name in row} == row
    assert (made["same"], made["score"], made["predicted_score"]) == ("1", "9", pytest.approx(0.5, abs=0.5))


def test_a_threshold_is_given_at_prediction_time(folder, tmp_path, capsys) -> None:
    both = write_reviews(tmp_path)
    save_untrained(folder, "positive", {"classification": {**both, "positive": "positive"}})
    for threshold, label in ((0.001, "positive"), (0.999, "negative")):
        assert predict(folder / "positive", "--text", "a film", "--threshold", threshold) == 0
        assert output(capsys)[0]["label"] == label
        assert evaluate(folder / "positive", both["dev"], "--out", tmp_path / "out", "--threshold", threshold) == 0
        assert "f1 (positive)" in capsys.readouterr().out
        assert json.loads((tmp_path / "out/metrics.json").read_text())["dev"]["details"]["threshold"] == threshold
        assert finetune.load(folder / "positive", threshold=threshold)("a film")["label"] == label
    assert predict(folder / "reviews", "--text", "a", "--threshold", 0.3) == 2
    assert "threshold: only supported for multi_label, or for two classes with" in capsys.readouterr().err


def test_a_column_of_labels_that_the_model_does_not_know_stays(folder, tmp_path, capsys) -> None:
    rows = [{"text": "good", "label": "positive"}, {"text": "bad", "label": "my note", "note": ["half \ud83d"]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert predict(folder / "reviews", tmp_path / "a.jsonl") == 0
    made = output(capsys)
    assert [(one["label"], one.get("gold")) for one in made] == [("positive", "positive"), ("my note", None)]
    assert {one["predicted_label"] for one in made} <= {"positive", "negative"}
    assert made[1]["note"] == ["half \N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        ("reviews", "a.log", "a.log: its suffix does not name a table format. Name it .csv"),
        ("pairs", "a.txt", "a.txt: its suffix does not name a table format. Name it .csv, .tsv, .jsonl, .json or"),
        ("reviews", "a.csv", "a.csv:1: no column 'text'; it has some, thing."),
        ("reviews", "a.jsonl", "a.jsonl:1: not JSON"),
        ("reviews", "none.csv", "none.csv: not found"),
        ("questions", "a.csv", "a.csv:1: no column 'question'; it has some, thing."),
    ],
)
def test_files_that_cannot_be_predicted_are_reported_in_one_line(folder, tmp_path, capsys, model, name, message):
    if name != "none.csv":
        (tmp_path / name).write_text("some,thing\nelse,here\n")
    assert predict(folder / model, tmp_path / name) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_list_is_predicted_together_and_a_stream_begins_at_once(folder: Path) -> None:
    model = Predictor(folder / "reviews", precision="fp32")
    sizes: list[int] = []
    model.model.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0].lengths)))
    texts = ["good", "the film was bad", "fine", "a very awful plot", "end"]
    made = model(texts)
    assert sizes == [5]
    assert [one["label"] for one in model.stream(texts)] == [one["label"] for one in made]
    assert sizes[1:] == [1, 2, 2]


def test_an_id_that_cannot_be_written_is_named_after_the_answers_before_it(folder: Path) -> None:
    records = [{"text": "a", "id": 1}, {"text": "b", "id": "\ud83d"}]
    made = Predictor(folder / "reviews", precision="fp32").stream(records)
    assert next(made)["id"] == 1
    refused(r"record:2: the id has half of a surrogate pair at character 0 \(\\ud83d\)", next, made)


def test_an_empty_text_is_a_text(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert predict(folder / "reviews", "--text", "") == 0
    (made,) = output(capsys)
    assert made["text"] == ""
    assert predict(folder / "reviews", "--text", "", "--out", tmp_path / "one.jsonl") == 0
    assert read_lines(tmp_path / "one.jsonl") == [made]
    assert predict(folder / "reviews", tmp_path / "one.jsonl", "--text", "a") == 2
    assert "one.jsonl and --text. Give one of them." in capsys.readouterr().err


def test_models_of_glue_read_glues_files_and_others(folder: Path, tmp_path: Path, capsys: Any) -> None:
    home = tmp_path / "glue/CoLA"
    home.mkdir(parents=True)
    for name in ("train", "dev"):
        (home / f"{name}.tsv").write_text('gj04\t1\t\t"good" film\ngj04\t0\t*\tbad "film\n')
    (home / "test.tsv").write_text("index\tsentence\n0\ta film\n")
    save_untrained(folder, "cola", {"classification": {"glue": "cola", "glue_dir": str(tmp_path / "glue")}})
    expected = ['"good" film', 'bad "film']
    write_csv(tmp_path / "a.csv", ["sentence", "label"], [[expected[0], "1"], [expected[1], "0"]])
    for path in (home / "dev.tsv", tmp_path / "a.csv"):
        assert predict(folder / "cola", path) == 0
        made = [(one["text"], one["gold"]) for one in output(capsys)]
        assert made == [(expected[0], "acceptable"), (expected[1], "unacceptable")]
        assert evaluate(folder / "cola", path, "--out", tmp_path / "out") == 0
        capsys.readouterr()
    assert predict(folder / "cola", home / "test.tsv") == 0
    assert [(one["text"], one.get("gold")) for one in output(capsys)] == [("a film", None)]


@pytest.mark.parametrize("model", ["reviews", "pairs", "questions"])
def test_predict_gives_what_evaluate_gives(folder: Path, tmp_path: Path, model: str) -> None:
    path = {"reviews": folder / "dev.jsonl", "pairs": folder / "pairs.csv"}.get(model, folder / "questions.jsonl")
    assert evaluate(folder / model, path, "--out", tmp_path) == 0
    assert predict(folder / model, path, "--out", tmp_path / "made.jsonl") == 0
    scored = (tmp_path / "predictions" / f"{path.stem}.jsonl").read_text()
    assert (tmp_path / "made.jsonl").read_text() == scored
    assert all("gold" in one for one in read_lines(tmp_path / "made.jsonl"))


def test_questions_come_from_tables_too(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict(folder / "questions", folder / "questions.jsonl") == 0
    expected = output(capsys)
    assert expected[1]["gold"] == ["the book", "book"]
    assert (expected[0]["id"], expected[0]["question"], expected[0]["context"]) == ("1", "what was good", CONTEXT)
    records = read_lines(folder / "questions.jsonl")
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    columns = ["id", "question", "context", "answers"]
    rows = [[*(one[name] for name in columns[:3]), json.dumps(one["answers"])] for one in records]
    write_csv(tmp_path / "a.csv", columns, rows)
    for name in ("a.parquet", "a.csv"):
        assert predict(folder / "questions", tmp_path / name) == 0
        assert output(capsys) == expected
    write_csv(tmp_path / "b.csv", columns[1:3], [row[1:3] for row in rows])
    assert predict(folder / "questions", tmp_path / "b.csv") == 0
    made = output(capsys)
    assert [one["id"] for one in made] == ["2", "3", "4"], "lines, where there are no ids"
    assert [one["answer"] for one in made] == [one["answer"] for one in expected]
    write_csv(tmp_path / "c.csv", columns, [[*rows[0][:3], "{'text': ['x']}"]])
    assert predict(folder / "questions", tmp_path / "c.csv") == 2
    assert "c.csv:2: answers is" in capsys.readouterr().err


def test_questions_are_written_for_the_official_script(folder: Path, tmp_path: Path) -> None:
    path = folder / "questions.jsonl"
    assert predict(folder / "questions", path, "--out", tmp_path / "made.jsonl") == 0
    lines = {one["id"]: one for one in read_lines(tmp_path / "made.jsonl")}
    answers = json.loads((tmp_path / "made.answers.json").read_text())
    assert answers == {identity: one["answer"] for identity, one in lines.items()}
    nothing = json.loads((tmp_path / "made.no-answer.json").read_text())
    by_score = sorted(lines, key=lambda identity: lines[identity]["no_answer_score"])
    assert sorted(nothing, key=nothing.__getitem__) == by_score
    # None is above the script's own threshold of 1, at which it takes the answers as they are.
    assert all(0 <= chance <= 1 for chance in nothing.values())
    assert evaluate(folder / "questions", path, "--out", tmp_path / "out") == 0
    scores = json.loads((tmp_path / "out/metrics.json").read_text())["questions"]["scores"]
    golds = {identity: one["gold"] for identity, one in lines.items()}
    official = squad_v2(golds, answers, nothing)
    for name in ("exact", "f1", "total"):
        assert official[name] == pytest.approx(scores[name])
    assert json.loads((tmp_path / "out/predictions/questions.answers.json").read_text()) == answers


@pytest.mark.parametrize(
    "words",
    ["runs/x --precision fp32 test.csv", "--precision fp32 runs/x test.csv", "runs/x test.csv --precision fp32"],
)
def test_options_may_come_before_the_file(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    arguments = words.split()
    seen: list[Any] = []
    monkeypatch.setattr(commands, "model_folder", lambda folder: folder)
    monkeypatch.setattr(evaluation, "evaluate", lambda *given, **_: seen.append(given) or "")
    assert main(["evaluate", *arguments]) == 0
    assert main(["evaluate", *[one for one in arguments if one != "test.csv"]]) == 0
    assert [[*map(str, given[:2])] for given in seen] == [["runs/x", "test.csv"], ["runs/x", "None"]]


def test_a_second_file_keeps_the_first_ones_metrics(folder: Path, tmp_path: Path) -> None:
    def metrics() -> dict[str, Any]:
        return json.loads((tmp_path / "out/metrics.json").read_text())

    (tmp_path / "other").mkdir()
    lines = (folder / "dev.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other/dev.jsonl").write_text("".join(lines[:3]))
    for arguments in ([folder / "dev.jsonl"], [tmp_path / "other/dev.jsonl"], []):
        assert evaluate(folder / "reviews", *arguments, "--out", tmp_path / "out") == 0
    assert {name: one["file"] for name, one in metrics().items()} == {
        "dev": str(folder / "dev.jsonl"),
        "dev-2": str(tmp_path / "other/dev.jsonl"),
        "dev-3": None,  # the config's own
    }
    counts = [len(read_lines(tmp_path / f"out/predictions/{name}.jsonl")) for name in metrics()]
    assert counts == [12, 3, 12]
    before = metrics()
    assert evaluate(folder / "reviews", tmp_path / "other/dev.jsonl", "--out", tmp_path / "out") == 0
    assert metrics() == before, "the same file once more replaces its own"


def test_an_export_is_evaluated_beside_itself(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert main(["export", str(folder / "reviews"), str(tmp_path / name)]) == 0
        assert evaluate(tmp_path / name, folder / "dev.jsonl") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "one-evaluation", "two", "two-evaluation"]
    assert (tmp_path / "one-evaluation/metrics.json").is_file()
    assert evaluate(folder / "reviews/model", folder / "dev.jsonl") == 0
    assert (folder / "reviews/evaluation/metrics.json").is_file()


def test_sets_that_are_one_file_are_remarked(folder: Path) -> None:
    section = {"train": str(folder / "train.jsonl"), "dev": str(folder / "." / "train.jsonl")}
    values = {"name": "x", "start_from": str(folder / "bert"), "max_length": 32, "engine": {"precision": "fp32"}}
    config = FinetuneConfig.model_validate({**values, "classification": section})
    assert config.repeated_sets() == [("dev", "train")]
    plan = runs.plan(config, in_process=True)
    said = runs.describe_start(config, plan)
    assert "note: dev is the same file as train: its examples trained the model" in said
    assert f"\n  held out: dev ({plan.examples} examples)\n" in said
    others = {**section, "dev": str(folder / "dev.jsonl"), "test": str(folder / "dev.jsonl")}
    config = FinetuneConfig.model_validate({**values, "classification": others})
    assert config.repeated_sets() == [("test", "dev")]
    for more, wanted in (
        ({}, "  no held-out set: the last checkpoint is kept. To keep the best one by a score, set classification.dev"),
        ({"dev_share": 0.25}, " examples), 0.25 of each class of the training set (dev_share)"),
    ):
        section = {"train": str(folder / "train.jsonl"), **more}
        config = FinetuneConfig.model_validate({**values, "classification": section})
        assert wanted in runs.describe_start(config, runs.plan(config, in_process=True)), wanted
    hub = {"dataset": "some/name", "revision": "1", "dev": "train", "test": "test"}
    assert FinetuneConfig.model_validate({"name": "x", "classification": hub}).repeated_sets() == [("dev", "train")]


TABLES = {
    "bare": '"We are here , he said .\t1\na film\t1\n" No "\t1\nthe book "\t1\n',  # as in MRPC and QQP
    "quoted": '"He said ""no"", twice"\t1\nplain\t1\n"a\ttab"\t1\n"two\nlines"\t1\n',
    "inside": 'the "odd" film\t1\na ""b""\t1\n',
}
TEXTS = {
    ("bare", "none"): ['"We are here , he said .', "a film", '" No "', 'the book "'],
    ("quoted", "standard"): ['He said "no", twice', "plain", "a\ttab", "two\nlines"],
    **{("inside", quoting): ['the "odd" film', 'a ""b""'] for quoting in ("auto", "none", "standard")},
}


@pytest.mark.parametrize(("name", "quoting"), [*TEXTS, ("bare", "auto"), ("quoted", "auto")])
def test_quotes_of_a_tsv_file_are_read_as_is_set_and_never_guessed(tmp_path: Path, name: str, quoting: Any) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(f"text\tlabel\n{TABLES[name]}")
    trained = Classification(ClassificationSettings(train="gone.jsonl", labels=("1", "2"), quoting=quoting))
    if texts := TEXTS.get((name, quoting)):
        assert [one.text for one in trained.read_file(str(path))] == texts
        return
    with pytest.raises(InputError) as refusal:
        trained.read_file(str(path))
    cell = TABLES[name].partition("\t")[0]
    assert str(refusal.value) == (
        f"{path}:2: the cell {cell} starts with a quote. Set classification.quoting to standard if quotes surround "
        "cells, or to none if they belong to the text; or save the file as .jsonl."
    )
    csv_file = tmp_path / "a.csv"
    csv_file.write_text('text,label\n"good film",1\n')
    assert trained.read_file(str(csv_file))[0].text == "good film", "other formats have their own quotes"
