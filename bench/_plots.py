"""Curves as PNG files in ``bench/plots``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import QUICK
from bench._native import BUILT

FOLDER = BUILT / "plots" if QUICK else Path(__file__).parent / "plots"
_COLORS = ("#0b6e99", "#d1495b", "#2e8b57", "#8b6bb1", "#c98a00")
_MARKERS = "osD^v"


@dataclass
class Line:
    """One curve: its label, its points, and which of the colours it has."""

    label: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    dashed: bool = False


@dataclass
class Bar:
    """A height to be held: a dashed line over the whole width, in the colour of the curve that it is for."""

    label: str
    height: float
    color: int | None = None


def plot(
    name: str,
    title: str,
    axes: tuple[str, str],
    lines: Sequence[Line],
    bars: Sequence[Bar],
    *,
    log_y: bool = False,
) -> None:
    """Draws curves over a logarithmic x axis.

    Args:
        name: The file's name.
        title: Over the picture.
        axes: What x and y are, with units.
        lines: The curves.
        bars: What is to be held.
        log_y: Whether y is logarithmic too; else it begins at 0.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure, area = pyplot.subplots(figsize=(9, 5), dpi=120, layout="constrained")
    for line in lines:
        area.plot(
            [x for x, _ in line.points],
            [y for _, y in line.points],
            label=line.label,
            color=_COLORS[line.color % len(_COLORS)],
            marker=_MARKERS[line.color % len(_MARKERS)],
            markersize=5,
            linewidth=1.8,
            linestyle=(0, (1, 1.2)) if line.dashed else "-",
            markerfacecolor="white" if line.dashed else None,
        )
    for bar in bars:
        color = "#444444" if bar.color is None else _COLORS[bar.color]
        area.axhline(bar.height, label=bar.label, color=color, linestyle=(0, (6, 3)), linewidth=1.2)
    area.set_xscale("log")
    places = sorted({x for line in lines for x, _ in line.points})
    area.set_xticks(places)
    area.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _short(x)))
    area.xaxis.set_minor_formatter(NullFormatter())
    if log_y:
        area.set_yscale("log")
        area.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        area.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        area.yaxis.set_minor_formatter(NullFormatter())
    else:
        top = max((*(bar.height for bar in bars), *(y for line in lines for _, y in line.points)))
        area.set_ylim(0, top * 1.1)
    area.set_title(title, fontsize=12, loc="left", pad=12)
    area.set_xlabel(axes[0])
    area.set_ylabel(axes[1])
    area.grid(alpha=0.25)
    area.spines[["top", "right"]].set_visible(False)
    area.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.01, 0.5))
    FOLDER.mkdir(parents=True, exist_ok=True)
    figure.savefig(FOLDER / name)
    pyplot.close(figure)
    print(f"  drawn: {FOLDER.relative_to(Path.cwd()) if FOLDER.is_relative_to(Path.cwd()) else FOLDER}/{name}")


def _short(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:g} {unit}"
    return f"{number:g}"
