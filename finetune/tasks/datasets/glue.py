"""The nine tasks of GLUE (Wang et al., 2018): their official files, scores, submissions, and the paper's table.

Column names and positions follow the official downloads, as google-research/bert run_classifier.py and
transformers' data/processors/glue.py read them. The files have no quoting: a quote is an ordinary character.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from finetune.tasks.datasets.files import read_text
from finetune.tasks.datasets.table import Key, Table, TableLayout
from finetune.tasks.datasets.tables import read_table
from pretrain.common.errors import InputError
from pretrain.common.files import atomic_open

logger = logging.getLogger(__name__)

GlueName = Literal["", "cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"]

Results = Mapping[str, Mapping[str, Mapping[str, float]]]
"""{task: {set, such as dev: {score: value, as returned by `Task.score`}}}."""


@dataclass(frozen=True)
class GlueTask:
    """A GLUE task: columns and sets of its files, names of its labels, and its scores."""

    title: str  # name of the task, its folder and its submission
    labels: dict[str, str]  # {label in the files: our name}, in the order of the hub's `glue` data set; {} for values
    text: Key = "sentence1"  # column of the text, or of the first text of a pair
    pair: Key | None = "sentence2"  # column of the second text; None without pairs
    label: Key = "label"  # column of the label
    scores: tuple[str, ...] = ("accuracy",)  # names of the scores that GLUE reports
    metric: str = "accuracy"  # score that selects the checkpoint: GLUE's, or the mean of its two (Wang et al., sec. 3)
    folders: tuple[str, ...] = ()  # other names of its folder
    dev: tuple[str, ...] = ("dev",)  # names of its dev sets
    test: tuple[str, ...] = ("test",)  # names of its test sets


_NLI = {"entailment": "entailment", "not_entailment": "not_entailment"}
_WNLI = {"0": "not_entailment", "1": "entailment"}
_ACCURACY_F1 = ("accuracy", "f1", "accuracy_and_f1")

TASKS: dict[str, GlueTask] = {
    "cola": GlueTask(
        "CoLA",
        {"0": "unacceptable", "1": "acceptable"},
        text=3,  # an index, because its training and dev files have no header
        pair=None,
        label=1,
        scores=("matthews", "accuracy"),
        metric="matthews",
    ),
    "sst2": GlueTask("SST-2", {"0": "negative", "1": "positive"}, text="sentence", pair=None, folders=("sst",)),
    "mrpc": GlueTask(
        "MRPC",
        {"0": "not_equivalent", "1": "equivalent"},
        text="#1 String",
        pair="#2 String",
        label="Quality",
        scores=_ACCURACY_F1,
        metric="accuracy_and_f1",
    ),
    "stsb": GlueTask(
        "STS-B",
        {},
        label="score",
        scores=("pearson", "spearman", "pearson_and_spearman"),
        metric="pearson_and_spearman",
        folders=("sts",),
    ),
    "qqp": GlueTask(
        "QQP",
        {"0": "not_duplicate", "1": "duplicate"},
        text="question1",
        pair="question2",
        label="is_duplicate",
        scores=_ACCURACY_F1,
        metric="accuracy_and_f1",
        folders=("qqpclean",),
    ),
    "mnli": GlueTask(
        "MNLI",
        {name: name for name in ("entailment", "neutral", "contradiction")},
        label="gold_label",
        folders=("multinli",),
        dev=("dev_matched", "dev_mismatched"),
        test=("test_matched", "test_mismatched", "diagnostic"),
    ),
    "qnli": GlueTask("QNLI", _NLI, text="question", pair="sentence", folders=("qnliv2",)),
    "rte": GlueTask("RTE", _NLI),
    "wnli": GlueTask("WNLI", _WNLI),
}


# ---------------------------------------------------------------- files


def read_split(name: str, folder: Path | str, split: str) -> Table | None:
    """Read the columns `text`, `pair` and `label` (with our label names) of an official file; None if it is missing.

    Args:
        name: a key of `TASKS`.
        folder: the task's folder or its parent; case and punctuation of folder names are ignored.
        split: train, or one of the task's `dev` or `test` sets; test sets have no labels.
    """
    task = TASKS[name]
    task_folder = _task_folder(name, folder)
    path = _find_diagnostic(task_folder) if split == "diagnostic" else _find_file(task_folder, f"{split}.tsv")
    if path is None:
        return None
    if split in task.test:
        text_column = task.text if isinstance(task.text, str) else "sentence"  # only CoLA's test file has a header
        return _read(path, name, text_column, labeled=False)
    return _read(path, name, task.text)


def read_file(name: str, path: Path | str, *, labeled: bool = True) -> Table:
    """Read another file in the format of the task's dev file, or of its test file if not `labeled`."""
    text_column = TASKS[name].text
    header = read_text(Path(path)).partition("\n")[0].rstrip("\r").split("\t")
    if not labeled and isinstance(text_column, int) and "sentence" in header:
        return _read(Path(path), name, "sentence", labeled=False)
    return _read(Path(path), name, text_column, may_lack_labels=not labeled)


