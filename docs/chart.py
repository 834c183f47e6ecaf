"""python docs/chart.py: the chart of the README, drawn from the first table of docs/benchmarks/index.md."""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path

from pretrain.reporting.charts import Series, line_chart

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/benchmarks/index.md"
CHART = ROOT / "docs/images/equal-time.svg"
COMMAND = "python docs/chart.py"

_TITLE = "Held-out loss after equal training time"
_SECTION = "## Loss after equal time\n"
_STYLE = (
    'text{font-family:-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1c2430}'
    ".t{font-size:15px;font-weight:600}.n{font-size:12px;fill:#4d5a70}"
    "svg svg text{font-size:10.5px;fill:#4d5a70}svg svg .l{font-size:11.5px;font-weight:600}"
    ".grid{stroke:#e1e5ec}polyline{fill:none;stroke-width:2.2}"
)
# As CSS classes, for curves and their labels.
_COLORS = {"own": "#2f6fb5", "other-1": "#d08a2e", "other-2": "#b5463c"}


def published(page: str) -> tuple[list[str], list[list[float]]]:
    """The headings of the table, and its rows of numbers: minutes, then a loss for each heading."""
    table = page.partition(_SECTION)[2].partition("\n|")[2].partition("\n\n")[0]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return head[1:], [[float(cell) for cell in row] for row in rows]


def svg(page: str) -> str:
    """The chart of the page's numbers: a chart of the reports, with its own style and the names beside the curves."""
    figure = line_chart(_TITLE, _series(page), form="{:.3g}".format, form_x="{:g} min".format)
    drawing = figure.partition("<svg ")[2].partition("</svg>")[0]
    curves = json.loads(html.unescape(figure.partition('data-chart="')[2].partition('"')[0]))
    ends = {curve["name"]: (curve["kind"], *curve["points"][-1]) for curve in curves}
    labels = [
        f'<text class="l {kind}" x="{x + 8}" y="{y + 4}">{html.escape(name)} {loss}</text>'
        for name, (kind, x, y, _, loss) in ends.items()
    ]
    colors = "".join(
        f"polyline.{kind}{{stroke:{color}}}circle.{kind},svg svg text.{kind}{{fill:{color}}}"
        for kind, color in _COLORS.items()
    )
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 330" width="760" height="330" role="img" '
            f'aria-label="{_TITLE}">',
            f"<style>{_STYLE}{colors}</style>",
            '<rect width="760" height="330" rx="12" fill="#fbfbfa"/>',
            f'<text x="20" y="28" class="t">{_TITLE} on one CPU core</text>',
            '<text x="20" y="47" class="n">masked language modeling, nats, lower is better; 4 layers of 256, same '
            "text, vocabulary and batch</text>",
            f'<svg x="10" y="60" width="480" height="264" overflow="visible" {drawing}{"".join(labels)}</svg>',
            "</svg>\n",
        ]
    )


def _series(page: str) -> list[Series]:
    """The curves. Those of this project are alike; the others come in the order of the colors."""
    names, rows = published(page)
    others = iter([kind for kind in _COLORS if kind != "own"])
    series = []
    for column, name in enumerate(names, start=1):
        own = name.startswith("mini.yaml")
        points = [(row[0], row[column]) for row in rows]
        series.append(Series("bertrain" if own else name, points, "own" if own else next(others)))
    return series


def main() -> int:
    """Write the chart. Returns an exit code."""
    CHART.write_text(svg(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{CHART.relative_to(ROOT)}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
