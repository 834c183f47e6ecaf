"""What is checked before a job is sent, and the one-line errors of a client."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest
import requests
import yaml
from ray.job_submission import JobStatus

import pretrain
from cluster.jobs import client, entrypoint
from cluster.jobs.client import Job
from cluster.jobs.command import follow_log
from cluster.jobs.submission import make_job, parse_run
from cluster.workers import local
from cluster.workers.address import check_dashboard
from cluster.workers.launch import check_address
from finetune.cli import job_functions, main
from pretrain.common.errors import InputError, MachineError
from pretrain.config import load_config
from tests.chaos import wait_for
from tests.distributed import run_program
from tests.json_server import serving

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    phase = {"sequence_length": 32, "global_sequences": 8, "steps": 4, "peak_learning_rate": 1e-3}
    values = {"name": "trial", "corpus": {"dir": "corpora/one"}, "phases": [phase]}
    path.write_text(yaml.safe_dump(values))
    return path


def read(config: Path, *more: str, workers: str | None = None) -> Job:
    command, path, given = parse_run(["pretrain", str(config), *more])
    return make_job(job_functions()[command], path, folder="/shared", workers=workers, **given)


def ray_job(name: str, **fields: Any) -> Any:
    """A running job as Ray's client describes it."""
    usual = {"start_time": 0, "end_time": None, "driver_exit_code": None, "message": "", "status": JobStatus.RUNNING}
    return SimpleNamespace(submission_id=name, **{**usual, **fields})


def jobs_of(ray: Any = None) -> client.JobsClient:
    """Our client of a cluster, with `ray` as Ray's."""
    cluster = client.JobsClient.__new__(client.JobsClient)
    cluster.address = cluster.safe_url = "http://127.0.0.1:8265"
    cluster.ray_client = ray
    return cluster


def test_a_checkpoint_on_the_cluster_decides_model_and_vocabulary(config: Path) -> None:
    """Defaults of this machine would contradict it there."""
    job = read(config, "--from", "/shared/bert", "--set", "model.hidden_dropout=0.0")
    assert job.config["start_from"] == "/shared/bert"
    given = read(config).config["model"]
    assert job.config["model"]["hidden_dropout"] == 0.0
    assert len(job.config["model"]) < len(given)
    assert "lowercase" not in job.config["corpus"]["vocabulary"]


def test_a_run_at_an_address_is_known_by_it(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it trains, the cluster decides; this machine can see what is in the folder that it would have here."""
    monkeypatch.setenv("BERTRAIN_RUNS", str(tmp_path / "shared"))
    metadata = client.job_metadata(read(config, "--set", "run_dir=s3://bucket/trial"))
    assert metadata["runs"] == str(tmp_path / "shared")
    assert metadata["run_dir"] == "s3://bucket/trial"
    assert client.job_metadata(read(config))["run_dir"] == "/shared/runs/trial"
    job = ray_job("trial", metadata=metadata)
    assert "run folder s3://bucket/trial" in client.describe(job)
    assert client.progress_lines(job) == []
    folder = tmp_path / "shared/s3/bucket/trial"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": 2.0, "tokens_per_second": 7}) + "\n")
    assert client.progress_lines(job) == ["step 3, loss 2.0000, 7 tokens/s"]


def given_job(job: client.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment in which a cluster runs it."""
    metadata = {**client.job_metadata(job), "job_submission_id": "trial"}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"metadata": metadata}))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")


def test_a_cluster_without_the_console_command_is_named() -> None:
    job = ray_job("mini", status=JobStatus.FAILED, driver_exit_code=127, metadata={"resumes": "yes"})
    code, state = jobs_of().exit_status(job)
    assert code == MachineError.exit_code
    assert "no `bertrain` on the PATH" in state


WHERE = [("", "/mine", "/mine"), ("/its", "/mine", "/its"), ("", "", "")]


