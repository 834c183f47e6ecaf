"""python docs/chart.py: the chart of the README, drawn from the first table of docs/benchmarks/index.md."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/benchmarks/index.md"
CHART = ROOT / "docs/images/equal-time.svg"
COMMAND = "python docs/chart.py"

_SECTION = "## Loss after equal time\n"
_WIDTH, _HEIGHT = 760, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 490, 66, 276
_MINUTES, _NATS = (0.0, 8.0), (5.0, 8.0)
_OWN, _OTHERS = "#2f6fb5", ("#d08a2e", "#b5463c")
_STYLE = (
    'text{font-family:-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1c2430}'
    ".t{font-size:15px;font-weight:600}.n{font-size:12px;fill:#4d5a70}.l{font-size:13px;font-weight:600}"
    ".g{stroke:#e1e5ec;fill:none}"
)


def published(page: str) -> tuple[list[str], list[list[float]]]:
    """The headings of the table, and its rows of numbers: minutes, then a loss for each heading."""
    table = page.partition(_SECTION)[2].partition("\n|")[2].partition("\n\n")[0]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return head[1:], [[float(cell) for cell in row] for row in rows]


def svg(page: str) -> str:
    """The chart of the page's numbers."""
    names, rows = published(page)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        'role="img" aria-label="Held-out loss after equal training time">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="12" fill="#fbfbfa"/>',
        '<text x="20" y="28" class="t">Held-out loss after equal training time on one CPU core</text>',
        '<text x="20" y="47" class="n">masked language modeling, nats, lower is better; 4 layers of 256, same text, '
        "vocabulary and batch</text>",
        *_axes(),
    ]
    others = iter(_OTHERS)
    labels: set[str] = set()
    for column, name in enumerate(names, start=1):
        own = name.startswith("mini.yaml")
        color = _OWN if own else next(others)
        label = "bertrain" if own else name
        points = [(row[0], row[column]) for row in rows]
        parts.append(_line(points, color))
        if label not in labels:
            labels.add(label)
            parts.append(_label(points[-1], label, color))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes() -> list[str]:
    parts = []
    for nats in range(int(_NATS[0]), int(_NATS[1]) + 1):
        y = _y(nats)
        parts.append(f'<path d="M{_LEFT} {y}H{_RIGHT}" class="g"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" class="n" text-anchor="end">{nats}</text>')
    for minutes in range(0, int(_MINUTES[1]) + 1, 2):
        text = f"{minutes} minutes" if minutes == _MINUTES[1] else str(minutes)
        parts.append(f'<text x="{_x(minutes)}" y="{_BOTTOM + 20}" class="n" text-anchor="middle">{text}</text>')
    return parts


def _line(points: list[tuple[float, float]], color: str) -> str:
    path = "L".join(f"{_x(minutes)} {_y(nats)}" for minutes, nats in points)
    dots = "".join(f'<circle cx="{_x(minutes)}" cy="{_y(nats)}" r="3.5"/>' for minutes, nats in points)
    return f'<g fill="{color}"><path d="M{path}" stroke="{color}" stroke-width="2.5" fill="none"/>{dots}</g>'


def _label(point: tuple[float, float], name: str, color: str) -> str:
    return (
        f'<text x="{_x(point[0]) + 12}" y="{_y(point[1]) + 4}" class="l" style="fill:{color}">'
        f"{name} {point[1]:.2f}</text>"
    )


def _x(minutes: float) -> float:
    return round(_LEFT + (minutes - _MINUTES[0]) / (_MINUTES[1] - _MINUTES[0]) * (_RIGHT - _LEFT), 1)


def _y(nats: float) -> float:
    return round(_BOTTOM - (nats - _NATS[0]) / (_NATS[1] - _NATS[0]) * (_BOTTOM - _TOP), 1)


def main() -> int:
    """Write the chart. Returns an exit code."""
    CHART.write_text(svg(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{CHART.relative_to(ROOT)}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
