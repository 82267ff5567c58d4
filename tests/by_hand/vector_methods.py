"""Adapters of fixtures/credit.json for the methods beyond the presets; see vector_adapters."""

import math

import torch

from cothink import counterfactual, losses, offpolicy
from cothink.batch import pad
from cothink.types import Sample


def off(units, kind, advantages=None, **options):
    """Loss, gradient per token and metrics of units = lists of turns (rollout, old, new), summed over tokens."""
    made = []
    for k, turns in enumerate(units):
        parts = [[0.0], [0.0], [0.0]]
        index, adv = [-1], [0.0]
        for j, turn in enumerate(turns):
            for column, values in zip(parts, turn):
                column += values
            index += [j] * len(turn[0])
            adv += [1.0 if advantages is None else advantages[k]] * len(turn[0])
        row = Sample("p", "r", f"u{k}", (0,) * len(adv), tuple(index), tuple(parts[1]), tuple(adv),
                     rollout=tuple(parts[0]))  # fmt: skip
        made.append((row, parts[2]))
    samples = [s for s, _ in made]
    batch = pad(samples, [[float(t >= 0) for t in s.turns] for s in samples], dtype=torch.float64)
    width = batch.ids.shape[1]
    new = torch.tensor([n + [0.0] * (width - len(n)) for _, n in made], dtype=torch.float64, requires_grad=True)
    loss, metrics = losses.policy(new, batch, offpolicy=kind, **options)
    loss.backward()
    grads = [new.grad[k][batch.turns[k] >= 0].tolist() for k in range(len(units))]
    return loss.item(), grads, metrics


def rollout_correction(i, p):
    """At new = old with A = 1 every token's gradient is minus its factor; the geometric mean is only a warning."""
    low, high = p["band"]
    units = [[(r, t, t)] for r, t in zip(i["logp_rollout"], i["logp_train"])]

    def factors(kind, **bounds):
        return [[-g for g in row] for row in off(units, kind, **bounds)[1]]

    logs = [[t - r for t, r in zip(*pair)] for pair in zip(i["logp_train"], i["logp_rollout"])]
    return {
        "token_ratio": factors("decoupled"),
        "token_truncated": factors("tis_token", rho_max=p["cap"]),
        "token_masked": factors("mis_token", rho_min=low, rho_max=high),
        "sequence_ratio": [row[0] for row in factors("tis_turn", rho_max=1e9)],
        "sequence_truncated": [row[0] for row in factors("tis_turn", rho_max=p["cap"])],
        "sequence_geo": [math.exp(sum(row) / len(row)) for row in logs],
        "mismatch_k3": [losses._k3(-torch.tensor(row, dtype=torch.float64)).mean().item() for row in logs],
    }


def ess(i, p):
    w, n = i["weights"], len(i["weights"])
    fraction = offpolicy.ess_fraction(sum(w) / n, sum(x * x for x in w) / n)
    return {"ess": fraction * n, "fraction": fraction, "chi_square": sum(x * x for x in w) / n - 1,
            "lr_scale": math.sqrt(fraction)}  # fmt: skip


def turn_mask(i, p):
    units = [[(b, b, n)] for b, n in zip(i["logp_behaviour"], i["logp_new"])]
    grads = off(units, "opsm_turn", i["advantages"], drift_max=p["delta"], clip="none")[1]
    drift = [sum(b) / len(b) - sum(n) / len(n) for b, n in zip(i["logp_behaviour"], i["logp_new"])]
    return {"drift": drift, "keep": [any(g) for g in grads]}


def decoupled(i, p):
    behaviour, prox, new = ([i[f"logp_{k}"]] for k in ("behaviour", "prox", "new"))
    options = {"clip": "ppo", "low": p["eps_low"], "high": p["eps_high"], "dual_clip": None}
    return {
        "behaviour_weight": -off([[(behaviour, prox, prox)]], "decoupled")[0],
        "ratio": -off([[(prox, prox, new)]], "decoupled", clip="none")[0],
        "loss": off([[(behaviour, prox, new)]], "decoupled", [i["advantage"]], **options)[0],
        "coupled_loss": off([[(behaviour, behaviour, new)]], "decoupled", [i["advantage"]], **options)[0],
    }


def solo_event(i, p):
    groups = {g: [s for s, h in zip(i["solo"], i["groups"]) if h == g] for g in i["groups"]}
    baseline = [sum(groups[g]) / len(groups[g]) for g in i["groups"]]
    bonus = [counterfactual.guide_bonus(r, b, p["bonus"]) for r, b in zip(i["joint"], baseline)]
    guides = [r + p["lam"] * b for r, b in zip(i["joint"], bonus)]
    return {"solo_baseline": baseline, "guide_rewards": guides, "solver_rewards": i["joint"]}


def vine(i, p):
    values = [sum(c) / len(c) for c in i["continuations"]]
    steps = zip(i["step_rewards"], values, [*values[1:], 0.0], strict=True)
    found = [counterfactual.step_advantage(*step, p["gamma"]) for step in steps]
    return {"values": values, "advantages": found, "total": sum(found)}


def causal(i, p):
    gains, means = counterfactual.influence(i["logp_next_full"], i["logp_next_masked"], i["groups"])
    return {"contributions": gains, "influence": means}


METHODS = {
    "causal_influence": causal,
    "counterfactual_event_reward": solo_event,
    "mc_value_advantage": vine,
    "decoupled_objective": decoupled,
    "effective_sample_size": ess,
    "off_policy_turn_mask": turn_mask,
    "rollout_correction": rollout_correction,
}
