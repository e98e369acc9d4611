"""Trees in decoding of tiny targets: separate branches, the target's own text, valid shapes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from specdistill.decoding.decoder import Decoder
from specdistill.decoding.proposer import DecodingState, Proposal
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.sequence import Generation
from specdistill.decoding.transformers_models import check_reads_trees, keep_path, run_target
from specdistill.decoding.tree import (
    ROOT,
    DynamicTree,
    StaticTree,
    Tree,
    TreePass,
    build_tree_shape,
)
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.recipe.sections import TreeConfig
from specdistill.targets.frozen import FrozenTarget
from tests import mtp_targets
from tests.draft_models import half_right
from tests.proposers import SHAPES, Oracle, ngram_proposer, proposer_of
from tests.refusals import refused
from tests.tiny import qwen, tiny_target_model, tiny_tokenizer, twins

PROMPT = [5, 9, 5, 9, 20, 31]
DIAGRAM = Tree((ROOT, ROOT, 0, 0, 1))  # a, b; c and d after a; e after b
DYNAMIC = DynamicTree(budget=9, depth=4, top_k=3)
STATIC = StaticTree((3, 2, 1))
GREEDY = Sampling()


class ProposalRecorder:
    """A proposer that records the proposals of another one."""

    def __init__(self, proposer: Any) -> None:
        self.proposer = proposer
        self.proposals: list[Proposal] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.proposer, name)

    def propose_tree(self, *arguments: Any) -> list[Proposal]:
        proposals = self.proposer.propose_tree(*arguments)
        self.proposals += proposals
        return proposals


NAMES = ("draft_model", "draft_model, of transformers", "draft_model, other vocabulary", *SHAPES)
BLOCKS = ("dflash", "dspark", "dspark, rnn", "pard")

# --- Shapes


def test_the_tree_of_the_diagram_has_its_children_and_masks() -> None:
    assert DIAGRAM.children == {ROOT: [0, 1], 0: [2, 3], 1: [4], 2: [], 3: [], 4: []}
    assert (
        DIAGRAM.extend_to_leaf([]) == [0, 2]
        and DIAGRAM.extend_to_leaf([1]) == [1, 4]
        and DIAGRAM.extend_to_leaf([0, 3]) == [0, 3]
    )
    step = TreePass.cover_trees([DIAGRAM], [3], torch.device("cpu"))
    assert step.positions == [[3, 4, 4, 5, 5, 5]]
    rows = ["111 100000", "111 110000", "111 101000", "111 110100", "111 110010", "111 101001"]
    assert step.build_mask(None)[0].int().tolist() == [
        [int(bit) for bit in row if bit != " "] for row in rows
    ]
    rows = ["011 100000", "001 110000", "001 101000", "000 110100", "000 110010", "000 101001"]
    assert step.build_mask(3)[0].int().tolist() == [
        [int(bit) for bit in row if bit != " "] for row in rows
    ]


def test_masks_of_levels_are_those_of_the_whole_tree() -> None:
    first = TreePass.begin_at_root([4, 7], torch.device("cpu")).add_level(
        torch.tensor([[0, 0]] * 2)
    )
    second = first.add_level(torch.tensor([[0, 0, 1]] * 2))
    whole = TreePass.cover_trees([DIAGRAM] * 2, [3, 6], torch.device("cpu"))
    for window in (None, 2, 3, 5):
        both = torch.cat(
            (torch.nn.functional.pad(first.build_mask(window), (0, 3)), second.build_mask(window)),
            1,
        )
        assert torch.equal(both, whole.build_mask(window)[:, 1:])


TABLE = {
    (): [0.6, 0.3, 0.1],
    (0,): [0.5, 0.4, 0.1],  # 0.30, 0.24
    (1,): [0.1, 0.0, 0.9],  # 0.27
    (0, 0): [0.9, 0.05, 0.05],  # 0.27
    (1, 2): [0.4, 0.3, 0.3],
    (2,): [0.2, 0.2, 0.6],
}


def make_table_draft() -> Any:
    """Return the root's logits and a function that expands levels, both from TABLE."""
    texts: list[tuple[int, ...]] = [()]

    def expand(index_1T: Tensor, rows_1T: Tensor) -> Tensor:
        nonlocal texts
        texts = [
            (*texts[row], token)
            for token, row in zip(index_1T[0].tolist(), rows_1T[0].tolist(), strict=True)
        ]
        return torch.tensor([[TABLE[text] for text in texts]]).log()

    return torch.tensor([TABLE[()]]).log(), expand


