"""Which component may import which, read from the syntax trees; lazy and TYPE_CHECKING imports count."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("pretrain", "finetune", "cluster")

# A component is a folder below a package; the files beside those folders are one, with the name of the package. From
# the bottom up, each with all those that it may import; one that is not above cannot be named, so no circle and no
# import upward can be written down.
MAY_IMPORT: dict[str, str] = {
    "pretrain.common": "",
    "pretrain.config": "pretrain.common",
    "pretrain.storage": "pretrain.common",
    "pretrain.tracking": "pretrain.common pretrain.config",
    "cluster.workers": "pretrain.common",
    "pretrain.corpus": "pretrain.common pretrain.config pretrain.storage cluster.workers",
    "pretrain.batches": "pretrain.common pretrain.config pretrain.corpus",
    "pretrain.model": "pretrain.common pretrain.config",
    "pretrain.objectives": "pretrain.common pretrain.config pretrain.batches pretrain.model",
    "pretrain.checkpoint": (
        "pretrain.common pretrain.config pretrain.storage pretrain.corpus pretrain.model pretrain.objectives"
    ),
    "pretrain.planning": (
        "pretrain.common pretrain.config pretrain.corpus pretrain.batches pretrain.model pretrain.objectives "
        "pretrain.checkpoint"
    ),
    "pretrain.training": "pretrain.common pretrain.config pretrain.model",
    "pretrain.run": (
        "pretrain.common pretrain.config pretrain.storage pretrain.tracking cluster.workers pretrain.corpus "
        "pretrain.batches pretrain.model pretrain.objectives pretrain.checkpoint pretrain.planning "
        "pretrain.training"
    ),
    "cluster.jobs": "pretrain.common pretrain.config cluster.workers",
    "cluster": "cluster.jobs",
    "cluster.manifests": "pretrain.common pretrain.config cluster.workers",
    "cluster.doctor": "pretrain.common cluster.workers cluster.jobs",
    "pretrain.reporting": (
        "pretrain.common pretrain.config pretrain.tracking pretrain.corpus pretrain.batches pretrain.model "
        "pretrain.checkpoint pretrain.run"
    ),
    "pretrain": "pretrain.common pretrain.run",
    "finetune.tasks": "pretrain.common pretrain.corpus",
    "finetune.training": (
        "pretrain.common pretrain.config pretrain.storage pretrain.batches pretrain.model pretrain.checkpoint "
        "pretrain.training pretrain.run finetune.tasks"
    ),
    "finetune.artifacts": (
        "pretrain.common pretrain.model pretrain.checkpoint pretrain.run finetune.tasks finetune.training"
    ),
    "finetune.experiments": (
        "pretrain.common pretrain.config cluster.workers pretrain.model pretrain.run finetune.tasks finetune.training"
    ),
    "finetune.scores": (
        "pretrain.common pretrain.corpus pretrain.batches pretrain.model pretrain.checkpoint pretrain.run "
        "pretrain.reporting"
    ),
    "finetune.workflows": (
        "pretrain.common pretrain.config pretrain.corpus pretrain.planning pretrain.run pretrain.reporting "
        "finetune.training"
    ),
    "finetune": (
        "pretrain.common pretrain.run pretrain.reporting cluster.jobs cluster.manifests cluster.doctor "
        "finetune.training finetune.artifacts finetune.experiments finetune.scores finetune.workflows"
    ),
}

# Libraries that only some components may import: others use them through these components.
OWNERS = {
    "ray": ("cluster/", "pretrain/corpus/"),
    "deepspeed": ("pretrain/training/engine/",),
    "wandb": ("pretrain/tracking/",),
    "fsspec": ("pretrain/storage/",),
    "s3fs": (),
    "wandb_workspaces": ("pretrain/reporting/workspace.py",),
}


@functools.cache
def _files() -> dict[str, Path]:
    """Return the file of each module, by dotted name."""
    modules = {}
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return modules


@functools.cache
def _imports(file: Path) -> list[tuple[str, int]]:
    """Return all imports anywhere in a file, as (dotted name, line)."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.append((whole if whole in _files() else node.module or "", node.lineno))
    return found


@functools.cache
def _arrows() -> dict[str, dict[str, int]]:
    """Return module -> the project's modules that it imports, each with a line of the import."""
    arrows: dict[str, dict[str, int]] = {}
    for module, file in _files().items():
        arrows[module] = {name: line for name, line in _imports(file) if name in _files() and name != module}
    return arrows


def _component(module: str) -> str:
    package, *inner = _files()[module].relative_to(ROOT).parts
    return f"{package}.{inner[0]}" if len(inner) > 1 else package


def _circles(arrows: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """Return the modules on import cycles, found by repeatedly removing modules without imports."""
    left = {module: set(imported) & set(arrows) for module, imported in arrows.items()}
    while free := [module for module, imported in left.items() if not imported & set(left)]:
        for module in free:
            del left[module]
    return [sorted(left)] if left else []


def test_components_import_only_what_stands_below() -> None:
    allowed = {component: set(components.split()) for component, components in MAY_IMPORT.items()}
    wrong = [
        f"{module.replace('.', '/')}, line {line}: {_component(module)} may not import {name}"
        for module, imported in _arrows().items()
        for name, line in imported.items()
        if _component(name) != _component(module) and _component(name) not in allowed.get(_component(module), set())
    ]
    assert not wrong, "\n".join(wrong)


def test_the_table_runs_downward() -> None:
    above = list(MAY_IMPORT)
    for number, (component, components) in enumerate(MAY_IMPORT.items()):
        unknown = set(components.split()) - set(above[:number])
        assert not unknown, f"{component} names {unknown}, which do not stand above it in the table"


def test_the_table_has_no_arrow_that_is_not_used() -> None:
    used = {(_component(module), _component(name)) for module, imported in _arrows().items() for name in imported}
    written = {(component, one) for component, components in MAY_IMPORT.items() for one in components.split()}
    assert not written - used
    assert not set(MAY_IMPORT) - {_component(module) for module in _files()}


def test_no_files_import_each_other_in_a_circle() -> None:
    assert not _circles(_arrows())


@pytest.mark.parametrize("library", OWNERS)
def test_a_library_has_one_owner(library: str) -> None:
    users = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in _files().values()
        for name, line in _imports(file)
        if name.split(".")[0] == library and not file.relative_to(ROOT).as_posix().startswith(OWNERS[library])
    ]
    assert not users
