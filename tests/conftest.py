"""Running a script inside the test process: many small runs without paying for an interpreter each."""

import json
import runpy
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """run("ersac_tabular", "--seed", 3) -> exit code, output and run folders, all under a temporary folder."""

    def call(script, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, arguments)])
        before = set(tmp_path.glob("runs/*"))
        handler, threads, code = signal.getsignal(signal.SIGINT), torch.get_num_threads(), 0
        capsys.readouterr()
        try:
            runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
        except SystemExit as stop:
            code = stop.code
            if isinstance(code, str):  # sys.exit("message") prints it and exits with 1
                print(code, file=sys.stderr)
                code = 1
        finally:
            signal.signal(signal.SIGINT, handler)
            torch.set_num_threads(threads)
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code or 0, out=out, err=err, folders=sorted(set(tmp_path.glob("runs/*")) - before))

    return call


@pytest.fixture
def load():
    """What a run folder holds: result, arguments, checkpoint and the metrics as text without the timing column."""

    def read(folder):
        return SimpleNamespace(
            result=json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else None,
            args=json.loads((folder / "args.json").read_text()),
            checkpoint=torch.load(folder / "checkpoint.pt", weights_only=True),
            metrics=[line.rsplit(",", 1)[0] for line in (folder / "metrics.csv").read_text().splitlines()],
        )

    return read
