"""The command line: what each command does, refuses and returns. Workers and Ray are stand-ins here."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml
from corpora import make_corpus
from tokenizers import Tokenizer, models

from finetune.cli import main
from pretrain.common import records
from pretrain.common.commands import default_workers
from pretrain.common.errors import DivergedError, MachineError, StoppedError
from pretrain.common.worker import Worker
from pretrain.config import load_config
from pretrain.tracking import live

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small prepared corpus, which is copied."""
    return make_corpus(tmp_path_factory.mktemp("prepared") / "corpus", documents=20, vocabulary_size=500)


@pytest.fixture
def config_file(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on the corpus, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    shutil.copytree(prepared, tmp_path / "corpus")
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: trial\ncorpus: {dir: corpus, vocabulary: {size: 500}}\n"
        "model: {size: custom, layers: 1, hidden: 8, heads: 1}\n"
        "phases: [{sequence_length: 32, global_sequences: 8, steps: 3, peak_learning_rate: 1e-3}]\n"
    )
    return path


Calls = list  # what reached the stand-ins, in order: (who, arguments)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stand-ins for train.main, cluster.workers.launch.run, live.follow and records.append_end_event."""
    seen = Calls()

    @contextlib.contextmanager
    def follow(run_dir: Path, total_steps: int, **_: Any):
        seen.append(("follow", (run_dir, total_steps)))
        yield

    def stand_in(name: str, **attributes: Any) -> None:
        module = ModuleType(name)
        module.__dict__.update(attributes)
        package, _, leaf = name.rpartition(".")
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(sys.modules[package], leaf, module, raising=False)

    from cluster.workers import launch

    stand_in("pretrain.run.train", main=lambda request, worker: seen.append(("train", (request, worker))))
    monkeypatch.setattr(live, "follow", follow)
    monkeypatch.setattr(records, "append_end_event", lambda *given: seen.append(("end", given)))
    monkeypatch.setattr(launch, "run", lambda *given, **named: seen.append(("run", (given, named))))
    return seen


