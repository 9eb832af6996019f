"""The stamp of a measurement: machine, versions and load. A speedup without it can't be compared."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

from drafters.provenance import revision
from drafters.target import Target


def environment(target: Target) -> dict[str, Any]:
    """Describe machine, software and how the target runs. Stable over repeated calls (load is apart)."""
    device = str(target.device)
    if target.device.type == "cuda":
        device = f"{device} ({torch.cuda.get_device_name(target.device)})"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "headstart": revision(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": str(getattr(target.model.config, "_attn_implementation", None)),
    }


def load_average() -> list[float] | None:
    """The machine's load over 1, 5 and 15 minutes, None where the system keeps none."""
    return [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
