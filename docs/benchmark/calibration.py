"""Does the ellipsoid hold the truth as often as upsilon says? Policy evaluation on RiverSwim with a fixed policy.

    python docs/benchmark/calibration.py

A policy that was learned on the data was also chosen on them, so its values are the ones that the data overrate. Here
the policy is fixed beforehand, the one that collected the data, and the critics of ersac_tabular.py only evaluate it.
Columns: the share of states whose ellipsoid holds the true Q-vector, and the share whose robust value is a lower bound
of the true value. Unseen pairs have an entry of their own: no data speak there, only the initial tables do. The same
for learned policies is tabular.py --grid calibration. Finished seeds are skipped the next time.
"""

import csv
import itertools
import math
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from scipy.optimize import nnls
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from ersac_tabular import Args as Tabular  # noqa: E402
from ersac_tabular import (  # noqa: E402
    collect,
    entropy,
    expectile_value_iteration,
    greedy,
    machine_replacement,
    policy_value,
    riverswim,
    robust_target,
    worst_case_box,
    worst_case_ellipsoid,
    worst_case_hull,
)

UPSILONS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
CURVES = [(100, 0.5), (100, 0.1), (100, 0.9), (10, 0.5), (1000, 0.5)]  # transitions per state, tau
COLUMNS = ["dataset_size", "expectile_tau", "targets", "upsilon", "seed", "coverage_rate", "lower_bound_rate"]
COLUMNS += ["coverage_rate_seen", "lower_bound_rate_seen", "share_seen", "commit"]
NEAR = 0.01  # tolerance for rounding and incomplete convergence


@dataclass
class Args:
    workers: int = 2
    """processes at a time, one thread each"""
    num_seeds: int = 10
    """seeds, counted from 100"""
    out: str = str(ROOT / "docs" / "benchmark" / "calibration.csv")
    """CSV to append to"""


def mahalanobis(x, q):
    """Squared distances of points x [M, B, A] from the mean of the samples q [N, B, A], in their covariance. [B, M]"""
    mu = q.mean(0)
    d = (q - mu).permute(1, 2, 0)  # [B, A, N]
    sigma = d @ d.mT / len(q)  # [B, A, A]
    scale = sigma.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]  # [B, 1, 1]
    ridge = (1e-12 * scale + torch.finfo(q.dtype).tiny) * torch.eye(q.shape[-1], dtype=q.dtype)
    gap = (x - mu).permute(1, 2, 0)  # [B, A, M]
    return (gap * torch.linalg.solve(sigma + ridge, gap)).sum(1)


def radius_squared(q, upsilon):
    """Of the smallest ellipsoid around the mean that holds a share upsilon of the samples. [B]"""
    k = min(max(math.ceil(upsilon * len(q) - 1e-9), 1), len(q))  # 0.28 * 25 is a little above 7
    return mahalanobis(q, q).kthvalue(k, dim=-1).values


def inside(x, q, uncertainty_set, upsilon, tolerance=0.0):
    """Whether the points x [B, A] lie in the sets built from q [N, B, A], up to a tolerance. Bool [B]"""
    if uncertainty_set == "box":
        return ((q.amin(0) - tolerance <= x) & (x <= q.amax(0) + tolerance)).all(-1)
    if uncertainty_set == "ellipsoid":
        nearest = q.mean(0).clamp(x - tolerance, x + tolerance)  # x moved towards the mean, by the tolerance
        return mahalanobis(nearest[None], q)[:, 0] <= radius_squared(q, upsilon)
    # x is in the hull iff w >= 0, sum(w) = 1 and sum_n w_n (q_n - x) = 0 has a solution
    scale = (q - x).abs().amax((0, 2)).clamp(min=1e-300)  # [B]
    d = (q - x) / scale[:, None]  # [N, B, A]
    system = torch.cat([d, torch.ones_like(d[..., :1])], -1)  # [N, B, A + 1]
    system = system.permute(1, 2, 0).numpy()  # [B, A + 1, N]
    goal = np.eye(system.shape[1])[-1]
    error = torch.tensor([nnls(system[b], goal)[1] for b in range(len(system))])  # [B]
    return error < 1e-9 + tolerance / scale


def monte_carlo(P, R, pi, gamma, episodes, rng):
    """Discounted returns of episodes from uniform starts, as in the paper. [episodes]"""
    s = rng.integers(len(P), size=episodes)
    returns = np.zeros(episodes)
    for t in range(round(20 / (1 - gamma))):  # gamma^t has fallen to e^-20
        a = (pi[s].cumsum(-1) < rng.random((episodes, 1))).sum(-1).clip(max=P.shape[1] - 1)
        s_next = (P[s, a].cumsum(-1) < rng.random((episodes, 1))).sum(-1).clip(max=P.shape[0] - 1)
        returns += gamma**t * R[s, a, s_next]
        s = s_next
    return returns


