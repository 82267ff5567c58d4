"""How the library computes each formula of fixtures/credit.json: formula key -> f(inputs, parameters)."""

import math

import pytest
import torch

from cothink import credit, estimators, losses, stats, watch
from cothink.batch import pad, weights_for
from cothink.rewards import length
from cothink.types import FINISHED, Completion, Episode, Finish, Sample, Score, ScoredTurn, Task, Turn


def turn(name, parents=(), role="r", tokens=1, text="x"):
    ids = tuple(range(tokens))
    return Turn(name, tuple(parents), role, "p", Completion(text, (9,), ids, (0.0,) * tokens), text)


def rows(rewards, groups, lengths=None):
    lengths = lengths or [1] * len(rewards)
    return [
        ScoredTurn(g, f"e{i}", "r", "p", 0, float(v), n) for i, (v, g, n) in enumerate(zip(rewards, groups, lengths))
    ]


def nest(values, shape):
    """Flat values in the nesting of `shape` (lists of lists of anything)."""
    line = iter(values)

    def build(part):
        return [build(p) for p in part] if isinstance(part, list) else next(line)

    return build(shape)


def flat(values):
    return [x for v in values for x in flat(v)] if isinstance(values, list) else [values]


def sample(turns, unit):
    """A float64 row of turns {old, new, advantages}: one prompt token, one context token between turns."""
    ids, index, old, new, adv = [0], [-1], [0.0], [0.0], [0.0]
    for j, t in enumerate(turns):
        if j:
            ids, index, old, new, adv = [*ids, 0], [*index, -1], [*old, 0.0], [*new, 0.0], [*adv, 0.0]
        ids += [1] * len(t["new_logp"])
        index += [j] * len(t["new_logp"])
        old, new, adv = old + t["old_logp"], new + t["new_logp"], adv + t["advantages"]
    return Sample("p", "r", unit, tuple(ids), tuple(index), tuple(old), tuple(adv)), new


def loss_of(units, mode="token_mean", ref=None, **options):
    """Loss, gradient per trained token and metrics of units = lists of turns {old_logp, new_logp, advantages}."""
    made = [sample(turns, f"u{i}") for i, turns in enumerate(units)]
    samples = [s for s, _ in made]
    batch = pad(samples, weights_for(samples, mode, turns_ref=1), dtype=torch.float64)
    width = batch.ids.shape[1]
    new = torch.tensor([n + [0.0] * (width - len(n)) for _, n in made], dtype=torch.float64, requires_grad=True)
    if ref is not None:
        batch.ref_logprobs = torch.zeros_like(new).masked_scatter(batch.turns >= 0, torch.tensor(ref).double())
    loss, metrics = losses.policy(new, batch, **options)
    loss.backward()
    means = {k: v / n for k, (v, n) in metrics.items() if n}
    return loss.item(), new.grad[batch.turns >= 0].tolist(), means


def token(old, new, advantage):
    return {"old_logp": [old], "new_logp": [new], "advantages": [advantage]}


def each(entries, **options):
    """Losses and gradients of one-token units, one call each."""
    out = [loss_of([[token(*e)]], log_ratio_max=None, **options)[:2] for e in entries]
    return {"losses": [loss for loss, _ in out], "grad_logp": [grad[0] for _, grad in out]}


def scoped(i, p):
    scope = {("task",): "task", ("task", "role"): "role", ("task", "role", "turn"): "role_turn"}[tuple(p["scope"])]
    turns = [ScoredTurn(s["task"], s["episode"], s["role"], "p", s["turn"], s["reward"], 1) for s in i["scored"]]
    options = {"scope": scope, "weighting": p["weighting"]}
    if p["std"] != "none":
        assert p["baseline"] == "mean"
        return estimators.grpo(turns, **options, std=p["std"], eps=p["eps"], min_members_for_std=2)
    if p["baseline"] == "mean":
        return estimators.dr_grpo(turns, **options)
    return estimators.rloo(turns, **options, leave_out=p["baseline"].split("_")[1])


