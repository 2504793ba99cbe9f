"""Reads tensors from files: safetensors, GGUF and quantized formats."""
