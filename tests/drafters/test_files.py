"""Files of a drafter folder: scratch folders, modes, and values that no drafter can have."""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch

from drafters.errors import UserError
from drafters.files import CONFIG, alone_in, partial_folder, read_folder, read_json, replacing, write_weights


def test_each_process_has_a_scratch_folder_and_a_dead_one_s_goes(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for pid in (gone.pid, os.getppid()):
        (tmp_path / f".out.{pid}.partial").mkdir()
        os.utime(tmp_path / f".out.{pid}.partial", (0, 0))
    recent = tmp_path / f".out.1.{gone.pid}.partial"  # perhaps a process of another container
    recent.mkdir()
    (tmp_path / ".out.mine.partial").mkdir()  # whoever made that
    kept = {f".out.{os.getppid()}.partial", ".out.mine.partial", recent.name}
    with partial_folder(tmp_path / "out") as one, partial_folder(tmp_path / "out") as two:
        assert {p.name for p in tmp_path.iterdir()} == kept | {one.name, two.name}
    assert {p.name for p in tmp_path.iterdir()} == kept


def test_errors_name_the_folder_that_was_asked_for(tmp_path):
    with pytest.raises(UserError) as error, partial_folder(tmp_path / "out") as folder:
        raise UserError(f"{folder / CONFIG}: wrong")
    assert str(error.value) == f"{tmp_path / 'out' / CONFIG}: wrong"
    with pytest.raises(OSError) as full, partial_folder(tmp_path / "out") as folder:
        (folder / "no" / CONFIG).write_text("")
    assert full.value.filename == str(tmp_path / "out" / "no" / CONFIG)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / f".plan.json.{gone.pid}.partial").write_text("ne")  # a process was killed there
    os.utime(tmp_path / f".plan.json.{gone.pid}.partial", (0, 0))
    with pytest.raises(KeyboardInterrupt), replacing(path) as partial:
        partial.write_text("ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    with replacing(path) as partial:
        partial.write_text("new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_one_process_at_a_time_writes_into_a_folder(tmp_path, capsys):
    waited = threading.Event()

    def wait():
        with alone_in(tmp_path, "taken; waiting", wait=True):
            waited.set()

    with alone_in(tmp_path, "taken"):
        with pytest.raises(UserError, match="^taken$"), alone_in(tmp_path, "taken"):
            pass
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not waited.wait(0.2)
    waiting.join(10)
    assert waited.is_set() and "taken; waiting" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model.safetensors", "medusa_lm_head.pt"])
def test_weights_have_the_mode_that_the_umask_leaves(tmp_path, name):
    before = os.umask(0o022)
    try:
        write_weights(tmp_path / name, {"x": torch.ones(2)})
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o644
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


@pytest.mark.parametrize("key", ["num_attention_heads", "head_dim", "hidden_size", "vocab_size", "medusa_num_layers"])
def test_a_size_of_nothing_is_refused(tmp_path, key):
    (tmp_path / CONFIG).write_text(json.dumps({"transformer_layer_config": {key: 0}}))
    with pytest.raises(UserError, match=f"{key}=0 must be at least 1"):
        read_json(tmp_path / CONFIG)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(UserError, match="x: is a file, not a drafter folder"):
        read_folder(tmp_path / "x")
