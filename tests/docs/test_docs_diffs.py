"""The diffs of docs/extend are applied to a copy of the project, and its new tests run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs/extend/change-the-model.md"]


def diffs(text: str) -> list[str]:
    """The fenced ```diff blocks of a page, in order."""
    return re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def added_tests(patches: list[str]) -> list[str]:
    """Test files that the patches add or change."""
    paths = re.findall(r"^\+\+\+ b/(tests/(?:\w+/)?test_\w+\.py)$", "".join(patches), re.MULTILINE)
    return list(dict.fromkeys(paths))


def copy_of_the_project(folder: Path) -> None:
    """The tracked files, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def follow(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Apply the page's diffs to a copy in `folder` and run the tests they add; the last command's outcome."""
    patches = diffs(page.read_text(encoding="utf-8"))
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    # git must not take a repository around the copy for its own: it would apply nothing, in silence.
    outside = {**environment, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    for patch in patches:
        command = ["git", "apply", "-"]
        applied = subprocess.run(command, cwd=folder, env=outside, input=patch, capture_output=True, text=True)
        if applied.returncode:
            return applied
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *added_tests(patches)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_following_a_page_gives_tests_that_pass(page: Path, tmp_path: Path):
    patches = diffs(page.read_text(encoding="utf-8"))
    assert patches, f"{page.name} has no ```diff block"
    assert added_tests(patches), f"the diffs of {page.name} add no test"
    copy_of_the_project(tmp_path)
    result = follow(page, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