def whitened(i, p):
    """Rewards lie on each turn's last token only, which is what a turn's return is."""
    parts = [t for s in i["samples"] for t in s]
    assert all(not any(t[:-1]) for t in parts)
    turns = [ScoredTurn("t", f"e{k}", "r", "p", k, t[-1], len(t)) for k, t in enumerate(parts)]
    out = estimators.rfpp(turns, gamma_token=p["gamma"], whiten_scope="batch", eps=p["var_eps"])
    plain = [[t[-1] * p["gamma"] ** k for k in reversed(range(len(t)))] for t in parts]
    return {"returns": nest(flat(plain), i["samples"]), "advantages": nest(flat(out), i["samples"])}


def centred_whitened(i, p):
    turns = rows(i["rewards"], i["groups"], i["lengths"])
    return {
        "centred": estimators.dr_grpo(turns),
        "advantages": estimators.rfpp_baseline(turns, whiten_scope="batch", eps=p["var_eps"]),
    }


def opo(i, p):
    out = estimators.opo(rows(i["rewards"], i["groups"], i["lengths"]))
    return {"advantages": out, "baselines": [r - a for r, a in zip(i["rewards"], out)]}


def rae(i, p):
    assert p["order"] == "before_update"
    state = {}
    turns = [ScoredTurn("t", f"e{k}", key, "p", 0, r, 1) for k, (key, r) in enumerate(zip(i["keys"], i["rewards"]))]
    out = estimators.rae(turns, state, alpha=p["alpha"], initial=p["initial"])
    return {"advantages": out, "baselines_used": [r - a for r, a in zip(i["rewards"], out)], "final_baselines": state}


def gdpo(i, p):
    names = list(i["rewards"])
    count = len(i["rewards"][names[0]])
    parts = [{n: i["rewards"][n][k] for n in names} for k in range(count)]
    turns = [ScoredTurn("t", f"e{k}", "r", "p", 0, sum(c.values()), 1, components=c) for k, c in enumerate(parts)]
    return {
        "decoupled": estimators.gdpo(turns, weights=p["weights"], eps=p["eps"]),
        "summed_then_normalised": estimators.grpo(turns, eps=p["eps"]),
    }


def two_level(i, p):
    triples = enumerate(zip(i["rewards"], i["tasks"], i["trees"]))
    turns = [ScoredTurn(t, f"e{k}", "r", "p", 0, r, 1, prefix=str(tree)) for k, (r, t, tree) in triples]
    inter = estimators.grpo(turns, scope="task", eps=p["eps"])
    intra = estimators.grpo(turns, scope="prefix", eps=p["eps"], min_members_for_std=2)
    return {"inter": inter, "intra": intra, "advantages": [a + b for a, b in zip(inter, intra)]}


def anchors(i, p):
    def turns(key):
        return [ScoredTurn("t", s["episode"], "r", "p", 0, s[key], 1, anchor=s["anchor"]) for s in i["scored"]]

    episode = estimators.dr_grpo(turns("episode_reward"), weighting="episode")
    step = estimators.dr_grpo(turns("step_return"), scope="anchor")
    mixed = [a + p["omega"] * b for a, b in zip(episode, step)]
    return {"episode_part": episode, "step_part": step, "advantages": mixed}


def marshal(i, p):
    chains = {f"e{e}": chain(rewards) for e, rewards in enumerate(i["turn_rewards"])}
    values = [list(credit.returns(*c, p["gamma"]).values()) for c in chains.values()]
    turns = [ScoredTurn("t", e, "r", "p", k, v, 1) for e, vs in zip(chains, values) for k, v in enumerate(vs)]
    mean = sum(flat(values)) / len(flat(values))
    return {"returns": values, "mean": mean, "advantages": nest(estimators.dr_grpo(turns), i["turn_rewards"])}


def chain(rewards):
    turns = [turn(str(k), [str(k - 1)] if k else []) for k in range(len(rewards))]
    return turns, {str(k): r for k, r in enumerate(rewards)}


