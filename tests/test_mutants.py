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


def noticed(folder, script, old, new):
    """Copy what the script's tests need, put the fault in, and run them: do they fail?"""
    for name in ("tests", "docs"):
        ignored = shutil.ignore_patterns("*.png", "*.gif", "gym*.csv", "tabular*.csv")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(path, folder)
    mutant = folder / f"{script}.py"
    mutant.write_text(mutant.read_text().replace(old, new))
    tests = f"tests/test_{script.removeprefix('ersac_').removesuffix('_expectile_data')}.py"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", tests]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        return True, "the tests did not end"
    return done.returncode == 1 or done.returncode < 0, done.stdout[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted({param.values[0] for param in FAULTS}))
def test_without_a_fault_there_is_nothing_to_notice(script, tmp_path):
    failed, output = noticed(tmp_path, script, "import", "import")
    assert not failed, output


@pytest.mark.slow
@pytest.mark.parametrize("script, old, new", FAULTS)
def test_the_fault_is_noticed(script, old, new, tmp_path):
    failed, output = noticed(tmp_path, script, old, new)
    assert failed, output
