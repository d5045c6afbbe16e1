"""Protects ersac_tabular.py: whole runs against a plain re-implementation, the MDPs against the paper, expectiles,
value iteration and exact evaluation against independent solutions, and what a run leaves behind."""

import csv
import functools
import itertools
import math
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from conftest import ROOT, command_line, plain_worst_case, read_rows
from scipy import stats

import ersac_tabular as tables

MDPS = {"MachineReplacement": tables.machine_replacement, "RiverSwim": tables.riverswim}


# ----- a whole run written anew, in loops over states, actions, critics and transitions. Of the script it has the
# risk-sensitive policies only, which are tested below
def plain_mdp(env_id):
    """outcomes[s][a]: what can follow, as (probability, next state, reward), next states in ascending order."""
    outcomes = []
    if env_id == "MachineReplacement":
        for s in range(10):
            run = [(0.1, s - 1, 0.0), (0.5, s, -5.0 * (s + 1)), (0.4, s + 1, 0.0)]
            ends = {0: [(5 / 9, 0, -5.0), (4 / 9, 1, 0.0)], 9: [(0.1, 8, 0.0), (0.9, 9, -50.0)]}
            outcomes.append([ends.get(s, run), [(1.0, 0, -100.0)]])
        return outcomes
    left, stay, right = 0.137028976772708, 0.284628388822161, 0.578342634405131
    for s in range(20):
        swim = [(left, s - 1, 0.0), (stay, s, 0.0), (right, s + 1, 0.0)]
        ends = {
            0: [(left + stay, 0, 0.0), (right, 1, 0.0)],
            19: [(left, 18, 0.0), (stay + right, 19, 86.2971023227292)],
        }
        outcomes.append([[(1.0, max(s - 1, 0), 5.0)], ends.get(s, swim)])
    return outcomes


def plain_value(outcomes, pi, gamma):
    """Discounted value of each state under the policy pi[s][a], by long iteration."""
    value, change = [0.0] * len(outcomes), 1.0
    while change > 1e-12:
        new = [0.0] * len(outcomes)
        for s, actions in enumerate(outcomes):
            for a, outcome in enumerate(actions):
                new[s] += pi[s][a] * sum(p * (r + gamma * value[t]) for p, t, r in outcome)
        change, value = max(abs(x - y) for x, y in zip(new, value)), new
    return value


def plain_transitions(outcomes, behaviour, size, epsilon, reset_prob, seed):
    """The list of transitions (s, a, s_next) that the behaviour policy leaves."""
    rng, S = np.random.default_rng([seed, 0]), len(outcomes)
    s = int(rng.integers(S))
    explore, move, jump = rng.random(size), rng.random(size), rng.random(size)
    random_actions, random_states = rng.integers(2, size=size), rng.integers(S, size=size)
    data = []
    for i in range(size):
        a = int(random_actions[i]) if explore[i] < epsilon else int(behaviour[s])
        total = np.cumsum([p for p, _, _ in outcomes[s][a]])
        s_next = outcomes[s][a][min((total <= move[i]).sum(), len(total) - 1)][1]
        data.append((s, a, s_next))
        s = int(random_states[i]) if jump[i] < reset_prob else s_next
    return data


def plain_entropy(p):
    return -sum(x * math.log(x) for x in p)


