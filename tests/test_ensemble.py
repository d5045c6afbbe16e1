"""ersac_ensemble.py: the SAC-N proposition, the envelope theorem, the stacked critics, and the script end to end."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import minari
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ersac_ensemble
import ersac_tabular
from ersac_ensemble import (
    Actor,
    EnsembleCritic,
    actor_loss,
    critic_loss,
    dataset_name,
    ensemble_similarity,
    load_transitions,
    robust_target,
    worst_case_box,
    worst_case_ellipsoid,
    worst_case_hull,
)

ROOT = Path(__file__).resolve().parents[1]
SETS = {"box": worst_case_box, "hull": worst_case_hull, "ellipsoid": lambda q, pi: worst_case_ellipsoid(q, pi, 0.9)}
DATA = ("--dataset-id", "test/cartpole-v0")
SHORT = ("--total-updates", 24, "--eval-interval", 12, "--checkpoint-interval", 5, "--eval-episodes", 3)
SMALL = (*DATA, *SHORT, "--num-critics", 4, "--hidden-dim", 16, "--batch-size", 32)


def problem(seed=0, N=6, B=40, D=3, A=4):
    """Random linear critics, target critics and policy, and a batch, all in float64."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    batch = draw(B, D), torch.randint(A, (B,), generator=g), draw(B), draw(B, D), (draw(B) > 1).double()
    return draw(N, D, A), draw(N, D, A), draw(D, A), batch


# ----- Proposition 3.1: with the box set, ERSAC is SAC-N
def sac_n_losses(theta, theta_target, phi, batch, alpha, gamma):
    """SAC-N as published: y(r, s', a') for every next action a', squared errors averaged over a' ~ pi, in loops."""
    s, a, r, s_next, done = batch
    pi = torch.softmax(s_next @ phi, -1)
    losses = []
    for w in theta:
        error = 0.0
        for a_next in range(phi.shape[1]):
            lowest = torch.stack([(s_next @ w_target)[:, a_next] for w_target in theta_target]).min(0).values
            y = r + gamma * (1 - done) * (lowest - alpha * pi[:, a_next].log())
            error = error + pi[:, a_next] * ((s @ w)[torch.arange(len(a)), a] - y) ** 2
        losses.append(error.mean())
    return torch.stack(losses)  # [N]


def test_box_critic_gradient_is_that_of_sac_n_and_the_losses_differ_by_the_proofs_constant():
    theta, theta_target, phi, batch = problem()
    s, a, r, s_next, done = batch
    alpha, gamma, N = 0.3, 0.9, len(theta)
    theta.requires_grad_()
    theirs = sac_n_losses(theta, theta_target, phi, batch, alpha, gamma).mean()  # (1 / N) sum_i L_Q(theta_i)
    (theirs_gradient,) = torch.autograd.grad(theirs, theta)
    log_pi = (s_next @ phi).log_softmax(-1)
    q_star = worst_case_box(torch.einsum("bd,nda->nba", s_next, theta_target), log_pi.exp())
    y = robust_target(r, done, log_pi.exp(), log_pi, q_star, alpha, gamma)
    ours = critic_loss(torch.einsum("bd,nda->nba", s, theta), a, y).mean(1).sum()
    (ours_gradient,) = torch.autograd.grad(ours, theta)
    torch.testing.assert_close(ours_gradient / N, theirs_gradient)
    # C: the variance of the sampled target over a' ~ pi, which no critic can change
    sampled = r[:, None] + gamma * (1 - done)[:, None] * (q_star - alpha * log_pi)  # y(r, s', a'), [B, A]
    mean = (log_pi.exp() * sampled).sum(-1, keepdim=True)
    constant = (log_pi.exp() * (sampled - mean) ** 2).sum(-1).mean()
    torch.testing.assert_close(theirs - ours / N, constant)
    assert constant > 0.01


