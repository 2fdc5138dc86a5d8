"""A stream gives every row once per epoch, in one order for any number of ranks, and goes on where a run stopped."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset
from rows import streaming
from rows.batches import FIRST_ROW, Share
from rows.formats import row_of
from rows.sources import open_stream
from rows.streaming import Stream, Tokenised, stream_steps
from rows.tokenizing import as_columns, tokenize_window
from token_rows import toy_tokenizer, write

STEPS = list(itertools.product((1, 2, 3), (1, 2), (7, 8, 23)))


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "WINDOW", 5)


def numbers(count: int, packed_length: int = 0) -> Stream:
    """Records 0, 1, 2, ...; each becomes a row of its number, twice."""

    def tokenise(records: list[int], first: int) -> Tokenised:
        assert records == list(range(first, first + len(records)))
        return [{"input_ids": [number, number], "labels": [number, number]} for number in records], Counter(), []

    return Stream(lambda: iter(range(count)), tokenise, packed_length)


def take(stream: Stream, epochs: int, rank: int, world: int, micro: int, **position: int) -> list[tuple[list, dict]]:
    """(numbers seen per micro-batch, position) of each step, up to the end of an epoch."""
    steps = []
    for batches, after, _ in stream_steps(
        stream, Share(micro, 2, rank, world), position or FIRST_ROW, seed=0, pad_token_id=99
    ):
        seen = [b["input_ids"][:, 0].tolist() if (b["labels"][:, 1:] != -100).any() else [] for b in batches]
        steps.append((seen, after))
        if after["epoch"] == epochs:
            return steps
    raise AssertionError("a stream has no end")


@pytest.mark.parametrize(("world", "micro", "count"), STEPS)
def test_every_record_is_seen_once_per_epoch_and_all_ranks_take_as_many_micro_batches(
    world: int, micro: int, count: int
) -> None:
    ranks = [take(numbers(count), 2, rank, world, micro) for rank in range(world)]
    assert len({len(steps) for steps in ranks}) == 1
    for epoch in (0, 1):
        seen = []
        for step in zip(*ranks):
            assert len({len(batches) for batches, _ in step}) == 1
            after = step[0][1]
            is_in = (after["epoch"] == epoch and after["rows_seen"]) or after == {"epoch": epoch + 1, "rows_seen": 0}
            seen += [n for batches, _ in step if is_in for batch in batches for n in batch]
        assert sorted(seen) == list(range(count))


def test_order_is_that_of_one_rank_and_resumes_at_any_step_on_any_number_of_ranks() -> None:
    alone = [n for batches, _ in take(numbers(23), 1, 0, 1, 4) for batch in batches for n in batch]
    assert alone != sorted(alone)
    halves = [take(numbers(23), 1, rank, 2, 2) for rank in range(2)]
    together = [n for step in zip(*halves) for pair in zip(*(batches for batches, _ in step)) for b in pair for n in b]
    assert together == alone
    position = take(numbers(23), 1, 0, 1, 2)[2][1]
    rest = [n for batches, _ in take(numbers(23), 1, 0, 1, 3, **position) for batch in batches for n in batch]
    assert rest == alone[position["rows_seen"] :]


def test_rows_are_numbered_in_the_order_of_the_epoch() -> None:
    order = [n for batches, _ in take(numbers(23), 1, 0, 1, 4) for batch in batches for n in batch]
    seen_by_all = []
    for rank in range(2):
        for (batches, _, row_numbers), _ in zip(
            stream_steps(numbers(23), Share(2, 2, rank, 2), seed=0, pad_token_id=99), range(3)
        ):
            seen = [ids for batch, of_batch in zip(batches, row_numbers) for ids in batch["input_ids"] if of_batch]
            assert [order[n] for of_batch in row_numbers for n in of_batch] == [ids[0].item() for ids in seen]
            seen_by_all += [n for of_batch in row_numbers for n in of_batch]
    assert sorted(seen_by_all) == list(range(23))


def test_stream_is_packed_window_by_window() -> None:
    batches, _, _ = next(stream_steps(numbers(10, packed_length=6), Share(1, 2, 0, 1), seed=0, pad_token_id=99))
    assert len(batches) == 2
    assert all(
        batch["position_ids"][0].tolist()[:4] == [0, 1, 0, 1] and "attention_mask" not in batch for batch in batches
    )


def broken_at(first_bad: int, error: Exception, is_reading: bool) -> Stream:
    """Records that cannot be read, or made into rows, from one on."""

    def open_records() -> Iterator[int]:
        yield from range(first_bad)
        if is_reading:
            raise error
        yield from range(first_bad, 20)

    def tokenise(records: list[int], first: int) -> Tokenised:
        if any(record >= first_bad for record in records):
            raise error
        return [{"input_ids": [1, 1], "labels": [1, 1]} for _ in records], Counter(), []

    return Stream(open_records, tokenise)


@pytest.mark.parametrize("is_reading", [False, True])
@pytest.mark.parametrize("error", [ValueError("a.jsonl, line 7: is not JSON"), OSError("a.jsonl: the disk is gone")])
def test_error_in_the_middle_ends_with_one_message(error: Exception, is_reading: bool) -> None:
    steps = stream_steps(broken_at(7, error, is_reading), Share(1, 1, 0, 1), seed=0, pad_token_id=99)
    with pytest.raises(SystemExit) as stopped:
        for _ in range(10):
            next(steps)
    assert stopped.value.code.strip() == f"Error: {error}"  # which Python prints


def test_error_that_another_rank_meets_names_that_rank() -> None:
    with pytest.raises(SystemExit) as stopped:
        next(stream_steps(broken_at(2, OSError("no such disk"), True), Share(1, 1, 3, 4), seed=0, pad_token_id=99))
    assert stopped.value.code.strip() == "Error: rank 3: no such disk"


def losing(count: int, problem_at: int, lost: set[int], max_lost: float = 1.0) -> Stream:
    """Records of which one is bad and some lose their answer."""

    def tokenise(records: list[int], first: int) -> Tokenised:
        kept = [number for number in records if number != problem_at and number not in lost]
        rows = [{"input_ids": [number, number], "labels": [number, number]} for number in kept]
        counts = Counter({"lost": len(lost & set(records))})
        return rows, counts, [f"a.jsonl, line {problem_at + 1}: is bad"] * (problem_at in records)

    return Stream(lambda: iter(range(count)), tokenise, 0, max_lost)


def test_rows_that_are_left_out_are_reported_by_rank_0_once(capsys: pytest.CaptureFixture) -> None:
    take(losing(20, 7, {12, 13}), 3, 0, 2, 1)
    assert capsys.readouterr().out.splitlines() == [
        "train data: of the first 10 rows of the stream, 1 bad row(s) left out",
        "- a.jsonl, line 8: is bad",
        "train data: of the first 15 rows of the stream, 1 bad row(s) left out, "
        "2 lost their whole answer to --max_length",
    ]
    take(losing(20, 7, {12, 13}), 1, 1, 2, 1)
    assert capsys.readouterr().out == ""


def test_many_lost_rows_stop_a_stream_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(take(losing(20, 99, {0, 1}, 0.1), 1, 0, 1, 1)) == 9  # a tenth, though two fifths of the first window
    for enough, lost in ((10, {0, 5}), (1000, {0, 1, 2})):  # as soon as enough is read, or at the end
        monkeypatch.setattr(streaming, "ENOUGH_READ", enough)
        with pytest.raises(SystemExit) as stopped:
            take(losing(18, 99, lost, 0.1), 1, 0, 1, 1)
        error = stopped.value.code
        assert f"of the first {min(enough, 18)} rows of the stream, {len(lost)} lost their whole answer" in error
        assert "More than 10% would not be learnt (--allow_lost_rows)" in error
        assert take(losing(18, 99, lost), 1, 0, 1, 1)


def test_window_of_real_rows_counts_what_it_leaves_out() -> None:
    rows = [{"prompt": "a" * 30, "completion": "b"}, {"prompt": "a"}, {"prompt": "a", "completion": "b"}]
    options = 8, "keep_start", True, True, False
    kept, counts, problems = tokenize_window(
        rows, 40, tokenizer=toy_tokenizer(), columns={}, options=options, skip_bad_rows=True
    )
    assert (len(kept), counts["lost"], counts["bad"]) == (1, 1, 1)
    assert len(problems) == 1 and problems[0].startswith("row 42: the column")
    with pytest.raises(ValueError, match="1 bad row"):
        tokenize_window(rows, 40, tokenizer=toy_tokenizer(), columns={}, options=options, skip_bad_rows=False)


def test_files_and_folders_are_streamed_split_by_split(tmp_path: Path) -> None:
    for name in ("train-0", "train-1", "test"):
        write(tmp_path, f"{name}.jsonl", "".join(json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(2)))

    def texts(split: str) -> list[Any]:
        return [json.loads(r["_row"])["text"] for r in open_stream([str(tmp_path)], split, "train")]

    assert texts("train") == ["train-0 0", "train-0 1", "train-1 0", "train-1 1"]
    assert texts("test") == ["test 0", "test 1"]


def test_column_that_only_later_records_have_is_kept() -> None:
    assert as_columns([{"a": 1}, {"a": 2, "b": 3}]) == {"a": [1, 2], "b": [None, 3]}


def test_window_of_mixed_sources_keeps_every_row(tmp_path: Path) -> None:
    Dataset.from_list([{"text": "p"}]).to_parquet(tmp_path / "a.parquet")
    Dataset.from_list([{"text": "s"}]).save_to_disk(tmp_path / "saved")
    names = [str(write(tmp_path, "a.jsonl", '{"text": "j"}\n')), str(tmp_path / "a.parquet"), str(tmp_path / "saved")]
    columns = as_columns(list(open_stream(names, "train", "train")))
    records = [{name: values[i] for name, values in columns.items()} for i in range(3)]
    assert [row_of(record, 0, {})[0] for record in records] == [{"text": "j"}, {"text": "p"}, {"text": "s"}]


def test_record_whose_row_column_another_record_filled_in_is_read_by_its_own_columns() -> None:
    columns = as_columns([{"_row": '{"text": "a"}', "_where": "f, line 1", "_problem": ""}, {"text": "b"}])
    records = [{name: values[i] for name, values in columns.items()} for i in range(2)]
    assert [row_of(record, 1, {})[:2] for record in records] == [({"text": "a"}, "f, line 1"), ({"text": "b"}, "row 2")]


def test_parquet_is_streamed_without_a_copy_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    Dataset.from_list([{"text": str(i)} for i in range(2500)]).to_parquet(tmp_path / "a.parquet")
    before = sorted(tmp_path.rglob("*"))
    rows = list(open_stream([str(tmp_path / "a.parquet")], "train", "train"))
    assert [json.loads(row["_row"])["text"] for row in rows] == [str(i) for i in range(2500)]
    assert rows[-1]["_where"] == f"{tmp_path / 'a.parquet'}, row 2500" and sorted(tmp_path.rglob("*")) == before
