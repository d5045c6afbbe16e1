"""Faults that tests/test_epinet.py must notice, see tests/test_mutants.py: (what to replace, by what, in words)."""

FAULTS = [
    (
        "worst_case(target, s_next, log_pi.exp(), z)",
        "worst_case(critic, s_next, log_pi.exp(), z)",
        "the target comes from the critic itself, not from the target critic",
    ),
    (
        "robust_target(r, ended, log_pi.exp()",
        "robust_target(r, 0 * ended, log_pi.exp()",
        "terminations are ignored",
    ),
    (
        "(next_obs - obs_mean) / obs_std",
        "next_obs",
        "next observations are not normalised",
    ),
    (
        "a, y, c[index], args.noise_scale)",
        "a, y, c[: len(index)], args.noise_scale)",
        "closed form: the directions of the first transitions in place of the minibatch's",
    ),
    (
        "y + args.noise_scale * (z @ c[index].T)",
        "y + 0 * (z @ c[index].T)",
        "sampled form: the noise is left out",
    ),
    (
        "self.mean(psi), self.stochastic(psi.detach())",
        "self.mean(psi), self.stochastic(psi)",
        "the stochastic head moves the features",
    ),
    (
        "(args.lambda_sigma, (critic.learnable,))",
        "(args.lambda_mu, (critic.learnable,))",
        "--lambda-sigma is ignored",
    ),
    (
        "        with torch.no_grad():\n            q_star = worst_case(critic, s, pi, z)  # [B, A]\n",
        "",
        "the actor's worst case is the target's, of the next states and from before the critic's step",
    ),
    (
        "pi_loss = actor_loss(pi, log_pi, q_star, alpha).mean()",
        "pi_loss = -actor_loss(pi, log_pi, q_star, alpha).mean()",
        "the actor climbs the wrong way",
    ),
    (
        "(h - args.target_entropy * math.log(A))",
        "(args.target_entropy * math.log(A) - h)",
        "the entropy coefficient moves the wrong way",
    ),
    (
        "list(target.parameters()), list(critic.parameters()), args.polyak)",
        "list(target.parameters()), list(critic.parameters()), 1 - args.polyak)",
        "the target critic follows at 1 - polyak",
    ),
    (
        "math.sqrt(chi2.ppf(args.upsilon, A)) if star",
        "math.sqrt(chi2.ppf(args.upsilon, args.index_dim)) if star",
        "the radius counts the indices, not the actions",
    ),
    (
        '"charts/q_minus_return": (q_data - followed)[known].mean()',
        '"charts/q_minus_return": (q_data - followed.nan_to_num()).mean()',
        "q_minus_return takes an unknown return for 0",
    ),
    (
        "args.eval_episodes, 10**6 * (args.seed + 1) + 10**5,",
        "args.eval_episodes, 10**6 * (args.seed + 1),",
        "the final episodes are not fresh",
    ),
]