@functools.cache
def plain_run(setting):
    """Everything that a run of SETTINGS[setting] should leave: data, tables, Adam's moments, rows, result."""
    f = SimpleNamespace(**SETTINGS[setting])
    outcomes = plain_mdp(f.env_id)
    N, S, A = f.num_critics, len(outcomes), 2
    reward = {(s, a, t): r for s in range(S) for a in range(A) for _, t, r in outcomes[s][a]}
    kind, upsilon, gamma, alpha = f.uncertainty_set, f.upsilon, f.gamma, f.alpha

    # data, and what each critic sees of it
    P, R = MDPS[f.env_id]()
    behaviour = tables.expectile_value_iteration(P, R, f.expectile_tau, gamma).argmax(-1)
    optimal = tables.expectile_value_iteration(P, R, 0.5, gamma).argmax(-1)
    size = f.dataset_size * S
    data = plain_transitions(outcomes, behaviour, size, f.epsilon, f.reset_prob, f.seed)
    visits = np.zeros((S, A, S))
    for transition in data:
        visits[transition] += 1
    resamples = [visits] * N
    if f.bootstrap:
        resamples = np.random.default_rng([f.seed, 1]).multinomial(size, visits.ravel() / size, N)
        resamples = resamples.reshape(N, S, A, S)
    followers = {  # of the pair (s, a) in the data of critic i: the next states, each with its number of transitions
        (i, s, a): [(t, int(count)) for t, count in enumerate(resamples[i][s][a]) if count > 0]
        for i, s, a in itertools.product(range(N), range(S), range(A))
    }
    share = np.array([sum(x == s for x, _, _ in data) / size for s in range(S)])

    # initial tables
    low, high = f.prior or (min(reward.values()) / (1 - gamma), max(reward.values()) / (1 - gamma))
    q = np.random.default_rng([f.seed, 2]).uniform(low, high, (N, S, A))
    start = q.copy()
    target, logits, m, v = q.copy(), np.zeros((S, A)), np.zeros((S, A)), np.zeros((S, A))

    def softmax():
        return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    # returns of the greedy policy, which splits ties, between random and optimal play
    v_random, v_optimal, v_behaviour = (
        plain_value(outcomes, pi, gamma) for pi in (np.full((S, A), 0.5), np.eye(A)[optimal], np.eye(A)[behaviour])
    )

    def returns(pi):
        return plain_value(outcomes, [[(x == max(p)) / sum(y == max(p) for y in p) for x in p] for p in pi], gamma)

    def score(value, starts):
        got, low, high = (sum(x[s] for s in starts) for x in (value, v_random, v_optimal))
        return 100 * (got - low) / (high - low)

    rows = []
    for update in range(1, f.total_updates + 1):
        # targets at the next states, from the target tables: the worst case for all critics, or each its own
        pi = softmax()
        if f.targets == "shared":
            q_next = [[plain_worst_case(kind, target[:, s], pi[s], upsilon) for s in range(S)]] * N
        else:
            q_next = target
        value = [[pi[s] @ q_next[i][s] + alpha * plain_entropy(pi[s]) for s in range(S)] for i in range(N)]

        # each transition pulls its critic once, with step q_lr, towards the mean of the pair's targets
        errors = []
        for i, s, a in itertools.product(range(N), range(S), range(A)):
            if seen := followers[i, s, a]:
                count = sum(c for _, c in seen)
                mean = sum(c * (reward[s, a, t] + gamma * value[i][t]) for t, c in seen) / count
                errors.append(mean - q[i, s, a])
                for _ in range(count):
                    q[i, s, a] += f.q_lr * (mean - q[i, s, a])

        # actor: gradient of -(<pi, q*> + alpha H) through the softmax, weighted by the states' share; Adam by hand
        q_star = [plain_worst_case(kind, q[:, s], pi[s], upsilon) for s in range(S)]
        gradient = np.zeros((S, A))
        for s, a, b in itertools.product(range(S), range(A), range(A)):  # d loss / d pi_b, d pi_b / d logit_a
            slope = -(q_star[s][b] - alpha * (math.log(pi[s, b]) + 1))
            gradient[s, a] += share[s] * slope * pi[s, b] * ((a == b) - pi[s, a])
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        logits -= f.policy_lr * (m / (1 - 0.9**update)) / (np.sqrt(v / (1 - 0.999**update)) + 1e-30)
        target = (1 - f.polyak) * target + f.polyak * q

        if update % f.eval_interval == 0 or update == f.total_updates:
            spread = {True: [], False: []}  # of the pairs in the data, and of the others
            for s, a in itertools.product(range(S), range(A)):
                spread[visits[s, a].sum() > 0].append(q[:, s, a].std())
            entropies = share @ [plain_entropy(p) for p in pi]
            robust = share @ [pi[s] @ q_star[s] for s in range(S)]
            means = share @ [pi[s] @ q[:, s].mean(0) for s in range(S)]
            last = returns(softmax())
            row = {
                "update": update,
                "losses/critic_loss": np.mean(np.square(errors)),
                "losses/actor_loss": -(robust + alpha * entropies),
                "charts/policy_entropy": entropies,
                "charts/q_robust": robust,
                "charts/q_gap": means - robust,
                "charts/std_data_actions": np.mean(spread[True]),
                "charts/std_other_actions": np.mean(spread[False]) if spread[False] else math.nan,
                "eval/normalized_return": score(last, range(S)),
                "eval/normalized_return_state1": score(last, [0]),
            }
            rows.append(row)

    ell = f"Ell_{upsilon}-N" if upsilon < 1 else "Ell-N"
    names = {"box": "SAC-N", "hull": "CH-N", "ellipsoid": ell}
    if f.targets == "own":
        names = {"box": "Box-N-own", "hull": "CH-N-own", "ellipsoid": f"{ell}-own"}
    result = dict(script="ersac_tabular.py", method=names[kind], env_id=f.env_id, dataset_id=None, seed=f.seed)
    result |= dict(updates=f.total_updates, policy_entropy=share @ [plain_entropy(p) for p in softmax()])
    result |= dict(eval_episodes=S, eval_return_mean=np.mean(last), eval_return_std=np.std(last))
    result |= dict(random_return=np.mean(v_random), reference_return=np.mean(v_optimal))
    result |= {name: row[f"eval/{name}"] for name in ("normalized_return", "normalized_return_state1")}
    result["behaviour_normalized_return"] = score(v_behaviour, range(S))
    result["eval_returns"] = pytest.approx(last, rel=1e-8, abs=1e-9)
    end, moments = dict(q=q, q_target=target, logits=logits, visits=visits), dict(exp_avg=m, exp_avg_sq=v)
    return SimpleNamespace(start=start, prior=[low, high], end=end, moments=moments, rows=rows, result=result)


