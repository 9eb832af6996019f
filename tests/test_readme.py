"""Every command and every line of Python in README.md works as written."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from drafters.errors import UserError
from train.recipe import load_recipe

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.M | re.S)


def commands() -> list[str]:
    """Shell lines of the README without comments; a line that ends in a backslash goes on."""
    lines = "\n".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]


def check_make(targets: list[str]) -> None:
    defined = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), flags=re.M))
    assert targets and set(targets) <= defined


def check_module(name: str, args: list[str]) -> None:
    """Parses the arguments with the module's own parser, and loads the recipes among them."""
    assert (ROOT / (name.replace(".", "/") + ".py")).is_file(), f"no such script: {name}"
    try:
        importlib.import_module(name).parser().parse_args(args)
    except SystemExit:  # argparse has printed what is wrong
        pytest.fail(f"{name} refuses {shlex.join(args)}")
    if args and args[0].endswith(".yaml"):
        overrides = [arg for arg in args[1:] if "=" in arg and not arg.startswith("-")]
        load_recipe(ROOT / args[0], overrides)


def check(command: str) -> None:
    """Checks a command without running it; a kind of command that it does not know fails."""
    match shlex.split(command):
        case ["make", *targets]:
            check_make(targets)
        case ["source", ".venv/bin/activate"]:
            assert ".venv" in (ROOT / "Makefile").read_text()
        case ["accelerate", "launch", *args]:
            launch = launch_command_parser().parse_args(args)
            assert launch.module, "launch by module, not by path"
            check_module(f"{launch.training_script}.__main__", launch.training_script_args)
        case ["python", "-m", package, *args]:
            check_module(f"{package}.__main__", args)
        case ["python", script, *args]:
            assert script.startswith("scripts/")
            check_module(script.removesuffix(".py").replace("/", "."), args)
        case _:
            pytest.fail(f"the README has a command that no test knows: {command}")


def test_the_readme_has_commands_and_python():
    assert len(commands()) >= 10
    assert blocks("python")


@pytest.mark.parametrize("command", commands())
def test_commands(command):
    check(command)


@pytest.mark.parametrize(
    "command",
    [
        "make no-such-target",
        "python scripts/chat.py --no-such-flag",
        "python scripts/no_such_script.py",
        "python -m train recipes/no-such-recipe.yaml",
        "rm -rf runs",
    ],
)
def test_wrong_commands_are_found(command):
    with pytest.raises((AssertionError, pytest.fail.Exception, UserError)):
        check(command)


def test_python(monkeypatch, capsys, target, drafters):
    """Runs the Python blocks in order, in one namespace, with a tiny target and drafter in place of the named ones."""
    monkeypatch.setattr("drafters.target.load_target", lambda *args, **kwargs: target)
    monkeypatch.setattr("drafters.checkpoint.load_drafter", lambda *args, **kwargs: drafters["eagle3"])
    namespace: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    assert len(namespace["out"].tokens) > 0
    assert namespace["out"].text in capsys.readouterr().out
