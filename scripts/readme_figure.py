"""The README's picture: score against measured bytes, from the report of a run.

python scripts/readme_figure.py runs/demo/report.html docs/results/demo.svg
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# A report's figures take their colours from the page; a file has to bring its own, and these
# can be read on a light and on a dark ground.
COLOURS = {"currentColor": "#7d8590", "var(--line)": "#7d8590", "var(--paper)": "none"}


def main() -> None:
    source, target = sys.argv[1:]
    figures = re.findall(r"<svg.*?</svg>", Path(source).read_text(), flags=re.DOTALL)
    svg = figures[0].replace("var(--sans)", "sans-serif")
    for name, colour in COLOURS.items():
        svg = svg.replace(name, colour)
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    Path(target).write_text(svg.replace("<svg", f'<svg {names} width="640"', 1) + "\n")


if __name__ == "__main__":
    main()