# Every flag is away from its default, from 0 and from 1. The settings differ where a fault could hide: both MDPs, all
# sets, states and pairs with and without data, risk levels, numbers of critics, what the initial tables cover.
BASE = dict(seed=5, dataset_size=4, epsilon=0.3, reset_prob=0.25, num_critics=7, bootstrap=True, gamma=0.8, alpha=8.0)
BASE |= dict(targets="shared", upsilon=0.6, q_lr=0.07, policy_lr=0.2, polyak=0.15, total_updates=12, eval_interval=5)
BOX, HULL, ELLIPSOID = ({"uncertainty_set": name} for name in ("box", "hull", "ellipsoid"))
SWIM, WEAR = dict(env_id="RiverSwim", expectile_tau=0.15), dict(env_id="MachineReplacement", expectile_tau=0.85)
SETTINGS = {
    "own targets, box": BOX | WEAR | dict(targets="own", prior=(-150.0, 50.0)),
    "own targets, hull": HULL | SWIM | dict(targets="own", prior=(-30.0, 200.0), bootstrap=False),
    "own targets, ellipsoid": ELLIPSOID | SWIM | dict(targets="own", prior=(-50.0, 300.0), epsilon=0.6),
    "box, RiverSwim": BOX | SWIM | dict(expectile_tau=0.85, prior=(-50.0, 300.0)),
    "box, all pairs seen": BOX | WEAR | dict(prior=(-300.0, 100.0), epsilon=0.9, dataset_size=30, gamma=0.95),
    "hull, RiverSwim": HULL | SWIM | dict(prior=(-30.0, 200.0)),
    "hull, one data set": HULL | WEAR | dict(prior=(-150.0, 50.0), num_critics=15, bootstrap=False),
    "ellipsoid, states without data": ELLIPSOID | SWIM | dict(prior=(-50.0, 300.0), reset_prob=0.05),
    "ellipsoid, one data set": ELLIPSOID | WEAR | dict(prior=(-150.0, 50.0), bootstrap=False),
    "ellipsoid of all critics, default prior": ELLIPSOID | SWIM | dict(upsilon=1.0, gamma=0.7, prior=None),
    "ellipsoid, 0.28 * 25 is above 7": ELLIPSOID | WEAR | dict(upsilon=0.28, num_critics=25, prior=None),
}
SETTINGS = {name: BASE | own for name, own in SETTINGS.items()}


