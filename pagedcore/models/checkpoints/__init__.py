"""Files become modules and stored weights: safetensors, GGUF, GPTQ, AWQ, bitsandbytes, compressed-tensors."""