def tree_of(leaves, roles):
    """Turns and leaf rewards of a nested list, ids are index paths."""
    turns, own = [], {}

    def grow(part, path, depth):
        for k, child in enumerate(part):
            name = f"{path}{k}"
            turns.append(turn(name, [path] if path else [], roles[depth]))
            if isinstance(child, list):
                grow(child, name, depth + 1)
            else:
                own[name] = child

    grow(leaves, "", 0)
    return turns, own


def by_depth(values, depth, shape):
    picked = [v for k, v in values.items() if len(k) == depth]
    return nest(picked, [[0] * len(x) for x in shape] if depth == 2 else shape if depth == 3 else [0] * len(shape))


def prefix_tree(i, p):
    turns, own = tree_of(i["tree"], "abc")
    values = credit.returns(turns, own, pooling=p["pooling"])
    places = [ScoredTurn("t", "e", t.role, "p", 0, values[t.id], 1, prefix=f"{t.parents}>{t.role}") for t in turns]
    advantages = dict(zip(values, estimators.rloo(places, scope="prefix")))
    names = {"first": 1, "second": 2}
    out = {f"{n}_values": by_depth(values, d, i["tree"]) for n, d in names.items()}
    out |= {f"{n}_advantages": by_depth(advantages, d, i["tree"]) for n, d in names.items()}
    return out | {"leaf_advantages": by_depth(advantages, 3, i["tree"])}


def siblings(i, p):
    values = [sum(c["leaf_rewards"]) / len(c["leaf_rewards"]) for c in i["children"]]
    scores = [c["critic"] for c in i["children"] if "critic" in c] or None
    return {"values": values, "advantages": credit.sibling_advantages(values, scores, p["alpha"])}


def tree_labels(i, p):
    roles = ("generator", "verifier", "refiner")
    turns, own = tree_of(i["leaves"], roles)
    values = credit.returns(turns, own)
    good = credit.labels(values, p["theta"])
    pairs = credit.sibling_pairs(turns, good)
    names = {r: d for d, r in enumerate(roles, 1)}
    out = {f"{r}_values": by_depth(values, d, i["leaves"]) for r, d in names.items() if d < 3}
    out |= {f"{r}_labels": by_depth(good, d, i["leaves"]) for r, d in names.items()}
    return out | {"pairs": {r: sum(len(chosen) == d for chosen, _ in pairs) for r, d in names.items()}}


def episode(k, task, reward=None, finished=True, text="x"):
    rewards = () if reward is None else (Score("0", "answer", reward),)
    return Episode(
        f"e{k}", Task(task, "q", "a"), (turn("0", text=text),), Finish(FINISHED if finished else "x", ""), rewards
    )


def unfinished(i, p):
    episodes = [episode(k, *e) for k, e in enumerate(zip(i["groups"], i["rewards"], i["finished"]))]
    settled = credit.settle_unfinished(episodes, p["mode"], mask_cap=p["mask_cap"])
    turns = credit.scored(settled.episodes)
    advantages = dict(zip([t.episode for t in turns], estimators.rloo(turns)))
    values = {t.episode: t.value for t in turns}
    return {
        "rewards_used": [values.get(e.id, 0.0) for e in episodes],
        "loss_weights": [float(e.id in values) for e in episodes],
        "advantages": [advantages.get(e.id, 0.0) for e in episodes],
    }


def aggregation(i, p):
    weights = losses.aggregation_weights(
        i["turn_lengths"], p["mode"], length_ref=p.get("length_ref"), turns_ref=p.get("turns_ref")
    )
    spent = [[w * sum(t) for w, t in zip(ws, ts)] for ws, ts in zip(weights, i["token_losses"])]
    turns = [[w * n for w, n in zip(ws, ns)] for ws, ns in zip(weights, i["turn_lengths"])]
    return {"loss": sum(flat(spent)), "token_weights": weights, "turn_weights": turns}