def test_every_set_has_a_plain_loop():
    sets = {(flags["uncertainty_set"], flags["targets"]) for flags in SETTINGS.values()}
    fields = tables.Args.__annotations__
    assert sets == set(itertools.product(get_args(fields["uncertainty_set"]), get_args(fields["targets"])))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_equals_the_plain_algorithm(run, load, first_state, setting):
    flags, plain = SETTINGS[setting], plain_run(setting)
    first = first_state("ersac_tabular", *command_line(flags))
    for name in ("q", "q_target"):
        assert first[name].numpy() == pytest.approx(plain.start, rel=1e-13), name
    assert (first["logits"] == 0).all()

    done = run("ersac_tabular", *command_line(flags))
    assert done.code == 0, done.err
    (folder,) = done.folders
    got = load(folder)
    assert {k: got.args[k] for k in flags if k != "prior"} == {k: flags[k] for k in flags if k != "prior"}
    assert got.args["prior"] == pytest.approx(plain.prior)
    assert got.checkpoint.keys() == plain.end.keys()
    for name, table in plain.end.items():
        assert got.checkpoint[name].numpy() == pytest.approx(table, rel=1e-8, abs=1e-8), name
    (adam,) = done.names["optimizer"].state_dict()["state"].values()
    for name, moment in plain.moments.items():  # Adam's steps hide the size of a gradient, its moments do not
        assert adam[name].numpy() == pytest.approx(moment, rel=1e-8, abs=1e-10), name

    rows = read_rows(folder)
    assert [row["update"] for row in rows] == [5, 10, 12]
    for row, expected in zip(rows, plain.rows, strict=True):
        assert row.pop("charts/updates_per_second") > 0.1
        assert row == pytest.approx(expected, rel=1e-8, abs=1e-9, nan_ok=True)
    assert got.result.pop("updates_per_second") > 0.1
    assert got.result.keys() == plain.result.keys()
    for name, expected in plain.result.items():
        number = isinstance(expected, float)
        assert got.result[name] == (pytest.approx(expected, rel=1e-8, abs=1e-9) if number else expected), name
    score = f"{got.result['normalized_return']:.1f}"
    low, high = got.result["random_return"], got.result["reference_return"]
    assert f"{got.result['method']} on" in done.out and folder.name in done.out
    assert f"normalized return {score} (0: {low:.1f}, random play; 100: {high:.1f}, optimal play)" in done.out
    assert f"normalized_return={score}" in done.err  # the progress bar


def test_a_tiny_gradient_moves_the_actor_as_far_as_a_large_one(run, load):
    """Adam's first step has the size of its learning rate, if eps is far below the gradient: here some 1e-11."""
    flags = "--gamma 0 --alpha 0 --epsilon 0 --prior 5 5.000000001 --num-critics 1 --policy-lr 0.25 --total-updates 1"
    last = load(run("ersac_tabular", *flags.split()).folders[0]).checkpoint
    seen = last["visits"].sum((1, 2)) > 0
    assert seen.sum() > 5 and last["logits"][seen].abs().numpy() == pytest.approx(0.25, rel=1e-6)
    assert (last["logits"][~seen] == 0).all()  # no data, no opinion


@pytest.mark.parametrize("kind", ["box", "hull", "ellipsoid"])
def test_learns_what_the_data_show(run, load, kind):
    """Risk-averse data of RiverSwim: their policy stays on the left bank, but random actions show the way. Where all
    critics see the same data and start below all that is attainable, every set should find it."""
    flags = dict(expectile_tau=0.9, epsilon=0.6, reset_prob=0.3, dataset_size=50, num_critics=5, bootstrap=False)
    flags |= dict(prior=(-30.0, -10.0), q_lr=0.1, policy_lr=0.1, polyak=0.2, total_updates=500, uncertainty_set=kind)
    result = load(run("ersac_tabular", *command_line(flags)).folders[0]).result
    assert result["behaviour_normalized_return"] < 50 and result["normalized_return"] > 97


# ----- the MDPs, expectiles and risk-sensitive value iteration
@pytest.mark.parametrize("env_id", MDPS)
def test_the_mdps_are_the_published_ones(env_id):
    P, R = MDPS[env_id]()
    probability, reward = np.zeros_like(P), np.zeros_like(R)
    for s, a in itertools.product(range(len(P)), range(2)):
        for p, s_next, r in plain_mdp(env_id)[s][a]:
            probability[s, a, s_next], reward[s, a, s_next] = p, r
    assert P.dtype == R.dtype == np.float64 and P == pytest.approx(probability, abs=1e-15) and (R == reward).all()
    assert P.sum(-1) == pytest.approx(1.0, abs=1e-14)


