"""An evaluation as files: `report.json` for machines, one self-contained `report.html` for people.

The page loads nothing from anywhere: CSS inline, plots as inline SVG drawn in the page's own text color, so that they
follow its light or dark scheme.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from decode.arms import HF, PLAIN, is_plain
from decode.caveats import is_slower
from decode.plots import PARTS, draw

CSS = """
:root{color-scheme:light dark;--ink:#1b1f24;--paper:#fff;--soft:#f2f4f7;--line:#d5dae1;--good:#bfe8cb;--bad:#fbdcd6}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ee;--paper:#14171c;--soft:#1f242c;--line:#3a424e;--good:#1f5a36;--bad:#5c2a24}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1rem;font:16px/1.5 system-ui,sans-serif;color:var(--ink);
background:var(--paper);overflow-wrap:anywhere}
h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.15rem;margin:2rem 0 .5rem}
.headline{font-size:1.15rem;background:var(--soft);padding:.8rem 1rem;border-radius:.5rem}
.warning{background:var(--bad);padding:.5rem .8rem;border-radius:.4rem;margin:.4rem 0}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:.9rem;overflow-wrap:normal}
th,td{padding:.25rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
.facts td{text-align:left;white-space:normal}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));gap:1rem}
figure{margin:0}figure svg{width:100%;height:auto;display:block}figcaption{font-size:.85rem}
details{border-top:1px solid var(--line);padding:.4rem 0}summary{cursor:pointer}
pre{white-space:pre-wrap;background:var(--soft);padding:.6rem;border-radius:.4rem;font-size:.85rem}
mark{background:var(--good);color:inherit;border-radius:.15rem}
"""


def write_report(report: dict[str, Any], outputs: Sequence[dict[str, Any]], out_dir: str | Path) -> Path:
    """Write `report.json` and `report.html`.

    Args:
        report: what `decode.evaluate.evaluate` returns; a key "outputs" in it is left out of the JSON file.
        outputs: [{id, category, prompt, arms: {arm: [(text, drafted and accepted)]}}].
        out_dir: folder, made if need be.

    Returns:
        The path of the HTML page.
    """
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    data = {key: value for key, value in report.items() if key != "outputs"}
    (folder / "report.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    page = folder / "report.html"
    page.write_text(render_html(report, outputs), encoding="utf-8")
    return page


def render_html(report: dict[str, Any], outputs: Sequence[dict[str, Any]]) -> str:
    """The page's HTML."""
    warnings = "".join(f'<p class="warning"><strong>Warning:</strong> {_text(w)}</p>' for w in report["warnings"])
    figures = "".join(
        f'<figure role="img" aria-label="{_text(caption)}">{svg}<figcaption>{_text(caption)}</figcaption></figure>'
        for caption, svg in draw(report)
    )
    target, prompts = report["target"], report["prompts"]
    conventions = _facts(report["settings"].get("conventions", {}))
    settings = _facts({k: v for k, v in report["settings"].items() if k != "conventions"})
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>headstart: {_text(target["name"])}</title><style>{CSS}</style></head><body>
<h1>Speculative decoding on {_text(target["name"])}</h1>
<p class="headline">{_text(headline(report))}</p>
{warnings}
<h2>Arms</h2>{arms_table(report)}
<p>Tokens/s and speedup are end to end, prefill included. Tau counts the target's own token, accepted does not.</p>
<div class="plots">{figures}</div>
<h2>By category</h2>{category_table(report)}
<h2>By context</h2>{context_table(report)}
{_decisions(report)}
<h2>Drafters</h2>{_drafters(report)}
<h2>Environment</h2>{_facts(report["environment"])}
<h2>Settings</h2>{_facts({"prompts": f"{prompts['name']} ({prompts['count']})", "target": target})}{settings}
<details><summary>What the numbers mean</summary>{conventions}</details>
<h2>Outputs</h2><p><mark>Marked</mark> text was drafted and accepted; the rest is the target's own.</p>
{"".join(_output(o) for o in outputs)}
</body></html>
"""


def is_drafter(arm: dict[str, Any]) -> bool:
    """Whether an arm is a drafter's."""
    return arm["name"] != HF and not is_plain(arm["name"])