def test_sac_n_with_sampled_next_actions_agrees_within_monte_carlo_error():
    theta, theta_target, phi, (s, a, r, s_next, done) = problem(1, B=8)
    alpha, gamma = 0.3, 0.9
    log_pi = (s_next @ phi).log_softmax(-1)
    lowest = torch.einsum("bd,nda->nba", s_next, theta_target).min(0).values
    draws = torch.multinomial(log_pi.exp(), 200_000, True, generator=torch.Generator().manual_seed(0))  # [B, draws]
    y = r[:, None] + gamma * (1 - done)[:, None] * (lowest - alpha * log_pi).gather(1, draws)
    q = torch.einsum("bd,nda->nba", s, theta)[:, torch.arange(8), a]  # [N, B]
    slope = 2 * (q[..., None] - y)  # d loss / d q, one sample each, [N, B, draws]
    exact = 2 * (q - robust_target(r, done, log_pi.exp(), log_pi, lowest, alpha, gamma))
    error = (slope.mean(-1) - exact).abs() / (slope.std(-1) / math.sqrt(200_000)).clamp(min=1e-12)
    assert error[:, done == 0].max() < 5 and (slope.mean(-1) - exact).abs().max() < 0.05


def test_box_actor_objective_and_gradient_are_those_of_sac_n():
    theta, _, phi, (s, *_) = problem(2)
    phi.requires_grad_()
    pi = torch.softmax(s @ phi, -1)
    lowest = torch.stack([s @ w for w in theta]).min(0).values
    theirs = (pi * (lowest - 0.3 * pi.log())).sum(-1).mean()  # J_pi, an expectation over a ~ pi
    log_pi = (s @ phi).log_softmax(-1)
    q = torch.einsum("bd,nda->nba", s, theta)
    ours = actor_loss(log_pi.exp(), log_pi, worst_case_box(q, log_pi.exp()), 0.3).mean()
    torch.testing.assert_close(-ours, theirs)
    torch.testing.assert_close(-torch.autograd.grad(ours, phi)[0], torch.autograd.grad(theirs, phi)[0])


# ----- the envelope theorem
@pytest.mark.parametrize("kind", SETS)
def test_holding_q_star_fixed_gives_the_exact_gradient(kind):
    theta, _, phi, (s, *_) = problem(3, N=9)
    q = torch.einsum("bd,nda->nba", s, theta)
    phi.requires_grad_()

    def objective(phi, fixed=None):
        log_pi = (s @ phi).log_softmax(-1)
        q_star = SETS[kind](q, log_pi.exp()) if fixed is None else fixed
        return ((log_pi.exp() * q_star).sum(-1) - 0.3 * (log_pi.exp() * log_pi).sum(-1)).mean()

    log_pi = (s @ phi).log_softmax(-1)
    with torch.no_grad():
        q_star = SETS[kind](q, log_pi.exp())
    (ours,) = torch.autograd.grad(-actor_loss(log_pi.exp(), log_pi, q_star, 0.3).mean(), phi)
    (full,) = torch.autograd.grad(objective(phi), phi)  # through the inner minimum
    torch.testing.assert_close(ours, full, rtol=1e-8, atol=1e-10)
    for i, j in itertools.product(range(phi.shape[0]), range(phi.shape[1])):
        step = torch.zeros_like(phi)
        step[i, j] = 1e-6
        with torch.no_grad():
            slope = (objective(phi + step) - objective(phi - step)) / 2e-6
        assert slope.item() == pytest.approx(ours[i, j].item(), abs=1e-6)


