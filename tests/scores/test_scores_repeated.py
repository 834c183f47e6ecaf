"""`evaluate-pretrained` again, beside other processes and models, and with tokenizers and data that are not plain."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.cli import main
from finetune.scores import finetuning, finetuning_runs
from finetune.scores.blimp import read_blimp
from finetune.scores.finetuning import finetuning_scores
from finetune.scores.finetuning_runs import FinetuningSettings
from finetune.scores.held_out import HeldOutSettings, masked_sequences
from finetune.scores.masked_model import MaskedModel
from finetune.scores.record import Record
from finetune.scores.view import finetuning_charts, score_notes, score_rows, score_table
from pretrain.common.errors import DivergedError, InputError, RunError, StoppedError
from pretrain.run.preflight import only_run
from tests.fake_trials import hand_out
from tests.scores.test_scores import make_masked_lm
from tests.tasks.refusals import refused
from tests.tiny_checkpoints import SPECIALS, write_reviews

MODEL = {"fingerprint": "f", "name": "n", "folder": "d"}
CLS, SEP, MASK = (SPECIALS.index(name) for name in ("[CLS]", "[SEP]", "[MASK]"))


def with_tokenizer(bert: Path, folder: Path, replaced: Sequence[tuple[str, str]] = (), **changes: Any) -> Path:
    """A copy of the model whose tokenizer.json has other values and names."""
    shutil.copytree(bert, folder)
    content = {**json.loads(MaskedModel(bert).tokenizer.to_str()), **changes}
    text = json.dumps(content, ensure_ascii=False)
    for before, after in replaced:
        text = text.replace(before, after)
    (folder / "tokenizer.json").write_text(text)
    (folder / "vocab.txt").unlink()
    return folder


def test_special_tokens_in_a_text_are_ordinary_characters(bert: Path) -> None:
    model = MaskedModel(bert)
    text = "the [MASK] film [SEP] [CLS]"
    ids, ordinary = model.encode(text)
    (sequence,) = masked_sequences(model.tokenizer, model.special_ids, [text], HeldOutSettings(share=0.01))
    for found in (ids.tolist(), [*sequence.masked.ids]):
        assert [found.count(number) for number in (CLS, SEP)] == [1, 1]
    assert MASK not in ids
    assert ordinary.tolist() == [False, *[True] * (len(ids) - 2), False]


def test_a_tokenizer_without_a_template_is_framed_as_in_pretraining(tmp_path: Path, bert: Path) -> None:
    plain, model = MaskedModel(with_tokenizer(bert, tmp_path / "plain", post_processor=None)), MaskedModel(bert)
    assert plain.encode("the film")[0].tolist() == model.encode("the film")[0].tolist()
    for one in (plain, model):
        (sequence,) = masked_sequences(one.tokenizer, one.special_ids, ["the film was good"], HeldOutSettings())
        assert (sequence.masked.ids[0], sequence.masked.ids[-1], sequence.tokens) == (CLS, SEP, 4)


def test_the_mask_is_found_by_its_role(tmp_path: Path, bert: Path) -> None:
    renamed = with_tokenizer(bert, tmp_path / "renamed", [("[MASK]", "[BLANK]")])
    refused("its tokenizer has no mask token", MaskedModel, renamed)
    (renamed / "tokenizer_config.json").write_text('{"mask_token": "[BLANK]"}')
    assert MaskedModel(renamed).mask_id == MASK


def pair(**changes: Any) -> bytes:
    row = {"sentence_good": "a", "sentence_bad": "b", "UID": "one", "linguistics_term": "t", **changes}
    return json.dumps(row).encode() + b"\n"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([pair()[:-2] + b', "x": "\xe9"}\n'], "line 1 is not a pair of BLiMP .UnicodeDecodeError"),
        ([pair() + pair(sentence_good=None)], "line 2 is not a pair of BLiMP .*a value is not text"),
        ([pair() + pair(UID="two")], r"line 2 is of another paradigm\. Give a file for each UID"),
        ([pair() + pair(linguistics_term="u")], "line 2 is of another paradigm"),
        ([pair(), pair()], r"1\.jsonl: its UID .one. is that of another file"),
        ([], r"no \.jsonl file"),
        ([b""], "has no pair"),
        ([b'{"sentence_good": "a"}\n'], "line 1 is not a pair"),
        ([b"[1\n"], "line 1 is not a pair"),
    ],
)
def test_damaged_blimp_is_refused(tmp_path: Path, files: list[bytes], message: str) -> None:
    for number, content in enumerate(files):
        (tmp_path / f"{number}.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_blimp(tmp_path, 1)  # whatever the limit is


def test_two_processes_write_one_record(tmp_path: Path) -> None:
    first, second = (Record(tmp_path / "record.json", MODEL) for _ in range(2))
    first.write("blimp", {}, {"overall": 1.0})
    second.write("finetuning", {}, {"a": 1}, beside=True)
    first.write("finetuning", {}, {"b": 2}, beside=True)
    content = json.loads((tmp_path / "record.json").read_text())
    assert content["blimp"]["scores"] == {"overall": 1.0}
    assert content["finetuning"]["scores"] == {"a": 1, "b": 2}
    first.write("finetuning", {"other": 1}, {"c": 3}, beside=True)
    assert first.read("finetuning", {"other": 1}) == {"c": 3}


def test_scores_of_earlier_versions_count(tmp_path: Path) -> None:
    """Their records say whether targets were shifted, which no version can do any more."""
    record = Record(tmp_path / "scores.json", MODEL)
    record.write("blimp", {"limit": 3, "shifted": False}, {"a": 1})
    assert record.read("blimp", {"limit": 3}) == {"a": 1}
    record.write("blimp", {"limit": 3, "shifted": True}, {"a": 1})
    assert record.read("blimp", {"limit": 3}) == {}


def measured(name: str, length: int, shifted: bool = False, overrides: Sequence[str] = ()) -> dict[str, Any]:
    text = {"bits_per_character": 1.5, "nats_per_token": 3.0, "accuracy": 0.5}
    held_out = {"how": {"texts": "abc", "length": length, "shifted": shifted}, "scores": text}
    tuned = {"metric": "f1", "part": "dev", "pretrained": [0.5], "random": [], "overrides": list(overrides)}
    return {"model": {"name": name}, "held_out": held_out, "finetuning": {"how": {}, "scores": {"ner": tuned}}}


def test_measurements_of_a_row_that_differ_are_marked() -> None:
    """Where targets are shifted is the model's affair, and one that was not measured needs no mark."""
    alike = [measured("a", 128), measured("b", 128, shifted=True), {"model": {"name": "c"}}]
    assert score_notes(alike) == []
    assert dict(score_rows(alike))["held-out text, accuracy"] == ["0.5000", "0.5000", "–"]
    models = [*alike, measured("d", 64, overrides=["training.steps=9"])]
    rows = dict(score_rows(models))
    assert rows["held-out text, accuracy"] == ["0.5000 [1]", "0.5000 [1]", "–", "0.5000 [2]"]
    assert rows["ner, f1"][3] == "0.5000 [2]"
    assert score_notes(models) == [
        "held-out text [1]: length 128",
        "held-out text [2]: length 64",
        "ner [1]: overrides none",
        "ner [2]: overrides training.steps=9",
    ]
    assert "length 64" in str(score_table(models).caption)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    write_reviews(tmp_path / "data")
    config = "max_length: 32\nclassification: {train: train.jsonl, dev: dev.jsonl}\nengine: {precision: fp32}\n"
    for name in ("reviews", "Two.parts_v1"):
        text = f"name: reviews\ntraining: {{steps: 2, examples_per_step: 4}}\n{config}"
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