def best_drafter(report: dict[str, Any]) -> dict[str, Any] | None:
    """The drafter arm with the highest speedup; lossy arms count only if there is no other."""
    arms = [a for a in report["arms"] if is_drafter(a)]
    sound = [a for a in arms if not (a["exact_match"] and a["exact_match"]["verdict"] == "FAIL")]
    return max(sound or arms, key=lambda a: a["speedup"], default=None)


def headline(report: dict[str, Any]) -> str:
    """The result in words."""
    best = best_drafter(report)
    reference = PLAIN if best is None else best["reference"]
    plain = next(a for a in report["arms"] if a["name"] == reference)
    if best is None:
        return f"Plain decoding: {plain['tokens_per_second']:.1f} tokens/s; no drafter was measured."
    low_high = best["speedup_ci95"]
    interval = "" if low_high is None else f" (95% interval {low_high[0]:.2f} to {low_high[1]:.2f})"
    return (
        f"{best['name']}: {best['speedup']:.2f}x the speed of {reference} decoding{interval}, "
        f"{best['tokens_per_second']:.1f} tokens/s against {plain['tokens_per_second']:.1f}, "
        f"{best['tau']:.2f} tokens per target step."
    )


# --- tables -----------------------------------------------------------------------------------------------------------

COLUMNS = (
    "arm", "tokens/s", "speedup", "95% interval", "median", "tau", "accepted", "forwards/token", "TTFT p50 ms",
    "TPOT p50/p95/p99 ms", "draft/verify/other ms", "memory MB", "output",
)  # fmt: skip


def arm_row(arm: dict[str, Any]) -> list[str]:
    """One arm's cells, as in `COLUMNS`; a drafter slower than plain is marked."""
    interval, split, match, tpot = arm["speedup_ci95"], arm["cost_split"], arm["exact_match"], arm["tpot_ms"]
    slow = " (slower)" if is_slower(arm) and is_drafter(arm) else ""
    own = arm["name"] != HF  # generate reports no steps
    return [
        arm["name"],
        f"{arm['tokens_per_second']:.1f}",
        f"{arm['speedup']:.2f}x{slow}",
        "" if interval is None or is_plain(arm["name"]) else f"{interval[0]:.2f} to {interval[1]:.2f}",
        f"{arm['speedup_median']:.2f}x",
        f"{arm['tau']:.2f}" if own else "",
        f"{arm['accepted_per_step']:.2f}" if own else "",
        f"{arm['target_forwards_per_token']:.2f}",
        _number(arm["ttft_ms"]["p50"]),
        " / ".join(_number(tpot[q]) for q in ("p50", "p95", "p99")),
        "" if split is None else " / ".join(_number(split[part]["ms"]) for part in PARTS),
        f"{arm['peak_memory_mb']:.0f}",
        "" if match is None else f"{match['verdict']} ({match['rate']:.0%})",
    ]


def arms_table(report: dict[str, Any]) -> str:
    """The table of arms as HTML."""
    return _table(COLUMNS, [arm_row(arm) for arm in report["arms"]])


def category_table(report: dict[str, Any]) -> str:
    """Speedup and tau of each drafter by category as HTML."""
    arms = [a for a in report["arms"] if is_drafter(a) and a["by_category"]]
    if not arms:
        return "<p>The prompts name no category.</p>"
    header = ["category", "prompts", *(f"{a['name']}: {what}" for a in arms for what in ("speedup", "tau", "tokens/s"))]
    rows = [
        [category, str(first["prompts"])]
        + [
            cell
            for arm in arms
            for row in [arm["by_category"][category]]
            for cell in (f"{row['speedup']:.2f}x", f"{row['tau']:.2f}", f"{row['tokens_per_second']:.1f}")
        ]
        for category, first in arms[0]["by_category"].items()
    ]
    return _table(header, rows)


