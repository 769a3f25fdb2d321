"""What a plan costs: the paper's columns and the exact ones."""
