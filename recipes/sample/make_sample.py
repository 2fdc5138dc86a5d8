"""Make the embedded sample: a tiny chat model and a small fine-tuning task for it.

The task turns a free-text order into one structured line, for example::

    user:       Hello, this is Mia Stone. Please send 3 blue lamps to Oslo on Friday.
    assistant:  name: Mia Stone; item: blue lamps; quantity: 3; city: Oslo; day: Friday

The base model is first trained here, from random weights, on other chats about such orders:
confirmations in prose and answers to questions. It can find and copy the fields of an order,
but has never seen the structured line. Fine-tuning on ``data/train.jsonl`` teaches that line.
No order of the test file is used anywhere else. Everything is drawn from fixed seeds on one
CPU thread: about ten minutes, or a few seconds with ``--data-only``.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
SEED = 20
TRAIN_ROWS, TEST_ROWS = 3600, 256
VOCAB_SIZE, MAX_POSITIONS = 1280, 512
EXERCISE_STEPS, PRETRAIN_STEPS = 480, 2000  # copying unrelated words first makes the rest quick
PRETRAIN_BATCH, PRETRAIN_LR = 32, 2e-3
PROMPT_LOSS_WEIGHT = 0.1  # of a prompt token, against 1.0 for a token of the answer

# Word lists (strings of words) and sentence patterns (lists), written for this sample.
WORDS = {
    name: value.split() if isinstance(value, str) else value
    for name, value in json.loads((HERE / "words.json").read_text(encoding="utf-8")).items()
}
ALL_CITIES = WORDS["cities"] + WORDS["unseen_cities"]  # the unseen ones are not in the training data
FIELDS = ("name", "item", "quantity", "city", "day")

BOS, EOS, PAD, TURN = "<|startoftext|>", "<|im_end|>", "<|pad|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Order = dict[str, str]
Chat = list[dict[str, str]]


def draw_order(rng: random.Random, cities: list[str]) -> Order:
    """Draw the five fields of one order."""
    return {
        "name": " ".join(rng.choice(WORDS[part]) for part in ("first_names", "last_names")),
        "item": " ".join(rng.choice(WORDS[part]) for part in ("colours", "things")),
        "quantity": str(rng.randint(2, 60)),
        "city": rng.choice(cities),
        "day": rng.choice(WORDS["days"]),
    }


def write_message(rng: random.Random, order: Order) -> str:
    """Write an order the way a customer would."""
    message = rng.choice(WORDS["messages"]).format(**order)
    return f"{rng.choice(WORDS['greetings'])} {message} {rng.choice(WORDS['closings'])}".strip()


def structured_line(order: Order) -> str:
    """The answer that fine-tuning teaches."""
    return "; ".join(f"{field}: {order[field]}" for field in FIELDS)


def chat(prompt: str, answer: str) -> Chat:
    """One question and its answer, as chat messages."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def make_task() -> tuple[list[Chat], list[Chat]]:
    """Make the train and test chats; they share no prompt, no answer and no customer."""
    rng = random.Random(SEED)
    test_orders = [draw_order(rng, ALL_CITIES + WORDS["unseen_cities"]) for _ in range(TEST_ROWS)]
    test_names = {order["name"] for order in test_orders}
    train_orders: list[Order] = []
    while len(train_orders) < TRAIN_ROWS:
        order = draw_order(rng, WORDS["cities"])
        if order["name"] not in test_names:
            train_orders.append(order)
    train = [chat(write_message(rng, order), structured_line(order)) for order in train_orders]
    test = [chat(write_message(rng, order), structured_line(order)) for order in test_orders]
    for turn in (0, 1):
        seen = {row[turn]["content"] for row in train}
        assert not any(row[turn]["content"] in seen for row in test), "test rows leaked into train"
    return train, test


def invented_word(rng: random.Random) -> str:
    """A word that can only be copied, never guessed."""
    return "".join(rng.choice(WORDS["syllables"]) for _ in range(rng.randint(2, 3))).capitalize()


def answer_about(rng: random.Random, order: Order) -> tuple[str, str]:
    """A question about one to five fields of an order, and its answer in prose."""
    fields = rng.sample(FIELDS, rng.choice([1, 1, 2, 2, 3, 5]))
    question = "What is " + " and ".join(f"the {field}" for field in fields) + "?"
    answer = " and ".join(f"the {field} is {order[field]}" for field in fields)
    return question, answer[0].upper() + answer[1:] + "."


def pretraining_chat(rng: random.Random, test_names: set[str]) -> Chat:
    """One chat for the base model; the structured line never occurs in it."""
    while (order := draw_order(rng, ALL_CITIES))["name"] in test_names:
        pass
    if rng.random() < 0.3:
        order["name"] = f"{invented_word(rng)} {invented_word(rng)}"
    if rng.random() < 0.3:
        order["city"] = invented_word(rng)
    message = write_message(rng, order)
    kind = rng.random()
    if kind < 0.45:
        row = chat(message, rng.choice(WORDS["confirmations"]).format(**order))
    elif kind < 0.85:
        question, answer = answer_about(rng, order)
        row = chat(f"{message} {question}", answer)
    elif kind < 0.97:
        words = message.split()
        start = rng.randrange(len(words) - 6)
        part = " ".join(words[start : start + rng.randint(5, 12)])
        row = chat(f"Please repeat: {part}", part)
    else:
        row = chat(*rng.choice(WORDS["small_talk"]))
    if rng.random() < 0.1:
        row = [{"role": "system", "content": rng.choice(WORDS["system_prompts"])}, *row]
    return row


