"""The report's two files: complete, self-contained, safe to open."""

import io
import json
from html.parser import HTMLParser

import pytest
from rich.console import Console

from decode.arms import Run
from decode.evaluate import summarize
from decode.report import headline, print_table, write_report

EVIL = "<script>alert('x')</script> & $x^2$"


def one_run(scale):
    rounds = [[3, 3, a, a + 1, 0.001 * scale, 0.006 * scale, 0.001 * scale, 0.008 * scale] for a in (0, 2, 3)]
    return Run(list(range(9)), rounds, 20, 0.03, 0.024 * scale, "length", 100.0)


@pytest.fixture
def report():
    records = [
        {
            "id": f"p{i}",
            "category": ("chat", EVIL)[i % 2],
            "arms": {"plain": [one_run(4 + i)], EVIL: [one_run(2)], "slow": [one_run(9)], "hf_generate": [one_run(5)]},
        }
        for i in range(4)
    ]
    return {
        "environment": {"python": "3", "load_before": [0.1, 0.2, 0.3]},
        "target": {"name": EVIL, "fingerprint": {}, "template_hash": None},
        "settings": {"runs": 2, "conventions": {"tau": "bonus included"}},
        "prompts": {"name": "headstart", "count": 4},
        "drafters": {
            name: {"kind": "Fake", "training_samples": 7, "training_tokens": None, "tau_estimate": None,
                   "expected_tau": None, "trained_for": None}
            for name in (EVIL, "slow")
        },
        "arms": [summarize(name, records) for name in ("plain", EVIL, "slow", "hf_generate")],
        "warnings": [f"beware of {EVIL}"],
    }  # fmt: skip


OUTPUTS = [{"id": "p0", "category": "chat", "prompt": EVIL, "arms": {EVIL: [("own ", False), (EVIL, True)]}}]


class Page(HTMLParser):
    """Collects tags and checks that they nest."""

    VOID = {"meta", "br", "link", "img"}

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links, self.text = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [v for k, v in attributes if k in ("src", "href", "xlink:href", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [v for k, v in attributes if k in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_is_self_contained_and_escaped(report, tmp_path):
    path = write_report(report, OUTPUTS, tmp_path / "new")
    source = path.read_text()
    page = Page()
    page.feed(source)
    assert page.open == []
    assert "http://" not in source and "https://" not in source and "@import" not in source
    assert "script" not in page.tags and "link" not in page.tags
    assert all(link.startswith("#") for link in page.links)
    assert page.tags.count("svg") == 5
    assert "#010203" not in source and "currentColor" in source
    assert 'name="viewport"' in source and "prefers-color-scheme:dark" in source
    assert page.tags.count("mark") == 2  # the legend and the one accepted piece
    assert any(EVIL in text for text in page.text)


def test_json_holds_the_report_without_outputs(report, tmp_path):
    write_report(report | {"outputs": OUTPUTS}, OUTPUTS, tmp_path)
    data = json.loads((tmp_path / "report.json").read_text())
    assert "outputs" not in data and data["arms"] == report["arms"]


def test_headline_names_the_best_lossless_drafter(report):
    assert headline(report).startswith(f"{EVIL}: ")
    assert "x the speed of plain decoding (95% interval" in headline(report)
    report["arms"][1]["exact_match"] = {"verdict": "FAIL", "rate": 0.0}
    assert headline(report).startswith("slow: ")
    report["arms"] = report["arms"][:1]
    assert "no drafter" in headline(report)


def test_plain_alone_still_gives_a_page(report, tmp_path):
    report["arms"], report["drafters"] = report["arms"][:1], {}
    assert "Plain decoding" in write_report(report, [], tmp_path).read_text()


def test_what_a_router_chose_is_shown(report, tmp_path):
    name = next(iter(report["drafters"]))
    report["drafters"][name]["choices"] = {"off": 1, "suffix, sure": 3}
    words = "suffix, sure 3 times (75%); off 1 times (25%)"
    assert words in write_report(report, [], tmp_path).read_text()
    console = Console(file=io.StringIO(), width=200)
    print_table(report, console)
    assert f"{name} chose {words}" in console.file.getvalue()


def test_terminal_table(report):
    console = Console(file=io.StringIO(), width=200)
    print_table(report, console)
    text = console.file.getvalue()
    assert "slow" in text and "(slower)" in text and "warning: beware" in text
