"""Packing: nothing lost, few rows, nothing trained across a border, and every document as if it were alone."""

import itertools
import math
import pickle
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets, load_from_disk
from rows.batches import Share, training_steps
from rows.packing import (
    best_fit_fills,
    collate_packed,
    count_sizes,
    exact_fills,
    length_grouped_order,
    num_bins,
    pack_rows,
    plan_packing,
)
from tiny_models import tiny_llama
from training.losses import IGNORE_INDEX, num_label_tokens, token_loss_sum
from transformers import LlamaForCausalLM

PAD = 0
# Lengths of the 3,600 training rows of recipes/sample with its tokenizer, as {length: rows}: much the same length.
SAMPLE = {49: 25, 50: 68, 52: 92, 53: 226, 54: 143, 55: 187, 56: 251, 57: 311, 58: 287, 59: 274, 60: 297}
SAMPLE |= {61: 364, 62: 267, 63: 175, 64: 219, 65: 130, 66: 99, 67: 73, 68: 60, 69: 15, 70: 37}


def lengths_of(kind: str, num_documents: int, max_length: int) -> np.ndarray:
    """Document lengths in random order, all within the limit."""
    draw = np.random.default_rng(5)
    if kind == "sample":
        return draw.permutation(np.repeat(list(SAMPLE), list(SAMPLE.values())))
    if kind == "half":
        return draw.integers(max_length // 2 + 1, max_length // 2 + 20, num_documents)
    values = {
        "chats": lambda: draw.lognormal(6, 1, num_documents),
        "uniform": lambda: draw.uniform(1, max_length, num_documents),
        "tiny": lambda: draw.uniform(1, 20, num_documents),
        "thirds": lambda: draw.normal(max_length / 3, max_length / 20, num_documents),
        "bimodal": lambda: np.where(
            draw.random(num_documents) < 0.7,
            draw.normal(max_length / 5, max_length / 30, num_documents),
            draw.normal(max_length * 0.6, max_length / 20, num_documents),
        ),
    }[kind]()
    return np.clip(values, 1, max_length).astype(np.int64)


def rows_of_plan(lengths: np.ndarray | list[int], max_length: int) -> list[list[int]]:
    """The documents of each row of a plan."""
    documents, starts = plan_packing(lengths, max_length)
    assert starts[0] == 0 and starts[-1] == len(documents)
    return [part.tolist() for part in np.split(documents, starts[1:-1])]


def pack(rows: list[dict[str, list[int]]], max_length: int) -> tuple[list[dict[str, list[int]]], str]:
    """pack_rows, with all its rows read."""
    packed, line = pack_rows(Dataset.from_list(rows), max_length)
    return list(packed), line


def check_plan(bins: list[list[int]], lengths: np.ndarray, max_length: int) -> None:
    """Every document once, no row over the limit, and the order that plan_packing promises."""
    documents = np.fromiter(itertools.chain.from_iterable(bins), dtype=np.int64)
    assert np.array_equal(np.sort(documents), np.arange(len(lengths)))
    starts = np.cumsum([0] + [len(documents) for documents in bins[:-1]])
    assert np.add.reduceat(lengths[documents], starts).max() <= max_length
    assert all(documents == sorted(documents) for documents in bins[:1000])
    assert np.array_equal(documents[starts], np.sort(documents[starts]))


def token_bound(lengths: np.ndarray, max_length: int) -> int:
    """Two rows in a hundred more than the tokens need, and one."""
    return math.ceil(1.02 * lengths.sum() / max_length) + 1


@pytest.mark.parametrize("max_length", [512, 1024, 2048, 5001])
@pytest.mark.parametrize("kind", ["sample", "chats", "uniform", "tiny", "thirds", "bimodal"])
def test_rows_are_few_and_every_document_is_in_one(kind: str, max_length: int) -> None:
    lengths = lengths_of(kind, 20_000, max_length)
    bins = rows_of_plan(lengths, max_length)
    check_plan(bins, lengths, max_length)
    assert len(bins) <= token_bound(lengths, max_length)
    assert bins == rows_of_plan(lengths.tolist(), max_length)


@pytest.mark.parametrize("max_length", [512, 5001])
def test_documents_over_half_a_row_get_a_row_each(max_length: int) -> None:
    lengths = lengths_of("half", 20_000, max_length)
    assert rows_of_plan(lengths, max_length) == [[index] for index in range(20_000)]


@pytest.mark.parametrize("kind", ["chats", "thirds"])
def test_a_million_documents_are_planned(kind: str) -> None:
    lengths = lengths_of(kind, 1_000_000, 2048)
    bins = rows_of_plan(lengths, 2048)
    check_plan(bins, lengths, 2048)
    assert len(bins) <= token_bound(lengths, 2048)


def best_fit_one_by_one(lengths: list[int], max_length: int) -> int:
    """Best fit decreasing as in the textbook, which looks at every bin: the independent reference."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else max_length) - length)
    return len(rooms)


def test_small_cases_agree_with_best_fit_one_by_one() -> None:
    draw = random.Random(1)
    for _ in range(400):
        max_length = draw.randint(1, 40)
        shortest = draw.randint(1, max_length)
        lengths = np.array([draw.randint(shortest, max_length) for _ in range(draw.randint(1, 60))])
        textbook = best_fit_one_by_one(lengths.tolist(), max_length)
        counted = count_sizes(lengths)
        assert num_bins(best_fit_fills(*counted, max_length)) == textbook
        for longest_first in (True, False):
            fills = exact_fills(*counted, max_length, longest_first)
            assert sum(bins * per_bin for _, _, bins, per_bin in fills) == len(lengths)
        bins = rows_of_plan(lengths, max_length)
        check_plan(bins, lengths, max_length)
        assert math.ceil(lengths.sum() / max_length) <= len(bins) <= textbook


@pytest.mark.parametrize("max_length", [2049, 4097, 6143])
def test_lengths_at_the_limit_survive_the_coarse_search(max_length: int) -> None:
    """Over 2,048 tokens the search counts in units of several, of which a document at the limit may need one more."""
    lengths = np.append(lengths_of("thirds", 3000, max_length), [max_length, max_length - 1] * 5)
    bins = rows_of_plan(lengths, max_length)
    check_plan(bins, lengths, max_length)
    assert len(bins) < num_bins(best_fit_fills(*count_sizes(lengths), max_length)), "the search was not needed"


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([4, 9, 3, 12], r"index 1 has 9 tokens \(2 in all.*1 to max_length 8"),
        ([4, 0], r"index 1 has 0 tokens"),
        ([], "no documents"),
    ],
)
def test_documents_that_cannot_be_packed_are_named(lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows_of_plan(lengths, 8)


def test_a_label_too_few_is_an_error() -> None:
    rows = [{"input_ids": [1], "labels": [1]}, {"input_ids": [1, 2], "labels": [1]}]
    with pytest.raises(ValueError, match="index 1 has 2 tokens and 1 labels"):
        pack(rows, 8)


def make_rows(lengths: list[int], seed: int = 0) -> list[dict[str, list[int]]]:
    """Random documents; about a third of the labels is masked, the first label is not."""
    draw = random.Random(seed)
    rows = []
    for length in lengths:
        ids = [draw.randrange(1, 96) for _ in range(length)]
        labels = [IGNORE_INDEX if i and draw.random() < 0.3 else token for i, token in enumerate(ids)]
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def split_packed(row: dict[str, list[int]]) -> list[dict[str, list[int]]]:
    """Cut a packed row where positions restart: [{input_ids, labels}]."""
    starts = [i for i, position in enumerate(row["position_ids"]) if position == 0]
    ends = [*starts[1:], len(row["input_ids"])]
    assert row["position_ids"] == [i for start, end in zip(starts, ends) for i in range(end - start)]
    return [{name: row[name][s:e] for name in ("input_ids", "labels")} for s, e in zip(starts, ends)]


def test_packed_rows_hold_the_documents_and_as_many_labels() -> None:
    rows = make_rows([7, 2, 1, 30, 3, 3, 12, 1, 9, 30] * 5)
    packed, line = pack(rows, 32)
    found = [document for row in packed for document in split_packed(row)]
    assert all(document["labels"][0] == IGNORE_INDEX for document in found)
    expected = [{**row, "labels": [IGNORE_INDEX, *row["labels"][1:]]} for row in rows]
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    trained = sum(label != IGNORE_INDEX for row in rows for label in row["labels"][1:])
    assert num_label_tokens(collate_packed(packed, PAD)["labels"]) == trained
    assert all(len(row["labels"]) <= 32 for row in packed)
    tokens = sum(len(row["input_ids"]) for row in rows)
    ratio = tokens / (32 * len(packed))
    assert line == f"packing: 50 rows into {len(packed)} rows of at most 32 tokens, {tokens} tokens, {ratio:.1%} filled"
    assert pack(rows, 32) == (packed, line)


def packed_by_hand(rows: list[dict[str, list[int]]], bins: list[list[int]]) -> list[dict[str, list[int]]]:
    """The rows of a plan, token by token."""
    packed = []
    for documents in bins:
        row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": [], "documents": documents}
        for document in documents:
            for position, (token, label) in enumerate(zip(rows[document]["input_ids"], rows[document]["labels"])):
                row["input_ids"].append(token)
                row["labels"].append(label if position else IGNORE_INDEX)
                row["position_ids"].append(position)
        packed.append(row)
    return packed


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_packed_rows_are_put_together_when_read_from_a_plan_of_few_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shuffled: bool
) -> None:
    """Counted: rows read and converted while planning, bytes kept per document; also from a data set of many pieces."""
    rows = make_rows(lengths_of("chats", 3000, 300).tolist())
    concatenate_datasets([Dataset.from_list(rows[at : at + 700]) for at in range(0, 3000, 700)]).save_to_disk(tmp_path)
    data = load_from_disk(str(tmp_path))
    if is_shuffled:
        order = np.random.default_rng(2).permutation(3000)
        data, rows = data.select(order), [rows[at] for at in order]
    reads = Counter()
    for name in ("__getitem__", "__getitems__", "__iter__", "to_list", "to_dict"):
        function = getattr(Dataset, name)
        monkeypatch.setattr(
            Dataset, name, lambda *args, name=name, function=function: (reads.update([name]), function(*args))[1]
        )
    packed, _ = pack_rows(data, 300)
    assert not reads
    arrays = [value for value in vars(packed).values() if isinstance(value, np.ndarray)]
    assert len(arrays) == 2 and sum(array.nbytes for array in arrays) <= 20 * len(rows)
    assert packed[0] == packed[-len(packed)] and reads == {"__getitem__": 2}
    with pytest.raises(IndexError):
        packed[len(packed)]
    expected = packed_by_hand(rows, rows_of_plan([len(row["labels"]) for row in rows], 300))
    assert list(packed) == expected and list(pickle.loads(pickle.dumps(packed))) == expected
    if not is_shuffled:  # else the order is in memory as well
        assert len(pickle.dumps(packed)) < 20 * len(rows) + 10_000, "tokens were pickled"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_steps_of_packed_rows_say_their_documents_and_are_the_same_from_workers(num_workers: int) -> None:
    rows = make_rows([7, 2, 1, 30, 3, 3, 12, 1, 9, 30])
    packed, _ = pack_rows(Dataset.from_list(rows), 32)
    steps = training_steps(packed, Share(2, 1, 0, 1), seed=0, pad_token_id=PAD, num_workers=num_workers)
    for _ in range(-(-len(packed) // 2)):
        (batch,), _, (documents,) = next(steps)
        chosen = packed_by_hand(rows, documents)
        assert all(torch.equal(batch[name], values) for name, values in collate_packed(chosen, PAD).items())


def test_an_end_of_text_inside_a_document_does_not_cut_it() -> None:
    rows = [{"input_ids": [5, PAD, 6], "labels": [5, PAD, 6]}, {"input_ids": [7, PAD], "labels": [7, PAD]}]
    packed, _ = pack(rows, 6)
    assert packed == [
        {
            "input_ids": [5, PAD, 6, 7, PAD],
            "labels": [-100, PAD, 6, -100, PAD],
            "position_ids": [0, 1, 2, 0, 1],
            "documents": [0, 1],
        }
    ]
    batch = collate_packed([*packed, {"input_ids": [9] * 7, "labels": [9] * 7, "position_ids": [*range(7)]}], PAD)
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert batch["labels"][0].tolist() == [-100, PAD, 6, -100, PAD, -100, -100]


def packed_case(num_rows: int) -> tuple[list[dict[str, list[int]]], dict[str, torch.Tensor]]:
    """Packed rows of 22 tokens and, for two, of 13: the second is padded. Returns (packed rows, batch)."""
    packed = pack(make_rows([9, 6, 1, 5, 1]), 22)[0][:1]
    packed += pack(make_rows([8, 5], seed=1), 22)[0]
    if num_rows == 1:  # padded as well, as a row that is collated with a longer one
        packed = [packed[1], packed[0]]
        batch = {name: values[:1] for name, values in collate_packed(packed, PAD).items()}
        return packed[:1], batch
    return packed, collate_packed(packed, PAD)


def llama(attention: str, is_training: bool, recomputes: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = tiny_llama()
    model.set_attn_implementation(attention)
    if recomputes:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model.train(is_training)


def run(model: LlamaForCausalLM, batch: dict[str, torch.Tensor], **kwargs: object) -> torch.Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
    return model(**inputs, **{"use_cache": False, **kwargs}).logits  # (B, T, V)


def largest_difference(model: LlamaForCausalLM, packed: list, logits: torch.Tensor) -> float:
    """Largest difference of a document's logits (packed) to those of the document alone in a batch of its own."""
    largest = 0.0
    for row, row_logits in zip(packed, logits):
        start = 0
        for document in split_packed(row):
            alone = run(model, {"input_ids": torch.tensor([document["input_ids"]])})[0]
            together = row_logits[start : start + len(alone)]
            largest = max(largest, (together - alone).abs().max().item())
            start += len(alone)
    return largest


MODES = pytest.mark.parametrize(("is_training", "recomputes"), [(False, False), (True, False), (True, True)])


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@MODES
def test_packed_documents_do_not_see_each_other(
    attention: str, num_rows: int, is_training: bool, recomputes: bool
) -> None:
    """Within 1e-5: fp32 sums over another number of keys. Other ids in the padding must change nothing at all."""
    model = llama(attention, is_training, recomputes)
    packed, batch = packed_case(num_rows)
    logits = run(model, batch)
    assert largest_difference(model, packed, logits) < 1e-5
    pad_changed = batch["input_ids"].clone()
    is_padding = torch.tensor([[i >= len(row["input_ids"]) for i in range(logits.shape[1])] for row in packed])
    assert is_padding.any()
    pad_changed[is_padding] = 50
    assert torch.equal(run(model, {**batch, "input_ids": pad_changed})[~is_padding], logits[~is_padding])


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_of_ones_or_a_cache_lets_documents_see_each_other(attention: str, num_rows: int) -> None:
    """Why collate_packed returns no mask. Should this fail, transformers has changed; the documents are then safe."""
    model = llama(attention, is_training=False, recomputes=False)
    packed, batch = packed_case(num_rows)
    ones = torch.ones_like(batch["input_ids"])
    assert largest_difference(model, packed, run(model, batch, attention_mask=ones)) > 1e-2
    assert largest_difference(model, packed, run(model, batch, use_cache=True)) > 1e-2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@MODES
def test_a_packed_batch_has_the_loss_and_gradients_of_its_documents(
    attention: str, is_training: bool, recomputes: bool
) -> None:
    """The loss within 1e-6 and gradients within 1e-5, relative: fp32 sums in another order."""
    model = llama(attention, is_training, recomputes)
    documents = make_rows([9, 6, 1, 5, 1, 8, 5, 12, 3])
    packed, _ = pack(documents, 22)
    assert len(packed) == 3

    def loss_and_gradients(batches: list[dict[str, torch.Tensor]]) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        losses = [token_loss_sum(run(model, batch), batch["labels"]) for batch in batches]
        torch.stack(losses).sum().backward()
        return sum(loss.item() for loss in losses), torch.cat([p.grad.flatten() for p in model.parameters()])

    alone = [{name: torch.tensor([values]) for name, values in row.items()} for row in documents]
    expected_loss, expected_gradients = loss_and_gradients(alone)
    loss, gradients = loss_and_gradients([collate_packed(packed, PAD)])
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert (gradients - expected_gradients).norm() < 1e-5 * expected_gradients.norm()


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 16, 803, 4000])
def test_length_grouped_order_has_every_row_once(num_rows: int) -> None:
    lengths = np.random.default_rng(5).permutation(num_rows)
    order = length_grouped_order(lengths, 8, seed=3, epoch=0).tolist()
    assert sorted(order) == list(range(num_rows))
    assert order == length_grouped_order(lengths, 8, seed=3, epoch=0).tolist()
    assert max(lengths) == max(lengths[row] for row in order[:8]), "the longest row is not in the first group"
    assert num_rows < 16 or order != length_grouped_order(lengths, 8, seed=3, epoch=1).tolist()