def rates(args, tables):
    """What only the true MDP tells about a run of ersac_tabular.py, from its arguments and its checkpoint: whether the
    robust value bounds the last policy's soft value from below, whether the set holds its Q-vector, what the policy
    itself is worth (the run evaluates the greedy one), and what sampled episodes of the greedy one return."""
    P, R = {"MachineReplacement": machine_replacement, "RiverSwim": riverswim}[args["env_id"]]()
    gamma, upsilon, kind = args["gamma"], args["upsilon"], args["uncertainty_set"]
    q, log_pi = tables["q"], tables["logits"].log_softmax(-1)
    pi = log_pi.exp()
    if kind == "ellipsoid":
        q_star = worst_case_ellipsoid(q, pi, upsilon)  # [S, A]
    else:
        q_star = {"box": worst_case_box, "hull": worst_case_hull}[kind](q, pi)
    bonus = args["alpha"] * entropy(pi, log_pi)  # [S]
    robust_v = ((pi * q_star).sum(-1) + bonus).numpy()  # [S]
    soft_v = policy_value(P, R + bonus.numpy()[:, None, None], pi.numpy(), gamma)  # [S]
    soft_q = torch.tensor((P * (R + gamma * soft_v)).sum(-1))  # [S, A]

    uniform = np.full(pi.shape, 1 / pi.shape[1])
    optimal = np.eye(pi.shape[1])[expectile_value_iteration(P, R, 0.5, gamma).argmax(-1)]
    v, v_random, v_optimal = (policy_value(P, R, policy, gamma) for policy in (pi.numpy(), uniform, optimal))
    episodes = monte_carlo(P, R, greedy(pi.numpy()), gamma, 1000, np.random.default_rng([args["seed"], 3]))
    return {
        "lower_bound_rate": (robust_v <= soft_v + NEAR).mean().item(),
        "coverage_rate": inside(soft_q, q, kind, upsilon, NEAR).double().mean().item(),
        "normalized_return_stochastic": 100 * (v - v_random).mean() / (v_optimal - v_random).mean(),
        "normalized_return_stochastic_state1": 100 * (v - v_random)[0] / (v_optimal - v_random)[0],
        "monte_carlo_return": episodes.mean(),
    }


def evaluate_fixed(size, tau, targets, seed, commit):
    """Rows of one data set: the defaults of ersac_tabular.py, with a policy that stays as it is."""
    torch.set_num_threads(1)
    default = Tabular()
    N = default.num_critics
    P, R = riverswim()
    S, A, _ = P.shape
    behaviour = expectile_value_iteration(P, R, tau, default.gamma).argmax(-1)  # [S]
    pi = (1 - default.epsilon) * np.eye(A)[behaviour] + default.epsilon / A  # the policy of the data, [S, A]
    rng = np.random.default_rng([seed, 0])
    visits = collect(P, behaviour, size * S, default.epsilon, default.reset_prob, rng)  # [S, A, S]
    resamples = np.random.default_rng([seed, 1]).multinomial(size * S, visits.ravel() / visits.sum(), N)
    resamples = torch.tensor(resamples.reshape(N, S, A, S)).double()
    n = resamples.sum(-1)  # [N, S, A]
    p_hat = resamples / n.clamp(min=1)[..., None]  # [N, S, A, S]
    step = 1 - (1 - default.q_lr) ** n
    prior = (R.min() / (1 - default.gamma), R.max() / (1 - default.gamma))
    v = policy_value(P, R, pi, default.gamma)  # [S]
    truth = torch.tensor((P * (R + default.gamma * v)).sum(-1))  # Q^pi, [S, A]
    seen = visits.sum(-1).min(-1) > 0  # every action of the state was taken, [S]
    pi = torch.tensor(pi)
    reward = torch.tensor(R)

    def train(upsilon):
        q = torch.tensor(np.random.default_rng([seed, 2]).uniform(*prior, (N, S, A)))
        q_target = q.clone()
        for _ in range(default.total_updates):
            if targets == "shared":
                q_next = worst_case_ellipsoid(q_target, pi, upsilon)  # [S, A]
            else:
                q_next = q_target[:, None, None]  # [N, 1, 1, S, A]
            y = robust_target(reward, 0.0, pi, pi.log(), q_next, 0.0, default.gamma)  # [(N,) S, A, S]
            q += step * ((p_hat * y).sum(-1) - q)
            q_target.lerp_(q, default.polyak)
        return q

    rows = []
    q = train(None) if targets == "own" else None  # own targets know no upsilon while they learn
    for upsilon in UPSILONS:
        if targets == "shared":
            q = train(upsilon)
        covered = inside(truth, q, "ellipsoid", upsilon, NEAR).numpy()  # [S]
        bound = ((pi * worst_case_ellipsoid(q, pi, upsilon)).sum(-1).numpy() <= v + NEAR).astype(float)  # [S]
        row = [size, tau, targets, upsilon, seed, covered.mean(), bound.mean()]
        row += [covered[seen].mean(), bound[seen].mean(), seen.mean(), commit]
        rows.append([round(x, 6) if isinstance(x, float) else x for x in row])
    return rows


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    path = Path(args.out)
    text = path.read_text() if path.exists() else ",".join(COLUMNS) + "\n"
    rows = list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))
    done = {(row["dataset_size"], row["expectile_tau"], row["targets"], row["seed"]) for row in rows}
    tasks = []
    for (size, tau), targets, i in itertools.product(CURVES, ("own", "shared"), range(args.num_seeds)):
        if (str(size), str(tau), targets, str(100 + i)) not in done:
            tasks.append((size, tau, targets, 100 + i))
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    if not path.exists():
        path.write_text(text)
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(evaluate_fixed, *task, described.stdout.strip()) for task in tasks]
        for future in tqdm(as_completed(futures), total=len(futures), desc="calibration", unit="data set"):
            with open(path, "a", newline="") as f:
                csv.writer(f, lineterminator="\n").writerows(future.result())
