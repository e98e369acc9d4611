"""Trees in real decoding of tiny targets: branches that do not see each other, text that is the target's own, forms that add up."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chi2_contingency
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from specdistill.decoding.decoder import Decoder, Generation
from specdistill.decoding.proposer import DecodingState, Proposal, Proposer, TreeProposer
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.transformers_models import check_reads_trees, keep_path, read
from specdistill.decoding.tree import ROOT, DynamicTree, StaticTree, Step, Tree, candidates_are_drawn, tree_shape
from specdistill.errors import UserError
from specdistill.methods.draft_model.proposer import DraftModelProposer
from specdistill.methods.eagle.module import build_eagle
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.mtp.checkpoint import build_mtp
from specdistill.methods.ngram.method import NgramProposer
from specdistill.targets.frozen import FrozenTarget
from tests import mtp_targets
from tests.draft_models import half_right, translated
from tests.tiny import qwen, tiny_target_model, tiny_tokenizer, twins

PROMPT = [5, 9, 5, 9, 20, 31]
DIAGRAM = Tree((ROOT, ROOT, 0, 0, 1))  # a, b; c and d after a; e after b
DYNAMIC = DynamicTree(budget=9, depth=4, top_k=3)
STATIC = StaticTree((3, 2, 1))
GREEDY = Sampling()


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    model = tiny_target_model()
    model.generation_config.eos_token_id = []
    return FrozenTarget(model, tiny_tokenizer(), name="tiny")


class Watched:
    """Notes what a proposer proposed."""

    def __init__(self, proposer: Any) -> None:
        self.proposer = proposer
        self.proposals: list[Proposal] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.proposer, name)

    def propose_tree(self, *arguments: Any) -> Proposal:
        self.proposals.append(self.proposer.propose_tree(*arguments))
        return self.proposals[-1]


class OracleTree:
    """Drafts the target's own completion among wrong tokens: at each node the right child is the last of two."""

    aux_layers: tuple[int, ...] = ()
    num_parameters = num_bytes = 0

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def begin(self, max_length: int) -> None:
        pass

    def propose(self, state: DecodingState, k: int, sampling: Sampling, generator: torch.Generator | None) -> Proposal:
        raise AssertionError("asked for a chain")

    def propose_tree(
        self, state: DecodingState, shape: StaticTree | DynamicTree, sampling: Sampling, generator: torch.Generator | None
    ) -> Proposal:
        done, parents, tokens, above = len(state.token_ids), [], [], ROOT
        for token in self.text[done : done + shape.depth]:
            tokens += [(token + 1) % 200, token]
            parents += [above, above]
            above = len(parents) - 1
        return Proposal(tokens, None, Tree(tuple(parents))) if tokens else Proposal([])


def proposer_of(name: str, target: FrozenTarget) -> Proposer:
    if name == "draft_model":
        return DraftModelProposer(half_right(target))
    if name == "draft_model, of transformers":
        return DraftModelProposer(qwen())
    if name == "draft_model, other vocabulary":
        return translated(target)
    if name == "mtp":
        return HeadProposer(build_mtp(target, init="scratch"))
    if name == "eagle":
        return HeadProposer(build_eagle(target))
    shapes: dict[str, dict[str, Any]] = {
        "eagle3": {},
        "eagle3, two layers": {"num_layers": 2, "norm_output": True},
        "eagle3, pruned": {"draft_vocabulary": torch.arange(0, target.vocab_size, 3)},
        "eagle3, window": {"sliding_window": 4},
    }
    return HeadProposer(build_eagle3(target, **shapes[name]))


NAMES = (
    "draft_model",
    "draft_model, of transformers",
    "draft_model, other vocabulary",
    "mtp",
    "eagle",
    "eagle3",
    "eagle3, two layers",
    "eagle3, pruned",
    "eagle3, window",
)

# --- Forms


