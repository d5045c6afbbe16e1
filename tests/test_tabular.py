"""ersac_tabular.py: MDPs, expectiles, the algorithm against a plain re-implementation, and the script itself."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from scipy import stats

from ersac_tabular import (
    actor_loss,
    collect,
    entropy,
    expectile,
    expectile_value_iteration,
    greedy,
    machine_replacement,
    monte_carlo,
    policy_value,
    riverswim,
    robust_target,
)

ROOT = Path(__file__).resolve().parents[1]
MDPS = {"MachineReplacement": machine_replacement, "RiverSwim": riverswim}
SHORT = ("--total-updates", 30, "--eval-interval", 10, "--checkpoint-interval", 7, "--eval-episodes", 20)


# ----- the MDPs
def test_machine_replacement_is_the_published_one():
    P, R = machine_replacement()
    assert P.shape == R.shape == (10, 2, 10) and P.dtype == R.dtype == np.float64
    assert (P[:, 1, 0] == 1).all() and (R[:, 1, 0] == -100).all()
    assert P[0, 0, :2] == pytest.approx([5 / 9, 4 / 9]) and P[9, 0, 8:] == pytest.approx([0.1, 0.9])
    for s in range(1, 9):
        assert P[s, 0, s - 1 : s + 2] == pytest.approx([0.1, 0.5, 0.4])
    assert np.diag(R[:, 0]) == pytest.approx(-5.0 * np.arange(1, 11))
    assert R[:, 0].sum() == pytest.approx(-5.0 * 55)  # no other reward for running the machine
    assert P.sum(-1) == pytest.approx(1.0, abs=1e-14)


def test_riverswim_is_the_published_one():
    P, R = riverswim()
    assert P.shape == R.shape == (20, 2, 20) and P.dtype == R.dtype == np.float64
    for s in range(20):
        assert P[s, 0, max(s - 1, 0)] == 1 and R[s, 0, max(s - 1, 0)] == 5
    for s in range(1, 19):
        assert P[s, 1, s - 1 : s + 2].tolist() == [0.137028976772708, 0.284628388822161, 0.578342634405131]
    assert P[0, 1, :2] == pytest.approx([0.421657365594869, 0.578342634405131], abs=1e-15)
    assert P[19, 1, 18:] == pytest.approx([0.137028976772708, 0.862971023227292], abs=1e-15)
    assert R[19, 1, 19] == 86.2971023227292 and np.count_nonzero(R[:, 1]) == 1
    assert P.sum(-1) == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize("env_id", MDPS)
def test_gymnasium_environment(env_id):
    env = gym.make(f"ersac/{env_id}-v0")
    check_env(env.unwrapped, skip_render_check=True)
    P, R = MDPS[env_id]()
    s, _ = env.reset(seed=0)
    counts = np.zeros_like(P)
    for step in range(4000):
        a = step % 2
        s_next, reward, terminated, truncated, _ = env.step(a)
        assert P[s, a, s_next] > 0 and reward == R[s, a, s_next] and not terminated
        counts[s, a, s_next] += 1
        s = env.reset()[0] if truncated else s_next
    visits = counts.sum(-1, keepdims=True)
    assert (np.abs(counts / np.maximum(visits, 1) - P)[visits[..., 0] > 100] < 0.2).all()
    assert truncated  # step 4000 is the end of the 20th episode of 200 steps


# ----- expectiles and risk-sensitive value iteration
def test_expectile_agrees_with_scipy():
    rng = np.random.default_rng(0)
    for _ in range(1000):
        size, tau = rng.integers(1, 12), rng.uniform(0.01, 0.99)
        x, p = rng.normal(size=size) * 10 ** rng.uniform(-3, 3), rng.dirichlet(np.ones(size))
        assert expectile(x, p, tau) == pytest.approx(stats.expectile(x, alpha=1 - tau, weights=p), rel=1e-9, abs=1e-9)


def test_expectile_broadcasts_and_takes_an_axis():
    rng = np.random.default_rng(1)
    x, p = rng.normal(size=(3, 5, 4)), rng.dirichlet(np.ones(5), size=(3, 4)).transpose(0, 2, 1)
    got = expectile(x, p, 0.3, axis=1)
    assert got.shape == (3, 4)
    for i, j in itertools.product(range(3), range(4)):
        assert got[i, j] == pytest.approx(stats.expectile(x[i, :, j], alpha=0.7, weights=p[i, :, j]), abs=1e-12)
    assert expectile(x, np.full(4, 0.25), 0.5) == pytest.approx(x.mean(-1), abs=1e-12)
    assert (expectile(x, np.full(4, 0.25), 0.9) < expectile(x, np.full(4, 0.25), 0.1)).all()  # 0.9 is risk-averse
    assert expectile(np.array([1.0, 2.0, 1e9]), np.array([0.5, 0.5, 0.0]), 0.5) == pytest.approx(1.5, abs=1e-6)


@pytest.mark.parametrize("env_id", MDPS)
@pytest.mark.parametrize("tau", [0.1, 0.5, 0.9])
def test_value_iteration_solves_the_bellman_equation(env_id, tau):
    P, R = MDPS[env_id]()
    q = expectile_value_iteration(P, R, tau, 0.9)
    for s, a in itertools.product(range(len(P)), range(2)):
        outcome = R[s, a] + 0.9 * q.max(-1)
        assert q[s, a] == pytest.approx(stats.expectile(outcome, alpha=1 - tau, weights=P[s, a]), abs=1e-8)


def test_the_papers_policy_table_up_to_two_cells():
    """28 of 30 cells; the two others are named in docs/paper_notes.md."""
    paper = {0.1: "0000000011", 0.5: "0000001111", 0.9: "0000011111"}
    P, R = machine_replacement()
    different = [
        (state, tau)
        for tau, row in paper.items()
        for state, (ours, theirs) in enumerate(zip(expectile_value_iteration(P, R, tau, 0.9).argmax(-1), row), 1)
        if ours != int(theirs)
    ]
    assert different == [(9, 0.1), (7, 0.5)]


def test_no_start_distribution_gives_the_papers_behaviour_column():
    """RiverSwim: the returns at tau = 0.1 and 0.9 add up to more than 43 in every start state; the paper's to 14."""
    P, R = riverswim()
    policies = [np.eye(2)[expectile_value_iteration(P, R, tau, 0.9).argmax(-1)] for tau in (0.5, 0.1, 0.9)]
    random_, optimal, seeking, averse = policy_value(P, R, np.stack([np.full((20, 2), 0.5), *policies]), 0.9)
    assert ((seeking + averse - 2 * random_) / (optimal - random_)).min() > 0.43


