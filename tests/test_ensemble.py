"""Protects ersac_ensemble.py: every update and every number it leaves behind are those of a plain loop written from the
paper, its box is SAC-N (Proposition 3.1), its actor's gradient is exact (envelope theorem), and it learns."""

import itertools
import math
from typing import get_args

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from conftest import (
    assert_close,
    check_learned,
    check_result,
    descend,
    double,
    mean,
    normalise,
    plain_data,
    plain_policy,
    plain_returns,
    plain_row,
    plain_worst_case,
    read_rows,
)

import ersac_ensemble as script

SETS = {
    "box": script.worst_case_box,
    "hull": script.worst_case_hull,
    "ellipsoid": lambda q, pi: script.worst_case_ellipsoid(q, pi, 0.9),
}


# ----- the plain loop: no code of the script, float64, loops over critics and transitions
def plain_critic(state, n, obs):
    """Critic n of a stack: two hidden layers, each normalised, written with matrix products. [B, A]"""
    h = obs
    for layer in (0, 1):
        h = torch.relu(normalise(h @ state[f"weights.{layer}"][n] + state[f"biases.{layer}"][n]))
    return h @ state["weights.2"][n] + state["biases.2"][n]


def plain_training(x, first, prior, data):
    """Algorithms 1 to 3, own targets, EDAC and the temperature of Section 2.2, from the first weights on. Returns
    what is logged and the actor, both for every update, and all that is learned."""
    critic, target, actor = (double(first[name]) for name in ("critic", "target", "actor"))
    log_alpha = torch.tensor(math.log(max(x.alpha, 1e-30)), dtype=torch.float64)
    for tensor in (*critic.values(), *actor.values(), *[log_alpha][: x.autotune]):
        tensor.requires_grad_()
    q_adam, policy_adam = torch.optim.Adam(critic.values()), torch.optim.Adam([*actor.values(), log_alpha])
    generator = torch.Generator().manual_seed(x.seed)
    N, B, A = x.num_critics, x.batch_size, 4
    rows, actors = [], []

    def q_values(network, obs):
        q = [plain_critic(network, n, x.input_scale * obs) for n in range(N)]
        if prior is not None:
            q = [q[n] + x.prior_scale * plain_critic(prior, n, x.input_scale * obs) for n in range(N)]
        return torch.stack(q)  # [N, B, A]

    def worst_case(q, pi):
        q, pi = q.detach().numpy(), pi.detach().numpy()
        worst = [plain_worst_case(x.uncertainty_set, q[:, b], pi[b], x.upsilon) for b in range(B)]
        return torch.tensor(np.stack(worst))  # [B, A]

    for update in range(1, x.total_updates + 1):
        left = (x.total_updates - update + 1) / x.total_updates
        index = torch.randint(len(data.s), (B,), generator=generator)
        s, a, r = data.s[index], data.a[index], data.r[index]
        s_next, terminated = data.s_next[index], data.terminated[index]
        alpha = math.exp(log_alpha.item())

        # target: one for all critics, against the worst case, or each critic's own
        pi, log_pi = (tensor.detach() for tensor in plain_policy(actor, s_next))
        q_next = q_values(target, s_next).detach()
        if x.targets == "shared":
            q_next = [worst_case(q_next, pi)] * N
        y = torch.zeros(N, B, dtype=torch.float64)
        for n, b in np.ndindex(N, B):
            v = sum(pi[b, k] * (q_next[n][b, k] - alpha * log_pi[b, k]) for k in range(A))
            y[n, b] = r[b] if terminated[b] else r[b] + x.gamma * v

        # critics, with EDAC's cosines
        q = q_values(critic, s)
        errors = torch.stack([torch.stack([q[n, b, a[b]] - y[n, b] for b in range(B)]) for n in range(N)])  # [N, B]
        loss = sum((errors[n] ** 2).mean() for n in range(N))
        for i, j in itertools.combinations(range(N), 2):
            u, v = (q[k] - q[k].gather(1, a[:, None]) for k in (i, j))
            cosine = (u * v).sum(-1) / ((u * u).sum(-1) * (v * v).sum(-1)).sqrt()
            loss = loss + N * x.edac_eta * cosine.mean()
        descend(q_adam, loss, left * x.q_lr)

        # actor, against the critics after their step, and the temperature, which falls while pi is too random
        q = q_values(critic, s).detach()
        pi, log_pi = plain_policy(actor, s)
        q_star = worst_case(q, pi)
        h = -(pi * log_pi).sum(-1)
        loss = -((pi * q_star).sum(-1) + alpha * h).mean()
        excess = h.mean().item() - x.target_entropy * math.log(A)
        descend(policy_adam, loss + log_alpha.exp() * excess, left * x.policy_lr)

        # target critics
        for name, value in critic.items():
            target[name] = (1 - x.polyak) * target[name] + x.polyak * value.detach()

        row = {"update": update, "losses/critic_loss": mean(errors.flatten() ** 2), "losses/actor_loss": loss.item()}
        row |= plain_row(pi, log_pi, q.mean(0), q.std(0, correction=0), q_star, a, data.returns[index])
        rows.append(row | {"charts/alpha": alpha})
        actors.append(double(actor))
    parts = {"critic": critic, "target": target, "actor": actor, "log_alpha": log_alpha, "generator": generator}
    return rows, actors, parts | {"q_optimizer": q_adam, "policy_optimizer": policy_adam}