def test_the_tree_of_the_diagram() -> None:
    assert DIAGRAM.depths == (1, 1, 2, 2, 2)
    assert DIAGRAM.children == {ROOT: [0, 1], 0: [2, 3], 1: [4], 2: [], 3: [], 4: []}
    assert DIAGRAM.prolonged([]) == [0, 2] and DIAGRAM.prolonged([1]) == [1, 4] and DIAGRAM.prolonged([0, 3]) == [0, 3]
    step = Step.whole(DIAGRAM, 3, torch.device("cpu"))
    assert step.positions == (3, 4, 4, 5, 5, 5)
    rows = ["111 100000", "111 110000", "111 101000", "111 110100", "111 110010", "111 101001"]
    assert step.visible(None).int().tolist() == [[int(bit) for bit in row if bit != " "] for row in rows]
    rows = ["011 100000", "001 110000", "001 101000", "000 110100", "000 110010", "000 101001"]
    assert step.visible(3).int().tolist() == [[int(bit) for bit in row if bit != " "] for row in rows]


def test_levels_see_what_the_whole_tree_lets_them_see() -> None:
    first = Step.before(4, torch.device("cpu")).descend(torch.tensor([0, 0]))
    second = first.descend(torch.tensor([0, 0, 1]))
    whole = Step.whole(DIAGRAM, 3, torch.device("cpu"))
    for window in (None, 2, 3, 5):
        both = torch.cat((torch.nn.functional.pad(first.visible(window), (0, 3)), second.visible(window)))
        assert torch.equal(both, whole.visible(window)[1:])


def table_of(distributions: dict[tuple[int, ...], list[float]]) -> Any:
    """A draft given by a table of probabilities: the logits after the root, and the function that expands its levels."""
    texts: list[tuple[int, ...]] = [()]

    def expand(index_T: Tensor, rows_T: Tensor) -> Tensor:
        nonlocal texts
        texts = [(*texts[row], token) for token, row in zip(index_T.tolist(), rows_T.tolist(), strict=True)]
        return torch.tensor([distributions[text] for text in texts]).log()

    return torch.tensor([distributions[()]]).log(), expand


def test_a_dynamic_tree_keeps_the_most_probable_paths() -> None:
    distributions = {
        (): [0.6, 0.3, 0.1],
        (0,): [0.5, 0.4, 0.1],  # 0.30, 0.24
        (1,): [0.1, 0.0, 0.9],  # 0.27
        (0, 0): [0.9, 0.05, 0.05],  # 0.27
        (1, 2): [0.4, 0.3, 0.3],
    }
    # Of the second level 00 (0.30) and 12 (0.27) are expanded, not 01 (0.24).
    index_N, tree, probs_NW = DynamicTree(budget=6, depth=3, top_k=2).grow(*table_of(distributions), GREEDY, None)
    assert index_N.tolist() == [0, 1, 0, 1, 2, 0]
    assert tree.parents == (ROOT, ROOT, 0, 0, 1, 2)
    assert probs_NW is None
    index_N, _, _ = DynamicTree(budget=4, depth=3, top_k=2).grow(*table_of(distributions), GREEDY, None)
    assert index_N.tolist() in ([0, 1, 0, 2], [0, 1, 0, 0])  # two of 0.27


