"""Faults in gen_expectile_data.py that its tests must notice."""

FAULTS = [
    ("actor_loss = -torch.min(", "actor_loss = torch.min(", "the actor climbs down"),
    ("actor_loss - entropy_coef * policy_entropy", "actor_loss + entropy_coef * policy_entropy", "entropy is punished"),
    ("*actor.parameters(), *critic.parameters()], lr", "*actor.parameters()], lr", "the critic never learns"),
    ("optimizer, tau, not tau or", "optimizer, tau and 0.5, not tau or", "tau does not reach the training"),
    ("np.where(values < e, tau, 1 - tau)).sum", "np.where(values < e, 1 - tau, tau)).sum", "expectiles upside down"),
    (
        "np.minimum(np.roll(rho, -1, 0), 1)",
        "np.minimum(rho, 1)",
        "traces cut by this step's weight, not the next one's",
    ),
    ("+ args.gamma * ~terminated * values", "+ args.gamma * values", "values beyond a termination"),
    ('"truncated"], 0.97 * args.gamma', '"truncated"], 0.97', "traces without discount"),
    (
        "generator=generator) < epsilon, random, chosen)",
        "generator=generator) < 0.1, random, chosen)",
        "--epsilon ignored",
    ),
    ("zip(sims, executed.tolist())", "zip(sims, chosen.tolist())", "the chosen action is executed, not the noisy one"),
    ("(torch.randint(2**31, (1,), generator=generator).item(), ())", "(args.seed, ())", "all simulators on one seed"),
    ("not tau or i >= 8, generator", "True, generator", "a tau trains its actor before its critic is ready"),
    ("lr * (1 - i % per_round / per_round)", "lr * (1 - i / per_round)", "the step size falls below 0 in later rounds"),
    ("[args.seed, 4, i]).mean()", "[args.seed, 1]).mean()", "policies measured on other episodes"),
    (
        '"ref_max_score": policies[0.5]',
        '"ref_max_score": policies[jobs[0][0]]',
        "the reference is not the neutral policy",
    ),
    ("rng.random() >= epsilon:", "rng.random() >= 0.0:", "data without random actions"),
    ("pi.argmax() if greedy else", "pi.argmax() if True else", "data of the greedy policy"),
    (
        "zip((actor, critic, optimizer), current",
        "zip((actor, critic), current",
        "Adam's moments are lost in a resumed run",
    ),
]