# ----- the script against the plain loop
BASE = """--dataset-id test/chain-v0 --seed 5 --num-critics 7 --hidden-dim 8 --batch-size 16 --total-updates 3
    --gamma 0.93 --alpha 0.4 --polyak 0.15 --q-lr 3e-3 --policy-lr 2e-3 --target-entropy 0.7 --upsilon 0.8
    --eval-interval 2 --eval-episodes 25"""
SHARED = f"{BASE} --targets shared --prior-scale 0 --input-scale 1 --uncertainty-set"
OWN = f"{BASE} --targets own --prior-scale 1.5 --input-scale 1.6 --uncertainty-set"
VARIANTS = [  # flags, and the method's one name
    (f"{SHARED} box", "SAC-N"),
    (f"{SHARED} box --edac-eta 0.7 --autotune --input-scale 1.6", "EDAC"),
    (f"{SHARED} box --prior-scale 0.5", "Box-N"),
    (f"{SHARED} hull --alpha 0", "CH-N"),
    (f"{SHARED} ellipsoid --upsilon 1 --autotune", "Ell-N"),
    (f"{SHARED} ellipsoid --upsilon 0.3 --dataset-id test/declared-v0", "Ell_0.3-N"),
    (f"{SHARED} ellipsoid --prior-scale 1.5", "Ell_0.8-N"),
    (f"{OWN} box --prior-scale 0 --dataset-id test/chain-cut-v0", "Box-N-own"),
    (f"{OWN} hull --autotune", "CH-N-own"),
    (f"{OWN} ellipsoid --upsilon 1", "Ell-N-own"),
    (f"{OWN} ellipsoid", "Ell_0.8-N-own"),
]
DECLARED = {  # steps of an evaluation episode, reference scores; the second has an action that nobody took
    "test/chain-v0": (10, -14.0, 25.0),
    "test/declared-v0": (1, 0.0, 25.0),
    "test/chain-cut-v0": (4, None, None),
}


def test_every_set_has_a_plain_loop():
    sets = {flags.split("--uncertainty-set ")[1].split()[0] for flags, _ in VARIANTS}
    assert sets == set(get_args(script.Args.__annotations__["uncertainty_set"]))


