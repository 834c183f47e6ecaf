"""An installed package is whole without the clone: a wheel in a folder of its own, used from an empty one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from finetune.cli import build_parsers
from pretrain.common.examples import CONFIGS, listing

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds what the wheel installs."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    source.mkdir()
    for name in ("cluster", "configs", "finetune", "pretrain", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    build = "import setuptools.build_meta as b; b.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, check=True)
    with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
        wheel.extractall(place / "site")
    return place / "site"


def run(site: Path, folder: Path, *words: str, code: int = 0, program: tuple[str, ...] = ("-m", "finetune.cli")) -> str:
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", "BERTRAIN_PROGRAM": "bertrain"}
    command = [sys.executable, *program, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, (words, done.stdout, done.stderr)
    return done.stdout + done.stderr


def test_the_wheel_has_all_files_of_the_packages_and_the_example_configs(site: Path) -> None:
    folders = ["cluster", "configs", "finetune", "pretrain"]
    tracked = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    missing = [name for name in tracked.stdout.split() if not (site / name).is_file()]
    assert missing == ["cluster/manifests/Containerfile"], "an image is built from a clone"


def test_every_command_describes_itself(site: Path, tmp_path: Path) -> None:
    commands = list(build_parsers()[1])
    code = f"""
import finetune.cli
for command in {commands}:
    try: finetune.cli.main([command, "--help"])
    except SystemExit as end: assert not end.code
"""
    shown = run(site, tmp_path, program=("-c", code))
    assert re.findall(r"^usage: bertrain ([\w-]+)", shown, re.MULTILINE) == commands


def test_advice_in_python_names_the_console_command(site: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "BERTRAIN_PROGRAM"}
    command = [sys.executable, "-c", "from pretrain.common.commands import program; print(program())"]
    given = {"cwd": tmp_path, "env": {**environment, "PYTHONPATH": str(site)}}
    assert subprocess.run(command, capture_output=True, text=True, check=True, **given).stdout == "bertrain\n"


@pytest.mark.parametrize("kind", ["kuberay", "slurm"])
def test_a_manifest_of_an_example_config_is_written(kind: str, site: Path, tmp_path: Path) -> None:
    assert "bert-base" in run(site, tmp_path, "manifest", kind, "bert-base")


def test_example_configs_are_listed_printed_and_taken_by_name(site: Path, tmp_path: Path) -> None:
    assert run(site, tmp_path, "configs") == listing() + "\n"
    mini = run(site, tmp_path, "configs", "mini")
    assert mini == (CONFIGS / "pretrain" / "mini.yaml").read_text()
    assert "did you mean mini?" in run(site, tmp_path, "configs", "minni", code=2)
    assert "mini" in run(site, tmp_path, "pretrain", "mini", "--dry-run", "--set", "engine.precision=fp32")
    (tmp_path / "my.yaml").write_text(mini.replace("decay_timescale", "decay_timscale"))
    message = run(site, tmp_path, "pretrain", "my.yaml", "--dry-run", code=2)
    assert re.fullmatch(r"error: my.yaml:\d+: .*did you mean decay_timescale\?\n", message), message


@pytest.mark.slow
def test_the_demo_runs_without_the_clone(site: Path, tmp_path: Path) -> None:
    run(site, tmp_path, "demo", "--quick")
    assert (tmp_path / "runs" / "demo-quick" / "report.html").is_file()