def test_expectile_agrees_with_scipy():
    rng = np.random.default_rng(0)
    for _ in range(300):
        size, tau = rng.integers(1, 12), rng.uniform(0.01, 0.99)
        x, p = rng.normal(size=size) * 10 ** rng.uniform(-3, 3), rng.dirichlet(np.ones(size))
        oracle = stats.expectile(x, alpha=1 - tau, weights=p)
        assert tables.expectile(x, p, tau) == pytest.approx(oracle, rel=1e-9, abs=1e-9)
    x, p = rng.normal(size=(3, 5, 4)), rng.dirichlet(np.ones(5), size=(3, 4)).transpose(0, 2, 1)
    rows = [[stats.expectile(x[i, :, j], alpha=0.7, weights=p[i, :, j]) for j in range(4)] for i in range(3)]
    assert tables.expectile(x, p, 0.3, axis=1) == pytest.approx(np.array(rows), abs=1e-12)
    assert tables.expectile([0.0, 1.0], 0.5, 0.9) == pytest.approx(0.1)  # 0.9 is risk-averse
    assert tables.expectile(np.array([1.0, 2.0, 1e9]), np.array([0.5, 0.5, 0.0]), 0.5) == pytest.approx(1.5, abs=1e-6)


@pytest.mark.parametrize("env_id, tau", [*itertools.product(MDPS, (0.1, 0.5, 0.9)), ("RiverSwim", 0.15)])
def test_value_iteration_solves_the_bellman_equation(env_id, tau):
    P, R = MDPS[env_id]()
    q = tables.expectile_value_iteration(P, R, tau, 0.9)
    for s, a in itertools.product(range(len(P)), range(2)):
        outcome = R[s, a] + 0.9 * q.max(-1)
        assert q[s, a] == pytest.approx(stats.expectile(outcome, alpha=1 - tau, weights=P[s, a]), abs=1e-8)


def test_the_papers_policy_table_up_to_two_cells():
    """28 of 30 cells; the two others are named in docs/paper_notes.md."""
    P, R = tables.machine_replacement()
    paper = {0.1: "0000000011", 0.5: "0000001111", 0.9: "0000011111"}
    ours = {tau: tables.expectile_value_iteration(P, R, tau, 0.9).argmax(-1) for tau in paper}
    different = [(s + 1, tau) for tau, row in paper.items() for s in range(10) if ours[tau][s] != int(row[s])]
    assert different == [(9, 0.1), (7, 0.5)]


def test_no_start_distribution_gives_the_papers_behaviour_column():
    """RiverSwim: the returns at tau = 0.1 and 0.9 add up to more than 43 in every start state; the paper's to 14."""
    P, R = tables.riverswim()
    policies = [np.eye(2)[tables.expectile_value_iteration(P, R, tau, 0.9).argmax(-1)] for tau in (0.5, 0.1, 0.9)]
    optimal, seeking, averse = (tables.policy_value(P, R, policy, 0.9) for policy in policies)
    random_ = tables.policy_value(P, R, np.full((20, 2), 0.5), 0.9)
    assert ((seeking + averse - 2 * random_) / (optimal - random_)).min() > 0.43


# ----- collection, evaluation, target and loss
def test_collected_data_follow_the_behaviour_policy():
    P, _ = tables.riverswim()
    behaviour = np.arange(20) % 2
    visits = tables.collect(P, behaviour, 40_000, 0.1, 0.2, np.random.default_rng(0))
    counts = visits.sum(-1)
    assert counts.sum() == 40_000 and (visits[P == 0] == 0).all()
    chosen = counts[np.arange(20), behaviour].sum() / 40_000
    assert chosen == pytest.approx(0.95, abs=4 * np.sqrt(0.95 * 0.05 / 40_000))  # half of the random actions agree
    for s, a in zip(*np.nonzero(counts > 500)):
        assert visits[s, a] / counts[s, a] == pytest.approx(P[s, a], abs=5 * np.sqrt(0.25 / counts[s, a]))
    # without resets the data are one path; with a reset after every transition the states are uniform
    path = tables.collect(P, np.ones(20, int), 5000, 0.1, 0.0, np.random.default_rng(1))
    assert np.abs(path.sum((1, 2)) - path.sum((0, 1))).max() <= 1
    jumps = tables.collect(P, np.zeros(20, int), 20_000, 0.1, 1.0, np.random.default_rng(2))
    assert stats.chisquare(jumps.sum((1, 2))).pvalue > 1e-4


