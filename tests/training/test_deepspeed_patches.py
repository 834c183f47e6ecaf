"""DeepSpeed's private names that we rely on: each is there, and one file alone uses them."""

import ast
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pretrain.training.engine import deepspeed_patches
from pretrain.training.engine.deepspeed_patches import CHECKED, PRIVATE_NAMES, PrivateName

ROOT = Path(__file__).parents[2]


def resolve(owner: str) -> object:
    module, _, name = owner.partition(":")
    found: object = importlib.import_module(module)
    return getattr(found, name) if name else found


@pytest.mark.parametrize("private", PRIVATE_NAMES, ids=lambda one: f"{one.owner.rpartition('.')[2]}.{one.name}")
def test_the_installed_deepspeed_has_the_name(private: PrivateName) -> None:
    deepspeed_patches.import_deepspeed()
    owner = resolve(private.owner)
    assigned = re.compile(rf"\b{re.escape(private.name)}\b(: [\w\[\]., ]+)?( = |$)", re.MULTILINE)
    assert hasattr(owner, private.name) or assigned.search(inspect.getsource(owner)), (  # type: ignore[arg-type]
        f"DeepSpeed {importlib.metadata.version('deepspeed')} has no {private.owner}.{private.name} ({private.buys})"
    )


def test_modules_that_wait_for_others_are_there() -> None:
    deepspeed_patches.import_deepspeed()
    importlib.import_module(deepspeed_patches.COLLECTIVE_MODULES)
    package, _, prefix = deepspeed_patches.GATHERING_MODULES.rpartition(".")
    modules = [one.name for one in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    assert any(one.startswith(prefix) for one in modules)


def test_each_name_says_what_it_buys_and_for_which_version() -> None:
    assert all(re.search(r"\d", one.buys) and one.checked for one in PRIVATE_NAMES)
    assert len({(one.owner, one.name) for one in PRIVATE_NAMES}) == len(PRIVATE_NAMES)
    required = (ROOT / "pyproject.toml").read_text()
    assert f'"deepspeed>={CHECKED},' in required, "no older version is allowed than the one that was read"


def attributes(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} | texts


def test_no_other_file_uses_a_private_name() -> None:
    names = {one.name for one in PRIVATE_NAMES}
    own = ROOT / "pretrain/training/engine/deepspeed_patches.py"
    assert names <= attributes(own), "every name in the list is used"
    for package in ("pretrain", "finetune", "cluster"):
        for file in (ROOT / package).rglob("*.py"):
            if file != own:
                assert not attributes(file) & names, file


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