@pytest.mark.parametrize("shape", [DYNAMIC, STATIC, StaticTree((2, 2, 2, 2)), DynamicTree(budget=4, depth=4, top_k=8)])
def test_trees_have_the_form_asked_for(target: FrozenTarget, shape: StaticTree | DynamicTree) -> None:
    watched = Watched(HeadProposer(build_eagle3(target)))
    Decoder(target, watched).generate(PROMPT, max_new_tokens=12, tree=shape)
    for proposal in watched.proposals:
        tree = proposal.tree
        assert tree is not None and len(proposal.tokens) == len(tree.parents)
        assert all(parent < node for node, parent in enumerate(tree.parents))
        for children in tree.children.values():
            assert len({proposal.tokens[child] for child in children}) == len(children)
        if isinstance(shape, DynamicTree):
            assert len(proposal.tokens) == shape.budget and max(tree.depths) <= shape.depth
        else:
            counts = Counter(tree.depths)
            assert len(proposal.tokens) == shape.num_nodes
            assert [counts[level + 1] // counts.get(level, 1) for level in range(shape.depth)] == list(shape.branching)


# --- The target


def models(kind: str) -> FrozenTarget:
    if kind in mtp_targets.KINDS:
        return mtp_targets.tiny_target(kind)
    model = qwen() if kind == "windows" else tiny_target_model()
    model.set_attn_implementation("eager" if kind == "eager" else "sdpa")
    return FrozenTarget(model, tiny_tokenizer(), name=kind)


@pytest.mark.parametrize("kind", ["sdpa", "eager", "windows", "deepseek_v3"])
def test_a_pass_over_a_tree_reads_each_branch_as_it_reads_it_alone(kind: str) -> None:
    """The windows are of 8 positions, the text is of 20; what is kept of the cache afterwards is that of the path. In float64: logits here
    reach 18, where float32 itself rounds by nearly as much as is allowed.
    """
    target = models(kind)
    target.model.double().set_experts_implementation("eager")  # torch's grouped product of experts has no float64
    text = [(7 * n) % 200 + 1 for n in range(20)]
    tokens = [50, 60, 70, 80, 90]
    layers = (1, 2)
    with torch.inference_mode():
        for path in ([0, 2], [0, 3], [1, 4], [1], []):
            cache, alone_cache = DynamicCache(), DynamicCache()
            read(target, text[:-1], cache)
            step = Step.whole(DIAGRAM, len(text) - 1, target.device)
            together = read(target, [text[-1], *tokens], cache, layers, step)
            branch = [tokens[node] for node in path]
            alone = read(target, [*text, *branch], alone_cache, layers)
            rows = [0, *(node + 1 for node in path)]
            kept = together.at(rows)
            last = target.logits(alone.last_hidden)[:, len(text) - 1 :]
            assert_same(target.logits(kept.last_hidden), last)
            for ours, theirs in zip(kept.aux, alone.aux, strict=True):
                assert_same(ours, theirs[:, len(text) - 1 :])
            keep_path(cache, len(tokens), path)
            assert cache.get_seq_length() == alone_cache.get_seq_length()
            for ours, theirs in zip(cache.layers, alone_cache.layers, strict=True):
                assert_same(ours.keys, theirs.keys)
                assert_same(ours.values, theirs.values)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)


def test_targets_that_cannot_read_a_tree_are_refused(target: FrozenTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"eval\.tree: got tiny qwen3_next, whose recurrent layers"):
        check_reads_trees(mtp_targets.tiny_target("qwen3_next"))
    check_reads_trees(target)
    plain = target.features
    for ignored in ("attention_mask", "position_ids_BT"):
        monkeypatch.setattr(target, "features", lambda *a, ignored=ignored, **o: plain(*a, **{**o, ignored: None}))
        with pytest.raises(UserError, match=r"eval\.tree: got tiny, which reads a branch of a tree differently"):
            check_reads_trees(target)
    monkeypatch.setattr(target.config, "_attn_implementation", "flash_attention_2")
    with pytest.raises(UserError, match=r"target\.attn: got a tree with attention flash_attention_2, expected sdpa or eager"):
        check_reads_trees(target)


# --- The draft


def forced_logits(proposer: Any, target: FrozenTarget, text: list[int], path: list[int]) -> Tensor:
    """The draft's logits after `path`, fed one token after the other from an empty cache."""
    if isinstance(proposer, DraftModelProposer):
        logits: Tensor = proposer.draft(input_ids=torch.tensor([[*text, *path]])).logits[0, -1]
        return logits
    head = proposer.head
    proposer.begin(100)
    hidden = head.fuse(target.features(torch.tensor([text[:-1]]), head.aux_layers))
    next_ids = torch.tensor([text[1:]])
    for token in [*path, None]:
        normed, next_hidden = head(next_ids, hidden, proposer.cache.next_rotary(next_ids.shape[1]), proposer.cache)
        next_ids, hidden = torch.tensor([[token or 0]]), next_hidden[:, -1:]
    return head.logits(normed[0, -1])


