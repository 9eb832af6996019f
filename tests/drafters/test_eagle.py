"""EAGLE: what training unrolls is what decoding does, step by step."""

import copy

import pytest
import torch

from drafters.base import DraftSettings
from drafters.beam import _best_subtree
from drafters.build import MLP_SHARE, QUIET, TOKEN_GAIN, build_eagle
from drafters.checkpoint import load_drafter, native_tensors, probe_logits, save_drafter
from drafters.eagle import NORMS
from drafters.errors import UserError
from drafters.target import Features, wrap_target
from tests.tiny import make_model, make_target, make_tokenizer

STEPS, T = 4, 12
IDS = torch.randint(512, (2, T), generator=torch.Generator().manual_seed(0))
SOME = torch.randperm(512, generator=torch.Generator().manual_seed(1))[:100].sort().values


VARIANTS = {"eagle1": (1, ()), "eagle3": (3, ()), "eagle3.1": (3, ("fc_norm", "norm_output"))}
VARIANTS |= {name: (3, (name,)) for name in NORMS}


def make_eagle(target, variant):
    version, norms = VARIANTS[variant]
    torch.manual_seed(version)
    drafter = build_eagle(target, SOME, version=version, warm_layer=False, norms=norms)
    for weight in drafter.parameters():
        if weight.dim() == 2:
            weight.data.normal_(0, 0.2 if drafter.kind == "eagle3" else 0.1)  # EAGLE-1 norms nothing on its way
        else:
            weight.data.uniform_(0.6, 1.4)
    drafter._shared = {name: weight.double() for name, weight in drafter._shared.items()}
    return drafter.double()  # so that 1e-5 means something; softmax and rotary angles stay float32


@pytest.fixture(scope="module", params=["eagle1", "eagle3", "eagle3.1"])
def eagle(request, target):
    return make_eagle(target, request.param)


@pytest.fixture(scope="module")
def features(target, eagle):
    return features_for(target, eagle)


def features_for(target, eagle):
    found = target.forward(IDS, torch.arange(T)[None].expand(2, T), taps=eagle.taps)
    return Features(found.final.double(), None if found.taps is None else found.taps.double())


def part(features, row, begin, end):
    taps = None if features.taps is None else features.taps[row : row + 1, begin:end]
    return Features(features.final[row : row + 1, begin:end], taps)


def decoded_logits(eagle, features, row, t):
    """Draft logits of the decoder with x[0..t+1] committed, fed the true tokens instead of its own: STEPS of them."""
    x = IDS[row]
    state = eagle.begin(T + STEPS)
    eagle.extend(state, x[1:2], part(features, row, 0, 1))  # in two pieces, as prefill and a round would
    if t:
        eagle.extend(state, x[2 : t + 2], part(features, row, 1, t + 1))
    out, logits = state.out, [eagle.logits(state.out[0, -1])]
    for j in range(1, STEPS):
        if t + 1 + j >= T:
            break
        position = torch.tensor([[t + j]])
        out = eagle._cached(state, x[None, t + 1 + j : t + 2 + j], out, position, None, state.length + j - 1)
        logits.append(eagle.logits(out[0, -1]))
    return logits


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_teacher_forced_training_equals_decoding(target, variant):
    eagle = make_eagle(target, variant)
    features = features_for(target, eagle)
    outs = eagle.unroll(IDS, features, STEPS)
    compared = 0
    for row in range(2):
        for t in range(T - 1):
            for j, expected in enumerate(decoded_logits(eagle, features, row, t)):
                torch.testing.assert_close(eagle.logits(outs[j][row, t]), expected, atol=1e-5, rtol=1e-5)
                compared += 1
    assert compared == 2 * sum(min(STEPS, T - 1 - t) for t in range(T - 1))


