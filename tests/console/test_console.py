"""The console command `bertrain` and launch.sh, which hands over to it: one list of commands, one package for each."""

from __future__ import annotations

import importlib.metadata
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
from pretrain.common.commands import EXIT_CODES

ROOT = Path(__file__).parents[2]
PARSER, PARSERS = cli.build_parsers()
CHOICES = "choose from " + ", ".join(map(repr, ("pretrain", "prepare", "finetune")))
HEAVY = ("torch", "ray", "transformers", "numpy", "pydantic", "yaml", "rich", "wandb", "deepspeed")


def test_a_reader_that_ends_ends_the_command_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "finetune.cli", "pretrain", "configs/pretrain/bert-mini.yaml", "--dry-run"]
    command += ["--set", "engine.precision=fp32"]  # else the machine is measured
    with os.fdopen(writer, "w") as output:
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")


def test_help_and_typing_errors_import_nothing_heavy() -> None:
    helps = [[], ["--help"], ["-h"], ["help"], *([name, "--help"] for name in PARSERS)]
    given = [*helps, ["pretrian"], ["logs"], ["up", "--cpu", "1"]]
    code = f"""
import sys
from finetune.cli import main
for words in {given}:
    try: code = main(words)
    except SystemExit as end: code = end.code
    print("\\0", code, *sorted({{name.partition('.')[0] for name in sys.modules}}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    codes, loaded = zip(
        *(line[1:].split(None, 1) for line in result.stdout.splitlines() if line[:1] == "\0"), strict=True
    )
    assert codes == ("0",) * len(helps) + ("2",) * 3
    assert not set(HEAVY) & set(loaded[-1].split())


@pytest.mark.parametrize("words", [[], ["help"], ["-h"], ["--help"]], ids=" ".join)
def test_help_lists_every_command_on_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    listed = [name for names in cli.GROUPS.values() for name in names]
    assert [line.split()[0] for line in lines if re.match(r"  [a-z]", line)] == listed
    assert sorted(listed) == sorted(PARSERS)


def test_help_and_version_of_both_programs(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["help", "pretrain"], ["help", "help"]):
        with pytest.raises(SystemExit):
            cli.main(words)
    assert re.findall(r"^usage: ./launch.sh (\S+)", capsys.readouterr().out, re.MULTILINE) == ["pretrain", "COMMAND"]
    assert cli.main(["--version"]) == 0
    version = capsys.readouterr().out
    shutil.copy(ROOT / "pyproject.toml", clone)
    assert without_venv(clone, "--version").stdout == version == f"bertrain {importlib.metadata.version('bertrain')}\n"
    assert without_venv(clone, "help", "test").stdout.startswith("usage: ./launch.sh test ")


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("pretrian", "did you mean pretrain? ./launch.sh --help lists them."),
        ("finetun", "did you mean finetune? ./launch.sh --help lists them."),
        ("xyzzy", "./launch.sh --help lists them."),
        ("eval", "did you mean evaluate? ./launch.sh --help lists them."),
        ("pre", "did you mean prepare, predict or pretrain? ./launch.sh --help lists them."),
    ],
)
def test_an_unknown_command_names_the_nearest(word: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word, "--set", "a=b"]) == 2
    assert capsys.readouterr().err == f"error: {word!r} is not a command; {advice}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pretrain"], "pretrain: the following arguments are required: CONFIG."),
        (["pretrain", "a.yaml", "--frk", "b"], "pretrain: unrecognized arguments: --frk b; did you mean --fork?"),
        (["finetune", "a.yaml", "--seedz=3"], "finetune: unrecognized arguments: --seedz=3; did you mean --seeds?"),
        (
            ["finetune", "a.yaml", "--se", "3"],
            "finetune: unrecognized arguments: --se 3; did you mean --set or --seeds?",
        ),
        (["submit", "mini", "--set", "a=b"], "submit: unrecognized arguments: --set a=b."),
        (["submit", "--", "pretrian"], f"submit: argument COMMAND: invalid choice: 'pretrian' ({CHOICES})."),
        (["logs", "a", "b"], "logs: unrecognized arguments: b."),
        (["evaluate", "a", "b", "c"], "evaluate: unrecognized arguments: c."),
        (["evaluate", "--out", "x"], "evaluate: the following arguments are required: MODEL."),
        (["up", "--nodes", "0"], "up: argument --nodes: '0' is not a positive integer."),
        (["attention", "a", "--text"], "attention: argument --text: expected one argument."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    advice = f"./launch.sh {words[0]} --help describes its arguments."
    assert capsys.readouterr().err == f"error: {message} {advice}\n"


@pytest.mark.parametrize("words", [["demo", "--fresh"], ["logs", "-f", "bert-mini"]], ids=" ".join)
def test_a_command_gets_its_arguments_and_says_how_it_ended(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    parser, parsers = cli.build_parsers()
    seen: list[Any] = []
    parsers[words[0]].set_defaults(command=lambda given: seen.append(given) or 75)
    monkeypatch.setattr(cli, "build_parsers", lambda: (parser, parsers))
    assert cli.main(words) == 75
    assert seen == [parser.parse_args(words)]


@pytest.mark.parametrize("options", [["--onnx"], ["--checkpoint", "best"], ["--average", "other"], ["--averaged"], []])
def test_export_depends_on_what_the_folder_holds(tmp_path, monkeypatch, options, capsys) -> None:
    """`best` is a fine-tuned model here, but as an option's value it is not what is exported."""
    from finetune.artifacts import export
    from pretrain.run import api

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "export", lambda run, out, **given: f"pretrained {run}")
    monkeypatch.setattr(export, "export", lambda run, out, **given: f"tuned {run}")
    Path("pretrained").mkdir()
    for folder in ("best", "tuned/model", "runs/named/model"):
        Path(folder).mkdir(parents=True)
        Path(folder, "finetune.json").write_text("{}")
    for run, folder in (("tuned", "tuned"), ("tuned/model", "tuned/model"), ("named", "runs/named")):
        allowed = options in ([], ["--onnx"])
        assert cli.main(["export", run, "out", *options]) == (0 if allowed else 2)
        shown = capsys.readouterr()
        refused = f"error: {''.join(options[:1])}: needs a pretraining run, and {folder} is fine-tuned. Remove it.\n"
        assert (shown.out, shown.err) == ((f"tuned {folder}\n", "") if allowed else ("", refused))
    assert cli.main(["export", "pretrained", "out", *options]) == (2 if options == ["--onnx"] else 0)
    refused = "error: --onnx: needs a fine-tuned model, and pretrained is not one. Fine-tune it first.\n"
    assert capsys.readouterr() == (("", refused) if options == ["--onnx"] else ("pretrained pretrained\n", ""))