# ----- across scripts: one-hot states and linear critics are tables
@pytest.mark.parametrize("kind", SETS)
def test_one_update_equals_the_gradient_step_on_tables(kind):
    N, S, A, lr, alpha, gamma = 5, 6, 3, 0.1, 0.05, 0.9
    g = torch.Generator().manual_seed(4)
    q = torch.randn(N, S, A, generator=g, dtype=torch.float64)
    logits = torch.randn(S, A, generator=g, dtype=torch.float64)
    s, a, s_next = (torch.randint(n, (200,), generator=g) for n in (S, A, S))
    r = torch.randn(200, generator=g, dtype=torch.float64)
    # ersac_ensemble.py with one-hot observations and a weight matrix for each critic
    weight, phi = q.clone().requires_grad_(), logits.clone().requires_grad_()
    eye = torch.eye(S, dtype=torch.float64)
    log_pi = (eye[s_next] @ phi).log_softmax(-1).detach()
    q_star = SETS[kind](torch.einsum("bs,nsa->nba", eye[s_next], q), log_pi.exp())
    y = robust_target(r, torch.zeros(200), log_pi.exp(), log_pi, q_star, alpha, gamma)
    critic_loss(torch.einsum("bs,nsa->nba", eye[s], weight), a, y).mean(1).sum().backward()
    new_weight = weight.detach() - lr * weight.grad
    log_pi = (eye[s] @ phi).log_softmax(-1)
    q_star = SETS[kind](torch.einsum("bs,nsa->nba", eye[s], new_weight), log_pi.exp().detach())
    actor_loss(log_pi.exp(), log_pi, q_star, alpha).mean().backward()
    # ersac_tabular.py's functions on the tables: targets once per state, then counts
    worst = getattr(ersac_tabular, f"worst_case_{kind}")
    extra = (0.9,) if kind == "ellipsoid" else ()
    table_log_pi = logits.log_softmax(-1)
    table_star = worst(q, table_log_pi.exp(), *extra)
    table = q.clone()
    for state, act in itertools.product(range(S), range(A)):
        rows = ((s == state) & (a == act)).nonzero()[:, 0]
        if len(rows):
            nxt = s_next[rows]
            at_next = table_log_pi[nxt].exp(), table_log_pi[nxt], table_star[nxt]
            mean = ersac_tabular.robust_target(r[rows], 0.0, *at_next, alpha, gamma).mean()
            table[:, state, act] += lr * 2 * len(rows) / 200 * (mean - q[:, state, act])
    torch.testing.assert_close(new_weight, table)
    table_logits = logits.clone().requires_grad_()
    table_log_pi = table_logits.log_softmax(-1)
    star = worst(table, table_log_pi.exp().detach(), *extra)
    share = torch.bincount(s, minlength=S) / 200
    (ersac_tabular.actor_loss(table_log_pi.exp(), table_log_pi, star, alpha) * share).sum().backward()
    torch.testing.assert_close(phi.grad, table_logits.grad)


# ----- the stacked critics
def test_critics_start_like_independent_linear_layers():
    torch.manual_seed(0)
    critic = EnsembleCritic(8, 4, 300, 32)
    for weight, bias, fan_in in zip(critic.weights, critic.biases, (8, 32, 32)):
        layers = [torch.nn.Linear(fan_in, weight.shape[-1]) for _ in range(300)]
        for ours, theirs in ((weight, [l.weight for l in layers]), (bias, [l.bias for l in layers])):
            theirs = torch.stack([t.detach() for t in theirs])
            assert ours.abs().max() <= 1 / math.sqrt(fan_in) and ours.numel() == theirs.numel()
            assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.03)
            per_critic = ours.detach().flatten(1).std(1), theirs.flatten(1).std(1)
            assert per_critic[0].mean().item() == pytest.approx(per_critic[1].mean().item(), rel=0.05)


@pytest.mark.parametrize("layer_norm", [True, False])
def test_stack_equals_a_loop_over_critics_whatever_the_blocks(layer_norm):
    torch.manual_seed(1)
    critic = EnsembleCritic(5, 3, 7, 16, layer_norm).double()
    obs = torch.randn(11, 5, dtype=torch.float64)
    plain = []
    for n in range(7):
        h = obs
        for layer, (w, b) in enumerate(zip(critic.weights, critic.biases)):
            h = F.linear(h, w[n].T, b[n, 0])
            if layer < 2:
                h = F.relu(F.layer_norm(h, (16,)) if layer_norm else h)
        plain.append(h)
    plain = torch.stack(plain)
    weight = torch.randn_like(plain)
    expected = torch.autograd.grad((plain * weight).sum(), critic.parameters())
    for block in (1, 2, 3, 7, 10):
        critic.block = block
        out = critic(obs)
        torch.testing.assert_close(out, plain)
        for ours, theirs in zip(torch.autograd.grad((out * weight).sum(), critic.parameters()), expected):
            torch.testing.assert_close(ours, theirs)


# ----- losses
def test_critic_loss_against_loops():
    q, action, target = torch.randn(3, 5, 4), torch.tensor([0, 3, 1, 2, 2]), torch.randn(5)
    loss = critic_loss(q, action, target)
    assert loss.shape == (3, 5)
    for n, b in itertools.product(range(3), range(5)):
        assert loss[n, b].item() == pytest.approx((q[n, b, action[b]] - target[b]).item() ** 2, rel=1e-5)


