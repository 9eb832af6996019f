"""The plots of a report as inline SVG, drawn in the page's own text color so that they follow light and dark."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from decode.arms import HF, is_plain

INK = "#010203"  # stands for the page's text color; replaced by currentColor
COLORS = ("#2f81d6", "#d9822b", "#3a9d5d", "#b35bbd", "#c9485b", "#5aa7a7", "#8c7a3d")  # legible on white and on black
PARTS = ("draft", "verify", "other")


def draw(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(caption, SVG) of each plot that has something to show."""
    arms = [a for a in report["arms"] if not is_plain(a["name"])]
    drafters = [a for a in arms if a["name"] != HF]
    color = {arm["name"]: COLORS[i % len(COLORS)] for i, arm in enumerate(arms)}
    drawn: list[tuple[str, str]] = []
    if arms:
        drawn.append(("Speedup over plain decoding with 95% interval", _plot_speedup(arms, color)))
    if any(a["survival"] for a in drafters):
        drawn.append(
            ("Survival: share of steps that accept at least this many tokens", _plot_survival(drafters, color))
        )
    split = [a for a in report["arms"] if a["cost_split"]]
    if split:
        drawn.append(("Where a target step's time goes", _plot_cost(split)))
    if any(a["by_category"] for a in drafters):
        drawn.append(("Speedup by category", _plot_categories(drafters, color)))
    if any(a["rejection_histogram"] for a in drafters):
        drawn.append(("Steps by accepted tokens", _plot_histogram(drafters, color)))
    decided = [a for a in drafters if a.get("decisions")]
    if decided:
        drawn.append(("What the policy drafted, round by round", _plot_decisions(decided, color)))
    return drawn


def _plot_decisions(arms: list[dict[str, Any]], color: dict[str, str]) -> str:
    figure, axes = _figure(2.2)
    for arm in arms:
        axes.step(
            range(len(arm["decisions"]["drafted"])),
            arm["decisions"]["drafted"],
            where="post",
            linewidth=0.8,
            color=color[arm["name"]],
            label=_label(arm["name"]),
        )
    axes.set_xlabel("round, prompt after prompt")
    axes.set_ylabel("nodes drafted")
    return _svg(figure, legend=True)


def _plot_speedup(arms: list[dict[str, Any]], color: dict[str, str]) -> str:
    figure, axes = _figure(0.5 * len(arms) + 1.0)
    for y, arm in enumerate(arms):
        low, high = arm["speedup_ci95"] or (arm["speedup"], arm["speedup"])
        error = [[max(0.0, arm["speedup"] - low)], [max(0.0, high - arm["speedup"])]]
        axes.errorbar(arm["speedup"], y, xerr=error, fmt="o", capsize=4, color=color[arm["name"]])
    axes.axvline(1.0, color=INK, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(arms)), [_label(a["name"]) for a in arms])
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set_xlabel("times plain decoding")
    return _svg(figure)


def _plot_survival(arms: list[dict[str, Any]], color: dict[str, str]) -> str:
    figure, axes = _figure(2.6)
    for arm in arms:
        depths = range(1, len(arm["survival"]) + 1)
        axes.plot(depths, arm["survival"], marker="o", color=color[arm["name"]], label=_label(arm["name"]))
    axes.set_xticks(range(1, max(len(a["survival"]) for a in arms) + 1))
    axes.set_ylim(0, 1)
    axes.set_xlabel("draft depth")
    return _svg(figure, legend=True)


def _plot_cost(arms: list[dict[str, Any]]) -> str:
    figure, axes = _figure(0.45 * len(arms) + 1.2)
    left = [0.0] * len(arms)
    for part, fill in zip(PARTS, COLORS, strict=False):
        widths = [arm["cost_split"][part]["ms"] for arm in arms]
        axes.barh(range(len(arms)), widths, left=left, color=fill, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(arms)), [_label(a["name"]) for a in arms])
    axes.invert_yaxis()
    axes.set_xlabel("ms per target step")
    return _svg(figure, legend=True)


def _plot_categories(arms: list[dict[str, Any]], color: dict[str, str]) -> str:
    categories = list(next(a["by_category"] for a in arms if a["by_category"]))
    figure, axes = _figure(0.22 * len(categories) * (len(arms) + 1) + 0.9)
    height = 0.8 / len(arms)
    for i, arm in enumerate(arms):
        values = [arm["by_category"][c]["speedup"] for c in categories]
        axes.barh([y + i * height for y in range(len(categories))], values, height, color=color[arm["name"]],
                  label=_label(arm["name"]))  # fmt: skip
    axes.axvline(1.0, color=INK, linewidth=1, linestyle="--")
    axes.set_yticks([y + 0.4 - height / 2 for y in range(len(categories))], [_label(c) for c in categories])
    axes.invert_yaxis()
    axes.set_xlabel("times plain decoding")
    return _svg(figure, legend=True)


def _plot_histogram(arms: list[dict[str, Any]], color: dict[str, str]) -> str:
    figure, axes = _figure(2.6)
    width = 0.8 / len(arms)
    for i, arm in enumerate(arms):
        counts = arm["rejection_histogram"]
        total = sum(counts.values()) or 1
        axes.bar([int(k) + i * width for k in counts], [v / total for v in counts.values()], width,
                 color=color[arm["name"]], label=_label(arm["name"]))  # fmt: skip
    axes.set_xticks(range(max((len(a["rejection_histogram"]) for a in arms), default=1)))
    axes.set_xlabel("accepted draft tokens")
    axes.set_ylabel("share of steps")
    return _svg(figure, legend=True)


def _label(name: str) -> str:
    return name.replace("$", r"\$")  # matplotlib reads $...$ as a formula


def _figure(height: float) -> tuple[Figure, Any]:
    # small on purpose: at 72 points an inch it is a phone's width, so text keeps its size there
    figure = Figure(figsize=(5.0, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.tick_params(colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    return figure, axes


def _svg(figure: Figure, legend: bool = False) -> str:
    if legend:
        figure.legend(loc="outside upper left", ncols=3, frameon=False, labelcolor=INK, fontsize=8)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "headstart"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", text)  # inline SVG needs no namespaces
    return text.replace(INK, "currentColor")