@pytest.mark.parametrize("env_id", MDPS)
def test_exact_evaluation_against_iteration_and_simulation(env_id):
    P, R = MDPS[env_id]()
    S, rng = len(P), np.random.default_rng(3)
    for pi in rng.dirichlet(np.ones(2), size=(3, S)):
        exact = tables.policy_value(P, R, pi, 0.9)
        assert exact == pytest.approx(plain_value(plain_mdp(env_id), pi, 0.9), rel=1e-10)
    s, returns = rng.integers(S, size=4000), np.zeros(4000)
    for t in range(200):  # 0.9^200 is 7e-10
        a = (rng.random(4000) < pi[s, 1]).astype(int)
        s_next = (P[s, a].cumsum(-1) < rng.random((4000, 1))).sum(-1).clip(max=S - 1)
        returns += 0.9**t * R[s, a, s_next]
        s = s_next
    assert abs(returns.mean() - exact.mean()) < 4 * returns.std() / np.sqrt(4000)


def test_target_and_actor_loss_by_hand():
    pi = torch.tensor([[0.25, 0.75], [1.0, 0.0]], dtype=torch.float64)
    log_pi = pi.log()  # holds -inf: 0 log 0 counts as 0
    q_star = torch.tensor([[4.0, 8.0], [1.0, -5.0]], dtype=torch.float64, requires_grad=True)
    h = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))
    assert tables.entropy(pi, log_pi).numpy() == pytest.approx([h, 0.0])
    reward, terminated = torch.tensor([1.0, 2.0]).double(), torch.tensor([0.0, 1.0]).double()
    y = tables.robust_target(reward, terminated, pi, log_pi, q_star, 0.1, 0.9)
    assert y.tolist() == pytest.approx([1 + 0.9 * (7 + 0.1 * h), 2.0])
    loss = tables.actor_loss(pi, log_pi, q_star, 0.1)
    assert loss.tolist() == pytest.approx([-(7 + 0.1 * h), -1.0]) and not loss.requires_grad  # q* is held fixed


# ----- the script
def test_defaults_are_the_documented_settings():
    documented = dict(env_id="RiverSwim", dataset_size=10, expectile_tau=0.5, epsilon=0.1, reset_prob=0.1, seed=1)
    documented |= dict(targets="shared", uncertainty_set="ellipsoid", upsilon=0.9, num_critics=100, bootstrap=True)
    documented |= dict(total_updates=6000, gamma=0.9, alpha=0.01, q_lr=0.01, policy_lr=0.01, polyak=0.02, prior=None)
    assert documented.items() <= vars(tables.Args()).items()


@pytest.mark.parametrize("probability", [0, 1])
def test_the_ends_of_what_is_allowed(run, load, probability):
    flags = "--gamma 0 --alpha 0 --polyak 1 --q-lr 1 --upsilon 1 --prior 3 3 --seed 0 --num-critics 1"
    flags += f" --dataset-size 1 --total-updates 1 --eval-interval 1 --epsilon {probability} --reset-prob {probability}"
    done = run("ersac_tabular", *flags.split())
    assert done.code == 0, done.err
    result = load(done.folders[0]).result
    assert all(math.isfinite(x) for x in result.values() if isinstance(x, float))


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["box --upsilon 0.9", "hull --upsilon 0.9", "ellipsoid --upsilon 1.0"])
def test_committed_rows_are_made_again(run, load, flags):
    arguments = f"--env-id RiverSwim --dataset-size 10 --expectile-tau 0.1 --uncertainty-set {flags}"
    path = ROOT / "docs" / "benchmark" / "tables.csv"
    rows = {(row["arguments"], row["seed"]): row for row in csv.DictReader(path.read_text().splitlines())}
    row = rows[arguments, "100"]
    result = load(run("ersac_tabular", *arguments.split(), "--seed", 100).folders[0]).result
    for name in ("normalized_return", "normalized_return_state1", "behaviour_normalized_return", "eval_return_mean"):
        assert result[name] == pytest.approx(float(row[name]), abs=1e-6), name