def test_ensemble_similarity_against_all_pairs():
    g = torch.Generator().manual_seed(5)
    q = torch.randn(6, 9, 4, generator=g, dtype=torch.float64)
    q[2, 3] = 1.5  # a critic that sees no difference between actions contributes nothing
    q.requires_grad_()
    action = torch.randint(4, (9,), generator=g)
    total = torch.zeros(9, dtype=torch.float64)
    for b in range(9):
        for i in range(6):
            for j in range(i + 1, 6):
                x, y = (q[k, b] - q[k, b, action[b]] for k in (i, j))
                if x.norm() > 0 and y.norm() > 0:
                    total[b] = total[b] + x @ y / x.norm() / y.norm()
    ours = ensemble_similarity(q, action)
    torch.testing.assert_close(ours, total)
    (gradient,) = torch.autograd.grad(ours.sum(), q)
    (expected,) = torch.autograd.grad(total.sum(), q)
    torch.testing.assert_close(gradient, expected)
    assert gradient.isfinite().all()
    assert ensemble_similarity(torch.ones(3, 2, 4), torch.tensor([0, 1])).tolist() == [0.0, 0.0]


# ----- data
def test_dataset_names():
    assert dataset_name("LunarLander-v3", 0.9, 10_000) == "ersac/lunarlander/tau90-10k-v0"
    assert dataset_name("CartPole-v1", 0.05, 1234) == "ersac/cartpole/tau05-1234-v0"
    assert dataset_name("ersac/RiverSwim-v0", 0.125, 1000) == "ersac/riverswim/tau12p5-1k-v0"


def test_transitions_keep_terminations_truncations_and_returns_apart(datasets):
    dataset = minari.load_dataset("test/cartpole-v0")
    obs, action, reward, next_obs, terminated, returns = load_transitions(dataset, 0.9)
    assert len(obs) == len(action) == len(reward) == len(next_obs) == len(terminated) == len(returns) == 3000
    start = 0
    for episode in dataset.iterate_episodes():
        T = len(episode.rewards)
        part = slice(start, start + T)
        assert np.array_equal(obs[part], episode.observations[:-1].astype(np.float32))
        assert np.array_equal(next_obs[part], episode.observations[1:].astype(np.float32))
        assert np.array_equal(action[part], episode.actions) and np.array_equal(terminated[part], episode.terminations)
        if episode.terminations[-1]:
            expected = [sum(0.9**k * r for k, r in enumerate(episode.rewards[t:])) for t in range(T)]
            assert returns[part].numpy() == pytest.approx(expected, rel=1e-5)
        else:
            assert returns[part].isnan().all() and terminated[part].sum() == 0
        start += T
    assert terminated.sum() > 5 and returns.isnan().any()


def test_missing_data_set_of_ours_is_made(datasets, monkeypatch, capsys):
    commands = []

    def generate(command):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(ersac_ensemble.subprocess, "run", generate)
    with pytest.raises(SystemExit) as stop:
        ersac_ensemble.find_dataset(ersac_ensemble.Args(env_id="CartPole-v1", expectile_tau=0.9, dataset_size=1000))
    assert "ersac/cartpole/tau90-1k-v0 could not be made" in str(stop.value)
    words = " ".join(commands[0])
    assert "gen_expectile_data.py --env-id CartPole-v1 --expectile-tau 0.9 --dataset-size 1000" in words
    args = ersac_ensemble.Args(env_id="CartPole-v1", dataset_size=3000)
    assert ersac_ensemble.find_dataset(args).spec.dataset_id == "ersac/cartpole/tau50-3k-v0" and len(commands) == 1


# ----- the training loop against a plain one
def plain_data(dataset_id, gamma, return_scale):
    """Data as numpy arrays with the script's normalisation, written anew: loops, float64."""
    columns, seen = [[] for _ in range(5)], []
    for episode in minari.load_dataset(dataset_id).iterate_episodes():
        T = len(episode.actions)
        for t in range(T):
            step = episode.observations[t], episode.actions[t], episode.rewards[t]
            for column, value in zip(columns, (*step, episode.observations[t + 1], float(episode.terminations[t]))):
                column.append(value)
            if episode.terminations[-1]:
                seen.append(sum(gamma ** (k - t) * episode.rewards[k] for k in range(t, T)))
    s, a, r, s_next, done = (np.array(column, np.float64) for column in columns)
    mean, std = s.mean(0), np.maximum(s.std(0), 1e-3)
    r = r * return_scale / math.sqrt(np.mean(np.square(seen)))
    arrays = (s - mean) / std, a, r, (s_next - mean) / std, done
    return [torch.tensor(x) for x in arrays]