@pytest.mark.parametrize("flags, method", [pytest.param(*pair, id=pair[1]) for pair in VARIANTS])
def test_three_updates_and_all_that_is_logged_equal_a_plain_loop(run, load, first_state, datasets, flags, method):
    words = flags.split()
    x = tyro.cli(script.Args, args=words)
    done = run("ersac_ensemble", *words)
    assert done.code == 0, done.err
    first, last = first_state("ersac_ensemble", *words), load(done.folders[0]).checkpoint
    prior = double(done.names["prior"].state_dict()) if x.prior_scale else None
    for name, value in first["critic"].items():
        assert torch.equal(value, first["target"][name])  # the targets start as the critics
        assert prior is None or not torch.equal(value.double(), prior[name])

    # the data, and all that is learned from them
    data = plain_data(x.dataset_id, x.gamma)
    for name in ("terminated", "returns"):
        assert_close(done.names[name], getattr(data, name), name)
    for name, plain in {"obs": data.s, "action": data.a, "reward": data.r, "next_obs": data.s_next}.items():
        assert_close(done.names[name], plain, name)
    rows, actors, parts = plain_training(x, first, prior, data)
    optimizers = {name: parts[name] for name in ("q_optimizer", "policy_optimizer")}
    check_learned(last, {name: parts[name] for name in ("critic", "target", "actor")}, optimizers)
    for name, value in {"log_alpha": parts["log_alpha"], "obs_mean": data.mean, "obs_std": data.std}.items():
        assert_close(last[name], value, name)
    assert torch.equal(last["generator"], parts["generator"].get_state()) and last["update"] == 3

    # metrics.csv
    steps, low, high = DECLARED[x.dataset_id]
    env, seed = gym.make("test/Chain-v0", max_episode_steps=steps), 10**6 * (x.seed + 1)

    def returns(actor, episodes, seed):
        def act(obs):
            return int(plain_policy(actor, (torch.tensor(obs).double() - data.mean) / data.std)[0].argmax())

        return plain_returns(act, env, episodes, seed)

    logged = read_rows(done.folders[0])
    assert [row["update"] for row in logged] == [2, 3]
    for row, actor, expected in zip(logged, actors[1:], rows[1:], strict=True):
        expected["eval/return"] = mean(returns(actor, 3, seed))
        assert row.pop("charts/updates_per_second") > 0.1
        assert row == pytest.approx(expected, rel=2e-4, abs=2e-5, nan_ok=True)

    # result.json and the last lines
    words = {"script": "ersac_ensemble.py", "method": method, "env_id": "test/Chain-v0", "dataset_id": x.dataset_id}
    pi, log_pi = plain_policy(actors[-1], data.s)
    words |= {"seed": 5, "updates": 3, "policy_entropy": -(pi * log_pi).sum(-1).mean().item()}
    check_result(done.folders[0], returns(actors[-1], 25, seed + 10**5), low, high, done.out, **words)


# ----- Proposition 3.1: with the box set, ERSAC is SAC-N
def problem(seed=0, N=6, B=40, D=3, A=4):
    """Random linear critics, target critics and policy, and a batch, all in float64."""
    g = torch.Generator().manual_seed(seed)
    shapes = (B, D), (B,), (B, D), (B,), (N, D, A), (N, D, A), (D, A)
    s, r, s_next, x, *networks = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
    return *networks, (s, torch.randint(A, (B,), generator=g), r, s_next, (x > 1).double())


def sac_n_loss(w, theta_target, phi, batch, alpha, gamma):
    """SAC-N's loss of one critic as published: y(r, s', a') for every a', squared errors averaged over a' ~ pi."""
    s, a, r, s_next, done = batch
    pi = torch.softmax(s_next @ phi, -1)
    error = 0.0
    for k in range(phi.shape[1]):
        lowest = torch.stack([(s_next @ w_target)[:, k] for w_target in theta_target]).min(0).values
        y = r + gamma * (1 - done) * (lowest - alpha * pi[:, k].log())
        error = error + pi[:, k] * ((s @ w)[torch.arange(len(a)), a] - y) ** 2
    return error.mean()


def test_box_critic_gradient_is_that_of_sac_n_and_the_losses_differ_by_the_proofs_constant():
    theta, theta_target, phi, batch = problem()
    s, a, r, s_next, done = batch
    alpha, gamma = 0.3, 0.9
    theta.requires_grad_()
    theirs = torch.stack([sac_n_loss(w, theta_target, phi, batch, alpha, gamma) for w in theta]).mean()
    log_pi = (s_next @ phi).log_softmax(-1)
    pi = log_pi.exp()
    q_star = script.worst_case_box(torch.einsum("bd,nda->nba", s_next, theta_target), pi)
    y = script.robust_target(r, done, pi, log_pi, q_star, alpha, gamma)
    ours = script.critic_loss(torch.einsum("bd,nda->nba", s, theta), a, y).mean(1).sum() / len(theta)
    torch.testing.assert_close(torch.autograd.grad(ours, theta), torch.autograd.grad(theirs, theta))
    # C: the variance of the sampled target over a' ~ pi, which no critic can change
    sampled = r[:, None] + gamma * (1 - done)[:, None] * (q_star - alpha * log_pi)  # y(r, s', a'), [B, A]
    deviation = sampled - (pi * sampled).sum(-1, keepdim=True)
    constant = (pi * deviation**2).sum(-1).mean()
    torch.testing.assert_close(theirs - ours, constant)
    assert constant > 0.01


