"""Faults that tests/test_gen.py must notice, see tests/test_mutants.py: (what to replace, by what, in words)."""

FAULTS = [
    (
        "actor_loss = -torch.min(",
        "actor_loss = torch.min(",
        "the actor climbs down",
    ),
    (
        "actor_loss - entropy_coef * policy_entropy",
        "actor_loss + entropy_coef * policy_entropy",
        "entropy is punished",
    ),
    (
        "[*actor.parameters(), *critic.parameters()], lr",
        "[*actor.parameters()], lr",
        "the critic never learns",
    ),
    (
        "scored = chosen if outcomes else executed",
        "scored = chosen",
        "action-noise: the critic gives its value to the chosen action, not to the executed one",
    ),
    (
        "weight = np.where(values < e, tau, 1 - tau)",
        "weight = np.where(values < e, 1 - tau, tau)",
        "expectiles upside down",
    ),
    (
        "np.minimum(np.roll(rho, -1, 0), 1)",
        "np.minimum(rho, 1)",
        "traces are cut by this step's weight, not by the next one's",
    ),
    (
        "np.where(terminated, 0.0, args.gamma * v_next)",
        "args.gamma * v_next",
        "values beyond a termination",
    ),
    (
        "    decay = 0.97 * args.gamma\n",
        "    decay = 0.97\n",
        "traces without discount",
    ),
    (
        "executed = torch.where(noisy, random, chosen)",
        "executed = chosen",
        "the training executes no random actions",
    ),
    (
        "if t == 0 or seed != roll",
        "if t == 0 and seed != roll",
        "resampled outcomes on the ground of another episode",
    ),
    (
        "train_actor = tau is None or i >= 8",
        "train_actor = True",
        "a tau trains its actor before its critic is ready",
    ),
    (
        "lr * (1 - i / rollouts)",
        "lr * (1 - (i + 1) / rollouts)",
        "the last rollout teaches nothing",
    ),
    (
        'critic.load_state_dict(policies[None]["critic"])',
        "pass",
        "a tau's critic does not begin where the neutral start ended",
    ),
    (
        'optimizer.load_state_dict(current["optimizer"])',
        "pass",
        "Adam's moments are lost in a resumed run",
    ),
    (
        "[args.seed, 4, rollouts - 1])",
        "[args.seed, 1])",
        "policies are measured on the random policy's episodes",
    ),
    (
        'ref_max_score=policies[0.5]["greedy_return"]',
        'ref_max_score=policy["greedy_return"]',
        "the reference is not the neutral policy",
    ),
    (
        "actor is not None and rng.random() >= epsilon:",
        "actor is not None:",
        "data without random actions",
    ),
    (
        "limit=size - total))",
        "limit=size))",
        "more transitions than --dataset-size",
    ),
    (
        "collect_episodes(env, actor, args.epsilon, early, args.dataset_seed)",
        "collect_episodes(env, actor, args.epsilon, early, args.seed)",
        "the early policy's episodes do not follow --dataset-seed",
    ),
    (
        'os.path.join(policy_dirs[0], "early", names[0.5], "policy.pt")',
        'os.path.join(policy_dirs[0], names[0.5], "policy.pt")',
        "the early policy is the neutral one",
    ),
]