# ----- data
def test_collected_data_follow_the_behaviour_policy():
    P, R = riverswim()
    behaviour = np.arange(20) % 2
    visits = collect(P, behaviour, 40_000, 0.1, 0.2, np.random.default_rng(0))
    assert visits.sum() == 40_000 and (visits[P == 0] == 0).all()
    chosen = visits.sum(-1)[np.arange(20), behaviour].sum() / 40_000
    assert chosen == pytest.approx(0.95, abs=4 * np.sqrt(0.95 * 0.05 / 40_000))  # half of the random actions agree
    counts = visits.sum(-1)
    for s, a in zip(*np.nonzero(counts > 500)):
        tolerance = 5 * np.sqrt(0.25 / counts[s, a])
        assert visits[s, a] / counts[s, a] == pytest.approx(P[s, a], abs=tolerance)


def test_resets_of_the_data_collection():
    P, _ = riverswim()
    # without resets the data are one path: every state is left as often as it is entered, but for the two ends
    visits = collect(P, np.ones(20, int), 5000, 0.1, 0.0, np.random.default_rng(1))
    assert np.abs(visits.sum((1, 2)) - visits.sum((0, 1))).max() <= 1
    # with a reset after every transition the states are uniform
    visits = collect(P, np.zeros(20, int), 20_000, 0.1, 1.0, np.random.default_rng(2))
    assert stats.chisquare(visits.sum((1, 2))).pvalue > 1e-4