def by_the_book(w, norms, embeds, taps):
    """Logits of two steps on one sequence, from tensors alone, with each norm where servers have it.

    h = fc(cat taps) is read beside the token's embedding; the residual is h; a step's sum is what the next reads.
    """
    T, heads, d = len(taps), 4, 16

    def rms(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]

    def rotated(x, position):  # (heads, d), half against half
        angle = position * 10000.0 ** (-torch.arange(d // 2).double() / (d // 2))
        one, two = x.split(d // 2, dim=-1)
        return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], dim=-1)

    if "norm_before_fc" in norms:
        taps = rms(taps, "input_norm")
    if "fc_norm" in norms:
        taps = torch.cat([rms(tap, f"fc_norm.{i}") for i, tap in enumerate(taps.split(64, dim=-1))], dim=-1)
    hidden = list(taps @ w["fc.weight"].T)
    logits, seen = [], [[] for _ in range(T)]  # seen[t]: keys and values that row t may look at
    for j in range(2):
        keep = []
        for t in range(T - j):
            normed = rms(hidden[t], "midlayer.hidden_norm")
            x = torch.cat([rms(embeds[t + 1 + j], "midlayer.input_layernorm"), normed])
            q, k, v = (w[f"midlayer.self_attn.{n}_proj.weight"] @ x for n in "qkv")
            q, k = rotated(q.view(heads, d), t + j), rotated(k.view(-1, d), t + j)
            for row in range(t, T) if j == 0 else [t]:
                seen[row].append((k.repeat_interleave(2, 0), v.view(-1, d).repeat_interleave(2, 0)))
            keep.append((normed, q))
        for t, (normed, q) in enumerate(keep):
            keys, values = (torch.stack(x) for x in zip(*seen[t], strict=True))  # (rows, heads, d)
            share = ((q * keys).sum(-1) / d**0.5).softmax(0)
            out = w["midlayer.self_attn.o_proj.weight"] @ (share[..., None] * values).sum(0).flatten()
            out = out + (normed if "norm_before_residual" in norms else hidden[t])
            x = rms(out, "midlayer.post_attention_layernorm")
            gate, up = (w[f"midlayer.mlp.{n}_proj.weight"] @ x for n in ("gate", "up"))
            out = out + w["midlayer.mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)
            logits.append(w["lm_head.weight"] @ rms(out, "norm"))
            hidden[t] = rms(out, "norm") if "norm_output" in norms else out
    return torch.stack(logits)


@torch.no_grad()
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "eagle1"])
def test_every_norm_is_where_servers_have_it(target, variant):
    eagle, norms = make_eagle(target, variant), VARIANTS[variant][1]
    features = features_for(target, eagle)
    embeds = target.embedding[IDS[0]].double()
    expected = by_the_book(eagle.state_dict(), norms, embeds, features.taps[0, : T - 1])
    one, two = eagle.unroll(IDS, features, 2)
    torch.testing.assert_close(
        eagle.logits(torch.cat([one[0, : T - 1], two[0, : T - 2]])), expected, atol=1e-4, rtol=1e-4
    )
    plain = make_eagle(target, "eagle3")
    plain.load_state_dict(eagle.state_dict(), strict=False)
    changed = (plain.logits(plain.unroll(IDS, features, 2)[1]) - eagle.logits(two)).abs().max()
    assert (changed > 0.1) == bool(norms)


@torch.no_grad()
def test_a_proposed_chain_is_the_step_by_step_argmax(eagle, features):
    state = eagle.begin(T + STEPS)
    eagle.extend(state, IDS[0, 1:], part(features, 0, 0, T - 1))
    before = state.keys.clone(), state.out.clone()
    chain = eagle.propose(state, DraftSettings("chain", length=STEPS))
    out, tokens = state.out, []
    fresh = eagle.begin(T + STEPS)
    eagle.extend(fresh, IDS[0, 1:], part(features, 0, 0, T - 1))
    for j in range(STEPS):
        tokens.append(SOME[eagle.logits(out[0, -1]).argmax()])
        out = eagle._cached(fresh, tokens[-1][None, None], out, torch.tensor([[T - 1 + j]]), None, T - 1 + j)
    assert chain.tokens.tolist() == [int(t) for t in tokens] and chain.parents.tolist() == [-1, 0, 1, 2]
    assert chain.q is None and state.length == T - 1
    drafted = slice(0, T - 1 + STEPS - 1)  # every draft reads the rows of those before it
    torch.testing.assert_close(state.keys[:, :, drafted], fresh.keys[:, :, drafted])
    assert torch.equal(state.keys[:, :, : T - 1], before[0][:, :, : T - 1]) and torch.equal(state.out, before[1])
    again = eagle.propose(state, DraftSettings("chain", length=STEPS))
    assert torch.equal(again.tokens, chain.tokens)


