"""The console command `bertrain` and launch.sh, which hands over to it: one list of commands, one package for each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.doctor.verdicts import judge_versions
from cluster.workers.launch import environment
from finetune import cli
from finetune.__main__ import build_parser as finetune_parser
from pretrain.__main__ import build_parser as pretrain_parser
from pretrain.common.commands import EXIT_CODES

ROOT = Path(__file__).parents[2]
PARSERS = {"pretrain": pretrain_parser, "finetune": finetune_parser, "cluster": cli.cluster_parser}
HEAVY = ("torch", "ray", "transformers", "numpy", "pydantic", "yaml", "rich", "wandb", "deepspeed")


def commands_of(package: str) -> set[str]:
    """The commands that the package's parser has."""
    parser = PARSERS[package]()
    return {name for action in parser._actions for name in action.choices or ()}


# ---- bertrain


def test_a_reader_that_ends_ends_the_command_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "finetune.cli", "pretrain", "configs/pretrain/bert-mini.yaml", "--dry-run"]
    with os.fdopen(writer, "w") as output:
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    "words",
    [[], ["--help"], ["-h"], ["help"], ["pretrian"], *([name, "--help"] for name in cli.commands())],
    ids=" ".join,
)
def test_help_and_typing_errors_import_nothing_heavy(words: list[str]) -> None:
    code = f"""
import sys
from finetune.cli import main
try: sys.exit(main({words}))
finally: print(sorted({{name.partition('.')[0] for name in sys.modules}}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == (2 if words == ["pretrian"] else 0)
    loaded = result.stdout.splitlines()[-1]
    assert not [name for name in HEAVY if f"'{name}'" in loaded]


def test_help_lists_every_command_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    expected = {*commands_of("pretrain"), *commands_of("finetune"), *commands_of("cluster")}
    assert set(cli.commands()) == expected
    assert len(cli.commands()) == len(expected)
    for name in expected:
        assert sum(line.startswith(f"  {name} ") for line in lines) == 1


def test_every_command_is_one_of_its_packages_parser() -> None:
    for name in cli.commands():
        assert name in commands_of(cli.package_of([name]))


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("pretrian", "did you mean pretrain? ./launch.sh --help lists them."),
        ("finetun", "did you mean finetune? ./launch.sh --help lists them."),
        ("xyzzy", "./launch.sh --help lists them."),
        ("--version", "./launch.sh --help lists them."),
    ],
)
def test_an_unknown_command_names_the_nearest(word: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word, "--set", "a=b"]) == 2
    assert capsys.readouterr().err == f"error: {word!r} is not a command; {advice}\n"


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("finetune", ["demo", "--fresh"]),
        ("pretrain", ["prepare", "run.yaml"]),
        ("finetune", ["predict", "runs/sst2"]),
        ("cluster", ["logs", "-f", "bert-mini"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_command_reaches_its_package_whole(monkeypatch: pytest.MonkeyPatch, package: str, words: list[str]) -> None:
    seen = stand_in(monkeypatch, package, 75)
    assert cli.main(words) == 75
    assert seen == [words]


def stand_in(monkeypatch: pytest.MonkeyPatch, package: str, code: int) -> list[Any]:
    """Put a command line that returns `code` in the package's place; returns what it is called with."""
    seen: list[Any] = []
    line = "finetune.cli.run_command" if package == "cluster" else f"{package}.__main__.main"
    monkeypatch.setattr(line, lambda *given: seen.append(given[-1]) or code)
    return seen


@pytest.mark.parametrize("options", [[], ["--onnx"], ["--checkpoint", "best"], ["--checkpoint=best"]])
def test_export_depends_on_what_the_folder_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """`best` is a fine-tuned model here, but as an option's value it is not what is exported."""
    monkeypatch.chdir(tmp_path)
    for folder in ("best", "tuned/model"):
        Path(folder).mkdir(parents=True)
        Path(folder, "finetune.json").write_text("{}")
    assert cli.package_of(["export", *options, "pretrained", "out"]) == "pretrain"
    assert cli.package_of(["export", *options, "tuned", "out"]) == "finetune"
    assert cli.package_of(["export", "tuned/model", "out", *options]) == "finetune"
    assert cli.package_of(["export", *options, "--help"]) == "pretrain"
    Path("runs/named/model").mkdir(parents=True)
    Path("runs/named/model/finetune.json").write_text("{}")
    assert cli.package_of(["export", *options, "named", "out"]) == "finetune"