# ----- evaluation
@pytest.mark.parametrize("env_id", MDPS)
def test_exact_evaluation_against_iteration_and_monte_carlo(env_id):
    P, R = MDPS[env_id]()
    rng = np.random.default_rng(3)
    pi = rng.dirichlet(np.ones(2), size=(3, len(P)))
    bonus = rng.uniform(size=(3, len(P)))
    v = np.zeros((3, len(P)))
    for _ in range(500):
        for k, s in itertools.product(range(3), range(len(P))):
            v[k, s] = bonus[k, s] + sum(pi[k, s, a] * (P[s, a] @ (R[s, a] + 0.9 * v[k])) for a in range(2))
    assert policy_value(P, R, pi, 0.9, bonus) == pytest.approx(v, rel=1e-10)
    episodes = monte_carlo(P, R, pi[0], 0.9, 4000, np.random.default_rng(4))
    standard_error = episodes.std() / np.sqrt(4000)
    assert abs(episodes.mean() - policy_value(P, R, pi[:1], 0.9).mean()) < 4 * standard_error


def test_greedy_splits_ties():
    assert greedy(np.array([[0.5, 0.5], [0.2, 0.8]])).tolist() == [[0.5, 0.5], [0.0, 1.0]]


# ----- target and losses
def test_target_and_actor_loss_by_hand():
    pi = torch.tensor([[0.25, 0.75], [1.0, 0.0]], dtype=torch.float64)
    log_pi = pi.log()  # holds -inf: 0 log 0 counts as 0
    q_star = torch.tensor([[4.0, 8.0], [1.0, -5.0]], dtype=torch.float64)
    h = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))
    assert entropy(pi, log_pi).numpy() == pytest.approx([h, 0.0])
    reward, terminated = torch.tensor([1.0, 2.0]).double(), torch.tensor([0.0, 1.0]).double()
    y = robust_target(reward, terminated, pi, log_pi, q_star, 0.1, 0.9)
    assert y.numpy() == pytest.approx([1 + 0.9 * (7 + 0.1 * h), 2.0])
    assert actor_loss(pi, log_pi, q_star, 0.1).numpy() == pytest.approx([-(7 + 0.1 * h), -1.0])


def test_actor_loss_sends_no_gradient_into_q_star():
    q_star = torch.ones(1, 2, requires_grad=True)
    logits = torch.zeros(1, 2, requires_grad=True)
    log_pi = logits.log_softmax(-1)
    actor_loss(log_pi.exp(), log_pi, q_star, 0.1).sum().backward()
    assert q_star.grad is None and logits.grad is not None


# ----- the algorithm, against a re-implementation with loops over states, actions, critics and transitions
def plain_ersac(env_id, visits, resamples, q, kind, upsilon, updates, alpha=0.01, gamma=0.9, lr=0.01, polyak=0.02):
    """Sweeps over the data with the sets written out in numpy, and Adam written out by hand."""
    P, R = MDPS[env_id]()
    N, S, A = q.shape
    target, logits, m, v = q.copy(), np.zeros((S, A)), np.zeros((S, A)), np.zeros((S, A))

    def worst(points, p):
        if kind == "box":
            return points.min(0)
        if kind == "hull":
            return points[np.argmin([point @ p for point in points])]
        mu, sigma = points.mean(0), np.cov(points.T, ddof=0)
        distances = sorted((x - mu) @ np.linalg.solve(sigma, x - mu) for x in points)
        radius = np.sqrt(distances[int(np.ceil(round(upsilon * N, 9))) - 1])
        return mu - radius * sigma @ p / np.sqrt(p @ sigma @ p)

    for t in range(1, updates + 1):
        pi = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        value = [pi[s] @ worst(target[:, s], pi[s]) - alpha * pi[s] @ np.log(pi[s]) for s in range(S)]
        for i, s, a in itertools.product(range(N), range(S), range(A)):
            seen = [(R[s, a, x] + gamma * value[x], int(c)) for x, c in enumerate(resamples[i, s, a]) if c > 0]
            count = sum(c for _, c in seen)
            for _ in range(count):  # each transition pulls once, with step lr, towards the mean of their targets
                q[i, s, a] += lr * (sum(y * c for y, c in seen) / count - q[i, s, a])
        gradient = np.zeros((S, A))
        for s in range(S):
            slope = -(worst(q[:, s], pi[s]) - alpha * (np.log(pi[s]) + 1))  # d loss / d pi
            jacobian = np.diag(pi[s]) - np.outer(pi[s], pi[s])
            gradient[s] = visits[s].sum() / visits.sum() * jacobian @ slope
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        logits -= 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-30)
        target += polyak * (q - target)
    return q, target, logits


