"""An installed package is whole without the clone: a wheel in an empty environment, used from an empty folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from packaging.requirements import Requirement
from tiny_checkpoints import make_bert, write_reviews

from cluster.workers import launch
from pretrain.common.errors import InputError
from pretrain.common.examples import CONFIGS, listing
from tests.artifacts.untrained import save_untrained

ROOT = Path(__file__).parents[2]
CONFIGS_LINK = ROOT / "pretrain/common/configs"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    source.mkdir()
    for name in ("cluster", "configs", "finetune", "pretrain", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    build = "import setuptools.build_meta as b; b.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, check=True)
    return next(place.glob("*.whl"))


def install(wheel: Path, folder: Path, *extras: str) -> Path:
    """A virtual environment with the wheel and no packages but those that it requires; returns its site-packages."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    left = [("bertrain", extra) for extra in ("", *extras)]
    for name, extra in left:  # grows
        found = next(iter(metadata.distributions(name=name, path=[str(site)])), None) or metadata.distribution(name)
        for line in found.requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                left += [one for one in ((needed.name, part) for part in ("", *needed.extras)) if one not in left]
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(found.locate_file(top)))
    return site


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation without extras."""
    return install(wheel, tmp_path_factory.mktemp("installed") / "venv")


def run(
    site: Path, folder: Path, *words: str, code: int = 0, program: tuple[str, ...] = ("-m", "finetune.cli"), **more: str
) -> str:
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "BERTRAIN_PROGRAM": "bertrain", **more}
    command = [str(site.parents[2] / "bin/python"), *program, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, (words, done.stdout, done.stderr)
    return done.stdout + done.stderr


def test_the_wheel_has_all_files_of_the_packages_and_the_example_configs(wheel: Path) -> None:
    folders = ["cluster", "configs", "finetune", "pretrain"]
    tracked = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    files = set(zipfile.ZipFile(wheel).namelist())
    link = CONFIGS_LINK.relative_to(ROOT).as_posix()
    expected = {re.sub("^configs/", f"{link}/", name) for name in tracked.stdout.split()} - {link}
    assert expected - files == {"cluster/manifests/Containerfile"}, "an image is built from a clone"
    assert {name.partition("/")[0] for name in files} == {"cluster", "finetune", "pretrain", "bertrain-0.1.0.dist-info"}


def test_advice_in_python_names_the_console_command(site: Path, tmp_path: Path) -> None:
    code = "from pretrain.common.commands import program; print(program())"
    assert run(site, tmp_path, program=("-c", code), BERTRAIN_PROGRAM="") == "bertrain\n"


def test_example_configs_are_listed_printed_and_taken_by_name(site: Path, tmp_path: Path) -> None:
    assert run(site, tmp_path, "configs") == listing() + "\n"
    mini = run(site, tmp_path, "configs", "mini")
    assert mini == (CONFIGS / "pretrain" / "mini.yaml").read_text()
    assert "did you mean mini?" in run(site, tmp_path, "configs", "minni", code=2)
    assert "mini" in run(site, tmp_path, "pretrain", "mini", "--dry-run", "--set", "engine.precision=fp32")
    (tmp_path / "my.yaml").write_text(mini.replace("decay_timescale", "decay_timscale"))
    message = run(site, tmp_path, "pretrain", "my.yaml", "--dry-run", code=2)
    assert re.fullmatch(r"error: my.yaml:\d+: .*did you mean decay_timescale\?\n", message), message


def write_task(folder: Path) -> Path:
    """A model, which is returned, and my.yaml, the config of another."""
    make_bert(folder / "bert")
    section = {"classification": write_reviews(folder)}
    given = {"name": "mine", "start_from": str(folder / "bert"), "max_length": 32, "engine": {"precision": "fp32"}}
    (folder / "my.yaml").write_text(json.dumps({**given, **section}))
    return save_untrained(folder, "reviews", section)


def test_prediction_evaluation_and_export_need_no_extra(site: Path, tmp_path: Path) -> None:
    model = write_task(tmp_path)
    code = """
import sys
from finetune.cli import main
for words in sys.argv[1:]: print("\\0", main(words.split()), end="", flush=True)
"""
    needed = {
        f"predict {model} {tmp_path}/dev.jsonl --out predictions.csv": "",
        f"evaluate {model}": "",
        f"export {model} out": "",
        f"predict {model} {tmp_path}/dev.jsonl --out predictions.parquet": "data",
        f"evaluate {model} {tmp_path}/dev.parquet": "data",
        f"export {model} onnx --onnx": "onnx",
        "finetune my.yaml": "train",
        "finetune my.yaml --seeds 2": "cluster,train",
        "prepare mini": "data",
        "demo": "cluster,data,train",
        "up": "cluster",
    }
    printed = run(site, tmp_path, *needed, program=("-c", code))
    codes = [int(code) for code in re.findall(r"\0 (\d+)", printed)]
    assert codes == [3 if extra else 0 for extra in needed.values()], printed
    commands = [f" -m pip install 'bertrain[{extra}]'" for extra in needed.values() if extra]
    assert re.findall(r"error: .+ not installed\. Run: .+/python\S*( .*)$", printed, re.MULTILINE) == commands
    assert {path.name for path in tmp_path.iterdir()} >= {"predictions.csv", "out"}
    assert not {path.name for path in tmp_path.iterdir()} & {"predictions.parquet", "onnx", "runs", "data"}


def test_a_module_that_hides_ours_is_named(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "version_info", (3, 10))  # whose `python -m` looks in the current folder first
    for name in ("cluster.py", "pretrain.py", "cluster/__init__.py"):
        (own := tmp_path / name).parent.mkdir(exist_ok=True)
        own.write_text("raise SystemExit('it ran')")
        line = f"{own} hides bertrain's package {name[:-3].partition('/')[0]}. Rename it.\n"
        assert run(site, tmp_path, "configs", code=2, PYTHONPATH=str(tmp_path)) == f"error: {line}"
        for package, function in (("finetune", "load"), ("pretrain", "train"))[: 1 + name.startswith("cluster")]:
            program = ("-c", f"import {package}; {package}.{function}('x')")
            assert run(site, tmp_path, program=program, code=1, PYTHONPATH=str(tmp_path)).endswith(f"Error: {line}")
        with pytest.raises(InputError, match=f"^{own} hides"):
            launch.run_driver("cluster.workers.driver", MagicMock(), address="", run_dir=tmp_path / "run")
        own.unlink()
    run(site, tmp_path, "configs", PYTHONPATH=str(tmp_path))  # an empty folder cluster/ hides nothing


@pytest.mark.slow
def test_fine_tuning_on_one_machine_needs_its_engine_alone(wheel: Path, tmp_path: Path) -> None:
    write_task(tmp_path)
    site = install(wheel, tmp_path / "venv", "train")
    shown = run(site, tmp_path, "finetune", "my.yaml")
    assert "1 worker, without Ray" in shown
    assert "W&B is not installed" in shown
    assert "ray not installed" in run(site, tmp_path, "finetune", "my.yaml", "--set", "name=y", "--ray", code=3)


@pytest.mark.slow
def test_the_demo_runs_without_the_clone(wheel: Path, tmp_path: Path) -> None:
    run(install(wheel, tmp_path / "venv", "all"), tmp_path, "demo", "--set", "phases.0.steps=40")
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
