"""Where a result comes from: recipe, versions and git revision, kept beside every checkpoint and report."""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "safetensors")


def provenance(recipe: dict[str, Any]) -> dict[str, Any]:
    """What `headstart.json` says of a run's origin."""
    return {"recipe": recipe, "versions": {name: version(name) for name in PACKAGES}, "headstart": revision()}


def revision() -> str:
    """Git revision of this checkout ("+" where files differ from it), else the installed version, else "unknown"."""
    root = Path(__file__).resolve().parent.parent
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
        try:
            found = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:  # no git
            return "unknown"
        if found.returncode == 0:
            return found.stdout.strip()
    try:
        return version("headstart")
    except PackageNotFoundError:
        return "unknown"