@pytest.mark.parametrize("kind, upsilon", [("box", 0.9), ("hull", 0.9), ("ellipsoid", 1.0), ("ellipsoid", 0.6)])
@pytest.mark.parametrize("env_id, bootstrap", [("RiverSwim", True), ("MachineReplacement", False)])
def test_script_equals_the_plain_algorithm(run, load, env_id, kind, upsilon, bootstrap):
    arguments = ["--env-id", env_id, "--uncertainty-set", kind, "--upsilon", upsilon, "--num-critics", 7, "--seed", 5]
    arguments += ["--total-updates", 12, "--bootstrap" if bootstrap else "--no-bootstrap"]
    done = run("ersac_tabular", *arguments)
    assert done.code == 0, done.err
    got = load(done.folders[0])
    visits = got.checkpoint["visits"].numpy()
    resamples = np.repeat(visits[None], 7, 0)
    if bootstrap:
        size = int(visits.sum())
        resamples = np.random.default_rng([5, 1]).multinomial(size, visits.ravel() / size, 7).reshape(7, *visits.shape)
        assert (resamples.sum((1, 2, 3)) == size).all() and (resamples[:, visits == 0] == 0).all()
    q = np.random.default_rng([5, 2]).uniform(*got.args["prior"], (7, *visits.shape[:2]))
    q, target, logits = plain_ersac(env_id, visits, resamples, q, kind, upsilon, 12)
    for ours, plain in (("q", q), ("q_target", target), ("logits", logits)):
        assert got.checkpoint[ours].numpy() == pytest.approx(plain, rel=1e-8, abs=1e-8), ours


# ----- the script
@pytest.mark.parametrize("kind", ["box", "hull", "ellipsoid"])
def test_seeds_side_by_side_equal_single_runs(run, load, kind):
    flags = ("--uncertainty-set", kind, "--total-updates", 150, "--eval-interval", 50, "--eval-episodes", 20)
    together = run("ersac_tabular", *flags, "--seed", 3, "--num-seeds", 4)
    assert together.code == 0 and len(together.folders) == 4
    for seed in (3, 5):
        alone = load(run("ersac_tabular", *flags, "--seed", seed, "--exp-name", "alone").folders[0])
        (folder,) = [f for f in together.folders if f"__{seed}__" in f.name]
        batched = load(folder)
        for name in ("q", "q_target", "logits", "visits"):
            assert torch.equal(alone.checkpoint[name], batched.checkpoint[name])
        for name, value in alone.result.items():
            if isinstance(value, float) and name != "updates_per_second":
                assert batched.result[name] == pytest.approx(value, abs=1e-10), name
        assert alone.args | {"exp_name": ""} == batched.args | {"exp_name": ""}