class Runs:
    """Stands for Ray: hands out trials, and ends those from random weights and with one of `seeds` with `error`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.folders: list[Path] = []
        self.error: RunError | None = None
        self.seeds = range(9)

    def __call__(self, target: str, tasks: Sequence[Any], *, poll: Any, **options: Any) -> None:
        hand_out(tasks, poll, self._result)

    def _result(self, task: Any) -> float | RunError:
        config = task.training.config
        self.names.append(config["name"])
        self.folders.append(task.run_dir)
        fails = config["random_weights"] and config["seed"] in self.seeds
        return self.error if fails and self.error is not None else 0.5


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Runs:
    runs = Runs()
    monkeypatch.setattr("cluster.workers.trials.launch.run_trials", runs)
    return runs


def test_a_run_of_another_process_is_left_alone(work: Path, bert: Path, ran: Runs) -> None:
    """A run from random weights that another checkpoint began is removed only if no process trains it."""
    settings = FinetuningSettings((work / "reviews.yaml",), seeds=1, data=work / "data")
    ran.error = StoppedError("stopped.")
    with pytest.raises(StoppedError):
        finetuning_scores(bert, work / "out", "first", settings)
    (begun,) = (folder for folder in ran.folders if finetuning_runs.RANDOM in folder.parts)
    (begun / "sign").touch()
    ran.error = None
    other = make_masked_lm(work / "other")
    with only_run(work / "out"), pytest.raises(InputError, match="another process"):
        finetuning_scores(other, work / "out", "second", settings)
    assert (begun / "sign").is_file()
    assert finetuning_scores(other, work / "out", "second", settings)["reviews"].random == (0.5,)
    assert not (begun / "sign").exists()


def test_a_model_is_fine_tuned_by_one_process_with_or_without_random_weights(work: Path, bert: Path, ran: Runs) -> None:
    settings = FinetuningSettings((work / "reviews.yaml",), seeds=1, random=False, data=work / "data")
    ran.error = StoppedError("stopped.")
    finetuning_scores(bert, work / "out", "first", settings)
    (own,) = ran.folders
    (own / "scores.json").unlink()
    shutil.copytree(work / "data", work / "moved")  # what was begun from there is not continued, but removed
    with only_run(own.parents[1]), pytest.raises(InputError, match="another process"):
        finetuning_scores(bert, work / "out", "first", replace(settings, random=True, data=work / "moved"))
    assert own.is_dir()


def test_checkpoints_are_fine_tuned_at_once_if_they_share_no_runs(work: Path, bert: Path, ran: Runs) -> None:
    settings = FinetuningSettings((work / "reviews.yaml",), seeds=1, random=False, data=work / "data")
    finetuning_scores(bert, work / "out", "first", settings)
    folder = ran.folders[0].parents[1]
    with only_run(folder):
        other = make_masked_lm(work / "other")
        assert finetuning_scores(other, work / "out", "second", settings)["reviews"].pretrained == (0.5,)
        shutil.rmtree(ran.folders[0])
        refused("another process", finetuning_scores, bert, work / "out", "first", settings)


def test_a_divergence_that_another_checkpoint_left_is_told(work: Path, bert: Path, ran: Runs) -> None:
    settings = FinetuningSettings((work / "reviews.yaml",), seeds=1, data=work / "data")
    ran.error = DivergedError("loss is nan")
    other = make_masked_lm(work / "other")
    for folder, name in ((bert, "first"), (other, "second"), (other, "second")):
        record = Record(work / f"{name}.json", MODEL)
        with pytest.raises(DivergedError, match="1 of 2 runs failed"):
            finetuning_scores(folder, work / "out", name, settings, record=record)
        assert list(record.read(finetuning.PART, {})["reviews"]["pretrained"]) == [0.5]
    assert len(ran.folders) == 3


def test_a_mean_without_the_runs_that_failed_says_so(work: Path, bert: Path, ran: Runs) -> None:
    record = Record(work / "first.json", MODEL)
    ran.error, ran.seeds = DivergedError("loss is nan"), range(1, 2)
    settings = FinetuningSettings((work / "reviews.yaml",), seeds=3, data=work / "data")
    with pytest.raises(DivergedError, match="1 of 6 runs failed"):
        finetuning_scores(bert, work / "out", "first", settings, record=record)
    rows = dict(score_rows([record.content]))
    assert rows["reviews, accuracy"] == ["0.5000 ± 0.0000"]
    assert rows["  from random weights"] == ["0.5000 ± 0.0000 (2 of 3)"]
    assert "random weights (2 of 3)" in next(finetuning_charts([record.content]))


def test_files_of_any_name_are_fine_tuned(work: Path, bert: Path, ran: Runs) -> None:
    settings = FinetuningSettings((work / "Two.parts_v1.yaml",), seeds=1, data=work / "data")
    assert list(finetuning_scores(bert, work / "out", "first", settings)) == ["Two.parts_v1"]
    assert sorted(ran.names) == ["reviews-two-parts-v1-0", "reviews-two-parts-v1-random-0"]


@pytest.mark.parametrize("wrong", [["--blimp", "none"], ["--finetune", "none.yaml"]])
def test_wrong_paths_are_found_before_anything_is_measured(work, bert, wrong, monkeypatch, capsys) -> None:
    monkeypatch.setattr("finetune.scores.command.held_out_score", lambda *_, **options: pytest.fail("measured"))
    (work / "text.txt").write_text("the film was good.")
    words = [wrong[0], str(work / wrong[1])]
    command = ["evaluate-pretrained", str(bert), "--out", str(work / "out"), "--texts", str(work / "text.txt")]
    assert main([*command, *words]) == 2
    assert "none" in capsys.readouterr().err
