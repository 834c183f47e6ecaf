"""Settings and fixtures of all tests: no network, API keys, external cluster or GPU; one thread per process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.object_store import FaultyProxy

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", WANDB_MODE="offline", MPLBACKEND="agg")
for name in ("WANDB_API_KEY", "RAY_ADDRESS", "FORCE_COLOR"):
    os.environ.pop(name, None)
# Tests that a shell runs in the background ignore SIGINT, and so would the processes that they stop with it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Rates that tests measure or fake must not enter the user's cache.
os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / f"bertrain-tests-{os.getuid()}")
# Tests multiply small matrices in many processes: with more threads each, they would only wait for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The time of an example depends only on how busy the machine is.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Test files that are skipped if a package is missing, as on a GPU machine with few packages.
_PACKAGES = {
    "test_cluster": "ray",
    "test_corpus_ray": "ray",
    "test_submission": "ray",
    "test_object_storage": "moto",
    "test_stored_runs": "moto",
    "test_streamed": "moto",
    "test_runs": "wandb_workspaces",
}
_WORKER_BYTES = 3 << 30  # peak memory of a pytest worker: in a test with two training processes, or with Ray


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests except with `-m gpu`: the others expect results of a CPU."""
    if config.option.markexpr.strip() != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes of `-n auto`: one per core for the whole suite, 0 for selected tests.

    Selected tests are few, or run with -s, or have marks: those with marks start clusters, one at a time.
    """
    option, given = config.option, config.args_source is config.ArgsSource.ARGS
    named = given and not all(Path(one).is_dir() for one in config.args)
    marked = option.markexpr not in config.getini("addopts")
    if named or marked or option.keyword or config.getoption("lf", False) or option.capture == "no":
        return 0
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, psutil.virtual_memory().available // _WORKER_BYTES, 16))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of `_PACKAGES` that cannot run here."""
    missing = {file: package for file, package in _PACKAGES.items() if importlib.util.find_spec(package) is None}
    for item in items:
        if (package := missing.get(item.path.stem)) is not None:
            item.add_marker(pytest.mark.skip(reason=f"{package} is not installed"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus, which tests must not change."""
    from corpora import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpora") / "one", documents=60, vocabulary_size=300)


@pytest.fixture(scope="session")
def s3() -> Iterator[FaultyProxy]:
    """An S3 server for all tests of a process."""
    from tests.object_store import s3_server

    with s3_server() as proxy:
        yield proxy


@pytest.fixture
def proxy(s3: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyProxy:
    """The server with an empty bucket, which s3:// addresses of this process and its children use."""
    from tests.object_store import point_to

    point_to(s3, tmp_path / "cache", monkeypatch)
    s3.reset()
    return s3


@pytest.fixture(params=["moto", *(pytest.param(one, marks=pytest.mark.stores) for one in ("gs", "az", "s3"))])
def bucket(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, FaultyProxy]]:
    """The address of an empty bucket on moto or, with `-m stores`, on another store; and the proxy in front of it."""
    from tests.object_store import BUCKET, real_store

    is_moto = request.param == "moto"
    moto = contextlib.nullcontext(request.getfixturevalue("proxy")) if is_moto else None
    with moto or real_store(request.param, tmp_path, monkeypatch) as proxy:
        yield f"{'s3' if is_moto else request.param}://{BUCKET}", proxy
