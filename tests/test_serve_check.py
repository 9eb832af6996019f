"""scripts/serve_check.py: its arithmetic, and what becomes of the server's processes. The server is a stand-in."""

import os
import sys
import time
from types import SimpleNamespace

import pytest

from decode.engine import DraftSettings, Generation, Round
from drafters.errors import UserError
from scripts import serve_check as script

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="target"} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="target"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="target"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="0"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="1"} 1.0
"""
# Stands where the server's Python would: answers like it, and has a child of its own, whose id is its log's first line.
SERVER = """#!{python}
import http.server, json, subprocess, sys
if {broken}:
    sys.exit("(Worker pid=1) ERROR [executor.py:9] ValueError: no such drafter\\nRuntimeError: see root cause above")
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer({metrics!r}.encode() if self.path == "/metrics" else b"")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = asked["prompt"][: asked["max_tokens"]]
        self.answer(json.dumps({{"choices": [{{"token_ids": ids}}]}}).encode())

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def options(tmp_path, broken=False):
    stand_in = tmp_path / "python"
    stand_in.write_text(SERVER.format(python=sys.executable, metrics=METRICS, broken=broken))
    stand_in.chmod(0o755)
    return SimpleNamespace(python=str(stand_in), target=str(tmp_path), start_timeout=20, concurrency=2)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def round_of(drafted, accepted):
    return Round(drafted, drafted, accepted, accepted + 1, 0.0, 0.0, 0.0)


def test_both_decoders_are_counted_alike():
    rounds = [round_of(2, 2), *[round_of(2, 1)] * 4, *[round_of(2, 0)] * 5]
    served = script.survival(script.parse_counters(METRICS), 2)
    assert served == script.our_survival(rounds, 2)
    assert served == {"rounds": 10, "kept": 6, "tau": pytest.approx(1.6), "survival": [0.5, 0.1]}


@pytest.mark.parametrize(("ends_at", "counted"), [(None, 2), (2, 1), (4, 1), (5, 2)])
def test_our_last_round_counts_whole_as_the_servers_does(monkeypatch, ends_at, counted):
    tokens = [0 if i == ends_at else 7 for i in range(11)]  # 1 of the prefill, then 4, 4 and 2 by three rounds
    rounds = [round_of(3, 3), round_of(3, 3), round_of(3, 1)]
    end = None if ends_at is None else ends_at + 1
    asked = {}

    def generate(*_, **options):
        asked.update(options)
        return Generation(tokens, rounds=rounds)

    monkeypatch.setattr(script, "generate", generate)
    target = SimpleNamespace(eos_token_ids=(0,))
    assert script.our_run(target, None, [1], 8, DraftSettings(length=3)) == (tokens[:8][:end], rounds[:counted])
    assert (asked["max_new_tokens"], asked["eos_token_ids"]) == (11, ())  # else our last round would be cut short


@pytest.mark.parametrize(
    ("dtype", "kept", "rounds", "same_text", "found"),
    [
        ("float32", 60, 100, 20, []),
        ("float32", 40, 100, 20, ["accepts 1.400"]),
        ("float32", 50, 100, 20, ["keeps 50 drafts, our decoder 60"]),
        ("float32", 60, 100, 19, ["1 texts differ"]),
        ("bfloat16", 50, 100, 3, []),  # near-ties fall either way there
        ("bfloat16", 0, 0, 20, ["did not speculate", "accepts 1.000"]),
    ],
)
def test_what_counts_as_a_failure(dtype, kept, rounds, same_text, found):
    row = {"dtype": dtype, "prompts": 20, "same_text": same_text, "ours": {"tau": 1.6, "kept": 60}}
    served = {"tau": 1 + kept / max(1, rounds), "kept": kept, "rounds": rounds}
    problems = script.failures(row | {"server": served})
    assert len(problems) == len(found)
    assert all(part in problem for part, problem in zip(found, problems, strict=True))


def test_the_server_answers_and_ends_with_its_children(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        script.server(options(tmp_path), tmp_path, "plain", "float32") as url,
    ):
        texts, rate, grown = script.ask_all(url, [[5, 6, 7], [8]], 2, 2)
        assert texts == [[5, 6], [8]]
        assert rate > 0 and set(grown.values()) == {0.0}  # only growth counts, not what was there before
        child = int((tmp_path / "plain.log").read_text().splitlines()[0])
        assert alive(child)
        raise KeyboardInterrupt
    deadline = time.monotonic() + 5
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def test_a_server_that_ends_is_one_line(tmp_path):
    with (
        pytest.raises(UserError, match=r"ended with status 1; .*plain\.log says: .*ValueError: no such drafter$"),
        script.server(options(tmp_path, broken=True), tmp_path, "plain", "float32"),
    ):
        pass


def test_a_server_that_never_answers_is_given_up(tmp_path):
    late = options(tmp_path)
    late.start_timeout = 0
    with (
        pytest.raises(UserError, match="not ready in 0 s"),
        script.server(late, tmp_path, "plain", "float32"),
    ):
        pass
