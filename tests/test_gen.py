"""gen_expectile_data.py: the expectile targets against plain loops, restored states, the data sets, and the script."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import minari
import numpy as np
import pytest
import torch
from scipy import stats

import gen_expectile_data as gen
from gen_expectile_data import Args, Simulator, behaviour_env, get_state, network, play_episode, set_state

ROOT = Path(__file__).resolve().parents[1]
FEW = ("--eval-episodes", 2)
TINY = ("--start-steps", 1, "--finish-steps", 1, "--floor", -1e9, "--eval-episodes", 2, "--checkpoint-interval", 1)


@pytest.fixture(autouse=True)
def datasets(monkeypatch, tmp_path):
    """Minari's folder of this test."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def arrays(dataset_id):
    """Every array of a data set, episode by episode."""
    dataset = minari.load_dataset(dataset_id)
    columns = ("observations", "actions", "rewards", "terminations", "truncations")
    return [[getattr(episode, name) for name in columns] for episode in dataset.iterate_episodes()]


def same(first, second):
    pairs = [(a, b) for e, f in zip(first, second, strict=True) for a, b in zip(e, f, strict=True)]
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


# ----- the expectile target, against scipy and plain loops
def executed_probs(A, epsilon):
    return [[(1 - epsilon) * (a == b) + epsilon / A for b in range(A)] for a in range(A)]


def test_risk_weights_agree_with_scipy():
    rng = np.random.default_rng(0)
    for _ in range(300):
        A, tau, epsilon = rng.integers(2, 7), rng.uniform(0.02, 0.98), rng.uniform(0.01, 1)
        w, p = rng.normal(size=(3, A)), np.array(executed_probs(A, epsilon))
        q, rho = gen.risk_weights(w[:, None, :], p, tau)  # [3, A], [3, A, A]
        for i in range(3):
            for a in range(A):
                exact = stats.expectile(w[i], alpha=1 - tau, weights=p[a])
                assert q[i, a] == pytest.approx(exact, abs=1e-9)
        assert (p * rho).sum(-1) == pytest.approx(1) and (p * rho * w[:, None]).sum(-1) == pytest.approx(q, abs=1e-9)
        worst, best = w.argmin(-1), w.argmax(-1)  # a risk-averse expectile weighs the bad outcomes up
        assert ((rho[range(3), 0, worst] >= rho[range(3), 0, best]) == (tau >= 0.5)).all()


def fake_rollout(rng, T=30, E=3, D=4, A=3):
    """A rollout with made-up numbers, an actor and a critic."""
    torch.manual_seed(0)
    roll = {
        "obs": rng.normal(size=(T, E, D)),
        "next_obs": rng.normal(size=(T, E, D)),
        "reward": rng.normal(size=(T, E)),
    }
    roll |= {"chosen": rng.integers(A, size=(T, E)), "executed": rng.integers(A, size=(T, E))}
    roll |= {"terminated": rng.random((T, E)) < 0.1, "truncated": rng.random((T, E)) < 0.1}
    return roll, network(D, A, 8, 1.0), network(D, 1 + A, 8, 1.0)


def outputs(net, obs):
    return net(torch.as_tensor(obs, dtype=torch.float32)).detach().double().numpy()


def softmax(x):
    return np.exp(x) / np.exp(x).sum()


def test_neutral_start_is_generalised_advantage_estimation():
    roll, actor, critic = fake_rollout(np.random.default_rng(1))
    args = Args(gamma=0.9, reward_scale=0.5)
    target, advantage = gen.targets(roll, None, actor, critic, None, args)
    T, E = roll["reward"].shape
    for e in range(E):
        for start in range(T):  # the definition: a discounted sum of TD errors up to the end of the episode
            total, weight = 0.0, 1.0
            for t in range(start, T):
                v, v_next = (outputs(critic, roll[key][t, e])[0] for key in ("obs", "next_obs"))
                bootstrap = 0.0 if roll["terminated"][t, e] else 0.9 * v_next
                total += weight * (0.5 * roll["reward"][t, e] + bootstrap - v)
                weight *= 0.9 * 0.97
                if roll["terminated"][t, e] or roll["truncated"][t, e]:
                    break
            assert advantage[start, e] == pytest.approx(total, abs=1e-6)
            assert target[start, e] == pytest.approx(total + outputs(critic, roll["obs"][start, e])[0], abs=1e-6)


