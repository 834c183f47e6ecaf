"""Models of the Hugging Face Hub: which files are fetched, and what is said where none can be."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fsspec
import httpx2
import pytest
from huggingface_hub import constants

from finetune.cli import main
from pretrain.common.errors import MachineError
from pretrain.storage.objects import ObjectStore
from pretrain.storage.runs import fetched_model
from tests.json_server import serving
from tests.object_store import forget_clients

MODEL, SHARD = "hf://owner/name", "weights-of-1.safetensors"
INDEX = {"weight_map": {"a": SHARD, "b": "../model.safetensors"}}
SMALL = ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "modules.json", "1_Pooling/config.json")
SMALL += ("encoder/modules.json", "encoder/1_Pooling/config.json", "encoder/sentence_bert_config.json")
OTHERS = ("README.md", "tf_model.h5", "onnx/config.json", "onnx/model.onnx", "model.fp16.safetensors")
OTHERS += ("encoder/model.safetensors",)
TORCH = ("pytorch_model.bin", "training_args.bin")


class Hub:
    """A repository, as the Hub answers."""

    def __init__(self) -> None:
        self.files: dict[str, Any] = {}
        self.failures: list[tuple[Any, ...]] = []  # the next answers

    def answer(self, path: str, _: Any) -> tuple[Any, ...]:
        parts = unquote(path.split("?")[0]).strip("/").split("/")
        if self.failures:
            return self.failures.pop(0)
        if parts[0] != "api":
            return 200, self.files["/".join(parts[4:])]
        if "tree" not in parts:
            return 200, {"id": "owner/name"}
        folder = "".join(f"{part}/" for part in parts[6:])
        sizes = {name: len(json.dumps(value)) for name, value in self.files.items() if name.startswith(folder)}
        rows = [{"type": "file", "oid": name, "size": size, "path": name} for name, size in sizes.items()]
        return (200, rows) if rows or not folder else (404, {}, "EntryNotFound")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub()
    monkeypatch.setenv("BERTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    forget_clients(monkeypatch)
    fetched_model.cache_clear()
    with serving(made.answer) as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        yield made


@pytest.mark.parametrize("inner", ["", "0_Transformer/"])
@pytest.mark.parametrize(
    ("there", "weights"),
    [
        (("model.safetensors", "model.safetensors.index.json", SHARD, *TORCH), {"model.safetensors"}),
        (("model.safetensors.index.json", SHARD, *TORCH), {"model.safetensors.index.json", SHARD}),
        (TORCH, {"pytorch_model.bin"}),
        (("weights.pt",), {"weights.pt"}),
    ],
)
def test_one_set_of_weights_is_fetched(hub: Hub, capfd: Any, there: Any, weights: set[str], inner: str) -> None:
    small = {name if "/" in name or name == "modules.json" else inner + name for name in SMALL}
    hub.files = dict.fromkeys((*small, *OTHERS, *(inner + name for name in there)), INDEX)
    folder = fetched_model(MODEL)
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("[!.]*") if path.is_file()}
    assert found == small | {inner + name for name in weights}
    assert f"fetching {MODEL}" in capfd.readouterr().err


def test_what_was_fetched_is_used_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    hub.files, hub.failures = {"config.json": {}}, [(503, {}), (429, {})]
    folder = fetched_model(MODEL)
    assert ["; retrying for " in record.message for record in caplog.records[:2]] == [True, True]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fetched_model.cache_clear()
    assert fetched_model(MODEL) == folder
    with pytest.raises(MachineError, match="offline mode is enabled"):
        fetched_model(f"{MODEL}@main")


LOG_IN = r"accept its terms at http://127\S*/owner/name, if it has any, and set HF_TOKEN or run `hf auth login`\."


@pytest.mark.parametrize(
    ("endpoint", "failure", "code", "message"),
    [
        ("http://127.0.0.1:9", (), 3, r"; 1 attempt in .*Connection refused\)\. Check the network, HTTPS_PROXY and"),
        ("http://nowhere.invalid", (), 3, r"; 1 attempt in .*\. Check the network"),
        ("nowhere", (), 3, r"; 1 attempt in .*missing an 'http://'.*\. Check the network"),
        ("", (401, {}, "GatedRepo"), 2, rf"^error: hf://owner/name: gated or private; {LOG_IN}"),
        (
            "",
            (401, {}, "RepoNotFound"),
            2,
            rf"the Hub has no such repository, or it is private\. Check its name; {LOG_IN}",
        ),
        ("", (404, {}, "RevisionNotFound"), 2, "^error: hf://owner/name: the repository has no such revision"),
        ("", (), 2, r"name@main/folder: no config\.json, tokenizer or weights are stored there"),
    ],
)
def test_what_cannot_be_fetched_is_one_line(hub: Hub, monkeypatch, capfd, endpoint, failure, code, message) -> None:
    if endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    hub.failures = [failure] * 99 if failure else []
    assert main(["evaluate-pretrained", f"{MODEL}@main/folder"]) == code
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(message, line), line


def test_errors_of_a_library_are_the_store_s_and_a_bug_keeps_its_traceback(hub: Hub) -> None:
    def tried(work: Any) -> None:
        ObjectStore(retry_seconds=0)._retry(MODEL, "read", work)

    for work in (lambda: int("a"), lambda: {}["a"], lambda: json.loads("a"), lambda: len(1), lambda: hub.answer()):  # pyright: ignore
        with pytest.raises((ValueError, KeyError, TypeError)):
            tried(work)
    for work in (
        lambda: fsspec.filesystem("a"),
        lambda: httpx2.get("a"),
        lambda: Path("/nowhere").iterdir().__next__(),
    ):
        with pytest.raises(Exception, match=MODEL):
            tried(work)