def test_a_dynamic_tree_keeps_the_most_probable_paths() -> None:
    # Of the second level 00 (0.30) and 12 (0.27) are expanded, not 01 (0.24).
    ((index_N, tree, probs_NW),) = DynamicTree(budget=6, depth=3, top_k=2).grow(
        *make_table_draft(), GREEDY, [None]
    )
    assert index_N.tolist() == [0, 1, 0, 1, 2, 0]
    assert tree.parents == (ROOT, ROOT, 0, 0, 1, 2)
    assert probs_NW is None
    ((index_N, _, _),) = DynamicTree(budget=4, depth=3, top_k=2).grow(
        *make_table_draft(), GREEDY, [None]
    )
    assert index_N.tolist() in ([0, 1, 0, 2], [0, 1, 0, 0])  # two of 0.27
    # At T = 1/4 probabilities go by their fourth powers: 0.94 of 0, 0.67 of 00 and 0.27 of 01,
    # before 0.06 of 1.
    ((index_N, tree, _),) = DynamicTree(budget=3, depth=2, top_k=2).grow(
        *make_table_draft(), Sampling(0.25), [None]
    )
    assert (index_N.tolist(), tree.parents) == ([0, 0, 1], (ROOT, 0, 0))


def test_a_static_tree_has_the_distribution_that_each_node_was_drawn_from() -> None:
    generator = torch.Generator().manual_seed(0)
    ((index_N, tree, probs_NW),) = StaticTree((2, 1)).grow(
        *make_table_draft(), Sampling(1.0), [generator]
    )
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, parent in enumerate(tree.parents):
        assert probs_NW is not None and probs_NW[node].tolist() == pytest.approx(
            TABLE[paths[parent]], abs=1e-6
        )
        paths[node] = (*paths[parent], int(index_N[node]))
    assert sorted(map(len, paths.values())) == [0, 1, 1, 2, 2]


# --- The target


def build_target(kind: str) -> FrozenTarget:
    if kind in mtp_targets.KINDS:
        return mtp_targets.tiny_target(kind)
    model = qwen() if kind == "windows" else tiny_target_model()
    model.set_attn_implementation("eager" if kind == "eager" else "sdpa")
    return FrozenTarget(model, tiny_tokenizer(), name=kind)


@pytest.mark.parametrize("kind", ["sdpa", "eager", "windows", "deepseek_v3"])
def test_a_pass_over_a_tree_reads_each_branch_as_it_reads_it_alone(kind: str) -> None:
    """The cache that remains after a path is also that of the path alone.

    Windows have 8 positions, and the text has 20. The model is in float64, because logits reach 18
    here, where the rounding of float32 is nearly as large as the tolerance.
    """
    target = build_target(kind)
    # torch's grouped product of experts has no float64
    target.model.double().set_experts_implementation("eager")
    text = [(7 * n) % 200 + 1 for n in range(20)]
    tokens = [50, 60, 70, 80, 90]
    layers = (1, 2)
    with torch.inference_mode():
        for path in ([0, 2], [0, 3], [1, 4], [1], []):
            cache, alone_cache = DynamicCache(), DynamicCache()
            run_target(target, [text[:-1]], cache)
            step = TreePass.cover_trees([DIAGRAM], [len(text) - 1], target.device)
            together = run_target(target, [[text[-1], *tokens]], cache, layers, step)
            branch = [tokens[node] for node in path]
            alone = run_target(target, [[*text, *branch]], alone_cache, layers)
            rows = [0, *(node + 1 for node in path)]
            path_features = together.at(torch.tensor([rows]))
            last = target.logits(alone.last_hidden)[:, len(text) - 1 :]
            assert_same(target.logits(path_features.last_hidden), last)
            for ours, theirs in zip(path_features.aux, alone.aux, strict=True):
                assert_same(ours, theirs[:, len(text) - 1 :])
            keep_path(cache, len(tokens), path)
            assert cache.get_seq_length() == alone_cache.get_seq_length()
            for ours, theirs in zip(cache.layers, alone_cache.layers, strict=True):
                assert_same(ours.keys, theirs.keys)
                assert_same(ours.values, theirs.values)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)


