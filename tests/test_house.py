"""The project weighs no more than its committed limits, and the limits follow it down."""

from pathlib import Path

import pytest

from tests.house import ROOT, limits, weight


@pytest.fixture(scope="module")
def figures() -> dict[str, int]:
    return weight()


def test_nothing_is_over_its_limit(figures: dict[str, int]) -> None:
    over = {name: (figure, limits()[name]) for name, figure in figures.items() if figure > limits()[name]}
    assert not over, f"(figure, limit) of what grew: {over}. Make it smaller, or raise the limit with a decision."


def test_limits_follow_the_figures_down(figures: dict[str, int]) -> None:
    assert figures.keys() == limits().keys()
    loose = {name: (figure, limits()[name]) for name, figure in figures.items() if limits()[name] > figure * 1.02 + 1}
    assert not loose, f"(figure, limit) of what shrank: {loose}. Lower the limits in tests/house.yaml."


def test_lines_are_counted_as_an_editor_shows_them(tmp_path: Path) -> None:
    from tests import house

    file = tmp_path / "a.py"
    file.write_text('def f():\n    """One.\n\n    Two.\n    """\n\n    return 1\n')
    assert house.line_count(file) == 7
    assert list(house.function_lengths(file)) == [7]
    assert (ROOT / "tests" / "house.yaml").is_file()