def ratios(i, p):
    """A = -1 and no clip: the loss is the ratio. The products are only a warning in the vectors."""

    def one(turns, kind):
        units = [[{"old_logp": [0.0] * len(t), "new_logp": t, "advantages": [-1.0] * len(t)} for t in turns]]
        return loss_of(units, "const_turn", ratio=kind, clip="none", log_ratio_max=None)[0]

    d = i["dlogp"]
    return {
        "token": [[one([[x]], "token") for x in t] for t in d],
        "turn_arith": [one([t], "turn_arith") for t in d],
        "turn_geo": [one([t], "turn_geo") for t in d],
        "episode_geo": one(d, "episode_geo") / len(d),
        "turn_product": [math.prod(map(math.exp, t)) for t in d],
        "episode_product": math.prod(map(math.exp, flat(d))),
    }


def kl(i, p):
    def run(kind):
        out = [
            loss_of([[token(x - math.log(r), x, 0.0)]], ref=[y], kl=kind, kl_beta=1.0)
            for x, y, r in zip(i["logp"], i["logp_ref"], i["ratios"])
        ]
        return [o[0] for o in out], [o[1][0] for o in out], [o[2]["kl_ref_k1"] for o in out]

    (k2, g2, k1), (k3, g3, _), (straight, gs, _) = run("k2"), run("k3"), run("k3_st")
    assert straight == pytest.approx(k3) and gs == pytest.approx(g2)
    return {"k1": k1, "k2": k2, "k3": k3, "k3_importance_weighted": run("k3_iw")[0],
            "grad_k1": [1.0] * len(k1), "grad_k2": g2, "grad_k3": g3}  # fmt: skip


def turn_loss(i, p):
    options = {"ratio": p["ratio"], "clip": "ppo", "low": p["eps_low"], "high": p["eps_high"]}
    loss, _, means = loss_of(
        [r["turns"] for r in i["rows"]],
        p["aggregation"],
        **options,
        dual_clip=p["dual_clip"],
        log_ratio_max=p["log_ratio_max"],
    )
    return {"loss": loss, "clip_fraction": means["clip_fraction"], "dual_clip_fraction": means["dual_clip_fraction"]}


def clipped(i, p):
    entries = [(0.0, math.log(r), a) for r, a in zip(i["ratios"], i["advantages"])]
    return each(entries, clip="ppo", low=p["eps_low"], high=p["eps_high"], dual_clip=p["dual_clip"])


def cispo(i, p):
    entries = [(x - math.log(r), x, a) for r, a, x in zip(i["ratios"], i["advantages"], i["logp"])]
    return each(entries, clip="cispo", low=p["low"], high=p["high"])


def sapo(i, p):
    assert (p["tau_pos"], p["tau_neg"]) == losses.SAPO_TAU
    return each([(0.0, math.log(r), a) for r, a in zip(i["ratios"], i["advantages"])], clip="sapo")


def gspo(i, p):
    n = len(i["dlogp"])
    part = {"old_logp": [0.0] * n, "new_logp": i["dlogp"], "advantages": [i["advantage"]] * n}
    bounds = {"low": p["eps_low"], "high": p["eps_high"]}
    loss, grad, means = loss_of([[part]], "turn_mean", ratio="turn_geo", clip="gspo", **bounds)
    return {"loss": loss, "grad_logp": grad, "ratio": means["ratio_max"]}


def accuracy(i, p):
    groups = {k: v["accuracy"] for k, v in i["groups"].items()}
    spread = {k: v["shaped"] for k, v in i["groups"].items()}
    kept = credit.accuracy_filter(groups, p["low"], p["high"])
    return {"kept": kept, "kept_by_shaped_std": credit.spread_filter(spread, top_p=1.0)}


def spread(i, p):
    groups = {k: [s, -s] for k, s in enumerate(i["group_std"])}
    kept = credit.spread_filter(groups, p["top_p"])
    total = sum(i["group_std"])
    return {"kept": kept, "kept_share": sum(i["group_std"][k] for k in kept) / total if total else 0.0}


def void(i, p):
    episodes = [
        Episode(f"e{e}", Task("t", "q", "a"),
                tuple(turn(str(k), text="x" if kind in p["valid_kinds"] else " \n") for k, kind in enumerate(kinds)),
                Finish(FINISHED, ""))
        for e, kinds in enumerate(i["episodes"])
    ]  # fmt: skip
    kept = credit.drop_void(episodes)
    return {"kept": [e in kept for e in episodes]}