def test_the_program_is_named_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BERTRAIN_PROGRAM", raising=False)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/bertrain", "pretrain"])
    help_text = cli.build_parsers()[0].format_help()
    assert help_text.startswith("usage: bertrain ")
    monkeypatch.setenv("BERTRAIN_PROGRAM", "./launch.sh")
    assert cli.build_parsers()[0].format_help() == help_text.replace("bertrain", "./launch.sh")


def test_ray_and_its_workers_name_the_program_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own names are those of modules."""
    monkeypatch.delenv("BERTRAIN_PROGRAM", raising=False)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/bertrain", "pretrain"])
    code = "from pretrain.common.commands import program; print(program())"
    result = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert result.stdout == "bertrain\n"


@pytest.mark.parametrize("program", ["bertrain", "./launch.sh"])
def test_the_advice_about_a_missing_package_is_for_its_installation(program: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("BERTRAIN_PROGRAM", program)
    (row,) = judge_versions({"torch": "none: no module"})
    assert (".venv" in row.advice) == (program == "./launch.sh")
    assert ("requirements.lock" in row.advice) == (program == "bertrain")


def test_the_help_has_the_exit_codes_of_the_reference() -> None:
    page = (ROOT / "docs/reference/exit-codes.md").read_text()
    assert re.findall(r"[:,] (\d+) ", EXIT_CODES) == re.findall(r"^\| `(\d+)`", page, re.MULTILINE)


def test_every_command_has_a_sentence_and_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for name, parser in PARSERS.items():
        text = parser.format_help()
        assert re.search(r"^[A-Z][^\n]{15,}\.$", text, re.MULTILINE), name
        assert f"examples:\n  ./launch.sh {name}" in text
        for action in parser._actions:
            assert action.help, f"{name} {action.dest}"


def test_an_option_is_the_same_in_every_command() -> None:
    """Its short form, and what it takes: a file or a folder to write, a number of workers or an elastic range."""
    differing = {"--out": {"DIR", "FILE"}, "--workers": {"N", "N|MIN-MAX"}, "--texts": {"FILE", "PATH"}}
    taken: dict[str, set[Any]] = {}
    for parser in PARSERS.values():
        for action in parser._actions:
            name = action.option_strings[-1] if action.option_strings else ""
            metavar = "" if action.metavar in differing.get(name, set()) else action.metavar
            taken.setdefault(name, set()).add((*action.option_strings, metavar))
    assert [forms for name, forms in taken.items() if name and len(forms) > 1] == []


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """launch.sh beside a .venv that is set up, and whose `bertrain` prints what it is called with."""
    shutil.copy(ROOT / "launch.sh", tmp_path)
    (tmp_path / "docs/reference").mkdir(parents=True)
    shutil.copy(ROOT / "docs/reference/commands.md", tmp_path / "docs/reference")
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


def launch(clone: Path, *words: str, python: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": str(python)} if python else None
    return subprocess.run(["./launch.sh", *words], cwd=clone, capture_output=True, text=True, env=environment)


def write_program(path: Path, lines: str) -> Path:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return path


def end_when_it_has_started(command: subprocess.Popen[Any], pid: Path) -> None:
    """Ends launch.sh once its child has written its id; neither is left."""
    while not pid.is_file() or not pid.read_text():
        assert command.poll() is None
    command.terminate()
    assert command.wait() == 143
    assert not psutil.pid_exists(int(pid.read_text())) or psutil.Process(int(pid.read_text())).status() == "zombie"


def without_venv(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Calls launch.sh, which sets nothing up."""
    shutil.rmtree(clone / ".venv", ignore_errors=True)
    result = launch(clone, *words)
    assert not (clone / ".venv").exists()
    return result


