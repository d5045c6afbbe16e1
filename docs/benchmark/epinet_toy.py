"""What the Epinet learns about its own ignorance: standard deviation against the number of data points.

    python docs/benchmark/epinet_toy.py

Critic and loss are those of ersac_epinet.py; the targets are zero, for only the spread is of interest. First, one state
s with two actions, of which action 0 has been tried n times: theory says noise_scale / sqrt(n) there (the loss is least
at the mean of n random unit vectors) and the prior's own spread where nothing was tried. Second, states on a line with
many data on the left, a few in the middle and none elsewhere. Both for linear heads with the closed form's loss and for
general heads with the loss of samples. Writes epinet_std.csv and epinet_line.csv.
"""

import copy
import csv
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from ersac_epinet import EpinetCritic, epinet_loss  # noqa: E402


@dataclass
class Args:
    seeds: int = 10
    """networks and data sets for each number of data points"""
    counts: tuple[int, ...] = (1, 3, 10, 30, 100, 300, 1000)
    """numbers of data points at the pair (s, action 0)"""
    out: str = str(ROOT / "docs" / "benchmark")
    """folder for the CSVs"""


def train(states, action, seed, linear=True, updates=600, noise_scale=1.0, prior_scale=1.0):
    """An Epinet fitted to the pairs (states [n, 2], action [n]), and the same Epinet before it saw any data."""
    torch.manual_seed(seed)
    critic = EpinetCritic(2, 2, 16, 32, prior_scale=prior_scale, linear=linear)
    untrained = copy.deepcopy(critic)
    c = F.normalize(torch.randn(len(states), 16), dim=-1)  # one fixed direction for each data point, [n, d_z]
    optimizer = torch.optim.Adam([p for p in critic.parameters() if p.requires_grad], lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.01, updates)
    for _ in range(updates):
        if linear:
            loss = epinet_loss(*critic(states), action, torch.zeros(len(states)), c, noise_scale).mean()
        else:
            z = torch.randn(30, 16)
            q = critic.sample(states, z)[:, torch.arange(len(states)), action]  # [N, n]
            loss = (q - noise_scale * z @ c.T).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return critic, untrained


@torch.no_grad()
def spread(critic, states):
    """Standard deviation of q(s, a, z) over z, for linear heads |sigma_bar(s, a)|. [n, A]"""
    if critic.linear:
        return critic(states)[1].norm(dim=-1)
    z = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0))
    return critic.sample(states, z).std(0)


@torch.no_grad()
def linear_share(critic, states):
    """Share of the variance of q(s, a, z) over z that a linear function of z explains; 1 for linear heads."""
    z = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0))
    q = critic.sample(states, z).flatten(1)  # [2000, n A]
    z = torch.cat([z, torch.ones(2000, 1)], 1)
    rest = q - z @ torch.linalg.lstsq(z, q).solution
    return (1 - rest.square().sum() / (q - q.mean(0)).square().sum()).item()


def std_against_count(n, seed, linear=True):
    """One row: spread at the seen pair, at the same state's other action, at a state far away; and before any data."""
    seen, far = torch.tensor([[0.5, -0.5]]), torch.tensor([[-3.0, 3.0]])
    row = {"heads": "linear" if linear else "general", "n": n, "seed": seed, "theory": n**-0.5}
    both = train(seen.expand(n, 2), torch.zeros(n, dtype=torch.long), seed, linear)
    for when, critic in zip(("", "_before"), both):
        row[f"seen{when}"], row[f"other_action{when}"] = spread(critic, seen)[0].tolist()
        row[f"far_state{when}"] = spread(critic, far).mean().item()
        row[f"linear_share{when}"] = linear_share(critic, seen)
    return row


def line(seed, linear=True):
    """Rows along a line of states: 1000 data points on the left, 10 in the middle, none elsewhere."""
    g = torch.Generator().manual_seed(seed)
    x = torch.cat([-2 + torch.rand(1000, generator=g), 0.2 + 0.4 * torch.rand(10, generator=g)])  # [1010]
    both = train(torch.stack([x, x.square() / 2 - 1], -1), torch.zeros(len(x), dtype=torch.long), seed, linear)
    grid = torch.linspace(-4, 3, 71)
    after, before = (spread(critic, torch.stack([grid, grid.square() / 2 - 1], -1)) for critic in both)  # [71, A]
    names = ("x", "seen_action", "other_action", "before")
    rows = zip(grid.tolist(), *after.T.tolist(), before.mean(-1).tolist())
    heads = "linear" if linear else "general"
    return [{"heads": heads, "seed": seed} | dict(zip(names, row)) for row in rows]


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(1)
    kinds = (True, False)
    counts = [std_against_count(n, s, kind) for kind in kinds for n in args.counts for s in range(args.seeds)]
    lines = [row for kind in kinds for s in range(args.seeds) for row in line(s, kind)]
    for name, rows in (("epinet_std", counts), ("epinet_line", lines)):
        with open(Path(args.out) / f"{name}.csv", "w", newline="") as f:
            writer = csv.DictWriter(f, rows[0])
            writer.writeheader()
            writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
