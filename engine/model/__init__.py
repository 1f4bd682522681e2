"""Model definitions that read like prose, and the loaders for safetensors folders and GGUF files."""