def test_the_program_is_named_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BERTRAIN_PROGRAM", raising=False)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/bertrain", "pretrain"])
    help_text = pretrain_parser().format_help()
    assert help_text.startswith("usage: bertrain ")
    monkeypatch.setenv("BERTRAIN_PROGRAM", "./launch.sh")
    assert pretrain_parser().format_help() == help_text.replace("bertrain", "./launch.sh")


def test_ray_and_its_workers_name_the_program_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own names are those of modules."""
    monkeypatch.delenv("BERTRAIN_PROGRAM", raising=False)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/bertrain", "pretrain"])
    code = "from pretrain.common.commands import program; print(program())"
    result = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert result.stdout == "bertrain\n"


@pytest.mark.parametrize("program", ["bertrain", "./launch.sh"])
def test_the_advice_about_a_missing_package_is_for_its_installation(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BERTRAIN_PROGRAM", program)
    (row,) = judge_versions({"torch": "none: no module"})
    assert (".venv" in row.advice) == (program == "./launch.sh")
    assert ("requirements.lock" in row.advice) == (program == "bertrain")


def test_the_help_has_the_exit_codes_of_the_reference() -> None:
    page = (ROOT / "docs/reference/exit-codes.md").read_text()
    assert re.findall(r"[:,] (\d+) ", EXIT_CODES) == re.findall(r"^\| `(\d+)`", page, re.MULTILINE)


def test_an_installed_package_brings_the_command() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert '[project.scripts]\nbertrain = "finetune.cli:main"\n' in project
    assert f'"finetune" = ["{cli.COMMANDS_FILE.name}"]' in project


# ---- every command's help


@pytest.mark.parametrize("package", PARSERS)
def test_every_command_has_a_sentence_and_examples(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    (subparsers,) = [action for action in PARSERS[package]()._actions if action.choices]
    for name, parser in dict(subparsers.choices or {}).items():
        text = parser.format_help()
        assert re.search(r"^[A-Z][^\n]{15,}\.$", text, re.MULTILINE), name
        assert f"examples:\n  ./launch.sh {name}" in text
        for action in parser._actions:
            assert action.help, f"{name} {action.dest}"


# ---- launch.sh


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """launch.sh beside a .venv that is set up, and whose `bertrain` prints what it is called with."""
    shutil.copy(ROOT / "launch.sh", tmp_path)
    (tmp_path / "finetune").mkdir()
    shutil.copy(cli.COMMANDS_FILE, tmp_path / "finetune")
    for name in ("requirements.lock", "pyproject.toml"):
        (tmp_path / name).write_text("")
    program = tmp_path / ".venv/bin/bertrain"
    program.parent.mkdir(parents=True)
    # It names its Python, as what pip installs does.
    lines = f'#!/bin/sh\n: "{program.parent}/python"\necho "$@"\necho "$PYTHONSAFEPATH $BERTRAIN_PROGRAM"\n'
    program.write_text(lines)
    program.chmod(0o755)
    return tmp_path


def add_stamps(clone: Path, *extras: str) -> None:
    """Mark the packages of these extras as installed."""
    stamp = subprocess.run(["cksum"], input=b"", capture_output=True, check=True).stdout
    for extra in extras:
        (clone / ".venv" / f"stamp-{extra}").write_bytes(stamp)


def launch(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["./launch.sh", *words], cwd=clone, capture_output=True, text=True)


def test_launch_sh_lists_the_same_commands(clone: Path) -> None:
    shutil.rmtree(clone / ".venv")
    for words in ([], ["--help"]):
        result = launch(clone, *words)
        assert (result.returncode, result.stderr) == (0, "")
        assert cli.COMMANDS_FILE.read_text() in result.stdout
        assert "\n  test " in result.stdout
        assert max(map(len, result.stdout.splitlines())) <= 120
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize("word", ["pretrian", "pre", "Start", "*", "Fine-tune:"])
def test_launch_sh_sets_nothing_up_for_an_unknown_command(clone: Path, word: str) -> None:
    shutil.rmtree(clone / ".venv")
    result = launch(clone, word)
    assert result.returncode == 2
    assert result.stderr == f"error: '{word}' is not a command; ./launch.sh --help lists them.\n"
    assert not (clone / ".venv").exists()


def test_launch_sh_lets_an_installed_command_name_the_nearest(clone: Path) -> None:
    add_stamps(clone, "base")
    assert launch(clone, "demp").stdout.splitlines()[0] == "demp"


@pytest.mark.parametrize("words", [["docs", "--help"], ["test", "-h"], ["test", "-k", "x", "--help"]], ids=" ".join)
def test_launch_sh_sets_nothing_up_for_help(clone: Path, words: list[str]) -> None:
    shutil.rmtree(clone / ".venv")
    result = launch(clone, *words)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"usage: ./launch.sh {words[0]} ")
    assert not (clone / ".venv").exists()


def test_launch_sh_and_the_docs_program_have_the_same_options(clone: Path) -> None:
    program = subprocess.run([sys.executable, ROOT / "docs/build.py", "--help"], capture_output=True, text=True)
    options = set(re.findall(r"--[a-z]+", launch(clone, "docs", "--help").stdout))
    assert options == set(re.findall(r"--[a-z]+", program.stdout)) - {"--help"}


def test_launch_sh_hands_every_command_over(clone: Path) -> None:
    add_stamps(clone, "base")
    for name in cli.commands():
        result = launch(clone, name, "a b", "--set", "x=1")
        assert result.stdout.splitlines() == [f"{name} a b --set x=1", "1 ./launch.sh"], result.stderr


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["prepare", "x.yaml"], "base"),
        (["export", "run", "out"], "base"),
        (["export", "run", "--onnx", "out"], "onnx"),
        (["bench", "step"], "bench"),
        (["test", "tests/test_x.py"], "test"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_launch_sh_sets_up_what_a_command_needs(clone: Path, words: list[str], extra: str) -> None:
    (clone / ".venv/bin/python").write_text('#!/bin/sh\necho "$@" >>pip.txt; exit 1\n')
    (clone / ".venv/bin/python").chmod(0o755)
    add_stamps(clone, *({"base", "onnx", "bench", "test"} - {extra}))
    result = launch(clone, *words)
    assert result.returncode == 3
    assert f"Setting up .venv ({extra}), log in .venv/install.log ...\n" in result.stderr
    package = str(clone) if extra == "base" else f"{clone}[{extra}]"
    assert f"--editable {package} --constraint" in (clone / "pip.txt").read_text()


def test_launch_sh_shows_what_pip_is_doing(clone: Path) -> None:
    steps = "Collecting torch\n  Downloading torch-2.13.0.whl (190.3 MB)"
    (clone / ".venv/bin/python").write_text(f"#!/bin/sh\necho '{steps}'; sleep 2; exit 1\n")
    (clone / ".venv/bin/python").chmod(0o755)
    add_stamps(clone, "base")
    ours, terminal = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as shown:
        launched = subprocess.Popen(["./launch.sh", "bench", "step"], cwd=clone, stderr=terminal)
        os.close(terminal)
        assert launched.wait() == 3
        assert re.search(rb" 1 s  Downloading torch-2.13.0.whl \(190.3 MB\)", shown.read(65536))


@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize("shebang", ["#!{bin}/python3\n", '#!/bin/sh\n\'\'\'exec\' "{bin}/python" "$0" "$@"\n'])
def test_launch_sh_makes_a_copied_venv_again(clone: Path, moved: bool, shebang: str) -> None:
    """Its programs name the Python of the original, and would run the original's code."""
    checkout = clone / "a copy"
    original = clone / ".venv/bin"
    (clone / ".venv/bin/bertrain").write_text(shebang.format(bin=original))
    (clone / ".venv/made-by-launch.sh").touch()
    add_stamps(clone, "base", "test")
    checkout.mkdir()
    for name in ("launch.sh", "finetune", "requirements.lock", "pyproject.toml", ".venv"):
        subprocess.run(["mv" if moved else "cp", *([] if moved else ["-a"]), clone / name, checkout], check=True)
    python = clone / "python"
    python.write_text('#!/bin/sh\n[ "$2" != venv ] || exit 9\n')
    python.chmod(0o755)
    result = subprocess.run(
        ["./launch.sh", "list"], cwd=checkout, capture_output=True, text=True, env={**os.environ, "PYTHON": str(python)}
    )
    assert result.returncode == 3
    assert "Setting up .venv (base)" in result.stderr
    assert not (checkout / ".venv/bin").exists()
    assert original.exists() != moved