def expected_files(name: str, folder: Path | str, split: str) -> str:
    """Return a description of the file that `read_split` expects, for messages."""
    return f"{split}.tsv of {TASKS[name].title} in {_task_folder(name, folder)}"


def _task_folder(name: str, folder: Path | str) -> Path:
    """Return the folder with the task's training set: a subfolder of `folder`, or `folder`."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise InputError(f"classification.glue_dir: {folder}: no such folder. Give the folder of GLUE's downloads.")
    subfolders = {_normalize(item.name): item for item in sorted(folder.iterdir()) if item.is_dir()}
    for folder_name in (name, *TASKS[name].folders):
        if folder_name in subfolders:
            return subfolders[folder_name]
    if _normalize(folder.resolve().name) in (name, *TASKS[name].folders) or _find_file(folder, "train.tsv"):
        return folder
    raise InputError(
        f"classification.glue_dir: {folder}: has no folder {TASKS[name].title}. Its folders: "
        f"{', '.join(item.name for item in subfolders.values()) or 'none'}."
    )


def _normalize(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _find_file(folder: Path, name: str) -> Path | None:
    """Return the file with this lower-case name, ignoring case; None if there is none."""
    return next((item for item in sorted(folder.iterdir()) if item.name.lower() == name), None)


def _find_diagnostic(task_folder: Path) -> Path | None:
    """Return GLUE's diagnostic set for MNLI models: AX.tsv or diagnostic.tsv, in MNLI's folder or one next to it."""
    folders = [item for item in sorted(task_folder.parent.iterdir()) if item.is_dir()]
    folders = [item for item in folders if _normalize(item.name) in ("ax", "diagnostic")]
    folders = [task_folder, task_folder.parent, *folders]
    candidates = (_find_file(folder, name) for folder in folders for name in ("ax.tsv", "diagnostic.tsv"))
    return next((path for path in candidates if path), None)


def _read(path: Path, name: str, text_column: Key, *, labeled: bool = True, may_lack_labels: bool = False) -> Table:
    task = TASKS[name]
    columns = {"text": text_column, "pair": task.pair, "label": task.label if labeled else None}
    headers = {column: header for column, header in columns.items() if header is not None}
    layout = TableLayout("tsv", quoting="none", header=isinstance(text_column, str))
    # The official training set of QQP has broken rows; `datasets` skips them too (glue.py, _generate_examples).
    broken: list[str] = []
    on_skipped = broken.append if name == "qqp" and labeled else None
    optional = [task.label] if may_lack_labels else []
    table = read_table(path, list(headers.values()), layout=layout, optional=optional, on_skipped=on_skipped)
    if broken:
        logger.warning("%s: skipped %d broken rows; the first is %s", path, len(broken), broken[0])
    cells: dict[Key, list[Any]] = {
        column: table.columns[header] for column, header in headers.items() if header in table.columns
    }
    if "label" in cells and task.labels:
        cells["label"] = [task.labels.get(value, value) for value in cells["label"]]
    return Table(cells, table.source, table.numbers, table.separator)


# ---------------------------------------------------------------- submission

# {(task, test set): (file name, as in nyu-mll/jiant's submission formatter; number of rows of the official set)}
_SUBMISSIONS: dict[tuple[str, str], tuple[str, int]] = {
    ("cola", "test"): ("CoLA.tsv", 1063),
    ("sst2", "test"): ("SST-2.tsv", 1821),
    ("mrpc", "test"): ("MRPC.tsv", 1725),
    ("stsb", "test"): ("STS-B.tsv", 1379),
    ("qqp", "test"): ("QQP.tsv", 390965),
    ("mnli", "test_matched"): ("MNLI-m.tsv", 9796),
    ("mnli", "test_mismatched"): ("MNLI-mm.tsv", 9847),
    ("mnli", "diagnostic"): ("AX.tsv", 1104),
    ("qnli", "test"): ("QNLI.tsv", 5463),
    ("rte", "test"): ("RTE.tsv", 3000),
    ("wnli", "test"): ("WNLI.tsv", 146),
}


def write_submission(
    task: str, predictions: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path | str
) -> list[Path]:
    """Write the files for gluebenchmark.com: columns `index` (from 0) and `prediction`, separated by tabs.

    Labels are as in GLUE's files; values have three decimals, clipped to [0, 5], as in jiant's _write_glue_preds.

    Args:
        task: a key of `TASKS`.
        predictions: from `Classification.decode`, by the set's name in `read_test`. A set whose length differs from the
            official one is written with a warning, because the site rejects it.
        folder: folder to write.
    """
    official_labels = {label: official_label for official_label, label in TASKS[task].labels.items()}
    paths = []
    for split, items in predictions.items():
        name, num_rows = _SUBMISSIONS[task, split]
        if len(items) != num_rows:
            logger.warning("%s: %d predictions, but the official test set has %d rows", name, len(items), num_rows)
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_open(path) as file:
            file.write(b"index\tprediction\n")
            for index, item in enumerate(items):
                cell = official_labels[item["label"]] if official_labels else f"{min(max(item['value'], 0.0), 5.0):.3f}"
                file.write(f"{index}\t{cell}\n".encode())
        paths.append(path)
    return paths


# ---------------------------------------------------------------- the paper's table

PAPER_COLUMNS: tuple[tuple[str, str, str, str], ...] = (
    ("MNLI-m", "mnli", "matched", "accuracy"),
    ("MNLI-mm", "mnli", "mismatched", "accuracy"),
    ("QQP", "qqp", "", "f1"),
    ("QNLI", "qnli", "", "accuracy"),
    ("SST-2", "sst2", "", "accuracy"),
    ("CoLA", "cola", "", "matthews"),
    ("STS-B", "stsb", "", "spearman"),
    ("MRPC", "mrpc", "", "f1"),
    ("RTE", "rte", "", "accuracy"),
)
"""(heading, task, suffix of the set's name, score): the nine columns of Devlin et al., table 1, which excludes WNLI."""

PAPER: dict[str, tuple[float, ...]] = {
    "BERT-Base, test": (84.6, 83.4, 71.2, 90.5, 93.5, 52.1, 85.8, 88.9, 66.4),
    "BERT-Large, test": (86.7, 85.9, 72.1, 92.7, 94.9, 60.5, 86.5, 89.3, 70.1),
}
"""Rows of Devlin et al., table 1, scored by the GLUE server."""

_MISSING = "–"  # cell of a missing score


def paper_row(results: Results) -> list[float | None]:
    """Return our dev scores in per cent, one per column of the paper's table; None if missing."""
    row: list[float | None] = []
    for _, task, subset, score in PAPER_COLUMNS:
        value = results.get(task, {}).get(f"dev_{subset}" if subset else "dev", {}).get(score)
        row.append(None if value is None else 100 * value)
    return row


def table_rows(results: Results, *, name: str) -> list[list[str]]:
    """Return headings, the paper's rows and the row of our model `name`; averages are over columns that we have."""
    rows: dict[str, Sequence[float | None]] = {**PAPER, f"{name}, dev": paper_row(results)}
    our_row = rows[f"{name}, dev"]
    lines = [["", *(title for title, *_ in PAPER_COLUMNS), "average (our columns)" if None in our_row else "average"]]
    for title, values in rows.items():
        used = [value for value, ours in zip(values, our_row, strict=True) if value is not None and ours is not None]
        lines.append([title, *map(_format_cell, values), _format_cell(sum(used) / len(used) if used else None)])
    return lines


def format_table(lines: list[list[str]]) -> str:
    """Format `lines` from `table_rows` as a Markdown table, followed by a list of missing columns."""
    missing = [heading for heading, cell in zip(lines[0], lines[-1], strict=True) if cell == _MISSING]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in [lines[0], ["-" * width for width in widths], *lines[1:]]
    )
    note = f"; missing: {', '.join(missing)}" if missing else ""
    return f"{text}\n\nF1 of QQP and MRPC, Matthews of CoLA, Spearman of STS-B, accuracy of the others{note}.\n"


def _format_cell(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.1f}"
