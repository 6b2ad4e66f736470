"""Files to plain numpy and back: GGUF, safetensors, HF folders, PEFT adapter folders."""