@pytest.mark.parametrize("tau", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("estimator", ["action-noise", "resample"])
def test_targets_equal_plain_loops(tau, estimator):
    rng = np.random.default_rng(2)
    roll, actor, critic = fake_rollout(rng)
    args = Args(gamma=0.9, reward_scale=0.5, epsilon=0.3)
    (T, E), A, N = roll["reward"].shape, 3, 5
    outcomes = None
    if estimator == "resample":
        outcomes = rng.normal(size=(T, E, N, 4)), rng.normal(size=(T, E, N)), rng.random((T, E, N)) < 0.1
        for column, key in zip(outcomes, ("next_obs", "reward", "terminated")):
            column[:, :, 0] = roll[key]  # the first outcome is the one that happened
    p = executed_probs(A, 0.3)

    def scores(obs):  # values of executed actions, of chosen actions, of the state
        out = outputs(critic, obs)
        w = [out[0] + out[1 + b] for b in range(A)]
        q = w if outcomes else [stats.expectile(w, alpha=1 - tau, weights=p[a]) for a in range(A)]
        return w, q, sum(pi * x for pi, x in zip(softmax(outputs(actor, obs)), q))

    def weight(value, e, others, probs):  # the expectile's weight of one outcome over its probability
        side = lambda x: tau if x < e else 1 - tau  # noqa: E731
        return side(value) / sum(prob * side(x) for x, prob in zip(others, probs))

    target, advantage = gen.targets(roll, outcomes, actor, critic, tau, args)
    for e in range(E):
        G, rho_next = 0.0, 0.0
        for t in reversed(range(T)):
            w, q, v = scores(roll["obs"][t, e])
            a, b = roll["chosen"][t, e], roll["executed"][t, e]
            ended = roll["terminated"][t, e] or roll["truncated"][t, e] or t == T - 1

            def follow(next_obs, reward, terminated):
                return 0.5 * reward + (0.0 if terminated else 0.9 * scores(next_obs)[2])

            if outcomes:
                z = [follow(*(x[t, e, n] for x in outcomes)) for n in range(N)]
                y = stats.expectile(z, alpha=1 - tau)
                rho = weight(z[0], y, z, [1 / N] * N)
                G = y - q[a] + (0.0 if ended else 0.9 * 0.97 * min(rho, 1) * G)
                expected = q[a] + G, q[a] - v + G
            else:
                z = follow(roll["next_obs"][t, e], roll["reward"][t, e], roll["terminated"][t, e])
                G = z - w[b] + (0.0 if ended else 0.9 * 0.97 * min(rho_next, 1) * G)
                rho_next = weight(w[b], q[a], w, p[a])
                expected = w[b] + G, q[a] - v + rho_next * G
            assert (target[t, e], advantage[t, e]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("tau", [0.1, 0.5, 0.9])
def test_both_estimators_agree_on_cartpole(tau):
    """CartPole has no randomness but the action noise: with many resamples both see the same outcomes."""
    sim, twin, rng = Simulator("CartPole-v1"), behaviour_env("CartPole-v1"), np.random.default_rng(3)
    twin.reset(seed=0)
    value = lambda obs: float(10 * obs[0] - 40 * abs(obs[2]) + 3 * obs[3])  # noqa: E731, any function will do
    epsilon, N, tested = 0.3, 4000, 0
    while tested < 5:
        if not tested or len(sim.actions) == 4:
            sim.reset(tested)
            sim.step(tested % 2)
            state, seen = get_state(sim.env), {}
            for b in (0, 1):
                set_state(twin, state)
                obs, reward, terminated, *_ = twin.unwrapped.step(b)
                seen[b] = reward + 0.9 * (0 if terminated else value(obs))
            roll = {"next_obs": np.zeros((1, 1, 4)), "reward": np.ones((1, 1)), "terminated": np.zeros((1, 1), bool)}
            roll |= {"chosen": np.array([[1]]), "states": [[(sim.seed, state)]]}
            next_obs, reward, terminated = gen.resample(twin, roll, N, epsilon, rng)
            z = reward[0, 0, 1:] + 0.9 * ~terminated[0, 0, 1:] * np.array([value(obs) for obs in next_obs[0, 0, 1:]])
            assert sorted(set(z)) == pytest.approx(sorted(seen.values()))  # nothing else can happen
            exact, _ = gen.risk_weights(np.array([seen[0], seen[1]])[None], np.array(executed_probs(2, epsilon)), tau)
            sampled, _ = gen.risk_weights(z, 1 / len(z), tau)
            assert abs(sampled - exact[1]) < 0.05 * abs(seen[0] - seen[1])
            tested += 1
        sim.step(int(rng.integers(2)))


# ----- restored states
@pytest.mark.parametrize("env_id", ["CartPole-v1", "MountainCar-v0", "Acrobot-v1", "RiverSwim", "MachineReplacement"])
def test_restored_states_are_exact(env_id):
    env, twin, rng = behaviour_env(env_id), behaviour_env(env_id), np.random.default_rng(4)
    env.reset(seed=1)
    twin.reset(seed=1)
    for _ in range(60):
        set_state(twin, get_state(env))
        action = int(rng.integers(env.action_space.n))
        twin.unwrapped.np_random, env.unwrapped.np_random = np.random.default_rng(9), np.random.default_rng(9)
        here, there = env.step(action), twin.unwrapped.step(action)
        if env_id in ("RiverSwim", "MachineReplacement"):
            assert here[0].argmax() == there[0]
        else:
            assert np.array_equal(here[0], there[0])
        assert here[1:3] == there[1:3]
        if here[2] or here[3]:
            env.reset()


def test_lunar_lander_is_restored_in_flight_only():
    env, twin, rng = behaviour_env("LunarLander-v3"), behaviour_env("LunarLander-v3"), np.random.default_rng(5)
    env.reset(seed=2)
    twin.reset(seed=2)
    errors, refused, done = [], 0, False
    while not done:
        state, action = get_state(env), int(rng.integers(4))
        env.unwrapped.np_random = twin.unwrapped.np_random = np.random.default_rng(len(errors))
        obs, reward, terminated, truncated, _ = env.step(action)
        if state is None:
            refused += 1
        elif not terminated:
            set_state(twin, state)
            twin.unwrapped.np_random = np.random.default_rng(len(errors))
            there = twin.unwrapped.step(action)
            errors.append(max(np.abs(obs - there[0]).max(), abs(reward - there[1]) / 100))
        done = terminated or truncated
    assert len(errors) > 40 and np.median(errors) < 1e-3 and np.quantile(errors, 0.9) < 1e-2


def test_states_that_cannot_be_restored():
    env = behaviour_env("LunarLander-v3")
    env.reset(seed=0)
    assert get_state(env) is not None
    env.unwrapped.legs[0].ground_contact = True
    assert get_state(env) is None


@pytest.mark.parametrize("env_id", ["CartPole-v1", "LunarLander-v3"])
def test_simulator_replays_to_the_same_place(env_id):
    sim, rng = Simulator(env_id), np.random.default_rng(6)
    sim.reset(7)
    for _ in range(70 if env_id == "LunarLander-v3" else 8):
        sim.step(int(rng.integers(2)))
    again = Simulator(env_id)
    again.reset(3)
    again.step(1)
    again.reset(sim.seed, list(sim.actions))
    assert again.actions == sim.actions and again.episode_return == sim.episode_return
    for _ in range(3):
        first, second = sim.step(1), again.step(1)
        assert np.array_equal(first[0], second[0]) and first[1:] == second[1:]


# ----- rollouts and episodes
def test_rollout_executes_the_noise_and_cuts_episodes():
    torch.manual_seed(0)
    sims, actor = [Simulator("CartPole-v1") for _ in range(4)], network(4, 2, 8, 1.0)
    for seed, sim in enumerate(sims):
        sim.reset(seed)
    roll, finished = gen.rollout(sims, actor, 0.4, torch.Generator().manual_seed(1), False)
    assert roll["obs"].shape == (256, 4, 4) and roll["chosen"].shape == (256, 4)
    noisy = (roll["chosen"] != roll["executed"]).mean()
    assert noisy == pytest.approx(0.2, abs=0.06)  # half of the random actions agree with the chosen ones
    done = roll["terminated"] | roll["truncated"]
    assert done.sum() == len(finished) > 10
    assert np.array_equal(roll["obs"][1:][~done[:-1]], roll["next_obs"][:-1][~done[:-1]])
    assert (np.abs(roll["obs"][1:][done[:-1]]) < 0.05).all()  # a new episode
    quiet, _ = gen.rollout(sims, actor, 0.0, torch.Generator().manual_seed(1), False)
    assert np.array_equal(quiet["chosen"], quiet["executed"])


def test_episodes_hold_what_happened():
    torch.manual_seed(0)
    env, actor, rng = behaviour_env("CartPole-v1"), network(4, 2, 8, 1.0), np.random.default_rng(0)
    for epsilon, greedy in ((0.0, True), (0.3, False)):
        episode = play_episode(env, actor, rng, epsilon, greedy)
        obs, _ = env.reset(seed=episode["seed"])
        assert np.array_equal(obs, episode["observations"][0])
        for t, action in enumerate(episode["actions"]):
            if greedy:
                assert action == actor(torch.from_numpy(obs)).argmax()
            obs, reward, terminated, truncated, _ = env.step(int(action))
            assert np.array_equal(obs, episode["observations"][t + 1]) and reward == episode["rewards"][t]
            assert (terminated, truncated) == (episode["terminations"][t], episode["truncations"][t])
    cut = play_episode(env, actor, rng, limit=5)
    assert len(cut["actions"]) == 5 and cut["truncations"].tolist() == [False] * 4 + [True]
    assert len(cut["observations"]) == 6 and not cut["terminations"].any()


def test_an_end_at_the_limit_stays_a_termination():
    env = behaviour_env("CartPole-v1")
    steps = len(play_episode(env, None, np.random.default_rng(1))["actions"])
    cut = play_episode(env, None, np.random.default_rng(1), limit=steps)
    assert cut["terminations"][-1] and not cut["truncations"].any()


def test_random_policy_is_uniform_and_the_noise_has_its_share():
    torch.manual_seed(0)
    env, rng = behaviour_env("RiverSwim"), np.random.default_rng(2)
    counts = np.bincount(np.concatenate([play_episode(env, None, rng)["actions"] for _ in range(20)]))
    assert stats.chisquare(counts).pvalue > 1e-4
    right = torch.nn.Linear(20, 2, bias=False)
    right.weight.data = torch.tensor([[0.0], [1e3]]).expand(2, 20)
    share = np.concatenate([play_episode(env, right, rng, epsilon=0.2)["actions"] for _ in range(20)]).mean()
    assert share == pytest.approx(0.9, abs=4 * np.sqrt(0.09 / 4000))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_share_of_the_random_policy(fraction):
    left = torch.nn.Linear(20, 2, bias=False)
    left.weight.data = torch.tensor([[1e3], [0.0]]).expand(2, 20)
    args = Args(random_fraction=fraction, epsilon=0.0)
    episodes = gen.collect_episodes(behaviour_env("RiverSwim"), left, args, 4000)
    assert sum(len(episode["actions"]) for episode in episodes) == 4000
    share = np.mean([episode["actions"].any() for episode in episodes])  # the policy itself never goes right
    assert share == fraction


# ----- data sets
@pytest.mark.parametrize("env_id", ["CartPole-v1", "LunarLander-v3"])
def test_data_set_of_a_committed_policy(run, env_id):
    arguments = ("--env-id", env_id, "--expectile-tau", 0.9, "--dataset-size", 1000, "--seed", 4)
    done = run("gen_expectile_data", *arguments)
    assert done.code == 0, done.err
    name = env_id.split("-")[0].lower()
    dataset = minari.load_dataset(f"ersac/{name}/tau90-1k-v0")
    assert f"{dataset.spec.dataset_id}: 1000 transitions" in done.out and dataset.total_steps == 1000
    env, total = dataset.recover_environment(), 0
    assert env.spec.id == env_id and env.action_space == dataset.action_space
    assert env.observation_space == dataset.observation_space
    seeds = dataset.storage.get_episode_metadata(range(dataset.total_episodes))
    episodes = list(dataset.iterate_episodes())
    for episode, stored in zip(episodes, seeds):  # an independent run of the stored actions gives the stored numbers
        obs, _ = env.reset(seed=int(stored["seed"]))
        assert np.array_equal(obs, episode.observations[0]) and len(episode.observations) == len(episode.actions) + 1
        for t, action in enumerate(episode.actions):
            obs, reward, terminated, truncated, _ = env.step(action)
            total += 1
            assert np.array_equal(obs, episode.observations[t + 1]) and reward == episode.rewards[t]
            assert terminated == episode.terminations[t]
            assert (truncated or (total == 1000 and not terminated)) == episode.truncations[t]
        assert episode.terminations[-1] or episode.truncations[-1]
        assert not (episode.terminations[:-1] | episode.truncations[:-1]).any()
    reference = torch.load(ROOT / f"docs/policies/{name}-tau50/policy.pt", weights_only=True)
    scores = minari.get_normalized_score(dataset, np.array([reference["random_return"], reference["greedy_return"]]))
    assert scores == pytest.approx([0, 1])
    about = dataset.storage.metadata
    assert {"algorithm_name", "author", "description", "requirements", "code_permalink"} <= set(about)
    assert about["num_episodes_average_score"] == 100 and "tau 0.9" in about["description"]
    result = json.loads((done.folders[0] / "result.json").read_text())
    assert result["datasets"][0]["transitions"] == 1000 and result["ref_max_score"] == reference["greedy_return"]
    policy = torch.load(ROOT / f"docs/policies/{name}-tau90/policy.pt", weights_only=True)
    actor = network(env.observation_space.shape[0], int(env.action_space.n), 128, 0.01)
    actor.load_state_dict(policy["actor"])
    obs, actions = (np.concatenate(x) for x in zip(*((e.observations[:-1], e.actions) for e in episodes)))
    pi = actor(torch.from_numpy(obs)).softmax(-1).detach().numpy()
    likelihood = 0.9 * pi[range(1000), actions].mean() + 0.1 / pi.shape[-1]
    expected = ((0.9 * pi + 0.1 / pi.shape[-1]) ** 2).sum(-1).mean()
    assert likelihood == pytest.approx(expected, abs=0.05)  # what follows if actions are drawn from that mixture


@pytest.mark.parametrize("env_id", ["RiverSwim", "MachineReplacement"])
@pytest.mark.parametrize("tau", [0.1, 0.9])
def test_tabular_data_follow_the_solved_policy(run, env_id, tau):
    done = run("gen_expectile_data", "--env-id", env_id, "--expectile-tau", tau, "--dataset-size", 3001, *FEW)
    assert done.code == 0, done.err
    dataset = minari.load_dataset(f"ersac/{env_id.lower()}/tau{int(100 * tau)}-3001-v0")
    P, R = {"RiverSwim": gen.riverswim, "MachineReplacement": gen.machine_replacement}[env_id]()
    best, agree = gen.expectile_value_iteration(P, R, tau, 0.9).argmax(-1), []
    for episode in dataset.iterate_episodes():
        assert (episode.observations.sum(-1) == 1).all() and len(episode.actions) <= 200
        s = episode.observations.argmax(-1)
        assert (P[s[:-1], episode.actions, s[1:]] > 0).all()
        assert np.array_equal(R[s[:-1], episode.actions, s[1:]], episode.rewards)
        agree += (episode.actions == best[s[:-1]]).tolist()
    assert len(agree) == 3001 and np.mean(agree) == pytest.approx(0.95, abs=0.02)
    obs, _ = dataset.recover_environment().reset(seed=0)
    assert obs in dataset.observation_space and obs.sum() == 1


def test_resampled_tables_are_near_the_exact_ones(run):
    """N_s next states a pair instead of the true probabilities: more of them, more of the exact policy's actions."""
    P, R = gen.machine_replacement()
    best, agree = gen.expectile_value_iteration(P, R, 0.9, 0.9).argmax(-1), {}
    for number in (2, 100_000):
        flags = ("--env-id", "MachineReplacement", "--expectile-tau", 0.9, "--dataset-size", 2000, "--epsilon", 0, *FEW)
        flags += (
            "--estimator",
            "resample",
            "--num-resamples",
            number,
            "--exp-name",
            number,
            "--overwrite",
            "--seed",
            6,
        )
        assert run("gen_expectile_data", *flags).code == 0
        data = arrays("ersac/machinereplacement/tau90-2k-v0")
        agree[number] = np.concatenate([e[1] == best[e[0].argmax(-1)[:-1]] for e in data]).mean()
    assert agree[2] < agree[100_000] and agree[100_000] > 0.99


def test_same_arguments_give_the_same_arrays(run, datasets):
    flags = ("--env-id", "LunarLander-v3", "--dataset-size", 700)
    dataset_id = "ersac/lunarlander/tau50-700-v0"
    assert run("gen_expectile_data", *flags).code == 0
    first = arrays(dataset_id)
    assert run("gen_expectile_data", *flags, "--overwrite", "--exp-name", "again").code == 0
    assert same(first, arrays(dataset_id))
    shutil.rmtree(datasets)
    assert run("gen_expectile_data", *flags, "--seed", 2).code == 0
    assert not same(first[:1], arrays(dataset_id)[:1])


def test_grid_makes_what_is_missing_of_nine_data_sets(run, datasets):
    ids = {f"ersac/machinereplacement/tau{t}-{n}-v0" for t in (10, 50, 90) for n in ("1k", "10k", "100k")}
    missing = {"ersac/machinereplacement/tau10-1k-v0", "ersac/machinereplacement/tau90-1k-v0"}
    for dataset_id in ids - missing:
        (datasets / dataset_id).mkdir(parents=True)
    done = run("gen_expectile_data", "--env-id", "MachineReplacement", "--grid", *FEW)
    assert done.code == 0, done.err
    assert done.out.count("left alone") == 7 and set(minari.list_local_datasets()) == missing


@pytest.mark.slow
def test_grid_makes_nine_data_sets_and_continues(run, datasets):
    done = run("gen_expectile_data", "--env-id", "MachineReplacement", "--grid", *FEW)
    assert done.code == 0, done.err
    ids = sorted(minari.list_local_datasets())
    assert ids == sorted(f"ersac/machinereplacement/tau{t}-{n}-v0" for t in (10, 50, 90) for n in ("1k", "10k", "100k"))
    shutil.rmtree(datasets / "ersac/machinereplacement/tau50-10k-v0")
    again = run("gen_expectile_data", "--env-id", "MachineReplacement", "--grid", "--exp-name", "again", *FEW)
    assert again.code == 0 and again.out.count("left alone") == 8 and again.out.count("10000 transitions") == 1
    assert len(minari.list_local_datasets()) == 9


def test_a_small_data_set_is_the_beginning_of_a_large_one(run):
    for size in (300, 1000):
        assert (
            run("gen_expectile_data", "--env-id", "RiverSwim", "--dataset-size", size, "--exp-name", size, *FEW).code
            == 0
        )
    small, large = arrays("ersac/riverswim/tau50-300-v0"), arrays("ersac/riverswim/tau50-1k-v0")
    assert len(small) == 2 and same(small[:1], large[:1])
    for column, longer in zip(small[1][:3], large[1][:3]):
        assert np.array_equal(column, longer[: len(column)])
    assert small[1][4].tolist() == [False] * 99 + [True]  # cut, and marked as cut


def test_existing_data_set_is_left_alone(run, datasets):
    flags = ("--env-id", "RiverSwim", "--dataset-size", 50, "--random-fraction", 0.25, *FEW)
    assert run("gen_expectile_data", *flags).code == 0
    (path,) = (datasets / "ersac/riverswim").iterdir()
    assert path.name == "tau50-random25-50-v0"
    before = (path / "data/main_data.hdf5").stat().st_mtime_ns
    again = run("gen_expectile_data", *flags)
    assert again.code == 0 and "left alone" in again.out and again.folders == []
    assert (path / "data/main_data.hdf5").stat().st_mtime_ns == before
    assert run("gen_expectile_data", *flags, "--overwrite", "--exp-name", "new").code == 0
    assert (path / "data/main_data.hdf5").stat().st_mtime_ns > before
    assert [p.name for p in datasets.iterdir()] == ["ersac"]  # nothing else is left over


# ----- training
def policy_files(folder):
    return {path.parent.name: path.read_bytes() for path in folder.glob("*/policy.pt")}


@pytest.mark.parametrize("estimator", ["action-noise", "resample"])
def test_training_is_reproducible_and_its_policies_are_kept(run, tmp_path, estimator):
    flags = ("--env-id", "CartPole-v1", "--expectile-tau", 0.9, "--dataset-size", 100, "--policy-dir", "mine", *TINY)
    flags += ("--estimator", estimator, "--num-resamples", 2)
    first = run("gen_expectile_data", *flags, "--exp-name", "first")
    assert first.code == 0, first.err
    assert "cartpole-start: training the neutral start" in first.out
    names = {"cartpole-start", "cartpole-tau50", "cartpole-tau90"}
    assert set(policy_files(tmp_path / "mine")) == set(policy_files(first.folders[0])) == names
    stored = arrays("ersac/cartpole/tau90-100-v0")
    # the kept policies are used, and give the same data
    second = run("gen_expectile_data", *flags, "--overwrite", "--exp-name", "second")
    assert second.code == 0 and "training" not in second.out and same(stored, arrays("ersac/cartpole/tau90-100-v0"))
    # trained again, they are the same bits; the folder of policies is not touched
    before = policy_files(tmp_path / "mine")
    third = run("gen_expectile_data", *flags, "--overwrite", "--retrain", "--exp-name", "third")
    assert third.code == 0 and policy_files(third.folders[0]) == before == policy_files(tmp_path / "mine")
    assert same(stored, arrays("ersac/cartpole/tau90-100-v0"))
    # other settings need other policies
    other = run("gen_expectile_data", *flags, "--overwrite", "--epsilon", 0.2)
    assert other.code == 1 and "another epsilon" in other.err and len(other.err.strip().splitlines()) == 1


def test_log_of_the_training(run):
    done = run("gen_expectile_data", "--env-id", "CartPole-v1", "--dataset-size", 10, "--retrain", *TINY)
    assert done.code == 0, done.err
    rows = (done.folders[0] / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[:3] for row in rows[1:]] == [
        ["cartpole-start", "1", "4096"],
        ["cartpole-tau50", "1", "4096"],
    ]
    assert rows[0].startswith("policy,rollout,env_steps,charts/episode_return,charts/episode_length,losses/critic_loss")
    own = (done.folders[0] / "cartpole-tau50/metrics.csv").read_text().splitlines()
    assert own == [rows[0], rows[2]]


def test_a_bad_policy_is_not_stored(run, tmp_path):
    flags = ("--env-id", "CartPole-v1", "--dataset-size", 10, "--policy-dir", "mine", *TINY, "--floor", 501)
    done = run("gen_expectile_data", *flags)
    assert done.code == 1 and "below the floor 501 after three rounds" in done.err.splitlines()[-1]
    assert done.out.count("the floor is 501") == 3  # it went on before it gave up
    assert not list(tmp_path.glob("mine/*")) and not list(tmp_path.glob("minari/*"))


def test_other_environments(run, tmp_path):
    flags = ("--env-id", "Acrobot-v1", "--dataset-size", 600, "--policy-dir", "mine", *TINY)
    done = run("gen_expectile_data", *flags, "--expectile-tau", 0.125)
    assert done.code == 0, done.err
    assert minari.load_dataset("ersac/acrobot/tau12p5-600-v0").total_steps == 600
    assert (tmp_path / "mine/acrobot-tau12p5/policy.pt").exists()


def start_process(tmp_path, *arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "gen_expectile_data.py"), *map(str, arguments)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=tmp_path, env=environment, **quiet)


def wait_for(what, process, seconds=60):
    deadline = time.time() + seconds
    while not (found := what()) and process.poll() is None and time.time() < deadline:
        time.sleep(0.002)
    return found


@pytest.mark.parametrize("env_id", ["CartPole-v1", pytest.param("LunarLander-v3", marks=pytest.mark.slow)])
def test_killed_training_resumes_to_the_same_bits(run, tmp_path, env_id):
    flags = ("--env-id", env_id, "--dataset-size", 100, "--retrain", *TINY[4:], "--seed", 3)
    flags += ("--start-steps", 12_000, "--finish-steps", 6000, "--estimator", "resample", "--num-resamples", 2)
    whole = run("gen_expectile_data", *flags)
    assert whole.code == 0, whole.err
    dataset_id = f"ersac/{env_id.split('-')[0].lower()}/tau50-100-v0"
    stored = arrays(dataset_id)
    process = start_process(tmp_path, *flags, "--overwrite", "--output-dir", "killed")
    for _ in range(2):
        metrics = lambda: [p for p in tmp_path.glob("killed/*/metrics.csv") if len(p.read_text().splitlines()) > 2]  # noqa: E731
        assert wait_for(metrics, process)
        time.sleep(random.uniform(0, 0.6))
        process.kill()
        process.wait()
        (folder,) = tmp_path.glob("killed/*")
        process = start_process(tmp_path, "--resume", folder)
        time.sleep(random.uniform(2, 4))
    assert process.wait(120) == 0
    assert policy_files(folder) == policy_files(whole.folders[0]) and len(policy_files(folder)) == 2
    lines = [(f / "metrics.csv").read_text().splitlines() for f in (folder, whole.folders[0])]
    assert [x.rsplit(",", 1)[0] for x in lines[0]] == [x.rsplit(",", 1)[0] for x in lines[1]]
    assert same(stored, arrays(dataset_id))


def test_killed_collection_leaves_no_half_data_set(tmp_path, datasets):
    flags = ("--env-id", "RiverSwim", "--dataset-size", 20_000, *FEW)
    process = start_process(tmp_path, *flags)
    hidden = wait_for(lambda: list(datasets.glob(".ersac-*/ersac/riverswim/*/data/*")), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert hidden and minari.list_local_datasets() == {} and not (datasets / "ersac").exists()
    (leftover,) = datasets.glob(".ersac-*")
    os.utime(leftover, (0, 0))
    assert start_process(tmp_path, *flags).wait() == 0
    assert list(minari.list_local_datasets()) == ["ersac/riverswim/tau50-20k-v0"] and not leftover.exists()
    assert minari.load_dataset("ersac/riverswim/tau50-20k-v0").total_steps == 20_000


def test_interrupted_run_says_how_to_go_on(run, monkeypatch, tmp_path):
    flags = ("--env-id", "CartPole-v1", "--dataset-size", 50, "--retrain", *TINY)
    monkeypatch.setattr(torch.optim.Adam, "step", lambda *_: signal.raise_signal(signal.SIGINT))
    part = run("gen_expectile_data", *flags)
    monkeypatch.undo()
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    folder = Path("runs") / part.folders[0].name
    assert part.code == 130 and part.out.strip().splitlines()[-1].endswith(f"--resume {folder}")
    rest = run("gen_expectile_data", "--resume", folder)
    assert rest.code == 0 and (part.folders[0] / "result.json").exists()


# ----- bad input
BAD = [
    ("--expectile-tau 0", "expectile-tau"),
    ("--expectile-tau 1", "expectile-tau"),
    ("--expectile-tau nan", "expectile-tau"),
    ("--env-id Pendulum-v1", "Discrete"),
    ("--env-id LunarLanderContinuous-v3", "LunarLanderContinuous-v3"),
    ("--env-id NoSuchThing-v0", "NoSuchThing"),
    ("--env-id FrozenLake-v1", "vector"),
    ("--env-id Blackjack-v1", "vector"),
    ("--dataset-size 0", "dataset-size"),
    ("--dataset-size many", "dataset-size"),
    ("--seed -1", "seed"),
    ("--seed 4294967296", "seed"),
    ("--epsilon 1.5", "epsilon"),
    ("--epsilon nan", "epsilon"),
    ("--random-fraction -0.1", "random-fraction"),
    ("--estimator guess", "estimator"),
    ("--num-resamples 1", "num-resamples"),
    ("--start-steps 0", "start-steps"),
    ("--finish-steps 0", "finish-steps"),
    ("--floor inf", "floor"),
    ("--hidden-dim 0", "hidden-dim"),
    ("--policy-lr 0", "policy-lr"),
    ("--gamma 1", "gamma"),
    ("--reward-scale nan", "reward-scale"),
    ("--eval-episodes 0", "eval-episodes"),
    ("--checkpoint-interval 0", "checkpoint-interval"),
    ("--resume nowhere", "nowhere"),
    ("--no-such-flag 1", "no-such-flag"),
    ("--output-dir /proc/nowhere", "output-dir"),
    ("--retrain --policy-dir mine --estimator resample --env-id Taken-v0", "Taken"),
    ("--policy-dir /proc/nowhere --env-id Acrobot-v1", "policy-dir"),
    ("--hidden-dim 64", "another hidden_dim"),
]


@pytest.mark.parametrize("arguments, named", BAD)
def test_bad_input_ends_in_one_clear_line(run, tmp_path, arguments, named):
    done = run("gen_expectile_data", *arguments.split())
    assert done.code in (1, 2) and named in done.err and "Traceback" not in done.err
    if done.code == 1:
        assert len(done.err.strip().splitlines()) == 1 and done.err.strip().endswith(".")
    assert list(tmp_path.glob("**/*.json")) == [] and list(tmp_path.glob("**/*.hdf5")) == []


def test_minari_folder_that_cannot_be_written(run, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("/proc/nowhere", str(tmp_path / "file")):
        monkeypatch.setenv("MINARI_DATASETS_PATH", place)
        done = run("gen_expectile_data", "--env-id", "RiverSwim", "--dataset-size", 10)
        assert done.code == 1 and place in done.err and len(done.err.strip().splitlines()) == 1


class Nothing(gym.Env):
    """A vector environment whose state no one knows how to restore."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), float(action), False, False, {}


def test_resample_needs_a_state_that_can_be_restored(run, monkeypatch):
    monkeypatch.setitem(
        gym.registry, "Nothing-v0", gym.envs.registration.EnvSpec("Nothing-v0", "test_gen:Nothing", max_episode_steps=9)
    )
    done = run("gen_expectile_data", "--env-id", "Nothing-v0", "--estimator", "resample")
    assert done.code == 1 and "cannot be restored" in done.err and len(done.err.strip().splitlines()) == 1
    assert (
        run("gen_expectile_data", "--env-id", "Nothing-v0", "--policy-dir", "mine", "--dataset-size", 5, *TINY).code
        == 0
    )


def test_damaged_policy_and_foreign_checkpoint(run, tmp_path):
    folder = tmp_path / "mine/cartpole-start"
    folder.mkdir(parents=True)
    (folder / "policy.pt").write_bytes(b"not a policy")
    done = run("gen_expectile_data", "--env-id", "CartPole-v1", "--policy-dir", "mine")
    assert done.code == 1 and "damaged" in done.err and len(done.err.strip().splitlines()) == 1
    torch.save({"script": "ersac_tabular.py"}, folder / "checkpoint.pt")
    done = run("gen_expectile_data", "--resume", folder)
    assert done.code == 1 and "not written by" in done.err


def test_wandb_offline(run, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    done = run("gen_expectile_data", "--env-id", "CartPole-v1", "--dataset-size", 10, "--retrain", "--track", *TINY)
    assert done.code == 0, done.err
    assert len(list(tmp_path.glob(f"wandb/offline-run-*{done.folders[0].name}"))) == 1


def test_help_reads_as_documentation():
    out = subprocess.run([sys.executable, "gen_expectile_data.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    flat = " ".join(out.stdout.replace("│", " ").split())
    assert out.returncode == 0 and "--estimator {action-noise,resample}" in flat and "seeks risk" in flat
    assert "(default: 100000)" in flat and "(default: 0.5)" in flat


# ----- the claims
@pytest.mark.parametrize("name, floor", [("cartpole", 475), ("lunarlander", 220)])
def test_committed_policies_are_above_their_floor(name, floor):
    for level in ("start", "tau10", "tau50", "tau90"):
        policy = torch.load(ROOT / f"docs/policies/{name}-{level}/policy.pt", weights_only=True)
        assert policy["greedy_return"] >= floor and policy["args"]["seed"] == 1
        assert (ROOT / f"docs/policies/{name}-{level}/metrics.csv").exists()


@pytest.mark.slow
@pytest.mark.parametrize("env_id, floor", [("CartPole-v1", 475), ("LunarLander-v3", 220)])
def test_committed_policies_on_fresh_episodes(env_id, floor):
    env = behaviour_env(env_id)
    for level in ("tau10", "tau50", "tau90"):
        path = ROOT / f"docs/policies/{env_id.split('-')[0].lower()}-{level}/policy.pt"
        actor = network(env.observation_space.shape[0], int(env.action_space.n), 128, 0.01)
        actor.load_state_dict(torch.load(path, weights_only=True)["actor"])
        assert gen.episode_returns(env, actor, 100, 12345).mean() >= floor, level


@pytest.mark.slow
@pytest.mark.parametrize("env_id, seconds", [("CartPole-v1", 120), ("LunarLander-v3", 360)])
def test_training_is_fast_and_gives_the_committed_policy(run, env_id, seconds):
    started = time.time()
    done = run("gen_expectile_data", "--env-id", env_id, "--retrain", "--dataset-size", 1000)
    assert done.code == 0 and time.time() - started < seconds
    name = f"{env_id.split('-')[0].lower()}-tau50"
    ours, committed = (
        torch.load(p / name / "policy.pt", weights_only=True) for p in (done.folders[0], ROOT / "docs/policies")
    )
    assert ours["greedy_return"] >= committed["greedy_return"] - 40


@pytest.mark.slow
def test_collection_of_100k_takes_less_than_a_minute(run):
    done = run("gen_expectile_data", "--env-id", "LunarLander-v3")
    result = json.loads((done.folders[0] / "result.json").read_text())
    assert result["datasets"][0]["dataset_id"] == "ersac/lunarlander/tau50-100k-v0"
    assert result["datasets"][0]["seconds"] < 60


@pytest.mark.slow
def test_both_estimators_make_cartpole_cautious(run, tmp_path):
    """Risk aversion shows as a more upright pole, whichever estimator finds it."""
    angle = {}
    for estimator in ("action-noise", "resample"):
        for tau in (0.5, 0.9):
            flags = (
                "--env-id",
                "CartPole-v1",
                "--expectile-tau",
                tau,
                "--dataset-size",
                20_000,
                "--estimator",
                estimator,
            )
            done = run("gen_expectile_data", *flags, "--policy-dir", estimator, "--overwrite", "--exp-name", f"{tau}")
            assert done.code == 0, done.err
            obs = np.concatenate([episode[0] for episode in arrays(f"ersac/cartpole/tau{int(100 * tau)}-20k-v0")])
            angle[estimator, tau] = np.abs(obs[:, 2]).mean()
    for estimator in ("action-noise", "resample"):
        assert angle[estimator, 0.9] < angle[estimator, 0.5], angle
