"""The page of a training run: how its loss, its parts and its speed went."""

from __future__ import annotations

import html
import json
from importlib import resources
from pathlib import Path
from typing import Any

from eval import plots
from eval.durable import write_atomically
from train.claim import CONFIG_FILE
from train.metrics import METRICS_FILE, numbers, read_lines

REPORT_FILE = "report.html"
_SMOOTHING = 0.05  # share of the run over which a line is averaged


def is_run(directory: Path) -> bool:
    """Whether `kvjax train` wrote this directory."""
    return (directory / METRICS_FILE).exists() and (directory / CONFIG_FILE).exists()


def write(directory: Path) -> Path:
    """Writes report.html into the run's directory and returns its path.

    Raises:
      ValueError: no line of metrics is there yet.
    """
    lines = read_lines(directory / METRICS_FILE)
    if not lines:
        raise ValueError(f"{directory / METRICS_FILE} has no line yet")
    config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))["config"]
    path = directory / REPORT_FILE
    write_atomically(path, page(directory.name, config, lines))
    return path


def page(name: str, config: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    """One HTML page: no scripts, nothing loaded."""
    layers = by_layer(lines)
    lines = [numbers(line) for line in lines]
    style = resources.files("eval").joinpath("page.css").read_text(encoding="utf-8")
    last = lines[-1]
    title = html.escape(f"{config['kind']} on {config['model']}")
    rows = "".join(
        f"<tr><th>{html.escape(key)}</th><td>{lines[0].get(key, float('nan')):.4g}</td>"
        f"<td>{value:.4g}</td></tr>"
        for key, value in last.items()
        if key != "step"
    )
    figures = "<p class=note>No plots: they need matplotlib (the extra <code>plot</code>).</p>"
    if plots.available():
        figures = f"<figure>{curves(name, lines)}<figcaption>{_CAPTION}</figcaption></figure>"
    settings = html.escape(json.dumps(config, indent=1, default=str))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f"<header><p class=kicker>kvjax train · {html.escape(name)}</p><h1>{title}</h1>"
        f"<p class=lead>{last['step']} of {config['steps']} steps of {config['batch']} x "
        f"{config['length']} tokens.</p></header>\n<section>{figures}"
        "<div class=wide><table><thead><tr><th></th><th>first</th><th>last</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></section>\n{layers}"
        f"<section><h2>Set-up</h2><pre>{settings}</pre></section>\n"
        "</main>\n</body>\n</html>\n"
    )


def by_layer(lines: list[dict[str, Any]]) -> str:
    """What has a value per layer, averaged over the last twentieth of the run; "" for nothing."""
    names = [name for name in lines[-1] if name not in numbers(lines[-1])]
    if not names:
        return ""
    last = lines[-max(1, round(_SMOOTHING * len(lines))) :]
    columns = [
        [sum(layer) / len(layer) for layer in zip(*(line[name] for line in last), strict=True)]
        for name in names
    ]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    rows = "".join(
        f"<tr><th>{layer}</th>" + "".join(f"<td>{value:.3g}</td>" for value in values) + "</tr>"
        for layer, values in enumerate(zip(*columns, strict=True))
    )
    return (
        f"<section><h2>By layer, mean of the last {len(last)} lines</h2><div class=wide><table>"
        f"<thead><tr><th>layer</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        "</section>\n"
    )


_CAPTION = "Every value by step; the dark line is its running mean over a twentieth of the run."


@plots.figure_style
def curves(name: str, lines: list[dict[str, float]]) -> Any:
    """One small plot per value."""
    from matplotlib.figure import Figure

    del name  # it salts the ids
    keys = [key for key in lines[-1] if key != "step"]
    figure = Figure(figsize=(5.0, 1.3 * len(keys)), layout="constrained")
    axes = figure.subplots(len(keys), 1, squeeze=False, sharex=True)[:, 0]
    steps = [line["step"] for line in lines]
    width = max(1, round(_SMOOTHING * len(lines)))
    for axis, key in zip(axes, keys, strict=True):
        values = [line.get(key, float("nan")) for line in lines]
        axis.plot(steps, values, lw=0.8, alpha=0.45, color="#56b4e9")
        axis.plot(steps, running_mean(values, width), lw=1.5, color="#0072b2")
        axis.set_title(key, fontsize=9, loc="left")
        axis.grid(axis="y", lw=0.6, alpha=0.6)
    axes[-1].set_xlabel("step")
    return figure


def running_mean(values: list[float], width: int) -> list[float]:
    """Each value averaged with up to `width` - 1 before it."""
    return [
        sum(values[max(0, end - width) : end]) / (end - max(0, end - width))
        for end in range(1, len(values) + 1)
    ]