def repetition_chat(rng: random.Random) -> Chat:
    """A first exercise in copying: repeat a few unrelated words."""
    lists = ("first_names", "last_names", "cities", "unseen_cities", "colours", "things", "days")
    words = [word for name in lists for word in WORDS[name]] + [str(number) for number in range(2, 61)]
    part = " ".join(rng.choices(words, k=rng.randint(3, 10)))
    return chat(f"Please repeat: {part}", part)


def train_tokenizer(chats: list[Chat]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, so that any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, TURN, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [f"{message['role']}\n{message['content']}" for row in chats for message in row]
    tokenizer.train_from_iterator(texts, trainer)
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "additional_special_tokens": [TURN]}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, model_max_length=MAX_POSITIONS, **special
    )


def token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """The special tokens, as the model's configuration names them."""
    return {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of about 1.4 million random weights."""
    torch.manual_seed(SEED)
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": MAX_POSITIONS}
    other = {"initializer_range": 0.04, "tie_word_embeddings": False}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **other, **token_ids(tokenizer)))
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data)  # helps copying; not tied
    model.set_attn_implementation("eager")  # the fastest one on a CPU at this size
    return model


def make_batches(chats: list[Chat]) -> list[list[Chat]]:
    """Group chats of similar length, so that little padding is needed, and shuffle the groups."""
    batches: list[list[Chat]] = []
    pool = 16 * PRETRAIN_BATCH
    for start in range(0, len(chats), pool):
        rows = sorted(chats[start : start + pool], key=lambda row: sum(len(turn["content"]) for turn in row))
        grouped = [rows[i : i + PRETRAIN_BATCH] for i in range(0, len(rows), PRETRAIN_BATCH)]
        random.Random(start).shuffle(grouped)
        batches += grouped
    return batches


def encode(tokenizer: PreTrainedTokenizerFast, chats: list[Chat]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, padded on the right, and the weight of each token in the loss."""
    rows = tokenizer.apply_chat_template(chats, return_dict=True, return_assistant_tokens_mask=True)
    width = max(len(ids) for ids in rows["input_ids"])
    input_ids = torch.full((len(chats), width), tokenizer.pad_token_id)
    weights = torch.zeros(len(chats), width)
    for row, (ids, mask) in enumerate(zip(rows["input_ids"], rows["assistant_masks"])):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        weights[row, : len(ids)] = torch.tensor(mask).clamp(min=PROMPT_LOSS_WEIGHT)
    return input_ids, weights


def pretrain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, chats: list[Chat]) -> None:
    """Train the base model in place, with warmup and a cosine to a tenth of the peak rate."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    batches = make_batches(chats)
    started = time.perf_counter()
    for step, batch in enumerate(batches):
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / len(batches))
        optimizer.param_groups[0]["lr"] = PRETRAIN_LR * min(1.0, (step + 1) / 100) * cosine
        input_ids, weights = encode(tokenizer, batch)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
        targets, weights = input_ids[:, 1:].flatten(), weights[:, 1:].flatten()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="none")
        optimizer.zero_grad()
        ((losses * weights).sum() / weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == len(batches) - 1:
            answer_loss = losses.detach()[weights == 1.0].mean().item()
            seconds = time.perf_counter() - started
            print(f"step {step}  answer loss {answer_loss:.4f}  {seconds:.0f} s", flush=True)


def main() -> None:
    """Write data/ and, unless told otherwise, model/ next to this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-only", action="store_true", help="write the data files and stop")
    parser.add_argument("--output", type=Path, default=HERE, help="folder that gets data/ and model/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    train, test = make_task()
    (args.output / "data").mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        lines = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
        (args.output / "data" / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    if args.data_only:
        return
    rng = random.Random(SEED + 1)
    held_out = {row[1]["content"].split(";")[0].removeprefix("name: ") for row in test}
    exercises = [repetition_chat(rng) for _ in range(EXERCISE_STEPS * PRETRAIN_BATCH)]
    chats = exercises + [pretraining_chat(rng, held_out) for _ in range(PRETRAIN_STEPS * PRETRAIN_BATCH)]
    tokenizer = train_tokenizer(chats[-20000:])
    model = make_model(tokenizer)
    pretrain(model, tokenizer, chats)
    model.generation_config = GenerationConfig(do_sample=False, **token_ids(tokenizer))
    model.to(torch.bfloat16).save_pretrained(args.output / "model")
    tokenizer.save_pretrained(args.output / "model")


if __name__ == "__main__":
    main()