def drawdown(i, p):
    alarm = watch.drawdown(i["series"], **p)
    return {"smoothed": watch.smooth(i["series"], p["rate"]), "drawdown": alarm.values,
            "warn_index": alarm.warn, "stop_index": alarm.stop}  # fmt: skip


def norms(i, p):
    alarm = watch.gradient_norms(i["series"], **p)
    return {"ratios": alarm.values, "warn_index": alarm.warn, "stop_index": alarm.stop}


def entropy(i, p):
    nats = watch.categorical_entropy(i["probabilities"])
    return {"nats": nats, "normalised": nats / math.log(len(i["probabilities"]))}


def covariance(i, p):
    found = watch.entropy_covariance(i["logp"], i["advantages"])
    top = sorted(range(len(found)), key=lambda k: -found[k])[: max(1, int(p["fraction"] * len(found)))]
    return {"covariance": found, "mean": sum(found) / len(found), "top_tokens": sorted(top)}


def steps(i, p):
    out = losses.optimiser_steps(**i)
    return {"rows_per_rank": out.rows, "mini_batch_rows_per_rank": out.minibatch_rows,
            "steps": out.steps, "loss_scale": out.loss_scale}  # fmt: skip


def overlong(tokens, **parameters):
    spoken = Turn("0", (), "r", "p", Completion("", output_ids=(0,) * tokens), "")
    return length.overlong(
        Task("t", "", ""), spoken, Episode("e", Task("t", "", ""), (), Finish(FINISHED, "")), **parameters
    )


ADAPTERS = {
    "accuracy_filter": accuracy,
    "aggregation_weights": aggregation,
    "anchor_state_advantage": anchors,
    "categorical_entropy": entropy,
    "centred_whitened_advantage": centred_whitened,
    "clipped_objective": clipped,
    "decoupled_reward_advantage": gdpo,
    "detached_clip_objective": cispo,
    "ema_baseline_advantage": rae,
    "entropy_covariance": covariance,
    "fisher_exact": lambda i, p: {"p_two_sided": stats.fisher_exact(**i)},
    "gradient_norm_watch": norms,
    "group_mean_advantage": lambda i, p: {"advantages": estimators.dr_grpo(rows(**i))},
    "grpo_advantage": lambda i, p: {"advantages": estimators.grpo(rows(**i), **p)},
    "importance_ratio": ratios,
    "kl_estimators": kl,
    "length_weighted_baseline": opo,
    "mutual_information": lambda i, p: {"nats": watch.mutual_information(**i, **p)},
    "net_push": lambda i, p: {"roles": estimators.net_push(**i)},
    "optimiser_steps": steps,
    "overlong_penalty": lambda i, p: {"penalties": [overlong(n, **p) for n in i["lengths"]]},
    "prefix_tree_advantage": prefix_tree,
    "rloo_advantage": lambda i, p: {"advantages": estimators.rloo(rows(**i))},
    "running_max_alarm": lambda i, p: {
        "first_index": watch.running_max(**i, **p),
        "final_drawdown": watch.drawdown(**i, rate=1.0).values[-1],
    },
    "scoped_advantage": lambda i, p: {"advantages": scoped(i, p)},
    "sequence_ratio_objective": gspo,
    "sibling_advantage": siblings,
    "smoothed_drawdown_watch": drawdown,
    "soft_gate_objective": sapo,
    "spread_filter": spread,
    "sum_then_normalise": marshal,
    "tree_value_labels": tree_labels,
    "turn_policy_loss": turn_loss,
    "turn_return_to_go": lambda i, p: {
        "returns": [list(credit.returns(*chain(r), p["gamma"]).values()) for r in i["turn_rewards"]]
    },
    "two_level_advantage": two_level,
    "unfinished_handling": unfinished,
    "void_turn_filter": void,
    "whitened_token_returns": whitened,
    "wilson_interval": lambda i, p: dict(zip(("low", "high"), stats.wilson(**i, **p))),
}