def test_run_folder_and_result(run, load):
    done = run("ersac_tabular", *SHORT, "--env-id", "MachineReplacement", "--uncertainty-set", "box", "--seed", 2)
    assert done.code == 0 and "normalized return" in done.out and str(done.folders[0].name) in done.out
    got = load(done.folders[0])
    needed = "script method env_id dataset_id seed updates updates_per_second eval_episodes eval_return_mean "
    needed += "eval_return_std random_return reference_return normalized_return policy_entropy"
    assert set(needed.split()) <= set(got.result)
    r = got.result
    assert (r["script"], r["method"], r["env_id"], r["seed"]) == ("ersac_tabular.py", "SAC-N", "MachineReplacement", 2)
    scale = r["reference_return"] - r["random_return"]
    assert r["normalized_return"] == pytest.approx(100 * (r["eval_return_mean"] - r["random_return"]) / scale)
    assert abs(r["monte_carlo_return"] - r["eval_return_mean"]) < 6 * r["eval_return_std"] / np.sqrt(r["eval_episodes"])
    assert [line.split(",")[0] for line in got.metrics] == ["update", "10", "20", "30"]
    assert not list(done.folders[0].glob("*.tmp")) and got.checkpoint["update"] == 30


def test_other_seeds_give_other_numbers(run, load):
    first, second = (load(run("ersac_tabular", *SHORT, "--seed", seed).folders[0]).checkpoint for seed in (0, 1))
    assert not torch.equal(first["q"], second["q"]) and not torch.equal(first["visits"], second["visits"])


def test_unseen_pairs_keep_their_initial_values(run, load):
    got = load(run("ersac_tabular", *SHORT, "--reset-prob", 0, "--expectile-tau", 0.1, "--seed", 4).folders[0])
    unseen = got.checkpoint["visits"].sum(-1) == 0
    initial = torch.tensor(np.random.default_rng([4, 2]).uniform(*got.args["prior"], (100, 20, 2)))
    assert unseen.any() and torch.equal(got.checkpoint["q"][:, unseen], initial[:, unseen])
    states = unseen.all(-1)
    assert (got.checkpoint["logits"][states] == 0).all()  # no data, no opinion


@pytest.mark.parametrize("kind", ["box", "hull", "ellipsoid"])
def test_resumed_run_ends_with_the_same_bits(run, load, kind, monkeypatch):
    flags = (*SHORT, "--uncertainty-set", kind, "--seed", 1)
    whole = load(run("ersac_tabular", *flags).folders[0])
    calls = []

    def interrupt(*arguments):  # Ctrl-C during update 18, between two checkpoints and two rows
        calls.append(arguments)
        if len(calls) == 2 * 18:  # Adam calls it, too
            signal.raise_signal(signal.SIGINT)
        return lerp(*arguments)

    lerp = torch.Tensor.lerp_
    monkeypatch.setattr(torch.Tensor, "lerp_", interrupt)
    part = run("ersac_tabular", *flags, "--exp-name", "part")
    monkeypatch.setattr(torch.Tensor, "lerp_", lerp)
    (folder,) = part.folders
    assert part.code == 130 and f"--resume {Path('runs') / folder.name}" in part.out
    assert load(folder).checkpoint["update"] == 18 and not (folder / "result.json").exists()
    rest = run("ersac_tabular", "--resume", Path("runs") / folder.name)
    assert rest.code == 0 and rest.folders == []
    resumed = load(folder)
    assert resumed.metrics == whole.metrics
    for name in ("q", "q_target", "logits", "visits"):
        assert torch.equal(resumed.checkpoint[name], whole.checkpoint[name])
    for name, value in whole.result.items():
        assert name == "updates_per_second" or resumed.result[name] == value
    # evaluation alone: the same result, nothing written
    stamp = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = run("ersac_tabular", "--resume", Path("runs") / folder.name, "--eval-only")
    assert again.code == 0 and again.out == rest.out
    assert stamp == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_killed_run_resumes_to_the_same_bits(tmp_path, run, load):
    """SIGKILL at random moments, three times in a row, of a real process."""
    flags = ["--total-updates", 1500, "--eval-interval", 100, "--checkpoint-interval", 50, "--seed", 8]
    whole = load(run("ersac_tabular", *flags, "--exp-name", "whole").folders[0])
    command = [sys.executable, str(ROOT / "ersac_tabular.py")]
    start = [*command, *map(str, flags), "--output-dir", str(tmp_path / "killed")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for _ in range(3):
        process = subprocess.Popen(start, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.time() + 60
        while not (checkpoints := list(tmp_path.glob("killed/*/checkpoint.pt"))) and time.time() < deadline:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.5) if "--resume" not in start else random.uniform(2, 4))
        process.send_signal(signal.SIGKILL)
        process.wait()
        start = [*command, "--resume", str(checkpoints[0].parent)]
    assert subprocess.run(start, env=environment, capture_output=True).returncode == 0
    got = load(checkpoints[0].parent)
    assert got.metrics == whole.metrics
    for name in ("q", "q_target", "logits"):
        assert torch.equal(got.checkpoint[name], whole.checkpoint[name])
    assert {k: v for k, v in got.result.items() if k != "updates_per_second"} == {
        k: v for k, v in whole.result.items() if k != "updates_per_second"
    }


