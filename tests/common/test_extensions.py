"""Modules of the user's own, named in a config: found, checked, recorded, carried, and imported only if asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chaos import cluster
from corpora import make_corpus
from starts import pretraining

from finetune.cli import main
from finetune.tasks.base import Task
from finetune.tasks.classification import Classification, ClassificationSettings
from finetune.tasks.custom_metric import custom_score
from finetune.tasks.entities import Entities, EntitiesSettings
from finetune.tasks.questions import Questions, QuestionsSettings
from finetune.training.config import FinetuneConfig
from pretrain.common import extensions
from pretrain.common.errors import InputError
from pretrain.common.extensions import ENV_VAR

ROOT = Path(__file__).resolve().parents[2]
SCHEME = """
from pretrain.batches.scheme import MaskingScheme
import beside  # which lies in the same folder
class Scheme(MaskingScheme):
    def choose(self, rows, bits, limits):
        return tokens.starts[:-1] + 1
"""
MODULES = {
    "mine/first.py": SCHEME,
    "mine/half.py": "from pretrain.batches.scheme import MaskingScheme\nclass Scheme(MaskingScheme): pass\n",
    "mine/broken.py": "def f():\n    return {}['x']\n\nf()\n",
    "mine/unclosed.py": "\ndef (\n",
    "mine/needs.py": "import a_package_that_is_nowhere\n",
    "mine/scores.py": "def equal(true, made):\n    return sum(a == b for a, b in zip(true, made))\n\nnone = 1\n",
    "beside.py": "",
}
LENGTHS = """
from finetune.tasks.classification import Classification, ClassificationSettings
class Lengths(Classification):
    summary, settings_type = "Counts words", ClassificationSettings
