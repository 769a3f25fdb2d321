"""Llama, GPT, Transformers and custom models. No parallelism."""
