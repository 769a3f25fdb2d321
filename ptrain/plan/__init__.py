"""What will be done to the model, as data: steps, and the theorems that they obey."""
