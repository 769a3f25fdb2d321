"""What is measured: memory by state, traffic by call; a meter knows no prediction."""
