"""Imported by the fork server of in_process.py: what every run would import or work out anew."""

import finetune
import finetune_mem_limit
import finetune_performance
import in_process
import launch_worker
import transformers.models.llama.modeling_llama
import verify
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

SCRIPTS = finetune, finetune_mem_limit, finetune_performance, verify
OTHERS = in_process, launch_worker, transformers.models.llama.modeling_llama
get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns
