"""The rules of the house, read off the source: import directions, file names, sizes, no machine paths."""

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import decode
import drafters
import train

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("train", "drafters", "decode")
FORBIDDEN = {
    "train": {"decode", "scripts", "tests"},
    "drafters": {"train", "decode", "scripts", "tests"},
    "decode": {"train", "scripts", "tests"},
    "scripts": {"tests"},
}
TRAINING_ONLY = {"datasets", "accelerate", "peft", "wandb"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported_names(path: Path) -> set[str]:
    """Top-level names that a file imports anywhere, also inside functions and `if TYPE_CHECKING`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # A relative import stays in its package only with one dot: the packages have no subfolders.
            assert node.level <= 1, f"{path}:{node.lineno}: import from above the package"
            if node.level == 0 and node.module:
                names.add(node.module.split(".")[0])
    return names


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_three_packages_are_ours():
    # A `train` folder or train.py in the working directory, or another distribution's, would be taken instead.
    assert {Path(package.__file__).parent.parent for package in (train, drafters, decode)} == {ROOT}


@pytest.mark.parametrize("path", python_files(*FORBIDDEN), ids=label)
def test_imports_point_one_way(path):
    room = path.relative_to(ROOT).parts[0]
    imported = imported_names(path)
    if (
        label(path) == "train/__main__.py"
    ):  # an entry point, like those in scripts/: it hands the decoder to the trainer
        imported -= {"decode"}
    assert not imported & FORBIDDEN[room], f"{label(path)} may not import {imported & FORBIDDEN[room]}"
    if label(path) == "drafters/variants.py":  # merges a LoRA adapter into a target, if there is one
        imported -= {"peft"}
    if room in ("drafters", "decode"):
        assert not imported & TRAINING_ONLY, f"{label(path)}: only train and scripts use {imported & TRAINING_ONLY}"


def test_the_import_check_sees_every_form(tmp_path):
    source = tmp_path / "sample.py"
    source.write_text("import decode.engine as e\ndef f():\n    from train.recipe import Recipe\n    from . import x\n")
    assert imported_names(source) == {"decode", "train"}


@pytest.mark.parametrize("path", python_files(*PACKAGES, "scripts"), ids=label)
def test_no_file_is_named_after_another_module(path):
    taken = set(sys.stdlib_module_names) | set(packages_distributions()) | set(PACKAGES)
    if path.stem not in ("__init__", "__main__"):
        assert path.stem not in taken, f"{label(path)} shadows a module when its folder comes first on the path"


@pytest.mark.parametrize("path", python_files(*PACKAGES, "scripts", "tests"), ids=label)
def test_files_and_functions_stay_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{label(path)}:{node.lineno}: {node.name} has {lines} lines"


def test_no_machine_paths_and_no_registry_hosts():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:  # an unpacked archive, not a checkout
        pytest.skip("not a git checkout")
    private = re.compile(r"/(?:work|home|root|Users)/\w|--(?:extra-)?index-url|--find-links|https?://[\w.]*pypi")
    text_kinds = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ""}
    files = [ROOT / name for name in listed.stdout.splitlines()]
    texts = {f: f.read_text() for f in files if f.suffix in text_kinds and f.is_file() and f != Path(__file__)}
    assert ROOT / "pyproject.toml" in texts
    found = [
        f"{label(f)}:{number}"
        for f, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if private.search(line)
    ]
    assert not found
