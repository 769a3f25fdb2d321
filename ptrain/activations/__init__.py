"""What a rank keeps for backward: recomputed or offloaded, by block."""
