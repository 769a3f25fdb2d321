"""Llama, GPT, Transformers and custom models, without parallelism."""