BAD = [
    ("--upsilon 0", "upsilon"),
    ("--upsilon 1.01", "upsilon"),
    ("--upsilon nan", "upsilon"),
    ("--expectile-tau 0", "expectile-tau"),
    ("--expectile-tau 1", "expectile-tau"),
    ("--env-id FrozenLake-v1", "env-id"),
    ("--uncertainty-set ball", "uncertainty-set"),
    ("--dataset-size 0", "dataset-size"),
    ("--num-seeds 0", "num-seeds"),
    ("--seed -1", "seed"),
    ("--num-critics 0", "num-critics"),
    ("--epsilon 1.5", "epsilon"),
    ("--reset-prob -0.1", "reset-prob"),
    ("--gamma 1", "gamma"),
    ("--gamma -0.1", "gamma"),
    ("--alpha -1", "alpha"),
    ("--alpha inf", "alpha"),
    ("--q-lr 0", "q-lr"),
    ("--q-lr 2", "q-lr"),
    ("--policy-lr nan", "policy-lr"),
    ("--polyak 0", "polyak"),
    ("--prior 1 0", "prior"),
    ("--prior nan 0", "prior"),
    ("--total-updates 0", "total-updates"),
    ("--total-updates many", "total-updates"),
    ("--eval-interval 0", "eval-interval"),
    ("--eval-episodes 0", "eval-episodes"),
    ("--checkpoint-interval 0", "checkpoint-interval"),
    ("--eval-only", "resume"),
    ("--resume nowhere", "nowhere"),
    ("--no-such-flag 1", "no-such-flag"),
    ("--output-dir /proc/nowhere", "output-dir"),
]


@pytest.mark.parametrize("arguments, named", BAD)
def test_bad_input_ends_in_one_clear_line(run, tmp_path, arguments, named):
    done = run("ersac_tabular", *arguments.split())
    assert done.code in (1, 2) and named in done.err and "Traceback" not in done.err
    if done.code == 1:
        assert len(done.err.strip().splitlines()) == 1 and done.err.strip().endswith(".")
    assert list(tmp_path.glob("**/*.json")) == []


def test_bad_checkpoints_end_in_one_clear_line(run, tmp_path):
    (good,) = run("ersac_tabular", *SHORT).folders
    bytes_ = (good / "checkpoint.pt").read_bytes()
    foreign = tmp_path / "foreign.pt"
    torch.save({"script": "ersac_epinet.py"}, foreign)
    for content, says in [(bytes_[:500], "damaged"), (b"", "damaged"), (foreign.read_bytes(), "not written by")]:
        (good / "checkpoint.pt").write_bytes(content)
        done = run("ersac_tabular", "--resume", good)
        assert done.code == 1 and says in done.err and len(done.err.strip().splitlines()) == 1
    (good / "checkpoint.pt").write_bytes(bytes_)
    done = run("ersac_tabular", "--resume", good, "--upsilon", 0.5)
    assert done.code == 1 and "--upsilon 0.5 contradicts" in done.err
    assert run("ersac_tabular", "--resume", good, "--uncertainty-set", "ellipsoid").code == 0  # agrees with the run