@pytest.mark.parametrize("name", [name for name in NAMES if "vocabulary" not in name])
@pytest.mark.parametrize("shape", [DYNAMIC, STATIC])
def test_a_level_is_drafted_as_each_of_its_branches_is_alone(
    target: FrozenTarget, name: str, shape: StaticTree | DynamicTree
) -> None:
    """After several rounds, with what the cache then holds: a node's children are the best tokens after its own path."""
    watched = Watched(proposer_of(name, target))
    run = Decoder(target, watched).generate(PROMPT, max_new_tokens=14, tree=shape)
    before_last = len(run.token_ids) - len(run.rounds[-1].emitted)
    text, proposal = [*PROMPT, *run.token_ids[:before_last]], watched.proposals[-1]
    tree = proposal.tree
    assert tree is not None
    fresh = proposer_of(name, target)
    paths: dict[int, list[int]] = {ROOT: []}
    with torch.inference_mode():
        for node, parent in enumerate(tree.parents):
            paths[node] = [*paths[parent], proposal.tokens[node]]
        for node, children in tree.children.items():
            if children:
                best = forced_logits(fresh, target, text, paths[node]).topk(len(children)).indices
                ids = fresh.target_ids_W[best] if isinstance(fresh, HeadProposer) else best
                assert [proposal.tokens[child] for child in children] == ids.tolist(), paths[node]


class Guided(Watched):
    """Drafts with a head, but proposes an oracle's tree, whose right path lies at the end of every family."""

    def __init__(self, proposer: Any, oracle: OracleTree) -> None:
        super().__init__(proposer)
        self.oracle = oracle
        self.texts: list[list[int]] = []

    def propose_tree(self, state: DecodingState, *arguments: Any) -> Proposal:
        self.texts.append(list(state.token_ids))
        super().propose_tree(state, *arguments)
        return self.oracle.propose_tree(state, *arguments)


@pytest.mark.parametrize("name", ["eagle3", "eagle"])
def test_a_head_gets_the_features_of_the_accepted_path(target: FrozenTarget, name: str) -> None:
    plain = Decoder(target).generate(PROMPT, max_new_tokens=17).token_ids
    guided = Guided(proposer_of(name, target), OracleTree([*PROMPT, *plain]))
    run = Decoder(target, guided).generate(PROMPT, max_new_tokens=17, tree=StaticTree((2, 2, 2)))
    assert [r.num_accepted for r in run.rounds] == [3] * 4
    fresh: Any = proposer_of(name, target)
    for text, proposal in zip(guided.texts, guided.proposals, strict=True):
        with torch.inference_mode():
            best = fresh.target_ids_W[forced_logits(fresh, target, text, []).topk(2).indices]
        assert proposal.tokens[:2] == best.tolist()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [DYNAMIC, STATIC])
def test_greedy_output_is_the_plain_output(target: FrozenTarget, name: str, shape: StaticTree | DynamicTree) -> None:
    plain = Decoder(target).generate(PROMPT, max_new_tokens=40)
    fast = Decoder(target, proposer_of(name, target)).generate(PROMPT, max_new_tokens=40, tree=shape)
    assert fast.token_ids == plain.token_ids
    check_rounds(fast, shape)


def check_rounds(run: Generation, shape: StaticTree | DynamicTree) -> None:
    assert run.token_ids[1:] == tuple(token for r in run.rounds for token in r.emitted)
    for r in run.rounds:
        assert r.emitted[: r.num_accepted] == r.drafted[: r.num_accepted]
        assert len(r.emitted) in (r.num_accepted, r.num_accepted + 1)
        assert len(r.drafted) <= shape.depth
        if isinstance(shape, DynamicTree):
            assert len(r.drafted) + r.num_off_path == shape.budget


