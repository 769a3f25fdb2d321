"""What a plan is made of: its steps, and what each answers about itself."""