def test_targets_that_cannot_read_a_tree_are_refused(
    target: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused("eval.tree", "tiny qwen3_next, whose recurrent layers"):
        check_reads_trees(mtp_targets.tiny_target("qwen3_next"))
    check_reads_trees(target)
    plain = target.features
    for ignored in ("attention_mask", "position_ids_BT"):
        monkeypatch.setattr(
            target, "features", lambda *a, ignored=ignored, **o: plain(*a, **{**o, ignored: None})
        )
        with refused("eval.tree", "tiny, which does not compute the same hidden states"):
            check_reads_trees(target)
    monkeypatch.setattr(target.config, "_attn_implementation", "flash_attention_2")
    with refused("target.attn", "a tree with attention flash_attention_2"):
        check_reads_trees(target)


# --- The draft


def compute_forced_logits(
    proposer: Any, target: FrozenTarget, text: list[int], path: list[int]
) -> Tensor:
    """Return the draft's logits after `path`, read token by token from an empty cache."""
    if isinstance(proposer, DraftModelProposer):
        logits: Tensor = proposer.draft(input_ids=torch.tensor([[*text, *path]])).logits[0, -1]
        return logits
    head = proposer.draft
    proposer.begin([100])
    hidden = head.fuse(target.features(torch.tensor([text[:-1]]), head.aux_layers))
    next_ids = torch.tensor([text[1:]])
    for token in [*path, None]:
        normed, next_hidden = head(
            next_ids, hidden, proposer.cache.begin_chain([next_ids.shape[1]]), proposer.cache
        )
        next_ids, hidden = torch.tensor([[token or 0]]), next_hidden[:, -1:]
    return head.logits(normed[0, -1])


@pytest.mark.parametrize("name", [name for name in NAMES if "vocabulary" not in name])
@pytest.mark.parametrize("shape", [DYNAMIC, STATIC])
def test_a_level_is_drafted_as_each_of_its_branches_is_alone(
    target: FrozenTarget, name: str, shape: StaticTree | DynamicTree
) -> None:
    """After several rounds a node's children are still the best tokens after its own path."""
    recorder = ProposalRecorder(proposer_of(name, target))
    run = Decoder(target, recorder).generate(PROMPT, max_new_tokens=14, tree=shape)
    before_last = len(run.token_ids) - len(run.rounds[-1].emitted)
    text, proposal = [*PROMPT, *run.token_ids[:before_last]], recorder.proposals[-1]
    tree = proposal.tree
    assert tree is not None
    fresh = proposer_of(name, target)
    paths: dict[int, list[int]] = {ROOT: []}
    with torch.inference_mode():
        for node, parent in enumerate(tree.parents):
            paths[node] = [*paths[parent], proposal.tokens[node]]
        for node, children in tree.children.items():
            if children:
                best = (
                    compute_forced_logits(fresh, target, text, paths[node])
                    .topk(len(children))
                    .indices
                )
                ids = fresh.map_to_target(best) if isinstance(fresh, HeadProposer) else best
                assert [proposal.tokens[child] for child in children] == ids.tolist(), paths[node]


class OracleGuided(ProposalRecorder):
    """A head that drafts, while an oracle's tree is proposed.

    The right path of that tree is the last child of every node.
    """

    def __init__(self, proposer: Any, oracle: Oracle) -> None:
        super().__init__(proposer)
        self.oracle = oracle
        self.texts: list[list[int]] = []

    def propose_tree(self, state: DecodingState, *arguments: Any) -> list[Proposal]:
        self.texts += map(list, state.token_ids)
        super().propose_tree(state, *arguments)
        return self.oracle.propose_tree(state, *arguments)


@pytest.mark.parametrize("prompts", [[PROMPT], [PROMPT, [7], list(range(40, 60))]])
@pytest.mark.parametrize("name", ["eagle3", "eagle"])
def test_a_head_gets_the_features_of_the_accepted_path(
    target: FrozenTarget, name: str, prompts: list[list[int]]
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 17, "tree": StaticTree((2, 2, 2))}
    plain = [Decoder(target).generate(prompt, max_new_tokens=17).token_ids for prompt in prompts]
    oracle = Oracle(*([*prompt, *text] for prompt, text in zip(prompts, plain, strict=True)))
    guided = OracleGuided(proposer_of(name, target), oracle)
    if len(prompts) == 1:
        runs = [Decoder(target, guided).generate(PROMPT, **options)]
    else:
        runs = Decoder(target, guided).generate_all(prompts, **options)
    assert [[r.num_accepted for r in run.rounds] for run in runs] == [[3] * 4] * len(prompts)
    fresh: Any = proposer_of(name, target)
    for text, proposal in zip(guided.texts, guided.proposals, strict=True):
        with torch.inference_mode():
            best = fresh.map_to_target(
                compute_forced_logits(fresh, target, text, []).topk(2).indices
            )
        assert proposal.tokens[:2] == best.tolist()


@pytest.fixture(scope="module")
def plain(target: FrozenTarget) -> Generation:
    return Decoder(target).generate(PROMPT, max_new_tokens=16)


@pytest.mark.parametrize("name", [*NAMES, *BLOCKS])
@pytest.mark.parametrize("shape", [DYNAMIC, STATIC])
def test_greedy_output_is_the_plain_output(
    target: FrozenTarget, plain: Generation, name: str, shape: StaticTree | DynamicTree
) -> None:
    fast = Decoder(target, proposer_of(name, target)).generate(
        PROMPT, max_new_tokens=16, tree=shape
    )
    assert (
        fast.token_ids
        == plain.token_ids
        == (fast.token_ids[0], *(token for r in fast.rounds for token in r.emitted))
    )
    for r in fast.rounds:
        assert r.emitted[: r.num_accepted] == r.drafted[: r.num_accepted]
        assert len(r.emitted) in (r.num_accepted, r.num_accepted + 1)
        assert len(r.drafted) <= shape.depth
        assert len(r.drafted) + r.num_off_path == (
            shape.budget if isinstance(shape, DynamicTree) else 3 + 6 + 6
        )


@pytest.mark.parametrize(
    "name", ["draft_model", "draft_model, other vocabulary", "eagle3, pruned", *BLOCKS]
)
@pytest.mark.parametrize(
    "shape", [DynamicTree(budget=4, depth=4, top_k=1), StaticTree((1, 1, 1, 1))]
)
def test_a_tree_of_one_branch_is_the_chain(
    target: FrozenTarget, name: str, shape: StaticTree | DynamicTree
) -> None:
    chain = Decoder(target, proposer_of(name, target)).generate(
        PROMPT, max_new_tokens=14, num_speculative_tokens=4
    )
    tree = Decoder(target, proposer_of(name, target)).generate(
        PROMPT, max_new_tokens=14, tree=shape
    )
    rounds = [
        [(r.drafted, r.num_accepted, r.emitted, r.num_off_path) for r in run.rounds]
        for run in (chain, tree)
    ]
    assert rounds[0] == rounds[1]


# --- Near-ties


def test_near_ties_are_broken_on_every_branch_that_is_taken() -> None:
    """Every token has a twin a few roundings away, and the draft proposes both of them."""
    target = twins()
    plain = Decoder(target).generate(PROMPT, max_new_tokens=40).token_ids
    draft = LlamaForCausalLM(target.model.config).eval()
    draft.load_state_dict(target.model.state_dict())
    run = Decoder(target, DraftModelProposer(draft)).generate(
        PROMPT, max_new_tokens=40, tree=StaticTree((2, 2, 2))
    )
    assert run.token_ids == plain
    assert all(r.num_accepted == 3 for r in run.rounds[:-1])


# --- Sampling


def test_a_target_that_drafts_for_itself_accepts_every_first_child(target: FrozenTarget) -> None:
    """As p = q, the first child of every node is accepted."""
    recorder = ProposalRecorder(DraftModelProposer(target.model))
    options: dict[str, Any] = {
        "sampling": Sampling(1.0),
        "generator": torch.Generator().manual_seed(0),
    }
    run = Decoder(target, recorder).generate(PROMPT, max_new_tokens=41, tree=STATIC, **options)
    assert [r.num_accepted for r in run.rounds[:-1]] == [3] * (len(run.rounds) - 1)
    assert all(proposal.probabilities is not None for proposal in recorder.proposals)
    recorder = ProposalRecorder(DraftModelProposer(target.model))
    Decoder(target, recorder).generate(PROMPT, max_new_tokens=8, tree=DYNAMIC, **options)
    assert all(proposal.probabilities is None for proposal in recorder.proposals)


def test_a_distribution_of_few_tokens_gives_few_children(target: FrozenTarget) -> None:
    recorder = ProposalRecorder(DraftModelProposer(half_right(target)))
    sampling, generator = Sampling(1.0, top_k=2), torch.Generator().manual_seed(0)
    run = Decoder(target, recorder).generate(
        PROMPT, max_new_tokens=20, tree=STATIC, sampling=sampling, generator=generator
    )
    assert {len(proposal.tokens) for proposal in recorder.proposals} == {2 + 4 + 4}
    assert {len(r.drafted) + r.num_off_path for r in run.rounds} == {10}


# --- Refusals


@pytest.mark.parametrize(
    ("options", "key", "got"),
    [
        ({"budget": 3, "depth": 4, "top_k": 2}, "budget", 3),
        ({"budget": 15, "depth": 4, "top_k": 2}, "budget", 15),
        ({"budget": 4, "depth": 2}, "top_k", "nothing"),
        ({}, "budget", "nothing"),
        ({"branching": [4, 2], "depth": 2}, "branching", "a static tree with depth"),
        ({"branching": []}, "branching", []),
        ({"branching": [32, 32, 2]}, "branching", "[32, 32, 2], 3104 nodes"),
    ],
)
def test_invalid_tree_shapes_are_refused(options: dict[str, Any], key: str, got: object) -> None:
    with refused(f"eval.tree.{key}", got):
        build_tree_shape(TreeConfig(**options))


def test_a_recipe_determines_the_tree_shape() -> None:
    assert (
        build_tree_shape(TreeConfig(budget=9, depth=4, top_k=3)) == DYNAMIC
        and build_tree_shape(TreeConfig(branching=[3, 2, 1])) == STATIC
    )
    for shape in (DYNAMIC, STATIC):
        assert build_tree_shape(TreeConfig(**shape.settings)) == shape  # type: ignore[arg-type]
    # two candidates below the root, and then two for each of two nodes on three levels
    assert build_tree_shape(TreeConfig(budget=14, depth=4, top_k=2)).count_candidates(4) == 14
    assert DYNAMIC.cut(1) == replace(DYNAMIC, depth=1, budget=3) and STATIC.cut(2) == StaticTree(
        (3, 2)
    )


@pytest.mark.parametrize(
    ("proposer", "key", "got"),
    [
        (lambda target: ngram_proposer(), "tree", "a tree for LookupProposer"),
        (
            lambda target: HeadProposer(build_eagle3(target, sliding_window=3)),
            "tree.depth",
            "4 draft steps",
        ),
    ],
)
def test_proposers_that_cannot_draft_the_tree_are_refused(
    target: FrozenTarget, proposer: Any, key: str, got: str
) -> None:
    with refused(f"eval.{key}", got):
        Decoder(target, proposer(target)).generate(PROMPT, max_new_tokens=8, tree=DYNAMIC)