def plain_forward(parameters, obs):
    """One critic with layer norm, written with matrix products only."""
    h = obs
    for layer, (w, b) in enumerate(zip(parameters[0::2], parameters[1::2])):
        h = h @ w + b
        if layer < 2:
            centred = h - h.mean(-1, keepdim=True)
            h = torch.relu(centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    return h


def test_three_updates_equal_a_loop_over_critics_with_edac_bootstrap_and_learned_alpha(run, load, datasets):
    """Everything the losses tests cannot see: signs, weights, annealing, what is updated from what and when."""
    N, eta, gamma, alpha, polyak, lr_q, lr_pi, B, updates, seed = 4, 0.3, 0.97, 0.05, 0.1, 2e-3, 1e-3, 32, 3, 5
    coef = 0.2
    flags = f"--uncertainty-set box --edac-eta {eta} --bootstrap --autotune --num-critics {N} --hidden-dim 16 "
    flags += f"--batch-size {B} --gamma {gamma} --alpha {alpha} --polyak {polyak} --q-lr {lr_q} --policy-lr {lr_pi} "
    flags += f"--total-updates {updates} --seed {seed} --eval-episodes 1 --return-scale 3 --bc-coef {coef}"
    done = run("ersac_ensemble", "--dataset-id", "test/lander-v0", *flags.split())  # with two actions EDAC is constant
    assert done.code == 0, done.err
    ours = load(done.folders[0]).checkpoint

    s, a, r, s_next, done = plain_data("test/lander-v0", gamma, 3.0)
    a, D, A = a.long(), s.shape[1], 4
    torch.manual_seed(seed)  # the same draws in the same order: bootstrap weights, critics, (unused) prior, actor
    weights = torch.poisson(torch.ones(N, len(s)))
    stacked, _, actor = EnsembleCritic(D, A, N, 16), EnsembleCritic(D, A, N, 16), Actor(D, A, 16).double()
    pairs = list(zip(stacked.weights, stacked.biases))
    critics = [[t for w, b in pairs for t in (w[n].detach().double(), b[n, 0].detach().double())] for n in range(N)]
    critics = [[t.requires_grad_() for t in critic] for critic in critics]
    targets = [[t.detach().clone() for t in critic] for critic in critics]
    log_alpha = torch.tensor(math.log(alpha), dtype=torch.float64, requires_grad=True)
    q_optimizers = [torch.optim.Adam(critic) for critic in critics]
    pi_optimizer, alpha_optimizer = torch.optim.Adam(actor.parameters()), torch.optim.Adam([log_alpha])
    generator = torch.Generator().manual_seed(seed)
    for update in range(updates):
        left = (updates - update) / updates
        for optimizer in (*q_optimizers, pi_optimizer, alpha_optimizer):
            optimizer.param_groups[0]["lr"] = left * (lr_q if optimizer in q_optimizers else lr_pi)
        index = torch.randint(len(s), (B,), generator=generator)
        temperature = math.exp(log_alpha.item())
        q_next = torch.stack([plain_forward(t, s_next[index]) for t in targets]).min(0).values
        p = torch.softmax(actor(s_next[index]), -1).detach()
        soft_value = (p * (q_next - temperature * p.log())).sum(-1)
        y = (r[index] + gamma * (1 - done[index]) * soft_value).detach()
        q = [plain_forward(critic, s[index]) for critic in critics]
        loss = 0
        for n in range(N):
            for b in range(B):
                loss = loss + weights[n, index[b]] * (q[n][b, a[index[b]]] - y[b]) ** 2 / B
        for i, j in itertools.combinations(range(N), 2):
            x, z = (q[k] - q[k].gather(1, a[index][:, None]) for k in (i, j))
            loss = loss + N * eta * F.cosine_similarity(x, z).mean()
        for optimizer in q_optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in q_optimizers:
            optimizer.step()
        p = torch.softmax(actor(s[index]), -1)
        lowest = torch.stack([plain_forward(critic, s[index]) for critic in critics]).min(0).values.detach()
        objective = (p * (lowest - temperature * p.log())).sum(-1) + coef * p.gather(1, a[index][:, None]).log()[:, 0]
        gradient = torch.autograd.grad(-objective.mean(), list(actor.parameters()))
        for parameter, g in zip(actor.parameters(), gradient):
            parameter.grad = g
        # alpha rises when the policy is less random than asked, as minus the gradient of alpha (H - target) says
        missing = 0.3 * math.log(A) + (p * p.log()).sum(-1).mean().item()
        log_alpha.grad = torch.tensor(-temperature * missing, dtype=torch.float64)
        pi_optimizer.step()
        alpha_optimizer.step()
        for critic, target in zip(critics, targets):
            for t, t_target in zip(critic, target):
                t_target.copy_((1 - polyak) * t_target + polyak * t.detach())
    close = dict(rtol=1e-3, atol=2e-5)
    for part, expected in (("critic", critics), ("target", targets)):
        for n, (kind, layer) in itertools.product(range(N), itertools.product(("weights", "biases"), range(3))):
            value = expected[n][2 * layer + (kind == "biases")].detach().float()
            torch.testing.assert_close(ours[part][f"{kind}.{layer}"][n].squeeze(0), value, **close)
    for name, value in actor.state_dict().items():
        torch.testing.assert_close(ours["actor"][name], value.float(), **close)
    assert ours["log_alpha"].item() == pytest.approx(log_alpha.item(), abs=1e-5) != math.log(alpha)


# ----- the script
@pytest.mark.parametrize(
    "flags, method",
    [
        (("--uncertainty-set", "box"), "SAC-N"),
        (("--uncertainty-set", "hull", "--bootstrap"), "ERSAC-CH-N"),
        (("--uncertainty-set", "ellipsoid", "--autotune"), "ERSAC-Ell-N"),
        (("--uncertainty-set", "box", "--edac-eta", 1.0, "--prior-scale", 0.5), "EDAC"),
        (("--no-normalize-obs", "--return-scale", "None", "--no-layer-norm", "--no-anneal-lr"), "ERSAC-Ell-N"),
    ],
)
def test_methods_end_to_end_and_resumed_to_the_same_bits(run, load, datasets, flags, method):
    done = run("ersac_ensemble", *SMALL, *flags)
    assert done.code == 0, done.err
    whole = load(done.folders[0])
    assert whole.result["method"] == method and whole.result["dataset_id"] == "test/cartpole-v0"
    assert whole.result["env_id"] == "CartPole-v1" and done.folders[0].name.startswith("CartPole-v1__")
    needed = "script method env_id dataset_id seed updates updates_per_second eval_episodes eval_return_mean "
    needed += "eval_return_std random_return reference_return normalized_return policy_entropy"
    assert set(needed.split()) == set(whole.result)
    assert whole.result["normalized_return"] == pytest.approx(100 * (whole.result["eval_return_mean"] - 20) / 480)
    assert [line.split(",")[0] for line in whole.metrics] == ["update", "12", "24"]
    # the same run stopped after update 15: the checkpoint of update 15 is what a kill would have left behind
    part = run("ersac_ensemble", *SMALL, *flags, "--exp-name", "part")
    folder = part.folders[0]
    stop_after(folder, run, SMALL, flags, 15)
    rest = run("ersac_ensemble", "--resume", folder)
    assert rest.code == 0, rest.err
    again = load(folder)
    assert again.metrics == whole.metrics
    for name in ("critic", "target", "actor"):
        for key, value in whole.checkpoint[name].items():
            assert torch.equal(value, again.checkpoint[name][key]), (name, key)
    assert {k: v for k, v in again.result.items() if k != "updates_per_second"} == {
        k: v for k, v in whole.result.items() if k != "updates_per_second"
    }


def stop_after(folder, run, small, flags, update):
    """Put the checkpoint of an interrupted run into the folder: the same run with Ctrl-C during that update."""
    original, calls = torch._foreach_lerp_, []

    def interrupt(*arguments):
        calls.append(1)
        if len(calls) == update:
            signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    torch._foreach_lerp_ = interrupt
    try:
        done = run("ersac_ensemble", *small, *flags, "--exp-name", "stopped")
    finally:
        torch._foreach_lerp_ = original
    assert done.code == 130 and "--resume" in done.out
    for path in folder.iterdir():
        path.unlink()
    for path in done.folders[0].iterdir():
        path.rename(folder / path.name)


def test_same_seed_same_numbers_other_seed_other_numbers(run, load, datasets):
    first, second, third = (
        load(run("ersac_ensemble", *SMALL, "--seed", seed, "--exp-name", name).folders[0])
        for seed, name in ((3, "a"), (3, "b"), (4, "c"))
    )
    assert first.metrics == second.metrics and first.metrics != third.metrics


def test_bootstrap_prior_and_edac_change_the_run(run, load, datasets):
    runs = [(), ("--bootstrap",), ("--prior-scale", 1.0), ("--uncertainty-set", "box")]
    runs.append(("--uncertainty-set", "box", "--edac-eta", 1.0))
    texts = [
        load(run("ersac_ensemble", *SMALL, *f, "--exp-name", f"x{i}").folders[0]).metrics for i, f in enumerate(runs)
    ]
    assert len({tuple(text) for text in texts}) == len(runs)


BAD = [
    ("--upsilon 0", "upsilon"),
    ("--upsilon 1.5", "upsilon"),
    ("--num-critics 0", "num-critics"),
    ("--gamma 1", "gamma"),
    ("--alpha -1", "alpha"),
    ("--alpha 0 --autotune", "alpha"),
    ("--edac-eta -1", "edac-eta"),
    ("--edac-eta 1", "box"),
    ("--target-entropy 1.2", "target-entropy"),
    ("--return-scale 0", "return-scale"),
    ("--q-lr 0", "q-lr"),
    ("--batch-size 0", "batch-size"),
    ("--hidden-dim 0", "hidden-dim"),
    ("--total-updates 0", "total-updates"),
    ("--expectile-tau 1", "expectile-tau"),
    ("--uncertainty-set ball", "uncertainty-set"),
    ("--eval-only", "resume"),
    ("--resume nowhere", "nowhere"),
    ("--dataset-id test/pendulum-v0", "discrete actions"),
    ("--dataset-id test/lake-v0", "vectors"),
    ("--dataset-id test/nan-v0", "not finite"),
    ("--dataset-id test/ragged-v0", "T + 1"),
    ("--output-dir /proc/nowhere", "output-dir"),
]


@pytest.mark.parametrize("arguments, named", BAD)
def test_bad_input_ends_in_one_clear_line(run, datasets, tmp_path, arguments, named):
    data = () if "dataset-id" in arguments else DATA
    done = run("ersac_ensemble", *data, *SHORT, *arguments.split())
    assert done.code in (1, 2) and named in done.err and "Traceback" not in done.err, done.err
    if done.code == 1:
        assert len(done.err.strip().splitlines()) == 1
    assert list(tmp_path.glob("runs/**/*.json")) == []


def test_unknown_environment_and_foreign_id(run, datasets):
    done = run("ersac_ensemble", "--env-id", "Nowhere-v0")
    assert done.code == 1 and "--env-id Nowhere-v0" in done.err
    done = run("ersac_ensemble", "--dataset-id", "nobody/nothing-v0")
    assert done.code == 1 and "nobody/nothing-v0" in done.err and len(done.err.strip().splitlines()) == 1


def test_checkpoint_acts_in_five_lines(run, load, datasets):
    """The snippet of docs/ersac_ensemble.md."""
    (folder,) = run("ersac_ensemble", *SMALL, "--hidden-dim", 16).folders
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    actor = Actor(len(checkpoint["obs_mean"]), 2, checkpoint["args"]["hidden_dim"])
    actor.load_state_dict(checkpoint["actor"])
    obs, _ = gym.make("CartPole-v1").reset(seed=0)
    action = actor((torch.tensor(obs) - checkpoint["obs_mean"]) / checkpoint["obs_std"]).argmax().item()
    assert action in (0, 1)


def test_video_of_the_final_evaluation(run, datasets):
    done = run("ersac_ensemble", *SMALL, "--capture-video")
    assert done.code == 0, done.err
    (video,) = (done.folders[0] / "video").glob("*.mp4")
    assert video.stat().st_size > 1000


def test_runs_as_a_real_process(datasets, tmp_path):
    command = [sys.executable, str(ROOT / "ersac_ensemble.py"), *map(str, SMALL), "--output-dir", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MINARI_DATASETS_PATH": str(datasets)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "result.json").read_text())["method"] == "ERSAC-Ell-N" and str(folder) in done.stdout
