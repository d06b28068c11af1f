"""Row 25 of AGENTS_API 13: a client of 3.51 walks the rows 1, 7 and 8 of `test_conformance.py`.

That version is installed from PyPI into the cache of pytest, beside the one in use: hence slow. Run it with `-m slow`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

OLD = "openai==3.51.*"


@pytest.fixture(scope="module")
def old_client(request: pytest.FixtureRequest) -> Path:
    """The directory of the old package; what it depends on is what the new one uses."""
    place = Path(request.config.cache.mkdir("openai-3.51"))
    if not (place / "openai").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), OLD]
        subprocess.run(pip, check=True)
    return place


@pytest.mark.slow
def test_row_25_a_client_of_3_51(old_client: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(old_client)}
    version = [sys.executable, "-c", "import openai; print(openai.__version__)"]
    assert subprocess.run(version, env=env, capture_output=True, text=True).stdout.startswith("3.51.")
    rows = [sys.executable, "-m", "pytest", "tests/test_conformance.py", "-k", "row_1_ or row_7 or row_8"]
    done = subprocess.run(rows, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 10