def cli(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip()


def add_checkpoint(folder: Path, name: str = "step-00000002") -> None:
    (folder / "checkpoints" / name).mkdir(parents=True)
    (folder / "checkpoints" / name / "manifest.json").write_text("{}")


def test_pretrain_records_the_run_and_starts_the_workers(config_file: Path, calls: Calls):
    """--workers overrides the file and --set."""
    assert cli("pretrain", config_file, "--set", "seed=5", "--set", "scheduling.workers=7", "--workers", "1") == 0
    (follow, run) = calls
    assert follow == ("follow", (Path("runs/trial"), 3))
    (target, request), named = run[1]
    assert target == "pretrain.run.train:main"
    assert (request.config["seed"], request.resume) == (5, False)
    json.dumps(request.config)  # it travels as JSON
    assert (named["name"], named["run_dir"], named["workers"]) == ("trial", Path("runs/trial"), 1)
    assert load_config("runs/trial/config.yaml") == load_config(config_file, ["seed=5"])
    environment = json.loads(Path("runs/trial/environment.json").read_text())
    assert environment["cpu_cores"] == len(os.sched_getaffinity(0))
    assert {"torch", "deepspeed", "ray"} <= set(environment["packages"])


def test_without_ray_it_trains_in_this_process(config_file: Path, calls: Calls):
    assert cli("pretrain", config_file, "--no-ray") == 0
    assert [name for name, _ in calls] == ["follow", "train"]
    request, worker = calls[1][1]
    assert isinstance(worker, Worker)
    assert (worker.rank, worker.world_size, request.resume) == (0, 1, False)


PLACE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
PLACE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(("rank", "expected"), [("0", ["follow", "train"]), ("1", ["train"])])
def test_under_torchrun_only_the_first_worker_checks_and_draws(config_file, calls, monkeypatch, rank, expected) -> None:
    for name, value in (PLACE | {"RANK": rank, "LOCAL_RANK": rank}).items():
        monkeypatch.setenv(name, value)
    assert cli("pretrain", config_file) == 0
    assert [name for name, _ in calls] == expected
    assert Path("runs/trial/config.yaml").exists() == (rank == "0")


def test_half_of_torchruns_variables_are_refused(config_file, calls, monkeypatch, capsys):
    """Such processes would all train the whole run, in one folder."""
    for given, message in (
        ({"RANK": "1"}, "RANK is '1' in the environment, but WORLD_SIZE is not set. Start the"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK is '0' in the environment, but MASTER_ADDR is not set. Start the"),
        (PLACE | {"RANK": "x"}, "RANK is 'x' and WORLD_SIZE '2' in"),
        (PLACE | {"RANK": "2"}, "RANK is '2' and WORLD_SIZE '2' in"),
        (PLACE | {"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x' and LOCAL_WORLD_SIZE '2' in"),
        *(
            (PLACE | {name: ""}, f"RANK is '0' in the environment, but {name} is not set. Start the")
            for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        ),
    ):
        with monkeypatch.context() as environment:
            for name in PLACE:
                environment.delenv(name, raising=False)
            for name, value in given.items():
                environment.setenv(name, value)
            for options in ((), ("--no-ray",)):
                assert cli("pretrain", config_file, *options) == 2
                assert error_of(capsys).startswith(f"error: {message}")
    assert not calls
    assert not Path("runs").exists()


def test_a_run_with_checkpoints_is_not_restarted_without_resume(config_file: Path, calls: Calls, capsys):
    add_checkpoint(Path("runs/trial"))
    assert cli("pretrain", config_file) == 2
    assert error_of(capsys) == (
        "error: runs/trial: already has checkpoints (latest step-00000002). Add --resume to continue that run, "
        "or choose another name or run_dir to start a new one."
    )
    assert calls == []
    assert cli("pretrain", config_file, "--set", "name=other") == 0


def test_a_config_that_no_run_wrote_is_not_replaced(config_file: Path, calls: Calls, capsys):
    Path("runs/trial").mkdir(parents=True)
    own = Path("runs/trial/config.yaml")
    own.write_text(f"# mine\n{config_file.read_text()}")
    assert cli("pretrain", own) == 2
    assert "runs/trial/config.yaml: no run wrote it" in error_of(capsys)
    assert own.read_text().startswith("# mine")
    own.unlink()
    assert cli("pretrain", config_file) == 0
    assert cli("pretrain", own) == 0  # that of a run which has no checkpoint yet


def test_resume_refuses_another_config_and_continues_with_other_workers(config_file: Path, calls: Calls, capsys):
    cli("pretrain", config_file)
    add_checkpoint(Path("runs/trial"))
    capsys.readouterr()
    assert cli("pretrain", config_file, "--resume", "--set", "phases.0.steps=4", "--set", "seed=1") == 2
    assert error_of(capsys) == (
        "error: runs/trial/config.yaml: the run was started with other settings: seed (0 -> 1). "
        "Resume with the old values, or choose another name or run_dir to start a new run."
    )
    assert load_config("runs/trial/config.yaml").seed == 0
    assert cli("pretrain", config_file, "--resume", "--set", "engine.zero_stage=2") == 0
    assert calls[-1][1][0][1].resume is True
    assert load_config("runs/trial/config.yaml").engine.zero_stage == 2


def test_resume_before_the_first_checkpoint_begins(config_file: Path, calls: Calls):
    assert cli("pretrain", config_file, "--resume") == 0
    assert [name for name, _ in calls] == ["follow", "run"]


def test_more_workers_than_cores_are_refused(config_file: Path, calls: Calls, capsys):
    many = len(os.sched_getaffinity(0)) + 1
    batch = f"phases.0.global_sequences={many}"
    assert cli("pretrain", config_file, "--workers", many, "--set", batch) == 3
    assert f"too few for {many} workers" in error_of(capsys)
    assert cli("pretrain", config_file, "--workers", many, "--set", batch, "--set", "scheduling.address=h:1") == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--set corpus.dir=nowhere", "nowhere: not a prepared corpus"),
        ("--set corpus.dir=torn", "torn/"),
        (
            "--set run_dir=run.yaml/trial",
            "run.yaml/trial/.lock: cannot write here (Not a directory).",
        ),
        ("--no-ray --set scheduling.workers=2", "--no-ray: trains in one process, but scheduling.workers is 2."),
        ("--set model.norm=layernorm", "model.norm: 'layernorm' is not one of .* did you mean layer_norm?"),
        ("--set model.activation=geluu", "model.activation: 'geluu' is not one of .* did you mean gelu?"),
        ("--set corpus.vocabulary.size=400", "corpus: has 500 vocabulary entries; the config has 400."),
        ("--set corpus.vocabulary.path=a.txt", "corpus: its vocabulary (500 entries) is not a.txt (7 entries)."),
        ("--set corpus.vocabulary.path=a.json", "corpus.vocabulary.kind: wordpiece, but a.json is"),
        ("--set corpus.vocabulary.path=bad.json", "bad.json: not a tokenizer.json"),
        (
            "--set corpus.vocabulary.lowercase=false",
            "corpus: its vocabulary was created with lowercase: true; the config has false.",
        ),
        (
            "--set corpus.vocabulary.strip_accents=false",
            "corpus: its vocabulary was created with strip_accents: true; the",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_workers_start(config_file, calls, capsys, words, expected) -> None:
    shutil.copytree("corpus", "torn")
    shard = next(Path("torn").glob("*.tokens.npy"))
    shard.write_bytes(shard.read_bytes()[:-2])
    Path("a.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n")
    Tokenizer(models.WordPiece({"b": 1, "a": 0, "c": 2}, unk_token="a")).save("a.json")
    Path("bad.json").write_text("[]")
    assert cli("pretrain", config_file, *words.split()) == 2
    assert re.match(re.escape(f"error: {expected}").replace(r"\.\*", ".*"), error_of(capsys))
    assert calls == []
    assert not Path("runs").exists()


def test_the_same_vocabulary(config_file: Path, calls: Calls):
    for override in ("size=900", "path=corpus/vocab.txt", "path=corpus/tokenizer.json"):
        assert cli("pretrain", config_file, "--set", f"corpus.vocabulary.{override}") == 0


def test_each_mistake_in_the_config_is_a_line(config_file: Path, capsys):
    assert cli("pretrain", config_file, "--set", "sed=1", "--set", "model.hiden=2") == 2
    assert error_of(capsys).splitlines() == [
        "error: --set sed=1: sed is not a known setting; did you mean seed?",
        "error: --set model.hiden=2: model.hiden is not a known setting; did you mean hidden?",
    ]


NOTHING = "s. No step is saved. Continue with --resume."


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> MagicMock:
    """What is called instead of the workers; the test says with which error it ends."""
    run = MagicMock()
    monkeypatch.setattr("cluster.workers.launch.run", run)
    return run


@pytest.mark.parametrize(
    ("error", "code", "said", "events"),
    [
        (MachineError("m"), 3, "error: m", []),
        (DivergedError("d"), 4, "error: d", [("diverged", "d", 0)]),
        (StoppedError("s."), 130, f"error: {NOTHING}", [("stop", NOTHING, 0)]),
        (KeyboardInterrupt(), 130, None, []),
    ],
)
def test_the_end_of_the_workers_is_the_exit_code(config_file, calls, fails, capsys, error, code, said, events) -> None:
    fails.side_effect = error
    assert cli("pretrain", config_file) == code
    assert said in (None, error_of(capsys))
    assert [given[1:] for what, given in calls if what == "end"] == events


@pytest.mark.parametrize(
    "command", [("pretrain", "run.yaml", "--resume"), ("export", "trial", "out"), ("report", "trial")]
)
def test_a_run_with_settings_of_another_version_is_refused_in_one_line(config_file: Path, command, capsys) -> None:
    run = config_file.parent / "runs/trial"
    add_checkpoint(run)
    (run / "metrics.jsonl").write_text('{"step": 2, "loss": 1.0}\n')
    (run / "config.yaml").write_text(f"{config_file.read_text()}gone: 1\nevaluation: {{gone: 2}}\n")
    assert cli(*command) == 2
    assert error_of(capsys) == "error: runs/trial/config.yaml: made by another version of bertrain. Train again."


def test_an_end_that_cannot_be_recorded_keeps_its_exit_code(config_file: Path, fails, monkeypatch, capsys):
    fails.side_effect = StoppedError("s.")
    monkeypatch.setattr(records, "append_end_event", MagicMock(side_effect=MachineError("disk full")))
    assert cli("pretrain", config_file) == 130
    assert error_of(capsys) == f"warning: the end of the run is not recorded: disk full\nerror: {NOTHING}"


def test_a_bug_keeps_its_traceback(config_file: Path, fails):
    fails.side_effect = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        cli("pretrain", config_file)


def test_dry_run_touches_nothing(config_file: Path, calls: Calls, capsys):
    assert cli("pretrain", config_file, "--dry-run", "--on", "8xH100", "--mean-length", "20") == 0
    text = capsys.readouterr().out
    assert text.startswith("Run\n  runs/trial: new\n\n")
    assert "Resolved config" not in text
    for part in ("Precision", "Parameters", "Memory per worker", "Work", "8 x H100", "20 documents"):
        assert part in text
    assert cli("pretrain", config_file, "--dry-run", "--show-config", "--set", "engine.precision=fp32") == 0
    resolved = capsys.readouterr().out.split("Resolved config\n")[1]
    assert yaml.safe_load(resolved)["model"]["intermediate"] == 32
    assert calls == []
    assert not Path("runs").exists()


def test_prepare_prepares_or_describes(config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    from pretrain.corpus import prepare

    monkeypatch.setattr(prepare, "prepare", lambda config, **_: f"prepared {config.corpus.dir}")
    assert cli("prepare", config_file) == 0
    line = re.compile(r"phases\.0: [\d,]+ sequences in an epoch, \d+\.\d tokens on average \(max \d+\)")
    first, second = capsys.readouterr().out.splitlines()
    assert first == "prepared corpus"
    assert line.fullmatch(second), second
    Path("a.txt").write_text("x" * 1_500_000)
    sources = "corpus.sources=[{kind: books, path: a.txt, name: novel}]"
    assert cli("prepare", config_file, "--dry-run", "--set", sources, "--set", "corpus.dir=new") == 0
    text = capsys.readouterr().out
    assert "novel: books, 1 file, 1.5 MB, weight 1" in text
    assert "new: new; 1.5 MB to read" in text


def test_two_at_once_in_one_run_folder_are_refused(config_file: Path, calls: Calls, capsys):
    from pretrain.run import preflight

    with preflight.locked_run(Path("runs/trial")):
        assert cli("pretrain", config_file) == 2
    assert error_of(capsys).startswith("error: runs/trial: another process is training in it.")
    assert calls == []
    assert cli("pretrain", config_file) == 0


def test_export_takes_a_run_by_folder_or_name_and_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from pretrain.checkpoint import hf

    seen = []
    monkeypatch.setattr(hf, "export_run", lambda *given, **_: seen.append(given) or "a part")
    monkeypatch.chdir(tmp_path)
    Path("runs/a").mkdir(parents=True)
    for given in ("a", "runs/a"):
        assert cli("export", given, "out") == 0
    assert cli("export", "b", "out") == 2
    assert cli("export", "a", "out", "--checkpoint", "best") == 0
    Path("a").mkdir()
    assert cli("export", "a", "out") == 0, "a folder comes before a name"
    run, out = Path("runs/a"), Path("out")
    assert seen == [(run, out, None), (run, out, None), (run, out, "best"), (Path("a"), out, None)]


def test_the_driver_loads_no_torch_before_workers_start(config_file: Path):
    """Reading and estimating a run must stay quick; only to settle a precision is the machine measured."""
    code = (
        "import sys; from finetune.cli import main\n"
        f"assert main(['pretrain', {str(config_file)!r}, '--dry-run', '--set', 'engine.precision=fp32']) == 0\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment)


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "runs/a", "--out", "gs://bucket/page.html"],
        ["prepare", "s3://bucket/run.yaml"],
        ["predict", "runs/a", "--text", "x", "--out", "s3://bucket/lines.jsonl"],
        ["evaluate", "runs/a", "--out", "s3://bucket/scores"],
        ["sweep", "a.yaml", "--submission", "s3://bucket/out"],
        ["demo", "--run-dir", "s3://bucket/run"],
    ],
)
def test_remote_addresses_are_refused(arguments: list[str], capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is a remote address; only local paths are supported." in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "option", "why"),
    [
        ("pretrain run.yaml --on here", "--on", "without --dry-run"),
        ("pretrain run.yaml --mean-length 20", "--mean-length", "without --dry-run"),
        ("pretrain run.yaml --show-config", "--show-config", "without --dry-run"),
        ("sweep a.yaml --show-config", "--show-config", "without --dry-run"),
        ("finetune a.yaml --seeds 2 --resume", "--resume", "with --seeds"),
        ("finetune a.yaml --parallel 2", "--parallel", "without --seeds N"),
        ("list --allow-plain-http", "--allow-plain-http", "without --address"),
        ("doctor --cluster --address http://127.0.0.1:1", "--cluster", "with --address"),
        ("adapt a.txt --from a --out b --replay 0.3", "--replay", "without --general"),
        ("demo --minutes 3 --set phases.0.steps=4", "--minutes", "with --set phases.0.steps"),
        ("RANK=0 pretrain run.yaml --workers 2", "--workers", "under torchrun"),
        ("RANK=0 finetune a.yaml --ray", "--ray", "under torchrun"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    config_file, calls, monkeypatch, capsys, words, option, why
) -> None:
    Path("a").mkdir()
    given = words.removeprefix("RANK=0 ")
    for name, value in PLACE.items() if given != words else ():
        monkeypatch.setenv(name, value)
    assert cli(*given.split()) == 2
    assert error_of(capsys).startswith(f"error: {option}: has no effect {why}")
    assert calls == []
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("environment", "is_terminal", "red"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "dumb"}, True, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "0"}, False, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_an_error_is_red_on_a_terminal(environment, is_terminal, red, tmp_path: Path) -> None:
    """That of the console command, and that of launch.sh, which has no .venv."""
    shutil.copy(ROOT / "launch.sh", tmp_path)
    (tmp_path / "docs/reference").mkdir(parents=True)
    (tmp_path / "docs/reference/commands.md").touch()
    given = {name: value for name, value in os.environ.items() if name not in ("TERM", "NO_COLOR")} | environment
    for command in ([sys.executable, "-m", "finetune.cli", "xyzzy"], [tmp_path / "launch.sh", "xyzzy"]):
        ours, theirs = os.openpty() if is_terminal else os.pipe()
        with os.fdopen(ours, "rb", buffering=0) as shown:
            assert subprocess.run(command, cwd=ROOT, stderr=theirs, env=given, check=False).returncode == 2
            os.close(theirs)
            head = b"\x1b[1;31merror:\x1b[0m" if red else b"error:"
            assert shown.read(4096).startswith(head + b" 'xyzzy' is not a command")


def test_what_a_message_quotes_does_nothing_to_the_terminal(capsys):
    assert main(["prepare", "no\x1b[2J\u2028such.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no\\x1b[2J\\u2028such.yaml: cannot be read")


@pytest.mark.parametrize(
    ("what", "backend", "code", "late"),
    [
        ("raise InputError('wrong')", "nccl", 2, False),
        ("raise RuntimeError('a bug')", "nccl", 1, False),
        ("raise InputError('wrong')", "gloo", 2, True),
        ("print('fine')", "nccl", 0, True),
    ],
)
def test_a_failed_process_does_not_wait_for_a_group_that_is_left(what, backend, code, late) -> None:
    """NCCL's destructor may wait for other ranks; `late` is printed by what runs when the interpreter ends."""
    program = f"""
import atexit, sys, types
from pretrain.common.commands import run_for_exit_code
from pretrain.common.errors import InputError
sys.modules["torch.distributed"] = types.SimpleNamespace(is_initialized=lambda: True, get_backend=lambda: {backend!r})
atexit.register(lambda: print("late"))
def run():
    {what}
sys.exit(run_for_exit_code(run))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("late" in done.stdout) == late
    assert not code or ("error: wrong" in done.stderr) or ("RuntimeError: a bug" in done.stderr)


def test_a_stopped_stage_leaves_the_advice_to_its_command() -> None:
    again = StoppedError(f"stopped at step 2 of 4.{StoppedError.CONTINUE}").for_rerun()
    assert str(again) == "stopped at step 2 of 4. Run the same command again to continue."


@pytest.mark.parametrize(("gpus", "cores", "expected"), [(0, 1, 1), (0, 2, 2), (0, 64, 2), (1, 16, 1), (8, 16, 8)])
def test_every_gpu_has_a_worker(gpus: int, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert default_workers() == expected
