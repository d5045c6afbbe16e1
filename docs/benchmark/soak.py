"""A long run watched from outside: memory and speed over time.

    python docs/benchmark/soak.py --minutes 60

Starts a training script with more updates than fit into the time, reads its resident memory, its processor time and its
last row of metrics.csv twice a minute, and ends it with Ctrl-C, so that the way out is tried too. A row is written at
once. Speed is updates per second of processor time, evaluation included, so that other programs hardly count.
"""

import csv
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Args:
    command: str = "ersac_epinet.py --env-id CartPole-v1 --dataset-size 10000"
    """script and arguments"""
    minutes: float = 60.0
    """how long to watch"""
    interval: float = 30.0
    """seconds between two rows"""
    out: str = str(ROOT / "docs" / "benchmark" / "soak.csv")
    """CSV with a row for every look"""


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    script, *words = shlex.split(args.command)
    with tempfile.TemporaryDirectory() as folder, open(args.out, "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["seconds", "cpu_seconds", "rss_mb", "update"])
        command = [sys.executable, str(ROOT / script), *words, "--total-updates", "100000000", "--output-dir", folder]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        started = time.time()
        while time.time() - started < 60 * args.minutes and process.poll() is None:
            time.sleep(args.interval)
            status = Path(f"/proc/{process.pid}/status").read_text()
            rss = int(status.split("VmRSS:")[1].split()[0]) / 1024
            ticks = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]  # user and system
            cpu = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
            update = 0
            for path in Path(folder).glob("*/metrics.csv"):
                with open(path, newline="") as metrics:
                    update = max([int(row["update"]) for row in csv.DictReader(metrics)], default=0)
            writer.writerow([f"{time.time() - started:.0f}", f"{cpu:.1f}", f"{rss:.1f}", update])
            f.flush()
        process.send_signal(signal.SIGINT)
        print(process.communicate(timeout=60)[0].strip())
        if process.returncode != 130:
            sys.exit(f"{args.command}: ended with code {process.returncode} instead of 130, that of Ctrl-C.")