@pytest.mark.parametrize("kind", ["windows", "deepseek_v3"])
def test_targets_of_other_kinds_keep_their_text(kind: str) -> None:
    target = models(kind)
    target.model.generation_config.eos_token_id = []
    plain = Decoder(target).generate(PROMPT, max_new_tokens=30).token_ids
    wrong = [token if index % 5 else (token + 1) % 200 for index, token in enumerate([*PROMPT, *plain])]
    run = Decoder(target, OracleTree(wrong)).generate(PROMPT, max_new_tokens=30, tree=StaticTree((2, 2, 2)))
    assert run.token_ids == plain
    assert 0 < sum(r.num_accepted for r in run.rounds) < sum(len(r.drafted) for r in run.rounds)


def test_the_right_path_of_an_oracles_tree_is_accepted_in_full(target: FrozenTarget) -> None:
    plain = Decoder(target).generate(PROMPT, max_new_tokens=41)
    oracle = OracleTree([*PROMPT, *plain.token_ids])
    run = Decoder(target, oracle).generate(PROMPT, max_new_tokens=41, tree=StaticTree((2, 2, 2, 2)))
    assert run.token_ids == plain.token_ids
    assert [(r.num_accepted, r.num_off_path) for r in run.rounds] == [(4, 4)] * 8


@pytest.mark.parametrize("name", ["draft_model", "eagle3"])
def test_a_tree_accepts_at_least_what_the_chain_within_it_would(target: FrozenTarget, name: str) -> None:
    """A static tree's first branch is the chain: the draft's best tokens."""
    watched, chain = Watched(proposer_of(name, target)), proposer_of(name, target)
    run = Decoder(target, watched).generate(PROMPT, max_new_tokens=60, tree=StaticTree((3, 2, 1)))
    text, gained = [*PROMPT, run.token_ids[0]], 0
    whole = [*PROMPT, *run.token_ids]
    for r, proposal in zip(run.rounds, watched.proposals, strict=True):
        assert proposal.tree is not None
        first = [proposal.tokens[node] for node in proposal.tree.prolonged([])]
        if isinstance(chain, DraftModelProposer):
            chain.begin(len(text) + 3)
            with torch.inference_mode():
                assert chain.propose(DecodingState(text), 3, GREEDY, None).tokens == first
        following = whole[len(text) :]
        alone = next((n for n, token in enumerate(first) if following[n : n + 1] != [token]), len(first))
        assert r.num_accepted >= alone
        gained += r.num_accepted - alone
        text += r.emitted
    assert gained > 0 or name != "draft_model"  # none of an untrained head's draft tokens is accepted


@pytest.mark.parametrize("name", ["draft_model", "draft_model, other vocabulary", "eagle3, pruned"])
@pytest.mark.parametrize("shape", [DynamicTree(budget=4, depth=4, top_k=1), StaticTree((1, 1, 1, 1))])
def test_a_tree_of_one_branch_is_the_chain(target: FrozenTarget, name: str, shape: StaticTree | DynamicTree) -> None:
    chain = Decoder(target, proposer_of(name, target)).generate(PROMPT, max_new_tokens=40, num_speculative_tokens=4)
    tree = Decoder(target, proposer_of(name, target)).generate(PROMPT, max_new_tokens=40, tree=shape)
    rounds = [[(r.drafted, r.num_accepted, r.emitted, r.num_off_path) for r in run.rounds] for run in (chain, tree)]
    assert rounds[0] == rounds[1]


# --- Ends


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5])
def test_the_length_limit_cuts_an_accepted_path(target: FrozenTarget, max_new_tokens: int) -> None:
    plain = Decoder(target).generate(PROMPT, max_new_tokens=20)
    oracle = OracleTree([*PROMPT, *plain.token_ids])
    run = Decoder(target, oracle).generate(PROMPT, max_new_tokens=max_new_tokens, tree=StaticTree((2, 2, 2, 2)))
    assert run.token_ids == plain.token_ids[:max_new_tokens]
    assert sum(r.num_accepted for r in run.rounds) <= max_new_tokens - 1
    assert not run.stopped


