"""The checkpoint whose scores are taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scores.test_scores import make_masked_lm


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT with random weights, which no test changes."""
    return make_masked_lm(tmp_path_factory.mktemp("bert"))