def test_existing_run_folder_is_left_alone(run, tmp_path):
    for second in range(30):  # whenever the run starts
        folder = tmp_path / "runs" / f"RiverSwim__ersac_tabular__1__{int(time.time()) + second}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text("precious")
    done = run("ersac_tabular", *SHORT)
    assert done.code == 1 and "exists" in done.err and len(done.err.strip().splitlines()) == 1
    assert all([p.name for p in f.iterdir()] == ["result.json"] for f in tmp_path.glob("runs/*"))
    assert all((f / "result.json").read_text() == "precious" for f in tmp_path.glob("runs/*"))


def test_infinite_loss_stops_the_run(run):
    done = run("ersac_tabular", *SHORT, "--prior", -1e98, 1e98, "--alpha", 1e308)
    assert done.code == 1 and "update" in done.err.splitlines()[-1] and "not finite" in done.err


def test_wandb_offline(tmp_path):
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "ersac_tabular.py"), *map(str, SHORT), "--track", "--num-seeds", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and len(list(tmp_path.glob("runs/*/result.json"))) == 2, done.stderr
    stored = [path.name for path in tmp_path.glob("wandb/offline-run-*")]
    assert len(stored) == 2 and all(any(n.endswith(f.name) for n in stored) for f in tmp_path.glob("runs/*"))


def test_without_a_wandb_account_the_run_goes_on(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {"HOME": str(tmp_path)}
    command = [sys.executable, str(ROOT / "ersac_tabular.py"), *map(str, SHORT), "--track"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0 and "goes on without it" in done.stderr and "Traceback" not in done.stderr
    assert len(list(tmp_path.glob("runs/*/result.json"))) == 1


def test_help_reads_as_documentation():
    out = subprocess.run([sys.executable, "ersac_tabular.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0
    flat = " ".join(out.stdout.replace("│", " ").split())
    for flag in ("--uncertainty-set {box,hull,ellipsoid}", "--bootstrap, --no-bootstrap", "--prior", "--reset-prob"):
        assert flag in flat
    assert "share of the critics that the ellipsoid covers" in flat and "SAC-N" in flat


# ----- the claims
@pytest.mark.slow
def test_ellipsoid_beats_box_on_riverswim_with_little_data(run, load):
    returns = {"box": [], "ellipsoid": []}
    for kind, tau in itertools.product(returns, (0.1, 0.5, 0.9)):
        flags = ("--uncertainty-set", kind, "--expectile-tau", tau, "--seed", 100, "--num-seeds", 10)
        done = run("ersac_tabular", *flags, "--reset-prob", 0.1, "--exp-name", f"{kind}{tau}")
        results = sorted((load(f).result for f in done.folders), key=lambda r: r["seed"])
        returns[kind].append([r["normalized_return"] for r in results])
    gain = np.mean(returns["ellipsoid"], 0) - np.mean(returns["box"], 0)  # [seeds]
    assert gain.mean() >= 3 and (gain > 0).sum() >= 7, gain


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["box", "hull", "ellipsoid"])
def test_machine_replacement_with_little_data(run, load, kind):
    scores = []
    for tau in (0.1, 0.5, 0.9):
        flags = ("--env-id", "MachineReplacement", "--uncertainty-set", kind, "--expectile-tau", tau)
        done = run("ersac_tabular", *flags, "--seed", 100, "--num-seeds", 10, "--exp-name", f"{kind}{tau}")
        scores += [load(folder).result["normalized_return"] for folder in done.folders]
    assert len(scores) == 30 and np.mean(scores) >= 93
