"""The heads of block drafters by loops over the tokens before each place, and their shapes."""

import numpy as np
from block_oracle import LAYERS, MASK, MASKS, rms

from specjax.drafters.domino import DominoConfig
from specjax.drafters.lilicorr import LiLiCorrConfig
from specjax.drafters.xpress import XPressConfig

SHAPE = dict(layers=LAYERS, block_size=MASKS + 1, mask_token=MASK, target_layers=(0, 1, 2))
EXPRESS = XPressConfig(**SHAPE, rank=5, inner_size=6, num_passes=2)
LATTICE = dict(lattice_size=6, lattice_heads=2, factor_size=5, mlp_ratio=1.5, num_candidates=3)
LILICORR = LiLiCorrConfig(**SHAPE, **LATTICE, logit_scale=20.0)
DOMINO = DominoConfig(**SHAPE, from_root=False, gru_size=7, rank=5, prefix=1)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def slow_domino(w, hidden, base, path, table, fault=None):
    """Logits ``[D, V]`` below each token of a path, by a loop over the tokens before each place."""
    read, recall = (w[name]["weight"] for name in ("read", "recall"))
    found = []
    for place in range(1, len(hidden)):
        state = np.zeros(recall.shape[1])
        for token in path[: place + (fault == "reads the token itself")]:
            r, z, n = np.split(read @ table[token], 3)
            rr, zz, nn = np.split(recall @ state, 3)
            keep, reset = sigmoid(z + zz), sigmoid(r + rr)
            if fault == "gates exchanged":
                keep, reset = reset, keep
            state = (1 - keep) * np.tanh(n + reset * nn) + keep * state
        mixed = w["down"]["weight"] @ np.concatenate([hidden[place], state])
        latent = mixed * sigmoid(mixed)
        corrected = place > DOMINO.prefix - (fault == "the prefix too")
        found.append(base[place] + corrected * (w["lm_head"]["weight"] @ latent))
    return np.stack(found)


def slow_xpress(w, hidden, base, path, table, fault=None, *, before, passes=None):
    """The same of a refiner: the tokens before each place are those of the path, or with
    ``passes`` those that so many passes over all places guess."""
    w = w["refiner"]
    local, whole, fuse = (w[name]["weight"] for name in ("local", "whole", "fuse"))
    mean = hidden[1:].mean(axis=0) if fault == "mean without the root" else hidden.mean(axis=0)
    first = path[0] if fault == "the root twice" else before

    def refined(previous):
        read = [
            np.concatenate([local @ h, whole @ mean, w["embedding"][token]])
            for h, token in zip(hidden, previous, strict=True)
        ]
        own = [fuse @ x for x in read]
        found = []
        for place in range(1, len(hidden)):
            seen = range(len(hidden)) if fault == "reads later tokens" else range(place + 1)
            mixed = own[place] * (fault != "no identity")
            mixed = mixed + sum(w["mix"][:, place, j] * own[j] for j in seen)
            gate = w["gate"]["weight"] @ mixed
            inner = gate * sigmoid(gate) * (w["up"]["weight"] @ mixed)
            found.append(w["lm_head"]["weight"] @ (mixed + w["down"]["weight"] @ inner))
        return base[1:] + np.stack(found)

    if passes is None:
        return refined([first, *path])
    guess = base[1:].argmax(axis=-1)
    for _ in range(passes):
        logits = refined([first, path[0], *guess[:-1]])
        guess = logits.argmax(axis=-1)
    return logits


def slow_lilicorr(w, hidden, base, path, table, fault=None, *, feature):
    """The same of the candidates of a lattice, -inf elsewhere, by loops over pairs of them."""
    config, net = LILICORR, w["lattice"]
    context = rms(w["fc"]["weight"] @ feature, w["hidden_norm"]["weight"])
    count, places = config.num_candidates, len(hidden) - 1

    def linear(name, x, of=net):
        return of[name]["weight"] @ x + of[name]["bias"]

    def silu(x):
        return x * sigmoid(x)

    logs = base[1:] - np.log(np.exp(base[1:]).sum(axis=-1, keepdims=True))
    tokens = np.argsort(-logs, axis=-1, kind="stable")[:, :count]
    where = [(place, rank) for place in range(places) for rank in range(count)]
    x = []
    for place, rank in where:
        log = logs[place, tokens[place, rank]]
        features = np.asarray([log, np.exp(log), log - logs[place].max(), 0, rank == 0])
        features[3] = rank / (count - 1) if fault != "ranks reversed" else 1 - rank / (count - 1)
        normed = (features - features.mean()) / np.sqrt(features.var() + 1e-5)
        normed = normed * net["feature_norm"]["weight"] + net["feature_norm"]["bias"]
        own = linear("feature_down", silu(linear("feature_up", normed)))
        own = own + linear("token", table[tokens[place, rank]]) + linear("state", hidden[place + 1])
        x.append(own + net["slots"][0, 0, place, 0] + net["ranks"][0, 0, 0, rank])
    x = np.stack(x)
    for i in range(config.lattice_layers):
        layer, out = net["layers"][i], []
        read = linear("qkv", rms(x, layer["attention_norm"]["weight"]).T, layer_bias(layer))
        q, k, v = np.split(read.T, 3, axis=1)
        for n, (place, _) in enumerate(where):
            heads = []
            for head, cut in enumerate(np.split(np.arange(x.shape[1]), config.lattice_heads)):
                scores = k[:, cut] @ q[n, cut] / np.sqrt(len(cut))
                for m, (other, _) in enumerate(where):
                    apart = (other - place) if fault == "distances turned" else (place - other)
                    scores[m] += net["distances"][head, apart + config.block_size - 1]
                    scores[m] += (apart == 0) * net["same"][head]
                weights = np.exp(scores - scores.max())
                heads.append(weights / weights.sum() @ v[:, cut])
            out.append(linear("out", np.concatenate(heads), layer))
        x = x + np.stack(out)
        inner = [linear("up", y, layer) for y in rms(x, layer["mlp_norm"]["weight"])]
        x = x + np.stack([linear("down", silu(y), layer) for y in inner])
    x = rms(x, net["norm"]["weight"]).reshape(places, count, -1)
    anchor = rms(linear("context", context), net["anchor_norm"]["weight"])

    def end(name, y):
        found = linear(name, y)
        return found / np.linalg.norm(found)

    def factor(place, rank):
        own = x[place, rank]
        return silu(linear("factor", np.concatenate([own, anchor, own * anchor])))

    found = np.full(base[1:].shape, -np.inf)
    for place in range(places):
        leaving = end("anchor_leave", anchor)
        if place and fault != "each below the root":
            rank = int(np.argmax(tokens[place - 1] == path[place]))
            leaving = end("leave", factor(place - 1, rank))
        for rank, token in enumerate(tokens[place]):
            cosine = leaving @ end("enter", factor(place, rank))
            unary = base[1 + place, token] if fault == "logits of the block too" else 0
            found[place, token] = config.logit_scale * cosine + unary
    return found


def layer_bias(layer):
    """Biases of a linear layer as a column, for several columns at once."""
    qkv = layer["qkv"]
    return {"qkv": {"weight": qkv["weight"], "bias": qkv["bias"][:, None]}}
