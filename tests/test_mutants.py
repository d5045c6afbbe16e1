"""What the tests protect against: faults put into a script on purpose, one at a time, must make its tests fail.

The faults are data, a file a script in tests/mutants: what to replace, by what, and the fault in words. Run with

    python -m pytest -m slow tests/test_mutants.py
"""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FAULTS = [
    pytest.param(path.stem, old, new, id=f"{path.stem}: {words}")
    for path in sorted((ROOT / "tests" / "mutants").glob("*.py"))
    for old, new, words in runpy.run_path(str(path))["FAULTS"]
]


@pytest.mark.parametrize("script, old, new", FAULTS)
def test_the_fault_can_be_put_in(script, old, new):
    source = (ROOT / f"{script}.py").read_text()
    assert source.count(old) == 1, f"{script}.py has this {source.count(old)} times, not once: {old}"
    compile(source.replace(old, new), script, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("script, old, new", FAULTS)
def test_the_fault_is_noticed(script, old, new, tmp_path):
    for name in ("tests", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.csv", "*.png", "*.gif"))
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(path, tmp_path)
    mutant = tmp_path / f"{script}.py"
    mutant.write_text(mutant.read_text().replace(old, new))
    tests = f"tests/test_{script.removeprefix('ersac_').removesuffix('_expectile_data')}.py"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 1, f"{tests} noticed nothing (exit code {done.returncode}):\n{done.stdout[-2000:]}"
