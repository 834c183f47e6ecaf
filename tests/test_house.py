"""Code size stays within the committed limits, and the limits are lowered when it shrinks."""

from pathlib import Path

import pytest

from tests import house
from tests.house import AT_LEAST, ROOT, branch_coverage, limits, weight
from tests.odd_phrases import odd_phrases


@pytest.fixture(scope="module")
def figures() -> dict[str, float]:
    return weight()


def test_nothing_is_over_its_limit(figures: dict[str, float]) -> None:
    allowed = limits()
    over = {name: (figure, allowed[name]) for name, figure in figures.items() if figure > allowed[name]}
    over = {name: both for name, both in over.items() if name not in AT_LEAST}
    assert not over, f"(figure, limit) of what grew: {over}. Make it smaller, or raise the limit with a decision."
    under = {name: (figures[name], allowed[name]) for name in AT_LEAST if figures[name] < allowed[name]}
    assert not under, f"(figure, limit) of what tests lost: {under}"


def test_limits_follow_the_figures_down(figures: dict[str, float]) -> None:
    assert figures.keys() == limits().keys()
    loose = {name: (figure, limits()[name]) for name, figure in figures.items() if limits()[name] > figure * 1.02 + 1}
    loose = {name: both for name, both in loose.items() if name not in AT_LEAST}
    assert not loose, f"(figure, limit) of what shrank: {loose}. Lower the limits in tests/house.yaml."


def test_lines_are_counted_as_an_editor_shows_them(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('def f():\n    """One.\n\n    Two.\n    """\n\n    return 1\n')
    assert house.line_count(file) == 7
    assert list(house.function_lengths(file)) == [7]
    assert (ROOT / "tests" / "house.yaml").is_file()


def test_a_string_weighs_nothing_whatever_is_in_it(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('a = 1  # one\nb = f"{a + 1} {len([])} is long" "y"\n')
    assert house.code_tokens(file) == 5  # a = 1 b =


def test_odd_phrases_are_found_where_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        '"""What it is."""\n\n_MOST_ROWS = 1  # There is no limit, but this is no\n# table of its own: those\n'
        'own = f"the newest of {texts} texts begins"\n'
    )
    found = sorted((name, line) for name, line, _ in odd_phrases(file))
    assert found == [
        *(("begins", 5), ("docstrings", 1), ("is_no", 3), ("names", 3), ("newest", 5), ("own", 3)),
        *(("texts", 5), ("those", 3)),
    ]


def test_branches_are_counted_by_component() -> None:
    names = ("pretrain/model/a.py", "pretrain/model/kernels/b.py", "cluster/jobs/c.py")
    summaries = [{"covered_branches": reached, "num_branches": 4} for reached in (1, 3, 2)]
    report = {"files": {name: {"summary": summary} for name, summary in zip(names, summaries, strict=True)}}
    assert branch_coverage(report) == {"cluster/jobs": (2, 4), "pretrain/model": (4, 8)}