@pytest.mark.parametrize(("of_cluster", "mine", "expected"), WHERE)
def test_a_job_trains_where_the_cluster_says_or_its_client(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_cluster: str, mine: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BERTRAIN_RUNS", mine)
    given_job(make_job(pretrain.train, config, folder=tmp_path), monkeypatch)
    monkeypatch.setenv("BERTRAIN_RUNS", of_cluster)
    monkeypatch.setattr(entrypoint, "wait_in_queue", lambda _: None)
    monkeypatch.setattr("pretrain.run.api.train", lambda config, resume: None)
    assert main(["job"]) == 0
    assert os.environ["BERTRAIN_RUNS"] == expected


def test_a_job_calls_what_the_command_line_calls(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its config in memory: a job that is killed leaves no file behind."""
    given_job(make_job(pretrain.prepare, config, overrides={"seed": 5}, folder=tmp_path), monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pretrain.run.api.prepare", load_config)
    assert main(["job"]) == 0
    printed = capsys.readouterr().out
    assert "seed=5" in printed
    assert "address='127.0.0.1:1'" in printed


def test_a_run_has_one_name_everywhere(config: Path) -> None:
    job = read(config, "--set", "seed=7")
    assert (job.name, job.config["tracking"]["run_id"], job.config["seed"]) == ("trial", "trial", 7)
    assert job.run_dir == "runs/trial"
    assert json.loads(json.dumps(job.config)) == job.config
    for name in ("../up", "a/b", "-x", "x" * 64, "a b", "$(id)"):
        with pytest.raises(InputError, match="name"):
            read(config, "--set", f"name={json.dumps(name)}")
    with pytest.raises(InputError, match=r"tracking\.project: 'team/bert' must be at most"):  # as W&B would
        read(config, "--set", "tracking.project=team/bert", "--set", "tracking.wandb=auto")


@pytest.mark.parametrize(("given", "expected"), [(None, (1, 1)), ("3", (3, 3)), ("2-4", (2, 4)), ("2-2", (2, 2))])
def test_workers(config: Path, given: str | None, expected: tuple[int, int]) -> None:
    assert read(config, workers=given).workers == expected
    for wrong in ("0", "4-2", "two", "1-", "-3", ""):
        with pytest.raises(InputError, match="expected an integer >= 1 or a range"):
            read(config, workers=wrong)


SECRETS = ("apikey", "WANDB_API_KEY", "x-api-key", "HF_TOKEN", "dbPassword", "passwd", "Authorization", "credentials")


@pytest.mark.parametrize(
    ("text", "is_secret"),
    [
        *((f"{{{name}: hunter2}}", True) for name in (*SECRETS, "client-secret", "AWS_SECRET")),
        ("{token: [hunter2]}", True),
        ("{password: {value: hunter2}}", True),
        ("{secrets: [{a: [hunter2]}]}", True),
        ("{tokens: 2000}", False),
        ("{max_tokens: 128, token_count: 5, num_keys: 3, keys: 7}", False),
        ("{token_path: /run/token}", False),
        ("{token: null, password: '', use_auth_token: true}", False),
        ("{monkey: a, hotkeys: b, compass: north, tokenizer: x}", False),
    ],
)
def test_a_secret_in_a_config_is_refused(config: Path, text: str, is_secret: bool) -> None:
    given = ["--set", f"engine.deepspeed={{any: {text}}}", "--set", "corpus.shard_tokens=2000"]
    if not is_secret:
        assert read(config, *given).config["corpus"]["shard_tokens"] == 2000
        return
    with pytest.raises(InputError, match=r"engine\.deepspeed\.any\.[A-Za-z_-]+[\w.]* looks like a secret") as caught:
        read(config, *given)
    assert not re.search("hunter2", str(caught.value))
    assert "\n" not in str(caught.value)


# ---- the command line, against what answers


def run(tmp_path: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """The exit code of a command, and what it printed."""
    own = {"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    done = run_program(main, list(arguments), env={**os.environ, **own, **environment})
    return done.returncode, done.stdout + done.stderr


def listed(nodes: Sequence[dict[str, Any]], query: dict[str, list[str]]) -> dict[str, Any]:
    """As Ray's aggregator does it: filtered, sorted by id, and cut."""
    filters = list(zip(query.get("filter_keys", ()), query.get("filter_values", ()), strict=True))
    found = [node for node in nodes if all(node[key] == value for key, value in filters)]
    cut = sorted(found, key=lambda node: node["node_id"])[: int(query["limit"][0])]
    counts = dict.fromkeys(("total", "num_after_truncation", "num_filtered"), len(found))
    return {"result": True, "msg": "", "data": {"result": {"result": cut, **counts}}}


@contextlib.contextmanager
def dashboard(
    token: str = "", nodes: Sequence[dict[str, Any]] = (), refuses: bool = False
) -> Iterator[tuple[str, list[str | None]]]:
    """The URL of a dashboard without jobs, and the Authorization of each request that it gets."""
    seen: list[str | None] = []
    version = {"version": "4", "ray_version": "2.60.0", "ray_commit": "x", "session_name": "s"}

    def answer(path: str, headers: Mapping[str, str]) -> tuple[int, Any]:
        sent = headers.get("Authorization")
        seen.append(sent)
        if refuses:  # it knows nobody's token
            return 403, "Forbidden"
        if path == "/api/version":
            return 200, version
        if token and sent != f"Bearer {token}":
            return (403 if sent else 401), {}
        if urlsplit(path).path == "/api/v0/nodes" and nodes:
            return 200, listed(nodes, parse_qs(urlsplit(path).query))
        return (200 if path == "/api/jobs/" else 500), []

    with serving(answer) as url:
        yield url, seen


@pytest.mark.parametrize("token", ["", "c0ffee" * 10])
def test_the_token_goes_to_the_given_address_alone_and_its_lack_is_warned_of(
    tmp_path: Path, config: Path, token: str
) -> None:
    """The environment may name another cluster, or a proxy, which would get the token."""
    with dashboard(token) as (address, seen), dashboard() as (other, seen_there):
        given = dict.fromkeys(("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "http_proxy"), other) if token else {}
        given |= {"RAY_AUTH_TOKEN": token, "no_proxy": "", "NO_PROXY": ""} if token else {}
        _, output = run(tmp_path, "submit", "--address", address, "--", "pretrain", str(config), **given)
    warned = f"warning: {address}: this cluster accepts jobs without a token"
    assert (warned in output) == (not token)
    assert f"error: {address}: did not report its nodes" in output  # it continued
    assert set(seen) == ({None, f"Bearer {token}"} if token else {None})
    assert seen_there == []
    assert "Traceback" not in output
    assert "c0ffee" not in output


def test_a_proxy_is_avoided_for_one_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "inside.example")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    for _ in range(2):
        with pytest.raises(MachineError, match="No cluster answers"):
            check_dashboard("http://127.0.0.1:9")
    assert os.environ["no_proxy"] == "inside.example,127.0.0.1"


def test_the_own_cluster_gets_its_own_token(tmp_path: Path) -> None:
    """Nobody else can know it, so RAY_AUTH_TOKEN is another cluster's."""
    (tmp_path / "token").write_text("c0ffee" * 10)
    (tmp_path / "bertrain").mkdir()
    with dashboard("c0ffee" * 10) as (address, _):
        cluster = {"folder": str(tmp_path), "address": "127.0.0.1:1", "dashboard": address}
        (tmp_path / "bertrain/cluster.json").write_text(json.dumps(cluster))
        assert run(tmp_path, "list", RAY_AUTH_TOKEN="of another cluster") == (0, "no jobs\n")


def test_a_token_is_not_sent_unencrypted(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The name is resolved, but nothing is sent by http to another machine, even if it is only one of two addresses."""
    addresses = {"far": ["10.1.2.3"], "both": ["127.0.0.1", "10.1.2.3"], "near": ["127.0.0.1", "::1"]}
    requested: list[str] = []

    def get(url: str, **_: object) -> None:
        requested.append(url)
        raise requests.ConnectionError("nobody there")

    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_: [(0, 0, 0, "", (one, 0)) for one in addresses[host]])
    monkeypatch.setattr(requests, "get", get)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "c0ffee")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    refused = "over http the token, or the password, would leave this machine unencrypted"
    for command in (["status", "x"], ["submit", "--", "pretrain", str(config)], ["doctor"], ["list"]):
        for address in ("http://far:8265", "http://both:8265"):
            assert main([command[0], "--address", address, *command[1:]]) == 2
            errors = capsys.readouterr().err
            assert errors.startswith(f"error: {address}: {refused}")
            assert errors.count("\n") == 1
            assert requested == []
    for allowed in (["http://near:8265"], ["https://far:8265"], ["http://far:8265", "--allow-plain-http"]):
        assert main(["list", "--address", *allowed]) == 3
        assert requested.pop().startswith(allowed[0])
        assert "No cluster answers" in capsys.readouterr().err
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert main(["list", "--address", "http://far:8265"]) == 3  # there is no secret to protect
    requested.clear()
    for secret in ("me:hunter2", "hunter2", ":hunter2"):  # but a password, or a token in its place
        assert main(["list", "--address", f"http://{secret}@far:8265"]) == 2
        errors = capsys.readouterr().err
        assert requested == []
        assert "http://***@far:8265" in errors
        assert "hunter2" not in errors


WITH_PASSWORDS = ("http://me:hunter2@127.0.0.1:9", "http://me:hunter2@127.0.0.1:x", "http://me:hunter2@[::1")
WITH_PASSWORDS += ("me:hunter2@127.0.0.1:9", "ftp://me:hunter2@127.0.0.1", "http://me:hun/hunter2@127.0.0.1:9")
WITH_PASSWORDS += ("http://hunter2@127.0.0.1:9", "http://me:a@hunter2@x:0", "http://me:hunter2@127.0.0.1:9/#@")


@pytest.mark.parametrize("address", WITH_PASSWORDS)
def test_a_password_in_an_address_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], address: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for command in (["list"], ["doctor"]):
        assert main([*command, "--address", address]) in (2, 3)
        output = capfd.readouterr()
        assert "hunter2" not in output.out + output.err
        assert output.err.count("\n") == 1
    with pytest.raises(InputError, match=r"scheduling\.address") as caught:
        check_address(address)
    assert "hunter2" not in str(caught.value)


def test_an_address_that_is_not_a_url_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for address in ("auto", "http://[::1", "http://", "http://x:99999", "http:///a", "//x", "http://\ufffd:y"):
        assert main(["list", "--address", address]) == 2
        errors = capsys.readouterr().err
        assert "is not the URL of a Ray dashboard" in errors
        assert errors.count("\n") == 1


def test_a_server_that_does_not_answer(tmp_path: Path, config: Path) -> None:
    """Ray's own client would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code, output = run(tmp_path, "submit", "--address", address, "--", "pretrain", str(config))
    assert code == 3
    assert output.startswith(f"error: No cluster answers at {address} (")
    assert output.count("\n") == 1


def test_a_wrong_token(tmp_path: Path, config: Path) -> None:
    with dashboard(refuses=True) as (address, _):
        code, output = run(tmp_path, "submit", "--address", address, "--", "pretrain", str(config))
        assert code == 2
        assert output.startswith(f"error: {address}: the cluster rejects this token. Put the cluster's token into RAY_")
        assert output.count("\n") == 1
        address = address.replace("//", "//me:hunter2@")
        code, output = run(tmp_path, "list", "--address", address, RAY_AUTH_TOKEN="wrong")
    assert code == 2
    assert "rejects this token. Unset RAY_AUTH_TOKEN, which overrides files, and put the" in output
    assert "//***@127.0.0.1" in output
    assert "hunter2" not in output


@pytest.mark.parametrize(
    ("options", "arguments", "code", "expected"),
    [
        ([], [], 2, "No cluster is running on this machine. Give --address URL, or start one with ./launch.sh up."),
        (["--address", "http://127.0.0.1:9"], [], 3, "No cluster answers at http://127.0.0.1:9 ("),
        (["--workers", "1" * 5000], [], 2, "expected an integer >= 1 or a range"),
        (["--dir", "s3://b/f"], [], 2, "is a remote address"),
        ([], ["--workers", "2"], 2, "such as --workers, go before it"),
        ([], ["--resume"], 2, "Jobs always resume"),
        ([], ["--set", "phasess=1"], 2, "did you mean phases"),
        ([], ["finetune", "{config}", "--from", "s3://b"], 2, "does not name a file or folder"),
        ([], ["pretrain", "nowhere.yaml"], 2, "nowhere.yaml"),
    ],
)
def test_mistakes_are_reported_before_anything_is_sent(
    tmp_path: Path, config: Path, options: list[str], arguments: list[str], code: int, expected: str
) -> None:
    command = arguments if arguments and not arguments[0].startswith("--") else ["pretrain", "{config}", *arguments]
    found, output = run(tmp_path, "submit", *options, "--", *(part.format(config=config) for part in command))
    assert found == code
    assert expected in output
    assert "Traceback" not in output


def test_the_list_of_jobs_shows_names_as_they_are(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Whoever reaches the cluster names jobs."""
    job = ray_job("[/red]a\x1b[2J", metadata={"bertrain": "[bold]"})
    monkeypatch.setattr(client, "JobsClient", lambda *_, **__: SimpleNamespace(jobs=lambda: [job], queued=lambda _: {}))
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert "[/red]a\\x1b[2J" in shown
    assert "[bold]" in shown


def test_a_job_that_waits_is_named_as_such(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """To Ray it is running, like the job that it waits for and one that has waited."""
    outputs = {"first": "step 1\n", "started": "started: queued behind first\nstarted: starts\n"}
    outputs["waits"] = "waits: queued behind first, started\n"
    asked = {"bertrain": "pretrain", "workers": "1"}
    jobs = [ray_job(name, metadata=asked, start_time=number) for number, name in enumerate(outputs)]
    cluster = jobs_of(SimpleNamespace(list_jobs=lambda: jobs[::-1], get_job_logs=outputs.__getitem__))
    monkeypatch.setattr(client, "JobsClient", lambda *_, **__: cluster)
    assert main(["list"]) == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()[1:]] == ["running", "running", "queued"]
    assert main(["status", "waits"]) == 0
    assert capsys.readouterr().out.startswith("waits: queued behind first, started\n")


# ---- the cluster of `up`


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nodes_end_with_up_however_it_ends(tmp_path: Path, number: signal.Signals) -> None:
    """What it started ends, and nothing else; its folder with the token is gone."""
    # A child of a node outlives it unless its session is ended.
    node = "".join(line for line in local.NODE_PROGRAM.splitlines(True) if " ray" not in line and "main()" not in line)
    node += "import subprocess, time; subprocess.run(['sleep', '60']); time.sleep(60)"
    code = f"from cluster.workers import local; local.NODE_PROGRAM = {node!r}; local.up(1, 1)"
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    with (
        subprocess.Popen(["sleep", "60"], start_new_session=True) as other,
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment) as up,
    ):
        try:
            wait_for(lambda: len(psutil.Process(up.pid).children(recursive=True)) == 2)
            below = psutil.Process(up.pid).children(recursive=True)
            folder = Path(json.loads((tmp_path / "bertrain/cluster.json").read_text())["folder"])
            assert (folder / "token").stat().st_mode & 0o777 == 0o600
            up.send_signal(number)
            # CPython ends by the signal, though it was handled, if it came while a library executed a string.
            assert up.wait(30) in ((0, -number) if number == signal.SIGINT else (-number,))
            psutil.wait_procs(below, timeout=10)
            assert not [one for one in below if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
            wait_for(lambda: not folder.exists(), 5)
            assert other.poll() is None
        finally:
            other.kill()
            up.kill()


def test_up_with_an_unusable_state_folder(tmp_path: Path) -> None:
    """It leaves no folder with a token behind."""
    (tmp_path / "file").touch()
    before = set(Path("/tmp").glob("bertrain-*/token"))
    code, output = run(tmp_path, "up", XDG_STATE_HOME=str(tmp_path / "file"))
    assert code == 2
    assert "cluster.json: cannot write here" in output
    assert output.count("\n") == 1
    assert not set(Path("/tmp").glob("bertrain-*/token")) - before


def test_nodes_start_from_a_path_without_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray splits the commands of its own processes at spaces. A node that joins finds the link there already."""
    (tmp_path / "two words").mkdir()
    python = Path(sys.executable)
    (tmp_path / "two words/venv").symlink_to(python.parent.parent)
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/two words/venv/{python.parent.name}/{python.name}")
    started: list[tuple[str, str]] = []
    real: Any = subprocess.Popen

    def start(command: list[str], *, env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        started.append((command[0], env["PATH"].partition(":")[0]))
        return real(["true"], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    (tmp_path / "cluster").mkdir()
    with contextlib.ExitStack() as ends:
        for _ in range(2):
            local.start_node(tmp_path / "cluster", 1, [], ends)
    for program, folder in started:
        assert " " not in program + folder
        assert Path(program).samefile(python)
        assert Path(folder).samefile(python.parent)


# ---- the output of a job


def following(monkeypatch: pytest.MonkeyPatch, ray: Any) -> client.JobsClient:
    monkeypatch.setattr(client.JobsClient, "get", lambda *_: None)
    return jobs_of(ray)


def test_a_lost_connection_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ray:
        async def tail_job_logs(self, _: str) -> AsyncIterator[str]:
            yield "step 1\n"
            raise RuntimeError("WebSocket connection closed unexpectedly with close code 1006")

    pieces = following(monkeypatch, Ray()).follow("mini")
    assert next(pieces) == "step 1\n"
    lost = r"8265: the connection was lost \(.* 1006\)\. mini may still be running: `logs"
    with pytest.raises(MachineError, match=lost):
        next(pieces)


def test_ctrl_c_ends_following_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Ray:
        closed = False

        async def tail_job_logs(self, _: str) -> AsyncIterator[str]:
            try:
                yield "step 1\n"
                asyncio.get_running_loop().call_soon(signal.default_int_handler, signal.SIGINT, None)
                await asyncio.sleep(60)
            finally:
                self.closed = True

    ray = Ray()
    assert follow_log(following(monkeypatch, ray), "mini") == 130
    assert ray.closed
    assert "mini: still running" in capsys.readouterr().err


@pytest.mark.parametrize("error", [requests.ConnectionError, requests.Timeout, ConnectionError])
def test_a_head_that_is_away_is_not_a_stranger(error: type[Exception]) -> None:
    cluster = jobs_of()
    advice = r"the cluster does not answer now .* run the same command again later"
    with pytest.raises(MachineError, match=advice), cluster.one_line_errors():
        raise error("refused")


@pytest.mark.parametrize(
    ("log", "folder", "code", "said"),
    [
        ("error: stopped at step 9 of 80; checkpoint step-00000009 is saved.\n", 0, 75, "checkpoint step-00000009 is"),
        (
            "error: stopped while no workers ran. Checkpoint step-00000004 is saved.",
            0,
            75,
            "checkpoint step-00000004 is",
        ),
        ("error: stopped before the next step. No step is saved. Continue with --resume.\n", 0, 130, "no step is"),
        ("step 7/80  loss 6.1\n", 5, 75, "checkpoint step-00000005 is"),  # it was killed
        ("", 0, 130, "no step is"),  # before it started
        ("error: x. Checkpoint step-00000006 is saved.\nwarning: W&B\n", 5, 75, "checkpoint step-00000006 is"),
        ("step 900/1000  loss 6.1\n", -1, 75, "does not say"),  # killed on another machine
        ("INFO Runtime env is setting up.\nmini: queued behind other\n", -1, 130, "no step is"),
        ("checkpoint step-00000003 is saved\nruns/mini: finished.\nmini: finished\n", 0, 0, "had finished"),
    ],
)
def test_a_stopped_training_says_what_is_saved(tmp_path: Path, log: str, folder: int, code: int, said: str) -> None:
    checkpoint = tmp_path / f"run/checkpoints/step-{folder:08d}"
    if folder >= 0:
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").touch()
    metadata = {"resumes": "yes", "run_dir": str(tmp_path / "run")}
    jobs = jobs_of(SimpleNamespace(get_job_logs=lambda _: log))
    found = jobs.exit_status(ray_job("mini", status=JobStatus.STOPPED, metadata=metadata))
    assert found[0] == code
    assert said in found[1]


# ---- what a cluster holds


def test_dead_nodes_hide_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray lists 100 nodes unless more are requested, and remembers a thousand dead ones."""
    others = {**dict.fromkeys(("node_ip", "node_name", "state_message"), ""), "start_time_ms": 0, "end_time_ms": 0}
    others |= {"resources_total": {}, "labels": {}, "is_head_node": False}
    nodes = [{**others, "node_id": f"{n:04}", "state": "DEAD" if n < 150 else "ALIVE"} for n in range(300)]
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with dashboard(nodes=nodes) as (address, _):
        assert [node["node_id"] for node in client.alive_nodes(address)] == [node["node_id"] for node in nodes[150:]]


def a_node(cpus: float, memory_gib: float = 0, *, head: bool = False) -> dict[str, Any]:
    return {"resources_total": {"CPU": cpus, "memory": memory_gib * 2**30}, "is_head_node": head}


def test_a_cluster_that_is_too_small_may_be_waited_for(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    cluster = jobs_of()
    monkeypatch.setattr(client.JobsClient, "jobs", lambda _: [])
    monkeypatch.setattr(client.JobsClient, "start", lambda _, name, *__: started.append(name))
    monkeypatch.setattr(client, "alive_nodes", lambda _: [a_node(0, 8, head=True)])
    with pytest.raises(MachineError, match=r"has 0 CPU cores.* If nodes will be added, use --wait-for-nodes\."):
        cluster.submit(read(config))
    assert not started
    cluster.submit(read(config), wait_for_nodes=True)
    assert started == ["trial"]


def test_a_head_is_not_filled_with_jobs_that_wait() -> None:
    nodes = [a_node(64, 900), a_node(4, 5, head=True)]
    client.check_head(nodes, 50, "http://head:8265")
    full = r"has 60 running or queued jobs, the most that its head node's memory allows \(5\.0 GiB, 90 MiB each\)"
    with pytest.raises(MachineError, match=full):
        client.check_head(nodes, 60, "http://head:8265")
