from dataclasses import replace

import numpy as np
import pytest

from specdistill.common.errors import UserError
from specdistill.evaluation.report.build import build_result_rows
from specdistill.evaluation.statistics.metrics import (
    METRICS,
    collect_prompt_sums,
    compute_value,
    find_long_context_start,
    group_rounds_by_context,
)
from specdistill.evaluation.statistics.records import (
    Configuration,
    PromptRecord,
    read_records,
    select_records,
    write_records,
)
from specdistill.serving.engines.client import ServerCounts
from tests.refusals import refused
from tests.rounds import record
from tests.simulated import SUITE, as_from_server, simulate


def test_records_survive_the_file(tmp_path):
    odd = PromptRecord(
        **{**vars(simulate(1)[0]), "text": "line separator \u2028, \x85 and <|end|>"}
    )
    path = tmp_path / "samples.jsonl"
    served = [
        as_from_server(record, with_baseline=record.id.startswith("chat")) for record in simulate(4)
    ]
    write_records([odd, *simulate(3), *served], path)
    assert read_records(path, "report") == [odd, *simulate(3), *served]


def test_a_servers_counts_give_the_drafts_that_its_rounds_give():
    measured = record([(4, 2), (0, 0), (4, 4), (3, 0), (4, 2)])
    assert measured.list_drafts() == [(4, 2), (4, 4), (3, 0), (4, 2)]
    assert measured.token_ids == (7,) * 14
    counts = ServerCounts(
        (),
        num_drafts=4,
        num_draft_tokens=15,
        num_accepted_tokens=8,
        accepted_per_position=(3, 3, 1, 1),
    )
    served = replace(measured, rounds=(), counts=counts)
    assert served.list_drafts() == [(4, 4), (4, 2), (4, 2), (3, 0)]
    assert served.token_ids == ()
    assert replace(served, counts=replace(counts, num_drafts=0)).list_drafts() == []


@pytest.mark.parametrize("content", [None, '{"id": 1}\n', "not json\n", "[]\n"])
def test_a_file_without_records_is_refused(tmp_path, content):
    path = tmp_path / "samples.jsonl"
    if content:
        path.write_text(content)
    with refused("baseline", path):
        read_records(path, "baseline")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "caf\xe9"}' * 1000, "after 2 records: line 3: byte 0xe9, which is not UTF-8"),
        (b'{"suite": "s"}', "after 2 records: .* validation error"),
        (
            b'{"num_prompt_tokens": -1}',
            (
                "after 2 records: (?s:.*)num_prompt_tokens\\s+Input should be greater than or equal"
                " to 1"
            ),
        ),
        (b'{"suite": NaN}', "after 2 records: line 3: NaN, which is not a number"),
    ],
)
def test_a_broken_record_is_named_in_a_few_words(tmp_path, line, message):
    path = tmp_path / "samples.jsonl"
    write_records(simulate(2)[:2], path)
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(UserError, match=message) as caught:
        read_records(path, "baseline")
    assert len(str(caught.value)) < 4000


@pytest.mark.parametrize(
    ("name", "value"), [("seconds", "0"), ("seconds", "1e999"), ("num_tokens", "0")]
)
def test_a_record_without_a_speed_is_refused(tmp_path, name, value):
    path, (cold,) = tmp_path / "samples.jsonl", simulate(1)
    write_records([replace(cold, speculative=replace(cold.speculative, **{name: 123456}))], path)
    path.write_text(path.read_text().replace("123456", value))
    with refused("report", path):
        read_records(path, "report")


def test_a_row_selects_its_own_records():
    cold = simulate(4)
    warm = [replace(record, configuration=Configuration(4, 1.0)) for record in cold]
    rows = [
        row
        for configuration, records in ((Configuration(4), cold), (Configuration(4, 1.0), warm))
        for row in build_result_rows(records, SUITE, configuration, seed=0)
    ]
    assert select_records(rows[0], [*cold, *warm]) == cold
    (chat,) = [row for row in rows if row["category"] == "chat" and row["temperature"] == 1.0]
    assert select_records(chat, [*cold, *warm]) == [
        record for record in warm if record.category == "chat"
    ]


def test_the_nodes_beside_a_tree_s_path_are_drafted_tokens_too(tmp_path):
    tree = record([(4, 2), (3, 0)])
    tree = replace(tree, rounds=tuple(replace(entry, num_off_path=9) for entry in tree.rounds))
    table = collect_prompt_sums([tree])
    assert (table["num_drafts"], table["num_draft_tokens"], table["num_accepted_tokens"]) == (
        [2],
        [4 + 9 + 3 + 9],
        [2],
    )
    path = tmp_path / "samples.jsonl"
    write_records([tree], path)
    assert read_records(path, "report") == [tree]
    path.write_text(path.read_text().replace(', "num_off_path": 9', ""))
    assert [entry.num_drafted for entry in read_records(path, "report")[0].rounds] == [4, 3]


def test_rounds_without_drafted_tokens_do_not_count_as_drafts():
    table = collect_prompt_sums([record([(4, 2), (0, 0), (4, 4)])])
    names = ("num_drafts", "num_rounds", "num_draft_tokens", "num_accepted_tokens")
    assert [table[name] for name in names] == [2, 3, 8, 6]


def test_the_context_of_a_round_counts_the_tokens_before_it():
    def group_by_context(num_prompt_tokens):
        return group_rounds_by_context(
            [record([(4, 2), (0, 0), (4, 4), (4, 0)], num_prompt_tokens=num_prompt_tokens)]
        )

    # Contexts of 11, 15 and 20: 10 + first token; + 3 + 1 (nothing drafted in between); + 5.
    assert (group_by_context(10), group_by_context(11)) == (
        {8: [3, 1, 5], 16: [1]},
        {8: [3, 1], 16: [5, 1]},
    )
    assert (group_by_context(21), group_by_context(22)) == (
        {16: [3, 1, 5, 1]},
        {16: [3, 1, 5], 32: [1]},
    )


def test_buckets_are_powers_of_two():
    by_context = {
        context: [*group_rounds_by_context([record([(4, 2)], context - 1)])]
        for context in (1, 2, 3, 255, 256, 257)
    }
    assert by_context == {1: [1], 2: [2], 3: [2], 255: [128], 256: [256], 257: [256]}


@pytest.mark.parametrize(
    ("num_short", "num_long", "start"), [(30, 30, 256), (29, 30, None), (30, 29, None)]
)
def test_long_contexts_begin_with_the_highest_bucket_of_thirty_rounds_above_thirty(
    num_short, num_long, start
):
    short, long = (
        record([(4, 2), (4, 1)][:number], context - 1) for number, context in ((1, 128), (2, 256))
    )
    records = (
        [short] * num_short
        + [long] * (num_long // 2)
        + [replace(long, rounds=long.rounds[:1])] * (num_long % 2)
    )
    assert find_long_context_start(records) == start
    assert find_long_context_start([*records, *[record([(4, 2)], 511)] * 30]) == 512
    table = collect_prompt_sums(records)
    if start is None:
        assert np.isnan(table["num_rounds_long"]).all()
    else:
        assert table["num_rounds_long"].tolist() == [0] * 30 + [2] * 15
        assert table["num_emitted_short"].tolist() == [3] * 30 + [0] * 15
        assert compute_value(METRICS["context_ratio"], table) == pytest.approx((1 + 1.5) / (1 + 2))