@torch.no_grad()
def test_only_distances_between_positions_count(eagle, features):
    hidden, rows = eagle.fuse(features), torch.arange(T)[None]
    following = torch.nn.functional.pad(IDS[:, 1:], (0, 1))

    def logits(positions):
        residual, q, k, v = eagle.inputs(following, hidden, positions.expand(2, T))
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return eagle.logits(eagle.outputs(residual, attended.transpose(1, 2).flatten(2)))

    torch.testing.assert_close(logits(rows), eagle.logits(eagle.unroll(IDS, features, 1)[0]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits(rows + 100), logits(rows), atol=1e-3, rtol=1e-3)
    assert (logits(rows * 3) - logits(rows)).abs().max() > 0.05


@torch.no_grad()
def test_rows_past_the_end_are_harmless(eagle, features):
    short = Features(features.final[:, :3], None if features.taps is None else features.taps[:, :3])
    assert all(out.isfinite().all() for out in eagle.unroll(IDS[:, :3], short, 5))


# ---- proposals


def closed(tree):
    parents = tree.parents.tolist()
    return all(-1 <= parent < i for i, parent in enumerate(parents))


@torch.no_grad()
@pytest.mark.parametrize(("top_k", "total", "length"), [(3, 9, 4), (1, 4, 4), (10, 4, 3), (4, 500, 2)])
def test_trees(eagle, features, top_k, total, length):
    settings = DraftSettings("tree", length=length, top_k=top_k, total=total)
    state = eagle.begin(T + settings.rows)
    eagle.extend(state, IDS[0, 1:], part(features, 0, 0, T - 1))
    tree = eagle.propose(state, settings)
    assert closed(tree) and len(tree.tokens) <= total and tree.q is None
    assert set(tree.tokens.tolist()) <= set(SOME.tolist())
    siblings = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len(set(siblings)) == len(siblings)
    # the root's children are the drafter's best tokens, each node's score is its path's log probability
    best = SOME[eagle.logits(state.out[0, -1]).topk(top_k).indices].tolist()
    children = [token for parent, token in siblings if parent == -1]
    assert set(children) <= set(best) and best[0] in children
    if top_k == 1:
        chain = eagle.propose(state, DraftSettings("chain", length=length))
        assert torch.equal(tree.tokens, chain.tokens) and torch.equal(tree.parents, chain.parents)


@torch.no_grad()
def test_tree_nodes_see_their_own_branch_only(eagle, features):
    """Following any path of the tree as a chain gives the same children as the tree has."""
    settings = DraftSettings("tree", length=3, top_k=3, total=100)
    state = eagle.begin(T + settings.rows)
    eagle.extend(state, IDS[0, 1:], part(features, 0, 0, T - 1))
    tree = eagle.propose(state, settings)
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    checked = 0
    for node in {p for p in parents if p >= 0}:
        path, at = [], node
        while at >= 0:
            path.insert(0, tokens[at])
            at = parents[at]
        out = state.out
        for j, token in enumerate(path):
            out = eagle._cached(state, torch.tensor([[token]]), out, torch.tensor([[T - 1 + j]]), None, T - 1 + j)
        children = {tokens[i] for i, p in enumerate(parents) if p == node}
        assert children == set(SOME[eagle.logits(out[0, -1]).topk(3).indices].tolist())
        checked += len(path) > 1
    assert checked == 3


def test_tied_scores_keep_parents():
    # 0 and 1 are children of the root; 2, 3 of 0 and 4, 5 of 1; log probability 0 ties a child with its parent
    scores = torch.tensor([0.0, 0.0, 0.0, -9.0, 0.0, -9.0])
    tokens, parents = torch.arange(6), torch.tensor([-1, -1, 0, 0, 1, 1])
    for total in range(1, 7):
        tree = _best_subtree(scores, tokens, parents, total)
        assert len(tree.tokens) == total and closed(tree)
        kept = tree.tokens.tolist()
        for token, parent in zip(kept, tree.parents.tolist(), strict=True):
            assert (kept[parent] if parent >= 0 else -1) == parents[token]


@torch.no_grad()
def test_a_drafter_that_is_sure_of_everything_still_gives_a_tree(target, features, eagle):
    sure = build_eagle(target, SOME, version=eagle.config.version, norms=eagle.config.norms)
    sure.load_state_dict(eagle.state_dict())
    sure.logits = lambda out: torch.zeros(*out.shape[:-1], 100).index_fill(-1, torch.tensor([7]), 1e4)
    settings = DraftSettings("tree", length=4, top_k=3, total=4)
    state = sure.begin(T + settings.rows)
    sure.extend(state, IDS[0, 1:], part(features, 0, 0, T - 1))
    tree = sure.propose(state, settings)
    assert closed(tree) and tree.tokens.tolist() == [int(SOME[7])] * 4 and tree.parents.tolist() == [-1, 0, 1, 2]


@torch.no_grad()
def test_a_sampled_chain_reports_the_q_it_was_drawn_from(eagle, features):
    state = eagle.begin(T + 2)
    eagle.extend(state, IDS[0, 1:], part(features, 0, 0, T - 1))
    settings, generator = DraftSettings("chain", length=2, sample=True), torch.Generator().manual_seed(0)
    counts = torch.zeros(512)
    for _ in range(200):
        chain = eagle.propose(state, settings, 0.7, generator)
        counts[chain.tokens[0]] += 1
        assert chain.q.shape == (2, 512) and (chain.q.gather(1, chain.tokens[:, None]) > 0).all()
    expected = torch.zeros(512).scatter(0, SOME, (eagle.logits(state.out[0, -1]) / 0.7).softmax(-1).float())
    torch.testing.assert_close(chain.q[0], expected)
    assert (counts / 200 - expected).abs().sum() < 0.8
    assert eagle.propose(state, settings, 0.0, generator).q is None  # greedy
    assert len(eagle.propose(state, DraftSettings(length=0)).tokens) == 0


# ---- making one


def test_a_warm_layer_is_the_targets_last(target):
    drafter = build_eagle(target, SOME, version=3)
    block = target.blocks[-1]
    H = target.hidden_size
    assert torch.equal(drafter.layer.mlp.up_proj.weight, block.mlp.up_proj.weight)
    assert torch.equal(drafter.layer.mlp.down_proj.weight, MLP_SHARE * block.mlp.down_proj.weight)
    out, theirs = drafter.layer.self_attn.o_proj.weight, block.self_attn.o_proj.weight
    assert torch.equal(out[:, : H // 2], theirs[:, : H // 2])  # of the heads that stay as they are
    assert torch.equal(out[:, H // 2 :], TOKEN_GAIN * theirs[:, H // 2 :])
    q, first = drafter.layer.self_attn.q_proj.weight, block.self_attn.q_proj.weight[: H // 2]
    assert torch.equal(q[: H // 2, H:], first) and not q[H // 2 :, H:].any()
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight[SOME])
    assert torch.equal(drafter.norm.weight, target.decoder.norm.weight)
    cold = build_eagle(target, None, version=3, warm_head=False, warm_layer=False)
    assert not torch.equal(cold.lm_head.weight, target.lm_head.weight) and cold.lm_head.weight.shape == (512, H)


def test_half_of_a_warm_eagle3s_heads_look_at_their_own_token(target):
    drafter = build_eagle(target, None, version=3)
    heads = target.config.num_attention_heads
    features = target.forward(IDS, torch.arange(T)[None].expand(2, T), taps=drafter.taps)
    tokens = IDS.roll(-1, 1)
    _, q, k, _ = drafter.inputs(tokens, drafter.fuse(features), torch.arange(T)[None])
    scores = q @ k.repeat_interleave(heads // k.shape[1], dim=1).transpose(2, 3) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
    own = weights.diagonal(dim1=2, dim2=3).mean((0, 2))  # (heads,)
    assert (own[heads // 2 :] > 0.8).all() and (own[: heads // 2] < 0.6).all()


@pytest.mark.parametrize("norm", ["fc_norm", "norm_before_fc"])
def test_a_normed_tap_enters_a_warm_layer_at_the_streams_size(target, norm):
    features = target.forward(IDS, torch.arange(T)[None].expand(2, T), taps=target.default_taps())
    size = features.taps[..., -target.hidden_size :].square().mean().sqrt()
    fused = build_eagle(target, None, version=3, norms=[norm]).fuse(features)
    assert 0.5 < fused.square().mean().sqrt() / size < 2


def test_a_warm_eagle1_starts_with_the_features_it_reads(target):
    """Nothing norms its sum on the way to the head: whatever an untrained layer adds is noise there."""
    drafter = build_eagle(target, None, version=1)
    features = target.forward(IDS, torch.arange(T)[None].expand(2, T))
    out = drafter.unroll(IDS, features, 1)[0]
    torch.testing.assert_close(out, features.final)
    out.square().sum().backward()
    assert drafter.layer.mlp.down_proj.weight.grad.any() and drafter.fc.weight.grad[:, :8].any()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_warm_eagle1_attends_as_the_targets_last_block(family):
    """It reads what the final norm gave, where the block reads what its own norm gives."""
    target = make_target(family, layers=2)
    block, final = target.blocks[-1], target.decoder.norm
    with torch.no_grad():
        for norm in (block.input_layernorm, final):
            norm.weight.uniform_(0.2, 3.0)
    heads, kv_heads = target.config.num_attention_heads, target.config.num_key_value_heads
    attention = build_eagle(target, None, version=1, num_kv_heads=heads).layer.self_attn
    stream = 5 * torch.randn(7, target.hidden_size)
    for name, factor in (("q_proj", 1.0), ("k_proj", 1.0), ("v_proj", QUIET)):
        mine = getattr(attention, name)(final(stream)).unflatten(-1, (heads, -1))
        theirs = getattr(block.self_attn, name)(block.input_layernorm(stream)).unflatten(-1, (-1, mine.shape[-1]))
        served = theirs.repeat_interleave(heads // theirs.shape[1], dim=1)  # each query head finds its KV head
        torch.testing.assert_close(mine, factor * served, rtol=1e-4, atol=1e-4)
    assert kv_heads < heads


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_warm_norms_multiply_by_what_the_targets_do(family, dtype):
    model = make_model(family, layers=4)
    with torch.no_grad():
        for norm in (model.model.norm, *model.model.layers[-1].children()):
            if "Norm" in type(norm).__name__:
                norm.weight.uniform_(0.2, 10.0)
    target = wrap_target(model.to(dtype), make_tokenizer(), "tiny")
    block, drafter = target.blocks[-1], build_eagle(target, None, version=3)
    before_mlp = block.pre_feedforward_layernorm if family == "gemma2" else block.post_attention_layernorm
    pairs = [(drafter.norm, target.decoder.norm), (drafter.layer.hidden_norm, block.input_layernorm)]
    stream, close = torch.randn(7, target.hidden_size), {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    for mine, theirs in [*pairs, (drafter.layer.post_attention_layernorm, before_mlp)]:
        torch.testing.assert_close(mine(stream), theirs(stream.to(dtype)).float(), **close)


def test_rope_factors_for_heads_of_another_size_are_left_out():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    rope |= {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}  # 12 of 16 numbers are rotated, as in Phi-4 mini
    more = {"original_max_position_embeddings": 128, "pad_token_id": 0, "partial_rotary_factor": 0.75}
    target = wrap_target(make_model("phi3", rope_parameters=rope, **more), make_tokenizer(), "phi")
    assert torch.isfinite(
        build_eagle(target, None).unroll(
            IDS, target.forward(IDS, torch.arange(T)[None].expand(2, T), taps=target.default_taps()), 1
        )[0]
    ).all()


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_layer_in_one_compiled_call_gives_what_its_parts_give(variant, window):
    target = wrap_target(make_model(layers=4).bfloat16(), make_tokenizer(), "tiny").pack()
    drafter = make_eagle(target, variant).float().bind(target)
    drafter.fuse_layer(torch.bfloat16)
    if target.fast is None or target.fast.dtype != torch.float32:
        pytest.skip("no C compiler, or a CPU that computes in bfloat16")
    assert (drafter.block is None) == (variant == "norm_before_residual")
    drafter.meta["window"] = window
    chain, tree = DraftSettings("chain", 3), DraftSettings("tree", 3, 2, 6)

    def run():
        state, out = drafter.begin(40), []
        for begin, end in ((0, 7), (7, 8), (8, 10)):
            tokens = IDS[0, begin + 1 : end + 1]
            drafter.extend(state, tokens, part(features, 0, begin, end))
            out += [drafter.propose(state, chain).tokens, drafter.propose(state, tree).tokens, state.out]
        return [*out, state.keys[:, :, :10], drafter.first_drafts(state, IDS[0, 11:], part(features, 0, 10, 11), 1)]

    with torch.inference_mode():
        features = target.forward(IDS, torch.arange(T)[None].expand(2, T), taps=drafter.taps)
        together = run()
        drafter.block = None
        for a, b in zip(together, run(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_scale_of_embeddings_is_trainings_own_affair():
    target = wrap_target(make_model(layers=3).bfloat16(), make_tokenizer(), "tiny")  # its rows times 7 are no bfloat16
    drafter = build_eagle(target, SOME, version=1)
    drafter.fc.weight.data.normal_(0, 0.1)
    features = target.forward(IDS, torch.arange(T)[None].expand(2, T))
    out, files = drafter.unroll(IDS, features, 2), {n: w.clone() for n, w in native_tensors(drafter).items()}
    drafter.scale_embeddings(7.0)
    assert not torch.equal(drafter.fc.weight, files["fc.weight"])
    for a, b in zip(out, drafter.unroll(IDS, features, 2), strict=True):
        torch.testing.assert_close(a, b)
    for name, tensor in native_tensors(drafter).items():
        torch.testing.assert_close(tensor, files[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_scaled_drafter_is_saved_as_it_is_whatever_the_targets_dtype(tmp_path, dtype):
    target = wrap_target(make_model(layers=4, initializer_range=0.1).to(dtype), make_tokenizer(), "tiny")
    drafter = build_eagle(target, None, version=1).bind(target)
    drafter.scale_embeddings(1 / float(target.embedding.float().square().mean().sqrt()))
    for weight in (drafter.fc.weight, drafter.layer.self_attn.o_proj.weight, drafter.layer.mlp.down_proj.weight):
        torch.nn.init.normal_(weight, 0, 0.1)  # as if it had been trained: a warm one does not hear the token
    saved = load_drafter(
        save_drafter(drafter, tmp_path / "drafter", target, {}), target, dtype=torch.float32, pack=False
    )
    assert saved.embed_scale == 1.0 and not torch.allclose(saved.fc.weight, drafter.fc.weight)
    torch.testing.assert_close(probe_logits(saved, target), probe_logits(drafter, target), rtol=1e-4, atol=1e-4)


def test_rows_behind_the_cache_are_refused_and_copies_stand_alone():
    target = wrap_target(make_model(layers=4).bfloat16(), make_tokenizer(), "tiny").pack()
    drafter = make_eagle(target, "eagle3").float().bind(target)
    drafter.fuse_layer(torch.bfloat16)
    if drafter.block is None:
        pytest.skip("no C compiler, or a CPU that computes in bfloat16")
    with torch.inference_mode():
        features = target.forward(IDS[:1], torch.arange(T)[None], taps=drafter.taps)

        def run(drafter, capacity):
            state = drafter.begin(capacity)
            drafter.extend(state, IDS[0, 1:], part(features, 0, 0, T - 1))
            drafter.propose(state, DraftSettings("chain", 5))
            return state.out

        with pytest.raises(ValueError, match="cannot take row"):
            run(drafter, T)
        expected, twin = run(drafter, 2 * T), copy.deepcopy(drafter)
        drafter.block.layers[0][1][0].panels.zero_()
        assert torch.equal(run(twin, 2 * T), expected) and not torch.equal(run(drafter, 2 * T), expected)


def test_frequencies_stay_float32_when_the_drafter_is_cast(target):
    drafter = build_eagle(target, None, version=3)
    exact = drafter.rotary.inv_freq.clone()
    drafter.to(torch.bfloat16)
    assert drafter.fc.weight.dtype == torch.bfloat16
    assert torch.equal(drafter.rotary.inv_freq, exact) and drafter.rotary.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5}, "does not divide"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads=3"),
        ({"taps": (1, 9)}, "drafter.taps"),
    ],
)
def test_impossible_shapes(target, options, message):
    with pytest.raises(UserError, match=message):
        build_eagle(target, None, **options)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_every_family_gets_a_drafter(family):
    target = make_target(family, layers=3)
    for version in (1, 3):
        drafter = build_eagle(target, SOME, version=version)
        features = target.forward(IDS, torch.arange(T)[None].expand(2, T), taps=drafter.taps)
        assert drafter.logits(drafter.unroll(IDS, features, 2)[1]).shape == (2, T, 100)
