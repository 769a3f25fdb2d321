"""llama, gpt, models of transformers and the user's own; they know no parallelism."""
