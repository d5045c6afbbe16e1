"""Faults of ersac_ensemble.py: what to replace, by what, and the fault in words. See tests/test_mutants.py."""

FAULTS = [
    (
        "follow, returns = 0.0 if episode.terminations[-1] else math.nan, []",
        "follow, returns = 0.0, []",
        "returns of truncated episodes count as known",
    ),
    ("    if args.normalize_obs:", "    if True:", "--no-normalize-obs has no effect"),
    (
        "(next_obs - obs_mean) / obs_std  # [|D|, obs_dim]",
        "next_obs  # [|D|, obs_dim]",
        "next observations are not normalised",
    ),
    ("if args.return_scale else 1.0", "if args.return_scale else 10.0 / rms", "--return-scale None has no effect"),
    ("upsilon=args.upsilon)", "upsilon=0.9)", "--upsilon has no effect"),
    ('"ellipsoid": ellipsoid}', '"ellipsoid": worst_case_hull}', "hull in place of ellipsoid"),
    (
        "if args.prior_scale > 0 else network(obs)",
        "if args.prior_scale > 0 and network is critic else network(obs)",
        "a prior in the critics and not in their targets",
    ),
    (
        "worst_case(q_values(target, s_next), log_pi.exp())",
        "worst_case(q_values(critic, s_next), log_pi.exp())",
        "online critics in the target",
    ),
    (
        "worst_case(q_values(target, s_next), log_pi.exp())",
        "worst_case(q_values(target, s_next), torch.full_like(log_pi, 1 / A))",
        "worst case of the uniform policy",
    ),
    ("robust_target(r, ended,", "robust_target(r, 0 * ended,", "terminations ignored"),
    ("losses * weights[:, index]", "losses * weights[:, : len(index)]", "bootstrap weights of the first transitions"),
    (
        "            q = q_values(critic, s)  # [N, B, A]\n            q_star",
        "            q = q.detach()  # [N, B, A]\n            q_star",
        "the actor's worst case from before the critics' step",
    ),
    (
        "pi_loss = actor_loss(pi, log_pi, q_star, alpha).mean()",
        "pi_loss = -actor_loss(pi, log_pi, q_star, alpha).mean()",
        "the actor climbs the wrong way",
    ),
    (
        "list(critic.parameters()), args.polyak)",
        "list(critic.parameters()), 1 - args.polyak)",
        "targets follow at the wrong rate",
    ),
]
