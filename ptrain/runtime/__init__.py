"""Runtime backends: ranks, mesh, memory tiers and collectives, for real and fake tensors."""