def test_length_grouped_order_saves_padding_and_mixes_the_groups() -> None:
    """Against random order; and the length of groups shows no trend, with 500 of them within 4 standard errors."""
    lengths = lengths_of("chats", 4003, 2048)
    order = length_grouped_order(lengths, 8, seed=0, epoch=0)

    def padded_tokens(order: list[int]) -> int:
        return sum(8 * lengths[order[i : i + 8]].max() for i in range(0, 4000, 8))

    assert padded_tokens(order) < 1.1 * lengths.sum()
    assert padded_tokens(list(range(4003))) > 1.8 * lengths.sum()
    longest = lengths[order[:4000]].reshape(-1, 8).max(1)
    for other in (np.arange(499), longest[:-1]):  # with time, and from group to group: sorted mega-batches show 0.9
        assert abs(np.corrcoef(longest[1:], other)[0, 1]) < 4 / math.sqrt(499)


@pytest.mark.parametrize("num_rows", [20, 64, 200, 3600])
def test_length_grouped_order_differs_by_epoch_and_follows_no_length_inside_a_group(num_rows: int) -> None:
    """Where the longest row of a group stands: uniform over its eight parts, within 4 standard errors of 40 epochs."""
    lengths = lengths_of("chats", num_rows, 2048)
    orders = [length_grouped_order(lengths, 64, seed=0, epoch=epoch).tolist() for epoch in range(40)]
    assert len({tuple(order) for order in orders}) == len({tuple(order[:20]) for order in orders}) == 40
    pieces = {frozenset(order[start : start + 8]) for order in orders for start in range(0, 16, 8)}
    assert len(pieces) > 16, "the same rows meet in every epoch"
    if num_rows < 64:
        return
    ranks = lengths + np.random.default_rng(1).random(num_rows) / 2  # many rows are cut to the same length
    middle = num_rows // 128 * 64
    firsts = [[ranks[order[start : start + 64]].argmax() // 8 for order in orders] for start in (0, middle)]
    for first in firsts:
        assert abs(np.mean(first) - 3.5) < 4 * math.sqrt(63 / 12 / 40)


def test_length_grouped_order_pads_small_micro_batches_less_than_random_order() -> None:
    for num_rows, share in ((200, 0.5), (3600, 0.2)):
        lengths = lengths_of("chats", num_rows, 2048)
        order = length_grouped_order(lengths, 64, seed=0, epoch=0)
        for micro in (2, 4, 8):
            padded = [
                sum(micro * lengths[chosen[i : i + micro]].max() for i in range(0, num_rows // 64 * 64, micro))
                for chosen in (np.array(order), np.random.default_rng(0).permutation(num_rows))
            ]
            excess = [total - lengths[order].sum() for total in padded]
            assert excess[0] < share * excess[1], (num_rows, micro, padded)