def test_a_stop_token_within_a_path_ends_the_text(target: FrozenTarget) -> None:
    plain = Decoder(target).generate(PROMPT, max_new_tokens=20)
    stop = plain.token_ids[6]
    first = plain.token_ids.index(stop)
    model = tiny_target_model()
    model.generation_config.eos_token_id = stop
    oracle = OracleTree([*PROMPT, *plain.token_ids])
    run = Decoder(FrozenTarget(model, tiny_tokenizer(), name="tiny"), oracle).generate(
        PROMPT, max_new_tokens=20, tree=StaticTree((2, 2, 2, 2))
    )
    assert run.token_ids == plain.token_ids[: first + 1] and run.stopped
    assert sum(r.num_accepted for r in run.rounds) <= first


def test_a_draft_at_the_end_of_its_context_drafts_fewer_levels(target: FrozenTarget) -> None:
    plain = Decoder(target).generate(PROMPT, max_new_tokens=250)
    proposer = DraftModelProposer(half_right(target), target_max_length=target.max_length)
    run = Decoder(target, proposer).generate(PROMPT, max_new_tokens=250, tree=DynamicTree(budget=6, depth=4, top_k=2))
    assert run.token_ids == plain.token_ids


def test_near_ties_are_broken_on_every_branch_that_is_taken() -> None:
    """Every token has a twin a few roundings away, and the draft, which is the target, proposes both."""
    target = twins()
    plain = Decoder(target).generate(PROMPT, max_new_tokens=40).token_ids
    draft = LlamaForCausalLM(target.model.config).eval()
    draft.load_state_dict(target.model.state_dict())
    run = Decoder(target, DraftModelProposer(draft)).generate(PROMPT, max_new_tokens=40, tree=StaticTree((2, 2, 2)))
    assert run.token_ids == plain
    assert all(r.num_accepted == 3 for r in run.rounds[:-1])


# --- Sampling


def draws(decoder: Decoder, shape: StaticTree | DynamicTree | None, seed: int) -> Counter[tuple[int, ...]]:
    """How often each (first, second, third token) was sampled."""
    options: dict[str, Any] = {
        "tree": shape,
        "sampling": Sampling(temperature=0.7, top_k=3),
        "generator": torch.Generator().manual_seed(seed),
    }
    return Counter(decoder.generate(PROMPT, max_new_tokens=3, **options).token_ids for _ in range(150))


@pytest.fixture(scope="module")
def plain_draws(target: FrozenTarget) -> Counter[tuple[int, ...]]:
    return draws(Decoder(target), None, seed=0)


@pytest.mark.parametrize("name", ["draft_model", "eagle3, pruned"])
@pytest.mark.parametrize("shape", [DynamicTree(budget=4, depth=2, top_k=2), StaticTree((2, 2))])
def test_sampled_text_follows_the_targets_distribution(
    target: FrozenTarget, plain_draws: Counter[tuple[int, ...]], name: str, shape: StaticTree | DynamicTree
) -> None:
    both = plain_draws, draws(Decoder(target, proposer_of(name, target)), shape, seed=1)
    keys = sorted(both[0].keys() | both[1].keys())
    assert chi2_contingency([[counts[key] for key in keys] for counts in both]).pvalue > 0.01


