"""Imported by the fork server of in_process.py: what every run of a Llama would import or work out anew."""

import transformers.models.llama.modeling_llama  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns
