"""Private names of other libraries that we rely on: each is there, and one file alone uses those of DeepSpeed."""

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pretrain.training.engine import deepspeed_patches
from pretrain.training.engine.deepspeed_patches import CHECKED_VERSION
from tests.house import private_names, unlisted_private_names

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/decisions/0158-private-names.md"
PRODUCT = [file for package in ("pretrain", "finetune", "cluster") for file in (ROOT / package).rglob("*.py")]


@pytest.mark.parametrize(("owner", "name"), private_names())
def test_the_installed_library_has_the_name(owner: str, name: str) -> None:
    deepspeed_patches.import_deepspeed()
    found = pkgutil.resolve_name(owner)
    assigned = re.compile(rf"\b{name}\b(: [\w\[\]., |]+)?( = |$)", re.MULTILINE)
    assert (
        any(re.fullmatch(name.replace("*", r"\w*"), one) for one in dir(found))
        or hasattr(found, name)
        or assigned.search(inspect.getsource(found))  # type: ignore[arg-type]
    )


def test_each_private_name_of_a_library_is_in_the_table() -> None:
    assert not unlisted_private_names()
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(set(private_names()))
    names = set().union(*map(attributes, PRODUCT))
    assert [name for _, name in private_names() if not {one for one in names if one.startswith(name.rstrip("*"))}] == []


def test_modules_that_wait_for_others_are_there() -> None:
    deepspeed_patches.import_deepspeed()
    importlib.import_module(deepspeed_patches.COLLECTIVE_MODULES)
    package, _, prefix = deepspeed_patches.GATHERING_MODULES.rpartition(".")
    modules = [one.name for one in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    assert any(one.startswith(prefix) for one in modules)


def test_no_older_deepspeed_is_allowed_than_the_one_that_was_read() -> None:
    assert f'"deepspeed>={CHECKED_VERSION},' in (ROOT / "pyproject.toml").read_text()


def attributes(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    imported = {one.name for node in nodes if isinstance(node, ast.ImportFrom) for one in node.names}
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} | texts | imported


def test_no_other_file_uses_a_private_name_of_deepspeed() -> None:
    names = {name for owner, name in private_names() if owner.startswith("deepspeed")}
    own = ROOT / "pretrain/training/engine/deepspeed_patches.py"
    assert names <= attributes(own), "every name in the list is used"
    assert not [file for file in PRODUCT if file != own and attributes(file) & names]


def test_the_layouts_alone_ask_for_the_stage() -> None:
    """DeepSpeed's own config names it, too."""
    users = {file.name for file in (ROOT / "pretrain/training").rglob("*.py") if "zero_stage" in attributes(file)}
    assert users == {"state_layouts.py", "deepspeed_config.py"}


def test_a_name_that_is_gone_is_not_replaced_in_silence() -> None:
    with pytest.raises(RuntimeError, match="has no process_gradients, which"):
        deepspeed_patches.replace_gradient_sums(SimpleNamespace(), lambda *_: None)


def test_deepspeed_asks_torch_for_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NVML, it would read CUDA_VISIBLE_DEVICES, which may name a GPU by its UUID, as numbers."""
    deepspeed_patches.import_deepspeed()
    nvml: Any = SimpleNamespace(nvmlInit=lambda: None, NVMLError=RuntimeError)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    module: Any = importlib.import_module("deepspeed.accelerator.cuda_accelerator")
    monkeypatch.setattr(module, "pynvml", None)
    with deepspeed_patches.without_nvml():
        module.CUDA_Accelerator()
    assert module.pynvml is None
    assert sys.modules["pynvml"] is nvml
