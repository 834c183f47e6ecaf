"""Names of earlier versions: read with a remark, in configs, the records of runs and corpora; digests keep them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pretrain.common.earlier import RENAMED, as_before, as_now
from pretrain.config import PretrainConfig, changed_for_resume, load_config
from pretrain.reporting.report import card_page
from pretrain.run.progress import Progress

PRETRAINING = {
    "name": "trial",
    "corpus": {"dir": "c", "sources": [{"kind": "books", "path": "x"}, {"kind": "books", "path": "y"}]},
    "model": {"size": "mini"},
    "optimizer": {"name": "muon"},
    "adaptation": {},
    "scheduling": {},
    "tracking": {},
    "distillation": {"teacher": "t"},
    "start_from": "",
    "phases": [{"sequence_length": 64, "global_sequences": 8, "steps": 10, "peak_learning_rate": 1e-4}],
}
# Section, old name, new name, a value of the old one and what it is now.
ROWS: list[tuple[str, str, str, Any, Any]] = [
    ("model", "attention_init", "attention_init", "neighbours", "neighbors"),
    ("optimizer", "muon_rate", "muon_lr_scale", 2.5, 2.5),
    ("adaptation", "general", "replay_corpus", "g", "g"),
    ("distillation", "initialise", "initialize", False, False),
    ("corpus.sources.1", "licence", "license", "CC0", "CC0"),
]


def given(folder: Path, section: str, name: str, value: Any) -> Path:
    """A config with this setting."""
    values = yaml.safe_load(yaml.safe_dump(PRETRAINING))
    values |= {"start_from": "s", "distillation": {}} if section == "adaptation" else {}
    *path, last = [int(key) if key.isdigit() else key for key in section.split(".")]
    inner = values
    for key in path:
        inner = inner[key]
    inner[last][name] = value
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder / "config.yaml"


def test_each_row_is_tested() -> None:
    tested = {(section.split(".")[0].replace("corpus", "sources"), old) for section, old, *_ in ROWS}
    told = {(section, old) for section in RENAMED.keys() - {"pairs", "masking", "progress"} for old in RENAMED[section]}
    assert tested == told


@pytest.mark.parametrize(("section", "old", "new", "was", "now"), ROWS)
def test_an_old_name_is_read_with_a_remark(section, old, new, was, now, tmp_path, capsys) -> None:
    expected = load_config(given(tmp_path / "new", section, new, now))
    assert capsys.readouterr().err == ""
    path = given(tmp_path / "old", section, old, was)
    assert load_config(path) == expected
    values = (f": {was}", f": {now}") if old == new else ("", "")
    said = f"{section}.{old}{values[0]} is now {section}.{new}{values[1]}; the old name is read until 0.3"
    assert re.fullmatch(rf"{re.escape(str(path))}:\d+: {re.escape(said)}\n", capsys.readouterr().err)
    # The override decides, whatever the names.
    path = given(tmp_path / "both", section, new, {"neighbors": "normal", 2.5: 1.0}.get(now, now))
    assert load_config(path, [f"{section}.{old}={yaml.safe_dump(was).split()[0]}"]) == expected
    assert f"--set {section}.{old}=" in capsys.readouterr().err
    # A run recorded the names of its version.
    given(tmp_path / "run", section, old, was).with_name("metrics.jsonl").touch()
    assert load_config(tmp_path / "run" / "config.yaml") == expected
    assert capsys.readouterr().err == ""


def test_the_new_name_decides_beside_the_old_one() -> None:
    assert as_now("optimizer", {"muon_lr_scale": 2.0, "muon_rate": 1.0}) == {"muon_lr_scale": 2.0}


def test_a_run_of_an_earlier_version_resumes(tmp_path: Path) -> None:
    before = load_config(given(tmp_path, "optimizer", "muon_rate", 2.5))
    recorded = as_before(before.model_dump(mode="json"))
    assert recorded["optimizer"]["muon_rate"] == 2.5
    assert "muon_lr_scale" not in recorded["optimizer"]
    assert changed_for_resume(PretrainConfig.model_validate(recorded), before, 1) == []
    state = {**dataclasses.asdict(Progress(step=7)), "passed_over": [[2, 3], [2, 1]]}
    del state["skipped"]
    assert Progress.from_state(state) == Progress(step=7, skipped={"steps": 4})


def test_the_card_of_an_earlier_version_is_shown() -> None:
    page = card_page({"sources": [{"name": "wiki", "licence": "CC0"}]})
    assert dict(zip(page["source_columns"], page["sources"][0], strict=True))["license"] == "CC0"


@pytest.mark.parametrize(
    ("section", "name", "value", "instead"),
    [
        ("scheduling", "data_stall_seconds", 60.0, "the limit is ten times hang_seconds"),
        ("tracking", "tags", ["a", "b"], "set the environment variable WANDB_TAGS"),
        ("adaptation", "finetuning", ["task.yaml"], "give --finetune CONFIG to adapt"),
        ("adaptation", "finetuning_seeds", 3, "give --seeds N to adapt"),
    ],
)
def test_what_changed_no_result_is_read_with_a_remark(section, name, value, instead, tmp_path, capsys) -> None:
    path = given(tmp_path / "run", section, name, value)
    config = load_config(path)
    said = f"{section}.{name} left in 0.2, and has no effect; {instead}"
    assert re.fullmatch(rf"{re.escape(str(path))}:\d+: {re.escape(said)}\n", capsys.readouterr().err)
    recorded = config.model_dump(mode="json")
    recorded[section][name] = value
    assert changed_for_resume(PretrainConfig.model_validate(recorded), config, 1) == []
