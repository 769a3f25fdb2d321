"""The update rules, and the optimizers of torch and of this project that execute them."""
