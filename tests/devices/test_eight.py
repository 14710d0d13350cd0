"""Runs on_eight.py, whose name keeps pytest from it, in a process that has eight virtual devices."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import jax

SCRIPT = pathlib.Path(__file__).with_name("on_eight.py")


def test_on_eight_devices() -> None:
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "--rootdir", str(SCRIPT.parents[2]), str(SCRIPT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=SCRIPT.parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    text = SCRIPT.read_text("utf-8")
    if not hasattr(jax, "shard_map"):  # before JAX 0.7: what needs it stands at the end
        text = text.split("# The axes of a mesh are explicit")[0]
    count = text.count("\ndef test_")
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= count > 0
    assert "skipped" not in done.stdout
