"""A stream gives every row once per epoch, in one order for any number of ranks, and goes on where a run stopped."""

import itertools
import json
import multiprocessing
import os
import pickle
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import psutil
import pytest
import torch
from datasets import Dataset
from launching import Patience
from rows import files, sources, streaming
from rows.batches import FIRST_ROW, Share, Step
from rows.formats import row_of
from rows.prepare import prepare_data
from rows.sources import open_stream, unread_set, unread_stream
from rows.streaming import Gather, Part, Stream, Tokenised, read_parts, stream_steps
from rows.tokenizing import as_columns, tokenize_window
from token_rows import toy_tokenizer, write
from training.arguments import parse_arguments

STEPS = list(itertools.product((1, 2, 3), (1, 2), (7, 8, 23)))
FIRST_OF_NEXT = {"rows_seen": 0, "stream": {}}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "WINDOW", 5)


def opened(count: int, place: dict[str, int]) -> Iterator[int]:
    """Records 0, 1, 2, ... from a place on."""
    for number in range(place.get("next", 0), count):
        place["next"] = number + 1
        yield number


def numbers(count: int, packed_length: int = 0) -> Stream:
    """Records 0, 1, 2, ...; each becomes a row of its number, twice."""

    def tokenise(records: list[int], first: int) -> Tokenised:
        assert records == list(range(first, first + len(records)))
        return [{"input_ids": [number, number], "labels": [number, number]} for number in records], Counter(), []

    return Stream(partial(opened, count), tokenise, packed_length)