def context_table(report: dict[str, Any]) -> str:
    """Tau of each drafter by tokens before the step as HTML: past its trained length a drafter may fade."""
    arms = [a for a in report["arms"] if a["name"] not in (PLAIN, HF)]
    buckets = sorted({b for a in arms for b in a.get("by_context", {})}, key=lambda b: int(b.partition("-")[0]))
    rows = [
        [bucket, *(f"{a['by_context'][bucket]['tau']:.2f}" if bucket in a["by_context"] else "" for a in arms)]
        for bucket in buckets
    ]
    return _table(["tokens before the step", *(f"{a['name']}: tau" for a in arms)], rows)


def print_table(report: dict[str, Any], console: Console | None = None) -> None:
    """Print headline, the main columns of the arms and the warnings to the terminal."""
    console = console or Console()
    shown = [COLUMNS.index(c) for c in ("arm", "tokens/s", "speedup", "95% interval", "tau", "output")]
    table = Table(box=SIMPLE_HEAD)
    for index in shown:
        table.add_column(COLUMNS[index], justify="left" if index == 0 else "right", no_wrap=True)
    for arm in report["arms"]:
        row = arm_row(arm)
        table.add_row(*(row[index] for index in shown))
    console.print(headline(report), markup=False, highlight=False)
    console.print(table)
    for name, drafter in report["drafters"].items():
        if chosen := choices(drafter):
            console.print(f"{name} chose {chosen}", markup=False, highlight=False)
    for warning in report["warnings"]:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)


def choices(drafter: dict[str, Any]) -> str:
    """How often a router chose each of its drafters, in words; empty for other drafters."""
    counts = drafter.get("choices") or {}
    total = sum(counts.values())
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    return "; ".join(f"{name} {count} times ({count / total:.0%})" for name, count in ranked)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _facts(facts: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{_text(key)}</td><td>{_text(value if isinstance(value, str) else json.dumps(value))}</td></tr>"
        for key, value in facts.items()
    )
    return f'<div class="scroll"><table class="facts"><tbody>{rows}</tbody></table></div>'


def _drafters(report: dict[str, Any]) -> str:
    header = (
        "drafter", "kind", "training samples", "training tokens", "tau in training", "expected tau",
        "target moved (KL, nats)", "tau here", "chosen",
    )  # fmt: skip
    arms = {arm["name"]: arm for arm in report["arms"]}
    keys = ("kind", "training_samples", "training_tokens", "tau_estimate", "expected_tau", "target_kl")
    rows = []
    for name, drafter in report["drafters"].items():
        values = [drafter.get(k) for k in keys]
        cells = ["" if v is None else f"{v:.3g}" if isinstance(v, float) else str(v) for v in values]
        rows.append([name, *cells, f"{arms[name]['tau']:.2f}", choices(drafter)])
    return _table(header, rows)


def _decisions(report: dict[str, Any]) -> str:
    """How often each policy asked for what."""
    shares = {
        arm["name"]: ", ".join(f"{what} {share:.0%}" for what, share in list(arm["decisions"]["share"].items())[:8])
        for arm in report["arms"]
        if arm.get("decisions")
    }
    return f"<h2>Decisions</h2>{_facts(shares)}" if shares else ""


def _output(output: dict[str, Any]) -> str:
    arms = "".join(
        f"<h4>{_text(name)}</h4><pre>"
        + "".join(f"<mark>{_text(text)}</mark>" if drafted else _text(text) for text, drafted in pieces)
        + "</pre>"
        for name, pieces in output["arms"].items()
    )
    title = f"{output['id']}: {output['prompt'][:80]}"
    return f"<details><summary>{_text(title)}</summary><pre>{_text(output['prompt'])}</pre>{arms}</details>"


def _text(value: Any) -> str:
    return html.escape(str(value))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"
