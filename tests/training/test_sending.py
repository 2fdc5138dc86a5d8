"""Where the host waits for the device: once per step, and what is handed on instead of asked for changes no result."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import waits
from hooks.structure import set_use_cache
from in_process import Run
from launching import part_of_sample, small_model
from rows.batches import collate
from rows.packing import collate_packed
from tiny_models import tiny_llama
from tools.proof.shrink import build_tiny_model
from torch import nn
from training.evaluation import evaluate
from training.losses import micro_batch_loss
from training.sending import document_starts, run_model, send, takes_any_name
from transformers import CONFIG_MAPPING, modeling_flash_attention_utils
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

CPU = torch.device("cpu")
SCRIPTS = ("finetune", "finetune_performance", "finetune_mem_limit")
DOCUMENTS = [[5, 4, 7], [9, 3]]  # tokens of each in two rows; four are padding in the second


def rows_of(documents):
    """Packed rows of random tokens, and the documents one by one."""
    alone = [[torch.randint(67, 96, (size,)).tolist() for size in sizes] for sizes in documents]
    rows = []
    for texts in alone:
        ids = [token for text in texts for token in text]
        rows.append({"input_ids": ids, "labels": ids, "position_ids": [i for text in texts for i in range(len(text))]})
    return rows, alone


def waits_in(function):
    """What a function returns, and its waits."""
    found = []
    with waits.Operators(found.append), waits.Calls(found.append):
        return function(), found


@pytest.mark.parametrize("packing", ["true", "false"])
@pytest.mark.parametrize(
    "script, before", [*((script, waits.count) for script in SCRIPTS), ("finetune", waits.count_unknown)]
)
def test_step_of_each_script_waits_for_the_device_once(tmp_path, script, packing, before):
    """With nothing handed on to the model, transformers asks once per forward or more, of two."""
    arguments = ["--model_name_or_path", small_model()]
    arguments += ["--dataset_name", part_of_sample(tmp_path / "data", 8), "--output_dir", tmp_path, "--max_steps", 4]
    arguments += ["--packing", packing, "--max_length", 256, "--per_device_train_batch_size", 2]
    arguments += ["--gradient_accumulation_steps", 2, "--eval_steps", 0, "--report_to", "none", "--max_new_tokens", 1]
    done = Run(arguments, tmp_path / "log", script=script, before=before).wait()
    assert done.codes == [0, 0], done.output[-3000:]
    found = [line for line in done.output.splitlines() if line.startswith("WAIT")]
    counts = [int(line.split()[1]) for line in found if line.startswith("WAITS")]
    assert len(counts) == 2, done.output[-3000:]
    assert all(count == 1 if before is waits.count else count >= 3 for count in counts), found


def test_documents_start_where_positions_do_not_go_on_and_with_each_row():
    batch = collate_packed(rows_of(DOCUMENTS)[0], 0)
    starts, longest = document_starts(batch["position_ids"])
    assert starts.tolist() == [0, 5, 9, 16, 25, 28, 32] and longest == 9 and starts.dtype == torch.int32
    sent = send(batch, CPU)
    assert sent.needs_mask and sent.documents["cu_seq_lens_q"] is sent.documents["cu_seq_lens_k"]
    assert sent.documents["max_length_q"] == sent.documents["max_length_k"] == 9
    assert type(sent.documents["max_length_q"]) is int and dict(sent).keys() == batch.keys()
    assert not send(collate_packed(rows_of([[6], [6]])[0], 0), CPU).needs_mask


def test_padding_is_known_where_it_is_and_what_is_on_a_device_is_not_looked_at():
    assert send(collate(rows_of([[4], [6]])[0], 0), CPU).needs_mask
    assert send(collate(rows_of([[6], [6]])[0], 0), CPU).needs_mask is False
    far = {"input_ids": torch.zeros(1, 4, dtype=torch.int64, device="meta")}
    assert send(far, torch.device("meta")).needs_mask is None


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "mixtral", "qwen3_next"])
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("documents", [DOCUMENTS, [[6], [6]]])
@torch.no_grad()
def test_masks_made_of_what_is_known_are_those_that_are_read(family, packs, documents):
    """The same bits; layers with windows, caps and experts included."""
    torch.manual_seed(0)
    model = build_tiny_model(CONFIG_MAPPING[family]()).eval()
    model.config.use_cache = False
    batch = (collate_packed if packs else collate)(rows_of(documents)[0], 0)
    inputs = {name: values for name, values in batch.items() if name != "labels"}
    expected = model(**inputs).logits
    sent = send(inputs, CPU)
    found, left = waits_in(lambda: run_model(model, sent).logits)
    assert torch.equal(found, expected)
    assert not left


@pytest.mark.slow
@torch.no_grad()
def test_masks_of_every_family_are_those_that_are_read():
    """Padded rows, rows of one length, packed ones and packed rows of one document; what a family runs by itself."""
    torch.manual_seed(0)
    different, compared = [], 0
    cases = [
        (kind, collate_packed if packs else collate) for packs in (True, False) for kind in (DOCUMENTS, [[6], [6]])
    ]
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            model = build_tiny_model(CONFIG_MAPPING[family]()).eval()
        except Exception:  # a config that needs more than its defaults, or a library
            continue
        set_use_cache(model, False)
        for documents, collator in cases:
            batch = collator(rows_of(documents)[0], 0)
            inputs = {name: values for name, values in batch.items() if name != "labels"}
            try:
                expected = model(**inputs).logits
            except Exception:  # a family without positions
                continue
            found, compared = run_model(model, send(inputs, CPU)).logits, compared + 1
            is_real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
            if not torch.allclose(found[is_real], expected[is_real], atol=1e-5):
                different.append((family, documents, collator.__name__))
    assert not different
    assert compared > 600


def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, dropout_p=0.0):
    """What flash attention of variable length computes; (tokens, heads, head size)."""
    assert int(max_seqlen_q) == int(max_seqlen_k) and causal  # asked of a tensor
    places = torch.arange(len(q))
    documents = torch.searchsorted(cu_seqlens_q[1:].long(), places, right=True)
    allowed = (documents[:, None] == documents) & (places[:, None] >= places)
    repeats = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)))
    out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=softmax_scale)
    return out[0].transpose(0, 1)


def whole(q, k, v, causal, softmax_scale, **_):
    """What flash attention computes of whole rows; (rows, tokens, heads, head size)."""
    starts = torch.arange(len(q) + 1) * q.shape[1]
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 1, "max_seqlen_k": 1}
    out = varlen(*(x.flatten(0, 1) for x in (q, k, v)), **lengths, causal=causal, softmax_scale=softmax_scale)
    return out.view(q.shape)


@torch.no_grad()
def test_flash_attention_is_handed_the_documents_of_several_rows_and_asks_nothing():
    """In transformers' own code, with its kernels replaced by formulas. Without them documents of several rows see one
    another, and those of one row cost a wait or more in each of the four layers."""
    torch.manual_seed(0)
    model = tiny_llama().eval()
    rows, alone = rows_of(DOCUMENTS)
    ids = [[torch.tensor([text]) for text in texts] for texts in alone]
    expected = [torch.cat([model(one, use_cache=False).logits[0] for one in texts]) for texts in ids]
    model.config._attn_implementation = "flash_attention_2"
    model.config.use_cache = False
    process = modeling_flash_attention_utils._lazy_define_process_function(varlen)
    kernels = (whole, varlen, None, None, None), (process, None)
    batch = collate_packed(rows, 0)
    inputs = {name: values for name, values in batch.items() if name != "labels"}
    one = {name: values[:1] for name, values in inputs.items()}
    sent = send(inputs, CPU)
    with mock.patch.object(modeling_flash_attention_utils, "lazy_import_flash_attention", lambda *_: kernels):
        found, left = waits_in(lambda: run_model(model, sent).logits)
        plain = model(**inputs).logits
        _, asked = waits_in(lambda: model(**{**one, "max_length_q": None}).logits)
    assert not left and len(asked) >= 4
    for logits, seen, row in zip(found, plain, expected):
        assert torch.allclose(logits[: len(row)], row, atol=1e-5)
        assert (seen[: len(row)] - row).abs().max() > 1e-2


def test_family_that_lists_what_it_takes_is_handed_no_documents():
    class Listing(nn.Module):
        config = SimpleNamespace(_attn_implementation="flash_attention_2")

        def forward(self, input_ids, position_ids):
            return input_ids

    batch = collate_packed(rows_of(DOCUMENTS)[0], 0)
    assert not takes_any_name(Listing) and takes_any_name(type(tiny_llama()))
    assert run_model(Listing(), send(batch, CPU), leave_out=("labels",)).shape == (2, 16)


def test_evaluation_waits_once_however_many_batches_it_has():
    model = tiny_llama()
    rows = [collate(rows_of(sizes)[0], 0) for sizes in ([[4], [6]], [[5], [5]], [[3], [7]])]
    batches = [{name: values.as_subclass(waits.OnHost) for name, values in batch.items()} for batch in rows]
    accelerator = SimpleNamespace(device=CPU, reduce=lambda totals: totals)
    model.reset_iter_state = lambda: None  # FSDP2's, which waits for nothing
    model.config.use_cache = False
    loss, found = waits_in(lambda: evaluate(accelerator, model, batches, micro_batch_loss))
    assert found == ["tolist"] and 3 < loss < 7
