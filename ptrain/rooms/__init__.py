"""What a program happens in: ranks, mesh, tiers and collectives, of tensors or of ghosts."""