def test_launch_sh_takes_a_venv_by_another_path_to_it(clone: Path) -> None:
    add_stamps(clone, "base")
    (clone / "link").symlink_to(clone)
    assert launch(clone / "link", "list").stdout.splitlines()[0] == "list"


def test_a_stopped_set_up_ends_its_installer_and_frees_the_lock(clone: Path) -> None:
    """The installer waits for a file that never comes, so only a signal ends it."""
    (clone / ".venv/made-by-launch.sh").touch()
    (clone / ".venv/stamp-base").write_text("of an older lock file")
    installer, pid = clone / ".venv/bin/python", clone / "pid"
    installer.write_text(f"#!/bin/sh\necho $$ >{pid}\nexec tail -f /dev/null\n")
    installer.chmod(0o755)
    with subprocess.Popen(["./launch.sh", "doctor"], cwd=clone, stderr=subprocess.DEVNULL) as command:
        while not pid.is_file() or not pid.read_text():
            assert command.poll() is None
        command.terminate()
        assert command.wait() == 143
    assert not psutil.pid_exists(int(pid.read_text())) or psutil.Process(int(pid.read_text())).status() == "zombie"
    assert subprocess.run(["flock", "--nonblock", "requirements.lock", "true"], cwd=clone).returncode == 0


def test_a_set_up_stopped_while_it_makes_the_venv_leaves_no_process(clone: Path) -> None:
    """The Python that makes the virtual environment waits for a file that never comes."""
    shutil.rmtree(clone / ".venv")
    python, pid = clone / "python", clone / "pid"
    python.write_text(f'#!/bin/sh\n[ "$2" = venv ] || exit 0\necho $$ >{pid}\nexec tail -f /dev/null\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python)}
    with subprocess.Popen(
        ["./launch.sh", "doctor"], cwd=clone, stderr=subprocess.PIPE, text=True, env=environment
    ) as command:
        assert command.stderr is not None
        assert command.stderr.readline() == "Setting up .venv (base), log in .venv/install.log ...\n"
        while not pid.is_file() or not pid.read_text():
            assert command.poll() is None
        command.terminate()
        assert command.wait() == 143
    assert not psutil.pid_exists(int(pid.read_text())) or psutil.Process(int(pid.read_text())).status() == "zombie"


def test_a_shell_completes_commands_and_options() -> None:
    script = cli_output(["completion", "bash"])
    ask = f"""{script}
complete() {{ COMP_WORDS=(bertrain "$@"); COMP_CWORD=$#; COMPREPLY=(); _shtab_bertrain; echo "${{COMPREPLY[@]}}"; }}
complete ''; complete pretrain --fo; complete export --o; complete submit --addr; complete finetune --see
"""
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    first, *options = done.stdout.splitlines()
    assert set(cli.commands()) <= set(first.split())
    assert options == ["--fork", "--onnx", "--address", "--seeds"]
    assert cli_output(["completion", "zsh"]).startswith("#compdef bertrain\n")


def cli_output(words: list[str]) -> str:
    command = [sys.executable, "-m", "finetune.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