def test_a_target_that_drafts_for_itself_loses_nothing_by_drawing(target: FrozenTarget) -> None:
    """p = q: the first child of every node stands. And which kind of tree carries a distribution."""
    watched = Watched(DraftModelProposer(target.model))
    options: dict[str, Any] = {"sampling": Sampling(1.0), "generator": torch.Generator().manual_seed(0)}
    run = Decoder(target, watched).generate(PROMPT, max_new_tokens=41, tree=STATIC, **options)
    assert [r.num_accepted for r in run.rounds[:-1]] == [3] * (len(run.rounds) - 1)
    assert all(proposal.probabilities is not None for proposal in watched.proposals)
    assert candidates_are_drawn(Sampling(1.0), STATIC) and not candidates_are_drawn(GREEDY, STATIC)
    watched = Watched(DraftModelProposer(target.model))
    Decoder(target, watched).generate(PROMPT, max_new_tokens=8, tree=DYNAMIC, **options)
    assert all(proposal.probabilities is None for proposal in watched.proposals)
    assert not candidates_are_drawn(Sampling(1.0), DYNAMIC)


def test_a_law_of_few_tokens_gives_few_children(target: FrozenTarget) -> None:
    watched = Watched(DraftModelProposer(half_right(target)))
    sampling, generator = Sampling(1.0, top_k=2), torch.Generator().manual_seed(0)
    run = Decoder(target, watched).generate(PROMPT, max_new_tokens=20, tree=STATIC, sampling=sampling, generator=generator)
    assert {len(proposal.tokens) for proposal in watched.proposals} == {2 + 4 + 4}
    assert {len(r.drafted) + r.num_off_path for r in run.rounds} == {10}


# --- What cannot work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 3, "depth": 4, "top_k": 2}, r"eval\.tree\.budget: got 3, expected from 4, the depth, to 14"),
        ({"budget": 15, "depth": 4, "top_k": 2}, r"eval\.tree\.budget: got 15, expected from 4, the depth, to 14"),
        ({"budget": 4, "depth": 4, "top_k": 0}, r"eval\.tree\.top_k: got 0, expected 1 or more"),
        ({"budget": 4, "depth": 0, "top_k": 2}, r"eval\.tree\.depth: got 0, expected 1 or more"),
        ({"budget": 4, "depth": 2}, r"eval\.tree\.top_k: got nothing"),
        ({}, r"eval\.tree\.budget: got nothing.*budget, depth and top_k, or branching"),
        ({"branching": [4, 2], "depth": 2}, r"eval\.tree\.branching: got a static tree with depth"),
        ({"branching": []}, r"eval\.tree\.branching: got \[\]"),
        ({"branching": [2, 0]}, r"eval\.tree\.branching: got \[2, 0\]"),
        ({"branching": [32, 32, 2]}, r"eval\.tree\.branching: got \[32, 32, 2\], 3104 nodes, expected at most 1024"),
    ],
)
def test_forms_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tree_shape(**options)


def test_forms_are_what_a_recipe_says() -> None:
    assert tree_shape(budget=9, depth=4, top_k=3) == DYNAMIC and tree_shape(branching=[3, 2, 1]) == STATIC
    for shape in (DYNAMIC, STATIC):
        assert tree_shape(**shape.settings) == shape  # type: ignore[arg-type]
    assert DYNAMIC.cut(1) == replace(DYNAMIC, depth=1, budget=3) and STATIC.cut(2) == StaticTree((3, 2))


@pytest.mark.parametrize(
    ("proposer", "message"),
    [
        (lambda target: NgramProposer(), r"eval\.tree: got a tree for NgramProposer, which drafts chains only"),
        (lambda target: HeadProposer(build_eagle3(target, sliding_window=3)), r"eval\.tree\.depth: got 4 steps.*at most 3"),
        (
            lambda target: DraftModelProposer(target.model, confidence_threshold=0.5),
            r"eval\.confidence_threshold: got 0\.5 with a tree",
        ),
    ],
)
def test_proposers_that_cannot_draft_the_tree_are_refused(target: FrozenTarget, proposer: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Decoder(target, proposer(target)).generate(PROMPT, max_new_tokens=8, tree=DYNAMIC)


def test_proposers_of_trees_are_known_by_what_they_can() -> None:
    assert issubclass(HeadProposer, TreeProposer) and issubclass(DraftModelProposer, TreeProposer)
    assert not issubclass(NgramProposer, TreeProposer)
