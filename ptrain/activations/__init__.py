"""Activations saved for backward: recomputation and offload, per block."""