@pytest.mark.parametrize("words", [[], ["--help"]], ids=" ".join)
def test_launch_sh_lists_the_same_commands(clone: Path, words: list[str]) -> None:
    result = without_venv(clone, *words)
    assert (result.returncode, result.stderr) == (0, "")
    assert cli.overview(PARSERS) in result.stdout
    assert "\n  test " in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_launch_sh_sets_nothing_up_for_an_unknown_command(clone: Path) -> None:
    for word in ("pretrian", "pre", "Start", "*", "Fine-tune:"):
        result = without_venv(clone, word)
        assert result.returncode == 2
        assert result.stderr == f"error: '{word}' is not a command; ./launch.sh --help lists them.\n"


def test_launch_sh_lets_an_installed_command_name_the_nearest(clone: Path) -> None:
    add_stamps(clone, "base")
    assert launch(clone, "demp").stdout.splitlines()[0] == "demp"


@pytest.mark.parametrize("words", [["docs", "--help"], ["test", "-h"], ["test", "-k", "x", "--help"]], ids=" ".join)
def test_launch_sh_sets_nothing_up_for_help(clone: Path, words: list[str]) -> None:
    result = without_venv(clone, *words)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"usage: ./launch.sh {words[0]} ")


def test_launch_sh_and_the_docs_program_have_the_same_options(clone: Path) -> None:
    program = subprocess.run([sys.executable, ROOT / "docs/build.py", "--help"], capture_output=True, text=True)
    options = set(re.findall(r"--[a-z]+", launch(clone, "docs", "--help").stdout))
    assert options == set(re.findall(r"--[a-z]+", program.stdout)) - {"--help"}


