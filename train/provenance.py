"""Where a drafter comes from: recipe, versions and git revision, kept beside every checkpoint."""

import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "safetensors")


def provenance(recipe: dict[str, Any]) -> dict[str, Any]:
    """What `headstart.json` says of a run's origin."""
    return {"recipe": recipe, "versions": {name: version(name) for name in PACKAGES}, "git": git_revision()}


def git_revision() -> str | None:
    """Revision of this checkout, with "+" when files were changed; None outside git."""
    root = Path(__file__).resolve().parent.parent
    try:
        head = subprocess.run(
            ["git", "-C", root, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
        status = subprocess.run(
            ["git", "-C", root, "status", "--porcelain"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if status.stdout.strip() else "")
