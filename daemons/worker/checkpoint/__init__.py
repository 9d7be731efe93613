"""Reading a model folder in Hugging Face format: typed config, safetensors headers, tensors one by one."""