TASK = Lengths
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of a test is left in this process."""
    monkeypatch.setenv(ENV_VAR, "{}")
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mine", "beside"):
            del sys.modules[name]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules and a config in `configs`, which is the current one."""
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    corpus = make_corpus(tmp_path / "corpus", documents=60, vocabulary_size=300)
    values = pretraining(corpus, Path("runs/own"), [(32, 8, 3)], name="own", masking__scheme="mine.first")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/own.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bertrain(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The console command, which has no current folder on its path."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", **variables}
    command = [sys.executable, "-m", "finetune.cli", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("masking.scheme=mine.frist", "mine has no module frist; did you mean first?"),
        ("masking.scheme=mine.first.inner", "first.py has no module inner; it has none."),
        (
            "masking.scheme=mime.token",
            "no package mime; it is not installed, and not in {0}/configs or {0}. Of the built",
        ),
        ("masking.scheme=mime.token", "Of the built-in kinds, did you mean tokens?"),
        ("masking.scheme=mine", "'mine' is not one of tokens, whole_words"),
        ("masking.scheme=mine..first", "'mine..first' is not a dotted name such as my_package.module"),
        ("objective=places", "'places' is not a dotted name"),
        ("objective=mine.first", "first.py has no OBJECTIVE, a class that derives from pretrain.objectives.objective."),
        ("masking.scheme=mine.half", "half.py lacks choose(self, tokens: PackedTokens, bits: np.ndarray, limits"),
        ("masking.scheme=mine.broken", "{0}/mine/broken.py:2: mine.broken raises KeyError when it is imported ('x')"),
        ("masking.scheme=mine.unclosed", "{0}/mine/unclosed.py:2: mine.unclosed raises SyntaxError when it is"),
        ("masking.scheme=mine.needs", "{0}/mine/needs.py:1: mine.needs raises ModuleNotFoundError when it is"),
    ],
)
def test_a_module_that_does_not_do_is_one_line(place, capsys, setting, message) -> None:
    assert main(["pretrain", "configs/own.yaml", "--dry-run", "--set", setting]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --set {setting}: {setting.partition('=')[0]}: ")
    assert message.format(place) in line


def test_the_line_of_a_config_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = place / "configs/own.yaml"
    config.write_text(config.read_text().replace("mine.first", "mine.frist"))
    assert main(["pretrain", str(config), "--dry-run"]) == 2
    number = config.read_text().splitlines().index("  scheme: mine.frist") + 1
    assert capsys.readouterr().err.startswith(f"error: {config}:{number}: masking.scheme: mine.frist: ")


def test_modules_beside_the_config_are_found_after_installed_ones(place: Path, tmp_path: Path) -> None:
    shutil.move(place / "mine", place / "configs/mine")
    shutil.move(place / "beside.py", place / "configs/beside.py")
    (place / "configs/yaml.py").write_text("raise SystemExit('not me')")
    assert main(["pretrain", "configs/own.yaml", "--dry-run"]) == 0
    assert sys.modules["yaml"] is yaml
    assert json.loads(os.environ[ENV_VAR])["carried"] == [str(place / "configs/beside.py"), str(place / "configs/mine")]
    (place / "configs/mine/secret.txt").write_text("not a module")
    sent = Path(extensions.ship_modules({}, tmp_path / "aside")["working_dir"])
    assert {str(file.relative_to(sent)) for file in sent.rglob("*.*")} == set(MODULES)


@pytest.mark.parametrize("allowed", [False, True])
def test_a_recorded_config_imports_what_is_asked_for(place, capsys, allowed) -> None:
    """As an export that a stranger made, with a module in the current folder."""
    (place / "mine/places.py").write_text((ROOT / "tests/toy_objective.py").read_text())
    config = pretraining(place / "corpus", Path("runs/own"), [(32, 8, 3)], objective="mine.places")
    (place / "theirs").mkdir()
    (place / "theirs/config.yaml").write_text(yaml.safe_dump(config))
    assert main(["export", "theirs", "out", *(["--import", "mine.places"] if allowed else [])]) == 2
    found = capsys.readouterr().err
    assert ("theirs/checkpoints" in found) == allowed == ("mine.places" in sys.modules)
    assert ("mine.places: a recorded config names this module" in found) != allowed
    assert ("add --import mine.places" in found) != allowed


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("task.kind=mine.scores", "task.kind: mine.scores: {0}/mine/scores.py has no TASK, a class that derives from "),
        ("task.kind=mine.wordless", "mine.wordless: TASK of {0}/mine/wordless.py lacks summary: str, which Task req"),
        ("task.kind=mine.unset", "mine.unset: its settings_type must derive from pretrain.common.sections.Section."),
        ("task.kind=lengths", "task: kind: 'lengths' is not a dotted name such as my_package.module. "),
        ("task.tran=x", "task.tran is not a known setting; did you mean train?"),
        ("task.max_windows=many", "task.max_windows is 'many'; expected a valid integer"),
        ("task.metric=macrof1", "task: metric: 'macrof1' is not one of accuracy, macro_f1"),
    ],
)
def test_a_task_of_ones_own_is_checked_by_its_settings(place, capsys, setting, message) -> None:
    (place / "mine/lengths.py").write_text(LENGTHS)
    wordless = "from finetune.tasks.base import Task\nclass TASK(Task):\n    head, settings_type = 'tokens', int\n"
    wordless += "".join(f"    def {name}(self): ...\n" for name in Task.__abstractmethods__)
    (place / "mine/wordless.py").write_text(wordless)
    (place / "mine/unset.py").write_text(f"{LENGTHS}Lengths.settings_type = int\n")
    (place / "train.csv").write_text("text,label\n" + "a film,good\nan end,bad\n" * 4)
    values = {"name": "own", "task": {"kind": "mine.lengths", "train": "train.csv"}}
    (place / "own.yaml").write_text(yaml.safe_dump(values))
    assert main(["finetune", "own.yaml", "--from", "bert", "--dry-run", "--set", setting]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message.format(place) in line


def test_a_model_with_a_task_of_a_stranger_imports_nothing(place: Path) -> None:
    (place / "mine/lengths.py").write_text(LENGTHS)
    config = FinetuneConfig.model_validate({"name": "theirs", "task": {"kind": "mine.lengths", "train": "train.csv"}})
    with pytest.raises(InputError, match=r"^mine.lengths: a recorded .* add --import mine.lengths, or import it"):
        config.make_task()
    assert "mine" not in sys.modules
    with pytest.raises(InputError, match=r"^os:system: a recorded config names this module"):  # though it is imported
        custom_score("os:system", ["rm"], ["rm"])
    extensions.import_modules(["mine.lengths"])
    assert type(config.make_task()).__name__ == "Lengths"


@pytest.mark.parametrize(("name", "message"), [("equals", "did you mean equal"), ("none", "equal(true, predicted)")])
def test_a_score_is_a_function(place: Path, capsys: pytest.CaptureFixture[str], name: str, message: str) -> None:
    (place / "own.yaml").write_text(yaml.safe_dump({"name": "own", "entities": {"train": "x", "metric": "f1"}}))
    setting = f"entities.metric=mine.scores:{name}"
    assert main(["finetune", "own.yaml", "--from", "bert", "--dry-run", "--set", setting]) == 2
    assert message.replace("equal(", f"{name}(") in capsys.readouterr().err


def test_scores_of_ones_own_get_what_is_true_and_what_is_predicted(place: Path) -> None:
    extensions.import_modules(["mine.scores:equal"])
    metric = "mine.scores:equal"
    (place / "train.conll").write_text("the O\nfilm B-WORK\n\nit O\n")
    entities = Entities(EntitiesSettings(train="train.conll", metric=metric))
    made: list[dict[str, Any]] = [{"tags": ["O", "O"]}, {"tags": ["O"]}]
    assert entities.score(entities.read_train(), made)[entities.metric] == 1
    (place / "train.csv").write_text("text,label\na film,good\nan end,bad\n")
    classes = Classification(ClassificationSettings(train="train.csv", metric=metric))
    assert classes.score(classes.read_train(), [{"label": "good"}, {"label": "bad"}])[classes.metric] == 2
    asked = {"id": "1", "question": "Who?", "context": "It was Ann.", "answers": {"text": ["Ann"], "answer_start": [7]}}
    (place / "train.jsonl").write_text(json.dumps(asked) + "\n")
    questions = Questions(QuestionsSettings(train="train.jsonl", metric=metric))
    made = [{"id": "1", "best_non_empty": "Ann", "no_answer_score": 0.0}]
    assert questions.metric == "equal"
    assert questions.score(questions.read_train(), made)["equal"] == 0  # a list of right answers beside one


@pytest.mark.slow
def test_workers_have_it_and_a_change_is_said(place: Path) -> None:
    trained = bertrain(place, "pretrain", "configs/own.yaml", "--workers", "2", "--set", "checkpoint.every_steps=1")
    assert trained.returncode == 0, trained.stderr
    recorded = json.loads((place / "runs/own/environment.json").read_text())["modules"]
    assert list(recorded) == ["beside", "mine.first"]
    shutil.rmtree(place / "runs/own/checkpoints/step-00000003")
    (place / "mine/first.py").write_text(f"{SCHEME}# changed\n")
    resumed = bertrain(place, "pretrain", "configs/own.yaml", "--resume")
    assert resumed.returncode == 0
    assert resumed.stderr == "warning: mine.first: changed since the run was last started.\n"


@pytest.mark.slow
def test_a_job_carries_it_to_machines_that_lack_it(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The folder of the job has no modules, and the workers are not children of this process."""
    with cluster(tmp_path_factory.mktemp("state"), "--nodes", "1", "--cpus-per-node", "2") as one:
        there = tmp_path_factory.mktemp("there")
        options = ["--set", f"corpus.dir={place / 'corpus'}", "--set", "scheduling.workers=2"]
        job = ("submit", "--dir", str(there), "--follow", "--", "pretrain", "configs/own.yaml", *options)
        done = bertrain(place, *job, XDG_STATE_HOME=str(one.state))
        assert done.returncode == 0, done.stdout + done.stderr
    recorded = json.loads((there / "runs/own/environment.json").read_text())["modules"]
    assert list(recorded) == ["beside", "mine.first"]