def test_launch_sh_hands_every_command_over(clone: Path) -> None:
    add_stamps(clone, "base")
    for name in PARSERS:
        result = launch(clone, name, "a b", "--set", "x=1")
        assert result.stdout.splitlines() == [f"{name} a b --set x=1", "1 ./launch.sh"], result.stderr


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["prepare", "x.yaml"], "base"),
        (["export", "run", "--onnx", "out"], "base"),  # installs nothing unasked: the command says what is missing
        (["bench", "step"], "bench"),
        (["test", "tests/test_x.py"], "test"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_launch_sh_sets_up_what_a_command_needs(clone: Path, words: list[str], extra: str) -> None:
    write_program(clone / ".venv/bin/python", 'echo "$@" >>pip.txt; exit 1')
    add_stamps(clone, *({"base", "bench", "test"} - {extra}))
    result = launch(clone, *words)
    assert result.returncode == 3
    assert f"Setting up .venv ({extra}), log in .venv/install.log ...\n" in result.stderr
    package = f"{clone}[all]" if extra == "base" else f"{clone}[all,{extra}]"
    assert f"--editable {package} --constraint" in (clone / "pip.txt").read_text()


def test_launch_sh_shows_what_pip_is_doing(clone: Path) -> None:
    steps = "Collecting torch\n  Downloading torch-2.13.0.whl (190.3 MB)"
    write_program(clone / ".venv/bin/python", f"echo '{steps}'; sleep 2; exit 1")
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
    for name in ("launch.sh", "docs", "requirements.lock", "pyproject.toml", ".venv"):
        subprocess.run(["mv" if moved else "cp", *([] if moved else ["-a"]), clone / name, checkout], check=True)
    python = write_program(clone / "python", '[ "$2" != venv ] || exit 9')
    result = launch(checkout, "list", python=python)
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
    pid = clone / "pid"
    write_program(clone / ".venv/bin/python", f"echo $$ >{pid}\nexec tail -f /dev/null")
    with subprocess.Popen(["./launch.sh", "doctor"], cwd=clone, stderr=subprocess.DEVNULL) as command:
        end_when_it_has_started(command, pid)
    assert subprocess.run(["flock", "--nonblock", "requirements.lock", "true"], cwd=clone).returncode == 0


def test_a_set_up_stopped_while_it_makes_the_venv_leaves_no_process(clone: Path) -> None:
    """The Python that makes the virtual environment waits for a file that never comes."""
    shutil.rmtree(clone / ".venv")
    pid = clone / "pid"
    python = write_program(clone / "python", f'[ "$2" = venv ] || exit 0\necho $$ >{pid}\nexec tail -f /dev/null')
    given: dict[str, Any] = {"cwd": clone, "env": {**os.environ, "PYTHON": str(python)}, "text": True}
    with subprocess.Popen(["./launch.sh", "doctor"], stderr=subprocess.PIPE, **given) as command:
        assert command.stderr is not None
        assert command.stderr.readline() == "Setting up .venv (base), log in .venv/install.log ...\n"
        end_when_it_has_started(command, pid)


def test_a_shell_completes_commands_options_and_values(tmp_path: Path) -> None:
    """As bash asks: it splits words at equals signs."""
    for folder in ("runs/alpha", "finetune"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("my own.yaml", "mine.csv"):
        (tmp_path / file).touch()
    asked = {
        "pretrain --fo": ["--fork"],
        "pretrain --set a = b mi": ["mini"],
        "finetune my": ["my own.yaml"],
        "sweep mini sst2 --grid = sm": ["small-bert"],
        "evaluate alp": ["alpha"],
        "evaluate alpha m": ["my own.yaml", "mine.csv"],
        "pretrain mini --from alp": ["alpha"],
        "submit --follow -- pretr": ["pretrain"],
        "configs glue/s": ["glue/sst2", "glue/stsb"],
        "help pret": ["pretrain"],
        "manifest slurm squ": ["squad"],
    }
    lines = "".join(f"complete_words bertrain {words}\n" for words in asked)
    ask = f"""{cli_output(["completion", "bash"])}
complete_words() {{
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _bertrain "$1" "${{@: -1}}" 2>/dev/null
    printf '%s|' "${{COMPREPLY[@]}}"; echo
}}
complete_words bertrain ''; complete_words ./launch.sh ''
{lines}"""
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True, cwd=tmp_path)
    first, with_launcher, *found = (line.split("|")[:-1] for line in done.stdout.splitlines())
    assert sorted(first) == sorted([*PARSERS, "help"])
    assert set(with_launcher) - set(first) == {"bench", "docs", "test"}
    assert dict(zip(asked, map(sorted, found), strict=True)) == {words: sorted(want) for words, want in asked.items()}


def test_zsh_takes_values_and_lists() -> None:
    script = cli_output(["completion", "zsh"])
    assert script.startswith("#compdef bertrain launch.sh\n")
    assert re.search(r'"--grid=\[.*\]:grid:\(auto devlin small-bert\)"', script)
    assert re.search(r'"\*:YAML file of the run.*:_bertrain_file_of_finetune"', script)
    if shell := shutil.which("zsh"):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def cli_output(words: list[str]) -> str:
    command = [sys.executable, "-m", "finetune.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