def test_box_actor_objective_and_gradient_are_those_of_sac_n():
    theta, _, phi, (s, *_) = problem(2)
    phi.requires_grad_()
    pi = torch.softmax(s @ phi, -1)
    lowest = torch.stack([s @ w for w in theta]).min(0).values
    theirs = (pi * (lowest - 0.3 * pi.log())).sum(-1).mean()  # J_pi, an expectation over a ~ pi
    log_pi = (s @ phi).log_softmax(-1)
    q_star = script.worst_case_box(torch.einsum("bd,nda->nba", s, theta), log_pi.exp())
    ours = -script.actor_loss(log_pi.exp(), log_pi, q_star, 0.3).mean()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, phi), torch.autograd.grad(theirs, phi))


# ----- the envelope theorem
@pytest.mark.parametrize("kind", SETS)
def test_holding_q_star_fixed_gives_the_exact_gradient(kind):
    theta, _, phi, (s, *_) = problem(3, N=9)
    q = torch.einsum("bd,nda->nba", s, theta)

    def objective(phi):
        """The worst case's value plus the entropy, with the minimum taken anew for every policy."""
        pi = torch.softmax(s @ phi, -1)
        return ((pi * SETS[kind](q, pi)).sum(-1) - 0.3 * (pi * pi.log()).sum(-1)).mean().item()

    phi.requires_grad_()
    log_pi = (s @ phi).log_softmax(-1)
    q_star = SETS[kind](q, log_pi.exp())
    (gradient,) = torch.autograd.grad(-script.actor_loss(log_pi.exp(), log_pi, q_star, 0.3).mean(), phi)
    for i, j in np.ndindex(*phi.shape):
        step = torch.zeros_like(phi)
        step[i, j] = 1e-6
        slope = (objective(phi + step) - objective(phi - step)) / 2e-6
        assert slope == pytest.approx(gradient[i, j].item(), abs=1e-6)


# ----- the stacked critics and EDAC's term
def test_critics_start_like_independent_linear_layers():
    torch.manual_seed(0)
    critic = script.EnsembleCritic(8, 4, 300, 32)
    for weight, bias, fan_in in zip(critic.weights, critic.biases, (8, 32, 32)):
        layers = [torch.nn.Linear(fan_in, weight.shape[-1]) for _ in range(300)]
        for ours, theirs in ((weight, [l.weight for l in layers]), (bias, [l.bias for l in layers])):
            theirs = torch.stack([t.detach() for t in theirs])
            assert ours.abs().max() <= 1 / math.sqrt(fan_in) and ours.numel() == theirs.numel()
            assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.03)
            per_critic = ours.detach().flatten(1).std(1), theirs.flatten(1).std(1)
            assert per_critic[0].mean().item() == pytest.approx(per_critic[1].mean().item(), rel=0.05)


def test_ensemble_similarity_against_all_pairs():
    g = torch.Generator().manual_seed(5)
    q = torch.randn(6, 9, 4, generator=g, dtype=torch.float64)
    q[2, 3] = 1.5  # a critic that sees no difference between actions contributes nothing
    q.requires_grad_()
    action = torch.randint(4, (9,), generator=g)
    total = torch.zeros(9, dtype=torch.float64)
    for b, (i, j) in itertools.product(range(9), itertools.combinations(range(6), 2)):
        x, y = (q[k, b] - q[k, b, action[b]] for k in (i, j))
        if x.norm() > 0 and y.norm() > 0:
            total[b] = total[b] + x @ y / x.norm() / y.norm()
    ours = script.ensemble_similarity(q, action)
    torch.testing.assert_close(ours, total)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), q), torch.autograd.grad(total.sum(), q))
    assert script.ensemble_similarity(torch.ones(3, 2, 4), torch.tensor([0, 1])).tolist() == [0.0, 0.0]


# ----- learning
@pytest.mark.parametrize("flags", ["box --targets shared", "hull", "ellipsoid", "ellipsoid --targets shared"])
def test_learns_to_walk_right_from_random_play(run, load, datasets, flags):
    """Random play on the chain earns -14. Walking right from the middle earns 30 less a few steps."""
    flags = f"--uncertainty-set {flags} --prior-scale {0 if 'shared' in flags else 3} --input-scale 1 --num-critics 5 "
    flags += "--hidden-dim 32 --batch-size 64 --total-updates 200 --gamma 0.9 --q-lr 3e-3 --policy-lr 3e-3"
    done = run("ersac_ensemble", "--dataset-id", "test/chain-large-v0", *flags.split(), "--eval-episodes", 50)
    result = load(done.folders[0]).result
    assert result["eval_return_mean"] > 24 and result["normalized_return"] > 95
