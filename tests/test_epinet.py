"""ersac_epinet.py: closed forms against sampling, uncertainty that shrinks with data, and the script end to end."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from ersac_epinet import EpinetCritic, epinet_loss, worst_case_ellipsoid, worst_case_gaussian

ROOT = Path(__file__).resolve().parents[1]
DATA = ("--dataset-id", "test/cartpole-v0", "--env-id", "CartPole-v1")
SHORT = ("--total-updates", 24, "--eval-interval", 12, "--checkpoint-interval", 5, "--eval-episodes", 3)
SMALL = (*DATA, *SHORT, "--hidden-dim", 16, "--batch-size", 32, "--num-index-samples", 20)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ----- closed forms against sampling
def test_loss_and_gradient_against_monte_carlo():
    B, A, d, n = 5, 3, 4, 100_000
    mu, sigma, y = draw(B, A).requires_grad_(), draw(B, A, d, seed=1).requires_grad_(), draw(B, seed=2)
    c, action, z = draw(B, d, seed=3), torch.tensor([0, 2, 1, 1, 0]), draw(n, d, seed=4)
    exact = epinet_loss(mu, sigma, action, y, c, 0.7)  # [B]
    rows = torch.arange(B)
    q = mu[rows, action] + z @ sigma[rows, action].T  # [n, B]
    sampled = (q - y - 0.7 * z @ c.T).square()
    assert ((sampled.mean(0) - exact).abs() < 5 * sampled.std(0) / math.sqrt(n)).all()
    for ours, theirs in zip(
        torch.autograd.grad(exact.sum(), (mu, sigma)), torch.autograd.grad(sampled.mean(0).sum(), (mu, sigma))
    ):
        assert (ours - theirs).abs().max() < 0.02 * ours.abs().max()


@pytest.mark.parametrize("A", [2, 4, 18])
def test_gaussian_set_against_a_hundred_thousand_samples(A):
    d, n = A + 2, 100_000
    mu, sigma, z = draw(2, A), draw(2, A, d, seed=1), draw(n, d, seed=2)
    pi = draw(2, A, seed=3).softmax(-1)
    q = mu + torch.einsum("bad,nd->nba", sigma, z)  # [n, B, A]
    covariance = torch.einsum("bad,bcd->bac", sigma, sigma)
    for b in range(2):
        assert np.allclose(
            np.cov(q[:, b].T.numpy()), covariance[b].numpy(), atol=0.05 * covariance[b].abs().max().item()
        )
    for upsilon in (0.5, 0.9):
        radius = math.sqrt(chi2.ppf(upsilon, A))
        ours = (pi * worst_case_gaussian(mu, sigma, pi, radius)).sum(-1)
        sampled = (pi * worst_case_ellipsoid(q, pi, upsilon)).sum(-1)
        mean = (pi * mu).sum(-1)
        assert ((ours - sampled).abs() < 0.02 * (mean - ours)).all()
        inside = torch.einsum("nba,bac,nbc->nb", q - mu, torch.linalg.inv(covariance), q - mu) <= radius**2
        assert (inside.double().mean(0) - upsilon).abs().max() < 5 * math.sqrt(upsilon * (1 - upsilon) / n)


def test_fewer_indices_than_actions_cover_more():
    A, d, n, upsilon = 4, 2, 100_000, 0.9
    sigma, z = draw(1, A, d, seed=1), draw(n, d, seed=2)
    radius = math.sqrt(chi2.ppf(upsilon, A))
    # q lies in a plane; there the set is |z| <= radius, and chi2 with A degrees of freedom is too generous
    share = (z.square().sum(-1) <= radius**2).double().mean().item()
    assert share == pytest.approx(chi2.cdf(radius**2, d), abs=0.005) and share > 0.97
    pi = torch.full((1, A), 1 / A, dtype=torch.float64)
    q_star = worst_case_gaussian(torch.zeros(1, A).double(), sigma, pi, radius)
    best = (torch.einsum("bad,nd->nba", sigma, radius * z / z.norm(dim=-1, keepdim=True)) * pi).sum(-1).min()
    assert (pi * q_star).sum().item() == pytest.approx(best.item(), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gaussian_set_in_degenerate_cases(dtype):
    mu, pi = torch.randn(3, 4, dtype=dtype), torch.eye(4, dtype=dtype)[:3]
    assert torch.equal(worst_case_gaussian(mu, torch.zeros(3, 4, 5, dtype=dtype), pi, 2.0), mu)
    for scale in (1e-30, 1e-10, 1e10):
        sigma = (torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
        q_star = worst_case_gaussian(torch.zeros_like(mu), sigma, pi, 2.0)
        expected = -2 * sigma[torch.arange(3), torch.arange(3)].double().norm(dim=-1)  # a deterministic policy
        assert (pi * q_star).sum(-1).double().numpy() == pytest.approx(expected.numpy(), rel=1e-5)


# ----- the critic
@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_samples_and_gradients_of_the_critic(head):
    critic = EpinetCritic(5, 3, 4, 16, head=head).double()
    obs, z = draw(7, 5), draw(6, 4, seed=1)
    q = critic.sample(obs, z)
    assert q.shape == (6, 7, 3)
    if head == "linear":
        mu, sigma = critic(obs)
        assert mu.shape == (7, 3) and sigma.shape == (7, 3, 4)
        for n, b, a in np.ndindex(6, 7, 3):
            assert q[n, b, a].item() == pytest.approx((mu[b, a] + sigma[b, a] @ z[n]).item())
        # the stochastic head sends no gradient into the features
        gradients = torch.autograd.grad(sigma.sum(), list(critic.base.parameters()), allow_unused=True)
        assert all(g is None or (g == 0).all() for g in gradients)
    assert not any(p.requires_grad for p in critic.prior.parameters())
    assert torch.equal(critic.sample(obs, 0 * z)[0], critic.mean(critic.base(obs)))


# ----- the claim that the method rests on
def test_learned_spread_falls_like_one_over_root_n_and_stays_where_there_are_no_data():
    sys.path.insert(0, str(ROOT / "docs" / "benchmark"))
    from epinet_toy import std_against_count

    counts = (1, 10, 100)
    rows = {n: [std_against_count(n, seed) for seed in range(100, 104)] for n in counts}
    mean = {name: [np.mean([row[name] for row in rows[n]]) for n in counts] for name in rows[1][0]}
    slope = np.polyfit(np.log(counts), np.log(mean["seen"]), 1)[0]
    assert -0.58 < slope < -0.42  # 1/sqrt(n) is -0.5; nothing in the critic knows n
    np.testing.assert_allclose(mean["seen"], mean["theory"], rtol=0.25)
    for place in ("other_action", "far_state"):
        kept = np.array(mean[place]) / mean[f"{place}_before"]
        assert (kept > 0.6).all() and (kept < 1.6).all(), (place, kept)
        assert mean[place][-1] > 4 * mean["seen"][-1]


# ----- the script
@pytest.mark.parametrize(
    "flags, method",
    [
        ((), "ERSAC-Ell-Epi*"),
        (("--method", "ell-epi", "--upsilon", 1.0), "ERSAC-Ell-Epi"),
        (("--method", "ell-epi", "--head", "mlp", "--lambda-mu", 1e-4, "--lambda-sigma", 1e-4), "ERSAC-Ell-Epi"),
        (("--index-dim", 1, "--autotune"), "ERSAC-Ell-Epi*"),
    ],
)
def test_methods_end_to_end_and_resumed_to_the_same_bits(run, load, datasets, monkeypatch, flags, method):
    done = run("ersac_epinet", *SMALL, *flags)
    assert done.code == 0, done.err
    whole = load(done.folders[0])
    assert whole.result["method"] == method and len(whole.metrics) == 3
    original, calls = torch._foreach_lerp_, []

    def interrupt(*arguments):
        calls.append(1)
        if len(calls) == 15:
            import signal

            signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(torch, "_foreach_lerp_", interrupt)
    part = run("ersac_epinet", *SMALL, *flags, "--exp-name", "part")
    monkeypatch.setattr(torch, "_foreach_lerp_", original)
    assert part.code == 130
    assert run("ersac_epinet", "--resume", part.folders[0]).code == 0
    again = load(part.folders[0])
    assert again.metrics == whole.metrics
    for name in ("critic", "target", "actor"):
        for key, value in whole.checkpoint[name].items():
            assert torch.equal(value, again.checkpoint[name][key]), (name, key)


BAD = [
    ("--dataset-id test/ragged-v0", "T + 1"),
    ("--upsilon 1", "infinite"),
    ("--upsilon 0", "upsilon"),
    ("--head mlp", "linear in z"),
    ("--index-dim 0", "index-dim"),
    ("--num-index-samples 0", "num-index-samples"),
    ("--noise-scale -1", "noise-scale"),
    ("--prior-scale nan", "prior-scale"),
    ("--method ell-n", "method"),
    ("--dataset-id test/pendulum-v0", "discrete actions"),
]


@pytest.mark.parametrize("arguments, named", BAD)
def test_bad_input_ends_in_one_clear_line(run, datasets, arguments, named):
    done = run("ersac_epinet", *(() if "dataset-id" in arguments else DATA), *SHORT, *arguments.split())
    assert done.code in (1, 2) and named in done.err and "Traceback" not in done.err, done.err
    assert done.code == 2 or len(done.err.strip().splitlines()) == 1