def uneven(count: int, packed_length: int = 0) -> Stream:
    """Records that become two rows, one, or none since they are bad or lost; all rows differ."""

    def tokenise(records: list[int], first: int) -> Tokenised:
        rows = [[2 * number, *[2 * number + part] * (1 + number % 3)] for number in records for part in range(2)]
        kept = [row for row in rows if (row[0] // 2) % 7 < 5 and (row[0] // 2) % 3 + 1 > row[1] % 2]
        problems = [f"record {number} is bad" for number in records if number % 7 == 5]
        counts = Counter({"lost": sum(number % 7 == 6 for number in records)})
        return [{"input_ids": row, "labels": row} for row in kept], counts, problems

    return Stream(partial(opened, count), tokenise, packed_length)


def with_the_others(stream: Stream, share: Share, position: dict[str, Any]) -> Gather:
    """An exchange with ranks that are played in this process, window by window."""
    ranks = [read_parts(stream, position, rank, share.world_size) for rank in range(share.world_size)]
    return lambda own: [own if rank == share.rank else next(parts) for rank, parts in enumerate(ranks)]


def take(
    stream: Stream, epochs: int, share: Share, position: dict[str, Any] = FIRST_ROW, is_shared: bool = True
) -> list[Step]:
    """Each step, up to the end of an epoch."""
    gather = with_the_others(stream, share, position) if is_shared and share.world_size > 1 else None
    steps = []
    for step in stream_steps(stream, share, position, seed=0, pad_token_id=99, gather=gather):
        steps.append(step)
        if step.position["epoch"] == epochs:
            return steps
    raise AssertionError("a stream has no end")


def seen(steps: list[Step]) -> list[list[list[list[int]]]]:
    """The tokens of each row with labels, of each micro-batch, of each step."""
    return [
        [
            [ids.tolist() for ids, labels in zip(batch["input_ids"], batch["labels"]) if (labels[1:] != -100).any()]
            for batch in step.micro_batches
        ]
        for step in steps
    ]


def in_order(ranks: list[list[Step]]) -> list[list[int]]:
    """The rows that some ranks see, in the global order; without what pads them."""
    found = []
    for step in zip(*map(seen, ranks), strict=True):
        for batches in zip(*step, strict=True):
            found += [[token for token in row if token != 99] for batch in batches for row in batch]
    return found


@pytest.mark.parametrize(("world", "micro", "count"), STEPS)
def test_every_record_is_seen_once_per_epoch_and_all_ranks_take_as_many_micro_batches(
    world: int, micro: int, count: int
) -> None:
    ranks = [take(numbers(count), 2, Share(micro, 2, rank, world)) for rank in range(world)]
    positions = [[step.position for step in steps] for steps in ranks]
    assert all(other == positions[0] for other in positions)
    ends = [number for number, after in enumerate(positions[0], start=1) if after["rows_seen"] == 0]
    assert len(ends) == 2 and positions[0][-1] == {"epoch": 2, **FIRST_OF_NEXT}
    for first, end in zip([0, ends[0]], ends):
        rows = in_order([steps[first:end] for steps in ranks])  # strict about the micro-batches of each step
        assert sorted(rows) == [[number, number] for number in range(count)]


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("packed_length", [0, 9])
@pytest.mark.parametrize("make", [numbers, uneven])
def test_order_is_that_of_one_rank_and_resumes_at_any_step_on_any_number_of_ranks(
    make: Callable[[int, int], Stream], packed_length: int, is_shared: bool
) -> None:
    stream = make(33, packed_length)
    steps = take(stream, 2, Share(3, 1, 0, 1))
    alone, size = in_order([steps]), 3
    assert len(alone) > 20 and alone[: len(alone) // 2] != sorted(alone[: len(alone) // 2])
    for world, micro in ((2, 1), (3, 1)):
        ranks = [take(stream, 2, Share(micro, 1, rank, world), is_shared=is_shared) for rank in range(world)]
        assert in_order(ranks) == alone
    for number in (2, len(steps) // 2 - 1, len(steps) - 3):
        position = json.loads(json.dumps(steps[number - 1].position))  # as a checkpoint keeps it
        ranks = [take(stream, 2, Share(1, 1, rank, 3), position, is_shared) for rank in range(3)]
        epoch_ends = sum(step.position["rows_seen"] == 0 for step in steps[:number])
        short = -len(alone[: len(alone) // 2]) % size if epoch_ends else 0  # the last step of the first epoch
        assert in_order(ranks) == alone[number * size - short :], position
        old = {name: position[name] for name in ("epoch", "rows_seen")}  # a checkpoint that does not say where to open
        assert in_order([take(stream, 2, Share(3, 1, 0, 1), old)]) == alone[number * size - short :]


def counting(stream: Stream) -> tuple[Stream, list[list[int]]]:
    """The stream, and the records that are tokenised of it, call by call, in this process."""
    calls: list[list[int]] = []

    def tokenise(records: list[int], first: int) -> Tokenised:
        calls.append(records)
        return stream.tokenise(records, first)

    return replace(stream, tokenise=tokenise), calls


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_ranks_share_the_tokenising_of_every_window_alike(count: int) -> None:
    tokenised = []
    for number in range(count):
        stream, calls = counting(uneven(23))
        for _ in itertools.takewhile(lambda part: part.epoch == 0, read_parts(stream, FIRST_ROW, number, count)):
            pass
        tokenised.append(calls[:5])
    for sizes in zip(*([len(call) for call in calls] for calls in tokenised)):
        assert max(sizes) - min(sizes) <= 1
    assert sorted(itertools.chain(*itertools.chain(*tokenised))) == list(range(23))


def test_resumed_rank_opens_at_the_window_that_was_open_and_tokenises_none_before_it() -> None:
    position = next(s for s in take(uneven(40), 1, Share(4, 1, 0, 1)) if s.position["rows_seen"] > 20).position
    window, place = position["stream"]["window"], position["stream"]["place"]
    assert window > 2 and place == {"next": 5 * window} and position["stream"]["taken"] < 5 * 2
    stream, calls = counting(uneven(40))
    next(read_parts(stream, position, 0, 1))
    assert calls == [list(range(5 * window, 5 * window + 5))]
    stream, calls = counting(uneven(40))
    next(read_parts(stream, {name: position[name] for name in ("epoch", "rows_seen")}, 0, 1))
    assert calls == [[0, 1, 2, 3, 4]]  # where a checkpoint does not say where to open


def test_process_beside_a_rank_is_a_bounded_number_of_windows_ahead_and_ends_with_the_steps() -> None:
    tokenised = multiprocessing.Value("i", 0)
    plain = numbers(1000)

    def tokenise(records: list[int], first: int) -> Tokenised:
        tokenised.value += len(records)
        return plain.tokenise(records, first)

    before = set(multiprocessing.active_children())
    steps = stream_steps(replace(plain, tokenise=tokenise), Share(1, 1, 0, 1), seed=0, pad_token_id=99)
    next(steps)
    (process,) = set(multiprocessing.active_children()) - before
    at_most = 5 * (1 + streaming.AHEAD + 1)  # taken, waiting, and one that is ready to
    patience = Patience(process.pid)
    while tokenised.value < at_most:
        assert not patience.is_over()
        time.sleep(0.01)
    for _ in range(4):
        next(steps)  # of the same window; the next one is taken with the last of them
    assert tokenised.value <= at_most + 5
    steps.close()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def ended(queue: Any) -> None:
    """A rank that is killed while the process beside it is ahead."""
    steps = stream_steps(numbers(1000), Share(1, 1, 0, 1), seed=0, pad_token_id=99)
    next(steps)
    queue.put([child.pid for child in multiprocessing.active_children()])
    time.sleep(3600)


def test_process_beside_a_rank_ends_when_the_rank_is_killed() -> None:
    queue = multiprocessing.Queue()
    rank = multiprocessing.Process(target=ended, args=(queue,))
    rank.start()
    (beside,) = queue.get()
    process = psutil.Process(beside)
    assert process.is_running()
    rank.kill()
    assert psutil.wait_procs([process], timeout=60)[0]


def test_process_beside_a_rank_that_is_killed_ends_the_rank_with_what_happened() -> None:
    def tokenise(records: list[int], first: int) -> Tokenised:
        if first == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return numbers(20).tokenise(records, first)

    steps = stream_steps(replace(numbers(20), tokenise=tokenise), Share(1, 1, 0, 1), seed=0, pad_token_id=99)
    with pytest.raises(SystemExit, match=r"reads the stream has ended \(exit code -9"):
        for _ in range(6):
            next(steps)


def test_stream_of_a_run_can_be_handed_to_a_process_that_is_not_forked(tmp_path: Path) -> None:
    words = f"--model_name_or_path toy --dataset_name {written_in_every_way(tmp_path)[0]} --streaming --max_steps 1"
    arguments = parse_arguments([*words.split(), "--skip_bad_rows", "--output_dir", str(tmp_path / "run")])
    stream = prepare_data(arguments, toy_tokenizer(), 0, 1).stream
    again = pickle.loads(pickle.dumps(stream))
    found, expected = (next(read_parts(one, FIRST_ROW, 1, 2)) for one in (again, stream))
    assert len(found.rows) == 3 and found == expected


def test_training_draws_the_same_random_numbers_beside_a_stream() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    take(numbers(23), 1, Share(1, 1, 0, 1))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_rows_are_numbered_in_the_order_of_the_epoch() -> None:
    order = [row[0] for row in in_order([take(numbers(23), 1, Share(4, 2, 0, 1))])]
    all_numbers = []
    for rank in range(2):
        for step in take(numbers(23), 1, Share(2, 2, rank, 2)):
            rows = [ids[0].item() for batch, n in zip(step.micro_batches, step.rows) for ids in batch["input_ids"] if n]
            of_step = list(itertools.chain(*step.rows))
            assert [order[number] for number in of_step] == rows
            all_numbers += of_step
    assert sorted(all_numbers) == list(range(23))


def test_stream_is_packed_window_by_window() -> None:
    batches, _, _ = next(stream_steps(numbers(10, packed_length=6), Share(1, 2, 0, 1), seed=0, pad_token_id=99))
    assert len(batches) == 2
    assert all(
        batch["position_ids"][0].tolist()[:4] == [0, 1, 0, 1] and "attention_mask" not in batch for batch in batches
    )


def broken_at(first_bad: int, error: Exception, is_reading: bool) -> Stream:
    """Records that cannot be read, or made into rows, from one on."""

    def open_records(place: dict[str, int]) -> Iterator[int]:
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


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_one_rank_cannot_read_ends_all_with_one_message(rank: int) -> None:
    share, stream = Share(1, 1, rank, 3), numbers(40)
    failing = [numbers(40), numbers(40), broken_at(8, OSError("a.jsonl: the disk is gone"), True)]
    others = [read_parts(one, FIRST_ROW, number, 3) for number, one in enumerate(failing)]

    def gather(own: Part) -> list[Part]:
        return [next(parts) for parts in others]

    steps = stream_steps(stream, share, seed=0, pad_token_id=99, gather=gather)
    with pytest.raises(SystemExit) as stopped:
        for _ in range(10):
            next(steps)
    assert stopped.value.code.strip() == "Error: rank 2: a.jsonl: the disk is gone"


def test_error_that_all_ranks_meet_is_named_without_one() -> None:
    share, stream = Share(1, 1, 1, 2), broken_at(7, ValueError("a.jsonl, line 8: cannot be read"), True)
    with pytest.raises(SystemExit) as stopped:
        take(stream, 1, share)
    assert stopped.value.code.strip() == "Error: a.jsonl, line 8: cannot be read"


def test_ranks_whose_files_differ_end_with_what_differs() -> None:
    share = Share(1, 1, 0, 2)
    gather = with_the_others(numbers(13), share, FIRST_ROW)
    with pytest.raises(SystemExit) as stopped:
        list(stream_steps(numbers(14), share, seed=0, pad_token_id=99, gather=gather))
    assert "window 2 of epoch 0 has 4 records from {'next': 10} on rank 0, 3 records" in stopped.value.code


def test_bug_in_the_process_beside_a_rank_is_told_with_its_traceback() -> None:
    with pytest.raises(SystemExit) as stopped:
        list(stream_steps(broken_at(0, KeyError("oops"), True), Share(1, 1, 0, 1), seed=0, pad_token_id=99))
    assert "KeyError: 'oops'" in stopped.value.code and "in open_records" in stopped.value.code


def losing(count: int, problem_at: int, lost: set[int], max_lost: float = 1.0) -> Stream:
    """Records of which one is bad and some lose their answer."""

    def tokenise(records: list[int], first: int) -> Tokenised:
        kept = [number for number in records if number != problem_at and number not in lost]
        rows = [{"input_ids": [number, number], "labels": [number, number]} for number in kept]
        counts = Counter({"lost": len(lost & set(records))})
        return rows, counts, [f"a.jsonl, line {problem_at + 1}: is bad"] * (problem_at in records)

    return Stream(partial(opened, count), tokenise, 0, max_lost)


def test_rows_that_are_left_out_are_reported_by_rank_0_once(capsys: pytest.CaptureFixture) -> None:
    take(losing(20, 7, {12, 13}), 3, Share(1, 2, 0, 2))
    assert capsys.readouterr().out.splitlines() == [
        "train data: of the first 10 rows of the stream, 1 bad row(s) left out",
        "- a.jsonl, line 8: is bad",
        "train data: of the first 15 rows of the stream, 1 bad row(s) left out, "
        "2 lost their whole answer to --max_length",
    ]
    take(losing(20, 7, {12, 13}), 1, Share(1, 2, 1, 2))
    assert capsys.readouterr().out == ""


def test_many_lost_rows_stop_a_stream_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        len(take(losing(20, 99, {0, 1}, 0.1), 1, Share(1, 2, 0, 1))) == 9
    )  # a tenth, though two fifths of the first window
    for enough, lost in ((10, {0, 5}), (1000, {0, 1, 2})):  # as soon as enough is read, or at the end
        monkeypatch.setattr(streaming, "ENOUGH_READ", enough)
        with pytest.raises(SystemExit) as stopped:
            take(losing(18, 99, lost, 0.1), 1, Share(1, 2, 0, 1))
        error = stopped.value.code
        assert f"of the first {min(enough, 18)} rows of the stream, {len(lost)} lost their whole answer" in error
        assert "More than 10% would not be learnt (--allow_lost_rows)" in error
        assert take(losing(18, 99, lost), 1, Share(1, 2, 0, 1))


def test_lost_rows_are_counted_on_by_a_run_that_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "ENOUGH_READ", 15)
    lost = {0, 11, 16}  # more than a tenth of the first 20, and of none before
    steps = stream_steps(losing(60, 99, lost, 0.14), Share(1, 1, 0, 1), seed=0, pad_token_id=99)
    position = next(step.position for step in steps if step.position["rows_seen"] == 11)
    assert position["stream"]["window"] == 2 and position["stream"]["lost"]["lost"] == 1
    with pytest.raises(SystemExit) as stopped:
        take(losing(60, 99, lost, 0.14), 1, Share(1, 1, 0, 1), position)
    assert "of the first 20 rows of the stream, 3 lost" in stopped.value.code


def test_bad_rows_end_a_stream_that_does_not_skip_them() -> None:
    steps = stream_steps(replace(losing(20, 7, set()), skips_bad=False), Share(1, 1, 0, 1), seed=0, pad_token_id=99)
    with pytest.raises(SystemExit) as stopped:
        for _ in range(6):
            next(steps)
    assert stopped.value.code.strip() == "Error: train data: 1 bad row(s) in the stream:\n- a.jsonl, line 8: is bad"


def test_window_of_real_rows_counts_what_it_leaves_out() -> None:
    rows = [{"prompt": "a" * 30, "completion": "b"}, {"prompt": "a"}, {"prompt": "a", "completion": "b"}]
    options = 8, "keep_start", True, True, False
    unread = [partial(dict, row) for row in rows]
    kept, counts, problems = tokenize_window(unread, 40, tokenizer=toy_tokenizer(), columns={}, options=options)
    assert (len(kept), counts["lost"], counts["bad"]) == (1, 1, 1)
    assert len(problems) == 1 and problems[0].startswith("row 42: the column")


def test_files_and_folders_are_streamed_split_by_split(tmp_path: Path) -> None:
    for name in ("train-0", "train-1", "test"):
        write(tmp_path, f"{name}.jsonl", "".join(json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(2)))

    def texts(split: str) -> list[Any]:
        return [json.loads(r["_row"])["text"] for r in open_stream([str(tmp_path)], split, "train")]

    assert texts("train") == ["train-0 0", "train-0 1", "train-1 0", "train-1 1"]
    assert texts("test") == ["test 0", "test 1"]


def written_in_every_way(folder: Path) -> list[str]:
    """A folder of files, files of every kind, and a saved data set: with blank lines, bad rows, quoted line ends."""
    (folder / "many").mkdir()
    names = [str(folder / "many")]
    for number in range(2):
        lines = [f'{{"text": "{number} {i}"}}\n' + "\n \u3000\n" * (i % 3 == 1) for i in range(7)]
        write(folder / "many", f"train-{number}.jsonl", "\ufeff" + "".join(lines) + "no JSON\n")
    texts = {
        "a.txt": "\nä b\n\n\x1c\n\u3000x\r\n...\nend",
        "a.csv": 'text,more\n"a\nb",1\n\nc,2\nd\ne,4\n',
        "a.json": json.dumps([{"text": str(i)} for i in range(5)]),
        "lines.json": "".join(f'{{"text": "{i}"}}\n' for i in range(5)),
    }
    names += [str(write(folder, name, text)) for name, text in texts.items()]
    Dataset.from_list([{"text": f"p {i}"} for i in range(11)]).to_parquet(folder / "a.parquet", batch_size=4)
    Dataset.from_list([{"text": f"s {i}"} for i in range(11)]).save_to_disk(folder / "saved")
    return [*names, str(folder / "a.parquet"), str(folder / "saved")]


def test_stream_of_every_kind_of_source_opens_at_any_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "AT_ONCE", 3)
    monkeypatch.setattr(sources, "AT_ONCE", 3)
    names, place = written_in_every_way(tmp_path), {}
    records, places = [], []
    for read in unread_stream(names, "train", "train", place):
        records.append(read())
        places.append(json.dumps(place))
    assert records == list(open_stream(names, "train", "train"))
    assert len(records) == 2 * 8 + 4 + 4 + 5 + 5 + 11 + 11 and sum(bool(record["_problem"]) for record in records) == 3
    assert len(set(places)) == len(places)
    for number, place in enumerate(places, start=1):
        rest = [read() for read in unread_stream(names, "train", "train", json.loads(place))]
        assert rest == records[number:], place


def test_streamed_data_set_opens_at_any_record_by_its_own_state(tmp_path: Path) -> None:
    for number in range(3):
        Dataset.from_list([{"text": f"{number} {i}"} for i in range(5)]).to_parquet(tmp_path / f"{number}.parquet")
    parquet = [str(tmp_path / f"{number}.parquet") for number in range(3)]

    def records(place: dict[str, Any]) -> Iterator[dict[str, str]]:
        rows = datasets.load_dataset("parquet", data_files=parquet, split="train", streaming=True)
        return (read() for read in unread_set("a/name", rows, place))

    place: dict[str, Any] = {}
    found = [(record, json.dumps(place)) for record in records(place)]
    assert [json.loads(record["_row"])["text"] for record, _ in found] == [
        f"{n} {i}" for n in range(3) for i in range(5)
    ]
    assert found[7][0]["_where"] == "a/name, row 8"
    for number, (_, place) in enumerate(found, start=1):
        assert list(records(json.loads(place))) == [record for record, _ in found[number:]]


def test_stream_that_opens_late_reads_no_row_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f'{{"text": "{i}"}}\n' for i in range(100)]
    name, place = str(write(tmp_path, "a.jsonl", "".join(lines))), {}
    list(itertools.islice(unread_stream([name], "train", "train", place), 90))
    assert place == {"source": 0, "file": 0, "rows": 90, "line": 90, "byte": sum(map(len, lines[:90]))}
    with open(name, "r+b") as file:  # what lies before is not even looked at
        file.write(b"\n" * (place["byte"] - 1))
    rest = [read() for read in unread_stream([name], "train", "train", dict(place))]
    assert [json.loads(record["_row"])["text"] for record in rest] == [str(i) for i in range(90, 100)]
    assert rest[0]["_where"] == f"{name}, line 91"
    place["byte"] += 1
    with pytest.raises(ValueError, match=r"a\.jsonl is not what it was .* no line ends at byte"):
        next(unread_stream([name], "train", "train", place))
    read = []
    monkeypatch.setattr(files, "parse", lambda text: read.append(text) or {})
    part = Stream(partial(unread_stream, [name], "train", "train"), lambda records, first: ([], Counter(), []))
    assert next(read_parts(part, FIRST_ROW, 0, 1)).num_records == 5 and not read  # nor those of other ranks


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
